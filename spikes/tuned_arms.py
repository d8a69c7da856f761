"""What spikes over ten seeds share: the interval; in 105 and 106 each arm's learning rate is tuned, then every arm runs.

Resumable: the folder `runs` beside a ladder keeps what has ended and the last saved step of the rest."""
import gzip
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from composer_replication.experiments.schedule import Job, run_jobs
from composer_replication.experiments.setting import Setting

TUNING, SEEDS = (100, 101, 102), tuple(range(10))


def passed(points: list[dict]) -> float:
    "Mean held-out pass rate of some measurements."
    return fmean(p for point in points for p in point["passed"] if p is not None)


def area(curve: list[dict]) -> float:
    "Over the measurements after the first; of an arm without steps the first is all there is."
    return passed(curve[1:] or curve)


MEASURES = {"end": lambda curve: passed(curve[-1:]), "area": area, "plateau": lambda curve: passed(curve[-2:])}
T = 2.262  # 97.5 % point of Student's t with nine degrees of freedom: ten seeds


def interval(values: list[float]) -> tuple[float, float, float]:
    "Mean and 95 % t interval over ten seeds."
    mean, half = fmean(values), T * stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def played(settings: dict[str, Setting], seeds: tuple[int, ...], workers: int, out: Path) -> dict[str, dict]:
    "Arm -> seed -> result. Ends with exit code 1 where a run failed; the others are kept."
    jobs = {Job(setting, seed): (arm, seed) for seed in seeds for arm, setting in settings.items()}
    results, failed = {arm: {} for arm in settings}, []
    for outcome in run_jobs(jobs, out, workers):
        arm, seed = jobs[outcome.job]
        results[arm] |= {seed: outcome.result} if outcome.result else {}
        failed += [f"{arm}, seed {seed}: {outcome.problem}"] if outcome.problem else []
        ended = outcome.problem or f"{arm}, seed {seed}, {outcome.result.seconds:.0f} s"
        print(f"{sum(map(len, results.values()))} of {len(jobs)}: {ended}", flush=True)
    if failed:
        sys.exit("\n".join(failed))
    return results


def tuned(settings: dict[str, Setting], rates: tuple[float, ...], workers: int, out: Path) -> dict[str, dict[str, float]]:
    "Arm -> learning rate -> mean area on development tasks."
    grid = {f"{arm} {rate}": replace(setting, learning_rate=rate, held_out_split="dev")
            for arm, setting in settings.items() for rate in rates}
    results = played(grid, TUNING, workers, out)
    return {arm: {str(rate): fmean(area(r.curve) for r in results[f"{arm} {rate}"].values()) for rate in rates}
            for arm in settings}


def climb(
    settings: dict[str, Setting],
    rates: tuple[float, ...],  # tried for each arm that is trained; of equal ones the first is taken
    folder: Path,  # of the spike
    workers: int,
    tuned_as: Mapping[str, str] = {},  # arms that take the rate of another one
) -> None:
    "Tune, run every arm, and write `runs.json.gz`."
    out = folder / "runs"
    areas = tuned({arm: s for arm, s in settings.items() if s.steps and arm not in tuned_as}, rates, workers, out)
    chosen = {arm: float(max(by, key=by.get)) for arm, by in areas.items()}
    settings = {arm: replace(s, learning_rate=chosen[tuned_as.get(arm, arm)]) if s.steps else s for arm, s in settings.items()}
    results = played(settings, SEEDS, workers, out)
    kept = {"tuning": areas, "chosen": chosen,
            "runs": [{"arm": arm, **asdict(r)} for arm, of in results.items() for r in of.values()]}
    (folder / "runs.json.gz").write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


def student(
    degrees: int,  # of freedom: seeds less one
    level: float = 0.95,  # of the interval; one of several comparisons: 1 - 0.05 / their number (Bonferroni)
) -> float:
    "Return the two-sided point of Student's t, by integrating its density."
    angle = np.linspace(0, np.pi / 2, 1_000_001)  # t is sqrt(degrees) * tan(angle); the density over angles is cos^(degrees - 1)
    shares = np.cumsum(np.cos(angle) ** (degrees - 1))
    return float(degrees**0.5 * np.tan(angle[np.searchsorted(shares / shares[-1], level)]))
