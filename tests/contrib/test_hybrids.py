"Branches that start from states kept at the forks, against a plain forward each; more families, and bf16: the notebook."
import copy

import pytest
import torch
import transformers as tf
from trl.trainer.utils import add_fused_lm_head

from composer_replication.contrib import hybrids
from composer_replication.contrib.hybrids import TrunkCache
from composer_replication.training.reading import watch_forward
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.forward import forward_branches, forward_trunk, trunk_problem
from composer_replication.tree.pack import KINDS, pack_trees
from composer_replication.tree.pass_cost import PASS_ENTRIES, branch_passes
from composer_replication.tree.states import state_mixers

TINY = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
HEADS = TINY | {"num_key_value_heads": 4}
LINEAR, CONV = [[kind, "full_attention", kind] for kind in ("linear_attention", "conv")]
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=16)
LATENT = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8, n_group=1, topk_group=1,
              first_k_dense_replace=1)
FAMILIES = {
    "Qwen3-Next": ("Qwen3Next", lambda: tf.Qwen3NextConfig(**TINY, **DELTA, **SHARED, head_dim=8, layer_types=LINEAR)),
    "Granite-4": ("GraniteMoeHybrid", lambda: tf.GraniteMoeHybridConfig(**TINY, **MAMBA2, layer_types=LINEAR, num_local_experts=4,
                                                                        num_experts_per_tok=2, shared_intermediate_size=16)),
    "LFM2": ("Lfm2", lambda: tf.Lfm2Config(**TINY, layer_types=CONV)),
}
MORE = {
    "Qwen3.5": ("Qwen3_5", lambda: tf.Qwen3_5TextConfig(**TINY, **DELTA, head_dim=8, layer_types=LINEAR)),
    "Qwen3.5-MoE": ("Qwen3_5Moe", lambda: tf.Qwen3_5MoeTextConfig(**TINY, **DELTA, **SHARED, head_dim=8, layer_types=LINEAR)),
    "LFM2-MoE": ("Lfm2Moe", lambda: tf.Lfm2MoeConfig(**TINY, **EXPERTS, layer_types=CONV, num_dense_layers=1)),
    "LFM3": ("Lfm3", lambda: tf.Lfm3Config(**TINY, layer_types=CONV)),
    "Bamba": ("Bamba", lambda: tf.BambaConfig(**TINY, **MAMBA2, attn_layer_indices=[1])),
    "Zamba2": ("Zamba2", lambda: tf.Zamba2Config(**HEADS | {"num_hidden_layers": 4}, layers_block_type=["mamba", "hybrid"] * 2,
                                                 mamba_d_state=8, mamba_ngroups=2, n_mamba_heads=4, chunk_size=16,
                                                 num_mem_blocks=1)),
    "Kimi-Linear": ("KimiLinear", lambda: tf.KimiLinearConfig(
        **HEADS, **LATENT, layer_types=LINEAR, num_experts=4, num_experts_per_token=2, moe_intermediate_size=16,
        num_shared_experts=1, linear_attn_config=dict(num_heads=4, head_dim=8, short_conv_kernel_size=4, kda_layers=[1, 3],
                                                    full_attn_layers=[2]))),
    "Bailing": ("BailingHybrid", lambda: tf.BailingHybridConfig(**HEADS, **LATENT, **EXPERTS, layer_types=LINEAR,
                                                                q_lora_rank=16)),
}
ALL = FAMILIES | MORE


def make(family):
    "A tiny random model. Weights are larger than usual, so that a wrong state moves the result by far more than 1e-5."
    name, config = ALL[family]
    torch.manual_seed(7)
    model = getattr(tf, name + "ForCausalLM")(config()).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    return model


def ragged(lead=(0, 0, 0)):
    "Rows with seven branches (forks beside each other, and before the last token), none, and one that forks at the very start."
    draw = torch.Generator().manual_seed(3)

    def ids(n):
        return tuple(torch.randint(3, 97, (n,), generator=draw).tolist())

    a, b, c = ids(41), ids(13), ids(26)
    tree_a = Tree("a", a, (Span(1, 6, 9), Span(3, 17, 22), Span(5, 30, 41)), (
        Branch("hint", 1, 4, ids(3) + a[6:9], 3), Branch("hint", 3, 15, ids(1) + a[17:22], 1),
        Branch("hint", 5, 25, ids(9) + a[30:41], 9),
        Branch("chosen", 3, 16, a[16:17] + ids(7), 1, 0), Branch("rejected", 3, 16, a[16:22], 1, 0),
        Branch("chosen", 5, 40, ids(2), 1, 1), Branch("rejected", 5, 40, ids(2), 1, 1)))
    tree_c = Tree("c", c, (Span(2, 20, 26),), (Branch("hint", 2, 0, ids(22) + c[20:26], 22),))
    return pack_trees([tree_a, Tree("b", b, (Span(1, 4, 13),)), tree_c], pad_token_id=0, lead=list(lead))


