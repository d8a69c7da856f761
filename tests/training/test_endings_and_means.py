"Endings decide what was cut off, a machine's delay teaches nothing, and a step's means are over its own tokens and rows."

import math
from dataclasses import replace

import pytest
import torch
import world
from datasets import Dataset
from trainer_script import BASE
from transformers.trainer_callback import PrinterCallback

from composer_replication.envs.toy.model import embedded_model
from composer_replication.hints.layers import default_composite
from composer_replication.rollout.types import Ending
from composer_replication.training.batches import mask_rows, mean_over_counted
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.setup import group_pairs
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.training.window import PassMeans


class Kept(ComposerReplicationTrainer):
    "Keeps generations as they were made, and the gradient of each optimizer step."

    def _generate_and_score_completions(self, inputs):
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch

    def training_step(self, *args, **kwargs):
        out = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.grads = [*getattr(self, "grads", []), [p.grad.clone() for p in self.student.parameters()]]
        return out


def train(folder, environment=world.Files, rows=8, **changes):
    settings = (
        BASE
        | {
            "save_strategy": "no",
            "max_steps": 1,
            "alpha_sdpo": 0.0,
            "sample_every": 0,
            "max_grad_norm": 0.0,
            "optim": "sgd",
            "per_device_train_batch_size": 16,
            "lr_scheduler_type": "constant",
        }
        | changes
    )
    args = ComposerReplicationConfig(str(folder), **settings)
    pairs = {"pair_source": group_pairs} if args.beta_replay else {}
    trainer = Kept(
        embedded_model("mild"),
        args=args,
        processing_class=world.tokenizer(),
        train_dataset=Dataset.from_list(world.rows(rows)),
        environment_factory=environment,
        hint_source=default_composite() if args.alpha_sdpo else None,
        **pairs,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


# ---- endings


LIMITS = {
    "tokens": {"max_turns": 8, "max_completion_length": 40, "max_turn_tokens": 38},
    "turns": {"max_turns": 1, "max_completion_length": 96},
    "both": {"max_turns": 2, "max_completion_length": 60},
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("objective", ["dr_grpo", "dapo"])
def test_endings_decide_what_is_cut_off(limit, objective, tmp_path):
    trainer = train(tmp_path, loss_type=objective, mask_truncated_completions=True, **LIMITS[limit])
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


@pytest.mark.parametrize("why", ["timeout", "error", "reward"])
@pytest.mark.parametrize("changes", [{}, {"all_fail": "distil"}, {"group_hints": True}])
def test_an_unscored_episode_teaches_nothing(why, changes, tmp_path, monkeypatch):
    "Every second episode: its calls, or its reward, were given up."

    def play(self, rows, names):
        rollouts = ComposerReplicationTrainer.play(self, rows, names)
        return [replace(r, ending=Ending(why), reward=0.0) if i % 2 and why != "reward" else r for i, r in enumerate(rollouts)]

    monkeypatch.setattr(Kept, "play", play, raising=False)
    Silent.number = 0
    trainer = train(
        tmp_path, Silent if why == "reward" else world.Files, alpha_sdpo=1.0, beta_replay=0.5, target_turns="all", **changes
    )
    rows = trainer.batch["composer_rows"]
    unscored = [row for row in rows if row.trace.reward is None]
    assert unscored and len(unscored) < len(rows) and any(b.kind == "hint" for row in rows for b in row.tree.branches)
    assert not any(row.tree.branches for row in unscored)


def test_no_pair_takes_an_answer_of_an_unscored_episode(tmp_path, monkeypatch):
    "Whatever source makes the pairs sees scored episodes alone."
    Silent.number, seen = 0, []
    monkeypatch.setattr(Silent, "get_reward", lambda self: self.earned + self.scored if self.scored else None)
    trainer = train(tmp_path, Silent, beta_replay=0.5)
    trainer.pair_source = lambda traces: seen.extend(traces) or group_pairs(traces)
    trees = trainer._trees({"completion_mask": torch.ones(16, 1)})
    assert seen and all(t.reward is not None for t in seen) and len(trees) == 16


# ---- means of a step


def row(counted, tokens, width=6, advantage=1.0):
    return {
        "counted": torch.tensor(counted),
        "advantages": torch.full((len(counted),), advantage),
        "completion_mask": torch.tensor([[1] * n + [0] * (width - n) for n in tokens]),
        "num_items_in_batch": torch.tensor(99),
    }


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "sapo", "luspo", "bnpo", "cispo", "dapo", "vespo"])
def test_a_mean_over_what_counts_by_hand(loss_type):
    step = [row([True, False], [3, 0]), row([False, False], [0, 2]), row([True, True], [1, 5])]
    mean_over_counted(step, loss_type, lambda counts: 2 * counts, 4)  # two devices alike
    assert not any("counted" in batch for batch in step)
    if loss_type in ("cispo", "dapo", "vespo"):
        assert all(batch["num_items_in_batch"] == 2 * 9 * 4 and batch["advantages"].eq(1).all() for batch in step)
    else:
        assert all(batch["advantages"].allclose(torch.tensor(3 / 2 if loss_type == "bnpo" else 6 / 3)) for batch in step)
    nothing = [row([False], [0])]
    mean_over_counted(nothing, loss_type, lambda counts: counts, 1)
    assert torch.isfinite(nothing[0]["advantages"]).all()


