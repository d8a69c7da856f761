"""The ladder of spike 106: `python ladder.py` tunes each arm's learning rate, runs every arm, and writes `runs.json.gz`.

    python ladder.py               tune and run the four arms of the primary contrasts
    python ladder.py --all         the controls, too
    python ladder.py --trials      the development runs that led to this setting, into `development.json`

Resumable: the folder `runs` keeps what has ended and the last saved step of the rest."""
import argparse
import gzip
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "105-hint-ladder"))
from run import BASE as NARROW  # noqa: E402
from run import SEEDS, TUNING, played, tuned  # noqa: E402

BASE = replace(NARROW, tasks=16, rollouts=4, held_out_series="wide")
SDPO = {"alpha_sdpo": 10.0, "sdpo_beta": 0.0}  # forward KL
PRIMARY = {
    "A0": replace(BASE, steps=0, hints="template"),
    "A1": replace(BASE, hints="template"),
    "A2": replace(BASE, **SDPO),
    "A2 filler": replace(BASE, **SDPO, hints="filler")}
ARMS = PRIMARY | {
    "A2 other": replace(BASE, **SDPO, hints="other"),
    "A2 wrong": replace(BASE, **SDPO, hints="wrong"),
    "A2 reverse KL": replace(BASE, alpha_sdpo=10.0),
    "B1": replace(BASE, hints="template", imitate=True)}
RATES = 1e-4, 3e-4, 1e-3

DEV = replace(NARROW, held_out_split="dev")  # the trials, seed 100: what moves an arm at all
NEAR = replace(DEV, alpha_sdpo=1.0, sdpo_beta=0.0, learning_rate=1e-3)
WIDE = replace(NEAR, alpha_sdpo=10.0, tasks=16, rollouts=4)
TRIALS = {
    "exact, alpha 1, 1e-3": NEAR,
    "filler, alpha 1, 1e-3": replace(NEAR, hints="filler"),
    "exact, reverse KL, alpha 1, 1e-3": replace(NEAR, sdpo_beta=1.0),
    "exact, alpha 10, 1e-3": replace(NEAR, alpha_sdpo=10.0),
    "exact, alpha 1, 3e-3": replace(NEAR, learning_rate=3e-3),
    "exact, alpha 10, 1e-3, 16 tasks of 4, 60 steps": replace(WIDE, steps=60),
    "exact, alpha 10, 3e-3, 16 tasks of 4": replace(WIDE, learning_rate=3e-3),
    "filler, alpha 10, 1e-3, 16 tasks of 4": replace(WIDE, hints="filler"),
    "policy only, 1e-3, 16 tasks of 4, 60 steps": replace(WIDE, alpha_sdpo=0.0, hints="template", steps=60)}


def try_out(workers: int) -> None:
    "Write the curve of each trial."
    rows = []
    for name, by_seed in played(TRIALS, TUNING[:1], workers, HERE / "runs").items():
        curve = [[point["step"], fmean(p for p in point["passed"] if p is not None)] for point in by_seed[TUNING[0]].curve]
        rows.append({"name": name, "seed": TUNING[0], "curve": curve, "setting": asdict(TRIALS[name])})
    (HERE / "development.json").write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--workers", type=int, default=2)
    given.add_argument("--all", action="store_true")
    given.add_argument("--trials", action="store_true")
    given = given.parse_args()
    if given.trials:
        return try_out(given.workers)
    settings, out = ARMS if given.all else PRIMARY, HERE / "runs"
    areas = tuned(settings, given.workers, out, RATES)
    chosen = {arm: float(max(by, key=by.get)) for arm, by in areas.items()}
    settings = {arm: replace(s, learning_rate=chosen[arm]) if s.steps else s for arm, s in settings.items()}
    results = played(settings, SEEDS, given.workers, out)
    kept = {"tuning": areas, "chosen": chosen,
            "runs": [{"arm": arm, **asdict(r)} for arm, of in results.items() for r in of.values()]}
    (HERE / "runs.json.gz").write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


if __name__ == "__main__":
    main()
