"""Runs of the trainer in the small world: for tests in their own process, and, by jobs, in processes of theirs."""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import world
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import GRPOTrainer  # noqa: F401 (named by a job)

from composer_replication.envs.toy.model import embedded_model
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.losses.batch import TraceExample
from composer_replication.replay.pairs import group_pairs, sibling_pairs
from composer_replication.traces.siblings import SiblingIndex
from composer_replication.training.batches import from_plain, to_plain
from composer_replication.training.checkpoint import last_complete_checkpoint, load_buffer, save_buffer
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.trainer import ComposerReplicationTrainer

BASE = {"report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True, "seed": 3,
        "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 1, "max_turns": 3, "max_completion_length": 64,
        "num_generations": 4, "per_device_train_batch_size": 4, "max_tool_calling_iterations": 3, "alpha_sdpo": 1.0,
        "teacher_check": "off", "teacher": "ema", "tool_timeout": 3600}  # the machine may be busy
SCENES = {  # settings besides BASE; `rows` is the size of the data, `lora` puts an adapter around the model
    "all": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
            "beta_replay": 0.5, "kl_coef": 0.1, "max_steps": 6, "rows": 4, "teacher_check": "warn"},
    "epochs": {"logging_steps": 2, "max_steps": 6, "rows": 3},
    "frozen": {"teacher": "frozen", "beta_replay": 0.5, "max_steps": 3, "rows": 4},
    "trust": {"teacher": "trust_region", "beta_replay": 0.5, "replay_form": "dpo", "max_steps": 2, "rows": 4},
    "taid": {"sdpo_divergence": "taid", "max_steps": 3, "rows": 4},
    "lora": {"lora": True, "beta_replay": 0.5, "max_steps": 3, "rows": 4},
    "trl": {"rollout": "trl", "per_device_train_batch_size": 2, "steps_per_generation": 2, "max_steps": 3, "rows": 4},
    "zero": {"rollout": "trl", "alpha_sdpo": 0.0, "max_steps": 2, "rows": 4, "max_completion_length": 112, "save_strategy": "no"},
    "kill": {"max_steps": 6, "rows": 8, "beta_replay": 0.5, "save_total_limit": 2, "max_turns": 2, "max_completion_length": 32},
    "union": {"beta_replay": 0.5, "kl_coef": 0.1, "kl_estimator": "k3", "max_steps": 1, "rows": 2, "optim": "sgd",
              "max_grad_norm": 0.0, "save_strategy": "no"},
    "spread": {"seed": 4, "per_device_train_batch_size": 2, "num_generations": 8, "beta_replay": 0.5,
               "max_steps": 3, "rows": 8},  # a group of eight lies on two devices or more
    "two": {"per_device_train_batch_size": 2, "steps_per_generation": 2, "beta_replay": 0.5, "max_steps": 3, "rows": 8},
    "odd": {"per_device_train_batch_size": 2, "steps_per_generation": 2, "beta_replay": 0.5, "kl_coef": 0.1, "max_steps": 3,
            "rows": 3},
}


def policy(lora=False, elsewhere=False):
    model = embedded_model()
    if elsewhere and not lora:  # as far from the start as a trainer that resumes may be: all has to come from the checkpoint
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
    if lora:
        torch.manual_seed(7 + elsewhere)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def recorded():
    "Recorded traces with pairs."
    traces = toy_traces()[:60]
    siblings = SiblingIndex(traces)
    examples = [TraceExample(t, pairs=tuple(sibling_pairs(t, siblings))[:1]) for t in traces]
    return sorted((e for e in examples if e.pairs), key=lambda e: len(e.trace.turns))[:5]


def make(scene, out, kind=ComposerReplicationTrainer, model=None, callbacks=(), **changes):
    "A trainer of this scene that writes to `out`."
    settings = BASE | SCENES[scene] | changes
    rows, lora = settings.pop("rows"), settings.pop("lora", False)
    config = ComposerReplicationConfig(str(out), **settings)
    extra = {}
    if issubclass(kind, ComposerReplicationTrainer):
        extra = {"hint_source": default_composite()} if config.alpha_sdpo else {}
        extra |= {"pair_source": group_pairs, "replay_examples": recorded()} if config.beta_replay else {}
    return kind(model or policy(lora), None, config, Dataset.from_list(world.rows(rows)), processing_class=world.tokenizer(),
                environment_factory=world.Files, callbacks=list(callbacks), **extra)


def outcome(trainer):
    "All that a run leaves behind, as plain values."
    teacher, reference = getattr(trainer, "teacher", None), getattr(trainer, "reference", None)
    timed = ("time", "second", "runtime")
    return {"parameters": {n: p.detach().clone() for n, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()},
            "optimizer": trainer.optimizer.state_dict()["state"],
            "teacher": {n: t.clone() for n, t in teacher.state_dict().items()} if teacher else {},
            "reference": {n: t.clone() for n, t in reference.state_dict().items()} if reference else {},
            "log": [{k: v for k, v in entry.items() if not any(word in k for word in timed)}
                    for entry in trainer.state.log_history if "train_runtime" not in entry]}


