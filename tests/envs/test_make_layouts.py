"Layouts that `tasks make` takes tasks from, the limit of time, reasons for nothing kept, and outcomes that nobody can know."

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from envs_tasks import write

from composer_replication.cli import tasks as commands
from composer_replication.core import deadline as deadlines
from composer_replication.core.deadline import OutOfTime, deadline
from composer_replication.envs.deletion import libraries
from composer_replication.envs.deletion import subject as subjects
from composer_replication.envs.deletion.judge import runner
from composer_replication.envs.deletion.judge.evidence import add_evidence
from composer_replication.envs.deletion.judge.messages import Phase, PhaseResult
from composer_replication.envs.deletion.judge.observe import canonical, encode
from composer_replication.envs.deletion.judge.runner import run_phases
from composer_replication.envs.deletion.judge.trees import import_mode
from composer_replication.envs.deletion.judge.variants import make_probe
from composer_replication.envs.deletion.layout import import_roots, imported_modules
from composer_replication.envs.deletion.metadata import needed_requirements
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import FeatureDeletionTask, make_patch, read_tasks
from composer_replication.envs.deletion.tasks import knowable
from composer_replication.envs.deletion.tasks.coverage import measure_coverage
from composer_replication.envs.deletion.tasks.gates import GATES, make_bench, try_deletion
from composer_replication.envs.deletion.tasks.knowable import Unknowable, is_explained, stands_in, without_unknowable
from composer_replication.envs.deletion.tasks.make import PackageReport, TaskSettings, make_tasks
from composer_replication.envs.deletion.tasks.select import find_targets, module_name, parse

CODE = '''
def spread(values, width):
    """Values in rows of a width, the last one shorter."""
    rows = []
    for start in range(0, len(values), width):
        rows.append(list(values[start:start + width]))
    return rows
'''
TEST = """
from {module} import spread

def test_spread():
    assert spread([1, 2, 3], 2) == [[1, 2], [3]]

def test_empty():
    assert spread([], 2) == []
"""


def files_of(module, before="", folder="tests"):
    return {f"{folder}/test_a.py".removeprefix("./"): before + TEST.format(module=module)}


def inside(folder, module):
    "A package with its tests inside of it."
    empty = dict.fromkeys((f"{folder}/__init__.py", f"{folder}/tests/__init__.py"), "")
    return {**empty, f"{folder}/a.py": CODE, **files_of(module, folder=f"{folder}/tests")}


