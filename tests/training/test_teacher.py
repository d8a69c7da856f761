"""Teachers against closed forms, other libraries and faults: real training steps, PEFT, half precision, save and load."""
import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from composer_replication.losses.chunked import lm_head, token_terms
from composer_replication.losses.divergences import Divergence
from composer_replication.training import teacher as teacher_policy
from composer_replication.training.teacher import KINDS, make_teacher, reference_policy

TINY = dict(vocab_size=80, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, bos_token_id=0, eos_token_id=1, pad_token_id=2)
LORA = dict(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
IDS = torch.arange(5, 35).view(2, 15)


def policy(tied=True, dtype=torch.float32, lora=False, **options):
    torch.manual_seed(4)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=tied)).to(dtype)
    return get_peft_model(model, LoraConfig(**(LORA | options)), autocast_adapter_dtype=False) if lora else model


def train(model, steps, teacher=None, optimizer=None, rate=0.05):
    "Real steps of a real optimizer; the student's weights after each, in float64."
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    path = []
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if teacher is not None:
            teacher.after_step()
        path.append({n: p.detach().double() for n, p in model.named_parameters() if p.requires_grad})
    return path


def read(teacher):
    with teacher.using() as models:
        return [m(input_ids=IDS).logits for m in models]


def weights(model):
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("tied, lora, dtype", (
    (True, False, torch.float32), (False, False, torch.float32), (True, True, torch.float32), (True, False, torch.bfloat16)))
def test_ema_is_its_closed_form(tied, lora, dtype):
    "In float32 for a model in bfloat16 too, which reads its rounding: in bfloat16 alone it would not move."
    model = policy(tied, dtype, lora)
    start = {n: p.detach().double() for n, p in model.named_parameters() if p.requires_grad}
    teacher = make_teacher("ema", model, rate=0.2)
    path = train(model, 6, teacher)
    state = teacher.state_dict()
    assert state.keys() == start.keys() and all(t.dtype == torch.float32 for t in state.values())
    for name, first in start.items():
        expected = 0.8 ** 6 * first + sum(0.2 * 0.8 ** (5 - k) * step[name] for k, step in enumerate(path))
        torch.testing.assert_close(state[name].double(), expected, rtol=1e-5, atol=1e-6)
    assert sum((path[-1][n] - first).abs().max() for n, first in start.items()) > 1e-3
    with teacher.using() as (reader,):
        own = dict(reader.named_parameters())
        head, embedding = reader.get_output_embeddings().weight, reader.get_input_embeddings().weight
    assert (head is embedding) == tied
    prefix = "base_model.model." if lora else ""
    assert all(torch.equal(own[n.removeprefix(prefix)], t.to(dtype)) for n, t in state.items())


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_frozen_does_not_move_and_live_is_the_policy(lora):
    model = policy(lora=lora).eval()
    at_start = model(input_ids=IDS).logits.detach()
    frozen, live, region = (make_teacher(kind, model, mix=0.3) for kind in ("frozen", "live", "trust_region"))
    train(model, 4, rate=5.0 if lora else 0.05)
    model.eval()
    now = model(input_ids=IDS).logits.detach()
    assert (now - at_start).abs().max() > 1e-3
    assert torch.equal(read(frozen)[0], at_start)
    assert torch.equal(read(live)[0], now)
    assert [torch.equal(a, b) for a, b in zip(read(region), (at_start, now))] == [True, True]
    with live.using() as models:
        assert len(models) == 1 and models[0] is (model.get_base_model() if lora else model)
    assert [t.own_trunk for t in (live, frozen, region)] == [False, True, True]
    if lora:  # and the base model is not copied
        with frozen.using() as (reader,):
            theirs = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
            mine = {n for n, p in reader.named_parameters() if p.data_ptr() not in theirs}
        assert mine and all("lora_" in n for n in (*mine, *frozen.state_dict()))


@pytest.mark.parametrize("lora, fails", ((False, True), (True, False), (True, True)))
@pytest.mark.parametrize("kind", KINDS)
def test_using_leaves_the_student_as_it_was(kind, lora, fails):
    model = policy(lora=lora)
    teacher = make_teacher(kind, model)
    train(model, 2, teacher)
    (model.get_base_model() if lora else model).train().model.layers[1].eval()  # a mode of its own
    before, modes = weights(model), [m.training for m in model.modules()]
    trainable = [p.requires_grad for p in model.parameters()]
    with contextlib.suppress(KeyboardInterrupt), teacher.using() as models:
        assert not torch.is_grad_enabled() and not any(m.training for reader in models for m in reader.modules())
        if fails:
            raise KeyboardInterrupt
    assert torch.is_grad_enabled()
    assert same(before, weights(model)) and modes == [m.training for m in model.modules()]
    assert trainable == [p.requires_grad for p in model.parameters()]


