"Two passes, and one, against one plain forward per branch, for every family of models they are meant for."
import logging
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from bf16 import bf16_bound, bf16_errors
from hypothesis import given
from hypothesis import strategies as st
from largest import Largest
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.tree import forward, pass_cost
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.checkpointed import keeping_cache, keeps_cache
from composer_replication.tree.forward import (
    forward_branches,
    forward_trunk,
    start_problem,
    trunk_problem,
)
from composer_replication.tree.one_pass import TreeMask, forward_tree, one_pass, tree_problem
from composer_replication.tree.pack import KINDS, pack_trees
from composer_replication.tree.pass_cost import LAYER_WORTH, branch_passes

TINY = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256)
NO_SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
           attn_pdrop=0.0, **NO_SPECIAL)
SMALL = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **NO_SPECIAL)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
               n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
               qk_nope_head_dim=8, v_head_dim=8)
FAMILIES = {
    "Qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**TINY)),
    "Qwen2-sliding": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=5, layer_types=MIXED)),
    "Qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**TINY, head_dim=8)),
    "Llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**TINY)),
    "Mistral": (tf.MistralForCausalLM, tf.MistralConfig(**TINY, sliding_window=5)),
    "Gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config(**TINY, head_dim=8, sliding_window=5, layer_types=MIXED)),
    "Gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=5, layer_types=MIXED)),
    "Phi3": (tf.Phi3ForCausalLM, tf.Phi3Config(**TINY, **NO_SPECIAL)),
    "Phi3-sliding": (tf.Phi3ForCausalLM, tf.Phi3Config(**TINY, **NO_SPECIAL, sliding_window=5)),
    "DeepseekV3": (tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config(**TINY | {"num_key_value_heads": 4}, **EXPERTS)),
}
OLDER = {  # whose layers call the cache by another name, or take it by its place
    "GPTNeoX": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**TINY, **NO_SPECIAL, rotary_pct=0.5)),
    "GPT2": (tf.GPT2LMHeadModel, tf.GPT2Config(**GPT)),
    "GPTBigCode": (tf.GPTBigCodeForCausalLM, tf.GPTBigCodeConfig(**GPT)),
    "Falcon": (tf.FalconForCausalLM, tf.FalconConfig(**SMALL, alibi=False)),
    "OPT": (tf.OPTForCausalLM, tf.OPTConfig(**SMALL, ffn_dim=64, dropout=0.0, word_embed_proj_dim=32,
                                            max_position_embeddings=128)),
    "Phi": (tf.PhiForCausalLM, tf.PhiConfig(**TINY, **NO_SPECIAL)),
}
STATEFUL = {
    "Mamba": (tf.MambaForCausalLM, tf.MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2)),
    "Jamba": (tf.JambaForCausalLM, tf.JambaConfig(**TINY, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
                                                  mamba_d_state=4, mamba_dt_rank=4)),
    "RecurrentGemma": (tf.RecurrentGemmaForCausalLM, tf.RecurrentGemmaConfig(**TINY, head_dim=8, attention_window_size=8)),
}


def make(family, table=FAMILIES):
    "A tiny random model. Weights are larger than usual, so that a wrong mask moves the result by far more than 1e-5."
    kind, config = table[family]
    torch.manual_seed(7)
    config._attn_implementation = "eager" if family in ("Gemma2", "Mamba") else "sdpa"
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4)
    return model


