"""The composed loss against one plain forward per branch, finite differences and TRL; who is computed, and how much."""
import os
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from largest import Largest
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

from composer_replication.losses import channels, chunked
from composer_replication.losses.channels import reference_logps
from composer_replication.losses.compose import compose_loss, token_shift
from composer_replication.losses.divergences import Divergence
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.pack import pack_trees

VOCAB = 64
TINY = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.3)
FAMILIES = {
    "qwen2": lambda **kw: Qwen2ForCausalLM(Qwen2Config(**TINY | kw)),
    "llama": lambda **kw: LlamaForCausalLM(LlamaConfig(**TINY | kw)),
    "gemma2": lambda **kw: Gemma2ForCausalLM(Gemma2Config(**TINY | kw, head_dim=8, final_logit_softcapping=3.0,
                                                          sliding_window=8, attn_implementation="eager")),
}


def make_model(family="qwen2", seed=0, dtype=torch.float64, **kw):
    "A tiny random model, in float64 throughout where asked for: transformers' own norms pass through float32."
    torch.manual_seed(seed)
    model = FAMILIES[family](**kw).eval().to(dtype)
    if dtype == torch.float64:
        for name, module in list(model.named_modules()):
            if type(module).__name__ in ("Qwen2RMSNorm", "LlamaRMSNorm"):
                exact = torch.nn.RMSNorm(module.weight.numel(), module.variance_epsilon, dtype=dtype)
                model.set_submodule(name, exact)
    return model


def ids(n, seed):
    return tuple(torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def make_trees():
    "Two rows of unequal length: hints at two turns of the first and one of the second, three pairs, and a bare row."
    a, b, c = ids(30, 1), ids(17, 2), ids(9, 3)
    first = Tree("a", a, (Span(1, 5, 9), Span(3, 14, 20), Span(5, 26, 30)), (
        Branch("hint", 3, 10, (*ids(4, 4), *a[10:14], *a[14:20]), 8),
        Branch("chosen", 3, 13, (a[13], *ids(5, 5)), 1, 0),
        Branch("rejected", 3, 13, (a[13], *a[14:20]), 1, 0),
        Branch("hint", 1, 0, (*ids(2, 6), *a[0:5], *a[5:9]), 7),
        Branch("chosen", 5, 25, (a[25], *ids(2, 7)), 1, 1),
        Branch("rejected", 5, 25, (a[25], *a[26:30]), 1, 1)))
    second = Tree("b", b, (Span(2, 8, 13),), (
        Branch("rejected", 2, 7, (b[7], *ids(3, 8)), 1, 0),
        Branch("chosen", 2, 7, (b[7], *b[8:13]), 1, 0),
        Branch("hint", 2, 6, (*ids(3, 9), *b[6:8], *b[8:13]), 5)))
    return [first, Tree("c", c, (Span(1, 4, 8),)), second]


TREES = make_trees()


def logits_of(model, sequence):
    return model(torch.tensor([sequence])).logits[0]


def naive_parts(model, trees, teacher):
    "All that the terms need, one plain forward per sequence: completion and answer log-probabilities, hinted rows."
    completion, answers, lengths, students, teachers = [], {}, {}, [], []
    for number, tree in enumerate(trees):
        trunk = logits_of(model, tree.ids)
        for span in tree.spans:
            completion += [trunk[p - 1].log_softmax(-1)[tree.ids[p]] for p in range(span.start, span.end)]
        for branch in tree.branches:
            sequence = tree.ids[:branch.fork] + branch.ids
            targets = range(branch.fork + branch.start, len(sequence))
            if branch.kind == "hint":
                told = logits_of(teacher, sequence).detach()
                span = next(s for s in tree.spans if s.turn == branch.turn)
                students += [trunk[p - 1] for p in range(span.start, span.end)]
                teachers += [told[p - 1] for p in targets]
            else:
                said = logits_of(model, sequence).log_softmax(-1)
                answers[number, branch.pair, branch.kind] = sum(said[p - 1][sequence[p]] for p in targets)
                lengths[number, branch.pair, branch.kind] = len(targets)
    side = lambda of, kind: torch.stack([torch.as_tensor(of[k]) for k in sorted(of) if k[2] == kind])
    sides = (side(of, kind) for of in (answers, lengths) for kind in ("chosen", "rejected"))
    return completion, torch.stack(students), torch.stack(teachers), *sides


def naive(model, trees, teacher, reference, alpha=1.0, beta=1.0):
    completion, s, t, chosen, rejected, *_ = naive_parts(model, trees, teacher)
    _, _, _, ref_chosen, ref_rejected, *_ = naive_parts(reference, trees, teacher)
    lm_ce = -sum(completion) / len(completion)
    sdpo = compute_topk_self_distillation_loss(s, t, distillation_topk=20, distillation_alpha=1.0,
                                               distillation_add_tail=True).sum() / len(s)
    margin = 0.1 * ((chosen - rejected) - (ref_chosen - ref_rejected).detach())
    dpo = -F.logsigmoid(margin).mean()
    return lm_ce, sdpo, dpo, lm_ce + alpha * sdpo + beta * dpo


def gradients(loss, model):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, model.parameters())]


