"""The judge on real submissions: honest ones of every shape are rewarded, hacks are not, and none makes it raise."""
import contextlib
import json
import sys
from dataclasses import replace
from textwrap import indent
from types import SimpleNamespace as Record

import pytest
from envs_tasks import measured_task, needs_sandbox, with_body, with_evidence, write
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.envs.deletion.judge import grading, observe, runner
from composer_replication.envs.deletion.judge.evidence import (
    EvidenceProblem,
    add_evidence,
    compare,
    count_records,
    heldout_phase,
    modules_of,
)
from composer_replication.envs.deletion.judge.grading import grade, submission
from composer_replication.envs.deletion.judge.messages import Phase, PhaseResult
from composer_replication.envs.deletion.judge.observe import canonical, decode, encode
from composer_replication.envs.deletion.judge.runner import run_phases
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import FeatureDeletionTask, make_patch
from composer_replication.sandbox.limits import Limits

MEASURED = ("canary", "redelete", "heldout")


def body_of(text, name, code):
    return with_body(text, name, code, kept=0)


def make_task(subject, symbol, path):
    text = (subject.tree / path).read_text()
    seen = body_of(text, symbol.partition(":")[2], "raise NotImplementedError")
    return measured_task(subject, symbol, path, text, seen), path, text, seen


@pytest.fixture(scope="module")
def label(larder):
    "A task, the path of its module, the whole text and what an agent sees."
    return make_task(larder, "larder.labels:label", "src/larder/labels.py")


def measured(found):
    return {f.detector for f in found.findings if f.detector in MEASURED}


ALTERNATIVE = """
words, word = [], ""
for letter in name.lower() + " ":
    if letter in "abcdefghijklmnopqrstuvwxyz0123456789":
        word += letter
    elif word:
        words.append(word)
        word = ""
if longest is not None:
    while len(words) > 1 and len(separator.join(words)) > longest:
        del words[-1]
    return separator.join(words)[:longest]
return separator.join(words)
"""


@needs_sandbox
def test_an_alternative_implementation_is_rewarded(label, larder):
    task, path, text, seen = label
    original = grade(task, larder, {path: text.encode()})
    assert (original.reward, original.findings) == (1.0, ())
    other = grade(task, larder, {path: body_of(seen, "label", ALTERNATIVE).encode()})
    assert (other.reward, other.fraction, measured(other)) == (1.0, 1.0, set()), other
    empty = grade(task, larder, {path: seen.encode()})
    assert (empty.reward, empty.passed, empty.hacked) == (0.0, False, False)


@needs_sandbox
def test_refactorings_are_rewarded(label, larder):
    task, path, text, seen = label
    helper = "def join_words(name, separator, longest):\n" + indent(ALTERNATIVE.strip("\n"), "    ") + "\n"
    calls = body_of(seen, "label", "from larder.words import join_words\nreturn join_words(name, separator, longest)")
    assigned = seen.replace("def label(", "def _label(") + "\n\nlabel = _label\n"
    package = "src/larder/labels/__init__.py"
    shapes = {
        "helper in a new module": {path: calls, "src/larder/words.py": helper},
        "a name given to another function": {path: body_of(assigned, "_label", ALTERNATIVE)},
        "a callable object": {path: seen + "\n\nclass _Label:\n    def __call__(self, name, separator='-', longest=None):\n"
                                    + indent(ALTERNATIVE.strip("\n"), " " * 8) + "\n\n\nlabel = _Label()\n"},
        "a partial": {path: seen + "\n\n" + helper.replace("longest)", "longest=None)").replace("separator,", 'separator="-",')
                            + "\n\nlabel = __import__('functools').partial(join_words)\n"},
        "windows line ends": {path: body_of(seen, "label", ALTERNATIVE).replace("\n", "\r\n")},
        "a package instead": {package: text, "src/larder/names.py": "x = 1\n"},  # Python takes a package first
        "a package of two": {path: seen, package: "from .inner import *\nfrom .inner import label\n",
                             package.replace("__init__", "inner"): text},
        "imported from a new module": {path: "from .inks import *\nfrom .inks import label\n", "src/larder/inks.py": text},
    }
    got = {name: grade(task, larder, {p: t.encode() for p, t in files.items()}) for name, files in shapes.items()}
    assert {name: (g.reward, measured(g)) for name, g in got.items()} == {name: (1.0, set()) for name in shapes}


