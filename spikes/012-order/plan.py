"""Spike 012: SDPO alone, before the policy objective, or not at all; SmolLM2-135M on SQL. Go on with the plan's runs.

    .venv/bin/python spikes/012-order/plan.py --workers 2      # processes on CPUs, one thread each
    .venv/bin/python spikes/012-order/plan.py --together 8     # processes on one GPU
    .venv/bin/python spikes/012-order/plan.py --pilot          # development runs alone that measure H3's and H4's deviations
    .venv/bin/python spikes/012-order/plan.py --collect        # write runs.jsonl.gz from the runs that ended

Each run that ends is a file of `runs`; a run that was killed is made again. 012-order.ipynb states hypotheses and thresholds.
"""
import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import orjson
import torch
from datasets import Dataset
from filelock import FileLock

from composer_replication.core.files import write_file, write_json, write_jsonl
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows
from composer_replication.experiments.pass_at_k import EvalTasks, play_samples
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.recipes.stages import warmed
from composer_replication.replay.pairs import recovery_pairs
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.read import read_traces
from composer_replication.tree.build import build_tree
from composer_replication.tree.template import probe_template

sys.path.append(str(Path(__file__).resolve().parents[1]))
import resumable

HERE = Path(__file__).parent
RUNS = HERE / "runs"
LEVELS = ("easy", "medium")
STARTS = (0, 1)  # seeds of the warm-up
SEEDS, TUNING = tuple(range(10)), (1000, 1001, 1002)  # of test runs; of those on development tasks, which choose rates and switch
STEPS, EPISODES, GROUP = 12, 16, 4  # optimizer steps, episodes of each, episodes of a task
TASKS, SAMPLES = 64, 2  # measured after a run; episodes of each
RATES = tuple(5e-6 * f for f in (1, 3, 10, 30, 100))
FIRST = {"policy": (1, 2, 3), "sdpo": (0, 1, 2), "filler": (0, 1, 2), "rejection": (1, 2, 3),
         "joint, gated": (1, 2, 3)}  # of RATES; then wider
SWITCH = (3, 6, 9)  # steps of SDPO before the policy objective, of 12 in all
CURVE = (0, 1, 2)  # seeds whose checkpoints after 3, 6 and 9 steps are measured too, on development tasks
HINTS = {"sdpo": "[sql, template, raw_error]", "filler": "[composer_replication.envs.sql.hints:filler_hints]"}
LIMITS = RolloutConfig(max_turns=6, max_tokens=384, max_turn_tokens=64, seed=0)
LOGGED = ("step", "loss", "reward", "frac_reward_zero_std", "num_tokens", "grad_norm", "entropy", "sdpo/", "rollout/",
          "conflict/")


@dataclass(frozen=True)
class Run:
    "One run of the plan."

    arm: str
    start: int
    seed: int
    rate: float | None = None  # of the arm, or for `sequence` of its SDPO steps
    switch: int | None = None  # steps of SDPO in `sequence`
    then: float | None = None  # rate of the policy objective in `sequence`
    alpha: float | None = None  # weight of channel 2 in `joint, gated`

    @property
    def split(self) -> str:
        return "development" if self.seed in TUNING else "test"

    @property
    def path(self) -> Path:
        chosen = [f"{x:.1e}" if isinstance(x, float) else str(x) for x in (self.rate, self.switch, self.then, self.alpha) if x]
        return RUNS / f"{'-'.join([self.arm, str(self.start), str(self.seed), *chosen])}.json"


def read(path: Path) -> dict:
    return orjson.loads(path.read_bytes())


# --- what is chosen on development tasks

def passes(runs: list[Run]) -> float | None:
    "Mean reward of the runs; None until all have ended."
    return float(np.mean([read(r.path)["rewards"] for r in runs])) if all(r.path.exists() for r in runs) else None


def rates(arm: str, alpha: float | None = None) -> tuple[list[Run], float | None]:
    "Development runs of an arm so far needed, and its rate once they have ended: the best that is no edge of what was tried."
    tried = list(FIRST[arm])
    while True:
        runs = {n: [Run(arm, 0, seed, RATES[n], alpha=alpha) for seed in TUNING] for n in tried}
        found = {n: passes(of) for n, of in runs.items()}
        every = sum(runs.values(), [])
        if None in found.values():
            return every, None
        best = max(tried, key=lambda n: (found[n], -n))
        wider = best - 1 if best == min(tried) else best + 1 if best == max(tried) else best
        if wider in tried or not 0 <= wider < len(RATES):
            return every, RATES[best]
        tried.append(wider)


def sequence(start: int, seed: int, switch: int) -> Run | None:
    "SDPO at its own rate, then the policy objective at its own."
    first, then = rates("sdpo")[1], rates("policy")[1]
    return first and then and Run("sequence", start, seed, first, switch, then)


