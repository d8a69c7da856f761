"""Generators whose rollouts vLLM samples. Its engine runs where it is installed: `make test-vllm`, on a CPU; on a GPU not run."""
import json
import os
from importlib.util import find_spec

import pytest
import torch
from forks import _start, composer
from peft import LoraConfig, get_peft_model

from composer_replication.contrib.queue import generator as generator_module
from composer_replication.contrib.queue.claims import Claims
from composer_replication.contrib.queue.generator import Generator, check_queue_recipe, queue_settings, trained_weights
from composer_replication.contrib.queue.rollouts import begin_generation, begin_run
from composer_replication.contrib.queue.store import Store
from composer_replication.contrib.queue.trainer import queue_trainer
from composer_replication.contrib.queue.vllm_engine import VllmEngine, plain_model
from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import make_trainer
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig

real = [pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"), pytest.mark.trainer,
        pytest.mark.xdist_group("vllm")]
LIMIT = 600  # seconds
NATS = 2e-4  # worst difference of a token's log-probability between two engines in float32
ON_CPU = dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
SMALL = {"rollout": "vllm", "train_rows": "8", "max_completion_length": "64", "max_turns": "2", "report_to": "none",
         "sample_every": "0", "save_strategy": "no", "vllm_max_model_length": "2048",
         "episode_reward": "{failed_calls: 0.1, floor: -1}"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    embedded_model().save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


def recipe_in(folder, model, **changes):
    given = {"model": str(model), "tokenizer": str(model), "output_dir": str(folder)} | {k: str(v) for k, v in changes.items()}
    recipe = load_recipe("toy", SMALL | given)
    recipe.config.disable_tqdm = True
    return recipe


# ---- without vLLM


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.7, "top_k": 5, "min_p": 0.1}], ids=str)
def test_a_queue_whose_generators_sample_with_vllm_refuses_cut_distributions(cut):
    changes = {name: str(value) for name, value in cut.items()}
    recipe = load_recipe("toy", changes | {"vllm_importance_sampling_correction": "false"})
    check_queue_recipe(recipe)
    recipe.config.rollout = "vllm"
    with pytest.raises(InputProblem, match=next(iter(cut))):
        check_queue_recipe(recipe)


class Fake:
    "In the engine's place, at its one method: transformers samples, by a copy of the weights as they were."

    def __init__(self, config, tokenizer):
        self.tokenizer, self.loads = tokenizer, 0

    def load(self, model):
        self.loads += 1
        copy = embedded_model()
        copy.load_state_dict(plain_model(model).state_dict())
        return TransformersPolicy(copy.eval(), self.tokenizer)


def without_vllm(recipe, url, monkeypatch):
    "What makes a trainer that has a generator with a fake engine play where it would wait."
    monkeypatch.setattr(generator_module, "VllmEngine", Fake)
    make = queue_trainer(recipe, url)
    queue = make.keywords["queue"]
    generator = Generator(recipe, Claims(Store(url), name="generator"))

    def turn(seconds):
        while group := generator.next_group():
            generator.claims.deliver(group, generator.version, generator.play(group))

    queue.pause = turn
    return make, generator


def test_a_trainer_whose_generators_have_engines_makes_none_and_each_version_reaches_them(tmp_path, model_folder, monkeypatch):
    settings = {"max_staleness": 0, "vllm_importance_sampling_correction": "false", "max_steps": 3}
    recipe = recipe_in(tmp_path / "vllm", model_folder, **settings)
    make, generator = without_vllm(recipe, "memory://fake-engine", monkeypatch)
    one = make_trainer(recipe, make)
    one.train()
    assert generator.engine.loads == 3 and not hasattr(one, "vllm_generation")
    recipe = recipe_in(tmp_path / "plain", model_folder, rollout="transformers", **settings)
    other = make_trainer(recipe)
    other.train()
    for (name, mine), (_, theirs) in zip(one.student.named_parameters(), other.student.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_generator_without_vllm_says_so_before_it_waits(tmp_path, model_folder):
    with pytest.raises(InputProblem, match="samples with vLLM, which is not installed here; make an environment"):
        Generator.join(recipe_in(tmp_path, model_folder), "memory://nobody-trains")


@pytest.mark.parametrize("changes, said", [
    ({"vllm_server_base_url": "http://localhost:8000"}, "--queue does not go with a vLLM server; leave vllm_server_base_url out"),
    ({"vllm_tensor_parallel_size": "2"}, "--queue does not go with vllm_tensor_parallel_size=2; set it to 1")])
def test_engines_that_a_generator_cannot_have_are_refused(tmp_path, model_folder, changes, said):
    with pytest.raises(InputProblem, match=said):
        check_queue_recipe(recipe_in(tmp_path, model_folder, **changes))


def test_how_much_memory_an_engine_takes_is_each_machines_own(tmp_path, model_folder):
    one, other = (queue_settings(recipe_in(tmp_path, model_folder, vllm_gpu_memory_utilization=share)) for share in (0.3, 0.9))
    assert one == other


# ---- vLLM itself


def scored(model, rollout):
    "Log-probabilities of the sampled ids by one plain forward pass."
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        logprobs = model.eval()(ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0][len(rollout.prompt_ids) - 1:]


def difference(model, rollouts):
    "Worst over the sampled ids."
    def of(rollout):
        sampled = torch.tensor(rollout.completion_mask, dtype=torch.bool)
        return (scored(model, rollout) - torch.tensor(rollout.logprobs))[sampled].abs().max().item()
    return max(map(of, rollouts))


def move(model, by=0.02):
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * by)


