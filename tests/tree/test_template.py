"Chat templates: what the probe finds out about the real ones, and about ones made to go wrong."
import json
from functools import cache
from pathlib import Path

import pytest
import trl
from small_tokenizers import small_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.tree.build import build_tree
from composer_replication.tree.context import context_ids
from composer_replication.tree.template import ChatFormat, TemplateProblem, probe_template

# With tools passed: (schema, arguments, text beside a call, results, reasoning), and what stands out.
TABLE = {
    "qwen2.5": ((True, "object", True, True, "inline"), {}),
    "qwen3": ((True, "object", True, True, "field"), {"blank": "<think>\n\n</think>\n\n"}),
    "qwen3-coder": ((True, "object", True, True, "inline"), {"raw_arguments": False}),
    "llama3.1": ((True, "object", False, True, None), {}),
    "mistral-v3": ((True, "text", False, True, None), {"short_ids": True, "appends": False}),
    "deepseek-v3.1": ((True, "object", True, True, "inline"), {}),
    "deepseek-r1-distill-qwen": ((False, None, False, False, None), {"raw_arguments": False}),
    "phi-3-mini": ((False, None, False, False, "inline"), {"raw_arguments": False, "closing": "<|endoftext|>"}),
    "phi-4-mini": ((True, "object", True, True, "inline"), {"closing": "<|endoftext|>"}),
    "kimi-k2": ((True, "object", True, True, "inline"), {}),
    "gemma3-STANDIN-vocab": ((False, None, False, False, "inline"), {"raw_arguments": False, "merge": True}),
    "gemma4-STANDIN-vocab": ((True, "object", True, True, "field"), {"raw_arguments": False}),
}
ORDINARY = {"raw_arguments": True, "short_ids": False, "merge": False, "system": True, "closing": "", "blank": "",
            "appends": True, "empty_tools": False}

TOOL = {"type": "function", "function": {"name": "look_up", "description": "Find it.", "parameters": {
    "type": "object", "properties": {"key": {"type": "string", "description": "What to find."}}, "required": ["key"]}}}
TALK = Trace("talk", (
    Turn("user", "Where is it?"), Turn("assistant", tool_calls=(ToolCall("look_up", {"key": "it"}, "call_0123456789"),)),
    Turn("tool", "Nowhere.", tool_call_id="call_0123456789", name="look_up"), Turn("assistant", "I do not know.")),
             (TOOL,))


@cache
def tokenizer(folder) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@cache
def chat_format(folder) -> ChatFormat:
    return probe_template(tokenizer(folder))


@pytest.fixture(scope="session")
def folders(shared_data):
    return shared_data / "tokenizers"


@pytest.mark.data
@pytest.mark.parametrize("name", TABLE)
def test_verdict_on_every_real_template(folders, name):
    want, special = TABLE[name]
    found = chat_format(folders / name).tooled
    assert (found.tools, found.arguments, found.call_text, found.results, found.thinking) == want
    assert {field: getattr(found, field) for field in ORDINARY} == ORDINARY | special


@pytest.mark.data
@pytest.mark.parametrize("name", [n for n, (row, _) in TABLE.items() if row[1]])
def test_arguments_come_out_once(folders, name):
    chat = chat_format(folders / name)
    sampled = chat.tokenizer.decode(build_tree(TALK, chat).ids)
    assert "\\\"key" not in sampled and "&#34;" not in sampled and "look_up" in sampled and "Nowhere." in sampled


@pytest.mark.data
@pytest.mark.parametrize("name", [n for n, (row, _) in TABLE.items() if not row[1]])
def test_templates_without_tools_are_refused_for_traces_with_tools_and_used_for_text(folders, name):
    chat = chat_format(folders / name)
    with pytest.raises(TemplateProblem, match="needs tool schemas and tool calls and tool results, which .* set "
                       "`tokenizer.chat"):
        build_tree(TALK, chat)
    text = Trace("text", (Turn("system", "Be brief."), Turn("user", "SELECT?"), Turn("assistant", "SELECT 1"),
                          Turn("user", "Error", observation=True), Turn("assistant", "SELECT 2")))
    assert len(build_tree(text, chat, {4: "There is a table."}).branches) == 1


