"""A Harbor folder used as Harbor would: the agent's container, then the verifier, each path where Harbor puts it."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.envs.deletion.harbor import requirements, write_harbor
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import FeatureDeletionTask, TaskProblem, make_patch, read_text

LARDER = Path(__file__).parents[2] / "repos" / "larder"
PATH = "src/larder/labels.py"


@pytest.fixture(scope="module")
def subject():
    return prepare_subject(LARDER)


@pytest.fixture(scope="module")
def task(subject):
    full = read_text(subject.tree / PATH)
    seen = full.replace(full[full.index("    digits = f"):], "    raise NotImplementedError\n")
    return FeatureDeletionTask(
        "larder-batch-code", subject.source, subject.base_commit, ("tests/test_labels.py::test_batch_code",),
        ("tests/test_labels.py::test_initials",), ("python", "-m", "pytest", "-q"), ("larder.labels:batch_code",), "function",
        "stub", "Write `batch_code`.", deletion_patch=make_patch({PATH: full}, {PATH: seen}),
        golden_diff=make_patch({PATH: seen}, {PATH: full}))


@pytest.fixture
def container(task, subject, tmp_path):
    "Harbor's places inside a namespace: run(command) gives the reward that lies in /logs/verifier afterwards."
    if not shutil.which("bwrap"):
        pytest.skip("apt-get install -y bubblewrap")
    made = write_harbor(task, subject, tmp_path)
    app, logs = tmp_path / "app", tmp_path / "logs"
    shutil.copytree(made / "environment" / "repo", app)
    logs.mkdir()
    python = [Path(sys.executable).parents[1], Path(sys.base_prefix)]
    seen = [part for path in ("/usr", *python) for part in ("--ro-bind", path, path)]
    places = [part for name in ("tests", "solution") for part in ("--ro-bind", made / name, f"/{name}")]
    base = ["bwrap", "--unshare-all", "--die-with-parent", "--tmpfs", "/", "--tmpfs", "/tmp", *seen,
            "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
            "--proc", "/proc", "--dev", "/dev", *places, "--bind", app, "/app", "--bind", logs, "/logs", "--chdir", "/app",
            "--setenv", "PATH", f"{python[0]}/bin:/usr/bin:/bin"]

    def run(command):
        subprocess.run([*map(str, base), "sh", "-c", command], check=False, timeout=600, capture_output=True)
        subprocess.run([*map(str, base), "sh", "/tests/test.sh"], check=True, timeout=100, capture_output=True)
        return (logs / "verifier" / "reward.txt").read_text()
    return run


WRONG = "sed -i 's/raise NotImplementedError/return \"\"/' src/larder/labels.py"
TESTS = "printf 'def test_batch_code(): pass\\ndef test_initials(): pass\\n' > tests/test_labels.py"
HOOK = "printf 'import os\\nos._exit(0)\\n' > conftest.py; cp conftest.py src/larder/conftest.py; cp conftest.py pytest.py"
EXIT = "printf '\\nimport os\\nos._exit(0)\\n' >> src/larder/labels.py"
LINK = "ln -sf /solution/files/src/larder/labels.py src/larder/labels.py"  # no file of the agent's: a link is not followed
NOISE = "sh /solution/solve.sh; printf '\\nimport os\\nos.write(3, b\"{}\\\\n\")\\n' >> src/larder/labels.py"


@pytest.mark.parametrize("command, reward", [
    ("sh /solution/solve.sh", "1"), ("true", "0"), (WRONG, "0"), (TESTS, "0"), (HOOK, "0"), (EXIT, "0"), (LINK, "0"),
    (NOISE, "0"),
    (f"{TESTS}; {HOOK}; sh /solution/solve.sh", "1"), ("echo 1 > /logs/verifier/reward.txt", "0"),
    ("mkfifo src/larder/pipe.py; sh /solution/solve.sh", "1"),
])
def test_the_verifier_rewards_the_solution_alone(container, command, reward):
    assert container(command) == reward


def test_the_agent_sees_neither_the_solution_nor_the_verifier(task, subject, tmp_path):
    made = write_harbor(task, subject, tmp_path)
    for part in ("environment", "tests/tree", "instruction.md", "task.toml"):
        files = [made / part] if (made / part).is_file() else [path for path in (made / part).rglob("*") if path.is_file()]
        assert files and not any(b"check = sum" in path.read_bytes() for path in files)
    assert not any("harbor_judge" in path.name for path in (made / "environment").rglob("*"))
    assert any(line.startswith("pytest==") for line in requirements(subject))


def test_a_folder_that_is_there_is_kept(task, subject, tmp_path):
    (tmp_path / task.task_id).mkdir()
    with pytest.raises(TaskProblem, match="exists already"):
        write_harbor(task, subject, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [task.task_id]
