"""A Harbor folder used as Harbor would: the agent's container, then the verifier, each path where Harbor puts it."""
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from composer_replication.contrib.harbor.export import requirements, write_harbor
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import FeatureDeletionTask, TaskProblem, make_patch, read_text

LARDER = Path(__file__).parents[2] / "composer_replication" / "data" / "repos" / "larder"
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
    (logs / "verifier").mkdir(parents=True)
    (logs / "verifier").chmod(0o777)  # as Harbor leaves it
    python = [Path(sys.executable).parents[1], Path(sys.base_prefix)]
    seen = [part for path in ("/usr", *python) for part in ("--ro-bind", path, path)]
    places = ["--bind", made / "tests", "/tests", "--ro-bind", made / "solution", "/solution"]
    open_to_all = [part for path in python for above in reversed(path.parents[:-1]) for part in ("--dir", above)]
    base = ["--die-with-parent", "--tmpfs", "/", "--tmpfs", "/tmp", *open_to_all, *seen,
            "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
            "--proc", "/proc", "--dev", "/dev", *places, "--bind", app, "/app", "--bind", logs, "/logs", "--chdir", "/app",
            "--setenv", "PATH", f"{python[0]}/bin:/usr/bin:/bin"]

    verifier = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--cap-add", "ALL"] if os.geteuid() == 0 else ["--unshare-all"]

    def run(command):
        agent = ["bwrap", "--unshare-all", *map(str, base), "sh", "-c", command]
        subprocess.run(agent, check=False, timeout=600, capture_output=True)
        judge = ["bwrap", *verifier, *map(str, base), "sh", "/tests/test.sh"]
        subprocess.run(judge, check=True, timeout=100, capture_output=True)
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


READS = "open('/tests/task.json')\n"  # ends the import of a right solution where it may not
LATE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for i in range(400):
            for place in ("/logs/verifier/reward.txt", "/logs/verifier/reward.json"):
                try:
                    open(place, "w").write("1" if place.endswith("txt") else '{"reward": 1}')
                except OSError:
                    pass
            time.sleep(0.01)
    os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights from the tests' process")
def test_a_submission_can_neither_read_the_verifier_s_tests_nor_write_its_reward(container, tmp_path):
    (tmp_path / "app" / "probe.py").write_text(READS)
    assert container("sh /solution/solve.sh; cat probe.py >> src/larder/labels.py") == "0"
    (tmp_path / "app" / "probe.py").write_text(LATE)
    assert container("cp probe.py src/larder/labels.py") == "0"
    time.sleep(1)
    assert (tmp_path / "logs/verifier/reward.txt").read_text() == "0" and not (tmp_path / "logs/verifier/reward.json").exists()


def test_the_verifier_has_a_container_of_its_own(task, subject, tmp_path):
    made = write_harbor(task, subject, tmp_path)
    settings = tomllib.loads((made / "task.toml").read_text())
    assert settings["verifier"]["environment_mode"] == "separate" and settings["artifacts"] == ["/app"]
    dockerfile = (made / "tests" / "Dockerfile").read_text()
    assert "COPY . /tests" in dockerfile and "/solution" not in dockerfile
    assert (made / "tests" / "requirements.txt").read_text() == (made / "environment" / "requirements.txt").read_text()


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