@pytest.fixture
def one_group_differs(monkeypatch):
    "The first group's rewards differ, those of the others are equal."

    def play(self, rows, names):
        rollouts = ComposerReplicationTrainer.play(self, rows, names)
        return [replace(r, ending=Ending.DONE, reward=i / 2 if i < 4 else 1.0) for i, r in enumerate(rollouts)]

    monkeypatch.setattr(Kept, "play", play, raising=False)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo", "dapo", "cispo"])
@pytest.mark.parametrize(
    "split",
    [
        dict(per_device_train_batch_size=8, gradient_accumulation_steps=1),
        dict(per_device_train_batch_size=2, gradient_accumulation_steps=4),
    ],
)
def test_each_step_of_a_generation_is_a_mean_over_its_own_rows(loss_type, split, one_group_differs, tmp_path, monkeypatch):
    "Gradients of both steps of one generation, at a learning rate of zero, against those of a mean over all rows."
    together = split["gradient_accumulation_steps"]
    shared = dict(
        loss_type=loss_type,
        learning_rate=0.0,
        max_steps=2,
        seed=1,
        steps_per_generation=2 * together,
        max_completion_length=48,
        **split,
    )
    plain = train(tmp_path / "a", **shared)
    counts, inner = [], Kept._arranged

    def arranged(self, batches):
        for at in range(0, len(batches), together):
            step = batches[at : at + together]
            tokens = sum(((b["completion_mask"] * b["tool_mask"]).sum(1) * b["counted"]).sum().item() for b in step)
            counts.append((torch.cat([b["counted"] for b in step]).float().mean().item(), tokens))
        return inner(self, batches)

    monkeypatch.setattr(Kept, "_arranged", arranged)
    skipped = train(tmp_path / "b", equal_rewards="skip", **shared)
    assert len(counts) == 2 and any(g.abs().max() > 1e-6 for g in plain.grads[0])
    assert len({share for share, _ in counts}) == 2  # the shuffle dealt the two steps different numbers of rows that count
    everything = sum(sum(r.completion_mask) for r in plain.rollouts)
    for mine, all_rows, (share, tokens) in zip(skipped.grads, plain.grads, counts):
        scale = 1 / share if loss_type in ("dr_grpo", "grpo") else everything / 2 / tokens
        for a, b in zip(mine, all_rows):
            torch.testing.assert_close(a, b * scale, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_coef": 0.1, "kl_place": "loss", "equal_rewards": "skip"},
        {},
        {"alpha_sdpo": 1.0, "mask_truncated_completions": True},
        {"beta": 0.1, "loss_type": "cispo"},
    ],
)
def test_means_do_not_depend_on_the_rows_of_a_pass(changes, one_group_differs, tmp_path):
    "The second step on one generation, so that ratios are not 1."
    logs = []
    for rows, passes in ((8, 1), (2, 4), (1, 8)):
        if "beta" in changes:  # TRL loads its reference by the model's name
            base = tmp_path / "base"
            embedded_model("mild").save_pretrained(base)
        trainer = train_named(tmp_path / f"{rows}", changes, rows, passes)
        logs.append(trainer.state.log_history[1])
    names = [n for n in logs[0] if n in ("entropy", "kl", "kl/token", "cispo_clip_ratio") or n.startswith("clip_ratio")]
    assert "entropy" in names and len(names) > 1
    for name in names:
        values = [log[name] for log in logs]
        assert values[1:] == pytest.approx(values[:1] * 2, rel=2e-3, abs=1e-5), name
    if "clip_ratio/region_mean" in names:
        assert logs[0]["clip_ratio/region_mean"] > 0 and logs[0]["clip_ratio/high_max"] >= logs[0]["clip_ratio/high_mean"]


