"""Our losses as verl 0.9.1 calls them, against our trainer's divergence, against plain loops, and against TRL's normaliser.

With verl installed (`make test-foreign`) its own trainer functions make the calls. Without it a pinned stub of them does, written
from 0.9.1's `trainer/distillation/losses.py`, `workers/utils/losses.py` and `trainer/ppo/core_algos.py`."""
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from composer_replication.contrib import verl as ours
from composer_replication.core.errors import InputProblem
from composer_replication.losses.divergences import Divergence

REAL = find_spec("verl") is not None
PROMPTS, RESPONSES, VOCAB, K = (3, 2), (4, 5), 30, 4
NEEDS_VERL = pytest.mark.skipif(not REAL, reason="verl is not installed: make test-foreign")
MASKS = {"no token": [], "one token": [(1, 4)], "two turns": [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]}


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def stub_modules():
    "The interface that the adapter imports: 0.9.1's names and meaning, our own lines."
    def no_padding_2_padding(tensor, data):
        rows = tensor.unbind()
        return padded([row[-n - 1:-1] for row, n in zip(rows, data["responses"].offsets().diff().tolist())])

    def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor):
        by = {"token-mean": batch_num_tokens, "seq-mean-token-sum-norm": global_batch_size * loss_scale_factor}
        return (loss_mat * loss_mask).sum() * dp_size / by[loss_agg_mode]

    made = {"verl.workers.utils.padding": dict(no_padding_2_padding=no_padding_2_padding),
            "verl.trainer.ppo.core_algos": dict(agg_loss=agg_loss)}
    modules = {".".join(name.split(".")[:n]): ModuleType("stub") for name in made for n in range(1, 5)}
    for name, members in made.items():
        vars(modules[name]).update(members)
    return modules


class Stub:
    "What verl's trainer does with a loss of ours."

    def logits_step(self, mode, logits, data):
        teacher = (data[name].values().unsqueeze(0) for name in ("teacher_logprobs", "teacher_ids"))
        return ours.sdpo_topk(logits, *teacher, ours.BETAS[mode])

    def loss(self, mode, output, data, coef=1.0, policy=False):
        config = actor_config(SimpleNamespace)
        distillation = SimpleNamespace(distillation_loss=SimpleNamespace(use_policy_gradient=False))
        losses, metrics = ours.sdpo_loss(config, distillation, output, data)
        mask = data["response_mask"].to_padded_tensor(0)
        loss = (losses * mask).sum() / data["batch_num_tokens"] * coef
        if policy:
            from verl.workers.utils.padding import no_padding_2_padding
            counts = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
            config.global_batch_info = counts | {"loss_scale_factor": 8}
            old, advantages = (data[name].to_padded_tensor(0) for name in ("old_log_probs", "advantages"))
            now = no_padding_2_padding(output["log_probs"], data)
            loss = loss + ours.policy_loss(old, now, advantages, mask, config.loss_agg_mode, config)[0]
        return loss, metrics


def actor_config(kind, **more):
    return kind(strategy="fsdp", clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, loss_agg_mode="token-mean", **more)


class Real:
    "verl's own functions, by the names that its workers call."

    def config(self, mode, coef, policy):
        from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig, PolicyLossConfig
        loss = DistillationLossConfig(loss_mode=mode, topk=K, use_task_rewards=policy, distillation_loss_coef=coef,
                                      use_policy_gradient=False, loss_max_clamp=None, log_prob_min_clamp=None)
        actor = actor_config(ActorConfig, rollout_n=1, ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2, use_kl_loss=False,
                             policy_loss=PolicyLossConfig(loss_mode="composer_dr_grpo"))
        return dict(config=actor, distillation_config=DistillationConfig(distillation_loss=loss))

    def logits_step(self, mode, logits, data):
        from verl.trainer.distillation.losses import distillation_ppo_loss
        return distillation_ppo_loss(**self.config(mode, 1.0, False), data=data, student_logits=logits, data_format="thd")

    def loss(self, mode, output, data, coef=1.0, policy=False):
        from verl.trainer.distillation.losses import distillation_ppo_loss
        return distillation_ppo_loss(**self.config(mode, coef, policy), model_output=output, data=data)


@pytest.fixture
def trainer(monkeypatch):
    if REAL:
        ours.register()
        return Real()
    for name, module in stub_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return Stub()


