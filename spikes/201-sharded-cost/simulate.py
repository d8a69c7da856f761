"""Passes of ranks over recorded traces that are drawn for them at random and dealt anew, by the trainer's own code.

    COMPOSER_DATA=FOLDER python spikes/201-sharded-cost/simulate.py

writes simulated.json: for each kind of traces, way of reading and number of rollouts a rank, what levelling costs. What is done
lies in runs/, so that a run that was cut off goes on from there.
"""
import json
import math
import os
import random
import warnings
from collections import Counter
from dataclasses import astuple, dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoTokenizer

from composer_replication.contrib.fsdp.deal import _pack, branch_tokens, deal
from composer_replication.contrib.fsdp.level import ANSWERS, Passes, PassSettings, count_passes, level
from composer_replication.hints.layers import default_composite
from composer_replication.replay.pairs import DPOPair, recovery_pairs
from composer_replication.traces.read import read_traces
from composer_replication.traces.siblings import action_key
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import RolloutTree, target_hints, target_turns
from composer_replication.tree.forward import trunk_tokens
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.pass_cost import PASS_ENTRIES, SHARDED_ENTRIES, branch_groups, branch_part, wanted_branches
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
SHIPPED = PassSettings(True, True, True, True, True, SHARDED_ENTRIES, True)
READINGS = {  # distils, own trunk, reference, student's and reader's branches read a cache, what a pass is worth, splits
    "as shipped": SHIPPED,
    "rows kept": SHIPPED,
    "as before": PassSettings(True, True, True, False, True, PASS_ENTRIES, True),
    "block mask": PassSettings(True, True, True, True, True, math.inf),
    "channel 2 alone": PassSettings(True, True, False, True, True, SHARDED_ENTRIES, True)}
KEPT = {"rows kept": True, "as before": False}  # each rank keeps its rows: whether sorted; in the other ways they are dealt anew
CONTRAST = ("as shipped", "rows kept", "as before")  # all that is asked of more than one rollout a rank
PAIRS = ("recoveries", "every error turn")  # whose pairs channel 3 gets; the second is what teachers by `replay` could give
ROLLOUTS, RANKS, POOL, DEALS, FEW = (1, 2, 4), (2, 4, 8, 64), 60, 100, 10  # few deals where there are 64 ranks
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


def rollouts_of(data: Path, name: str, pairs: str) -> list[RolloutTree]:
    "Traces with trees that have a hint at every error turn, and pairs; the same ones in every call."
    files, count, longest = CORPORA[name]
    chat, hints = probe_template(tokenizer_of(data)), default_composite()
    traces = [t for file in files for t in read_traces(data / "traces" / f"{file}.jsonl.gz")]
    made, source = [], recovery_pairs if pairs == "recoveries" else every_pair
    for trace in random.Random(0).sample(traces, min(count, len(traces))):
        try:
            hinted = target_hints(trace, target_turns(trace), hints)
            made.append(RolloutTree(trace, build_tree(trace, chat, hinted, source(trace), max_tokens=longest)))
        except ValueError:  # a trace that the template does not take
            continue
    return [r for r in made if r.tree.ids]


def trees_of(data: Path, name: str, pairs: str) -> list:
    return [r.tree for r in rollouts_of(data, name, pairs)]


def row_bytes(rollout: RolloutTree) -> int:
    "Of a row as the trainer sends it: TRL's columns and log-probabilities of the policy and the start, trace and tree."
    ids, first = torch.tensor([rollout.tree.ids]), rollout.tree.spans[0].start if rollout.tree.spans else 1
    parts = {"prompt": ids[:, :first], "completion": ids[:, first:]}
    row = {f"{part}_ids": given for part, given in parts.items()}
    row |= {f"{part}_mask": torch.ones_like(given) for part, given in parts.items()}
    extra = {name: torch.zeros(parts["completion"].shape) for name in ("old_per_token_logps", "ref_logprobs")}
    scalars = {"advantages": torch.zeros(1), "num_items_in_batch": torch.tensor(0)}
    row |= extra | scalars | {"tool_mask": row["completion_mask"], "composer_rows": [rollout]}
    return len(_pack(row, [[0]], 0)[0])


@dataclass(frozen=True)
class Held:
    "What one rank holds for one backward pass."

    passes: Passes
    tokens: dict[str, list[int]]  # of each pass, kind by kind; the policy's own under \"policy\"


def _tokens(batch, kinds, shared, cached, worth, split=False):
    "Of each pass over the branches of these kinds."
    wanted = wanted_branches(batch, kinds)
    if not wanted.any():
        return []
    if not shared:
        length = [[int((batch.branch_segment[row] == s).sum()) for s in range(wanted.shape[1])] for row in range(len(wanted))]
        return [int(batch.branch_fork[row, s]) + length[row][s] for row, s in wanted.nonzero().tolist()]
    *_, part, wanted = branch_part(batch, wanted)
    return [trunk_tokens(batch, kinds)] * (not cached) + [
        columns[:, piece].numel() for _, columns, _, pieces in branch_groups(part, wanted, worth, split) for piece in pieces]


def held(batch, how: PassSettings) -> Held:
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


def pool_of(trees: list, rollouts: int, size: int) -> list[list[int]]:
    "Optimizer steps of a rank at random: numbers of trees."
    draw, numbers = random.Random(f"pool/{rollouts}"), range(len(trees))
    return [[draw.choice(numbers) for _ in range(ACCUMULATION * rollouts)] for _ in range(size)]


def branch_counts(tree) -> tuple[int, int]:
    "Answers of pairs, and hints."
    hints = sum(branch.kind == "hint" for branch in tree.branches)
    return len(tree.branches) - hints, hints


