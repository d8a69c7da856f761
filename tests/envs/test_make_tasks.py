"Repositories that will not do, kills, odd definitions: what becomes of them, in one sentence each."

import ast
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from envs_tasks import needs_sandbox, write
from typer.testing import CliRunner

import composer_replication
from composer_replication.cli.tasks import stage_table, tasks_app
from composer_replication.core.deadline import OutOfTime, deadline, time_left
from composer_replication.envs.deletion.judge.messages import PhaseResult, read_result
from composer_replication.envs.deletion.judge.runner import RunnerProblem
from composer_replication.envs.deletion.subject import prepare_subject, store_path, subject_of
from composer_replication.envs.deletion.task import read_tasks, task_to_row, write_tasks
from composer_replication.envs.deletion.tasks import coverage, gates, write_up
from composer_replication.envs.deletion.tasks import make as deletion
from composer_replication.envs.deletion.tasks.coverage import Coverage
from composer_replication.envs.deletion.tasks.delete import DELETERS, TRIVIAL, remove, replace_bodies, stub
from composer_replication.envs.deletion.tasks.gates import GATES, Deletion
from composer_replication.envs.deletion.tasks.make import TaskSettings, make_tasks
from composer_replication.envs.deletion.tasks.select import (
    Target,
    body_lines,
    find_bundles,
    find_symbols,
    find_targets,
    functions_of,
    module_name,
    parse,
)
from composer_replication.envs.deletion.tasks.validate import contradictions
from composer_replication.envs.deletion.unpack import SubjectProblem
from composer_replication.sandbox.base import sandbox_problem

REPOS = Path(composer_replication.__file__).parent / "data" / "repos"
GOOD = '''
def spread(values, width):
    """Values in rows of a width, the last one shorter."""
    rows = []
    for start in range(0, len(values), width):
        rows.append(list(values[start:start + width]))
    return rows


def total(rows):
    """The sum over all rows, with each row weighed by its place."""
    result = 0
    for place, row in enumerate(rows, start=1):
        result += place * sum(row)
    return result


def either(flag):
    """Nothing, in the end."""
    for _ in range(3):
        flag = not flag
        flag = bool(flag)
    return None


def shown(rows):
    """Rows as text, for people."""
    parts = []
    for number, row in enumerate(rows):
        parts.append(str(number) + ": " + ", ".join(str(value) for value in row))
    return "; ".join(parts)
'''
GOOD_TESTS = """
import pytest
from good import spread, total, either, shown

@pytest.mark.parametrize("values, width, rows", [
    ([1, 2, 3], 2, [[1, 2], [3]]), ([4, 5], 1, [[4], [5]]), ([7, 8, 9, 1], 3, [[7, 8, 9], [1]])])
def test_spread(values, width, rows):
    assert spread(values, width) == rows

@pytest.mark.parametrize("rows, result", [([[1, 2], [3]], 9), ([[4], [5]], 14), ([[2, 2], [2]], 8)])
def test_total(rows, result):
    assert total(rows) == result

def test_either():
    assert not either(True) and not either(False)

@pytest.mark.parametrize("rows, text", [([[1, 2], [3]], "0: 1, 2; 1: 3"), ([[5]], "0: 5"), ([[7], [8, 9]], "0: 7; 1: 8, 9")])
def test_shown(rows, text):
    assert shown(rows) == text
"""


def good(folder: Path, **more) -> Path:
    return write(folder / "good", {"good.py": GOOD, "test_good.py": GOOD_TESTS} | more)


@pytest.fixture(scope="module")
def made(tmp_path_factory, store):
    "Tasks of a small repository with one trivial definition, one whose copy is documented, and unfit tests beside them."
    folder = tmp_path_factory.mktemp("made")
    copy = "Roughly:\n\n" + textwrap.indent(GOOD[GOOD.index("    parts = []"):], "    ")
    unfit = """
        import os, random, socket, time
        from good import spread

        def test_fails():
            assert spread([1], 1) == []

        def test_hangs():
            spread([1], 1)
            while True:
                time.sleep(0.01)

        def test_flaky():  # all of three runs pass once in 4,096 times
            assert spread([1], 1) and os.urandom(1)[0] < 16

        def test_needs_a_service():  # nobody listens there, with a network or without
            spread([1], 1)
            socket.create_connection(("127.0.0.1", 1), timeout=2)

        def test_ends_all():
            spread([1], 1)
            if os.environ.get("PYTHONPATH"):
                os._exit(0)
    """
    odd = {"docs/guide.md": copy, "test_guide.py": "def test_guide():\n    assert open('docs/guide.md').read()\n",
           "test_unfit.py": textwrap.dedent(unfit), "test_broken.py": "import is_nowhere\n",
           "test_a.py": "import sys\n\ndef test_a():\n    sys.settrace(None)\n"}
    if sandbox_problem("bubblewrap") is None:
        odd["test_long.py"] = ("import pytest\nfrom good import spread\n\n"
                               "@pytest.mark.parametrize('text', ['a'], ids=['a' * 5000])\n"
                               "def test_long(text):\n    assert spread([1], 1) == [[1]]\n")
    repository = good(folder, **odd)
    out = folder / "tasks.jsonl"
    [report] = make_tasks([repository], out, TaskSettings(per_package=9, granularity=("function", "bundle")), jobs=1, store=store)
    return report, read_tasks(out), out


