"Gates: lossless against brute force over all answers, chances counted again (spike 003), rounds against a panel that counts."
import random
import sys
import threading
from collections import Counter, defaultdict
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.env import make_world
from composer_replication.replay.panel import Everyone, Sure, make_gate, replay_gated, settled, tally
from composer_replication.replay.prices import Price
from composer_replication.replay.same_action import schema_key
from composer_replication.replay.teachers import TeacherCallResult, asked_turns, replay_traces, trace_states
from composer_replication.replay.vote import Verdict, count_votes, extract_dpo_pairs
from composer_replication.traces.siblings import action_key

sys.path.append(str(Path(__file__).parents[2] / "spikes" / "120-lab-bases"))
from scripted import WorldAgent, world_episode

sys.path.append(str(Path(__file__).parents[2] / "spikes" / "003-pairs-from-disagreement"))
from gates import Worth

NAMES = ("t0", "t1", "t2", "t3", "t4")
SETTINGS = [(least, minority) for least in (1, 2, 3) for minority in (True, False)]
ASK = Turn("user", "Which?")


def act(number):
    return Turn("assistant", tool_calls=(ToolCall("do", {"n": number}),))


def pairs_of(ballots, least, minority):
    "Pairs as (chosen, rejected), by the rules in words; 0 is the student's action, None abstains."
    counts = Counter(b for b in ballots if b is not None)
    winner = [n for n, c in counts.items() if c >= least and 2 * c > counts.total()]
    if not winner:
        return frozenset()
    if winner[0]:
        return frozenset([(winner[0], 0)])
    return frozenset((0, n) for n in counts if n) if minority else frozenset()


@cache
def can_change(ballots, left, least, minority):
    "Whether some answers of those that are left end in other pairs than others: brute force, with actions that are new."
    return len(ends(ballots, left, least, minority)) > 1


@cache
def ends(ballots, left, least, minority):
    if not left:
        return frozenset([pairs_of(ballots, least, minority)])
    new = max([b for b in ballots if b], default=0) + 1
    ways = [None, 0, *range(1, new + 1)]
    return frozenset().union(*(ends(tuple(sorted((*ballots, w), key=str)), left - 1, least, minority) for w in ways))


@pytest.mark.parametrize("least, minority", SETTINGS)
def test_settled_is_exactly_that_nothing_can_change(least, minority):
    seen = Counter()
    for size in range(6):
        for ballots in product((None, 0, 1, 2, 3), repeat=size):
            counts = Counter(b for b in ballots if b is not None)
            mine, others = counts.pop(0, 0), list(counts.values())
            for left in range(6 - size):
                found = settled(mine, others, left, least, minority)
                renamed = {n: i for i, n in enumerate(dict.fromkeys(b for b in ballots if b), 1)} | {0: 0, None: None}
                known = tuple(sorted((renamed[b] for b in ballots), key=str))
                assert found is not can_change(known, left, least, minority), (ballots, left)
                seen[found] += bool(left)
    assert min(seen.values()) > 100


def result(name, number, asked=True):
    action, problem = (None, "refused") if number is None else (act(number), "")
    return TeacherCallResult(name, action, problem, cost=0.01, asked=asked)


TRACE = Trace("one", (ASK, act(0)))
[STATE] = trace_states(TRACE)


def through(gate, ballots, student=TRACE.turns[1]):
    "What a gate asks on these answers, in its order, and in how many rounds."
    results, rounds = {}, 0
    while names := gate.next(STATE, student, results):
        results |= {n: result(n, ballots[NAMES.index(n)]) for n in names}
        rounds += 1
    return results, rounds