def batch(chosen, dtype=torch.float64):
    "One packed micro-batch, its student's logits and the teacher's, the packed row of each chosen response token, and labels."
    made = torch.Generator().manual_seed(3)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES)]
    logits, teacher = (2 * torch.randn(sum(lengths), VOCAB, generator=made, dtype=dtype) for _ in range(2))
    ids = [torch.randint(VOCAB, (n,), generator=made) for n in lengths]
    rows = [sum(lengths[:s]) + PROMPTS[s] + t - 1 for s, t in chosen]
    labels = torch.cat([i.roll(-1) for i in ids])
    old = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0] + torch.randn(len(labels), generator=made, dtype=dtype)
    top = teacher.log_softmax(-1).topk(K, -1)
    values, places = torch.zeros_like(top.values), torch.zeros_like(top.indices)
    values[rows], places[rows] = top.values[rows], top.indices[rows]
    parts = {"teacher_logprobs": nested(values.split(lengths)), "teacher_ids": nested(places.to(torch.int32).split(lengths)),
             "input_ids": nested(ids), "prompts": nested([i[:p] for i, p in zip(ids, PROMPTS)]),
             "responses": nested([i[p:] for i, p in zip(ids, PROMPTS)]),
             "response_mask": nested([torch.ones(n) for n in RESPONSES]),
             "old_log_probs": nested([o[p - 1:-1] for o, p in zip(old.split(lengths), PROMPTS)]),
             "advantages": nested([torch.randn(n, generator=made, dtype=dtype) for n in RESPONSES])}
    numbers = dict(dp_size=1, batch_num_tokens=sum(RESPONSES), global_batch_size=2)
    if REAL:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu
        data = TensorDict(parts, batch_size=2)
        tu.assign_non_tensor(data, **numbers)
    else:
        data = parts | numbers
    return data, logits.requires_grad_(), teacher, rows, labels


def outputs(trainer, mode, logits, data, labels):
    "What the engine collects in one forward."
    lengths = data["input_ids"].offsets()
    found = {name: torch.nested.nested_tensor_from_jagged(value.squeeze(0), lengths)
             for name, value in trainer.logits_step(mode, logits.unsqueeze(0), data).items()}
    logprobs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return found | {"log_probs": torch.nested.nested_tensor_from_jagged(logprobs, lengths)}


def weights(logits, data, rows, chosen, labels):
    now = logits.detach().log_softmax(-1)[rows].gather(-1, labels[rows, None])[:, 0]
    old = torch.stack([data["old_log_probs"].unbind()[s][t] for s, t in chosen]) if chosen else now
    return (now - old).exp().clamp(max=2.0)


@pytest.mark.parametrize("mode", ours.BETAS)
@pytest.mark.parametrize("chosen", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
def test_the_loss_and_its_gradient_are_our_trainers(trainer, mode, chosen, dtype):
    data, logits, teacher, rows, labels = batch(chosen, dtype)
    loss, metrics = trainer.loss(mode, outputs(trainer, mode, logits, data, labels), data)
    mine = logits.detach().clone().requires_grad_()
    values = Divergence(ours.BETAS[mode], support="teacher_top_k", top_k=K)(mine[rows], teacher[rows])
    expected = (values * weights(mine, data, rows, chosen, labels)).sum() / sum(RESPONSES)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits.grad, mine.grad, rtol=0, atol=1e-5)
    assert metrics["distillation/sdpo_tokens"] == len(chosen)
    assert metrics["distillation/sdpo_share"] == pytest.approx(len(chosen) / sum(RESPONSES))
    assert bool(loss) == bool(chosen)
    others = torch.ones(len(logits), dtype=torch.bool).index_fill(0, torch.tensor(rows, dtype=torch.long), False)
    assert not logits.grad[others].any()


def loops(student, teacher, beta):
    "The divergence over the teacher's top k and the tail, one entry after the other."
    p, q = ([math.exp(v) for v in row.log_softmax(-1).tolist()] for row in (student, teacher))
    top = sorted(range(VOCAB), key=lambda i: -q[i])[:K]
    p, q = ([side[i] for i in top] + [1 - sum(side[i] for i in top)] for side in (p, q))
    if beta in (0.0, 1.0):
        first, second = (q, p) if beta == 0.0 else (p, q)
        return sum(a * math.log(a / b) for a, b in zip(first, second))
    m = [(1 - beta) * a + beta * b for a, b in zip(p, q)]
    return sum((1 - beta) * a * math.log(a / c) + beta * b * math.log(b / c) for a, b, c in zip(p, q, m))


@pytest.mark.parametrize("mode", ours.BETAS)
def test_each_token_is_what_loops_give(trainer, mode):
    data, logits, teacher, rows, _ = batch(MASKS["two turns"])
    found = trainer.logits_step(mode, logits.unsqueeze(0), data)["distillation_losses"][0]
    assert found[rows].tolist() == pytest.approx([loops(logits[r], teacher[r], ours.BETAS[mode]) for r in rows], abs=1e-9)