def test_unfit_tests_are_counted_and_the_rest_goes_on(made):
    report, tasks, _ = made
    assert report.problem == "" and tasks
    used = {node for task in tasks for node in (*task.fail_to_pass, *task.pass_to_pass)}
    assert not any(node.startswith("test_unfit.py") for node in used), used
    assert any("fail or take more than 5 s" in note for note in report.notes)
    assert any("end the process that runs them (test_unfit.py::test_ends_all)" in note for note in report.notes)


def test_gates_drop_the_trivial_and_the_copied(made):
    report, tasks, out = made
    rows = [json.loads(line) for path in Path(f"{out}.journals").iterdir() for line in path.read_text().splitlines()[1:]]
    why = {row["key"]: row["dropped"] for row in rows if "dropped" in row}  # both ways: the first follows from a hash
    assert why["good:either stub"] == "trivial" and why["good:shown stub"] == "copy visible", why
    assert {task.deleted_symbols for task in tasks} >= {("good:spread",), ("good:total",)}
    assert report.tried == len(rows) and report.kept == len(tasks) == len(rows) - sum(report.dropped.values())


def test_a_task_is_what_it_says(made, store):
    _, tasks, _ = made
    task = next(task for task in tasks if task.deleted_symbols == ("good:total",))
    assert {node.partition("[")[0] for node in task.fail_to_pass if "unfit" not in node} >= {"test_good.py::test_total"}
    subject = subject_of(task, store)
    ((path, (before, after)),) = task.changed_files(subject.tree).items()
    assert (path, before) == ("good.py", GOOD) and "place * sum(row)" not in after
    assert task.difficulty["lines"] == 4 and task.difficulty["weight"] == 7 and task.difficulty["trivial_pass"] < 1
    assert "The sum over all rows" in task.problem_statement and "result += " not in task.problem_statement + repr(task)
    assert contradictions(task, subject) == []


@pytest.mark.parametrize(("change", "sentence"), [
    ({"deleted_symbols": ("good:nobody",)}, "has no definition good:nobody"),
    ({"deleted_symbols": ("good:spread",)}, "good:spread still holds code"),
    ({"fail_to_pass": ("test_none.py::test_x",)}, "test_none.py is not in good"),
    ({"fingerprints": (1,)}, "fingerprints are not those"),
    ({"problem_statement": "Write it:\n" + GOOD}, "problem_statement holds the deleted code"),
    ({"golden_diff": "--- a/good.py\n+++ b/good.py\n@@ -1 +1 @@\n-x\n+y\n"}, "does not fit"),
])
def test_contradictions_are_one_sentence(made, store, change, sentence):
    _, tasks, _ = made
    task = next(task for task in tasks if task.deleted_symbols == ("good:total",))
    found = contradictions(replace(task, **change), subject_of(task, store))
    assert sentence in found[0] and "\n" not in found[0]


@pytest.mark.slow  # some 20 s
def test_repositories_that_will_not_do(tmp_path, store):
    test = "def test_x(): pass\n"
    bad = {
        "broken": ({"broken.py": "import nowhere_to_be_found\n", "test_broken.py": f"import broken\n{test}"},
                   "nowhere_to_be_found"),
        "native": ({"native/__init__.py": "from native import f\n", "native/_fast.c": "", "test_native.py": "import native\n"},
                   "holds parts in another language .native/_fast.c."),
        "lonely": ({"lonely.py": "x = 1\n", "test_lonely.py": test}, "has 1 fast and steady tests"),
    }
    specs = [write(tmp_path / name, files) for name, (files, _) in bad.items()] + [good(tmp_path)]
    out = tmp_path / "tasks.jsonl"
    reports = make_tasks(specs, out, TaskSettings(per_package=1, granularity=("function",)), jobs=2, store=store)
    for report, (_, sentence) in zip(reports, bad.values(), strict=False):
        assert re.search(sentence, report.problem) and "\n" not in report.problem, report
    assert reports[-1].kept == 1 == len(read_tasks(out))


def test_an_earlier_file_outlives_a_call_that_makes_nothing(tmp_path, store):
    out = tmp_path / "tasks.jsonl"
    out.write_text("kept\n")
    [report] = make_tasks([tmp_path / "absent"], out, store=store)
    assert not report.kept and out.read_text() == "kept\n"


FAILURES = [
    ("prepare_subject", SubjectProblem("it cannot be fetched")), ("prepare_subject", OutOfTime()),
    ("prepare_subject", KeyError("x")), ("Journal", OSError("no space")),
    ("measure_coverage", RunnerProblem("no tests run")), ("measure_coverage", OutOfTime()),
    ("make_bench", OSError("no space")), ("find_targets", KeyError("x")), ("package_rows", OutOfTime()),
]


