"The argument check against plain jsonschema, over generated arguments; and the sentence for a call that cannot be read."
import json
import warnings

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.core.errors import InputProblem
from composer_replication.core.tools import (
    ToolResult,
    alternatives,
    argument_error,
    check_arguments,
    properties_of,
    refusal,
    unreadable,
)
from composer_replication.core.trace import ToolCall
from composer_replication.rollout.tool_call_parser import read_call

KINDS = {"s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
         "l": {"type": "array", "items": {"type": "string"}}, "o": {"type": "object"},
         "m": {"type": "integer", "nullable": True}, "e": {"enum": ["up", "down"]},
         "d": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}
SCHEMA = {"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": KINDS, "required": ["s"]}}}
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 9)
                      | st.floats(-9, 9).filter(lambda f: not f.is_integer())
                      | TEXTS | st.sampled_from(["up", "down"]),
                      lambda inner: st.lists(inner, max_size=2)
                      | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2))
PLAIN = {**SCHEMA["function"]["parameters"], "additionalProperties": False,
         "properties": KINDS | {"m": {"type": ["integer", "null"]}}}  # `nullable` in JSON Schema's own words


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from([*KINDS, "z"]), VALUES, max_size=5))
def test_what_jsonschema_refuses_is_refused_and_nothing_else(arguments):
    errors = list(jsonschema.Draft202012Validator(PLAIN).iter_errors(arguments))
    clause = check_arguments(SCHEMA, arguments)
    assert (clause is None) == (not errors)
    if errors:
        names = {str(e.path[0]) for e in errors if e.path} | {"z", "s"}
        assert any(repr(name)[:-1] in clause for name in names) and "\n" not in clause and len(clause) < 300


@pytest.mark.parametrize("arguments, clause", [
    ({}, "the argument 's' is missing"),
    ({"s": "a", "z": 1}, "there is no argument 'z'; the arguments are s, i, n, b, l, o, m, e, d"),
    ({"z": 1}, "there is no argument 'z'; the arguments are s, i, n, b, l, o, m, e, d"),
    ({"i": "1"}, "the argument 's' is missing"),
    ({"s": "a", "i": True}, "'i' must be an integer, not True"),
    ({"s": "a", "i": 1.0}, "'i' must be an integer, not 1.0"),
    ({"s": None}, "'s' must be a string, not None"),
    ({"s": "a", "m": "x"}, "'m' must be an integer or null, not 'x'"),
    ({"s": "a", "l": ["b", 3]}, "'l[1]' must be a string, not 3"),
    ({"s": "a\0"}, "'s' must be a string without zero byte or half surrogate pair, not 'a\\x00'"),
    ({"s": "\ud800"}, "'s' must be a string without zero byte or half surrogate pair, not '\\ud800'"),
    ({"s": "a", "e": "left"}, "'e' does not fit: 'left' is not one of ['up', 'down']"),
    ({"s": "a", "d": {"x": "1"}}, "'d.x' must be an integer, not '1'"),
    ({"s": "a", "m": None, "e": "up", "d": {"x": 1, "y": 2}}, None),
])
def test_one_clause_names_the_argument(arguments, clause):
    assert check_arguments(SCHEMA, arguments) == clause


def test_a_tool_without_arguments_takes_none():
    bare = {"type": "function", "function": {"name": "t"}}
    assert check_arguments(bare, {}) is None
    assert check_arguments(bare, {"a": 1}) == "there is no argument 'a'; the tool takes none"
    assert argument_error(bare, {"a": 1}).message == "Additional properties are not allowed ('a' was unexpected)"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20), st.sampled_from(["ls", "", "a b"]))
def test_every_raw_call_has_a_sentence(raw, name):
    result = refusal(ToolCall(name, raw), [SCHEMA])
    assert result == ToolResult(unreadable(ToolCall(name, raw)), "json_decode")
    assert result.text.endswith("Write one JSON object with a name and arguments.")


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text("ab\"\\é", max_size=3), st.integers() | st.text(max_size=4), max_size=3), st.data())
def test_a_cut_off_call_is_told_the_column_of_the_whole_call(arguments, data):
    whole = json.dumps({"name": "ls", "arguments": arguments})
    start = whole.index('"arguments": ') + len('"arguments": ')
    cut = whole[:data.draw(st.integers(start, len(whole) - 1))]
    with pytest.raises(ValueError) as error:
        json.loads(cut)
    assert unreadable(read_call(cut)).startswith(f"Invalid JSON in the call: {error.value}.")


@pytest.mark.parametrize("text", [
    '{"name": "ls", "x"arguments": {"folder": "."}}', '{"name": "ls"content": {"folder": "."}}',
    '{"name": "", "arguments": {"f',
    '{"name": "ls", "arguments":',
    '{"name": "ls", "arguments": {"n": -1000000000000000000000000000000}'])
def test_the_sentence_names_the_place_in_the_text_as_it_was_written(text):
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads(text)
    assert unreadable(read_call(text)).startswith(f"Invalid JSON in the call: {error.value}.")


@pytest.mark.parametrize("parameters", [
    {"properties": {"path": {"type": "text"}}}, {"properties": {"path": {"pattern": "("}}},
    {"properties": {"path": {"$ref": "#/nowhere"}}},
    {"properties": ["path"]}, {"properties": {"path": {"minLength": "three"}}}, ["path"], "path", {"required": 3}],
    ids=lambda parameters: str(parameters)[:40])