def test_a_trained_adapter_is_the_start_and_an_adapter_named_ref_comes_first():
    model = policy(lora=True)
    train(model, 3, rate=5.0)
    model.eval()
    trained = model(input_ids=IDS).logits.detach()
    teacher = make_teacher("frozen", model)
    train(model, 2, rate=5.0)
    assert torch.equal(read(teacher)[0], trained)

    torch.manual_seed(9)
    model.add_adapter("ref", LoraConfig(**(LORA | dict(r=3, init_lora_weights=False))))
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    model.eval()
    model.set_adapter("ref", inference_mode=True)
    expected = model(input_ids=IDS).logits.detach()
    model.set_adapter("default")
    named = make_teacher("frozen", model)
    assert torch.equal(read(named)[0], expected) and not torch.equal(expected, trained)
    assert trainable == {n for n, p in model.named_parameters() if p.requires_grad}
    assert model.active_adapter == "default"


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_a_teacher(kind, lora):
    model = policy(lora=lora)
    teacher = make_teacher(kind, model)
    train(model, 1, teacher)
    causal = (model.get_base_model() if lora else model).eval()
    with teacher.using() as models:
        hidden = [m.base_model(IDS).last_hidden_state.flatten(0, 1) for m in models]
    states, head = teacher.combine(hidden, models)
    assert not states.requires_grad and not head.weight.requires_grad
    student = causal.base_model(IDS).last_hidden_state.flatten(0, 1)
    noise = torch.randn(student.shape, generator=torch.Generator().manual_seed(0))
    terms = token_terms(student + noise, lm_head(causal), states, head, IDS.flatten(), Divergence(0.0))
    terms.divergence.sum().backward()
    mine = {id(p) for p in model.parameters()}
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    for reader in models:
        assert all(p.grad is None for p in reader.parameters() if id(p) not in mine)


@pytest.mark.parametrize("mix, lora", ((0.0, False), (0.3, False), (0.3, True), (1.0, True)))
def test_trust_region_is_the_normalised_product_of_both_policies(mix, lora):
    model = policy(tied=False, dtype=torch.float64, lora=lora)
    teacher = make_teacher("trust_region", model, mix=mix)
    train(model, 3, rate=5.0 if lora else 0.5)
    with teacher.using() as models:
        hidden = [m.base_model(IDS).last_hidden_state.flatten(0, 1) for m in models]
        logp_ref, logp_now = (m(IDS).logits.flatten(0, 1).log_softmax(-1) for m in models)
    states, head = teacher.combine(hidden, models)
    product = ((1 - mix) * logp_ref + mix * logp_now).exp()
    expected = product / product.sum(-1, keepdim=True)
    torch.testing.assert_close(head.logits(states).softmax(-1), expected, rtol=1e-11, atol=0)
    assert (logp_ref - logp_now).abs().max() > 1e-2
    assert states.shape[1] == (16 if lora else 32)  # an untrained head is one and the same


@pytest.mark.parametrize("lora,dtype", ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)),
                         ids=("full", "lora", "bfloat16"))
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_uninterrupted_bit_for_bit(kind, lora, dtype, tmp_path):
    model = policy(lora=lora, dtype=dtype)
    teacher = make_teacher(kind, model)
    train(model, 3, teacher)
    teacher.save(tmp_path / "checkpoint" / "teacher")
    middle, said = weights(model), read(teacher)
    train(model, 3, teacher)

    again = policy(lora=lora, dtype=dtype)
    again.load_state_dict(middle)
    resumed = make_teacher(kind, again)  # as a new process would: the copy is of the weights at hand
    resumed.load(tmp_path / "checkpoint" / "teacher")
    assert all(torch.equal(a, b) for a, b in zip(read(resumed), said))
    if lora:  # dropout draws are part of a run; here both go on from the same place
        for m in (*model.modules(), *again.modules()):
            if isinstance(m, torch.nn.Dropout):
                m.p = 0.0
        model.load_state_dict(middle)
        teacher.load(tmp_path / "checkpoint" / "teacher")
        train(model, 3, teacher)
    train(again, 3, resumed)
    assert same(weights(model), weights(again))
    assert same(teacher.state_dict(), resumed.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(read(teacher), read(resumed)))
    assert [p.name for p in (tmp_path / "checkpoint" / "teacher").iterdir()] == [teacher_policy.FILE]


def test_loading_what_does_not_fit_is_refused_in_one_sentence(tmp_path):
    model = policy()
    make_teacher("ema", model).save(tmp_path)
    with pytest.raises(ValueError, match="this model needs"):
        make_teacher("ema", policy(tied=False)).load(tmp_path)
    with pytest.raises(ValueError, match="this model needs"):
        make_teacher("ema", policy(lora=True)).load(tmp_path)
    gemma = Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=5.0))
    with pytest.raises(ValueError, match="caps them"):
        make_teacher("trust_region", gemma)


def test_the_reference_shares_a_copy_of_the_start():
    model = policy()
    frozen, region, ema = (make_teacher(kind, model) for kind in ("frozen", "trust_region", "ema"))
    at_start = read(frozen)[0]
    train(model, 2, ema)
    assert reference_policy(model, frozen) is frozen
    shared = reference_policy(model, region)
    with shared.using() as (a,), region.using() as (b, _):
        assert a is b
    assert shared.kind == "frozen" and len(read(shared)) == 1 and torch.equal(read(shared)[0], at_start)
    now = model.eval()(IDS).logits
    assert torch.equal(read(reference_policy(model, ema))[0], now)  # made now, so its start is now
    assert torch.equal(read(reference_policy(model))[0], now)


@pytest.mark.parametrize("kind", ("ema", "trust_region"))
def test_a_head_that_an_adapter_trains_is_the_teachers_own(kind):
    model = policy(tied=False, dtype=torch.float64, lora=True, modules_to_save=["lm_head"])
    teacher = make_teacher(kind, model, rate=0.5)
    train(model, 2, teacher, rate=0.5)
    with teacher.using() as models:
        hidden = [m.base_model(IDS).last_hidden_state.flatten(0, 1) for m in models]
        logits = [m(IDS).logits.flatten(0, 1) for m in models]
    states, head = teacher.combine(hidden, models)
    torch.testing.assert_close(head.logits(states), sum(logits) / len(logits))
    assert any("lm_head" in name for name in teacher.state_dict())
    assert (logits[0] - model.eval()(IDS).logits.flatten(0, 1)).abs().max() > 1e-3