@pytest.mark.parametrize(("stage", "error"), FAILURES)
def test_tasks_of_a_package_that_fails_later_stay(stage, error, tmp_path, monkeypatch):
    "At each stage of the next run, and in the runs after it; another folder of the same name is another package."
    [task, *_] = read_tasks(REPOS / "larder.tasks.jsonl")
    failing: list[Path] = []

    def put(name, result):
        def call(given, *others):
            package = given.stem if name == "Journal" else getattr(given, "spec", given).parent.name
            if name == stage and package in {spec.parent.name for spec in failing}:
                raise error
            return result(given, *others)

        monkeypatch.setattr(deletion, name, call)

    def rows(bench, settings, known, on_try):
        row = task_to_row(replace(task, task_id=bench.spec.parent.name, repo=bench.source))
        return [] if known else [{"key": "f stub", "task": row}]

    put("prepare_subject", lambda spec, store: SimpleNamespace(
        spec=spec, source=spec.name, sha256=spec.parent.name, missing=(), notes=(), tree=Path(spec.parent.name, "tree"),
        outcomes={}, coverage=None, seconds={}))
    for name in ("measure_coverage", "make_bench"):
        put(name, lambda subject, store: subject)
    put("Journal", deletion.Journal)
    put("find_targets", lambda subject, *settings: ([], []))
    put("package_rows", rows)
    specs, out = [tmp_path / "one/pack", tmp_path / "two/pack", tmp_path / "three/other"], tmp_path / "tasks.jsonl"

    def run(specs):
        reports = make_tasks(specs, out, TaskSettings(), 1)
        rows = json.loads(Path(f"{out}.report.json").read_text())
        assert [row["notes"] for row in rows] == [report.notes for report in reports]
        return {task.task_id for task in read_tasks(out)}, [note for row in rows for note in row["notes"] if "earlier" in note]

    assert run(specs) == ({"one", "two", "three"}, [])
    for failing[:] in (specs[:1], specs[:2], specs[2:], specs[:1]):
        found, said = run(specs)
        assert found == {"one", "two", "three"} and len(said) == len(failing) * (stage in ("prepare_subject", "Journal"))
    failing.clear()
    assert run(specs[1:]) == ({"two", "three"}, [])  # as asked


RUN = """
import sys
from pathlib import Path
from composer_replication.envs.deletion.tasks.make import TaskSettings, make_tasks
spec, out, store = map(Path, sys.argv[1:4])
make_tasks([spec], out, TaskSettings(per_package=9, granularity=("function",)), jobs=1, store=store,
           on_report=lambda report: print(report.stage, report.last.rpartition(": ")[0], sep="|", flush=True))
"""


@pytest.mark.slow  # some 20 s
def test_a_kill_loses_nothing_and_repeats_nothing(tmp_path, store):
    spec, out = good(tmp_path), tmp_path / "tasks.jsonl"
    run = [sys.executable, "-c", RUN, spec, out, store]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as process:
        first: list[str] = []
        while len(first) < 2:
            first += filter(None, [process.stdout.readline().strip().partition("|")[2]])
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    journal = next(Path(f"{out}.journals").glob("*.jsonl"))
    with journal.open("a") as file:
        file.write('{"key": "good:cut sho')
    again = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and not set(first) & {line.partition("|")[2] for line in again.stdout.split("\n")}, again
    whole = tmp_path / "whole.jsonl"
    make_tasks([spec], whole, TaskSettings(per_package=9, granularity=("function",)), jobs=1, store=store)
    measured = {"difficulty": {}, "canaries": (), "heldout_records": ()}
    assert [replace(task, **measured) for task in read_tasks(out)] == [replace(task, **measured) for task in read_tasks(whole)]
    for row in json.loads(Path(f"{out}.report.json").read_text()):
        assert row["tried"] == row["kept"] + sum(row["dropped"].values())


LARGE = ("fractions", "calendar", "configparser", "statistics", "tokenize", "difflib")  # 5 to 18 s each
STDLIB = ("textwrap", "shlex", "bisect", "string", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE))


def exports(text):
    "What `__all__` lists."
    return {name for node in parse(text).body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
            and isinstance(node.value, ast.List | ast.Tuple) for name in ast.literal_eval(node.value)}


@pytest.mark.parametrize("name", STDLIB)
def test_only_the_body_changes(name):
    """Every definition of real modules: the stub parses, keeps all signatures and docstrings, and touches no other definition;
    removed it leaves Python without the name."""
    text = Path(__import__(name).__file__).read_text()
    symbols = find_symbols(f"{name}.py", text, name)
    assert len(symbols) > 3
    for symbol in symbols:
        target = Target((symbol,), symbol.kind, frozenset())
        for body in TRIVIAL.values():
            parse(replace_bodies({f"{name}.py": text}, target, body)[f"{name}.py"])
        left = stub({f"{name}.py": text}, target)[f"{name}.py"]
        after = {s.qualname: s.node for s in find_symbols(f"{name}.py", left, name)}
        for other in symbols:
            if other.qualname == symbol.qualname or other.qualname.startswith(symbol.qualname + "."):
                for old, new in zip(functions_of(other), functions_of(replace(other, node=after[other.qualname])), strict=True):
                    assert ast.dump(old.args) == ast.dump(new.args) and ast.get_docstring(old) == ast.get_docstring(new)
                    assert ast.unparse(new.body[-1]) == "raise NotImplementedError" and len(new.body) <= 2
            elif not symbol.qualname.startswith(other.qualname + "."):
                assert ast.dump(other.node) == ast.dump(after[other.qualname]), (symbol.qualname, other.qualname)
        gone = remove({f"{name}.py": text}, target)[f"{name}.py"]
        assert symbol.qualname not in {s.qualname for s in find_symbols(f"{name}.py", gone, name)} | exports(gone)


