"TAID moves with the trainer's steps and is its closed form there; without a schedule: tests/losses/test_registered.py."

import pytest
import torch
from kept_trainer import Compared, trained

from composer_replication.envs.toy.model import embedded_model
from composer_replication.losses.distill import TAIDScheduler
from composer_replication.losses.divergences import DIVERGENCES
from composer_replication.training.config import ComposerReplicationConfig


def test_taid_in_the_trainer_is_the_closed_form_at_each_step(tmp_path):
    "KL of softmax((1 - t) student + t teacher) from the student; t is the scheduler's, one step after each optimizer step."
    trainer = trained(tmp_path, model=embedded_model(), kind=Compared, alpha_sdpo=1.0, teacher="frozen", max_steps=2,
                      per_device_train_batch_size=8, max_completion_length=128, sdpo_importance_clip=None,
                      sdpo_divergence="taid", sdpo_support="student_top_k")
    logged = [h for h in trainer.state.log_history if "sdpo/loss" in h]
    schedule = TAIDScheduler(2)
    assert len(trainer.passes) == len(logged) == 2
    for (student, teacher, total), step in zip(trainer.passes, logged):
        assert step["sdpo/t"] == pytest.approx(schedule.t)
        z = student.double()
        p, s = ((1 - schedule.t) * z + schedule.t * teacher.double()).softmax(-1), z.softmax(-1)
        ids = z.topk(20).indices
        p, s = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, s))
        by_hand = (p * (p / s).log()).sum().item()
        assert total == pytest.approx(by_hand, rel=1e-3, abs=1e-5) and by_hand > 0.01
        schedule.step(total / len(student))
    assert (logged[0]["sdpo/t"], trainer.schedule.steps) == (0.4, 2) and logged[1]["sdpo/t"] >= 0.7


def test_only_a_channel_that_is_on_has_a_schedule(tmp_path):
    assert [name for name, known in DIVERGENCES.items() if known.scheduled] == ["taid"]
    off = ComposerReplicationConfig(str(tmp_path), report_to="none", bf16=False, alpha_sdpo=0.0, sdpo_divergence="taid")
    assert off.schedule(5) is None