def switch() -> tuple[list[Run], int | None]:
    runs = {s: [sequence(0, seed, s) for seed in TUNING] for s in SWITCH}
    if None in sum(runs.values(), []):
        return [], None
    found = {s: passes(of) for s, of in runs.items()}
    return sum(runs.values(), []), None if None in found.values() else max(SWITCH, key=lambda s: (found[s], -s))


def equal_steps() -> int | None:
    "Steps that the policy objective alone takes in the CPU seconds of `sequence`, from the development runs."
    at, rate = switch()[1], rates("policy")[1]
    if at is None or rate is None:
        return None

    def cost(runs):
        return np.mean([read(r.path)["cpu_seconds"][part] for r in runs for part in ("record", "train")])
    ratio = cost([sequence(0, seed, at) for seed in TUNING]) / cost([Run("policy", 0, seed, rate) for seed in TUNING])
    return max(STEPS, round(STEPS * ratio))


def weight(seeds: tuple[int, ...] = TUNING) -> tuple[list[Run], float | None]:
    "Runs at policy's middle rate, and the weight of channel 2 at which both gradients have one norm where both act."
    runs = [Run("gradients", 0, seed, RATES[FIRST["policy"][1]], alpha=1.0) for seed in seeds]
    if not all(run.path.exists() for run in runs):
        return runs, None
    ratios = [entry["conflict/norm_ratio"] for run in runs for entry in read(run.path)["log"] if entry.get("conflict/norm_ratio")]
    if not ratios:
        raise ValueError("no run of `gradients` logged conflict/norm_ratio; measure more steps")
    return runs, float(f"{1 / np.exp(np.mean(np.log(ratios))):.1e}")


def joint() -> tuple[list[Run], tuple[float, float] | None]:
    "Development runs of `joint, gated`, and its rate and weight."
    runs, alpha = weight()
    if alpha is None:
        return runs, None
    tried, rate = rates("joint, gated", alpha)
    return runs + tried, rate and (rate, alpha)


def plan() -> Iterator[Run | None]:
    "Runs in order; None stands for runs that wait for a choice."
    yield from (Run("start", 0, seed) for seed in TUNING[:1])
    for arm in ("sdpo", "policy", "filler", "rejection"):
        yield from rates(arm)[0]
    yield from switch()[0]
    yield from joint()[0]
    for start in STARTS:
        for seed in SEEDS:
            yield Run("start", start, seed)
            for arm in ("sdpo", "filler", "policy", "sequence", "rejection", "joint, gated"):
                at = switch()[1]
                if arm == "sequence":
                    yield at and sequence(start, seed, at)
                elif arm == "joint, gated":
                    chosen = joint()[1]
                    yield chosen and Run(arm, start, seed, chosen[0], alpha=chosen[1])
                else:
                    rate = rates(arm)[1]
                    yield rate and (arm != "policy" or at) and Run(arm, start, seed, rate)


def pilot() -> Iterator[Run | None]:
    "Development runs at the middle rates; channel 2's weight in `joint, gated` from the gradients of the first seed alone."
    yield weight()[0][0]
    for seed in TUNING:
        yield Run("rejection", 0, seed, RATES[FIRST["rejection"][1]])
        alpha = weight(TUNING[:1])[1]
        yield alpha and Run("joint, gated", 0, seed, RATES[FIRST["joint, gated"][1]], alpha=alpha)
    for arm in ("sdpo", "policy"):
        yield from (Run(arm, 0, seed, RATES[FIRST[arm][1]]) for seed in TUNING)


# --- how a run is made

def start_folder(seed: int) -> Path:
    "The warm-up's checkpoint, made once (some 19 CPU minutes)."
    folder = RUNS / f"start-{seed}"
    recipe = load_recipe("smollm2-sql", {"bf16": "true"})
    stage = recipe.arguments.warm_up | {"folder": str(folder), "seed": seed}
    with FileLock(f"{folder}.making"):
        warmed(replace(recipe, arguments=replace(recipe.arguments, warm_up=stage)))
    return folder


