"A teacher's top entries as they arrive: in half precision too."

import math

import pytest
import torch

from composer_replication.losses.divergences import Divergence
from composer_replication.losses.received import teacher_top_k_terms


def right(student, teacher, ids, beta):
    "The divergence over the entries and the tail from both whole distributions, in float64."
    sides = []
    for logits in (student, teacher):
        logprobs = logits.double().log_softmax(-1)
        rest = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        sides.append(torch.cat([logprobs.gather(-1, ids), rest], -1))
    s, t = sides
    if beta in (0.0, 1.0):
        s, t = (s, t) if beta else (t, s)
        return (s.exp() * (s - t)).sum(-1)
    mixture = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return (beta * t.exp() * (t - mixture) + (1 - beta) * s.exp() * (s - mixture)).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "dtype, worst, mean",
    [(torch.float64, 1e-5, 1e-5), (torch.float32, 1e-3, 1e-4), (torch.float16, 1.6, 0.15), (torch.bfloat16, 2.5, 0.5)],
)
@pytest.mark.parametrize("vocab, k, scale", [(97, 32, 4.0), (1000, 50, 2.0), (97, 1, 2.0)])
def test_a_teacher_in_half_precision_is_off_by_its_rounding_only(beta, dtype, worst, mean, vocab, k, scale):
    made = torch.Generator().manual_seed(1)
    teacher, student = torch.randn(400, vocab, generator=made) * scale, torch.randn(400, vocab, generator=made) * 2
    logprobs, ids = teacher.double().log_softmax(-1).topk(k)
    off = (teacher_top_k_terms(student, logprobs.to(dtype), ids, Divergence(beta)) - right(student, teacher, ids, beta)).abs()
    assert off.max() < worst and off.mean() < mean


@pytest.mark.parametrize("dtype, rest", [(torch.bfloat16, 3.7e-4), (torch.float16, 4.6e-5)])
def test_log_probabilities_that_sum_to_more_than_one_leave_the_tail_as_much_as_is_known(dtype, rest):
    # Both round upwards: their mass is above 1, and the student puts all of its own on the tail.
    chances = torch.linspace(0.3, 0.7, 4001, dtype=torch.float64)
    logprobs = torch.stack([chances, 1 - rest - chances], -1).log()
    above = logprobs.to(dtype).double().exp().sum(-1) > 1
    ids, student = torch.tensor([[0, 1]]).expand(above.sum(), 2), torch.zeros(int(above.sum()), 97)
    student[:, 5] = 40.0
    values = teacher_top_k_terms(student, logprobs[above].to(dtype), ids)
    assert (
        above.sum() > 100 and (values + math.log(rest)).abs().max() < 2.5
    )  # 7.9 nats are right for bfloat16; 15.9 had been given


def test_a_tail_is_never_likelier_than_its_tokens_can_be():
    logprobs = torch.tensor([[0.5, 0.5, 1e-9]]).log().bfloat16()  # 94 more, each at most 1e-9
    student = torch.zeros(1, 97)
    student[:, 5] = 40.0
    assert teacher_top_k_terms(student, logprobs, torch.tensor([[0, 1, 2]])) > 15.9


def test_a_certain_teacher_is_finite():
    logprobs = torch.tensor([[0.0, -torch.inf]])
    for dtype in (torch.float32, torch.bfloat16):
        values = teacher_top_k_terms(
            torch.zeros(1, 7, requires_grad=True), logprobs.to(dtype), torch.tensor([[0, 1]]), Divergence(0.0)
        )
        assert values.isfinite().all()
