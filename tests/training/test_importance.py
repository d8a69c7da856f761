"Channel 2 weighs each token by the ratio to the policy that sampled it, capped, in its sum and in the trainer."
from types import SimpleNamespace

import pytest
import torch
from kept_trainer import Compared, ComparedSteps, trained

from composer_replication.losses.channels import sdpo_sum
from composer_replication.losses.chunked import TokenTerms


def test_a_sum_weighs_each_token_by_its_capped_ratio():
    divergence = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    student, old = torch.log(torch.tensor([0.5, 0.2, 0.9])), torch.log(torch.tensor([0.25, 0.4, 0.1]))  # ratios 2, 0.5 and 9
    places = torch.tensor([[0, 3], [1, 1], [1, 2]])
    batch = SimpleNamespace(input_ids=torch.zeros(2, 5), sdpo_student=places, sdpo_labels=torch.zeros(3), sites=2)
    terms = TokenTerms(divergence, student, student)
    for clip, weights, clipped in ((3.0, [2.0, 0.5, 3.0], 1), (1.5, [1.5, 0.5, 1.5], 2), (None, [1.0, 1.0, 1.0], 0)):
        part = sdpo_sum(terms, batch, old, clip)
        torch.testing.assert_close(part.total, (divergence.detach() * torch.tensor(weights)).sum())
        torch.testing.assert_close(part.by_row, torch.tensor([weights[0], 2 * weights[1] + 4 * weights[2]]))
        torch.testing.assert_close(torch.autograd.grad(part.total, divergence)[0], torch.tensor(weights))
        assert part.stats["clipped"] == clipped
    assert sdpo_sum(terms, batch, None, 3.0).total.item() == 7.0  # the policy has sampled these tokens as it is


class WeighedSteps(ComparedSteps):
    "Keeps for the trainer the log-probabilities of hinted turns' tokens when they were sampled."

    def _total(self, part, terms):
        if part.sites:
            t, batch = self.trainer, part.batch
            row, place = batch.sdpo_student.T
            old = part.inputs["sampling_per_token_logps"][row, place + 1 - part.inputs["prompt_ids"].shape[1]]
            t.sampled = [*getattr(t, "sampled", []), (batch.sdpo_labels, old)]
        return super()._total(part, terms)


class Weighed(Compared):
    steps_kind = WeighedSteps


def test_the_second_step_on_a_generation_is_weighed_by_its_ratios(tmp_path):
    trainer = trained(tmp_path, kind=Weighed, alpha_sdpo=1.0, teacher="frozen", max_steps=2, num_iterations=2,
                      sdpo_support="full", sdpo_top_k=None, sdpo_beta=1.0, sdpo_importance_clip=1.2, learning_rate=0.5,
                      max_completion_length=96)
    ratios = []
    for (student, teacher, total), (labels, old) in zip(trainer.passes, trainer.sampled):
        s, t = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
        ratio = (s.gather(1, labels[:, None])[:, 0] - old).exp()
        kl = (s.exp() * (s - t)).sum(-1)
        assert total == pytest.approx((kl * ratio.clamp(max=1.2)).sum().item(), rel=1e-3, abs=1e-4)
        ratios.append(ratio)
    first, second = ratios
    assert (first - 1).abs().max() < 1e-3 and (second > 1.2).any() and (second < 0.9).any()
