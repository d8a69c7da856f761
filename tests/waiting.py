"""Looks at what others change meanwhile: wait for an event, a process that may end, a file that may go."""
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def wait_until(condition: Callable, seconds: float = 60.0):
    "What the condition gives once it holds, or at the end of the time."
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def free_port() -> int:
    "A port that a program may listen on later: below those that the system gives to every connection meanwhile."
    first, draw = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", draw.randrange(min(10_000, first // 2), first)))
            except OSError:
                continue
            return probe.getsockname()[1]


def alive(pid: int) -> bool:
    "Whether the process runs; one that has ended and waits to be collected does not."
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    "The words of a process, empty where it has ended."
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def text_of(path: Path) -> str:
    "A file's text, empty where it is gone: others remove theirs between a look into a folder and a read."
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return ""
