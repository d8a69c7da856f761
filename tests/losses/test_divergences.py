"""Divergences and the distillation menu against TRL, torch and closed forms."""
import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdpo import loss_utils

from composer_replication.core.errors import InputProblem
from composer_replication.losses.distill import (
    EntropyAware,
    Taid,
    TAIDScheduler,
    entropy_aware_opd_loss,
    taid_loss,
    teacher_entropy,
)
from composer_replication.losses.divergences import Divergence, generalized_jsd_loss, named_divergence

BETAS = (0.0, 0.3, 1.0)


def logits(*shape, seed=0, dtype=torch.float64, scale=2.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).to(dtype)


def pair(*shape, dtype=torch.float64, grad=False):
    return logits(*shape, seed=1, dtype=dtype).requires_grad_(grad), logits(*shape, seed=2, dtype=dtype)


def loss_and_grad(function, student):
    student = student.detach().clone().requires_grad_()
    loss = function(student)
    loss.backward()
    return loss.detach(), student.grad


def assert_same(ours, theirs, student, **tolerance):
    for a, b in zip(loss_and_grad(ours, student), loss_and_grad(theirs, student)):
        torch.testing.assert_close(a, b, **tolerance)


# Direction and scale, pinned to TRL's two public implementations and to torch

@pytest.mark.parametrize("beta", BETAS)
def test_full_support_is_trl_sdpo_alpha(beta):
    student, teacher = pair(5, 11)
    assert_same(lambda s: generalized_jsd_loss(s, teacher, beta=beta, reduction="sum"),
                lambda s: loss_utils.compute_divergence(s.log_softmax(-1), teacher.log_softmax(-1), beta).sum(),
                student)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_masked_batchmean_is_trl_gkd_beta(beta, temperature):
    student, teacher = pair(2, 4, 9)
    labels = torch.tensor([[-100, 3, 1, -100], [2, -100, 0, 5]])
    assert_same(lambda s: generalized_jsd_loss(s, teacher, labels, beta, temperature),
                lambda s: GKDTrainer.generalized_jsd_loss(s, teacher, labels, beta, temperature), student)


def test_closed_forms_on_three_tokens():
    log = lambda *p: torch.tensor(p, dtype=torch.float64).log()[None]
    s, t = log(0.2, 0.3, 0.5), log(0.6, 0.3, 0.1)
    assert generalized_jsd_loss(s, t, beta=1.0).item() == pytest.approx(0.2 * math.log(1 / 3) + 0.5 * math.log(5))
    m = (0.75 * 0.2 + 0.25 * 0.6, 0.3, 0.75 * 0.5 + 0.25 * 0.1)
    kl = lambda p: sum(a * math.log(a / b) for a, b in zip(p, m))
    by_hand = 0.75 * kl((0.2, 0.3, 0.5)) + 0.25 * kl((0.6, 0.3, 0.1))
    assert generalized_jsd_loss(s, t, beta=0.25).item() == pytest.approx(by_hand)
    # The student's favourite is the third token; the tail holds the rest: (0.5, 0.5) against (0.1, 0.9)
    top = generalized_jsd_loss(s, t, beta=1.0, top_k=1).item()
    assert top == pytest.approx(0.5 * math.log(0.5 / 0.1) + 0.5 * math.log(0.5 / 0.9))
    # Its two favourites, renormalised: (0.5, 0.3) / 0.8 against (0.1, 0.3) / 0.4
    renormalised = generalized_jsd_loss(s, t, beta=1.0, top_k=2, tail=False).item()
    assert renormalised == pytest.approx(0.625 * math.log(0.625 / 0.25) + 0.375 * math.log(0.375 / 0.75))
    # The teacher's favourite is the first: (0.2, 0.8) against (0.6, 0.4)
    teachers = generalized_jsd_loss(s, t, beta=1.0, top_k=1, support="teacher_top_k").item()
    assert teachers == pytest.approx(0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4))
    sampled = generalized_jsd_loss(s, t, torch.tensor([2]), beta=1.0, support="sampled").item()
    assert sampled == pytest.approx(math.log(5))


# Supports