def played_rows(folder, one_side):
    "The file of eight rollouts of two tasks by one process; one side: only the first task's have hinted error turns and pairs."
    trainer = make("union", folder, model=policy().double(), per_device_train_batch_size=8)
    pairs, source, inner = trainer.pair_source, folder / "rows.pt", trainer._generate_and_score_completions
    if one_side:
        trainer.hint_source = lambda kind, meta: f"Look again: {kind}." if meta.trace.task_id == "0-0" else None
        trainer.pair_source = lambda traces: [p if t.task_id == "0-0" else () for t, p in zip(traces, pairs(traces))]

    def kept(inputs):
        found = inner(inputs)
        order = sorted(range(8), key=lambda i: found["composer_rows"][i].trace.task_id)
        found = {k: v if getattr(v, "ndim", 1) == 0 or not hasattr(v, "__len__") else
                 v[order] if isinstance(v, torch.Tensor) else [v[i] for i in order] for k, v in found.items()}
        save_buffer(source, to_plain(found))
        return found

    trainer._generate_and_score_completions = kept
    trainer.train()
    return source


def differences(a, b, where=""):
    "Where two outcomes are not the same to the bit."
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [f"{where} by {(a.double() - b.double()).abs().max():.1e}"]
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{where}/{k} is in one only" for k in a.keys() ^ b.keys()]
        return missing + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{where} has {len(a)} and {len(b)} entries"]
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}/{i}")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {a} and {b}"]


def weights(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.student.named_parameters()}


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- in processes of their own


class Stored(ComposerReplicationTrainer):
    "Learns from rows that were played before (`job['rows']`), each device from its own part of them."

    source = None

    def _generate_and_score_completions(self, inputs):
        found = from_plain(load_buffer(self.source), self.accelerator.device)
        count = len(found["prompt_ids"]) // self.accelerator.num_processes
        mine = slice(self.accelerator.process_index * count, (self.accelerator.process_index + 1) * count)
        whole = lambda value: isinstance(value, torch.Tensor) and value.ndim == 0 or not hasattr(value, "__len__")
        return {key: value if whole(value) else value[mine] for key, value in found.items()}


class Broken(ComposerReplicationTrainer):
    "The second device meets a NaN at the second step."

    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        if self._step and self.accelerator.process_index:
            found["advantages"] = found["advantages"] * float("nan")
        return found


class Tell(TrainerCallback):
    "Writes down each step that is over and keeps its gradients; stands still after step `hold` until the file `go` is there."

    def __init__(self, path, hold=0):
        self.path, self.hold, self.grads = Path(path), hold, {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.grads = {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters()}

    def on_step_end(self, args, state, control, **kwargs):
        with open(self.path, "a") as file:
            print(state.global_step, file=file, flush=True)
        while state.global_step == self.hold and not self.path.with_name("go").exists():
            time.sleep(0.01)


class Ticks:
    "Counts what a run does to its checkpoints' files, its losses and its episodes; kills the process at the given one."

    def __init__(self, out, last):
        self.out, self.last, self.count = str(out), last, 0
        for owner, name in ((ComposerReplicationTrainer, "_compute_loss"), (world.Files, "reset")):
            setattr(owner, name, self.around(getattr(owner, name)))
        sys.addaudithook(self.heard)

    def around(self, inner):
        def ticked(*args, **kwargs):
            self.tick()
            return inner(*args, **kwargs)

        return ticked

    def heard(self, event, args):
        writes = event == "open" and isinstance(args[1], str) and args[1][0] in "wax"
        if (writes or event in ("os.rename", "os.remove", "os.rmdir")) and f"{self.out}/checkpoint-" in os.fspath(str(args[0])):
            self.tick()

    def tick(self):
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def task(name, scene, out, rank, resume=None, kind="ComposerReplicationTrainer", rows=None, double=False, hold=0, **changes):
    "One run; what it leaves behind goes to a file."
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    told, made = Tell(out / f"steps-{rank}", hold), globals()[kind]
    model = policy().double() if double else None
    trainer = make(scene, out, made, model, [told], ddp_timeout=60, **changes)
    if rows:
        trainer.source = rows
    last = last_complete_checkpoint(out) if resume == "last" else resume
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
        found = outcome(trainer) | {"grads": told.grads if rows else {}}
    except RuntimeError as problem:
        if kind != "Broken":
            raise
        found = {"problem": f"{type(problem).__name__}: {problem}"}
    save_buffer(out / f"{name}-rank{rank}.pt", found)


def main(job):
    "Run the tasks of a job: `tasks`, with an environment `env`, a file `log`, and a tick `kill` at which the process dies."
    gc.freeze()  # what was imported stays; the trainer collects garbage before every run
    os.environ.update(job.get("env", {}))
    if "log" in job:
        os.dup2(os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    ticks = Ticks(job["tasks"][0]["out"], job["kill"]) if "kill" in job else None
    for settings in job["tasks"]:
        task(rank=rank, **settings)
    if ticks:
        Path(job["tasks"][0]["out"], "ticks").write_text(str(ticks.count))
