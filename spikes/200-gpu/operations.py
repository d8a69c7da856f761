"""How many operations a step of stage b asks of the device, by arm: at one row of some 4,000 tokens a GPU waits for them.

    .venv/bin/python spikes/200-gpu/operations.py

counts them on the CPU, in models as deep as those of stage b and narrow, on a row of 1,000 tokens (their number hardly moves the
count), and writes operations.json. A view launches nothing and is left out. What goes through in one pass is decided as on a GPU.
"""
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import stage_b
import torch
from common import HERE, Stage
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.tree import forward
from composer_replication.tree.template import probe_template

LAYERS, TOKENS = {"0.5B": 24, "7B LoRA": 28}, 1024
BOUND = {"sdpo, live": 1.3, "all, live": 1.8}  # operations over GRPO's


class Counting(TorchDispatchMode):
    "Counts operations by name."

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.found[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def counted(stage: Stage, size: str, arm: str, layers: int) -> dict:
    "Operations of one step, and how many of them make the program wait for the device."
    name, checkpointing, attention, *_ = stage_b.CASES[size]
    chat = probe_template(embedded_tokenizer())
    trace, answers = stage_b.rollout(chat, TOKENS, stage_b.ERRORS)
    row, mask = stage_b.row_of(trace, answers, chat, *stage_b.ARMS[arm][:2])
    shape = stage_b.TINY | {"num_hidden_layers": layers, "max_position_embeddings": 8192}
    recipe = stage_b.recipe_of(stage, name, checkpointing, attention, shape, arm, len(mask) - mask.index(1))
    trainer, inputs = stage_b.trainer_of(recipe, "cpu"), stage_b.inputs_of(row, mask, "cpu")
    stage_b.step(trainer, inputs)
    with Counting() as counting:
        stage_b.step(trainer, inputs)
    return {"operations": counting.found.total(), "waits": counting.found["_local_scalar_dense"] + counting.found["nonzero"]}


def main():
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["operations", "--tiny", "--out", folder]
        stage = Stage("b", __doc__)
        forward.LAYER_WORTH["cpu"] = forward.LAYER_WORTH["cuda"]
        found = {f"{size}: {arm}": counted(stage, size, arm, layers) for size, layers in LAYERS.items() for arm in stage_b.ALL}
    Path(HERE, "operations.json").write_text(json.dumps({"torch": torch.__version__, "cases": found}, indent=1) + "\n")
    print("\n".join(f"{key}: {row}" for key, row in found.items()))


if __name__ == "__main__":
    main()
