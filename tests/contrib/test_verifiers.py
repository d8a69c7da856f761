"Our environments as a taskset of verifiers: what is played again, what is read back, and the real one against our loop."
import json
from pathlib import Path

import pytest
import world
from three_loops import Script, play_ours, played_trace
from verifiers_play import play_verifiers

from composer_replication.contrib.verifiers import tasks as verifiers
from composer_replication.contrib.verifiers.tasks import PlayedAgain, Source, Unscored, located, play_again, row_parts
from composer_replication.core.environment import TaskSet
from composer_replication.core.errors import InputProblem
from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import TraceProblem
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows, task_of
from composer_replication.traces.formats.base import read_record
from composer_replication.traces.read import read_traces

VF_EVAL = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "vf-eval"


class Counting:
    "An environment whose answer is how often it was asked."

    tools = ()

    def __init__(self, reward=0.5):
        self.asked, self.closed, self.earned = 0, 0, reward

    def reset(self, **row):
        pass

    def call(self, call):
        self.asked += 1
        return ToolResult(f"{call.name} {json.dumps(call.arguments)} {self.asked}")

    def reward(self, answer=""):
        self.answer = answer
        return self.earned

    def close(self):
        self.closed += 1


def said(*calls, content=None):
    asked = [{"id": key, "name": "f", "arguments": text} for key, text in calls]
    return {"role": "assistant", "content": content, "tool_calls": asked or None}


def told(key, text):
    return {"role": "tool", "tool_call_id": key, "content": text}


def test_calls_are_made_again_in_order_and_differing_answers_are_counted():
    messages = [{"role": "user", "content": "go"}, said(("a", '{"x": 1}'), ("b", "[no")), told("a", 'f {"x": 1} 1'),
                told("b", "other"), said(("c", "{}")), told("c", "f {} 3"), said(content="done")]
    environment = Counting()
    assert play_again(environment, messages) == PlayedAgain(0.5, 3, 1)
    assert environment.answer == "done" and environment.closed == 1


def test_calls_of_different_turns_may_have_one_id():
    messages = [said(("a", "{}")), told("a", "f {} 1"), said(("a", "{}")), told("a", "f {} 2"), said(content="done")]
    assert play_again(Counting(), messages) == PlayedAgain(0.5, 2, 0)


def test_a_task_without_tools_is_no_taskset(monkeypatch):
    monkeypatch.setattr(verifiers, "task_set", lambda name, wanted: TaskSet(()))
    with pytest.raises(InputProblem, match="'riddle' is answered in one turn, without tools; take an environment with tools"):
        Source("riddle").task_set()


def test_an_episode_that_cannot_be_scored_counts_neither_way():
    environment = Counting(reward=None)
    with pytest.raises(Unscored, match="could not score the episode"):
        play_again(environment, [said(content="done")])
    assert environment.closed == 1


def test_a_row_is_split_and_joined():
    row = {"prompt": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}], "task_id": "1", "size": "small"}
    assert row_parts(row) == ("A", [{"role": "user", "content": "B"}], {"task_id": "1", "size": "small"})
    assert row_parts(row | {"prompt": row["prompt"][1:]})[0] is None


def test_tasks_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").touch()
    assert located("mine.jsonl") == str(tmp_path / "mine.jsonl")
    assert (located("easy,medium"), located(None)) == ("easy,medium", None)
    with pytest.raises(InputProblem):
        Source("deletion").task_set()


NODE = {"message": {"role": "user", "content": "go"}}


@pytest.mark.parametrize("changes, why", [
    ({"nodes": [NODE, {"parent": 1, "message": NODE["message"]}]}, "message 1 comes after message 1"),
    ({"nodes": [NODE, {"parent": True, "message": NODE["message"]}]}, "which is none before it"),
    ({"nodes": []}, "no messages"),
    ({"nodes": [{"parent": None}]}, "message"),
    ({"agent": None}, "NoneType"),
])
def test_a_damaged_record_of_verifiers_is_a_problem_and_no_crash(changes, why):
    record = {"verifiers": {}, "id": "e", "task": {"data": {}}, "agent": {"config": {}}, "nodes": [NODE]} | changes
    with pytest.raises(TraceProblem, match=why):
        read_record(record)


def test_the_way_to_the_last_message_is_read_and_rewards_are_weighted(tmp_path):
    nodes = [NODE, {"parent": 0, "message": {"role": "assistant", "content": "left"}},
             {"parent": 0, "message": said(("a", "{}"))}, {"parent": 2, "message": told("a", "x")}]
    trace = {"verifiers": {}, "id": "e", "task": {"data": {"id": "t"}}, "agent": {"config": {"model": "m"}}, "nodes": nodes,
             "rewards": {"one": {"score": 1.0, "weight": 2.0}, "two": {"score": 0.5}, "three": None}}
    episode = {"ok": True, "traces": [trace, trace | {"id": "f", "rewards": {"one": None}}]}
    (tmp_path / "traces.jsonl").write_text(json.dumps(episode) + "\n")
    first, second = read_traces(tmp_path / "traces.jsonl", strict=True)
    assert (first.trace_id, first.task_id, first.model, first.reward, second.reward) == ("e", "t", "m", 2.5, None)
    assert [turn.content for turn in first.turns] == ["go", "", "x"] and first.format == "verifiers"


@pytest.mark.skipif(not VF_EVAL.exists(), reason="no .venv-verifiers: make verifiers")
def test_verifiers_plays_as_our_loop_does(tmp_path):
    source = Source("sql", "easy", rows=2, seed=3)
    first, second = rows = sql_rows(2, 3, "train", ("easy",))
    assert [row["task_id"] for row in source.task_set().rows] == [row["task_id"] for row in rows]
    right = {"sql": task_of(first["task_id"]).reference}
    scripts = {first["task_id"]: Script((("tables", {}), ("query", {"sql": "SELEC"}), ("query", right)), "It ran."),
               second["task_id"]: Script((("describe", {"name": "x"}), ("query", {"sql": "SELECT 1"})), "1")}
    traces = {trace.task_id: played_trace(trace) for trace in play_verifiers(VF_EVAL, source, scripts, tmp_path)}
    assert traces == {row["task_id"]: play_ours(SqlEnv, row, scripts[row["task_id"]], world.tokenizer()) for row in rows}
    assert sorted(played.reward for played in traces.values()) == [0.0, 1.0]
