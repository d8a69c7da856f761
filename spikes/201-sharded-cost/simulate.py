"""Passes of ranks over recorded traces that are dealt to them at random, counted by the trainer's own code.

    COMPOSER_DATA=FOLDER python spikes/201-sharded-cost/simulate.py

writes simulated.json: for each kind of traces, way of reading and number of rollouts a rank, what dealing them costs.
"""
import json
import math
import os
import random
import warnings
from collections import Counter
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from transformers import AutoTokenizer

from composer_replication.hints.layers import default_composite
from composer_replication.replay.pairs import DPOPair, recovery_pairs
from composer_replication.traces.read import read_traces
from composer_replication.traces.siblings import action_key
from composer_replication.training.deal import branch_counts
from composer_replication.training.level import ANSWERS, Passes, Reading, count_passes, level
from composer_replication.tree.example import example_tree, target_hints, target_turns
from composer_replication.tree.forward import PASS_ENTRIES, SHARDED_ENTRIES, _groups, _part, _wanted, trunk_tokens
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.template import probe_template

warnings.filterwarnings("ignore")
HERE = Path(__file__).parent
KINDS = ("teacher", "reference", "pairs", "recorded")  # fields of `Passes`
GRADIENT = {"pairs": True, "recorded": True, "teacher": False, "reference": False}
UNITS = {True: 2, False: 1}  # of all weights a pass gathers, before its forward and its backward; gradients are scattered once
MINI_SWE = ["miniswe_deepseek_chat_dev", "miniswe_deepseek_chat_dev_rerun", "miniswe_deepseek_lite_dev_noparallel"]
CORPORA = {  # files, how many traces of them, tokens of a trunk at most
    "mini-swe": (MINI_SWE, 69, 8704),
    "SQL": (["intercode_sql_multimodel"], 300, 8704),
    "airline": (["tau2_airline_multimodel", "taubench_airline_gpt4o"], 300, 8704)}
READINGS = {  # distils, own trunk, reference, student's and reader's branches read a cache, what a pass is worth, splits
    "as shipped": Reading(True, True, True, True, True, SHARDED_ENTRIES, True),
    "as before": Reading(True, True, True, False, True, PASS_ENTRIES, True),
    "block mask": Reading(True, True, True, True, True, math.inf),
    "channel 2 alone": Reading(True, True, False, True, True, SHARDED_ENTRIES, True)}
UNSORTED = ("as before",)  # rows come as dealt; else those with most answers, then hints, come first in an optimizer step
PAIRS = ("recoveries", "every error turn")  # whose pairs channel 3 gets; the second is what teachers by `replay` could give
ROLLOUTS, RANKS, POOL, DEALS = (1, 2, 4), (2, 4, 8, 64), 60, 100
ACCUMULATION = 8  # backward passes of an optimizer step, as in the recipe


def tokenizer_of(data: Path):
    made = AutoTokenizer.from_pretrained(data / "tokenizers" / "qwen2.5")
    made.pad_token = made.pad_token or made.eos_token
    return made


def every_pair(trace) -> list[DPOPair]:
    "At every error turn the assistant's next other action as a better answer: how many pairs there are is what counts here."
    made = []
    for turn in target_turns(trace):
        mine = trace.turns[turn]
        later = (t for t in trace.turns[turn + 1:] if t.role == "assistant" and action_key(t) != action_key(mine))
        if better := next(later, None):
            made.append(DPOPair(trace.trace_id, turn, better, mine, "spike"))
    return made


def trees_of(data: Path, name: str, pairs: str) -> list:
    "Trees with a hint at every error turn, and pairs; the same ones in every call."
    files, count, longest = CORPORA[name]
    chat, hints = probe_template(tokenizer_of(data)), default_composite()
    traces = [t for file in files for t in read_traces(data / "traces" / f"{file}.jsonl.gz")]
    made, source = [], recovery_pairs if pairs == "recoveries" else every_pair
    for trace in random.Random(0).sample(traces, min(count, len(traces))):
        try:
            hinted = target_hints(trace, target_turns(trace), hints)
            made.append(example_tree(trace, chat, hinted, source(trace), max_tokens=longest))
        except ValueError:  # a trace that the template does not take
            continue
    return [t for t in made if t.ids]


