"""Tasks of a recipe: what a split keeps apart, against a plain oracle; one's own environment; a real run on deletion tasks."""
import json
import os
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import yaml
from forks import composer
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.core.environment import TaskSet, TasksWanted
from composer_replication.envs.deletion.env import FeatureDeletionEnv, find_tasks
from composer_replication.envs.deletion.task import read_tasks, write_tasks
from composer_replication.recipes import tasks as tasks_module
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.recipes.tasks import RunTasks, keep_split, recipe_tasks, split_rows
from composer_replication.sandbox.base import sandbox_kinds, sandbox_problem
from composer_replication.training.checkpoint import mark_complete

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
EVAL = dict(eval_strategy="steps", eval_steps=1)
SMALL = dict(model="embedded", max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=256,
             max_turns=2, max_turn_tokens=64, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
             logging_steps=1)


def write(folder, **values):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(SMALL | values))
    return path


# The split

def meet(one, other):
    "Two symbols, spelled out: equal, or one inside the other."
    a, b = one.replace(":", ".").split("."), other.replace(":", ".").split(".")
    return one.split(":")[0] == other.split(":")[0] and a[:len(b)] == b[:len(a)]


ROWS = st.lists(st.fixed_dictionaries({
    "task_id": st.uuids().map(str), "prompt": st.sampled_from("abcdefgh").map(lambda text: [{"role": "user", "content": text}]),
    "repository": st.sampled_from("xyz"), "created_at": st.sampled_from(["2024-01", "2025-06", "2026-02"]),
    "parts": st.lists(st.sampled_from(["m:f", "m:C", "m:C.g", "m:C.g.h", "m:Cx", "n:f"]), min_size=1, max_size=2)}),
    min_size=2, max_size=9, unique_by=lambda r: r["task_id"])


@pytest.mark.filterwarnings("ignore:held_out_rows")
@settings(max_examples=150)
@given(ROWS, st.sampled_from(["repository", "time", "task"]), st.sampled_from([1, 2, 3, 0.2, 0.5]), st.integers(0, 3))
def test_no_group_is_on_both_sides(rows, split, held_out, seed):
    try:
        train, out = split_rows(rows, split, held_out, seed)
    except RecipeProblem:
        return
    assert train and out and sorted(r["task_id"] for r in [*train, *out]) == sorted(r["task_id"] for r in rows)
    for a in train:
        for b in out:
            if split == "repository":
                assert a["repository"] != b["repository"]
            elif split == "time":
                assert a["created_at"] < b["created_at"]
            else:
                assert a["prompt"] != b["prompt"]
                assert a["repository"] != b["repository"] or not any(meet(x, y) for x in a["parts"] for y in b["parts"])
    assert split_rows(rows[::-1], split, held_out, seed)[1][::-1] == out or split == "task"


def test_a_split_holds_out_what_was_asked_where_it_can():
    rows = [{"task_id": str(i), "prompt": str(i), "repository": f"r{i // 4}"} for i in range(20)]
    assert len(split_rows(rows, "repository", 0.4, 0)[1]) == 8
    assert len(split_rows(rows, "task", 0.25, 0)[1]) == 5 and len(split_rows(rows, "task", 7, 0)[1]) == 7
    draws = {tuple(r["task_id"] for r in split_rows(rows, "task", 3, seed)[1]) for seed in range(6)}
    assert len(draws) > 3


@pytest.mark.parametrize("sizes, asked, out", [  # from the latest on
    ([3, 40, 3], 5, 3), ([3, 2, 40], 4, 5), ([3, 4, 40], 4, 3), ([1, 9, 1, 9], 8, 10), ([1, 11, 1, 9], 6, 1), ([12, 9], 2, 12)])
def test_a_split_by_time_takes_no_older_tasks_than_bring_it_nearer_to_what_was_asked(sizes, asked, out):
    dates = [f"2026-{12 - n:02}" for n, size in enumerate(sizes) for _ in range(size)]
    rows = [{"task_id": str(i), "prompt": str(i), "created_at": date} for i, date in enumerate(dates)]
    with pytest.warns(UserWarning, match="held_out_rows") if out > asked else nullcontext():
        train, held = split_rows(rows, "time", asked, 0)
    assert len(held) == out and max(row["created_at"] for row in train) < min(row["created_at"] for row in held)