def separate(model, batch):
    "The oracle: the logits of every branch as a plain sequence of its own, on the branch axis."
    out = torch.zeros(*batch.branch_ids.shape, 97)
    for row, tree in enumerate(batch.trees):
        at = 0
        for branch in tree.branches:
            out[row, at:at + len(branch.ids)] = model(torch.tensor([tree.ids[:branch.fork] + branch.ids])).logits[0, branch.fork:]
            at += len(branch.ids)
    return out


def gradients(model, logits, mask):
    "Of a weighted sum of the logits at `mask`."
    model.zero_grad(set_to_none=True)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weights)[mask].sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE)])
def test_logits_and_gradients_are_those_of_rows(family, monkeypatch):
    "Live teacher and pairs on the student's own pass, a frozen teacher that reads for itself; several cuts, padding on the left."
    monkeypatch.setattr(hybrids, "NEAR", 4)
    model, batch = make(family), ragged((2, 9, 3))
    assert trunk_problem(model) is None and state_mixers(model)
    kind = batch.branch_kind.gather(1, batch.branch_segment.clamp(min=0)).masked_fill(batch.branch_segment < 0, -1)
    want, answers = separate(model, ragged()), (kind == 1) | (kind == 2)  # not those that the trunk holds itself
    scale = want.abs().max().item()

    _, cache = forward_trunk(model, batch)
    assert isinstance(cache, TrunkCache) and cache.cuts.at == (0, 6, 17, 27, 42)
    with torch.no_grad():
        live = model.lm_head(forward_branches(model, batch, cache, kinds=("hint",)))
    got = model.lm_head(forward_branches(model, batch, cache, kinds=("chosen", "rejected")))
    with torch.no_grad():
        frozen = model.lm_head(forward_branches(copy.deepcopy(model), batch, kinds=("hint",)))
    if family == "Granite-4":
        live, got, frozen = (x / model.config.logits_scaling for x in (live, got, frozen))
    assert scale > 0.5
    assert max((x - want)[kind == 0].abs().max().item() for x in (live, frozen)) < 1e-5 * scale
    assert (got - want)[answers].abs().max() < 1e-5 * scale
    tree, rows = gradients(model, got, answers), gradients(model, want, answers)
    largest = max(g.abs().max().item() for g in rows.values())
    assert tree.keys() == rows.keys() and len(rows) > 20
    for name, grad in rows.items():
        assert (tree[name] - grad).abs().max() < 1e-5 * largest, name


def test_the_passes_leave_no_trace_in_the_model_and_the_cache():
    "Branches read the cache again and again, and a model's own generation is as before."
    model, batch = make("Granite-4"), ragged()
    ids = batch.input_ids[:1, :9]
    before = model.generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        _, cache = forward_trunk(model, batch)
        first, second = (forward_branches(model, batch, cache) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), before)
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_fault_within_the_pass_leaves_the_mixers_as_they_were():
    model, batch = make("LFM2"), ragged()
    with pytest.raises(IndexError):
        forward_trunk(model, batch.__class__(**{**vars(batch), "input_ids": batch.input_ids + 1000}))
    assert all("forward" not in vars(m) for m in model.modules())


def test_attention_and_experts_read_a_trunk_once():
    "And the branches once, in two passes."
    model, batch, read = make("Granite-4"), ragged(), {}
    for name, child in (("attention", "1.self_attn"), ("experts", "1.block_sparse_moe")):
        module = model.model.layers.get_submodule(child)
        module.register_forward_pre_hook(lambda m, a, k, name=name: read.__setitem__(name, read.get(name, 0) + (
            a[0] if a else k["hidden_states"]).shape[:2].numel()), with_kwargs=True)
    with torch.no_grad():
        forward_branches(model, batch)
    once = 2 * (int(batch.branch_fork.max()) + batch.branch_ids.shape[1])  # two rows have branches; padding counts
    assert branch_passes(batch, KINDS, True, False, PASS_ENTRIES) == 2 and read["attention"] == read["experts"] == once


def test_trls_own_pass_keeps_the_states(monkeypatch):
    "The trainer's cache: filled by a forward that TRL makes, with its fused head and padding on both sides."
    monkeypatch.setattr(hybrids, "NEAR", 4)
    model, batch = make("Granite-4"), ragged((2, 9, 3))
    want = separate(model, ragged()) * model.config.logits_scaling
    add_fused_lm_head(model)
    with watch_forward(model, batch) as forward:
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.input_ids, fused_lm_head=True)
    got, real = model.lm_head(forward_branches(model, batch, forward.cache)), batch.branch_segment >= 0
    assert isinstance(forward.cache, TrunkCache) and (got - want)[real].abs().max() < 1e-5 * want.abs().max()
    got[real].sum().backward()
    assert model.model.layers[0].mamba.A_log.grad.abs().max() > 0 and forward.logprobs.shape == (3, batch.input_ids.shape[1] - 1)
