"How far bf16 moves branches, read in two passes and as rows: the tests of every family's tolerance."
import copy

import torch

from composer_replication.tree.forward import forward_branches

EXPERTS = 2.0  # a router's choice may flip: in either way, and rarely in both
OTHERS = 1.2


@torch.no_grad()
def bf16_errors(model, batch):
    "Root mean square errors of branches' states, `{way: error}`, against rows in float32, as shares of those."
    real, low = batch.branch_segment >= 0, copy.deepcopy(model).to(torch.bfloat16)
    want = forward_branches(model, batch, method="rows")[real]
    size = lambda x: x.float().pow(2).mean().sqrt()
    states = {way: forward_branches(low, batch, method=way)[real] for way in ("rows", "two_pass")}
    return {way: (size(got - want) / size(want)).item() for way, got in states.items()}


def bf16_bound(model):
    "Of the error of two passes over that of rows."
    routed = any("router" in name or name.endswith((".gate", "expert_bias")) for name, _ in model.named_modules())
    return EXPERTS if routed else OTHERS
