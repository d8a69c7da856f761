"Teachers asked and votes counted; the count against a plain tally over every panel of up to five teachers."
import json
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from composer_replication.core.trace import ToolCall, Trace, TraceProblem, Turn
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.replay.teachers import (
    TeacherCallResult,
    TraceState,
    asked_turns,
    replay_trace,
    replay_traces,
    trace_states,
)
from composer_replication.replay.vote import Verdict, count_votes, extract_dpo_pairs
from composer_replication.traces.siblings import action_key

ASK, SEEN = Turn("user", "Which color?"), Turn("tool", "red", observation=True)


def act(number, shuffled=False):
    "Action `number`; `shuffled` writes the same one in other words."
    if shuffled:
        return Turn("assistant", "Now.", tool_calls=(ToolCall("do", {"why": "so it  is", "n": number}),))
    return Turn("assistant", tool_calls=(ToolCall("do", {"n": number, "why": "so it is"}),))


STUDENT = act(0)

# a ballot: an action's number (0 is the student's) and how it is written; None: no action; "x": an action that does not count
BALLOTS = ((0, False), (0, True), (1, False), (2, True), "x")
PANELS = [*(p for size in range(6) for p in product(BALLOTS, repeat=size)), *product((*BALLOTS, None, (3, False)), repeat=3)]


def panel(ballots):
    made = []
    for i, b in enumerate(ballots):
        action = None if b is None else act(0) if b == "x" else act(*b)
        made.append(TeacherCallResult(f"t{i}", action, "no" if b in (None, "x") else ""))
    return made


def tally(ballots, least):
    "The vote by the rules as they are written: counted over numbers, without any turn."
    numbers = Counter(b[0] for b in ballots if b not in (None, "x"))
    voting = sum(numbers.values())
    if voting < least:
        return Verdict.ABSTAINED, None, set()
    winners = [n for n, c in numbers.items() if c > voting / 2 and c >= least]
    if winners:
        return Verdict.OTHER if winners[0] else Verdict.STUDENT, winners[0], set(numbers) - {winners[0]}
    most = max(numbers.values())
    return Verdict.TIE if most > 1 and list(numbers.values()).count(most) > 1 else Verdict.SPLIT, None, set()


@pytest.mark.parametrize("least", [1, 2, 3])
def test_the_count_is_the_plain_tally(least):
    seen = Counter()
    for ballots in PANELS:
        verdict, winner, rest = tally(ballots, least)
        vote = count_votes(STUDENT, panel(ballots), least)
        assert vote.verdict is verdict and vote.asked == len(ballots)
        assert sorted(r.action.tool_calls[0].arguments["n"] for r in vote.minority) == sorted(rest)
        assert (vote.action is None) == (winner is None)
        if winner is not None:
            assert action_key(vote.action) == action_key(act(winner))
            assert vote.votes == sum(b not in (None, "x") and b[0] == winner for b in ballots)
        seen[verdict] += 1
    assert len(seen) == len(Verdict) and min(seen.values()) > 10, seen


@pytest.mark.parametrize("minority", [True, False])
@pytest.mark.parametrize("least", [1, 2, 3])
def test_pairs_follow_the_vote_and_not_the_order_of_the_teachers(least, minority):
    for ballots in PANELS[::3]:
        check_pairs(ballots, least, minority)


