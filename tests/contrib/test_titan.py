"""Our loss as TitanRL (torchtitan 0.3.0) calls it, against our trainer's divergence and against plain loops.

With torchtitan installed (`make test-foreign`) `BaseLoss`, `GRPOLoss` and `ChunkedLossWrapper` are its own; only the file of
`torchtitan.experiments.rl` that imports vLLM is passed over. Without it a pinned stub stands for `BaseLoss` and `GRPOLoss`,
written from 0.3.0's `components/loss.py` and `experiments/rl/losses/`."""
import math
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from composer_replication.contrib import titan
from composer_replication.core.errors import InputProblem
from composer_replication.losses.divergences import Divergence

REAL = find_spec("torchtitan") is not None
BATCH, TIME, VOCAB = 2, 8, 40
MASKS = {"no token": [], "one token": [(1, 6)], "two turns": [(0, 2), (0, 3), (0, 4), (1, 1), (1, 2)]}
MENU = {"reverse, student's top 20": {}, "forward, full": dict(beta=0.0, support="full", top_k=None),
        "JSD, teacher's top 5": dict(beta=0.5, support="teacher_top_k", top_k=5)}


def stub_modules():
    "0.3.0's interface, our own lines: a nested Config whose `build` makes the loss, and GRPO's surrogate over the step's tokens."
    class BaseLoss:
        @dataclass(kw_only=True, slots=True)
        class Config:
            def build(self, **more):
                return type(self).owner(replace(self), **more)

        def __init_subclass__(cls):
            cls.Config.owner = cls

    class GRPOLoss(BaseLoss):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseLoss.Config):
            clip_eps: float = 0.2

        def __init__(self, config, *, compile_config=None):
            self.eps = config.clip_eps

        def __call__(self, logits, labels, global_valid_tokens=None, *, generator_logprobs, advantages, loss_mask):
            now = -F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            ratio = (now - generator_logprobs).exp()
            terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - self.eps, 1 + self.eps) * advantages)
            loss = (terms * loss_mask).sum() / global_valid_tokens
            return loss, {"loss/mean": loss.detach()}

    made = {"torchtitan.components.loss": dict(BaseLoss=BaseLoss), "torchtitan.experiments.rl.losses": dict(GRPOLoss=GRPOLoss)}
    modules = {}
    for name, members in made.items():
        for n in range(1, name.count(".") + 2):
            modules.setdefault(".".join(name.split(".")[:n]), ModuleType("stub"))
        vars(modules[name]).update(members)
    return modules


@pytest.fixture
def grpo(monkeypatch):
    "TitanRL's policy loss, and ours made for its base class."
    if REAL:
        import torchtitan.experiments
        package = ModuleType("torchtitan.experiments.rl")  # its own __init__ imports vLLM
        package.__path__ = [f"{torchtitan.experiments.__path__[0]}/rl"]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    else:
        for name, module in stub_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    from torchtitan.experiments.rl.losses import GRPOLoss
    titan.sdpo_loss_class.cache_clear()
    yield GRPOLoss
    titan.sdpo_loss_class.cache_clear()


def batch(chosen, dtype=torch.float32):
    "What `PolicyTrainer.forward_backward` passes to its loss, and the hinted teacher beside it."
    made = torch.Generator().manual_seed(11)
    logits, teacher = (torch.randn(BATCH, TIME, VOCAB, generator=made, dtype=dtype) for _ in range(2))
    labels = torch.randint(VOCAB, (BATCH, TIME), generator=made)
    sdpo_mask = torch.zeros(BATCH, TIME, dtype=torch.bool)
    for place in chosen:
        sdpo_mask[place] = True
    now = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    rest = dict(generator_logprobs=now + 0.6 * torch.randn(BATCH, TIME, generator=made, dtype=dtype),
                advantages=torch.randn(BATCH, TIME, generator=made, dtype=dtype),
                loss_mask=torch.arange(TIME).expand(BATCH, TIME) > 0)
    return logits.requires_grad_(), labels, teacher, sdpo_mask, rest


def channel_two(logits, labels, teacher, sdpo_mask, rest, divergence):
    "Our trainer's value: the mean over error turns' tokens of the divergence times the clipped ratio."
    values = divergence(logits[sdpo_mask], teacher[sdpo_mask], labels[sdpo_mask])
    now = logits.detach().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    weights = (now - rest["generator_logprobs"]).exp().clamp(max=2.0)[sdpo_mask]
    return (values * weights).sum() / max(int(sdpo_mask.sum()), 1)


