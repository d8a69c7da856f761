"Who learns from which rollout: groups by brute force, gradients by closed form, each option in a real step."
import math
import random

import pytest
import torch
import world
from kept_trainer import made, trained
from played import played_once

from composer_replication.losses.channels import vote_sum
from composer_replication.training.groups import equal_groups, failed_groups, route_rows
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.pack import pack_trees


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


def test_votes_are_the_rewards_of_the_turns():
    "Value by hand, gradient by finite differences in float64."
    trees = [Tree("a", tuple(range(1, 9)), (Span(1, 2, 4), Span(3, 5, 8)), (
        Branch("chosen", 1, 1, (2, 11, 12), 1, 0, share=0.75), Branch("rejected", 1, 1, (2, 3, 4), 1, 0, share=0.25),
        Branch("chosen", 3, 4, (5, 6, 7, 8), 1, 1, share=0.6), Branch("rejected", 3, 4, (5, 9), 1, 1, share=0.4))),
        Tree("b", (1, 2, 3, 4), (Span(1, 2, 4),), (
            Branch("chosen", 1, 1, (2, 7), 1, 0), Branch("rejected", 1, 1, (2, 3, 4), 1, 0)))]
    batch = pack_trees(trees, 0)
    logps = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([2, 2, 3, 1, 1, 2])
    out = vote_sum(logps, lengths, batch)
    wanted = -(0.25 - 0.5) * (-2.0 / 2) - (0.6 - 0.5) * (-3.0 / 3)  # the trunk's own answers that were voted on
    assert out.total.item() == pytest.approx(wanted) and out.by_row.tolist() == pytest.approx([wanted, 0])
    assert out.stats["voted"] == 2
    out.total.backward()
    for i in range(6):
        sides = []
        for sign in (1, -1):
            moved = logps.detach().clone()
            moved[i] += sign * 1e-4
            sides.append(vote_sum(moved, lengths, batch).total.item())
        assert logps.grad[i].item() == pytest.approx((sides[0] - sides[1]) / 2e-4, abs=1e-6)


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


def test_a_sibling_of_the_group_gives_the_hint(tmp_path):
    plain, group = (after(tmp_path / str(on), environment=world.Files, group_hints=on, num_generations=16,
                          max_turns=3, max_completion_length=160) for on in (False, True))
    layers = [{b.layer for r in t.batch["composer_rows"] for b in r.tree.branches if b.kind == "hint"} for t in (plain, group)]
    assert "sibling" not in layers[0] and "sibling" in layers[1]


def test_votes_need_pairs_that_have_some(tmp_path):
    with pytest.raises(ValueError, match="no pair has any"):
        made(tmp_path, beta_replay=1.0, replay_form="prm")