def parts(out):
    return out.lm_ce, out.sdpo_jsd, out.trace_replay_dpo, out.total


# Value and gradient of every term

@pytest.mark.parametrize("family", FAMILIES)
def test_every_term_and_its_gradient_is_that_of_plain_forwards(family):
    # Gemma's eager attention takes its softmax in float32, whatever the model
    dtype, tolerance = (torch.float32, dict(atol=1e-4, rtol=1e-3)) if family == "gemma2" else (torch.float64, {})
    model, reference = make_model(family, dtype=dtype), make_model(family, seed=1, dtype=dtype)
    batch = reference_logps(reference, pack_trees(TREES, 0))
    out = compose_loss(model, batch, alpha_sdpo=0.7, beta_replay=1.3)
    expected = naive(model, TREES, model, reference, 0.7, 1.3)
    for ours, theirs in zip(parts(out), expected):
        torch.testing.assert_close(ours, theirs, **tolerance)
        for a, b in zip(gradients(ours, model), gradients(theirs, model)):
            torch.testing.assert_close(a, b, **tolerance)
    assert out.metrics["sdpo/sites"] == 3 and out.metrics["sdpo/tokens"] == 15
    assert out.metrics["replay/pairs"] == 3 and out.metrics["replay/tokens"] == 5 + 6 + 2 + 4 + 3 + 5
    assert out.metrics["lm/tokens"] == 14 + 4 + 5


def test_float32_takes_trl_kernels_and_agrees():
    model, reference = make_model(), make_model(seed=1)
    batch = reference_logps(reference, pack_trees(TREES, 0))
    exact = compose_loss(model, batch)
    low = deepcopy(model).float()
    batch = replace(batch, ref_logps=batch.ref_logps.float())
    out = compose_loss(low, batch)
    for a, b in zip(parts(out), parts(exact)):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(out.total, low), gradients(exact.total, model)):
        torch.testing.assert_close(a, b.float(), rtol=1e-3, atol=1e-4)
    for divergence in (Divergence(0.0), Divergence(0.5)):
        a, b = (compose_loss(m, batch, divergence=divergence).sdpo_jsd for m in (low, model))
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("term", ("lm_ce", "sdpo_jsd", "trace_replay_dpo"))
def test_each_gradient_against_finite_differences(term):
    model, reference = make_model(), make_model(seed=1)
    batch, frozen, eps = reference_logps(reference, pack_trees(TREES, 0)), deepcopy(model), 1e-5
    live = gradients(getattr(compose_loss(model, batch), term), model)
    at = lambda: getattr(compose_loss(model, batch, teacher=frozen), term)  # the teacher stays while the student moves
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), live):
            step = torch.randn(p.shape, generator=generator, dtype=torch.float64) * eps
            p.add_(step)
            up = at()
            p.sub_(2 * step)
            down = at()
            p.add_(step)
            torch.testing.assert_close((gradient * step).sum(), (up - down) / 2, rtol=1e-4, atol=1e-6 * eps)


@pytest.mark.parametrize("wrapper", (None, "taid", "entropy_aware"))
def test_no_gradient_reaches_the_teacher(wrapper):
    model, teacher = make_model(), make_model(seed=1)
    batch = reference_logps(model, pack_trees(TREES, 0))
    out = compose_loss(model, batch, teacher=teacher, sdpo_wrapper=wrapper)
    out.total.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.numel() > 16)
    assert not batch.ref_logps.requires_grad
    # A live teacher is a frozen copy of the student as it is now
    live = gradients(compose_loss(model, batch, sdpo_wrapper=wrapper).sdpo_jsd, model)
    copy = gradients(compose_loss(model, batch, sdpo_wrapper=wrapper, teacher=deepcopy(model)).sdpo_jsd, model)
    for a, b in zip(live, copy):
        torch.testing.assert_close(a, b)


