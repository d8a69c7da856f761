"Plans of runs, against PyTorch's own shards of a model without data, what autograd saves, and files."
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from composer_replication.contrib.fsdp.level import idle_pass
from composer_replication.contrib.fsdp.policies import within_root
from composer_replication.core.errors import InputProblem
from composer_replication.recipes.memory_estimate import activation_bytes, estimate, meta_model
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.tree.forward import WAYS
from composer_replication.tree.pass_cost import PASS_ENTRIES, SHARDED_ENTRIES, pass_worth

sys.path.append(str(Path(__file__).resolve().parents[2] / "spikes"))
from published_shapes import SHAPES, published_shape


def planned(name, settings=None, devices=1, **other):
    "The estimate of a shipped recipe, by the shape of its model, of which two layers will do."
    recipe = load_recipe(name, {key: str(value) for key, value in (settings or {}).items()}, estimating=True)
    return estimate(recipe, devices, shape=published_shape(recipe.arguments.model, **{"num_hidden_layers": 2} | other))


@pytest.fixture
def mesh():
    "Eight devices of which this is one and the others answer at once."
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def size(parameters):
    return sum(p.numel() for p in parameters)


def test_weights_of_a_device_are_its_parts_and_those_put_together_are_the_root_and_two_layers(mesh):
    plan = planned("qwen2.5-coder-7b-fsdp2", devices=8).memory
    model = meta_model(published_shape("Qwen/Qwen2.5-Coder-7B-Instruct", num_hidden_layers=2))
    layers = [size(layer.parameters()) for layer in model.model.layers]
    root = size(model.parameters()) - sum(layers)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    part = sum(p.to_local().numel() for p in model.parameters())
    assert plan["weights"] == pytest.approx(4 * part, rel=1e-3) and plan["gradients"] == pytest.approx(4 * part, rel=1e-3)
    assert plan["optimizer"] == pytest.approx(8 * part, rel=1e-3)
    assert plan["gathered weights"] == pytest.approx(2 * (root + 2 * layers[0]), rel=1e-3)


@pytest.mark.parametrize("teacher, parts", [("live", 0), ("frozen", 1), ("ema", 1), ("trust_region", 1)])
def test_a_teacher_lies_in_parts_and_sets_the_students_aside_while_it_is_read(teacher, parts):
    plan = planned("qwen2.5-coder-7b-fsdp2", {"teacher": teacher, "beta_replay": "0.0"}, devices=8)
    shape = SHAPES["Qwen/Qwen2.5-Coder-7B-Instruct"]
    part, head = 4 * plan.parameters // 8, 2 * shape["vocab_size"] * shape["hidden_size"]
    assert plan.memory["teacher and reference"] == parts * part
    assert plan.memory["swapped shards"] == parts * (part + head)
    assert plan.memory["sampling copy"] == 2 * plan.parameters


def test_keys_and_values_lie_beside_the_activations_where_branches_read_them():
    def cache(**settings):
        return planned("qwen2.5-coder-7b-lora", {"beta_replay": "0.0"} | settings).memory["branches' cache"]

    own = cache()
    assert own > 0 and own == cache(gradient_checkpointing="false") == cache(teacher="live")
    assert cache(teacher="live", gradient_checkpointing="false") == 0  # they are activations
    assert cache(alpha_sdpo="0.0") == 0 != cache(alpha_sdpo="0.0", beta_replay="0.1")


def test_the_plan_says_how_branches_are_read():
    def plan(**settings):
        return planned("qwen2.5-coder-7b-lora", {"beta_replay": "0.0"} | settings).branches

    assert plan(teacher="live").startswith(WAYS["once"]) and plan(teacher="ema").startswith(WAYS["once"])
    assert plan(teacher="live", attn_implementation="eager") == WAYS["dense"]  # which takes no such mask
    assert plan(alpha_sdpo="0.0") == "no channel reads branches"


