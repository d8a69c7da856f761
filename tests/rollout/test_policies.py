"Sampling against transformers' own generate, sampled distributions, and policies behind functions and real HTTP."

import pytest
import torch
from rollouts import Folder, config
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)

from composer_replication.core.tools import unreadable
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.replay.client import complete
from composer_replication.replay.endpoint import Endpoint as ModelEndpoint
from composer_replication.replay.prices import Price
from composer_replication.replay.teachers import TeacherProblem
from composer_replication.rollout.decode import CachedBatch, RereadBatch, open_batch
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import ClientPolicy, TransformersPolicy
from composer_replication.rollout.sampling import Numbers, Sampling
from composer_replication.rollout.tool_call_parser import Markup, TurnReader, probe_markup
from composer_replication.tree.context import context_ids, reads_near
from composer_replication.tree.template import probe_template

VOCAB, END = 64, 1
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=END, bos_token_id=2,
             initializer_range=0.4)  # large, so that what is attended to matters
FAMILIES = {
    "qwen2": lambda: Qwen2Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=12, sliding_window_pattern=3, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"]),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=10),
}


def made(name, attention="sdpa"):
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation=attention).float().eval()


def greedy(model, ids, limit):
    out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=limit,
                         do_sample=False, eos_token_id=END, pad_token_id=0)
    return tuple(out[0, len(ids):].tolist())


def conversation(batch, turns=4):
    "Four turns of five rows of different length, of which some leave; two share their prompt."
    draw = torch.Generator().manual_seed(3)
    ids = lambda n: torch.randint(3, VOCAB, (n,), generator=draw).tolist()
    prompts = [ids(9), ids(30), ids(1), ids(17)]
    prompts.append(list(prompts[0]))
    past, rows, turns_of = {i: [] for i in range(5)}, list(range(5)), []
    contexts = prompts
    for turn in range(turns):
        limits = [3 + (5 * r + turn) % 11 for r in rows]
        made = batch.sample(rows, contexts, limits, [f"{turn}/{r}" for r in rows])
        for row, context, limit, sample in zip(rows, contexts, limits, made):
            past[row] += context
            turns_of.append((row, list(past[row]), limit, sample))
            past[row] += sample.ids
        rows = [r for r in rows if not (turn == 1 and r == 1) and not (turn == 2 and r == 4)]
        contexts = [ids(1 + (r * 7 + turn * 3) % 13) for r in rows]
    return turns_of


@pytest.mark.parametrize("name,attention", [*((n, "sdpa") for n in FAMILIES), ("qwen2", "eager"), ("gemma3", "eager")])
def test_batched_turns_are_generate_row_by_row(name, attention):
    model = made(name, attention)
    batch = open_batch(model, frozenset({END}), Sampling(temperature=0))
    assert isinstance(batch, CachedBatch)
    for row, ids, limit, sample in conversation(batch):
        assert sample.ids == greedy(model, ids, limit), (row, len(ids))
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *sample.ids]])).logits[0, len(ids) - 1:-1]
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(sample.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=2e-5, rtol=0)


def test_a_model_that_trains_with_block_masks_samples_with_dense_ones():
    "FlexAttention's CPU kernel fails where a token is read alone."
    model = embedded_model()
    policy, played = TransformersPolicy(model, embedded_tokenizer()), {}
    for attention in ("sdpa", "flex_attention"):
        model.set_attn_implementation(attention)
        with policy.batch(Sampling(temperature=0)) as batch:
            played[attention] = [sample.ids for *_, sample in conversation(batch)]
        assert model.config._attn_implementation == attention
    assert played["flex_attention"] == played["sdpa"]


def test_stateful_models_reread():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, pad_token_id=0,
                                                         eos_token_id=END, state_size=4)).eval()
    batch = open_batch(model, frozenset({END}), Sampling(temperature=0))
    assert isinstance(batch, RereadBatch)
    for _, ids, limit, sample in conversation(batch):
        assert sample.ids == greedy(model, ids, limit)


def test_drawn_tokens_follow_the_distribution():
    torch.manual_seed(0)
    logits = torch.randn(1, 12).expand(20000, 12) * 2
    numbers = torch.tensor([Numbers("test")[0], *torch.rand(19999).tolist()])
    ids, _ = Sampling(temperature=1.5, top_p=0.8).draw(logits, numbers)
    kept = (logits[:1] / 1.5).softmax(-1)[0]
    order = kept.argsort(descending=True)
    nucleus = order[: int((kept[order].cumsum(0) < 0.8).sum()) + 1]
    assert set(ids.tolist()) <= set(nucleus.tolist())
    expected = torch.zeros(12).index_put_((nucleus,), kept[nucleus] / kept[nucleus].sum())
    torch.testing.assert_close(torch.bincount(ids, minlength=12) / 20000, expected, atol=0.012, rtol=0)


