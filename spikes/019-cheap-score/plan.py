"""Spike 019: does the cheap score of a hint predict what happens? Go on with the plan's runs.

    OMP_NUM_THREADS=1 .venv/bin/python spikes/019-cheap-score/plan.py --minutes 60

Each run that ends is appended to `runs.jsonl`, at once; a run that was killed is made again. No run begins after so many minutes.
019-cheap-score.ipynb states hypotheses, thresholds and the verdict rule; they were committed before any run.
"""
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

import torch

from composer_replication.core.hint import Hint, HintSource, hint_at
from composer_replication.core.trace import HintContext, Trace
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.hints import SqlHints, filler_hints, unseen
from composer_replication.envs.sql.tasks import sql_rows, task_of
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.hints import world_hints
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.teams import TeamEnv, team_hints
from composer_replication.experiments.evaluate import one_thread
from composer_replication.experiments.hint_score import Repair, action_logprobs, hinted_pairs, repairs
from composer_replication.hints.layers import RawErrorHintGenerator
from composer_replication.losses.compose import compose_loss
from composer_replication.losses.divergences import Divergence
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.stages import warmed
from composer_replication.rollout.fork import Fork, ForkBranch, checked_forks, play_forks
from composer_replication.rollout.fork_result import fork_result
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import target_hints, target_turns
from composer_replication.tree.pack import pack_trees

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import appended  # noqa: E402
from fingerprint import reward_fingerprint  # noqa: E402

KEPT, START = HERE / "runs.jsonl", HERE / "runs" / "start"
SEEDS = range(2)  # of the lab; SQL has the first
STEPS, TREES, RATE = 60, 16, 5e-4  # of a training in the lab; the rate is that of 018
HELD_OUT = 64  # tasks measured after a training, one episode each
APART = ("none", "exact", "filler")  # kinds that are also played with random numbers of their own


# --- hints of SQL

def _call(task, trace, turn):
    "The right next call."
    name, arguments = unseen(task, trace, turn) or ("query", {"sql": task.reference})
    return f"Call `{name}`" + "".join(f" with `{key}`: {value}" for key, value in arguments.items()) + "."


def _next(trace, n=1):
    "Another task of the series, whose schema is another one."
    head, _, number = trace.task_id.rpartition("-")
    return f"{head}-{int(number) + n}"


class OtherSql(SqlHints):
    "The hint of the next task of the series."

    def task(self, task_id):
        head, _, number = task_id.rpartition("-")
        return task_of(f"{head}-{int(number) + 1}")


def _sql(say: Callable[[HintContext], str]) -> HintSource:
    return lambda kind, meta: say(HintContext.of(meta))


SQL_HINTS: dict[str, Callable] = {
    "exact": _sql(lambda c: _call(task_of(c.trace.task_id), c.trace, c.site.turn)),
    "own": SqlHints(), "other": OtherSql(),
    "wrong": _sql(lambda c: f"Call `query` with `sql`: {task_of(_next(c.trace)).reference}."),
    "raw": RawErrorHintGenerator(), "filler": filler_hints()}


# --- worlds

@dataclass(frozen=True)
class World:
    "Where a run plays."

    environment: Callable
    hints: dict[str, HintSource]  # by kind
    rows: Callable[[int, str, str], list[dict]]  # number, name of the series, split
    episodes: int  # that are recorded
    recorded: RolloutConfig
    times: int  # branches of each kind at a failed turn
    most: int  # failed turns that are played again


WORLDS = {
    "teams": World(TeamEnv, {kind: team_hints(kind) for kind in ("exact", "own", "blind", "wrong", "other", "filler")},
                   world_rows, 96, RolloutConfig(max_turns=8, max_turn_tokens=128), 3, 24),
    "toy": World(WorldEnv, {kind: world_hints(kind) for kind in ("exact", "template", "vague", "wrong", "raw", "filler")},
                 world_rows, 160, RolloutConfig(max_turns=5, max_turn_tokens=128), 3, 24),
    "sql": World(SqlEnv, SQL_HINTS, lambda n, series, split: sql_rows(n, series, split, ("easy", "medium")), 96,
                 RolloutConfig(max_turns=4, max_tokens=384, max_turn_tokens=64), 2, 24)}
HABIT = {"teams": "teams", "toy": "strong"}


@cache
def start_of(world: str) -> TransformersPolicy:
    "The agent as it is before training."
    if world == "sql":
        shorter = {"folder": str(START), "demonstrations": 96, "hinted": 96, "steps": 16, "batch_size": 8, "learning_rate": 1e-4}
        recipe = load_recipe("smollm2-sql")
        warmed(replace(recipe, arguments=replace(recipe.arguments, warm_up=shorter)))
        loaded = load_checkpoint(str(START))
        return TransformersPolicy(loaded.model.eval(), loaded.tokenizer, "start")
    return TransformersPolicy(embedded_model(HABIT[world]).eval(), embedded_tokenizer())


@dataclass(frozen=True)
class Run:
    "One run of the plan."

    world: str
    seed: int
    kind: str | None = None  # of hints: it is trained; None: scored and played with all

    @property
    def name(self) -> str:
        return f"{self.world}-{self.seed}" + (f"-{self.kind}-{STEPS}" if self.kind else "")


def plan(done: dict[str, dict]) -> Iterator[Run]:
    "All runs, what is played first."
    yield from (Run(world, seed) for seed in SEEDS for world in HABIT)
    yield Run("sql", 0)
    yield from (Run(world, seed, kind) for seed in SEEDS for world in HABIT for kind in WORLDS[world].hints)


# --- the cheap score, and what happens

