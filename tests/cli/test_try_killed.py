"`hints try` is killed at random moments, several times: nothing is lost, nothing is asked twice."
import json
import random
import subprocess
import sys
import threading
import time

from bad_server import BadServer, Reply, completion

from composer_replication.replay.ledger import Ledger

PROGRAM = "from composer_replication.cli.app import main; main()"


def until(true, process=None, seconds=240):
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

    def __init__(self):
        self.answered, self.stop, self.round, self.turn = [], 0, 0, threading.Condition()

    def __call__(self, request):
        with self.turn:
            mine = self.round
            self.turn.wait_for(lambda: self.round != mine or len(self.answered) < self.stop)
            if self.round != mine:
                return Reply(hang_up=True)
            self.answered.append(body(request))
        return listing(request)

    def full(self):
        return len(self.answered) == self.stop

    def let(self, stop, of_the_dead=0):
        with self.turn:
            self.stop, self.round = stop, self.round + of_the_dead
            self.turn.notify_all()


def test_killed_after_any_answer_it_goes_on_and_asks_nothing_twice(rows, tmp_path):
    "The server answers a random number and holds the others; once the ledger has these answers, the process is killed."
    ledger, kept = tmp_path / "killed/replies.ledger", tmp_path / "killed/branches.jsonl"
    words = ["hints", "try", "--sites", "3", "--times", "2", "--seed", "1", "--out", "killed", "--model"]
    held, before = Held(), set()
    with BadServer(held) as server:
        words.append(f"m@{server.url}")
        for stop in sorted(random.Random(5).sample(range(1, 24), 2)):
            held.let(stop)
            process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT)
            until(held.full, process)
            until(lambda: len(list(Ledger(ledger).rows())) == len(held.answered), process)
            until(lambda: server.open == min(8, 24 - len(held.answered)), process)
            process.kill()
            process.communicate()
            held.let(stop, of_the_dead=1)
            until(lambda: server.open == 0)
            lines = set(kept.read_bytes().split(b"\n")[:-1])  # the last may be torn
            assert before <= lines
            before = lines
        held.let(1000)
        row, = rows(*words)
    assert row["branches"] == 24 and before <= set(kept.read_bytes().splitlines())
    assert len(held.answered) == len(set(held.answered)) == 24
    with BadServer(listing) as other:  # never killed
        again, = rows(*words[:-3], "undisturbed", "--model", f"m@{other.url}")
    assert all(row[name] == again[name] for name in ("levels", "gains", "by_hint"))
