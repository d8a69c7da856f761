"""Agent code against the process that runs the tests: nothing turns a failure into a pass, nothing reaches the next phase."""
import contextlib
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from envs_tasks import needs_sandbox

from composer_replication.envs.deletion.judge import runner, trees
from composer_replication.envs.deletion.judge.messages import Phase
from composer_replication.envs.deletion.judge.runner import (
    JudgePool,
    JudgeProcess,
    RunnerProblem,
    close_judges,
    lay_out,
    pytest_settings,
    run_phases,
    warm_judge,
)
from composer_replication.sandbox import limits
from composer_replication.sandbox.limits import Limits, descendants

pytestmark = needs_sandbox
SHORT = Limits(wall_s=60.0)
LABELS = "src/larder/labels.py"


@pytest.fixture(scope="module")
def nodes(larder):
    (all_tests,) = run_phases(larder, [Phase("all", {})], SHORT)
    return tuple(node for node in all_tests.outcomes if node.startswith("tests/test_labels.py"))


def broken(larder, extra):
    "The module with a wrong `label`, and more code."
    return (larder.tree / LABELS).read_text() + "\n\ndef label(*args, **kwargs):\n    return 'wrong'\n\n\n" + extra


def attacks():
    "Those that aim at the process; what aims at pytest is in the exploits' files."
    line = r"""
import json, os, gc, sys
names = [l.split("(")[0].split()[1] for l in open("tests/test_labels.py") if l.startswith("def test_")]
passed = [{"node": "tests/test_labels.py::" + n, "outcome": "passed", "seconds": 0.1} for n in names]
"""
    yield "hangs", "import time\ntime.sleep(1000)\n"
    yield "stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    yield "kills everybody", """
import os
for pid in (os.getppid(), 1):
    try:
        os.kill(pid, 9)
    except OSError:
        pass
"""
    yield "writes to every descriptor", line + """
for fd in range(256):
    for message in passed:
        try:
            os.write(fd, (json.dumps(message) + "\\n" + "00 " + json.dumps(message) + "\\n").encode())
        except OSError:
            pass
"""
    yield "prints what the parent prints", line + """
for fd in (0, 1, 2):
    for name in (f"/proc/self/fd/{fd}", f"/proc/{os.getppid()}/fd/{fd}", f"/proc/1/fd/{fd}", "/dev/stdout", "/dev/tty"):
        result = {"messages": passed + [{"end": True}], "cut": None, "foreign": False, "clean": True, "seconds": 1}
        try:
            with open(name, "w") as file:
                file.write(json.dumps(result) + "\\n")
        except OSError:
            pass
"""
    yield "says it twice", line + """
for thing in gc.get_objects():
    if getattr(thing, "__qualname__", "") == "_sender.<locals>.send":
        for message in passed:
            thing(**message)
"""
    yield "floods its pipe", "import os\nwhile True:\n    os.write(3, b'x' * 65536)\n"
    yield "multiplies", """
