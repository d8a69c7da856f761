"""Stage c: a recipe with and without channel 2, several seeds, several runs at once until the time is over; a next call goes on.

The recipe is `smollm2-sql` where SmolLM2 is at hand (--model FOLDER, or `composer-rl models get smollm2`), else `toy`. A run of
`smollm2-sql` is measured on test tasks that nothing else has used.
"""
import math
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from common import Stage

SDPO = {"alpha_sdpo": 1.0, "beta_replay": 0.0}
ARMS = {"policy": SDPO | {"alpha_sdpo": 0.0}, "sdpo": SDPO, "sdpo, filler hint": SDPO | {"hints": "[stage_c:filler]"}}
SEEDS, LEAST = range(5), 3  # seeds wanted, and seeds without which no interval is stated
STEPS, TASKS, SAMPLES = 12, 64, 2  # of `smollm2-sql`: steps of 16 episodes, test tasks, episodes of each
LONG = {"smollm2-sql": {"max_steps": STEPS, "save_steps": STEPS, "held_out_rows": 0, "bf16": "true"},
        "toy": {"max_steps": 60, "train_rows": 64, "held_out_rows": 64}}
SHORT = {"max_steps": 1, "train_rows": 4, "held_out_rows": 2, "max_turns": 2, "max_turn_tokens": 32, "max_completion_length": 96,
         "gradient_accumulation_steps": 1}
# that spike 004-real chose on development tasks: the policy's by passes, SDPO's by right actions of channel 2 alone
RATES = {"smollm2-sql": {"policy": 5e-5, "sdpo": 1.5e-5, "sdpo, filler hint": 1.5e-5}}


class filler:
    "A hint layer without content, the control of every gain."

    name = "filler"

    def generate(self, error_kind, error_meta):
        return "The weather was fine that morning, and a light wind came from the sea."


def recipe_name(stage: Stage) -> tuple[str, str | None, str | None]:
    "Recipe, its model where another than the recipe's, and why it is not the ladder of SmolLM2."
    from composer_replication.recipes.models import fetched_model
    model = stage.given.model or fetched_model("smollm2")
    if stage.tiny or not model:
        return "toy", None, "tiny" if stage.tiny else "SmolLM2 is not here; give --model FOLDER"
    return "smollm2-sql", str(model), None


def settings(name: str, tiny: bool) -> dict:
    "What every arm has in common."
    return (SHORT | {"use_cpu": "true", "bf16": "false"} if tiny else LONG[name] | {"use_cpu": "false"}) | {"report_to": "none"}


def begin(stage: Stage, name: str, model: str | None) -> str | None:
    "The weights that all runs begin at: the recipe's warm-up, made once."
    from composer_replication.recipes.recipe import load_recipe
    from composer_replication.recipes.run import warmed
    if model is None:
        return None
    out = {"model": model, "output_dir": stage.out / "work" / name}
    recipe = load_recipe(name, {key: str(value) for key, value in (settings(name, stage.tiny) | out).items()})
    recipe.arguments.warm_up["folder"] = str(stage.out / "work" / "start")
    return warmed(recipe).arguments.model


def run(out: Path, tiny: bool, name: str, start: str | None, arm: str, seed: int) -> dict:
    "One run, in a process of its own: its score and reward, and seconds."
    import torch

    from composer_replication.recipes.recipe import load_recipe
    from composer_replication.recipes.run import run_recipe
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    folder = out / "work" / name / f"{arm}-{seed}"
    values = settings(name, tiny) | ARMS[arm] | {"seed": seed, "output_dir": folder}
    values |= {"learning_rate": RATES[name][arm]} if name in RATES else {}
    values |= {"model": start, "warm_up": "null", "resume": "true"} if start else {"save_strategy": "no"}
    steps = values.get("max_steps") or load_recipe(name, estimating=True).config.max_steps
    if not start:
        values |= {"guard_steps": steps, "guard_settings": "{min_steps: 1000000}"}  # one reading, at the end
    begun = time.monotonic()
    done = run_recipe(load_recipe(name, {key: str(value) for key, value in values.items()}))
    found = {"reward": done.metrics.get("reward"), "loss": done.metrics.get("loss"), "steps": done.step, "of": done.of}
    trained = round(time.monotonic() - begun, 1)
    rewards = test_rewards(done.checkpoint) if start else None
    score = sum(map(sum, rewards)) / sum(map(len, rewards)) if rewards else done.metrics.get("guard/held_out_score")
    found |= {"held_out": score, "rewards": rewards, "train_seconds": trained}
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def test_rewards(checkpoint) -> list[list[float]]:
    "Of episodes on test tasks, (tasks, samples)."
    from composer_replication.envs.sql.env import SqlEnv
    from composer_replication.envs.sql.tasks import sql_rows
    from composer_replication.experiments.pass_at_k import EvalTasks, play_samples
    from composer_replication.recipes.checkpoint import load_checkpoint
    from composer_replication.rollout.policies import TransformersPolicy
    from composer_replication.rollout.types import RolloutConfig
    loaded, rows = load_checkpoint(str(checkpoint)), sql_rows(TASKS, "spike-200", "test", ("easy", "medium"))
    limits = RolloutConfig(max_turns=6, max_tokens=384, max_turn_tokens=64, seed=0)
    policy = TransformersPolicy(loaded.model, loaded.tokenizer)
    played = play_samples(policy, EvalTasks("sql", SqlEnv, rows), SAMPLES, limits)
    return [[rollout.reward or 0.0 for rollout in row] for row in played]


