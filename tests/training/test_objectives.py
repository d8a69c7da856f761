"""The objectives' settings, read from real configurations and held to the papers' equations written as slow loops."""
import math

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.losses.received import clipped_terms
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import make_trainer
from composer_replication.training.objectives import PO_OBJECTIVES, make_po_config, objective_settings

BUDGET = 16
LENGTHS = (7, 2, 5, 4)
ADVANTAGES = (1.3, -0.7, 0.4, -1.0)


def config(name, folder="out", **more):
    return make_po_config(name, GRPOConfig, output_dir=str(folder), bf16=False, report_to="none",
                          per_device_train_batch_size=4, num_generations=2, max_completion_length=BUDGET, **more)


# Settings

def test_overrides_win():
    assert config("gspo", steps_per_generation=2).steps_per_generation == 2
    assert config("gspo", generation_batch_size=8).steps_per_generation == 2
    assert config("dr_grpo", scale_rewards="batch").scale_rewards == "batch"


def test_the_menu_cannot_be_changed():
    with pytest.raises(TypeError):
        PO_OBJECTIVES["grpo"]["loss_type"] = "dapo"
    objective_settings("grpo")["loss_type"] = "dapo"
    assert objective_settings("grpo")["loss_type"] == "grpo"


# The papers' losses, each completion and token in turn, in Python floats. One micro-batch of an accumulation window:
# `window` is the number of tokens and `parts` the number of micro-batches in it.

def clipped(ratio, advantage, low, high):
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def sums(logps, old, low, high):
    return [sum(clipped(math.exp(p - q), a, low, high) for p, q in zip(row, was))
            for row, was, a in zip(logps, old, ADVANTAGES)]


def grpo(logps, old, window, parts):
    terms = [total / len(row) for total, row in zip(sums(logps, old, 0.2, 0.2), logps)]
    return -sum(terms) / len(terms) / parts


def dr_grpo(logps, old, window, parts):
    return -sum(sums(logps, old, 0.2, 0.2)) / (len(logps) * BUDGET) / parts


def bnpo(logps, old, window, parts):
    return -sum(sums(logps, old, 0.2, 0.2)) / sum(len(row) for row in logps) / parts


def dapo(logps, old, window, parts):
    return -sum(sums(logps, old, 0.2, 0.28)) / window


def gspo(logps, old, window, parts):
    total = 0.0
    for row, was, advantage in zip(logps, old, ADVANTAGES):
        ratio = math.exp(sum(p - q for p, q in zip(row, was)) / len(row))
        total += clipped(ratio, advantage, 3e-4, 4e-4)
    return -total / len(logps) / parts


def cispo(logps, old, window, parts, weights_at=None):
    "`weights_at`: the log-probs at which the weights are held, so that differences see them as constants."
    total = 0.0
    for row, was, at, advantage in zip(logps, old, weights_at or logps, ADVANTAGES):
        total += sum(min(math.exp(w - q), 5.0) * advantage * p for p, q, w in zip(row, was, at))
    return -total / window


ORACLES = {"grpo": grpo, "dr_grpo": dr_grpo, "bnpo": bnpo, "dapo": dapo, "gspo": gspo, "cispo": cispo}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    "What each trainer is made of."
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(4)])
    return embedded_model(), embedded_tokenizer(), rows, tmp_path_factory.mktemp("objectives")


def trainer_for(name, base, reward=lambda **_: [0.0], **more):
    model, tokenizer, rows, folder = base
    return GRPOTrainer(model, reward, config(name, folder, use_cpu=True, **more), rows, processing_class=tokenizer)


def batch(spread):
    "Log-probs now and then, (4, 7), padded with rubbish that the mask must hide; ratios spread around 1."
    made = torch.Generator().manual_seed(7)
    old = -2 * torch.rand(4, max(LENGTHS), generator=made, dtype=torch.float64) - 0.1
    logps = old + spread * torch.randn(4, max(LENGTHS), generator=made, dtype=torch.float64)
    mask = torch.tensor([[t < n for t in range(max(LENGTHS))] for n in LENGTHS])
    return torch.where(mask, logps, 50.0), torch.where(mask, old, 49.0), mask


