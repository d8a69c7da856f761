"""Channel 2 alone: the third start learns from its own recorded episodes by each kind of hint, and acts without hints.

    .venv/bin/python spikes/004-real/alone.py --minutes 60

goes on with the runs of `plan`, in its order; each one that ends is a file of `made/alone`. Every run is the recipe
`smollm2-sql` with recorded traces in the place of a task. The notebook states the thresholds and reads alone.json.
"""
import argparse
import os
import shutil
import time
from pathlib import Path

import numpy as np
import orjson
import torch
from reads import act, states, table

from composer_replication.core.files import write_file, write_json, write_jsonl
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows
from composer_replication.experiments.pass_at_k import EvalTasks, play_samples
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.read import read_traces

HERE = Path(__file__).parent
FOLDER, START = HERE / "made/alone", HERE / "out/smollm2-sql-hinted-warm-up"
SQL = "composer_replication.envs.sql.hints"
HINTS = {"own": ["sql", "template", "raw_error"], "exact": [f"{SQL}:exact_hints"], "other site": [f"{SQL}:other_site_hints"],
         "wrong": [f"{SQL}:wrong_hints"], "filler": [f"{SQL}:filler_hints"]}
RATE, FACTORS, SEEDS, TUNING = 5e-6, (1, 3, 10), (0, 1, 2), 1000
TASKS = {"train": 160, "development": 64, "test": 64}
SAMPLES = {"train": 2, "development": 2, "test": 2}
STEPS = 10
LOGGED = ("step", "sdpo/loss", "sdpo/gap", "sdpo/sites", "sdpo/excluded", "grad_norm")


def read(path: Path):
    return orjson.loads(path.read_bytes())


def episodes(checkpoint: Path, split: str, seed: int = 0) -> list[list]:
    "Episodes of the tasks of a split, (tasks, samples); no other pilot has used these tasks."
    loaded = load_checkpoint(str(checkpoint))
    rows = sql_rows(TASKS[split], "spike-004-real-alone", split, ("easy", "medium"))
    limits = RolloutConfig(max_turns=6, max_tokens=384, max_turn_tokens=64, seed=seed)
    policy = TransformersPolicy(loaded.model, loaded.tokenizer, split)
    return play_samples(policy, EvalTasks("sql", SqlEnv, rows), SAMPLES[split], limits)


def record(split: str) -> Path:
    "The start's own episodes; played once."
    path = FOLDER / f"{split}.jsonl.gz"
    if not path.exists():
        write_jsonl(path, (orjson.loads(rollout.trace.to_json()) for row in episodes(START, split) for rollout in row))
    return path


def train(hints: str, seed: int, factor: int) -> Path:
    "The checkpoint of a run."
    out = FOLDER / "run" / f"{hints.replace(' ', '-')}-{seed}-{factor}"
    return run_recipe(load_recipe("smollm2-sql", {
        "model": str(START), "warm_up": "null", "task": "null", "tasks": "null", "held_out_rows": "0",
        "traces": f"[{record('train')}]", "hints": f"[{', '.join(HINTS[hints])}]", "alpha_sdpo": "1.0",
        "learning_rate": str(RATE * factor), "replay_batch_size": "2", "max_steps": str(STEPS), "save_steps": str(STEPS),
        "seed": str(seed), "bf16": "true", "output_dir": str(out)})).checkpoint


def measure(checkpoint: Path, split: str) -> dict:
    """Right actions without a hint at the start's error turns, a row each; those of the start itself, the teacher, behind every
    kind of hint too. On test tasks, the rewards of new episodes."""
    loaded = load_checkpoint(str(checkpoint))
    policy = TransformersPolicy(loaded.model, loaded.tokenizer)
    every = states(list(read_traces(str(record(split)))), policy.chat)
    of = [state for state in every if checkpoint == START or state.source == "none"]
    found = table(of, act(policy, of))
    if split == "test":
        found["rewards"] = [[rollout.reward or 0.0 for rollout in row] for row in episodes(checkpoint, split)]
    return found


def one_run(hints: str | None, seed: int, factor: int) -> dict:
    "Train, measure, and forget the weights."
    began = time.process_time()
    checkpoint = START if hints is None else Path(train(hints, seed, factor))
    found = {"hints": hints, "seed": seed, "factor": factor} | measure(checkpoint, "development" if seed == TUNING else "test")
    if hints is not None:
        state = read(checkpoint / "trainer_state.json")
        found["log"] = [entry for entry in state["log_history"] if "loss" in entry]
        shutil.rmtree(Path(checkpoint).parent)
    return found | {"cpu_seconds": round(time.process_time() - began, 1)}


def kept(hints, seed, factor) -> Path:
    return FOLDER / f"{(hints or 'start').replace(' ', '-')}-{seed}-{factor}.json"


def tuned(hints: str) -> int:
    "The factor with most right actions at development error turns; the filler has its own, the rest one."
    by = hints if hints == "filler" else "own"
    rights = {n: np.mean([row["none"] for row in read(kept(by, TUNING, n))["sites"]]) for n in FACTORS}
    return max(FACTORS, key=lambda factor: (rights[factor], -factor))


def plan():
    "Runs in their order; a factor of None: what tuning says."
    yield from ((None, seed, 1) for seed in (TUNING, 0))
    yield from ((hints, TUNING, factor) for hints in ("own", "filler") for factor in FACTORS)
    yield from ((hints, seed, None) for seed in SEEDS for hints in ("own", "filler"))
    yield from ((hints, seed, None) for seed in SEEDS for hints in HINTS if hints not in ("own", "filler"))


def collect() -> None:
    "All runs that have ended, in alone.json."
    runs = [read(path) for path in sorted(FOLDER.glob("*-*.json"))]
    for run in runs:
        run["log"] = [{key: entry.get(key) for key in LOGGED} for entry in run.get("log", ())]
    write_file(HERE / "alone.json", orjson.dumps({"steps": STEPS, "rate": RATE, "runs": runs}))


def main():
    parser = argparse.ArgumentParser(description="Go on with the runs of channel 2 alone.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    parser.add_argument("--collect", action="store_true", help="write alone.json and stop")
    asked = parser.parse_args()
    if asked.collect:
        return collect()
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * asked.minutes
    for hints, seed, factor in plan():
        if time.monotonic() > end:
            break
        path = kept(hints, seed, factor or tuned(hints))
        try:  # two processes may share the runs
            os.close(os.open(path.with_suffix(".taken"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        write_json(path, one_run(hints, seed, factor or tuned(hints)))
        print(path.name, read(path)["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()
