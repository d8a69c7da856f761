"The plan of a sharded run, against PyTorch's own shards of a model without data."
import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config

from composer_replication.contrib.fsdp.level import idle_pass
from composer_replication.contrib.fsdp.policies import within_root
from composer_replication.core.errors import InputProblem
from composer_replication.recipes.memory_estimate import BRANCHES, SHAPES, activation_bytes, estimate, model_shape
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.forward import WAYS, forward_tree
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.pass_cost import PASS_ENTRIES, SHARDED_ENTRIES, pass_worth


@pytest.fixture
def mesh():
    "Eight devices of which this is one and the others answer at once."
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def size(parameters):
    return sum(p.numel() for p in parameters)


def test_weights_of_a_device_are_its_parts_and_those_put_together_are_the_root_and_two_layers(mesh):
    recipe = load_recipe("qwen2.5-coder-7b-fsdp2", estimating=True)
    plan = estimate(recipe, devices=8).memory
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_shape(recipe.arguments.model)[0])
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
    recipe = load_recipe("qwen2.5-coder-7b-fsdp2", overrides={"teacher": teacher, "beta_replay": "0.0"}, estimating=True)
    plan, shape = estimate(recipe, devices=8), SHAPES["Qwen/Qwen2.5-Coder-7B-Instruct"]
    part, head = 4 * plan.parameters // 8, 2 * shape["vocab_size"] * shape["hidden_size"]
    assert plan.memory["teacher and reference"] == parts * part
    assert plan.memory["swapped shards"] == parts * (part + head)
    assert plan.memory["sampling copy"] == 2 * plan.parameters


def test_keys_and_values_lie_beside_the_activations_where_branches_read_them():
    def cache(**settings):
        given = {"beta_replay": "0.0"} | settings
        return estimate(load_recipe("qwen2.5-coder-7b-lora", given, estimating=True)).memory["branches' cache"]

    own = cache()
    assert own > 0 and own == cache(gradient_checkpointing="false") == cache(teacher="live")
    assert cache(teacher="live", gradient_checkpointing="false") == 0  # they are activations
    assert cache(alpha_sdpo="0.0") == 0 != cache(alpha_sdpo="0.0", beta_replay="0.1")


