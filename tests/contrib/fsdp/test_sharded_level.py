"Passes are counted from the packed batches alone: the counts are what the terms really make, and all ranks end up with the same."
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from random_trees import random_tree
from transformers import Qwen3Config
from transformers.modeling_outputs import BaseModelOutputWithPast

import composer_replication.tree.forward as forward
import composer_replication.tree.pass_cost as pass_cost
from composer_replication.contrib.fsdp.level import Level, Passes, PassSettings, count_passes, idle_pass, level
from composer_replication.losses.channels import pair_logps, reference_logps, teacher_states
from composer_replication.tree.pack import pack_trees


class Body(torch.nn.Module):
    "Hands its passes to `read`."

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, input_ids, past_key_values=None, **others):
        return self.read(input_ids, past_key_values, **others)


class Counting:
    "As much of a causal LM as branches need; it counts the passes through its layers and computes next to nothing."

    dtype, device, training, _is_stateful, _supports_flex_attn = torch.float32, torch.device("cpu"), True, False, True

    def __init__(self, checkpointing=False, attention="sdpa"):
        self.config = Qwen3Config(vocab_size=8, hidden_size=2, num_hidden_layers=1)
        self.config._attn_implementation = attention
        self.gradient_checkpointing, self.passes = checkpointing, 0
        self.head = SimpleNamespace(weight=torch.ones(8, 2, requires_grad=True), bias=None)
        self.base_model = Body(self._read)

    def get_output_embeddings(self):
        return self.head

    def modules(self):
        return (self,)

    def _read(self, input_ids, past_key_values=None, **others):
        self.passes += 1
        if past_key_values is not None:
            keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
            past_key_values.update(keys, keys, 0)
        hidden = torch.ones(*input_ids.shape, 2, requires_grad=True)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


def rank_of(draw):
    "What one rank holds for one backward pass."
    batch = pack_trees([random_tree(draw) for _ in range(draw.randrange(1, 4))], 0) if draw.random() < 0.95 else None
    recorded = pack_trees([random_tree(draw) for _ in range(2)], 0) if draw.random() < 0.7 else None
    return batch, recorded if recorded is not None and recorded.pairs else None


def made(batch, recorded, how, attention):
    "Passes that the terms make, counted while they make them; `fill` is asked after each kind, as the trainer does."
    reader, student, each = Counting(attention=attention), Counting(not how.trains_shared, attention), Counter()

    def counted(kind, model, function):
        before = model.passes
        function()
        each[kind] += model.passes - before

    cache = None
    if batch is not None and batch.input_ids.numel() and how.trains_shared:
        _, cache = forward.forward_trunk(Counting(attention=attention), batch)
    if batch is not None and how.distils and batch.sites:
        counted("teacher", reader, lambda: teacher_states(reader, batch, None if how.own_trunk else cache))
    for packed in (batch, recorded):
        if packed is not None and packed.pairs and how.reference:
            counted("reference", reader, lambda packed=packed: reference_logps(reader, packed))
    if batch is not None and batch.pairs:
        hidden = torch.ones(*batch.input_ids.shape, 2)
        counted("pairs", student, lambda: pair_logps(student, batch, hidden, cache))
    if recorded is not None:
        counted("recorded", student, lambda: pair_logps(student, recorded))
    return Passes(**each)


@pytest.mark.parametrize("layouts", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_in_random_layouts_every_rank_makes_as_many_passes_of_every_kind(monkeypatch, layouts):
    draw, idle, busiest = random.Random(0), 0, Counter()
    for layout in range(layouts):
        monkeypatch.setattr(pass_cost, "MASK_ENTRIES", draw.choice([1, 200, 2**11, 2**25]))
        monkeypatch.setattr(pass_cost, "PASS_ENTRIES", draw.choice([0, 2**18, pass_cost.SHARDED_ENTRIES]))
        attention = draw.choice(["sdpa", "sdpa", "sdpa", "flash_attention_2"])  # the last takes no mask of ours
        reads = attention != "flash_attention_2"
        how = PassSettings(*(draw.random() < 0.7 for _ in range(3)), reads and draw.random() < 0.7, reads,
                      pass_cost.pass_worth(Counting(attention=attention)), attention == "sdpa")
        ranks = [rank_of(draw) for _ in range(draw.choice([2, 2, 3]))]
        counts = [[count_passes(*rank, how)] for rank in ranks]
        levels = level(counts)
        sequences = []
        for rank, (mine,) in zip(ranks, levels):
            real = made(*rank, how, attention)
            assert real == mine.own, (layout, how, attention)
            model, passes = Counting(), ["policy"]
            for kind in ("teacher", "reference", "pairs", "recorded"):
                for _ in range(mine.idle(kind)):
                    idle_pass(model)
                passes += [kind] * (getattr(real, kind) + mine.idle(kind))
                busiest[kind] = max(busiest[kind], getattr(real, kind))
            assert model.passes == sum(mine.idle(kind) for kind in busiest)
            idle += model.passes
            sequences.append(passes)
        assert all(one == sequences[0] for one in sequences)
    assert idle > layouts and min(busiest.values()) > 3  # the layouts are not all alike


def test_levelling_two_backward_passes_keeps_them_apart():
    ranks = [[Passes(5, 1, 0, 2), Passes()], [Passes(0, 3, 0, 2), Passes(1)]]
    assert [[each.most for each in rank] for rank in level(ranks)] == [[Passes(5, 3, 0, 2), Passes(1)]] * 2
    assert level(ranks)[1][0].idle("teacher") == 5 and Level().idle("pairs") == 0


@pytest.mark.parametrize("kind", ["teacher", "reference", "pairs", "recorded"])
def test_no_rank_has_to_take_a_pass_back(kind):
    draw = random.Random(kind)
    ranks = [[Passes(**{kind: draw.randrange(9)}) for _ in range(4)] for _ in range(3)]
    assert all(each.idle(kind) >= 0 for rank in level(ranks) for each in rank)
