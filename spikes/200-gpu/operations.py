"""How many operations a step of stage b asks of the device, by arm: at one row of some 4,000 tokens a GPU waits for them.

    .venv/bin/python spikes/200-gpu/operations.py

counts them on the CPU, in models as deep as those of stage b and narrow, on a row of 1,000 tokens (their number hardly moves the
count), and writes operations.json. A view launches nothing and is left out. What goes through in one pass is decided as on a GPU.
Then it times steps on this CPU, as its own rule decides and with trunks and branches apart, in turns. `before` is of 27 November.
"""
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import stage_b
import torch
from common import HERE, Stage
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.training import step as training_step
from composer_replication.training.reading import Models
from composer_replication.tree import pass_cost
from composer_replication.tree.template import probe_template

LAYERS, TOKENS = {"0.5B": 24, "7B LoRA": 28}, 1024
BOUND = {"sdpo, live": 1.3, "all, live": 1.8}  # operations over GRPO's
PARTS = {(training_step.Steps, "_policy_loss"): "student forward, policy", (Models, "read_teacher"): "teacher",
         (Models, "read_reference"): "reference", (training_step, "sdpo_term"): "SDPO", (training_step, "pairs_term"): "DPO"}
TIMED = [(64, 2, 200, 2), (64, 4, 1000, 4), (128, 4, 1000, 4)]  # width, layers, tokens, error turns
STEPS = 10


class Counting(TorchDispatchMode):
    "Counts operations by name."

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.found[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def prepared(stage: Stage, size: str, arm: str, shape: dict, tokens: int, errors: int):
    "A trainer and its inputs."
    name, checkpointing, attention, *_ = stage_b.CASES[size]
    chat = probe_template(embedded_tokenizer())
    trace, answers = stage_b.rollout(chat, tokens, errors)
    row, mask = stage_b.row_of(trace, answers, chat, *stage_b.ARMS[arm][:2])
    shape = stage_b.TINY | {"max_position_embeddings": 8192} | shape
    recipe = stage_b.recipe_of(stage, name, checkpointing, attention, shape, arm, len(mask) - mask.index(1))
    return stage_b.trainer_of(recipe, "cpu"), stage_b.inputs_of(row, mask, "cpu")


def counted(stage: Stage, size: str, arm: str, layers: int) -> dict:
    "Operations of one step, in all and by part, and how many of them make the program wait for the device."
    trainer, inputs = prepared(stage, size, arm, {"num_hidden_layers": layers}, TOKENS, stage_b.ERRORS)
    stage_b.step(trainer, inputs)
    parts = Counter()

    def watch(owner, name, part, undo):
        function = getattr(owner, name)
        undo.callback(setattr, owner, name, function)

        def watched(*args, **kwargs):
            before = counting.found.total()
            try:
                return function(*args, **kwargs)
            finally:
                parts[part] += counting.found.total() - before

        setattr(owner, name, watched)

    with ExitStack() as undo, Counting() as counting:
        for (owner, name), part in PARTS.items():
            watch(owner, name, part, undo)
        watch(trainer.accelerator, "backward", "backward", undo)
        stage_b.step(trainer, inputs)
    parts["other"] = counting.found.total() - parts.total()
    waits = counting.found["_local_scalar_dense"] + counting.found["nonzero"]
    return {"operations": counting.found.total(), "waits": waits, "parts": {part: n for part, n in parts.items() if n}}


def timed(stage: Stage, arm: str, width: int, layers: int, tokens: int, errors: int) -> dict:
    "Least CPU seconds of some steps by way, in turns."
    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width}
    trainer, inputs = prepared(stage, "0.5B", arm, shape, tokens, errors)
    worth, seconds = {"apart": float("-inf"), "by the rule": pass_cost.LAYER_WORTH["cpu"]}, {"apart": [], "by the rule": []}
    for _ in range(STEPS):
        for way, each in seconds.items():
            pass_cost.LAYER_WORTH["cpu"] = worth[way]
            begun = time.process_time()
            stage_b.step(trainer, inputs)
            each.append(time.process_time() - begun)
    return {way: min(each) for way, each in seconds.items()}


def main():
    file = Path(HERE, "operations.json")
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["operations", "--tiny", "--out", folder]
        stage = Stage("b", __doc__)
        seconds = {f"{arm}: {width} wide, {layers} layers, {tokens} tokens": timed(stage, arm, width, layers, tokens, errors)
                   for width, layers, tokens, errors in TIMED for arm in ("sdpo, live", "all, live", "all, frozen")}
        pass_cost.LAYER_WORTH["cpu"] = pass_cost.LAYER_WORTH["cuda"]
        found = {f"{size}: {arm}": counted(stage, size, arm, layers) for size, layers in LAYERS.items() for arm in stage_b.ALL}
    facts = {"torch": torch.__version__, "bounds": BOUND, "cases": found, "seconds": seconds}
    facts["before"] = json.loads(file.read_text())["before"]
    file.write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(f"{key}: {row}" for key, row in (found | seconds).items()))


if __name__ == "__main__":
    main()
