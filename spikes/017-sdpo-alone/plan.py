"""Spike 017: SDPO alone on a real model under today's judge; SmolLM2-135M on SQL. Go on with the plan's runs.

    composer-rl models get smollm2
    OMP_NUM_THREADS=1 .venv/bin/python spikes/017-sdpo-alone/costs.py
    OMP_NUM_THREADS=1 .venv/bin/python spikes/017-sdpo-alone/plan.py --minutes 100 --workers 1

Each run that ends is appended to `runs.jsonl`, at once; a run that was killed is made again. No run begins after so many minutes.
017-sdpo-alone.ipynb states hypotheses, thresholds and the verdict rule; they were committed before any run.
"""
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import orjson
import torch
from datasets import Dataset
from filelock import FileLock
from transformers import TrainerCallback

from composer_replication.core.files import write_json, write_jsonl
from composer_replication.core.trace import Trace
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import answers, sql_rows
from composer_replication.experiments.pass_at_k import EvalTasks, play_samples
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.recipes.stages import warmed
from composer_replication.replay.pairs import recovery_pairs
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.tool_call_parser import ParsedTurn, TurnReader
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.error_sites import SiteFinder
from composer_replication.traces.habits import detectors_of
from composer_replication.traces.read import read_traces
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import target_turns
from composer_replication.tree.template import probe_template

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import appended  # noqa: E402
from fingerprint import reward_fingerprint  # noqa: E402

KEPT, MADE = HERE / "runs.jsonl", HERE / "runs"
LEVELS = ("easy", "medium")
TUNING = (1000,)  # seeds of development runs, which choose the rates
SEEDS = {"sdpo": 8, "policy": 8, "rejection": 8, "sdpo filler": 5, "retry": 5}  # of test runs, from 0
DESCRIBED = {"opsa": 3}  # as SEEDS, of the arm that is only described and runs last
TASKS = {"development": (64, 1), "test": (128, 2)}  # measured after a run, and episodes of each
STEPS, RECORDED, ROWS = 10, 160, 16  # optimizer steps, recorded episodes, rows of a step of imitation
SCREENED, MORE = 80, 3  # tasks that the policy objective chooses from; episodes of each beside the recorded one
AGAIN = 4  # actions that `retry` samples at a failed turn
RATES = tuple(5e-6 * 3.0**n for n in (-1, 0, 1, 2, 3))
FIRST = (1, 2, 3)  # of RATES, for every arm alike; wider where the best is an edge
CURVE = (0, 1, 2)  # seeds whose checkpoints on the way are measured too, on development tasks
LIMITS = RolloutConfig(max_turns=6, max_tokens=384, max_turn_tokens=64, seed=0)
FILLER = "[composer_replication.envs.sql.hints:filler_hints]"
LOGGED = ("step", "loss", "reward", "frac_reward_zero_std", "grad_norm", "entropy", "sdpo/", "rollout/")
SETTINGS = {"bf16": "true"}  # over the recipe's: weights in float32, products in bfloat16 (training three times as fast with AMX)


@dataclass(frozen=True)
class Run:
    "One run of the plan."

    arm: str
    seed: int
    rate: float | None = None

    @property
    def split(self) -> str:
        return "development" if self.seed in TUNING else "test"

    @property
    def name(self) -> str:
        return "-".join([self.arm, str(self.seed), *([f"{self.rate:.1e}"] if self.rate else [])])


# --- what is chosen on development tasks

def tuned(arm: str, done: dict[str, dict]) -> tuple[list[Run], float | None]:
    "Development runs of an arm so far needed, and its rate once they have ended."
    run_of, level = (lambda seed, rate: Run(arm, seed, rate)), (lambda run: np.mean(run["rewards"]))
    return appended.tuned(run_of, level, done, RATES, FIRST, TUNING)


def policy_steps() -> int:
    "Optimizer steps of `policy` that cost as much as the playing and training of `sdpo`, by prices measured once (`costs.py`)."
    price = orjson.loads((HERE / "costs.json").read_bytes())
    return round((price["playing"] + STEPS) / price["policy"])