def batch_of_three():
    "Ragged rows: five branches (one pair among them), none, and one that forks at the very start."
    draw = torch.Generator().manual_seed(3)

    def ids(n):
        return tuple(torch.randint(3, 97, (n,), generator=draw).tolist())

    a, b, c = ids(41), ids(13), ids(26)
    spans = Span(1, 6, 9), Span(3, 17, 22), Span(5, 30, 41)
    tree_a = Tree("a", a, spans, (
        Branch("hint", 1, 4, ids(3) + a[6:9], 3), Branch("hint", 3, 16, ids(1) + a[17:22], 1),
        Branch("hint", 5, 25, ids(9) + a[30:41], 9),
        Branch("chosen", 3, 16, a[16:17] + ids(7), 1, 0), Branch("rejected", 3, 16, a[16:22], 1, 0)))
    tree_c = Tree("c", c, (Span(2, 20, 26),), (Branch("hint", 2, 0, ids(22) + c[20:26], 22),))
    return pack_trees([tree_a, Tree("b", b, (Span(1, 4, 13),)), tree_c], pad_token_id=0)


def separate(model, batch):
    "The oracle: every branch as a plain sequence of its own, from the trees rather than from the batch."
    hidden = torch.zeros(*batch.branch_ids.shape, model.config.hidden_size)
    parts = []
    for row, tree in enumerate(batch.trees):
        at = 0
        for branch in tree.branches:
            whole = torch.tensor([tree.ids[:branch.fork] + branch.ids])
            parts.append((row, at, model.base_model(whole).last_hidden_state[0, branch.fork:]))
            at += len(branch.ids)
    for row, at, states in parts:
        hidden[row, at:at + len(states)] = states
    return hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_and_rows_agree(family):
    """Invariant 3, in float32, with ragged padding on either side, with several branches in a row and with none.

    A trainer's batch is padded on both sides; the trunk's cache then comes from the student's own forward."""
    model, plain = make(family), batch_of_three()
    with torch.no_grad():
        want = separate(model, plain)
        for lead in ([0, 0, 0], [2, 9, 5]):
            batch = pack_trees(plain.trees, pad_token_id=0, lead=lead, width=50 if lead[0] else 0)
            hidden, cache = forward_trunk(model, batch)
            for how in (dict(method="two_pass"), dict(method="rows"), dict(cache=cache)):
                got = forward_branches(model, batch, **how)
                assert (got - want).abs().max() < 1e-5 and (got[batch.branch_segment < 0] == 0).all(), how
            chosen = (batch.branch_kind.gather(1, batch.branch_segment.clamp(min=0)) == 1) & (batch.branch_segment >= 0)
            only = forward_branches(model, batch, cache, kinds=("chosen",))
            assert chosen.any() and (only - want)[chosen].abs().max() < 1e-5 and (only[~chosen] == 0).all()
            for row, (n, tree) in enumerate(zip(lead, plain.trees)):
                alone = model.base_model(torch.tensor([tree.ids])).last_hidden_state[0]
                assert (hidden[row, n:n + len(tree.ids)] - alone).abs().max() < 1e-5
    assert want.abs().max() > 0.5, "the states are too small for the comparison to mean anything"


ONCE = sorted({*FAMILIES, *OLDER} - {"Gemma2"})  # eager
SOME = ("Qwen2", "Gemma3", "Phi3-sliding", "DeepseekV3")  # one of each kind of mask, and experts


@pytest.mark.parametrize("family", ONCE)
def test_one_pass_agrees_with_separate_rows(family):
    "Every branch against a sequence of its own, every trunk against a plain pass; batched, ragged, padded on either side."
    model, plain = make(family, FAMILIES | OLDER), batch_of_three()
    assert tree_problem(model) is None
    with torch.no_grad():
        want = separate(model, plain)
        trunks = [model.base_model(torch.tensor([tree.ids])).last_hidden_state[0] for tree in plain.trees]
        for lead in ([0, 0, 0], [2, 9, 5]):
            batch = pack_trees(plain.trees, pad_token_id=0, lead=lead, width=50 if lead[0] else 0)
            hidden, branches = forward_tree(model, batch)
            assert (branches - want).abs().max() < 1e-5 and (branches[batch.branch_segment < 0] == 0).all()
            for row, (n, trunk) in enumerate(zip(lead, trunks)):
                assert (hidden[row, n:n + len(trunk)] - trunk).abs().max() < 1e-5
            for kinds in (("hint",), ("chosen", "rejected"), ("own",)):
                read = batch.branch_kind.gather(1, batch.branch_segment.clamp(min=0))
                read = torch.isin(read, torch.tensor([KINDS.index(kind) for kind in kinds])) & (batch.branch_segment >= 0)
                for whole in (True, False):
                    if not (read.any() or whole):
                        continue
                    states, some = forward_tree(model, batch, kinds, whole)
                    assert (some - want * read[..., None]).abs().max() < 1e-5
                    assert whole or (states[:, :1] == 0).all(2)[~read.any(1)].all()


