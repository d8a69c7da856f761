"""Spike 013: Qwen2.5-Coder-0.5B learns from its own error turns in `sql`, zero shot, behind hints. Go on with the plan's runs.

    .venv/bin/python spikes/013-qwen-own-errors/plan.py --workers 2    # processes on CPUs, one thread each
    .venv/bin/python spikes/013-qwen-own-errors/plan.py --collect      # write runs.jsonl.gz from the runs that ended

Each run that ends is a file of `runs`; a run that was killed is made again. The notebook states hypotheses and thresholds.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import orjson
import torch
from filelock import FileLock
from own_errors import LookFirst, QueryOnly  # beside this file, as are the layers that HINTS names

from composer_replication.core.files import write_json, write_jsonl
from composer_replication.core.trace import Trace
from composer_replication.envs.sql.tasks import sql_rows, task_of
from composer_replication.hints.layers import CompositeHintGenerator, make_layers
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.export import export_checkpoint
from composer_replication.recipes.models import chat_template
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import Rollout, RolloutConfig
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

sys.path.append(str(Path(__file__).resolve().parents[1]))
import resumable

HERE = Path(__file__).parent
RUNS = HERE / "runs"
LEVELS = ("easy", "medium")
SEEDS, CONTROLS, TUNING = tuple(range(10)), tuple(range(5)), 1000  # of own and filler; of the other arms; of what is chosen
EPISODES, TASKS, SITES = 48, 32, 32  # recorded for a seed; measured after a run; error turns at which the teacher is measured
MESSAGES = {"plain": QueryOnly, "look": LookFirst}  # environments with a first message each, of which one is chosen
LEARNING = ((8, 2e-4), (8, 5e-4), (16, 5e-4))  # steps and rate, of which one is chosen
ASKS = ("finds", "looks", "fails")  # of `looks`: actions that ask for the names
HINTS = {"own": "[template, raw_error]", "filler": "[composer_replication.envs.sql.hints:filler_hints]",
         "exact": "[own_errors:exact]", "other site": "[own_errors:other_site]"}
FIRST = RolloutConfig(max_turns=1, max_tokens=200, max_turn_tokens=48, temperature=0.8, seed=0)
WHOLE = RolloutConfig(max_turns=3, max_tokens=400, max_turn_tokens=48, temperature=0.8, seed=0)
POLICY = {  # Dr.GRPO on the environment's own tasks, a group of four each; its rate is not tuned
    "traces": "null", "tasks": "easy,medium", "alpha_sdpo": "0.0", "train_rows": "48", "shuffle_dataset": "false",
    "max_steps": "12", "save_steps": "12", "learning_rate": "5.0e-5", "per_device_train_batch_size": "4",
    "gradient_accumulation_steps": "4", "num_generations": "4", "max_turns": "3", "max_completion_length": "400",
    "max_turn_tokens": "48", "temperature": "0.8"}
LOGGED = ("step", "loss", "reward", "frac_reward_zero_std", "grad_norm", "sdpo/")


@dataclass(frozen=True)
class Run:
    "One run of the plan."

    arm: str  # of HINTS; or start, the model as it is; or teacher, the model behind each hint at its own error turns
    seed: int
    message: str  # of MESSAGES
    steps: int | None = None
    rate: float | None = None

    @property
    def split(self) -> str:
        return "development" if self.seed == TUNING else "test"

    @property
    def path(self) -> Path:
        named = (self.arm.replace(" ", "_"), self.seed, self.message, self.steps, self.rate)
        return RUNS / f"{'-'.join(str(x) for x in named if x is not None)}.json"


def read(path: Path) -> dict:
    return orjson.loads(path.read_bytes())


def share(episodes: list[dict], *kinds: str) -> float:
    "Of episodes, those whose first action is of these kinds of `looks`."
    return float(np.mean([episode["turns"][0] in kinds for episode in episodes]))


def message() -> tuple[list[Run], str | None]:
    "Runs that choose the first message, and that with which the own hint adds most to the share of next actions that ask."
    runs = {name: Run("teacher", TUNING, name) for name in MESSAGES}
    if not all(run.path.exists() for run in runs.values()):
        return list(runs.values()), None
    behind = {name: read(run.path)["behind"] for name, run in runs.items()}
    gain = {name: share(of["own"], *ASKS) - share(of["none"], *ASKS) for name, of in behind.items()}
    return list(runs.values()), max(gain, key=gain.get)


def learning() -> tuple[list[Run], tuple[int, float] | None]:
    "Runs of `own` that choose steps and rate: the highest share of first actions that ask; of equals the cheaper."
    chosen = message()[1]
    if chosen is None:
        return [], None
    runs = {pair: Run("own", TUNING, chosen, *pair) for pair in LEARNING}
    if not all(run.path.exists() for run in runs.values()):
        return list(runs.values()), None
    found = {pair: share(read(run.path)["episodes"], *ASKS) for pair, run in runs.items()}
    return list(runs.values()), max(LEARNING, key=lambda pair: (found[pair], -pair[0], -pair[1]))


def plan() -> Iterator[Run | None]:
    "Runs in order; None stands for runs that wait for a choice."
    yield from message()[0]
    yield from learning()[0]
    if (chosen := learning()[1]) is None:
        yield None
        return
    first = message()[1]
    for seed in SEEDS:
        yield from (Run(arm, seed, first, *chosen) for arm in ("own", "filler"))
        if seed < 2:
            yield from (Run(arm, seed, first) for arm in ("teacher", "start"))
    for seed in CONTROLS:
        yield from (Run(arm, seed, first, *chosen) for arm in ("exact", "other site"))
    ended = [read(run.path)["episodes"] for seed in SEEDS if (run := Run("own", seed, first, *chosen)).path.exists()]
    if any(episode["reward"] for episodes in ended for episode in episodes):  # else the policy objective still has no gradient
        for seed in CONTROLS:
            yield from (Run(arm, seed, first, *chosen) for arm in ("policy", "sequence"))


# --- what is counted


def looks(trace: Trace, names: set[str]) -> list[str]:
    """What each turn of the assistant did: `finds`, it asked sqlite_master and saw a table's name; `looks`, it saw none;
    `fails`, the statement did not run; `other`, it did not ask."""
    found = []
    for at, turn in enumerate(trace.turns):
        if turn.role == "assistant":
            call = turn.tool_calls[0] if turn.tool_calls else None
            sql = str(call.arguments.get("sql", "")).lower() if call and call.parsed else ""
            answer = trace.turns[at + 1] if call and at + 1 < len(trace.turns) else None
            if "sqlite_master" not in sql and "sqlite_schema" not in sql:
                found.append("other")
            elif answer is None or answer.failed:
                found.append("fails")
            else:
                found.append("finds" if names & set(re.findall(r"\w+", answer.content.lower())) else "looks")
    return found


def counted(rollouts: list[Rollout]) -> list[dict]:
    "What each episode did."
    names = [{table.name for table in task_of(r.trace.task_id).schema.tables} for r in rollouts]
    said = [[str(turn.tool_calls[0].arguments if turn.tool_calls else turn.content)[:200] for turn in r.trace.turns
             if turn.role == "assistant"] for r in rollouts]
    return [{"turns": looks(r.trace, of), "said": text, "reward": r.reward or 0.0, "tokens": r.sampled}
            for r, of, text in zip(rollouts, names, said)]


# --- how a run is made

class Work:
    "One run's folder and CPU seconds."

    def __init__(self, run: Run):
        self.run, self.folder, self.seconds = run, RUNS / f"work-{os.getpid()}", {"record": 0.0, "train": 0.0, "measure": 0.0}
        self.world = MESSAGES[run.message]
        shutil.rmtree(self.folder, ignore_errors=True)

    def timed(self, part: str, make, *arguments):
        began = time.process_time()
        made = make(*arguments)
        self.seconds[part] += time.process_time() - began
        return made

    def policy(self, checkpoint: str = "") -> TransformersPolicy:
        "The base model, or a checkpoint with its adapter merged."
        model = checkpoint or load_recipe(HERE / "recipe.yaml").arguments.model
        loaded = load_checkpoint(model, chat_template("fenced"), device="cpu")
        return TransformersPolicy(loaded.model, loaded.tokenizer, "qwen2.5-coder-0.5b")

    def rows(self, n: int, split: str) -> list[dict]:
        "Tasks of this seed's own series, behind the first message."
        return self.world.behind(sql_rows(n, f"spike-013-{self.run.seed}", split, LEVELS))

    def recorded(self) -> Path:
        "The base model's first actions on this seed's training tasks, shared by its arms; what recording cost lies beside them."
        path = RUNS / f"recorded-{self.run.message}-{self.run.seed}.jsonl"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                policy, began = self.policy(), time.process_time()
                played = collect(policy, self.world, self.rows(EPISODES, "train"), FIRST)
                write_json(path.with_suffix(".cost"), {"cpu_seconds": time.process_time() - began})
                write_jsonl(path, (orjson.loads(r.trace.to_json()) for r in played))
        self.seconds["record"] = read(path.with_suffix(".cost"))["cpu_seconds"]
        return path

    def train(self, name: str, settings: dict[str, str]) -> tuple[Path, list[dict]]:
        "The last checkpoint of the recipe with other settings, and its log."
        out = {"output_dir": str(self.folder / name), "seed": str(self.run.seed)}
        checkpoint = self.timed("train", lambda: Path(run_recipe(load_recipe(HERE / "recipe.yaml", settings | out)).checkpoint))
        history = read(checkpoint / "trainer_state.json")["log_history"]
        return checkpoint, [{k: v for k, v in entry.items() if k.startswith(LOGGED)} for entry in history if "loss" in entry]

    def sdpo(self, hints: str) -> tuple[Path, list[dict]]:
        "Channel 2 alone on recorded first actions."
        steps = str(self.run.steps)
        return self.train("sdpo", {"traces": f"[{self.recorded()}]", "hints": hints, "max_steps": steps, "save_steps": steps,
                                   "learning_rate": repr(self.run.rate)})

    def rewarded(self, model: dict[str, str]) -> tuple[Path, list[dict]]:
        "The policy objective from a model's weights."
        return self.train("policy", model | POLICY | {"task": f"own_errors:{self.world.__name__}"})

    def teacher(self) -> dict[str, list[dict]]:
        "Next actions at the first error turns of this seed's recorded episodes, behind each hint and behind none."
        sites = [(trace, found[0]) for trace in read_traces(str(self.recorded())) if (found := find_error_sites(trace))][:SITES]
        rows, names = [], []
        for arm, wanted in {**HINTS, "none": None}.items():
            source = CompositeHintGenerator(make_layers(wanted.strip("[]").split(", ")) if wanted else [])
            for trace, site in sites:
                hint = source.hint(trace, site)
                prompt = [{"role": t.role, "content": t.content} for t in trace.turns[:site.turn]]
                prompt[-1]["content"] += f"\n\n{hint.text}" if hint else ""  # as a tree's branch shows it
                rows.append({"prompt": prompt, "task_id": trace.task_id})
                names.append(f"{arm}/{trace.trace_id}")
        found = self.timed("measure", lambda: counted(collect(self.policy(), self.world, rows, FIRST, trace_ids=names)))
        return {arm: found[n * len(sites):(n + 1) * len(sites)] for n, arm in enumerate((*HINTS, "none"))}

    def made(self) -> dict:
        "All that is kept of the run."
        found, arm, checkpoint = {"log": []}, self.run.arm, ""
        if arm == "teacher":
            found = {"behind": self.teacher()}
        elif arm == "policy":
            checkpoint, found["log"] = self.rewarded({})
        elif arm == "sequence":
            checkpoint, found["first"] = self.sdpo(HINTS["own"])
            export_checkpoint(str(checkpoint), self.folder / "merged", merge=True)
            checkpoint, found["log"] = self.rewarded({"model": str(self.folder / "merged")})
        elif arm != "start":
            checkpoint, found["log"] = self.sdpo(HINTS[arm])
        if arm != "teacher":
            rows, policy = self.rows(TASKS, self.run.split), self.policy(str(checkpoint))
            found["episodes"] = self.timed("measure", lambda: counted(collect(policy, self.world, rows, WHOLE)))
        shutil.rmtree(self.folder, ignore_errors=True)
        return found | {"cpu_seconds": {part: round(seconds, 1) for part, seconds in self.seconds.items()}}


# --- processes

def work() -> None:
    "Make runs until none is left."
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    while True:
        run, lock, left = resumable.claim(plan())
        if not left:
            return
        if run is None:  # others make what this plan waits for
            time.sleep(20)
            continue
        with lock:
            began = time.monotonic()
            made = Work(run).made()
            made["seconds"] = round(time.monotonic() - began, 1)
            write_json(run.path, asdict(run) | {"commit": commit} | made)
        for name, episodes in made.get("behind", {"episodes": made.get("episodes")}).items():
            shares = f"asks {share(episodes, *ASKS):.3f}, finds {share(episodes, 'finds'):.3f}"
            print(run.path.name, name, shares, made["cpu_seconds"], flush=True)


def path_of(run: dict) -> Path:
    "The file of a run that was kept."
    return Run(*(run[field.name] for field in fields(Run))).path


def main() -> None:
    parser = argparse.ArgumentParser(description="Go on with the runs of spike 013.")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--collect", action="store_true", help="write runs.jsonl.gz and stop")
    asked = parser.parse_args()
    if asked.collect:
        return resumable.collect(RUNS, HERE / "runs.jsonl.gz")
    resumable.unpack(HERE / "runs.jsonl.gz", path_of)
    workers = [get_context("spawn").Process(target=work) for _ in range(asked.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