def together(stage: Stage, left: list[tuple[str, int]], processes: int, arguments: tuple, ended) -> None:
    "Runs in processes beside one another; at the end of the stage's time those that have not ended are killed."
    pool, running, left = ProcessPoolExecutor(processes, get_context("spawn")), {}, list(left)
    try:
        while running or left:
            while left and len(running) < processes and stage.fits():
                arm, seed = left.pop(0)
                running[pool.submit(run, *arguments, arm, seed)] = arm, seed, time.monotonic()
            done, _ = wait(running, max(0.0, stage.given.seconds - stage.seconds()), FIRST_COMPLETED)
            if not done:
                return
            for future in done:
                arm, seed, begun = running.pop(future)
                stage.took(begun)
                failed = future.exception()  # of one run: the others go on
                ended(f"{arm}/{seed}", {"reason": f"{type(failed).__name__}: {failed}"} if failed else future.result())
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)


def difference(runs: dict, arm: str, base: str) -> dict | None:
    "Held-out score of an arm against another, paired by seed and, where it has them, task; None below the least number of seeds."
    from composer_replication.experiments.statistics import paired_bootstrap
    scores = {key: by_task(row) for key, row in runs.items() if row.get("held_out") is not None}
    seeds = [seed for seed in SEEDS if f"{arm}/{seed}" in scores and f"{base}/{seed}" in scores]
    if len(seeds) < LEAST:
        return None
    made = paired_bootstrap([scores[f"{arm}/{s}"] for s in seeds], [scores[f"{base}/{s}"] for s in seeds])
    return {"estimate": made.estimate, "low": made.low, "high": made.high, "seeds": len(seeds)}


def by_task(row: dict) -> list[float]:
    "Score of each test task; of the toy world the whole."
    return [sum(each) / len(each) for each in row["rewards"]] if row.get("rewards") else [row["held_out"]]


def judged(runs: dict) -> tuple[dict[str, bool], dict]:
    "Every run ended, and SDPO above the policy alone and above its control."
    whole = lambda row: "reason" not in row and row["steps"] == row["of"] and math.isfinite(row["loss"])
    checks = {f"{key}: ended": whole(row) for key, row in runs.items()}
    found = {f"sdpo - {base}": difference(runs, "sdpo", base) for base in ("policy", "sdpo, filler hint")}
    return checks | {name: gain["low"] > 0 for name, gain in found.items() if gain}, found


def main() -> None:
    stage = Stage("c", __doc__)
    stage.check()
    warnings.simplefilter("ignore", FutureWarning)
    name, model, why = recipe_name(stage)
    earlier = stage.earlier()
    runs = earlier.get("runs", {}) if earlier.get("recipe") == name else {}
    seeds, about = [0] if stage.tiny else SEEDS, {"recipe": name, "why": why, "together": stage.given.together}

    def tell(whole: dict[str, bool]) -> None:
        checks, gains = judged(runs)
        stage.write(checks | whole, about | {"runs": runs, "differences": gains})

    def ended(key: str, row: dict) -> None:
        runs[key] = row
        tell({})

    left = [(arm, seed) for seed in seeds for arm in ARMS if "reason" in runs.get(f"{arm}/{seed}", {"reason": None})]
    start = begin(stage, name, model) if left else None
    about |= {"begun_seconds": round(stage.seconds(), 1)}
    together(stage, left, stage.given.together, (stage.out, stage.tiny, name, start), ended)
    tell({"every seed ran": sum("reason" not in row for row in runs.values()) == len(ARMS) * len(seeds)})


if __name__ == "__main__":
    main()