def test_a_teacher_of_another_size_is_read_right():
    model, teacher = make_model(), make_model("llama", seed=1, hidden_size=24)
    out = compose_loss(model, pack_trees(TREES, 0), beta_replay=0.0, teacher=teacher)
    _, s, t, *_ = naive_parts(model, TREES, teacher)
    expected = compute_topk_self_distillation_loss(s, t, distillation_topk=20, distillation_alpha=1.0,
                                                   distillation_add_tail=True)
    torch.testing.assert_close(out.sdpo_jsd, expected.mean())


def test_wrappers_and_simpo_against_plain_forwards():
    model, teacher = make_model(), make_model(seed=1)
    batch = pack_trees(TREES, 0)
    _, s, t, chosen, rejected, len_chosen, len_rejected = naive_parts(model, TREES, teacher)
    log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)
    kl = lambda p, q: F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    taid = kl((0.6 * s.detach() + 0.4 * t).log_softmax(-1), log_s).mean()
    gate = torch.distributions.Categorical(logits=t).entropy() / torch.tensor(float(VOCAB)).log()
    gated = (gate * kl(log_t, log_s) + (1 - gate) * kl(log_s, log_t)).mean()
    simpo = -F.logsigmoid(2 * chosen / len_chosen - 2 * rejected / len_rejected - 1).mean()
    get = lambda **kw: compose_loss(model, batch, dpo_variant="simpo", teacher=teacher, **kw)
    torch.testing.assert_close(get(sdpo_wrapper="taid").sdpo_jsd, taid)
    torch.testing.assert_close(get(sdpo_wrapper="entropy_aware").sdpo_jsd, gated)
    torch.testing.assert_close(get().trace_replay_dpo, simpo)


# A channel with nothing to do

def total_and_gradients(model, batch, **kw):
    out = compose_loss(model, batch, **kw)
    return out, gradients(out.total, model)


def test_zero_weights_are_channel_one_bit_for_bit(monkeypatch):
    model = make_model(dtype=torch.float32)
    batch = reference_logps(model, pack_trees(TREES, 0))
    bare = pack_trees([replace(t, branches=()) for t in TREES], 0)
    alone, expected = total_and_gradients(model, bare)
    monkeypatch.setattr(channels, "forward_branches", lambda *a, **k: pytest.fail("a channel that is off was computed"))
    out, got = total_and_gradients(model, batch, alpha_sdpo=0.0, beta_replay=0.0)
    assert torch.equal(out.total, out.lm_ce) and torch.equal(out.total, alone.lm_ce)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert {out.metrics[k] for k in ("sdpo/sites", "sdpo/tokens", "replay/pairs", "replay/tokens")} == {0}


def test_nothing_to_do_is_an_exact_zero_and_says_so(monkeypatch):
    model = make_model(dtype=torch.float32)
    bare = pack_trees([replace(t, branches=()) for t in TREES], 0)
    monkeypatch.setattr(channels, "forward_branches", lambda *a, **k: pytest.fail("a branch pass without branches"))
    out = compose_loss(model, bare)
    assert (out.sdpo_jsd.item(), out.trace_replay_dpo.item()) == (0.0, 0.0) and torch.equal(out.total, out.lm_ce)
    assert out.metrics == {"lm/tokens": 23, "sdpo/sites": 0, "sdpo/tokens": 0, "replay/pairs": 0, "replay/tokens": 0}
    for term in (out.sdpo_jsd, out.trace_replay_dpo):
        assert term.requires_grad and all(g.eq(0).all() for g in gradients(term, model))


def test_one_channel_off_leaves_the_other_alone(monkeypatch):
    model, passes = make_model(), []
    batch = reference_logps(make_model(seed=1), pack_trees(TREES, 0))
    whole, real = compose_loss(model, batch), channels.forward_branches
    def counted(*args, **kw):
        passes.append((kw["kinds"], torch.is_grad_enabled()))
        return real(*args, **kw)
    monkeypatch.setattr(channels, "forward_branches", counted)
    no_sdpo, no_replay = compose_loss(model, batch, alpha_sdpo=0.0), compose_loss(model, batch, beta_replay=0.0)
    assert passes == [(("chosen", "rejected"), True), (("hint",), False)]
    assert torch.equal(no_sdpo.total, whole.lm_ce + whole.trace_replay_dpo)
    assert torch.equal(no_replay.total, whole.lm_ce + whole.sdpo_jsd)


