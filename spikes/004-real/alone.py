"""Channel 2 alone: the third start learns from its own recorded episodes by each kind of hint, and acts without hints.

    .venv/bin/python spikes/004-real/alone.py --minutes 60

goes on with the runs of `plan`, in its order; each one that ends is a file of `made/alone`. Every run is the recipe
`smollm2-sql` with recorded traces in the place of a task. The notebook states the thresholds and reads alone.json.
"""
import numpy as np
from pilot import FACTORS, HINTS, RATE, SEEDS, START, TUNING, Pilot, main, read

STEPS = 10
PILOT = Pilot("alone", "spike-004-real-alone", ("step", "sdpo/loss", "sdpo/gap", "sdpo/sites", "sdpo/excluded", "grad_norm"))


def one_run(hints: str, seed: int, factor: int) -> dict:
    "Train on recorded episodes, and measure: on development tasks their error turns alone."
    split, checkpoint, found = "development" if seed == TUNING else "test", START, {}
    if hints != "start":
        checkpoint, found = PILOT.train({
            "task": "null", "tasks": "null", "traces": f"[{PILOT.record('train')}]", "hints": f"[{', '.join(HINTS[hints])}]",
            "alpha_sdpo": "1.0", "replay_batch_size": "2", "max_steps": str(STEPS), "save_steps": str(STEPS)}, seed, factor)
    return found | PILOT.measure(checkpoint, split, play=split == "test")


def tuned(hints: str) -> int:
    "The factor with most right actions at development error turns; the filler has its own, the rest one."
    by = hints if hints == "filler" else "own"
    rights = {n: np.mean([row["none"] for row in read(PILOT.kept(by, TUNING, n))["sites"]]) for n in FACTORS}
    return max(FACTORS, key=lambda factor: (rights[factor], -factor))


def plan():
    yield from (("start", seed, 1) for seed in (TUNING, 0))
    yield from ((hints, TUNING, factor) for hints in ("own", "filler") for factor in FACTORS)
    yield from ((hints, seed, None) for seed in SEEDS for hints in ("own", "filler"))
    yield from ((hints, seed, None) for seed in SEEDS for hints in HINTS if hints not in ("own", "filler"))


if __name__ == "__main__":
    main(PILOT, plan, one_run, tuned, {"steps": STEPS, "rate": RATE})
