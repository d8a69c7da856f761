"Spike 003's recorded teachers against a naive comparison of whole histories, on real multi-model traces."
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.replay.prices import Price
from composer_replication.replay.teachers import (
    asked_turns,
    replay_trace,
    replay_traces,
    trace_states,
)
from composer_replication.replay.vote import extract_dpo_pairs
from composer_replication.traces.read import read_traces
from composer_replication.traces.siblings import squeeze

sys.path.append(str(Path(__file__).parent))
from gates import any_words
from recorded import ELSEWHERE, RecordedTeacher, shared_turns

ASK, SEEN = Turn("user", "Which color?"), Turn("tool", "red", observation=True)


def act(number):
    return Turn("assistant", tool_calls=(ToolCall("do", {"n": number}),))


OTHERS = ("claude-opus-4-6", "claude-sonnet-4-5", "gpt-5.4")


def attempt(name, *actions, reward=0.0, task="task"):
    return Trace(name, (ASK, *(t for a in actions for t in (a, SEEN))), task_id=task, reward=reward)


def one(teacher, trace, turn=1):
    [[result]] = replay_trace(trace, [teacher], [turn])
    return result


STUDENT = attempt("student", act(0), act(1))


@pytest.mark.parametrize("attempts, expected", [
    ([attempt("a", act(2))], 2),
    ([attempt("a", act(2)), attempt("b", act(3)), attempt("c", act(3))], 3),  # most often
    ([attempt("a", act(2), reward=1.0), attempt("b", act(3)), attempt("c", act(3))], 3),
    ([attempt("a", act(2)), attempt("b", act(3), reward=1.0)], 3),  # then what earned most
    ([attempt("a", act(2), reward=None), attempt("b", act(3), reward=0.5)], 3),
    ([attempt("b", act(2)), attempt("a", act(3))], 3),  # then the first by its id
    ([attempt("a", act(2), task="another task")], 2),  # no model sees the task
    ([attempt("student", act(2))], None),  # its own attempt
    ([replace(attempt("a", act(2)), turns=(replace(ASK, content="Which  color? "), act(2)))], 2),
    ([replace(attempt("a", act(2)), turns=(replace(ASK, content="What color?"), act(2)))], None),
    ([], None)])
def test_which_action_is_the_answer(attempts, expected):
    for order in (attempts, attempts[::-1]):
        result = one(RecordedTeacher("t", order), STUDENT)
        assert result.asked and result.teacher == "t"
        if expected is None:
            assert (result.action, result.problem, result.cost, result.votes) == (None, ELSEWHERE, 0.0, False)
            assert (result.prompt_tokens, result.completion_tokens, result.seconds) == (0, 0, 0.0)
        else:
            assert result.votes and result.action.tool_calls[0].arguments == {"n": expected}


def test_reasoning_and_tokens_of_a_record_stay_there():
    thought = replace(act(2), thinking="secret", token_ids=(1,), logprobs=(-0.5,))
    student = replace(STUDENT, turns=tuple(replace(t, thinking="mine") if t.role == "assistant" else t for t in STUDENT.turns))
    assert one(RecordedTeacher("t", [attempt("a", thought)]), student).action == act(2)
    then = RecordedTeacher("t", [attempt("a", act(0), act(5))])  # the student's reasoning is not part of the history
    assert one(then, student, 3).action == act(5)


def test_what_the_call_would_have_cost():
    def count(turns, tools):
        return 100 * len(turns) + 7 * len(tools)
    trace = replace(STUDENT, tools=({"name": "do"},))
    priced, counted, bare = (RecordedTeacher("t", [attempt("a", act(0), act(5))], p, c)
                             for p, c in ((Price(3, 15), count), (None, count), (Price(3, 15), None)))
    result = one(priced, trace, 3)
    assert (result.prompt_tokens, result.completion_tokens) == (307, 100)
    assert result.cost == pytest.approx((307 * 3 + 100 * 15) / 1e6)
    assert (one(counted, trace, 3).prompt_tokens, one(counted, trace, 3).cost) == (307, None)
    assert (one(bare, trace, 3).prompt_tokens, one(bare, trace, 3).cost) == (0, None)


@pytest.fixture(scope="module")
def airline(shared_data):
    return list(read_traces(shared_data / "traces" / "tau2_airline_multimodel.jsonl.gz"))


def history(trace, turn):
    "What stands before a turn, as anyone would compare it."
    return [(t.role, squeeze(t.content), [(c.name, c.arguments) for c in t.tool_calls]) for t in trace.turns[:turn]]


def test_real_states_are_those_of_whole_histories(airline):
    students = [t for t in airline if t.model == "qwen2.5-7b"]
    teachers = [RecordedTeacher(m, [t for t in airline if t.model == m]) for m in OTHERS]
    naive = {m: [(history(t, at), t, at) for t in airline if t.model == m for at in asked_turns(t)] for m in OTHERS}
    found = Counter()
    for trace, results in zip(students, replay_traces(students, teachers)):
        enough = []
        for at, row in zip(asked_turns(trace), results):
            mine = history(trace, at)
            for r in row:
                there = [t.turns[i] for before, t, i in naive[r.teacher] if before == mine]
                assert bool(there) == r.votes
                assert not there or (r.action.tool_calls, r.action.content) in [(a.tool_calls, a.content) for a in there]
                found[r.teacher, r.votes] += 1
            enough += [at] * (sum(r.votes for r in row) >= 2)
        assert enough == shared_turns(trace, teachers)
    assert all(found[m, True] >= 5 and found[m, False] > 300 for m in OTHERS), found


def test_real_pairs_are_of_real_actions(airline):
    "Where a weak model acts on a user that nobody named, the others ask: the pair says so."
    teachers = [RecordedTeacher(m, [t for t in airline if t.model == m]) for m in OTHERS]
    made = []
    for trace in (t for t in airline if t.model == "qwen2.5-7b"):
        if turns := shared_turns(trace, teachers):
            assert turns == [2]  # the user's words differ from there on
            answers = replay_trace(trace, teachers, turns)
            made += extract_dpo_pairs(trace, answers, turns=turns, key=any_words)
    assert made and all(not p.chosen.tool_calls and p.rejected.tool_calls for p in made if p.source.startswith("majority"))
    states = [trace_states(t)[0] for t in airline]
    assert len({s.key for s in states}) < len(states)
