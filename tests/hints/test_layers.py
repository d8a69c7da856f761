"Templates and layers: order, routing, refusals, and what becomes of strange input."

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.core.trace import ERROR_KINDS, ErrorSite, HintContext, ToolCall, Trace, Turn
from composer_replication.hints.layers import (
    CompositeHintGenerator,
    HintGenerator,
    RawErrorHintGenerator,
    RoutingHintGenerator,
    TemplateHintGenerator,
    default_composite,
)
from composer_replication.hints.leak_check import repeats
from composer_replication.hints.sibling_layer import SiblingHintGenerator
from composer_replication.hints.templates import dispatch, hint_tool_not_found, knows
from composer_replication.hints.text import sentences
from composer_replication.traces.siblings import SiblingIndex

SCHEMA = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "user_id": {"type": "string"},
                "seats": {"type": "integer", "description": "How many seats, at most 9."},
            },
            "required": ["user_id"],
        },
    },
}


CALL = ToolCall("book", {"seats": 2, "user": "mia"})


def case(kind="runtime_error", error="Error: no idea", calls=(CALL,), gold=None, reward=0.0, **context):
    turns = (Turn("user", "Book."), Turn("assistant", tool_calls=calls), Turn("tool", error, observation=True, failed=True))
    trace = Trace("one", turns, (SCHEMA,), task_id="seats", gold=gold, reward=reward)
    return trace, ErrorSite("one", 1, 2, 1, 2, kind, HintContext(kind, error, **context))


class Says:
    def __init__(self, name, text):
        self.name, self.text, self.asked = name, text, 0

    def generate(self, error_kind, error_meta):
        self.asked += 1
        return self.text


def test_the_first_answer_that_passes_is_the_hint_and_no_layer_behind_it_is_asked():
    trace, site = case(gold="+++ b/x\n@@ -1 +1 @@\n+the_answer = forty_two(1)\n")
    silent, empty, echo, leak, good, last = (
        Says("silent", None),
        Says("empty", " \n"),
        Says("echo", 'book(seats=2, user="mia")'),
        Says("leak", "Write the_answer = forty_two(1)."),
        Says("good", "Look up the id. "),
        Says("last", "x"),
    )
    composite = CompositeHintGenerator([silent, empty, echo, leak, good, last])
    hint = composite.hint(trace, site)
    assert (hint.text, hint.layer) == ("Look up the id.", "good")
    assert composite.refused == {
        ("empty", "empty"): 1,
        ("echo", "repeats the failed action"): 1,
        ("leak", "leaks the reference solution"): 1,
    }
    assert last.asked == 0
    hook = composite.as_collator_hook()
    assert hook(site.kind, HintContext.at(trace, site)) == "Look up the id."


def test_every_layer_is_a_hint_generator_and_the_order_is_that_of_the_inventory():
    composite = default_composite(llm_complete=str, enable_raw_error=True, siblings=SiblingIndex())
    assert [layer.name for layer in composite.layers] == ["template", "raw_error", "judge", "sibling"]
    assert all(isinstance(layer, HintGenerator) for layer in (*composite.layers, composite))
    assert [layer.name for layer in default_composite().layers] == ["template", "raw_error"]
    assert [layer.name for layer in default_composite(llm_complete=str).layers] == ["template", "raw_error", "judge"]
    assert [layer.name for layer in default_composite(llm_complete=str, enable_raw_error=False).layers] == ["template", "judge"]
    assert [layer.name for layer in default_composite(enable_raw_error=False, siblings=SiblingIndex()).layers] == [
        "template",
        "sibling",
    ]


def test_a_failing_judge_hands_over_to_the_sibling():
    trace, site = case()
    other = replace(
        trace,
        trace_id="two",
        reward=1.0,
        turns=(
            trace.turns[0],
            Turn("assistant", tool_calls=(ToolCall("find_user", {"name": "Mia"}),)),
            Turn("tool", "mia_li", observation=True),
        ),
    )
    index = SiblingIndex()
    index.add(trace, [site])
    index.add(other, [])

    def down(prompt):
        raise TimeoutError

    composite = default_composite(llm_complete=down, enable_raw_error=False, siblings=index)
    hint = composite.hint(trace, site)
    assert hint.layer == "sibling" and 'find_user(name="Mia")' in hint.text
    assert composite.layers[1].failures == {"TimeoutError": 1}


