"What a grader expected: only the layer that says so in its name reads it."
import pytest

from composer_replication.contrib.benchmarks.expected_value import ExpectedValueHints, nearly, refused
from composer_replication.core.trace import HintContext
from composer_replication.hints.layers import default_composite, make_layers

PLACE = "composer_replication.contrib.benchmarks.expected_value:ExpectedValueHints"
SCHEMA = {"name": "lend", "parameters": {"type": "object", "properties": {"p": {"type": "number"}}, "required": ["p"]}}


def error_of(given, expected):
    return f"Invalid value for parameter 'p': {given}. Expected one of {expected}. Case insensitive."


@pytest.mark.parametrize("given, expected, percent", [
    ("5", "[0.05]", True), ("7.0", "['', 0.07]", True), ("12.5", "[0.125, 12]", True),
    ("500", "[5]", False), ("5", "[5.0]", False), ("'5'", "[0.05]", False), ("5", "[0]", False)])
def test_percent_is_told_by_its_ratio(given, expected, percent):
    assert ("percent" in str(nearly(*refused(error_of(given, expected))))) == percent


@pytest.mark.parametrize("error", ["", error_of("5", "[no list]"), error_of("no value", "[1]"), "Expected one of [1]"])
def test_what_names_no_values_refuses_none(error):
    assert refused(error) is None


@pytest.mark.parametrize("given, expected, says", [
    ("'2024-03-12'", "['2023-03-12']", "another value"), ("'10:30'", "['', '11:30']", "another value"),
    ("'What is on the picture, in detail?'", "['what is on the picture']", "nothing added"), ("'a'", "['b']", None),
    ("'Beijing, China'", "['Beijing', '北京']", "nothing added"), ("'shared'", "['red']", None),
    ("'kill /IM /F'", "['kill /F /IM']", "same words"),
    ("'2024-03-12'", "['12 March 2024']", None), ("5", "['5']", None), ("'red'", "no list", None)])
def test_a_right_form_is_not_called_wrong(given, expected, says):
    near = nearly(*(refused(error_of(given, expected)) or (None, [])))
    assert (near is None) if says is None else says in near


def context(given, expected):
    return HintContext("type_error", error_of(given, expected), ("lend",), "lend", SCHEMA)


GOLDS = [("5", "[0.05]"), ("5", "[7]"), ("5", "['5']"), ("'a b'", "['b a']"), ("'a b'", "['c']"),
         ("'2024'", "['2023']"), ("'2024'", "[2024]")]


@pytest.mark.parametrize("given", sorted({given for given, _ in GOLDS}))
def test_two_expected_values_give_one_hint_unless_the_layer_is_named(given):
    contexts = [context(given, expected) for of, expected in GOLDS if of == given]
    assert len({default_composite().generate("type_error", one) for one in contexts}) == 1
    [layer] = make_layers([PLACE])
    assert isinstance(layer, ExpectedValueHints) and len({layer.generate("type_error", one) for one in contexts}) > 1


@pytest.mark.parametrize("given, expected", GOLDS)
def test_the_layer_never_says_the_value(given, expected):
    hint = ExpectedValueHints().generate("type_error", context(given, expected))
    assert hint is None or expected.strip("[]'") not in hint.replace(given.strip("'"), "")


def test_without_a_graders_words_it_has_no_hint():
    assert ExpectedValueHints().generate("runtime_error", HintContext("runtime_error", "No such file")) is None
