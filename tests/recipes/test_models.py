"Our own chat templates, and where a model is."
import pytest
from transformers import AutoTokenizer

from composer_replication.core.trace import ToolCall, Turn
from composer_replication.recipes import models
from composer_replication.rollout.tool_call_parser import TurnReader
from composer_replication.tree.template import probe_template

TOKENIZERS = ("qwen2.5", "gemma3-STANDIN-vocab", "mistral-v3")


@pytest.mark.data
@pytest.mark.parametrize("name", sorted({*models.template_names()} - {"fenced"}))  # tests/tree/test_fenced.py
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_our_templates_carry_all_and_their_turns_are_read_back(shared_data, tokenizer, name):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / tokenizer)
    tokenizer.chat_template = models.chat_template(name)
    chat = probe_template(tokenizer)
    form = chat.tooled
    assert form.tools and form.system and form.results and form.call_text and not form.merge
    assert (form.arguments, form.thinking, form.appends) == ("object", "field", True)
    calls = (ToolCall("ls", {"folder": 'src/"a" <b>'}), ToolCall("cat", {"file": "a.py", "lines": [1, 2]}))
    turns = [Turn("user", "Look."), Turn("assistant", "I look.", "It may be in src.", calls)]
    messages, _, raw = form.messages(turns, [True, True])
    prompt = chat.render(form, form.messages(turns[:1], [True])[0], (), True)
    text = chat.render(form, messages, (), False, raw)
    assert text.startswith(prompt)
    parsed = TurnReader.of(chat).markup.read(text.removeprefix(prompt).removesuffix(form.after).removesuffix(form.end))
    assert (parsed.content, parsed.thinking, parsed.calls) == ("I look.", "It may be in src.", calls)
