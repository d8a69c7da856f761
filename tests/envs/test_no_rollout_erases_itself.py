"""What an agent brings about is scored, however slow, large or deep; what the machine brings about is not."""
import errno
import os
import shlex
import threading
from contextlib import closing
from dataclasses import replace

import envs_tasks
import pytest
from envs_tasks import Says, open_boxes

from composer_replication.core.environment import TrlEnvironment, late_call_reward, step_limit
from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import ToolCall
from composer_replication.envs.deletion import env as page
from composer_replication.envs.deletion.env import FeatureDeletionEnv, deletion_rows
from composer_replication.envs.deletion.judge import grading
from composer_replication.envs.deletion.judge.grading import zero_grade
from composer_replication.envs.deletion.judge.messages import PhaseResult
from composer_replication.envs.deletion.judge.runner import RunnerProblem
from composer_replication.envs.rewards import SharedCredit
from composer_replication.rollout.loop import collect
from composer_replication.rollout.types import Ending, RolloutConfig
from composer_replication.sandbox import folders
from composer_replication.sandbox.base import Limits, open_sandbox, sandbox_problem
from composer_replication.sandbox.folders import DiskUsage, folder_usage, opened

LIMITS = Limits(wall_s=100.0, cpu_s=20, memory_mb=512, processes=32, file_mb=8, disk_mb=16)
SMALL = replace(LIMITS, files=150)


def say(env, name, **arguments):
    return env.call(ToolCall(name, arguments)).text


def python(env, code):
    return env.call(ToolCall("shell", {"command": shlex.join(["python", "-c", code])}))


# The loop

class Slow:
    "An environment whose calls and reward wait for a gate that somebody opens."
    tools = ({"type": "function", "function": {"name": "wait", "description": "Wait.",
                                               "parameters": {"type": "object", "properties": {}}}},)

    def __init__(self, gate, **limits):
        self.gate = gate
        vars(self).update(limits)

    def reset(self, **row):
        return None

    def call(self, call):
        self.gate.wait(60)
        return ToolResult("waited")

    def reward(self, answer=""):
        self.gate.wait(60)
        return 0.0

    def close(self):
        pass


@pytest.mark.parametrize("turns, name", [(["Done."], "reward_s"), ([("wait", {}), "Done."], "call_s")])
def test_the_loop_waits_as_long_as_an_environment_says_it_takes(turns, name):
    rows, config = [{"prompt": "Wait.", "task_id": "x"}], RolloutConfig(tool_timeout=1.5)
    gate = threading.Event()
    late, = collect(Says(*turns), lambda: Slow(gate), rows, config)
    assert (late.ending, late.reward) == (Ending.TIMEOUT, 0.0 if name == "call_s" else None)
    assert "within 1.5 seconds" in late.problem
    assert ("earns 0" in late.problem) == (late.reward is not None)
    threading.Timer(2.0, gate.set).start()
    scored, = collect(Says(*turns), lambda: Slow(gate, **{name: 60.0}), rows, config)
    assert (scored.ending, scored.reward) == (Ending.DONE, 0.0)


@pytest.mark.parametrize("wrap", [lambda made: made(), SharedCredit,
                                  lambda made: TrlEnvironment(type("Holds", (), {"environment": made()})())])
def test_a_late_call_earns_nothing_and_a_late_machine_is_no_fault_of_the_model(wrap, caplog):
    "One that ends slow calls itself and is late all the same was kept waiting by the machine."
    for limits, reward in (({}, 0.0), ({"call_s": 0.05}, None)):
        assert late_call_reward(wrap(lambda limits=limits: Slow(None, **limits))) == reward
    gate, rows = threading.Event(), [{"prompt": "Wait.", "task_id": "x"}]
    late, = collect(Says(("wait", {}), "Done."), lambda: Slow(gate, call_s=0.05), rows, RolloutConfig(tool_timeout=1.5))
    gate.set()
    assert (late.ending, late.reward) == (Ending.TIMEOUT, None)
    assert f"{late.trace.trace_id} ended with timeout: wait gave no answer" in caplog.text


def test_every_environment_that_holds_one_of_ours_says_what_ours_says():
    ours = FeatureDeletionEnv([], limits=Limits(wall_s=40.0), judge_s=500.0)
    for environment in (ours, SharedCredit(lambda: ours), TrlEnvironment(type("Holds", (), {"environment": ours})())):
        assert step_limit(environment, "reward", 30.0) > 2 * 500 and step_limit(environment, "call", 30.0) > 40
        assert step_limit(environment, "call", 1000.0) == 1000.0
    assert step_limit(Slow(None), "reward", 30.0) == 30.0


# The tree

TREES = {
    "files": "for k in range(400): open(f'{k}.py', 'w').close()",
    "folders": "import os\nfor k in range(400): os.mkdir(f'{k}')",
    "nested folders": "import os\nfor k in range(20): os.makedirs(f'{k}/' + '/'.join(['d'] * 20))",
    "links": "import os\nfor k in range(400): os.symlink('src', f'{k}')",
    "one file by many names": "import os\nopen('0.py', 'w')\nfor k in range(1, 400): os.link('0.py', f'{k}.py')",
    "pipes": "import os\nfor k in range(400): os.mkfifo(f'{k}')",
    "many more": "import os\nfor k in range(60): os.makedirs(f'{k}/' + '/'.join(['d'] * 40))",
}


