"""Steps of spike 107, one process each; the notebook reads what they leave in cells.jsonl.

    COMPOSER_DATA=FOLDER python spikes/107-growth/growth.py --minutes 60

goes on with the cells of `PLAN` that are not there yet.
"""
import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "101-channel-cost"))
SHAPE = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
ARMS = ("grpo", "all, frozen")
LONGEST_S = 1500  # of one cell


@dataclass(frozen=True)
class Cell:
    "One step."

    axis: str
    arm: str
    length: int = 4096  # tokens of a row
    errors: int = 8  # error turns of a row, each with a hint and a pair
    vocab: int = 16384
    rows: int = 1
    key = property(lambda self: (self.axis, self.arm, self.length, self.errors, self.vocab, self.rows))


AXES = {"length": [1024 * 2**i for i in range(8)], "errors": [0, 1, 2, 4, 8, 16, 32, 64],
        "vocab": [2048 * 4**i for i in range(4)] + [151936], "rows": [1, 2, 4, 8]}
BASE = {"errors": {"length": 16384}, "vocab": {"length": 2048}, "rows": {"length": 2048}}
PLAN = [replace(Cell(axis, arm), **BASE.get(axis, {}), **{axis: value})
        for axis, values in AXES.items() for value in values for arm in ARMS]


def layer_bytes(shape) -> int:
    "Bytes that one layer of a float32 Qwen2 keeps of a token for its backward pass, without the mask."
    heads = (6 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.hidden_size // shape.num_attention_heads
    return 4 * (6 * shape.hidden_size + 4 * shape.intermediate_size + heads)


def read_cells(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(row: dict) -> tuple:
    return Cell(**{name: row[name] for name in Cell.__dataclass_fields__}).key


def go_on(path: Path, minutes: float, plan=PLAN) -> list[dict]:
    "The cells that are not there yet; none begins after so many minutes. One that takes too long is kept as such."
    end = time.monotonic() + 60 * minutes
    for cell in plan:
        if cell.key in {key_of(r) for r in read_cells(path)} or time.monotonic() > end:
            continue
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
        try:
            done = subprocess.run([sys.executable, __file__, "--cell", json.dumps(asdict(cell))], capture_output=True, text=True,
                                  timeout=LONGEST_S, env=env)
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.stderr[-500:]}
        except subprocess.TimeoutExpired:
            found = {"failed": f"took more than {LONGEST_S} s"}
        with path.open("a") as file:
            file.write(json.dumps(asdict(cell) | found) + "\n")
        print(cell, {k: v for k, v in found.items() if k in ("seconds", "peak_mib", "failed")}, flush=True)
    return read_cells(path)


def one(cell: Cell) -> dict:
    "Seconds, memory and multiply-adds of a step, and the machine's own rate in the same process."
    import arms
    import torch

    from composer_replication.traces.read import read_traces
    from composer_replication.tree.template import probe_template
    torch.set_num_threads(1)
    data = Path(os.environ["COMPOSER_DATA"])
    tokenizer = arms.tokenizer_of(data)
    chat, traces = probe_template(tokenizer), list(read_traces(data / "traces" / "miniswe_deepseek_chat_dev.jsonl.gz"))
    trace, answers, _ = arms.rollout(traces, arms.rounds_of(traces, chat), chat, cell.length, cell.errors, 0)
    made, mask = arms.rows_of(trace, answers, chat, [cell.errors])
    row = made[cell.errors]["hints" if cell.arm == "grpo" else "both"]
    shape = SHAPE | {"vocab_size": cell.vocab}
    data, fold = json.loads(json.dumps(row.to_data(), default=list)), lambda ids: [i % cell.vocab for i in ids]
    data["tree"]["ids"] = fold(data["tree"]["ids"])
    for branch in data["tree"]["branches"]:
        branch["ids"] = fold(branch["ids"])
    row = arms.RolloutTree.from_data(data)
    model = arms.make_model(shape | {"max_position_embeddings": 2**18})
    trainer = arms.trainer_of(cell.arm, model, tokenizer)
    single = arms.batch_of(row, mask, 0)
    again = lambda v: v.repeat(cell.rows, *[1] * (v.ndim - 1)) if isinstance(v, torch.Tensor) and v.ndim else v * cell.rows
    inputs = {name: again(value) for name, value in single.items()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = arms.mib("VmRSS")
    with arms.Clock() as clock:
        arms.step(trainer, inputs)
    costs = arms.multiply_adds(shape)
    return {"seconds": clock.seconds, "wall": clock.wall, "before_mib": before, "peak_mib": arms.mib("VmHWM"),
            "tokens": len(row.tree.ids), "sampled": sum(mask), "rate": rate(),
            "branch_tokens": sum(len(b.ids) for b in row.tree.branches),
            "multiply_adds": {k: v * cell.rows for k, v in arms.predict(costs, row.tree, cell.arm).items()}}


def rate(seconds: float = 1.0) -> float:
    "Multiply-adds a second of one large matrix product, the best of some: what this core can do at its best."
    import torch
    a, best, end = torch.randn(768, 768), 0.0, time.process_time() + seconds
    while time.process_time() < end:
        start = time.process_time()
        a @ a
        best = max(best, 768**3 / (time.process_time() - start))
    return best


def main():
    parser = argparse.ArgumentParser(description="Go on with spike 107.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no cell begins after so many")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        print(json.dumps(one(Cell(**asked.cell))))
    else:
        go_on(HERE / "cells.jsonl", asked.minutes)


if __name__ == "__main__":
    main()