import os, time
for _ in range(12):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(1000)
"""
    yield "fills the memory", "x = []\nwhile True:\n    x.append(bytearray(1 << 24))\n"


ATTACKS = dict(attacks())
STUCK = ("hangs", "stops itself", "multiplies")  # up to the time limit


def test_nothing_turns_a_failure_into_a_pass(larder, nodes):
    phases = {name: Phase(name, {LABELS: broken(larder, code)}, nodes) for name, code in ATTACKS.items()}
    phases["honest"] = Phase("honest", {}, nodes)
    results = {}
    for names, wall_s in ((STUCK, 0.8), ([name for name in phases if name not in STUCK], 60.0)):
        results |= zip(names, run_phases(larder, [phases[name] for name in names], Limits(wall_s=wall_s)), strict=True)
    rewarded = [name for name, result in results.items() if result.passed(nodes)]
    assert rewarded == ["honest"]  # the last one: nothing that came before reached it
    assert "time limit" in results["hangs"].problem and "time limit" in results["stops itself"].problem
    forged = {name for name, result in results.items() if result.forged}
    assert forged == {"writes to every descriptor", "says it twice", "floods its pipe"}
    assert "not asked for" in results["says it twice"].problem  # its names lack their parameters


LOOKS = '''
import ctypes, os, pytest

libc = ctypes.CDLL(None, use_errno=True)
ABOVE = sorted({1, os.getppid()})


def test_the_parent_cannot_be_looked_into():
    for pid in ABOVE:
        for name in ("mem", "environ", "fd", "fd/0", "fd/1", "maps"):
            with pytest.raises(OSError):
                path = f"/proc/{pid}/{name}"
                os.listdir(path) if name == "fd" else open(path, "rb").read(1)


def test_the_parent_cannot_be_traced():
    for pid in ABOVE:
        assert libc.ptrace(16, pid, 0, 0) == -1
        pidfd = os.pidfd_open(pid)
        assert [libc.syscall(438, pidfd, fd, 0) for fd in range(6)] == [-1] * 6
        os.close(pidfd)


def test_the_parent_cannot_be_signalled():
    import signal
    for pid in ABOVE:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    assert os.getppid() in ABOVE


def test_only_the_pipe_is_open():
    leads = {}
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            leads[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    assert leads.pop(3).startswith("pipe:")
    assert set(leads.values()) == {"/dev/null"}  # pytest itself opens one more


def test_other_trees_are_out_of_sight():
    here = os.getcwd()
    assert here.startswith("/judge/trees/")
    for path in ("/judge", "/judge/trees", "/judge/code"):
        with pytest.raises(OSError):
            os.listdir(path)
    with pytest.raises(OSError):
        open("/judge/code/phases.py")


def test_the_tree_is_read_only():
    mine = "tests/test_labels.py"
    for act in (lambda: open(mine, "a"), lambda: os.remove(mine), lambda: os.mkdir("new"), lambda: open("conftest.py", "w"),
                lambda: os.chmod("tests", 0o777), lambda: open("/repo/x", "w"), lambda: open("/tmp/x", "w")):
        with pytest.raises(OSError):
            act()


def test_only_its_own_folder_is_writable():
    import tempfile
    with tempfile.TemporaryFile() as file:
        file.write(b"1")


def test_leave_something_behind():
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                import time
                while True:
                    open(os.environ["TMPDIR"] + "/left", "w").write("x")
                    time.sleep(0.01)
            os._exit(0)
    open("/dev/shm/left", "w").write("x")


def test_nothing_is_left():
    assert [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid())] == []
    assert os.listdir("/dev/shm") == [] and os.listdir(os.environ["TMPDIR"]) == []
'''


def test_what_a_child_can_reach(larder):
    names = [line[4:].split("(")[0] for line in LOOKS.splitlines() if line.startswith("def test_")]
    looks = tuple(f"tests/test_looks.py::{name}" for name in names if name != "test_nothing_is_left")
    last = ("tests/test_looks.py::test_nothing_is_left",)
    overlay = {"tests/test_looks.py": LOOKS}
    first, second = run_phases(larder, [Phase("look", overlay, looks), Phase("left", overlay, last)], SHORT)
    assert {node: outcome for node, outcome in first.outcomes.items() if outcome != "passed"} == {}
    assert first.passed(looks) and second.passed(last), second


SPY = """
import re

def found(words):
    "The words that stand in this process's memory."
    seen = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            start, end, rights = re.match(r"(\\w+)-(\\w+) (\\S+)", line).groups()
            if rights.startswith("rw"):
                memory.seek(int(start, 16))
                seen |= set(re.findall(words, memory.read(int(end, 16) - int(start, 16))))
    return seen

"""


def test_a_phase_cannot_see_the_plans_of_later_ones(larder):
    spy = SPY + """
def test_own():
    assert found(b"test[_]own")

def test_later():
    assert not found(b"not[-]yet[-]known")
"""
    nodes = ("tests/test_spy.py::test_own", "tests/test_spy.py::test_later")
    later = Phase("later", {"tests/x.py": ""}, ("tests/test_labels.py::not-yet-known",), data={"inputs": "not-yet-known"})
    first, _ = run_phases(larder, [Phase("spy", {"tests/test_spy.py": spy}, nodes), later], SHORT)
    assert first.passed(nodes), first


def test_settings_of_the_submission_do_not_count(larder, nodes):
    hooks = "def pytest_collection_modifyitems(items):\n    items.clear()\n"
    overlay = {LABELS: broken(larder, ""), "pytest.ini": "[pytest]\naddopts = --collect-only\n",
               "src/sitecustomize.py": "raise SystemExit\n", "src/usercustomize.py": "raise SystemExit\n",
               "setup.cfg": "[tool:pytest]\naddopts = -k nothing\n"}
    beside = {"src/larder/conftest.py": hooks}
    plain, hooked = run_phases(larder, [Phase("ini", overlay, nodes), Phase("conftest", beside, nodes)], SHORT)
    assert "failed" in plain.outcomes.values() and not plain.passed(nodes)
    assert hooked.passed(nodes)  # a conftest.py beside the code is not above the tests


def test_outcomes_that_are_no_passes(larder):
    text = """
