"""vLLM against transformers: one engine, made by TRL for a recipe with `rollout: vllm`, on the embedded model in float32.

Runs where vLLM is installed: `make test-vllm` makes an environment with it and needs no GPU."""
import os
import pkgutil
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import yaml

import composer_replication
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import make_trainer
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy, vllm_policy
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.types import Ending, RolloutConfig

pytestmark = [pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"), pytest.mark.trainer,
              pytest.mark.xdist_group("vllm")]
NATS = 2e-4  # worst difference of a token's log-probability between two engines in float32
ON_CPU = dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
RECIPE = dict(task="toy", rollout="vllm", train_rows=4, num_generations=4, per_device_train_batch_size=4, max_turns=4,
              max_completion_length=256, max_turn_tokens=64, vllm_max_model_length=2048, learning_rate=1e-3, max_steps=2,
              logging_steps=1, save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
              disable_tqdm=True)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    "A trainer by recipe, whose engine TRL has made."
    out = tmp_path_factory.mktemp("vllm")
    model, threads = embedded_model(), torch.get_num_threads()
    model.save_pretrained(out / "model")
    embedded_tokenizer().save_pretrained(out / "model")
    (out / "r.yaml").write_text(yaml.safe_dump(RECIPE | dict(model=str(out / "model"), output_dir=str(out / "run"))))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ON_CPU.items():
            patch.setenv(name, value)
        import trl.generation.vllm_generation as made_by
        # On a CPU vLLM packs the weights of linear layers away, so that none can be loaded again; on a GPU it keeps them.
        patch.setattr("vllm._custom_ops._supports_onednn", False)
        # TRL's would compute in bfloat16
        patch.setattr(made_by, "LLM", partial(made_by.LLM, dtype="float32", enforce_eager=True))
        before = dict(os.environ)
        yield make_trainer(load_recipe(out / "r.yaml"))
        for name in set(os.environ) - set(before):  # TRL and vLLM set RANK and others
            del os.environ[name]
    torch.set_num_threads(threads)


def test_every_module_is_imported_beside_vllm():
    "vLLM holds transformers below the version of requirements/core.txt."
    found = [m.name for m in pkgutil.walk_packages(composer_replication.__path__, "composer_replication.")]
    assert len(found) > 150 and all(map(import_module, found))


def scored(model, rollout):
    "Log-probabilities of the sampled ids by one plain forward pass."
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        logprobs = model.eval()(ids).logits[0, :-1].float().log_softmax(-1)
    found = logprobs.gather(1, ids[0, 1:, None])[:, 0][len(rollout.prompt_ids) - 1:]
    return found[torch.tensor(rollout.completion_mask, dtype=torch.bool)]


def difference(model, rollouts):
    "Worst over the sampled ids."
    return max((scored(model, r) - torch.tensor(r.logprobs)[torch.tensor(r.completion_mask, dtype=torch.bool)]).abs().max().item()
               for r in rollouts)


def policies(trainer):
    return vllm_policy(trainer.vllm_generation.llm, embedded_tokenizer(), trainer.student), \
        TransformersPolicy(trainer.student, embedded_tokenizer())


def test_episodes_with_tool_calls_have_transformers_logprobs_and_end_at_stop_tokens(trainer):
    vllm, _ = policies(trainer)
    rows, limits = world_rows(8, seed=0), RolloutConfig(max_turns=5, max_tokens=300, max_turn_tokens=60)
    first, again = (collect(vllm, WorldEnv, rows, limits, trace_ids=[f"a{i}" for i in range(8)]) for _ in range(2))
    other = collect(vllm, WorldEnv, rows, limits, trace_ids=[f"b{i}" for i in range(8)])
    assert difference(trainer.student, first) < NATS
    assert [r.completion_ids for r in first] == [r.completion_ids for r in again] != [r.completion_ids for r in other]
    turns = [t for r in first for t in r.trace.turns if t.role == "assistant"]
    assert len(turns) > 2 * len(first) and any(t.observation for r in first for t in r.trace.turns)
    for turn in turns:
        assert not set(turn.token_ids[:-1]) & vllm.stops
        assert turn.token_ids[-1] in vllm.stops or len(turn.token_ids) == 60 or turn is turns[-1]


def test_without_chance_both_engines_play_the_same_episodes(trainer):
    rows, limits = world_rows(6, seed=1), RolloutConfig(max_turns=4, max_tokens=240, temperature=0.0)
    one, two = (collect(policy, WorldEnv, rows, limits, trace_ids=[str(i) for i in range(6)]) for policy in policies(trainer))
    assert [r.completion_ids for r in one] == [r.completion_ids for r in two]
    assert [(r.ending, r.reward) for r in one] == [(r.ending, r.reward) for r in two]


def test_what_the_generation_config_names_ends_a_turn_too(trainer, monkeypatch):
    row, = world_rows(1, seed=2)
    prompt = trainer.setup.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True)["input_ids"]

    def answers():
        for policy in policies(trainer):
            with policy.batch(Sampling(temperature=0.0)) as batch:
                yield batch.sample([0], [prompt], [20], ["0"])[0]

    whole, same = answers()
    third = whole.ids[2]
    assert whole.ids == same.ids and third not in whole.ids[:2]
    monkeypatch.setattr(trainer.student.generation_config, "eos_token_id", [trainer.setup.tokenizer.eos_token_id, third])
    assert [(a.ids, a.cut) for a in answers()] == [(whole.ids[:3], False)] * 2


def test_a_row_that_no_longer_fits_ends_its_episode(trainer):
    vllm, _ = policies(trainer)
    row = world_rows(1, seed=0)[0]
    fits = len(collect(vllm, WorldEnv, [row], RolloutConfig(max_turns=1, max_tokens=8), trace_ids=["x"])[0].prompt_ids)
    vllm.positions = fits + 4
    short, = collect(vllm, WorldEnv, [row], RolloutConfig(max_turns=3, max_tokens=99), trace_ids=["x"])
    assert short.ending is Ending.TOKENS and len(short.completion_ids) == 4
    vllm.positions = fits
    none, = collect(vllm, WorldEnv, [row], RolloutConfig(max_turns=3, max_tokens=99), trace_ids=["x"])
    assert none.ending is Ending.TOKENS and not none.completion_ids


def test_after_an_optimizer_step_the_engine_samples_by_the_new_weights(trainer, monkeypatch):
    start, play, seen = embedded_model(), trainer.play, []

    def watched(rows, name):
        rollouts = play(rows, name)
        seen.append((difference(trainer.student, rollouts), difference(start, rollouts)))
        trainer.student.train()
        return rollouts

    monkeypatch.setattr(trainer, "play", watched)
    trainer.train()
    (now, then), (later, stale) = seen
    assert now == then < NATS
    assert later < NATS and stale > 20 * NATS
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["sampling/sampling_logp_difference/max"] < NATS for entry in logged)
