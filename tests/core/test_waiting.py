"An interrupt that another thread received ends every long wait of the main thread."
import subprocess
import sys

CODE = """
import os, signal, threading, time
from concurrent.futures import ThreadPoolExecutor
from composer_replication.core.deadline import awaited, in_threads
from composer_replication.core.trace import Turn
from composer_replication.replay.teachers import TraceState, ask_each
from composer_replication.rollout.tool_threads import run_chains

def interrupt(*_):
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the system may choose any thread
    time.sleep(600)

class Far:
    name, remote, answer = "far", True, interrupt

waits = {
    "jobs in threads": lambda: list(in_threads(interrupt, [1, 2], 2)),
    "a future": lambda: awaited(ThreadPoolExecutor(1).submit(interrupt)),
    "teachers elsewhere": lambda: ask_each([(Far(), [TraceState("t", (Turn("user", "Hello"),))])]),
    "a chain of tools": lambda: run_chains([[interrupt]], 1, 600.0)}
for name, wait in waits.items():
    if os.fork() == 0:
        signal.alarm(300)
        try:
            wait()
        except KeyboardInterrupt:
            os.write(1, f"{name}\\n".encode())
        os._exit(0)
for _ in waits:
    os.wait()
"""


def test_an_interrupt_that_a_worker_thread_received_ends_the_wait():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=900)
    ended = sorted(done.stdout.splitlines())
    assert ended == ["a chain of tools", "a future", "jobs in threads", "teachers elsewhere"], done.stderr
