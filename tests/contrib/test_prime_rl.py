"""Our custom loss as PRIME-RL 0.8 calls it, against our trainer's sampled support, loops, and the divergence that it estimates.

PRIME-RL is on no package index: the two dataclasses and the call are a pinned stub of `src/prime_rl/trainer/rl/loss.py`."""
import math
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from composer_replication.contrib.prime_rl import loss_terms, sdpo_loss
from composer_replication.losses.divergences import Divergence

VOCAB, TIME = 12, 9
MASKS = {"no token": [], "one token": [4], "a turn": [2, 3, 4, 5]}


@dataclass
class LossInputs:
    "Stub: 0.8's fields."

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    "Stub: 0.8's fields."

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    names = "prime_rl.trainer.rl.loss".split(".")
    for n in range(1, 5):
        monkeypatch.setitem(sys.modules, ".".join(names[:n]), ModuleType("stub"))
    sys.modules["prime_rl.trainer.rl.loss"].LossOutputs = LossOutputs


def case(chosen, dtype=torch.float64, weights=False):
    "Both sides' logits, the tokens, and the inputs made of them."
    made = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(TIME, VOCAB, generator=made, dtype=dtype) for _ in range(2))
    student.requires_grad_()
    tokens = torch.randint(VOCAB, (TIME,), generator=made)
    now, there = (x.log_softmax(-1)[range(TIME), tokens] for x in (student, teacher))
    ref = torch.zeros(TIME, dtype=dtype)
    ref[chosen] = there[chosen]
    mask = torch.arange(TIME) > 0  # the prompt's last token is not trained on
    old, advantages = (torch.randn(TIME, generator=made, dtype=dtype) for _ in range(2))
    stream = torch.rand(TIME, generator=made, dtype=dtype) if weights else None
    return student, teacher, tokens, LossInputs(now, now.detach() + 0.5 * old, ref, advantages, mask, stream)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("chosen", MASKS.values(), ids=MASKS)
def test_the_loss_and_its_gradient_are_our_trainers(chosen, dtype):
    student, teacher, tokens, inputs = case(chosen, dtype)
    out = sdpo_loss(inputs, alpha_sdpo=0.7)
    out.loss.backward()
    mine = student.detach().clone().requires_grad_()
    now = mine.log_softmax(-1)[range(TIME), tokens]
    ratio = (now - inputs.inference_logprobs).exp()
    policy = -torch.minimum(ratio * inputs.advantages, ratio.clamp(0.8, 1.2) * inputs.advantages)[1:].sum()
    values = Divergence(1.0, support="sampled")(mine[chosen], teacher[chosen], tokens[chosen])
    sdpo = (values * ratio.detach().clamp(max=2.0)[chosen]).sum()
    (policy + 0.7 * sdpo).backward()
    torch.testing.assert_close(out.loss, policy + 0.7 * sdpo, rtol=0, atol=1e-5)
    torch.testing.assert_close(student.grad, mine.grad, rtol=0, atol=1e-5)
    assert out.metrics["sdpo_tokens"].item() == len(chosen)
    assert out.metrics["sdpo"].item() == pytest.approx(sdpo.item() / max(len(chosen), 1), abs=1e-5)
    assert all(isinstance(v, torch.Tensor) and not v.requires_grad for v in out.metrics.values())


@pytest.mark.parametrize("weights", (False, True))
def test_each_sum_is_what_loops_give(weights):
    _, _, _, inputs = case(MASKS["a turn"], weights=weights)
    policy, sdpo, tokens = loss_terms(inputs, importance_clip=1.1, epsilon_low=0.1, epsilon_high=0.3)
    columns = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.ref_logprobs, inputs.advantages)
    rows = zip(*(x.tolist() for x in columns))
    by_hand, taught = 0.0, 0.0
    for t, (now, old, ref, advantage) in enumerate(rows):
        weight = inputs.loss_weights[t].item() if weights else 1.0
        ratio = math.exp(now - old)
        if t:
            by_hand -= weight * min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
        if t in MASKS["a turn"]:
            taught += weight * (now - ref) * min(ratio, 1.1)
    assert (policy.item(), sdpo.item(), tokens) == (pytest.approx(by_hand, abs=1e-9), pytest.approx(taught, abs=1e-9), 4)


def test_its_mean_over_the_students_own_tokens_is_the_full_divergence():
    "Value and gradient, by summing over every token of the vocabulary."
    student, teacher, _, _ = case([])
    logits = student[0].detach().clone().requires_grad_()
    total, gradient = 0.0, torch.zeros(VOCAB, dtype=torch.float64)
    for token, p in enumerate(logits.detach().softmax(-1).tolist()):
        now, ref = (x.log_softmax(-1)[token][None] for x in (logits, teacher[0]))
        one = LossInputs(now, now.detach(), ref, torch.zeros(1), torch.ones(1, dtype=torch.bool))
        value = sdpo_loss(one).loss
        total, gradient = total + p * value.item(), gradient + p * torch.autograd.grad(value, logits)[0]
    full = Divergence(1.0)(logits, teacher[0])
    assert total == pytest.approx(full.item(), abs=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(full, logits)[0], rtol=0, atol=1e-9)


def test_no_gradient_reaches_the_teacher():
    _, _, _, inputs = case([3])
    inputs.ref_logprobs.requires_grad_()
    sdpo_loss(inputs).loss.backward()
    assert inputs.ref_logprobs.grad is None or not inputs.ref_logprobs.grad.any()
