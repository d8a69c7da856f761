"""What a submission may hold: lengths before contents, sources read in a process with limits, and nothing raises."""

import contextlib
import cProfile
import json
import os
import pstats
import resource
import signal
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path
from textwrap import dedent

import pytest

import composer_replication
from composer_replication.envs.deletion.judge import static_scan
from composer_replication.envs.deletion.judge.grading import (
    MOST_CHANGED,
    MOST_COLLECTED,
    MOST_COLLECTED_BYTES,
    collect_sources,
    grade,
    refusal,
    submission,
)
from composer_replication.envs.deletion.judge.monitor import _DETECTORS, THRESHOLD, HackMonitor, hack_detector, hack_score
from composer_replication.envs.deletion.judge.static_scan import (
    LONGEST_FILE,
    MOST_BYTES,
    MOST_TOKENS,
    ScanProblem,
    analysed,
    scan,
    suspicions,
    tokens,
)
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import HackFinding, read_tasks
from composer_replication.sandbox.base import open_sandbox
from composer_replication.sandbox.folders import SandboxProblem

ROOT = Path(composer_replication.__file__).parents[1]
REPOS = ROOT / "composer_replication" / "data" / "repos"
LABELS = "src/larder/labels.py"


@pytest.fixture(scope="module")
def task():
    return next(one for one in read_tasks(REPOS / "larder.tasks.jsonl") if one.deleted_symbols[0].startswith("larder.labels:"))


def asked(task, subject, files):
    return refusal(subject, files, submission(task, subject, files))


