"""The ladder of spike 105: `python run.py` tunes each arm's learning rate, runs every arm, and writes `runs.json.gz`.

Resumable: the folder `runs` keeps what has ended and the last saved step of the rest."""
import argparse
import sys
from dataclasses import replace
from pathlib import Path

from composer_replication.experiments.setting import Setting

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from tuned_arms import climb  # noqa: E402

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
RATES = 3e-4, 1e-3, 3e-3
TUNED_AS = {"A1 wall time of A2": "A1"}  # every other arm that is trained is tuned on its own


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--workers", type=int, default=2)
    given.add_argument("--primary", action="store_true", help="only A0, A1, A2 and A2 with filler hints")
    given = given.parse_args()
    climb(PRIMARY if given.primary else ARMS, RATES, HERE, given.workers, TUNED_AS)


if __name__ == "__main__":
    main()
