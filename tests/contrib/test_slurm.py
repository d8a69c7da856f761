"""Jobs in Slurm itself, on one machine with two CPUs: `apt-get install slurm-wlm`, or skipped."""
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import wait
from slurm_cluster import absent, slurm_cluster

from composer_replication.contrib.launch.clients import job_cancel, job_logs, job_record, job_status, submit
from composer_replication.contrib.launch.job import LaunchJob, LaunchProblem, limit_of
from composer_replication.contrib.launch.watch import read_status

POLITE = "trap 'echo a last checkpoint; exit 130' TERM; " \
         "echo begun on $SLURM_GPUS_ON_NODE GPUs and $SLURM_CPUS_PER_TASK cores; while :; do sleep 0.2; done"
WHY = f"{absent()} is not installed: apt-get install slurm-wlm"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(absent() is not None, reason=WHY)]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # from where the jobs are submitted
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # a job finds composer-rl there
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm", monkeypatch):
        yield


def slurm_job(folder, limit=None):
    return LaunchJob("toy", ("bash", "-c", POLITE), str(folder), limit or limit_of(hours=1), {"toy.yaml": "task: toy\n"},
                     str(folder), hardware="H100", gpus=2, cpus=2)


def begun(folder):
    return (folder / "log.txt").exists() and "begun" in (folder / "log.txt").read_text()


def test_a_job_is_submitted_shown_and_ended_by_its_budget(slurm, tmp_path):
    folder = tmp_path / "it's $(touch pwned)"
    record = submit(slurm_job(folder, limit_of(budget=2, price=720)), "slurm")  # ten seconds
    assert record["id"].isdecimal()
    wait(lambda: begun(folder))
    assert job_status(record).startswith("RUNNING") and job_logs(record, 5) == "begun on 2 GPUs and 2 cores"
    wait(lambda: not job_status(record).startswith(("RUNNING", "COMPLETING")))
    assert job_status(record).startswith("FAILED") and job_status(record).endswith("NonZeroExitCode")
    status = read_status(folder)
    assert status.state == "spent" and status.seconds == 10 and "a last checkpoint" in job_logs(record, 9)
    again = submit(slurm_job(folder, limit_of(budget=2, price=720)), "slurm")
    wait(lambda: job_status(again).startswith("FAILED"))
    assert "of 10 seconds of the limit are used" in job_logs(again, 9) and not list(tmp_path.rglob("pwned"))


def test_a_cancelled_job_writes_a_checkpoint_and_the_next_of_its_name_waits_for_it(slurm, tmp_path):
    record = submit(slurm_job(tmp_path / "run"), "slurm")
    wait(lambda: begun(tmp_path / "run"))
    second = submit(slurm_job(tmp_path / "other"), "slurm")
    assert job_status(second).startswith("PENDING") and job_status(second).endswith("Dependency")
    job_cancel(job_record(tmp_path / "run"))
    wait(lambda: job_status(record).startswith("CANCELLED"))
    wait(lambda: read_status(tmp_path / "run").state == "stopped")
    assert "a last checkpoint" in job_logs(record, 9)
    assert "CANCELLED" in (tmp_path / "run" / "slurm.txt").read_text() and not list((tmp_path / "here").iterdir())
    wait(lambda: begun(tmp_path / "other"))
    job_cancel(second)


def test_a_requeued_job_goes_on_counting(slurm, tmp_path):
    record = submit(slurm_job(tmp_path / "run"), "slurm")
    wait(lambda: begun(tmp_path / "run"))
    time.sleep(1)  # so that there is something to count
    subprocess.run(["scontrol", "requeue", record["id"]], check=True, timeout=60)
    wait(lambda: job_status(record).startswith("PENDING"))
    first = read_status(tmp_path / "run")
    subprocess.run(["scontrol", "update", f"JobId={record['id']}", "StartTime=now"], check=True, timeout=60)
    wait(lambda: (tmp_path / "run" / "log.txt").read_text().count("begun") == 2)
    time.sleep(1)
    job_cancel(record)
    wait(lambda: read_status(tmp_path / "run").state == "stopped")
    assert first.state == "stopped" and read_status(tmp_path / "run").used > first.used >= 1


def test_what_the_cluster_does_not_have_is_refused_in_its_words(slurm, tmp_path):
    with pytest.raises(LaunchProblem, match="sbatch: error: .*(not available|[Ii]nvalid)"):
        submit(replace(slurm_job(tmp_path / "run"), hardware="A100"), "slurm")