@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", (True, False))
def test_student_top_k_is_trl(beta, tail):
    student, teacher = pair(5, 30)
    assert_same(lambda s: generalized_jsd_loss(s, teacher, beta=beta, top_k=4, tail=tail, reduction="sum"),
                lambda s: loss_utils.compute_topk_self_distillation_loss(
                    s, teacher, distillation_topk=4, distillation_alpha=beta, distillation_add_tail=tail).sum(),
                student)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", (True, False))
def test_teacher_top_k_is_student_top_k_seen_from_the_other_side(beta, tail):
    student, teacher = pair(5, 30)
    one = generalized_jsd_loss(student, teacher, beta=beta, top_k=4, support="teacher_top_k", tail=tail)
    other = generalized_jsd_loss(teacher, student, beta=1 - beta, top_k=4, support="student_top_k", tail=tail)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("k", (6, 50))
@pytest.mark.parametrize("tail", (True, False))
def test_top_k_of_everything_is_the_full_vocabulary(k, tail):
    student, teacher = pair(4, 6)
    assert_same(lambda s: generalized_jsd_loss(s, teacher, beta=0.5, top_k=k, tail=tail),
                lambda s: generalized_jsd_loss(s, teacher, beta=0.5), student)


def test_sampled_token_has_trl_gradient_and_is_unbiased():
    student, teacher = pair(3, 5)
    ids = torch.tensor([4, 0, 2])
    ours = loss_and_grad(lambda s: generalized_jsd_loss(s, teacher, ids, beta=1.0, support="sampled", reduction="sum"),
                         student)
    theirs = loss_and_grad(lambda s: loss_utils.compute_sampled_token_self_distillation_loss(
        s, teacher, ids, distillation_alpha=1.0).sum(), student)
    torch.testing.assert_close(ours[1], theirs[1])
    # Over all samples, weighed by the student, value and gradient are those of KL(student || teacher)
    one_s, one_t = student[:1], teacher[:1]
    exact = loss_and_grad(lambda s: generalized_jsd_loss(s, one_t, beta=1.0), one_s)
    draw = lambda y: loss_and_grad(
        lambda s: generalized_jsd_loss(s, one_t, torch.tensor([y]), beta=1.0, support="sampled"), one_s)
    draws = [draw(y) for y in range(5)]
    weights = one_s[0].softmax(-1)
    for part in (0, 1):
        torch.testing.assert_close(sum(w * d[part] for w, d in zip(weights, draws)), exact[part])


def test_the_tail_survives_where_the_model_is_sure():
    student = torch.tensor([[30.0, 0.0, -1.0, -2.0]])  # float32: the tail's mass of 1e-13 vanishes in 1 - p
    teacher = torch.tensor([[0.0, 2.0, 0.0, 0.0]])
    t = 1 / (3 + math.exp(2))  # the teacher's probability of the student's favourite
    by_hand = t * math.log(t) + (1 - t) * (math.log(1 - t) - (math.log(1 + math.exp(-1) + math.exp(-2)) - 30))
    assert generalized_jsd_loss(student, teacher, beta=0.0, top_k=1).item() == pytest.approx(by_hand, rel=1e-6)


def test_token_clip_bounds_each_entry():
    student, teacher = pair(2, 6)
    s, t = student.softmax(-1).tolist(), teacher.softmax(-1).tolist()
    for tau in (0.05, 10.0):
        by_loop = sum(min(q * math.log(q / p), tau) for ps, qs in zip(s, t) for p, q in zip(ps, qs)) / 2
        assert generalized_jsd_loss(student, teacher, beta=0.0, token_clip=tau).item() == pytest.approx(by_loop)
    clipped = generalized_jsd_loss(student, teacher, beta=0.0, token_clip=0.05)
    assert clipped < generalized_jsd_loss(student, teacher, beta=0.0)


# Gradients