@pytest.mark.parametrize("settings", MENU.values(), ids=MENU)
@pytest.mark.parametrize("chosen", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_the_loss_and_its_gradient_are_our_trainers(grpo, chosen, settings, dtype):
    logits, labels, teacher, sdpo_mask, rest = batch(chosen, dtype)
    loss_fn = titan.sdpo_loss_class().Config(policy=grpo.Config(), alpha_sdpo=0.7, **settings).build()
    tokens = int(rest["loss_mask"].sum())
    loss, metrics = loss_fn(logits, labels, tokens, teacher_logits=teacher, sdpo_mask=sdpo_mask, sdpo_tokens=len(chosen), **rest)
    loss.backward()
    mine = logits.detach().clone().requires_grad_()
    support = {"beta": 1.0, "support": "student_top_k", "top_k": 20} | settings
    sdpo = channel_two(mine, labels, teacher, sdpo_mask, rest, Divergence(**support))
    expected = grpo.Config().build()(mine, labels, tokens, **rest)[0] + 0.7 * sdpo
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(logits.grad, mine.grad, rtol=0, atol=1e-5)
    assert metrics["sdpo/mean"].item() == pytest.approx(sdpo.item(), abs=1e-5)
    assert metrics["sdpo/counted_frac"].item() == bool(chosen)
    assert "loss/mean" in metrics


def test_each_token_is_what_loops_give(grpo):
    "Reverse KL over the whole vocabulary, entry by entry, and the clipped surrogate."
    logits, labels, teacher, sdpo_mask, rest = batch(MASKS["two turns"], torch.float64)
    loss_fn = titan.sdpo_loss_class().Config(policy=grpo.Config(), alpha_sdpo=2.0, support="full", top_k=None).build()
    loss, _ = loss_fn(logits, labels, 14, teacher_logits=teacher, sdpo_mask=sdpo_mask, sdpo_tokens=5, **rest)
    policy, sdpo = 0.0, 0.0
    for b in range(BATCH):
        for t in range(TIME):
            p, q = ([math.exp(v) for v in side[b, t].log_softmax(-1).tolist()] for side in (logits.detach(), teacher))
            ratio = p[labels[b, t]] / math.exp(rest["generator_logprobs"][b, t])
            advantage = rest["advantages"][b, t].item()
            if t:
                policy -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            if sdpo_mask[b, t]:
                sdpo += min(ratio, 2.0) * sum(x * math.log(x / y) for x, y in zip(p, q))
    assert loss.item() == pytest.approx(policy / 14 + 2.0 * sdpo / 5, abs=1e-5)


def test_a_weight_of_zero_is_titans_loss(grpo):
    logits, labels, _, _, rest = batch([])
    ours, theirs = titan.sdpo_loss_class().Config(policy=grpo.Config(), alpha_sdpo=0.0).build(), grpo.Config().build()
    assert torch.equal(ours(logits, labels, 14, **rest)[0], theirs(logits, labels, 14, **rest)[0])


def test_the_stock_trainers_call_is_refused(grpo):
    logits, labels, _, _, rest = batch([])
    with pytest.raises(InputProblem, match="override forward_backward"):
        titan.sdpo_loss_class().Config(policy=grpo.Config()).build()(logits, labels, 14, **rest)


def test_a_schedule_is_refused(grpo):
    with pytest.raises(InputProblem, match="schedule"):
        titan.sdpo_loss_class().Config(policy=grpo.Config(), divergence="taid").build()


def test_no_gradient_reaches_the_teacher_and_unread_rows_may_be_anything(grpo):
    logits, labels, teacher, sdpo_mask, rest = batch(MASKS["one token"])
    teacher = torch.where(sdpo_mask[..., None], teacher, math.nan).requires_grad_()
    loss, _ = titan.sdpo_loss_class().Config(policy=grpo.Config()).build()(
        logits, labels, 14, teacher_logits=teacher, sdpo_mask=sdpo_mask, sdpo_tokens=1, **rest)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert teacher.grad is None


@pytest.mark.skipif(not REAL, reason="torchtitan is not installed: make test-foreign")
@pytest.mark.parametrize("chosen", MASKS.values(), ids=MASKS)
def test_chunked_is_unchunked(grpo, chosen):
    "Inside torchtitan's ChunkedLossWrapper, which takes hidden states and calls the loss on four parts of the sequence."
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
    _, labels, teacher, sdpo_mask, rest = batch(chosen)
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, VOCAB, bias=False), torch.randn(BATCH, TIME, 16)
    config = titan.sdpo_loss_class().Config(policy=grpo.Config())
    assert issubclass(titan.sdpo_loss_class(), BaseLoss)
    chunked = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=config).build()
    chunked.set_lm_head(head)
    extra = dict(teacher_logits=teacher, sdpo_mask=sdpo_mask, sdpo_tokens=len(chosen))
    sides = []
    whole = config.build()
    for run in (lambda h: chunked(h, labels, 14, **extra, **rest), lambda h: whole(head(h), labels, 14, **extra, **rest)):
        states = hidden.clone().requires_grad_()
        head.zero_grad()
        loss, metrics = run(states)
        loss.backward()
        sides.append((loss.detach(), states.grad, head.weight.grad.clone(), metrics["sdpo/mean"], metrics["sdpo/counted_frac"]))
    for in_chunks, at_once in zip(*sides):
        torch.testing.assert_close(in_chunks, at_once, rtol=0, atol=1e-5)