@dataclass(frozen=True)
class Held:
    "What one rank holds for one backward pass."

    passes: Passes
    tokens: dict[str, list[int]]  # of each pass, kind by kind; the policy's own under \"policy\"


def _tokens(batch, kinds, shared, cached, worth, split=False):
    "Of each pass over the branches of these kinds."
    wanted = _wanted(batch, kinds)
    if not wanted.any():
        return []
    if not shared:
        length = [[int((batch.branch_segment[row] == s).sum()) for s in range(wanted.shape[1])] for row in range(len(wanted))]
        return [int(batch.branch_fork[row, s]) + length[row][s] for row, s in wanted.nonzero().tolist()]
    *_, part, wanted = _part(batch, wanted)
    return [trunk_tokens(batch, kinds)] * (not cached) + [
        columns[:, piece].numel() for _, columns, _, pieces in _groups(part, wanted, worth, split) for piece in pieces]


def held(batch, how: Reading) -> Held:
    "Passes of a rank with this batch, and the tokens of each; the counts are the trainer's."
    passes = count_passes(batch, None, how)
    tokens = {kind: [] for kind in KINDS} | {"policy": [batch.input_ids.numel()]}
    if how.distils:
        tokens["teacher"] = _tokens(batch, ("hint",), how.reads_shared, how.trains_shared and not how.own_trunk, how.worth,
                                    how.splits)
    if batch.pairs:
        tokens["pairs"] = _tokens(batch, ANSWERS, how.trains_shared, True, how.worth)
        if how.reference:
            answers = _tokens(batch, ANSWERS, how.reads_shared, True, how.worth, how.splits)
            tokens["reference"] = [trunk_tokens(batch, ANSWERS), *answers]
    assert [len(tokens[kind]) for kind in KINDS] == list(astuple(passes)), (tokens, passes)
    return Held(passes, tokens)


def pool_of(trees: list, rollouts: int, pad: int, size: int) -> list[dict[str, list[Held]]]:
    "A rank's optimizer steps at random: what each backward pass holds, read in each way. Rows are sorted as `by_length` does."
    draw, made = random.Random(f"pool/{rollouts}"), []
    for _ in range(size):
        taken = [draw.choice(trees) for _ in range(ACCUMULATION * rollouts)]
        best = sorted(taken, key=lambda tree: (branch_counts(tree), len(tree.ids)), reverse=True)
        packed = [[pack_trees(rows[at:at + rollouts], pad) for at in range(0, len(rows), rollouts)] for rows in (taken, best)]
        made.append({name: [held(batch, how) for batch in packed[name not in UNSORTED]] for name, how in READINGS.items()})
    return made


def cost(kind: str, tokens: int, per_token: float, gather: float) -> float:
    "Seconds of a pass: its arithmetic or what it moves, whichever takes longer; see the page for the constants."
    gradient = kind == "policy" or GRADIENT[kind]
    return max((4 if gradient else 1) * tokens * per_token, UNITS[gradient] * gather)


def dealt(ranks: list[Held]) -> dict[str, float]:
    "Sums over the ranks of one backward pass."
    levels = [each for each, in level([[rank.passes] for rank in ranks])]
    idle = {kind: sum(each.idle(kind) for each in levels) for kind in KINDS}
    own = {kind: sum(len(rank.tokens[kind]) for rank in ranks) for kind in (*KINDS, "policy")}
    units = {kind: UNITS[kind == "policy" or GRADIENT[kind]] for kind in own}
    read = sum(sum(map(sum, rank.tokens.values())) for rank in ranks)
    moved, idle_moved = (sum(units[kind] * count for kind, count in counts.items()) for counts in (own, idle))
    count = sum(idle.values())
    return {"idle": count, "passes": count + sum(own.values()), "idle_tokens": count, "read": read,
            "idle_units": idle_moved, "units": moved + idle_moved}