import pytest, unittest

@pytest.mark.xfail
def test_xfailed():
    assert False

@pytest.mark.xfail
def test_xpassed():
    pass

def test_skipped():
    pytest.skip()

@pytest.fixture
def bad():
    raise ValueError

def test_set_up(bad):
    pass

@pytest.fixture
def late():
    yield
    raise ValueError

def test_torn_down(late):
    pass

class TestSub(unittest.TestCase):
    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)

    @unittest.expectedFailure
    def test_expected(self):
        self.assertTrue(False)

def test_passed():
    pass
"""
    (result,) = run_phases(larder, [Phase("kinds", {"tests/test_kinds.py": text}, ())], SHORT)
    kinds = {node.split("::", 1)[1]: outcome for node, outcome in result.outcomes.items() if "test_kinds" in node}
    assert kinds == {"test_xfailed": "xfailed", "test_xpassed": "xpassed", "test_skipped": "skipped", "test_set_up": "error",
                     "test_torn_down": "error", "TestSub::test_subtests": "failed", "TestSub::test_expected": "xfailed",
                     "test_passed": "passed"}


def test_a_missing_node_is_not_a_pass(larder, nodes):
    wanted = (*nodes, "tests/test_labels.py::test_that_is_not_there", "tests/test_nowhere.py::test_x")
    (result,) = run_phases(larder, [Phase("one", {}, wanted)], SHORT)
    assert not result.passed(wanted)


def test_a_file_that_cannot_be_collected_takes_only_its_own_tests_along(larder, nodes):
    early = "tests/test_early.py"
    wanted = (f"{early}::test_x", *nodes)
    for text in ("raise RuntimeError\n", "def"):
        (result,) = run_phases(larder, [Phase("x", {early: text}, wanted)], SHORT)
        assert result.outcomes == {**dict.fromkeys(nodes, "passed"), early: "error"} and result.problem is None
        assert result.passed(nodes) and not result.passed(wanted)


def test_partial_results_of_a_hang_are_kept(larder):
    text = "import time\ndef test_a():\n    pass\ndef test_b():\n    time.sleep(99)\ndef test_c():\n    pass\n"
    nodes = tuple(f"tests/test_h.py::test_{c}" for c in "abc")
    (result,) = run_phases(larder, [Phase("hang", {"tests/test_h.py": text}, nodes)], Limits(wall_s=1))
    assert result.outcomes == {"tests/test_h.py::test_a": "passed"}
    assert result.problem == "stopped at the time limit in tests/test_h.py::test_b"


def test_nothing_stays_on_the_host(larder, nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in larder.tree.rglob("*")}
    phases = [Phase("a", {LABELS: None, "src/new/x.py": "1"}, nodes), Phase("b", {}, nodes)]
    assert run_phases(larder, phases, SHORT)[1].passed(nodes)
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in larder.tree.rglob("*")} == before


def test_overlays_cannot_leave_the_tree(larder, tmp_path):
    for path in ("../out.py", "/tmp/out.py", "a/../../out.py"):
        with pytest.raises(ValueError, match="outside of the tree"):
            lay_out(larder.tree, {path: "x"}, tmp_path / path.replace("/", "_"))


def test_settings_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.pytest")
    with pytest.raises(ValueError, match="cannot be read"):
        pytest_settings(tmp_path)


@pytest.fixture
def judge(larder):
    close_judges()
    with JudgeProcess(larder.libraries, Limits(wall_s=100.0, memory_mb=2048)) as made:
        made.wait()
        yield made


def processes(judge):
    "Of a judge: the interpreter is the last of them."
    found = []
    for pid in descendants(os.getpid())[1:]:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ends meanwhile
            told = [Path(f"/proc/{pid}/{name}").read_text() for name in ("environ", "cmdline")]
            found += [pid] if str(judge.job.parent) in told[0] or "phases.main" in told[1] else []
    return found


def waiting():
    return runner.POOL.waiting()


def test_one_judge_serves_many_calls(larder, nodes):
    close_judges()
    phases = [Phase("x", {LABELS: broken(larder, "")}, nodes), Phase("y", {}, nodes)]
    first = run_phases(larder, phases, SHORT)
    used = waiting()
    again = run_phases(larder, phases, SHORT)
    assert [r.outcomes for r in again] == [r.outcomes for r in first] and len(used) == 1 and waiting() == used
    assert list((used[0].job / "trees").iterdir()) == [] == list((used[0].job / "spare").iterdir())
    warm_judge(larder, SHORT, wait=True)
    assert waiting() == used
    close_judges()
    assert waiting() == [] and not used[0].job.exists() and processes(used[0]) == []


def test_a_phase_does_not_wait_until_its_tree_is_removed_and_the_judge_s_end_does(larder, nodes, monkeypatch):
    close_judges()
    remove, go_on, gone = shutil.rmtree, threading.Event(), []

    def slowly(path, *options, **named):
        if threading.current_thread() is threading.main_thread():
            gone.append("a caller waited")
        go_on.wait(60)
        remove(path, *options, **named)
        gone.append(Path(path).exists())

    monkeypatch.setattr(runner.shutil, "rmtree", slowly)
    phases = [Phase(str(k), {}, nodes) for k in range(2)]
    threading.Timer(10, go_on.set).start()
    assert all(result.passed(nodes) for result in run_phases(larder, phases, SHORT))
    [judge] = waiting()
    assert list((judge.job / "trees").iterdir()) == []  # out of sight of the next phase
    go_on.set()
    close_judges()
    assert gone == [False, False] and not judge.job.parent.exists()


def test_a_judge_that_ended_while_it_waited_is_replaced(larder, nodes, judge):
    os.kill(processes(judge)[-1], signal.SIGKILL)
    judge._done.exception(100)
    runner.POOL.keep(runner.POOL.key(larder, SHORT), judge)
    assert not judge.ready() and run_phases(larder, [Phase("y", {}, nodes)], SHORT)[0].passed(nodes)


def test_a_judge_whose_process_does_not_end_is_said(larder, nodes, monkeypatch):
    "On a busy machine its end may come late: the wait for it has a limit, which is no fault of a tree."
    monkeypatch.setattr(runner, "END_S", 0.0)
    with pytest.raises(RunnerProblem, match="has not ended in 0 s"):
        judge = JudgeProcess(larder.libraries, SHORT)
        judge.close, finalize = (lambda: None), judge.close
        try:
            monkeypatch.setattr(judge, "_word", lambda seconds: b"")
            judge.wait()
        finally:
            finalize()


def test_a_judge_whose_block_raises_is_closed_and_the_others_wait(larder):
    close_judges()
    warm_judge(larder, SHORT)
    with pytest.raises(KeyError), runner.POOL.judge(larder, SHORT) as one, runner.POOL.judge(larder, SHORT) as other:
        assert one is not other and runner.POOL.waiting() == []
        raise KeyError
    assert runner.POOL.waiting() == [] and not one.job.exists() and not other.job.exists()
    with runner.POOL.judge(larder, SHORT, fresh=True) as own, runner.POOL.judge(larder, SHORT) as kept:
        pass
    assert runner.POOL.waiting() == [kept] and not own.job.exists()


def test_nothing_of_a_pool_is_left_whatever_its_block_raises(larder):
    close_judges()
    with pytest.raises(KeyError), JudgePool() as pool:
        with pool.judge(larder, SHORT) as idle:
            pass
        with pool.judge(larder, SHORT) as idle, pool.judge(larder, SHORT) as busy:
            raise KeyError
    assert pool.waiting() == []
    for judge in (idle, busy):
        assert not judge.ready() and not judge.job.exists() and processes(judge) == []


def test_a_judge_that_works_while_its_pool_is_closed_ends_with_its_block(larder):
    close_judges()
    with JudgePool() as pool:
        later = pool.judge(larder, SHORT)
        judge = later.__enter__()
    assert judge.ready()  # a phase that runs is not cut off
    later.__exit__(None, None, None)
    assert pool.waiting() == [] and not judge.job.exists() and processes(judge) == []


def test_a_child_forked_while_its_parent_held_the_pool_uses_the_pool():
    with runner.POOL._lock:
        if (child := os.fork()) == 0:
            signal.alarm(20)
            runner.POOL.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_judge_that_ends_under_a_phase_is_replaced_once(larder, nodes, monkeypatch):
    close_judges()
    ran, started = JudgeProcess.run, []

    def run(self, plan, wall_s):
        started.append(self)
        self.wait()
        if len(started) <= broken_runs:
            os.kill(processes(self)[-1], signal.SIGKILL)
        return ran(self, plan, wall_s)

    monkeypatch.setattr(JudgeProcess, "run", run)
    broken_runs = 1
    assert run_phases(larder, [Phase("y", {}, nodes)], SHORT)[0].passed(nodes) and len(set(started)) == 2
    assert not started[0].ready() and not started[0].job.exists()


def test_a_phase_under_which_every_judge_ends_has_not_passed(larder, nodes):
    "The limit on all memory together ends the judge: that is the phase's doing, and no reason to leave it unscored."
    fills = "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(300 << 20)\n        break\n"
    fills += "time.sleep(30)\n"
    (result,) = run_phases(larder, [Phase("fills", {LABELS: fills}, nodes)], Limits(wall_s=60.0, memory_mb=512))
    assert result.outcomes == {} and "the limit on memory" in result.problem
    assert run_phases(larder, [Phase("next", {}, nodes)], Limits(wall_s=60.0, memory_mb=512))[0].passed(nodes)


def test_no_judge_no_result(larder, nodes, monkeypatch):
    close_judges()
    monkeypatch.setattr(runner, "_START", "raise SystemExit('no room')")
    with pytest.raises(RunnerProblem, match="did not start .exit code 1.*no room"):
        run_phases(larder, [Phase("y", {}, nodes)], SHORT)


def test_a_judge_that_is_forgotten_ends(larder):
    judge = JudgeProcess(larder.libraries, SHORT)
    job, done = judge.job, judge._done
    del judge
    assert done.result(100).exit_code == 0 or done.result().cut == "closed"
    assert not job.exists()


def test_a_forked_child_leaves_its_parents_judges_alone(larder, nodes):
    run_phases(larder, [Phase("y", {}, nodes)], SHORT)
    used = waiting()
    if (child := os.fork()) == 0:
        mine = runner.POOL.waiting()
        used[-1].close()
        os._exit(len(mine))
    assert os.waitpid(child, 0)[1] == 0 and used[-1].job.exists() and used[-1].ready()
    assert run_phases(larder, [Phase("y", {}, nodes)], SHORT)[0].passed(nodes) and waiting() == used


def test_what_one_submission_leaves_the_next_one_does_not_find(larder, nodes, judge):
    "Words of an earlier submission and of its plan are in no memory of the judge's."
    words = "left-by-the-first", "asked-of-the-first"
    first = Phase("first", {LABELS: broken(larder, "import os\nos.write(3, b'{\"broke\": \"left-by-the-first\"}\\n')\n")}, nodes,
                  data={"calls": [], "x": words[1]})
    spy = SPY + """
