"A test gets the marks of what it uses, also through fixtures and helpers."
import subprocess

import pytest
from conftest import LONG, ROOT, names_used


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