@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", (
    {}, {"top_k": 3}, {"top_k": 3, "tail": False}, {"top_k": 3, "support": "teacher_top_k"}, {"temperature": 1.7},
    {"token_clip": 0.2},
), ids=str)
def test_gradcheck(beta, options):
    student, teacher = pair(2, 3, 8, grad=True)
    labels = torch.tensor([[1, -100, 3], [-100, 2, 0]])
    assert torch.autograd.gradcheck(lambda s: generalized_jsd_loss(s, teacher, labels, beta, **options), (student,))


@pytest.mark.parametrize("loss", (
    generalized_jsd_loss, taid_loss, entropy_aware_opd_loss,
    lambda s, t, y: generalized_jsd_loss(s, t, y, beta=0.0),
    lambda s, t, y: generalized_jsd_loss(s, t, y, beta=1.0),
    lambda s, t, y: generalized_jsd_loss(s, t, y, top_k=2),
    lambda s, t, y: generalized_jsd_loss(s, t, y, top_k=2, support="teacher_top_k"),
    lambda s, t, y: generalized_jsd_loss(s, t, y, beta=1.0, support="sampled"),
))
def test_no_gradient_reaches_the_teacher(loss):
    student, teacher = pair(3, 6, grad=True)
    teacher.requires_grad_()
    loss(student, teacher, torch.tensor([0, 1, 2])).backward()
    assert student.grad.abs().sum() > 0 and teacher.grad is None


# Numerics

@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", ({}, {"top_k": 3}, {"top_k": 5}, {"top_k": 3, "support": "teacher_top_k"}), ids=str)
def test_entries_ruled_out_on_both_sides_are_as_if_absent(beta, options):
    student, teacher = pair(4, 6)
    pad = torch.full((4, 3), -math.inf, dtype=torch.float64)
    padded = torch.cat([teacher, pad], -1)
    value, grad = loss_and_grad(lambda s: generalized_jsd_loss(s, padded, beta=beta, **options),
                                torch.cat([student, pad], -1))
    expected, expected_grad = loss_and_grad(lambda s: generalized_jsd_loss(s, teacher, beta=beta, **options), student)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, torch.cat([expected_grad, torch.zeros_like(pad)], -1))


def test_an_entry_ruled_out_on_one_side():
    s, t = torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([[0.0, 0.0, 0.0]])
    assert generalized_jsd_loss(s, t, beta=0.0).item() == math.inf  # the student cannot cover the teacher
    assert generalized_jsd_loss(s, t, beta=1.0).item() == pytest.approx(math.log(1.5))
    value, grad = loss_and_grad(lambda x: generalized_jsd_loss(x, t, beta=0.5), s)
    # m = (5/12, 5/12, 1/6)
    by_hand = 0.5 * math.log(0.5 / (5 / 12)) + 0.5 * (2 / 3 * math.log(1 / 3 / (5 / 12)) + math.log(2) / 3)
    assert value.item() == pytest.approx(by_hand)
    assert grad.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_is_computed_in_float32(beta, dtype):
    student, teacher = pair(3, 40, dtype=dtype)
    loss = generalized_jsd_loss(student, teacher, beta=beta, top_k=5)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, generalized_jsd_loss(student.float(), teacher.float(), beta=beta, top_k=5), rtol=0,
                               atol=0)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", (None, 3))
def test_huge_logits_stay_finite_where_the_answer_is(beta, top_k):
    student = torch.tensor([[1e4, 0.0, -1e4, 3.0]])
    value, grad = loss_and_grad(lambda s: generalized_jsd_loss(s, student + 7.0, beta=beta, top_k=top_k), student)
    assert value.item() == pytest.approx(0.0, abs=1e-6) and grad.isfinite().all()


@pytest.mark.parametrize("loss", (generalized_jsd_loss, taid_loss, entropy_aware_opd_loss,
                                  lambda s, t, y: generalized_jsd_loss(s, t, y, beta=1.0, top_k=2)))
@pytest.mark.parametrize("reduction", ("batchmean", "sum"))
def test_all_masked_is_an_exact_zero_with_a_graph(loss, reduction):
    student = torch.full((2, 3, 5), math.nan, requires_grad=True)
    out = loss(student, torch.full((2, 3, 5), math.nan), torch.full((2, 3), -100))
    out.backward()
    assert out.item() == 0.0 and student.grad.eq(0).all()