def test_each_channel_is_divided_by_its_own_count():
    model = make_model()
    reference = make_model(seed=1)
    one, three = (reference_logps(reference, pack_trees([TREES[0]] * n, 0)) for n in (1, 3))
    for a, b in zip(parts(compose_loss(model, one)), parts(compose_loss(model, three))):
        torch.testing.assert_close(a, b)
    alone = compose_loss(model, one)
    with_bare_row = compose_loss(model, reference_logps(reference, pack_trees([TREES[0], TREES[1]], 0)))
    torch.testing.assert_close(alone.sdpo_jsd, with_bare_row.sdpo_jsd)
    torch.testing.assert_close(alone.trace_replay_dpo, with_bare_row.trace_replay_dpo)


def test_a_trace_without_completion_tokens():
    model = make_model()
    out = compose_loss(model, pack_trees([Tree("empty", ids(6, 1), ())], 0))
    assert out.total.item() == 0.0 and out.metrics["lm/tokens"] == 0
    assert all(g.eq(0).all() for g in gradients(out.total, model))


# What a report shows

def test_token_shift_against_plain_forwards():
    model, teacher = make_model(), make_model(seed=1)
    shifts = token_shift(model, pack_trees(TREES, 0), k=4, teacher=teacher)
    expected = []
    for tree in TREES:
        trunk = logits_of(model, tree.ids).log_softmax(-1)
        for branch in (b for b in tree.branches if b.kind == "hint"):
            span = next(s for s in tree.spans if s.turn == branch.turn)
            told = logits_of(teacher, tree.ids[:branch.fork] + branch.ids).log_softmax(-1)
            offset = branch.fork + branch.start - span.start
            expected += [(tree.ids[p], trunk[p - 1], told[p + offset - 1]) for p in range(span.start, span.end)]
    assert [s.label for s in shifts] == [e[0] for e in expected]
    assert [s.site for s in shifts] == [0] * 6 + [1] * 4 + [2] * 5
    for shift, (label, s, t) in zip(shifts, expected):
        assert (shift.student_logprob, shift.teacher_logprob) == pytest.approx((s[label].item(), t[label].item()))
        likeliest = (s.exp() + t.exp()).argsort(descending=True)[:4].tolist()
        assert [a[0] for a in shift.alternatives] == likeliest
        for i, p, q in shift.alternatives:
            assert (p, q) == pytest.approx((s[i].exp().item(), t[i].exp().item()))
    out = compose_loss(model, pack_trees(TREES, 0), beta_replay=0.0, teacher=teacher)
    assert sum(s.divergence for s in shifts) / len(shifts) == pytest.approx(out.sdpo_jsd.item())


def test_reference_logps_against_plain_forwards():
    reference = make_model(seed=1)
    batch = reference_logps(reference, pack_trees(TREES, 0))
    _, _, _, chosen, rejected, *_ = naive_parts(reference, TREES, reference)
    torch.testing.assert_close(batch.ref_logps[0::2], chosen.detach())
    torch.testing.assert_close(batch.ref_logps[1::2], rejected.detach())
    assert reference_logps(reference, pack_trees([TREES[1]], 0)).ref_logps.shape == (0,)


# Memory

@pytest.mark.parametrize("time", (100, 400))
def test_no_tensor_of_time_by_vocabulary(monkeypatch, time):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 2**15)
    monkeypatch.setattr(Largest, "numel", 0)
    vocab = 6000
    model = make_model(dtype=torch.float32, vocab_size=vocab, hidden_size=4, num_attention_heads=1)
    trunk = ids(time, 1)
    tree = Tree("long", trunk, (Span(1, 5, time - 20), Span(3, time - 15, time)), (
        Branch("hint", 3, time - 18, (4, *trunk[time - 18:]), 4),
        Branch("chosen", 3, time - 16, (trunk[time - 16], 7, 8), 1, 0),
        Branch("rejected", 3, time - 16, trunk[time - 16:], 1, 0)))
    batch = pack_trees([tree], 0)
    with Largest():
        batch = reference_logps(model, batch)
        compose_loss(model, batch).total.backward()
        token_shift(model, batch)
    assert Largest.numel <= 2**15 < time * vocab / 8
