"""Small traces after real files: what is read, where it failed, what is wanted, and what the hint says."""

import json
from pathlib import Path

import pytest

from composer_replication.hints.layers import default_composite
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

FOLDER = Path(__file__).parents[1] / "fixtures" / "traces_2"
CASES = sorted(path.name.removesuffix(".expect.json") for path in FOLDER.glob("*.expect.json"))


@pytest.mark.parametrize("name", CASES)
def test_a_small_trace_is_read_as_it_should(name):
    expected = json.loads((FOLDER / f"{name}.expect.json").read_text())
    path = next(p for p in FOLDER.glob(f"{name}.json*"))
    traces = list(read_traces(path, on_problem=lambda problem: None))
    assert len(traces) == expected["traces"]
    [trace] = traces
    sites = find_error_sites(trace)
    if "calls" in expected:
        assert sum(len(t.tool_calls) for t in trace.turns) == expected["calls"]
    if "results" in expected:
        assert sum(t.observation for t in trace.turns) == expected["results"]
    assert len(sites) == len(expected["sites"])
    for found, given in zip(sites, expected["sites"], strict=True):
        got = {"message_index": found.message_index, "evidence_index": found.evidence_index, "kind": found.kind}
        assert {key: got[key] for key in given} == given
    assert sum(bool(s.wanted) for s in sites) <= expected.get("wanted", len(sites))
    hints = [str(default_composite().hint(trace, s) or "") for s in sites]
    if word := expected.get("hint_should_mention"):
        assert any(word in hint for hint in hints)
    if word := expected.get("hint_should_not_mention"):
        assert not any(word in hint for hint in hints)
    if word := expected.get("error_should_mention"):  # a hint never repeats a name that does not exist
        assert any(word in site.context.error_message for site in sites)
