"""Slurm itself for tests, on one machine: its controller and its daemon as processes, without a password between them."""
import getpass
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
SETTINGS = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:H100:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def absent() -> str | None:
    "A program of Slurm's that is not here."
    return next((name for name in PROGRAMS if shutil.which(name) is None), None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def slurm_cluster(folder, monkeypatch):
    "One node with two CPUs and two files in place of its two GPUs; the environment leads to it."
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu Type=H100 File={folder}/gpu[0-1]\n")
    (folder / "slurm.conf").write_text(SETTINGS.format(
        host=socket.gethostname(), controller=free_port(), daemon=free_port(), user=getpass.getuser(), folder=folder))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    processes = []
    try:
        for words in (["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            with (folder / f"{words[0]}.log").open("wb") as log:
                nowhere = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                processes.append(subprocess.Popen(words, start_new_session=True, **nowhere))
        end, state = time.monotonic() + 120, ["sinfo", "--noheader", "--format=%T"]
        while subprocess.run(state, capture_output=True, text=True, timeout=60).stdout.strip() != "idle":
            assert time.monotonic() < end, "".join(path.read_text() for path in folder.glob("*.log"))
            time.sleep(0.5)
        yield
    finally:
        subprocess.run(["scancel", f"--user={getpass.getuser()}", "--signal=KILL"], capture_output=True, timeout=60,
                       env=os.environ | {"SLURM_CONF": str(folder / "slurm.conf")})
        for process in reversed(processes):
            process.terminate()
            process.wait(60)
