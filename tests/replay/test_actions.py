"Actions that a schema reads alike, against pydantic reading the same; actions that come to the same, in real environments."
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, WithJsonSchema

from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import ToolCall, Trace, TraceProblem, Turn
from composer_replication.envs.toy.agents import WorldAgent, world_episode
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.replay.vote import effect_key, normalised, schema_key
from composer_replication.replay.teachers import TeacherCallResult, asked_turns, trace_states
from composer_replication.replay.vote import Verdict, count_votes, extract_dpo_pairs
from composer_replication.traces.siblings import action_key


class Passenger(BaseModel):
    name: str
    age: int = 30


class Booking(BaseModel):
    "What the tool takes; its schema is pydantic's own."

    cabin: Literal["economy", "business"]
    seats: int = 1
    most: float | None = None
    flexible: bool = False
    folder: Path = Path(".")
    passengers: list[Passenger] = []
    note: str = ""


TOOL = {"type": "function", "function": {"name": "book", "parameters": Booking.model_json_schema()}}


def act(arguments, name="book"):
    return Turn("assistant", tool_calls=(ToolCall(name, arguments),))


def same(one, other, tools=(TOOL,)):
    trace = Trace("t", (Turn("user", "Go."),), tuple(tools))
    return schema_key(trace, 1, act(one)) == schema_key(trace, 1, act(other))


ECONOMY = {"cabin": "economy"}
ALIKE = [  # pairs that pydantic reads as the same booking
    ({"seats": 2}, {"seats": "2"}), ({"seats": 2}, {"seats": 2.0}), ({"seats": 2}, {"seats": " 2 "}),
    ({}, {"seats": 1}), ({}, {"seats": "1"}),
    ({"most": 9.5}, {"most": "9.5"}), ({"most": 90}, {"most": "9e1"}), ({}, {"most": None}),
    ({"flexible": True}, {"flexible": "true"}),
    ({"folder": "a/b"}, {"folder": "./a//b/"}), ({}, {"folder": "./"}),
    ({"passengers": [{"name": "Ann", "age": 30}]}, {"passengers": [{"name": "Ann"}]}),
    ({"passengers": [{"name": "Ann", "age": 8}]}, {"passengers": [{"age": "8", "name": "Ann"}]}), ({}, {"note": ""}),
]
APART = [
    ({"seats": 2}, {"seats": 3}), ({}, {"seats": 2}), ({"note": "2"}, {"note": "2.0"}), ({"note": "./a"}, {"note": "a"}),
    ({"note": "Yes"}, {"note": "yes"}), ({"folder": "a/../b"}, {"folder": "b"}), ({"flexible": True}, {}), ({"most": 0}, {}),
    ({"passengers": [{"name": "Ann"}, {"name": "Bob"}]}, {"passengers": [{"name": "Bob"}, {"name": "Ann"}]}),
    ({"passengers": []}, {"passengers": [{"name": ""}]}), ({"most": 1}, {"most": True}),
]


@pytest.mark.parametrize("one, other", ALIKE)
def test_alike_is_what_pydantic_reads_alike(one, other):
    assert Booking(**ECONOMY, **one) == Booking(**ECONOMY, **other)
    assert same(ECONOMY | one, ECONOMY | other) and same(ECONOMY | other, ECONOMY | one)


@pytest.mark.parametrize("one, other", APART)
def test_what_differs_stays_apart(one, other):
    assert not same(ECONOMY | one, ECONOMY | other)


def test_the_case_of_a_word_counts_where_the_enum_does_not_decide_it():
    assert same({"cabin": "economy"}, {"cabin": " Economy"})
    both = {"type": "function", "function": {"name": "book", "parameters": {"type": "object", "properties": {
        "cabin": {"type": "string", "enum": ["A", "a"]}}}}}
    assert not same({"cabin": "A"}, {"cabin": "a"}, [both]) and not same({"cabin": " A"}, {"cabin": " a"}, [both])