@pytest.mark.parametrize(("source", "left"), [
    ("from .toy import f\n", ""),
    ("from .toy import f, g\n", "from .toy import g\n"),
    ("from .toy import f as h, g\n", "from .toy import g\n"),
    ("from pkg.toy import (\n    f,\n    g,\n)\n", "from pkg.toy import g\n"),
    ("from . import toy\n", "from . import toy\n"),
    ("from .other import f\n", "from .other import f\n"),
    ("__all__ = ['f', 'g']\nfrom .toy import *\nf = 1\n", None),
    ("if True:\n    from .toy import f\n", "if True:\n    pass\n"),
])
def test_imports_of_what_is_gone(source, left):
    toy = "__all__ = ('f', 'g')\ndef f():\n    return [1]\n\ndef g():\n    return [2]\n"
    files = {"pkg/__init__.py": source, "pkg/toy.py": toy}
    [symbol] = [s for s in find_symbols("pkg/toy.py", toy, "pkg.toy") if s.qualname == "f"]
    new = remove(files, Target((symbol,), "function", frozenset()))
    if left is not None:
        assert new.get("pkg/__init__.py", source) == left
    assert ast.literal_eval(parse(new["pkg/toy.py"]).body[0].value) == ("g",)


def test_an_import_inside_of_what_goes_costs_nothing_below_it():
    toy = ("def f():\n    return [1]\n\ndef g():\n    from toy import f\n    return f()\nX = 1\n\nclass A:\n    def h(self):\n"
           "        from toy import f\n\nY = 2\n")
    symbols = {s.qualname: s for s in find_symbols("toy.py", toy, "toy")}
    new = remove({"toy.py": toy}, Target((symbols["f"], symbols["g"]), "bundle", frozenset()))["toy.py"]
    assert new.split() == "X = 1 class A: def h(self): pass Y = 2".split()


STATED = {
    "pkg/__init__.py": "from .core import grow, shrink\n__all__ = ['grow', 'shrink']\n",
    "pkg/core.py": '''
__all__ = ["grow", "Plant"]

def grow(x):
    "Larger."
    y = x + 1
    return y * y

def shrink(x):
    y = x - 1
    return y * y

def lone(x):
    y = x - 2
    return y * y

class Plant:
    def water(self, x):
        y = x + 3
        return y * y
''',
}


@pytest.mark.parametrize(("names", "mode", "true"), [
    ("grow", "stub", "a function. Its signature and docstring are still there; where code was, `NotImplementedError` is raised. "
                     "Write it"),
    ("shrink", "stub", "a function. Its signature is still there; where code was"),
    ("Plant", "stub", "a class. Signatures are still there; where code was"),
    ("Plant.water", "remove", "a method. The whole definition is gone, and whatever imported it or listed it in `__all__` inside "
                              "the package. Write it again, so that it works as before."),
    ("grow shrink", "stub", "a feature of 2 definitions. Signatures and docstrings are still there; where code was"),
    ("grow lone", "remove", "definitions are gone, and whatever imported them or listed them in `__all__` inside the package. "
                            "Write them again"),
])
def test_every_sentence_of_the_prompt_is_true(names, mode, true):
    symbols = [s for s in find_symbols("pkg/core.py", STATED["pkg/core.py"], "pkg.core") if s.qualname in names.split()]
    target = Target(tuple(symbols), "bundle", frozenset())
    after = DELETERS[mode](STATED, target)
    gone = Deletion(target, mode, {path: STATED[path] for path in after}, after, {})
    alone = write_up.problem_statement(SimpleNamespace(name="pkg"), gone, ["t.py::a"])
    assert true in alone and "do not see" not in alone and "This test fails" in alone
    several = write_up.problem_statement(SimpleNamespace(name="pkg"), gone, ["t.py::a", "t.py::b"], 2)
    assert "These tests fail" in several and "Other tests, which you do not see, must pass too." in several


FEATURES = {
    "pkg/__init__.py": "",
    "pkg/tags.py": """
from pkg.store import keep_tag

def parse_tag(text):
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 2:
        raise ValueError(text)
    return tuple(parts)

def add_tag(store, text):
    name, value = parse_tag(text)
    keep_tag(store, name, value)
    return sorted(store)

def get(x):
    return x.y
""",
    "pkg/store.py": """
def keep_tag(store, name, value):
    if name in store:
        store[name].append(value)
    else:
        store[name] = [value]

def clear(store):
    for key in list(store):
        if key.startswith("_"):
            continue
        del store[key]
    return len(store)
""",
}


def features(tests):
    "Targets of a package whose definitions are run by the given tests."
    symbols = {s.name: s for path, text in FEATURES.items() for s in find_symbols(path, text, module_name(path, ["."]))}
    lines: dict = {}
    for name, nodes in tests.items():
        lines.setdefault(symbols[name].path, {}).update({line: tuple(nodes) for line in body_lines(symbols[name])})
    everyone = {node for nodes in tests.values() for node in nodes}
    return Coverage(dict.fromkeys(everyone, "passed"), {}, {}, lines)


@pytest.mark.parametrize("node", [
    "t.py::test_a", "t.py::test_a[x in y]", "t.py::test_a[stopped at the limit in z]", "a in b/t.py::test"])
def test_a_test_that_breaks_the_runs_off_is_left_out_whatever_its_name(monkeypatch, node):
    def runs(subject, phases, limits):
        for phase in phases:
            ends = [{"end": True}] if node not in phase.nodes else [{"start": node}]
            passed = [{"node": one, "outcome": "passed", "seconds": 0.1} for one in phase.nodes if one != node]
            yield read_result(phase, "".join(json.dumps(m) + "\n" for m in passed + ends).encode(), None, 1.0)

    monkeypatch.setattr(gates, "run_phases", lambda *given: list(runs(*given)))
    found, broke = gates._three_runs(SimpleNamespace(source="package"), ["t.py::other", node])
    assert broke == [node] and all(run.outcomes == {"t.py::other": "passed"} for run in found)