def test_a_schema_that_is_none_is_one_problem_that_names_the_tool(parameters):
    tool = {"type": "function", "function": {"name": "ls", "parameters": parameters}}
    with pytest.raises(InputProblem, match="the parameters of the tool 'ls' are no JSON schema .*; mend the tool's") as caught:
        refusal(ToolCall("ls", {"path": "a"}), [tool])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind, known",
                         [(None, True), ("runtime_error", True), ("slow_disk", False), ("Timeout", False)])
def test_an_unknown_kind_of_error_is_not_replaced_in_silence(kind, known):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ToolResult("the disk is slow", kind).failed == (kind is not None)
    assert [f"the error kind {kind!r} is unknown" in str(w.message) for w in caught] == [True] * (not known)


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TREE = {"type": "object", "required": ["name"],
        "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}


def with_references(properties, **more):
    return {"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": properties} | more}}


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("properties, arguments, clause", [
    ({"to": {"$ref": "#/KEY/Point"}}, {"to": {"x": 1}}, None),
    ({"to": {"$ref": "#/KEY/Point"}}, {"to": {"x": "one"}}, "'to.x' must be an integer, not 'one'"),
    ({"to": {"$ref": "#/KEY/Point"}}, {"at": 1}, "there is no argument 'at'; the arguments are to"),
    ({"to": {"anyOf": [{"$ref": "#/KEY/Point"}, {"type": "null"}]}}, {"to": None}, None),
    ({"all": {"items": {"$ref": "#/KEY/a~1b"}}}, {"all": [{"x": 1}, {"x": None}]}, "'all[1].x' must be an integer, not None"),
    ({"to": {"$ref": "#/properties/from"}, "from": {"type": "integer"}}, {"to": "here"}, "'to' must be an integer, not 'here'"),
])
def test_a_reference_stands_for_what_it_names(key, properties, arguments, clause):
    properties = json.loads(json.dumps(properties).replace("KEY", key))
    definitions = {"Point": POINT, "a/b": {"$ref": f"#/{key}/Point"}}
    assert check_arguments(with_references(properties, **{key: definitions}), arguments) == clause


@pytest.mark.parametrize("others, arguments, clause", [
    ({"$ref": "#/$defs/Point"}, {"home": {"x": 1}}, None),
    ({"$ref": "#/$defs/Point"}, {"home": {"x": "one"}}, "'home.x' must be an integer, not 'one'"),
    (True, {"to": 1, "home": 2}, None), (False, {"home": 2}, "there is no argument 'home'; the arguments are to"),
    ({}, {"home": 2}, "there is no argument 'home'; the arguments are to")])
def test_a_tool_may_take_names_that_are_not_listed(others, arguments, clause):
    tool = with_references({"to": {"type": "integer"}}, additionalProperties=others, **{"$defs": {"Point": POINT}})
    assert check_arguments(tool, arguments) == clause


def test_a_schema_may_contain_itself():
    tool = with_references({"root": {"$ref": "#/$defs/Tree"}}, **{"$defs": {"Tree": TREE}})
    deep = {"name": "a"}
    for _ in range(30):
        deep = {"name": "b", "below": [deep]}
    assert check_arguments(tool, {"root": deep}) is None
    clause = check_arguments(tool, {"root": {"name": "a", "below": [{"name": 1}]}})
    assert clause == "'root.below[0].name' must be a string, not 1"
    assert properties_of(tool)["root"]["type"] == "object"


def test_the_parameters_themselves_may_be_a_reference_or_a_union():
    closed = {"Tree": TREE | {"additionalProperties": False}}
    whole = {"function": {"name": "t", "parameters": {"$ref": "#/$defs/Tree", "$defs": closed}}}
    union = {"function": {"name": "t", "parameters": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Point"}],
                                                      "$defs": {"Tree": TREE, "Point": POINT}}}}
    for tool, known in ((whole, "name, below"), (union, "name, below, x")):
        assert check_arguments(tool, {"name": "a", "below": []}) is None
        assert check_arguments(tool, {"name": "a", "y": 1, "z": 2}) == f"there is no argument 'y'; the arguments are {known}"
        assert ", ".join(properties_of(tool)) == known
    assert "'name'" in check_arguments(whole, {"name": 1})
    assert "is not valid under any" in check_arguments(union, {"below": []})


def test_references_without_an_end_or_a_target_end(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen",
                        lambda *_, **__: pytest.fail("a schema made the host fetch something"))
    loop = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}, "C": {"anyOf": [{"$ref": "#/$defs/C"}] * 9}}
    for to in ("#/$defs/A", "#/$defs/none", "#/$defs/C", "https://example.org/schema.json"):
        tool = with_references({"to": {"$ref": to}}, **{"$defs": loop})
        assert set(alternatives_types(tool)) == {"to"}
        with pytest.raises(InputProblem, match="the parameters of the tool 't' are no JSON schema"):
            check_arguments(tool, {"to": 1})


def alternatives_types(tool):
    root = tool["function"]["parameters"]
    return {name: [a.get("type") for a in alternatives(schema, root)] for name, schema in properties_of(tool).items()}