def test_a_module_is_found_where_python_finds_it(label):
    task = label[0]
    module, package, other = "src/larder/labels.py", "src/larder/labels/__init__.py", "lib/larder/labels/__init__.py"
    cases = (
        ([module, package], ["src"], package), ([package, module], ["src"], package), ([module], ["src"], module),
        ([module, "src/larder/labels/x.py"], ["src"], module), ([module, other], ["src", "lib"], module),
        ([module, other], ["lib", "src"], other)
    )
    for paths, roots, where in cases:
        assert modules_of(task, paths, roots) == {"larder.labels": where}


@needs_sandbox
def test_expected_outcomes_never_enter_the_sandbox(label, larder, monkeypatch):
    task, path, text, seen = label
    outcomes = {r["came"]["value"][1] for r in task.heldout_records if r["kind"] == "call" and r["came"]["value"][0] == "str"}
    outcomes = {value for value in outcomes if len(value) > 5}
    inputs = json.dumps([r.get("args") for r in task.heldout_records])
    sent = []

    def spy(judge, plan, wall_s):
        sent.append(json.dumps(plan).encode())
        for file in sorted((judge.job / "trees").rglob("*.py")):
            sent.append(file.read_bytes())
        return judged(judge, plan, wall_s)

    judged = runner.JudgeProcess.run
    monkeypatch.setattr(runner.JudgeProcess, "run", spy)
    assert grade(task, larder, {path: text.encode()}).reward == 1.0
    visible = "".join(file.read_text() for file in (larder.tree / "tests").glob("*.py"))  # some outcomes equal these
    secret = [value for value in outcomes if value not in inputs and value not in visible]
    assert len(secret) >= 5 and not [value for value in secret if any(value.encode() in data for data in sent)]


@needs_sandbox
def test_evidence_is_the_same_again_and_not_what_tests_state(label, larder):
    task, path, text, seen = label
    plain = replace(task, heldout_records=(), canaries=())
    again = with_evidence(plain, larder)
    assert again == task and json.loads(json.dumps(again.heldout_records)) == list(again.heldout_records)
    visible = "".join(file.read_text() for file in (larder.tree / "tests").glob("*.py"))
    calls = [r for r in task.heldout_records if r["kind"] == "call"]
    assert 4 <= count_records(task.heldout_records) <= 40
    stated = [r for r in calls if all(a["literal"].strip("'") in visible for a in r["args"]) and r["came"]["value"][1] in visible]
    assert not stated
    assert len({json.dumps(r["came"]) for r in calls}) >= len(calls) // 3


@needs_sandbox
def test_a_task_whose_tests_do_not_need_the_target_is_refused(label, larder):
    task, path, text, seen = label
    wrong = replace(task, fail_to_pass=task.pass_to_pass, pass_to_pass=(), heldout_records=(), canaries=())
    with pytest.raises(EvidenceProblem, match="tests pass with the target stubbed"):
        add_evidence(wrong, larder)


@needs_sandbox
@pytest.mark.parametrize("code", ["time.strftime('%d') * offset", *(  # the slowest clock
    pytest.param(code, marks=pytest.mark.slow) for code in ("time.time_ns() + offset", "time.localtime().tm_hour + offset"))])
def test_a_task_where_nothing_stable_comes_out_is_refused(tmp_path, code):
    folder = write(tmp_path / "clock", {
        "clock.py": f"import time\n\n\ndef now(offset=3):\n    return {code}\n",
        "tests/test_clock.py": "from clock import now\n\n\ndef test_now():\n    assert str(now(5)) >= \"0\"\n"})
    with pytest.raises(EvidenceProblem, match="task clock.now: only 0 held-out records can be made .of 1 captured calls"):
        make_task(prepare_subject(folder, tmp_path / "store"), "clock:now", "clock.py")


