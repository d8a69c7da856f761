"""Stage c: a recipe with and without channel 2, several seeds, run after run until the time is over; the next call goes on.

The recipe is `smollm2-sql` where it is shipped and SmolLM2 is at hand (--model FOLDER, or `composer-rl models get smollm2`),
else `toy`.
"""
import math
import time
import warnings

from common import Stage

ARMS = {"policy": {"alpha_sdpo": 0.0, "beta_replay": 0.0}, "sdpo": {"alpha_sdpo": 1.0, "beta_replay": 0.0},
        "sdpo, filler hint": {"alpha_sdpo": 1.0, "beta_replay": 0.0, "hints": "[stage_c:filler]"}}
SEEDS, LEAST = range(5), 3  # seeds wanted, and seeds without which no interval is stated
LONG = {"smollm2-sql": {"held_out_rows": 32}, "toy": {"max_steps": 60, "train_rows": 64, "held_out_rows": 64}}
SHORT = {"max_steps": 1, "train_rows": 4, "held_out_rows": 2, "max_turns": 2, "max_turn_tokens": 32, "max_completion_length": 96,
         "gradient_accumulation_steps": 1}


class filler:
    "A hint layer without content, the control of every gain."

    name = "filler"

    def generate(self, error_kind, error_meta):
        return "The weather was fine that morning, and a light wind came from the sea."


def recipe_name(stage: Stage) -> tuple[str, str | None, str | None]:
    "Recipe, its model where another than the recipe's, and why it is not the ladder of SmolLM2."
    from composer_replication.recipes.models import fetched_model
    from composer_replication.recipes.recipe_file import shipped_recipes
    if "smollm2-sql" not in shipped_recipes():
        return "toy", None, "no recipe smollm2-sql is shipped"
    model = stage.given.model or fetched_model("smollm2")
    if stage.tiny or not model:
        return "toy", None, "tiny" if stage.tiny else "SmolLM2 is not here; give --model FOLDER"
    return "smollm2-sql", str(model), None


def run(stage: Stage, name: str, model: str | None, arm: str, seed: int) -> dict:
    "One run: its last held-out score and reward, and seconds."
    from composer_replication.recipes.recipe import load_recipe
    from composer_replication.recipes.run import run_recipe
    folder = stage.out / "work" / name / f"{arm}-{seed}"
    values = ARMS[arm] | (SHORT if stage.tiny else LONG[name]) | {"seed": seed, "output_dir": folder, "save_strategy": "no"}
    values |= {"use_cpu": "true", "bf16": "false"} if stage.tiny else {"use_cpu": "false", "bf16": "true"}
    values |= {"model": model} if model else {}
    steps = values.get("max_steps") or load_recipe(name, estimating=True).config.max_steps
    values |= {"guard_steps": steps, "guard_settings": "{min_steps: 1000000}"}  # one reading, at the end
    begun = time.monotonic()
    done = run_recipe(load_recipe(name, {key: str(value) for key, value in values.items()}))
    keys = {"held_out": "guard/held_out_score", "reward": "reward", "loss": "loss"}
    found = {name: done.metrics.get(key) for name, key in keys.items()}
    return found | {"steps": done.step, "of": done.of, "seconds": round(time.monotonic() - begun, 1)}


def difference(runs: dict, arm: str, base: str) -> dict | None:
    "Held-out score of an arm against another, paired by seed; None below the least number of seeds."
    from composer_replication.experiments.statistics import paired_bootstrap
    scores = {key: row["held_out"] for key, row in runs.items() if row.get("held_out") is not None}
    seeds = [seed for seed in SEEDS if f"{arm}/{seed}" in scores and f"{base}/{seed}" in scores]
    if len(seeds) < LEAST:
        return None
    made = paired_bootstrap([[scores[f"{arm}/{s}"]] for s in seeds], [[scores[f"{base}/{s}"]] for s in seeds])
    return {"estimate": made.estimate, "low": made.low, "high": made.high, "seeds": len(seeds)}


def judged(runs: dict) -> tuple[dict[str, bool], dict]:
    "Every run ended, and SDPO above the policy alone and above its control."
    checks = {f"{key}: ended": row["steps"] == row["of"] and math.isfinite(row["loss"]) for key, row in runs.items()}
    found = {f"sdpo - {base}": difference(runs, "sdpo", base) for base in ("policy", "sdpo, filler hint")}
    return checks | {name: gain["low"] > 0 for name, gain in found.items() if gain}, found


def main() -> None:
    stage = Stage("c", __doc__)
    stage.check()
    warnings.simplefilter("ignore", FutureWarning)
    name, model, why = recipe_name(stage)
    earlier = stage.earlier()
    runs = earlier.get("runs", {}) if earlier.get("recipe") == name else {}
    for seed in SEEDS if not stage.tiny else [0]:
        for arm in ARMS:
            if f"{arm}/{seed}" in runs or not stage.fits():
                continue
            begun = time.monotonic()
            runs[f"{arm}/{seed}"] = run(stage, name, model, arm, seed)
            stage.took(begun)
            checks, gains = judged(runs)
            stage.write(checks, {"recipe": name, "why": why, "runs": runs, "differences": gains})
    checks, gains = judged(runs)
    whole = len(runs) == len(ARMS) * (1 if stage.tiny else len(SEEDS))
    stage.write(checks | {"every seed ran": whole}, {"recipe": name, "why": why, "runs": runs, "differences": gains})


if __name__ == "__main__":
    main()
