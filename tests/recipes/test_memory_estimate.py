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
from transformers.trainer_utils import rotate_checkpoints

from composer_replication.contrib.fsdp.level import idle_pass
from composer_replication.contrib.fsdp.policies import within_root
from composer_replication.core.errors import InputProblem
from composer_replication.recipes.memory_estimate import (
    CPU,
    H200,
    SHAPES,
    Gathered,
    Network,
    estimate,
    gathered,
    model_shape,
    ring_seconds,
    sent_seconds,
    step_seconds,
)
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.training import checkpoint
from composer_replication.tree.forward import PASS_ENTRIES, SHARDED_ENTRIES, pass_worth

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


@pytest.mark.parametrize("settings", [
    {"teacher": "live"}, {"teacher": "ema", "dtype": "bfloat16"}, {"teacher": "frozen", "optimizer": "muon"},
    {"teacher": "trust_region", "use_peft": "true", "lora_r": "64", "lora_target_modules": "all-linear"}],
    ids=lambda settings: settings["teacher"])
def test_a_checkpoint_is_as_large_as_planned(settings, tmp_path, monkeypatch):
    recipe = load_recipe("toy", settings | {
        "output_dir": str(tmp_path), "max_steps": "3", "save_steps": "1", "save_total_limit": "1", "train_rows": "8",
        "held_out_rows": "2", "max_completion_length": "32", "gradient_accumulation_steps": "1", "num_generations": "2",
        "per_device_train_batch_size": "2"})
    plan, there = estimate(recipe), []
    on_disk = lambda folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def rotate(*given, **how):
        there.append(len(list(tmp_path.glob("checkpoint-*"))))
        rotate_checkpoints(*given, **how)

    monkeypatch.setattr(checkpoint, "rotate_checkpoints", rotate)
    run_recipe(recipe)
    small = 150_000  # tokenizer, states of random numbers, metrics
    assert on_disk(tmp_path / "checkpoint-3") == pytest.approx(plan.checkpoint, abs=small)
    assert max(there) == plan.checkpoints == 2


def test_checkpoints_on_disk_at_once():
    def at_once(**given):
        return estimate(load_recipe("toy", {key: str(value) for key, value in given.items()}, estimating=True)).checkpoints

    assert at_once(max_steps=10, save_steps=3, save_total_limit=9) == 4
    assert at_once(max_steps=10, save_steps=0.5, save_total_limit=9) == 2
    assert at_once(max_steps=10, save_steps=1, save_total_limit=2) == 3
    assert at_once(max_steps=10, save_steps=1, save_total_limit=0) == 10  # none is removed
    assert at_once(max_steps=10, save_strategy="no") == 0
    assert at_once(max_steps=-1) is at_once(max_steps=10, save_strategy="epoch") is None


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


def by_steps(size, devices, network):
    "A ring as it runs: at each of its steps every device sends one part, and all wait for the slowest link."
    seconds, part = 0.0, size / devices
    machines = -(-devices // network.node)
    pace = network.inside if machines == 1 else min(network.inside, network.between * network.node)
    for step in range(devices - 1):
        seconds += part / pace + (network.hop_between if step < machines - 1 else network.hop_inside)
    return seconds


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 9, 16, 64, 512])
def test_a_ring_takes_the_sum_of_its_steps(devices):
    network = Network(node=8, inside=7e9, between=2e8, hop_inside=3e-6, hop_between=2e-5)
    assert ring_seconds(1.5e9, 1, devices, network) == pytest.approx(by_steps(1.5e9, devices, network))
    in_pieces = sum(by_steps(1.5e9 / 29, devices, network) for _ in range(29))
    assert ring_seconds(1.5e9, 29, devices, network) == pytest.approx(in_pieces)


def test_cards_of_a_machine_that_send_slower_than_its_inside_set_the_pace():
    slow, fast = (Network(8, 1e9, card, 0.0, 0.0) for card in (1e8, 1e9))
    assert ring_seconds(1e9, 1, 16, slow) == pytest.approx(15 / 16 / 0.8)
    assert ring_seconds(1e9, 1, 16, fast) == pytest.approx(15 / 16)