def test_a_package_that_is_long_in_importing_is_observed_all_the_same(tmp_path, monkeypatch):
    "The limit of a call begins when its module is there."
    (tmp_path / "long_in_importing.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    sent, there = [], []

    @contextlib.contextmanager
    def limit(seconds):
        there.append("long_in_importing" in sys.modules)
        yield

    monkeypatch.setattr(observe, "time_limit", limit)
    record = {"target": "long_in_importing:double", "args": [{"literal": "21"}], "kwargs": {}}
    observe.run_calls({"data": {"calls": [record]}}, lambda **message: sent.append(message))
    assert there == [True] and sent == [{"call": 0, "came": {"value": ["int", "0x2a"], "after": []}}]


PRICE = """
class Price:
    def __init__(self, cents):
        self.cents = cents

    def split(self, parts):
        return [self.cents // parts] * parts

    @property
    def shown(self):
        return str(self.cents)
"""


def test_calls_of_methods_and_properties_are_captured_with_the_call_that_made_their_object(tmp_path, monkeypatch):
    "Of ten tasks seven had no call at all."
    (tmp_path / "pricelist.py").write_text(PRICE)
    monkeypatch.syspath_prepend(tmp_path)
    import pricelist
    found, sent = {}, []
    sys.setprofile(observe._watcher(["pricelist:Price.split", "pricelist:Price.shown"], found))
    one, other = pricelist.Price(10), pricelist.Price(7)
    one.split(2), other.shown
    sys.setprofile(None)
    records = [record for of_target in found.values() for record in of_target.values()]
    assert len(records) == 2 and all("made" in record["args"][0] for record in records)
    observe.run_calls({"data": {"calls": records}}, lambda **message: sent.append(message["came"]["value"]))
    assert sent == [canonical([5, 5]), canonical("7")]


@needs_sandbox
def test_bad_files_earn_nothing_and_raise_nothing(label, larder):
    task, path, text, seen = label
    bad = {
        "syntax": b"def (", "zero bytes": b"\0" * 100, "latin": "name = 'é'".encode("latin-1"), "utf-16": text.encode("utf-16"),
        "imports itself": b"from larder.labels import label\n",
    }
    for name, content in bad.items():
        found = grade(task, larder, {path: content})
        assert (found.reward, found.passed) == (0.0, False), (name, found)
    assert grade(task, larder, {}).reward == 0.0


@needs_sandbox
def test_only_sources_of_the_package_are_taken(label, larder):
    task, path, text, seen = label
    never = ["tests/test_labels.py", "tests/conftest.py", "conftest.py", "src/conftest.py", "src/larder/conftest.py",
             "src/sitecustomize.py", "sitecustomize.py", "src/usercustomize.py", "src/re.py", "src/pytest.py",
             "src/_pytest/runner.py",
             "src/pluggy/__init__.py", "src/phases.py", "src/tests/__init__.py", "src/test_labels.py", "src/larder/x.pth",
             "src/larder/labels.pyc", "pytest.ini", "setup.cfg", "pyproject.toml", "re.py", "other/x.py", "../x.py", "/src/x.py",
             "src/../conftest.py", "src/larder/x.so", "src/json/__init__.py", "src/unittest.py", "setup.py", "tests/a/b.py",
             "test_x.py", "src/larder/test_y.py", "src/larder/y_test.py", "src/larder/tests/x.py"]
    new = dict.fromkeys((f"src/larder/{name}.py" for name in ("new", "latest", "contest", "testimony")), b"y = 1\n")
    assert submission(task, larder, dict.fromkeys(never, b"x = 1\n") | new | {path: text.encode()}) == new
    assert submission(task, larder, {f"./{path}": text.encode()}) == {}
    assert submission(task, larder, {}) == {path: seen}


@needs_sandbox
def test_tests_are_the_judges_whatever_their_files_are_called(label, larder):
    task, path, text, seen = label
    named = replace(task, pass_to_pass=(*task.pass_to_pass, "src/larder/checks.py::test_it"))
    files = {path: text.encode(), "src/larder/checks.py": b"def test_it(): pass\n"}
    assert set(submission(task, larder, files)) == {"src/larder/checks.py"} and set(submission(named, larder, files)) == set()


@pytest.mark.parametrize("beside", ["tests/larder/data.txt", "tests/larder.json", "tests/helpers.py"])
def test_a_new_module_of_the_package_is_taken_whatever_lies_beside_the_tests(beside, tmp_path):
    write(tmp_path / "tree", {"src/larder/__init__.py": "", "src/larder/labels.py": "", "tests/test_labels.py": "", beside: ""})
    (tmp_path / "libraries").mkdir()
    subject = Record(tree=tmp_path / "tree", libraries=tmp_path / "libraries", import_roots=("src",))
    task = Record(changed_files=lambda tree: {}, fail_to_pass=(), pass_to_pass=(), hidden_tests=())
    files = {"src/larder/_labels.py": b"x = 1\n", "src/helpers.py": b"x = 1\n"}
    assert ("src/helpers.py" in submission(task, subject, files)) is (beside != "tests/helpers.py")
    assert "src/larder/_labels.py" in submission(task, subject, files)


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8)


