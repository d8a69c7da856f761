"Ranks (gloo, CPU) that deal rows anew; what each holds before and after goes to a file."
import os
import random
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from random_trees import random_tree

from composer_replication.contrib.fsdp import deal
from composer_replication.core.trace import Trace, Turn
from composer_replication.training.batches import to_plain
from composer_replication.training.checkpoint import save_buffer
from composer_replication.training.running import lost_rank
from composer_replication.tree.example import RolloutTree

TIMEOUT, PAD, TOGETHER, ROWS = 30, 99, 2, 3  # seconds, a token id, backward passes of an optimizer step, rows of one


def batch_of(draw, name):
    "A batch with columns of every kind, padded as TRL does; the last row is masked."
    trees = [random_tree(draw) for _ in range(ROWS)]
    first = [draw.randrange(1, len(t.ids)) for t in trees]
    before, after = max(first), max(len(t.ids) - f for t, f in zip(trees, first))
    left = torch.tensor([[PAD] * (before - f) + list(t.ids[:f]) for t, f in zip(trees, first)])
    right = torch.tensor([list(t.ids[f:]) + [PAD] * (after - len(t.ids) + f) for t, f in zip(trees, first)])
    mask = (right != PAD).long()
    mask[-1] = 0
    rows = [RolloutTree(Trace(f"{name}-{i}", (Turn("user", name),)), t) for i, t in enumerate(trees)]
    return {"prompt_ids": left, "prompt_mask": (left != PAD).long(), "completion_ids": right, "completion_mask": mask,
            "old_per_token_logps": -right.double() / 7, "advantages": torch.tensor([draw.random() for _ in trees]),
            "importance_sampling_ratio": torch.tensor([[draw.random()] for _ in trees]), "composer_rows": rows,
            "num_items_in_batch": torch.tensor(123), "labels": [f"{name}/{i}" for i in range(ROWS)]}


def main(job):
    "Four batches of two optimizer steps on each rank, dealt anew."
    os.environ.update(job["env"])
    os.dup2(os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    task, = job["tasks"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, pack = dist.get_rank(), deal._pack
    draw = random.Random(f"{task['scene']}/{rank}")
    batches = [batch_of(draw, f"rank{rank}-{number}") for number in range(2 * TOGETHER)]

    def troubled(*args):
        if rank == 1 and task.get("dies"):
            os._exit(9)
        if rank == 1 and task.get("fails"):
            raise KeyError("advantages")
        return pack(*args)

    deal._pack, found = troubled, {"before": [to_plain(b) for b in batches]}
    try:
        with lost_rank(TIMEOUT):
            found["after"] = [to_plain(b) for b in deal.deal_anew(batches, TOGETHER, PAD, torch.device("cpu"))]
    except RuntimeError as problem:
        found["problem"] = f"{type(problem).__name__}: {problem}"
    save_buffer(Path(task["out"]) / f"{task['name']}-rank{rank}.pt", found)
    if not task.get("dies"):
        dist.destroy_process_group()
