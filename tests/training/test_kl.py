"""Gradients of the KL estimators against differences of the KL over every outcome, in Python floats; values: the notebook."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_trainer import made

from composer_replication.training.batches import sampled_mask
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.kl import (
    KL_ESTIMATORS,
    kl_adjusted_advantages,
    kl_estimate,
    kl_loss_terms,
)

scores = st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=2, max_size=6)


def softmax(values):
    top = max(values)
    parts = [math.exp(v - top) for v in values]
    return [part / sum(parts) for part in parts]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def by_differences(function, values):
    steps = [[v + (h if i == j else 0) for j, v in enumerate(values)] for i in range(len(values)) for h in (1e-5, -1e-5)]
    found = [function(step) for step in steps]
    return [(up - down) / 2e-5 for up, down in zip(found[::2], found[1::2])]


@settings(max_examples=25, deadline=None)
@given(scores)
def test_gradients_in_expectation(rows):
    policy, reference, old = (list(column) for column in zip(*rows))
    q, was = softmax(reference), softmax(old)
    to_start = by_differences(lambda z: kl(softmax(z), q), policy)
    from_start = by_differences(lambda z: kl(q, softmax(z)), policy)
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    logq, sampled = torch.tensor(q, dtype=torch.float64).log(), torch.tensor(was, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    weights = logp.detach().exp()

    def of(scalar):
        return pytest.approx(torch.autograd.grad(scalar, logits, retain_graph=True)[0].tolist(), abs=1e-5)

    assert [0.0] * len(policy) == of((weights * kl_estimate(logp, logq, "k1")).sum())
    assert from_start == of((weights * kl_estimate(logp, logq, "k3")).sum())
    assert to_start == of((weights * kl_estimate(logp, logq, "k1").detach() * logp).sum())
    for name in KL_ESTIMATORS:  # with the ratio, whoever sampled
        assert to_start == of((sampled * kl_loss_terms(logp, logq, sampled.log(), name)).sum())


def test_k3_keeps_small_differences_in_float32():
    logp = torch.tensor([-1.0, -2.0])
    assert kl_estimate(logp, logp + 1e-3, "k3").tolist() == pytest.approx([5e-7] * 2, rel=2e-2)
    assert kl_estimate(logp, logp, "k3").tolist() == [0.0, 0.0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=4, max_size=4), st.floats(0.1, 2))
def test_an_advantage_is_that_of_the_reward_minus_the_weighted_kl(rows, coef):
    rewards, costs = torch.tensor(rows, dtype=torch.float64).T
    centred = lambda values: (values.view(2, 2) - values.view(2, 2).mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(kl_adjusted_advantages(centred(rewards), costs, coef, 2), centred(rewards - coef * costs))


def test_a_rollout_far_from_the_start_has_a_smaller_advantage(tmp_path):
    "The policy has moved before its first step; by hand from recorded log-probabilities of sampling and of the start."
    trainer = made(tmp_path, kl_coef=0.3, scale_rewards="none", max_completion_length=64)
    with torch.no_grad():
        trainer.student.lm_head.weight.mul_(1.5)
    trainer.train()
    batch = trainer.batch
    apart = (batch["sampling_per_token_logps"] - batch["ref_logprobs"]) * sampled_mask(batch)
    rewards = torch.tensor(trainer.generation.rewards) - 0.3 * apart.sum(1)
    groups = rewards.view(-1, trainer.num_generations)
    assert apart.sum(1).std() > 0.1
    torch.testing.assert_close(batch["advantages"], (groups - groups.mean(1, keepdim=True)).flatten(), atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_named_and_an_advantage_carries_no_gradient_of_its_kl():
    logp, cost = torch.randn(2, 3), torch.rand(4, requires_grad=True)
    assert not kl_adjusted_advantages(torch.zeros(4), cost, 0.1, 2).requires_grad
    with pytest.raises(ValueError, match="'k2' is unknown"):
        kl_estimate(logp, logp, "k2")
    with pytest.raises(ValueError, match="differ in shape"):
        kl_estimate(logp, logp[0])
    for advantages, costs in ((4, 3), (5, 5)):
        with pytest.raises(ValueError, match="whole groups of num_generations=2"):
            kl_adjusted_advantages(torch.zeros(advantages), torch.zeros(costs), 0.1, 2)


@pytest.mark.parametrize("change, says", [
    ({"kl_estimator": "k2"}, "kl_estimator='k2'"),
    ({"kl_coef": -0.1}, "kl_coef=-0.1"), ({"kl_coef": float("nan")}, "kl_coef=nan"),
    ({"kl_coef": 0.1, "scale_rewards": "batch"}, "scale_rewards='batch'"),
    ({"kl_coef": 0.1, "multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
    ({"kl_coef": 0.1, "kl_estimator": "k3", "scale_rewards": "group"}, None), ({"scale_rewards": "group"}, None)])
def test_a_kl_in_the_reward_needs_unscaled_rewards_and_nonsense_is_named(change, says):
    make = lambda: ComposerReplicationConfig("out", report_to="none", bf16=False, use_cpu=True, **change)
    if says is None:
        make()
    else:
        with pytest.raises(ValueError, match=says):
            make()
