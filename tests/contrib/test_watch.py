"""A command under a limit, in processes of its own: the time, SIGTERM, the guard, a killed watch, and several starts."""
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from jobs import GUARDED
from transformers import TrainerState
from waiting import alive

from composer_replication.contrib.launch.job import LaunchProblem, Limit
from composer_replication.contrib.launch.watch import JobWatch, Status, guard_reason, read_status, status_file
from composer_replication.core.files import write_json
from composer_replication.training.checkpoint import mark_complete
from composer_replication.training.guard import HeldOutGuard

COMMAND = Path(sys.executable).with_name("composer-rl")
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open("pids", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
POLITE = """
import signal, sys, time
def end(*_):
    open("ended", "w").write("a checkpoint")
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
open("begun", "w").close()
time.sleep(600)
"""


def start(folder, seconds, *command):
    words = [COMMAND, "jobs", "run", ".", "--seconds", str(seconds), "--json", "--", *map(str, command)]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(watch):
    "Exit code and JSON of a watch."
    try:
        out, err = watch.communicate(timeout=300)
    finally:
        watch.kill()
    return watch.returncode, json.loads(out) if out else err


def wait_for(path):
    end = time.monotonic() + 300
    while not path.exists() or path.name == "pids" and len(path.read_text().split()) < 2:
        assert time.monotonic() < end, f"{path.name} was never written"
        time.sleep(0.05)


def gone(*pids):
    "Whether these processes end."
    end = time.monotonic() + 120
    while any(map(alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_what_ignores_sigterm_is_killed_after_the_grace_with_all_that_it_started(tmp_path):
    watch = start(tmp_path, 60, sys.executable, "-c", STUBBORN)
    wait_for(tmp_path / "pids")
    watch.terminate()
    code, told = finish(watch)
    assert code == 130 and told["state"] == "stopped" and told["code"] == -signal.SIGKILL and told["used"] >= Limit(60).grace
    assert gone(*map(int, (tmp_path / "pids").read_text().split()))


def test_sigterm_lets_the_command_end_by_itself(tmp_path):
    watch = start(tmp_path, 3600, sys.executable, "-c", POLITE)
    wait_for(tmp_path / "begun")
    assert read_status(tmp_path).state == "running"
    with pytest.raises(LaunchProblem, match="a job runs in"):
        JobWatch(tmp_path, ["true"], Limit(3600))
    watch.terminate()
    code, told = finish(watch)
    assert code == 130 and told["state"] == "stopped" and (tmp_path / "ended").read_text() == "a checkpoint"
    assert read_status(tmp_path).state == "stopped"


def test_a_command_that_gets_sigterm_together_with_its_watch_is_stopped(tmp_path):
    "Slurm signals every process of a step at once, so the command may be gone before the watch looks."
    status = JobWatch(tmp_path, ["bash", "-c", "kill -TERM $PPID; exit 130"], Limit(3600)).run()
    assert status.state == "stopped" and status.code == 130


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_nothing_runs_without_a_limit_when_the_watch_is_killed(tmp_path):
    watch = start(tmp_path, 3600, sys.executable, "-c", POLITE)
    wait_for(tmp_path / "begun")
    watch.kill()
    watch.communicate(timeout=600)
    wait_for(tmp_path / "ended")
    assert read_status(tmp_path).state == "lost"


@pytest.mark.parametrize(("seconds", "code"), [(600, -signal.SIGTERM), (0, 0)])
def test_the_guard_ends_the_job_and_it_is_not_started_again(seconds, code, tmp_path):
    "The command hangs after the guard's checkpoint, or ends by itself."
    exit_code, told = finish(start(tmp_path, 60, sys.executable, "-c", GUARDED, seconds))
    assert exit_code == 0 and told["state"] == "guard" and told["code"] == code and "the KL is too large" in told["reason"]
    assert told["used"] < 54  # not by the limit
    with pytest.raises(LaunchProblem, match="the guard has stopped this run"):
        JobWatch(tmp_path, ["true"], Limit(3600))


def test_the_guards_own_state_is_read(tmp_path):
    "Written by the real guard and transformers, in the form of a checkpoint."
    guard, checkpoint = HeldOutGuard(kl_hard_stop=0.1), tmp_path / "checkpoint-7"
    guard.update(7, 0.5, 0.5, kl=0.2)
    checkpoint.mkdir()
    TrainerState(stateful_callbacks={"HeldOutGuard": {"guard": guard.state_dict(), "rewards": []}}).save_to_json(
        str(checkpoint / "trainer_state.json"))
    assert guard_reason(tmp_path) == ""  # not complete yet
    mark_complete(checkpoint)
    assert guard_reason(tmp_path) == guard.reason != ""


def test_torchrun_leaves_its_workers_the_whole_grace(tmp_path):
    "Asked of the installed torch, whose own default is 30 seconds."
    code = ("from torch.distributed.launcher.api import LaunchConfig;"
            f"open({str(tmp_path / 'seconds')!r}, 'w').write(str(LaunchConfig(1, 1, 2).shutdown_timeout))")
    assert JobWatch(tmp_path, [sys.executable, "-c", code], Limit(3000)).run().state == "done"
    assert (tmp_path / "seconds").read_text() == "300"


def test_all_starts_count_together(tmp_path):
    used = [JobWatch(tmp_path, ["sleep", "0.3"], Limit(1000)).run().used for _ in range(2)]
    assert 0.3 <= used[0] and used[0] + 0.3 <= used[1] < 300
    write_json(status_file(tmp_path), asdict(Status("lost", 899.0, 1000)))
    assert JobWatch(tmp_path, ["true"], Limit(1000)).run().state == "done"
    write_json(status_file(tmp_path), asdict(Status("lost", 900.0, 1000)))  # only the grace is left
    with pytest.raises(LaunchProblem, match="900 of 1000 seconds of the limit are used"):
        JobWatch(tmp_path, ["true"], Limit(1000))


@pytest.mark.parametrize(("command", "code"), [
    (["bash", "-c", "exit 7"], 7), (["bash", "-c", "kill -SEGV $$"], 128 + signal.SIGSEGV), (["true"], 0)])
def test_the_commands_exit_code_is_the_watchs(command, code, tmp_path):
    assert finish(start(tmp_path, 3600, *command))[0] == code


@pytest.mark.parametrize("text", ["", "[]", '{"state": "running"}'])
def test_a_broken_status_is_one_sentence(text, tmp_path):
    status_file(tmp_path).write_text(text)
    with pytest.raises(LaunchProblem, match="the status cannot be read"):
        read_status(tmp_path)


def test_each_machine_of_a_job_has_a_status_of_its_own(tmp_path, monkeypatch):
    names = set()
    for rank in ("0", "1", "2", "../x"):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", rank)
        names.add(status_file(tmp_path).relative_to(tmp_path).as_posix())
    assert names == {"job-status.json", "job-status-1.json", "job-status-2.json"}


def test_a_disk_that_refuses_the_status_for_a_while_ends_no_watch(tmp_path, monkeypatch):
    from composer_replication.contrib.launch import watch
    real, writes = watch.write_json, []

    def write(path, value):
        writes.append(value["state"])
        if len(writes) in (2, 3):
            raise OSError(5, "Input/output error")
        return real(path, value)

    monkeypatch.setattr(watch, "write_json", write)
    monkeypatch.setattr(watch, "WRITE", 0.05)
    code = "import time; time.sleep(2)"
    status = watch.JobWatch(tmp_path, [sys.executable, "-c", code], watch.Limit(300)).run()
    assert status.code == 0 and len(writes) > 3


def test_a_watch_that_fails_leaves_nothing_without_a_limit(tmp_path, monkeypatch):
    from composer_replication.contrib.launch import watch
    mine = watch.JobWatch(tmp_path, [sys.executable, "-c", "import time; time.sleep(600)"], watch.Limit(300))
    monkeypatch.setattr(type(mine), "look", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mine.run()
    assert gone(mine.child.pid)
