"""Trainer and generator in one process, the generator playing where the trainer would wait; both as commands that are killed."""
import math
import os
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from forks import SERVER, _command, composer
from fused import Fused, Killed
from safetensors.torch import load_file
from trainer_script import are_equal, weights

from composer_replication.contrib.queue.claims import Claims
from composer_replication.contrib.queue.generator import Generator, check_queue_recipe, queue_settings
from composer_replication.contrib.queue.rollouts import asked, begin_run, join_run, take
from composer_replication.contrib.queue.store import QueueProblem, Store
from composer_replication.contrib.queue.trainer import QueueTrainer
from composer_replication.core.errors import InputProblem
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import make_trainer, run_recipe
from composer_replication.rollout.types import Ending
from composer_replication.training.episodes import EnvironmentBroken

LIMIT = 900  # seconds that any wait may take; on an idle machine none needs 60
SMALL = {"train_rows": "8", "max_completion_length": "64", "max_turns": "2", "report_to": "none", "sample_every": "0",
         "episode_reward": "{failed_calls: 0.1, floor: -1}"}  # so that rewards differ


def recipe_in(folder, **changes):
    own = {"output_dir": str(folder), "save_strategy": "no"} | {key: str(value) for key, value in changes.items()}
    recipe = load_recipe("toy", SMALL | own)
    recipe.config.disable_tqdm = True
    return recipe


def with_queue(recipe, store, doctor=lambda rollout: rollout):
    "What makes a trainer that has its generator play where it would wait."
    begin_run(store, queue_settings(recipe))
    generator = Generator(recipe, Claims(Store(store.url), name="generator"))

    def turn(seconds):
        while group := generator.next_group():
            generator.claims.deliver(group, generator.version, map(doctor, generator.play(group)))

    store.pause = turn
    return partial(QueueTrainer, queue=store)


def moved(trainer):
    "How far training moves each weight."
    before = weights(trainer)
    trainer.train()
    return {name: weight - before[name] for name, weight in weights(trainer).items()}


def versions(store):
    "By generation, the version of the weights that played each group."
    generations = range(len(store.names("generations")))
    return {g: [played.version for played in take(store, g, len(asked(store, g)), 0)] for g in generations}


def test_without_staleness_and_correction_it_is_the_trainer_without_a_queue(tmp_path):
    settings = {"max_staleness": 0, "vllm_importance_sampling_correction": "false", "max_steps": 2}
    one = moved(make_trainer(recipe_in(tmp_path / "plain", **settings)))  # first: the other's making seeds what TRL shuffles by
    recipe = recipe_in(tmp_path / "queued", **settings)
    other = moved(make_trainer(recipe, with_queue(recipe, Store(str(tmp_path / "queue")))))
    assert are_equal(one, other) and any(delta.any() for delta in one.values())


def test_episodes_that_all_broke_are_played_again_by_the_next_run(tmp_path):
    broken = lambda rollout: replace(rollout, ending=Ending.ERROR, reward=None, problem="the sandbox is gone")
    settings, store = {"max_steps": 1, "resume": "true"}, Store(str(tmp_path / "queue"))
    recipe = recipe_in(tmp_path / "out", **settings)
    with pytest.raises(EnvironmentBroken, match="the sandbox is gone"):
        run_recipe(recipe, kind=with_queue(recipe, store, broken))
    recipe = recipe_in(tmp_path / "out", **settings)
    assert run_recipe(recipe, kind=with_queue(recipe, store)).step == 1


