"""SDPO first: the third start learns by channel 2, then by the policy objective, against the policy objective alone.

    .venv/bin/python spikes/004-real/first.py --minutes 60

goes on with the runs of `plan`, in its order; each one that ends is a file of `made/first`. Every run is the recipe
`smollm2-sql` on its own training tasks. The notebook states the thresholds and reads first.json.
"""
import numpy as np
from pilot import FACTORS, HINTS, RATE, SEEDS, START, TUNING, Pilot, main, read

STEPS = 12
DISTIL = {"alpha_sdpo": "1.0"}
FIRST = DISTIL | {"sdpo_steps": str(STEPS // 2), "policy_start": str(STEPS // 2)}
ARMS = {"A1": {"alpha_sdpo": "0.0"}, "A5": FIRST, "A5 filler": FIRST | {"hints": f"[{', '.join(HINTS['filler'])}]"}, "A2": DISTIL}
TUNED = ("A1", "B1")
LOGGED = ("step", "reward", "frac_reward_zero_std", "num_tokens", "sdpo/loss", "sdpo/sites", "grad_norm")
PILOT = Pilot("first", "spike-004-real-first", LOGGED, train_tasks=96)


def one_run(arm: str, seed: int, factor: int) -> dict:
    "Train, and measure: on development tasks new episodes alone."
    split, checkpoint, found = "development" if seed == TUNING else "test", START, {}
    if arm == "B1":
        checkpoint, found = PILOT.supervise(STEPS, seed, factor)
    elif arm != "start":
        checkpoint, found = PILOT.train(ARMS[arm] | {"max_steps": str(STEPS), "save_steps": str(STEPS)}, seed, factor)
    if split == "development":
        return found | {"rewards": PILOT.rewards(checkpoint, split)}
    return found | PILOT.measure(checkpoint, split)


def tuned(arm: str) -> int:
    "The factor with most passes of development tasks, for the arms without SDPO; for the others that of channel 2 alone."
    if arm not in TUNED:
        return 3
    passes = {n: np.mean(read(PILOT.kept(arm, TUNING, n))["rewards"]) for n in FACTORS}
    return max(FACTORS, key=lambda factor: (passes[factor], -factor))


def plan():
    yield "start", 0, 1
    yield from (("A1", TUNING, factor) for factor in FACTORS)
    yield from ((arm, seed, None) for seed in SEEDS for arm in ("A5", "A5 filler", "A1"))
    yield from (("B1", TUNING, factor) for factor in FACTORS)
    yield from ((arm, seed, None) for seed in SEEDS for arm in ("B1", "A2"))


if __name__ == "__main__":
    main(PILOT, plan, one_run, tuned, {"steps": STEPS, "rate": RATE})
