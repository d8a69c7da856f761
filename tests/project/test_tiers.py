"A test gets the marks of what it uses, also through fixtures and helpers."
import os
import subprocess
import sys

import pytest
from conftest import LONG, ROOT, ended_well, names_used, start_beside


def helper():
    return [subprocess.run(["true"]) for _ in range(2)]


class Started:
    def begin(self):
        return helper()


class Popular(subprocess.Popen):
    pass


@pytest.fixture
def done():
    return helper()


def of_no_tier():
    return "subprocess"


@pytest.mark.parametrize("function, expected", [(helper, True), (lambda: helper(), True), (of_no_tier, False),
                                                (lambda: Started(), True), (lambda: Popular(), True)])
def test_names_are_found_through_helpers_methods_and_bases(function, expected):
    used = names_used(function)
    assert bool({"subprocess", "Popen"} & used) is expected


def test_a_fixture_that_starts_processes_marks_its_tests(done, request):
    assert {mark.name for mark in request.node.iter_markers()} == {"process"}


def test_what_is_long_is_there():
    missing = {file: left for file, names in LONG.items()
               if (left := [name for name in names if f"def {name}(" not in (ROOT / "tests" / file).read_text()])}
    assert not missing


def test_a_test_that_starts_none_has_no_mark(request):
    assert {mark.name for mark in request.node.iter_markers()} == set()


CROSSES = """
import contextlib, os, subprocess
def test_opens(): open({path!r}).close()
def test_lists(): os.listdir(os.path.dirname({path!r}))
def test_runs():
    with contextlib.suppress(OSError):
        subprocess.run(["chromium"], env={{"PATH": "/nowhere"}})
def test_takes(shared_data): open({path!r}).close()
def test_none(): open(__file__).close()
"""
SETTINGS = """
[pytest]
addopts = -p no:cacheprovider --import-mode=importlib -rA
pythonpath = tests
markers =
  data
  process
"""


def test_a_test_that_needs_what_a_bare_machine_lacks_fails_everywhere(tmp_path):
    "On a machine that has all of it too."
    (tmp_path / "main" / "tests").mkdir(parents=True)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (path := tmp_path / "shared" / "data" / "rows.jsonl").write_text("{}")
    for name in ("conftest.py", "pages.py"):
        (tmp_path / "main" / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "main" / "tests" / "test_crosses.py").write_text(CROSSES.format(path=str(path)))
    (tmp_path / "main" / "pytest.ini").write_text(SETTINGS)
    env = {k: v for k, v in os.environ.items() if k != "COMPOSER_DATA"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "pytest", "tests/test_crosses.py"], cwd=tmp_path / "main", env=env,
                          capture_output=True, text=True).stdout
    failed = {line.split("::")[1].split()[0] for line in done.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_opens", "test_lists", "test_runs"} and "2 passed" in done, done
    assert "take the fixture shared_data" in done and "mark it browser" in done


def test_what_runs_beside_the_tests_ends_with_them_also_where_they_are_killed(tmp_path):
    os.mkfifo(words := tmp_path / "words")
    says = "import sys, time; to = open(sys.argv[1], 'w', 1); print('begun', file=to); time.sleep(60); print('late', file=to)"
    with subprocess.Popen(["sleep", "60"]) as owner:
        start_beside([sys.executable, "-c", says, str(words)], tmp_path, owner.pid)
        with words.open() as heard:
            assert heard.readline() == "begun\n"
            owner.kill()
            owner.wait()
            assert heard.read() == ""  # its end closed the pipe


def test_of_what_runs_beside_the_tests_output_and_status_are_kept(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as owner:
        start_beside([sys.executable, "-c", "print('said'); raise SystemExit(3)"], tmp_path, owner.pid)
        with pytest.raises(AssertionError, match="said"):
            ended_well(tmp_path)
        owner.kill()
    assert (tmp_path / "code").read_text() == "3\n"
