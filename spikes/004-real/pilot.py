"""What the pilots from one start share: tasks, episodes that it plays once, how a checkpoint is measured, runs."""
import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import torch
from reads import act, states, table

from composer_replication.core.files import write_file, write_json, write_jsonl
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows
from composer_replication.experiments.pass_at_k import EvalTasks, play_samples
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.recipes.stages import warmed
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.read import read_traces

HERE = Path(__file__).parent
START = HERE / "out/smollm2-sql-hinted-warm-up"
HINTS = {"own": ["sql", "template", "raw_error"], "exact": ["sql_controls:exact_hints"],
         "other site": ["sql_controls:other_site_hints"], "wrong": ["sql_controls:wrong_hints"],
         "filler": ["composer_replication.envs.sql.hints:filler_hints"]}
RATE, FACTORS = 5e-6, (1, 3, 10)
SEEDS, TUNING = (0, 1, 2), 1000  # the seed of runs that only choose a rate, on development tasks
TASKS, SAMPLES = 64, 2  # to develop on and to test on; episodes of a task


def read(path: Path):
    return orjson.loads(path.read_bytes())


@dataclass(frozen=True)
class Pilot:
    "Runs from the third start, each of them a file of `folder`."

    name: str  # of its folder in `made` and of the file beside this one that keeps its results
    series: str  # of its tasks, which nothing else has used
    logged: tuple[str, ...]  # what of a run's log is kept
    train_tasks: int = 160  # whose episodes the start records

    @property
    def folder(self) -> Path:
        return HERE / "made" / self.name

    def rows(self, split: str) -> list[dict]:
        return sql_rows(self.train_tasks if split == "train" else TASKS, self.series, split, ("easy", "medium"))

    def episodes(self, checkpoint: Path, split: str) -> list[list]:
        "(tasks, samples)."
        loaded = load_checkpoint(str(checkpoint))
        limits = RolloutConfig(max_turns=6, max_tokens=384, max_turn_tokens=64, seed=0)
        policy = TransformersPolicy(loaded.model, loaded.tokenizer, split)
        return play_samples(policy, EvalTasks("sql", SqlEnv, self.rows(split)), SAMPLES, limits)

    def record(self, split: str) -> Path:
        "The start's own episodes; played once."
        path = self.folder / f"{split}.jsonl.gz"
        if not path.exists():
            write_jsonl(path, (orjson.loads(rollout.trace.to_json()) for row in self.episodes(START, split) for rollout in row))
        return path

    def rewards(self, checkpoint: Path, split: str) -> list[list[float]]:
        "Of new episodes, (tasks, samples)."
        return [[rollout.reward or 0.0 for rollout in row] for row in self.episodes(checkpoint, split)]

    def measure(self, checkpoint: Path, split: str, play: bool = True) -> dict:
        """Right actions without a hint at the start's error turns, a row each; those of the start itself, the teacher, behind
        every kind of hint too. Rewards of new episodes."""
        loaded = load_checkpoint(str(checkpoint))
        policy = TransformersPolicy(loaded.model, loaded.tokenizer)
        every = states(list(read_traces(str(self.record(split)))), policy.chat)
        of = [state for state in every if checkpoint == START or state.source == "none"]
        found = table(of, act(policy, of))
        return found | ({"rewards": self.rewards(checkpoint, split)} if play else {})

    def _run_folder(self) -> Path:
        "An empty place for this process's next run."
        out = self.folder / f"run-{os.getpid()}"
        shutil.rmtree(out, ignore_errors=True)
        return out

    def train(self, settings: dict[str, str], seed: int, factor: int) -> tuple[Path, dict]:
        "Checkpoint of a run of `smollm2-sql` from the start, its log and CPU seconds. A process's next run overwrites it."
        out, began = self._run_folder(), time.process_time()
        same = {"model": str(START), "warm_up": "null", "held_out_rows": "0", "learning_rate": str(RATE * factor),
                "seed": str(seed), "bf16": "true", "record": "false", "output_dir": str(out)}
        checkpoint = Path(run_recipe(load_recipe("smollm2-sql", same | settings)).checkpoint)
        history = read(checkpoint / "trainer_state.json")["log_history"]
        log = [{key: entry.get(key) for key in self.logged} for entry in history if "loss" in entry]
        return checkpoint, {"log": log, "train_seconds": round(time.process_time() - began, 1)}

    def supervise(self, steps: int, seed: int, factor: int) -> tuple[Path, dict]:
        "As `train`, on those of the start's recorded episodes that passed: rejection sampling."
        out, began, log = self._run_folder(), time.process_time(), []
        stage = {"folder": str(out), "traces": [str(self.record("train"))], "steps": steps, "batch_size": 16, "seed": seed}
        stage = orjson.dumps(stage).decode()[:-1] + f', "learning_rate": {RATE * factor:.8f}}}'
        recipe = load_recipe("smollm2-sql", {"model": str(START), "warm_up": stage, "held_out_rows": "0", "bf16": "true"})
        warmed(recipe, log.append)
        return out, {"log": [{"step": entry["step"], "loss": entry["loss"]} for entry in log if "loss" in entry],
                     "train_seconds": round(time.process_time() - began, 1)}

    def kept(self, arm: str, seed: int, factor: int) -> Path:
        return self.folder / f"{arm.replace(' ', '-')}-{seed}-{factor}.json"

    def results(self) -> Path:
        return HERE / f"{self.name}.json"

    def collect(self, facts: dict) -> None:
        "Keep all runs that have ended, and the start's test episodes, at whose error turns they act."
        write_file(self.results(), orjson.dumps(facts | {"runs": [read(path) for path in sorted(self.folder.glob("*-*.json"))]}))
        shutil.copy(self.folder / "test.jsonl.gz", HERE / f"{self.name}.jsonl.gz")

    def unpack(self) -> None:
        "Runs and episodes that another checkout has kept, so that they are not made again."
        self.folder.mkdir(parents=True, exist_ok=True)
        for run in read(self.results())["runs"] if self.results().exists() else ():
            path = self.kept(run["arm"], run["seed"], run["factor"])
            path.with_suffix(".taken").touch()
            write_json(path, run)
        episodes = HERE / f"{self.name}.jsonl.gz"
        if episodes.exists() and not (self.folder / "test.jsonl.gz").exists():
            shutil.copy(episodes, self.folder / "test.jsonl.gz")


