"Trees: alignment over generated and real traces, sampled tokens, and input that is out of bounds."
import time
import unicodedata
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.replay.pairs import DPOPair
from composer_replication.tree.build import AlignmentError, Branch, Span, Tree, build_tree
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.template import TemplateProblem, probe_template
from composer_replication.tree.text import write_script

FOLDERS = ["embedded", "qwen2.5", "qwen3", "llama3.1", "mistral-v3", "deepseek-v3.1", "phi-4-mini", "kimi-k2",
           "gemma3-STANDIN-vocab", "gemma4-STANDIN-vocab", "phi-3-mini"]
TOOL = {"type": "function", "function": {"name": "run", "description": "Run it.", "parameters": {
    "type": "object", "properties": {"code": {"type": "string", "description": "What to run."}}, "required": ["code"]}}}


@cache
def chat_of(folder):
    return probe_template(AutoTokenizer.from_pretrained(folder) if folder else embedded_tokenizer())


def plain(text):
    "Text as a tokenizer that normalises would give it back."
    return unicodedata.normalize("NFC", text)


# Generated traces: orderly ones most of the time, and everything that recorded traces get wrong.
TEXT = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Co", "Cn"], exclude_characters="\u2581"), max_size=25),
    st.sampled_from(["", " ", "\n\n", "ok", "a\n  b\n", "Error: no such file", "</think> so", "<|im_end|>\n", "<|end|>",
                     "{{ 1 }}", '{"a": "<b>"}', "12", "1.0", "日本語のテキスト", "🙂🙃", "e\u0301", "<tool_response>"]))
ARGUMENTS = st.one_of(st.dictionaries(st.sampled_from(["code", "n"]), TEXT | st.integers() | st.booleans(), max_size=2),
                      st.just('{"code": '))
CALLS = st.lists(st.builds(ToolCall, st.sampled_from(["run", "stop"]), ARGUMENTS, st.sampled_from([None, "call_1", "c2"])),
                 min_size=1, max_size=2).map(tuple)
ASSISTANT = st.builds(Turn, st.just("assistant"), TEXT, thinking=st.none() | TEXT, tool_calls=st.just(()) | CALLS)
OTHER = st.builds(Turn, st.sampled_from(["user", "tool"]), TEXT, tool_call_id=st.none())
ORDERLY = st.lists(st.tuples(OTHER, ASSISTANT), min_size=1, max_size=5).map(
    lambda pairs: [t if t.role == "assistant" or i else replace(t, role="user") for i, t in enumerate(sum(pairs, ()))])
TURNS = st.one_of(ORDERLY, ORDERLY.map(lambda t: [Turn("system", "Be brief."), *t]),
                  st.lists(ASSISTANT | OTHER, max_size=8))
TRACES = st.builds(lambda turns, tools: Trace("generated", tuple(turns), tools), TURNS, st.sampled_from([(), (TOOL,)]))


def check_tree(tree, trace, chat, hints):
    "What must hold of any tree; token ids and texts, never lengths."
    read = lambda ids: plain(chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    assert [s.turn for s in tree.spans] == [i for i, t in enumerate(trace.turns) if t.role == "assistant"]
    for span in tree.spans:
        assert plain(trace.turns[span.turn].content.strip()) in read(tree.ids[span.start:span.end])
        assert all(plain(c.name) in read(tree.ids[span.start:span.end]) for c in trace.turns[span.turn].tool_calls)
    for branch in tree.branches:
        span = tree.span(branch.turn)
        assert branch.ids[branch.start:] == tree.ids[span.start:span.end]
        assert branch.start >= 1 and branch.fork <= span.start
        assert hints[branch.turn] in read(tree.ids[:branch.fork] + branch.ids[:branch.start])
    assert sorted([b.turn for b in tree.branches] + [r.turn for r in tree.refused]) == sorted(hints)
    batch = pack_trees([tree], 0)
    row, position = batch.sdpo_student.T
    assert batch.input_ids[row, position + 1].equal(batch.sdpo_labels)
    row, position = batch.sdpo_teacher.T
    assert batch.branch_ids[row, position + 1].equal(batch.sdpo_labels)


@pytest.mark.data
@pytest.mark.parametrize("name", FOLDERS)
def test_alignment_is_exact_or_refused(shared_data, name):
    "Invariants 1 and 2 over generated traces: a right tree or one of two named errors, and nothing else."
    chat = chat_of("" if name == "embedded" else shared_data / "tokenizers" / name)
    made = 0

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TRACES, st.sampled_from(["target", "start"]), st.booleans())
    def one(trace, placement, strip_thinking):
        nonlocal made
        hints = {i: "Zq hint." for i, t in enumerate(trace.turns) if t.role == "assistant"}
        try:
            tree = build_tree(trace, chat, hints, placement=placement, strip_thinking=strip_thinking)
        except (AlignmentError, TemplateProblem) as problem:
            assert str(problem).endswith(".") and "\n" not in str(problem)
            return
        check_tree(tree, trace, chat, hints)
        made += 1

    one()
    assert made >= 5, "nearly everything was refused: the test says nothing"


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "deepseek-v3.1", "kimi-k2", "phi-4-mini"])
def test_pieces_from_the_last_turns_are_the_exact_ones(shared_data, name):
    "The short way of cutting a trace gives what rendering every beginning in full gives."
    turns = [Turn("system", "Be brief."), Turn("user", "Start.")]
    for i in range(12):
        turns += [Turn("assistant", f"Step {i}." if i % 3 else "", tool_calls=(ToolCall("run", {"code": f"{i}"}, f"c{i}"),)),
                  Turn("tool", f"Result {i}.", tool_call_id=f"c{i}")]
        turns += [Turn("assistant", f"So {i}."), Turn("user", "Go on.")] if i % 4 == 3 else []
    script, pieces, _ = write_script(chat_of(shared_data / "tokenizers" / name), Trace("long", tuple(turns), (TOOL,)))
    assert len(pieces) == 15 and pieces == script._walk(near=False)


