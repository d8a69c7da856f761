"Actions that a schema reads alike, against pydantic reading the same."
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, WithJsonSchema

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.replay.same_action import normalised, schema_key
from composer_replication.replay.teachers import TeacherCallResult
from composer_replication.replay.vote import Verdict, count_votes, extract_dpo_pairs


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
    return schema_key(act(one), tools) == schema_key(act(other), tools)


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


@pytest.mark.parametrize("required", [["seats"], None, []])
def test_a_default_is_left_out_unless_it_must_be_given(required):
    tool = {"type": "function", "function": {"name": "book", "parameters": {
        "type": "object", "properties": {"seats": {"type": "integer", "default": 1}}, "required": required}}}
    assert same({"seats": 1}, {}, [tool]) is not bool(required)


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
    for cabin, equal in (("Basic_Economy", True), ("business", False)):
        one, other = (act({"reservation_id": "4WQ150", "cabin": c, "flights": [{"flight_number": "HAT1", "date": "2024-05-01"}],
                           "payment_id": "gift"}, "update_reservation_flights") for c in ("basic_economy", cabin))
        assert (schema_key(one, tools) == schema_key(other, tools)) is equal


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


def test_words_count_where_nothing_is_called():
    asks = [Turn("assistant", text) for text in ("Your id?", "Who are you?")]
    assert len({schema_key(ask, [TOOL]) for ask in asks}) == 2


def test_two_writings_that_only_white_space_parts_make_no_pair():
    def write(text):
        return Turn("assistant", tool_calls=(ToolCall("write", {"text": text}),))

    def key(action, tools):  # tells apart what `action_key` does not
        return action.tool_calls[0].arguments["text"].encode()
    student, better = write("if x:\n pass"), write("if x:\npass")
    trace = Trace("t", (Turn("user", "Go."), student))
    results = [TeacherCallResult(n, better) for n in "ab"]
    assert count_votes(student, results, key=partial(key, tools=())).verdict is Verdict.OTHER
    assert extract_dpo_pairs(trace, [results], key=key) == []