@pytest.mark.parametrize("family", SOME)
def test_small_groups_and_branches_in_pieces_are_exact(family, monkeypatch):
    model, batch, passes = make(family), pack_trees(batch_of_three().trees, pad_token_id=0, lead=[2, 9, 5], width=50), []
    count = model.base_model.register_forward_hook(lambda module, args, out: passes.append(1))
    with torch.no_grad():
        want, (_, cache) = separate(model, batch_of_three()), forward_trunk(model, batch)
        for entries in (1, 200, 900, 3000):
            monkeypatch.setattr(pass_cost, "MASK_ENTRIES", entries)
            passes.clear()
            assert (forward_branches(model, batch, cache) - want).abs().max() < 1e-5
            assert len(passes) == branch_passes(batch, KINDS, True, True, pass_cost.PASS_ENTRIES, split=True), entries
            assert (len(passes) > 6) == (entries < 900)  # branches
    count.remove()


@pytest.mark.parametrize("family", SOME)
def test_in_bf16_two_passes_are_as_near_to_float32_as_rows_are(family):
    model = make(family)
    error = bf16_errors(model, batch_of_three())
    assert 1e-3 < error["rows"] < 0.1 and error["two_pass"] < bf16_bound(model) * error["rows"]


def test_with_gradient_a_branch_stays_whole(monkeypatch):
    monkeypatch.setattr(pass_cost, "MASK_ENTRIES", 1)
    model, batch, passes = make("Qwen2"), batch_of_three(), []
    cache = forward_trunk(model, batch)[1]
    model.base_model.register_forward_hook(lambda module, args, out: passes.append(1))
    forward_branches(model, batch, cache)
    assert len(passes) == branch_passes(batch, KINDS, True, True, pass_cost.PASS_ENTRIES) == 6


def test_a_long_branch_over_a_long_trunk_makes_no_mask_of_both():
    "4,096 tokens over 32,768: 151 million entries in one mask."
    time, count = 32768, 4096
    config = tf.Qwen2Config(**TINY | dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    model, ids = tf.Qwen2ForCausalLM(config).eval(), tuple(torch.arange(time + count).remainder(97).tolist())
    tree = Tree("long", ids[:time] + ids[-8:], (Span(1, time, time + 8),),
                (Branch("hint", 1, time, ids[time:], count - 8),))
    cache = tf.DynamicCache([(torch.randn(1, 1, time, 8), torch.randn(1, 1, time, 8))])
    Largest.numel = 0
    with torch.no_grad(), Largest():
        forward_branches(model, pack_trees([tree], 0), cache)
    assert count * 97 < Largest.numel <= pass_cost.MASK_ENTRIES < count * time // 3


@pytest.mark.parametrize("family", ["Qwen2", "Gemma3", "DeepseekV3"])
def test_gradient_through_the_trunk_equals_that_of_separate_rows(family):
    batch, grads = batch_of_three(), []
    row, position = batch.pair_positions.T
    for way in ("two_pass", "once", "separate"):
        model = make(family)
        if way == "once":
            _, hidden = forward_tree(model, batch)
        elif way == "two_pass":
            _, cache = forward_trunk(model, batch)
            with torch.no_grad():  # the teacher reads the same cache first
                forward_branches(model, batch, cache, kinds=("hint",))
            hidden = forward_branches(model, batch, cache, kinds=("chosen", "rejected", "own"))
        else:
            hidden = separate(model, batch)
        direction = torch.randn(len(row), hidden.shape[-1], generator=torch.Generator().manual_seed(5))
        (hidden[row, position] * direction).sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    *ours, want = grads
    for found in ours:
        assert found.keys() == want.keys() and len(found) > 5
        for name, grad in found.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-4 * want[name].abs().max().item(), msg=name)