def gathers(**given):
    given = {key: str(value) for key, value in given.items()}
    return gathered(load_recipe("qwen2.5-coder-7b-fsdp2", given, estimating=True), branches=3, idle=0.25)


@pytest.mark.parametrize("given, expected", [  # the policy alone gathers before its forward and its backward pass
    ({"alpha_sdpo": 0, "beta_replay": 0}, Gathered(2, 0)),
    ({"alpha_sdpo": 0, "beta_replay": 0, "kl_coef": 0.1, "kl_place": "loss"}, Gathered(3, 0)),
    ({"beta_replay": 0}, Gathered(3, 4)),  # the frozen teacher's trunk, and hinted branches
    ({"beta_replay": 0, "teacher": "live"}, Gathered(2, 4)),
    ({"beta_replay": 0, "teacher": "trust_region"}, Gathered(4, 8)),
    ({"alpha_sdpo": 0}, Gathered(3, 12)),  # the reference's trunk and answers, and the student's answers twice
    ({"alpha_sdpo": 0, "replay_form": "simpo"}, Gathered(2, 8))])
def test_gathers_by_hand(given, expected):
    assert gathers(**given) == expected


def test_seconds_sent_by_hand():
    recipe = load_recipe("qwen2.5-coder-7b-fsdp2", estimating=True)
    made, shape = estimate(recipe, 64), model_shape(recipe.arguments.model)[0]
    ring = lambda size, pieces: ring_seconds(size, pieces, 64, H200.network)
    weights = made.parameters
    gather, passes = ring(2 * weights, 29), gathered(recipe)  # 28 layers, and embeddings with the head
    beside = 8 * passes.trunks * gather + gather  # gradients as bfloat16, too
    alone = 8 * passes.branches * gather + ring(4 * weights, 12 * 29)
    sent = sent_seconds(recipe, shape, (weights, weights), 64, H200)
    assert (sent.beside, sent.alone) == (pytest.approx(beside), pytest.approx(alone))
    s = made.seconds
    assert s["sent between devices"] == pytest.approx(beside + alone)
    assert s["step"] == pytest.approx(s["sampling"] + max(s["loss and backward"], beside) + alone)


def test_plain_data_parallelism_sends_gradients_twice_around_the_ring():
    recipe = load_recipe("qwen2.5-coder-7b-lora", estimating=True)
    one, eight = estimate(recipe, 1), estimate(recipe, 8)
    assert one.seconds["sent between devices"] == 0
    assert eight.seconds["sent between devices"] == pytest.approx(2 * ring_seconds(4 * eight.trained, 1, 8, H200.network))
    assert eight.seconds["step"] == one.seconds["step"]  # hidden behind the backward pass


def test_sending_that_takes_longer_than_the_arithmetic_is_waited_for():
    recipe, shape = load_recipe("smollm2-larder", estimating=True), model_shape("smollm2")[0]
    sent = type(sent_seconds(recipe, shape, (1, 1), 1, CPU))
    alone = step_seconds(recipe, shape, 134_515_008, 3, 0, CPU)
    slow = step_seconds(recipe, shape, 134_515_008, 3, 0, CPU, sent(alone["loss and backward"] + 5, 2))
    assert slow["step"] == pytest.approx(alone["step"] + 7)
    assert step_seconds(recipe, shape, 134_515_008, 3, 0, CPU, sent(1, 0))["step"] == pytest.approx(alone["step"])


def test_gradients_lie_whole_where_a_step_has_several_backward_passes():
    def whole(**given):
        return estimate(load_recipe("qwen2.5-coder-7b-fsdp2", given, estimating=True), 8)
    eight, one = whole(), whole(gradient_accumulation_steps="1", per_device_train_batch_size="8")
    assert eight.memory["whole gradients"] == 2 * eight.parameters and one.memory["whole gradients"] == 0


def test_layers_are_gathered_once_for_a_pass_and_twice_for_one_with_gradient(mesh, monkeypatch):
    "What `gathered` counts, of PyTorch's own collectives; idle passes of `contrib.fsdp.level` are such passes."
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