def test_more_held_out_than_asked_is_told_in_one_sentence(tmp_path, monkeypatch):
    rows = [{"task_id": str(i), "prompt": str(i), "repository": f"r{i // 12}"} for i in range(24)]
    monkeypatch.setattr(tasks_module, "task_set", lambda *asked: TaskSet(rows))
    told = ("held_out_rows=0.1 asks for 3 of 24 tasks, and 12 are held out: split='repository' keeps tasks of one repository "
            "together; give more tasks, or set another split.")
    recipe = load_recipe(write(tmp_path, task="toy", held_out_rows=0.1, split="repository", train_rows=4))
    with pytest.warns(UserWarning, match=re.escape(told)):
        held = recipe_tasks(recipe).held_out
    assert len(held) == 12
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        recipe_tasks(load_recipe(write(tmp_path, task="toy", held_out_rows=12, split="repository", train_rows=4)))


def test_everything_held_out_and_one_repository_are_refused():
    rows = [{"task_id": str(i), "prompt": str(i), "repository": "one"} for i in range(3)]
    with pytest.raises(RecipeProblem, match="leaves none of the 3 tasks"):
        split_rows(rows, "task", 3, 0)
    with pytest.raises(RecipeProblem, match="all 3 tasks have the same, one; .* set split to task"):
        split_rows(rows, "repository", 1, 0)


def split_of(train, out):
    return RunTasks([{"task_id": t} for t in train], [{"task_id": t} for t in out], TaskSet(()))


@pytest.mark.parametrize("first, then, said", [
    (("abc", "d"), ("abd", "c"), "holds out 1 tasks that this run would train on, for example d"),
    (("abc", ""), ("ab", "c"), "trained on 1 tasks that this run would hold out, for example c")])
def test_what_one_run_trained_on_another_may_not_hold_out_and_the_other_way_round(tmp_path, first, then, said):
    keep_split(tmp_path, split_of(*first))
    with pytest.raises(RecipeProblem, match=said):
        keep_split(tmp_path, split_of(*then))
    assert json.loads((tmp_path / "split.json").read_text())["held_out"] == [*first[1]]


def test_a_folder_with_weights_remembers_both_sides_of_all_its_runs(tmp_path):
    keep_split(tmp_path, split_of("abcdef", "xyz"))
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "weights").touch()
    mark_complete(tmp_path / "checkpoint-1")
    keep_split(tmp_path, split_of("abc", "x"))
    split = json.loads((tmp_path / "split.json").read_text())
    assert (split["train"], split["held_out"]) == ([*"abcdef"], [*"xyz"])
    with pytest.raises(RecipeProblem, match="holds out 2 tasks"):
        keep_split(tmp_path, split_of("abcyz", "x"))


def test_commits_of_one_repository_are_one_repository(tmp_path):
    def at(commit):
        return replace(task, task_id=f"{commit}", repo=f"owner/name@{commit}" if commit != "d" else "other==1.0")
    task = read_tasks(find_tasks("larder"))[0]
    write_tasks([at(commit) for commit in "abcd"], tmp_path / "t.jsonl")
    rows = FeatureDeletionEnv.task_set(TasksWanted(str(tmp_path / "t.jsonl"), None, 64, 0, 0)).rows
    assert [row["repository"] for row in rows] == ["owner/name"] * 3 + ["other"]


def test_each_row_is_hashed_once(monkeypatch):
    asked = []
    monkeypatch.setattr(tasks_module, "content_hash", lambda row, *fields: asked.append(1) or row["prompt"])
    rows = [{"task_id": str(n), "prompt": str(n % 150)} for n in range(200)]
    train, out = split_rows(rows, "task", 40, 0)
    assert len(asked) == 200 and len(train) + len(out) == 200
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in out}


# Deletion tasks, and what is wrong with them

def test_rows_of_a_task_file_are_its_tasks(tmp_path):
    whole = recipe_tasks(load_recipe(write(tmp_path, task="deletion", tasks="larder", train_rows=21)))
    assert len(whole.train) == 21 and not whole.held_out
    fewer = dict(task="deletion", tasks="larder", train_rows=5, episode_reward={"credit": "share"})
    some = recipe_tasks(load_recipe(write(tmp_path, **fewer)))
    assert len(some.train) == 5 and some.train == recipe_tasks(load_recipe(tmp_path / "mine.yaml")).train
    assert all("patch" not in row and "golden_diff" not in row for row in whole.train)


