"Agents that nobody here wrote, played as rollouts: how they end, what is scored, and that nothing of them goes on."

import os
import time
import warnings
from pathlib import Path

import pytest

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import ToolCall, Turn
from composer_replication.rollout.agents import Agent, AgentFactory
from composer_replication.rollout.loop import collect
from composer_replication.rollout.record import RecordedEpisode
from composer_replication.rollout.types import Ending, RolloutConfig
from composer_replication.sandbox.base import open_sandbox

ASK = """
import json, os, pathlib, sys, time, urllib.request

def ask(url, key, model, n):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": str(n)}]}).encode()
    request = urllib.request.Request(url + "/chat/completions", body,
                                     {"Content-Type": "application/json", "Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def play(url, key, model, workspace, prompt):
    kind = prompt.strip()
    pathlib.Path(workspace, "answer.txt").write_text("1")
    for n in range({"greedy": 9, "silent": 0}.get(kind, 1)):
        ask(url, key, model, n)
    if kind == "crashing":
        raise SystemError("I broke")
    if kind == "hanging":
        time.sleep(600)
    if kind == "killed":
        os.kill(os.getpid(), 9)
    if kind == "elsewhere":
        ask(url.rpartition("/e/")[0] + "/e/1/v1", key, model, 5)
"""


class Script:
    name, patience, asked = "script", 60.0, 0

    def reply(self, trace, sampling, limit, seed):
        self.asked += 1
        return Turn("assistant", f"said {trace.turns[-1].content}", tool_calls=()), False, 2


class Workspace:
    "A folder of a sandbox; it earns what stands in its answer."

    tools, mounts, closed = (), {}, 0

    def __init__(self, tree):
        self.tree = tree

    def reset(self, **row):
        if row["prompt"] == "broken":
            raise OSError("no disk")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.sandbox = open_sandbox(self.tree, kind="local-unsafe", mounts=self.mounts)

    def call(self, call: ToolCall):
        raise AssertionError("an agent has tools of its own")

    def reward(self, answer=""):
        return float(self.sandbox.read("answer.txt"))

    def close(self):
        Workspace.closed += 1
        if hasattr(self, "sandbox"):
            self.sandbox.close()


@pytest.fixture
def factory(tmp_path):
    for name in ("tree", "agent"):
        (tmp_path / name).mkdir()
    (tmp_path / "agent" / "mine.py").write_text(ASK)
    return AgentFactory(
        lambda: Workspace(tmp_path / "tree"), Agent("mine:play", str(tmp_path / "agent"), seconds=120), tmp_path / "log"
    )


def test_every_way_to_end(factory, tmp_path):
    kinds = ["good", "greedy", "crashing", "killed", "silent", "elsewhere", "broken"]
    before = Workspace.closed
    rollouts = collect(
        Script(), factory, [{"prompt": kind, "task_id": kind} for kind in kinds], RolloutConfig(max_turns=3, max_tokens=100)
    )
    found = {kind: (r.ending, r.reward, len(r.trace.sampled_turns)) for kind, r in zip(kinds, rollouts)}
    assert found == {
        "good": (Ending.DONE, 1.0, 1),
        "greedy": (Ending.TURNS, 1.0, 3),
        "crashing": (Ending.DONE, 1.0, 1),
        "killed": (Ending.DONE, 1.0, 1),
        "silent": (Ending.ERROR, None, 0),
        "elsewhere": (Ending.DONE, 1.0, 1),
        "broken": (Ending.ERROR, None, 0),
    }
    problems = dict(zip(kinds, (r.problem for r in rollouts)))
    assert (
        "I broke" in problems["crashing"]
        and "code 137" in problems["killed"]
        and "asked the model nothing" in problems["silent"]
    )
    assert "401" in problems["elsewhere"] and "no disk" in problems["broken"]  # another episode's path wants another key
    assert Workspace.closed - before >= len(kinds) and "I broke" in (tmp_path / "log" / "crashing-0.log").read_text()