def test_masked_positions_are_not_looked_at():
    student, teacher = pair(1, 3, 5, grad=True)
    labels = torch.tensor([[2, -100, 1]])
    with torch.no_grad():
        student[0, 1], teacher[0, 1] = math.nan, math.inf
    loss = generalized_jsd_loss(student, teacher, labels)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all() and student.grad[0, 1].eq(0).all()


# Properties

@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), beta=st.sampled_from(BETAS), k=st.integers(1, 8), shift=st.floats(-50, 50))
def test_properties(seed, beta, k, shift):
    student, teacher = logits(2, 8, seed=seed), logits(2, 8, seed=seed + 1)
    of = lambda s, t, **kw: generalized_jsd_loss(s, t, beta=beta, **kw).item()
    full = of(student, teacher)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    assert full >= -1e-12
    assert of(student, student) == pytest.approx(0, abs=1e-12)
    assert of(student + shift, teacher - shift) == pytest.approx(full, abs=1e-9)
    assert of(student[:, order], teacher[:, order]) == pytest.approx(full, abs=1e-9)
    assert -1e-12 <= of(student, teacher, top_k=k) <= full + 1e-9  # merging entries never increases a divergence
    if 0 < beta < 1:
        assert full <= -(beta * math.log(beta) + (1 - beta) * math.log(1 - beta)) + 1e-9  # the entropy of the mixing


# TAID and the gate


def test_taid_of_entries_that_are_ruled_out_is_as_if_they_were_absent():
    student, teacher = pair(3, 6)
    pad = torch.full((3, 2), -math.inf, dtype=torch.float64)
    for t in (0.0, 0.4, 1.0):
        padded = taid_loss(torch.cat([student, pad], -1), torch.cat([teacher, pad], -1), t=t)
        torch.testing.assert_close(padded, taid_loss(student, teacher, t=t))


def test_taid_schedule_by_hand():
    schedule = TAIDScheduler(100, t_start=0.4, t_end=0.9, alpha=0.5, momentum=0.8)
    assert schedule.step(4.0) == pytest.approx(0.405)  # no loss to compare with: the line, 0.4 + 0.5 / 100
    assert schedule.step(2.0) == pytest.approx(0.405 + 0.5 / (1 + math.exp(-0.1)) * 0.595)  # m = 0.2 * 0.5
    after = schedule.t
    assert schedule.step(3.0) == pytest.approx(after + 0.5 / (1 + math.exp(0.02)) * (1 - after))  # m = 0.8 * 0.1 - 0.2 * 0.5
    after = schedule.t
    assert schedule.step(None) == pytest.approx(max(after, 0.42))
    assert schedule.previous_loss == 3.0 and schedule.average_change == pytest.approx(-0.02)
    for _ in range(200):
        schedule.step(3.0)
    assert schedule.t == 0.9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=40), st.integers(0, 40))
def test_taid_schedule_only_climbs_and_survives_a_checkpoint(losses, cut):
    whole, first, second = (TAIDScheduler(30, alpha=0.1) for _ in range(3))
    ts = [whole.step(x) for x in losses]
    assert all(a <= b for a, b in zip([0.4, *ts], ts)) and ts[-1] <= 1.0
    [first.step(x) for x in losses[:cut]]
    second.load_state_dict(first.state_dict())
    assert [second.step(x) for x in losses[cut:]] == ts[cut:]


def test_entropy_and_gate_against_torch():
    student, teacher = pair(5, 9)
    entropy = torch.distributions.Categorical(logits=teacher).entropy()
    torch.testing.assert_close(teacher_entropy(teacher), entropy)
    gate = (entropy / 1.2).clamp(0, 1)
    assert (gate == 1).any() and (gate < 1).any()
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    kl = lambda p, q: F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    expected = (gate * kl(t, s) + (1 - gate) * kl(s, t)).mean()
    torch.testing.assert_close(entropy_aware_opd_loss(student, teacher, h_max=1.2), expected)


TOP = {"full": {}, "student_top_k": dict(support="student_top_k", top_k=3),
       "teacher_top_k": dict(support="teacher_top_k", top_k=3),
       "renormalised": dict(support="student_top_k", top_k=3, tail=False)}


