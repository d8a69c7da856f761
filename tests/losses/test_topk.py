"""Selected entries and the rest, against probabilities written out, finite differences and the checkpointed way."""
import math

import pytest
import torch
from largest import Largest
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.losses import topk
from composer_replication.losses.chunked import LMHead, map_rows, token_terms
from composer_replication.losses.divergences import Divergence
from composer_replication.losses.topk import selected_terms

VOCAB, WIDTH, ROWS = 60, 6, 9
SUPPORTS = {
    "reverse": Divergence(1.0, support="student_top_k", top_k=5),
    "forward": Divergence(0.0, support="student_top_k", top_k=5),
    "jsd, hot": Divergence(0.3, 1.7, "student_top_k", 4),
    "cold": Divergence(1.0, 0.6, "student_top_k", 4),
    "renormalised": Divergence(1.0, support="student_top_k", top_k=5, tail=False),
    "clipped": Divergence(0.0, 1.3, "student_top_k", 5, token_clip=0.02),
    "teacher's": Divergence(0.0, support="teacher_top_k", top_k=5),
    "one": Divergence(1.0, support="student_top_k", top_k=1),
    "all": Divergence(0.5, support="student_top_k", top_k=VOCAB + 3),
    "sampled": Divergence(1.0, 1.4, "sampled"),
}
HEADS = {"plain": {}, "everything": {"bias": True, "scale": 1.6, "softcap": 2.5}}


def make(dtype=torch.float64, bias=False, grad=True, spread=1.0, **options):
    "Arguments of `token_terms` but the divergence, and the student's tensors."
    torch.manual_seed(5)
    hidden, weight = (torch.randn(shape, dtype=dtype) for shape in ((ROWS, WIDTH), (VOCAB, WIDTH)))
    leaves = [hidden, (weight * spread).to(dtype)] + ([torch.randn(VOCAB, dtype=dtype)] if bias else [])
    leaves = [leaf.requires_grad_(grad) for leaf in leaves]
    head = LMHead(*leaves[1:], **options)
    teacher = LMHead((torch.randn(VOCAB, WIDTH + 2, dtype=dtype) * spread).to(dtype))
    labels = torch.randint(VOCAB, (ROWS,))
    return (leaves[0], head, torch.randn(ROWS, WIDTH + 2, dtype=dtype), teacher, labels), leaves


def written_out(hidden, head, teacher_hidden, teacher_head, labels, how):
    "Row by row with probabilities instead of log-probabilities, and nothing of the package."
    def logits(h, head):
        z = (h @ head.weight.T + (0 if head.bias is None else head.bias)) * head.scale
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    s, t = logits(hidden, head) / how.temperature, logits(teacher_hidden, teacher_head).detach() / how.temperature
    values = []
    for p, q, y in zip(s.softmax(-1), t.softmax(-1), labels):  # p the student's, q the teacher's
        if how.support == "sampled":
            ratio = (p[y] / q[y]).log().detach()
            values.append(ratio + ratio * (p[y].log() - p[y].log().detach()))
            continue
        leader = p if how.support == "student_top_k" else q
        kept = leader.detach().argsort(descending=True)[:how.top_k]
        if len(kept) < VOCAB and how.tail:
            others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, kept, False)
            p, q = (torch.cat([x[kept], x[others].sum()[None]]) for x in (p, q))
        else:
            p, q = (x[kept] / x[kept].sum() for x in (p, q))
        m = how.beta * q + (1 - how.beta) * p
        if how.beta in (0, 1):
            terms = p * (p / q).log() if how.beta else q * (q / p).log()
        else:
            terms = how.beta * q * (q / m).log() + (1 - how.beta) * p * (p / m).log()
        values.append((terms if how.token_clip is None else terms.clamp(max=how.token_clip)).sum())
    return torch.stack(values)


UPSTREAM = torch.linspace(-2, 3, ROWS, dtype=torch.float64)


def gradients(values, leaves):
    return torch.autograd.grad((values * UPSTREAM.to(values.dtype)).sum(), leaves)


