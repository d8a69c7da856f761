"""Hybrid sharding on two meshes (PyTorch FSDP2): a mixture's experts over all devices, all else in small groups that hold copies.

Experts hold most of the weights, so they are spread as widely as possible; all other weights are few, and are gathered within
a small group. Cursor's blog on Composer 2.5 names this layout."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

RANKS, GROUP = 4, 2  # processes in all, and those that share one copy of what is no expert
TIMEOUT = 60  # seconds that a rank waits for another


def shard_on_two_meshes(model, wide: DeviceMesh, narrow: DeviceMesh):
    "Experts over the devices of `wide` (1-D); all else over the second dimension of `narrow` (2-D), copied over the first."
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=wide)
        fully_shard(layer, mesh=narrow)
    return fully_shard(model, mesh=narrow)


def mixture():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, experts_implementation="eager"), dtype=torch.float64)


def train(model, groups, rows, steps=2):
    "Steps of AdamW on these rows; the gradients of each step, as the model holds them."
    optimizer, found = torch.optim.AdamW(groups, lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
        optimizer.step()
    return found


def rows():
    return torch.randint(3, 64, (RANKS * 2, 12), generator=torch.Generator().manual_seed(1))


def main(job):
    "One rank: what it holds, and for the first one whole gradients and weights, into `job['out']`."
    os.environ.update(job["env"])
    os.dup2(os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    wide = init_device_mesh("cpu", (RANKS,))
    narrow = init_device_mesh("cpu", (RANKS // GROUP, GROUP), mesh_dim_names=("copies", "parts"))
    model = shard_on_two_meshes(mixture(), wide, narrow)
    weights = dict(model.named_parameters())
    groups = [{"params": [p for n, p in weights.items() if (".experts." in n) is experts]} for experts in (True, False)]
    gradients = train(model, groups, rows().chunk(RANKS)[dist.get_rank()])
    held = {n: p.to_local().numel() for n, p in weights.items()}
    whole = {"gradients": [{n: g.full_tensor() for n, g in step.items()} for step in gradients],
             "weights": {n: p.detach().full_tensor() for n, p in weights.items()}}
    torch.save({"held": held} | (whole if dist.get_rank() == 0 else {}), f"{job['out']}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
