"Who learns from which rollout: groups by brute force, gradients by closed form, each option in a real step."
import math
import random

import pytest
import torch
import world
from kept_trainer import made, trained
from played import played_once

from composer_replication.training.groups import equal_groups, failed_groups, route_rows


def drawn(dice, groups=6, size=3):
    return [dice.choice([0.0, 0.0, 1.0, -0.5, math.nan]) for _ in range(groups * size)]


@pytest.mark.parametrize("seed", range(20))
def test_groups_and_routes_by_brute_force(seed):
    dice, size = random.Random(seed), 3
    rewards = drawn(dice, size=size)
    equal, failed = [], []
    for start in range(0, len(rewards), size):
        scored = [r for r in rewards[start:start + size] if r == r]
        equal += [len(set(scored)) <= 1] * size
        failed += [bool(scored) and max(scored) <= 0] * size
    tensor = torch.tensor(rewards)
    assert equal_groups(tensor, size).tolist() == equal and failed_groups(tensor, size).tolist() == failed
    for all_fail in ("policy", "distil"):
        policy, sdpo = route_rows(tensor, size, all_fail)
        apart = [all_fail == "distil" and f for f in failed]
        assert policy.tolist() == [not a for a in apart]
        assert sdpo.tolist() == [(f if all_fail == "distil" else True) and r == r for f, r in zip(failed, rewards)]


# ---- in a real step


class Uneven(world.Files):
    "Half of the tasks pay nothing, whatever is done; the others pay by what is done."

    def reset(self, task_id, **row):
        super().reset(task_id=task_id, **row)
        self.pays, self.letters = int(task_id.split("-")[1]) % 2, 0

    def _count(self, path, exists):
        self.letters += len(path)
        super()._count(path, exists)

    def get_reward(self):
        return (self.earned + self.letters / 100) * self.pays


SHORT = {"max_turns": 2, "max_completion_length": 72, "alpha_sdpo": 1.0, "teacher": "frozen"}


def after(folder, environment=Uneven, rows=4, **changes):
    trainer = played_once(made(folder, environment, rows, **SHORT | changes))
    trainer.train()
    return trainer


def close(a, b, scale=1.0):
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y * scale, rtol=1e-3, atol=1e-6)


def test_failed_groups_are_for_channel_2_alone(tmp_path):
    "Two runs of one channel each, on the same rollouts: their gradients add up to the routed one."
    routed = after(tmp_path / "routed", all_fail="distil")
    best = torch.tensor([r.reward for r in routed.rollouts]).view(-1, 4).amax(1)
    failed = best.le(0).repeat_interleave(4).nonzero()[:, 0].tolist()
    rows = routed.batch["composer_rows"]
    assert failed and all((i in failed) or not any(b.kind == "hint" for b in rows[i].tree.branches) for i in range(16))
    assert any(b.kind == "hint" for i in failed for b in rows[i].tree.branches)
    policy = after(tmp_path / "policy", alpha_sdpo=0.0)  # its advantages are zero in failed groups, whose rewards are equal
    distil = after(tmp_path / "sdpo", all_fail="distil", policy_start=1)
    assert any(g.abs().max() > 1e-5 for g in distil.grads) and any(g.abs().max() > 1e-5 for g in policy.grads)
    close(routed.grads, [a + b for a, b in zip(policy.grads, distil.grads)])


def test_a_schedule_distils_first_and_then_takes_the_policy_alone(tmp_path):
    trainer = trained(tmp_path, **SHORT | {"sdpo_steps": 1, "policy_start": 1, "max_steps": 2})
    logged = [h for h in trainer.state.log_history if "sdpo/loss" in h]
    assert logged[0]["sdpo/sites"] > 0 and logged[1]["sdpo/sites"] == 0 and logged[1]["sdpo/loss"] == 0
    assert logged[0]["loss"] == pytest.approx(logged[0]["sdpo/loss"], rel=1e-4)
    assert logged[1]["loss"] == pytest.approx(logged[1]["policy/loss"], abs=1e-7)
