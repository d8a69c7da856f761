"The learned layer: what becomes of what its writer writes, and who is asked where it fails."

import re

import pytest
from hinted import meta
from hypothesis import example, given
from hypothesis import strategies as st

from composer_replication.hints.layers import CompositeHintGenerator, make_layers
from composer_replication.hints.learned_layer import HINT_CHARS, clean_hint, writer_prompt
from composer_replication.hints.text import sentences

MARKS = ["<|im_end|>", "<|im_start|>", "</s>", "<think>", "</think>",
         "[INST]", "<end_of_turn>", "<|", "|>", "\n", "\x1b[2J", "word. ", "`a`"]


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
    c = meta()
    assert hints.hint(c.trace, c.site).layer == "raw_error"
    assert dict(hints.layers[0].failures) == failures and dict(hints.refused) == refused


def test_a_sound_hint_is_taken_and_without_a_writer_there_is_none():
    c, asked = meta(), []
    layers = make_layers(["learned", "raw_error"], write=lambda p: asked.append(p) or "Ask Mia for her user id.")
    hints = CompositeHintGenerator(layers)
    assert vars(hints.hint(c.trace, c.site)) == {"text": "Ask Mia for her user id.", "layer": "learned"}
    assert asked == [writer_prompt(c)]
    assert CompositeHintGenerator(make_layers(["learned"])).hint(c.trace, c.site) is None
