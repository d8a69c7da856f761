"Gates: lossless against brute force over all answers, chances against exact arithmetic, rounds against a panel that counts."
import json
import math
import random
import threading
from collections import Counter, defaultdict
from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.agents import WorldAgent, world_episode
from composer_replication.envs.toy.env import make_world
from composer_replication.replay.vote import schema_key
from composer_replication.replay.vote import (
    Everyone,
    Sure,
    Worth,
    compare_gates,
    foresight,
    reliability,
    replay_gated,
    settled,
    student_kind,
    tally,
)
from composer_replication.replay.teachers import TeacherCallResult, asked_turns, replay_traces, trace_states
from composer_replication.replay.vote import Verdict, count_votes, extract_dpo_pairs

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
    vote = count_votes(act(0), [*results.values(), result("t2", 1), *told.values()])
    assert (vote.asked, vote.votes, vote.verdict) == (2, 2, Verdict.OTHER)


# What an answer is worth

def panel(probabilities, count, seed):
    "Traces and answers of independent teachers: each does as the student with its probability, else one of two others."
    rng, traces, answers = random.Random(seed), [], []
    for i in range(count):
        traces.append(Trace(f"{i}", (Turn("user", f"{i}?"), act(0))))
        answers.append([[result(n, 0 if rng.random() < p else rng.choice((1, 2))) for n, p in zip(NAMES, probabilities)]])
    return traces, answers


def test_chances_are_the_posterior_means():
    gate = Worth(NAMES[:3], lambda name, state: 0.0, 1.0, kind=lambda state, student: "all", strength=4.0, trial=0)
    for ballots in [(0, 0, 1)] * 5 + [(1, 0, 0)] * 2 + [(1, 1, 1), (None, 0, 0)]:
        gate.learn(STATE, act(0), {n: result(n, b) for n, b in zip(NAMES, ballots)})
    # nine answers of t0 before anything: five agree, three do not, one abstains; Dirichlet(1/2) for the three ways
    pooled = {w: Fraction(n * 2 + 1, 2) / Fraction(21, 2) for w, n in {(1, ()): 5, (0, (1,)): 3, (0, ()): 1}.items()}
    own = {w: (n + 4 * pooled[w]) / 13 for w, n in {(1, ()): 5, (0, (1,)): 3, (0, ()): 1}.items()}
    found = gate.chances("all", "t0", (0, ()))
    assert found == pytest.approx({w: float(p) for w, p in own.items()}) and sum(found.values()) == pytest.approx(1)
    other = gate.chances("never seen", "t0", (0, ()))
    assert other == pytest.approx({w: float(p) for w, p in pooled.items()})
    # after one dissenter, t1 followed twice as the student and once as the dissenter: another way each
    assert gate.chances("never seen", "t1", (0, (1,))) == pytest.approx({
        (1, (1,)): 2.5 / 5, (0, (2,)): 1.5 / 5, (0, (1,)): 0.5 / 5, (0, (1, 1)): 0.5 / 5})


def test_two_actions_with_as_many_votes_share_a_chance():
    gate = Worth(NAMES, lambda name, state: 0.0, 1.0)
    found = gate.chances("x", "t2", (0, (1, 1)))
    assert found[(0, (2, 1))] == found[(0, (1, 2))] and sum(found.values()) == pytest.approx(1) and len(found) == 5


def exact_change(gate, kind, at, left, least, minority):
    "The chance of a change by going through every sequence of answers, one by one."
    def outcome(mine, others):
        ballots = [0] * mine + [i for i, n in enumerate(others, 1) for _ in range(n)]
        return pairs_of(ballots, least, minority)

    def walk(at, i, chance):
        if i == len(left):
            return chance * (outcome(*at) != now)
        return sum(walk(after, i + 1, chance * p) for after, p in gate.chances(kind, left[i], at).items())
    now = outcome(*at)
    return walk(at, 0, 1.0)


@pytest.mark.parametrize("least, minority", SETTINGS)
def test_the_chance_of_a_change_is_that_of_all_sequences(least, minority):
    gate = Worth(NAMES, lambda name, state: 0.0, 1.0, least, minority)
    for trace, [[*results]] in zip(*panel((0.5, 0.6, 0.7, 0.8, 0.8), 30, 1)):
        gate.learn(trace_states(trace)[0], act(0), {r.teacher: r for r in results})
    for ballots in [*product((None, 0, 1, 2), repeat=2), *product((0, 1, 2), repeat=4)]:
        results = {n: result(n, b) for n, b in zip(NAMES, ballots)}
        at = tally(STATE, act(0), results, schema_key)
        expected = exact_change(gate, student_kind(STATE, act(0)), at, NAMES[len(ballots):], least, minority)
        assert gate.change(STATE, act(0), results) == pytest.approx(expected, abs=1e-12)