def times(steps: list[list[Held]], per_token: float, gather: float) -> dict[str, float]:
    "Seconds of a step's passes where all wait at every one; and of the busiest rank by itself, which gathers nothing."
    together = 0.0
    for ranks in zip(*steps):
        for kind in (*KINDS, "policy"):
            for number in range(max(len(rank.tokens[kind]) for rank in ranks)):
                tokens = max(rank.tokens[kind][number] if number < len(rank.tokens[kind]) else 1 for rank in ranks)
                together += cost(kind, tokens, per_token, gather)
    own = lambda held: sum(cost(kind, n, per_token, 0.0) for kind, each in held.tokens.items() for n in each)
    return {"in_step_s": together, "busiest_s": max(sum(map(own, step)) for step in steps)}


SIZES = {"7B": 7.62e9, "32B": 32.8e9}
OPERATIONS, BANDWIDTH = 3e14, 3.6e11  # a second, and bytes a second of one GPU within a node; as in `recipes.memory_estimate`


def simulate(data: Path, pool: int = POOL, deals: int = DEALS) -> dict:
    "Everything; the same numbers in every call."
    pad, cells, corpora = tokenizer_of(data).pad_token_id, [], {}
    for name, source in product(CORPORA, PAIRS):
        trees = trees_of(data, name, source)
        hints = [sum(b.kind == "hint" for b in t.branches) for t in trees]
        pairs = [sum(b.kind == "chosen" for b in t.branches) for t in trees]
        tokens = mean(len(t.ids) for t in trees)
        corpora[f"{name}; {source}"] = {"traces": len(trees), "tokens": tokens, "hints": hints, "pairs": pairs}
        for rollouts in ROLLOUTS:
            steps = pool_of(trees, rollouts, pad, pool)
            for way in READINGS:
                ranks_of = [s[way] for s in steps]
                cells += [{"corpus": name, "pairs": source} | one(way, rollouts, ranks, ranks_of, deals) for ranks in RANKS]
        print(name, source, len(trees), flush=True)
    return {"corpora": corpora, "cells": cells, "pool": pool, "deals": deals}


def one(way: str, rollouts: int, ranks: int, steps: list[list[Held]], deals: int) -> dict:
    "Means over deals."
    found = {"way": way, "rollouts": rollouts, "ranks": ranks}
    draw = random.Random(f"{rollouts}/{ranks}")  # the same deals for every way
    deals = [[draw.choice(steps) for _ in range(ranks)] for _ in range(deals)]
    rows = [Counter() for _ in deals]
    for row, steps in zip(rows, deals):
        for at_once in zip(*steps):
            row.update(dealt(at_once))
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    for size, weights in SIZES.items():
        timed = [times(each, 2 * weights / OPERATIONS, 2 * weights / BANDWIDTH) for each in deals]
        found |= {f"{size}/{key}": mean(row[key] for row in timed) for key in timed[0]}
    shares = [row["idle_units"] / row["units"] for row in rows]
    read, each = total["read"] + total["idle_tokens"], len(deals) * ranks * ACCUMULATION
    return found | {"idle_of_passes": total["idle"] / total["passes"], "idle_of_tokens": total["idle_tokens"] / read,
                    "idle_of_bytes": total["idle_units"] / total["units"],
                    "idle_of_bytes_p90": sorted(shares)[int(0.9 * len(deals))],
                    "passes": total["passes"] / each, "own_passes": (total["passes"] - total["idle"]) / each,
                    "units": total["units"] / each}


if __name__ == "__main__":
    found = simulate(Path(os.environ["COMPOSER_DATA"]))
    (HERE / "simulated.json").write_text(json.dumps(found, indent=1) + "\n")
