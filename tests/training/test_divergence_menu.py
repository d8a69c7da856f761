"TAID moves with the trainer's steps; both divergences of the menu are their closed forms there."

import pytest
import torch
from kept_trainer import Compared, made
from played import played_once

from composer_replication.envs.toy.model import embedded_model
from composer_replication.losses.distill import TAIDScheduler
from composer_replication.losses.divergences import SCHEDULED
from composer_replication.training.config import ComposerReplicationConfig


def train(folder, steps=1, **changes):
    trainer = played_once(made(folder, model=embedded_model(), kind=Compared, alpha_sdpo=1.0, teacher="frozen", max_steps=steps,
                               per_device_train_batch_size=8, max_completion_length=128, sdpo_importance_clip=None, **changes))
    trainer.train()
    return trainer, [h for h in trainer.state.log_history if "sdpo/loss" in h]


@pytest.mark.parametrize("support", ("full", "student_top_k"))
def test_taid_in_the_trainer_is_the_closed_form_at_each_step(support, tmp_path):
    "KL of softmax((1 - t) student + t teacher) from the student; t is the scheduler's, one step after each optimizer step."
    trainer, logged = train(tmp_path, 2, sdpo_divergence="taid", sdpo_support=support)
    schedule = TAIDScheduler(2)
    assert len(trainer.passes) == len(logged) == 2
    for (student, teacher, total), step in zip(trainer.passes, logged):
        assert step["sdpo/t"] == pytest.approx(schedule.t)
        z = student.double()
        p, s = ((1 - schedule.t) * z + schedule.t * teacher.double()).softmax(-1), z.softmax(-1)
        if support == "student_top_k":
            ids = z.topk(20).indices
            p, s = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, s))
        by_hand = (p * (p / s).log()).sum().item()
        assert total == pytest.approx(by_hand, rel=1e-3, abs=1e-5) and by_hand > 0.01
        schedule.step(total / len(student))
    assert (logged[0]["sdpo/t"], trainer.schedule.steps) == (0.4, 2) and logged[1]["sdpo/t"] >= 0.7


def test_the_entropy_gate_in_the_trainer_is_the_closed_form(tmp_path):
    trainer, _ = train(tmp_path, sdpo_divergence="entropy_aware", sdpo_support="full")
    (student, teacher, total), = trainer.passes
    s, t = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    gate = -(t.exp() * t).sum(-1) / torch.tensor(float(s.shape[-1])).log()
    by_hand = gate * (t.exp() * (t - s)).sum(-1) + (1 - gate) * (s.exp() * (s - t)).sum(-1)
    assert total == pytest.approx(by_hand.sum().item(), rel=1e-3, abs=1e-4)


def test_only_a_channel_that_is_on_has_a_schedule(tmp_path):
    assert SCHEDULED == {"taid"}
    off = ComposerReplicationConfig(str(tmp_path), report_to="none", bf16=False, alpha_sdpo=0.0, sdpo_divergence="taid")
    assert off.schedule(5) is None
