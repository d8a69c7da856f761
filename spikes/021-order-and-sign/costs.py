"""Measure what each part of spike 021's arms costs, in steps of `recorded exact`, and write `costs.json`.

    OMP_NUM_THREADS=1 .venv/bin/python spikes/021-order-and-sign/costs.py

CPU seconds depend on what else the machine does (the same seconds bought 43 to 108 steps here), their ratios hardly:
the parts take turns, three rounds, and the median of each counts.
"""
import json
import time
from statistics import median

import plan
import torch

ROUNDS = 3
MOST = {"recorded exact": 8, "contrastive": 8, "order": 21, "policy": 4, "joint, gated": 4, "size only": 4}  # payments of a round


class Watch:
    "A clock that keeps the CPU seconds before each payment, and ends after so many."

    def __init__(self, most: int):
        self.most, self.seconds, self.last, self.spent = most, [], time.process_time(), 0.0

    def pay(self, part: str) -> None:
        self.seconds.append((part, time.process_time() - self.last))
        self.last = time.process_time()

    @property
    def over(self) -> bool:
        return len(self.seconds) >= self.most


def main() -> None:
    torch.set_num_threads(1)
    plan.LEAST_SHARE = 2.0  # `order` only looks
    prices, raw = {}, {}
    for world in plan.WORLDS:
        seconds = {}
        for turn in range(ROUNDS):
            for arm, most in MOST.items():
                watch = Watch(most)
                work = plan.Work(plan.Run(world, arm, plan.TUNING[0], 5e-4, 5e-4), watch)
                watch.last = time.process_time()
                {"order": work.order}.get(arm, work.recorded if arm in ("recorded exact", "contrastive") else work.live)()
                kept = watch.seconds if arm == "order" else watch.seconds[1:]  # the first one of the others loads code, or plays
                for part, took in watch.seconds[:1] if arm == "recorded exact" and turn else ():
                    seconds.setdefault(part, []).append(took)
                for part, took in kept:
                    if arm != "order" or "look" in part:
                        seconds.setdefault(part, []).append(took)
        raw[world] = {part: [round(s, 3) for s in of] for part, of in seconds.items()}
        prices[world] = {part: round(median(of) / median(seconds["recorded exact"]), 3) for part, of in seconds.items()}
        print(world, prices[world], flush=True)
    (plan.HERE / "costs.json").write_text(json.dumps(prices | {"seconds": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