def train_named(folder, changes, rows, passes):
    model = embedded_model("mild")
    if "beta" in changes:
        model.config._name_or_path = str(folder.parent / "base")
    settings = (
        BASE
        | {
            "save_strategy": "no",
            "max_steps": 2,
            "alpha_sdpo": 0.0,
            "sample_every": 0,
            "optim": "sgd",
            "learning_rate": 0.5,
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "max_completion_length": 48,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": passes,
            "steps_per_generation": passes,
            "num_iterations": 2,
            "max_turns": 2,
        }
        | changes
    )
    args = ComposerReplicationConfig(str(folder), **settings)
    trainer = Kept(
        model,
        args=args,
        processing_class=world.tokenizer(),
        train_dataset=Dataset.from_list(world.rows(4)),
        environment_factory=world.Files,
        hint_source=default_composite() if args.alpha_sdpo else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def test_pass_means_by_hand():
    means, metrics = PassMeans(), {"entropy": [5.0], "clip_ratio/low_min": [], "clip_ratio/high_max": [], "loss": []}
    for entropy, low, high, tokens in ((1.0, 0.2, 0.3, 10), (4.0, 0.1, 0.9, 30), (0.0, math.nan, math.nan, 0)):
        with means.of_pass(metrics, tokens):
            for name, value in {"entropy": entropy, "clip_ratio/low_min": low, "clip_ratio/high_max": high, "loss": 7.0}.items():
                metrics[name].append(value)
    assert metrics["entropy"] == [5.0] and metrics["loss"] == [7.0] * 3
    means.close(metrics)
    assert (
        metrics["entropy"] == [5.0, 3.25] and metrics["clip_ratio/low_min"] == [0.1] and metrics["clip_ratio/high_max"] == [0.9]
    )
    means.close(metrics)
    assert metrics["entropy"] == [5.0, 3.25]  # a step that scored nothing has no mean


def test_an_evaluation_has_one_mean_too(tmp_path):
    found = []
    for rows in (1, 4):
        args = ComposerReplicationConfig(
            str(tmp_path / str(rows)),
            **BASE
            | {
                "save_strategy": "no",
                "alpha_sdpo": 0.0,
                "per_device_eval_batch_size": rows,
                "num_generations_eval": 1,
                "max_completion_length": 48,
            },
        )
        trainer = ComposerReplicationTrainer(
            embedded_model("mild"),
            args=args,
            processing_class=world.tokenizer(),
            train_dataset=Dataset.from_list(world.rows(4)),
            eval_dataset=Dataset.from_list(world.rows(4, 1)),
            environment_factory=world.Files,
        )
        trainer.model.eval()
        metrics = {"entropy": []}
        for mean, tokens in {1: ((1.0, 1), (2.0, 3)), 4: ((1.75, 4),)}[rows]:
            with trainer.means["eval"].of_pass(metrics, tokens):
                metrics["entropy"].append(mean)
        trainer._metrics["eval"] = metrics
        trainer.log({"eval_loss": 0.0})
        found.append(trainer.state.log_history[-1]["eval_entropy"])
    assert found == [1.75, 1.75]


# ---- the KL joins channel 1


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_kl_in_the_loss_waits_for_the_policy(estimator, tmp_path):
    "Before policy_start the gradient is channel 2's alone; the KL is measured all the same, and is 0 at the start."
    shared = dict(
        alpha_sdpo=1.0, policy_start=2, max_steps=3, teacher="frozen", kl_place="loss", kl_estimator=estimator, learning_rate=0.2
    )
    plain, with_kl = (train(tmp_path / str(coef), world.Files, kl_coef=coef, **shared) for coef in (0.0, 5.0))
    logs = [h for h in with_kl.state.log_history if "kl/token" in h]
    assert abs(logs[0]["kl/token"]) < 1e-6 and abs(logs[2]["kl/token"]) > 1e-4
    same = [all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*grads)) for grads in zip(plain.grads, with_kl.grads)]
    assert same == [True, True, False]


# ---- the weight of channel 2


@pytest.mark.parametrize("loss_type", ["dr_grpo", "dapo", "luspo"])
def test_the_effective_weight_is_what_the_policy_term_lacks(loss_type, one_group_differs, tmp_path):
    "The gradient of the policy objective against that of a mean over tokens, of rows of one length."
    sequence = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    shared = dict(rows=2, max_turns=1, max_completion_length=40, max_turn_tokens=14, per_device_train_batch_size=8)
    mean = train(tmp_path / "mean", loss_type="dapo", **shared)
    found = train(tmp_path / "found", loss_type=loss_type, **shared, **sequence)
    lengths = {sum(r.completion_mask) for r in found.rollouts}
    assert len(lengths) == 1 and any(g.abs().max() > 1e-5 for g in mean.grads[0])
    found.args.alpha_sdpo = 3.0
    scale = 3.0 / found.args.effective_alpha(lengths.pop())
    for a, b in zip(found.grads[0], mean.grads[0]):
        torch.testing.assert_close(a, b * scale, rtol=2e-3, atol=1e-6)
