"""Measure what a step of the policy objective and the playing cost, in steps of `sdpo`, and write `costs.json`.

    OMP_NUM_THREADS=1 .venv/bin/python spikes/017-sdpo-alone/costs.py

CPU seconds depend on what else the machine does, their ratios hardly: the two trainings take turns, and the median counts.
The recorded episodes of the development seed are played before the first round, and are kept for its runs.
"""
import json
from itertools import pairwise
from statistics import median

import plan
import torch

ROUNDS, MOST = 2, 3  # steps of a round; the first one loads code


def main() -> None:
    torch.set_num_threads(1)
    seconds = {"sdpo": [], "policy": []}
    for _ in range(ROUNDS):
        for arm, of in seconds.items():
            work = plan.Work(plan.Run(arm, plan.TUNING[0], plan.RATES[2]))
            at = (work.sdpo if arm == "sdpo" else work.policy)(MOST)["cpu_at"]
            of += [round(after - before, 1) for before, after in pairwise(at[step] for step in sorted(at, key=int))]
            print(arm, of, flush=True)
    step, playing = median(seconds["sdpo"]), work.recorded()[1]
    prices = {"policy": round(median(seconds["policy"]) / step, 3), "playing": round(playing / step, 3)}
    kept = prices | {"seconds": seconds | {"playing": round(playing, 1)}}
    (plan.HERE / "costs.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
