"""Small runs of an arm: for tests in their own process, and for jobs in processes that are killed."""

import gc
import json
import os
import random
import signal
import time
from pathlib import Path

from composer_replication.envs.toy.traces import toy_traces
from composer_replication.experiments import arm
from composer_replication.experiments.setting import Preparation, Setting
from composer_replication.losses.batch import TraceExample
from composer_replication.replay.pairs import sibling_pairs
from composer_replication.traces.siblings import SiblingIndex
from composer_replication.training import running

BOTH = Setting(turns=2, steps=3, tasks=1, rollouts=4, held_out=2, measure_every=2, alpha_sdpo=1.0, beta_replay=0.5)


def replay(setting, tasks, seed, device):
    "Recorded traces with pairs, and what they cost."
    traces = toy_traces()[:40]
    siblings = SiblingIndex(traces)
    examples = [e for e in (TraceExample(t, pairs=tuple(sibling_pairs(t, siblings))[:1]) for t in traces) if e.pairs]
    return examples[:4], Preparation(len(traces), 4, 100, 0.5)


COMPONENTS = arm.Components(replay=replay)


# ---- killed at named moments


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, number=1):
    "Die at the given call of a function, before it does anything."
    whole, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(None)
        return die() if len(calls) == number else whole(*args, **kwargs)

    setattr(owner, name, counted)


def halfway(owner, name):
    "Die in the middle of the bytes that a function writes to its first argument."
    def cut(path, *args, **kwargs):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"{")
        die()

    setattr(owner, name, cut)


def in_place(name):
    "Die right before a file of this name appears."
    whole = os.replace
    os.replace = lambda part, path: die() if Path(path).name == name else whole(part, path)


MOMENTS = {
    "playing step 3": lambda: before(arm._ArmTrainer, "play", 3),
    "loss of step 2": lambda: before(arm._ArmTrainer, "_compute_loss", 2),
    "second measurement": lambda: before(arm, "measure", 2),
    "saving": lambda: halfway(running, "save_buffer"),
    "marker": lambda: in_place("complete.json"),
    "result": lambda: in_place("result.json")}


def play(job):
    "In a process of its own: one run, its steps told to a file."
    if job.get("moment"):
        MOMENTS[job["moment"]]()
    with open(f"{job['folder']}.told", "a", buffering=1) as told:
        arm.run_arm(BOTH, 5, Path(job["folder"]), lambda said: told.write(json.dumps(said) + "\n"), components=COMPONENTS)


def forked(job, seconds=None):
    "How the run ended: an exit code, or minus a signal. After `seconds` it is killed."
    pid = os.fork()
    if not pid:
        try:
            play(job)
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + (300 if seconds is None else seconds)
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(jobs, said):
    "In a process of its own: the jobs one after another; their exit codes go to the file `said`."
    gc.freeze()  # what was imported stays
    draw, codes = random.Random(1), []
    for job in jobs:
        if job.get("storm"):  # killed again and again, each time a little later
            span, code = 0.5, -9
            while code == -9:
                code, span = forked(job, draw.uniform(0.2, span)), span * 1.6
        else:
            code = forked(job)
        codes.append(code)
    Path(said).write_text(json.dumps(codes))