@pytest.fixture(params=["anew", "in place"])
def way(request, monkeypatch):
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    if request.param == "in place":  # as on a GPU, which packs nothing
        monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    return request.param


@pytest.fixture
def closing():
    "Engines that are closed after the test."
    engines = []
    yield engines.append
    for engine in engines:
        engine.close()


class TestVllm:
    pytestmark = real

    def test_each_version_of_the_weights_is_what_is_sampled_by(self, way, closing, tmp_path, model_folder):
        recipe = recipe_in(tmp_path, model_folder)
        trainer, url = embedded_model(), f"memory://engine-{way.replace(' ', '-')}"
        store = Store(url)
        begin_run(store, queue_settings(recipe))
        generator, engines = Generator(recipe, Claims(Store(url), name="ann")), []
        rows = world_rows(4, seed=0)
        torch.manual_seed(0)
        closing(generator.engine)
        for version in range(3):
            before = {name: weight.clone() for name, weight in trainer.state_dict().items()}
            if version:
                move(trainer)
            begin_generation(store, version, version, 0, trained_weights(trainer),
                             lambda g: [(row, [f"{g}-{n}-{i}" for i in range(4)]) for n, row in enumerate(rows)])
            rollouts = []
            while group := generator.next_group():
                assert group.generation == generator.version == version
                rollouts += generator.play(group)
                generator.claims.deliver(group, generator.version, rollouts[-4:])
            assert len(rollouts) == 16 and difference(trainer, rollouts) < NATS
            if version:
                stale = embedded_model()
                stale.load_state_dict(before)
                assert difference(stale, rollouts) > 20 * NATS
            engines.append(generator.engine.llm)
        assert generator.engine.is_packed == (way == "anew")
        assert len({id(llm) for llm in engines}) == (1 if way == "in place" else 3)

    def test_adapters_reach_the_engine(self, way, closing, tmp_path, model_folder):
        recipe = recipe_in(tmp_path, model_folder)
        torch.manual_seed(0)
        model = get_peft_model(embedded_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        engine = VllmEngine(recipe.config, embedded_tokenizer())
        closing(engine)
        for _ in range(2):
            move(model, 0.05)
            policy = engine.load(model)
            limits = RolloutConfig(max_turns=2, max_tokens=64)
            rollouts = collect(policy, WorldEnv, world_rows(4, seed=0), limits, trace_ids=list("abcd"))
            assert difference(model, rollouts) < NATS and difference(embedded_model(), rollouts) > 20 * NATS

    @pytest.mark.slow
    def test_commands_train_with_what_vllm_plays(self, tmp_path, model_folder):
        both = ["--config", "toy", "--queue", "queue"]
        settings = SMALL | {"model": model_folder, "tokenizer": model_folder, "max_steps": 3, "max_staleness": 0,
                            "ddp_timeout": LIMIT, "logging_steps": 1, "output_dir": "out"}
        both += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        environment = {**os.environ, **ON_CPU, "OMP_NUM_THREADS": "1"}
        generator, folder, said, complained = _start(["generate", *both, "--json"], tmp_path, environment)
        with folder:
            try:
                done = composer("train", *both, "--json", cwd=tmp_path, env=environment, timeout=LIMIT)
                assert done.returncode == 0, done.stderr[-3000:] + complained.read_text()[-3000:]
                generator.join(LIMIT)
                assert generator.exitcode == 0, complained.read_text()[-3000:]
                played = [json.loads(line) for line in said.read_text().splitlines()]
            finally:
                generator.kill()
                generator.join()
        assert [group["weights"] for group in played] == [group["generation"] for group in played] and len(played) == 6
        logged = [entry for line in done.stdout.splitlines() if "loss" in (entry := json.loads(line))]
        assert len(logged) == 3
        assert all(entry["sampling/sampling_logp_difference/max"] < NATS for entry in logged)
