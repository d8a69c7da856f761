"An interrupt that another thread received ends every long wait of the main thread."
import subprocess
import sys

import pytest

HEAD = """
import os, signal, sys, threading, time

def interrupt(*_):
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the system may choose any thread
    time.sleep(60)

async def interrupted(*_):
    interrupt()
"""
WAITS = {
    "jobs in threads": """
from composer_replication.core.deadline import in_threads
wait = lambda: list(in_threads(interrupt, [1, 2], 2))""",
    "a future": """
from concurrent.futures import ThreadPoolExecutor
from composer_replication.core.deadline import awaited
wait = lambda: awaited(ThreadPoolExecutor(1).submit(interrupt))""",
    "teachers elsewhere": """
from composer_replication.core.trace import Turn
from composer_replication.replay.teachers import TraceState, ask_each
class Far:
    name, remote, answer = "far", True, interrupt
wait = lambda: ask_each([(Far(), [TraceState("t", (Turn("user", "Hello"),))])])""",
    "a chain of tools": """
from composer_replication.rollout.tool_threads import run_chains
wait = lambda: run_chains([[interrupt]], 1, 60.0)""",
}


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupt_that_a_worker_thread_received_ends_the_wait(name):
    end = "\ntry:\n    wait()\nexcept KeyboardInterrupt:\n    print('ended', flush=True)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", HEAD + WAITS[name] + end], capture_output=True, text=True, timeout=50)
    assert done.stdout == "ended\n", done.stderr
