"""The ladder of spike 106: `python ladder.py` tunes each arm's learning rate, runs every arm, and writes `runs.json.gz`.

    python ladder.py               tune and run the four arms of the primary contrasts
    python ladder.py --all         the controls, too
    python ladder.py --trials      the development runs that led to this setting, into `development.json`

Resumable: the folder `runs` keeps what has ended and the last saved step of the rest. `tar xzf runs.tar.gz` puts back the results
of all runs, so that only what is new is played."""
import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from composer_replication.experiments.setting import Setting

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from tuned_arms import TUNING, climb, passed, played  # noqa: E402

# NARROW is the base of spike 105.
NARROW = Setting(habit="teams", turns=3, hints="exact", steps=30, measure_every=5, tasks=4, rollouts=8, held_out=64)
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
        curve = [[point["step"], passed([point])] for point in by_seed[TUNING[0]].curve]
        rows.append({"name": name, "seed": TUNING[0], "curve": curve})
    (HERE / "development.json").write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--workers", type=int, default=2)
    given.add_argument("--all", action="store_true")
    given.add_argument("--trials", action="store_true")
    given = given.parse_args()
    if given.trials:
        return try_out(given.workers)
    climb(ARMS if given.all else PRIMARY, RATES, HERE, given.workers)


if __name__ == "__main__":
    main()