def test_equal_lengths_are_not_alignment():
    "Invariant 1: same shape, one id different."
    ids, spans = (1, 2, 3, 4, 5, 6), (Span(1, 2, 5),)
    Tree("t", ids, spans, (Branch("hint", 1, 1, (9, 3, 4, 5), 1),))
    with pytest.raises(AlignmentError, match="token ids differ"):
        Tree("t", ids, spans, (Branch("hint", 1, 1, (9, 3, 5, 4), 1),))


@pytest.mark.parametrize("spans", [(Span(1, 0, 2),), (Span(1, 2, 2),), (Span(1, 2, 4), Span(3, 3, 6)), (Span(1, 4, 7),)])
def test_spans_must_lie_in_the_trunk_in_order(spans):
    with pytest.raises(AlignmentError, match="span"):
        Tree("t", (1, 2, 3, 4, 5, 6), spans)


TALK = Trace("talk", (
    Turn("user", "Run it."), Turn("assistant", "I run it.", tool_calls=(ToolCall("run", {"code": "1 / 0"}, "a"),)),
    Turn("tool", "ZeroDivisionError", tool_call_id="a"), Turn("assistant", "It fails."), Turn("user", "Why?"),
    Turn("assistant", "Division by zero.")), (TOOL,))


@pytest.mark.parametrize("placement", ["target", "start"])
def test_sampled_tokens_are_never_tokenised_again(placement):
    "Invariant 2: ids that no tokenizer would give for this text are in the trunk and in every branch."
    chat = chat_of("")
    odd = tuple(i for c in "It fails." for i in chat.encode(c, chat.anchor)) + (chat.tokenizer.eos_token_id,)
    assert odd != chat.encode("It fails.<|end|>", chat.anchor)
    trace = replace(TALK, turns=tuple(replace(t, token_ids=odd) if i == 3 else t for i, t in enumerate(TALK.turns)))
    pair = DPOPair("talk", 3, TALK.turns[5], trace.turns[3], "test")
    tree = build_tree(trace, chat, {3: "Look.", 5: "Think."}, [pair], placement=placement)
    span = tree.span(3)
    assert tree.ids[span.start:span.end] == odd
    hint, later, chosen, rejected = tree.branches
    assert hint.ids[hint.start:] == odd and rejected.ids[1:] == odd
    if placement == "start":  # the whole trunk behind the hint is copied, odd tokens and all
        assert any(later.ids[i:i + len(odd)] == odd for i in range(later.start))
    else:
        assert tree.ids[:later.fork][span.start:span.end] == odd


def test_a_branch_is_the_hinted_conversation():
    "Trunk up to the fork and the branch, decoded, are what the template gives for the conversation with the hint in it."
    chat = chat_of("")
    for placement, carrier in (("target", 4), ("start", 0)):
        branch = build_tree(TALK, chat, {5: "A hint."}, placement=placement).branches[0]
        trunk = build_tree(TALK, chat).ids
        messages = TALK.to_messages()
        messages[carrier]["content"] += "\n\nA hint."
        want = chat.tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
        assert chat.tokenizer.decode(trunk[:branch.fork] + branch.ids) == want
        assert branch.ids[0] != trunk[branch.fork]  # the fork is as late as it can be