def test_worth_more_than_any_price_is_sure_and_worth_nothing_asks_nobody():
    free = Worth(NAMES[:4], lambda name, state: 1e-9, 1e9, trial=0)
    dear = Worth(NAMES[:4], lambda name, state: 0.001, 0.0, trial=0)
    for ballots in list(product((None, 0, 1, 2), repeat=4))[::3]:
        assert list(through(free, ballots)[0]) == list(through(Sure(NAMES[:4]), ballots)[0])
        assert through(dear, ballots)[0] == {}


PRICES = {"t0": 0.01, "t1": 0.02, "t2": 0.05}


def best_of_all(gate, kind, at, i):
    "Least expected loss from here by the gate's own chances, and whether it takes asking; every way on is gone through."
    stop = gate.value_usd * exact_change(gate, kind, at, NAMES[i:3], 2, True)
    if i == 3:
        return stop, False
    ways = gate.chances(kind, NAMES[i], at).items()
    ask = PRICES[NAMES[i]] + sum(p * best_of_all(gate, kind, after, i + 1)[0] for after, p in ways)
    return min(stop, ask), ask < stop


@pytest.mark.parametrize("value", [0.02, 0.08, 0.2, 1.0])
def test_the_gate_stops_where_stopping_is_best(value):
    gate = Worth(NAMES[:3], lambda name, state: PRICES[name], value, trial=0)
    for trace, [[*results]] in zip(*panel((0.8, 0.6, 0.3), 25, 2)):
        gate.learn(trace_states(trace)[0], act(0), {r.teacher: r for r in results})
    for size in range(3):
        for ballots in product((None, 0, 1, 2), repeat=size):
            results = {n: result(n, b) for n, b in zip(NAMES, ballots)}
            at = tally(STATE, act(0), results, schema_key)
            expected = not settled(*at, 3 - size) and best_of_all(gate, student_kind(STATE, act(0)), at, size)[1]
            assert gate.next(STATE, act(0), results) == ([NAMES[size]] if expected else []), ballots


@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_a_value_that_is_no_amount(value):
    with pytest.raises(ValueError, match="is no amount; give dollars, 0 or more"):
        Worth(NAMES, lambda name, state: 0.0, value)


def test_the_chances_hold_on_answers_never_seen():
    traces, answers = panel((0.9, 0.7, 0.5), 700, 3)
    seen = foresight(traces, answers, Worth(NAMES[:3], lambda name, state: 0.0, 1.0))
    assert len(seen) > 1000
    for b in reliability(seen):
        assert abs(b.predicted - b.observed) < 3.5 * math.sqrt(b.predicted * (1 - b.predicted) / b.count) + 0.02, b
    assert sum(b.count for b in reliability(seen)) == len(seen)
    assert [tuple(b) for b in reliability([(0.0, False), (1.0, True), (0.05, True), (0.049, False)])] == [
        (2, 0.0245, 0.0), (1, 0.05, 1.0), (1, 1.0, 1.0)]


def test_an_action_that_its_own_tokens_made_likely_is_a_kind_of_its_own():
    def kind(probability):
        turn = Turn("assistant", "Left.", logprobs=None if probability is None else (math.log(probability) / 2,) * 2)
        return student_kind(STATE, turn)
    assert len({kind(p) for p in (None, 0.3, 0.6, 0.9, 0.97, 0.999)}) == 6
    assert student_kind(STATE, act(1)) == student_kind(STATE, act(2)) != student_kind(STATE, Turn("assistant", "Left."))
    sure, unsure = (Turn("assistant", "Left.", logprobs=(math.log(p),)) for p in (0.999, 0.4))
    gate = Worth(NAMES[:2], lambda name, state: 0.01, 0.1)
    for _ in range(30):
        gate.learn(STATE, sure, {n: TeacherCallResult(n, sure) for n in NAMES[:2]})
        gate.learn(STATE, unsure, {n: TeacherCallResult(n, act(1)) for n in NAMES[:2]})
    assert gate.next(STATE, sure, {}) == [] and gate.next(STATE, unsure, {}) == ["t0"]  # before anyone was asked


def test_a_trial_is_asked_as_sure_does():
    gate, sure = Worth(NAMES[:3], lambda name, state: 1.0, 0.0, trial=3), Sure(NAMES[:3])
    for ballots in [(1, 0, 1), (1, 1, 0), (0, 1, 1)]:
        results, _ = through(gate, ballots)
        assert list(results) == list(through(sure, ballots)[0])
        gate.learn(STATE, act(0), results)
    assert through(gate, (1, 0, 1))[0] == {}


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


