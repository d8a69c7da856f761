"A divergence registered once reaches the harness, a step of the trainer and a recipe; TAID moves with the trainer's steps."

import pytest
import torch
import world
from datasets import Dataset
from played import played_once
from transformers import Qwen2Config, Qwen2ForCausalLM

from composer_replication.envs.toy.model import embedded_model
from composer_replication.hints.layers import default_composite
from composer_replication.losses.compose import compose_loss
from composer_replication.losses.distill import TAIDScheduler
from composer_replication.losses.divergences import DIVERGENCES, SCHEDULED, register_divergence
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.pack import pack_trees


class Kept(ComposerReplicationTrainer):
    "Keeps what each backward pass compared and what came out; logits are made of whole hidden states, without chunks."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes = []

    def _total(self, step, terms):
        if step.sites:
            rows, (states, head) = step.forward.hidden[tuple(step.batch.sdpo_student.T)].detach(), step.teacher
            self.passes.append((self.student.lm_head(rows).detach(), head.logits(states), terms["sdpo"].total.item()))
        return super()._total(step, terms)


def train(folder, steps=1, **changes):
    config = ComposerReplicationConfig(
        str(folder), report_to="none", bf16=False, use_cpu=True, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=128, max_turns=3, max_steps=steps, logging_steps=1, learning_rate=1e-3, save_strategy="no",
        gradient_checkpointing=False, seed=3, disable_tqdm=True, sdpo_importance_clip=None, teacher="frozen",
        teacher_check="off", sample_every=0, **changes)
    trainer = Kept(embedded_model(), None, config, Dataset.from_list(world.rows(8)), processing_class=world.tokenizer(),
                   environment_factory=world.Files, hint_source=default_composite())
    played_once(trainer).train()
    return trainer, [h for h in trainer.state.log_history if "sdpo/loss" in h]


@pytest.fixture
def hellinger():
    @register_divergence("hellinger")
    def make(settings, t):
        return lambda student, teacher, labels: (student.softmax(-1).sqrt() - teacher.softmax(-1).sqrt()).square().sum(-1) / 2

    yield
    del DIVERGENCES["hellinger"]


def distance(student, teacher):
    return 1 - (student.double().softmax(-1) * teacher.double().softmax(-1)).sqrt().sum(-1)  # another form of the same


def test_a_registered_divergence_reaches_the_harness(hellinger):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         initializer_range=0.2, num_attention_heads=2, num_key_value_heads=1)).eval()
    trunk = tuple(torch.randint(3, 64, (20,)).tolist())
    hinted = (40, 41, 42, *trunk[9:17])
    batch = pack_trees([Tree("t", trunk, (Span(1, 12, 17),), (Branch("hint", 1, 9, hinted, 6),))], 0)
    out = compose_loss(model, batch, sdpo_wrapper="hellinger")
    with torch.no_grad():
        student = model(torch.tensor([trunk])).logits[0, 11:16]
        teacher = model(torch.tensor([trunk[:9] + hinted])).logits[0, -6:-1]
    assert out.sdpo_jsd.item() == pytest.approx(distance(student, teacher).mean().item(), abs=1e-6)
    assert out.sdpo_jsd.item() > 1e-4


def test_a_registered_divergence_reaches_the_trainer(hellinger, tmp_path):
    trainer, (logged,) = train(tmp_path, sdpo_divergence="hellinger")
    (student, teacher, total), = trainer.passes
    assert total == pytest.approx(distance(student, teacher).sum().item(), abs=1e-4) and total > 0.01
    assert logged["sdpo/loss"] == pytest.approx(total / len(student), abs=1e-6) and "sdpo/t" not in logged


def test_a_registered_divergence_reaches_the_recipes(hellinger, tmp_path):
    recipe = load_recipe("toy", {"sdpo_divergence": "hellinger", "output_dir": str(tmp_path)})
    student, teacher = torch.randn(2, 3, 5)
    torch.testing.assert_close(recipe.config.divergence()(student, teacher, None).double(), distance(student, teacher))
    menu = "use 'jsd', 'taid', 'entropy_aware'.* or 'hellinger'"
    with pytest.raises(RecipeProblem, match=f"sdpo_divergence='cosine' is unknown; {menu}"):
        load_recipe("toy", {"sdpo_divergence": "cosine"})


@pytest.mark.parametrize("support", ("full", "student_top_k"))
def test_taid_in_the_trainer_is_the_closed_form_at_each_step(support, tmp_path):
    "KL of softmax((1 - t) student + t teacher) from the student; t is the scheduler's, one step after each optimizer step."
    trainer, logged = train(tmp_path, 2, sdpo_divergence="taid", sdpo_support=support)
    schedule = TAIDScheduler(2)
    assert len(trainer.passes) == len(logged) == 2
    for (student, teacher, total), step in zip(trainer.passes, logged):
        assert step["sdpo/t"] == pytest.approx(schedule.t)
        z = student.double()
        p, s = ((1 - schedule.t) * z + schedule.t * teacher.double()).softmax(-1), z.softmax(-1)
        if support == "student_top_k":
            ids = z.topk(20).indices
            p, s = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, s))
        by_hand = (p * (p / s).log()).sum().item()
        assert total == pytest.approx(by_hand, rel=1e-3, abs=1e-5) and by_hand > 0.01
        schedule.step(total / len(student))
    assert (logged[0]["sdpo/t"], trainer.schedule.steps) == (0.4, 2) and logged[1]["sdpo/t"] >= 0.7


def test_the_entropy_gate_in_the_trainer_is_the_closed_form(tmp_path):
    trainer, _ = train(tmp_path, sdpo_divergence="entropy_aware", sdpo_support="full")
    (student, teacher, total), = trainer.passes
    s, t = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    gate = -(t.exp() * t).sum(-1) / torch.tensor(float(s.shape[-1])).log()
    by_hand = gate * (t.exp() * (t - s)).sum(-1) + (1 - gate) * (s.exp() * (s - t)).sum(-1)
    assert total == pytest.approx(by_hand.sum().item(), rel=1e-3, abs=1e-4)


def test_only_a_channel_that_is_on_has_a_schedule(tmp_path):
    assert SCHEDULED == {"taid"}
    off = ComposerReplicationConfig(str(tmp_path), report_to="none", bf16=False, alpha_sdpo=0.0, sdpo_divergence="taid")
    assert off.schedule(5) is None
