"""Spike 021, after its runs: is SDPO's end in the world `strong` that of too high a rate, of too many steps, or of its teacher?

    OMP_NUM_THREADS=1 .venv/bin/python spikes/021-order-and-sign/after.py --minutes 30 --workers 1

Asked when all runs had been seen, so it is described and changes no verdict: SDPO's rate was the lowest of the grid, and
its 100 steps were not tuned. On the development seeds `recorded exact` runs at three lower rates too, and is measured
after 10, 30 and 100 steps. The best of these by the mean of development tasks passed runs on seeds 40 to 49. Each run
also keeps how often the start is right at its own failed turns, plain and behind exact hints: what SDPO can reach there.
Runs are appended to `after.jsonl`.
"""
import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
from plan import DESCRIBED, HERE, TUNING, Clock, Run, Work, appended, reward_fingerprint

RATES, ENDS = (1.5625e-5, 3.125e-5, 6.25e-5, 1.25e-4), (10, 30, 100)


@dataclass(frozen=True)
class After(Run):
    "A run of `recorded exact` in `strong` that is measured on its way."

    ends: tuple[int, ...] = ENDS


def best(done: dict[str, dict]) -> tuple[float, int]:
    "Rate and steps that pass most development tasks."
    runs = [run for run in done.values() if run["seed"] in TUNING]
    mean = lambda rate, end: fmean(p for run in runs if run["rate"] == rate for p in run["passed"][str(end)])
    return max(((rate, end) for rate in RATES for end in ENDS), key=lambda of: mean(*of))


def plan(done: dict[str, dict]) -> Iterator[After | None]:
    tuning = [After("strong", "recorded exact", seed, rate) for rate in RATES for seed in TUNING]
    yield from tuning
    if all(run.name in done for run in tuning):
        rate, end = best(done)
        yield from (After("strong", "recorded exact", seed, rate, ends=(end,)) for seed in DESCRIBED)


class WorkAfter(Work):
    def made(self) -> dict:
        ends = self.run.ends
        model, passed, right = copy.deepcopy(self.start), {}, {}
        turns = self.failed_turns(self.run.split)
        for step in self.steps(model):
            if step in ends:
                found = self.measured(model)
                passed[str(step)], right[str(step)] = found["passed"], [int(x) for x in self.right(model, turns)]
            if step == ends[-1]:
                break
        at_start = {name: [int(x) for x in self.right(self.start, turns, name == "hinted")] for name in ("plain", "hinted")}
        return {"passed": passed, "start": found["start"], "right": right, "start_right": at_start}


def make(run: After) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    return asdict(run) | {"split": run.split, "fingerprint": reward_fingerprint("toy")} | WorkAfter(run, Clock("strong")).made()


if __name__ == "__main__":
    appended.command("021", HERE / "after.jsonl", plan, make)
