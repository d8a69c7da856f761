"""A judge's owner is killed at any moment: nothing of it is left, and the next one gives the same verdict."""
import random
import signal
import subprocess
import sys
import time

import envs_tasks
import psutil
import pytest
from sandboxes import own_state
from waiting import wait_until

from composer_replication.envs.deletion.task import write_tasks
from composer_replication.sandbox.boxes import MARK, sweep

pytestmark = envs_tasks.needs_sandbox
OWNER = """
import sys
from pathlib import Path
from composer_replication.core.trace import ToolCall
from composer_replication.envs.deletion.env import FeatureDeletionEnv
from composer_replication.envs.deletion.subject import subject_of
from composer_replication.envs.deletion.task import read_tasks

task, = read_tasks(Path(sys.argv[1]))
(path, (text, _)), = task.changed_files(subject_of(task).tree).items()
while True:
    env = FeatureDeletionEnv([task])
    env.reset(task_id=task.task_id)
    env.call(ToolCall("write_file", {"path": path, "text": text}))
    print(env.reward(), flush=True)
"""


@pytest.fixture
def world(initials, tmp_path, monkeypatch):
    "A task, and a state and a temporary folder of our own; what was prepared is shared with other tests."
    write_tasks([initials], tmp_path / "tasks.jsonl")
    (tmp_path / "tmp").mkdir()
    with own_state(monkeypatch) as state:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        yield state, tmp_path


def marked(state):
    "Processes of sandboxes that lie in this state."
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if process.environ().get(MARK, "").startswith(str(state)) else []
        except (psutil.Error, OSError):
            continue
    return found


def boxes(state):
    return [path.name for path in (state / "boxes").iterdir()] if (state / "boxes").is_dir() else []


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_owner_leaves_nothing_and_the_next_one_judges_the_same(world, kills):
    (state, folder), draw = world, random.Random("killed judges")
    for number in range(kills):
        owner = subprocess.Popen([sys.executable, "-c", OWNER, folder / "tasks.jsonl"], stdout=subprocess.PIPE, text=True)
        try:
            if number % 3:
                assert owner.stdout.readline() == "1.0\n"
            time.sleep(draw.random())
        finally:
            owner.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM)))
            owner.wait(timeout=300)
            rest = owner.stdout.read()
            owner.stdout.close()
        assert set(rest.split()) <= {"1.0"}
    assert wait_until(lambda: not boxes(state)), boxes(state)  # each owner's guard sweeps
    assert wait_until(lambda: not marked(state))
    assert list((folder / "tmp").iterdir()) == []
    assert [path.name for path in (state / "bytecode").iterdir() if path.name.startswith("tmp")] == []


HALF = """
import sys, time
import composer_replication.envs.deletion.judge.trees as trees
from composer_replication.envs.deletion.subject import subject_of
from composer_replication.envs.deletion.task import read_tasks
from pathlib import Path

compile_file = trees.compile_file

def slowly(path, target):
    compile_file(path, target)
    print("compiled", flush=True)
    time.sleep(60)

trees.compile_file = slowly
trees.compiled(subject_of(read_tasks(Path(sys.argv[1]))[0]))
"""


def test_an_owner_killed_while_it_compiles_leaves_no_half(world):
    state, folder = world
    owner = subprocess.Popen([sys.executable, "-c", HALF, folder / "tasks.jsonl"], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "compiled\n"
    assert list((state / "bytecode").iterdir()) == [] and boxes(state)
    owner.kill()
    owner.wait(timeout=300)
    owner.stdout.close()
    sweep()  # as whoever comes next does before its first command
    assert boxes(state) == []
    assert list((state / "bytecode").iterdir()) == [] and list((folder / "tmp").iterdir()) == []