def check_pairs(ballots, least, minority):
    trace = Trace("one", (ASK, STUDENT))
    verdict, winner, rest = tally(ballots, least)
    results = panel(ballots)
    pairs = extract_dpo_pairs(trace, [results], least, minority=minority)
    count = sum(b not in (None, "x") and b[0] == winner for b in ballots)
    if verdict is Verdict.OTHER:
        assert [(p.turn, action_key(p.chosen), p.rejected, p.source) for p in pairs] == [
            (1, action_key(act(winner)), STUDENT, f"majority:{count}/{len(ballots)}")]
    elif verdict is Verdict.STUDENT and minority:
        assert {action_key(p.rejected) for p in pairs} == {action_key(act(n)) for n in rest} and len(pairs) == len(rest)
        for p in pairs:
            kind, votes, teacher = p.source.split(":")
            told = next(r for r in results if r.teacher == teacher)
            assert (p.chosen, kind, votes, told.action) == (STUDENT, "student", f"{count}/{len(ballots)}", p.rejected)
    else:
        assert pairs == []
    again = extract_dpo_pairs(trace, [results[::-1]], least, minority=minority)
    assert sorted((action_key(p.chosen), action_key(p.rejected)) for p in again) == sorted(
        (action_key(p.chosen), action_key(p.rejected)) for p in pairs)


def test_a_call_that_cannot_be_read_is_another_action_but_never_a_vote():
    broken = Turn("assistant", tool_calls=(ToolCall("do", '{"n": 0'),))
    two = [TeacherCallResult(n, act(0)) for n in "ab"]
    trace = Trace("one", (ASK, broken))
    [pair] = extract_dpo_pairs(trace, [[*two, TeacherCallResult("c", broken, "Invalid JSON")]])
    assert (pair.chosen, pair.rejected, pair.source) == (act(0), broken, "majority:2/3")


# Asking

class Echo:
    "Does what the state's last message says, and remembers what it was asked."

    def __init__(self, name="echo"):
        self.name, self.batches = name, []

    def answer(self, states):
        self.batches.append([s.key for s in states])
        return [TeacherCallResult(self.name, Turn("assistant", f"{self.name}: {s.turns[-1].content}")) for s in states]


def attempts():
    same = (ASK, act(0), SEEN)
    return [Trace("one", (*same, act(1), SEEN, act(2))), Trace("two", (*same, act(3), SEEN)), Trace("three", (ASK,))]


def test_every_teacher_is_asked_once_about_every_different_state():
    teachers = [Echo("a"), Echo("b")]
    told = replay_traces(attempts(), teachers)
    named = [[[r.teacher for r in results] for results in of_trace] for of_trace in told]
    assert named == [[["a", "b"]] * 3, [["a", "b"]] * 2, []]
    for t in teachers:
        [batch] = t.batches
        assert len(batch) == len(set(batch)) == 3  # five states; the first two of both attempts are the same
    for trace, of_trace in zip(attempts(), told):
        for turn, results in zip(asked_turns(trace), of_trace):
            assert [r.action.content for r in results] == [f"{n}: {trace.turns[turn - 1].content}" for n in "ab"]


def test_some_turns_of_some_traces():
    told = replay_traces(attempts(), [Echo()], [[5, 1], None, []])
    asked, seen = "echo: Which color?", "echo: red"
    assert [[r.action.content for [r] in of_trace] for of_trace in told] == [[seen, asked], [asked, seen], []]
    with pytest.raises(TraceProblem, match=r"turn 2 of one is no turn of the assistant .*; ask at some of the turns \[1, 3, 5\]"):
        replay_trace(attempts()[0], [Echo()], [1, 2])
    with pytest.raises(ValueError, match="shorter"):
        replay_traces(attempts(), [Echo()], [None])
    with pytest.raises(TraceProblem, match="2 lists of answers stand beside 3 turns of one; pass the same turns"):
        extract_dpo_pairs(attempts()[0], [[], []])


def test_nothing_to_ask_asks_nobody():
    teacher = Echo()
    assert replay_traces([], [teacher]) == [] and replay_trace(attempts()[2], [teacher]) == [] and teacher.batches == []


@pytest.mark.parametrize("spoil", [
    lambda r: r[1:], lambda r: r + r[:1], lambda r: [], lambda r: [replace(r[0], teacher="other"), *r[1:]]])
def test_a_teacher_that_answers_out_of_turn_is_named(spoil):
    class Bad(Echo):
        def answer(self, states):
            return spoil(super().answer(states))
    with pytest.raises(ValueError, match="teacher 'bad' gave . results, by .*, for 3 states; it must give one of its own"):
        replay_trace(attempts()[0], [Echo(), Bad("bad")])


