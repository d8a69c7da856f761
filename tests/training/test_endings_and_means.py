"Endings decide what was cut off, a machine's delay teaches nothing, and a step's means are over its own tokens and rows."

import copy
from dataclasses import replace

import pytest
import torch
import world
from kept_trainer import Kept, made, trained

from composer_replication.envs.toy.model import embedded_model
from composer_replication.replay.pairs import group_pairs
from composer_replication.rollout.types import Ending
from composer_replication.training.batches import mask_rows
from composer_replication.training.trainer import ComposerReplicationTrainer

# ---- endings


LIMITS = {
    "tokens": {"max_turns": 8, "max_completion_length": 40, "max_turn_tokens": 38},
    "turns": {"max_turns": 1, "max_completion_length": 96},
    "both": {"max_turns": 2, "max_completion_length": 60},
}


@pytest.mark.parametrize("limit, objective", [("tokens", "dr_grpo"), ("turns", "dapo"), ("both", "dapo")])
def test_endings_decide_what_is_cut_off(limit, objective, tmp_path):
    trainer = trained(tmp_path, loss_type=objective, mask_truncated_completions=True, **LIMITS[limit])
    endings, batch = [r.ending for r in trainer.rollouts], trainer.batch
    ended = [e is Ending.DONE for e in endings]
    assert {Ending.TOKENS, Ending.TURNS} & set(endings) and any(ended)
    assert batch["completion_mask"].any(1).tolist() == ended
    assert batch["num_items_in_batch"] == sum(sum(r.completion_mask) for r in trainer.rollouts if r.ending is Ending.DONE)
    log = trainer.state.log_history[0]
    assert log["completions/clipped_ratio"] == pytest.approx(log.get("rollout/tokens", 0) + log.get("rollout/turns", 0))
    lengths = [sum(r.completion_mask) for r in trainer.rollouts if r.ending is Ending.DONE]
    assert log["completions/mean_terminated_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert log["completions/min_terminated_length"] == min(lengths) and log["completions/max_terminated_length"] == max(lengths)


def test_what_is_masked_has_no_ratio():
    "An old log-probability of a masked token would give an infinite ratio, and infinity times zero is no number."
    inputs = {
        "completion_mask": torch.ones(2, 3, dtype=torch.long),
        "tool_mask": torch.ones(2, 3, dtype=torch.long),
        "old_per_token_logps": torch.full((2, 3), -200.0),
        "advantages": torch.ones(2),
    }
    mask_rows(inputs, torch.tensor([True, False]))
    assert inputs["completion_mask"].tolist() == inputs["tool_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert inputs["old_per_token_logps"].tolist() == [[-200.0] * 3, [0.0] * 3] and inputs["advantages"].tolist() == [1.0, 1.0]


# ---- unscored


class Silent(world.Files):
    "A reward that cannot be had for every second episode."

    number = 0

    def reset(self, files, **row):
        super().reset(files)
        Silent.number += 1
        self.scored = Silent.number % 2

    def get_reward(self):
        return self.earned if self.scored else None


@pytest.mark.parametrize("why, changes", [
    ("timeout", {}), ("error", {"all_fail": "distil"}), ("reward", {})])
def test_an_unscored_episode_teaches_nothing(why, changes, tmp_path, monkeypatch):
    "Every second episode: its calls, or its reward, were given up."

    def play(self, rows, names):
        rollouts = ComposerReplicationTrainer.play(self, rows, names)
        return [replace(r, ending=Ending(why), reward=None) if i % 2 and why != "reward" else r for i, r in enumerate(rollouts)]

    monkeypatch.setattr(Kept, "play", play, raising=False)
    Silent.number = 0
    trainer = trained(
        tmp_path, Silent if why == "reward" else world.Files, alpha_sdpo=1.0, beta_replay=0.5, target_turns="all", **changes
    )
    rows = trainer.batch["composer_rows"]
    unscored = [row for row in rows if row.trace.reward is None]
    assert unscored and len(unscored) < len(rows) and any(b.kind == "hint" for row in rows for b in row.tree.branches)
    assert not any(row.tree.branches for row in unscored)


def test_an_episode_whose_call_was_late_is_scored(tmp_path, monkeypatch):
    def play(self, rows, names):
        rollouts = ComposerReplicationTrainer.play(self, rows, names)
        late = {"ending": Ending.TIMEOUT, "reward": 0.0}
        return [replace(r, **late if i % 2 else {"reward": 1.0}) for i, r in enumerate(rollouts)]

    monkeypatch.setattr(Kept, "play", play, raising=False)
    trainer = trained(tmp_path, world.Files)
    assert trainer.generation.rewards == [1.0, 0.0] * 8 and (trainer.batch["advantages"][1::2] < 0).all()


def test_no_pair_takes_an_answer_of_an_unscored_episode(tmp_path, monkeypatch):
    "Whatever source makes the pairs sees scored episodes alone."
    Silent.number, seen = 0, []
    monkeypatch.setattr(Silent, "get_reward", lambda self: self.earned + self.scored if self.scored else None)
    trainer = trained(tmp_path, Silent, beta_replay=0.5)
    trainer.pair_source = lambda traces: seen.extend(traces) or group_pairs(traces)
    trees = trainer._trees({"completion_mask": torch.ones(16, 1)})
    assert seen and all(t.reward is not None for t in seen) and len(trees) == 16


# ---- means of a step


@pytest.fixture
def one_group_differs(monkeypatch):
    "The first group's rewards differ, those of the others are equal."

    def play(self, rows, names):
        rollouts = ComposerReplicationTrainer.play(self, rows, names)
        return [replace(r, ending=Ending.DONE, reward=i / 2 if i < 4 else 1.0) for i, r in enumerate(rollouts)]

    monkeypatch.setattr(Kept, "play", play, raising=False)


@pytest.mark.parametrize("changes", [
    {"kl_coef": 0.1, "kl_estimator": "k3"}, {}, {"alpha_sdpo": 1.0, "mask_truncated_completions": True},
    {"beta": 0.1, "loss_type": "cispo"}, {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "mask_truncated_completions": True}])
def test_means_do_not_depend_on_the_rows_of_a_pass(changes, one_group_differs, tmp_path):
    "The second step on one generation, so that ratios are not 1."
    logs, model = [], embedded_model("mild")
    model.save_pretrained(tmp_path / "base")
    model.config._name_or_path = str(tmp_path / "base")  # by which TRL loads its reference where beta is set
    for rows, passes in ((8, 1), (1, 8)):
        trainer = trained(tmp_path / f"{rows}", rows=4, model=copy.deepcopy(model), max_steps=2, learning_rate=0.5,
                          max_completion_length=48, num_iterations=2, max_turns=2, per_device_train_batch_size=rows,
                          gradient_accumulation_steps=passes, steps_per_generation=passes, **changes)
        logs.append(trainer.state.log_history[1])
    names = [n for n in logs[0] if n in ("entropy", "kl", "kl/token", "cispo_clip_ratio") or n.startswith("clip_ratio")]
    assert "entropy" in names and len(names) > 1
    for name in names:
        assert logs[1][name] == pytest.approx(logs[0][name], rel=2e-3, abs=1e-5), name
    if "clip_ratio/region_mean" in names:
        assert logs[0]["clip_ratio/region_mean"] > 0 and logs[0]["clip_ratio/high_max"] >= logs[0]["clip_ratio/high_mean"]


def test_an_evaluation_has_one_mean_too(tmp_path):
    trainer, metrics = made(tmp_path), {"entropy": []}
    trainer.model.eval()
    for mean, tokens in ((1.0, 1), (2.0, 3)):
        with trainer.means["eval"].of_pass(metrics, tokens):
            metrics["entropy"].append(mean)
    trainer._metrics["eval"] = metrics
    trainer.log({"eval_loss": 0.0})
    assert trainer.state.log_history[-1]["eval_entropy"] == 1.75


# ---- the KL joins channel 1


def test_a_kl_in_the_loss_waits_for_the_policy(tmp_path):
    "Before policy_start the gradient is channel 2's alone; the KL is measured all the same, and is 0 at the start."
    shared = dict(alpha_sdpo=1.0, policy_start=2, max_steps=3, teacher="frozen", kl_estimator="k3", learning_rate=0.2)
    plain, with_kl = (trained(tmp_path / str(coef), world.Files, kl_coef=coef, **shared) for coef in (0.0, 5.0))
    logs = [h for h in with_kl.state.log_history if "kl/token" in h]
    assert abs(logs[0]["kl/token"]) < 1e-6 and abs(logs[2]["kl/token"]) > 1e-4
    same = [all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*grads)) for grads in zip(plain.steps, with_kl.steps)]
    assert same == [True, True, False]


# ---- the weight of channel 2


@pytest.mark.parametrize("loss_type", ["dr_grpo", "luspo"])
def test_the_effective_weight_is_what_the_policy_term_lacks(loss_type, one_group_differs, tmp_path):
    "The gradient of the policy objective against that of a mean over tokens, of rows of one length."
    sequence = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    shared = dict(rows=2, max_turns=1, max_completion_length=40, max_turn_tokens=14, per_device_train_batch_size=8)
    mean = trained(tmp_path / "mean", loss_type="dapo", **shared)
    found = trained(tmp_path / "found", loss_type=loss_type, **shared, **sequence)
    lengths = {sum(r.completion_mask) for r in found.rollouts}
    assert len(lengths) == 1 and any(g.abs().max() > 1e-5 for g in mean.grads)
    found.args.alpha_sdpo = 3.0
    scale = 3.0 / found.args.effective_alpha(lengths.pop())
    for a, b in zip(found.grads, mean.grads):
        torch.testing.assert_close(a, b * scale, rtol=2e-3, atol=1e-6)