@pytest.mark.parametrize("problem, late, gate", [
    ("stopped at the time limit in t.py::test_a", True, "hangs without it"),
    ("the judge's process ended while it ran: the limit on memory", False, "rest broken"),
    ("the run broke off (RecursionError: limit reached) in t.py::test_limit", False, "rest broken")])
def test_only_a_run_that_reached_the_time_limit_hangs(problem, late, gate):
    result = PhaseResult({}, {}, problem, late=late)
    assert gates._red(None, Deletion(None, "stub", {}, {}, {}), ([], []), result, PhaseResult({}, {})).dropped == gate


def test_tests_that_pass_satisfies_come_last():
    "Of hundreds of tests that run a definition, eighty by chance may all pass with `pass` as body: sqlparse lost its tasks so."
    nodes = [f"t.py::{number}" for number in range(300)]
    bench = SimpleNamespace(seconds=dict.fromkeys(nodes, 0.001), subject=SimpleNamespace(sha256="0"))
    target = Target((SimpleNamespace(name="m:f"),), "function", frozenset(nodes), (frozenset(nodes),))
    gone, telling = Deletion(target, "stub", {}, {}, {}), nodes[:3]
    red = PhaseResult(dict.fromkeys(nodes, "failed") | {"u.py::1": "passed", "u.py::2": "passed"}, {})
    with_pass = PhaseResult({node: "failed" if node in telling else "passed" for node in nodes}, {})
    tried = (nodes, ["u.py::1", "u.py::2"])
    kept = gates._red(bench, gone, tried, red, with_pass)
    assert not kept.dropped and set(telling) <= set(kept.fail_to_pass) and len(kept.fail_to_pass) == gates.MOST_TESTS
    nothing = PhaseResult(dict.fromkeys(nodes, "passed"), {})
    assert gates._red(bench, gone, tried, red, nothing).dropped == "trivial"
    assert not gates._red(bench, gone, tried, red, PhaseResult({}, {}, "stopped at the time limit", late=True)).dropped


def test_of_very_many_tests_each_definition_keeps_some():
    "Markdown: 1,200 tests run every definition, and each deletion ran them all, twice."
    nodes = [f"t.py::{number}" for number in range(1200)]
    bench = SimpleNamespace(seconds=dict.fromkeys(nodes, 0.2), subject=SimpleNamespace(sha256="0"))
    each = frozenset(nodes[:1150]), frozenset(nodes[7:10])
    target = Target((SimpleNamespace(name="m:f"), SimpleNamespace(name="m:g")), "bundle", each[0] | each[1], each)
    for mode in ("stub", "remove"):
        tried, _ = gates._nodes_to_try(bench, Deletion(target, mode, {}, {}, {}))
        assert each[1] <= set(tried) <= target.tests and gates.MOST_TRIED // 3 < len(tried) <= gates.MOST_TRIED
        assert tried == gates._nodes_to_try(bench, Deletion(target, mode, {}, {}, {}))[0] == sorted(tried, key=nodes.index)
    few = Target(target.symbols, "bundle", frozenset(nodes[:300]), (frozenset(nodes[:300]), frozenset(nodes[:5])))
    assert gates._nodes_to_try(bench, Deletion(few, "stub", {}, {}, {}))[0] == nodes[:300]


@pytest.fixture
def bench(made, store):
    "What was measured of that repository, with all that is odd in it."
    _, tasks, _ = made
    return gates.make_bench(subject_of(tasks[0], store), store)


def test_a_test_that_ends_the_tracing_costs_no_other_its_lines(bench):
    "sqlparse: after one test was cut off, 500 later ones seemed to run nothing."
    assert bench.coverage.outcomes["test_a.py::test_a"] == "passed"  # it ran before the others
    line = GOOD.split("\n").index("    result = 0") + 1
    of_total = {node for node in bench.coverage.passed if "::test_total[" in node}
    assert bench.coverage.tests_of("good.py", [line]) == of_total != set()


def test_a_file_that_cannot_be_imported_costs_its_own_tests_only(bench):
    "funcy, jmespath, Markdown and marshmallow: one such file, and no test of the package was run at all."
    assert "test_good.py::test_either" in bench.coverage.passed and "is_nowhere" in bench.coverage.errors["test_broken.py"]


def test_a_measurement_in_which_nothing_ran_is_not_kept(tmp_path, monkeypatch):
    "A sandbox that failed once made the repository useless for good."
    tree = write(tmp_path / "sound" / "tree", {"test_one.py": ""})
    nothing = {"tests": [], "outcomes": {}, "seconds": {}, "errors": [], "lines": {}}
    runs = iter([[nothing], [nothing | {"tests": ["t::x"], "outcomes": {"t::x": "passed"}}]])
    monkeypatch.setattr(coverage, "_run_all", lambda *given: next(runs))
    seen = [coverage.measure_coverage(SimpleNamespace(tree=tree, source="sound"), tmp_path).passed for _ in range(3)]
    assert seen == [set(), {"t::x"}, {"t::x"}]


@needs_sandbox
def test_a_test_with_an_endless_name_costs_no_other(bench):
    "natsort: one name of 5,000 characters, and the judge took the name for a forgery in each of three runs."
    long = [node for node in bench.coverage.passed if "test_long" in node]
    assert len(long) == 1 and len(long[0]) > 5000
    assert set(bench.seconds) == bench.coverage.passed - {*long, "test_unfit.py::test_flaky", "test_unfit.py::test_ends_all"}
    assert any("longer than 4000" in note and len(note) < 400 for note in bench.notes)


