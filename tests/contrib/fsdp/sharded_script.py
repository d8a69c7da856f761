"""Runs of the trainer with weights sharded by FSDP2 over processes of their own (gloo, CPU), and the same run in one process."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import trainer_script
import world
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from trainer_script import Stored, make
from transformers import Qwen3ForCausalLM, Trainer, TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import composer_replication.tree.pass_cost as pass_cost
from composer_replication.contrib.fsdp.deal import branch_tokens
from composer_replication.contrib.fsdp.level import Level
from composer_replication.contrib.fsdp.trainer import ShardedTrainer
from composer_replication.training.checkpoint import last_complete_checkpoint, save_buffer
from composer_replication.training.trainer import ComposerReplicationTrainer

FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}}
TIMEOUT = 30  # seconds that a rank waits for another
make_accelerator = Trainer.create_accelerator_and_postprocess


def let_accelerate_shard_on_cpu():
    "accelerate chooses FSDP on accelerators only: let it see several devices before it looks."
    def create(self):
        if self.args.fsdp:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        make_accelerator(self)

    Trainer.create_accelerator_and_postprocess = create


def norm(self, hidden):
    "Qwen3's, which transformers computes in float32 also for a model in float64: there rounding would be all that differs."
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(hidden.dtype)


def policy(lora=False, untied=False, dtype="float32"):
    model = trainer_script.policy(lora)
    if untied:
        config = model.config
        config.tie_word_embeddings = False
        apart = Qwen3ForCausalLM(config).eval()
        apart.load_state_dict(model.state_dict())
        model = apart
    return model.to(getattr(torch, dtype))


def whole(tensor):
    "A tensor of this rank alone; all ranks ask together."
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Watch(TrainerCallback):
    "Keeps the whole gradients before each optimizer step; a rank that is told to ends its process after one, or stands still."

    def __init__(self, dies=False, stands=None):
        self.grads, self.dies, self.stands = {}, dies, stands

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.grads = {n.removeprefix("module."): whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}

    def on_step_end(self, args, state, control, **kwargs):
        if self.dies:
            os._exit(9)
        if self.stands:
            self.stands.touch()
            os.kill(os.getpid(), signal.SIGSTOP)


def outcome(trainer, watch):
    "All that a run leaves behind, whole, as plain values."
    timed = ("time", "second", "runtime")
    kept = {name: getattr(trainer, name) for name in ("teacher", "reference")}
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {"parameters": {n: whole(p) for n, p in model.named_parameters() if p.requires_grad}, "grads": watch.grads,
            "branches": [branch_tokens(row.tree) for batch in trainer._buffered_inputs for row in batch.get("composer_rows", ())],
            **{name: {n: whole(t) for n, t in each.state_dict().items()} if each else {} for name, each in kept.items()},
            "log": [{k: v for k, v in entry.items() if not any(word in k for word in timed)}
                    for entry in trainer.state.log_history if "train_runtime" not in entry]}


class ShardedStored(Stored, ShardedTrainer):
    "Learns from rows that were played before."


def build(scene, out, watch, rows=None, sharded=False, lora=False, untied=False, dtype="float32", **changes):
    kinds = {(0, 0): ComposerReplicationTrainer, (0, 1): ShardedTrainer, (1, 0): Stored, (1, 1): ShardedStored}
    kind = kinds[bool(rows), sharded]
    changes = (FSDP if sharded else {}) | {"ddp_timeout": TIMEOUT} | changes
    trainer = make(scene, out, kind, policy(lora, untied, dtype), [watch], **changes)
    if rows:
        trainer.source = rows
    return trainer


def task(name, scene, out, rank, resume=None, dies=None, stops=None, held_out=0, levels=True, deals=True, **changes):
    "One run; what it leaves behind goes to a file."
    if not levels:
        Level.idle = lambda self, kind: 0
    if not deals:
        ShardedTrainer.deals_rows = False
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    watch = Watch(dies == rank, out / "stands" if stops == rank else None)
    last = last_complete_checkpoint(out) if resume == "last" else resume
    try:
        trainer = build(scene, out, watch, **changes)
        trainer.train(resume_from_checkpoint=str(last) if last else None)
        trainer.held_out_rows = world.rows(held_out, seed=5)
        found = outcome(trainer, watch) | {"held_out": trainer.held_out() if held_out else {}}
    except RuntimeError as problem:
        if dies is None and stops is None and levels:
            raise
        found = {"problem": f"{type(problem).__name__}: {problem}"}
    save_buffer(out / f"{name}-rank{rank}.pt", found)


def main(job):
    "Run the tasks of a job one after another in this process: `tasks`, with an environment `env` and a file `log`."
    os.environ.update(job.get("env", {}))
    if "log" in job:
        os.dup2(os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    Qwen3RMSNorm.forward = norm
    for limit, entries in (("PASS", 0), ("SHARDED", 0), ("MASK", 2**11)):  # several groups of branches, so that ranks differ
        setattr(pass_cost, f"{limit}_ENTRIES", entries)
    if "RANK" in os.environ:
        let_accelerate_shard_on_cpu()
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))  # on CPU transformers does not hand ddp_timeout on
    for settings in job["tasks"]:
        task(rank=int(os.environ.get("RANK", 0)), **settings)
    if dist.is_initialized():
        dist.destroy_process_group()