@pytest.mark.parametrize("least, minority", SETTINGS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_sure_loses_nothing_and_asks_nobody_in_vain(size, least, minority):
    gate = Sure(NAMES[:size], least, minority)
    for ballots in list(product((None, 0, 1, 2, 3), repeat=size))[::{4: 2, 5: 11}.get(size, 1)]:
        results, rounds = through(gate, ballots)
        asked = len(results)
        assert list(results) == list(NAMES[:asked])
        told = [results.get(n) or result(n, None, asked=False) for n in NAMES[:size]]
        full = extract_dpo_pairs(TRACE, [[result(n, b) for n, b in zip(NAMES, ballots)]], least, minority=minority)
        made = extract_dpo_pairs(TRACE, [told], least, minority=minority)
        assert [(p.chosen, p.rejected) for p in made] == [(p.chosen, p.rejected) for p in full]
        # one call less, and the pairs would have been open
        assert not asked or can_change(renumbered(ballots[:asked - 1]), size - asked + 1, least, minority)
        assert rounds <= asked


def renumbered(ballots):
    names = {n: i for i, n in enumerate(dict.fromkeys(b for b in ballots if b), 1)} | {0: 0, None: None}
    return tuple(sorted((names[b] for b in ballots), key=str))


def test_sure_asks_in_as_few_rounds_as_are_sure():
    assert Sure(NAMES[:3]).next(STATE, act(0), {}) == ["t0", "t1"]
    assert Sure(NAMES).next(STATE, act(0), {}) == ["t0", "t1", "t2"]
    assert Sure(NAMES[:1]).next(STATE, act(0), {}) == []  # one teacher is no majority of two
    assert through(Sure(NAMES[:3]), (1, 1, 0, 0, 0)) == ({n: result(n, 1) for n in NAMES[:2]}, 1)


def test_a_teacher_that_could_not_be_asked_has_no_vote_left():
    results = {"t0": result("t0", 1), "t1": result("t1", None, asked=False)}
    assert Sure(NAMES[:2]).next(STATE, act(0), results) == [] and Sure(NAMES[:3]).next(STATE, act(0), results) == ["t2"]
    assert tally(STATE, act(0), results | {"t2": result("t2", 0)}, schema_key) == (1, (1,))
    told = {"t2": TeacherCallResult("t2", act(1), asked=False)}
    assert tally(STATE, act(0), told, schema_key) == (0, ())
    counted = count_votes(act(0), [*results.values(), result("t2", 1), *told.values()])
    assert (counted.asked, counted.votes, counted.verdict) == (2, 2, Verdict.OTHER)


# What an answer is worth

def panel(probabilities, count, seed):
    "Traces and answers of independent teachers: each does as the student with its probability, else one of two others."
    rng, traces, answers = random.Random(seed), [], []
    for i in range(count):
        traces.append(Trace(f"{i}", (Turn("user", f"{i}?"), act(0))))
        answers.append([[result(n, 0 if rng.random() < p else rng.choice((1, 2))) for n, p in zip(NAMES, probabilities)]])
    return traces, answers


def test_the_chance_is_the_share_of_earlier_states_that_changed():
    "Counted again from the ballots, by the rules of a vote in words."
    gate, traces, answers = Worth(NAMES[:3], lambda name, state: 0.0, 1.0), *panel((0.6, 0.5, 0.4), 60, 1)
    rows = [[r.action.tool_calls[0].arguments["n"] for r in results] for [results] in answers]
    for trace, [results] in zip(traces, answers):
        gate.learn(trace_states(trace)[0], act(0), {r.teacher: r for r in results})

    def shape(ballots):
        counts = Counter(ballots)
        return counts.pop(0, 0), sorted(counts.values())

    tried = 0
    for size in range(3):
        for ballots in product((0, 1, 2), repeat=size):
            alike = [row for row in rows if shape(row[:size]) == shape(ballots)]
            changed = sum(pairs_of(row, 2, True) != pairs_of(row[:size], 2, True) for row in alike)
            results = {n: result(n, b) for n, b in zip(NAMES, ballots)}
            assert gate.chance(STATE, act(0), results) == pytest.approx((changed + 1) / (len(alike) + 2))
            tried += len(alike) > 5
    assert tried > 5
    assert gate.chance(STATE, act(0), {"t0": result("t0", None)}) == 0.5  # never seen


# Rounds

class Told:
    "Answers from a table, and remembers who was asked about what, together."

    remote = False

    def __init__(self, name, table):
        self.name, self.table, self.batches = name, table, []

    def answer(self, states):
        self.batches.append([s.key for s in states])
        return [self.table[s.key] for s in states]


def tables(traces, answers):
    known = defaultdict(dict)
    for trace, of_trace in zip(traces, answers):
        for state, results in zip(trace_states(trace), of_trace):
            for r in results:
                known[r.teacher][state.key] = r
    return known


def test_rounds_give_what_asking_one_by_one_gives():
    traces, answers = panel((0.7, 0.6, 0.5, 0.4), 60, 4)
    known, gate = tables(traces, answers), Sure(NAMES[:4])
    teachers = [Told(n, known[n]) for n in NAMES[:4]]
    told = replay_gated(traces, teachers, gate, at_once=10)
    for of_trace, [results] in zip(told, answers):
        asked, _ = through(gate, [r.action and r.action.tool_calls[0].arguments["n"] for r in results] + [None])
        assert [[r.teacher for r in row if r.asked] for row in of_trace] == [list(asked)]
        assert [r for r in of_trace[0] if r.asked] == results[:len(asked)]
        assert all((r.problem, r.action) == ("not asked: the gate had enough", None) for r in of_trace[0] if not r.asked)
    for t in teachers:
        keys = [k for batch in t.batches for k in batch]
        assert len(keys) == len(set(keys)) and max(map(len, t.batches)) <= 10
    full = replay_gated(traces, teachers, Everyone(NAMES[:4]))
    assert full == answers == replay_traces(traces, teachers)


def test_equal_states_share_their_answers():
    traces = [Trace(f"{i}", (ASK, act(i % 2))) for i in range(5)]  # one state, two students
    teacher = Told("t0", {STATE.key: result("t0", 1)})
    told = replay_gated(traces, [teacher], Everyone(("t0",)), at_once=2)
    assert teacher.batches == [[STATE.key]] and told == [[[result("t0", 1)]]] * 5


def test_teachers_elsewhere_are_asked_side_by_side():
    traces, answers = panel((0.5,) * 3, 4, 6)
    known, together = tables(traces, answers), threading.Barrier(3)

    class Elsewhere(Told):
        remote = True

        def answer(self, states):
            together.wait(200)  # nobody goes on before all three are being asked
            return super().answer(states)

    class Here(Told):
        def answer(self, states):
            assert threading.current_thread() is threading.main_thread()  # these would only share its cores
            return super().answer(states)
    for kind in (Elsewhere, Here):
        assert replay_gated(traces, [kind(n, known[n]) for n in NAMES[:3]], Everyone(NAMES[:3])) == answers


@pytest.mark.parametrize("order, said", [(("t0", "t9"), "asks for 't9' in a state where t0 can be asked"), (("t0", "t0"), None)])
def test_a_gate_that_names_a_stranger(order, said):
    known = {STATE.key: result("t0", 1)}
    if said:
        with pytest.raises(ValueError, match=said):
            replay_gated([TRACE], [Told("t0", known)], Everyone(order))
    else:
        assert replay_gated([TRACE], [Told("t0", known)], Everyone(order)) == [[[known[STATE.key]]]]


def test_a_gate_that_asks_again_is_told_so():
    class Again(Everyone):
        def next(self, state, student, results):
            return self.order
    with pytest.raises(ValueError, match="asks for 't0' in a state where nobody can be asked; name teachers"):
        replay_gated([TRACE], [Told("t0", {STATE.key: result("t0", 1)})], Again(("t0",)))


def test_some_turns_and_nothing_at_all():
    trace = Trace("two", (ASK, act(0), Turn("tool", "done", observation=True), act(1)))
    known = {s.key: result("t0", s.turn) for s in trace_states(trace)}
    gate = Everyone(("t0",))
    assert [[r.action.tool_calls[0].arguments["n"] for [r] in of_trace] for of_trace in
            replay_gated([trace, trace, TRACE], [Told("t0", known)], gate, [[3], None, []])] == [[3], [1, 3], []]
    assert replay_gated([], [Told("t0", {})], gate) == []
    with pytest.raises(ValueError, match="at least one"):
        replay_gated([trace], [], gate)


def test_a_teacher_that_breaks_ends_the_replay():
    class Broken(Told):
        def answer(self, states):
            raise OSError("no ledger")
    for remote in (True, False):
        Broken.remote = remote
        with pytest.raises(OSError, match="no ledger"):
            replay_gated([TRACE], [Broken("t0", {})], Everyone(("t0",)))


def test_gates_on_lab_traces_with_lab_actions():
    "Real calls with real schemas: a spelling that the schema does not tell apart is the same for votes, gates and reports."
    agent = WorldAgent.of(wrong_body=0.5, name=0.3, world=0.3)
    traces = [world_episode(make_world(f"gate-{i}", "train"), agent, i) for i in range(6)]
    rng, answers = random.Random(0), []
    for trace in traces:
        own = [trace.turns[t] for t in asked_turns(trace)]
        answers.append([[TeacherCallResult(n, rng.choice((done, own[-2], own[0])), cost=cost)
                         for n, cost in zip(NAMES[:3], (0.001, 0.01, 0.1))] for done in own])
    teachers = [Told(n, table) for n, table in tables(traces, answers).items()]
    told = replay_gated(traces, teachers, Sure(NAMES[:3], minority=False))

    def pairs(of):
        made = [p for t, a in zip(traces, of) for p in extract_dpo_pairs(t, a, minority=False, key=schema_key)]
        return [(p.trace_id, p.turn, action_key(p.chosen), action_key(p.rejected)) for p in made]
    calls, everyone = (sum(r.asked for of_trace in of for row in of_trace for r in row) for of in (told, answers))
    assert pairs(told) == pairs(answers) and len(pairs(answers)) > 5 and calls < 0.9 * everyone


def test_gates_by_name():
    prices = {"dear": Price(9, 9), "cheap": Price(1, 1), "middle": Price(3, 3)}
    assert make_gate("everyone", prices).next(STATE, act(0), {}) == ["dear", "cheap", "middle"]
    assert make_gate("sure", prices).next(STATE, act(0), {}) == ["cheap", "middle"]
    assert (make_gate("sure", prices, 3).order, make_gate("sure", prices, 3).min_votes) == (["cheap", "middle", "dear"], 3)
    with pytest.raises(InputProblem, match="there is no gate 'best'; use everyone or sure"):
        make_gate("best", prices)
    with pytest.raises(InputProblem, match="1 teacher cannot give 2 votes"):
        make_gate("sure", {"dear": Price(9, 9)})
