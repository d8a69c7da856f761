"Trainer and generators as Monarch actors, each a process that may die; in torchmonarch itself (`make test-foreign`)."
import asyncio
import json
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer_replication.contrib.monarch import train_with_actors
from composer_replication.contrib.queue.rollouts import begin_run
from composer_replication.contrib.queue.store import QueueProblem, Store
from composer_replication.core.errors import InputProblem
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe

needs_monarch = pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch is not installed: make test-foreign")
LIMIT = 300  # seconds that any wait may take
SMALL = {"train_rows": "8", "max_completion_length": "64", "max_turns": "2", "report_to": "none", "sample_every": "0",
         "queue_lease": "4"}


def trained(folder, meanwhile=None, steps=3, **changes):
    "The checkpoint of a run, while something else is done in another thread."
    settings = SMALL | {"max_steps": str(steps), "output_dir": str(folder / "out"), "save_strategy": "no"} | changes

    async def both():
        run = asyncio.wait_for(train_with_actors("toy", settings, str(folder / "queue")), LIMIT)
        return (await asyncio.gather(run, asyncio.to_thread(meanwhile or (lambda: None)), return_exceptions=True))[0]

    return asyncio.run(both())


def kill_once_playing(folder, which):
    "Kill an actor's process by its name, after the second generation has begun."
    end, store = time.monotonic() + LIMIT, Store(str(folder / "queue"))
    while not store.read("progress.json") or json.loads(store.read("progress.json"))["last"] < 1:
        assert time.monotonic() < end, "nobody plays"
        time.sleep(0.1)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            about = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"HYPERACTOR_PROCESS_NAME={which}".encode() in about:
            return os.kill(int(process.name), signal.SIGKILL)
    raise AssertionError(f"no process is called {which}")


@needs_monarch
def test_actors_train_as_the_trainer_alone(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": "3", "max_staleness": "0", "vllm_importance_sampling_correction": "false"}
    assert trained(tmp_path, **settings) == str(tmp_path / "out/checkpoint-3")
    alone = load_recipe("toy", SMALL | settings | {"max_steps": "3", "output_dir": str(tmp_path / "alone")})
    folders = tmp_path / "out/checkpoint-3", Path(run_recipe(alone).checkpoint)
    torch.testing.assert_close(*(load_file(folder / "model.safetensors") for folder in folders))


@needs_monarch
def test_a_generator_that_is_killed_is_replaced(tmp_path):
    found = trained(tmp_path, lambda: kill_once_playing(tmp_path, "generator0_0"), 12)
    assert found is None  # no checkpoint was asked for, and no error came


@needs_monarch
def test_a_trainer_that_is_killed_is_told(tmp_path):
    found = trained(tmp_path, lambda: kill_once_playing(tmp_path, "trainer"), 40)
    assert isinstance(found, InputProblem) and "the trainer's process died" in str(found)


@needs_monarch
def test_what_an_actor_refuses_is_said_as_it_was(tmp_path):
    begin_run(Store(str(tmp_path / "queue")), {"task": "another"})
    found = trained(tmp_path)
    assert isinstance(found, QueueProblem) and "Traceback" not in str(found), found


@pytest.mark.parametrize("settings, generators, said", [
    ({"task": "null", "traces": "[embedded]"}, 2, "without a task"), ({}, 0, "nobody would play")])
def test_what_cannot_be_is_refused_before_anything_starts(settings, generators, said, tmp_path):
    with pytest.raises(InputProblem, match=said):
        asyncio.run(train_with_actors("toy", settings, str(tmp_path / "queue"), generators))
    assert not (tmp_path / "queue").exists()
