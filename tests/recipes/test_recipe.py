"""Recipes against the dataclasses they fill, every bad one before any weight is loaded, and plans against real models."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.model import embedded_path, embedded_tokenizer
from composer_replication.recipes import load, memory_estimate
from composer_replication.recipes import run as recipe_run
from composer_replication.recipes.memory_estimate import count_parameters, estimate
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem, shipped_recipes
from composer_replication.training import setup
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.objectives import PO_OBJECTIVES, make_po_config

sys.path.append(str(Path(__file__).resolve().parents[2] / "spikes"))
from published_shapes import published_shape

CPU = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=4, num_generations=4,
           report_to="none", max_steps=1)


@pytest.fixture
def no_weights(monkeypatch):
    "Loading or making weights fails the test."
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(load, "embedded_model", refuse)
    monkeypatch.setattr(torch, "load", refuse)


@pytest.fixture
def write(tmp_path):
    "A recipe of these settings on top of a small one."
    def write(text=None, **settings):
        path = tmp_path / "recipe.yaml"
        values = CPU | dict(task="toy", output_dir=str(tmp_path / "out")) | settings
        path.write_text(yaml.safe_dump(values) if text is None else text)
        return path
    return write


# What is read

def test_settings_are_those_of_the_dataclass_itself(write):
    values = dict(learning_rate=3e-5, alpha_sdpo=0.5, sdpo_token_clip=None, teacher="frozen", max_turns=3, top_p=0.9, seed=7,
                  lr_scheduler_kwargs={"num_cycles": 2}, generation_kwargs={"no_repeat_ngram_size": 3}, adam_beta2=0.95)
    ours = load_recipe(write(**values)).config.to_dict()
    direct = ComposerReplicationConfig(**CPU, **values, output_dir=ours["output_dir"]).to_dict()
    assert {k for k in direct if direct[k] != ours[k]} <= {"logging_dir", "run_name"}


@pytest.mark.parametrize("objective", list(PO_OBJECTIVES))
def test_an_objective_sets_what_make_po_config_sets(write, objective):
    ours = load_recipe(write(objective=objective, gradient_accumulation_steps=2, train_rows=64)).config
    theirs = make_po_config(objective, **CPU, gradient_accumulation_steps=2, output_dir=ours.output_dir)
    for name in ("loss_type", "scale_rewards", "epsilon", "epsilon_high", "importance_sampling_level", "steps_per_generation",
                 "mask_truncated_completions"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_what_the_recipe_names_wins_over_the_objective_and_set_wins_over_both(write):
    path = write(objective="dapo", epsilon_high=0.5)
    assert load_recipe(path).config.epsilon_high == 0.5
    assert load_recipe(path, {"epsilon_high": "0.7"}).config.epsilon_high == 0.7
    assert load_recipe(path, {"objective": "cispo"}).config.loss_type == "cispo"
    assert load_recipe(path, {"save_strategy": "no"}).config.save_strategy == "no"  # YAML alone would read a truth value


def test_lora_settings_reach_peft(write):
    recipe = load_recipe(write(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "up_proj"], dtype="bfloat16"))
    assert (recipe.model.lora_r, recipe.model.lora_target_modules, recipe.model.dtype) == (4, ["q_proj", "up_proj"], "bfloat16")


@pytest.mark.parametrize("settings, expected", [
    (dict(rollout="vllm"), (True, "colocate", True)), (dict(rollout="trl", use_vllm=True), (True, "colocate", False)),
    (dict(rollout="vllm", vllm_server_base_url="http://127.0.0.1:8000"), (True, "server", True))])
def test_vllm_shares_the_process_or_is_the_server_that_is_named(write, settings, expected):
    config = load_recipe(write(model="Qwen/Qwen2.5-Coder-7B-Instruct", **settings)).config
    assert (config.use_vllm, config.vllm_mode, config.our_loop) == expected


def test_without_vllm_one_sentence_says_what_to_install(write, no_weights, monkeypatch):
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    monkeypatch.setattr(recipe_run, "warmed", lambda *args: pytest.fail("the warm-up comes first"))
    with pytest.raises(ValueError, match="vLLM, which is not installed here; make an environment with it by") as caught:
        recipe_run.run_recipe(load_recipe(write(model="Qwen/Qwen2.5-Coder-7B-Instruct", rollout="vllm")))
    assert "\n" not in str(caught.value)


# What is refused

BAD = [
    (dict(lerning_rate=1), r"recipe.yaml: the key 'lerning_rate' is unknown; did you mean learning_rate.*Allowed are .*model, "),
    (dict(model_name_or_path="x"), "'model_name_or_path' is not for recipes; use `model`"),
    (dict(env={"A": "1"}), "'env' is not for recipes"),
    (dict(max_steps="many"), "max_steps=many will not do: invalid int value"),
    (dict(max_steps=None), "max_steps=null will not do: this setting is never none"),
    (dict(learning_rate=[1, 2]), "learning_rate=.* will not do: no list is wanted"),
    (dict(learning_rate={"a": 1}), "learning_rate=.* will not do: no mapping is wanted"),
    (dict(lora_target_modules=[["q"]]), "lora_target_modules=.*the list must hold plain values"),
    (dict(use_cpu="perhaps"), "use_cpu=perhaps will not do"),
    (dict(dtype="float8"), "dtype=float8 will not do: invalid choice"),
    (dict(save_strategy=False), "save_strategy=false will not do: .*quoted"),
    (dict(task=None, traces="a.jsonl", held_out_rows=1), "needs a task to measure on"),
    (dict(task=None, traces="a.jsonl", max_steps=-1), "max_steps=-1: without a task"),
    (dict(task=None, traces="a.jsonl", alpha_sdpo=0), "leave nothing to train on"),
    (dict(task=None, traces="a.jsonl", beta_replay=1, replay_pairs="group"), "group needs rollouts"),
    (dict(beta_replay=1, replay_pairs="siblings"), "siblings needs traces"),
    (dict(hints=["template", "oracle"]),
     "hints: there is no layer 'oracle'; use judge, learned, pattern_judge, raw_error, sibling, sql, template"),
    (dict(detectors="luck"),
     "detectors: there is no detector 'luck'; use (empty_result, )?ignored_format, long_explanation, repeated_call"),
    (dict(detectors="composer_replication.traces.habits:luck"), "has no 'luck' that makes a detector"),
    (dict(formats=["composer_replication.traces.habits:repeated_call"]), "has no 'repeated_call' that makes a format"),
    (dict(blame="everybody"), "blame: there is no 'everybody'; use shown or cause"),
    (dict(hints="judge"), "the layer 'judge' needs a model; set hint_judge"),
    (dict(hints=["template", "pattern_judge"]), "the layer 'pattern_judge' needs a model; set hint_judge"),
    (dict(hint_judge="m@http://127.0.0.1:1"), "no layer of these asks a model; add judge, or one of your own with .* `complete`"),
    (dict(hints="learned"), "hint_writer=None: the layer 'learned' needs a model"),
    (dict(hint_writer="embedded"), "no layer of these asks a model; add learned"),
    (dict(hints="learned", hint_writer="./nowhere"), "there is no folder of model './nowhere'"),
    (dict(task="chess"), "there is no environment 'chess'; use deletion, gsm8k, sql, toy"),
    (dict(task="no_such_module:Env"), "'no_such_module' ended with ModuleNotFoundError"),
    (dict(task="json:Nothing"), "module 'json' has no 'Nothing'"),
    (dict(task="deletion"), "task 'deletion' needs tasks; set tasks to a file"),
    (dict(guard_settings={"foo": 1}), "guard_settings: there is no 'foo'; use min_steps, decline_patience, ema_alpha"),
    (dict(guard_settings={"ema_alpha": "much"}), "guard_settings: ema_alpha='much' is no number"),
    (dict(alpha_sdpo=-1), "alpha_sdpo=-1.0 is out of range"),
    (dict(beta_replay=1.0), "beta_replay=1.0 and no replay_pairs"),
    (dict(beta_replay=1.0, replay_pairs="nowhere.jsonl"), "replay_pairs 'nowhere.jsonl' is no file"),
    (dict(train_rows=0), "train_rows=0"),
    (dict(train_rows=1, per_device_train_batch_size=8), "train_rows=1 is less than the 2 tasks"),
    (dict(held_out_rows=4, guard=False), "held_out_rows=4 with guard=false and eval_strategy=no"),
    (dict(eval_strategy="steps", eval_steps=1), "held_out_rows=0 with eval_strategy=steps"),
    (dict(num_generations=1), "(?i)generation"),
    (dict(per_device_train_batch_size=3), "divisible|multiple"),
    (dict(model="random:nowhere/config.json", tokenizer="x"), "there is no folder"),
    (dict(model=f"random:{embedded_path()}", tokenizer="x"), "has no config.json"),
    (dict(model=f"random:{embedded_path() / 'medium' / 'config.json'}"), "comes without a tokenizer"),
    (dict(task="gsm8k", alpha_sdpo=1), "no tool calls and so no error turns"),
    (dict(rollout="vllm"), "vLLM reads its weights from a folder or hub id, and model 'embedded' is made in memory"),
    (dict(rollout="vllm", task=None, traces="a.jsonl"), "vLLM samples nothing without a task"),
    (dict(agent={"command": "x"}, rollout="trl"), "agent with rollout: trl would change nothing"),
    (dict(agent={"command": "x"}, task="gsm8k", alpha_sdpo=0), "agent with task 'gsm8k', which has no environment"),
    (dict(agent={"command": "x"}, task=None, traces="a.jsonl", held_out_rows=0), "agent=.* without a task: there are no roll"),
]


@pytest.fixture
def own(tmp_path, monkeypatch):
    "Hint layers and environments of a user's own module."
    (tmp_path / "own_parts.py").write_text("""
