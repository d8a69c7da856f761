"`hints try` is killed at random moments, several times: nothing is lost, nothing is asked twice."
import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from bad_server import BadServer, Reply, completion
from envs_tasks import needs_sandbox
from forks import _start
from sandboxes import own_state
from trajectories import trajectory

from composer_replication.replay.ledger import Ledger

GONE = [("cat b.py", 1, "cat: b.py: No such file or directory\n"), ("cat c.py", 1, "cat: c.py: No such file or directory\n")]


def until(true, process=None, seconds=600):
    "Wait for a condition; a process that ended first fails."
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end and (process is None or process.is_alive()), process
        time.sleep(0.02)


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


class Killed:
    "A command that plays branches against a server that holds its answers, and that is killed again and again."

    def __init__(self, folder, state, asked, server, held):
        self.folder, self.state, self.held, self.server = folder, state, held, server
        self.words = ["hints", "try", *map(str, asked), "--seed", "1", "--out", "killed", "--model", f"m@{server.url}"]
        self.ledger, self.kept = folder / "killed/replies.ledger", folder / "killed/branches.jsonl"
        self.before, self.seen = set(), []

    def replies(self):
        "Requests whose answers are in the ledger."
        return [json.dumps(json.loads(row["request"]), sort_keys=True) for row in Ledger(self.ledger).rows()]

    def watch(self, true, process):
        "Wait for a condition, and note the commands of sandboxes meanwhile."
        until(lambda: self.seen.extend(running(SLEEPS)) or true(), process)

    def kill(self, stop, moment):
        """Start it, let the server answer up to a number, kill it when `moment(process)` returns, and wait until it left nothing.

        Returns what stood there at its death."""
        self.held.let(stop)
        process, folder, *_ = _start(self.words, self.folder, None)
        with folder:
            began = time.monotonic()
            self.watch(self.held.full, process)
            moment(process)
            found = {"seconds": round(time.monotonic() - began, 2), "answered": len(self.held.answered)}
            found |= {"in flight": self.server.open, "commands": len(running(SLEEPS))}
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL
        self.held.let(stop, of_the_dead=1)
        until(lambda: self.server.open == 0)
        until(lambda: not running(SLEEPS) and not running(str(self.state)))
        until(lambda: not any(self.state.glob("boxes/*")))
        lines = set((self.kept.read_bytes() if self.kept.exists() else b"").split(b"\n")[:-1])  # the last may be torn
        assert self.before <= lines
        self.before = lines
        return found | {"in the ledger": len(self.replies()), "branches": len(lines)}


@pytest.fixture
def project(tmp_path):
    "A folder, and a trace that worked in it."
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a.py").write_text("x = 1\n")
    (tmp_path / "one.traj.json").write_text(json.dumps(trajectory(GONE)))
    return tmp_path


@pytest.mark.parametrize("answer, asked, at_once, branches", [
    (listing, TOY, 8, 24), pytest.param(sleeping, FOLDER, 20, 40, marks=needs_sandbox)], ids=["eight", "twenty, in sandboxes"])
def test_killed_after_any_answer_it_goes_on_and_asks_nothing_twice(rows, project, state, answer, asked, at_once, branches):
    "The server answers a random number and holds the others; once the ledger has these answers, the process is killed."
    held = Held(answer)
    with BadServer(held) as server:
        command = Killed(project, state, asked, server, held)

        def full(process):
            command.watch(lambda: len(command.replies()) == len(held.answered), process)
            command.watch(lambda: server.open == min(at_once, branches - len(held.answered)), process)

        for stop in sorted(random.Random(5).sample(range(1, branches), 2)):
            command.kill(stop, full)
        held.let(1000)
        row, = rows(*command.words)
    assert row["branches"] == branches and command.before <= set(command.kept.read_bytes().splitlines())
    assert len(held.answered) == len(set(held.answered)) == branches and bool(command.seen) == (answer is sleeping)
    with BadServer(answer) as other:  # never killed
        again, = rows(*command.words[:-3], "undisturbed", "--model", f"m@{other.url}")
    assert all(row[name] == again[name] for name in ("levels", "gains", "by_hint"))


@pytest.mark.slow
@needs_sandbox
def test_twenty_kills_at_random_moments(rows, project, state):
    """Forty branches, twenty in flight, killed at any moment of their commands: what the ledger has is asked once.

    `-s` shows what stood there at each death."""
    draw, held, deaths = random.Random(63), Held(sleeping), []
    with BadServer(held) as server:
        command = Killed(project, state, FOLDER, server, held)

        def any_moment(process):
            end = time.monotonic() + draw.uniform(0, 10)
            command.watch(lambda: time.monotonic() > end, process)

        for stop in sorted(draw.sample(range(1, 40), 20)):
            found = command.kill(stop, any_moment)
            deaths.append((set(command.replies()), len(held.answered)))
            print(json.dumps(found), flush=True)
        held.let(1000)
        row, = rows(*command.words)
    assert row["branches"] == 40 and command.before <= set(command.kept.read_bytes().splitlines())
    assert all(paid and paid <= set(held.answered[:n]) and not paid & set(held.answered[n:]) for paid, n in deaths)
    assert command.seen and len(held.answered) - len(set(held.answered)) <= sum(n - len(paid) for paid, n in deaths)
    print({"answered": len(held.answered), "different": len(set(held.answered)), "commands seen": len(set(command.seen))})
