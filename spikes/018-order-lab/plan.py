"""Spike 018: recorded or live, order and sign, in the lab's world of teams. Go on with the plan's runs.

    OMP_NUM_THREADS=1 .venv/bin/python spikes/018-order-lab/plan.py --minutes 30 --workers 1

Each run that ends is appended to `runs.jsonl`, at once; a run that was killed is made again. No run begins after so many minutes.
018-order-lab.ipynb states hypotheses, thresholds and the verdict rule; they were committed before any run on test tasks.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np
import orjson
import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainerCallback

from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.teams import TeamEnv, team_hints
from composer_replication.experiments.arm import TEAMS, arm_config
from composer_replication.experiments.evaluate import episode_limits
from composer_replication.experiments.setting import Setting
from composer_replication.losses.compose import compose_loss
from composer_replication.losses.divergences import Divergence
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import Rollout
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.build import Tree, build_tree
from composer_replication.tree.example import target_hints, target_turns
from composer_replication.tree.pack import pack_trees

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import appended  # noqa: E402
from fingerprint import reward_fingerprint  # noqa: E402
from hint_gate import hinted_turns, right_actions  # noqa: E402

KEPT, LOCKS = HERE / "runs.jsonl", HERE / "runs"
SEEDS, TUNING = tuple(range(10)), (100, 101)  # of test runs; of those on development tasks, which choose the rates
EPISODES, STEPS, TREES, TURNS = 192, 60, 16, 3  # recorded episodes, optimizer steps, trees of a step, turns of an episode
HELD_OUT = {"dev": 64, "test": 128}  # tasks measured after a run, one episode each
RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
FIRST = (2, 3, 4)  # of RATES, for every arm alike; wider where the best is an edge
RECORDED = {"recorded exact": "exact", "recorded filler": "filler", "recorded other": "other"}
ARMS = (*RECORDED, "live exact", "policy")
LIVE = Setting(habit="teams", turns=TURNS, hints="template", tasks=16, rollouts=4, measure_every=1000, steps=1000)


@dataclass(frozen=True)
class Run:
    "One run of the plan."

    arm: str
    seed: int
    rate: float
    budget: float | None = None  # CPU seconds of playing and training after which it ends; None: after `STEPS`

    @property
    def split(self) -> str:
        return "dev" if self.seed in TUNING else "test"

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}-{self.rate:.2e}"


def ended() -> dict[str, dict]:
    "Runs that ended, by name."
    runs = [orjson.loads(line) for line in KEPT.read_bytes().splitlines()] if KEPT.exists() else []
    return {Run(r["arm"], r["seed"], r["rate"]).name: r for r in runs}


# --- what is chosen on development tasks

def tuned(
    arm: str,
    done: dict[str, dict],
    budget: float | None = None,
) -> tuple[list[Run], float | None]:
    "Development runs of an arm so far needed, and its rate once they have ended."
    run_of, level = (lambda seed, rate: Run(arm, seed, rate, budget)), (lambda run: fmean(run["passed"]))
    return appended.tuned(run_of, level, done, RATES, FIRST, TUNING)


def equal_budget(done: dict[str, dict]) -> float | None:
    "CPU seconds of playing and training of `recorded exact` at its rate, mean of its development runs."
    rate = tuned("recorded exact", done)[1]
    return rate and round(fmean(done[Run("recorded exact", seed, rate).name]["cpu_seconds"] for seed in TUNING), 1)


def plan(done: dict[str, dict]) -> Iterator[Run | None]:
    "First stage, in order; None stands for runs that wait for a choice."
    rates = {}
    for arms in (tuple(RECORDED), ("live exact", "policy")):
        budget = None if arms[0] in RECORDED else equal_budget(done)
        for arm in arms:
            runs, rates[arm] = tuned(arm, done, budget) if arm in RECORDED or budget else ([], None)
            yield from runs
        for seed in SEEDS:
            yield from (rates[arm] and Run(arm, seed, rates[arm], budget) for arm in arms)


# --- how a run is made

@cache
def tokenizer():
    return embedded_tokenizer()


def policy_of(model: PreTrainedModel) -> TransformersPolicy:
    return TransformersPolicy(model.eval(), tokenizer())


def play(model: PreTrainedModel, rows: list[dict], seed: int) -> list[Rollout]:
    return collect(policy_of(model), TeamEnv, rows, episode_limits(TURNS, seed), seed)


def trees_of(played: list[Rollout], kind: str) -> list[Tree]:
    "A tree for each episode with a failed turn that has a hint of every kind, its hints of this one."
    chat, trees = policy_of(embedded_model("teams")).chat, []
    for r in played:
        targets = target_turns(r.trace)
        by_kind = {k: dict(target_hints(r.trace, targets, team_hints(k))) for k in RECORDED.values()}
        shared = [turn for turn in targets if all(hints[turn] for hints in by_kind.values())]
        if shared:
            sampled = ((*r.prompt_ids, *r.completion_ids), [0] * len(r.prompt_ids) + list(r.completion_mask))
            trees.append(build_tree(r.trace, chat, [(turn, by_kind[kind][turn]) for turn in shared], sampled=sampled))
    return trees


@cache
def recorded(seed: int) -> tuple[list[Rollout], float]:
    "The start's own episodes on this seed's training tasks, and the CPU seconds of playing them."
    began = time.process_time()
    return play(embedded_model("teams"), TEAMS.rows(EPISODES, f"018-{seed}", "train"), seed), time.process_time() - began


@cache
def start_on(seed: int, split: str):
    "Held-out tasks of a seed, which no other seed or spike plays, whether the start passes, and its failed turns."
    rows, start = TEAMS.rows(HELD_OUT[split], f"018-{seed}", split), embedded_model("teams")
    played = play(start, rows, 0)
    return rows, [int(r.reward == 1.0) for r in played], hinted_turns(played, policy_of(start), team_hints("exact"))


class Student:
    "The start in training by SDPO alone: forward KL to the frozen start behind its hints."

    def __init__(self, rate: float):
        self.model, self.teacher = embedded_model("teams").train(), embedded_model("teams").eval()
        self.optimizer, self.turns = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0), 0

    def step(self, trees: list[Tree]) -> None:
        batch = pack_trees(trees, tokenizer().pad_token_id)
        loss = compose_loss(self.model.train(), batch, 1.0, 0.0, teacher=self.teacher, divergence=Divergence(0.0)).sdpo_jsd
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.turns += batch.sites


def measured(model: PreTrainedModel, run: Run) -> dict:
    "Whether new episodes pass; on test tasks also whether a new action at each failed turn of the start works."
    rows, start, failed = start_on(run.seed, run.split)
    found = {"passed": [int(r.reward == 1.0) for r in play(model, rows, 0)], "start": start}
    if run.split == "test":
        found["right"] = [int(x) for x in right_actions(policy_of(model), failed, False, TeamEnv)]
        found["start_right"] = [int(x) for x in right_actions(policy_of(embedded_model("teams")), failed, False, TeamEnv)]
    return found


def train_recorded(run: Run) -> dict:
    "SDPO alone on the start's recorded episodes."
    played, cost = recorded(run.seed)
    began, student, order = time.process_time(), Student(run.rate), []
    trees, generator = trees_of(played, RECORDED[run.arm]), torch.Generator().manual_seed(run.seed)
    for _ in range(STEPS):
        if len(order) < TREES:
            order += torch.randperm(len(trees), generator=generator).tolist()
        student.step([trees[i] for i in order[:TREES]])
        order = order[TREES:]
    spent = cost + time.process_time() - began
    return {"cpu_seconds": spent, "steps": STEPS, "episodes": len(played), "trees": len(trees), "turns_read": student.turns,
            **measured(student.model, run)}


def train_live(run: Run) -> dict:
    "The same, each step on new episodes of the student as it is; measured at equal CPU seconds, and after as many steps."
    student, spent, steps, rows, found = Student(run.rate), 0.0, 0, TEAMS.rows(1000 * TREES, f"018-{run.seed}", "train"), {}
    while "passed" not in found or steps < STEPS:
        began = time.process_time()
        if trees := trees_of(play(student.model, rows[steps * TREES:][:TREES], run.seed), "exact"):
            student.step(trees)
        spent, steps = spent + time.process_time() - began, steps + 1
        state = {"cpu_seconds": spent, "steps": steps, "episodes": steps * TREES, "turns_read": student.turns}
        if spent >= run.budget and "passed" not in found:
            found |= {**state, **measured(student.model, run)}
        if steps == STEPS:
            found["equal_steps"] = {**state, **measured(student.model, run)}
    return found


class _Budget(TrainerCallback):
    "Ends the training after so many CPU seconds."

    def __init__(self, seconds: float):
        self.seconds, self.began, self.rewards = seconds, time.process_time(), []

    def on_step_end(self, args, state, control, **kwargs):
        self.spent = time.process_time() - self.began
        control.should_training_stop = self.spent >= self.seconds

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rewards += [logs["reward"]] if "reward" in (logs or {}) else []


def train_policy(run: Run) -> dict:
    "Dr.GRPO in groups of four on sixteen tasks a step, until the CPU seconds of `recorded exact` are spent."
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(**asdict(LIVE) | {"learning_rate": run.rate})
        config = arm_config(setting, run.seed, Path(folder))
        budget = _Budget(run.budget)
        trainer = ComposerReplicationTrainer(
            embedded_model("teams"), None, config, Dataset.from_list(TEAMS.rows(200 * LIVE.tasks, f"018-{run.seed}", "train")),
            processing_class=tokenizer(), environment_factory=TeamEnv, callbacks=[budget])
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.train()
        return {"cpu_seconds": budget.spent, "steps": trainer.state.global_step, "rewards": budget.rewards,
                "episodes": trainer.state.global_step * LIVE.tasks * LIVE.rollouts, **measured(trainer.student, run)}


MAKES: dict[str, Callable[[Run], dict]] = {
    **dict.fromkeys(RECORDED, train_recorded), "live exact": train_live, "policy": train_policy}


# --- processes

def claim() -> tuple[Run | None, FileLock | None, bool]:
    "A run that nobody works at, with its lock; whether any is left."
    done, left = ended(), False
    for run in plan(done):
        if run and run.name in done:
            continue
        left = True
        if run:
            lock = FileLock(LOCKS / f"{run.name}.lock")
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            if run.name not in ended():
                return run, lock, True
            lock.release()
    return None, None, left


def keep(run: dict) -> None:
    "Append a run that ended."
    with FileLock(LOCKS / "append.lock"), KEPT.open("ab") as file:
        file.write(orjson.dumps(run) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def work(minutes: float) -> None:
    "Make runs until none is left, or none may begin any more."
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    fingerprint, end = reward_fingerprint("teams"), time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        run, lock, left = claim()
        if not left:
            return
        if run is None:  # others make what this plan waits for
            time.sleep(5)
            continue
        with lock:
            began = time.monotonic()
            torch.manual_seed(run.seed)
            made = MAKES[run.arm](run)
            keep(asdict(run) | {"split": run.split, "commit": commit, "fingerprint": fingerprint,
                                "seconds": round(time.monotonic() - began, 1)} | made)
        print(f"{run.name}: passed {np.mean(made['passed']):.2f} of the start's {np.mean(made['start']):.2f}, "
              f"{made['cpu_seconds']:.0f} CPU s, {made['steps']} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Go on with the runs of spike 018.")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins after so many")
    asked = parser.parse_args()
    LOCKS.mkdir(exist_ok=True)
    if asked.workers == 1:
        return work(asked.minutes)
    workers = [get_context("spawn").Process(target=work, args=(asked.minutes,)) for _ in range(asked.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