def test_hinted_tokens_of_a_live_teacher_keep_activations_where_trunks_and_branches_go_in_one_pass():
    def plan(**settings):
        return estimate(load_recipe("qwen2.5-coder-7b-lora", {"beta_replay": "0.0"} | settings, estimating=True))

    live, ema = plan(teacher="live"), plan(teacher="ema")
    assert live.branches.startswith(WAYS["once"]) and ema.branches.startswith(WAYS["once"])
    recipe = load_recipe("qwen2.5-coder-7b-lora", estimating=True)
    shape, tokens = model_shape(recipe.arguments.model)[0], 512 + recipe.config.max_completion_length
    rows = recipe.config.per_device_train_batch_size
    for made, width in ((live, tokens + -(-tokens * BRANCHES // 1)), (ema, tokens)):
        assert made.memory["activations"] == activation_bytes(shape, rows, int(width), 2, recipe.config.gradient_checkpointing)
    apart = plan(teacher="live", attn_implementation="eager")  # which takes no such mask
    assert apart.branches == WAYS["dense"] and apart.memory["activations"] == ema.memory["activations"]
    assert plan(alpha_sdpo="0.0").branches == "no channel reads branches"


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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_saves(checkpointing):
    "With a slope in the number of layers."
    def both(layers):
        shape = Qwen3Config(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=24)
        model = AutoModelForCausalLM.from_config(shape).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.randint(0, 320, (2, 200))
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        saved = saved_bytes(model, lambda: model.model(input_ids=ids, attention_mask=mask, use_cache=False))
        return torch.tensor([activation_bytes(shape, 2, 200, 4, checkpointing), saved])

    planned, saved = (both(5) - both(2)).tolist()
    assert planned == pytest.approx(saved, rel=0.03)


def test_a_tree_in_one_pass_keeps_as_much_more_as_it_has_more_tokens():
    "A trunk of 200 tokens alone and with a hinted branch of 27."
    shape = Qwen3Config(vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=16)
    tree = Tree("", (1,) * 200, (Span(1, 160, 186),), (Branch("hint", 1, 160, (1,) * 27, 1),))
    model = AutoModelForCausalLM.from_config(shape)
    alone = saved_bytes(model, lambda: model.model(input_ids=torch.ones(1, 200, dtype=torch.long), use_cache=False))
    both = saved_bytes(model, lambda: forward_tree(model, pack_trees([tree], 0), ("hint",)))
    planned = activation_bytes(shape, 1, 227, 4, False) / activation_bytes(shape, 1, 200, 4, False)
    assert 227 / 200 <= planned == pytest.approx(both / alone, rel=0.1)


@pytest.mark.parametrize("settings", [{"teacher": "ema"}, {"teacher": "live", "attn_implementation": "eager"}])
def test_the_plan_names_the_ways_that_a_run_takes(settings, tmp_path):
    small = {"output_dir": str(tmp_path), "max_steps": "1", "train_rows": "8", "save_strategy": "no"}
    logged, recipe = [], load_recipe("toy", settings | small)
    run_recipe(recipe, logged.append)
    taken = {name for name in WAYS if any(entry.get(f"branches/{name}") for entry in logged)}
    assert taken and all(WAYS[name] in estimate(recipe).branches for name in taken)
    assert "eager" not in settings.values() or taken == {"dense"} and WAYS["once"] not in estimate(recipe).branches


def test_vllm_takes_its_share_of_the_card_instead_of_a_cache_for_sampling():
    def plan(**values):
        return estimate(load_recipe("qwen2.5-coder-7b-lora", {key: str(value) for key, value in values.items()}, estimating=True))

    plain, share = plan(), plan(rollout="vllm", vllm_gpu_memory_utilization=0.4)
    assert plain.memory["rollout cache"] > 0 == share.memory["rollout cache"] and "vLLM's share" not in plain.memory
    loss = sum(v for k, v in plain.memory.items() if k in ("branches' cache", "activations", "logits"))
    always = sum(plain.memory.values()) - loss - plain.memory["rollout cache"]
    assert share.memory["vLLM's share"] == pytest.approx(0.4 * 141e9) and share.peak == pytest.approx(always + loss + 0.4 * 141e9)
    asleep = plan(rollout="vllm", vllm_gpu_memory_utilization=0.4, vllm_enable_sleep_mode="true")
    assert asleep.peak == pytest.approx(always + max(loss, 0.4 * 141e9))
    small = plan(rollout="vllm", vllm_gpu_memory_utilization=0.05).memory["vLLM's share"]  # two bytes a value, as vLLM's
    assert small == 2 * plain.parameters + plain.memory["rollout cache"]
    far = plan(rollout="vllm", vllm_server_base_url="http://127.0.0.1:8000")
    assert "vLLM's share" not in far.memory and far.memory["rollout cache"] == 0


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
        plan = estimate(load_recipe("qwen2.5-coder-7b-fsdp2", {"fsdp_config": config}, estimating=True), devices=8)
        return plan.checkpoint / plan.parameters

    assert bytes_a_weight("FULL_STATE_DICT") - bytes_a_weight("SHARDED_STATE_DICT") == pytest.approx(4)


def test_a_plan_for_fewer_devices_needs_more_of_each():
    recipe = load_recipe("qwen2.5-coder-32b-fsdp2", estimating=True)
    peaks = [estimate(recipe, devices=n).peak for n in (1, 2, 8)]
    assert peaks == sorted(peaks, reverse=True) and peaks[2] < 141e9 < peaks[0] + 0.5 * peaks[0]


def test_a_sharded_recipe_planned_without_a_number_of_devices_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COMPOSER_DATA", str(tmp_path))
    from composer_replication.cli.train import _show_plan
    recipe = load_recipe("qwen3-8b-fsdp2", estimating=True)
    for devices, said in ((None, True), (8, False)):
        with pytest.raises(InputProblem, match="gsm8k_train"):  # which is not here, and was looked for after the plan
            _show_plan(recipe, devices, as_json=False)
        shown = capsys.readouterr()
        assert ("--devices" in shown.err) == said and shown.out


def test_gradients_lie_whole_where_a_step_has_several_backward_passes():
    def whole(**given):
        return estimate(load_recipe("qwen2.5-coder-7b-fsdp2", given, estimating=True), 8)
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