def test_the_sibling_layer_shows_the_best_sibling_and_none_of_its_thinking():
    trace, site = case()
    index = SiblingIndex()
    index.add(trace, [site])
    for name, reward in (("poor", 0.1), ("best", 0.9), ("good", 0.5)):
        action = Turn("assistant", "I think aloud.", "SECRET", (ToolCall(name, {"long": "x" * 5000}),))
        index.add(
            replace(trace, trace_id=name, reward=reward, turns=(trace.turns[0], action, Turn("tool", "fine", observation=True))),
            [],
        )
    said = SiblingHintGenerator(index).generate(site.kind, HintContext.at(trace, site))
    assert "best(" in said and "SECRET" not in said and len(said) < 500


def test_raw_errors_are_routed_and_bounded():
    trace, site = case(error="Traceback (most recent call last):\n" + "  File 'x', line 1\n" * 400 + "WeirdError: the end")
    raw = RoutingHintGenerator(RawErrorHintGenerator(max_chars=120))
    said = raw.generate(site.kind, HintContext.at(trace, site))
    assert len(said) <= 120 and said.endswith("WeirdError: the end")
    assert raw.generate("verbosity", HintContext.at(trace, site)) is None
    head = "begin " + "y" * 1000
    assert " begin y" in RawErrorHintGenerator(80).generate("runtime_error", HintContext.at(*case(error=head)))
    assert RawErrorHintGenerator().generate("runtime_error", HintContext.at(*case(error="<output></output>"))) is None


def test_a_raw_error_leaves_out_what_it_quotes_of_the_attempt():
    old = "def price(item):\n    return item.cost * item.factor  # the old line that is not in the file"
    trace, site = case(
        error=f"Odd: `{old}` went wrong in shop.py", calls=(ToolCall("edit", {"path": "shop.py", "old": old, "new": "x"}),)
    )
    assert default_composite().hint(trace, site).text.endswith("Odd: `…` went wrong in shop.py")


def test_a_raw_error_beside_a_long_blank_argument_stays_readable():
    trace, site = case(error="Odd: the file is empty", calls=(ToolCall("write", {"path": "a", "text": "\n" * 70}),))
    assert default_composite().hint(trace, site).text.endswith("Odd: the file is empty")


def test_a_raw_error_that_shows_the_attempt_keeps_the_rest():
    calls = (ToolCall("bash", {"command": "pip install numpy pandas | tail -5"}),)
    trace, site = case(error="Weird: bash -c 'pip install numpy pandas | tail -5' did something", calls=calls)
    composite = default_composite()
    assert composite.hint(trace, site).text.endswith("Weird: bash -c '…' did something") and not composite.refused


def test_tool_lists_are_bounded_and_nearest_first():
    names = tuple(f"tool_{i:03d}" for i in range(300))
    said = hint_tool_not_found(
        HintContext("tool_not_found", available_tools=(*names, "search_flight"), tool_name="search_flights")
    )
    assert (
        said.startswith("Only these tools exist here: `search_flight`, ") and said.endswith("and 289 more.") and len(said) < 300
    )
    assert "search_flights" not in said  # the wrong name stays out
    assert hint_tool_not_found(HintContext("tool_not_found", tool_name="x")) == "There is no tool named `x` here."
    assert not knows("tool_not_found", hint_tool_not_found(HintContext("tool_not_found")))


@pytest.mark.parametrize(
    "error, says",
    [
        ("book() got an unexpected keyword argument 'user'", "no `user`; perhaps `user_id` is meant"),
        ("Additional properties are not allowed ('colour' was unexpected)", "no `colour`."),
        ("'user_id' is a required property", "do not leave out `user_id`"),
        ("Missing required parameter: 'user_id'.", "do not leave out `user_id`"),
        (
            "Invalid value for parameter 'seats': 'two'. Expected one of [2].",
            "as integer, in exactly the form of its description (How many seats, at most 9)",
        ),
        (
            "Nested type checking failed for parameter 'seats'. Expected outer type array with inner type <class 'float'>.",
            "as array of float",
        ),
        ("something odd", "`user_id` (string), `seats` (integer, optional)"),
    ],
)
def test_type_errors_name_the_arguments(error, says):
    said = dispatch("type_error", HintContext("type_error", error, ("book",), "book", SCHEMA))
    assert says in said and "Expected one of" not in said


