"""The ladder of spike 105: `python run.py` tunes each arm's learning rate, runs every arm, and writes `runs.json.gz`.

Resumable: the folder `runs` keeps what has ended and the last saved step of the rest."""
import argparse
import gzip
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from composer_replication.experiments.schedule import Job, run_jobs
from composer_replication.experiments.setting import Setting

HERE = Path(__file__).parent
BASE = Setting(habit="teams", turns=3, hints="exact", steps=30, measure_every=5, tasks=4, rollouts=8, held_out=64)
SDPO, REPLAY = {"alpha_sdpo": 0.1}, {"beta_replay": 0.01, "replay_dpo_beta": 0.5}
PRIMARY = {
    "A0": replace(BASE, steps=0, hints="template"),
    "A1": replace(BASE, hints="template"),
    "A2": replace(BASE, **SDPO),
    "A2 filler": replace(BASE, **SDPO, hints="filler")}
ARMS = PRIMARY | {
    "A2 other": replace(BASE, **SDPO, hints="other"),
    "A2 wrong": replace(BASE, **SDPO, hints="wrong"),
    "A2 empty (no-hint EMA)": replace(BASE, **SDPO, hints="empty"),
    "A2 forward KL": replace(BASE, **SDPO, sdpo_beta=0.0),
    "A2 JSD": replace(BASE, **SDPO, sdpo_beta=0.5),
    "A2 filler, forward KL": replace(BASE, **SDPO, hints="filler", sdpo_beta=0.0),
    "A1 wall time of A2": replace(BASE, hints="template", steps=40),
    "A3": replace(BASE, **REPLAY, hints="template"),
    "A3 shuffled": replace(BASE, **REPLAY, hints="template", teachers="shuffled"),
    "A3r": replace(BASE, **REPLAY, hints="template", teachers="recovery"),
    "A4": replace(BASE, **SDPO, **REPLAY),
    "A5": replace(BASE, **SDPO, sdpo_steps=10, policy_start=10),
    "A6": replace(BASE, **SDPO, all_fail="distil"),
    "B1": replace(BASE, hints="template", imitate=True)}
RATES, TUNING, SEEDS = (3e-4, 1e-3, 3e-3), (100, 101, 102), tuple(range(10))
TUNED_AS = {"A1 wall time of A2": "A1"}  # every other arm that is trained is tuned on its own


def area(curve: list[dict]) -> float:
    "Mean held-out pass rate over the measurements after the first; of an arm without steps the first is all there is."
    return fmean(p for point in curve[1:] or curve for p in point["passed"] if p is not None)


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


def tuned(settings: dict[str, Setting], workers: int, out: Path, rates: tuple[float, ...] = RATES) -> dict[str, dict[str, float]]:
    "Arm -> learning rate -> mean area on development tasks; of equal ones the smaller rate is taken."
    grid = {f"{arm} {rate}": replace(setting, learning_rate=rate, held_out_split="dev") for arm, setting in settings.items()
            if setting.steps and arm not in TUNED_AS for rate in rates}
    results = played(grid, TUNING, workers, out)
    return {arm: {str(rate): fmean(area(r.curve) for r in results[f"{arm} {rate}"].values()) for rate in rates}
            for arm in settings if f"{arm} {rates[0]}" in results}


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--workers", type=int, default=2)
    given.add_argument("--primary", action="store_true", help="only A0, A1, A2 and A2 with filler hints")
    given = given.parse_args()
    settings, out = PRIMARY if given.primary else ARMS, HERE / "runs"
    areas = tuned(settings, given.workers, out)
    chosen = {arm: float(max(by, key=by.get)) for arm, by in areas.items()}
    settings = {arm: replace(s, learning_rate=chosen[TUNED_AS.get(arm, arm)]) if s.steps else s for arm, s in settings.items()}
    results = played(settings, SEEDS, given.workers, out)
    kept = {"tuning": areas, "chosen": chosen,
            "runs": [{"arm": arm, **asdict(r)} for arm, of in results.items() for r in of.values()]}
    (HERE / "runs.json.gz").write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


if __name__ == "__main__":
    main()
