"`hints try` is killed at random moments, several times: nothing is lost, nothing is asked twice."
import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from bad_server import BadServer, Reply, completion
from envs_tasks import needs_sandbox
from sandboxes import own_state
from trajectories import trajectory

from composer_replication.replay.ledger import Ledger

GONE = [("cat b.py", 1, "cat: b.py: No such file or directory\n"), ("cat c.py", 1, "cat: c.py: No such file or directory\n")]
PROGRAM = "from composer_replication.cli.app import main; main()"


def until(true, process=None, seconds=600):
    "Wait for a condition; a process that ended first fails."
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end and (process is None or process.poll() is None), process and process.communicate()
        time.sleep(0.01)


def body(request):
    return json.dumps(request.body, sort_keys=True)


def listing(request):
    "Half of the answers list the folder, the others call a tool that is not there."
    tools = {t["function"]["name"]: t["function"]["parameters"] for t in request.body["tools"]}
    name = next((n for n in tools if n in ("list_files", "ls", "show_tree")), None)
    lists = name is not None and request.body["seed"] % 2 == 0
    call = (name, json.dumps({tools[name]["required"][0]: "."})) if lists else ("nothing", "{}")
    return Reply(body=completion(calls=[call], finish="tool_calls"))


class Held:
    "Answers up to a number, and holds what comes after until its process is dead."

    def __init__(self, answer):
        self.answer, self.answered, self.stop, self.round, self.turn = answer, [], 0, 0, threading.Condition()

    def __call__(self, request):
        with self.turn:
            mine = self.round
            self.turn.wait_for(lambda: self.round != mine or len(self.answered) < self.stop)
            if self.round != mine:
                return Reply(hang_up=True)
            self.answered.append(body(request))
        return self.answer(request)

    def full(self):
        return len(self.answered) == self.stop

    def let(self, stop, of_the_dead=0):
        with self.turn:
            self.stop, self.round = stop, self.round + of_the_dead
            self.turn.notify_all()


def sleeping(request):
    "A command that is still running when its process is killed; one of two fails."
    command = f"sleep {SLEEPS}; cat {'a.py' if request.body['seed'] % 2 else 'b.py'}"
    return Reply(body=completion(calls=[("bash", json.dumps({"command": command}))], finish="tool_calls"))


SLEEPS = f"3.{os.getpid()}"  # seconds, in its name a mark


def running(mark):
    "Processes with a mark in their command."
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [process.name] if mark.encode() in (process / "cmdline").read_bytes() else []
    return found


TOY = ("--sites", 3, "--times", 2)
FOLDER = ("one.traj.json", "--workspace", "project", "--root", "/testbed", "--arms", "none,own", "--times", 10, "--at-once", 20,
          "--hints", "raw_error")


@pytest.fixture
def state(monkeypatch):
    "A place of sandboxes of our own."
    with own_state(monkeypatch) as state:
        yield state


@pytest.mark.parametrize("answer, asked, at_once, branches", [
    (listing, TOY, 8, 24), pytest.param(sleeping, FOLDER, 20, 40, marks=needs_sandbox)], ids=["eight", "twenty, in sandboxes"])
def test_killed_after_any_answer_it_goes_on_and_asks_nothing_twice(rows, tmp_path, state, answer, asked, at_once, branches):
    "The server answers a random number and holds the others; once the ledger has these answers, the process is killed."
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a.py").write_text("x = 1\n")
    (tmp_path / "one.traj.json").write_text(json.dumps(trajectory(GONE)))
    ledger, kept = tmp_path / "killed/replies.ledger", tmp_path / "killed/branches.jsonl"
    words = ["hints", "try", *map(str, asked), "--seed", "1", "--out", "killed", "--model"]
    held, before, seen = Held(answer), set(), []
    with BadServer(held) as server:
        words.append(f"m@{server.url}")
        for stop in sorted(random.Random(5).sample(range(1, branches), 2)):
            held.let(stop)
            process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT)
            until(held.full, process)
            until(lambda: seen.extend(running(SLEEPS)) or len(list(Ledger(ledger).rows())) == len(held.answered), process)
            until(lambda: seen.extend(running(SLEEPS)) or server.open == min(at_once, branches - len(held.answered)), process)
            process.kill()
            process.communicate()
            held.let(stop, of_the_dead=1)
            until(lambda: server.open == 0)
            until(lambda: not running(SLEEPS) and not running(str(state)))
            until(lambda: not any(state.glob("boxes/*")))
            lines = set(kept.read_bytes().split(b"\n")[:-1])  # the last may be torn
            assert before <= lines
            before = lines
        held.let(1000)
        row, = rows(*words)
    assert row["branches"] == branches and before <= set(kept.read_bytes().splitlines())
    assert len(held.answered) == len(set(held.answered)) == branches and bool(seen) == (answer is sleeping)
    with BadServer(answer) as other:  # never killed
        again, = rows(*words[:-3], "undisturbed", "--model", f"m@{other.url}")
    assert all(row[name] == again[name] for name in ("levels", "gains", "by_hint"))