@pytest.mark.data
def test_prompts_are_those_of_the_template_itself(folders):
    "Where nothing needs to be put right, the trunk is what `apply_chat_template` gives, token for token at each prompt."
    for name in ("qwen2.5", "llama3.1", "kimi-k2"):
        chat = chat_format(folders / name)
        tree = build_tree(TALK, chat)
        for span in tree.spans:
            text = chat.tokenizer.apply_chat_template(TALK.to_messages()[:span.turn], tools=[TOOL], tokenize=False,
                                                      add_generation_prompt=True)
            assert chat.tokenizer.decode(tree.ids[:span.start]) == text
            assert chat.tokenizer.encode(text, add_special_tokens=False) == list(tree.ids[:span.start])


@pytest.mark.data
def test_no_space_is_invented_in_front_of_a_sampled_turn(folders):
    "Sentence-piece tokenizers add one at the start of a text."
    for name in ("phi-3-mini", "gemma3-STANDIN-vocab"):
        chat = chat_format(folders / name)
        text = Trace("t", (Turn("user", "Hello"), Turn("assistant", "Good day"), Turn("user", "So?"), Turn("assistant", "Yes")))
        decoded = chat.tokenizer.decode(build_tree(text, chat).ids)
        assert "\nGood day<" in decoded or ">Good day<" in decoded


@pytest.mark.data
def test_mistral_moves_its_tools_and_is_refused_where_that_matters(folders):
    chat = chat_format(folders / "mistral-v3")
    tree = build_tree(TALK, chat)
    said = chat.tokenizer.decode(tree.ids)
    assert "call_0123456789" not in said  # nine letters and digits, the same on both sides
    call = json.loads(said[said.index("[TOOL_CALLS] ") + 13:said.index("]", said.index("[TOOL_CALLS] ") + 13) + 1])[0]
    assert len(call["id"]) == 9 and said.count(call["id"]) == 2
    later = Trace("later", (*TALK.turns, Turn("user", "Look again."), Turn("assistant", "Still nowhere.")), (TOOL,))
    with pytest.raises(ValueError, match="differently"):
        build_tree(later, chat)
    beside = Trace("beside", (TALK.turns[0], Turn("assistant", "I shall look.", tool_calls=TALK.turns[1].tool_calls)),
                   (TOOL,))
    with pytest.raises(TemplateProblem, match="text beside a tool call"):
        build_tree(beside, chat)


def with_template(source):
    out = embedded_tokenizer()
    out.chat_template = source
    return out


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def test_a_date_does_not_change_the_prompt():
    "Neither the template's own clock nor a parameter gets into the text."
    chat = probe_template(with_template("<|system|>{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}<|end|>" + PLAIN + PROMPT))
    text = Trace("t", (Turn("user", "a"), Turn("assistant", "b")))
    assert "26 Jul 2024" in chat.tokenizer.decode(build_tree(text, chat).ids)
    chat = probe_template(with_template("{{ date_string or strftime_now('%c') }}" + PLAIN + PROMPT))
    assert "26 Jul 2024" in chat.tokenizer.decode(build_tree(text, chat).ids)


@pytest.mark.parametrize("source", [
    "{{ messages | length }}" + PLAIN + PROMPT,  # earlier text changes
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}" + PROMPT,  # drops the assistant
    "{{ raise_exception('never') }}", "{{ nothing.at.all }}", "{% for m in messages %}{{ 1 / 0 }}{% endfor %}"])
def test_hopeless_templates_are_refused_in_one_sentence(source):
    with pytest.raises(TemplateProblem, match="set `tokenizer.chat_template` to one that only appends"):
        probe_template(with_template(source))


