"The plan of a sharded run, against PyTorch's own shards of a model without data."
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from composer_replication.core.errors import InputProblem
from composer_replication.recipes.memory_estimate import SHAPES, estimate, model_shape
from composer_replication.recipes.recipe import load_recipe

RECIPES = ["qwen2.5-coder-7b-fsdp2", "qwen3-8b-fsdp2"]


@pytest.fixture
def mesh():
    "Eight devices of which this is one and the others answer at once."
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def size(parameters):
    return sum(p.numel() for p in parameters)


@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_a_device_are_its_parts_and_those_put_together_are_the_root_and_two_layers(mesh, name):
    recipe = load_recipe(name, estimating=True)
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


def test_vllm_takes_its_share_of_the_card_instead_of_a_cache_for_sampling():
    def plan(**values):
        given = {"rollout": "vllm"} | {k: str(v) for k, v in values.items()}
        return estimate(load_recipe("qwen2.5-coder-7b-lora", given, estimating=True))

    plain = estimate(load_recipe("qwen2.5-coder-7b-lora", estimating=True))
    share = plan(vllm_gpu_memory_utilization=0.4)
    assert plain.memory["rollout cache"] > 0 == share.memory["rollout cache"] and "vLLM's share" not in plain.memory
    assert share.memory["vLLM's share"] == pytest.approx(0.4 * 141e9)
    loss = sum(v for k, v in plain.memory.items() if k in ("branches' cache", "activations", "logits"))
    always = sum(v for k, v in plain.memory.items()) - loss - plain.memory["rollout cache"]
    assert share.peak == pytest.approx(always + loss + 0.4 * 141e9)
    asleep = plan(vllm_gpu_memory_utilization=0.4, vllm_enable_sleep_mode="true")
    assert asleep.peak == pytest.approx(always + max(loss, 0.4 * 141e9))
    cache = plain.memory["rollout cache"]  # two bytes a value, as vLLM's
    assert plan(vllm_gpu_memory_utilization=0.05).memory["vLLM's share"] == 2 * plain.parameters + cache
    far = plan(vllm_server_base_url="http://127.0.0.1:8000")
    assert "vLLM's share" not in far.memory and far.memory["rollout cache"] == 0


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
