"""The KL estimators and their places, against enumeration of every outcome, in Python floats."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=40, deadline=None)
@given(scores)
def test_both_estimate_the_kl_without_bias(rows):
    policy, reference, _ = (softmax(column) for column in zip(*rows))
    logs = [torch.tensor(p, dtype=torch.float64).log() for p in (policy, reference)]
    for name in KL_ESTIMATORS:
        values = kl_estimate(*logs, name)
        assert sum(p * v for p, v in zip(policy, values.tolist())) == pytest.approx(kl(policy, reference), abs=1e-9)
    assert (kl_estimate(*logs, "k3") >= 0).all()


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


def test_estimates_pass_shapes_and_gradient():
    logp = torch.randn(2, 3, requires_grad=True)
    assert kl_estimate(logp, torch.zeros(2, 3)).shape == (2, 3)
    assert torch.autograd.grad(kl_estimate(logp, torch.zeros(2, 3), "k1").sum(), logp)[0].eq(1).all()
    with pytest.raises(ValueError, match="'k2' is unknown"):
        kl_estimate(logp, logp, "k2")
    with pytest.raises(ValueError, match="differ in shape"):
        kl_estimate(logp, logp[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(2, 5), st.floats(0, 2), st.randoms(use_true_random=False))
def test_adjusted_advantages_are_those_of_adjusted_rewards(groups, size, coef, random):
    rewards = [[random.random() for _ in range(size)] for _ in range(groups)]
    costs = [[random.uniform(-1, 3) for _ in range(size)] for _ in range(groups)]

    def advantages(rows):
        return [r - sum(row) / size for row in rows for r in row]

    expected = advantages([[r - coef * c for r, c in zip(*pair)] for pair in zip(rewards, costs)])
    got = kl_adjusted_advantages(torch.tensor(advantages(rewards), dtype=torch.float64),
                                 torch.tensor(costs, dtype=torch.float64).flatten(), coef, size)
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def test_adjusted_advantages_carry_no_gradient_of_the_kl():
    cost = torch.rand(4, requires_grad=True)
    assert not kl_adjusted_advantages(torch.zeros(4), cost, 0.1, 2).requires_grad


@pytest.mark.parametrize("advantages, cost", ((4, 3), (5, 5)))
def test_adjusted_advantages_refuse_broken_groups(advantages, cost):
    with pytest.raises(ValueError, match="whole groups of num_generations=2"):
        kl_adjusted_advantages(torch.zeros(advantages), torch.zeros(cost), 0.1, 2)


def config(**changes):
    return ComposerReplicationConfig("out", report_to="none", bf16=False, use_cpu=True, **changes)


@pytest.mark.parametrize("scale", ("group", "batch"))
def test_reward_place_needs_unscaled_rewards(scale):
    config(kl_place="loss", kl_estimator="k3", kl_coef=0.1, scale_rewards=scale)
    config(scale_rewards=scale)
    config(kl_coef=0.1)
    with pytest.raises(ValueError, match=f"scale_rewards='{scale}'"):
        config(kl_coef=0.1, scale_rewards=scale)
    with pytest.raises(ValueError, match="normalize_then_sum"):
        config(kl_coef=0.1, multi_objective_aggregation="normalize_then_sum")


@pytest.mark.parametrize("change, says", (({"kl_place": "both"}, "kl_place='both'"), ({"kl_estimator": "k2"}, "'k2'"),
                                          ({"kl_coef": -0.1}, "kl_coef=-0.1"), ({"kl_coef": float("nan")}, "kl_coef=nan")))
def test_nonsense_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        config(**change)
