"""Runs of a plan, each appended to one file the moment it ends; several processes may work at a plan."""
import argparse
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import orjson
from filelock import FileLock, Timeout


def ended(kept: Path) -> dict[str, dict]:
    "Runs that ended, by name."
    runs = [orjson.loads(line) for line in kept.read_bytes().splitlines()] if kept.exists() else []
    return {run["name"]: run for run in runs}


def keep(kept: Path, run: dict) -> None:
    "Append a run that ended."
    with FileLock(kept.parent / "runs" / "append.lock"), kept.open("ab") as file:
        file.write(orjson.dumps(run) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def tuned(
    run_of: Callable[[int, float], object],  # (seed, rate) -> a development run
    level: Callable[[dict], float],  # of a run that ended
    done: dict[str, dict],  # runs that ended, by name
    rates: tuple[float, ...],
    first: tuple[int, ...],  # of `rates`, tried for every arm alike; wider where the best is an edge
    seeds: tuple[int, ...],
) -> tuple[list, float | None]:
    "Return development runs so far needed, and the rate once they have ended: the best that is no edge of what was tried."
    tried = list(first)
    while True:
        runs = {n: [run_of(seed, rates[n]) for seed in seeds] for n in tried}
        every = sum(runs.values(), [])
        if any(run.name not in done for run in every):
            return every, None
        found = {n: fmean(level(done[run.name]) for run in of) for n, of in runs.items()}
        best = max(tried, key=lambda n: (found[n], -n))  # of equal ones the smallest
        wider = best - 1 if best == min(tried) else best + 1 if best == max(tried) else best
        if wider in tried or not 0 <= wider < len(rates):
            return every, rates[best]
        tried.append(wider)


def claim(kept: Path, plan: Callable[[dict[str, dict]], Iterable]) -> tuple:
    """A run that nobody works at, with its lock; whether any is left.

    `plan` gives runs, each with a `name`, and None for those that wait for others."""
    done, left = ended(kept), False
    for run in plan(done):
        if run and run.name in done:
            continue
        left = True
        if run:
            lock = FileLock(kept.parent / "runs" / f"{run.name}.lock")
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            if run.name not in ended(kept):
                return run, lock, True
            lock.release()
    return None, None, left


def work(kept: Path, plan: Callable, make: Callable[[object], dict], minutes: float) -> None:
    "Make runs until none is left, or none may begin any more."
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=kept.parent, capture_output=True, text=True).stdout.strip()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        run, lock, left = claim(kept, plan)
        if not left:
            return
        if run is None:  # others make what this plan waits for
            time.sleep(20)
            continue
        with lock:
            began = time.monotonic()
            made = make(run)
            keep(kept, {"name": run.name, "commit": commit, "seconds": round(time.monotonic() - began, 1)} | made)
        print(run.name, f"{time.monotonic() - began:.0f} s", flush=True)


def go_on(kept: Path, plan: Callable, make: Callable[[object], dict], minutes: float, workers: int) -> None:
    "Work at a plan in so many processes."
    (kept.parent / "runs").mkdir(exist_ok=True)
    if workers == 1:
        return work(kept, plan, make, minutes)
    processes = [get_context("spawn").Process(target=work, args=(kept, plan, make, minutes)) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def command(spike: str, kept: Path, plan: Callable, make: Callable[[object], dict]) -> None:
    "Go on with a plan as the command line says."
    parser = argparse.ArgumentParser(description=f"Go on with the runs of spike {spike}.")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins after so many")
    asked = parser.parse_args()
    go_on(kept, plan, make, asked.minutes, asked.workers)
