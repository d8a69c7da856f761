"""The shipped recipe `smollm2-sql`, as its command runs it, and what it gains on new tasks.

    COMPOSER_MODELS=FOLDER .venv/bin/python spikes/016-sql-recipe/run.py final-0 "final filler-0" final-1 final-2

makes the runs (arm and seed) that are not here: a file of `runs` for the start and each, with rewards of 64 new
test tasks (of seed 1000: development tasks), two episodes each, without hints; `kept.json` keeps all that ended.
The warm-up is made once, by the first run.
"""
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from composer_replication.core.files import write_json
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows
from composer_replication.experiments.pass_at_k import EvalTasks, play_samples
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig

HERE = Path(__file__).parent
RUNS, OUT = HERE / "runs", Path(os.environ.get("COMPOSER_OUT", "out"))
WARM_UP = OUT / "smollm2-sql-warm-up"
LIMITS = RolloutConfig(max_turns=6, max_tokens=384, max_turn_tokens=64, seed=0)
FILLER, SECOND = "hints=[composer_replication.envs.sql.hints:filler_hints]", "max_steps=10"
LIVE = (SECOND, "record=false", "train_rows=256", "held_out_rows=16", "guard_steps=10", "policy_start=10")
ARMS = {  # settings over the recipe's
    "recipe": LIVE, "filler": (*LIVE, FILLER), "recorded": (SECOND,), "recorded filler": (SECOND, FILLER),  # its earlier forms
    "longer": ("save_steps=10",), "faster": (SECOND, "learning_rate=5e-5"),  # tried on development tasks
    "final": (), "final filler": (FILLER,)}
SERIES = {"recorded": "spike-016-b", "final": "spike-016-c"}  # of test tasks, by the first word of the arm
TUNING = 1000  # the seed that chooses


def series(arm: str, seed: int) -> tuple[str, str]:
    "Of an arm's tasks: the name and the split."
    if seed == TUNING:
        return "spike-016", "development"
    return SERIES.get(arm.split()[0], "spike-016"), "test"


def measured(checkpoint: Path, series: str, split: str) -> list[list[float]]:
    "Rewards, by task and sample, of tasks that nothing else has used."
    loaded = load_checkpoint(str(checkpoint))
    tasks = EvalTasks("sql", SqlEnv, sql_rows(64, series, split, ("easy", "medium")))
    played = play_samples(TransformersPolicy(loaded.model, loaded.tokenizer, "measured"), tasks, 2, LIMITS)
    return [[rollout.reward or 0.0 for rollout in row] for row in played]


def trained(arm: str, seed: int) -> dict:
    "What the command wrote, and its seconds of wall clock and CPU, warm-up included where this run made it."
    out, warm, began = OUT / f"smollm2-sql-{arm}-{seed}", WARM_UP.exists(), time.monotonic()
    spent = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before, settings = spent(), (f"seed={seed}", f"output_dir={out}", *ARMS[arm])
    command = [Path(sys.executable).with_name("composer-rl"), "train", "--config", "smollm2-sql"]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True)
    *earlier, checkpoint = sorted(out.glob("checkpoint-?0"))
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    kept = ("step", "loss", "reward", "sdpo/loss", "sdpo/sites", "sdpo/tokens", "grad_norm", "step_time")
    return {"made_warm_up": not warm, "wall_seconds": time.monotonic() - began, "cpu_seconds": spent() - before,
            "log": [{k: v for k, v in e.items() if k in kept} for e in history if "loss" in e],
            "rewards": measured(checkpoint, *series(arm, seed)),
            "earlier": {c.name: measured(c, *series(arm, seed)) for c in earlier}}


def kept(name: str, make, *arguments) -> None:
    if not (path := RUNS / f"{name}.json").exists():
        write_json(path, make(*arguments))
        ended = json.loads((HERE / "kept.json").read_text()) if (HERE / "kept.json").exists() else {}
        write_json(HERE / "kept.json", ended | {name: json.loads(path.read_text())})
        print(path.name, flush=True)


if __name__ == "__main__":
    RUNS.mkdir(exist_ok=True)
    for which in sys.argv[1:]:
        arm, _, seed = which.rpartition("-")
        kept(which, trained, arm, int(seed))
        tasks = series(arm, int(seed))
        start = tasks[0].replace("spike-016", "start") if tasks[1] == "test" else "start-development"
        kept(start, lambda tasks=tasks: {"rewards": measured(WARM_UP, *tasks)})
