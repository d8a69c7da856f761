"""The promises of a sandbox, kept by Docker on a real daemon that these tests start and stop."""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sandboxes import FOUR, WAYS, Isolation, Promises, dockerd, make_tree

from composer_replication.sandbox.base import Limits, open_sandbox, sandbox_problem
from composer_replication.sandbox.folders import SandboxProblem


@pytest.fixture(scope="module", autouse=True)
def daemon():
    folder = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    try:
        with dockerd(folder) as address:
            yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not folder.exists(), "the daemon left mounts behind"


class TestDocker(Promises, Isolation):
    kind = "docker"


def test_shared_memory_counts_as_elsewhere(tmp_path):
    with open_sandbox(make_tree(tmp_path / "t"), kind="docker") as box:
        for way in ("anonymous", "whose pages nobody maps any more"):
            code = f"{FOUR}\n{WAYS[way]}\ntime.sleep(60)"
            assert box.exec(["python", "-c", code], limits=Limits(memory_mb=300, wall_s=100.0)).cut == "memory"


def docker(*words):
    return subprocess.run(["docker", *words], capture_output=True, text=True, timeout=100, check=True).stdout.split()


def test_nothing_is_left_and_a_killed_owner_is_swept(tmp_path, daemon):
    tree = make_tree(tmp_path / "t")
    code = ("import sys, time; from composer_replication.sandbox.base import open_sandbox\n"
            "box = open_sandbox(sys.argv[1], kind='docker'); print(box._box.path, flush=True); box.exec(['sleep', "
            "'60'])")
    owner = subprocess.Popen([sys.executable, "-c", code, tree], stdout=subprocess.PIPE, text=True)
    left = Path(owner.stdout.readline().strip())
    assert len(docker("ps", "--all", "--quiet")) == 1 and left.is_dir()
    owner.kill()
    owner.wait(timeout=100)
    with open_sandbox(tree, kind="docker") as box:
        assert len(docker("ps", "--all", "--quiet")) == 1
        assert box.exec(["true"]).exit_code == 0
    assert docker("ps", "--all", "--quiet") == []


def test_a_container_that_was_removed_is_told(tmp_path):
    with open_sandbox(make_tree(tmp_path / "t"), kind="docker") as box:
        docker("rm", "--force", box._container)
        with pytest.raises(SandboxProblem, match="dead"):
            box.exec(["true"])
        with pytest.raises(SandboxProblem, match="dead"):
            box.exec(["true"])
    assert not box._box.path.exists()


def test_one_sentence_without_a_daemon(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    assert "apt-get install" in sandbox_problem("docker") and "\n" not in sandbox_problem("docker")
    with pytest.raises(SandboxProblem, match="no Docker daemon answers"):
        open_sandbox(make_tree(tmp_path / "t"), kind="docker")
