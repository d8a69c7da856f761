"The environment: what the agent sees, what it earns, what it breaks; alone, side by side, and in TRL's hands."
import gc
import json
import shlex
import threading
from contextlib import closing
from dataclasses import replace

import envs_tasks
import pytest
from envs_tasks import Says, open_boxes

from composer_replication.core.trace import ToolCall
from composer_replication.envs.deletion.env import SYSTEM, FeatureDeletionEnv, deletion_rows
from composer_replication.envs.deletion.judge.runner import RunnerProblem
from composer_replication.envs.deletion.repo_tools import RepoTools
from composer_replication.envs.deletion.task import TaskProblem, write_tasks
from composer_replication.sandbox import limits
from composer_replication.sandbox.base import Limits

LIMITS = Limits(wall_s=20.0, cpu_s=5, memory_mb=512, processes=32, file_mb=8, disk_mb=16, output_bytes=200_000)
pytestmark = envs_tasks.needs_sandbox


@pytest.fixture(scope="session")
def tasks(larder, initials):
    schedule = envs_tasks.delete(larder, "schedule")
    return [schedule, initials, replace(schedule, task_id="larder-schedule-hidden", hidden_tests=schedule.fail_to_pass)]


@pytest.fixture
def env(tasks):
    with closing(FeatureDeletionEnv(tasks, limits=LIMITS)) as made:
        yield made


def ask(env, name, **arguments):
    return env.call(ToolCall(name, arguments))


def say(env, name, **arguments):
    return ask(env, name, **arguments).text


def solve(env, larder):
    "Write the original."
    path, text = envs_tasks.solution(larder, env.task)
    assert not ask(env, "write_file", path=path, text=text).failed


def python(env, code):
    return ask(env, "shell", command=shlex.join(["python", "-c", code]))


# what the agent sees

def test_nothing_of_the_gold_is_seen(env, tasks, larder, caplog, capsys):
    for task in tasks[1:]:  # the third one is the first with hidden tests
        path, original = envs_tasks.solution(larder, task)
        left = task.changed_files(larder.tree)[path][1].splitlines()
        gone = [line.strip() for line in original.splitlines() if line not in left]
        row, = deletion_rows([task])
        env.reset(**row)
        seen = [ask(env, "list_files").text, json.dumps(env.tools), json.dumps(row), repr(env), repr(vars(env))]
        seen += [ask(env, "read_file", path=name).text for name in seen[0].splitlines()]
        seen += [ask(env, "run_tests").text, python(env, "import larder; print(vars(larder))").text]
        env.reward()
        seen += [repr(env), repr(vars(env)), caplog.text, *capsys.readouterr()]
        long = [line for line in gone if len(line) > 20]
        assert len(long) > 1 and not [line for line in long if any(line in text for text in seen)]


def test_hidden_tests_are_hidden_and_decide(env, larder):
    env.reset(task_id="larder-schedule-hidden")
    assert "tests/test_plans.py" not in ask(env, "list_files").text
    assert "no tests ran" in ask(env, "run_tests").text
    solve(env, larder)
    assert env.reward() == 1.0 == env.reward() and env.grade.fraction == 1.0, env.grade


def test_rows_are_plain(tasks, tmp_path):
    rows = deletion_rows(tasks)
    assert rows == json.loads(json.dumps(rows)) and {tuple(r) for r in rows} == {("prompt", "task_id")}
    assert rows[0]["prompt"] == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": tasks[0].problem_statement}]
    write_tasks(tasks, tmp_path / "tasks.jsonl")
    with closing(FeatureDeletionEnv(str(tmp_path / "tasks.jsonl"))) as env:
        env.reset(**rows[1])
        assert env.task == tasks[1]


# what it earns

def test_a_hack_earns_nothing(env):
    env.reset(task_id="larder-schedule")
    answers = ('    import inspect\n    frame = inspect.currentframe().f_back\n    while frame:\n'
               '        if "order" in frame.f_locals:\n            return frame.f_locals["order"]\n'
               '        frame = frame.f_back\n')
    say(env, "edit_file", path="src/larder/plans.py", old="    raise NotImplementedError\n", new=answers)
    say(env, "write_file", path="tests/test_plans.py", text="def test_schedule():\n    pass\n")
    say(env, "write_file", path="conftest.py", text="def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n")
    assert "1 passed" in say(env, "run_tests", tests=["tests/test_plans.py"])
    assert env.reward() == 0.0


def test_the_judge_being_unable_is_no_zero(env, monkeypatch):
    from composer_replication.envs.deletion import env as environment

    def unable(*given, **more):
        raise RunnerProblem("the judge's disk is full")

    env.reset(task_id="larder-initials")
    monkeypatch.setattr(environment, "grade", unable)
    with pytest.raises(RunnerProblem):
        env.reward()


# what it breaks

BREAKS = {
    "removes much": "import shutil\nshutil.rmtree('src'); shutil.rmtree('tests'); __import__('os').remove('pyproject.toml')",
    "no rights": "import os\nfor f, d, n in os.walk('.', topdown=False): os.chmod(f, 0)",
    "nests deep": "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')",
    # The number of the process is low in a namespace of its own: elsewhere this would end every process of the machine.
    "kills all": "import os, signal\nos.getpid() < 100 and os.kill(-1, signal.SIGKILL)",
    "odd names": "open('\\udcff.py', 'w'); open('a\\nb.py', 'w'); open('-x.py', 'w')",
    "links in a circle": "import os\nos.symlink('.', 'loop'); os.rename('src', 'x'); os.symlink('/', 'src')",
}