def test_the_given_cache_is_left_as_it_was():
    model, batch = make("Gemma3"), batch_of_three()
    _, cache = forward_trunk(model, batch)
    before = [(layer.keys, layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    forward_branches(model, batch, cache)
    for layer, (same, keys, values) in zip(cache.layers, before):
        assert layer.keys is same and torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_a_deeper_model_waits_for_its_device_no_more_often():
    class Waits(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero")
            return function(*args, **kwargs or {})

    def waits(layers):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY | {"num_hidden_layers": layers})).eval()
        with Waits() as found:
            forward_branches(model, batch_of_three(), forward_trunk(model, batch_of_three())[1])
        return found.number

    assert 0 < waits(1) == waits(4)


def test_no_logits_are_made(monkeypatch):
    model, batch = make("Qwen2"), batch_of_three()
    monkeypatch.setattr(model.lm_head, "forward", lambda *_: pytest.fail("logits were made"))
    for method in ("two_pass", "rows"):
        assert forward_branches(model, batch, method=method).shape[-1] == model.config.hidden_size


@pytest.mark.parametrize("family", STATEFUL)
def test_stateful_models_fall_back_to_rows_and_say_so_once(family, caplog, monkeypatch):
    monkeypatch.setattr(forward, "_warned", set())
    model, batch = make(family, STATEFUL), batch_of_three()
    with caplog.at_level(logging.WARNING, logger=forward.__name__), torch.no_grad():
        hidden, cache = forward_trunk(model, batch)
        assert cache is None and hidden.shape[:2] == batch.input_ids.shape
        got = [forward_branches(model, batch, cache) for _ in range(2)]
        want = separate(model, batch)
    assert len([r for r in caplog.records if "one row per branch" in r.message]) == 1
    assert (got[1] - want).abs().max() < 1e-5


def test_gradient_checkpointing_falls_back_to_rows():
    model, batch = make("Qwen2"), batch_of_three()
    want = separate(model, batch).detach()
    model.activation_checkpointing_enable()
    assert trunk_problem(model) is None  # in evaluation the cache works
    model.train()
    assert "checkpointing" in trunk_problem(model)
    assert (forward_branches(model, batch, forward_trunk(model, batch)[1]) - want).abs().max() < 1e-5


def trunk_and_branches(model, batch, upstream):
    "States of the branches that read the trunk's cache, a sum over both, and how many tokens went through the layers."
    read = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    hidden, cache = forward_trunk(model, batch)
    branches = forward_branches(model, batch, cache)
    hook.remove()
    return branches, (hidden * batch.attention_mask[..., None]).square().sum() + (branches * upstream).sum(), sum(read)


@pytest.mark.parametrize("family", (*SOME, *OLDER))
def test_checkpointing_that_keeps_the_cache_changes_nothing(family):
    model, batch = make(family, FAMILIES | OLDER).train(), batch_of_three()
    upstream = torch.randn(batch.branch_ids.shape, generator=torch.Generator().manual_seed(0))
    upstream = (upstream * (batch.branch_segment >= 0))[..., None]
    known, total, once = trunk_and_branches(model, batch, upstream)
    total.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable()
    assert keeps_cache(model)
    with keeping_cache(model):
        found, total, read = trunk_and_branches(model, batch, upstream)
    total.backward()
    assert read == once and model.is_activation_checkpointing
    assert (found - known).abs().max() < 1e-5
    largest = max(g.abs().max() for g in want.values())

    def agree():
        for name, p in model.named_parameters():
            assert name not in want or (p.grad - want[name]).abs().max() < 1e-5 * largest, name

    agree()
    if tree_problem(model) is None:  # transformers' own checkpointing runs its layers again with the same mask
        model.zero_grad()
        hidden, found = forward_tree(model, batch)
        ((hidden * batch.attention_mask[..., None]).square().sum() + (found * upstream).sum()).backward()
        assert (found - known).abs().max() < 1e-5
        agree()


@pytest.mark.parametrize("family", ["Qwen2", "Gemma3"])
def test_hinted_branches_alone_give_no_gradient_to_what_they_attend_to(family):
    model, batch = make(family), batch_of_three()
    grads = []
    for read in (lambda: forward_trunk(model, batch)[0], lambda: forward_tree(model, batch, ("hint",))[0]):
        model.zero_grad()
        (read() * batch.attention_mask[..., None]).square().sum().backward()
        grads.append([p.grad for p in model.base_model.parameters()])
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * one.abs().max().item())
    model.zero_grad()
    states = forward_tree(model, batch, ("hint",))[1]
    states[batch.sdpo_teacher[:, 0], batch.sdpo_teacher[:, 1]].square().sum().backward()
    keys = [layer.self_attn.k_proj.weight.grad for layer in model.model.layers]
    assert all(grad is None or not grad.any() for grad in keys)