def test_an_unscored_episode_says_which_why_and_where_its_log_lies(factory, tmp_path, caplog):
    rows = [{"prompt": kind, "task_id": kind} for kind in ("good", "silent", "broken")]
    collect(Script(), factory, rows, RolloutConfig(max_turns=3))
    silent, broken = sorted((r.getMessage() for r in caplog.records if "unscored" in r.getMessage()), reverse=True)
    assert "episode silent-0 is unscored (error): the agent asked the model nothing" in silent
    assert silent.endswith(f"lies in {tmp_path / 'log' / 'silent-0.log'}") and (tmp_path / "log" / "silent-0.log").is_file()
    assert "episode broken-0 is unscored (error): reset raised OSError: no disk" in broken and "output" not in broken


def test_an_agent_that_hangs_is_ended_and_scored(factory):
    for seconds in (4, 32, 256):  # as many as this machine needs to start it
        factory.agent = Agent("mine:play", factory.agent.path, seconds=seconds)
        (rollout,) = collect(Script(), factory, [{"prompt": "hanging"}], RolloutConfig(max_turns=3))
        if rollout.reward is not None:
            break
    assert (rollout.ending, rollout.reward) == (Ending.LIMIT, 1.0) and "limit of wall" in rollout.problem


def test_a_stop_ends_agents_at_once(factory):
    policy = Script()
    (rollout,) = collect(policy, factory, [{"prompt": "hanging"}], RolloutConfig(max_turns=3), stop=lambda: policy.asked)
    assert rollout.ending is Ending.STOPPED and rollout.reward is None


def test_ctrl_c_ends_agents_at_once(factory):
    "Two run and one waits for a place; none of them goes on."
    policy, start, before = Script(), time.monotonic(), Workspace.closed

    def stop():
        if policy.asked == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(policy, factory, [{"prompt": "hanging"}] * 3, RolloutConfig(max_turns=3, tool_workers=2), stop=stop)
    assert time.monotonic() - start < 120 and Workspace.closed >= before + 2  # its limit: 120 s, twice


def test_counting_tokens_needs_a_key(factory):
    "A path without an episode is closed to an agent, too."
    (Path(factory.agent.path) / "mine.py").write_text(
        ASK
        + """
import urllib.error

def probe(url, key, model, workspace, prompt):
    ask(url, key, model, 0)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "a"}]}).encode()
    request = urllib.request.Request(url.rpartition("/e/")[0] + "/v1/messages/count_tokens", body,
                                     {"Content-Type": "application/json", "x-api-key": key})
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        pathlib.Path(workspace, "answer.txt").write_text(str(error.code))
"""
    )
    factory.agent = Agent("mine:probe", factory.agent.path, seconds=120)
    (rollout,) = collect(Script(), factory, [{"prompt": "a"}], RolloutConfig(max_turns=3))
    assert rollout.reward == 401.0, rollout.problem


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"command": ""}, "name a command"),
        ({"command": "x {y}"}, "cannot be read"),
        ({"command": "x 'y"}, "cannot be read"),
        ({"command": "x", "seconds": 0}, "bounds above 0"),
    ],
)
def test_agents_that_cannot_be(settings, said):
    with pytest.raises(InputProblem, match=said):
        Agent(**settings)


def test_an_agent_that_is_not_installed():
    with pytest.raises(InputProblem, match="'/nowhere' is no folder; install the agent there"):
        AgentFactory(Workspace, Agent("x", "/nowhere"))


def test_an_environment_without_a_workspace(factory):
    from composer_replication.envs.toy.env import WorldEnv, world_rows

    factory.factory = WorldEnv
    with pytest.raises(InputProblem, match="gives an agent no workspace"):
        collect(Script(), factory, world_rows(1, 0, "test"), RolloutConfig())


SQL = (
    ASK
    + """
import sqlite3

def answer(url, key, model, workspace, prompt):
    kind, _, rest = prompt.partition("\\n")
    assert "answer.sql" in rest
    place = pathlib.Path(workspace, "answer.sql")
    tables = sqlite3.connect(pathlib.Path(workspace, "database.db")).execute("SELECT name FROM sqlite_master").fetchall()
    said = ask(url, key, model, f"{kind} {sorted(tables)}")
    if kind == "folder":
        place.mkdir()
    elif kind == "link":
        place.symlink_to("database.db")
    elif kind != "nothing":
        place.write_bytes({"bytes": b"\\xff\\0", "long": b"SELECT 1 --" + b"x" * 10**6}.get(kind, said.encode()))
"""
)


