"Gates replayed on answers that are known: what each would have asked, and what became of the full panel's pairs."
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.replay.panel import Gate, Sure, replay_gated, tally
from composer_replication.replay.same_action import schema_key
from composer_replication.replay.teachers import trace_states
from composer_replication.replay.vote import extract_dpo_pairs


def any_words(action, tools):
    "As `schema_key`, but all actions without a call are the same: they speak."
    return schema_key(action, tools) if action.tool_calls else b"speaks"


TRIAL = 20  # states that `Worth` asks about as `Sure` does


def outcome(mine, others, min_votes):
    "Which pairs a tally makes: the number of the action that is preferred, how many are overruled, or none."
    cast = mine + sum(others)
    for i, n in enumerate(others):
        if n >= min_votes and 2 * n > cast:
            return "other", i
    return ("mine", len(others)) if others and mine >= min_votes and 2 * mine > cast else None


class Worth(Gate):
    """Query teachers while the expected value of a changed pair exceeds the price.

    The expected value is what right pairs of a state are worth, times the share of earlier states with the same tally in which
    the rest of the panel did change the pairs, (k + 1) / (n + 2) for k of n. A state teaches it once its vote is settled."""

    def __init__(self, order, price, value_usd, min_votes=2, key=schema_key):
        self.sure, self.price, self.value_usd, self.learned = Sure(tuple(order), min_votes, True, key), price, value_usd, 0
        self.seen, self.changed = Counter(), Counter()  # settled states by tally and teachers left, and those that changed

    def chance(self, state, student, results):
        "The share of earlier states in which the rest of the panel changed the pairs, from the same tally."
        at = self._at(tally(state, student, results, self.sure.key), results)
        return (self.changed[at] + 1) / (self.seen[at] + 2)

    def next(self, state, student, results):
        "As `Gate`; it learns from a state when it asks nobody more."
        names = self.sure.next(state, student, results)
        price = sum(self.price(name, state) for name in names)
        if names and (self.learned < TRIAL or self.value_usd * self.chance(state, student, results) > price):
            return names
        self.learn(state, student, results)
        return []

    def learn(self, state, student, results):
        "From states whose vote is settled by answers."
        self.learned += 1
        if self.sure.next(state, student, results) or not all(r.asked for r in results.values()):
            return
        names = [name for name in self.sure.order if name in results]
        steps = [{name: results[name] for name in names[:n]} for n in range(len(names) + 1)]
        tallies = [tally(state, student, step, self.sure.key) for step in steps]
        ends = [outcome(*t, self.sure.min_votes) for t in tallies]
        for step, votes, end in zip(steps, tallies, ends):
            at = self._at(votes, step)
            self.seen[at] += 1
            self.changed[at] += end != ends[-1]

    def _at(self, votes, results):
        return votes[0], tuple(sorted(votes[1])), len(self.sure.order) - len(results)


class GateReport(NamedTuple):
    "What a gate makes of answers that are known."

    gate: str
    states: int
    calls: int  # answers asked for; equal states share them
    dollars: float
    pairs: int
    kept: int
    lost: int
    added: int
    turned: int  # states in which both make pairs and prefer different actions
    agreement: float  # share of states with the full panel's pairs


@dataclass(frozen=True)
class KnownTeacher:
    "A teacher whose answers are known."

    name: str
    answers: dict  # `TeacherCallResult` by `TraceState.key`

    def answer(self, states):
        return [self.answers[s.key] for s in states]


def known_teachers(traces, answers, turns):
    "The panel that gives these answers again; arguments as `replay_traces` takes and gives them."
    states = [s for trace, at in zip(traces, turns, strict=True) for s in trace_states(trace, at)]
    results = [r for of_trace in answers for r in of_trace]
    return [KnownTeacher(results[0][i].teacher, {s.key: of_state[i] for s, of_state in zip(states, results, strict=True)})
            for i in range(len(results[0]))]


def compare_gates(traces, answers, gates, turns, minority=True, key=None, at_once=64):
    "A `GateReport` for every gate, by its name."
    panel = known_teachers(traces, answers, turns)
    states = [s for trace, at in zip(traces, turns, strict=True) for s in trace_states(trace, at)]

    def pairs(by_trace):
        return [{(s.turn, key(s, s.turn, p.chosen), key(s, s.turn, p.rejected))
                 for p in extract_dpo_pairs(trace, [r], turns=[s.turn], minority=minority, key=key)}
                for trace, at, of_trace in zip(traces, turns, by_trace) for s, r in zip(trace_states(trace, at), of_trace)]

    full, reports = pairs(answers), []
    for name, gate in gates.items():
        by_trace = replay_gated(traces, panel, gate, turns, at_once)
        rows = [of_state for of_trace in by_trace for of_state in of_trace]
        paid = {(s.key, r.teacher): r.cost or 0.0 for s, of_state in zip(states, rows) for r in of_state if r.asked}
        made = pairs(by_trace)
        kept, total = sum(len(f & m) for f, m in zip(full, made)), sum(map(len, made))
        turned = sum(bool(f and m) and {p[1] for p in f} != {p[1] for p in m} for f, m in zip(full, made))
        agreement = sum(f == m for f, m in zip(full, made)) / max(1, len(full))
        reports.append(GateReport(name, len(full), len(paid), sum(paid.values()), total, kept, sum(map(len, full)) - kept,
                                  total - kept, turned, agreement))
    return reports


def foresight(traces, answers, gate, turns):
    "Before each answer, the chance of a change by `Worth`, and whether it came."
    predictions, order, key = [], gate.sure.order, gate.sure.key
    for trace, at, of_trace in zip(traces, turns, answers, strict=True):
        for state, of_state in zip(trace_states(trace, at), of_trace, strict=True):
            student, by_name = trace.turns[state.turn], {r.teacher: r for r in of_state}
            steps = [{n: by_name[n] for n in order[:i]} for i in range(len(order) + 1)]
            pairs = [{(key(state, state.turn, p.chosen), key(state, state.turn, p.rejected))
                      for p in extract_dpo_pairs(trace, [list(step.values())], turns=[state.turn], key=key)} for step in steps]
            predictions += [(gate.chance(state, student, step), made != pairs[-1]) for step, made in zip(steps, pairs)
                            if gate.sure.next(state, student, step)]
            gate.learn(state, student, by_name)
    return predictions


class Bin(NamedTuple):
    "Chances of about the same size, and what came of them."

    count: int
    predicted: float  # mean chance
    observed: float  # share


def reliability(predictions, edges=(0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)):
    "The table in which both columns should be equal; empty bins are left out."
    bins = [[x for x in predictions if low <= x[0] < high or x[0] == high == edges[-1]] for low, high in zip(edges, edges[1:])]
    return [Bin(len(b), *(sum(column) / len(b) for column in zip(*b))) for b in bins if b]
