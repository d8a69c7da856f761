"A training step against a slow reference in float64 that shares nothing with it: plain forwards, loops, formulas of the papers."
import copy
import math

import pytest
import torch
import world
from datasets import Dataset
from kept_trainer import paired
from played import played_once
from trl import GRPOTrainer

from composer_replication.envs.toy.model import embedded_model
from composer_replication.hints.layers import default_composite
from composer_replication.replay.pairs import group_pairs
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.episodes import rollout_columns
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.forward import WAYS
from composer_replication.tree.pass_cost import LAYER_WORTH


def settings(folder, **changes):
    base = dict(report_to="none", bf16=False, use_cpu=True,
                per_device_train_batch_size=8, num_generations=4, max_completion_length=160,
                max_turns=4, max_steps=2, logging_steps=1, learning_rate=1e-3, save_strategy="no", gradient_checkpointing=False,
                seed=3, disable_tqdm=True, max_grad_norm=0.0, teacher="ema", teacher_ema_rate=0.3)
    return ComposerReplicationConfig(str(folder), **(base | changes))


def weights_of(policy):
    "Of each model that a teacher or reference reads."
    if policy is None:
        return []
    with policy.using() as models:
        return [copy.deepcopy(m.state_dict()) for m in models]


class Recorder(ComposerReplicationTrainer):
    "Keeps what every backward pass was given and gave."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def _compute_loss(self, model, inputs):
        keep = {"inputs": dict(inputs), "student": copy.deepcopy(self.student.state_dict()), "step": self._step,
                "teacher": weights_of(self.teacher), "reference": weights_of(self.reference)}
        loss = super()._compute_loss(model, inputs)
        self.seen.append(keep | {"loss": loss.item()})
        return loss

    def training_step(self, *args, **kwargs):
        out = super().training_step(*args, **kwargs)
        self.seen[-1]["grad"] = [p.grad.clone() for p in self.student.parameters()]
        return out


def double(state, temperature):
    model = embedded_model(pretrained=False).double().train()
    model.load_state_dict(state)
    model.temperature = temperature
    return model


def logprobs(model, ids):
    "Log-probabilities `(len - 1, vocab)` of one plain sequence."
    return (model(torch.tensor([list(ids)])).logits[0, :-1] / model.temperature).log_softmax(-1)


def policy_term(model, inputs, length):
    "Dr.GRPO (arXiv:2503.20783): advantages as they are, a constant length; the clipped ratio of PPO."
    total = 0.0
    for i in range(len(inputs["advantages"])):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
        answer = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()].tolist()
        found = logprobs(model, prompt + answer)
        for t, token in enumerate(answer):
            if inputs["tool_mask"][i][t]:
                now = found[len(prompt) - 1 + t, token]
                old = inputs["old_per_token_logps"][i][t].double() if "old_per_token_logps" in inputs else now.detach()
                ratio, gain = (now - old).exp(), inputs["advantages"][i].double()
                total = total - torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return total / (len(inputs["advantages"]) * length)


def top_k_reverse_kl(student, teacher, k=20):
    "KL(student || teacher) over the student's k likeliest tokens and one bucket for the rest, by hand."
    ids = student.topk(k).indices
    p, q = student.exp()[ids], teacher.exp()[ids]
    p, q = torch.cat([p, (1 - p.sum())[None]]), torch.cat([q, (1 - q.sum())[None]])
    return (p * (p / q).log()).sum()


def sdpo_terms(student, teachers, inputs, mix=0.5, clip=2.0):
    "Every token of every hinted turn, from two plain sequences: the rollout, and the rollout as told."
    values = []
    for number, row in enumerate(inputs["composer_rows"]):
        plain = logprobs(student, row.tree.ids)
        prompt = int(inputs["prompt_mask"][number].sum())
        for branch in row.tree.branches:
            if branch.kind != "hint":
                continue
            with torch.no_grad():
                told = [logprobs(t, row.tree.ids[:branch.fork] + branch.ids) for t in teachers]
            span, count = row.tree.span(branch.turn), len(branch.ids) - branch.start
            for t in range(count):
                at, there = span.start + t, branch.fork + branch.start + t
                judged = told[0][there - 1]
                if len(told) == 2:
                    judged = ((1 - mix) * judged + mix * told[1][there - 1]).log_softmax(-1)
                weight = 1.0
                if "old_per_token_logps" in inputs:
                    old = inputs["old_per_token_logps"][number][at - prompt].double()
                    weight = (plain[at - 1, row.tree.ids[at]].detach() - old).exp().clamp(max=clip)
                values.append(weight * top_k_reverse_kl(plain[at - 1], judged))
    return values


