"What scores a policy is the policy that sampled, and what loads an adapter is the model that was trained."

import json
from contextlib import nullcontext

import pytest
import torch
import transformers as tf
from kept_trainer import trained
from peft import LoHaConfig, LoraConfig, get_peft_model
from trainer_script import BASE

from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.export import export_checkpoint
from composer_replication.recipes.memory_estimate import count_parameters
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.step import Steps
from composer_replication.training.teacher import without_dropout
from composer_replication.training.trainer import ComposerReplicationTrainer

pytestmark = [  # PEFT warns of what these tests try
    pytest.mark.filterwarnings("ignore:(.|\n)*tie_word_embeddings"), pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")]

SMALL = dict(vocab_size=101, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA = SMALL | dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
GPT = SMALL | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
FAMILIES = {  # where each keeps its dropout: modules, numbers of a module, or the configuration, read at every pass
    "qwen3": tf.Qwen3Config(**LLAMA, head_dim=8, attention_dropout=0.3),
    "llama": tf.LlamaConfig(**LLAMA, attention_dropout=0.3),
    "gptj": tf.GPTJConfig(**GPT, rotary_dim=4),
    "gpt_neox": tf.GPTNeoXConfig(
        **SMALL,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout=0.3,
        attention_dropout=0.3,
    ),
    "phi": tf.PhiConfig(**LLAMA, resid_pdrop=0.3, embd_pdrop=0.3, attention_dropout=0.3),
    "falcon": tf.FalconConfig(
        **SMALL, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.3, attention_dropout=0.3
    ),
    "mixtral": tf.MixtralConfig(**LLAMA, num_local_experts=4, attention_dropout=0.3, router_jitter_noise=0.3),
}
ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False),
    "loha": LoHaConfig(r=4, target_modules=["q_proj", "v_proj"], rank_dropout=0.5, module_dropout=0.5, init_weights=False),
}
IDS = torch.arange(3, 19).reshape(2, 8)


def passes_differ(model):
    "By how much a pass in training mode differs from the model that samples."
    with torch.no_grad():
        torch.manual_seed(1)
        passes = [model.train()(IDS).logits for _ in range(3)]
        return max((one - model.eval()(IDS).logits).abs().max().item() for one in passes)


@pytest.mark.parametrize("name", [*FAMILIES, *ADAPTERS])
def test_nothing_is_dropped_where_it_is_scored(name):
    "Two more families: the notebook of teachers."
    torch.manual_seed(0)
    adapted = name in ADAPTERS
    model = get_peft_model(embedded_model(), ADAPTERS[name]) if adapted else tf.AutoModelForCausalLM.from_config(FAMILIES[name])
    assert passes_differ(model) > 1e-3
    assert passes_differ(without_dropout(model)) < (1e-4 if adapted else 1e-5)


class ScoredSteps(Steps):
    "Keeps the last pass, with the log-probabilities of the policy objective, for the trainer."

    def _policy_loss(self, model, part):
        self.trainer.seen = part
        return super()._policy_loss(model, part)


class Scored(ComposerReplicationTrainer):
    steps_kind = ScoredSteps