@pytest.mark.parametrize(
    "error, says",
    [
        ("Expecting ',' delimiter: line 1 column 9 (char 8)", "JSON object, with the keys `user_id` (string)"),
        ("You have an error in your SQL syntax; check the manual near '' at line 1", "ends too early"),
        ("Error executing query: cannot be read", "SQL statement"),
        (
            "ast_decoder:decoder_failed: Invalid syntax. Failed to decode AST. 'str' object has no attribute 'keys'",
            "the tool calls themselves",
        ),
        ("bash: -c: line 1: unexpected EOF while looking for matching `\"'", "not closed"),
    ],
)
def test_calls_that_do_not_parse_read_right_for_json_sql_and_shell(error, says):
    said = dispatch("json_decode", HintContext("json_decode", error, ("book",), "book", SCHEMA if "delimiter" in error else None))
    assert says in said and ("JSON" in said) == ("delimiter" in error)


def test_a_repeated_failure_names_its_cause_and_asks_for_a_change():
    trace, site = case("repeated_failure", "Error: User mia not found")
    said = TemplateHintGenerator().generate(
        "repeated_failure", HintContext.at(trace, replace(site, cause="runtime_error", streak=4))
    )
    assert said.startswith("There is no such user:") and "change the approach" in said and len(sentences(said)) == 2
    unknown = dispatch("repeated_failure", HintContext("repeated_failure", "Traceback ...\nOddError: blue"))
    assert "(`OddError: blue`)" in unknown


text = st.text(max_size=120)
odd_schema = st.one_of(
    st.none(),
    st.just({}),
    st.just({"function": {"name": "f"}}),
    st.just({"name": "f", "parameters": {"properties": {"a": True}}}),
    st.just({"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["string", "null"]}}, "required": ["b"]}}}),
)


@given(st.sampled_from(ERROR_KINDS), text, st.lists(text, max_size=3), st.one_of(st.none(), text), odd_schema)
def test_templates_never_crash_and_stay_short(kind, error, tools, name, schema):
    said = dispatch(kind, HintContext(kind, error, tuple(tools), name, schema))
    assert said.strip() and len(said) < 1200


@given(st.sampled_from(ERROR_KINDS), text, text, st.one_of(st.none(), text))
def test_whatever_comes_through_repeats_nothing(kind, error, action, gold):
    turns = (Turn("user", "x"), Turn("assistant", action), Turn("user", error, observation=True))
    trace = Trace("t", turns, gold=gold)
    hint = default_composite().hint(trace, ErrorSite("t", 1, 2, 1, 2, kind, HintContext(kind, error)))
    assert hint is None or (hint.text.strip() and not repeats(hint.text, turns[1]))


@pytest.mark.data
@pytest.mark.parametrize(
    "name, templates",
    [
        ("bfcl_typed_errors", 0.93),  # what a grader expected is no default hint
        ("miniswe_deepseek_chat_dev", 0.9),
        ("moatless_claude35_other_repos", 0.9),
        ("tau2_airline_multimodel", 0.95),
        ("taubench_airline_gpt4o", 0.95),
        ("swesmith_trajs", 0.5),
    ],
)
def test_hints_of_real_error_sites(shared_data, name, templates):
    from composer_replication.traces.error_sites import find_error_sites
    from composer_replication.traces.read import read_traces

    composite, layers, behind = default_composite(), [], []
    for trace in read_traces(shared_data / "traces" / f"{name}.jsonl.gz"):
        for site in find_error_sites(trace):
            hint = composite.hint(trace, site)
            assert hint is None or (0 < len(hint.text) <= 1000 and not repeats(hint.text, trace.turns[site.turn]))
            assert hint is None or hint.layer != "template" or len(sentences(hint.text)) <= 2
            assert hint is None or "Expected one of" not in hint.text  # a grader's words, with the solution in them
            if not site.wanted:  # failed tests behind `| tail`, whose status is the filter's, are quoted as they are
                filtered = trace.turns[site.evidence_turn].content.startswith("<returncode>0<")
                (behind if filtered else layers).append(hint and hint.layer)
    assert layers.count(None) <= 0.02 * len(layers) and None not in behind
    assert layers.count("template") >= templates * len(layers)
