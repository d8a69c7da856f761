"""DPO and SimPO against TRL, closed forms and finite differences."""
import math
import os
from types import SimpleNamespace

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.cpo import CPOTrainer

from composer_replication.losses.preference import dpo_loss, simpo_loss


def logps(n, seed):
    return -torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 30


LENGTHS = torch.tensor([3, 17, 9, 1]), torch.tensor([5, 2, 9, 40])


def trl_loss(chosen, rejected, beta, loss_type, gamma=0.0):
    "TRL's `cpo_loss`, whose sigmoid form on log-ratios is DPO's."
    trainer = SimpleNamespace(alpha=0.0, beta=beta, loss_type=loss_type, simpo_gamma=gamma, label_smoothing=0.0,
                              accelerator=SimpleNamespace(device="cpu"))
    losses, chosen_rewards, rejected_rewards = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    return losses.mean(), chosen_rewards, rejected_rewards


@pytest.mark.parametrize("beta", (0.1, 1.0, 5.0))
def test_dpo_is_trl(beta):
    chosen, rejected, ref_chosen, ref_rejected = (logps(4, seed) for seed in range(4))
    ours = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    loss, chosen_rewards, rejected_rewards = trl_loss(chosen - ref_chosen, rejected - ref_rejected, beta, "sigmoid")
    torch.testing.assert_close(ours.loss, loss)
    torch.testing.assert_close(ours.chosen_rewards, chosen_rewards)
    torch.testing.assert_close(ours.rejected_rewards, rejected_rewards)
    assert ours.accuracy == sum(c > r for c, r in zip(chosen_rewards, rejected_rewards)) / 4


@pytest.mark.parametrize("beta, gamma", ((2.0, 1.0), (2.5, 0.3), (1.0, 0.0)))
def test_simpo_is_trl(beta, gamma):
    chosen, rejected = logps(4, 0), logps(4, 1)
    ours = simpo_loss(chosen, rejected, *LENGTHS, beta=beta, gamma=gamma)
    loss, chosen_rewards, rejected_rewards = trl_loss(chosen / LENGTHS[0], rejected / LENGTHS[1], beta, "simpo", gamma)
    torch.testing.assert_close(ours.loss, loss)
    torch.testing.assert_close(ours.chosen_rewards, chosen_rewards)
    torch.testing.assert_close(ours.margins, chosen_rewards - rejected_rewards)


def test_closed_forms():
    one = lambda *values: (torch.tensor([v], dtype=torch.float64) for v in values)
    # margins: chosen gained 2 nats, rejected lost 1: beta 0.5 gives 1.5
    ours = dpo_loss(*one(-3.0, -7.0, -5.0, -6.0), beta=0.5)
    assert ours.loss.item() == pytest.approx(math.log(1 + math.exp(-1.5)))
    assert (ours.chosen_rewards.item(), ours.rejected_rewards.item(), ours.accuracy) == (1.0, -0.5, 1.0)
    # at the reference the gradient pulls the chosen up and the rejected down by beta / 2
    chosen, rejected = (x.requires_grad_() for x in one(-3.0, -4.0))
    dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta=0.3).loss.backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-0.15, 0.15))


def test_gradcheck_and_no_gradient_to_the_reference():
    values = [logps(4, seed).requires_grad_() for seed in range(4)]
    assert torch.autograd.gradcheck(lambda c, r: dpo_loss(c, r, values[2], values[3], 0.4).loss, values[:2])
    assert torch.autograd.gradcheck(lambda c, r: simpo_loss(c, r, *LENGTHS).loss, values[:2])
    dpo_loss(*values).loss.backward()
    assert values[0].grad is not None and values[2].grad is None and values[3].grad is None


def test_no_pairs_is_an_exact_zero_with_a_graph():
    none = torch.zeros(0, requires_grad=True)
    for out in (dpo_loss(none, none, none, none), simpo_loss(none, none, none, none)):
        assert out.loss.item() == 0.0 and out.loss.requires_grad and math.isnan(out.accuracy)


def test_bad_shapes_say_what_to_do():
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(ValueError, match=r"give tensors of shape \(pairs,\)\.$"):
        dpo_loss(two, three, two, two)
    with pytest.raises(ValueError, match=r"give tensors of shape \(pairs,\)\.$"):
        simpo_loss(two[None], two[None], two[None], two[None])
    with pytest.raises(ValueError, match="leave such pairs out"):
        simpo_loss(two, two, two, two)
