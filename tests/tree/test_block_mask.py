"Block masks against the dense ones that a model is given otherwise, pair by pair, and as the kernel computes them."
import math
import random
import shutil

import pytest
import torch
from largest import Largest
from random_trees import random_tree
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

from composer_replication.tree import forward
from composer_replication.tree.block_mask import BLOCK, branch_block_mask
from composer_replication.tree.forward import forward_branches, shares_trunk, way_name
from composer_replication.tree.pack import KINDS, pack_trees
from composer_replication.tree.pass_cost import branch_passes

TINY = dict(vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
            num_key_value_heads=1, pad_token_id=0)


def pairs(mask):
    "Which pairs the blocks show, and which the rule alone would."
    rows, _, queries, keys = mask.shape
    rule = mask.mask_mod(torch.arange(rows)[:, None, None], 0, torch.arange(queries)[:, None], torch.arange(keys))
    shown = torch.zeros_like(rule)
    for asks, counts, indices in ((True, mask.kv_num_blocks, mask.kv_indices),
                                  (False, mask.full_kv_num_blocks, mask.full_kv_indices)):
        for row, _, block in (counts > 0).nonzero().tolist():
            for column in indices[row, 0, block, :counts[row, 0, block]].tolist():
                at = row, slice(BLOCK * block, BLOCK * (block + 1)), slice(BLOCK * column, BLOCK * (column + 1))
                assert not shown[at].any(), "a block is listed twice"
                shown[at] = rule[at] if asks else True
    return shown, rule


def layout(draw, rows=3):
    "Positions, segments, forks and the trunk's mask of branches as they lie on the branch axis, padded on either side."
    time, count = draw.randrange(1, 700), draw.randrange(1, 500)
    segment, fork = torch.full((rows, count), -1), torch.zeros(rows, count, dtype=torch.long)
    position, valid = torch.zeros_like(fork), torch.ones(rows, time, dtype=torch.long)
    for row in range(rows):
        valid[row, :draw.randrange(time)] = draw.random() < 0.5
        end, at, number = draw.randrange(count + 1), 0, 0
        while at < end:
            length = min(draw.randrange(1, 260), end - at)
            depth = draw.randrange(time + 1)
            segment[row, at:at + length], fork[row, at:at + length] = number, depth
            position[row, at:at + length] = depth + torch.arange(length)
            at, number = at + length, number + 1
    return position, segment, fork, valid


@pytest.mark.parametrize("window", (None, 1, 60, 400))
def test_blocks_show_what_the_dense_mask_shows(window):
    draw = random.Random(window)
    for _ in range(60):
        parts = layout(draw)
        seen, far = forward._visible(*parts)
        dense = torch.cat([s if window is None else s & (d < window) for s, d in zip(seen, far)], -1)
        shown, rule = pairs(branch_block_mask(*parts, window=window))
        real = parts[1] >= 0
        assert torch.equal(shown[real], dense[real]) and torch.equal(rule[real], dense[real])


def test_blocks_that_are_not_seen_are_left_out():
    segment = torch.arange(8).repeat_interleave(128)[None]  # eight branches of a block each, at forks 512 apart
    fork = 512 * (segment + 1)
    mask = branch_block_mask(fork + torch.arange(1024)[None] % 128, segment, fork, torch.ones(1, 4096))
    assert mask.full_kv_num_blocks.flatten().tolist() == [4 * (i + 1) for i in range(8)]
    assert mask.kv_num_blocks.flatten().tolist() == [1] * 8  # each its own


def test_the_blocks_of_a_long_trunk_make_no_mask_of_all_pairs():
    "4,096 branch tokens over 32,768 of the trunk: 151 million pairs, of which no tensor is made."
    segment = torch.arange(8).repeat_interleave(512)[None]
    fork = 4096 * (segment + 1)
    position, valid, Largest.numel = fork + torch.arange(4096)[None] % 512, torch.ones(1, 32768), 0
    for window in (None, 1024):
        with Largest():
            mask = branch_block_mask(position, segment, fork, valid, window)
        assert mask.shape == (1, 1, 4096, 36864) and Largest.numel == 36864


def test_rows_with_fewer_branches_read_no_more_than_their_own():
    segment = torch.full((2, 1024), -1)
    segment[0], segment[1, :128] = torch.arange(8).repeat_interleave(128), 0
    fork = 512 * (segment + 1)
    mask = branch_block_mask(fork + torch.arange(1024) % 128, segment, fork, torch.ones(2, 4096))
    assert mask.full_kv_num_blocks[1].flatten().tolist() == [4] + [0] * 7
    assert mask.kv_num_blocks[1].flatten().tolist() == [1] * 8  # padding sees itself


def test_recurrent_layers_make_rows_where_attention_takes_block_masks():
    settings = dict(TINY, num_attention_heads=2, full_attn_idxs=[1], conv_L_cache=3)
    settings.pop("head_dim")
    for attention, reason in (("sdpa", None), ("flex_attention", "recurrent and convolutional layers cannot read a block mask")):
        torch.manual_seed(0)
        model = Lfm2ForCausalLM(Lfm2Config(**settings, attn_implementation=attention)).eval()
        assert shares_trunk(model) == reason and way_name(model) == ("rows" if reason else "states")


def test_all_branches_go_in_one_pass():
    model = LlamaForCausalLM(LlamaConfig(**TINY, attn_implementation="flex_attention"))
    assert shares_trunk(model) is None and way_name(model) == "block"
    draw = random.Random(3)
    batch = pack_trees([random_tree(draw) for _ in range(4)], 0)
    assert branch_passes(batch, KINDS, True, True, math.inf) == 1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="FlexAttention compiles its kernel with g++ on a CPU")
@pytest.mark.parametrize("family", ("llama", "gemma3"))
def test_the_compiled_kernel_gives_the_states_of_the_dense_mask(family):
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    else:
        kinds = ["sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**TINY, sliding_window=24, layer_types=kinds)).eval()
    draw, batch = random.Random(1), None
    while batch is None or not (batch.sites and batch.pairs and all(b.fork for t in batch.trees for b in t.branches)):
        batch = pack_trees([random_tree(draw) for _ in range(3)], 0)
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # their C++ does not compile, torch 2.13
        want = forward_branches(model, batch)
        model.set_attn_implementation("flex_attention")
        got, real = forward_branches(model, batch), batch.branch_segment >= 0
    torch.testing.assert_close(got[real], want[real], atol=1e-5, rtol=1e-5)
