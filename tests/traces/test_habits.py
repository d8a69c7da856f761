"""Habits on recorded traces, against plain scans of the same records; and that they are off until they are asked for."""
import json

import pytest

from composer_replication.core.trace import ERROR_KINDS, ToolCall, Trace, Turn
from composer_replication.traces.error_detectors import DETECTORS, register_detector
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.habits import HABITS, ignored_format, long_explanation, look_for, register_habit, repeated_call
from composer_replication.traces.read import read_traces
from composer_replication.tree.example import target_turns


@pytest.fixture
def unchanged(monkeypatch):
    monkeypatch.setitem(DETECTORS, "*", list(DETECTORS["*"]))
    before = dict(HABITS)
    look_for([])
    yield
    look_for([])
    HABITS.clear()
    HABITS.update(before)


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


def test_habits_are_off_until_they_are_asked_for_and_an_error_goes_first(unchanged):
    trace = repeated()
    assert [s.kind for s in find_error_sites(trace)] == ["runtime_error", "runtime_error"]
    look_for(["repeated_call"])
    look_for(["repeated_call"])
    assert DETECTORS["*"].count(repeated_call) == 1
    assert {s.turn: s.kind for s in target_turns(trace).values()} == {3: "repeated_call", 5: "runtime_error", 7: "runtime_error"}
    assert "repeated_call" not in ERROR_KINDS
    look_for(["long_explanation"])
    assert [s.kind for s in find_error_sites(trace)] == ["runtime_error", "runtime_error"], "the next recipe has not asked for it"


def test_what_is_always_registered_stays(unchanged):
    register_detector("*", repeated_call)
    look_for(["repeated_call"])
    look_for([])
    assert DETECTORS["*"].count(repeated_call) == 1


def test_another_answer_is_no_repetition():
    trace = repeated()
    assert found(repeated_call, trace) == [3, 7]


def test_ones_own_habit_has_a_name(unchanged):
    from composer_replication.traces.error_detectors import Detection

    @register_habit
    def shouting(trace, position):
        return Detection("shouting", "!") if trace.turns[position].content.isupper() else None
    look_for(["shouting"])
    assert [s.kind for s in find_error_sites(Trace("t", (Turn("user", "Go."), Turn("assistant", "YES"))))] == ["shouting"]


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