def test_an_agents_answer_to_a_question_about_a_database(factory):
    "Its folder holds the database; what it leaves in answer.sql is judged as the last query of our own loop is."
    from composer_replication.envs.sql.env import SqlEnv
    from composer_replication.envs.sql.tasks import sql_rows, task_of

    (row,) = sql_rows(1, 0, "train", ["easy"])
    task = task_of(row["task_id"])

    class Answers(Script):
        def reply(self, trace, sampling, limit, seed):
            asked = trace.turns[-1].content
            assert all(table.name in asked for table in task.schema.tables)
            return Turn("assistant", task.reference + ";" if asked.startswith("right") else "SELECT 'wrong'"), False, 2

    factory.factory, factory.agent = SqlEnv, Agent("mine:answer", factory.agent.path, seconds=120)
    (Path(factory.agent.path) / "mine.py").write_text(SQL)
    earned = {"right": 1.0, "wrong": 0.0, "nothing": 0.0, "folder": 0.0, "link": 0.0, "bytes": 0.0, "long": 0.0}
    rollouts = collect(Answers(), factory, [row | {"prompt": f"{kind}\n"} for kind in earned], RolloutConfig())
    assert {kind: r.reward for kind, r in zip(earned, rollouts)} == earned, [r.problem for r in rollouts]
    assert all(r.ending is Ending.DONE and not r.problem for r in rollouts)


def test_our_own_loop_opens_no_folder():
    from composer_replication.envs.sql.env import SqlEnv
    from composer_replication.envs.sql.tasks import sql_rows

    environment = SqlEnv()
    assert environment.reset(**sql_rows(1, 0, "train", ["easy"])[0]) is None and environment.sandbox is None


def shipped(name, folder):
    "The agent of a shipped recipe, installed in a folder. Skips where it is not, or where there is no bubblewrap."
    from composer_replication.recipes.recipe import load_recipe
    from composer_replication.sandbox.base import sandbox_problem

    if problem := sandbox_problem("bubblewrap"):
        pytest.skip(problem)
    settings = load_recipe(name, estimating=True).arguments.agent
    return Agent(**settings | {"path": str(folder), "seconds": 300})