@pytest.mark.parametrize("names", ["", "aa", "aba"])
def test_a_panel_has_names_of_its_own(names):
    with pytest.raises(ValueError, match="give at least one, each with a name of its own"):
        replay_trace(attempts()[0], [Echo(n) for n in names])


# States

def test_a_turn_with_nothing_before_it_has_no_state():
    trace = Trace("first", (act(0), SEEN, act(1)))
    assert asked_turns(trace) == [2] and len(trace_states(trace)) == 1
    with pytest.raises(TraceProblem, match="turn 0 of first is no turn of the assistant with a message before it"):
        trace_states(trace, [0])


def test_no_teacher_sees_reasoning_or_tokens():
    for trace in toy_traces()[:10]:
        secret = replace(trace, turns=tuple(replace(t, thinking="zqsecret", token_ids=(91919,), logprobs=(-0.91919,))
                                            if t.role == "assistant" else t for t in trace.turns))
        states = trace_states(secret)
        assert [s.turn for s in states] == asked_turns(trace) and states
        assert not any(word in repr(s) + json.dumps(s.messages) for s in states for word in ("zqsecret", "91919"))
        assert [s.key for s in states] == [s.key for s in trace_states(trace)]
        for s in states:
            assert s.messages == trace.to_messages(thinking=False)[:s.turn] and s.tools == trace.tools
    with pytest.raises(TraceProblem, match="make states with `trace_states`"):
        TraceState("one", (Turn("assistant", token_ids=(1,)),))
    with pytest.raises(TraceProblem, match="holds no message"):
        TraceState("one", ())


def test_a_key_is_the_messages_and_the_tools():
    tool = {"type": "function", "function": {"name": "do", "parameters": {"type": "object", "properties": {}}}}
    state = TraceState("one", (ASK, act(0), SEEN), (tool,))
    unseen = (replace(ASK, source_index=7), act(0), replace(SEEN, failed=False))
    assert state.key == TraceState("two", unseen, (json.loads(json.dumps(tool)),)).key
    others = [replace(state, tools=()), replace(state, turns=state.turns[:2]), replace(state, turns=(ASK, act(0, True), SEEN)),
              replace(state, turns=(ASK, act(1), SEEN)), replace(state, turns=(replace(ASK, role="system"), *state.turns[1:])),
              replace(state, turns=(ASK, act(0), replace(SEEN, content="re d"))),
              replace(state, turns=(ASK, replace(act(0), tool_calls=(ToolCall("do", '{"n": 0'),)), SEEN)),
              replace(state, turns=(ASK, act(0), replace(SEEN, content="half \ud800")))]
    assert len({s.key for s in [state, *others]}) == 1 + len(others)


@pytest.mark.parametrize("wrong, said", [
    (dict(action=None), "neither an action nor a problem"), (dict(action=ASK), "is a user message"),
    *((number, "negative or not finite") for number in (
        dict(prompt_tokens=-1), dict(completion_tokens=-1), dict(seconds=float("inf")), dict(cost=float("nan")), dict(cost=-1)))])
def test_a_result_that_no_call_can_have_is_refused(wrong, said):
    with pytest.raises(TraceProblem, match=said):
        TeacherCallResult("t", **{"action": STUDENT} | wrong)


def test_the_preferred_action_is_written_as_the_schema_has_it():
    from composer_replication.replay.same_action import schema_key
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    says = lambda n: Turn("assistant", tool_calls=(ToolCall("f", {"n": n}),))
    trace = Trace("t", (Turn("user", "go"), says(7)), (tool,))
    results = [TeacherCallResult(name, says(n)) for name, n in (("a", "5"), ("b", 5), ("c", 5))]
    [pair] = extract_dpo_pairs(trace, [results], key=schema_key)
    assert pair.chosen == says(5) and pair.source == "majority:3/3"
