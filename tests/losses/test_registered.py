"A divergence and a support of one line each reach every kernel, the harness, recipes and the trainer; the oracle is a loop."

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from composer_replication.losses import chunked
from composer_replication.losses.channels import SDPO_DIVERGENCE
from composer_replication.losses.chunked import LMHead, map_rows, token_terms
from composer_replication.losses.compose import compose_loss, token_shift
from composer_replication.losses.distill import EntropyAware, Taid
from composer_replication.losses.divergences import (
    DIVERGENCES,
    SUPPORTS,
    Divergence,
    generalized_jsd_loss,
    named_divergence,
    register_divergence,
    register_support,
)
from composer_replication.losses.received import teacher_top_k_terms
from composer_replication.recipes.recipe import load_recipe
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.pack import pack_trees

VOCAB, ROWS, K = 40, 7, 4
DISTANCES = {  # as registered, on log-probabilities; and on lists of probabilities
    "tv": (lambda p, q: (p.exp() - q.exp()).abs().sum(-1) / 2, lambda s, t: sum(abs(a - b) for a, b in zip(s, t)) / 2),
    "hellinger": (
        lambda p, q: ((p / 2).exp() - (q / 2).exp()).square().sum(-1) / 2,
        lambda s, t: 1 - sum(math.sqrt(a * b) for a, b in zip(s, t)),
    ),
    "plain_kl": (
        lambda p, q: (p.exp() * (p - q)).sum(-1),
        lambda s, t: sum(a * math.log(a / b) for a, b in zip(s, t) if a > 0),
    ),
}
PLACES = {  # as registered; and the entries of one row, from both sides' probabilities and the label
    "both_top_k": (
        lambda student, teacher, k: torch.cat([student.top(k), teacher.top(k)], -1),
        lambda s, t, y: {*best(s, K), *best(t, K)},
    ),
    "top_and_label": (
        lambda labels, teacher, k: torch.cat([labels.unsqueeze(-1), teacher.top(k)], -1),
        lambda s, t, y: {y, *best(t, K)},
    ),
    "twice_k": (lambda student, k: student.top(2 * k), lambda s, t, y: set(best(s, 2 * K))),
    "evens": (
        lambda student, labels: torch.arange(0, student.vocab, 2).expand(*labels.shape, -1),
        lambda s, t, y: set(range(0, VOCAB, 2)),
    ),
    "everything": (
        lambda student, teacher: torch.cat([student.top(99), teacher.top(99)], -1),
        lambda s, t, y: set(range(VOCAB)),
    ),
    "gaps": (
        lambda student, k: student.top(k).where(student.top(k) % 2 == 0, -1),
        lambda s, t, y: {i for i in best(s, K) if i % 2 == 0},
    ),
}


def best(p, k):
    return sorted(range(len(p)), key=lambda i: -p[i])[:k]


def settings(name, **options):
    return Divergence(
        support=name,
        top_k=K if name in ("both_top_k", "top_and_label", "twice_k", "gaps") or name.endswith("_top_k") else None,
        **options,
    )


def by_hand(distance, entries, student, teacher, labels, temperature=1.0, tail=True):
    "Loops over float64 probabilities and nothing of the package."
    values = []
    for s, t, y in zip(
        *((x.detach().double() / temperature).softmax(-1).tolist() for x in (student, teacher)), labels.tolist()
    ):
        kept = sorted(entries(s, t, y))
        s, t = ([*(p[i] for i in kept), *([sum(p[i] for i in range(VOCAB) if i not in kept)] if tail else [])]
                for p in (s, t))
        values.append(distance([a / sum(s) for a in s], [b / sum(t) for b in t]))
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(autouse=True)
def menus():
    kept = dict(DIVERGENCES), dict(SUPPORTS)
    for name, (function, _) in DISTANCES.items():
        register_divergence(name)(function)
    for name, (pick, _) in PLACES.items():
        register_support(name)(pick)
    yield
    for menu, before in zip((DIVERGENCES, SUPPORTS), kept):
        menu.clear()
        menu.update(before)


def sides(dtype=torch.float64, seed=4):
    g = torch.Generator().manual_seed(seed)
    hidden, weight, other, head = (
        torch.randn(shape, generator=g, dtype=dtype) for shape in ((ROWS, 5), (VOCAB, 5), (ROWS, 6), (VOCAB, 6))
    )
    student = LMHead(weight.requires_grad_(), torch.linspace(-1, 1, VOCAB, dtype=dtype), 1.2, 4.0)
    return (
        hidden.requires_grad_(),
        student,
        other.requires_grad_(),
        LMHead(head.requires_grad_()),
        torch.randint(VOCAB, (ROWS,), generator=g),
    )