def saved_bytes(model, read):
    "Bytes that a pass saves for the backward pass, by autograd's own hooks."
    mine, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = (0 if storage.data_ptr() in mine else storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        read()
    return sum(size for size, _ in found.values())


TINY = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
HYBRID = dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind, more", [("qwen3", {"head_dim": 24}), ("lfm2", HYBRID), ("gpt_neox", {})])
def test_activations_are_what_autograd_saves_in_a_pass_with_data(kind, more, lora):
    shape = AutoConfig.for_model(kind, vocab_size=320, **TINY, num_hidden_layers=4, **more)
    model = AutoModelForCausalLM.from_config(shape).train()
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear") if lora else None
    planned = activation_bytes(meta_model(shape, adapter).get_base_model() if lora else meta_model(shape), 2, 200, None)
    if lora:
        get_peft_model(model, adapter)
    ids, mask = torch.randint(0, 320, (2, 200)), torch.ones(2, 200, dtype=torch.long)
    mask[0, :5] = 0  # padding, as rows have it
    saved = saved_bytes(model, lambda: model.base_model(input_ids=ids, attention_mask=mask, use_cache=False))
    assert planned == pytest.approx(saved, rel=0.02)


def test_with_checkpointing_a_layer_is_kept_whole_and_of_the_others_their_inputs():
    shape = AutoConfig.for_model("qwen3", vocab_size=32, **TINY, num_hidden_layers=6)
    model = meta_model(shape)
    whole, some = (activation_bytes(model, 2, 100, None, checkpointing) for checkpointing in (False, True))
    assert some == 6 * 4 * 64 * 2 * 100 + 2 * whole // 6


@pytest.mark.parametrize("settings", [{"teacher": "ema"}, {"teacher": "live", "attn_implementation": "eager"}])
def test_the_plan_names_the_ways_that_a_run_takes(settings, tmp_path):
    small = {"output_dir": str(tmp_path), "max_steps": "1", "train_rows": "8", "save_strategy": "no"}
    logged, recipe = [], load_recipe("toy", settings | small)
    run_recipe(recipe, logged.append)
    taken = {name for name in WAYS if any(entry.get(f"branches/{name}") for entry in logged)}
    assert taken and all(WAYS[name] in estimate(recipe).branches for name in taken)
    assert "eager" not in settings.values() or taken == {"dense"} and WAYS["once"] not in estimate(recipe).branches


def test_vllm_in_this_process_needs_its_weights_and_a_cache_instead_of_one_for_sampling():
    def plan(**values):
        return planned("qwen2.5-coder-7b-lora", values)

    plain, share = plan(), plan(rollout="vllm")
    assert plain.memory["rollout cache"] > 0 == share.memory["rollout cache"] and "vLLM, at least" not in plain.memory
    least = share.memory["vLLM, at least"]
    assert least == 2 * plain.parameters + plain.memory["rollout cache"]  # two bytes a value, as vLLM's
    loss = sum(v for k, v in plain.memory.items() if k in ("branches' cache", "activations", "logits"))
    always = sum(plain.memory.values()) - loss - plain.memory["rollout cache"]
    asleep = plan(rollout="vllm", vllm_enable_sleep_mode="true")
    assert share.peak == always + least + loss and asleep.peak == always + max(least, loss)
    far = plan(rollout="vllm", vllm_server_base_url="http://127.0.0.1:8000")
    assert "vLLM, at least" not in far.memory and far.memory["rollout cache"] == 0


@pytest.mark.parametrize("settings", [
    {"teacher": "live"}, {"teacher": "ema", "dtype": "bfloat16"},
    {"teacher": "trust_region", "use_peft": "true", "lora_r": "64", "lora_target_modules": "all-linear"}],
    ids=lambda settings: settings["teacher"])
def test_a_checkpoint_is_as_large_as_planned(settings, tmp_path):
    recipe = load_recipe("toy", settings | {
        "output_dir": str(tmp_path), "max_steps": "1", "save_steps": "1", "train_rows": "8",
        "held_out_rows": "2", "max_completion_length": "32", "gradient_accumulation_steps": "1", "num_generations": "2",
        "per_device_train_batch_size": "2"})
    plan = estimate(recipe)
    run_recipe(recipe)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "checkpoint-1").rglob("*") if file.is_file())
    assert on_disk == pytest.approx(plan.checkpoint, abs=150_000)  # tokenizer, states of random numbers, metrics