@pytest.mark.parametrize("where", ["model", "adapter"])
def test_the_loss_scores_what_was_sampled(where, tmp_path):
    model, given = embedded_model("mild"), {}
    if where == "model":
        model.config.attention_dropout = 0.4
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.4
    else:
        settings = dict(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
        given["peft_config"] = LoraConfig(**settings)
    small = dict(alpha_sdpo=1.0, per_device_train_batch_size=4, max_completion_length=24)
    trainer = trained(tmp_path, rows=4, model=model, kind=Scored, given=given, **small)
    inputs, now = trainer.seen.inputs, trainer.seen.logprobs.detach()
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    assert mask.any() and (now - inputs["sampling_per_token_logps"])[mask].abs().max() < 1e-3


@pytest.mark.parametrize("setting", [{"disable_dropout": False}, {"neftune_noise_alpha": 5.0}])
def test_settings_that_score_another_policy_are_refused(setting, tmp_path):
    with pytest.raises(InputProblem, match="another policy than the one that sampled; leave it out"):
        ComposerReplicationConfig(str(tmp_path), **BASE | setting)


def test_a_recipe_has_no_dropout(tmp_path):
    text = "model: embedded\ntask: toy\nuse_peft: true\nlora_target_modules: [q_proj]\nuse_cpu: true\nbf16: false\n"
    (tmp_path / "r.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.model.lora_dropout == 0 and recipe.config.disable_dropout
    with pytest.raises(RecipeProblem, match="lora_dropout=0.05 would act in no pass.*leave it out"):
        load_recipe(tmp_path / "r.yaml", {"lora_dropout": "0.05"})


# ---- adapters at embeddings


TIED = {  # what an adapter may touch, and whether it can be trained here
    "plain": (dict(target_modules=["q_proj"]), True),
    "all-linear": (dict(target_modules="all-linear"), True),
    "embed": (dict(target_modules=["q_proj", "embed_tokens"]), False),
    "regex": (dict(target_modules=r".*(q_proj|embed_tokens)"), False),
    "dora": (dict(target_modules=["embed_tokens"], use_dora=True), False),
    "head": (dict(target_modules=["q_proj", "lm_head"]), False),
    "both": (dict(target_modules=["q_proj", "lm_head", "embed_tokens"]), False),
    "save embed": (dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), False),
    "save head": (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
    "save one": (dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True), True),
    "tokens": (dict(target_modules=["q_proj"], trainable_token_indices=[7, 9]), True),
}


def untied():
    model = embedded_model()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folders = {}
    for name, model in (("tied", embedded_model()), ("untied", untied())):
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        embedded_tokenizer().save_pretrained(folders[name])
    return folders


def adapter(base, folder, settings):
    "A saved adapter whose weights are all random, and its own logits."
    torch.manual_seed(0)
    model = get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05 * weight.requires_grad)
    model.save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        return ids, model.eval()(ids).logits


@pytest.mark.parametrize("name, base", [
    *((name, "tied") for name in TIED), *((name, "untied") for name in ("plain", "embed", "head", "save head"))])
def test_what_loads_an_adapter_is_the_adapter(name, base, bases, tmp_path):
    "In memory, and as exported; shared embeddings stay shared where the adapter leaves them so."
    ids, own = adapter(bases[base], tmp_path / "adapter", TIED[name][0])
    done = export_checkpoint(str(tmp_path / "adapter"), tmp_path / "out", True)
    assert 0 < done.difference < 1e-4
    for folder in ("adapter", "out"):
        with torch.no_grad():
            found = load_checkpoint(str(tmp_path / folder)).model(ids).logits
        assert (found - own).abs().max() < 1e-3, folder
    shares = base == "tied" and TIED[name][1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == shares


@pytest.mark.parametrize("name", TIED)
def test_adapters_at_embeddings_are_refused_before_training(name, bases):
    "On tied weights all that part them; on untied ones the output head's alone, which the loss would not read."
    settings, fits = TIED[name]
    for base, works in (("tied", fits), ("untied", name not in ("head", "both"))):
        refused = pytest.raises(InputProblem, match="leave the embeddings and the output head out of target_modules")
        with nullcontext() if works else refused:
            config = tf.AutoConfig.from_pretrained(bases[base])
            assert count_parameters(config, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))


def test_an_export_compares_with_the_adapter(bases, tmp_path, monkeypatch):
    "A merge that gave another model is refused, by the export and by all that loads it."
    adapter(bases["tied"], tmp_path / "adapter", TIED["embed"][0])
    monkeypatch.setattr("composer_replication.recipes.checkpoint.merge_adapter", lambda model: model.merge_and_unload())
    for act in (
        lambda: export_checkpoint(str(tmp_path / "adapter"), tmp_path / "out", True),
        lambda: load_checkpoint(str(tmp_path / "adapter")),
    ):
        with pytest.raises(InputProblem, match="is another model: its logits differ by"):
            act()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["name", "model", "adapter"])
def test_the_trainer_refuses_them_before_a_weight_is_loaded(given, bases, tmp_path, monkeypatch):
    peft = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    model = {"name": str(bases["tied"]), "model": embedded_model(), "adapter": get_peft_model(embedded_model(), peft)}[given]
    monkeypatch.setattr(tf.modeling_utils.PreTrainedModel, "from_pretrained", lambda *a, **k: pytest.fail("a weight was loaded"))
    with pytest.raises(InputProblem, match="are one weight"):
        trained(tmp_path, model=model, given={} if given == "adapter" else {"peft_config": peft})
