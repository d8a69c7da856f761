"Channel 2 against the policy objective: what `conflict/*` logs, and the gate on failed episodes, by oracles."
import copy
import math

import pytest
import torch
from played import played_once
from trainer_script import make

from composer_replication.training.step import Steps
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.training.window import conflict_metrics, conflict_sums

ONE_STEP = {"max_steps": 1, "save_strategy": "no", "rows": 8, "per_device_train_batch_size": 8, "steps_per_generation": 1}


@pytest.mark.parametrize("seed", range(5))
def test_sums_over_passes_by_a_plain_loop(seed):
    draw = torch.Generator().manual_seed(seed)
    policy, sdpo = (torch.randn(40, 6, generator=draw) for _ in range(2))
    policy[::5], sdpo[::7] = 0, 0
    passed = torch.rand(40, generator=draw) < 0.5
    sums = [conflict_sums(policy[part], sdpo[part], passed[part]) for part in (slice(0, 13), slice(13, 40))]  # two passes
    found = conflict_metrics({name: sums[0][name] + sums[1][name] for name in sums[0]})
    for prefix, wanted in (("", (0, 1)), ("passed/", (1,)), ("failed/", (0,))):
        p, s = [], []
        for one, other, won in zip(policy.tolist(), sdpo.tolist(), passed.tolist()):
            if any(one) and any(other) and won in wanted:
                p.append(one)
                s.append(other)
        dot = lambda a, b: sum(x * y for x, y in zip(a, b))
        flat = [x for row in p for x in row], [x for row in s for x in row]
        norms = [math.sqrt(dot(each, each)) for each in flat]
        assert found[f"conflict/{prefix}tokens"] == len(p)
        assert found[f"conflict/{prefix}share"] == pytest.approx(sum(dot(a, b) < 0 for a, b in zip(p, s)) / len(p))
        assert found[f"conflict/{prefix}norm_ratio"] == pytest.approx(norms[1] / norms[0])
        assert found[f"conflict/{prefix}cosine"] == pytest.approx(dot(*flat) / norms[0] / norms[1])


def test_no_token_in_common_logs_nothing():
    assert conflict_metrics(conflict_sums(torch.zeros(3, 2), torch.ones(3, 2), torch.ones(3, dtype=torch.bool))) == {}
    assert conflict_metrics({}) == {}


class StepsApart(Steps):
    "Takes each term's gradient by a whole backward pass of its own, before the step's, and keeps it for the trainer."

    def _total(self, part, terms):
        t = self.trainer
        t.apart = getattr(t, "apart", [])
        if part.sites:
            hidden, found = part.forward.hidden, {}
            hidden.retain_grad()
            for name in ("policy", "sdpo"):
                kept = [p.grad for p in t.student.parameters()]
                t.student.zero_grad()
                hidden.grad = None
                (terms[name].total * self.now.weights[name]).backward(retain_graph=True)
                found[name] = hidden.grad.double().clone()
                for p, grad in zip(t.student.parameters(), kept):
                    p.grad = grad
            rewards = [row.trace.reward for row in part.inputs["composer_rows"]]
            places = part.batch.sdpo_student.tolist()
            t.apart.append([(found["policy"][row, at], found["sdpo"][row, at], rewards[row]) for row, at in places])
        return super()._total(part, terms)


class Apart(ComposerReplicationTrainer):
    steps_kind = StepsApart


@pytest.mark.parametrize("changes", [{}, {"teacher": "live", "sdpo_support": "full", "beta_replay": 0.0}])
def test_logged_conflict_is_that_of_two_whole_backward_passes(changes, tmp_path):
    own = {"log_conflict": True, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "target_turns": "all"}
    settings = ONE_STEP | own | changes
    trainer = played_once(make("two", tmp_path, kind=Apart, **settings))
    trainer.train()
    logged, tokens = trainer.state.log_history[0], [token for step in trainer.apart for token in step]
    both = [(p, s, reward) for p, s, reward in tokens if p.any() and s.any()]
    assert both and len(both) < len(tokens)  # a group of equal rewards has no policy gradient
    parts = {"": both, "passed/": [t for t in both if t[2] > 0], "failed/": [t for t in both if not t[2] > 0]}
    assert parts["passed/"] and parts["failed/"]
    for part, some in parts.items():
        policy, sdpo = (torch.stack([t[i] for t in some]) for i in (0, 1))
        wanted = {"norm_ratio": sdpo.norm() / policy.norm(), "cosine": (policy * sdpo).sum() / policy.norm() / sdpo.norm(),
                  "share": ((policy * sdpo).sum(1) < 0).double().mean(), "tokens": len(some)}
        for name, value in wanted.items():
            assert logged[f"conflict/{part}{name}"] == pytest.approx(float(value), rel=1e-4), (part, name)


def test_to_log_it_changes_no_weight(tmp_path):
    found = []
    for log in (False, True):
        trainer = played_once(make("two", tmp_path / str(log), log_conflict=log, **ONE_STEP))
        trainer.train()
        said = any("conflict" in name for name in trainer.state.log_history[0])
        found.append((copy.deepcopy(trainer.student.state_dict()), said))
    (plain, silent), (logged, said) = found
    assert said and not silent and all(torch.equal(plain[name], logged[name]) for name in plain)


class GatedSteps(Steps):
    "Keeps channel 2's term, and the same in closed form from logits: reverse KL over the whole vocabulary, times the gate."

    def _total(self, part, terms):
        if "sdpo" not in terms:
            return super()._total(part, terms)
        term, labels, (states, head) = terms["sdpo"], part.batch.sdpo_labels[:, None], part.teacher
        with torch.no_grad():
            hidden, lm_head = part.forward.hidden[tuple(part.batch.sdpo_student.T)], self.trainer.student.lm_head
            student, teacher = (logits.double().log_softmax(-1) for logits in (lm_head(hidden), head.logits(states)))
            apart = (student.exp() * (student - teacher)).sum(-1)
            gate = 1 / (1 + torch.exp(-5 * (teacher.gather(1, labels) - student.gather(1, labels))[:, 0]))
        self.trainer.seen = part, term, (apart * gate).sum().item(), apart.sum().item()
        return super()._total(part, terms)


class Gated(ComposerReplicationTrainer):
    steps_kind = GatedSteps


@pytest.mark.parametrize("gate", ["failed", "none"])
def test_the_gate_is_sigmoid_of_five_times_the_gap_on_failed_episodes_alone(gate, tmp_path):
    settings = dict(target_turns="all", sdpo_gate=gate, sdpo_support="full", sdpo_beta=1.0, sdpo_importance_clip=None)
    trainer = played_once(make("two", tmp_path, kind=Gated, teacher="frozen", beta_replay=0.0, **ONE_STEP | settings))
    trainer.train()
    step, term, gated, plain = trainer.seen
    hinted = {row.trace.reward > 0 for row in step.inputs["composer_rows"] if any(b.kind == "hint" for b in row.tree.branches)}
    assert {row.trace.reward > 0 for row in step.inputs["composer_rows"]} == {True, False}
    assert hinted == ({False} if gate == "failed" else {True, False})
    assert term.total.item() == pytest.approx(gated if gate == "failed" else plain, rel=1e-3) and abs(gated / plain - 1) > 0.1
    assert term.count == len(step.batch.sdpo_labels)  # the mean stays one over all hinted tokens
