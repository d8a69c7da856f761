"""Nothing is left of a sandbox: after many runs, after Ctrl-C, after its owner was killed, after threads."""
import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from sandboxes import make_tree, own_state
from waiting import command_of, wait_until

from composer_replication.sandbox.base import Limits, open_sandbox, sandbox_problem
from composer_replication.sandbox.boxes import state_folder, sweep
from composer_replication.sandbox.folders import SandboxProblem
from composer_replication.sandbox.limits import descendants

needs_bubblewrap = pytest.mark.skipif(sandbox_problem("bubblewrap") is not None,
                                      reason=str(sandbox_problem("bubblewrap")))


@pytest.fixture(autouse=True)
def state(monkeypatch, tmp_path_factory):
    "A state and a temporary folder of our own: other tests run beside these."
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with own_state(monkeypatch) as folder:
        yield folder
        assert [*folder.glob("boxes/*")] == []


def world() -> dict:
    "What a sandbox could leave behind, counted for this process."
    gc.collect()  # else files of earlier tests are closed at some time in between
    tasks = []
    for pid in descendants(os.getpid())[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
            tasks.append(psutil.Process(pid).status())
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mine = os.environ["COMPOSER_STATE"]  # a daemon of other tests mounts below its own temporary folder
    groups = [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if "composer" in folder]
    return {"processes": len(tasks), "zombies": tasks.count(psutil.STATUS_ZOMBIE),
            "mounts": {place for place in places if mine in place or not place.startswith(("/tmp/", "/var/tmp/"))},
            "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "groups": len(groups),
            "temporary": set(os.listdir(tempfile.gettempdir()))}


def left_over(before: dict) -> dict:
    "What there is more of than before. Less is no matter: what an earlier test began may end in between."
    now = world()
    more = {name: now[name] - was if isinstance(was, set) else max(now[name] - was, 0) for name, was in before.items()}
    return {name: what for name, what in more.items() if what}


def run_many(tree, n):
    with open_sandbox(tree) as box:
        for k in range(n):
            assert box.exec(["true"]).exit_code == 0
            if k % 30 == 0:
                assert box.exec(["sh", "-c", "sleep 60 & sleep 60"], limits=Limits(wall_s=0.1)).cut == "wall"


@needs_bubblewrap
@pytest.mark.parametrize("n", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_after_many_runs(tmp_path, n):
    tree = make_tree(tmp_path / "t")
    run_many(tree, 1)
    before = world()
    run_many(tree, n)
    for _ in range(n // 20):
        open_sandbox(tree).close()
    assert left_over(before) == {}


OWNER = """
import sys, time
from composer_replication.sandbox.base import open_sandbox
box = open_sandbox(sys.argv[1])
print("ready", flush=True)
while True:
    box.exec(["sleep", sys.argv[2]])
"""


def sleeping(mark: str) -> list[int]:
    "Processes that sleep for the marked time."
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(f"sleep\0{mark}\0".encode()):
                found.append(int(pid))
        except OSError:
            continue
    return found


@needs_bubblewrap
@pytest.mark.parametrize("guarded", [True, False], ids=["its guard tidies up", "the next start sweeps"])
def test_a_killed_owner_leaves_nothing(tmp_path, state, guarded):
    tree, draw, marks = make_tree(tmp_path / "t"), random.Random("kill"), []
    for k in range(4):
        marks.append(f"{70 + k}.{os.getpid()}")
        owner = subprocess.Popen([sys.executable, "-c", OWNER, tree, marks[-1]], stdout=subprocess.PIPE, text=True)
        assert owner.stdout.readline() == "ready\n"
        if not guarded:
            for pid in descendants(owner.pid)[1:]:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
                    if "stdin.buffer.read" in command_of(guard := psutil.Process(pid)):
                        guard.kill()
        time.sleep(draw.random() * 0.02)  # some while a sandbox is being made, some while it runs
        owner.kill()
        owner.wait(timeout=100)
        owner.stdout.close()
    if not guarded:
        assert len(sweep()) == 1  # the last one's; every start swept what the one before had left
    assert wait_until(lambda: not any(map(sleeping, marks))), "a command outlived its owner"
    assert wait_until(lambda: not any((state / "boxes").iterdir())), "a box outlived its owner"


@needs_bubblewrap
def test_ctrl_c_leaves_nothing(tmp_path):
    tree, mark = make_tree(tmp_path / "t"), f"99.{os.getpid()}"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tree, mark], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
    assert owner.stdout.readline() == "ready\n"
    assert wait_until(lambda: sleeping(mark))
    owner.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in owner.communicate(timeout=200)[1]
    assert wait_until(lambda: not sleeping(mark))
    assert sweep() == []  # it tidied up itself; the fixture looks for what is left


class Interrupted(subprocess.Popen):
    "Ctrl-C comes when the process runs and nobody holds it yet."

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [pytest.param("bubblewrap", marks=needs_bubblewrap), "local-unsafe"])
@pytest.mark.filterwarnings("ignore:LocalSubprocessSandbox")
def test_ctrl_c_while_a_command_starts_leaves_nothing(tmp_path, monkeypatch, kind):
    mark = f"98.{os.getpid()}"
    with open_sandbox(make_tree(tmp_path / "t"), kind=kind) as box:
        assert box.exec(["true"]).exit_code == 0
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                box.exec(["sleep", mark])
        assert not sleeping(mark)
        assert box.exec(["true"]).exit_code == 0


@needs_bubblewrap
def test_a_forked_child_does_not_remove_its_parents_box(tmp_path):
    with open_sandbox(make_tree(tmp_path / "t")) as box:
        child = os.fork()
        if not child:
            box.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert box.exec(["cat", "src/one.py"]).stdout == "x = 1\n"


@needs_bubblewrap
def test_many_threads_open_run_and_close(tmp_path):
    tree, wrong, users = make_tree(tmp_path / "t"), [], []
    before = world()

    def work(k):
        try:
            for _ in range(3):
                with open_sandbox(tree) as box:
                    users.append((box._box.path.name, time.monotonic()))
                    if box.exec(["sh", "-c", f"echo {k} > mine; cat mine"]).stdout != f"{k}\n":
                        wrong.append(k)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == [] and len(users) == 24 and left_over(before) == {}


@needs_bubblewrap
def test_a_hostile_neighbour_does_not_disturb(tmp_path):
    "One sandbox forks, to 4,096 processes if nobody stopped it, and fills its disk while another works."
    tree = make_tree(tmp_path / "t")
    with open_sandbox(tree) as bad, open_sandbox(tree) as good:
        bomb = ("import os, time\nfor _ in range(12):\n  try:\n    os.fork()\n"
                "    open(os.urandom(4).hex(), 'wb').write(bytes(99999))\n  except OSError: pass\ntime.sleep(20)")
        limits = Limits(wall_s=1.0, disk_mb=20)
        runner = threading.Thread(target=bad.exec, args=(["python", "-c", bomb],), kwargs={"limits": limits})
        runner.start()
        results = [good.exec(["sh", "-c", "echo fine | cat"], limits=Limits(wall_s=120.0)) for _ in range(5)]
        runner.join(120)
        assert not runner.is_alive() and {(r.stdout, r.exit_code) for r in results} == {("fine\n", 0)}


@needs_bubblewrap
def test_a_tree_that_is_gone_is_told(tmp_path):
    tree = make_tree(tmp_path / "t")
    with open_sandbox(tree) as box, open_sandbox(tree) as other:
        shutil.rmtree(box._repo)
        for _ in range(2):
            with pytest.raises(SandboxProblem, match="dead: its tree on the host is gone"):
                box.exec(["true"])
        shutil.rmtree(tree)
        with pytest.raises(SandboxProblem, match="dead: its tree could not be restored"):
            other.reset()


def test_state_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    monkeypatch.setenv("COMPOSER_STATE", str(shared))
    with pytest.raises(ValueError, match="set COMPOSER_STATE to a folder of your own"):
        state_folder()