def trl_loss(trainer, logps, old, mask, window, parts):
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logps, torch.zeros_like(logps), None)
    trainer.current_gradient_accumulation_steps = parts
    trainer.model.train()
    ids = torch.zeros(mask.shape, dtype=torch.long)
    return trainer._compute_loss(trainer.model, {
        "prompt_ids": ids[:, :1], "prompt_mask": torch.ones(4, 1, dtype=torch.long), "completion_ids": ids,
        "completion_mask": mask.long(), "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": old,
        # what TRL carries counts the generation batch, `steps_per_generation` micro-batches of it
        "num_items_in_batch": torch.tensor(window * trainer.args.steps_per_generation / parts)})


def lists(rows, mask):
    return [row[keep].tolist() for row, keep in zip(rows, mask)]


@pytest.mark.parametrize("spread", (2e-4, 1.5))
@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_trl_computes_the_papers_loss(name, spread, base):
    trainer, parts, window = trainer_for(name, base, gradient_accumulation_steps=2), 2, 41.0
    logps, old, mask = batch(spread)
    logps.requires_grad_()
    loss = trl_loss(trainer, logps, old, mask, window, parts)
    now, then = lists(logps.detach(), mask), lists(old, mask)
    assert loss.item() == pytest.approx(ORACLES[name](now, then, window, parts), rel=1e-9)
    # the gradient, against differences of the oracle
    held = {"weights_at": now} if name == "cispo" else {}
    loss.backward()
    assert not logps.grad[~mask].any()
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [list(values) for values in now]
                moved[row][t] += step
                sides.append(ORACLES[name](moved, then, window, parts, **held))
            assert logps.grad[row, t].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-8)


# Advantages and the mask, through TRL's own generation step

REWARDS = (1.0, 0.0, 0.5, 0.25)


@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_advantages_and_truncation(name, base):
    trainer = trainer_for(name, base, lambda completions, **_: list(REWARDS[:len(completions)]))
    tokenizer = base[1]
    end = tokenizer.eos_token_id
    completions = [[20, 21, end], [20, 21, 22], [20, end], [20, 21, 22, end]]  # the second was cut off

    def sampled(prompts, *rest, **_):
        return completions, None

    trainer._generate_single_turn = sampled
    rows = [{"prompt": [{"role": "user", "content": "a"}]}] * 2 + [{"prompt": [{"role": "user", "content": "b"}]}] * 2
    trainer.model.train()
    made = trainer._generate_and_score_completions(rows)
    expected = []
    for group in (REWARDS[:2], REWARDS[2:]):
        mean = sum(group) / 2
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group))  # of a sample of two
        expected += [(r - mean) / (1.0 if name == "dr_grpo" else deviation + 1e-4) for r in group]
    assert made["advantages"].tolist() == pytest.approx(expected, rel=1e-5)
    counted = made["completion_mask"].sum(1).tolist()
    assert counted == ([3, 0, 2, 4] if name == "dapo" else [3, 3, 2, 4])


@pytest.mark.parametrize("spread", (0.15, 1.5))
def test_the_terms_for_other_trainers_are_trls(spread, base):
    trainer, (logps, old, mask) = trainer_for("dr_grpo", base), batch(spread)
    theirs, ours = logps.clone().requires_grad_(), logps.clone().requires_grad_()
    loss = trl_loss(trainer, theirs, old, mask, 41.0, 1)
    terms = clipped_terms(ours, old, torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None])
    value = terms[mask].sum() / (len(mask) * trainer.max_completion_length)
    loss.backward(), value.backward()
    torch.testing.assert_close(value, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.trainer
def test_turns_that_end_where_the_template_does_are_whole_for_dapo(tmp_path):
    "A base model whose end of sequence is another token than the one that ends a turn."
    tokenizer, model = embedded_tokenizer(), embedded_model()
    own = tokenizer.eos_token_id
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(next(i for i in range(9, 99) if i not in tokenizer.all_special_ids))
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "m")
    settings = {"model": str(tmp_path / "m"), "objective": "dapo", "output_dir": str(tmp_path / "o")}
    trainer = make_trainer(load_recipe("toy", settings))
    assert trainer.args.mask_truncated_completions and {own, tokenizer.eos_token_id} <= set(trainer.eos_token_ids)
