"""Recovery pairs against a plain oracle that spells the rule out over all pairs of turns, and on recorded SQL sessions."""
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.replay.pairs import changed_nothing, reads_only, recovery_pairs
from composer_replication.traces.read import read_traces
from composer_replication.traces.siblings import failed_turns

TOOLS = tuple({"type": "function", "function": {"name": name, "description": name, "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}}}
    for name in ("get_row", "put_row"))


def call(name, **arguments):
    return Turn("assistant", "so", tool_calls=(ToolCall(name, arguments),))


# what an action does: (turn, whether it failed, whether a failure of it certainly changed nothing)
ACTIONS = {"read": call("get_row", x="a1"), "read fails": call("get_row", x="b2"), "write": call("put_row", x="c3"),
           "write fails": call("put_row", x="d4"), "unknown": call("del_row", x="e5"), "misfit": call("put_row", y="f6"),
           "learned": call("get_row", x="g7")}
FAILS = {"read fails", "write fails", "unknown", "misfit"}
HARMLESS = {"read fails", "unknown", "misfit"}
SCRIPT = st.lists(st.sampled_from([*ACTIONS, "user speaks"]), min_size=1, max_size=7)


def played(names, tell):
    "A trace of these actions, each answered; where `tell`, failures name what `learned` then asks for."
    turns = [Turn("user", "Go.")]
    for name in names:
        if name == "user speaks":
            turns.append(Turn("user", "Well?"))
            continue
        failed = name in FAILS
        answer = ("no row; try g7" if tell else "no row") if failed else "row"
        turns += [ACTIONS[name], Turn("tool", answer, observation=True, failed=failed)]
    return Trace("t", tuple(turns), TOOLS)


def oracle(names, tell):
    "All (failed, recovery) numbers of the script that the rule allows, by trying every two."
    found = []
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            between = names[i:j]
            if first not in FAILS or any(n not in HARMLESS for n in between) or names[j] in FAILS or names[j] == "user speaks":
                continue
            known = any(n in FAILS or n == "learned" for n in names[:i])
            if names[j] == "learned" and tell and not known:
                continue
            found.append((i, j))
    return found


@settings(max_examples=300)
@given(SCRIPT, st.booleans())
def test_pairs_are_those_of_the_oracle(names, tell):
    trace = played(names, tell)
    places, at = [], 1  # of each entry of the script in the trace
    for name in names:
        places.append(at)
        at += 1 if name == "user speaks" else 2
    made = [(p.turn, int(p.source.partition(":")[2])) for p in recovery_pairs(trace)]
    assert made == [(places[i], places[j]) for i, j in oracle(names, tell)]
    for pair in recovery_pairs(trace):
        assert pair.rejected == trace.turns[pair.turn] and pair.chosen.tool_calls == trace.turns[int(pair.source[9:])].tool_calls
        assert (pair.chosen.content, pair.chosen.thinking) == (pair.rejected.content, pair.rejected.thinking)


def test_a_recovery_that_nothing_answered_is_none():
    trace = played(["read fails", "read"], False)
    assert len(recovery_pairs(trace)) == 1 and recovery_pairs(replace(trace, turns=trace.turns[:-1])) == []


def test_words_and_reasoning_after_the_error_are_not_taken():
    first = replace(ACTIONS["read fails"], content="I look.", thinking="easy")
    last = replace(ACTIONS["read"], content="Sorry!", thinking="it failed")
    trace = played(["read fails", "read"], False)
    trace = replace(trace, turns=(trace.turns[0], first, trace.turns[2], last, trace.turns[4]))
    [pair] = recovery_pairs(trace)
    assert (pair.chosen.content, pair.chosen.thinking, pair.chosen.tool_calls) == ("I look.", "easy", ACTIONS["read"].tool_calls)


def test_a_text_action_is_not_recovered_by_a_call_nor_by_a_submission():
    told = Turn("user", "no", observation=True, failed=True)
    ok = Turn("user", "fine", observation=True, failed=False)
    for action in (ACTIONS["read"], Turn("assistant", "submit"), Turn("assistant", "DELETE FROM a")):
        trace = Trace("t", (Turn("user", "Go."), Turn("assistant", "SELECT a FROM b"), told, action, ok))
        assert recovery_pairs(trace) == []


@pytest.mark.parametrize("annotations, name, reads", [
    ({"readOnlyHint": True}, "run", True), ({"readOnlyHint": False}, "get_it", False), ({}, "run", False)])
def test_a_tools_own_word_decides_first(annotations, name, reads):
    tool = {"type": "function", "function": {"name": name, "description": "", "parameters": {}, "annotations": annotations}}
    assert reads_only(ToolCall(name, {}), (tool,)) is reads


@pytest.mark.parametrize("name, reads", [
    ("search_files", True), ("get_user_details", True), ("readFile", True), ("list-updates", True), ("search_replace", False),
    ("find_and_replace", False), ("get_or_create_user", False), ("read_write", False), ("findOrInsertRow", False),
    ("show_and_delete", False)])
def test_a_name_that_also_changes_something_does_not_only_read(name, reads):
    assert reads_only(ToolCall(name, {})) is reads


@pytest.mark.parametrize("parameters, arguments, harmless", [
    ({"type": "object", "properties": {"a": {"type": "string"}}}, {"b": 1}, True),
    ({"type": "object", "properties": {}}, {"b": 1}, True),
    ({"type": "object"}, {"b": 1}, False),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, {"b": 1}, False),
    ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": True}, {"a": 1}, True)])
def test_an_unknown_argument_shows_that_a_call_never_ran_only_where_all_arguments_are_listed(parameters, arguments, harmless):
    tool = {"type": "function", "function": {"name": "run", "description": "", "parameters": parameters}}
    call = ToolCall("run", arguments, "c")
    turns = Turn("user", "Go."), Turn("assistant", tool_calls=(call,)), Turn("tool", "Error: no", tool_call_id="c")
    assert changed_nothing(Trace("t", turns, (tool,)), 1) is harmless


def test_a_schema_that_is_none_makes_no_pair():
    schema = {"name": "put_row", "description": "", "parameters": {"type": "HashMap"}}
    bad = ({"type": "function", "function": schema},)
    trace = replace(played(["write fails", "write"], False), tools=bad)
    assert recovery_pairs(trace) == []


def test_recorded_sql_sessions_hold_a_pair_at_every_tenth_failure(shared_data):
    failures = pairs = 0
    for n, trace in enumerate(read_traces(shared_data / "traces" / "intercode_sql_multimodel.jsonl.gz")):
        if n % 8:
            continue
        failures += len(failed_turns(trace))
        for pair in recovery_pairs(trace):
            pairs += 1
            at = int(pair.source[9:])
            texts = [turn.content for turn in (pair.chosen, pair.rejected)]
            assert at not in failed_turns(trace)
            assert all(re.match(r"\s*(execute\[)?\s*(select|show|desc)", t, re.I) for t in texts)
            assert {i for i in range(pair.turn, at) if trace.turns[i].role == "assistant"} <= failed_turns(trace)
    assert 0.07 < pairs / failures < 0.14