LAYOUTS = {  # name: files, roots, path and dotted name of the module
    "no tests, src": ({"src/pkg/__init__.py": "", "src/pkg/a.py": "x = 1\n"}, ("src",), "src/pkg/a.py", "pkg.a"),
    "no tests, top": ({"pkg/__init__.py": "", "src/notes.txt": ""}, (".",), "pkg/__init__.py", "pkg"),
    "no tests, lib": ({"lib/one.py": "x = 1\n"}, ("lib",), "lib/one.py", "one"),
    "namespace below src": ({"src/ns/pkg/__init__.py": "", "src/ns/pkg/a.py": CODE, **files_of("ns.pkg.a")},
                            ("src",), "src/ns/pkg/a.py", "ns.pkg.a"),
    "deep namespace": ({"src/com/ns/pkg/a.py": CODE, "tests/__init__.py": "", **files_of("com.ns.pkg.a")},
                       ("src",), "src/com/ns/pkg/a.py", "com.ns.pkg.a"),
    "namespace at the top": ({"ns/pkg/__init__.py": CODE, **files_of("ns.pkg", folder=".")},
                             (".",), "ns/pkg/__init__.py", "ns.pkg"),
    "a namespace with a module of the standard library's name": (
        {"jaraco/functools/__init__.py": CODE,
         **files_of("jaraco.functools", "import functools\nfrom functools import partial, wraps\n", ".")},
        (".",), "jaraco/functools/__init__.py", "jaraco.functools"),
    "a namespace with a library's name": (
        {"src/otel/instr/attr/__init__.py": CODE, **files_of("otel.instr.attr", "import attr\nfrom attr import define, field\n")},
        ("src",), "src/otel/instr/attr/__init__.py", "otel.instr.attr"),
    "python folder": ({"python/pkg/__init__.py": CODE, "rust/x.rs": "", **files_of("pkg", folder="python/tests")},
                      ("python",), "python/pkg/__init__.py", "pkg"),
    "any folder": ({"implementation/pkg/a.py": CODE, "implementation/pkg/__init__.py": "", "setup.py": "", **files_of("pkg.a")},
                   ("implementation",), "implementation/pkg/a.py", "pkg.a"),
    "tests inside, relative": (inside("python/pkg", "..a"), ("python",), "python/pkg/a.py", "pkg.a"),
    "tests inside a namespace": (inside("src/ns/pkg", "..a"), ("src/ns",), "src/ns/pkg/a.py", "pkg.a"),
    "tests inside a namespace, by full names": (inside("src/ns/datetime", "ns.datetime.a"),
                                                ("src",), "src/ns/datetime/a.py", "ns.datetime.a"),
    "vendored": ({"pkg/__init__.py": "", "pkg/a.py": CODE, "pkg/_vendor/six.py": "", **files_of("pkg.a", "import six\n")},
                 (".",), "pkg/a.py", "pkg.a"),
    "helpers beside": ({"src/pkg/a.py": CODE, "helpers.py": "", "tests/helpers2.py": "",
                        **files_of("pkg.a", "import helpers, helpers2\nimport pkg\nfrom pkg import a\n")},
                       ("src",), "src/pkg/a.py", "pkg.a"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_roots_are_where_imports_lead(tmp_path, name):
    files, roots, path, module = LAYOUTS[name]
    assert import_roots(write(tmp_path, files)) == roots
    assert module_name(path, roots) == module


TWINS = {"pkg/__init__.py": CODE, **dict.fromkeys(("tests/a/test_x.py", "tests/b/test_x.py"), TEST.format(module="pkg"))}
FOLDERS = {  # name: files, tests that pass, whether an empty __init__.py is written where one is missing
    "relative": ({"pkg.py": CODE, **files_of("pkg"), "tests/test_b.py": "from .test_a import *\n"}, 4, True),
    "two levels": (
        {"pkg.py": CODE, "tests/base.py": "X = 1\n", **files_of("pkg", "from ..base import X\n", "tests/unit")}, 2, True),
    "a name of the standard library": (
        {"pkg.py": CODE, "test/helper.py": "X = 1\n", **files_of("pkg", "from test.helper import X\n", "test")}, 2, True),
    "twins": (TWINS, 4, True),
    "twins by path": (
        TWINS | {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-ra --import-mode=importlib"\n'}, 4, False),
    "twins by path, in a list": (
        TWINS | {"pyproject.toml": '[tool.pytest]\naddopts = ["--import-mode", "importlib"]\n'}, 4, False),
    "twins by path, in an ini file": (
        TWINS | {"pytest.ini": "[pytest]\naddopts=\n\t--doctest-modules\n\t--import-mode importlib\n"}, 4, False),
    "neighbours by bare names": (
        {"pkg.py": CODE, "tests/helper.py": "X = 1\n", **files_of("pkg", "from helper import X\n"),
         "tests/test_b.py": "from tests.nothing import x\n"}, 2, False),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_tests_without_init(tmp_path, name):
    files, passed, written = FOLDERS[name]
    tree = write(tmp_path / "repo", files)
    notes = subjects._write_missing(tree, tmp_path / "libraries", "0")
    added = [path for path in tree.rglob("__init__.py") if path.relative_to(tree).as_posix() not in files]
    assert bool(added) == written and len(notes) == len(added) and all(path.read_text() == "" for path in added)
    folder = "tests" if (tree / "tests").is_dir() else "test"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", folder]
    env = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, timeout=60)
    assert f"{passed} passed" in ran.stdout, ran.stdout  # an oracle: pytest itself, with the settings of the repository


def test_what_an_sdist_lacks_is_said(tmp_path):
    files = {"pkg.py": CODE, "tests/test_a.py": "from tests import ServerCase, unittest\n"}
    [note] = subjects._write_missing(write(tmp_path / "repo", files), tmp_path / "libraries", "0")
    assert "tests that import ServerCase, unittest from it" in note and "a checkout of the repository" in note


LAYOUTS["twins by path"] = (FOLDERS["twins by path"][0], (".",), "pkg/__init__.py", "pkg")
RUN = ("tests inside a namespace, by full names", "twins by path")


@pytest.mark.parametrize("name", RUN)
def test_tests_of_every_layout_run(tmp_path, store, name):
    files, _, path, module = LAYOUTS[name]
    subject = prepare_subject(write(tmp_path / "repo", files), store)
    measured = measure_coverage(subject, store)
    assert len(measured.passed) == sum(text.count("def test_") for text in files.values()), measured.errors
    [target], _ = find_targets(subject, measured, granularity=("function",))
    assert target.name == f"{module}:spread" and target.tests == measured.passed


def test_requirements_of_namespaces_are_found_by_their_dotted_names(tmp_path):
    text = "import jaraco.classes as c\nfrom zope import interface\nfrom google.cloud import (\n    x)\n"
    imported = imported_modules(write(tmp_path, {"ns/pkg/__init__.py": "", "test_a.py": text}))
    assert {"jaraco", "jaraco.classes", "zope.interface", "google.cloud"} <= imported
    stated = ["jaraco.classes", "jaraco-packaging", "zope.interface>=5", "zope.event", "google-cloud", "sphinx"]
    assert needed_requirements([], stated, imported, "ns.pkg") == ["google-cloud", "jaraco.classes", "zope.interface>=5"]


@pytest.mark.parametrize(("addopts", "mode"), [
    ("-ra --import-mode=importlib", ["--import-mode=importlib"]), (["-q", "--import-mode", "append"], ["--import-mode=append"]),
    ("\n\t--doctest-modules\n\t--import-mode importlib", ["--import-mode=importlib"]), ("-q", []), ([], []),
    ("--import-mode=append --import-mode=importlib  # the last one holds", ["--import-mode=importlib"])])
def test_the_import_mode_is_read(addopts, mode):
    assert import_mode({"addopts": addopts}) == mode and import_mode({}) == []


# The limit of time


def test_what_takes_long_gets_what_is_left(larder, tmp_path, monkeypatch):
    now, given = [0.0], []
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(judge, plan, wall_s):
        given.append(wall_s)
        now[0] += 7
        return b"", "wall"

    monkeypatch.setattr(runner.JudgeProcess, "run", run)
    monkeypatch.setattr(runner.JudgeProcess, "wait", lambda judge: None)
    with deadline(10), pytest.raises(OutOfTime):
        run_phases(larder, [Phase("one", {}), Phase("two", {}), Phase("three", {})])
    assert given[-2:] == [10, 3]  # the second was cut by the deadline: it has no result

    def pip(command, timeout, **others):
        given.append(timeout)
        now[0] += timeout
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(libraries.subprocess, "run", pip)
    with deadline(20), pytest.raises(OutOfTime):
        libraries.install_wheels(["six", "attrs"], tmp_path, tmp_path)
    assert given[-1] == 20


def test_a_deadline_in_any_stage_loses_nothing_and_invents_nothing(tmp_path, store, monkeypatch):
    "The clock jumps beyond the deadline at the n-th look at it, for ever larger n until a run comes to its end."
    spec = write(tmp_path / "good", {"good.py": CODE + RULES, "test_good.py": TEST.format(module="good") + RULES_TEST})
    out, settings = tmp_path / "tasks.jsonl", TaskSettings(1, ("function",), "stub")
    stages, known = [], []
    for looks in itertools.accumulate(itertools.count(1, 12)):
        clock = itertools.chain([0] * (looks + 1), itertools.repeat(10**9))
        monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda clock=clock: next(clock)))
        [report] = make_tasks([spec], out, settings, 1, store, minutes=1000)
        lines = [line for path in Path(f"{out}.journals").glob("*.jsonl") for line in path.read_text().splitlines()[1:]]
        rows = [*map(json.loads, lines)]
        assert rows[: len(known)] == known
        before, known = len(known), rows
        if report.stage == "done":
            break
        assert report.stage == "stopped" and not report.problem
        [note] = [note for note in report.notes if "1000 minutes were over while" in note]
        finished = len(rows) > before
        assert ("goes on with" in note) == finished and ("give it more" in note) != finished
        stages.append(note.partition("while ")[2].partition(":")[0])
    assert set(stages) == {"running the tests", "deleting"} and len(read_tasks(out)) == 1
    assert not any(row.get("dropped") in ("hangs without it", "not judged", "not rewarded") for row in known)


# Why nothing was kept


ODD = """
def either(flag):
    for _ in range(4):
        flag = bool(not flag)
    return None
""" + "".join(f"""

def {name}(values):
    rows = []
    for start in range(0, len(values), 3):
        rows.append(list(values[start:start + 3]))
    return rows
""" for name in ("one", "two"))
ODD_TEST = """
from odd import either, one, two

def test_either():
    assert not either(True) and not either(False)

def test_one():
    assert one([1, 2, 3, 4]) == [[1, 2, 3], [4]]

def test_two():
    assert two([1, 2, 3, 4]) == [[1, 2, 3], [4]]
"""


def test_nothing_kept_is_explained_at_the_end_and_in_the_report(tmp_path, store, capsys):
    out, spec = tmp_path / "tasks.jsonl", write(tmp_path / "odd", {"odd.py": ODD, "test_odd.py": ODD_TEST})
    [report] = make_tasks([spec], out, TaskSettings(9, ("function",), "stub"), 1, store)
    assert report.stage == "done" and report.dropped == {"trivial": 1, "sibling alike": 2}
    for part in ("3 deletions tried, none kept: 2 sibling alike (odd:", "1 trivial (odd:either stub: pass)",
                 GATES["sibling alike"][1]):
        assert part in report.problem and "\n" not in report.problem
    assert re.search(r"odd:one stub: odd:two in odd.py|odd:two stub: odd:one in odd.py", report.examples["sibling alike"])
    assert json.loads(Path(f"{out}.report.json").read_text())[0]["problem"] == report.problem
    commands.show_reports([report], False)
    assert "".join(report.problem.split()) in "".join(capsys.readouterr().err.split())


def test_why_nothing_was_kept_without_a_deletion_and_with_a_task():
    none = PackageReport("x", "x==1", tests_run=4)
    none.count({})
    assert "no definition to delete" in none.why_nothing()
    none.count({"a": {"key": "a stub", "task": {}}})
    assert none.why_nothing() == ""


# What can be known

RULES = """
def fee(amount):
    '''The fee for an amount in cents: a share of small amounts, one fixed fee for all of the others.'''
    if amount > 4100:
        return 370
    return amount // 10


def capped(amount):
    '''The amount in cents, but never more than 250 cents, for one purchase of any kind.'''
    if amount > 250:
        return 250
    return amount + 0


def kind(text):
    if text.startswith("x"):
        return len(text)
    text = text.strip()
    return text.upper()


def unique(values):
    '''Every value of a list, each of them once, as a list that can be changed by the caller.'''
    found = set(values)
    return sorted(found, key=str)


def ordered(values):
    '''Every value of a list, each of them once, in the order of their texts.'''
    found = set(values)
    return sorted(found, key=str)


def label(count):
    '''The text that is printed on the label of a box with so many pieces in it.'''
    word = "pieces" if count > 1 else "piece"
    return f"{count} {word}"


def border(size):
    '''The letter of the class to which a box of a given size belongs, in the shop.'''
    if size >= 77:
        return "b"
    return "a"


def secret(text):
    '''The text with the prefix that all names of boxes have in the shop, where it is not empty.'''
    if text:
        return "qq-" + text
    return text
"""
RULES_TEST = """
from good import fee, capped, kind, unique, ordered, label, border, secret

def test_fee():
    assert fee(50) == 5 and fee(4000) == 400

def test_capped():
    assert capped(20) == 20

def test_kind():
    assert kind(" a") == "A" and kind("b") == "B"

def test_unique():
    assert set(unique([3, 1, 3])) == {1, 3}

def test_ordered():
    assert set(ordered([3, 1, 3])) == {1, 3}

def test_label():
    assert label(2) == "2 pieces" and label(1) == "1 piece"

def test_border():
    assert border(3 * 25 + 1) == "a" and border(7 * 11) == "b"

def test_secret():
    assert secret("") == ""
"""
INPUTS = {  # inputs whose outcome follows from what can be read, and inputs whose does not
    "fee": ([70, 3000], [9000, 4101]),
    "capped": ([30, 251, 9000], []),
    "kind": (["c ", "zz"], ["xa", "x"]),
    "unique": ([[1]], [[1, 2], [2, 1, 5]]),
    "ordered": ([[1], [1, 2], [2, 1, 5]], []),
    "label": ([1, 7], []),
    "border": ([5, 77, 400], []),
    "secret": ([""], ["a", "bc"]),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory, store):
    files = {
        "good.py": CODE + RULES,
        "test_good.py": TEST.format(module="good") + RULES_TEST,
        "test_more.py": "from good import secret\ndef test_hidden():\n    assert secret('b') == 'qq-b'\n",
    }
    return make_bench(prepare_subject(write(tmp_path_factory.mktemp("rules") / "rules", files), store), store)


def task_of(bench, name, hidden):
    "A task with a held-out call for each input, whose outcomes come from the original itself."
    space: dict = {}
    exec(compile(parse(bench.files["good.py"]), "good.py", "exec"), space)
    [target] = [t for t in find_targets(bench.subject, bench.coverage, least=0)[0] if t.name == f"good:{name}"]
    deletion = try_deletion(bench, target, "stub")
    records = [{"kind": "call", "target": f"good:{name}", "args": [encode(value)], "kwargs": {},
                "came": {"value": canonical(space[name](value)), "after": [canonical(value)] if isinstance(value, list) else []}}
               for value in sum(INPUTS[name], [])]
    task = FeatureDeletionTask(
        "t", "rules", bench.subject.base_commit, (f"test_good.py::test_{name}", *hidden), (), ("pytest",), (f"good:{name}",),
        "function", "stub", "Write it.", make_patch(deletion.before, deletion.after), make_patch(deletion.after, deletion.before),
        hidden_tests=tuple(hidden), heldout_records=tuple(records))
    return deletion, task


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_whose_outcome_follows_from_nothing_readable_are_left_out(bench, name, monkeypatch):
    monkeypatch.setattr("composer_replication.envs.deletion.tasks.knowable.MOST_LEFT_OUT", 1.0)
    monkeypatch.setattr("composer_replication.envs.deletion.tasks.knowable.FEWEST", 1)
    known, unknown = INPUTS[name]
    deletion, task = task_of(bench, name, ())
    if name == "secret":  # its constant stands in a test that is shown
        known, unknown = [*known, *unknown], []
    left = without_unknowable(bench, deletion, task)
    assert [record["args"] for record in left.heldout_records] == [[encode(value)] for value in known]


def test_a_task_that_is_mostly_unknowable_is_left_out(bench):
    with pytest.raises(Unknowable, match="2 of 4 held-out inputs depend on a branch that no visible test runs"):
        without_unknowable(bench, *task_of(bench, "kind", ()))


def test_a_hidden_test_that_nobody_can_satisfy_leaves_the_task_out(bench):
    with pytest.raises(Unknowable, match="a hidden test depends on the constant 'qq-' in good:secret"):
        without_unknowable(bench, *task_of(bench, "secret", ("test_more.py::test_hidden",)))


def test_what_is_missing_behind_a_time_limit_is_not_unknowable(bench, monkeypatch):
    deletion, task = task_of(bench, "label", ())
    deletion = replace(deletion, before={"good.py": bench.files["good.py"]})

    def run(subject, phases, limits):
        [phase] = phases
        if phase.name == "visible":
            return [PhaseResult(dict.fromkeys(phase.nodes, "passed"), {})]
        return [PhaseResult({}, {}, "stopped at the time limit", ({"call": 1, "came": {"raised": "KeyError"}},), late=True)]

    monkeypatch.setattr(knowable, "run_phases", run)
    monkeypatch.setattr(knowable, "rivals", lambda *given: [("a constant", {})])
    for name, most in (("MOST_LEFT_OUT", 1.0), ("FEWEST", 1)):
        monkeypatch.setattr(knowable, name, most)
    left = without_unknowable(bench, deletion, task)
    assert left.heldout_records == (task.heldout_records[0], *task.heldout_records[2:])


def test_mutants_are_measured_on_inputs_that_can_be_known(bench):
    "Of the pool, what cannot be known goes first; what is left is chosen and measured."
    seen, (_, task) = [], task_of(bench, "fee", ())

    def texts(records):
        return [json.dumps(record.get("args", record.get("source"))) for record in records]

    def without_hundreds(task):
        seen.extend(task.heldout_records)
        kept = [record for record, text in zip(seen, texts(seen), strict=True) if record["kind"] == "call" and "5" not in text]
        return replace(task, heldout_records=tuple(kept))

    made = add_evidence(replace(task, heldout_records=()), bench.subject, without_hundreds)
    assert len(seen) > len(made.heldout_records) > 3 and any("5" in text for text in texts(seen))
    assert not any("5" in text for text in texts(made.heldout_records))


@pytest.mark.parametrize(("value", "text", "stands"), [
    (86400, "86_400 s", True), (86400, "a day of 86400.", True), (16, "0x10", True), (37, "1.37", False), (37, "x37", False),
    (37, "370", False), (0.5, "half: 0.50", True), ("a\nb", r"'a\nb'", True), ("no key", "KeyError: no key", True),
    (b"salt", "salt", True), ("Salt", "salt", False), (1000, "1,000 metres", True), (1000, "1e3", True)])
def test_what_stands_in_a_text(value, text, stands):
    assert stands_in(value, [text]) is stands


def explained(doc, texts=()):
    return is_explained(parse(f"def amount(x):\n    {doc!r}\n    return x").body[0], dict(texts))


def test_what_explains_a_function():
    rule = "`amount` reads a text and gives whole cents, rounded half up."
    assert not explained("") and not explained("The amount of a bill.") and explained(rule)
    assert explained("The amount.", {"README.md": rule})
    assert not explained("The amount.", {"x.py": rule, "README.md": "See `amount`."})


# Tests of several parts


PARTS = """
import unittest
from good import fee

class TestFee(unittest.TestCase):
    def test_parts(self):
        for amount in (50, 60, 70):
            with self.subTest(amount=amount):
                self.assertEqual(fee(amount), amount // 10)

    def test_failing_part(self):
        for amount in (50, 4200):
            with self.subTest(amount=amount):
                self.assertEqual(fee(amount), amount // 10)
                [][amount]

def test_fixture(subtests):
    for amount in (50, 60):
        with subtests.test(amount=amount):
            assert fee(amount) == amount // 10
"""


def test_a_test_of_several_parts_is_one_result(bench):
    "unittest's `subTest` and pytest's `subtests` report each part; two reports of one test were called forged."
    files = {"test_parts_v100.py": make_probe(PARTS, ["TestFee.test_parts", "TestFee.test_failing_part", "test_fixture"], None)}
    plan = Phase("records", files, tuple(files), kind="probe")
    [result] = run_phases(bench.subject, [plan])
    assert result.problem is None and not result.forged
    seen = {message["probe"].rpartition("::")[2]: message for message in result.messages if "probe" in message}
    assert len(seen) == 3 and len(seen["test_parts"]["seen"]) >= 3 and seen["test_parts"]["raised"] is None
    assert seen["test_failing_part"]["raised"] == "IndexError" and seen["test_fixture"]["raised"] is None