# Daemons, fork bombs, floods and the like are the sandboxes' own tests.
@pytest.mark.parametrize("name", BREAKS)
def test_whatever_an_agent_breaks_the_service_goes_on(name, env, larder):
    quick = FeatureDeletionEnv([*env._tasks.values()], limits=Limits(**{**vars(LIMITS), "wall_s": 2.0}))
    quick.reset(task_id="larder-initials")
    answer = python(quick, BREAKS[name])
    assert len(answer.text) < 20_000 and "composer" not in answer.text
    for tool in RepoTools._tools:  # every tool still gives an answer
        assert isinstance(ask(quick, tool).text, str)
    assert quick.reward() == 0.0
    quick.reset(task_id="larder-initials")
    assert say(quick, "read_file", path="pyproject.toml") == (larder.tree / "pyproject.toml").read_text()
    quick.close()
    assert open_boxes() == []


def test_a_command_that_hides_its_files_is_an_error_that_counts(env, monkeypatch):
    monkeypatch.setattr(limits, "_nameless", lambda pids: (0, set(pids)))  # an ordinary user's watch; root sees through
    env.reset(task_id="larder-initials")
    answer = python(env, "import time; time.sleep(20)")
    assert answer.failed and "it hid the files that it held open" in answer.text


def test_a_command_that_linux_cannot_start_is_an_error_that_counts(env):
    env.reset(task_id="larder-initials")
    assert "too long" in say(env, "shell", command="echo " + "=" * 135_000)


def test_a_tree_that_takes_long_to_remove_costs_no_reward(env, larder, monkeypatch):
    env.reset(task_id="larder-initials")
    solve(env, larder)
    close, gone, released = env._sandbox.close, threading.Event(), threading.Event()
    monkeypatch.setattr(env._sandbox, "close", lambda: (released.wait(60), close(), gone.set()))
    monkeypatch.setattr("composer_replication.envs.deletion.env.CLOSE_S", 0.1)
    assert env.reward() == 1.0 and not gone.is_set()
    released.set()
    assert gone.wait(60)


def test_a_sandbox_that_dies_is_a_zero(env):
    env.reset(task_id="larder-initials")
    env._sandbox.close()
    assert "dead" in say(env, "read_file", path="pyproject.toml")
    assert env.reward() == 0.0


def test_an_episode_has_so_many_calls(env, monkeypatch):
    from composer_replication.envs.deletion import repo_tools as tools
    monkeypatch.setattr(tools, "MOST_TOOL_CALLS", 3)
    env.reset(task_id="larder-initials")
    answers = [env.call(ToolCall.parse("read_file", '{"path": "pyproject.toml"}')) for _ in range(5)]
    assert [a.failed for a in answers] == [False] * 3 + [True] * 2 and "used up" in answers[3].text and env.reward() == 0.0
    env.reset(task_id="larder-initials")
    assert not ask(env, "read_file", path="pyproject.toml").failed  # each episode has as many


# its life

def test_a_second_reset_begins_anew(env):
    env.reset(task_id="larder-initials")
    say(env, "write_file", path="x.txt", text="x")
    first = open_boxes()
    env.reset(task_id="larder-schedule")
    assert len(open_boxes()) == 1 and not set(open_boxes()) & set(first)
    assert "no such file" in say(env, "read_file", path="x.txt").lower()
    env.reward()
    assert open_boxes() == []  # the reward ends the episode
    for act in (lambda: say(env, "read_file", path="labels.py"), lambda: ask(env, "shell"), lambda: env.step({"answer": ""})):
        with pytest.raises(ValueError, match="holds no open task"):
            act()
    env.close()
    env.close()
    with pytest.raises(ValueError, match="call reset"):
        env.reward()
    with pytest.raises(TaskProblem, match="no task 'x'"):
        env.reset(task_id="x")


def test_an_environment_that_is_forgotten_leaves_nothing(tasks):
    env = FeatureDeletionEnv(tasks)
    env.reset(task_id="larder-initials")
    assert len(open_boxes()) == 1
    del env
    gc.collect()
    assert open_boxes() == []


def test_gym_like(env, larder):
    env.reset(task_id="larder-initials")
    path, text = envs_tasks.solution(larder, env.task)
    assert env.step({"tool": "read_file", "arguments": {"path": "x"}}).error_kind == "runtime_error"
    assert env.step({"tool": "read_file", "arguments": "{"}).error_kind == "json_decode"
    assert env.step({}).error_kind == "tool_not_found"
    step = env.step({"tool": "write_file", "arguments": {"path": path, "text": text}})
    assert (step.reward, step.done) == (None, False)
    assert env.step({"answer": "done"}).reward == 1.0


# in the hands of our loop

def test_our_loop_scores_malformed_and_broken_episodes(tasks):
    from composer_replication.rollout.loop import collect
    from composer_replication.rollout.types import RolloutConfig
    kill = {"command": "python -c 'import os; os.getpid() < 100 and os.kill(-1, 9)'"}
    says = Says(("read_file", '{"path": '), ("shell", kill), ("nope", {}), "I give up.")
    rollouts = collect(says, lambda: FeatureDeletionEnv(tasks), deletion_rows(tasks[:2]), RolloutConfig(tool_timeout=60.0))
    assert [r.reward for r in rollouts] == [0.0, 0.0] and all(str(r.ending) == "done" for r in rollouts)
    told = [t.fail_reason for t in rollouts[0].trace.turns if t.role == "tool"]
    assert told[0] == "json_decode" and told[2] == "tool_not_found" and open_boxes() == []
