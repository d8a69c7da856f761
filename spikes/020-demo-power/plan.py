"""Spike 020: the demo's setting and its power. Go on with the plan's runs.

    OMP_NUM_THREADS=1 .venv/bin/python spikes/020-demo-power/plan.py --minutes 30

A run is one demo: both trainings on the same episodes. It is appended to `runs.jsonl` as it ends; a killed one is made again.
020-demo-power.ipynb states the rule and the threshold; they were committed before any run.
"""
import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from composer_replication.experiments.demo import DemoSetting, demo_experiment

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from appended import go_on  # noqa: E402
from fingerprint import reward_fingerprint  # noqa: E402

SETTINGS = (  # from the cheapest
    DemoSetting(episodes=128, steps=40, trees=8, rate=1e-3),
    DemoSetting(episodes=128, steps=60, trees=8, rate=5e-4),
    DemoSetting(episodes=192, steps=60, trees=8, rate=5e-4),
    DemoSetting(episodes=192, steps=60, trees=16, rate=5e-4),
)
CHOOSING, SEEDS = (900, 901, 902), tuple(range(20))
LEAST = 0.2  # by which the hint is above the filler in both figures, at each of `CHOOSING`: the first such setting is taken


@dataclass(frozen=True)
class Run:
    "One demo."

    setting: DemoSetting
    seed: int

    @property
    def split(self) -> str:
        return "dev" if self.seed in CHOOSING else "test"

    @property
    def name(self) -> str:
        s = self.setting
        return f"{s.episodes}-{s.steps}-{s.trees}-{s.rate:.0e}-{self.seed}"


def above(run: dict) -> dict[str, float]:
    "By how much the hint is above the filler, of each figure."
    return {figure: fmean(run["arms"]["exact"][figure]) - fmean(run["arms"]["filler"][figure]) for figure in ("right", "passed")}


def plan(done: dict[str, dict]) -> Iterator[Run | None]:
    "The development runs of a setting, then of the next where it is not taken; then the seeds."
    for setting in SETTINGS:
        runs = [Run(setting, seed) for seed in CHOOSING]
        yield from runs
        if any(run.name not in done for run in runs):
            yield None
            return
        if all(min(above(done[run.name]).values()) >= LEAST for run in runs):
            yield from (Run(setting, seed) for seed in SEEDS)
            return


def make(run: Run) -> dict:
    "One demo in this process."
    torch.set_num_threads(1)
    began = time.process_time()
    found = demo_experiment(run.setting, run.seed, run.split)
    return {"setting": asdict(run.setting), "seed": run.seed, "split": run.split, "fingerprint": reward_fingerprint("toy"),
            "cpu_seconds": round(time.process_time() - began, 1),
            "arms": {arm: asdict(scores) for arm, scores in found.arms.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Go on with the runs of spike 020.")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins after so many")
    parser.add_argument("--kept", type=Path, default=HERE / "runs.jsonl", help="where runs are kept; another file makes all anew")
    asked = parser.parse_args()
    go_on(asked.kept, plan, make, asked.minutes, asked.workers)


if __name__ == "__main__":
    main()