def test_pairs_fork_one_token_early_and_hold_both_answers():
    chat = chat_of("")
    pair = DPOPair("talk", 3, Turn("assistant", "Another answer."), TALK.turns[3], "sibling")
    tree = build_tree(TALK, chat, pairs=[pair, DPOPair("talk", 4, TALK.turns[1], TALK.turns[3], "wrong turn"), pair])
    assert [(b.kind, b.pair, b.start) for b in tree.branches] == [(k, p, 1) for p in (0, 1) for k in ("chosen", "rejected")]
    assert [r.turn for r in tree.refused] == [4]
    chosen = tree.branches[0]
    assert chosen.fork == tree.span(3).start - 1 and chosen.ids[0] == tree.ids[chosen.fork]
    assert chat.tokenizer.decode(chosen.ids[1:]) == "Another answer.<|end|>"
    batch = pack_trees([tree, tree], 0)
    assert batch.pairs == 4 and set(batch.pair_sequence.tolist()) == set(range(8))


def test_max_tokens_drops_whole_turns_and_counts_their_sites():
    chat, whole = chat_of(""), build_tree(TALK, chat_of(""))
    for limit in range(whole.spans[0].end, len(whole.ids) + 2):
        tree = build_tree(TALK, chat, {3: "a", 5: "b"}, max_tokens=limit)
        assert len(tree.ids) <= limit and tree.ids == whole.ids[:len(tree.ids)] and tree.ids[-1] == chat.tokenizer.eos_token_id
        assert [b.turn for b in tree.branches] + [r.turn for r in tree.refused] == [3, 5]
        assert {r.turn for r in tree.refused} == {t for t in (3, 5) if whole.span(t).end > limit}


@pytest.mark.parametrize("turn", [
    Turn("tool", "word " * 200_000), Turn("tool", "x" * 800_000), Turn("assistant", "0123456789" * 60_000),
    Turn("tool", "\n" * 300_000), Turn("tool", "日本" * 150_000)], ids=["words", "one word", "digits", "newlines", "han"])
def test_a_turn_of_200_000_tokens_takes_bounded_time(turn):
    chat, start = chat_of(""), time.process_time()
    trace = Trace("huge", (TALK.turns[0], TALK.turns[1], turn, TALK.turns[3] if turn.role == "tool" else Turn("user", "And?"),
                           *([] if turn.role == "tool" else [TALK.turns[3]])), (TOOL,))
    last = len(trace.turns) - 1
    tree = build_tree(trace, chat, {last: "A hint."})
    assert len(tree.ids) > 60_000 and len(tree.branches) == 1
    assert tree.branches[0].fork > 60_000 or turn.role == "assistant"
    assert time.process_time() - start < 100


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(AlignmentError, match="surrogate"):
        build_tree(Trace("t", (Turn("user", "\ud83d"), Turn("assistant", "b"))), chat_of(""))
    tree = build_tree(TALK, chat_of(""), {3: "\ud83d"})
    assert [r.turn for r in tree.refused] == [3] and not tree.branches


@pytest.mark.data
def test_real_traces_align(shared_data):
    "Every turn of the assistant in a sample of real traces, hinted."
    from composer_replication.traces.read import read_traces
    for name in ("taubench_airline_gpt4o", "miniswe_deepseek_reasoner_dev", "sweagent_demos_and_tests"):
        chat = chat_of(shared_data / "tokenizers" / "qwen2.5")
        traces = iter(read_traces(shared_data / "traces" / f"{name}.jsonl.gz", on_problem=lambda _: None))
        for trace in (t for t, _ in zip(traces, range(6)) if any(t.role == "assistant" for t in t.turns)):
            spoken = [i for i, t in enumerate(trace.turns) if t.role == "assistant"]
            hints = {i: "Zq hint." for i in spoken[::5]}
            check_tree(build_tree(trace, chat, hints), trace, chat, hints)


def with_template(source):
    out = embedded_tokenizer()
    out.chat_template = source
    return probe_template(out)


def loop(shown):
    return ("{% for m in messages %}<|{{ m.role }}|>" + shown + "<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


@pytest.mark.parametrize("shown, trace, dropped", [
    ("{{ m.content.split('</think>')[-1] }}",
     (Turn("user", "a"), Turn("assistant", "I see </think> b")), "what the assistant said"),
    ("{{ m.content if m.role == 'assistant' or loop.first or m.content | length < 9 }}",
     (Turn("user", "a"), Turn("assistant", "b"), Turn("user", "a longer one"), Turn("assistant", "c")), "the user message")])
def test_what_a_template_drops_only_at_times_is_noticed_in_the_trace(shown, trace, dropped):
    "The probe cannot know of it; the text of every turn is compared with the trace."
    with pytest.raises(AlignmentError, match=dropped):
        build_tree(Trace("t", trace), with_template(loop(shown)))