@pytest.mark.parametrize("support", TOP)
@pytest.mark.parametrize("temperature", (1.0, 1.7))
def test_taid_is_the_forward_kl_to_the_interpolated_logits_over_every_support(support, temperature):
    student, teacher = pair(4, 9)
    settings = Divergence(0.5, temperature, **TOP[support])  # the direction of the settings plays no part
    target = (0.7 * student + 0.3 * teacher) / temperature
    p, s = target.softmax(-1), (student / temperature).softmax(-1)
    if support != "full":
        ids = (target if support == "teacher_top_k" else student).topk(3).indices
        p, s = p.gather(1, ids), s.gather(1, ids)
        rest = (1 - p.sum(1, keepdim=True), 1 - s.sum(1, keepdim=True))
        p, s = (p / p.sum(1, keepdim=True), s / s.sum(1, keepdim=True)) if support == "renormalised" else \
            (torch.cat([p, rest[0]], 1), torch.cat([s, rest[1]], 1))
    torch.testing.assert_close(named_divergence("taid", settings, 0.3)(student, teacher, None),
                               (p * (p / s).log()).sum(1))


@pytest.mark.parametrize("support", TOP)
def test_the_gate_is_of_the_full_entropy_over_every_support(support):
    student, teacher = pair(4, 9)
    ways = [Divergence(beta, 1.3, **TOP[support])(student, teacher) for beta in (0.0, 1.0)]
    gate = torch.distributions.Categorical(logits=teacher / 1.3).entropy() / math.log(9)
    ours = named_divergence("entropy_aware", Divergence(0.5, 1.3, **TOP[support]))(student, teacher, None)
    torch.testing.assert_close(ours, gate * ways[0] + (1 - gate) * ways[1])


@pytest.mark.parametrize("support", TOP)
@pytest.mark.parametrize("name", ("jsd", "taid", "entropy_aware"))
def test_gradcheck_of_every_registered_divergence_over_every_support(name, support):
    student, teacher = pair(3, 6, grad=True)
    if name == "taid":  # the student within the target is held fixed, so the finite difference must hold it too
        target = (0.6 * student + 0.4 * teacher).detach()
        way, fixed = named_divergence("taid", Divergence(**TOP[support]), 1.0), target
        moving = named_divergence("taid", Divergence(**TOP[support]), 0.4)
        _, ours = loss_and_grad(lambda s: moving(s, teacher, None).sum(), student)
        _, held = loss_and_grad(lambda s: way(s, target, None).sum(), student)
        torch.testing.assert_close(ours, held)
    else:
        way, fixed = named_divergence(name, Divergence(**TOP[support])), teacher.detach()
    assert torch.autograd.gradcheck(lambda s: way(s, fixed, None), (student.detach().requires_grad_(),))


def test_one_sampled_token_is_no_distribution():
    for name in ("taid", "entropy_aware"):
        with pytest.raises(InputProblem, match="support='sampled' keeps one token"):
            named_divergence(name, Divergence(1.0, support="sampled"))


def test_bad_options_say_what_to_do():
    student, teacher = pair(2, 3)
    for build in (lambda: Divergence(-0.1), lambda: Divergence(temperature=0), lambda: Divergence(support="best"),
                  lambda: Divergence(support="full", top_k=2), lambda: Divergence(support="student_top_k", top_k=0),
                  lambda: Divergence(1.0, support="sampled", token_clip=1.0), lambda: Taid(-1),
                  lambda: EntropyAware(-1.0), lambda: generalized_jsd_loss(student, teacher, reduction="mean"),
                  lambda: generalized_jsd_loss(student, teacher[:1]),
                  lambda: taid_loss(student, teacher[:1], torch.tensor([0, 1])),
                  lambda: generalized_jsd_loss(student, teacher, torch.tensor([1])),
                  lambda: generalized_jsd_loss(student, teacher, beta=1.0, support="sampled")):
        with pytest.raises(ValueError, match=r"[;.] ?.*\.$"):
            build()