def test_a_default_that_must_be_given_is_not_left_out():
    tool = {"type": "function", "function": {"name": "book", "parameters": {
        "type": "object", "properties": {"seats": {"type": "integer", "default": 1}}, "required": ["seats"]}}}
    assert not same({"seats": 1}, {}, [tool])


def test_a_schema_may_say_that_nothing_is_required_by_null():
    tool = {"type": "function", "function": {"name": "book", "parameters": {
        "type": "object", "properties": {"seats": {"type": "integer", "default": 1}}, "required": None}}}
    assert same({"seats": 1}, {}, [tool])


@pytest.mark.parametrize("arguments", [
    {"seats": "two"}, {"seats": "NaN"}, {"most": "1e999"}, {"most": "-Infinity"}, {"seats": "9" * 5000}, {"seats": "[" * 100_000},
    {"seats": "2.5"}, {"other": "3"},
    {"passengers": "Ann"}, {"passengers": [3, None]}, {"most": "null and void"}])
def test_what_the_schema_does_not_admit_stays_as_it_is(arguments):
    [call] = normalised(act(arguments), [TOOL]).tool_calls
    assert call.arguments == arguments


def test_a_value_that_any_of_several_readings_admits_is_left_alone():
    text_or_number = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    tool = {"type": "function", "function": {"name": "book", "parameters": {"type": "object", "properties": {
        "id": text_or_number, "any": {}, "yes": True, "loop": {"$ref": "#/$defs/loop"}, "lost": {"$ref": "#/$defs/none"},
        "either": {"anyOf": [{"type": "object", "properties": {"n": {"type": "integer"}}}, {"type": "object"}]},
        "list": {"type": ["array", "string"], "items": {"type": "integer"}}}, "$defs": {"loop": {"$ref": "#/$defs/loop"}}}}}
    kept = {"id": "12", "any": "12", "yes": "12", "loop": "12", "lost": "12", "list": "[1]", "either": {"n": "1"}}
    assert normalised(act(kept), [tool]).tool_calls[0].arguments == kept
    assert normalised(act({"list": ["1", 2.0]}), [tool]).tool_calls[0].arguments == {"list": [1, 2]}


def test_only_calls_of_known_tools_with_an_object_are_read():
    for turn in (act('{"seats": "2"'), act({"seats": "2"}, "other"), Turn("assistant", "2")):
        assert normalised(turn, [TOOL]) == turn
    assert normalised(act({"seats": "2"}), []) == act({"seats": "2"})
    assert normalised(act({"seats": "2"}), [TOOL["function"]]).tool_calls[0].arguments == {"seats": 2}  # without the wrapper


def test_a_real_schema_by_reference(shared_data):
    tools = json.loads((shared_data / "traces" / "tool_schemas.json").read_text())["tau2_airline"]
    trace = Trace("t", (Turn("user", "Go."),), tuple(tools))
    for cabin, equal in (("Basic_Economy", True), ("business", False)):
        one, other = (act({"reservation_id": "4WQ150", "cabin": c, "flights": [{"flight_number": "HAT1", "date": "2024-05-01"}],
                           "payment_id": "gift"}, "update_reservation_flights") for c in ("basic_economy", cabin))
        assert (schema_key(trace, 1, one) == schema_key(trace, 1, other)) is equal


class Annotated_(BaseModel):
    level: Annotated[int, WithJsonSchema({"type": "integer", "enum": [1, 2]})] = Field(2)


def test_numbers_of_an_enum():
    tool = {"type": "function", "function": {"name": "book", "parameters": Annotated_.model_json_schema()}}
    assert same({"level": "1"}, {"level": 1.0}, [tool]) and same({"level": "2"}, {}, [tool])
    assert not same({"level": 3}, {}, [tool])