def test_a_feature_is_deleted_across_modules(tmp_path):
    subject = SimpleNamespace(tree=write(tmp_path, FEATURES), import_roots=(".",), sha256="0")
    run = features({"pkg.tags:parse_tag": ["a", "b"], "pkg.tags:add_tag": ["a", "b", "c"], "pkg.store:keep_tag": ["a", "b", "c"],
                    "pkg.store:clear": ["d"], "pkg.tags:get": ["e"]})
    targets, notes = find_targets(subject, run)
    bundles = [target for target in targets if target.granularity == "bundle"]
    together = ["pkg.store:keep_tag", "pkg.tags:add_tag", "pkg.tags:parse_tag"]
    assert [[s.name for s in target.symbols] for target in bundles] == [together]
    assert bundles[0].tests_of_each == (frozenset("abc"), frozenset("abc"), frozenset("ab"))
    assert not any("pkg.tags:get" in target.name for target in targets)  # a getter is no task
    assert targets[1] == bundles[0]  # every second one is a bundle, as long as there are some
    assert [t.name for t in find_targets(subject, run, least=20)[0]] == [bundles[0].name]
    assert "4 definitions that tests run weigh less than 20" in find_targets(subject, run, least=20)[1][0]


def test_what_exactly_the_same_tests_run_belongs_together():
    text = "".join(f"def {name}(x):\n    return x + {n}\n\n" for n, name in enumerate(("alpha", "beta", "gamma")))
    symbols, run = find_symbols("m.py", text, "m"), {"m:alpha": "ab", "m:beta": "ab", "m:gamma": "abc"}
    tests = {name: frozenset(nodes) for name, nodes in run.items()}
    assert [[s.qualname for s in bundle] for bundle in find_bundles(symbols, {"m.py": text}, tests)] == [["alpha", "beta"]]


def test_show_never_tells_the_solution(made):
    _, tasks, out = made
    shown = CliRunner().invoke(tasks_app, ["show", str(out)] + [tasks[0].task_id])
    asjson = CliRunner().invoke(tasks_app, ["show", str(out), "--json"])
    solution = ("rows.append", "place * sum", "golden", "heldout", "canaries", "fingerprints")
    for result in (shown, asjson):
        assert result.exit_code == 0 and not any(code in result.output for code in solution)


@pytest.mark.parametrize("wrong", [
    ["--granularity", "line"], ["--mode", "melt"], ["--least", "tiny"], ["--per-package", "0"], ["--jobs", "many"], []])
def test_a_misspelt_command_ends_with_2(wrong):
    assert CliRunner().invoke(tasks_app, ["make", *(["x"] if wrong else []), *wrong]).exit_code == 2


def test_a_file_of_tasks_from_elsewhere(made, tmp_path):
    _, tasks, out = made
    lines = out.read_text().splitlines()
    row = json.loads(lines[0])
    wrong = [json.dumps({k: v for k, v in row.items() if k != "patch"}), "no json", json.dumps(row | {"mode": "melt"}), lines[0]]
    (tmp_path / "odd.jsonl").write_text("\n".join(wrong) + "\n")
    shown = CliRunner().invoke(tasks_app, ["show", str(tmp_path / "odd.jsonl"), "--json"])
    assert shown.exit_code == 0 and len([line for line in shown.stdout.splitlines() if line.startswith("{")]) == 1
    assert shown.stderr.count("warning:") == 3
    write_tasks([replace(tasks[0], task_id="elsewhere", base_commit="sha256:" + "1" * 64)], tmp_path / "else.jsonl")
    checked = CliRunner().invoke(tasks_app, ["validate", str(tmp_path / "else.jsonl"), "--json"])
    assert checked.exit_code == 1 and "prepare that repository first" in checked.stdout


@pytest.mark.parametrize(("rewards", "gate"), [((1, 1, 1), None), ((1, 1, 0.5), "not rewarded"), ((0, 1, 1), "not rewarded")])
def test_what_the_judge_does_not_reward_each_time_is_dropped(monkeypatch, rewards, gate):
    given = iter(rewards)
    task = read_tasks(REPOS / "larder.tasks.jsonl")[0]
    monkeypatch.setattr(deletion, "build_task", lambda *_: task)
    monkeypatch.setattr(deletion, "add_evidence", lambda task, *_: task)
    monkeypatch.setattr(deletion, "source_files", lambda *_: {})
    monkeypatch.setattr(deletion, "grade", lambda *_, **how: SimpleNamespace(reward=next(given), findings=(), fraction=0.5))
    gone = Deletion(SimpleNamespace(name="m:f"), "stub", {}, {}, {})
    row = deletion._row(SimpleNamespace(subject=None), gone, 0)
    assert row["key"] == "m:f stub" and row.get("dropped") == gate and ("task" in row) == (gate is None)
    assert gate is None or row["detail"] == "50% of its tests and records"


def test_the_sound_tasks_of_a_file_are_written(tmp_path):
    prepare_subject(REPOS / "larder")
    task = read_tasks(REPOS / "larder.tasks.jsonl")[0]
    write_tasks([task, replace(task, task_id="other", fingerprints=("0" * 16,))], tmp_path / "two.jsonl")
    words = ["validate", str(tmp_path / "two.jsonl"), "--oracles", "1", "--out", str(tmp_path / "sound.jsonl")]
    assert CliRunner().invoke(tasks_app, words).exit_code == 1
    assert read_tasks(tmp_path / "sound.jsonl") == [task]