def dpo_terms(student, reference, trees, beta=0.1):
    "-log sigmoid(beta (log-ratio of the chosen less that of the rejected)), arXiv:2305.18290 eq. 7."
    def summed(model, tree, branch):
        found, start = logprobs(model, tree.ids[:branch.fork] + branch.ids), branch.fork + branch.start
        return sum(found[start + t - 1, token] for t, token in enumerate(branch.ids[branch.start:]))

    values = []
    for tree in trees:
        for chosen in (b for b in tree.branches if b.kind == "chosen"):
            rejected = next(b for b in tree.branches if b.kind == "rejected" and b.pair == chosen.pair)
            gap = summed(student, tree, chosen) - summed(student, tree, rejected)
            with torch.no_grad():
                gap0 = summed(reference, tree, chosen) - summed(reference, tree, rejected)
            values.append(-torch.nn.functional.logsigmoid(beta * (gap - gap0)))
    return values


CASES = {
    "channel 3 alone": dict(alpha_sdpo=0.0, beta_replay=0.7),
    "all, EMA, another temperature": dict(alpha_sdpo=1.0, beta_replay=0.7, temperature=0.7),
    "all, live teacher": dict(alpha_sdpo=0.5, beta_replay=0.3, teacher="live"),
    "all, frozen, gradient checkpointing": dict(alpha_sdpo=0.5, beta_replay=0.3, teacher="frozen", gradient_checkpointing=True),
    "all, trust region, accumulation": dict(alpha_sdpo=1.0, beta_replay=0.3, teacher="trust_region",
                                            gradient_accumulation_steps=2, per_device_train_batch_size=4),
    "all, live, checkpointing, off policy": dict(alpha_sdpo=1.0, beta_replay=0.3, teacher="live", num_iterations=2, max_steps=2,
                                                 gradient_checkpointing=True, learning_rate=3e-3),
    "channel 2, off policy, another temperature": dict(
        alpha_sdpo=1.0, beta_replay=0.0, num_iterations=2, max_steps=2, temperature=0.6, learning_rate=3e-3),
}


DENSE = "all, live teacher", "all, trust region, accumulation"
BY_WAY = [(name, "once") for name in CASES if name != DENSE[0]] + [(name, "dense") for name in DENSE]


@pytest.mark.parametrize("name, way", BY_WAY)
def test_a_step_equals_the_slow_reference(name, way, tmp_path, monkeypatch):
    monkeypatch.setitem(LAYER_WORTH, "cpu", math.inf if way == "once" else -math.inf)
    changes = CASES[name]
    args = settings(tmp_path, **changes)
    extra = dict(pair_source=group_pairs, replay_examples=paired()) if args.beta_replay else {}
    trainer = Recorder(embedded_model("mild"), None, args, Dataset.from_list(world.rows(8)), processing_class=world.tokenizer(),
                       environment_factory=world.Files, hint_source=default_composite(), **extra)
    start = [p.detach().clone() for p in trainer.student.parameters()]
    played_once(trainer).train()
    window = trainer.seen[-args.gradient_accumulation_steps:]
    student = double(window[0]["student"], args.temperature)
    teachers = [double(s, args.temperature) for s in window[0]["teacher"]]
    references = [double(s, args.temperature) for s in window[0]["reference"]]
    policy, sdpo, dpo, want = 0.0, [], [], []
    for seen in window:
        policy = policy_term(student, seen["inputs"], args.max_completion_length) / len(window) + policy
        here = sdpo_terms(student, teachers, seen["inputs"]) if args.alpha_sdpo else []
        trees = [r.tree for r in seen["inputs"]["composer_rows"]] + trainer.optimizer_steps.recorded_trees(seen["step"])
        pairs = dpo_terms(student, references[0], trees) if args.beta_replay else []
        want.append((here, pairs))
        sdpo, dpo = sdpo + here, dpo + pairs
    total = policy + args.alpha_sdpo * sum(sdpo) / max(len(sdpo), 1) + args.beta_replay * sum(dpo) / max(len(dpo), 1)
    total.backward()

    assert abs(sum(s["loss"] for s in window) - total.item()) < 1e-5
    for mine, theirs in zip(window[-1]["grad"], student.parameters()):
        torch.testing.assert_close(mine.double(), theirs.grad, rtol=1e-3, atol=1e-5)
    logged = [h for h in trainer.state.log_history if "policy/loss" in h][-1]
    assert {each: logged[f"branches/{each}"] for each in WAYS} == dict.fromkeys(WAYS, 0) | {way: 1}
    if args.alpha_sdpo:
        assert len(sdpo) == logged["sdpo/tokens"] > 20 and logged["sdpo/sites"] > 2
        assert abs(logged["sdpo/loss"] - (sum(sdpo) / len(sdpo)).item()) < 1e-5
    if args.beta_replay:
        assert len(dpo) == logged["replay/pairs"] > 0
        assert abs(logged["replay/loss"] - (sum(dpo) / len(dpo)).item()) < 1e-5
    assert all(not torch.equal(a, b) for a, b in zip(start, trainer.student.parameters())), "a parameter has not moved"