@cache
def recorded(world: str, seed: int) -> list[Trace]:
    "The start's own episodes of a seed."
    of = WORLDS[world]
    rows = of.rows(of.episodes, f"019-{seed}", "train")
    return [r.trace for r in collect(start_of(world), of.environment, rows, replace(of.recorded, seed=seed), seed)]


def cases_of(world: str, seed: int) -> list[tuple[Repair, dict[str, str]]]:
    "Failed turns whose next action worked and that have a hint of each kind; of each task one, in the order of the tasks."
    of, found = WORLDS[world], {}
    for case in repairs(recorded(world, seed), of.hints["exact"], Counter()):
        texts = {kind: hint_at(source, case.trace, case.site) for kind, source in of.hints.items()}
        if case.task not in found and all(texts.values()):
            found[case.task] = case, {kind: hint.text for kind, hint in texts.items()}
    return list(found.values())[:of.most]


def scores(policy: TransformersPolicy, cases: list[tuple[Repair, dict[str, str]]]) -> list[dict]:
    "Of each case, by kind and for none: nats a token of the action that worked and of the one that failed."
    found = []
    for case, texts in cases:
        tree, labels = hinted_pairs([case], [texts], policy.chat)
        actions = action_logprobs(policy.model, tree, labels)
        found.append({name: [actions[0, name][i][1].mean().item() for i in (0, 1)] for _, name in labels})
    return found


def played(world: str, cases: list[tuple[Repair, dict[str, str]]], seed: int, shared: bool) -> list[dict]:
    "Of each case, by kind and for none: whether the next action works and whether the same error comes again, by repetition."
    of, refused = WORLDS[world], {}
    forks = [Fork(case.trace, case.site, Hint(texts["exact"], "exact"), {"task_id": case.trace.task_id}) for case, texts in cases]
    kept = checked_forks(forks, of.environment, refused)
    assert len(kept) == len(cases), refused
    arms = ("none", *of.hints) if shared else APART
    branches = [ForkBranch(fork, arm, texts.get(arm), n)
                for fork, (_, texts) in zip(kept, cases) for n in range(of.times) for arm in arms]
    config = replace(of.recorded, max_turns=1, max_tokens=4096, seed=seed, coupled=True)
    found = [{arm: [] for arm in arms} for _ in cases]
    place = {fork.name: i for i, fork in enumerate(kept)}
    for one in play_forks(start_of(world), branches, of.environment, config, scored=False, shared=shared):
        result = fork_result(one)
        found[place[one.fork.name]][one.arm].append(result and [int(result.works), int(result.again)])
    return found


def measure(run: Run) -> dict:
    "Score and play all kinds of hints."
    cases, policy = cases_of(run.world, run.seed), start_of(run.world)
    began = time.process_time()
    scored = scores(policy, cases)
    then = time.process_time()
    shared, apart = (played(run.world, cases, run.seed, together) for together in (True, False))
    rows = [{"task": case.task, "turn": case.site.turn, "error": case.site.kind, "scores": s, "played": p, "apart": a}
            for (case, _), s, p, a in zip(cases, scored, shared, apart)]
    return {"episodes": len(recorded(run.world, run.seed)), "cases": rows, "score_seconds": then - began,
            "play_seconds": time.process_time() - then}


# --- the gain of training

def passes(world: str, seed: int, policy: TransformersPolicy) -> list[int]:
    "Whether new tasks are passed, one episode each, without hints."
    of = WORLDS[world]
    rows = of.rows(HELD_OUT, f"019-{seed}", "test")
    limits = replace(of.recorded, max_turns=3 if world == "teams" else 5)
    return [int(r.reward == 1) for r in collect(policy, of.environment, rows, limits, 0)]


before = cache(lambda world, seed: passes(world, seed, start_of(world)))


def train(run: Run) -> dict:
    "SDPO alone on the start's recorded episodes with one kind of hint: forward KL to the frozen start behind it."
    of, policy, trees = WORLDS[run.world], start_of(run.world), []
    for trace in recorded(run.world, run.seed):
        targets = target_turns(trace)
        by_kind = {kind: dict(target_hints(trace, targets, source)) for kind, source in of.hints.items()}
        at = [turn for turn in targets if all(hints.get(turn) for hints in by_kind.values())]
        if at:
            trees.append(build_tree(trace, policy.chat, [(turn, by_kind[run.kind][turn]) for turn in at]))
    began, student, order = time.process_time(), embedded_model(HABIT[run.world]).train(), []
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=0)
    generator = torch.Generator().manual_seed(run.seed)
    for _ in range(STEPS):
        if len(order) < TREES:
            order += torch.randperm(len(trees), generator=generator).tolist()
        batch = pack_trees([trees[i] for i in order[:TREES]], embedded_tokenizer().pad_token_id)
        order = order[TREES:]
        loss = compose_loss(student.train(), batch, 1.0, 0.0, teacher=policy.model, divergence=Divergence(0.0)).sdpo_jsd
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
    spent = time.process_time() - began
    return {"trees": len(trees), "train_seconds": spent, "before": before(run.world, run.seed),
            "passed": passes(run.world, run.seed, TransformersPolicy(student.eval(), embedded_tokenizer()))}


def make(run: Run) -> dict:
    with one_thread():
        torch.manual_seed(run.seed)
        made = train(run) if run.kind else measure(run)
    gain = f", {fmean(made['passed']):.2f} of {fmean(made['before']):.2f}" if run.kind else f", {len(made['cases'])} cases"
    print(run.name + gain, flush=True)
    return {"world": run.world, "seed": run.seed, "kind": run.kind, "steps": STEPS if run.kind else None,
            "fingerprint": reward_fingerprint(run.world), **made}


if __name__ == "__main__":
    appended.command("019", KEPT, plan, make)