def test_memory():
    assert found(b"left[-]by[-]the[-]first|asked[-]of[-]the[-]first|test[_]memory") == {b"test_memory"}
"""
    second = Phase("second", {"tests/test_spy.py": spy}, ("tests/test_spy.py::test_memory",))
    runner.POOL.keep(runner.POOL.key(larder, SHORT), judge)
    one, two = run_phases(larder, [first, second], SHORT)
    assert one.forged or "left-by-the-first" in one.problem
    assert two.passed(second.nodes), two


def test_an_ordinary_users_watch_cannot_look_into_the_judge_and_need_not(larder, nodes, monkeypatch):
    "The judge, first of its namespace, hides what it holds from what it judges; only root would see."
    def nameless(pids):
        lines = {}
        for pid in pids:
            with contextlib.suppress(OSError):  # it ends meanwhile
                lines[pid] = Path(f"/proc/{pid}/status").read_text()
        return 0, {pid for pid, text in lines.items() if re.search(r"^NSpid:.*\t1$", text, re.M)}

    monkeypatch.setattr(limits, "_nameless", nameless)
    close_judges()
    (result,) = run_phases(larder, [Phase("all", {}, nodes)], Limits())
    close_judges()
    assert result.passed(nodes)


def test_what_is_laid_out_to_be_written_to_shares_nothing_with_the_store(larder, tmp_path):
    lay_out(larder.tree, {}, tmp_path / "linked")
    lay_out(larder.tree, {}, tmp_path / "copied", put=shutil.copy)
    same = [(tmp_path / name / LABELS).samefile(larder.tree / LABELS) for name in ("linked", "copied")]
    assert same == [True, False] and (tmp_path / "copied" / LABELS).read_bytes() == (larder.tree / LABELS).read_bytes()
    code = tmp_path / "code" / "__pycache__" / f"a.{sys.implementation.cache_tag}.pyc"
    code.parent.mkdir(parents=True)
    code.write_bytes(b"code")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.py").touch()
    for name, put in (("hard", trees.link), ("own", shutil.copy)):
        lay_out(tmp_path / "tree", {}, tmp_path / name, tmp_path / "code", put)
    assert [(tmp_path / name / "__pycache__" / code.name).samefile(code) for name in ("hard", "own")] == [True, False]
