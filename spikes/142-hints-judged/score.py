# ruff: noqa: E501
"""New hints against old ones at the same error turns: what each is worth to a small model, before anything is trained.

    git worktree add ../old ab8a7b3
    PYTHONPATH=../old python score.py hints FILES... > old.json     # the hints of that checkout
    PYTHONPATH=. python score.py hints FILES... > new.json
    PYTHONPATH=. python score.py compare old.json new.json MODEL FILES... > scores.json

Threshold, stated before any run: over the error turns at which the two hints differ and both exist, the new hint's contrast (nats a token by
which the action that worked gains more than the one that failed) is above the old one's, and the 95 % interval of the difference, resampling
tasks, excludes 0. A turn whose hint is the same in both is not scored.

The first run took the coding traces, the checkout ac28e62 as old and states of at most 4,096 tokens: 82 turns differ, 3 of them had a next
action that worked and a state that short; difference +.011 [-.011, .035], three tasks, so nothing is decided. The second, stated before it ran,
takes all shared traces, ab8a7b3 as old (the checkout whose hints the issue judged) and states of at most 6,144 tokens (67 turns of 25 tasks
when this was written, most of them of tau-bench; three files more made it 70 of 28). Both hints of a turn stand in one tree.
"""

import json
import sys
from collections import Counter
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

MOST = 6144  # tokens of a state


def key(trace, site) -> str:
    return f"{trace.trace_id}/{site.turn}"


def sites(paths):
    "The first error of each turn, as `hint_score.repairs` takes them."
    for path in paths:
        for trace in read_traces(path, on_problem=lambda problem: None):
            yield from ((trace, site) for _, site in sorted({s.turn: s for s in reversed(find_error_sites(trace))}.items()))


def hints(paths) -> dict:
    from composer_replication.hints.layers import default_composite

    generator = default_composite()
    return {key(trace, site): hint.text for trace, site in sites(paths) if (hint := generator.hint(trace, site))}


def compare(old: dict, new: dict, model: str, paths) -> dict:
    from composer_replication.experiments.hint_score import action_logprobs, hinted_pairs, repairs, within_limit
    from composer_replication.experiments.statistics import clustered_mean
    from composer_replication.recipes.checkpoint import load_checkpoint
    from composer_replication.tree.length_limit import LengthLimit
    from composer_replication.tree.template import probe_template

    differ = {k for k in old.keys() & new.keys() if old[k] != new[k]}
    traces = [trace for path in paths for trace in read_traces(path, on_problem=lambda problem: None)]

    def source(kind, context):
        return new.get(at) if (at := key(context.trace, context.site)) in differ else None

    checkpoint, left_out, rows = load_checkpoint(model), Counter(), []
    chat = probe_template(checkpoint.tokenizer)
    cases = within_limit(list(repairs(traces, source, left_out)), checkpoint.tokenizer, LengthLimit(MOST), left_out)
    for _, group in groupby(cases, lambda case: case.trace.trace_id):
        group = list(group)
        keys = [key(case.trace, case.site) for case in group]
        tree, labels = hinted_pairs(group, [{"old": old[k], "new": new[k]} for k in keys], chat, MOST)
        found = action_logprobs(checkpoint.model, tree, labels) if labels else {}
        gains = {label: worked[1].mean().item() - failed[1].mean().item() for label, (worked, failed) in found.items()}
        for n, (case, at) in enumerate(zip(group, keys)):
            if {(n, "old"), (n, "new"), (n, "none")} <= gains.keys():
                rows.append({"turn": at, "task": case.task, **{w: gains[n, w] - gains[n, "none"] for w in ("old", "new")}})
        print(len(rows), "of", len(cases), file=sys.stderr, flush=True)
    tasks = [row["task"] for row in rows]
    intervals = {name: clustered_mean([value(row) for row in rows], tasks).__dict__ for name, value in
                 {"old": itemgetter("old"), "new": itemgetter("new"), "difference": lambda row: row["new"] - row["old"]}.items()}
    return {"differ": len(differ), "scored": len(rows), "left out": dict(left_out), **intervals, "rows": rows}


if __name__ == "__main__":
    if sys.argv[1] == "hints":
        made = hints(map(Path, sys.argv[2:]))
    else:
        made = compare(*(json.loads(Path(p).read_text()) for p in sys.argv[2:4]), sys.argv[4], [Path(p) for p in sys.argv[5:]])
    json.dump(made, sys.stdout, indent=1, ensure_ascii=False, default=str)