def test_votes_and_pairs_by_the_schema():
    trace = Trace("t", (Turn("user", "Go."), act({"cabin": "business"})), (TOOL,))
    spelled = (ECONOMY, {"cabin": "Economy", "seats": "1"}, {"cabin": "business", "seats": 1.0})
    results = [TeacherCallResult(n, act(a)) for n, a in zip("abc", spelled)]
    assert extract_dpo_pairs(trace, [results]) == []
    [pair] = extract_dpo_pairs(trace, [results], key=schema_key)
    assert (pair.chosen, pair.rejected, pair.source) == (act(ECONOMY), trace.turns[1], "majority:2/3")
    assert (pair.votes, pair.teachers) == ((2, 1), ("a", "b"))
    assert pair.margin == pytest.approx(1 / 3)


def test_a_pair_carries_how_the_vote_went():
    trace = Trace("t", (Turn("user", "Go."), act({"n": 0})))

    def made(*numbers):
        results = [TeacherCallResult(n, act({"n": i})) for n, i in zip("abcdefg", numbers)]
        return [(p.votes, p.teachers, p.margin) for p in extract_dpo_pairs(trace, [results])]
    assert made(0, 1, 0, 2, 0, 2, 0) == [((4, 2, 1), ("a", "c", "e", "g"), 2 / 7), ((4, 1, 2), ("a", "c", "e", "g"), 2 / 7)]
    assert made(1, 0, 1, 2, 1, 1, 0) == [((4, 2, 1), ("a", "c", "e", "f"), 2 / 7)]
    assert made(1, 1, 1) == [((3, 0), ("a", "b", "c"), 1.0)]


def test_words_count_unless_they_are_told_not_to():
    trace = Trace("t", (Turn("user", "Go."),), (TOOL,))
    says = [Turn("assistant", text) for text in ("Your id?", "Who are you?")]
    assert len({schema_key(trace, 1, s) for s in says}) == 2
    assert len({schema_key(trace, 1, s, words=False) for s in says}) == 1
    call = schema_key(trace, 1, act(ECONOMY))
    assert schema_key(trace, 1, act(ECONOMY), words=False) == call != schema_key(trace, 1, says[0], words=False)
    assert schema_key(trace, 1, Turn("assistant", "speaks")) != schema_key(trace, 1, says[0], words=False)


# Effects

def files(env):
    return sorted(env.files.items())


def scripted(seed=0):
    "A row of the world, a trace really made on it, and its environment's tools by role."
    row = world_rows(1, f"effect-{seed}", "train")[0]
    env = WorldEnv()
    env.reset(**row)
    return row, world_episode(env.task, WorldAgent.of(), "one"), {t.role: t for t in env.task.tools}, env.task


def world_call(tools, role, **arguments):
    return act({tools[role].arguments[k]: v for k, v in arguments.items()}, tools[role].name)


def test_effects_in_the_world():
    row, trace, tools, task = scripted()
    at = asked_turns(trace)[2]  # before the body is written
    folder = task.path.split("/")[0]

    def key(action):
        return effect_key(WorldEnv, row, trace, at, action, files)
    read = [world_call(tools, "read", path=task.path, **more) for more in ({}, {"lines": 1000}, {"lines": 1})]
    assert key(read[0]) == key(read[1]) != key(read[2]) and len({action_key(r) for r in read}) == 3
    assert key(world_call(tools, "list", path=folder)) == key(world_call(tools, "list", path=f"{folder}/"))
    # this world compares paths as strings: another spelling is another action here, and no schema says otherwise
    assert key(read[0]) != key(world_call(tools, "read", path=f"./{task.path}"))
    write = [world_call(tools, "write", path=task.path, text=text) for text in ("x = 1\n", "x = 1\n", "x =  1\n")]
    assert key(write[0]) == key(write[1]) != key(write[2])  # all of them bring back "written"
    assert action_key(write[0]) == action_key(write[2])  # white space is not seen there


