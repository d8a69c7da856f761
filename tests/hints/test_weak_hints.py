# ruff: noqa: E501
"""Hints that said what the error does not say: a word in a name, another language, an output that is empty."""

import pytest

from composer_replication.core.trace import HintContext, ToolCall, Trace, Turn
from composer_replication.hints.diagnose import diagnose
from composer_replication.hints.layers import default_composite
from composer_replication.hints.templates import hint_json_decode
from composer_replication.traces.error_sites import find_error_sites

NODE = "\n    at Object.<anonymous> (/w/x.js:1:1)\n    at node:internal/main:36:10\n\nNode.js v20.0.0"


@pytest.mark.parametrize("error", [
    "src/a.ts(3,5): error TS2322: Type 'Timeout' is not assignable to type 'number'.",
    "src/a.ts:3:5 - error TS2304: Cannot find name 'TimeoutError'.",
    "error[E0433]: cannot find type `ConnectTimeout` in this scope\n --> src/a.rs:3:9",
    "src/net.go:12:4: undefined: RateLimit\nsrc/net.go:14:4: undefined: rate limit429"])
def test_a_word_in_the_name_of_a_type_is_no_cause(error):
    assert diagnose(error) is None


@pytest.mark.parametrize("error", [
    "/w/x.js:1\nfoo.map(\n    ^\n\nTypeError: foo.map is not a function" + NODE,
    "/w/x.js:1\n}\n^\n\nSyntaxError: Unexpected token '}'" + NODE,
    "ReferenceError: name 'x' is not defined" + NODE,
    "SyntaxError: Unexpected token < in JSON at position 0",
    "TypeError: Cannot read properties of undefined (reading 'a')"])
def test_an_error_of_node_is_not_python_s(error):
    assert diagnose(error) is None


@pytest.mark.parametrize("error, says", [
    ("Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nTypeError: can only concatenate str", "types do not fit"),
    ("requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='a.b', port=443): Read timed out.", "no answer in time"),
    ("The command timed out", "time limit")])
def test_what_the_error_says_is_still_diagnosed(error, says):
    assert says in diagnose(error)


@pytest.mark.parametrize("output", ["(no output)", "", "[no output]", "No output."])
@pytest.mark.parametrize("times", [1, 3])
def test_an_empty_output_is_not_quoted(output, times):
    made = []
    for n in range(times):
        made += [Turn("assistant", tool_calls=(ToolCall("bash", {"command": "./run"}, f"c{n}"),)),
                 Turn("tool", output, tool_call_id=f"c{n}", observation=True, failed=True, fail_reason="exit status 2")]
    trace = Trace("t", tuple(made))
    site = find_error_sites(trace)[-1]
    hint = default_composite().hint(trace, site).text
    assert "no output" not in hint.lower() and "nothing" in hint


@pytest.mark.parametrize("error", ["Previous response had parsing errors:\nERROR: No valid JSON found", "[ERROR] You did not use a tool in your previous response! # Next Steps",
                                   "The answer is not in the format", "found 2 actions, EXACTLY ONE is needed"])
def test_a_turn_without_a_call_is_not_told_of_arguments(error):
    assert "arguments" not in hint_json_decode(HintContext("json_decode", error))


@pytest.mark.parametrize("error", ["The output does not match the schema", "1 validation error for Town\nname\n  Field required", "Parsing failed: no action found",
                                   "invalid format", "Your reply could not be decoded"])
def test_a_notation_that_no_one_named_is_not_asked_for(error):
    hint = hint_json_decode(HintContext("json_decode", error))
    assert "JSON" not in hint and "one tool call" in hint and "notation" in hint