@pytest.mark.parametrize("limit", (2**20, 90), ids=("one tile", "tiles"))
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SUPPORTS)
def test_values_and_gradients_are_those_written_out(name, head, limit):
    args, leaves = make(**HEADS[head])
    values, of_student, of_teacher = selected_terms(*args, SUPPORTS[name], limit)
    expected = written_out(*args, SUPPORTS[name])
    torch.testing.assert_close(values, expected)
    for got, want in zip(gradients(values, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want)
    hidden, student, teacher_hidden, teacher, labels = args
    for found, logits in ((of_student, student.logits(hidden)), (of_teacher, teacher.logits(teacher_hidden))):
        known = (logits / SUPPORTS[name].temperature).log_softmax(-1)
        torch.testing.assert_close(found, known[range(ROWS), labels].detach())
    assert not of_student.requires_grad and not of_teacher.requires_grad


@pytest.mark.parametrize("name", [n for n in SUPPORTS if n not in ("clipped", "sampled")])  # which have no such slope
def test_gradients_against_finite_differences(name):
    args, leaves = make(bias=True, scale=1.2, softcap=4.0)

    def values(hidden, weight, bias):
        return selected_terms(hidden, LMHead(weight, bias, 1.2, 4.0), *args[2:], SUPPORTS[name], 100)[0]
    assert torch.autograd.gradcheck(values, leaves, fast_mode=True)


def test_many_rows_go_in_blocks(monkeypatch):
    args, leaves = make()
    how = SUPPORTS["reverse"]
    whole = selected_terms(*args, how, 300)
    expected = gradients(whole[0], leaves)
    monkeypatch.setattr(topk, "ROWS", 4)
    parts = selected_terms(*args, how, 300)
    for got, want in zip((*parts, *gradients(parts[0], leaves)), (*whole, *expected)):
        torch.testing.assert_close(got, want)


def test_a_small_tail_is_not_lost_to_rounding():
    # The tail's mass is 1e-12: one minus the sum of the others would be zero or noise in float32.
    logits = torch.cat([torch.tensor([30.0, 29.0]), torch.linspace(-1, 1, VOCAB - 2)])
    other = torch.cat([torch.tensor([30.0, 29.0]), torch.linspace(2, 1, VOCAB - 2)])
    one, how = torch.ones(1, 1), Divergence(1.0, support="student_top_k", top_k=2)
    entries = topk.select_entries(one, LMHead(logits[:, None]), torch.zeros(1, dtype=torch.long), how, 50).entries
    exact = logits.double()[2:].logsumexp(0)
    torch.testing.assert_close(entries[0, 2].double(), exact, rtol=1e-6, atol=0)
    weight = logits[:, None].requires_grad_()
    value = selected_terms(one, LMHead(weight), one, LMHead(other[:, None]), torch.zeros(1, dtype=torch.long), how, 50)[0]
    value.sum().backward()
    precise = logits[:, None].double().detach().requires_grad_()
    expected = how(precise.T, other[None].double())
    expected.sum().backward()
    torch.testing.assert_close(weight.grad[2:].double(), precise.grad[2:], rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ("reverse", "forward", "jsd, hot", "renormalised", "sampled"))
@pytest.mark.parametrize("alive", (3, 5, 20))
def test_impossible_tokens_stay_finite(name, alive):
    args, leaves = make(bias=True)
    hidden, head, teacher_hidden, teacher, labels = args
    bias = torch.where(torch.arange(VOCAB) < alive, 0.0, -math.inf).double()
    head, teacher = LMHead(head.weight, bias), LMHead(teacher.weight, bias)
    how, args = SUPPORTS[name], (hidden, head, teacher_hidden, teacher, labels % alive)
    ours, before = selected_terms(*args, how, 100)[0], map_rows(lambda s, t, y: (how(s, t, y),), *args)[0]
    torch.testing.assert_close(ours, before)
    assert ours.isfinite().all()
    for got, want in zip(gradients(ours, leaves[:2]), gradients(before, leaves[:2])):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want)


class Products(TorchDispatchMode):
    "Multiply-adds of all matrix products."

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear"):
            a, b = args[-2:]
            self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return out


