"""How often a model acts rightly at error turns, behind each kind of hint: what an arm with hints can learn from its teacher.

    .venv/bin/python spikes/004-real/reads.py CHECKPOINT TRACES --out READS.json

The notebook reads the file; the gate of the pilot is computed from it.
"""
import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import sql_controls
import torch

from composer_replication.core.files import write_json
from composer_replication.core.hint import hint_at
from composer_replication.core.trace import ErrorSite, ToolCall, Trace
from composer_replication.envs.sql import hints as sql
from composer_replication.envs.sql.tasks import answers, task_of
from composer_replication.experiments.statistics import Interval, clustered_mean
from composer_replication.hints.layers import CompositeHintGenerator, make_layers
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.tool_call_parser import TurnReader
from composer_replication.traces.error_sites import SiteFinder
from composer_replication.traces.habits import detectors_of
from composer_replication.traces.read import read_traces
from composer_replication.tree.build import build_tree
from composer_replication.tree.chat import ChatFormat

TOKENS = 64  # of an action, as in the recipe
SITES = 72  # error turns, each of another task
SOURCES = {"none": None, "own": CompositeHintGenerator(make_layers(["sql", "template", "raw_error"])),
           "exact": sql_controls.exact_hints(), "other site": sql_controls.other_site_hints(),
           "wrong": sql_controls.wrong_hints(), "filler": sql.filler_hints()}


@dataclass(frozen=True)
class State:
    "An error turn of one task, behind one hint or none."

    trace: Trace
    site: ErrorSite
    source: str  # of `SOURCES`
    ids: tuple[int, ...]  # up to the action


def states(traces: Sequence[Trace], chat: ChatFormat) -> Iterator[State]:
    "An error turn of each task, as many tasks as `SITES`, behind every source."
    find, by_task = SiteFinder(detectors_of(["empty_result", "wrong_result"])), {}
    for trace in traces:
        for site in {site.turn: site for site in reversed(find(trace))}.values():
            by_task.setdefault(trace.task_id, []).append((trace, site))
    rng, found = random.Random("004-real/reads"), 0
    for task in rng.sample(sorted(by_task), len(by_task)):
        made = _behind(*rng.choice(by_task[task]), chat)
        found += bool(made)
        if found <= SITES:
            yield from made


def _behind(trace, site, chat) -> list[State]:
    "Empty where a source has no hint or the template no place."
    made, upto = [], replace(trace, turns=trace.turns[:site.turn + 1])
    for name, source in SOURCES.items():
        hint = source and hint_at(source, trace, site)
        tree = build_tree(upto, chat, {site.turn: hint.text} if hint else {})
        if tree.refused or (source and not hint):
            return []
        branch, = tree.branches or (None,)
        ids = tree.ids[:branch.fork] + branch.ids[:branch.start] if branch else tree.ids[:tree.span(site.turn).start]
        made.append(State(trace, site, name, ids))
    return made


def right(state: State, calls: Sequence[ToolCall]) -> bool:
    "Whether an action looks at what is not known yet, or answers the question."
    if len(calls) != 1 or not calls[0].parsed:
        return False
    call, task = calls[0], task_of(state.trace.task_id)
    if call.name == "query":
        return answers(task, str(call.arguments.get("sql") or ""))
    wanted = sql.unseen(task, state.trace, state.site.turn)
    return wanted is not None and (call.name, dict(call.arguments)) == wanted


@torch.no_grad()
def act(policy: TransformersPolicy, of: Sequence[State], width: int = 16) -> list[bool]:
    "Whether the most likely action in each state is right."
    reader, found = TurnReader.of(policy.chat), {}
    order = sorted(range(len(of)), key=lambda n: len(of[n].ids))
    for first in range(0, len(order), width):
        numbers = order[first:first + width]
        rows = [list(of[n].ids) for n in numbers]
        with policy.batch(Sampling(temperature=0.0)) as batch:
            samples = batch.sample(numbers, rows, [TOKENS] * len(rows), list(map(str, numbers)))
        found |= {n: right(of[n], reader.read(s.ids, policy.stops, of[n].ids, s.cut).calls) for n, s in zip(numbers, samples)}
    return [found[n] for n in range(len(of))]


def table(of: Sequence[State], rights: Sequence[bool]) -> dict:
    "Rows by error turn: task, kind, and for each source whether the action was right."
    rows = {}
    for state, ok in zip(of, rights):
        key = state.trace.trace_id, state.site.turn
        rows.setdefault(key, {"task": state.trace.task_id, "turn": state.site.turn, "kind": state.site.kind})[state.source] = ok
    return {"sites": list(rows.values())}


def share(rows: Sequence[Mapping], first: str, second: str | None = None) -> Interval:
    "Share of error turns with a right action behind the first source, or its difference to the second's; tasks resampled."
    values = [row[first] - (row[second] if second else 0) for row in rows]
    return clustered_mean(values, [row["task"] for row in rows])


def main():
    parser = argparse.ArgumentParser(description="How often a checkpoint acts rightly at recorded error turns.")
    parser.add_argument("checkpoint")
    parser.add_argument("traces")
    parser.add_argument("--out", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_checkpoint(asked.checkpoint)
    policy = TransformersPolicy(loaded.model, loaded.tokenizer)
    of = list(states(list(read_traces(asked.traces)), policy.chat))
    made = table(of, act(policy, of))
    write_json(Path(asked.out), made)
    print(len(made["sites"]), Counter(row["kind"] for row in made["sites"]))
    for name in SOURCES:
        print(f"{name:10}", json.dumps(share(made["sites"], name).__dict__, default=str))


if __name__ == "__main__":
    main()