@pytest.fixture
def env(initials):
    "A reset one; both kinds count alike."
    kind = "local-unsafe" if sandbox_problem("bubblewrap") else "bubblewrap"
    with closing(FeatureDeletionEnv([initials], limits=SMALL, kind=kind)) as made:
        made.reset(task_id=initials.task_id)
        yield made


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_of_too_many_entries_is_refused_and_earns_nothing(env, initials, tree, monkeypatch):
    monkeypatch.setattr(page, "grade", lambda *given, **more: pytest.fail("it was judged"))
    path, text = envs_tasks.solution(env._subject, initials)
    say(env, "write_file", path=path, text=text)
    answer = python(env, TREES[tree])
    assert answer.failed and "150 new files and folders" in answer.text
    assert "more than" in say(env, "list_files") or "dead" in say(env, "list_files")
    assert env.reward() == 0.0 and env.grade.findings[0].what.startswith("the tree cannot be read: ")
    assert open_boxes() == []


def test_what_was_removed_again_counts_no_more(env, monkeypatch):
    "As after a test run that left much behind."
    monkeypatch.setattr(page, "grade", lambda *given, **more: zero_grade("it was judged"))
    assert python(env, "import os\nos.mkdir('m')\nfor k in range(160): open(f'm/{k}', 'w').close()").failed
    assert "remove some" in say(env, "list_files") and not python(env, "import shutil; shutil.rmtree('m')").failed
    assert not python(env, "import os\nos.mkdir('m')\nfor k in range(140): open(f'm/{k}', 'w').close()").failed
    env.reward()
    assert env.grade.findings[0].what == "it was judged"


def test_files_that_tools_write_count_too(env):
    said = [env.call(ToolCall("write_file", {"path": f"m/{k}/x.txt", "text": ""})) for k in range(80)]
    assert not said[0].failed and said[-1].failed and "limit on files" in said[-1].text
    assert "64 are the limit" in say(env, "write_file", path="d/" * 70 + "x", text="x") and "labels.py" in say(env, "list_files")
    for _ in range(200):
        assert not env.call(ToolCall("write_file", {"path": "m/0/x.txt", "text": "again"})).failed


def test_a_large_repository_leaves_room_for_itself(tmp_path):
    (tmp_path / "m").mkdir()
    for k in range(300):
        (tmp_path / f"m/{k}").touch()
    with open_sandbox(tmp_path, kind="local-unsafe", limits=SMALL) as box:
        box.write("new", b"x")
        assert box.exec(["touch", "more"]).exit_code == 0 and len(box.files()) == 302


def test_counting_ends_where_the_bound_is_passed(tmp_path, monkeypatch):
    looked, look = [], folders._status
    monkeypatch.setattr(folders, "_status", lambda *given: looked.append(given) or look(*given))
    for k in range(40):
        (tmp_path / f"{k}/d/e").mkdir(parents=True)
    with opened(tmp_path) as top:
        assert folder_usage(top).entries == len(looked) == 120
        looked.clear()
        assert folder_usage(top, DiskUsage(1 << 60, 10)).entries == len(looked) == 11
        assert folder_usage(top, DiskUsage(1, 1000)).entries == 1


# The judge

def test_a_judge_that_never_ends_is_the_machine_s_fault(initials, monkeypatch):
    "Where even the original comes to no end, nothing is scored."
    ended = threading.Event()

    def hangs(*given, **more):
        return [PhaseResult({}, {}, "it was ended at its time limit", late=True) for _ in given[1]]
    monkeypatch.setattr(page, "grade", lambda *given, **more: ended.wait(60))
    monkeypatch.setattr(grading, "run_phases", hangs)
    monkeypatch.setattr(page, "warm_judge", lambda *given, **more: None)
    with closing(FeatureDeletionEnv([initials], limits=LIMITS, kind="local-unsafe", judge_s=0.2)) as env:
        env.reset(task_id=initials.task_id)
        with pytest.raises(RunnerProblem, match="the original itself cannot be judged"):
            env.reward()
    ended.set()


@pytest.mark.parametrize("number, scored", [(errno.EIO, False), (errno.EMFILE, False), (errno.ENOSPC, False),
                                            (errno.ENAMETOOLONG, True)])
def test_a_machine_that_fails_while_the_sources_are_read_is_no_zero(initials, monkeypatch, number, scored):
    def fails(sandbox):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(page, "collect_sources", fails)
    monkeypatch.setattr(page, "warm_judge", lambda *given, **more: None)
    rollout, = collect(Says("Done."), lambda: FeatureDeletionEnv([initials], limits=LIMITS, kind="local-unsafe"),
                       deletion_rows([initials]), RolloutConfig(tool_timeout=60.0))
    assert (rollout.reward, str(rollout.ending)) == ((0.0, "done") if scored else (None, "error")), rollout.problem
    assert open_boxes() == []