ALL = {
    **PLACES,
    "student_top_k": (None, lambda s, t, y: set(best(s, K))),
    "teacher_top_k": (None, lambda s, t, y: set(best(t, K))),
    "full": (None, lambda s, t, y: set(range(VOCAB))),
}


@pytest.mark.parametrize("limit", (2**23, 60), ids=("one tile", "many tiles"))
@pytest.mark.parametrize("place", ALL)
@pytest.mark.parametrize("distance", ("hellinger", "plain_kl"))
def test_every_kernel_is_the_loop(distance, place, limit, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", limit)
    hidden, head, other, of_teacher, labels = sides()
    for temperature, tail in ((1.0, True), (1.7, place in ("everything", "gaps"))):
        how = named_divergence(distance, settings(place, temperature=temperature, tail=tail))
        wanted = by_hand(
            DISTANCES[distance][1],
            ALL[place][1],
            head.logits(hidden),
            of_teacher.logits(other),
            labels,
            temperature,
            tail and place not in ("full", "everything"),
        )
        on_logits = how(head.logits(hidden), of_teacher.logits(other), labels)
        (mapped,) = map_rows(lambda s, t, y, how=how: (how(s, t, y),), hidden, head, other, of_teacher, labels)
        terms = token_terms(hidden, head, other, of_teacher, labels, how)
        upstream, gradients = torch.linspace(1, 2, ROWS, dtype=torch.float64), []
        for values in (on_logits, mapped, terms.divergence):
            torch.testing.assert_close(values.detach(), wanted.to(values.dtype), rtol=1e-9, atol=1e-9)
            gradients.append(torch.autograd.grad((values * upstream).sum(), (hidden, head.weight)))
        for got in gradients[1:]:
            for a, b in zip(got, gradients[0]):
                torch.testing.assert_close(a, b)
        assert other.grad is None and of_teacher.weight.grad is None
        for logprobs, logits in (
            (terms.student_logprobs, head.logits(hidden)),
            (terms.teacher_logprobs, of_teacher.logits(other)),
        ):
            torch.testing.assert_close(logprobs, -F.cross_entropy(logits / temperature, labels, reduction="none"))


def test_gradients_are_those_of_finite_differences():
    hidden, head, other, of_teacher, labels = sides()
    for distance, place in (("hellinger", "both_top_k"), ("plain_kl", "gaps"), ("hellinger", "full")):
        how = named_divergence(distance, settings(place))
        assert torch.autograd.gradcheck(
            lambda h, w, how=how: token_terms(h, LMHead(w), other, of_teacher, labels, how).divergence,
            (hidden, head.weight),
            fast_mode=True,
        )


@pytest.mark.parametrize("place", PLACES)
def test_what_ships_takes_a_new_support(place):
    hidden, head, other, of_teacher, labels = sides()
    s, t = head.logits(hidden), of_teacher.logits(other)
    kl, tail, entries = DISTANCES["plain_kl"][1], place != "everything", PLACES[place][1]
    reverse, forward = (
        by_hand(kl, entries, s, t, labels, tail=tail),
        by_hand(lambda a, b: kl(b, a), entries, s, t, labels, tail=tail),
    )
    torch.testing.assert_close(
        token_terms(hidden, head, other, of_teacher, labels, settings(place, beta=1.0)).divergence.detach(), reverse
    )
    torch.testing.assert_close(
        generalized_jsd_loss(s, t, labels, 0.0, support=place, top_k=settings(place).top_k, reduction="none").detach(),
        forward
    )
    p = t.softmax(-1)
    gate = -(p * p.log()).sum(-1) / math.log(VOCAB)
    torch.testing.assert_close(
        EntropyAware(settings=settings(place))(s, t, labels).detach(), (gate * forward + (1 - gate) * reverse).detach()
    )
    if "student" in place or place == "evens":
        torch.testing.assert_close(
            Taid(0.3, settings(place))(s, t, labels).detach(),
            by_hand(lambda a, b: kl(b, a), entries, s, 0.7 * s + 0.3 * t, labels, tail=tail),
        )


def test_a_teacher_that_sends_its_best_entries_alone():
    hidden, head, other, of_teacher, labels = sides()
    s, t = head.logits(hidden), of_teacher.logits(other)
    sent = t.log_softmax(-1).topk(K)
    for name, (_, distance) in DISTANCES.items():
        values = teacher_top_k_terms(s, sent.values, sent.indices, named_divergence(name, Divergence()))
        torch.testing.assert_close(values.detach(), by_hand(distance, ALL["teacher_top_k"][1], s, t, labels))


def test_a_schedule_gives_its_t():
    register_divergence("mixed", scheduled=True)(
        lambda p, q, t: (1 - t) * (p.exp() * (p - q)).sum(-1) + t * (q.exp() * (q - p)).sum(-1)
    )
    hidden, head, other, of_teacher, labels = sides()
    args = hidden, head, other, of_teacher, labels
    reverse, forward = (token_terms(*args, settings("student_top_k", beta=beta)).divergence for beta in (1.0, 0.0))
    values = token_terms(*args, named_divergence("mixed", settings("student_top_k"), 0.25)).divergence
    torch.testing.assert_close(values, 0.75 * reverse + 0.25 * forward)
    assert DIVERGENCES["mixed"].scheduled


def tiny():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            initializer_range=0.3,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).eval()
    trunk = tuple(torch.randint(3, VOCAB, (20,)).tolist())
    hinted = (30, 31, 32, *trunk[9:17])
    with torch.no_grad():
        logits = model(torch.tensor([trunk])).logits[0, 11:16], model(torch.tensor([trunk[:9] + hinted])).logits[0, -6:-1]
    return (
        model,
        pack_trees([Tree("t", trunk, (Span(1, 12, 17),), (Branch("hint", 1, 9, hinted, 6),))], 0),
        logits,
        torch.tensor(trunk[12:17]),
    )


