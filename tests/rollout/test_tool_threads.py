"""Time limits of tool calls: a call is late by the time that its process could use, and by no other."""
import math
import signal
import subprocess
import sys
import time

from composer_replication.rollout.tool_threads import Chains

SCRIPT = """
import math, time
from composer_replication.rollout.tool_threads import Chains

with Chains(limit=2) as chains:
    chains.start("call", [lambda: (print("begun", flush=True), input(), "answer")[2]])
    print(*(done.late or done.value for _, steps in chains.take(math.inf) for done in steps))
"""


def test_a_process_that_was_stopped_is_not_late():
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(5)  # Ctrl-Z, longer than the limit
    child.send_signal(signal.SIGCONT)
    time.sleep(1)  # what was late would be given up by now
    assert child.communicate("\n", timeout=60)[0] == "answer\n"


def test_a_call_that_waits_and_one_that_works_are_late():
    def works():
        while not over:
            math.factorial(200)

    over = []
    with Chains(limit=1.0) as chains:
        chains.start("waits", [lambda: time.sleep(60)])
        chains.start("works", [works])
        found = {owner: done[0].late for owner, done in chains.take(math.inf)}
    over.append(True)
    assert found == {"waits": True, "works": True}
