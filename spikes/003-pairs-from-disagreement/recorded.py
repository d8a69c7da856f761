"""A teacher from a record.

Another model's recorded attempts at the same tasks make it a teacher that costs nothing: tokens and dollars say what the call
**would** have taken. A state is the same where its visible history is: roles, words and calls, up to white space, as in
`traces.siblings.state_keys`, and without the task, which no model sees. Tools are not part of that history, so a record and the
traces it answers must come from the same setting. Where a model stood in a state several times, its answer is the action that it
took most often; between equally frequent ones that of the attempt that earned most, then of the first by its id. Where it never
stood it abstains. The student's own attempt is never its answer.
"""
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from composer_replication.core.trace import Trace, Turn
from composer_replication.replay.prices import Price, Usage
from composer_replication.replay.teachers import TeacherCallResult, TraceState, trace_states
from composer_replication.traces.siblings import SiblingIndex, Step, action_key, state_keys

ELSEWHERE = "no recorded answer in this state"


class RecordedTeacher:
    "A model's recorded attempts as a teacher."

    def __init__(
        self,
        name: str,
        traces: Iterable[Trace],  # its attempts
        price: Price | None = None,  # what its answers would have cost; None: unknown
        count: Callable[[Sequence[Turn], Sequence[dict]], int] | None = None,  # tokens of turns with tools; None: not counted
    ):
        self.name, self.price, self.count, self._index = name, price, count, SiblingIndex()
        for trace in traces:
            self._index.add(replace(trace, task_id=""), ())  # no failed turns: only actions are looked up

    def steps(self, state: TraceState) -> list[Step]:
        "What it did in this state, attempt by attempt; the state's own trace is left out."
        *_, (_, key) = state_keys(Trace("", (*state.turns, Turn("assistant")), task_id=""))
        return [s for s in self._index.steps(key) if s.trace_id != state.trace_id]

    def answer(self, states: Sequence[TraceState]) -> list[TeacherCallResult]:
        "As `Teacher`."
        return [self._answer(state) for state in states]

    def _answer(self, state):
        if not (steps := self.steps(state)):
            return TeacherCallResult(self.name, None, ELSEWHERE, cost=0.0)
        often = Counter(action_key(s.action) for s in steps)
        best = min(steps, key=lambda s: (-often[action_key(s.action)], -(s.reward or 0), s.trace_id))
        action = replace(best.action, thinking=None)
        if self.count is None:
            return TeacherCallResult(self.name, action)
        prompt = self.count(state.turns, state.tools)
        written = self.count((*state.turns, action), state.tools) - prompt
        return TeacherCallResult(self.name, action, "", prompt, written, self.price and self.price.cost(Usage(prompt, written)))


def shared_turns(
    trace: Trace,
    teachers: Sequence[RecordedTeacher],
    least: int = 2,  # teachers that have an answer there
) -> list[int]:  # positions in `Trace.turns`
    "The turns of a trace at which recorded teachers can be asked."
    return [s.turn for s in trace_states(trace) if sum(bool(t.steps(s)) for t in teachers) >= least]