def test_a_token_half_again_as_likely_as_when_it_was_sampled_counts_half_again(tmp_path):
    "The policy's gradient alone, by plain SGD; the ratio is within its bound of 3."
    settings = {"alpha_sdpo": 0, "beta_replay": 0, "max_steps": 1, "optim": "sgd", "max_grad_norm": 0, "learning_rate": 100,
                "vllm_importance_sampling_mode": "token_truncate"}

    def rarer(rollout):
        logprobs = zip(rollout.logprobs, rollout.completion_mask)
        return replace(rollout, logprobs=tuple(p - math.log(1.5) * sampled for p, sampled in logprobs))

    doctors = {"once": lambda rollout: rollout, "more": rarer}
    recipes = {name: recipe_in(tmp_path / name, **settings) for name in doctors}
    once, more = (moved(make_trainer(recipe, with_queue(recipe, Store(f"memory://ratio-{name}"), doctors[name])))
                   for name, recipe in recipes.items())
    assert max(delta.abs().max() for delta in once.values()) > 1e-3
    for name, delta in once.items():
        torch.testing.assert_close(more[name], 1.5 * delta, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1])
def test_a_trainer_killed_at_an_access_to_its_queue_comes_to_the_same_weights(tmp_path, bound):
    "As below, in one process, where moments can be named: killed four times, then once more from the checkpoint to the end."
    settings = {"max_staleness": bound, "vllm_importance_sampling_correction": str(bool(bound)).lower(), "max_steps": 4,
                "save_strategy": "steps", "save_steps": 2}
    store = Fused(str(tmp_path / "queue"))
    for fuse, after in ((4, False), (12, True), (26, True), (12, False)):
        store.fuse = None
        recipe = recipe_in(tmp_path / "out", resume="true", **settings)
        kind = with_queue(recipe, store)
        store.fuse, store.after = fuse, after
        with pytest.raises(Killed):
            run_recipe(recipe, kind=kind)
    store.fuse, recipe = None, recipe_in(tmp_path / "out", resume="true", **settings)
    last = run_recipe(recipe, kind=with_queue(recipe, store))
    assert last.step == 4 and last.resumed_from.name == "checkpoint-2"
    staleness = {g - version for g, of_groups in versions(store).items() for version in of_groups}
    assert staleness == set(range(bound + 1))
    recipe = recipe_in(tmp_path / "oracle", **settings)
    queue = Store(store.url)
    queue.pause = None  # nothing is waited for
    run_recipe(recipe, **({"kind": partial(QueueTrainer, queue=queue)} if bound else {}))
    assert are_equal(*(load_file(tmp_path / name / "checkpoint-4" / "model.safetensors") for name in ("out", "oracle")))


def test_a_trainer_whose_rollouts_do_not_come_ends_with_a_sentence(tmp_path):
    recipe = recipe_in(tmp_path, ddp_timeout=7)
    queue, seconds = Store("memory://nobody-plays"), []
    queue.now, queue.pause = lambda: sum(seconds), seconds.append
    trainer = make_trainer(recipe, partial(QueueTrainer, queue=queue))
    queue.put("generators/one", b"ended: the disk is full.")
    said = r"no rollouts of generation 3 .* within 7 seconds \(ddp_timeout\); a generator ended: the disk is full; start"
    with pytest.raises(QueueProblem, match=said):
        trainer._wait_for(3, 2)
    assert 7 <= sum(seconds) < 8
    trainer.interrupt.requested = True
    with pytest.raises(KeyboardInterrupt):
        trainer._wait_for(3, 2)


@pytest.mark.parametrize("changes, said", [
    ({"rollout": "trl", "episode_reward": "null"}, "--queue does not go with rollout='trl'"),
    ({"loss_type": "vespo"}, "set vllm_importance_sampling_mode to token_truncate"),
    ({"task": "null", "traces": "embedded", "episode_reward": "null"}, "a recipe without a task")])
def test_what_cannot_go_through_a_queue_is_refused(tmp_path, changes, said):
    with pytest.raises(InputProblem, match=said):
        check_queue_recipe(recipe_in(tmp_path, **changes))


