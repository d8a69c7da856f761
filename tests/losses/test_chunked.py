"""Chunked projections against naive ones, values and gradients, and how much they ever hold."""
import pytest
import torch
import torch.nn.functional as F
from largest import Largest
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from composer_replication.losses import chunked
from composer_replication.losses.chunked import LMHead, lm_head, map_rows, token_logprobs, token_terms
from composer_replication.losses.distill import EntropyAware, Taid
from composer_replication.losses.divergences import Divergence

TINY = dict(vocab_size=80, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, bos_token_id=0, eos_token_id=1, pad_token_id=2)
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=0.2)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.0625)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=4.0)),
    "falcon-h1": lambda: FalconH1ForCausalLM(FalconH1Config(
        **TINY, lm_head_multiplier=0.3, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=1)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**(TINY | {"num_key_value_heads": 2}))),  # a head with a bias
}
DIVERGENCES = {
    "forward": Divergence(0.0), "jsd": Divergence(0.3), "reverse": Divergence(1.0, temperature=1.5),
    "top": Divergence(1.0, support="student_top_k", top_k=5), "clip": Divergence(0.0, token_clip=0.01),
    "sampled": Divergence(1.0, support="sampled"), "taid": Taid(0.4), "gate": EntropyAware(3.0),
}


@pytest.fixture(params=(2**23, 200), ids=("one chunk", "many chunks"))
def chunk(request, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", request.param)


def setup(name, dtype=torch.float32):
    torch.manual_seed(3)
    model = FAMILIES[name]().eval().to(dtype)
    if getattr(model.lm_head, "bias", None) is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    ids = torch.randint(3, 80, (1, 15))
    return model, ids, ids[0, 1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_the_models_own_logits(name, chunk):
    model, ids, labels = setup(name)
    weights = torch.linspace(-1, 1, 14)
    naive = -F.cross_entropy(model(ids).logits[0, :-1], labels, reduction="none")
    expected = torch.autograd.grad((naive * weights).sum(), list(model.parameters()))
    ours = token_logprobs(model.base_model(ids).last_hidden_state[0, :-1], lm_head(model), labels)
    got = torch.autograd.grad((ours * weights).sum(), list(model.parameters()))
    for a, b in zip((ours, *got), (naive, *expected)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("which", DIVERGENCES)
def test_terms_are_those_of_whole_logits(which, chunk):
    student, ids, labels = setup("gemma2", torch.float64)
    teacher = setup("phi", torch.float64)[0]
    how = DIVERGENCES[which]
    whole_s, whole_t = student(ids).logits[0, :-1], teacher(ids).logits[0, :-1]
    naive = how(whole_s, whole_t, labels)
    expected = torch.autograd.grad(naive.square().sum(), list(student.parameters()))
    terms = token_terms(student.base_model(ids).last_hidden_state[0, :-1], lm_head(student),
                        teacher.base_model(ids).last_hidden_state[0, :-1], lm_head(teacher), labels, how,
                        temperature=1.7)
    terms.divergence.square().sum().backward()
    torch.testing.assert_close(terms.divergence, naive)
    for p, b in zip(student.parameters(), expected):
        torch.testing.assert_close(p.grad, b)
    warm = getattr(how, "temperature", 1.7)  # a divergence's own comes first
    torch.testing.assert_close(terms.student_logprobs, -F.cross_entropy(whole_s / warm, labels, reduction="none"))
    torch.testing.assert_close(terms.teacher_logprobs, -F.cross_entropy(whole_t / warm, labels, reduction="none"))
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("which", DIVERGENCES)
def test_a_live_teacher_shares_the_head_and_still_gets_no_gradient(which):
    model, ids, labels = setup("qwen2", torch.float64)
    hidden = model.base_model(ids).last_hidden_state[0, :-1].detach()
    other = hidden + torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    other.requires_grad_()
    head, how = lm_head(model), DIVERGENCES[which]
    terms = token_terms(hidden, head, other, head, labels, how)
    terms.divergence.sum().backward()
    frozen = F.linear(other, head.weight).detach()
    expected = torch.autograd.grad(how(F.linear(hidden, head.weight), frozen, labels).sum(), head.weight)[0]
    torch.testing.assert_close(head.weight.grad, expected)
    assert other.grad is None


def test_map_rows_stops_the_teachers_gradient_whatever_the_function():
    student, teacher = LMHead(torch.randn(9, 4, requires_grad=True)), LMHead(torch.randn(9, 4, requires_grad=True))
    hidden, other = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    out, = map_rows(lambda s, t, y: ((s * t).sum(-1),), hidden, student, other, teacher, torch.arange(3))
    out.sum().backward()
    assert student.weight.grad is not None and hidden.grad is not None
    assert teacher.weight.grad is None and other.grad is None


def test_gradient_of_the_heads_weight_against_finite_differences():
    model, ids, labels = setup("qwen2", torch.float64)
    hidden = model.base_model(ids).last_hidden_state[0, :4].detach().requires_grad_()
    other, labels = torch.randn(4, 16, dtype=torch.float64), labels[:4]
    weight = torch.randn(80, 16, dtype=torch.float64, requires_grad=True)
    teacher = LMHead(torch.randn(80, 16, dtype=torch.float64))
    for how in (Divergence(0.3), Divergence(1.0, support="student_top_k", top_k=5)):
        assert torch.autograd.gradcheck(
            lambda h, w, how=how: token_terms(h, LMHead(w), other, teacher, labels, how).divergence, (hidden, weight),
            fast_mode=True)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, LMHead(w), labels), (hidden, weight), fast_mode=True)


def test_no_tensor_exceeds_the_chunk(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 2**15)
    monkeypatch.setattr(Largest, "numel", 0)
    vocab, n = 3000, 1000
    head = LMHead((torch.randn(vocab, 4) * 0.1).requires_grad_())
    hidden, labels = torch.randn(n, 4, requires_grad=True), torch.arange(n)
    with Largest():
        loss = -token_logprobs(hidden, head, labels).mean()
        terms = token_terms(hidden, head, hidden + 0.1, head, labels,
                            Divergence(1.0, support="student_top_k", top_k=20))
        (loss + terms.divergence.mean()).backward()
    assert hidden.grad is not None and 2**14 < Largest.numel <= 2**15 < n * vocab


def test_bfloat16_runs_and_stays_near():
    model, ids, labels = setup("qwen2")
    hidden, head = model.base_model(ids).last_hidden_state[0, :-1].detach(), lm_head(model).detach()
    low = LMHead(head.weight.bfloat16())
    torch.testing.assert_close(token_logprobs(hidden.bfloat16(), low, labels), token_logprobs(hidden, head, labels),
                               rtol=1e-2, atol=1e-2)
    how = Divergence(1.0, support="student_top_k", top_k=5)
    terms = token_terms(hidden.bfloat16(), low, hidden.bfloat16() + 1, low, labels, how)
    assert terms.divergence.dtype == torch.float32


def test_misaligned_rows_and_vocabularies_are_refused():
    head, other = LMHead(torch.zeros(5, 2)), LMHead(torch.zeros(6, 2))
    h, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="not aligned"):
        token_terms(h, head, h[1:], head, y, Divergence())
    with pytest.raises(ValueError, match="not aligned"):
        token_terms(h, head, h, head, y[1:], Divergence())
    with pytest.raises(ValueError, match="must share one"):
        token_terms(h, head, h, other, y, Divergence())