def test_a_sharded_checkpoint_in_one_file_has_the_weights_twice():
    def bytes_a_weight(kind):
        config = json.dumps({"version": 2, "state_dict_type": kind})
        plan = planned("qwen2.5-coder-7b-fsdp2", {"fsdp_config": config}, devices=8)
        return plan.checkpoint / plan.parameters

    assert bytes_a_weight("FULL_STATE_DICT") - bytes_a_weight("SHARDED_STATE_DICT") == pytest.approx(4)


def test_a_plan_for_fewer_devices_needs_more_of_each():
    peaks = [planned("qwen2.5-coder-32b-fsdp2", devices=n, num_hidden_layers=64).peak for n in (1, 2, 8)]
    assert peaks == sorted(peaks, reverse=True) and peaks[2] < 141e9 < peaks[0] + 0.5 * peaks[0]


def test_a_sharded_recipe_planned_without_a_number_of_devices_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COMPOSER_DATA", str(tmp_path))
    from composer_replication.cli.train import _show_plan
    from composer_replication.recipes import memory_estimate
    recipe = load_recipe("qwen3-8b-fsdp2", estimating=True)
    monkeypatch.setattr(memory_estimate, "model_shape", lambda name, revision: published_shape(name, num_hidden_layers=2))
    for devices, said in ((None, True), (8, False)):
        with pytest.raises(InputProblem, match="gsm8k_train"):  # which is not here, and was looked for after the plan
            _show_plan(recipe, devices, as_json=False)
        shown = capsys.readouterr()
        assert ("--devices" in shown.err) == said and shown.out


def test_gradients_lie_whole_where_a_step_has_several_backward_passes():
    def whole(**given):
        return planned("qwen2.5-coder-7b-fsdp2", given, 8)
    eight, one = whole(), whole(gradient_accumulation_steps="1", per_device_train_batch_size="8")
    assert eight.memory["whole gradients"] == 2 * eight.parameters and one.memory["whole gradients"] == 0


def test_layers_are_gathered_once_for_a_pass_and_twice_for_one_with_gradient(mesh, monkeypatch):
    "What a pass with sharded weights gathers, of PyTorch's own collectives; idle passes of `contrib.fsdp.level` are such passes."
    counts = Counter()
    for name in ("all_gather_single", "reduce_scatter_single"):
        inner = getattr(dist, name)

        def counted(*args, name=name, inner=inner, **kwargs):
            counts[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    shape = Qwen3Config(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
                        num_key_value_heads=1, head_dim=8)
    model = AutoModelForCausalLM.from_config(shape)
    assert pass_worth(model) == PASS_ENTRIES
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    assert pass_worth(model) == SHARDED_ENTRIES  # each of these passes saves a gathering
    fully_shard(model, mesh=mesh)  # stays gathered until its forward has ended
    for grad, passes in ((False, 1), (False, 3), (True, 1), (True, 3)):
        counts.clear()
        with torch.set_grad_enabled(grad):
            total = within_root(model, lambda passes=passes: sum(idle_pass(model) for _ in range(passes)))
        if grad:
            total.backward()
        assert counts["all_gather_single"] == 1 + passes * 3 * (2 if grad else 1), (grad, passes)
        assert counts["reduce_scatter_single"] == (1 + 3 if grad else 0)
        for module in (*model.model.layers, model):
            module.reshard()


def test_no_part_is_below_nothing_however_short_the_recorded_traces():
    "They have no prompt that is not learnt from."
    recipe = load_recipe("qwen2.5-coder-7b-traces", estimating=True)
    for most in (1, 256, 511, 512, 4096):
        arguments = replace(recipe.arguments, max_trace_tokens=most)
        shape = published_shape(arguments.model, num_hidden_layers=2)
        found = estimate(replace(recipe, arguments=arguments), 1, shape=shape)
        gradient = 4 * shape.vocab_size * shape.hidden_size  # of the head
        assert min(found.memory.values()) >= 0 and found.memory["logits"] > gradient