class Work:
    "One run's folder, device and CPU seconds."

    def __init__(self, run: Run, device: str):
        self.run, self.device, self.start = run, device, start_folder(run.start)
        self.folder, self.seconds = RUNS / f"work-{os.getpid()}", {"record": 0.0, "train": 0.0, "measure": 0.0}
        shutil.rmtree(self.folder, ignore_errors=True)

    def timed(self, part: str, make, *arguments):
        began = time.process_time()
        made = make(*arguments)
        self.seconds[part] += time.process_time() - began
        return made

    def play(self, checkpoint: Path, rows: list[dict], samples: int, name: str) -> list[list]:
        "Rollouts by task and sample."
        loaded = load_checkpoint(str(checkpoint), device=self.device)
        policy = TransformersPolicy(loaded.model, loaded.tokenizer, name)
        return play_samples(policy, EvalTasks("sql", SqlEnv, rows), samples, LIMITS)

    def recorded(self) -> tuple[Path, float]:
        "The start's episodes on this seed's training tasks, in the order of tasks, and what playing them cost in CPU seconds."
        path = RUNS / f"recorded-{self.run.start}-{self.run.seed}.jsonl"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                began = time.process_time()
                rows = sql_rows(STEPS * EPISODES // GROUP, self.run.seed, "train", LEVELS)
                played = self.play(self.start, rows, GROUP, "start")
                write_json(path.with_suffix(".cost"), {"cpu_seconds": time.process_time() - began})
                write_jsonl(path, (orjson.loads(r.trace.to_json()) for row in played for r in row))
        return path, read(path.with_suffix(".cost"))["cpu_seconds"]

    def traces(self, steps: int) -> Path:
        "Those of the last tasks, as many as so many steps of the policy objective would play; their cost is counted."
        path, cost = self.recorded()
        self.seconds["record"] += cost * steps / STEPS
        part = self.folder / "traces.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(part, b"".join(path.read_bytes().splitlines(keepends=True)[-steps * EPISODES:]))
        return part

    def train(self, name: str, model: Path, rate: float, steps: int, settings: dict[str, str]) -> tuple[Path, list[dict]]:
        "The last checkpoint of the recipe `smollm2-sql` with other settings, and its log."
        same = {
            "model": str(model), "warm_up": "null", "held_out_rows": "0", "learning_rate": repr(rate), "seed": str(self.run.seed),
            "bf16": "true", "use_cpu": str(self.device == "cpu").lower(), "max_steps": str(steps), "save_steps": "3",
            "save_total_limit": "null", "record": "false", "output_dir": str(self.folder / name), "resume": "true"}
        checkpoint = self.timed("train", lambda: Path(run_recipe(load_recipe("smollm2-sql", same | settings)).checkpoint))
        history = read(checkpoint / "trainer_state.json")["log_history"]
        return checkpoint, [{k: v for k, v in entry.items() if k.startswith(LOGGED)} for entry in history if "loss" in entry]

    def policy(self, model: Path, rate: float, steps: int, alpha: float = 0.0) -> tuple[Path, list[dict]]:
        "Dr.GRPO on this seed's first training tasks, each played once by a group; with `alpha` channel 2 beside it."
        beside = {"hints": HINTS["sdpo"], "sdpo_gate": "failed", "log_conflict": "true"} if alpha else {}
        return self.train("policy", model, rate, steps, beside | {
            "alpha_sdpo": repr(alpha), "shuffle_dataset": "false", "train_rows": str(steps * EPISODES // GROUP)})

    def sdpo(self, hints: str, rate: float, steps: int) -> tuple[Path, list[dict]]:
        "Channel 2 alone on recorded episodes: forward KL to the frozen start behind its hints."
        return self.train("sdpo", self.start, rate, steps, {
            "task": "null", "tasks": "null", "traces": f"[{self.traces(steps)}]", "hints": HINTS[hints], "alpha_sdpo": "1.0",
            "replay_batch_size": "2"})

    def rejection(self, rate: float) -> tuple[Path, list[dict]]:
        "Supervised learning on recorded episodes that passed, and on actions that worked in the place of those that had failed."
        from trl import SFTConfig, SFTTrainer

        loaded = load_checkpoint(str(self.start), device=self.device)
        chat, rows = probe_template(loaded.tokenizer), []
        for trace in read_traces(str(self.traces(STEPS))):
            tree = build_tree(trace, chat, pairs=recovery_pairs(trace))
            rows += [learnt(tree.ids, [(span.start, span.end) for span in tree.spans])] if trace.reward == 1 else []
            for branch in tree.branches:
                if branch.kind == "chosen":
                    ids = tree.ids[:branch.fork] + branch.ids
                    rows.append(learnt(ids, [(branch.fork + branch.start, len(ids))]))
        wanted = STEPS * EPISODES
        drawn = np.random.default_rng(self.run.seed).choice(len(rows), wanted, replace=len(rows) < wanted)
        config = SFTConfig(
            output_dir=str(self.folder / "sft"), max_steps=STEPS, learning_rate=rate, lr_scheduler_type="constant",
            per_device_train_batch_size=2, gradient_accumulation_steps=EPISODES // 2, bf16=True, use_cpu=self.device == "cpu",
            seed=self.run.seed, gradient_checkpointing=False, max_length=None, logging_steps=1, save_steps=3, report_to="none",
            disable_tqdm=True, dataloader_pin_memory=False)
        data = Dataset.from_list([rows[n] for n in drawn])
        trainer = SFTTrainer(loaded.model.train(), config, train_dataset=data, processing_class=loaded.tokenizer)
        self.timed("train", trainer.train)
        log = [{"step": e["step"], "loss": e["loss"], "rows": len(rows)} for e in trainer.state.log_history if "loss" in e]
        return self.folder / "sft" / f"checkpoint-{STEPS}", log

    def measure(self, checkpoint: Path, split: str, samples: int) -> list[list[float]]:
        "Rewards of new episodes without hints, by task and sample; tasks are this seed's own, of schemas in no training split."
        rows = sql_rows(TASKS, f"spike-012-{self.run.seed}", split, LEVELS)
        return [[r.reward or 0.0 for r in row] for row in self.timed("measure", self.play, checkpoint, rows, samples, "measured")]

    def made(self) -> dict:
        "All that is kept of the run."
        run, found = self.run, {}
        if run.arm == "start":
            checkpoint, log = self.start, []
        elif run.arm in ("policy", "joint, gated"):
            checkpoint, log = self.policy(self.start, run.rate, STEPS, run.alpha or 0.0)
        elif run.arm == "gradients":  # three steps; nothing of it is measured but the gradients
            checkpoint, log = self.policy(self.start, run.rate, 3, run.alpha)
            shutil.rmtree(self.folder, ignore_errors=True)
            return {"log": log, "rewards": [[0.0]], "cpu_seconds": self.seconds}
        elif run.arm == "sequence":
            checkpoint, first = self.sdpo("sdpo", run.rate, run.switch)
            checkpoint, log = self.policy(checkpoint, run.then, STEPS - run.switch)
            found["first"] = first
        elif run.arm == "rejection":
            checkpoint, log = self.rejection(run.rate)
        else:
            checkpoint, log = self.sdpo(run.arm, run.rate, STEPS)
        found |= {"log": log, "rewards": self.measure(checkpoint, run.split, SAMPLES)}
        found["cpu_seconds"] = {part: round(seconds, 1) for part, seconds in self.seconds.items()}
        if run.seed in CURVE and run.arm in ("policy", "sdpo", "filler", "rejection", "joint, gated"):
            found["curve"] = {n: self.measure(checkpoint.with_name(f"checkpoint-{n}"), "development", 1) for n in (3, 6, 9, 12)}
        if run.arm == "policy" and run.split == "test" and (steps := equal_steps()) > STEPS:
            began = dict(self.seconds)
            checkpoint, log = self.policy(self.start, run.rate, steps)
            found["equal"] = {"steps": steps, "rewards": self.measure(checkpoint, run.split, SAMPLES),
                              "cpu_seconds": found["cpu_seconds"]["train"] + self.seconds["train"] - began["train"]}
        shutil.rmtree(self.folder, ignore_errors=True)
        return found


def learnt(ids, spans) -> dict:
    labels = [-100] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return {"input_ids": list(ids), "labels": labels}


# --- processes

def work(device: str, minutes: float, runs: Callable[[], Iterator[Run | None]] = plan) -> None:
    "Make runs until none is left, or none may begin any more."
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        run, lock, left = resumable.claim(runs())
        if not left:
            return
        if run is None:  # others make what this plan waits for
            time.sleep(20)
            continue
        with lock:
            began = time.monotonic()
            made = Work(run, device).made()
            name = device if device == "cpu" else torch.cuda.get_device_name()
            seconds = round(time.monotonic() - began, 1)
            write_json(run.path, asdict(run) | {"commit": commit, "device": name, "seconds": seconds} | made)
        print(run.path.name, f"{np.mean(made['rewards']):.3f}", made["cpu_seconds"], flush=True)


def path_of(run: dict) -> Path:
    "The file of a run that was kept."
    return Run(*(run.get(field.name) for field in fields(Run))).path


def main() -> None:
    parser = argparse.ArgumentParser(description="Go on with the runs of spike 012.")
    parser.add_argument("--workers", type=int, default=1, help="processes on CPUs")
    parser.add_argument("--together", type=int, help="processes on one GPU, in the place of workers")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins after so many")
    parser.add_argument("--pilot", action="store_true", help="the pilot's runs in the place of the plan's")
    parser.add_argument("--collect", action="store_true", help="write runs.jsonl.gz and stop")
    asked = parser.parse_args()
    if asked.collect:
        return resumable.collect(RUNS, HERE / "runs.jsonl.gz")
    resumable.unpack(HERE / "runs.jsonl.gz", path_of)
    device = "cuda" if asked.together else "cpu"
    processes = asked.together or asked.workers
    of = (device, asked.minutes, pilot if asked.pilot else plan)
    workers = [get_context("spawn").Process(target=work, args=of) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