def test_zero_weights_are_trl_bit_for_bit(tmp_path):
    "Invariant 4, over multi-turn steps with real tool calls in TRL's own loop."
    def train(kind, **changes):
        args = settings(tmp_path, rollout="trl", alpha_sdpo=0.0, max_tool_calling_iterations=3, max_completion_length=112,
                        max_steps=2, **changes)
        made = kind(embedded_model("mild"), None, args, Dataset.from_list(world.rows(8)), processing_class=world.tokenizer(),
                    environment_factory=world.Files)
        made.train()
        return made

    for changes in ({}, dict(gradient_accumulation_steps=2, per_device_train_batch_size=4, gradient_checkpointing=True,
                             loss_type="grpo", scale_rewards="group")):
        theirs, ours = train(GRPOTrainer, **changes), train(ComposerReplicationTrainer, **changes)
        timed = ("time", "second", "runtime")
        history = [[{k: v for k, v in h.items() if not any(t in k for t in timed) and not k.startswith("health/")}
                    for h in trainer.state.log_history] for trainer in (theirs, ours)]  # what is said of a step changes no step
        assert history[0] == history[1]
        assert any(h.get("tools/call_frequency", 0) > 1 for h in history[0])
        assert any(h.get("grad_norm", 0) > 0 for h in history[0])
        assert all(torch.equal(a, b) for a, b in zip(theirs.model.parameters(), ours.model.parameters()))


def test_zero_weights_on_our_rollouts_are_trl_bit_for_bit(tmp_path):
    "The same rollouts through TRL's `rollout_func` give the same parameters."
    kept = []

    class Keeper(ComposerReplicationTrainer):
        def play(self, rows, names):
            rollouts = super().play(rows, names)
            kept.append((rollout_columns(rollouts, self.setup.tokenizer.eos_token_id), [r.reward for r in rollouts]))
            return rollouts

    data, args = Dataset.from_list(world.rows(8)), settings(tmp_path, alpha_sdpo=0.0, max_steps=2)
    ours = Keeper(embedded_model("mild"), None, args, data, processing_class=world.tokenizer(), environment_factory=world.Files)
    ours.train()
    play = iter(kept)
    earned = []

    def again(prompts, trainer):
        out, rewards = next(play)
        earned[:] = rewards
        return out

    theirs = GRPOTrainer(embedded_model("mild"), lambda **kw: list(earned), args, data, processing_class=world.tokenizer(),
                         rollout_func=again)
    theirs.train()
    losses = [[h["loss"] for h in t.state.log_history if "loss" in h] for t in (theirs, ours)]
    assert losses[0] == losses[1] and any(losses[0])
    assert all(torch.equal(a, b) for a, b in zip(theirs.model.parameters(), ours.model.parameters()))