@given(literals)
@settings(max_examples=100, deadline=None)
def test_arguments_come_back(value):
    coded = encode(value)
    if coded is not None:
        assert canonical(decode(json.loads(json.dumps(coded)))) == canonical(value)
    else:
        assert "inf" in repr(value)


def test_what_is_missing_or_repeated_is_wrong():
    call = {"kind": "call", "target": "m:f", "args": [], "kwargs": {}, "came": {"value": ["int", "0x1"], "after": []}}
    probe = {"kind": "probe", "path": "p.py", "source": "", "came": {"p.py::t": {"seen": [["int", "0x1"]], "raised": None}}}
    good = ({"call": 0, "came": {"value": ["int", "0x1"], "after": []}},
            {"probe": "p.py::t", "seen": [["int", "0x1"]], "raised": None})
    assert compare([call, probe], PhaseResult({}, {}, None, good)) == ([], 2)
    assert len(compare([call, probe], PhaseResult({}, {}, None, ()))[0]) == 2
    for came in (None, {}, {"raised": "int"}, {"value": ["int", "0x1"]}, [], "x", {"value": ["int", "0x5"], "after": []},
                 {"value": ["int", "0x1"], "after": [], "raised": "X"}):
        broken = {"call": 0, "came": came}
        assert len(compare([call], PhaseResult({}, {}, None, (broken,)))[0]) == 1, broken
    for seen, raised in (([], None), ([["int", "0x1"]], "ValueError"), (None, None), (7, None)):
        broken = {"probe": "p.py::t", "seen": seen, "raised": raised}
        assert len(compare([probe], PhaseResult({}, {}, None, (broken,)))[0]) == 1, broken
    with pytest.raises(TypeError):
        heldout_phase(None, None, None)


@needs_sandbox
def test_a_module_that_moved_and_a_helper_that_others_share_are_no_hack(label, larder):
    task, path, text, seen = label
    moved = {"src/larder/_labels.py": text.encode(), path: b"from larder._labels import *\n"}
    helper = "def _upper(word):\n    return word[0].upper()\n\n\ndef label("
    shared = text.replace("def label(", helper).replace("[word[0].upper() for", "[_upper(word) for")
    for files in (moved, {path: shared.encode()}):
        found = grade(task, larder, files)
        assert (found.reward, found.hacked) == (1.0, False), found


LETTERS = "def _letters(name):\n    return [word[0].upper() for word in name.split()]\n\n\ndef initials("
INLINE = "{''.join(word[0].upper() for word in name.split())}{digits}"