def plan(done: dict[str, dict]) -> Iterator[Run | None]:
    "Runs in order; None stands for runs that wait for a choice."
    yield from (Run("start", seed) for seed in TUNING)
    rates = {}
    for arm in SEEDS:
        runs, rates[arm] = tuned(arm, done)
        yield from runs
    for seed in range(max(SEEDS.values())):
        yield Run("start", seed)
        for arm, seeds in SEEDS.items():
            if seed < seeds:
                yield rates[arm] and Run(arm, seed, rates[arm])
    for arm, seeds in DESCRIBED.items():
        runs, rate = tuned(arm, done)
        yield from runs
        yield from (rate and Run(arm, seed, rate) for seed in range(seeds))


# --- how a run is made

def start_folder() -> Path:
    "The warm-up's checkpoint, made once."
    folder = MADE / "start"
    with FileLock(f"{folder}.making"):
        recipe = load_recipe("smollm2-sql", SETTINGS)
        warmed(replace(recipe, arguments=replace(recipe.arguments, warm_up=recipe.arguments.warm_up | {"folder": str(folder)})))
    return folder


class _Clock(TrainerCallback):
    "Keeps the CPU seconds at each step."

    def __init__(self, before: float):
        self.before, self.began, self.at = before, time.process_time(), {}

    def on_step_end(self, args, state, control, **kwargs):
        self.at[state.global_step] = round(self.before + time.process_time() - self.began, 1)