@pytest.mark.parametrize("name, remedy", [
    ("qwen3_5_think", "qwen3_5_think_training.jinja (in a recipe: `chat_template`)"),
    ("qwen3_6", "qwen3_6_training.jinja (in a recipe: `chat_template`)"),
    ("gptoss", "gptoss_training.jinja, does it too"), ("nemotron_3_nano", "nemotron_3_nano_training.jinja, does it too")])
def test_a_refused_template_names_the_one_that_trl_trains_with(name, remedy):
    made = with_template((Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text())
    with pytest.raises(TemplateProblem, match="one that only appends") as refused:
        probe_template(made)
    assert remedy in str(refused.value)


AFTER = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}" + PLAIN[
    len("{% for m in messages %}"):]
DROPS = PLAIN.replace("<|{{", "{% if m.role != 'system' or loop.first %}<|{{").replace("{% endfor", "{% endif %}{% endfor")
S, T, U, A = (Turn(*turn) for turn in (("system", "AAA"), ("system", "BBB"), ("user", "hi"), ("assistant", "x")))


@pytest.mark.parametrize("turns, roles, texts", [
    ((S, T, U), ["system", "user"], ["AAA\n\nBBB", "hi"]),
    ((S, U, T), ["system", "user"], ["AAA\n\nBBB", "hi"]),
    ((U, T), ["system", "user"], ["BBB", "hi"]),
    ((S, U, A, T, U), ["system", "user", "assistant", "user", "user"], ["AAA", "hi", "x", "BBB", "hi"]),
    ((U, A, U, S, A), ["user", "assistant", "user", "user", "assistant"], ["hi", "x", "hi", "AAA", "x"])])
@pytest.mark.parametrize("source", [AFTER, DROPS])
def test_a_later_system_message_is_merged_where_the_template_refuses_or_drops_it(source, turns, roles, texts):
    "Before the first answer into the leading one; behind it into the user's side, so that earlier text stays."
    form = probe_template(with_template(source + PROMPT)).plain
    messages, count, _ = form.messages(turns, [True] * len(turns))
    assert not form.late_system and [(m["role"], m["content"]) for m in messages] == list(zip(roles, texts))
    assert count == sorted(count) and count[-1] == len(messages)
    anywhere = probe_template(with_template(PLAIN + PROMPT)).plain
    kept = anywhere.messages(turns, [True] * len(turns))[0]
    assert anywhere.late_system and [m["content"] for m in kept] == [t.content for t in turns]


@pytest.mark.parametrize("turns", [(S, T, U), (S, U, T), (S, U, A, U, T), (S, U, A, T)])
def test_what_is_sampled_behind_a_later_system_message_is_that_of_the_tree(turns):
    chat = probe_template(small_tokenizer("qwen3.5"))
    ids = context_ids(chat, Trace("t", turns), True)
    tree = build_tree(Trace("t", (*turns, A)), chat)
    assert "BBB" in chat.tokenizer.decode(ids) and tree.ids[tree.spans[-1].start - len(ids):tree.spans[-1].start] == ids


def test_a_system_message_joins_the_user_where_there_is_no_such_role():
    strict = ("{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
              "{{ raise_exception('roles') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + PROMPT)
    chat = probe_template(with_template(strict))
    assert (chat.plain.system, chat.plain.merge) == (False, True)
    trace = Trace("t", (Turn("system", "Be brief."), Turn("user", "a"), Turn("user", "b"), Turn("assistant", "c")))
    assert chat.tokenizer.decode(build_tree(trace, chat).ids) == "<|user|>Be brief.\n\na\n\nb<|end|><|assistant|>c<|end|>"
    with pytest.raises(ValueError, match="does not render this conversation"):
        build_tree(Trace("t", (*trace.turns, Turn("assistant", "d"))), chat)