def test_other_settings_than_the_trainers_are_refused_by_name(tmp_path):
    store = Store("memory://settings")
    begin_run(store, queue_settings(recipe_in(tmp_path)))
    join_run(store, queue_settings(recipe_in(tmp_path / "elsewhere", resume="true", max_steps=99, save_steps=7)), 0)
    with pytest.raises(QueueProblem, match="belongs to a run with temperature=1.0, and here it is 0.5; take the same recipe"):
        join_run(store, queue_settings(recipe_in(tmp_path, temperature=0.5)), 0)


# ---- commands


def words(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


class Sea:
    "Commands in processes of their own, of which none outlives the test."

    def __init__(self, folder, store):
        self.folder, self.store, self.begun = folder, store, []

    def start(self, name, *arguments):
        said, complained = (self.folder / f"{name}-{len(self.begun)}.{stream}" for stream in ("out", "err"))
        said.touch()
        complained.touch()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        process = SERVER.Process(target=_command, args=([*map(str, arguments)], str(self.folder), environment, said, complained))
        process.start()
        process.complained = complained
        self.begun.append(process)
        return process

    def there(self, pattern):
        "Files of the queue, or of the folder."
        within = pattern.removeprefix("queue/")
        return set(self.store.files.glob(self.store.path(within)) if within != pattern else self.folder.glob(pattern))

    def until(self, pattern, process):
        "A file is there that was not there before, or the process has ended."
        before, end = self.there(pattern), time.monotonic() + LIMIT
        while not self.there(pattern) - before and process.is_alive():
            assert time.monotonic() < end, pattern
            time.sleep(0.01)

    def ended(self, process):
        process.join(LIMIT)
        assert process.exitcode == 0, process.complained.read_text()[-3000:]


@pytest.fixture(params=["folder", "s3"])
def sea(request, tmp_path):
    url = str(tmp_path / "queue") if request.param == "folder" else f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    made = Sea(tmp_path, Store(url))
    yield made
    for process in made.begun:
        process.kill()
        process.join(LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_commands_killed_at_several_moments_lose_nothing_and_train_nothing_twice(sea, tmp_path, bound):
    """Without staleness the weights are those of the command without a queue. With staleness rollouts depend on who was quick;
    a new run that trains on the same rollouts once each, in order, comes to the same weights."""
    settings = SMALL | {"max_steps": 6, "save_steps": 2, "max_staleness": bound, "queue_lease": 10, "ddp_timeout": LIMIT}
    settings |= {"vllm_importance_sampling_correction": str(bool(bound)).lower()}
    both = ["--config", "toy", "--queue", sea.store.url, *words(settings)]
    train = ["train", *both, "--set", "output_dir=out", "--set", "resume=true"]
    players = [sea.start("generate", "generate", *both) for _ in range(2)]
    trainer = sea.start("train", *train)
    for victim, moment in (("player", "queue/generations/000000/claim-*"), ("trainer", "queue/generations/000001/tasks.json"),
                           ("trainer", "out/checkpoint-2/optimizer.pt"), ("player", "queue/generations/000003/claim-*"),
                           ("trainer", "queue/generations/000004/rollouts-0.json.gz")):
        if not sea.there(moment):
            sea.until(moment, trainer)
        if victim == "trainer":
            trainer.kill()
            trainer.join(LIMIT)
            trainer = sea.start("train", *train)
        else:
            players[0].kill()
            players = [players[1], sea.start("generate", "generate", *both)]
    for process in (trainer, *players):
        sea.ended(process)
    staleness = {g: [g - version for version in of_groups] for g, of_groups in versions(sea.store).items()}
    assert sorted(staleness) == list(range(6)) and all(len(of_groups) == 2 for of_groups in staleness.values())
    assert {s for of_groups in staleness.values() for s in of_groups} <= set(range(bound + 1))
    assert bound == 0 or any(map(any, staleness.values()))
    oracle = ["train", *(both if bound else ["--config", "toy", *words(settings)]), "--set", "output_dir=oracle"]
    done = composer(*oracle, cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert are_equal(*(load_file(tmp_path / name / "checkpoint-6" / "model.safetensors") for name in ("out", "oracle")))
