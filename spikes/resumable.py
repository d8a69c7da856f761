"""Runs of a plan that several processes make, each ended run a file: what spikes 012, 013 and 200 share."""
import gzip
from collections.abc import Callable, Iterable
from pathlib import Path

import orjson
from filelock import FileLock, Timeout

from composer_replication.core.files import write_file, write_json


def claim(plan: Iterable) -> tuple:
    """A run that nobody works at, with its lock; whether any is left.

    `plan` gives runs, each with the `path` of its file, and None for those that depend on runs that have not ended."""
    left = False
    for run in plan:
        if run and run.path.exists():
            continue
        left = True
        if run:
            lock = FileLock(run.path.with_suffix(".lock"))
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            if not run.path.exists():
                return run, lock, True
            lock.release()
    return None, None, left


def collect(runs: Path, kept: Path) -> None:
    "All runs that ended, one a line, sorted by name, as gzip."
    lines = (orjson.dumps(orjson.loads(path.read_bytes())) for path in sorted(runs.glob("*.json")))
    write_file(kept, gzip.compress(b"".join(line + b"\n" for line in lines), mtime=0))


def unpack(
    kept: Path,  # of `collect`
    path_of: Callable[[dict], Path],  # where a run belongs
) -> None:
    "Runs that another checkout made, so that they are not made again."
    for line in gzip.decompress(kept.read_bytes()).splitlines() if kept.exists() else ():
        run = orjson.loads(line)
        if not (path := path_of(run)).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, run)