def test_the_harness_takes_both():
    model, batch, logits, labels = tiny()
    whole = compose_loss(model, batch, sdpo_wrapper="tv").sdpo_jsd.item()
    assert whole == pytest.approx(
        by_hand(DISTANCES["tv"][1], ALL["full"][1], *logits, labels, tail=False).mean().item(), abs=1e-6
    )
    how = named_divergence("tv", settings("both_top_k"))
    wanted = by_hand(DISTANCES["tv"][1], PLACES["both_top_k"][1], *logits, labels)
    assert compose_loss(model, batch, divergence=how).sdpo_jsd.item() == pytest.approx(wanted.mean().item(), abs=1e-6) != whole
    assert [row.divergence for row in token_shift(model, batch, divergence=how)] == pytest.approx(wanted.tolist(), abs=1e-6)


def test_the_recipes_take_both(tmp_path):
    from composer_replication.recipes.recipe import load_recipe
    from composer_replication.recipes.recipe_file import RecipeProblem

    changes = {"sdpo_divergence": "tv", "sdpo_support": "both_top_k", "sdpo_top_k": str(K), "output_dir": str(tmp_path)}
    hidden, head, other, of_teacher, labels = sides()
    s, t = head.logits(hidden), of_teacher.logits(other)
    values = load_recipe("toy", changes).config.divergence()(s, t)
    torch.testing.assert_close(values.detach(), by_hand(DISTANCES["tv"][1], PLACES["both_top_k"][1], s, t, labels))
    with pytest.raises(
        RecipeProblem, match="sdpo_support='eithr' is unknown; use 'full', 'student_top_k'.*'both_top_k'.* or 'gaps'"
    ):
        load_recipe("toy", changes | {"sdpo_support": "eithr"})
    with pytest.raises(RecipeProblem, match="support for another divergence"):
        load_recipe("toy", changes | {"sdpo_support": "sampled"})


@pytest.mark.parametrize("place", ("both_top_k", "student_top_k", "full"))
def test_a_step_of_the_trainer_is_the_loop(place, tmp_path):
    "With student_top_k the policy's own pass selects the entries."
    from kept_trainer import Compared, made
    from played import played_once

    from composer_replication.envs.toy.model import embedded_model

    trainer = played_once(
        made(tmp_path, model=embedded_model(), kind=Compared, alpha_sdpo=1.0, teacher="frozen", per_device_train_batch_size=4,
             max_completion_length=96, max_turns=2, sdpo_importance_clip=None, sdpo_divergence="hellinger", sdpo_support=place,
             sdpo_top_k=K)
    )
    trainer.train()
    passes = trainer.passes
    student, teacher, total = passes[0]
    wide = range(student.shape[1])
    entries = {
        "both_top_k": lambda s, t, y: {*best(s, K), *best(t, K)},
        "student_top_k": lambda s, t, y: best(s, K),
        "full": lambda s, t, y: wide,
    }[place]
    rest = by_hand_wide(entries, student, teacher, place != "full")
    assert total == pytest.approx(rest, rel=1e-3, abs=1e-4) and total > 0.001


def by_hand_wide(entries, student, teacher, tail):
    total = 0.0
    for s, t in zip(*(x.double().softmax(-1).tolist() for x in (student, teacher))):
        kept = list(entries(s, t, None))
        total += DISTANCES["hellinger"][1](
            *([*(p[i] for i in kept), *([max(1 - sum(p[i] for i in kept), 0.0)] if tail else [])] for p in (s, t))
        )
    return total