@pytest.mark.parametrize("chosen", MASKS.values(), ids=MASKS)
def test_task_rewards_and_sdpo_add_up(trainer, chosen):
    data, logits, teacher, rows, labels = batch(chosen)
    both, _ = trainer.loss("composer_sdpo", outputs(trainer, "composer_sdpo", logits, data, labels), data, coef=3.0, policy=True)
    alone, _ = trainer.loss("composer_sdpo", outputs(trainer, "composer_sdpo", logits, data, labels), data)
    policy = []
    for s, (p, n) in enumerate(zip(PROMPTS, RESPONSES)):
        first = sum(PROMPTS[:s]) + sum(RESPONSES[:s]) + p - 1
        now = logits.detach().log_softmax(-1)[range(first, first + n), labels[first:first + n]].tolist()
        for new, old, advantage in zip(now, data["old_log_probs"].unbind()[s].tolist(), data["advantages"].unbind()[s].tolist()):
            ratio = math.exp(new - old)
            policy.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    assert both.item() == pytest.approx(sum(policy) / sum(RESPONSES) + 3.0 * alone.item(), abs=1e-9)


def test_verls_settings_for_dr_grpo_divide_as_trl_does(trainer):
    "Sum over tokens, divided by completions times the longest length."
    made = torch.Generator().manual_seed(1)
    now, old, advantages = (torch.randn(3, 6, generator=made, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    whole = dict(dp_size=1, batch_num_tokens=12, global_batch_size=3, loss_scale_factor=8)
    config = actor_config(SimpleNamespace, global_batch_info=whole)
    loss, metrics = ours.policy_loss(old, now, advantages, mask, "seq-mean-token-sum-norm", config)
    ratio = (now - old).exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert loss.item() == pytest.approx(terms[mask].sum().item() / (3 * 8), abs=1e-12)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(((ratio < 0.8) | (ratio > 1.2))[mask].double().mean().item())


def test_verls_own_logits_step_is_refused(trainer):
    data, logits, _, _, labels = batch(MASKS["one token"])
    output = outputs(trainer, "composer_sdpo", logits, data, labels)
    del output["sdpo_taught"]
    with pytest.raises(InputProblem, match="VERL_USE_EXTERNAL_MODULES"):
        trainer.loss("composer_sdpo", output, data)


def test_a_scalar_signal_is_refused(trainer):
    data, logits, _, _, labels = batch(MASKS["one token"])
    settings = SimpleNamespace(distillation_loss=SimpleNamespace(use_policy_gradient=True))
    with pytest.raises(InputProblem, match="use_policy_gradient"):
        ours.sdpo_loss(SimpleNamespace(strategy="fsdp"), settings, outputs(trainer, "composer_sdpo", logits, data, labels), data)


def python(code, **env):
    "Run it in a fresh process."
    return subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=300,
                          cwd=Path(__file__).parents[2])


def test_the_adapters_need_torch_and_little_else():
    "They run in the other trainer's environment, which has its own versions of transformers, or none."
    done = python("import sys; from composer_replication.contrib import verl, prime_rl, titan;"
                  "print({'trl', 'transformers'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


@NEEDS_VERL
def test_verl_itself_loads_us_by_its_variable():
    code = ("import verl; from verl.trainer.distillation import losses;"
            "from verl.trainer.ppo.core_algos import get_policy_loss_fn as policy;"
            "print(losses.get_distillation_loss_fn('composer_sdpo').__module__, policy('composer_dr_grpo').__name__,"
            "losses.get_distillation_loss_settings('composer_sdpo_jsd').use_topk, verl.__version__)")
    done = python(code, VERL_USE_EXTERNAL_MODULES=ours.__name__)
    assert done.stdout.split() == [ours.__name__, "policy_loss", "True", "0.9.1"], done.stderr


@NEEDS_VERL
def test_verls_other_losses_are_as_they_were(trainer):
    "forward_kl_topk goes through our step, and is verl's: the teacher's k entries without a tail."
    data, logits, teacher, rows, _ = batch(MASKS["two turns"])
    found = trainer.logits_step("forward_kl_topk", logits.unsqueeze(0), data)
    top = teacher[rows].log_softmax(-1).topk(K, -1)
    expected = (top.values.exp() * (top.values - logits[rows].log_softmax(-1).gather(-1, top.indices))).sum(-1)
    torch.testing.assert_close(found["distillation_losses"][0, rows].double(), expected, rtol=0, atol=1e-5)
    assert {"student_mass", "teacher_mass"} <= set(found)