@pytest.mark.parametrize(("original", "dropped"), [(1.0, "hangs without it"), (8.0, "")])  # seconds of the original
def test_a_body_hangs_only_where_the_original_on_this_machine_would_not(original, dropped, monkeypatch):
    "On a busy machine bodies run into a limit that was measured on a quiet one; then the limit follows the original."
    nodes, took = ("t.py::test_a", "t.py::test_b"), 4 * original + 6.5  # seconds of each body
    symbols = (SimpleNamespace(name="m:f"),)
    target = SimpleNamespace(tests=frozenset(nodes), tests_of_each=(frozenset(nodes),), symbols=symbols, name="m:f")
    bodies = {name: {"m.py": f"body = {name!r}\n"} for name in gates.TRIVIAL}
    cut = gates.Deletion(target, "stub", {"m.py": "x = 1\n"}, {"m.py": "x = 2\n"}, bodies)
    bench = gates.Bench(SimpleNamespace(sha256="0"), None, {}, dict.fromkeys((*nodes, "t.py::other", "t.py::more"), 0.01), ())

    def run(subject, phases, limits):
        for phase in phases:
            seconds = {"red": 0.1, "pass": 0.1}.get(phase.name, took) if phase.name != "restored" else original
            if seconds > limits.wall_s:
                yield PhaseResult({}, {}, "stopped at the time limit", wall=limits.wall_s, late=True)
            else:
                outcomes = {n: "passed" if phase.name == "restored" or n not in nodes else "failed" for n in phase.nodes}
                yield PhaseResult(outcomes, dict.fromkeys(phase.nodes, 0.01), wall=seconds)

    monkeypatch.setattr(gates, "run_phases", lambda *given: list(run(*given)))
    found = gates.run_gates(bench, cut)
    assert found.dropped == dropped, found.detail


@pytest.mark.slow
def test_the_shipped_tasks_are_those_that_the_maker_makes(tmp_path):
    "This is how `repos/larder.tasks.jsonl` is made; held-out inputs may differ where a run was slow."
    shipped = tmp_path / "larder.tasks.jsonl"
    make_tasks([REPOS / "larder"], shipped, TaskSettings(60, ("function", "method"), "stub", least=1), 1)
    made, known = ({task.task_id: (task.fail_to_pass, task.problem_statement, task.golden_diff) for task in read_tasks(path)}
                   for path in (shipped, REPOS / "larder.tasks.jsonl"))
    assert made == known


def target(name, *nodes):
    return SimpleNamespace(name=name, tests=frozenset(nodes))


@pytest.fixture
def rows(monkeypatch):
    "The names that `package_rows` tries, what it says of them, and its rows; one deletion waits for all of its time."
    seconds = {"slow": 9.0, "fast": 0.1, "some": 1.0}
    targets = [target("c", "slow", "some"), target("waits", "fast"), target("a", "some")]
    monkeypatch.setattr(deletion, "find_targets", lambda *given: (list(targets), []))
    monkeypatch.setattr(deletion, "try_deletion", lambda bench, target, mode: target)
    monkeypatch.setattr(deletion, "run_gates", lambda bench, target: target)

    def row(bench, target, seed):
        while target.name == "waits":
            time_left()
            time.sleep(0.01)
        return {"key": f"{target.name} stub", "dropped": "trivial", "detail": ""}

    monkeypatch.setattr(deletion, "_row", row)
    bench = SimpleNamespace(seconds=seconds, subject=None, coverage=None)

    def made(minutes):
        said, rows = [], []
        with deadline(60 * minutes):
            for one in deletion.package_rows(bench, TaskSettings(mode="stub"), {}, said.append):
                rows.append(one)
        return said, rows

    return made


def test_before_a_deadline_the_cheapest_are_tried_first_and_a_slow_one_leaves_time(rows, monkeypatch):
    monkeypatch.setattr(deletion, "LEAST_S", 0.1)
    said, found = rows(2 / 60)
    assert [row["key"] for row in found] == ["waits stub", "a stub", "c stub"]
    assert found[0]["dropped"] == "too long" and "its part of the time that was left" in found[0]["detail"]
    assert said == [f"{name} stub: trying, its {many} tests take {seconds} s" for name, many, seconds in (
        ("waits", 1, 0.1), ("a", 1, 1.0), ("c", 2, 10.0))]
    assert set(row["dropped"] for row in found) <= GATES.keys()


def test_without_a_deadline_the_order_is_the_seeds(rows, monkeypatch):
    dropped = {"dropped": "trivial", "detail": ""}
    monkeypatch.setattr(deletion, "_row", lambda bench, target, seed: {"key": f"{target.name} stub"} | dropped)
    assert [row["key"] for row in rows(math.inf)[1]] == ["c stub", "waits stub", "a stub"]


def test_a_definition_gives_one_task_whatever_time_the_next_run_has(monkeypatch):
    "A deadline orders the targets by their cost, so that the same target may begin with another mode."
    targets = [target("a", "slow"), target("b", "fast")]
    monkeypatch.setattr(deletion, "find_targets", lambda *given: (list(targets), []))
    monkeypatch.setattr(deletion, "try_deletion", lambda bench, target, mode: f"{target.name} {mode}")
    monkeypatch.setattr(deletion, "run_gates", lambda bench, key: key)
    monkeypatch.setattr(deletion, "_row", lambda bench, key, seed: {"key": key, "task": {}})
    bench = SimpleNamespace(seconds={"slow": 9.0, "fast": 0.1}, subject=None, coverage=None)
    with deadline(600):
        known = {row["key"]: row for row in deletion.package_rows(bench, TaskSettings(), {})}
    assert len(known) == 2 and list(deletion.package_rows(bench, TaskSettings(), known)) == []


