"The learned layer: what its writer may read, what becomes of what it writes, and who is asked where it fails."

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composer_replication.core.trace import ErrorSite, HintContext, ToolCall, Trace, Turn
from composer_replication.hints.layers import CompositeHintGenerator, make_layers
from composer_replication.hints.learned_layer import HINT_CHARS, PART_CHARS, clean_hint, writer_prompt
from composer_replication.hints.text import sentences

TURNS = (
    Turn("system", "You are an agent."),
    Turn("user", "Book a seat for Mia."),
    Turn("assistant", thinking="SECRET THOUGHT", tool_calls=(ToolCall("user_details", {"user_id": "mia"}, "call_17"),)),
    Turn("tool", "Error: User mia not found", observation=True, failed=True),
    Turn("assistant", "FUTURE question"),
)
MARKS = ["<|im_end|>", "<|im_start|>", "</s>", "<think>", "</think>",
         "[INST]", "<end_of_turn>", "<|", "|>", "\n", "\x1b[2J", "word. ", "`a`"]


def context(turns=TURNS, gold="GOLDEN flight HAT417", error=TURNS[3].content):
    trace = Trace("t", turns, gold=gold)
    known = HintContext("runtime_error", error, (), "user_details")
    return HintContext.at(trace, ErrorSite("t", 2, 3, 2, 3, "runtime_error", known))


def test_the_prompt_holds_neither_gold_nor_future_nor_thinking():
    prompt = writer_prompt(context())
    assert "User mia not found" in prompt and "Book a seat for Mia." in prompt and 'user_details(user_id="mia")' in prompt
    assert not [hidden for hidden in ("GOLDEN", "HAT417", "FUTURE", "SECRET", "call_17") if hidden in prompt]
    quoted = context(gold='["Lafayette, LA"]', error="Expected one of ['Lafayette, LA'].")
    assert "Lafayette" not in writer_prompt(quoted) and "(withheld)" in writer_prompt(quoted)


def test_the_prompt_is_bounded_on_huge_turns():
    big = tuple(replace(t, content="word " * 200_000) for t in TURNS)
    assert len(writer_prompt(context(big, error="word " * 200_000))) < 6 * (PART_CHARS + 50)


@given(st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=60)), max_size=40).map("".join))
@example("Go on.<|im<|x|>_end|>")
@example("<think>" + "a" * 10_000)
def test_whatever_is_written_comes_out_short_on_one_line_and_without_marks(text):
    hint = clean_hint(text)
    assert len(hint) <= HINT_CHARS and len(sentences(hint)) <= 2
    assert not re.search(r"<\|\w+\|>|</?s>|</?think>|\[/?INST\]|_of_turn>|[\x00-\x1f\x7f-\x9f]", hint)
    hint.encode()  # no half of a surrogate pair


def raising(prompt):
    raise MemoryError


@pytest.mark.parametrize("write, failures, refused", [
    (raising, {"MemoryError": 1}, {}), (lambda p: None, {"wrote NoneType": 1}, {}),
    (lambda p: "", {}, {}), (lambda p: "NONE.", {}, {}),
    (lambda p: "Try user_details(user_id='mia') again.", {}, {("learned", "repeats the failed action"): 1}),
    (lambda p: "Take the GOLDEN flight HAT417.", {}, {("learned", "leaks the reference solution"): 1})])
def test_where_the_writer_fails_the_next_layer_is_asked(write, failures, refused):
    hints = CompositeHintGenerator(make_layers(["learned", "raw_error"], write=write))
    c = context()
    assert hints.hint(c.trace, c.site).layer == "raw_error"
    assert dict(hints.layers[0].failures) == failures and dict(hints.refused) == refused


def test_a_sound_hint_is_taken_and_without_a_writer_there_is_none():
    c, asked = context(), []
    layers = make_layers(["learned", "raw_error"], write=lambda p: asked.append(p) or "Ask Mia for her user id.")
    hints = CompositeHintGenerator(layers)
    assert vars(hints.hint(c.trace, c.site)) == {"text": "Ask Mia for her user id.", "layer": "learned"}
    assert asked == [writer_prompt(c)]
    assert CompositeHintGenerator(make_layers(["learned"])).hint(c.trace, c.site) is None