def test_mini_swe_agent_brings_a_feature_back(tmp_path):
    "In bubblewrap, on a task of larder: the model is a script that writes the file as it was."
    path = os.environ.get("COMPOSER_AGENTS", "")
    if not Path(path, "minisweagent").is_dir():
        pytest.skip("COMPOSER_AGENTS names no folder with mini-swe-agent; make test-agents installs it")
    agent = shipped("agent-mini-swe", path)
    from composer_replication.core.environment import TasksWanted
    from composer_replication.envs.deletion.env import FeatureDeletionEnv
    from composer_replication.envs.deletion.subject import subject_of

    brought = FeatureDeletionEnv.task_set(TasksWanted("larder", None, 4, 0, 0))
    row = brought.rows[0]
    task = brought.environment()._tasks[row["task_id"]]
    subject = subject_of(task, None)
    commands = [
        f"cat > {name} <<'EOF_EOF'\n{(subject.tree / name).read_text()}EOF_EOF" for name in task.changed_files(subject.tree)
    ]
    commands += ["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]

    class Solves(Script):
        def reply(self, trace, sampling, limit, seed):
            n = sum(t.role == "assistant" for t in trace.turns)
            return Turn("assistant", "Next.", tool_calls=(ToolCall("bash", {"command": commands[n]}),)), False, 20

    (rollout,) = collect(
        Solves(), AgentFactory(brought.environment, agent, tmp_path), [row], RolloutConfig(max_turns=9, tool_timeout=120)
    )
    assert (rollout.ending, rollout.reward, rollout.problem) == (Ending.DONE, 1.0, "") and not rollout.trace.segments
    assert [c.name for t in rollout.trace.turns for c in t.tool_calls] == ["bash"] * len(commands)


@pytest.mark.parametrize(
    "name, program, tool, argument, segments",
    [
        ("agent-codex", "bin/codex", "exec_command", "cmd", 1),
        ("agent-opencode", "bin/opencode", "bash", "command", 2),
        ("agent-claude-code", "claude-code-linux-*/claude", "Bash", "command", 1),
    ],
)
def test_agents_from_npm_answer_a_question(name, program, tool, argument, segments, tmp_path):
    "In bubblewrap, on a task of sql, with the recipe's command, behind a script. opencode asks for a title in another context."
    from composer_replication.envs.sql.env import SqlEnv
    from composer_replication.envs.sql.tasks import sql_rows, task_of

    found = [
        file.parents[file.parent.name == "bin"]
        for file in Path(os.environ.get("COMPOSER_AGENTS_NPM") or "/nowhere").glob(f"**/{program}")
        if file.is_file() and "baseline" not in str(file) and file.stat().st_size > 2**20
    ]
    if not found:
        pytest.skip(f"COMPOSER_AGENTS_NPM names no folder with {program}; make test-agents installs it")
    (row,) = sql_rows(1, 0, "train", ["easy"])
    reference = task_of(row["task_id"]).reference

    class Solves(Script):
        def reply(self, trace, sampling, limit, seed):
            if tool not in trace.tool_names or any(t.role == "tool" for t in trace.turns):
                return Turn("assistant", "Done."), False, 2
            command = f"printf %s '{reference.replace(chr(39), chr(34))}' > answer.sql"
            given = {argument: command} | ({} if argument == "cmd" else {"description": "writes"})
            return Turn("assistant", "I write it.", tool_calls=(ToolCall(tool, given),)), False, 9

    (rollout,) = collect(
        Solves(), AgentFactory(SqlEnv, shipped(name, found[0]), tmp_path), [row], RolloutConfig(tool_timeout=120)
    )
    assert (rollout.ending, rollout.reward, rollout.problem) == (Ending.DONE, 1.0, "")
    assert len(rollout.trace.parts()) == segments and [c.name for t in rollout.trace.turns for c in t.tool_calls] == [tool]


def test_a_recipe_names_an_agent(tmp_path):
    from types import SimpleNamespace

    from composer_replication.recipes.load import episode_factory
    from composer_replication.recipes.recipe import load_recipe
    from composer_replication.recipes.recipe_file import RecipeProblem

    brought = SimpleNamespace(brought=SimpleNamespace(environment=Workspace))
    settings = {"command": "mine:play", "seconds": 5}
    recipe = load_recipe("toy", {"agent": "{command: mine:play, seconds: 5}", "output_dir": str(tmp_path)})
    factory = episode_factory(recipe, brought)
    assert factory.factory is Workspace and factory.agent == Agent(**settings) and factory.log == tmp_path / "agents"
    assert episode_factory(load_recipe("toy"), brought) is Workspace
    wrongs = {"{comand: x}": "its keys are command, path", "{command: x [y}": "YAML", "{command: ''}": "name a command"}
    for wrong, said in wrongs.items():
        with pytest.raises((RecipeProblem, InputProblem), match=said):
            load_recipe("toy", {"agent": wrong})


CONNECTIONS = """
import http.client, json, socket, urllib.parse

def play(url, key, model, workspace, prompt):
    place = urllib.parse.urlsplit(url)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    idle = [socket.create_connection((place.hostname, place.port)) for _ in range(%d)]
    with open(workspace + "/answer.txt", "w") as answer:
        for connection in [*idle[:2], None]:
            asked = http.client.HTTPConnection(place.hostname, place.port, timeout=20)
            asked.sock = connection
            asked.request("POST", place.path + "/chat/completions", body, headers)
            assert asked.getresponse().status == 200
        answer.write(open("/proc/%%d/status" %% __import__("os").getppid()).read().split("Threads:")[1].split()[0])
"""


@pytest.mark.parametrize("count", [6, 40, 300])
def test_an_agent_may_hold_many_connections_at_once(factory, count):
    "What carries them is one event loop: no thread a connection."
    (Path(factory.agent.path) / "mine.py").write_text(CONNECTIONS % count)
    (rollout,) = collect(Script(), factory, [{"prompt": "hi"}], RolloutConfig(max_turns=9))
    assert (rollout.ending, rollout.problem) == (Ending.DONE, "") and rollout.reward <= 3


def test_keys_of_episodes_begin_like_no_option(factory, monkeypatch):
    seen = []
    monkeypatch.setattr("composer_replication.rollout.agents.RecordedEpisode",
                        lambda *given: seen.append(given[-1]) or RecordedEpisode(*given))
    for _ in range(20):
        collect(Script(), factory, [], RolloutConfig()), collect(Script(), factory, [{"prompt": "broken"}] * 8, RolloutConfig())
    assert len(set(seen)) == 160 and all(key.isalnum() and key.isascii() for key in seen)
