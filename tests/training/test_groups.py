"Who learns from which rollout: groups by brute force, gradients by closed form, each option in a real step."
import copy
import math
import random

import pytest
import torch
import world
from datasets import Dataset
from played import played_once
from transformers.trainer_callback import PrinterCallback

from composer_replication.envs.toy.model import embedded_model
from composer_replication.hints.layers import default_composite
from composer_replication.losses.channels import vote_sum
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.groups import equal_groups, failed_groups, route_rows
from composer_replication.training.setup import group_pairs
from composer_replication.training.trainer import ComposerReplicationTrainer
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
    for skip in (False, True):
        for distil in (False, True):
            route = route_rows(tensor, size, "skip" if skip else "keep", "distil" if distil else "policy")
            for i in range(len(rewards)):
                out = skip and equal[i]
                assert route.policy[i] == (not out and not (distil and failed[i]))
                assert route.sdpo[i] == ((failed[i] if distil else not out) and rewards[i] == rewards[i])
                assert route.counted[i] == (not out)


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


class Kept(ComposerReplicationTrainer):
    "Keeps the batch as generated, and the gradient of the first step."

    def _generate_and_score_completions(self, inputs):
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch

    def training_step(self, *args, **kwargs):
        out = super().training_step(*args, **kwargs)
        self.grads = [p.grad.clone() for p in self.student.parameters()]
        return out


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


def make(folder, environment=Uneven, rows=4, model="mild", **changes):
    base = dict(report_to="none", bf16=False, use_cpu=True, per_device_train_batch_size=16, num_generations=4, seed=3,
                max_turns=2, max_completion_length=72, max_steps=1, logging_steps=1, learning_rate=1e-3, save_strategy="no",
                optim="sgd",
                gradient_checkpointing=False, disable_tqdm=True, max_grad_norm=0.0, teacher_check="off", sample_every=0,
                tool_timeout=3600)  # the machine may be busy
    args = ComposerReplicationConfig(str(folder), **(base | changes))
    extra = {"pair_source": group_pairs} if args.beta_replay else {}
    trainer = Kept(embedded_model(model), None, args, Dataset.from_list(world.rows(rows)), processing_class=world.tokenizer(),
                   environment_factory=environment, hint_source=default_composite() if args.alpha_sdpo else None, **extra)
    trainer.remove_callback(PrinterCallback)
    return trainer if environment is Again else played_once(trainer)


def after(folder, **changes):
    trainer = make(folder, **changes)
    trainer.train()
    return trainer


def close(a, b, scale=1.0):
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y * scale, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "dapo"])
def test_skipped_groups_leave_a_mean_over_the_others(loss_type, tmp_path):
    "Equal groups have no gradient in the policy objective; without them a mean is larger by the rows or tokens they took up."
    plain = after(tmp_path / "keep", alpha_sdpo=0.0, loss_type=loss_type)
    skipped = after(tmp_path / "skip", alpha_sdpo=0.0, loss_type=loss_type, equal_rewards="skip")
    rewards = torch.tensor([r.reward for r in skipped.rollouts])
    equal = rewards.view(-1, 4).std(1).eq(0).repeat_interleave(4)
    assert 0 < equal.sum() < 16 and [r.reward for r in skipped.rollouts] == [r.reward for r in plain.rollouts]
    tokens = torch.tensor([sum(r.completion_mask) for r in plain.rollouts])
    ratio = 16 / (~equal).sum() if loss_type == "dr_grpo" else tokens.sum() / tokens[~equal].sum()
    assert any(g.abs().max() > 1e-5 for g in plain.grads)
    close(skipped.grads, plain.grads, ratio.item())
    assert not skipped.batch["completion_mask"][equal].any()


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
    trainer = make(tmp_path / "s", world.Files, 8, sdpo_steps=1, policy_start=1, max_steps=2, teacher="frozen")
    seen, inner = [], trainer.training_step

    def step(*args, **kwargs):
        before = copy.deepcopy(trainer.student.state_dict())
        out = inner(*args, **kwargs)
        seen.append((before, [p.grad.clone() for p in trainer.student.parameters()], dict(trainer.batch)))
        return out

    trainer.training_step = step
    trainer.train()
    logged = [h for h in trainer.state.log_history if "sdpo/loss" in h]
    assert logged[0]["sdpo/sites"] > 0 and logged[1]["sdpo/sites"] == 0 and logged[1]["sdpo/loss"] == 0
    assert logged[0]["loss"] == pytest.approx(logged[0]["sdpo/loss"], rel=1e-4)
    assert logged[1]["loss"] == pytest.approx(logged[1]["policy/loss"], abs=1e-7)


class Again(world.Files):
    "Pays the same to all the first time."

    plays = 0

    def reset(self, **row):
        Again.plays += 1
        self.later = Again.plays > 16
        super().reset(**row)

    def get_reward(self):
        return self.earned + Again.plays % 7 if self.later else 0.0


def test_equal_groups_are_played_again(tmp_path):
    Again.plays = 0
    trainer = after(tmp_path, environment=Again, alpha_sdpo=0.0, equal_rewards="resample")
    assert all("-again" in r.trace.trace_id for r in trainer.rollouts)
    assert [r.trace.task_id for r in trainer.rollouts] == [row["task_id"] for row in trainer.generation.rows]
    assert trainer.batch["advantages"].view(-1, 4).std(1).gt(0).any()
    logged = next(h["rollout/resampled"] for h in trainer.state.log_history if "rollout/resampled" in h)
    assert 1 <= logged <= 2
    kept = after(tmp_path / "kept", environment=world.Files, alpha_sdpo=0.0, equal_rewards="resample", resample_tries=1)
    once = {r.trace.trace_id.split("-again")[0] for r in kept.rollouts}
    plain = after(tmp_path / "plain", environment=world.Files, alpha_sdpo=0.0)
    groups = torch.tensor([r.reward for r in plain.rollouts]).view(-1, 4)
    for i, (a, b) in enumerate(zip(kept.rollouts, plain.rollouts)):  # a group that was not equal is as it was
        if groups[i // 4].std() > 0:
            assert a == b or (a.trace, a.reward) == (b.trace, b.reward)
        else:
            assert "-again0" in a.trace.trace_id
    assert once


def test_a_sibling_of_the_group_gives_the_hint(tmp_path):
    plain, group = (after(tmp_path / str(on), environment=world.Files, group_hints=on, num_generations=16,
                          max_turns=3, max_completion_length=160) for on in (False, True))
    layers = [{b.layer for r in t.batch["composer_rows"] for b in r.tree.branches if b.kind == "hint"} for t in (plain, group)]
    assert "sibling" not in layers[0] and "sibling" in layers[1]


def test_options_that_cannot_work_together(tmp_path):
    with pytest.raises(ValueError, match="looks at the environment's reward alone"):
        ComposerReplicationTrainer(
            embedded_model(), [lambda **kw: [0.0]], ComposerReplicationConfig(
                str(tmp_path), report_to="none", bf16=False, use_cpu=True, equal_rewards="resample", alpha_sdpo=0.0),
            Dataset.from_list(world.rows(8)), processing_class=world.tokenizer(), environment_factory=world.Files)
    with pytest.raises(ValueError, match="no pair has any"):
        make(tmp_path, beta_replay=1.0, replay_form="prm")