from composer_replication.envs.toy.env import WorldEnv
from composer_replication.hints.layers import TemplateHintGenerator
class Reflect(TemplateHintGenerator):
    def __init__(self, complete): super().__init__()
class MayReflect(TemplateHintGenerator):
    def __init__(self, complete=None): super().__init__()
class Guess(WorldEnv):
    recipe_defaults = {"max_turn": 7}
class Odd(WorldEnv):
    recipe_defaults = {"zzz": 7}
class Fine(WorldEnv):
    recipe_defaults = {"max_turns": 7, "temperature": 0.8}
""")
    monkeypatch.syspath_prepend(tmp_path)


JUDGED = {"hint_judge": "m@http://127.0.0.1:1/v1"}


@pytest.mark.parametrize("settings, said", [
    (dict(hints=["template", "own_parts:Reflect"], **JUDGED), None), (dict(hints="own_parts:MayReflect", **JUDGED), None),
    (dict(hints="own_parts:MayReflect"), None), (dict(hints=["judge", "own_parts:Reflect"], **JUDGED), None),
    (dict(hints=["template", "own_parts:Reflect"]), "the layer 'own_parts:Reflect' needs a model; set hint_judge"),
    (dict(hints="own_parts:Missing"), "has no 'Missing' that makes a hint layer"),
    (dict(task="own_parts:Fine"), None),
    (dict(task="own_parts:Guess"), "task 'own_parts:Guess': its recipe_defaults name 'max_turn', .*did you mean .*max_turns"),
    (dict(task="own_parts:Odd"), "its recipe_defaults name 'zzz', which is no setting")])
def test_ones_own_layers_and_environments_are_asked_what_they_need(write, own, settings, said):
    if said is None:
        recipe = load_recipe(write(**settings))
        assert recipe.config.max_turns == 7 or "Fine" not in str(settings)
        return
    with pytest.raises(RecipeProblem, match=said) as caught:
        load_recipe(write(**settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings, said", BAD, ids=[" ".join(map(str, s)) for s, _ in BAD])
def test_a_wrong_setting_is_one_sentence_before_any_weight(write, no_weights, settings, said):
    with pytest.raises(RecipeProblem, match=said) as caught:
        load_recipe(write(**settings))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(write()))


@pytest.mark.parametrize("text, said", [("", "no mapping"), ("- 1", "no mapping"), ("a: [", "cannot be read as YAML"),
                                        ("!!python/object/apply:os.system [ls]", "cannot be read as YAML"), ("\x00", "YAML")])
def test_a_file_that_is_no_recipe(write, text, said):
    with pytest.raises(RecipeProblem, match=said):
        load_recipe(write(text))


@pytest.mark.parametrize("value", ["2024-13-01", "2024-02-30", "2024-01-01 25:00:00", "[2024-99-99]", "{a: 2024-13-01}"])
def test_a_date_that_is_none_is_said_with_its_place(write, value):
    "YAML takes such text for a date; its reader then raises what is no error of YAML."
    with pytest.raises(RecipeProblem, match="run_name"):
        load_recipe(write(), {"run_name": value})
    with pytest.raises(RecipeProblem, match="recipe.yaml"):
        load_recipe(write(f"task: toy\nrun_name: {value}\n"))


def test_an_absent_file_and_a_bad_override():
    with pytest.raises(RecipeProblem, match="there is no recipe 'qwen3'; did you mean qwen3-8b-fsdp2 or qwen3-8b-lora"):
        load_recipe("qwen3")  # two of the shipped begin so
    with pytest.raises(RecipeProblem, match="there is no recipe 'zzz'; name .* shipped: .*toy"):
        load_recipe("zzz")
    with pytest.raises(RecipeProblem, match=r"--set: max_steps=x will not do"):
        load_recipe("toy", {"max_steps": "x"})


def test_gsm8k_without_its_files_is_told_before_any_weight(write, no_weights, tmp_path):
    recipe = load_recipe(write(task="gsm8k", alpha_sdpo=0.0, data_folder=str(tmp_path)))
    with pytest.raises(ValueError, match="task 'gsm8k' needs .*gsm8k_train.jsonl.gz.*set data_folder or COMPOSER_DATA"):
        recipe_run.make_trainer(recipe)


def test_a_tokenizer_that_will_not_do_is_told_before_any_weight(write, no_weights, tmp_path):
    tokenizer = embedded_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="no padding token"):
        recipe_run.make_trainer(load_recipe(write(tokenizer=str(tmp_path / "tokenizer"))))


def test_a_tokenizer_of_another_model_is_told_before_any_weight(write, no_weights, tmp_path):
    config = json.loads((embedded_path() / "medium" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    with pytest.raises(RecipeProblem, match="the tokenizer has .* tokens and the model's vocabulary 512"):
        recipe_run.make_trainer(load_recipe(write(model=f"random:{tmp_path / 'config.json'}", tokenizer=str(embedded_path()))))


def test_recorded_traces_without_pairs_and_an_earlier_run_are_told_before_any_weight(write, no_weights, tmp_path):
    lonely = tmp_path / "lonely.jsonl"
    lonely.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) + "\n")
    with pytest.raises(RecipeProblem, match="none of the 1 traces"):
        recipe_run.make_trainer(load_recipe(write(beta_replay=1.0, replay_pairs=str(lonely))))
    from composer_replication.training.checkpoint import mark_complete
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-3" / "x").write_text("x")
    mark_complete(tmp_path / "out" / "checkpoint-3")
    with pytest.raises(RecipeProblem, match="checkpoint-3 belongs to an earlier run; set resume"):
        recipe_run.make_trainer(load_recipe(write()))


def test_numbers_within_mappings_may_be_written_as_those_at_the_top(tmp_path, no_weights):
    text = "model: embedded\ntask: toy\nlearning_rate: 1e-4\nepisode_reward: {repeated_calls: 1e-3, length: {k: 2.5E-5}}\n"
    (tmp_path / "r.yaml").write_text(text + "train_rows: 8\nmax_steps: 1\nper_device_train_batch_size: 4\nnum_generations: 4\n"
                                     "output_dir: out/r\nuse_cpu: true\nbf16: false\nguard_settings: {ema_alpha: 1e-1}\n")
    read = load_recipe(tmp_path / "r.yaml", {"episode_reward": "{repeated_calls: 1e-3}"}).arguments
    assert read.episode_reward == {"repeated_calls": 0.001} and read.guard_settings == {"ema_alpha": 0.1}
    assert load_recipe(tmp_path / "r.yaml").arguments.episode_reward["length"] == {"k": 2.5e-5}


def test_a_revision_holds_for_weights_tokenizer_and_plan(tmp_path, monkeypatch):
    asked = []

    def spy(name):
        def from_pretrained(model, **options):
            asked.append((name, model, options.get("revision"), options.get("attn_implementation")))
            raise OSError("not here")
        return from_pretrained

    for name in ("AutoTokenizer", "AutoModelForCausalLM"):
        monkeypatch.setattr(getattr(load, name), "from_pretrained", spy(name))
    monkeypatch.setattr(memory_estimate.AutoConfig, "from_pretrained", spy("AutoConfig"))
    given = {"model": "some/model", "model_revision": "v1.0", "attn_implementation": "eager"}
    recipe = load_recipe("smollm2-sql", given, estimating=True)
    before = recipe.config.to_dict()
    for read in (load.recipe_tokenizer, load.start_model, estimate):
        with pytest.raises((RecipeProblem, OSError)):
            read(recipe)
    assert [one[0] for one in asked] == ["AutoTokenizer", "AutoModelForCausalLM", "AutoConfig"]
    assert {one[1:3] for one in asked} == {("some/model", "v1.0")}
    assert asked[1][3] == "eager" and recipe.config.to_dict() == before  # what reads a recipe leaves it as it is


@pytest.mark.parametrize("model", ["embedded", "random:{}"])
def test_models_made_in_memory_get_the_attention_that_is_asked_for(model, tmp_path):
    name = model.format(embedded_path() / "medium" / "config.json") if "random" in model else model
    for wanted in ("eager", "sdpa"):
        recipe = load_recipe("toy", {"model": name, "tokenizer": "embedded", "attn_implementation": wanted})
        assert load.recipe_model(recipe).model.config._attn_implementation == wanted


def test_a_good_recipe_does_reach_its_weights(write, no_weights):
    "So that the tests above cannot pass for want of a door."
    with pytest.raises(AssertionError, match="weights were loaded"):
        recipe_run.make_trainer(load_recipe(write()))


# Plans

@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_every_shipped_recipe_has_a_plan_without_weights(no_weights, name, monkeypatch, tmp_path):
    monkeypatch.setenv("COMPOSER_MODELS", str(tmp_path))  # none is fetched
    recipe = load_recipe(name, estimating=True)
    if not name.startswith("toy"):
        with pytest.raises(InputProblem, match=r"fetch it with `composer-rl models get|name a folder that has its config\.json"):
            estimate(recipe)
    shape = None if name.startswith("toy") else published_shape(recipe.arguments.model, num_hidden_layers=2)
    made = estimate(recipe, 2, shape=shape)
    assert made.peak > 0
    assert json.loads(json.dumps(vars(made))) == vars(made)


SMALL = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
MODELS = [Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=True),
          Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
          Qwen2Config(**SMALL, tie_word_embeddings=True), LlamaConfig(**SMALL, tie_word_embeddings=False)]


@pytest.mark.parametrize("shape", MODELS, ids=lambda s: f"{s.model_type}-{s.tie_word_embeddings}")
def test_parameters_are_exactly_those_of_the_real_model(shape):
    lora = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "down_proj"])
    real = AutoModelForCausalLM.from_config(shape)
    stored = {t.data_ptr(): t.numel() for t in real.state_dict().values()}
    assert count_parameters(shape) == (sum(stored.values()),) * 2
    adapted = get_peft_model(real, lora)
    assert count_parameters(shape, lora) == (sum(p.numel() for p in adapted.parameters()),
                                             sum(p.numel() for p in adapted.parameters() if p.requires_grad))


def test_tokens_and_sharding_by_hand():
    recipe = load_recipe("qwen3-8b-fsdp2", estimating=True)
    shape = published_shape("Qwen/Qwen3-8B")
    one, eight = (estimate(recipe, devices, shape=shape) for devices in (1, 8))
    assert eight.sampled_tokens_per_step == 8 * 8 * 1024 and eight.prompts_per_step == 8
    assert eight.total_tokens == 200 * 8**2 * 1024
    assert eight.memory["optimizer"] == 2 * 4 * 8_190_735_360 // 8 and one.memory["optimizer"] == 2 * 4 * 8_190_735_360
    assert eight.memory["teacher and reference"] == 0
    lora = estimate(load_recipe("qwen3-8b-lora", estimating=True), shape=shape)
    assert lora.memory["teacher and reference"] == 4 * lora.trained
    assert lora.memory["rollout cache"] == 2 * 36 * 8 * 128 * 32 * (512 + 4096) * 2


def test_a_generation_that_is_used_again_is_planned_once():
    once, four = (estimate(load_recipe("toy", {"num_iterations": n, "max_steps": "6"}, estimating=True)) for n in ("1", "4"))
    assert (four.rollouts_per_step, four.prompts_per_step) == (once.rollouts_per_step / 4, once.prompts_per_step / 4)
    assert four.sampled_tokens_per_step == once.sampled_tokens_per_step / 4 and four.total_tokens == once.total_tokens * 2 / 6


def test_layers_of_an_environment_are_there_without_its_task():
    "In a process that has loaded nothing else."
    code = ("from composer_replication.recipes.recipe import load_recipe\n"
            "print(load_recipe('toy-traces', {'hints': '[sql, template]'}).arguments.hints)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "['sql', 'template']" in done.stdout, done.stderr