def test_rows_of_masks_begin_where_cuda_wants_them():
    model, batch, masks = make("Qwen2-sliding"), batch_of_three(), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args, inputs: masks.append(inputs["attention_mask"]),
                                        with_kwargs=True)
    forward_branches(model, batch, forward_trunk(model, batch)[1])
    forward_tree(model, batch)
    ours = [getattr(mask, "branches", mask) for mask in masks if mask is not None and mask.dtype == torch.float32]
    assert len(ours) >= 6 and all(size % 8 == 0 for mask in ours for size in mask.stride()[:-1])  # attention.cpp, aligned_tensor


def test_a_mask_that_a_model_has_cut_is_refused():
    mask = TreeMask.of(torch.zeros(1, 1, 2, 5), None, True)
    query = torch.randn(1, 2, 5, 4)
    assert F.scaled_dot_product_attention(query, query, query, attn_mask=mask).shape == query.shape
    for cut in (mask[..., :4], mask + 1, mask.double()):
        with pytest.raises(AttributeError, match="branches"):
            F.scaled_dot_product_attention(query, query, query, attn_mask=cut)
    with pytest.raises(RuntimeError, match="split"):  # a cache in front of the trunk
        F.scaled_dot_product_attention(query[:, :, 1:], query, query, attn_mask=mask)


@pytest.mark.parametrize("family, checkpointed", (
    *((family, False) for family in FAMILIES | OLDER), *((family, True) for family in (*SOME, "GPTNeoX", "OPT"))))
def test_what_rows_begin_with_is_read_once(family, checkpointed, monkeypatch):
    "States, branches and gradients are those of one pass over whole rows; a third row holds nothing else."
    model, plain = make(family, FAMILIES | OLDER).train(), batch_of_three().trees
    begin, found, read = plain[0].ids[:4], [], []
    trees = [plain[0], replace(plain[1], ids=begin + plain[1].ids[4:]), Tree("d", begin, (Span(1, 1, 4),))]
    batch = replace(pack_trees(trees, 0), shared=4)
    if checkpointed:
        model.activation_checkpointing_enable()
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(tuple(args[0].shape)))
    for worth in (math.inf, -math.inf):
        seen = [(1, 4), (3, 37)] if worth < 0 and start_problem(model, checkpointed) is None else [(3, 41)]
        monkeypatch.setitem(LAYER_WORTH, "cpu", worth)
        model.zero_grad()
        hidden, cache = forward_trunk(model, batch)
        assert read == seen
        states = hidden.masked_fill(batch.attention_mask[..., None] == 0, 0.0), forward_branches(model, batch, cache)
        upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in states]
        sum((x * y).sum() for x, y in zip(states, upstream)).backward()
        found.append((*states, *(p.grad for p in model.parameters() if p.grad is not None)))
        read.clear()
    for whole, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, whole, rtol=1e-4, atol=1e-5 * whole.abs().max().item())