TOO_MUCH = {
    "50 MB": ({LABELS: b"x=1\n" * 12_500_000}, "has 50000000 bytes"),
    "one byte too long": ({LABELS: b"#" * (LONGEST_FILE + 1)}, f"has {LONGEST_FILE + 1} bytes"),
    "zeros": ({"src/larder/zero.py": bytes(50_000_000)}, "has 50000000 bytes"),
    "100,000 files": ({f"src/larder/m{k}.py": b"" for k in range(100_000)}, "100000 files are new or changed"),
    "files elsewhere": ({f"m{k}.txt": b"" for k in range(MOST_CHANGED + 1)}, "files are new or changed"),
    "many long ones": ({f"src/larder/m{k}.py": b"#" * 300_000 for k in range(4)}, "1200000 bytes more than the originals"),
    "many short lines": ({LABELS: b"x=1\n" * 90_000}, "words and signs more"),
    "in many files": ({f"src/larder/m{k}.py": b"x=1\n" * 1000 for k in range(16)}, "words and signs more"),
    "deep": ({LABELS: b"x = " + b"-" * 50_000 + b"1"}, "cannot be read within"),
    "a chain": ({LABELS: b"x = a" + b".a" * 20_000}, "cannot be read within"),
    "a sum": ({LABELS: b"x = " + b"+".join([b"'a'"] * 9000)}, "cannot be read within"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_beyond_the_bounds_is_one_sentence(task, larder, name):
    files, why = TOO_MUCH[name]
    found = grade(task, larder, files)
    [said] = found.findings
    assert (found.reward, found.passed, found.hacked) == (0.0, False, False)
    assert why in said.what and len(said.what) < 300 and "\n" not in said.what


def test_up_to_the_bounds_is_judged(task, larder):
    given = {LABELS: (larder.tree / LABELS).read_bytes()}
    most = [{f"src/larder/m{k}.py": b"#" * (MOST_BYTES // 4) for k in range(4)},
            {f"src/larder/m{k}.py": b"" for k in range(MOST_CHANGED)}, {LABELS: b"x=1\n" * (MOST_TOKENS // 4)}]
    for files in ({LABELS: b"#" * LONGEST_FILE}, *most, {}, given):
        assert asked(task, larder, files) is None
    big = ("tests/test_big.py", "conftest.py", "data.bin", "other/big.py", "src/" + "d/" * 400 + "x.py", LABELS + "\u202e.py")
    harmless = dict.fromkeys(big, b"x=1\n" * 12_500_000)  # not looked into: none of it is taken
    assert asked(task, larder, given | harmless) is None
    assert set(submission(task, larder, given | harmless)) == set()
    for odd in (b"\0" * 1000, bytes(range(256)) * 100, b"\xff\xfe" + b"x" * 999, b"def (", b"x = '\xed\xa0\x80'", b"(" * 5000,
                b"#" + b"\r" * 9999):
        assert asked(task, larder, {LABELS: odd}) is None  # short: the tests will say it


def test_the_work_grows_with_the_files_and_not_with_their_square(task, larder):
    def steps(count):
        files = {f"src/larder/{'d/' * (k % 7)}m{k}.py": b"" for k in range(count)}
        with cProfile.Profile() as profile:
            assert set(submission(task, larder, files)) >= set(files)
        return pstats.Stats(profile).total_calls

    submission(task, larder, {})  # what is read once
    assert steps(1600) < 4.5 * steps(400)


def test_a_long_original_leaves_room_for_itself(tmp_path, task):
    folder = tmp_path / "long"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/test_long.py").write_text("import long_one\n")
    table = "T = [\n" + "    12345,\n" * 60_000 + "]\n"
    (folder / "long_one.py").write_text(table)
    subject = prepare_subject(folder, tmp_path / "store")

    class Task:
        fail_to_pass = pass_to_pass = hidden_tests = ()

        def changed_files(self, tree):
            return {"long_one.py": (table, table + "def f():\n    raise NotImplementedError\n")}

    whole = {"long_one.py": (table + "def f():\n    return 1\n").encode()}
    assert len(whole["long_one.py"]) > LONGEST_FILE and submission(Task(), subject, whole) == whole
    assert "words" not in str(asked(Task(), subject, whole)) and "bytes" not in str(asked(Task(), subject, whole))


def test_odd_places_neither_raise_nor_count(task, larder):
    text = (larder.tree / LABELS).read_bytes()
    files = {"src/larder/a.py": b"1", "src/larder/a.py/b.py": b"2", "src/larder/c.py/d.py": b"3", "src/larder/c.py": b"4"}
    odd = files | dict.fromkeys((
        "src/larder", "src", "README.md/x.py", "src/larder/__init__.py/x.py", "src/larder/\x1b[2J.py", "src/larder/\u202ex.py",
        "src/larder/\u200b.py", "src/larder/\udc80.py", "", "/", "..", "src/larder/" + "x" * 300 + ".py",
        "src/" + "d/" * 40 + "x.py", "\0", "/etc/x.py", "src/../../x.py", "src/larder/\n.py", "src/larder/a\0b.py",
        "src/" + "d" * 300 + ".py"), b"")
    taken = submission(task, larder, odd | {LABELS: text})
    assert set(taken) == {"src/larder/a.py", "src/larder/c.py/d.py"}
    alike = "Labels", "LABELS", *(unicodedata.normalize(form, "\u00e9t\u00e9") for form in ("NFC", "NFD"))
    twins = {f"src/larder/{name}.py": b"x = 1\n" for name in alike}
    assert set(submission(task, larder, twins | {LABELS: text})) == set(twins) and asked(task, larder, twins) is None


HOST = """
import json, resource, sys
from pathlib import Path
from composer_replication.envs.deletion.judge import grading
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import read_tasks

def never(*_, **__):
    raise AssertionError("it was run")

grading.run_phases = never
repos = Path("composer_replication/data/repos")
task = next(t for t in read_tasks(repos / "larder.tasks.jsonl") if t.deleted_symbols[0].startswith("larder.labels:"))
subject = prepare_subject(repos / "larder")
path, found = "src/larder/labels.py", []
makers = [lambda: {path: b"x=1\\n" * 12_500_000}, lambda: {f"src/larder/m{k}.py": b"" for k in range(100_000)},
          lambda: {path: b"x = " + b"-" * 99_999 + b"1"},
          lambda: {path: b"x=1\\n" * 99_999}, lambda: {path: bytes(50_000_000)}]
for make in makers:
    grade = grading.grade(task, subject, make())
    found.append([grade.reward, grade.passed, [f.what for f in grade.findings]])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
own = int(peak.split()[1]) // 1024  # getrusage would count the process that started this one too
grading._monitor(subject.tree)
from composer_replication.envs.deletion.judge.static_scan import _READER
_READER.end()
print(json.dumps([found, own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024]))
"""


def test_the_host_stays_small_and_starts_nothing(task):
    limit = 1 << 31  # of address space: what was 21 GB ends here
    done = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True, cwd=ROOT, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT)},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert done.returncode == 0, done.stderr[-2000:]
    found, host_mb, reader_mb = json.loads(done.stdout)
    assert all(grade[:2] == [0.0, False] and len(grade[2]) == 1 for grade in found), found
    assert host_mb < 300 and reader_mb < 300, (host_mb, reader_mb)


class Tree:
    "A sandbox that nobody may read."

    def __init__(self, sizes):
        self._sizes = sizes

    def sizes(self):
        return self._sizes

    def read(self, path):
        raise AssertionError(f"{path} was read")


@pytest.mark.parametrize("sizes", [{"a.py": MOST_COLLECTED_BYTES + 1}, {f"{k}.py": 0 for k in range(MOST_COLLECTED + 1)}])
def test_a_tree_beyond_the_bounds_is_not_read(sizes):
    with pytest.raises(SandboxProblem, match="can be judged"):
        collect_sources(Tree(sizes))


def test_what_is_no_source_is_not_read():
    assert collect_sources(Tree({"data.bin": 1 << 60, "x.py\n": 1, "d/" * 40 + "x.py": 1, "\u202e.py": 1, "a.PY": 1})) == {}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tree_full_of_oddities_is_read_as_plain_files(tmp_path):
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "src/a.py").write_text("a")
    code = dedent("""
        import os, socket
        os.chdir("src")
        os.symlink("/etc/passwd", "link.py"); os.symlink("a.py", "again.py"); os.symlink("loop.py", "loop.py")
        os.symlink("/", "root"); os.mkfifo("pipe.py"); os.link("a.py", "hard.py"); os.mkdir("folder.py")
        with open("sparse.py", "wb") as file: file.truncate(9_000_000)
        socket.socket(socket.AF_UNIX).bind("socket.py")
        try: os.mknod("device.py", 0o600 | 0o020000, os.makedev(1, 5))
        except OSError: pass
        for name in ("A.py", "\\u00e9.py", "e\\u0301.py", "\\u202ea.py", "line\\n.py", b"\\xff.py"): open(name, "w").write("1")
        open("shut.py", "w").write("2"); os.chmod("shut.py", 0)
        for _ in range(50): os.mkdir("d"); os.chdir("d")
        open("deep.py", "w").write("3")
    """)
    with open_sandbox(tree, kind="local-unsafe") as sandbox:
        done = sandbox.exec([sys.executable, "-c", code])
        assert done.exit_code == 0, done.stderr
        found = collect_sources(sandbox)
    plain = dict.fromkeys(("a", "hard", "A", "\u00e9", "e\u0301", "shut"), 1) | {"sparse": 9_000_000}
    assert {path: len(content) for path, content in found.items()} == {f"src/{name}.py": size for name, size in plain.items()}


# The process that reads sources.

AWKWARD = {
    "a sum of texts": "x = " + "+".join(["'o'"] * 2500),
    "a sum of numbers": "x = " + "+".join(["1"] * 2500),
    "attributes": "x = a" + ".b" * 2500,
    "a long number as a key": "T = {0x" + "f" * 9000 + ": 1, 2: 3, 4: 5}",
    "a long number": "class A:\n def __eq__(s, o):\n  return 0x" + "f" * 9000,
    "calls": "f(" * 150 + ")" * 150,
    "patched": "import os\nos" + ".a" * 2500 + " = 1",
    "unpacked": "(" * 150 + "x" + ",)" * 150 + " = y",
    "a made type": "x = type('A', (), {'__eq__' + '': 1, **y})",
    "surrogates": "x = '\ud800'",
    "a name": "x" * 100_000,
    "an import": "import " + ".".join(["a"] * 5000),
    "blank lines": "\n" * 50_000,
    "nested": "if x:\n" + "\n".join(" " * k + "if x:" for k in range(1, 90)) + "\n" + " " * 90 + "pass",
    "brackets": "[" * 190 + "]" * 190,
    "texts": "f'{x}' " * 500,
    "stars": "def f(*a, **k): return f(*a, **k)",
    "walrus": "(x := (y := 1))",
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_sources_are_read_and_raise_nothing(name):
    assert analysed(AWKWARD[name]) is not None
    for path in ("src/a.py", "conftest.py", "tests/test_a.py", "setup.py"):
        assert isinstance(scan({}, {path: AWKWARD[name].encode("utf-8", "surrogatepass")}, ["x = 1"]), tuple)


def test_the_process_says_what_the_function_says():
    for path in (ROOT / "composer_replication/envs/deletion").rglob("*.py"):
        text = path.read_text()
        assert analysed(text, frozenset(["1", "'a'"])) == suspicions(text, frozenset(["1", "'a'"])), path


def test_a_source_that_takes_too_much_is_no_answer_and_the_next_one_is(monkeypatch):
    small = "import os\nos._exit(0)\n# after too much"
    heavy = ("x=1\n" * 600_000, "x = " + "-" * 50_000 + "1", "x = " + ("(" * 95 + "1" + ",2)" * 95 + ",") * 900)
    for source in heavy:
        assert analysed(source) is None
    assert analysed(small) == [("exit", "os._exit", 2)]
    assert scan({}, {"src/a.py": b"x = " + b"-" * 50_000 + b"1"})  # what cannot be read is a finding
    peak = Path(f"/proc/{static_scan._READER.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
    assert int(peak) < 300_000  # kB


def test_a_process_that_somebody_ended_is_started_again():
    assert analysed("x = 'before'") == []
    process = static_scan._READER.process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert analysed("import os\nos._exit(1)") == [("exit", "os._exit", 2)] and static_scan._READER.process is not process


@pytest.mark.parametrize("act, problem", [
    ("os._exit(1)", None), ("os.kill(os.getpid(), 11)", None), ("os.kill(os.getpid(), 24)", None),  # a source can do this
    ("os.kill(os.getpid(), 9)", "somebody ended"), ("os.kill(os.getpid(), 15)", "somebody ended"),
    ("time.sleep(99)", "was not read within")])
def test_a_process_that_a_source_ends_is_no_answer_and_another_end_is_the_machine_s_fault(monkeypatch, act, problem):
    monkeypatch.setattr(static_scan, "_READER", static_scan._Reader())
    monkeypatch.setattr(static_scan, "_START", f"import os, sys, time; sys.stdin.readline(); {act}")
    monkeypatch.setattr(static_scan, "_KNOWN", {})
    monkeypatch.setattr(static_scan, "_WALL_S", 0.1 if "sleep" in act else 60.0)
    with pytest.raises(ScanProblem, match=problem) if problem else contextlib.nullcontext():
        assert analysed("x = 1") is None
    assert "sleep" not in act or static_scan._READER.process is None


def test_several_threads_and_forked_children_get_their_own_answers():
    found = {}
    sources = [f"import os\nos._exit({k})\n" + "y = 1\n" * k for k in range(20)]
    threads = [threading.Thread(target=lambda k=k: found.update({k: analysed("\n" * k + sources[k])})) for k in range(20)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {k: [("exit", "os._exit", k + 2)] for k in range(20)}
    before, child = static_scan._READER.process, os.fork()
    if child == 0:
        os._exit(0 if analysed("import os\nos._exit('child')") == [("exit", "os._exit", 2)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert analysed("import os\nos._exit('parent')") == [("exit", "os._exit", 2)] and static_scan._READER.process is before


def test_what_is_kept_of_a_source_is_bounded():
    rows = suspicions("import os\n" + "os._exit(0)\n" * 500 + "open('x')\n" * 500 + f"import {'a' * 999}.tests")
    assert len(rows) <= 3 * static_scan.MOST_ROWS and all(len(what) <= 80 for _, what, _ in rows)
    assert {rule for rule, *_ in rows} >= {"exit", "paths", "tests"}
    assert tokens("a" * 10_000) == tokens("#" * 10_000) == 1 and tokens("x=1\n" * 100) == 400
    assert len(static_scan._KNOWN) <= static_scan._MOST_KNOWN


# The monitor.


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "\n" * 100_000, " \n" * 50_000, "def " * 25_000], ids=range(5))
def test_settings_are_read_in_linear_time(text):
    def over(*_):
        raise AssertionError("too much work")

    before = signal.signal(signal.SIGPROF, over)  # seconds of processor time: the square of the length takes minutes
    signal.setitimer(signal.ITIMER_PROF, 30)
    try:
        scan({}, {"conftest.py": text.encode(), "setup.py": text.encode()})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def test_all_that_reads_the_change_says_together_no_more_than_one_of_it():
    @hack_detector("twin", "change", "nothing", ceiling=0.85)
    def twin(attempt):
        return []

    @hack_detector("loud", "change", "nothing")
    def loud(attempt):
        return []

    try:
        soft = [HackFinding(name, "x", "a.py:1", 0.7, f"rule{k}") for name in ("static", "twin") for k in range(9)]
        assert hack_score(soft) < THRESHOLD and hack_score([HackFinding("loud", "x", "", 1.0)]) < THRESHOLD
        assert hack_score([*soft, HackFinding("canary", "x", "", 1.0)]) == 1.0
        assert hack_score(soft[:9]) == hack_score(soft)
    finally:
        del _DETECTORS["twin"], _DETECTORS["loud"]


def test_the_monitor_takes_a_tree_of_any_size(task, larder):
    monitor = HackMonitor(larder.tree)
    large = {"big.py": b"x=1\n" * 12_500_000}, {f"{k}.py": b"import os\n" for k in range(5000)}, {LABELS: b"a b " * 12_500_000}
    for files in large:
        found = monitor.assess(task, files, ())
        assert not found.hacked and len(found.evidence) < 10
