"""Jobs handed over: to stand-ins for each place's program, to kubectl itself before a stand-in for an API server, and here."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from jobs import wait

from composer_replication.contrib.launch.clients import (
    TARGETS,
    job_cancel,
    job_logs,
    job_record,
    job_status,
    leave,
    missing,
    submit,
    what_to_run,
    write_job,
)
from composer_replication.contrib.launch.job import LaunchJob, LaunchProblem, limit_of
from composer_replication.contrib.launch.watch import Status, read_status, status_file
from composer_replication.core.files import write_json

PROGRAM = """#!{python}
import json, os, sys
open({log!r}, "a").write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
print("first line")
print("https://modal.com/apps/me/main/ap-1 is ap-42, the map-reduce began" if sys.argv[1:2] == ["run"] else "42;cluster")
"""


def job_in(folder, **fields):
    return LaunchJob(**{"name": "toy", "command": ("true",), "folder": "/runs/toy", "limit": limit_of(hours=1),
                        "files": {"toy.yaml": "task: toy\n"}, "here": str(folder), "hardware": "H100", "image": "r.invalid/x:1",
                        "storage": "runs", **fields})


AWS = {"hardware": "ml.g5.2xlarge", "role": "arn:aws:iam::123456789012:role/x", "storage": "s3://bucket/runs"}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    "Stand-ins for all the programs, which record their words."
    folder, log = tmp_path / "bin", tmp_path / "asked"
    folder.mkdir()
    for name in {target.program for target in TARGETS.values()} | {"squeue", "scancel"}:
        (folder / name).write_text(PROGRAM.format(python=sys.executable, log=str(log)))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(("on", "fields"), [
    ("slurm", {}), ("kubernetes", {}), ("sky", {"env": ("HF_TOKEN", "OTHER"), "storage": "s3://bucket"}), ("modal", {}),
    ("sagemaker", AWS)])
def test_a_job_is_submitted_shown_and_ended_by_its_places_program(on, fields, programs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    folder = tmp_path / "it's $(touch pwned)"
    record = submit(job_in(folder, **fields), on)
    assert missing(on) is None and record["id"] == ("ap-42" if on == "modal" else "42") and job_record(folder) == record
    assert job_status(record) == job_cancel(record) == "first line\n42;cluster"
    if on != "slurm":
        job_logs(record, 7)
    asked = programs()
    assert all(not word.startswith("{") for words in asked for word in words), asked
    assert [words[0] for words in asked[:len(TARGETS[on].submit)]] == [words[0] for words in TARGETS[on].submit]
    assert any(word.endswith(record["spec"]) for word in asked[len(TARGETS[on].submit) - 1])
    assert any("toy" in word or "42" in word for word in asked[-1])
    assert not any("hf_secret_value" in p.read_text() for p in [*folder.iterdir(), tmp_path / "asked"] if p.is_file())
    assert not list(tmp_path.rglob("pwned"))
    if on == "sky":
        assert "--secret=HF_TOKEN" in asked[0] and "--secret=OTHER" in asked[0]


@pytest.mark.parametrize("on", TARGETS)
def test_no_two_files_of_a_job_have_one_name(on, tmp_path):
    for name in ("job", "sky", "kubernetes", "toy"):
        more = AWS if on == "sagemaker" else {"storage": "s3://bucket"} if on == "sky" else {}
        job = job_in(tmp_path / on / name, name=name, files={f"{name}.yaml": "task: toy\n"}, **more)
        leave(job, on)
        there = {path.name for path in Path(job.here).iterdir()} - {".job.lock"}
        assert there == {f"{name}.yaml", TARGETS[on].spec, "job.json"}
        assert (Path(job.here) / f"{name}.yaml").read_text() == "task: toy\n"


def test_a_job_is_reached_from_any_directory_and_after_its_folder_was_moved(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = submit(job_in("out/toy"), "slurm")
    assert record["folder"] == str(tmp_path / "out" / "toy") and record["spec"] == str(tmp_path / "out" / "toy" / "job.slurm.sh")
    (tmp_path / "out" / "toy").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "out")
    assert job_record("../moved")["folder"] == str(tmp_path / "moved")


def test_a_refusal_is_the_programs_own_last_line(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho first >&2; echo 'sbatch: error: invalid partition.' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchProblem, match=r"^sbatch --parsable \S+ ended with 1: sbatch: error: invalid partition; mend"):
        submit(job_in(tmp_path / "run"), "slurm")


def test_a_launch_that_fails_leaves_the_record_of_the_one_before(programs, tmp_path):
    first = submit(job_in(tmp_path / "run"), "slurm")
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(LaunchProblem, match="ended with 1"):
        submit(job_in(tmp_path / "run", limit=limit_of(hours=2)), "slurm")
    assert job_record(tmp_path / "run") == first
    assert leave(job_in(tmp_path / "run"), "slurm")["id"] == "" and job_record(tmp_path / "run") == first
    with pytest.raises(LaunchProblem, match="ended with 1"):
        submit(job_in(tmp_path / "new"), "slurm")
    with pytest.raises(LaunchProblem, match="no job was launched"):
        job_record(tmp_path / "new")


@pytest.mark.parametrize(("on", "asks"), [
    ("slurm", [job_status, job_cancel]), ("modal", [lambda record: job_logs(record, 5), job_cancel])])
def test_without_a_number_no_program_is_asked(on, asks, programs, tmp_path):
    "Written for somebody to hand over; or taken by a program that printed nothing."
    written = leave(job_in(tmp_path / "left"), on)
    (tmp_path / "bin" / TARGETS[on].program).write_text("#!/bin/sh\n")
    for record in (job_record(tmp_path / "left"), submit(job_in(tmp_path / "run"), on)):
        assert record["id"] == written["id"] == ""
        for ask in asks:
            with pytest.raises(LaunchProblem, match="was not submitted by this command"):
                ask(record)
    assert not (tmp_path / "asked").exists()


def test_sagemaker_gets_a_name_of_its_own_each_time_and_one_place(programs, tmp_path, monkeypatch):
    names, places = set(), set()
    for seconds in (1_800_000_000, 1_800_000_001):
        monkeypatch.setattr(time, "time", lambda now=seconds: now)
        record = submit(job_in(tmp_path / "run", name="a" * 40, **AWS), "sagemaker")
        request = json.loads(Path(record["spec"]).read_text())
        names.add(request["TrainingJobName"])
        data = request["InputDataConfig"][0]["DataSource"]["S3DataSource"]
        places.add((record["place"], request["CheckpointConfig"]["S3Uri"], data["S3Uri"]))
        job_status(record)
        assert f"--training-job-name={record['job']}" in programs()[-1] and record["job"] == request["TrainingJobName"]
    here = "s3://bucket/runs/" + "a" * 40
    assert names == {"a" * 40 + "-tro8w0", "a" * 40 + "-tro8w1"} and places == {(here, f"{here}/checkpoints", f"{here}/input")}


@pytest.mark.parametrize("state", ["InProgress", "Stopping", "Completed"])
def test_a_training_job_that_has_not_ended_is_not_joined_by_a_second(state, programs, tmp_path):
    job = job_in(tmp_path / "run", **AWS)
    first = submit(job, "sagemaker")
    (tmp_path / "bin" / "aws").write_text(f"#!/bin/sh\nprintf '{state}\\tTraining\\tNone\\n'\n")
    with nullcontext() if state == "Completed" else pytest.raises(LaunchProblem, match="a job runs in"):
        submit(replace(job, limit=limit_of(hours=2)), "sagemaker")
    assert (job_record(tmp_path / "run") == first) == (state != "Completed")


def test_nothing_is_written_where_a_job_runs(tmp_path):
    me = psutil.Process()
    write_json(status_file(tmp_path), asdict(Status("running", 1.0, 10, me.pid, me.create_time())))
    with pytest.raises(LaunchProblem, match="a job runs in"):
        leave(job_in(tmp_path), "slurm")
    assert not (tmp_path / "job.slurm.sh").exists() and not (tmp_path / "job.json").exists()


def test_what_to_run_can_be_pasted_into_a_shell(tmp_path):
    text = what_to_run(write_job(job_in(tmp_path / "it's"), "slurm")).replace("sbatch", "printf '%s\\n'", 1)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["--parsable", f"--output={tmp_path}/it's/slurm.txt", f"{tmp_path}/it's/job.slurm.sh"]


@pytest.mark.parametrize("text", ["", "[]", '{"on": "moon"}', '{"on": "local", "id": 5}'])
def test_a_folder_without_a_job_is_one_sentence(text, tmp_path):
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(LaunchProblem, match="no job|no record"):
        job_record(tmp_path)


# Kubernetes: kubectl itself

@pytest.fixture
def cluster(tmp_path, monkeypatch):
    pytest.importorskip("kubernetes_validate")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    from kube_server import kube_server
    with kube_server() as (cluster, config):
        (tmp_path / "kubeconfig").write_text(config)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("HOME", str(tmp_path))
        yield cluster


def test_kubectl_submits_shows_and_ends_a_job_and_the_deadline_ends_it(cluster, tmp_path):
    job = job_in(tmp_path / "run", machines=2, env=("HF_TOKEN",))
    record = submit(job, "kubernetes")
    assert record["id"] == f"job.batch/{record['job']}" and record["job"].startswith("toy-")
    assert {kind for kind, _ in cluster.objects} == {"configmaps", "services", "jobs", "pods"}
    assert job_status(record) == "active=1" and job_logs(record, 5).startswith("step 1 of 2")
    assert any("fieldValidation=Strict" in path for method, path in cluster.asked if method == "POST")
    with pytest.raises(LaunchProblem, match="a job runs in"):
        submit(job, "kubernetes")
    assert len([kind for kind, _ in cluster.objects if kind == "jobs"]) == 1 and job_status(record) == "active=1"
    cluster.pass_time(job.limit.seconds - job.limit.grace - 1)
    assert job_status(record) == "active=1"
    cluster.pass_time(1)
    assert job_status(record).startswith("DeadlineExceeded") and not any(kind == "pods" for kind, _ in cluster.objects)
    time.sleep(1.1)  # names hold the second
    again = submit(job, "kubernetes")
    assert again["job"] != record["job"] and job_status(again) == "active=1" and again["place"] == record["place"]
    cluster.pass_time(job.limit.seconds)
    job_cancel(again)
    job_cancel(record)
    assert cluster.objects == {}


# Here

def local(folder, script, seconds=3600):
    return LaunchJob("toy", ("bash", "-c", script), str(folder), limit_of(hours=seconds / 3600), here=str(folder))


def test_a_local_job_is_watched_and_ended_by_its_folder(tmp_path):
    record = submit(local(tmp_path, "echo hello; trap 'echo bye; exit 130' TERM; sleep 600 & wait"), "local")
    try:
        wait(lambda: "hello" in job_logs(record, 10))
        assert job_status(job_record(tmp_path)) == "running" and os.getsid(int(record["id"])) == int(record["id"]) != os.getsid(0)
        with pytest.raises(LaunchProblem, match="a job runs in"):
            submit(local(tmp_path, "true"), "local")
        assert job_cancel(record) == "stopped" == job_status(record) and "bye" in job_logs(record, 10)
        assert job_cancel(record) == "stopped"  # a second time changes nothing
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(record["id"]), signal.SIGTERM)


def test_a_local_job_ends_at_its_budget(tmp_path):
    job = replace(local(tmp_path, "sleep 600"), limit=limit_of(budget=1, price=1800))  # two seconds
    record = submit(job, "local")
    wait(lambda: job_status(record) != "running")
    assert job_status(record) == "spent" and read_status(tmp_path).seconds == 2
    assert "1.00 dollars at 1800 an hour" in record["limit"]
    with pytest.raises(LaunchProblem, match="the job has not begun: .*seconds of the limit are used"):
        submit(job, "local")


def test_a_local_job_outlives_the_terminal_that_launched_it(tmp_path):
    "The launching session gets SIGHUP and SIGKILL, as from a closed terminal."
    code = ("import signal, sys, time; signal.signal(signal.SIGHUP, signal.SIG_DFL);"  # these tests may run below nohup
            "from composer_replication.contrib.launch.clients import submit;"
            "from composer_replication.contrib.launch.job import LaunchJob, Limit;"
            f"job = LaunchJob('toy', ('bash', '-c', 'sleep 600'), {str(tmp_path)!r}, Limit(3600), here={str(tmp_path)!r});"
            "submit(job, 'local');"
            "print('launched', flush=True); time.sleep(600)")
    terminal = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        assert terminal.stdout.readline() == "launched\n"
        os.killpg(terminal.pid, signal.SIGHUP)
        terminal.wait(60)
    finally:
        terminal.kill()
    record = job_record(tmp_path)
    assert job_status(record) == "running"
    assert job_cancel(record) == "stopped"