def test_the_end_of_all_time_is_no_row(rows, monkeypatch):
    monkeypatch.setattr(deletion, "LEAST_S", 5.0)
    with pytest.raises(OutOfTime):
        rows(0.3 / 60)


def test_how_far_each_package_came_is_kept(tmp_path, store):
    "Fetched, installed, tests found, tests run, kept, and why not: in the file after each change, in the table, as JSON."
    untested = write(tmp_path / "untested", {"untested.py": "x = 1\n"})
    failing = write(tmp_path / "failing", {"failing.py": "x = 1\n", "test_failing.py": "def test_x():\n    assert 0\n"})
    out, stages = tmp_path / "tasks.jsonl", []

    def watch(report):
        [row] = [row for row in json.loads(Path(f"{out}.report.json").read_text()) if row["spec"] == report.spec]
        stages.append((Path(row["spec"]).name, row["stage"]))

    make_tasks([untested, failing, tmp_path / "absent"], out, TaskSettings(), 1, store, on_report=watch)
    assert list(dict.fromkeys(stages)) == [("untested", "fetching"), ("untested", "running the tests"), ("failing", "fetching"),
                                           ("failing", "running the tests"), ("absent", "fetching")]
    rows = json.loads(Path(f"{out}.report.json").read_text())
    assert [(row["fetched"], row["tests_found"], row["tests_run"], row["kept"]) for row in rows] == [
        (True, 0, 0, 0), (True, 1, 0, 0), (False, 0, 0, 0)]
    assert "holds no tests (no test_*.py or *_test.py): name a repository or sdist that ships them" in rows[0]["problem"]
    table = stage_table([deletion.PackageReport(**row) for row in rows])
    assert [list(column.cells) for column in table.columns][-1] == [row["problem"] for row in rows]


def test_the_patterns_of_the_project_say_what_a_test_is(tmp_path):
    settings = "[pytest]\npython_files = tests.py check_*.py\n"
    tree = write(tmp_path / "django", {"app/tests.py": "", "app/test_x.py": "", "pytest.ini": settings})
    assert coverage.test_files(tree) == ["app/tests.py"]


def test_a_fault_of_ours_costs_one_package(tmp_path, store, monkeypatch):
    def prepare(spec, store):
        return prepare_subject(spec, store) if Path(spec).name == "good" else {}["missing"]

    monkeypatch.setattr(deletion, "prepare_subject", prepare)
    specs = [tmp_path / "faulty", good(tmp_path, **{"test_good.py": "import nowhere\n"})]
    faulty, next_one = make_tasks(specs, tmp_path / "tasks.jsonl", TaskSettings(1, ("function",)), 1, store)
    assert "composer-rl itself failed (KeyError: 'missing'" in faulty.problem
    assert "has no passing test (test_good.py: " in next_one.problem  # its tests were run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(tmp_path, number):
    store = store_path().parent / f"test-{os.getpid()}-{number}"  # every user id must reach it
    store.mkdir(mode=0o755)
    try:
        spec, out = good(tmp_path), tmp_path / "tasks.jsonl"
        words = [sys.executable, "-c", RUN, spec, out, store]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            while run.stdout.readline() != "running the tests|\n":
                pass
            until = time.monotonic() + 30
            while not list((store / "scratch").glob("coverage-*/owner")) and time.monotonic() < until:
                time.sleep(0.01)
            run.send_signal(number)
            run.communicate(timeout=100)  # it does not wait for the package
        (tmp_path / f".tasks.jsonl.report.json.{run.pid}.partial").touch()  # as if the kill had come a moment earlier
        make_tasks([write(tmp_path / "untested", {"x.py": "x = 1\n"})], out, TaskSettings(), 1, store)
        assert not list((store / "scratch").iterdir()) and not list(tmp_path.glob(".*.partial"))
    finally:
        shutil.rmtree(store)


def test_an_interrupt_that_a_worker_thread_received_ends_the_run(tmp_path):
    "The system may give a process's signal to any thread; Python acts on it when the main one wakes."
    run = """
import signal, sys, threading, time
from composer_replication.envs.deletion.tasks.make import TaskSettings, make_tasks
def interrupt(report):
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(3000)
make_tasks(["nothing"], sys.argv[1], TaskSettings(), 1, on_report=interrupt)
"""
    begun = [sys.executable, "-c", run, tmp_path / "tasks.jsonl"]
    done = subprocess.run(begun, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr


def test_one_folder_under_two_spellings_gives_its_tasks_once(tmp_path, monkeypatch):
    "Its report stands under both; the file must be one that is read again."
    row = json.loads((REPOS / "larder.tasks.jsonl").read_text().splitlines()[0])
    monkeypatch.setattr(deletion, "make_package", lambda spec, *others: (deletion.PackageReport(str(spec)), [row]))
    reports = make_tasks(["larder", "./larder"], tmp_path / "tasks.jsonl")
    assert [report.spec for report in reports] == ["larder", "./larder"] and len(read_tasks(tmp_path / "tasks.jsonl")) == 1
