"What a sampled turn says: types of arguments that are written without them, and calls inside thoughts."

import copy

import pytest
from small_tokenizers import small_tokenizer
from trl import chat_template_utils as trl

from composer_replication.core.tools import refusal
from composer_replication.rollout.tool_call_parser import TurnReader, typed_arguments
from composer_replication.tree.template import probe_template

PROPERTIES = {
    "path": {"type": "string"},
    "start": {"type": "integer"},
    "ratio": {"type": "number"},
    "all": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "depth": {"type": ["integer", "null"]},
    "count": {"type": "integer", "nullable": True},
    "key": {"type": ["string", "integer"]},
    "mode": {"enum": ["1", "2"]},
    "level": {"enum": [1, 2]},
    "kind": {"allOf": [{"type": "integer"}]},
    "either": {"oneOf": [{"type": "boolean"}, {"type": "number"}]},
    "point": {"$ref": "#/$defs/Point"},
    "perhaps": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
    "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
    "grade": {"$ref": "#/$defs/Level"},
    "title": {"$ref": "#/$defs/Name"},
    "again": {"$ref": "#/$defs/Again"},
}
DEFS = {
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Level": {"type": "integer", "enum": [1, 2]},
    "Name": {"type": "string"},
    "Again": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/Again"}}]},
}
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "description": "",
                 "parameters": {"type": "object", "properties": PROPERTIES, "$defs": DEFS}},
}
WRITTEN = [  # argument, as the model writes it, and what the tool has to get
    ("path", "20", "20"),
    ("path", "true", "true"),
    ("path", '{"a": 1}', '{"a": 1}'),
    ("path", "1.50", "1.50"),
    ("path", "[1]", "[1]"),
    ("start", "20", 20),
    ("start", "-3", -3),
    ("start", "3.0", 3),
    ("start", "ten", "ten"),
    ("ratio", "0.5", 0.5),
    ("ratio", "2", 2),
    ("all", "true", True),
    ("all", "False", False),
    ("all", "yes", "yes"),
    ("names", '["a", "1"]', ["a", "1"]),
    ("names", "a, b", "a, b"),
    ("options", '{"deep": [1, {"x": null}]}', {"deep": [1, {"x": None}]}),
    ("limit", "7", 7),
    ("limit", "null", None),
    ("limit", "None", None),
    ("depth", "2", 2),
    ("depth", "null", None),
    ("count", "4", 4),
    ("count", "null", None),
    ("key", "20", "20"),
    ("mode", "1", "1"),
    ("level", "1", 1),
    ("kind", "5", 5),
    ("either", "true", True),
    ("either", "2.5", 2.5),
    ("point", '{"x": 1}', {"x": 1}),
    ("perhaps", '{"x": 3}', {"x": 3}),
    ("perhaps", "null", None),
    ("points", '[{"x": 4}]', [{"x": 4}]),
    ("grade", "2", 2),
    ("title", "12", "12"),
    ("again", "[1, [2]]", [1, [2]]),
    ("unknown", "5", "5"),
]


def reader(template, tokenizer="qwen3.5"):
    made = small_tokenizer(tokenizer)
    if template:
        made.response_template = getattr(trl, template)
    return made, TurnReader.of(probe_template(made))


def qwen(name, arguments):
    return (
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments)
        + "</function>\n</tool_call>"
    )


def glm(name, arguments):
    return (
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments)
        + "</tool_call>"
    )


@pytest.mark.parametrize(
    "template, write", [("qwen3_5_template", qwen), ("nemotron_3_template", qwen), ("glm4moe_template", glm), ("guessing", glm)]
)
def test_arguments_between_tags_have_the_types_of_the_schema(template, write, monkeypatch):
    guessing = copy.deepcopy(
        trl.glm4moe_template
    )  # as older transformers, and as users write it: any value that is JSON is taken for it
    guessing["fields"]["tool_calls"]["content_args"]["value_parser"] = {"name": "json", "args": {"allow_non_json": True}}
    monkeypatch.setattr(trl, "guessing", guessing, raising=False)
    tokenizer, turns = reader(template)
    for name, written, value in WRITTEN:
        ids = tokenizer.encode(write("read_file", [(name, written)]) + "<|im_end|>")
        (call,) = turns.read(tuple(ids), frozenset(ids[-1:]), tools=[TOOL]).calls
        assert call.arguments == {name: value} and type(call.arguments[name]) is type(value), (name, written)
        right = not isinstance(value, str) or name in ("path", "key", "mode", "title")
        assert (refusal(call, [TOOL]) is None) == right