def test_beginnings_are_read_once_where_that_saves_more_than_a_pass(monkeypatch):
    model, ids = make("Llama"), tuple(range(1, 41))
    batch = replace(pack_trees([Tree("t", ids, (Span(1, 30, 40),)), Tree("u", ids[:35], (Span(1, 30, 35),))], 0),
                    shared=35)
    layer = (sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()) / 3
    for gradient, passes in ((True, 3), (False, 1)):
        with torch.set_grad_enabled(gradient):
            for width, part in ((35, batch), (9, forward.narrow_batch(batch, torch.tensor([0, 1]), 10))):
                for more, expected in ((-1, width), (1, 0)):
                    monkeypatch.setitem(LAYER_WORTH, "cpu", passes * width * layer + more)
                    assert forward.start_read_once(model, part) == expected
            assert forward.start_read_once(model, forward.narrow_batch(batch, torch.tensor([1]), 10)) == 0  # one row
    monkeypatch.setitem(LAYER_WORTH, "cpu", -math.inf)
    assert forward.start_read_once(model, batch) == 35 and not one_pass(model, batch, KINDS)
    assert forward.start_read_once(make("OPT", OLDER), batch) == 0  # its positions count tokens


def row_with(*kinds):
    "A trunk of 40 tokens, and at its 20th a branch of 6 tokens of each kind."
    ids = (7, 7, 22, 23, 24, 25)
    branches = tuple(Branch(kind, 1, 20, ids, 2, -(kind == "hint")) for kind in kinds)
    return Tree("t", tuple(range(1, 41)), (Span(1, 21, 25),), branches)


ANSWERS = ("chosen", "rejected")


@pytest.mark.parametrize("rows, kinds, gradient, whole, one, two", [  # products, tokens, mask entries: in one pass, and in two
    ([ANSWERS], ANSWERS, True, True, (3, 12, 12 * 52), (3, 12, 12 * 32)),  # what lies behind the fork
    ([("hint",)], ("hint",), True, True, (3, 6, 6 * 46), (1, 6, 6 * 26)),  # a backward pass
    ([("hint", *ANSWERS)], ("hint", *ANSWERS), True, True, (3, 18, 18 * 58), (3, 12 + 2, 12 * 32 + 2 * 26)),
    ([ANSWERS, ()], ANSWERS, False, True, (1, 24, 24 * 52), (1, 12, 12 * 32)),  # padding
    ([ANSWERS, ()], ANSWERS, False, False, (1, 12, 12 * 32), (1, 12, 12 * 32)),  # nothing
])
def test_the_rule_counts_what_one_pass_adds(rows, kinds, gradient, whole, one, two, monkeypatch):
    model, batch = make("Llama"), pack_trees([row_with(*row) for row in rows], 0)
    layer = (sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()) / 3
    once, apart = (times * (tokens * layer + 2 * 32 * entries) for times, tokens, entries in (one, two))
    passes = 2 if "hint" in kinds and "chosen" in kinds else 1
    with torch.set_grad_enabled(gradient):
        for worth, taken in ((once - apart - 1, False), (once - apart + 1, True)):
            monkeypatch.setitem(LAYER_WORTH, "cpu", worth / passes)
            assert one_pass(model, batch, kinds, whole) == taken
        monkeypatch.setattr(pass_cost, "MASK_ENTRIES", one[2] - 1)
        assert not one_pass(model, batch, kinds, whole)
        assert not one_pass(model, pack_trees([row_with()], 0), kinds, whole)  # nothing to read