def make_start() -> None:
    "The third start, unless this checkout has it (19 CPU minutes)."
    if not START.exists():
        recipe = load_recipe("smollm2-sql", {"bf16": "true"})
        stage = recipe.arguments.warm_up | {"folder": str(START)}
        warmed(replace(recipe, arguments=replace(recipe.arguments, warm_up=stage)), lambda entry: print(entry, flush=True))


def main(pilot: Pilot, plan: Callable[[], Iterable], one_run: Callable[..., dict], tuned: Callable[[str], int], facts: dict):
    "Go on with a plan of runs, which are arm, seed, factor (None: what tuning says); several processes may share them."
    parser = argparse.ArgumentParser(description=f"Go on with the runs of the pilot {pilot.name}.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    parser.add_argument("--collect", action="store_true", help="write the results that there are and stop")
    asked = parser.parse_args()
    if asked.collect:
        return pilot.collect(facts)
    torch.set_num_threads(1)
    make_start()
    pilot.unpack()
    end = time.monotonic() + 60 * asked.minutes
    for arm, seed, factor in plan():
        if time.monotonic() > end:
            break
        factor = factor or tuned(arm)
        path = pilot.kept(arm, seed, factor)
        try:
            os.close(os.open(path.with_suffix(".taken"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        began = time.process_time()
        found = {"arm": arm, "seed": seed, "factor": factor} | one_run(arm, seed, factor)
        write_json(path, found | {"cpu_seconds": round(time.process_time() - began, 1)})
        print(path.name, read(path)["cpu_seconds"], flush=True)
