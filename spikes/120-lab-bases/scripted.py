"""A scripted agent that solves toy tasks, makes mistakes at set rates, and follows a reminder; and the shipped recording."""
import gzip
import json
import random
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import HintContext, ToolCall, Trace, Turn
from composer_replication.envs.toy.env import SYSTEM, Tool, WorldEnv, WorldTask, make_world
from composer_replication.envs.toy.functions import Function
from composer_replication.envs.toy.hints import exact_hint, template_hint, world_hints
from composer_replication.traces.error_sites import find_error_sites


@dataclass(frozen=True)
class PlanStep:
    "One tool call of a plan, or its answer."

    role: str  # a key of `ROLES`, or "answer"
    arguments: dict = field(default_factory=dict)  # by the role's own names of the arguments
    wrong: dict | None = None  # arguments that look right and fail
    answer: str = ""


def write_call(step: PlanStep, tool: Tool) -> tuple[str, str]:
    "The step in the words of the tool offered: name and JSON text."
    return tool.name, json.dumps({tool.arguments[k]: v for k, v in step.arguments.items()})


ANSWER, GIVING_UP = "Done.", "I could not do it."


def wrong_body(function: Function, rng: random.Random) -> str:
    "The function's code with another operation."
    second = rng.choice([n for n in range(6) if n != function.second])
    return replace(function, second=second).code


def plan_steps(
    task: WorldTask,
    body_first: str,  # what is written at first
) -> Generator[PlanStep, ToolResult, None]:
    "Steps that solve the task; each is sent its result."
    name = f"{task.function.name}.py"
    listing = yield PlanStep("list", {"path": "."}, wrong={"path": "modules"})
    path = next(p for p in listing.text.splitlines() if p.endswith(f"/{name}"))
    yield PlanStep("read", {"path": path}, wrong={"path": name})
    yield PlanStep("write", {"path": path, "text": body_first}, wrong={"path": name, "text": body_first})
    if not (yield PlanStep("test")).text.endswith(" 0 failed"):
        yield PlanStep("write", {"path": path, "text": task.function.code})
        yield PlanStep("test")
    yield PlanStep("answer", answer=ANSWER)


def slips(
    step: PlanStep,  # what the agent wants
    tool: Tool,  # the tool that it should call
) -> dict[str, tuple[str, str]]:  # kind of slip -> the call as it is written
    "All the ways in which this step can be written wrongly."
    name, text = write_call(step, tool)
    habit = Tool(tool.role, 0)
    calls = {}
    if habit.name != name:
        calls["name"] = write_call(step, habit)
        if step.arguments:
            calls["arguments"] = name, write_call(step, habit)[1]
    if step.arguments:
        calls["json"] = name, text[:-1]
    if step.wrong:
        calls["world"] = write_call(PlanStep(step.role, step.wrong), tool)
    return calls


@dataclass(frozen=True)
class WorldAgent:
    "A scripted policy of some skill."

    slips: MappingProxyType[str, float]  # kind of slip -> its chance at an attempt where it is possible
    wrong_body: float = 0.0  # chance that the first body written is wrong
    gives_up: float = 0.0  # chance of ending the episode after a failed attempt

    @classmethod
    def of(cls, wrong_body: float = 0.0, gives_up: float = 0.0, **slips: float) -> "WorldAgent":
        "An agent of these chances."
        return cls(MappingProxyType(slips), wrong_body, gives_up)

    def slip(self, possible: dict, rng: random.Random, care: dict) -> str | None:
        "The slip of one attempt, if any; `care` lowers the chance of a kind by a factor."
        for kind, chance in self.slips.items():
            if kind in possible and rng.random() < chance * care.get(kind, care.get("any", 1.0)):
                return kind
        return None


CURES = {"name": ("name",), "arguments": ("name", "arguments"), "json": ("json", "name"), "world": ("world", "name")}


def reminder(trace: Trace, slip: str, rng: random.Random) -> tuple[str, dict]:
    "A hint about the last, failed call of a trace, and how much each slip's chance falls with it."
    site = find_error_sites(trace)[-1]
    meta, kind = HintContext.at(trace, site), rng.random()
    if kind < 0.1:
        return world_hints("vague")(site.kind, meta), {"any": 0.9}
    if kind < 0.35:
        return exact_hint(site.kind, meta), {"any": 0.02}
    return template_hint(site.kind, meta), dict.fromkeys(CURES[slip], 0.02) | {"any": 0.3}


