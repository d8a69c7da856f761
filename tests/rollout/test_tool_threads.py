"""Time limits of tool calls: a call is late by the time that its process could use, and by no other."""
import math
import os
import signal
import subprocess
import sys
import time

from composer_replication.rollout.tool_threads import Chains

SCRIPT = """
import math, os, signal, time
from composer_replication.rollout.tool_threads import Chains

def stopped():
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    while time.monotonic() - began < 4:  # this thread may run on for a moment
        time.sleep(0.1)
    time.sleep(1)  # what is late would be given up meanwhile
    return "answer"

with Chains(limit=3) as chains:
    chains.start("call", [stopped])
    print(*(done.late or done.value for _, steps in chains.take(math.inf) for done in steps), flush=True)
os._exit(0)
"""


def test_a_process_that_was_stopped_is_not_late():
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
    time.sleep(5)  # Ctrl-Z, longer than the limit
    child.send_signal(signal.SIGCONT)
    assert child.communicate(timeout=60)[0] == "answer\n"


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
