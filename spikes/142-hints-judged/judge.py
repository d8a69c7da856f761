# ruff: noqa: E501
"""Draw error turns over all formats, with what their hints say.

    python judge.py draw SEED N > drawn.json        # the turns to be judged by reading
    python judge.py draw 20261127 60 draw-5.json    # the fifth draw: without the turns that the four before it held (`left_out`)
    python judge.py draw 20261128 60 draw-6.json    # the sixth, after the mends: without the turns of the five before it
    python judge.py draw 20261129 60 draw-7.json    # the seventh, after the mends of the sixth: without the turns of the six before it
"""

import json
import random
import sys
import warnings
from collections import defaultdict
from pathlib import Path

from composer_replication.hints.layers import default_composite
from composer_replication.hints.text import action_text
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

warnings.simplefilter("ignore")
SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def paths():
    "The shared trace files and the minimal cases; weak labels are no traces."
    data = sorted(p for p in (SHARED / "data/traces").glob("*.jsonl.gz") if "labels" not in p.name)
    return [*data, *sorted((SHARED / "cases/traces").glob("*.json*"))]


def drawn(seed: str, n: int, left_out: frozenset = frozenset()) -> list[dict]:
    "`n` error turns: formats in turn, one at random of each, until all are drawn; those of the minimal cases count as one format."
    pools = defaultdict(list)
    for path in paths():
        for trace in read_traces(path, on_problem=lambda problem: None):
            for site in (s for s in find_error_sites(trace) if (trace.trace_id, s.turn) not in left_out):
                pools["minimal cases" if path.parent.parent.name == "cases" else trace.format].append((path.name, trace, site))
    for name, pool in pools.items():
        random.Random(f"{seed}/{name}").shuffle(pool)
    order = [(name, pools[name][k]) for k in range(max(map(len, pools.values()))) for name in sorted(pools) if k < len(pools[name])]
    generator, rows = default_composite(), []
    for group, (file, trace, site) in order[:n]:
        hint, turn = generator.hint(trace, site), trace.turns[site.turn]
        rows.append({
            "group": group, "file": file, "trace": trace.trace_id, "turn": site.turn, "shown": site.evidence_turn, "kind": site.kind, "cause": site.cause,
            "said": " ".join(((turn.thinking or "")[-200:] + " | " + turn.content[-400:]).split()), "action": action_text(turn, 900), "error": site.context.error_message,
            "wanted": site.wanted, "layer": hint.layer if hint else None, "hint": hint.text if hint else None,
            "then": action_text(trace.turns[site.evidence_turn + 1], 300) if site.evidence_turn + 1 < len(trace.turns) else "",
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    left = frozenset(map(tuple, json.loads(Path(sys.argv[4]).read_text())["left_out"])) if len(sys.argv) > 4 else frozenset()
    json.dump(drawn(sys.argv[2], int(sys.argv[3]), left), sys.stdout, indent=1, ensure_ascii=False)