def test_global_random_state_and_training_mode_are_left_alone():
    model = embedded_model().train()
    policy = TransformersPolicy(model, embedded_tokenizer())
    before = torch.random.get_rng_state()
    with policy.batch(Sampling()) as batch:
        assert not model.training
        batch.sample([0], [[2, 30, 6, 3]], [4], ["a"])
    assert model.training and torch.equal(before, torch.random.get_rng_state())


# --- calls -------------------------------------------------------------------------------------------------------------

MARKUPS = {
    "qwen2.5": '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>\n<tool_call>\n'
               '{"name": "b", "arguments": {}}\n</tool_call>',
    "llama3.1": '{"name": "ls", "parameters": {"path": "a"}}',
    "mistral-v3": '[TOOL_CALLS] [{"name": "ls", "arguments": {"path": "a"}}]',
    "deepseek-v3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ls<｜tool▁sep｜>{"path": "a"}'
                     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi-k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{"path": "a"}'
               "<|tool_call_end|><|tool_calls_section_end|>",
}


@pytest.mark.data
@pytest.mark.parametrize("name", MARKUPS)
def test_calls_are_read_in_the_words_of_real_templates(name, shared_data):
    from transformers import AutoTokenizer
    chat = probe_template(AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name))
    markup, text = probe_markup(chat), MARKUPS[name]
    said = markup.read(text)
    assert said.calls[0] == ToolCall("ls", {"path": "a"})
    broken = markup.read(text.replace('"a"}', '"a"', 1))
    assert broken.calls[0].name == "ls" and not broken.calls[0].parsed and "JSON" in unreadable(broken.calls[0])
    assert reads_near(chat)


@pytest.mark.data
def test_trl_reads_the_same_calls(shared_data):
    from transformers import AutoTokenizer
    from trl.chat_template_utils import add_response_schema, parse_response
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "qwen3")
    reader = TurnReader.of(probe_template(tokenizer))
    text = "<think>\nWhere?\n</think>\n\nI look.\n" + MARKUPS["qwen2.5"] + "<|im_end|>"
    ids = tuple(tokenizer.encode(text))
    ours, theirs = reader.read(ids, frozenset({ids[-1]})), parse_response(add_response_schema(tokenizer), list(ids), prefix=[])
    read = [(c["function"]["name"], c["function"]["arguments"]) for c in theirs["tool_calls"]]
    assert read == [(c.name, c.arguments) for c in ours.calls] and len(read) == 2
    assert theirs["content"].strip() == ours.content == "I look." and theirs["reasoning_content"].strip() == ours.thinking


def test_text_behind_a_call_breaks_it_unless_the_call_is_closed():
    markup = Markup("<c>", "</c>", "</c><c>")
    assert [c.parsed for c in markup.read('<c>{"name": "a"} so</c>').calls] == [False]
    assert [c.parsed for c in markup.read('<c>{"name": "a"}</c> so').calls] == [True]
    assert [c.name for c in markup.read('x<c>{"name": "a"</c> <c>{"name": "b"}</c>').calls] == ["a", "b"]
    assert [c.name for c in markup.read('<c>{"name": "a"}</c> and then <c>{"name": "b"}</c> done').calls] == ["a", "b"]


def test_a_thought_ends_where_it_is_closed_first():
    markup = Markup("<c>", "</c>", "</c><c>", think=("<think>", "</think>"))
    call = '<c>{"name": "write", "arguments": {"content": "{{ a }}</think>{{ b }}"}}</c>'
    for thought, text in (("so", "<think>so</think>" + call), ("so", "so</think>" + call), (None, call),
                          ("<c> or not", "<think><c> or not</think>" + call)):
        read = markup.read(text)
        assert read.thinking == thought and [c.arguments for c in read.calls] == [{"content": "{{ a }}</think>{{ b }}"}], text


# --- an endpoint -------------------------------------------------------------------------------------------------------

def behind(url, key_env=None):
    return ModelEndpoint("embedded", "embedded", Price(0.0, 0.0), url, key_env)


def test_an_endpoint_that_fails_leaves_the_rollout_unscored():
    nobody = behind("http://127.0.0.1:9/v1")
    with pytest.raises(TeacherProblem, match="gave no answer .no connection"):
        complete(nobody, {}, timeout_s=0.5, tries=1)
    rollout, = collect(ClientPolicy(nobody, timeout_s=0.5, tries=1), Folder, [{"prompt": "Why?"}], config())
    assert (rollout.ending, rollout.reward) == ("error", None) and "gave no answer" in rollout.problem


def test_contexts_are_rendered_from_near_turns_alone(monkeypatch):
    chat = probe_template(embedded_tokenizer())
    call = Turn("assistant", tool_calls=(ToolCall("ls", {}, "call"),))
    result = Turn("tool", "nothing " * 50, tool_call_id="call", observation=True)
    trace = Trace("long", (Turn("user", "Why?"), *[call, result] * 60))
    lengths = []
    render = type(chat).render

    def counting(self, dialect, messages, *args, **options):
        lengths.append(len(messages))
        return render(self, dialect, messages, *args, **options)

    monkeypatch.setattr(type(chat), "render", counting)
    context_ids(chat, trace)
    assert max(lengths) <= 6