def test_effects_where_a_path_is_normalised():
    "Where a path is a path, two spellings are one action."
    class Normalising(WorldEnv):
        "As on a disk: `./a` is `a`."

        def call(self, call):
            return super().call(replace(call, arguments={k: v.removeprefix("./") for k, v in call.arguments.items()}))

    row, = world_rows(1, "effect")
    env = WorldEnv()
    env.reset(**row)
    tools, name = {t.role: t for t in env.task.tools}, env.task.path
    trace = Trace("demo", (Turn("user", "Go."),))

    def key(action):
        return effect_key(Normalising, row, trace, 1, action, files)
    one, other = (world_call(tools, "read", path=path) for path in (name, f"./{name}"))
    assert key(one) == key(other) and action_key(one) != action_key(other)


def test_votes_by_effect():
    row, trace, tools, task = scripted(1)
    at = asked_turns(trace)[1]  # it reads the module
    student = world_call(tools, "read", path=f"./{task.path}")
    spoiled = Trace(trace.trace_id, (*trace.turns[:at], student), trace.tools)
    results = [TeacherCallResult(n, world_call(tools, "read", path=task.path, **more))
               for n, more in (("a", {}), ("b", {"lines": 999}))]
    key = partial(effect_key, WorldEnv, row, state=files)
    assert count_votes(student, results).verdict is Verdict.SPLIT
    assert count_votes(student, results, key=partial(key, spoiled, at)).verdict is Verdict.OTHER
    [pair] = extract_dpo_pairs(spoiled, [results], turns=[at], key=key)
    assert (pair.chosen, pair.rejected, pair.source) == (results[0].action, student, "majority:2/2")
    [state] = trace_states(spoiled, [at])  # a state does in place of its trace
    assert key(state, at, student) == key(spoiled, at, student)


def test_two_writings_that_only_white_space_parts_make_no_pair():
    row, trace, tools, task = scripted()
    at = asked_turns(trace)[2]
    student, better = (world_call(tools, "write", path=task.path, text=text) for text in ("if x:\n pass", "if x:\npass"))
    spoiled = Trace(trace.trace_id, (*trace.turns[:at], student), trace.tools)

    def key(trace, turn, action):
        return effect_key(WorldEnv, row, trace, turn, action, files)
    assert extract_dpo_pairs(spoiled, [[TeacherCallResult(n, better) for n in "ab"]], turns=[at], key=key) == []


def test_every_turn_of_a_recorded_trace_comes_to_what_it_came_to():
    row, trace, tools, _ = scripted(2)
    for at in asked_turns(trace):
        one, again = (effect_key(WorldEnv, row, trace, at, trace.turns[at], files) for _ in range(2))
        assert one == again
    other = world_rows(1, "another", "train")[0]
    with pytest.raises(TraceProblem, match="brings back .* and not .*; give the row that the trace was made with"):
        effect_key(WorldEnv, other, trace, asked_turns(trace)[1], trace.turns[asked_turns(trace)[1]], files)
    with pytest.raises(ValueError, match=r"WorldEnv has no fingerprint\(\); pass `state`"):
        effect_key(WorldEnv, row, trace, asked_turns(trace)[0], trace.turns[asked_turns(trace)[0]])


class Closing:
    "Counts what is open, and fails where it is told to."

    open, tools = 0, ()

    def __init__(self):
        Closing.open += 1

    def reset(self, fails=False):
        self.fails = fails

    def call(self, call):
        if self.fails:
            raise OSError("gone")
        return ToolResult(call.name)

    def reward(self, answer=""):
        return None

    def fingerprint(self):
        return 0

    def close(self):
        Closing.open -= 1


def test_environments_are_closed_whatever_happens():
    trace = Trace("t", (Turn("user", "Go."), act({}, "a"), Turn("tool", "a", observation=True), act({}, "b")))
    effect_key(Closing, {}, trace, 3, act({}, "c"))
    for problem, spoiled in ((OSError, {"fails": True}), (TypeError, {"what": 1})):
        with pytest.raises(problem):
            effect_key(Closing, spoiled, trace, 3, act({}, "c"))
    assert Closing.open == 0
    keys = [effect_key(Closing, {}, trace, 3, a) for a in (act({}, "c"), act({"n": 1}, "c"), act("{", "c"), act({}, "d"))]
    assert len(set(keys)) == 2  # the environment does not care for arguments