def test_a_mistake_is_one_sentence():
    hidden, head, other, of_teacher, labels = sides()
    args = hidden, head, other, of_teacher, labels
    with pytest.raises(
        ValueError, match="support 'odd' asks for 'logits'; name its parameters from student, teacher, labels and k"
    ):
        register_support("odd")(lambda logits: logits)
    for function, shape in ((lambda p, q: (p - q).abs(), r"\(7, 5\)"), (lambda p, q: (p - q).abs().sum(), r"\(\)")):
        register_divergence("wrong")(function)
        with pytest.raises(ValueError, match=rf"gave values {shape} for log-probabilities \(7, 5\); sum over the last axis"):
            token_terms(*args, named_divergence("wrong", settings("student_top_k")))
    given = []
    register_support("wrong")(lambda student: given[-1])
    for ids in (torch.full((ROWS, 1), VOCAB), torch.zeros(ROWS, 2), torch.zeros(ROWS, 0, dtype=torch.long)):
        given.append(ids)
        for attempt in (
            lambda: token_terms(*args, Divergence(support="wrong")),
            lambda: Divergence(support="wrong")(head.logits(hidden), of_teacher.logits(other)),
        ):
            with pytest.raises(ValueError, match=f"support 'wrong' gave .* it must give ids below {VOCAB}"):
                attempt()
    with pytest.raises(ValueError, match="support='top_and_label' needs the sampled ids; pass labels"):
        settings("top_and_label")(head.logits(hidden), of_teacher.logits(other))
    with pytest.raises(ValueError, match="support='bothtopk' is unknown; use full, student_top_k, .*both_top_k"):
        Divergence(support="bothtopk")
    with pytest.raises(ValueError, match="does not go with top_k=None"):
        Divergence(support="both_top_k")
    with pytest.raises(ValueError, match="does not go with top_k=3"):
        Divergence(support="evens", top_k=3)
    with pytest.raises(ValueError, match="token_clip bounds terms"):
        named_divergence("tv", Divergence(token_clip=0.1))
    with pytest.raises(ValueError, match="another support for another divergence"):
        named_divergence("tv", Divergence(1.0, support="sampled"))
    assert SDPO_DIVERGENCE == Divergence(1.0, support="student_top_k", top_k=20)


OWN = '''
import torch

from composer_replication import register_divergence


def hellinger(student, teacher):
    return ((student / 2).exp() - (teacher / 2).exp()).square().sum(-1) / 2


def sharper(student, teacher, share):
    return share * hellinger(student, teacher)


@register_divergence("sharper of mine", scheduled=True)
def sharper_by_t(student, teacher, t):
    return sharper(student, teacher, t)


def named_alike(settings, t):
    return hellinger(settings, t)


def either(student, teacher, k):
    return torch.cat([student.top(k), teacher.top(k)], -1)
'''


@pytest.mark.parametrize("name, scale", [("hellinger", 1.0), ("sharper_by_t", 0.25), ("named_alike", 1.0)])
def test_a_recipe_names_a_divergence_and_a_support_by_their_place(name, scale, tmp_path, monkeypatch):
    (tmp_path / "places_of_mine.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "places_of_mine", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    given = {"sdpo_divergence": f"places_of_mine:{name}", "sdpo_support": "places_of_mine:either", "sdpo_top_k": "3"}
    config = load_recipe("toy", given).config
    assert (config.schedule(3) is not None) == (name == "sharper_by_t"), "declared, not read off the parameters' names"
    student, teacher = torch.randn(5, 9).log_softmax(-1), torch.randn(5, 9).log_softmax(-1)
    found = config.divergence(0.25)(student, teacher)
    for row, (s, t) in enumerate(zip(student.exp().tolist(), teacher.exp().tolist())):
        kept = sorted({*best(s, 3), *best(t, 3)})
        sides = [[side[i] for i in kept] + [1 - sum(side[i] for i in kept)] for side in (s, t)]
        expected = scale * (1 - sum(math.sqrt(max(a, 0) * max(b, 0)) for a, b in zip(*sides)))
        assert found[row].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("key, place, said", [
    ("sdpo_divergence", "places_of_mine:nothing", "has no 'nothing' that makes a divergence"),
    ("sdpo_divergence", "places_of_mine:sharper", "sharper' does not take .logp_student, logp_teacher.: .*share.*declare it"),
    ("sdpo_support", "not_there_at_all:either", "there is no support 'not_there_at_all:either'"),
    ("sdpo_support", "places_of_mine:hellinger_", "has no 'hellinger_'")])
def test_a_place_that_holds_none_is_refused(key, place, said, tmp_path, monkeypatch):
    (tmp_path / "places_of_mine.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "places_of_mine", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        load_recipe("toy", {key: place})