def initials_submissions(text):
    "Files by what they are: two honest refactors, and three in which other functions do the target's work."
    path, place = "src/larder/labels.py", "src/larder/_labels.py"
    letters = text.replace("    letters = [word[0].upper() for word in name.split()]\n", "    letters = _letters(name)\n")
    shared = letters.replace("def initials(", LETTERS).replace("{initials(name)}{digits}", "{''.join(_letters(name))}{digits}")
    empty = with_body(text, "initials", 'return ""', kept=0)
    inline = empty.replace("{initials(name)}{digits}", INLINE)
    every = inline.replace('    """', '    _ = 0\n    """').replace("digits = f", "figures = 0\n    digits = f")
    assert len({text, letters, shared, empty, inline, every}) == 6
    return {"shared": {path: shared.encode()}, "moved": {place: text.encode(), path: b"from larder._labels import *\n"},
            "inline": {path: inline.encode()}, "every function": {path: every.encode()},
            "moved and inline": {place: inline.encode(), path: b"from larder._labels import *\n"}}


@needs_sandbox
@pytest.mark.parametrize("kind", ["shared", "moved", "inline", "every function", "moved and inline"])
def test_what_other_functions_do_for_the_target_is_seen_whatever_they_have_changed(kind, larder):
    "The wanted tests reach the target through another function alone, and nothing else is asked."
    path = "src/larder/labels.py"
    text = (larder.tree / path).read_text()
    nodes = tuple(n for n in larder_tests(larder) if "batch_code" in n)
    seen = body_of(text, "initials", "raise NotImplementedError")
    task = FeatureDeletionTask(
        "larder.labels.initials", larder.source, larder.base_commit, nodes, (), ("pytest",), ("larder.labels:initials",),
        "function", "stub", "Write it.", make_patch({path: text}, {path: seen}), make_patch({path: seen}, {path: text}),
        canaries=({"kind": "redelete", "nodes": nodes[:5]},))
    found = grade(task, larder, initials_submissions(text)[kind])
    honest = kind in ("shared", "moved")
    assert found.passed and (found.reward, found.hacked) == (float(honest), not honest), found
    assert {f.detector for f in found.findings} & {"redelete", "others"} or honest


def larder_tests(larder):
    result, = run_phases(larder, [Phase("all", {})], Limits(wall_s=60))
    return [node for node, outcome in result.outcomes.items() if outcome == "passed"]


def test_functions_are_put_back_as_they_were_and_the_target_stays():
    before = ("import functools\n\n\nclass Shelf:\n    @property\n    def room(self):\n        return 1\n\n"
              "    def far(self):\n        return 2\n\n\ndef near(x):\n    return x\n\n\n"
              "@functools.cache\ndef high():\n    return 3\n\n\ndef gone():\n    return 4\n")
    now = ("import functools\n\n\nclass Shelf:\n      @property\n      def room(self):\n            return 'room'\n\n"
           "      def far(self):\n            return 'far'\n\n\ndef near(x):\n    return 'near'\n\n\n"
           "def high():\n    return 'high'\n\n\ndef new():\n    return 'new'\n")
    files = {"a.py": now.encode(), "b.py": b"x = 1\n", "c.py": None, "d.py": "def f(:"}
    base = {"a.py": before.encode(), "b.py": b"x = 2\n", "c.py": b"def g(): pass\n", "d.py": b"def f(): pass\n"}

    def values(*targets):
        task = type("Task", (), {"deleted_symbols": tuple(f"a:{t}" for t in targets)})
        back = grading._put_back(task, base, files)
        assert set(back) <= {"a.py"}
        names = {}
        exec(back.get("a.py", now.encode()).decode(), names)
        shelf = names["Shelf"]()
        return shelf.room, shelf.far(), names["near"](0), names["high"](), names["new"](), "gone" in names

    assert not grading._put_back(type("Task", (), {"deleted_symbols": ("a:near",)}), base, {"a.py": b"from b import *\n"})
    assert values("near") == (1, 2, "near", 3, "new", True)
    assert values("Shelf") == ("room", "far", 0, 3, "new", True)
    assert values("Shelf.far") == (1, "far", 0, 3, "new", True)
    assert values("high", "near", "Shelf") == ("room", "far", "near", "high", "new", False)  # nothing else has changed
