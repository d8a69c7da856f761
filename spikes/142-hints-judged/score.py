# ruff: noqa: E501
"""New hints against old ones at the same error turns: what each is worth to a small model, before anything is trained.

    git worktree add ../old ac28e62
    PYTHONPATH=../old python score.py hints FILES... > old.json     # the hints of that checkout
    PYTHONPATH=. python score.py hints FILES... > new.json
    PYTHONPATH=. python score.py compare old.json new.json MODEL FILES... > scores.json

Threshold, stated before any run: over the error turns at which the two hints differ and both exist, the new hint's contrast (nats a token by
which the action that worked gains more than the one that failed) is above the old one's, and the 95 % interval of the difference, resampling
tasks, excludes 0. Stands: turns drawn with seed 142, at most 4,096 tokens; a turn whose hint is the same in both is not scored.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path

from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

MOST = 200  # turns


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
    from composer_replication.experiments.hint_score import repairs, score_sites
    from composer_replication.experiments.statistics import clustered_mean
    from composer_replication.recipes.checkpoint import load_checkpoint

    differ = sorted(k for k in old.keys() & new.keys() if old[k] != new[k])
    drawn = set(random.Random(142).sample(differ, min(MOST, len(differ))))
    traces = [trace for path in paths for trace in read_traces(path, on_problem=lambda problem: None)]
    checkpoint, contrasts = load_checkpoint(model), {}
    for name, texts in (("old", old), ("new", new)):

        def source(kind, context, texts=texts):
            return texts.get(key(context.trace, context.site)) if key(context.trace, context.site) in drawn else None

        cases = list(repairs(traces, source, Counter()))
        for score in score_sites(checkpoint.model, checkpoint.tokenizer, cases, 4096, 0):
            if (contrast := score.contrast("own")) is not None:
                contrasts.setdefault(f"{score.case.trace.trace_id}/{score.case.site.turn}", {"task": score.case.task})[name] = contrast
    both = [row for row in contrasts.values() if {"old", "new"} <= row.keys()]
    interval = clustered_mean([row["new"] - row["old"] for row in both], [row["task"] for row in both])
    return {"differ": len(differ), "scored": len(both), "old": clustered_mean([r["old"] for r in both], [r["task"] for r in both]).__dict__,
            "new": clustered_mean([r["new"] for r in both], [r["task"] for r in both]).__dict__, "difference": interval.__dict__}  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "hints":
        made = hints(map(Path, sys.argv[2:]))
    else:
        made = compare(*(json.loads(Path(p).read_text()) for p in sys.argv[2:4]), sys.argv[4], [Path(p) for p in sys.argv[5:]])
    json.dump(made, sys.stdout, indent=1, ensure_ascii=False, default=str)
