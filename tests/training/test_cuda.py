"""What must hold on a GPU as on a CPU: losses, teachers, sampling, and a run by a recipe.

COMPOSER_CUDA_TESTS=cpu tries the tests themselves on a machine without one.
"""
import math
import os
from copy import deepcopy

import pytest
import torch

from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.losses.channels import reference_logps, teacher_states
from composer_replication.losses.compose import compose_loss
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.replay.pairs import sibling_pairs
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.sampling import Sampling
from composer_replication.traces.siblings import SiblingIndex
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import target_hints, target_turns
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.template import probe_template

pytestmark = pytest.mark.cuda


@pytest.fixture
def device():
    "The GPU; matrix products in full float32, so that a CPU is an oracle."
    if os.environ.get("COMPOSER_CUDA_TESTS") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return "cuda"


def batch():
    "Hinted branches and pairs of the shipped traces, packed."
    chat, index, trees = probe_template(embedded_tokenizer()), SiblingIndex(toy_traces()), []
    for trace in toy_traces():
        pairs = sibling_pairs(trace, index)
        hints = target_hints(trace, target_turns(trace), default_composite())
        if pairs and hints and len(trees) < 3:
            trees.append(build_tree(trace, chat, hints, pairs[:2]))
    made = pack_trees(trees, embedded_tokenizer().pad_token_id)
    assert made.sites and made.pairs
    return reference_logps(embedded_model("mild").float(), made)


def gradient(model, packed):
    "The composed loss and its gradient over all weights."
    model.zero_grad()
    loss = compose_loss(model, packed)
    loss.total.backward()
    return loss, torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])


def test_the_three_channels_and_their_gradient_are_the_cpus(device):
    model, packed = embedded_model().float().train(), batch()
    there = deepcopy(model).to(device)
    (ours, slope), (theirs, there_slope) = gradient(model, packed), gradient(there, packed.to(device))
    for name in ("lm_ce", "sdpo_jsd", "trace_replay_dpo", "total"):
        assert getattr(theirs, name).item() == pytest.approx(getattr(ours, name).item(), abs=1e-4, rel=1e-4), name
    assert ours.sdpo_jsd.item() > 0
    assert torch.nn.functional.cosine_similarity(slope, there_slope, dim=0) > 0.9999


def test_both_ways_of_reading_the_branches_give_the_same_states(device):
    model, packed = embedded_model().float().to(device).eval(), batch().to(device)
    torch.testing.assert_close(teacher_states(model, packed, method="rows"), teacher_states(model, packed), atol=1e-4, rtol=1e-4)


def test_the_log_probabilities_of_sampled_tokens_are_the_models(device):
    tokenizer, model = embedded_tokenizer(), embedded_model().float().to(device).eval()
    context = tokenizer("Which files are there?").input_ids
    with TransformersPolicy(model, tokenizer).batch(Sampling()) as playing:
        first = playing.sample([0, 1], [context, context], [8, 8], ["a", "b"])
        more = playing.sample([0, 1], [context, context], [8, 8], ["c", "d"])
    for one, two in zip(first, more):
        ids = torch.tensor([[*context, *one.ids, *context, *two.ids]], device=device)
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        start = len(context) - 1
        assert list(one.logprobs) == pytest.approx(logprobs[start:start + len(one.ids)], abs=1e-3)
        assert list(two.logprobs) == pytest.approx(logprobs[-len(two.ids):], abs=1e-3)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_recipe_runs_and_goes_on_from_its_checkpoint(device, adapter, tmp_path):
    values = dict(output_dir=tmp_path, max_steps=1, save_steps=1, train_rows=8, gradient_accumulation_steps=1,
                  max_completion_length=128, max_turns=2, max_turn_tokens=48, bf16=str(device == "cuda").lower(),
                  use_cpu=str(device == "cpu").lower(), use_peft=str(adapter).lower())
    values = {key: str(value) for key, value in values.items()}
    done = run_recipe(load_recipe("toy", values))
    more = run_recipe(load_recipe("toy", values | {"max_steps": "2", "resume": "true"}))
    assert (done.step, more.step) == (1, 2) and more.resumed_from == done.checkpoint
    assert math.isfinite(done.metrics["loss"]) and math.isfinite(more.metrics["loss"])