@dataclass
class Reader:
    "Backward passes over trees by their numbers; each is read once."

    trees: list
    pad: int
    known: dict = field(default_factory=dict)

    def __post_init__(self):
        self.tokens = [(*branch_tokens(tree), len(tree.ids)) for tree in self.trees]
        self.counts = [(*branch_counts(tree), len(tree.ids)) for tree in self.trees]  # by which ranks sorted rows that they kept

    def held(self, numbers: tuple[int, ...], way: str) -> Held:
        key = numbers, READINGS[way]
        if key not in self.known:
            self.known[key] = held(pack_trees([self.trees[n] for n in numbers], self.pad), READINGS[way])
        return self.known[key]

    def hands(self, ranks: list[list[int]], way: str) -> tuple[list[list[int]], list[int]]:
        "Trees of each rank in the order of its backward passes, and the numbers of those that came from another rank."
        if way in KEPT:
            return [sorted(step, key=lambda n: self.counts[n], reverse=True) if KEPT[way] else step for step in ranks], []
        every, size = sum(ranks, []), len(ranks[0])
        hands = deal([self.tokens[n] for n in every], len(ranks))
        moved = [every[row] for rank, hand in enumerate(hands) for row in hand if row // size != rank]
        return [[every[row] for row in hand] for hand in hands], moved

    def steps(self, ranks: list[list[int]], way: str) -> tuple[list[list[Held]], list[int]]:
        "What each rank holds in each backward pass, and the trees that came from another rank."
        (hands, moved), rows = self.hands(ranks, way), len(ranks[0]) // ACCUMULATION
        return [[self.held(tuple(hand[at:at + rows]), way) for at in range(0, len(hand), rows)] for hand in hands], moved


def cost(kind: str, tokens: int, per_token: float, gather: float) -> float:
    "Seconds of a pass: its arithmetic or what it moves, whichever takes longer; see the page for the constants."
    gradient = kind == "policy" or GRADIENT[kind]
    return max((4 if gradient else 1) * tokens * per_token, UNITS[gradient] * gather)


def sums(ranks: list[Held]) -> dict[str, float]:
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


def simulate(data: Path, pool: int = POOL, deals: int = DEALS, runs: Path | None = None) -> dict:
    "Everything; the same numbers in every call. runs: where finished parts are kept."
    pad, cells, corpora = tokenizer_of(data).pad_token_id, [], {}
    for name, source in product(CORPORA, PAIRS):
        rollouts_read = rollouts_of(data, name, source)
        trees, sizes = [r.tree for r in rollouts_read], [row_bytes(r) for r in rollouts_read]
        hints = [sum(b.kind == "hint" for b in t.branches) for t in trees]
        pairs = [sum(b.kind == "chosen" for b in t.branches) for t in trees]
        tokens = mean(len(t.ids) for t in trees)
        about = {"traces": len(trees), "tokens": tokens, "hints": hints, "pairs": pairs}
        corpora[f"{name}; {source}"] = about | {"row_bytes": mean(sizes)}
        for rollouts in ROLLOUTS if source == PAIRS[0] else ROLLOUTS[:1]:
            kept = runs and runs / f"{name}-{source}-{rollouts}.json"
            if not (kept and kept.exists()):
                reader, steps = Reader(trees, pad), pool_of(trees, rollouts, pool)
                part = [{"corpus": name, "pairs": source} | one(reader, sizes, way, rollouts, ranks, steps, deals)
                        for way in (READINGS if rollouts == 1 else CONTRAST) for ranks in RANKS]
                if kept:
                    runs.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps(part))
            cells += json.loads(kept.read_text()) if kept else part
            print(name, source, rollouts, len(trees), flush=True)
    return {"corpora": corpora, "cells": cells, "pool": pool, "deals": deals}


def one(reader: Reader, sizes: list[int], way: str, rollouts: int, ranks: int, pool: list[list[int]], deals: int) -> dict:
    "Means over deals."
    draw = random.Random(f"{rollouts}/{ranks}")  # the same deals for every way
    taken = [[draw.choice(pool) for _ in range(ranks)] for _ in range(deals if ranks < 64 else min(FEW, deals))]
    made = [reader.steps(each, way) for each in taken]
    rows, found = [Counter() for _ in made], {"way": way, "rollouts": rollouts, "ranks": ranks}
    for row, (steps, moved) in zip(rows, made):
        for at_once in zip(*steps):
            row.update(sums(at_once))
        row["sent"] += sum(sizes[n] for n in moved)
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    for size, weights in SIZES.items():
        timed = [times(steps, 2 * weights / OPERATIONS, 2 * weights / BANDWIDTH) for steps, _ in made]
        found |= {f"{size}/{key}": mean(row[key] for row in timed) for key in timed[0]}
    shares = [row["idle_units"] / row["units"] for row in rows]
    read, each = total["read"] + total["idle_tokens"], len(made) * ranks * ACCUMULATION
    return found | {"idle_of_passes": total["idle"] / total["passes"], "idle_of_tokens": total["idle_tokens"] / read,
                    "idle_of_bytes": total["idle_units"] / total["units"],
                    "idle_of_bytes_p90": sorted(shares)[int(0.9 * len(made))],
                    "passes": total["passes"] / each, "own_passes": (total["passes"] - total["idle"]) / each,
                    "units": total["units"] / each, "sent_bytes": total["sent"] / each}


if __name__ == "__main__":
    found = simulate(Path(os.environ["COMPOSER_DATA"]), runs=HERE / "runs" / "third-tokens")
    (HERE / "simulated.json").write_text(json.dumps(found, indent=1) + "\n")