def test_equal_states_share_their_answers_and_the_gate_learns_each_state_once():
    traces = [Trace(f"{i}", (ASK, act(i % 2))) for i in range(5)]  # one state, two students
    learned, table = [], {STATE.key: result("t0", 1)}

    class Watching(Everyone):
        def learn(self, state, student, results):
            learned.append((state.trace_id, student, dict(results)))
    teacher = Told("t0", table)
    told = replay_gated(traces, [teacher], Watching(("t0",)), at_once=2)
    assert teacher.batches == [[STATE.key]] and told == [[[table[STATE.key]]]] * 5
    assert learned == [(f"{i}", act(i % 2), {"t0": table[STATE.key]}) for i in range(5)]


def test_what_is_learned_counts_for_the_states_that_open_later():
    traces, answers = panel((1.0, 1.0), 300, 5)
    known = tables(traces, answers)
    asked = {}
    for at_once in (10, 300):
        gate = Worth(NAMES[:2], lambda name, state: 0.01, 0.5, trial=5)
        told = replay_gated(traces, [Told(n, known[n]) for n in NAMES[:2]], gate, at_once=at_once)
        asked[at_once] = sum(r.asked for of_trace in told for row in of_trace for r in row)
    assert asked[10] < 100 <= 300 <= asked[300]


def test_teachers_elsewhere_are_asked_side_by_side():
    traces, answers = panel((0.5,) * 3, 4, 6)
    known, together = tables(traces, answers), threading.Barrier(3)

    class Elsewhere(Told):
        remote = True

        def answer(self, states):
            together.wait(20)  # nobody goes on before all three are being asked
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


# Policies compared

def test_a_report_by_hand():
    class First(Everyone):
        "Asks the first two only."
        def next(self, state, student, results):
            return self.order[:2] if not results else []
    ballots = [(1, 1, 1), (1, 0, 1), (1, 1, 2), (0, 0, 1), (0, 1, 2), (1, 1, 2)]
    traces = [Trace(f"{i}", (Turn("user", f"{i}"), act(0))) for i in range(len(ballots))]
    traces[-1] = Trace("again", traces[2].turns)  # the same state, whose answers are paid once
    answers = [[[result(n, b) for n, b in zip(NAMES, row)]] for row in ballots]
    report = compare_gates(traces, answers, {"first": First(NAMES[:3]), "sure": Sure(NAMES[:3])})
    # full panel: 1 over 0; 1 over 0; 1 over 0; 0 over 1; nothing; 1 over 0. The first two alone lose the second and the fourth.
    assert tuple(report[0]) == ("first", 6, 10, pytest.approx(0.10), 3, 3, 2, 0, 0, pytest.approx(4 / 6))
    assert report[1][4:] == (5, 5, 0, 0, 0, 1.0) and report[1].calls == 13


def test_what_is_added_and_turned():
    class Only(Everyone):
        def next(self, state, student, results):
            return self.order[:1] if not results else []
    ballots = [(1, 2, 2), (0, 1, 1), (1, 2, 3), (1, 1, 2)]
    traces = [Trace(f"{i}", (Turn("user", f"{i}"), act(0))) for i in range(len(ballots))]
    answers = [[[result(n, b) for n, b in zip(NAMES, row)]] for row in ballots]
    [report] = compare_gates(traces, answers, {"only": Only(NAMES[:3])}, min_votes=1)
    # full panel: 2 over 0; 1 over 0; nothing; 1 over 0. The first alone: 1 over 0; nothing; 1 over 0; 1 over 0.
    assert (report.pairs, report.kept, report.lost, report.added, report.turned, report.agreement) == (3, 1, 2, 2, 1, 0.25)


def test_gates_on_lab_traces_with_lab_actions():
    "Real calls with real schemas: a spelling that the schema does not tell apart is the same for votes, gates and reports."
    agent = WorldAgent.of(wrong_body=0.5, name=0.3, world=0.3)
    traces = [world_episode(make_world(f"gate-{i}", "train"), agent, i) for i in range(6)]
    rng, answers = random.Random(0), []
    for trace in traces:
        own = [trace.turns[t] for t in asked_turns(trace)]
        answers.append([[TeacherCallResult(n, rng.choice((done, own[-2], own[0])), cost=cost)
                         for n, cost in zip(NAMES[:3], (0.001, 0.01, 0.1))] for done in own])
    gates = {"everyone": Everyone(NAMES[:3]), "sure": Sure(NAMES[:3], minority=False)}
    full, sure = compare_gates(traces, answers, gates, minority=False)
    assert full.calls == 3 * sum(len(asked_turns(t)) for t in traces) and full.pairs > 5
    assert sure.agreement == 1 and sure[4:] == full[4:] and sure.dollars < 0.9 * full.dollars
    assert json.loads(json.dumps(full._asdict()))["gate"] == "everyone"
