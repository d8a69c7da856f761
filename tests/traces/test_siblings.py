"States, siblings and recorded pairs; over the shared traces, against a naive comparison of whole histories."

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.core.trace import ErrorSite, HintContext, ToolCall, Trace, TraceProblem, Turn
from composer_replication.replay.pairs import DPOPair, recovery_pairs, sibling_pairs
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces
from composer_replication.traces.siblings import SiblingIndex, action_key, failed_turns, state_keys

ASK = Turn("user", "Where is the cat?")
OOPS = Turn("tool", "Error: no such box", observation=True, failed=True)
FINE = Turn("tool", "red, blue", observation=True, failed=False)


def act(name, **arguments):
    return Turn("assistant", tool_calls=(ToolCall(name, arguments),))


def attempt(id, action, answer, reward, *more, task="cats"):
    return Trace(id, (ASK, action, answer, *more), task_id=task, reward=reward)


def site(trace, turn=1):
    return ErrorSite(trace.trace_id, turn, turn + 1, turn, turn + 1, "runtime_error", HintContext("runtime_error", "Error"))


def index_of(*pairs):
    index = SiblingIndex()
    for trace, failed in pairs:
        index.add(trace, [site(trace, t) for t in failed])
    return index


BAD = attempt("bad", act("open", box="grey"), OOPS, 0.0)
GOOD = attempt("good", act("list"), FINE, 1.0)


def test_a_sibling_that_got_past_is_found_best_first():
    poor, none = attempt("poor", act("peek"), FINE, 0.0), attempt("none", act("wait"), FINE, None)
    twice = [attempt(i, act("look"), FINE, 1.0) for i in ("x", "y")]
    index = index_of((BAD, [1]), (poor, []), (none, []), (GOOD, []), *((t, []) for t in twice))
    # most reward, then what most did, then the shorter, then the id; an unknown reward comes last
    assert [s.trace_id for s in index.ways_past(BAD, 1)] == ["x", "y", "good", "poor", "none"]


@pytest.mark.parametrize(
    "other",
    [
        attempt("bad", act("list"), FINE, 1.0),  # the attempt itself, however it looks
        attempt("same", replace(BAD.turns[1], thinking="x", content="Now:"), FINE, 1.0),  # the identical action
        attempt("worse", act("list"), FINE, -1.0),  # earned less
        attempt("elsewhere", act("list"), FINE, 1.0, task="dogs"),  # another task
        attempt("nowhere", act("list"), FINE, 1.0, task=None),
        attempt("form", Turn("assistant", "execute[list]"), FINE, 1.0),  # acts in another form
    ],
)
def test_who_is_no_sibling(other):
    assert index_of((other, []), (BAD, [1])).ways_past(BAD, 1) == []


def test_an_attempt_is_not_its_own_sibling_among_others():
    recorded = attempt("bad", act("list"), FINE, 5.0)  # the same id, indexed with another action
    poor = attempt("poor", act("peek"), FINE, 0.0)
    assert [s.trace_id for s in index_of((recorded, []), (poor, [])).ways_past(BAD, 1)] == ["poor"]


def test_an_action_that_failed_too_or_that_nothing_followed_is_no_way_past():
    unfinished = Trace("unfinished", (ASK, act("list")), task_id="cats", reward=0.0)
    answered = replace(unfinished, trace_id="answered", reward=1.0)
    assert index_of((attempt("also", act("list"), OOPS, 1.0), [1])).ways_past(BAD, 1) == []
    assert index_of((unfinished, [])).ways_past(BAD, 1) == []
    assert [s.trace_id for s in index_of((answered, [])).ways_past(BAD, 1)] == ["answered"]


def test_sampled_tokens_of_another_attempt_are_not_kept():
    sampled = replace(GOOD, turns=(ASK, replace(GOOD.turns[1], token_ids=(1, 2), logprobs=(-0.1, -0.2)), FINE))
    [step] = index_of((sampled, [])).ways_past(BAD, 1)
    assert step.action.token_ids is None and step.action.logprobs is None


