"""Habits on recorded traces, against plain scans of the same records; and that they disturb no finder that was not given them."""
import json
import pickle
import sys
from dataclasses import replace

import pytest

from composer_replication.core.trace import ERROR_KINDS, ToolCall, Trace, Turn
from composer_replication.traces.error_detectors import Detection
from composer_replication.traces.error_sites import SiteFinder, find_error_sites
from composer_replication.traces.habits import (
    HABITS,
    detectors_of,
    ignored_format,
    long_explanation,
    register_habit,
    repeated_call,
)
from composer_replication.traces.read import read_traces
from composer_replication.tree.example import target_turns


def found(detector, trace):
    return [i for i in range(len(trace.turns)) if detector(trace, i)]


def scanned(trace):
    "Repeated calls, by comparing every two turns as JSON."
    def did(i):
        calls = [[c.name, c.arguments] for c in trace.turns[i].tool_calls]
        answers, at = [], i + 1
        while at < len(trace.turns) and trace.turns[at].observation:
            answers.append(trace.turns[at].content)
            at += 1
        return " ".join(json.dumps(calls, sort_keys=True).split()), answers
    turns = [i for i, t in enumerate(trace.turns) if t.tool_calls]
    return [i for i in turns if any(did(i)[1]) and any(did(j) == did(i) for j in turns if j < i)]


@pytest.mark.parametrize("file, least", [("taubench_airline_gpt4o", 5), ("miniswe_deepseek_chat_dev", 10)])
def test_repeated_calls_are_those_of_a_plain_scan(shared_data, file, least):
    traces = [t for n, t in enumerate(read_traces(shared_data / "traces" / f"{file}.jsonl.gz")) if n % 3 == 0]
    ours, theirs = [found(repeated_call, t) for t in traces], [scanned(t) for t in traces]
    more = [set(a) - set(b) for a, b in zip(ours, theirs)]
    assert all(set(b) <= set(a) for a, b in zip(ours, theirs)) and sum(map(len, more)) <= 2  # white space within arguments
    assert sum(map(len, theirs)) >= least


def test_ignored_rules_of_a_policy_are_those_of_a_plain_scan(shared_data):
    count = 0
    for trace in read_traces(shared_data / "traces" / "taubench_airline_gpt4o.jsonl.gz"):
        stated = "if you make a tool call, you should not respond to the user" in " ".join(trace.turns[0].content.split())
        both = [i for i, t in enumerate(trace.turns) if t.tool_calls and t.content.strip()]
        flagged = found(ignored_format, trace)
        assert set(both) <= set(flagged) if stated else not flagged
        assert all(len(trace.turns[i].tool_calls) > 1 for i in set(flagged) - set(both))
        count += len(flagged)
    assert count > 50


def test_long_explanations_are_long(shared_data):
    for trace in read_traces(shared_data / "traces" / "moatless_claude35_other_repos.jsonl.gz"):
        long = [i for i, t in enumerate(trace.turns) if t.tool_calls and len(t.content.split()) > 120]
        assert found(long_explanation, trace) == long


def repeated():
    call = Turn("assistant", tool_calls=(ToolCall("read", {"path": "a"}),))
    ok, bad = (Turn("tool", text, observation=True, failed=flag) for text, flag in (("alpha", False), ("no file", True)))
    return Trace("t", (Turn("user", "Go."), call, ok, call, ok, call, bad, call, bad))


def kinds(sites):
    return {site.turn: site.kind for site in sites}


def test_two_finders_with_different_habits_do_not_disturb_one_another():
    trace, plain = repeated(), {5: "runtime_error", 7: "runtime_error"}
    repeats, shouts = SiteFinder((repeated_call,)), SiteFinder((shouting,))
    assert kinds(find_error_sites(trace)) == plain
    assert kinds(target_turns(trace, find_sites=repeats).values()) == {3: "repeated_call"} | plain, "an error goes first"
    assert kinds(shouts(trace)) == plain == kinds(find_error_sites(trace))
    assert kinds(repeats(replace(trace, turns=(*trace.turns, Turn("assistant", "YES"))))) == kinds(repeats(trace))
    assert kinds(shouts(replace(trace, turns=(*trace.turns, Turn("assistant", "YES"))))) == plain | {9: "shouting"}
    assert "repeated_call" not in ERROR_KINDS


def test_a_finder_is_its_settings():
    assert SiteFinder((repeated_call,)) == SiteFinder((repeated_call,)) != SiteFinder()
    assert pickle.loads(pickle.dumps(SiteFinder((repeated_call,), "cause"))) == SiteFinder((repeated_call,), "cause")
    assert find_error_sites(repeated(), detectors=[repeated_call]) == SiteFinder((repeated_call,))(repeated())
    with pytest.raises(ValueError, match="shown or cause"):
        SiteFinder(blame="everybody")


def shouting(trace, position):
    return Detection("shouting", "!") if trace.turns[position].content.isupper() else None


def test_ones_own_habit_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "loud_habit.py").write_text("def shouting(trace, position):\n    return None\n")
    [own, known] = detectors_of(["loud_habit:shouting", "repeated_call", "loud_habit:shouting"])
    assert own.__module__ == "loud_habit" and known is repeated_call
    with pytest.raises(ValueError, match="has no 'whispering' that makes a detector"):
        detectors_of(["loud_habit:whispering"])
    with pytest.raises(ValueError, match="there is no detector 'luck'; use .*repeated_call.*package.module:name"):
        detectors_of(["luck"])
    monkeypatch.delitem(HABITS, "shouting", raising=False)
    assert detectors_of([register_habit(shouting).__name__]) == (shouting,)
    del HABITS["shouting"]


def test_another_answer_is_no_repetition():
    trace = repeated()
    assert found(repeated_call, trace) == [3, 7]


def reading(*tools):
    "Turns with one call each; a name with a space is a shell command."
    turns = [Turn("user", "Go.")]
    for tool in tools:
        if tool == "?":
            turns.append(Turn("user", "And?"))
            continue
        call = ToolCall("bash", {"command": tool}) if " " in tool else ToolCall(tool, {"path": "a.py"})
        turns += [Turn("assistant", tool_calls=(call,)), Turn("tool", "x", observation=True)]
    return Trace("t", tuple(turns))


@pytest.mark.parametrize(
    "tools, found",
    [
        (["Read"] * 8, [15]),
        (["Read"] * 16, [15, 31]),
        (["cat a.py", "grep -n x a.py", "Read", "search_code"] * 2, [15]),
        (["Read"] * 7, []),
        (["Read"] * 5 + ["Edit"] + ["Read"] * 5, []),
        (["Read"] * 5 + ["pytest -q"] + ["Read"] * 5, []),
        (["Read"] * 5 + ["?"] + ["Read"] * 5, []),
        (["cat a.py; make"] * 9, []),
    ],
)
def test_exploration_without_end(tools, found):
    from composer_replication.traces.habits import wasteful_exploration

    trace = reading(*tools)
    assert [at for at in range(len(trace.turns)) if wasteful_exploration(trace, at)] == found