class Work:
    "One run's folder and start."

    def __init__(self, run: Run):
        self.run, self.start, self.folder = run, start_folder(), MADE / f"work-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def play(self, checkpoint: Path, rows: list[dict], samples: int) -> list[list]:
        "Rollouts by task and sample, played as the trainer plays."
        loaded = load_checkpoint(str(checkpoint))
        policy = TransformersPolicy(loaded.model, loaded.tokenizer, "agent")
        with torch.autocast("cpu", torch.bfloat16):
            return play_samples(policy, EvalTasks("sql", SqlEnv, rows), samples, LIMITS)

    def kept(self, what: str, make) -> tuple[object, float]:
        "What the start did on this seed's tasks, made once, with its CPU seconds."
        path = MADE / f"{what}-{self.run.seed}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                began = time.process_time()
                made = make()
                write_json(path, {"made": made, "cpu_seconds": time.process_time() - began})
        found = orjson.loads(path.read_bytes())
        return found["made"], found["cpu_seconds"]

    def rows(self) -> list[dict]:
        return sql_rows(RECORDED, f"spike-017-{self.run.seed}", "train", LEVELS)

    def recorded(self) -> tuple[Path, float]:
        "The start's own episodes, one of each of this seed's training tasks, and what playing them cost."
        made, cost = self.kept("recorded", lambda: [
            orjson.loads(r.trace.to_json()) for row in self.play(self.start, self.rows(), 1) for r in row])
        write_jsonl(path := self.folder / "traces.jsonl", made)
        return path, cost

    def recipe(self, settings: dict[str, str], before: float, **how) -> dict:
        "The recipe `smollm2-sql` with other settings: its last checkpoint, log and CPU seconds."
        same = {
            "model": str(self.start), "warm_up": "null", "record": "false", "held_out_rows": "0",
            "learning_rate": repr(self.run.rate),
            "seed": str(self.run.seed), "save_steps": "5", "save_total_limit": "null",
            "output_dir": str(self.folder / "out")}
        clock = _Clock(before)
        recipe = load_recipe("smollm2-sql", SETTINGS | same | settings)
        finished = run_recipe(recipe, watch=lambda trainer, record: [clock], **how)
        history = orjson.loads((Path(finished.checkpoint) / "trainer_state.json").read_bytes())["log_history"]
        log = [{k: v for k, v in entry.items() if k.startswith(LOGGED)} for entry in history if "loss" in entry]
        return {"checkpoint": Path(finished.checkpoint), "steps": finished.step, "cpu_seconds": clock.at[finished.step],
                "cpu_at": {str(step): at for step, at in clock.at.items()}, "log": log}

    def sdpo(self, steps: int = STEPS) -> dict:
        "Channel 2 alone on recorded episodes: forward KL to the frozen start behind its hints."
        path, cost = self.recorded()
        hints = {"hints": FILLER} if self.run.arm == "sdpo filler" else {}
        return self.recipe({"task": "null", "tasks": "null", "traces": f"[{path}]", "max_steps": str(steps)} | hints, cost)

    def policy(self, steps: int | None = None) -> dict:
        "Dr.GRPO on tasks that the start passes sometimes, at the cost of `sdpo`; choosing them is not counted."
        path, _ = self.recorded()
        passed = {trace.task_id: [trace.reward or 0.0] for trace in read_traces(str(path))}
        rows = self.rows()[:SCREENED]
        more, screening = self.kept("more", lambda: [[r.reward or 0.0 for r in row] for row in self.play(self.start, rows, MORE)])
        sometimes = [row for row, of in zip(rows, more) if 0 < sum(of + passed[row["task_id"]]) < 1 + MORE]

        settings = {"alpha_sdpo": "0.0", "train_rows": str(SCREENED), "max_steps": str(steps or policy_steps())}
        found = self.recipe(settings, 0.0, kind=on(sometimes))
        return found | {"tasks": len(sometimes), "screening_cpu_seconds": screening}

    def imitate(self, rows: list[dict], before: float, loss: Callable | None = None) -> dict:
        "Supervised learning on rows, or another loss of outputs and labels, as many steps of as many rows for each arm."
        from trl import SFTConfig, SFTTrainer

        loaded = load_checkpoint(str(self.start))
        drawn = np.random.default_rng(self.run.seed).choice(len(rows), STEPS * ROWS, replace=len(rows) < STEPS * ROWS)
        config = SFTConfig(
            output_dir=str(self.folder / "out"), max_steps=STEPS, learning_rate=self.run.rate, lr_scheduler_type="constant",
            per_device_train_batch_size=2, gradient_accumulation_steps=ROWS // 2, bf16=True, use_cpu=True, seed=self.run.seed,
            gradient_checkpointing=False, max_length=None, logging_steps=1, save_steps=5, report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False)
        clock = _Clock(before)
        trainer = SFTTrainer(loaded.model.train(), config, train_dataset=Dataset.from_list([rows[n] for n in drawn]),
                             processing_class=loaded.tokenizer, callbacks=[clock], compute_loss_func=loss)
        trainer.train()
        log = [{"step": e["step"], "loss": e["loss"]} for e in trainer.state.log_history if "loss" in e]
        return {"checkpoint": self.folder / "out" / f"checkpoint-{STEPS}", "steps": STEPS, "cpu_seconds": clock.at[STEPS],
                "cpu_at": {str(step): at for step, at in clock.at.items()}, "log": log, "rows": len(rows)}

    def opsa(self) -> dict:
        "Lowers the least likely of the start's own tokens in its recorded episodes, each read once, without teacher or hint."
        path, cost = self.recorded()
        began, chat = time.process_time(), probe_template(load_checkpoint(str(self.start)).tokenizer)
        trees = [build_tree(trace, chat) for trace in read_traces(str(path))]
        rows = [learnt(tree.ids, [(span.start, span.end) for span in tree.spans]) for tree in trees]
        return self.imitate(rows, cost + time.process_time() - began, opsa_loss)

    def rejection(self) -> dict:
        "Imitates recorded episodes that passed, and actions that worked in the place of those that had failed."
        path, cost = self.recorded()
        began, chat, rows = time.process_time(), probe_template(load_checkpoint(str(self.start)).tokenizer), []
        for trace in read_traces(str(path)):
            tree = build_tree(trace, chat, pairs=recovery_pairs(trace))
            rows += [learnt(tree.ids, [(span.start, span.end) for span in tree.spans])] if trace.reward == 1 else []
            for branch in tree.branches:
                if branch.kind == "chosen":
                    ids = tree.ids[:branch.fork] + branch.ids
                    rows.append(learnt(ids, [(branch.fork + branch.start, len(ids))]))
        return self.imitate(rows, cost + time.process_time() - began)

    def retry(self) -> dict:
        "Samples each failed turn of the recorded episodes again from its own state, without a hint, and imitates what works."
        path, cost = self.recorded()
        began, loaded = time.process_time(), load_checkpoint(str(self.start))
        policy, rows = TransformersPolicy(loaded.model, loaded.tokenizer, "agent"), []
        reader = TurnReader.of(policy.chat)
        find = SiteFinder(detectors_of(load_recipe("smollm2-sql").arguments.detectors))
        failed = [(trace, turn, site.kind, build_tree(trace, policy.chat)) for trace in read_traces(str(path))
                  for turn, site in target_turns(trace, find_sites=find).items()]
        for at in range(0, len(failed), 16):
            part = [(one, sample) for one in failed[at:at + 16] for sample in range(AGAIN)]
            contexts = [tree.ids[:tree.span(turn).start] for (_, turn, _, tree), _ in part]
            names = [f"{trace.trace_id}/{turn}/{sample}" for (trace, turn, _, _), sample in part]
            with policy.batch(Sampling()) as batch, torch.autocast("cpu", torch.bfloat16):
                samples = batch.sample(range(len(part)), contexts, [LIMITS.max_turn_tokens] * len(part), names)
            for ((trace, _, kind, _), _), context, sampled in zip(part, contexts, samples):
                if works(trace, kind, reader.read(sampled.ids, policy.stops, context, sampled.cut, trace.tools)):
                    rows.append(learnt((*context, *sampled.ids), [(len(context), len(context) + len(sampled.ids))]))
        return self.imitate(rows, cost + time.process_time() - began) | {"failed_turns": len(failed)}

    def measure(self, checkpoint: Path, split: str) -> list[list[float]]:
        "Rewards by task and sample of this seed's own tasks, whose schemas no training saw, without hints; weights in bfloat16."
        tasks, samples = TASKS[split]
        rows = sql_rows(tasks, f"spike-017-{self.run.seed}", split, LEVELS)
        loaded = load_checkpoint(str(checkpoint))
        policy = TransformersPolicy(loaded.model.bfloat16(), loaded.tokenizer, "agent")
        return [[r.reward or 0.0 for r in row] for row in play_samples(policy, EvalTasks("sql", SqlEnv, rows), samples, LIMITS)]

    def made(self) -> dict:
        "All that is kept of the run."
        run, make = self.run, {name: getattr(self, name) for name in ("policy", "rejection", "retry", "opsa")}
        found = {"checkpoint": self.start} if run.arm == "start" else make.get(run.arm, self.sdpo)()
        checkpoint = found.pop("checkpoint")
        found["rewards"] = self.measure(checkpoint, run.split)
        if run.seed in CURVE and run.arm in ("sdpo", "policy", "rejection"):
            steps = sorted(int(path.name.split("-")[1]) for path in checkpoint.parent.glob("checkpoint-*"))
            found["curve"] = {str(n): self.measure(checkpoint.with_name(f"checkpoint-{n}"), "development") for n in steps}
        shutil.rmtree(self.folder, ignore_errors=True)
        return found