def test_models_that_cannot_go_at_once_are_named():
    eager = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, attn_implementation="eager"))
    assert tree_problem(eager) == "trunks and branches are told apart in torch's own attention (sdpa)"
    for family in STATEFUL:
        assert tree_problem(make(family, STATEFUL)), family
    assert "recurrent" in tree_problem(tf.Lfm2ForCausalLM(tf.Lfm2Config(**TINY, full_attn_idxs=[1], conv_L_cache=3)))
    falcon = tf.FalconForCausalLM(tf.FalconConfig(**SMALL, alibi=True))
    assert "ALiBi" in tree_problem(falcon)
    split = make("Llama")
    split.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert tree_problem(split) == "it lies on several devices"


def test_checkpointing_that_keeps_the_cache_keeps_little_else():
    model, batch = make("Llama").train(), batch_of_three()

    def saved(context):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t), context:
            forward_branches(model, batch, forward_trunk(model, batch)[1])
        return sum(sizes)

    whole = saved(torch.enable_grad())
    model.activation_checkpointing_enable()
    assert saved(keeping_cache(model)) < whole / 3


def test_models_that_remember_more_are_left_to_transformers(monkeypatch):
    assert not keeps_cache(make("Jamba", STATEFUL))
    model = make("Llama")
    monkeypatch.setattr(model.config, "num_kv_shared_layers", 1, raising=False)  # as Gemma 3n: layers that read those of others
    assert not keeps_cache(model)


def test_a_batch_without_branches_costs_no_forward(monkeypatch):
    model = make("Qwen2")
    batch = pack_trees([Tree("b", (5, 6, 7), (Span(1, 1, 3),))], 0)
    monkeypatch.setattr(model.model, "forward", lambda *_, **__: pytest.fail("a forward was run"))
    assert forward_branches(model, batch).shape == (1, 0, 32)
    with pytest.raises(ValueError, match="use two_pass or rows"):
        forward_branches(model, batch, method="one")


LENGTHS = st.lists(st.lists(st.integers(0, 90), min_size=6, max_size=6), min_size=1, max_size=4)


@given(LENGTHS, st.data())
def test_every_branch_goes_through_once_and_no_pass_costs_more_than_it_saves(length, data):
    fork = [data.draw(st.lists(st.integers(0, 5000), min_size=6, max_size=6)) for _ in length]
    packs = pass_cost.branch_packs(length, fork, pass_cost.PASS_ENTRIES)
    went = [(row, branch) for pack in packs for row, branches in pack.rows.items() for branch in branches]
    assert sorted(went) == [(r, b) for r, row in enumerate(length) for b, n in enumerate(row) if n]
    for pack in packs:
        assert pack.width == max(sum(length[row][b] for b in branches) for row, branches in pack.rows.items())
        assert pack.fork == max(fork[row][b] for row, branches in pack.rows.items() for b in branches)
    alone = [pass_cost.BranchPack(length[r][b], fork[r][b], {r: [b]}).entries(pass_cost.TOKEN_ENTRIES) for r, b in went]
    spent = sum(pack.entries(pass_cost.TOKEN_ENTRIES) for pack in packs)
    assert spent + pass_cost.PASS_ENTRIES * len(packs) <= sum(alone) + pass_cost.PASS_ENTRIES * len(alone)


def test_a_row_with_one_branch_does_not_wait_beside_one_with_eight():
    length, fork = [[100] * 8, [100] + [0] * 7, [0] * 8], [[9000 + 900 * i for i in range(8)], [300] + [0] * 7, [0] * 8]
    packs = pass_cost.branch_packs(length, fork, pass_cost.PASS_ENTRIES)
    assert sum(len(pack.rows) * pack.width for pack in packs) == 900
    (whole,) = pass_cost.branch_packs(length, fork, math.inf)
    assert whole.rows == {0: list(range(8)), 1: [0]} and whole.width == 800