def test_a_tool_that_is_not_offered_and_values_that_break_readers_are_left_as_text():
    tokenizer, turns = reader("qwen3_5_template")
    for name, value in (("other", "5"), ("read_file", "[" * 5000), ("read_file", "9" * 5000)):
        ids = tokenizer.encode(qwen(name, [("start", value)]) + "<|im_end|>")
        (call,) = turns.read(tuple(ids), frozenset(ids[-1:]), tools=[TOOL]).calls
        assert call.name == name and call.arguments == {"start": value}


EXACT = ["    return x", "a\n", "\n\ndef f():\n    pass\n", "\ta", "a\n\n", "\n", "", " ", "\r\na\r\n", "<b>\n x\n</b>"]


@pytest.mark.parametrize("text", EXACT)
@pytest.mark.parametrize(
    "family, template", [("qwen3.5", "qwen3_5_template"), ("qwen3.5", "nemotron_3_template"), ("glm4moe", "glm4moe_template")]
)
def test_text_between_tags_is_what_the_template_was_given(family, template, text):
    made, turns = reader(template, family)
    user, call = {"role": "user", "content": "q"}, {"name": "read_file", "arguments": {"path": text, "title": text}}
    whole = made.apply_chat_template(
        [user, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}],
        tools=[TOOL], tokenize=False)
    prompt = made.apply_chat_template([user], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    ids = made.encode(whole[len(prompt):] if whole.startswith(prompt) else whole[whole.rindex("<tool_call>"):])
    (read,) = turns.read(tuple(ids), frozenset(), tools=[TOOL]).calls
    assert read.arguments == {"path": text, "title": text}


def test_text_without_the_templates_own_line_breaks_loses_nothing():
    made, turns = reader("qwen3_5_template")
    ids = made.encode("<tool_call><function=read_file><parameter=path> a </parameter></function></tool_call><|im_end|>")
    (call,) = turns.read(tuple(ids), frozenset(ids[-1:]), tools=[TOOL]).calls
    assert call.arguments == {"path": " a "}


def test_json_keeps_the_types_that_the_model_wrote():
    tokenizer, turns = reader(None, "qwen3")
    ids = tokenizer.encode(
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "20", "start": "20", "key": 20}}\n</tool_call><|im_end|>'
    )
    (call,) = turns.read(tuple(ids), frozenset(ids[-1:]), tools=[TOOL]).calls
    assert (
        call.arguments == {"path": "20", "start": "20", "key": 20} and "'start' must be an integer" in refusal(call, [TOOL]).text
    )


HERMES = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>'
XML = qwen("read_file", [("path", "a")])
THOUGHTS = [  # text with a call in braces, calls that are run, whether anything is shown
    ("<think>I could {}", 0, False),
    ("<think>\nI could\n{}\nor {}", 0, False),
    ("Well. <think>I could {}", 0, True),
    ("<think>a</think>So <think>b {}", 0, True),
    ("<think>a</think>So <think>b</think> {}", 1, True),
    ("<think>a {} b</think>done", 0, True),
    ("<think>a {}</think>{}", 1, False),
    ("{}", 1, False),
    ("So {}", 1, True),
    ("{}\n<think>or {}", 1, False),
]


@pytest.mark.parametrize(
    "template, tokenizer, call", [(None, "qwen3", HERMES), ("qwen3_5_template", "qwen3.5", XML), (None, "qwen2.5", HERMES)]
)
@pytest.mark.parametrize("text, run, shown", THOUGHTS)
def test_a_call_inside_a_thought_is_not_run(template, tokenizer, call, text, run, shown):
    made, turns = reader(template, tokenizer)
    ids = made.encode(text.replace("{}", call) + "<|im_end|>")
    turn = turns.read(tuple(ids), frozenset(ids[-1:]), tools=[TOOL])
    assert len(turn.calls) == run and (bool(turn.content.strip()) == shown or template and run)


def test_a_thought_that_the_prompt_opens_and_nothing_closes_holds_no_call():
    tokenizer = small_tokenizer("qwen3")
    tokenizer.chat_template, tokenizer.response_template = trl.qwen3_8_chat_template, trl.nemotron_3_template
    turns = TurnReader.of(probe_template(tokenizer))
    context = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    for text, run in ((f"I could {XML}", 0), (XML, 0), (f"so</think>{XML}", 1), (f"a {XML}</think>b", 0)):
        ids = tokenizer.encode(text + "<|im_end|>")
        turn = turns.read(tuple(ids), frozenset(ids[-1:]), tuple(context), tools=[TOOL])
        assert len(turn.calls) == run, text
        assert turn.thinking


def test_without_schemas_what_is_json_is_read_as_json():
    written = {"start": "20", "path": "a.py", "all": "True", "names": '["a"]', "none": "null", "open": "[1"}
    read = {"start": 20, "path": "a.py", "all": True, "names": ["a"], "none": None, "open": "[1"}
    assert typed_arguments(written, None) == read
    assert typed_arguments(written, {}) == written  # there are schemas, and none of this tool