class Attempt:
    "One attempt at a task: its environment and its turns."

    def __init__(self, task: WorldTask, seed: int | str, environment: type[WorldEnv] = WorldEnv):
        self.env, self.trace_id, self.task_id, self.calls = environment(), f"{task.task_id}-{seed}", task.task_id, 0
        self.env.reset(task.task_id.removeprefix(f"{task.split}-"), task.split)
        self.turns = [Turn("system", SYSTEM), Turn("user", task.prompt)]

    def call(self, name: str, arguments: str) -> ToolResult:
        "Make a call as it is written, and keep it with its result."
        self.calls += 1
        call = ToolCall.parse(name, arguments, f"call_{self.calls}")
        result = self.env.call(call)
        self.turns += [Turn("assistant", "", None, (call,)), result.turn(call)]
        return result

    def trace(self, reward: float | None = None) -> Trace:
        "The turns so far."
        turns = tuple(replace(t, source_index=i) for i, t in enumerate(self.turns))
        return Trace(self.trace_id, turns, self.env.tools, self.task_id, reward=reward, source="scripted")

    def remind(self, hint: str, in_place: bool) -> None:
        "Append a hint to the last message, of which the failed attempt is removed where the hint stands in its place."
        if in_place:
            del self.turns[-2:]
        self.turns[-1] = replace(self.turns[-1], content=f"{self.turns[-1].content}\n\n{hint}")


def world_episode(
    task: WorldTask,
    agent: WorldAgent,
    seed: int | str,  # names the attempt
    reminded: float = 0.0,  # chance that a failed attempt is followed, or replaced, by a reminder
    max_turns: int = 12,  # of the agent; the episode is cut there
) -> Trace:
    "One attempt, really made; the trace's reward is the environment's."
    attempt, rng = Attempt(task, seed), random.Random(f"world-episode/{seed}/{task.task_id}")
    plan = plan_steps(task, wrong_body(task.function, rng) if rng.random() < agent.wrong_body else task.function.code)
    tools, step, care = {t.role: t for t in task.tools}, next(plan), {}
    while step.role != "answer" and attempt.calls < max_turns:
        possible = slips(step, tools[step.role])
        if slip := agent.slip(possible, rng, care):
            attempt.call(*possible[slip])
            care = {}
            if rng.random() < reminded:
                hint, care = reminder(attempt.trace(), slip, rng)
                attempt.remind(hint, in_place=rng.random() < 0.5)
            elif rng.random() < agent.gives_up:
                step = PlanStep("answer", answer=GIVING_UP)
        else:
            step, care = plan.send(attempt.call(*write_call(step, tools[step.role]))), {}
    if step.role == "answer":
        attempt.turns.append(Turn("assistant", step.answer))
    return attempt.trace(attempt.env.reward())


RECORDED_AGENTS = {
    "careful": WorldAgent.of(),
    "habitual": WorldAgent.of(name=0.6, arguments=0.3),
    "stubborn": WorldAgent.of(gives_up=0.25, name=0.9, world=0.7),
    "sloppy": WorldAgent.of(0.3, 0.05, arguments=0.5, json=0.3),
    "hasty": WorldAgent.of(0.5, 0.1, world=0.6, json=0.2)}
RECORDED_TASKS = 12


def record_traces(
    seed: int = 0,  # names the recording
) -> list[Trace]:
    "The shipped traces, recorded anew."
    tasks = [make_world(f"traces-{seed}-{i}", "train") for i in range(RECORDED_TASKS)]
    return [replace(world_episode(task, agent, name), model=f"scripted/{name}", gold=task.function.code)
            for task in tasks for name, agent in RECORDED_AGENTS.items()]


def traces_bytes(traces: list[Trace]) -> bytes:
    "The traces as a file's content."
    return gzip.compress(b"".join(t.to_json() + b"\n" for t in traces), mtime=0)