@pytest.mark.parametrize("changes, said", [
    (dict(tasks="nowhere.jsonl"), "tasks 'nowhere.jsonl' is no file; make one with `composer-rl tasks make`"),
    (dict(tasks="larder", held_out_rows=3, **EVAL),
     "split='repository': all 21 tasks have the same, larder"),
    (dict(tasks="larder", split="time", held_out_rows=3, **EVAL),
     "needs 'created_at' in every task"),
    (dict(task="os:getcwd", tasks="rows.jsonl"), "task 'os:getcwd' makes a str, which has no reset"),
    (dict(task="os:system", tasks="rows.jsonl"), "making an environment ended with TypeError"),
    (dict(task="composer_replication.envs.toy.env:make_world"),
     "brings no tasks of its own; set tasks to a file of JSON lines"),
    (dict(task="toy", tasks="larder"), "task 'toy' makes its own tasks; leave tasks out"),
    (dict(task="toy", held_out_rows=0.5, **EVAL), "held_out_rows=0.5 is a share"),
])
def test_mistakes_in_tasks_are_one_sentence(tmp_path, monkeypatch, changes, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x", "task_id": 1}) + "\n")
    with pytest.raises(ValueError, match=said) as caught:
        recipe_tasks(load_recipe(write(tmp_path, **dict(task="deletion") | changes)))
    assert "\n" not in str(caught.value)


class Scored:
    "Gives a reward and keeps no grade."
    tools = ()

    def reset(self, **row): pass

    def call(self, call): raise AssertionError

    def reward(self, answer=""): return 0.0

    def close(self): pass


@pytest.mark.parametrize("task", ["toy", f"{__name__}:Scored", None])
def test_credit_by_tests_is_refused_before_anything_is_loaded_where_there_is_no_grade(tmp_path, monkeypatch, task):
    own = {}
    if task is None:  # an answer is one turn
        answers = TaskSet([{"prompt": "x", "task_id": "1"}], reward=lambda completions, **row: [0.0] * len(completions))
        monkeypatch.setattr(tasks_module, "task_set", lambda *asked: answers)
    elif ":" in task:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "x", "task_id": n}) + "\n" for n in range(4)))
        own = {"tasks": str(tmp_path / "rows.jsonl"), "alpha_sdpo": 0.0}
    recipe = load_recipe(write(tmp_path, task=task or "toy", train_rows=4, episode_reward={"credit": "share"}, **own))
    with pytest.raises(ValueError, match="credit=share needs an environment that keeps a grade; leave credit out"):
        recipe_tasks(recipe)


# Real runs

def train(*arguments, cwd):
    return composer("train", *arguments, timeout=300, cwd=cwd, env=ENVIRONMENT)


def test_the_command_trains_on_deletion_tasks_and_measures_on_others(tmp_path):
    if all(sandbox_problem(kind) for kind in sandbox_kinds()):
        pytest.skip("no kind of sandbox works here")
    recipe = write(tmp_path, task="deletion", tasks="larder", split="task", held_out_rows=1,
                   **EVAL, max_steps=2,
                   per_device_eval_batch_size=2, num_generations_eval=1)
    done = train("--config", recipe, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["step"] == 2 and [line["reward"] for line in lines if "reward" in line] == [0.0, 0.0]
    assert any("eval_reward" in line for line in lines)
    split = json.loads((tmp_path / "out/mine/split.json").read_text())
    assert len(split["held_out"]) == 1 and len(split["train"]) == 20


OWN = """
from composer_replication.core.tools import ToolResult

class Env:
    tools = ({"type": "function", "function": {"name": "say", "description": "Say it.", "parameters": {"type": "object",
              "properties": {"word": {"type": "string", "description": "A word."}}, "required": ["word"]}}},)
    def reset(self, word, **row): self.word = word
    def call(self, call): return ToolResult("said")
    def reward(self, answer=""): return float(self.word in answer)
    def close(self): pass
"""


def test_an_environment_in_the_current_folder_is_trained_on(tmp_path):
    (tmp_path / "mine_env.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({"prompt": f"Say {w}.", "task_id": w, "word": w}) + "\n" for w in "ab"))
    recipe = write(tmp_path, task="mine_env:Env", tasks="rows.jsonl", train_rows=2)
    done = train("--config", recipe, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 1