def test_the_state_leaves_out_thinking_ids_and_white_space_and_nothing_else():
    turns = (ASK, replace(act("open", box="grey", n=1), thinking="a"), OOPS, act("list"))
    base = dict(state_keys(Trace("a", turns, task_id="t")))

    def keys(position, **change):
        changed = list(turns)
        changed[position] = replace(turns[position], **change)
        return dict(state_keys(Trace("b", tuple(changed), task_id="t")))

    for same in (
        dict(thinking=None),
        dict(tool_calls=(ToolCall("open", {"n": 1, "box": " grey "}, "id9"),)),
        dict(source_index=7),
    ):
        assert keys(1, **same) == base
    assert keys(0, content="Where  is\nthe cat? ") == base
    for other in (dict(content="I open it."), dict(tool_calls=(ToolCall("open", {"n": 2, "box": "grey"}),)), dict(tool_calls=())):
        assert keys(1, **other)[1] == base[1] and keys(1, **other)[3] != base[3]
    assert keys(2, content="Error: no such bag")[3] != base[3]
    assert keys(0, role="system")[1] != base[1]


def test_where_nothing_was_recorded_before_there_is_no_state():
    greeting = Trace("a", (Turn("assistant", "Hi!"), ASK, act("list"), FINE), task_id="t")
    assert [p for p, _ in state_keys(greeting)] == [2]


