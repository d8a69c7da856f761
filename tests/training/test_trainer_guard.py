"The guard around real training steps: the KL stops a run, a watched or resumed run is the same. A hack: test_planted_hack."

import pytest
import torch
import world
from kept_trainer import made

from composer_replication.envs.toy.model import embedded_model
from composer_replication.training.guard import HeldOutGuard
from composer_replication.training.trainer import ComposerReplicationTrainer


def brevity(completion_ids, **kwargs):
    return [-len(ids) / 50 for ids in completion_ids]


def make(folder, guard, held_out, **changes):
    base = dict(per_device_train_batch_size=4, max_turns=2, learning_rate=1e-4, seed=5, reward_weights=[1.0, 0.0],
                optim="adamw_torch", max_grad_norm=1.0)
    given = dict(reward_funcs=[brevity], guard=guard, held_out_rows=held_out)
    return made(folder, world.Files, 16, embedded_model(), ComposerReplicationTrainer, given, **base | changes)


def test_the_kl_to_the_start_stops_at_once(tmp_path):
    guard = HeldOutGuard(min_steps=50, kl_hard_stop=0.02)
    trainer = make(tmp_path, guard, world.rows(4, seed="held out"), guard_steps=1, max_steps=12, learning_rate=2e-4)
    trainer.train()
    kls = [h["guard/kl"] for h in trainer.state.log_history if "guard/kl" in h]
    assert guard.should_halt and trainer.state.global_step < 12
    assert all(k <= 0.02 for k in kls[:-1]) and kls[-1] > 0.02


def test_a_watched_run_is_the_same_run_and_a_resumed_guard_goes_on_as_if_nothing_had_been(tmp_path):
    "Evaluation draws its own random numbers."
    def run(name, guard, resume=None):
        own = dict(max_steps=2, guard_steps=1, save_strategy="steps", save_steps=1)
        trainer = make(tmp_path / name, guard, world.rows(2, seed="held out"), **own)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, [{k: v for k, v in h.items() if k.startswith("guard/")} for h in trainer.state.log_history]

    guards = [HeldOutGuard(min_steps=2, decline_patience=3, ema_alpha=0.5, kl_hard_stop=9.0) for _ in range(2)]
    plain, _ = run("plain", None)
    whole, readings = run("watched", guards[0])
    again, read_again = run("watched", guards[1], tmp_path / "watched" / "checkpoint-1")
    losses = [[h["loss"] for h in trainer.state.log_history if "loss" in h] for trainer in (plain, whole, again)]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2
    assert readings == read_again and sum(map(bool, readings)) == 2 and guards[0].state_dict() == guards[1].state_dict()
    for other in (plain, again):
        assert all(torch.equal(a, b) for a, b in zip(whole.student.parameters(), other.student.parameters()))


def test_held_out_tasks_must_not_be_trained_on(tmp_path):
    with pytest.raises(ValueError, match="held"):
        make(tmp_path, HeldOutGuard(), held_out=world.rows(4))
    with pytest.raises(ValueError, match="nothing to measure on; pass held_out_rows"):
        make(tmp_path, HeldOutGuard(), held_out=[])