def on(rows: list[dict]) -> Callable[..., ComposerReplicationTrainer]:
    "What makes a recipe's trainer with these tasks in the place of its own."
    def kind(model, **given):
        return ComposerReplicationTrainer(model, **given | {"train_dataset": Dataset.from_list(rows)})
    return kind


def works(trace: Trace, kind: str, action: ParsedTurn) -> bool:
    "Whether an action runs in the task's database and gives rows; in the place of a last query that was wrong it has to answer."
    if not action.calls or not action.calls[0].parsed:
        return False
    env, call = SqlEnv(), action.calls[0]
    env.reset(trace.task_id)
    result = env.call(call)
    if result.failed or result.text == "0 rows":
        return False
    return kind != "wrong_result" or call.name == "query" and answers(env.task, call.arguments["sql"])


def learnt(ids, spans) -> dict:
    labels = [-100] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return {"input_ids": list(ids), "labels": labels}


def opsa_loss(outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """Advantage -0.5 on a row's 20 % least likely sampled tokens, 0 on the others, as a mean over the sampled tokens.

    After OPSA, arXiv:2608.31046, which we know from a summary only."""
    own = labels[:, 1:]
    logprobs = outputs.logits[:, :-1].float().log_softmax(-1).gather(-1, own.clamp(min=0)[..., None])[..., 0]
    rows = [row[sampled] for row, sampled in zip(logprobs, own != -100)]
    least = [row[row.detach().argsort()[:round(len(row) / 5)]].sum() for row in rows]
    return 0.5 * sum(least) / (num_items_in_batch or sum(map(len, rows)))


def make(run: Run) -> dict:
    "Make a run."
    torch.set_num_threads(1)
    return asdict(run) | {"split": run.split, "fingerprint": reward_fingerprint("sql")} | Work(run).made()


if __name__ == "__main__":
    appended.command("017", KEPT, plan, make)