def test_keys_are_the_same_in_every_process():
    code = (
        "from composer_replication.traces.siblings import state_keys\n"
        "from composer_replication.core.trace import *\n"
        "t = Trace('a', (Turn('user', 'x'), Turn('assistant', tool_calls=(ToolCall('f', {'b': 1, 'a': [2]}),)), "
        "Turn('assistant', 'y')), task_id='t')\n"
        "print([k.hex() for _, k in state_keys(t)])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    call = Turn("assistant", tool_calls=(ToolCall("f", {"b": 1, "a": [2]}),))
    here = Trace("a", (Turn("user", "x"), call, Turn("assistant", "y")), task_id="t")
    assert other.stdout == f"{[k.hex() for _, k in state_keys(here)]}\n"


def test_pairs_prefer_what_got_past_and_what_earned_more():
    middling = attempt("middling", act("peek"), FINE, 0.5)
    index = index_of((BAD, [1]), (GOOD, []), (middling, []))
    assert sibling_pairs(BAD, index) == [DPOPair("bad", 1, GOOD.turns[1], BAD.turns[1], "sibling:error:good")]
    assert [p.source for p in sibling_pairs(middling, index)] == ["sibling:reward:good"]
    assert sibling_pairs(GOOD, index) == []
    tied = attempt("tied", act("wait"), FINE, 1.0)
    assert sibling_pairs(tied, index) == []  # neither failed and both earned the same
    assert sibling_pairs(replace(middling, reward=None), index) == []  # nothing failed, and nobody knows who did better
    assert sibling_pairs(replace(BAD, task_id=None), index) == []


def test_a_pair_of_one_action_or_of_a_question_is_refused():
    with pytest.raises(TraceProblem, match="same action"):
        DPOPair("t", 1, GOOD.turns[1], replace(GOOD.turns[1], thinking="x"), "s")
    with pytest.raises(TraceProblem, match="not the assistant's"):
        DPOPair("t", 1, ASK, GOOD.turns[1], "s")


content = st.text(max_size=30)
turn = st.one_of(
    st.builds(Turn, st.sampled_from(["user", "system"]), content),
    st.builds(Turn, st.just("assistant"), content),
    st.builds(
        lambda n, a: Turn("assistant", tool_calls=(ToolCall(n, a),)),
        content,
        st.one_of(content, st.dictionaries(content, st.one_of(content, st.integers(), st.floats(), st.none()), max_size=3)),
    ),
)


def plain(value):
    "A second, slower reading of what counts as the same."
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        return tuple(sorted((plain(k), repr(plain(v))) for k, v in value.items()))
    return value


def history(trace, position):
    return (
        trace.task_id,
        tuple(
            (t.role, plain(t.content), tuple((plain(c.name), plain(c.arguments)) for c in t.tool_calls))
            for t in trace.turns[:position]
        ),
    )


@given(st.lists(turn, max_size=5), st.lists(turn, max_size=5), st.integers(0, 5))
def test_keys_are_equal_exactly_where_histories_are(first, second, common):
    a, b = (
        Trace(i, tuple(first[:common]) + tuple(rest) + (Turn("assistant", "end"),), task_id="t")
        for i, rest in (("a", first[common:]), ("b", second))
    )
    for i, ki in state_keys(a):
        for j, kj in state_keys(b):
            assert (ki == kj) == (repr(history(a, i)) == repr(history(b, j)))


@pytest.mark.data
@pytest.mark.parametrize(
    "name, some", [("tau2_airline_multimodel", True), ("tau2_telecom_multimodel", False), ("taubench_airline_gpt4o", True)]
)
def test_shared_states_of_real_traces_are_those_of_a_naive_comparison(shared_data, name, some):
    traces = list(read_traces(shared_data / "traces" / f"{name}.jsonl.gz"))
    index = SiblingIndex(traces)
    seen = {}
    for t in traces:
        for p, turn in enumerate(t.turns):
            if p and turn.role == "assistant":
                seen.setdefault(repr(history(t, p)), set()).add(t.trace_id)
    assert len(index) == len(seen)
    assert index.shared == sum(len(ids) > 1 for ids in seen.values()) and (index.shared > 0) == some


@pytest.mark.data
def test_intercode_siblings_and_pairs(shared_data):
    tasks = {}
    for t in read_traces(shared_data / "traces" / "intercode_sql_multimodel.jsonl.gz"):
        if len(tasks) < 120 or t.task_id in tasks:
            tasks.setdefault(t.task_id, []).append(t)
    traces = [t for group in tasks.values() for t in group]
    index, with_way, pairs = SiblingIndex(traces), 0, []
    by_id = {t.trace_id: t for t in traces}
    for t in traces:
        sites = find_error_sites(t)
        for s in sites:
            ways = index.ways_past(t, s.turn)
            with_way += bool(ways)
            for w in ways:
                other = by_id[w.trace_id]
                assert w.trace_id != t.trace_id and other.task_id == t.task_id
                assert repr(history(other, w.turn)) == repr(history(t, s.turn))
                assert action_key(w.action) != action_key(t.turns[s.turn])
                assert w.turn not in {x.turn for x in find_error_sites(other)}
        pairs += sibling_pairs(t, index)
    assert with_way > 50 and len(pairs) > 50
    assert {p.source.split(":")[1] for p in pairs} == {"error", "reward"}
    # every two attempts part at one state only, so each pair of attempts gives a trace at most one pair
    assert all(
        len({p.source for p in pairs if p.trace_id == t.trace_id}) == len([p for p in pairs if p.trace_id == t.trace_id])
        for t in traces[:60]
    )


def test_a_wanted_failure_is_neither_rejected_nor_chosen():
    def run(command, said=""):
        return Turn("assistant", said, tool_calls=(ToolCall("bash", {"command": command}),))

    red = Turn("tool", "1 failed in 0.1s", observation=True, failed=True)
    wanted = attempt("tdd", run("pytest -q", "The new test should fail now."), red, 0.0)
    broken, good = attempt("broken", run("pytest"), red, 0.0), attempt("good", run("ls"), FINE, 0.0)
    assert [bool(s.wanted) for t in (wanted, broken) for s in find_error_sites(t)] == [True, False]
    assert (failed_turns(wanted), failed_turns(wanted, wanted=True), failed_turns(broken)) == (set(), {1}, {1})
    index = SiblingIndex([wanted, broken, good])
    assert [sibling_pairs(t, index) for t in (wanted, good)] == [[], []]
    assert [p.source for p in sibling_pairs(broken, index)] == ["sibling:error:good"]
    ask = Turn("assistant", tool_calls=(ToolCall("search", {"text": "cat"}),))
    seen = (*attempt("r", ask, OOPS, 0.0).turns, *wanted.turns[1:], run("ls"), FINE)
    assert recovery_pairs(Trace("r", seen)) == []  # a red test is no recovery
    assert recovery_pairs(Trace("w", wanted.turns + (run("ls"), FINE))) == []
    query = replace(ask, content="The search is expected to fail.")
    told = Trace("q", (ASK, query, OOPS, replace(query, tool_calls=(ToolCall("search", {"text": "box"}),)), FINE))
    assert [bool(s.wanted) for s in find_error_sites(told)] == [True] and recovery_pairs(told) == []