@pytest.mark.parametrize("frozen", (False, True))
def test_the_teacher_is_projected_once_and_a_frozen_head_gets_no_product(frozen):
    torch.manual_seed(0)
    weight = torch.randn(500, 4, requires_grad=not frozen)
    hidden = torch.randn(10, 4, requires_grad=True)
    with Products() as seen:
        how = Divergence(1.0, support="student_top_k", top_k=5)
        values = selected_terms(hidden, LMHead(weight), hidden + 1, LMHead(weight), torch.arange(10), how, 1000)[0]
        forward = seen.count
        values.sum().backward()
    once = 10 * 500 * 4
    assert forward == 2 * once and seen.count - forward == (2 if frozen else 3) * once
    assert (weight.grad is None) == frozen and hidden.grad is not None


def test_a_frozen_body_gets_no_gradient_and_nothing_needs_none():
    args, (hidden, weight) = make()
    values = selected_terms(hidden.detach(), *args[1:], SUPPORTS["reverse"], 100)[0]
    values.sum().backward()
    assert hidden.grad is None and weight.grad is not None
    assert not selected_terms(*make(grad=False)[0], SUPPORTS["reverse"], 100)[0].requires_grad


def test_no_rows_is_a_zero_with_a_graph():
    (hidden, head, other, teacher, labels), leaves = make()
    for how in SUPPORTS.values():
        terms = token_terms(hidden[:0], head, other[:0], teacher, labels[:0], how)
        assert all(g.abs().sum() == 0 for g in torch.autograd.grad(terms.divergence.sum(), leaves))


@pytest.mark.parametrize("autocast", (False, True))
def test_low_precision_stays_near(autocast):
    args, leaves = make(torch.float32, spread=0.5)
    how = Divergence(0.0, support="teacher_top_k", top_k=5)  # the teacher's entries are the same whatever the rounding
    expected = selected_terms(*args, how, 300)[0]
    want = gradients(expected, leaves)
    _, _, other, teacher, labels = args
    if autocast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = selected_terms(*args, how, 300)[0]
        got = gradients(values, leaves)
    else:
        leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
        low = leaves[0], LMHead(leaves[1]), other.bfloat16(), LMHead(teacher.weight.bfloat16()), labels
        values = selected_terms(*low, how, 300)[0]
        got = gradients(values, leaves)
    assert values.dtype == torch.float32 and [g.dtype for g in got] == [leaf.dtype for leaf in leaves]
    assert not torch.equal(values, expected)
    torch.testing.assert_close(values, expected, rtol=0.05, atol=0.02)
    for a, b in zip(got, want):
        assert (a.float() - b).norm() < 0.03 * b.norm()


@pytest.mark.parametrize("options", ({}, {"bias": True}, {"scale": 0.5, "softcap": 2.0}))
def test_no_tensor_exceeds_the_limit(monkeypatch, options):
    monkeypatch.setattr(Largest, "numel", 0)
    args, leaves = make(torch.float32, **options)
    with Largest():
        values = selected_terms(*args, SUPPORTS["reverse"], 300)[0]
        values.sum().backward()
    # The gradient of the head is as large as the head; logits would be 540.
    assert Largest.numel == VOCAB * WIDTH < ROWS * VOCAB


def test_sums_over_tiles_and_blocks_of_rows_are_not_rounded_to_bfloat16(monkeypatch):
    torch.manual_seed(0)
    hidden, weight, other = (torch.randn(shape).bfloat16() for shape in ((256, 16), (4000, 16), (256, 16)))
    labels, how = torch.randint(4000, (256,)), Divergence(1.0, support="sampled")  # without ties

    def gradients(limit=2**23, rows=512):
        monkeypatch.setattr(topk, "ROWS", rows)
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        selected_terms(leaves[0], LMHead(leaves[1]), other, LMHead(weight), labels, how, limit)[0].sum().backward()
        return [leaf.grad.double() for leaf in leaves]

    for once, often in zip(gradients(), gradients(8 * 40, 8)):
        assert (often - once).norm() < 3e-4 * once.norm()
