"What a chat template leaves out is counted and said; a turn is learnt with the reasoning that it was sampled with."

from functools import cache
from pathlib import Path

import pytest
from small_tokenizers import small_tokenizer
from trainer_script import BASE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.losses.batch import TraceExample
from composer_replication.replay.pairs import DPOPair
from composer_replication.report.train import counts_line
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.offline import OfflineTrainer
from composer_replication.tree.recorded import bare_turns, learnable_trees, recorded_parts, without_reasoning
from composer_replication.tree.template import probe_template

TOOL = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "d",
        "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "p"}}},
    },
}


def failed(number, path, thought):
    return [
        Turn("assistant", "", thought, (ToolCall("ls", {"path": path}, f"c{number}"),)),
        Turn("tool", f"Error: no such folder: {path}", tool_call_id=f"c{number}", name="ls", observation=True, failed=True),
    ]


def trace(*rounds, name="t"):
    "Each round is a question and its failed calls, as (path, thought)."
    turns = []
    for calls in rounds:
        turns.append(Turn("user", f"q{len(turns)}"))
        for path, thought in calls:
            turns += failed(len(turns), path, thought)
        turns.append(Turn("assistant", "Fine.", "So."))
    return Trace(name, tuple(turns), (TOOL,))


@cache
def tokenizer(name="qwen3"):
    if not isinstance(name, Path):
        return small_tokenizer(name)
    made = AutoTokenizer.from_pretrained(name)
    made.pad_token = made.pad_token or made.eos_token
    return made


@cache
def prepared(name):
    return probe_template(tokenizer(name))


def config(folder="out", **changes):
    return ComposerReplicationConfig(str(folder), **BASE | {"save_strategy": "no"} | changes)


def hint(kind, context):
    return "Look first."


LONG = [[("a", "think a"), ("b", None)], [("c", "think c")], [("d", "think d"), ("e", "think e")]]


ROUNDS = [LONG[:1], LONG[:2], LONG, [[("x", "think x")], []], [[("x", "think x")], [], []]]


@pytest.mark.data
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", ["deepseek-v3.1", "kimi-k2", "gemma4-STANDIN-vocab", "phi-4-mini", "qwen3-coder"])
def test_every_turn_of_a_real_template_is_learnt_with_its_own_reasoning(shared_data, name, rounds):
    test_every_turn_is_learnt_with_its_own_reasoning(shared_data / "tokenizers" / name, rounds)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("template", ["qwen3", "qwen2.5"])
def test_every_turn_is_learnt_with_its_own_reasoning(template, rounds):
    "Some templates show the reasoning of the last round alone; the text before a turn is what the policy saw at that turn."
    chat, example = prepared(template), TraceExample(trace(*rounds))
    trees, _ = recorded_parts(example, chat, config(), hint)
    found = {b.turn: (tree, tokenizer(template).decode(b.ids[b.start :])) for tree in trees for b in tree.branches}
    wanted = {i: t for i, t in enumerate(example.trace.turns) if t.tool_calls}
    assert found.keys() == wanted.keys() and sum(len(tree.branches) for tree in trees) == len(wanted)
    trees, _, said = learnable_trees([example], (), chat, config(), hint)
    assert bare_turns(trees)[0] == 0 and (said is None or "as it does when the model is sampled" in said)
    for turn, (tree, text) in found.items():
        assert (wanted[turn].thinking or "") in text and wanted[turn].tool_calls[0].name in text
        alone = recorded_parts(TraceExample(Trace("t", example.trace.turns[: turn + 2], (TOOL,))), chat, config(), hint)[0][-1]
        assert tree.ids[: tree.span(turn).end] == alone.ids[: alone.span(turn).end]  # as if the trace had ended there


def test_pairs_keep_their_places():
    tok = tokenizer()
    recorded = trace(*LONG)
    first, last = [i for i, t in enumerate(recorded.turns) if t.tool_calls][::4]
    pairs = tuple(DPOPair("t", i, Turn("assistant", "I ask.", "better"), recorded.turns[i], (), "s") for i in (first, last))
    trees, _ = recorded_parts(TraceExample(recorded, pairs=pairs), probe_template(tok), config(beta_replay=0.5), hint)
    sides = [(b.turn, b.kind, tok.decode(b.ids[b.start :])) for tree in trees for b in tree.branches if b.kind != "hint"]
    assert [side[:2] for side in sides] == [(i, kind) for i in (first, last) for kind in ("chosen", "rejected")]
    assert all(("better" if kind == "chosen" else recorded.turns[turn].thinking) in text for turn, kind, text in sides)


def test_a_template_without_reasoning_is_told_with_numbers():
    tok = tokenizer("llama3.1")  # its template has no place for reasoning
    chat = probe_template(tok)
    examples = [TraceExample(trace(*LONG, name="t1")), TraceExample(trace(LONG[0], name="t2"))]
    trees, left, said = learnable_trees(examples, (), chat, config(), hint)
    assert len(trees) == 2 and not left and bare_turns(trees) == (5, 2)
    assert (
        "recorded reasoning of 5 turns that are learnt from and 2 turns before" in said
        and "take a tokenizer whose template shows reasoning" in said
    )
    assert [len(turns) for tree in trees for turns in without_reasoning(tree)] == [4, 2, 1, 0]
    assert "(5 of them without their reasoning" in counts_line({"traces": 2, "turns": 6, "turns_without_reasoning": 5})


def test_the_trainer_says_and_logs_it(tmp_path):
    tok = tokenizer("llama3.1")  # its template has no place for reasoning
    size = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", vocab_size=len(tok), **size))
    args = config(tmp_path, max_steps=1)
    trainer = OfflineTrainer(
        model, args=args, processing_class=tok, traces=[TraceExample(trace(*LONG))], hint_source=hint
    )
    assert trainer.setup.without_reasoning == 4 and "reasoning of 4 turns that are learnt from" in trainer.setup.left_out
    trainer.train()
    assert trainer.state.log_history[0]["recorded/without_reasoning"] == 4 * args.gradient_accumulation_steps
