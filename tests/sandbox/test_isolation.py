"Without a sandbox nothing runs that a model or an agent wrote, at any door, unless the user allows it."
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.core.errors import InputProblem
from composer_replication.envs.deletion.env import FeatureDeletionEnv, find_tasks
from composer_replication.envs.deletion.judge.grading import grade
from composer_replication.envs.deletion.subject import subject_of
from composer_replication.envs.deletion.task import read_tasks
from composer_replication.recipes.checks import sandbox_missing
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.sandbox import base
from composer_replication.sandbox.base import (
    SandboxProblem,
    isolation_problem,
    open_sandbox,
    sandbox_choice,
    sandbox_kinds,
    task_problem,
)

DELETION = {"task": "deletion", "tasks": "larder", "split": "task"}
AGENT = {"task": "sql", "agent": "{command: 'true'}"}


@pytest.fixture(autouse=True)
def no_sandbox(monkeypatch):
    "A machine on which no kind that isolates works, and a user who allowed nothing."
    monkeypatch.delenv(base.CHOICE, raising=False)
    sandbox_kinds()
    gone = {name: replace(kind, problem=lambda: "it is missing.") for name, kind in base._KINDS.items()
            if kind.isolates}
    monkeypatch.setattr(base, "_KINDS", base._KINDS | gone)


@pytest.fixture
def task():
    return read_tasks(find_tasks("larder"))[0]


def refused(what, exc=SandboxProblem):
    with pytest.raises(exc, match="would run as this user, since no sandbox works here") as raised:
        what()
    assert "--unsafe-local" in str(raised.value) and "sandbox: local-unsafe" in str(raised.value)


def test_a_sandbox_of_any_kind(tmp_path):
    refused(lambda: open_sandbox(tmp_path))
    with pytest.warns(UserWarning, match="own code runs as this user"), open_sandbox(tmp_path, own_code=True) as box:
        assert box.exec(["true"]).exit_code == 0
    with sandbox_choice("local-unsafe"), open_sandbox(tmp_path) as box:
        assert "UNSAFE" in repr(box)
    assert isolation_problem("x") and not isolation_problem("x", kind="local-unsafe")


def test_the_judge_and_the_environment(task):
    refused(lambda: grade(task, subject_of(task), {}))
    env = FeatureDeletionEnv([task])
    refused(lambda: env.reset(task.task_id))
    refused(lambda: FeatureDeletionEnv([task], kind="docker").reset(task.task_id))  # whose judge would not be isolated
    assert grade(task, subject_of(task), {}, unsafe_local=True).reward == 0.0


@pytest.mark.parametrize("settings", [DELETION, AGENT])
def test_training(settings, tmp_path):
    settings = settings | {"output_dir": str(tmp_path / "run"), "model": "embedded", "max_steps": "1"}
    refused(lambda: run_recipe(load_recipe("toy", settings)))
    assert not (tmp_path / "run").exists()
    assert sandbox_missing(load_recipe("toy", settings | {"sandbox": "local-unsafe"})) is None
    with pytest.raises(InputProblem, match="sandbox"):
        load_recipe("toy", settings | {"sandbox": "bare"})


def test_a_kind_that_is_named_has_to_work(monkeypatch):
    "Another one that works does not stand in for it, and a judge needs bubblewrap beside any kind."
    def works(*kinds):
        problem = lambda name: None if name in kinds else "it is missing."
        known = {name: replace(kind, problem=partial(problem, name)) for name, kind in base._KINDS.items()
                 if kind.isolates}
        monkeypatch.setattr(base, "_KINDS", base._KINDS | known)

    works("bubblewrap")
    assert task_problem(False, agent=True) is None and task_problem(True) is None
    assert task_problem(False, agent=True, kind="docker") and task_problem(False, kind="docker") is None
    works("docker")
    assert task_problem(False, agent=True) is None and task_problem(True) and task_problem(True, kind="docker")


def test_recipes_of_our_own_worlds_need_none():
    assert all(sandbox_missing(load_recipe("toy", {"task": name})) is None for name in ("toy", "sql"))


def test_commands(tmp_path):
    (tasks := tmp_path / "tasks.jsonl").write_text(find_tasks("larder").read_text())
    doors = (["eval", "embedded", "--task", "deletion", "--tasks", str(tasks)],
             ["tasks", "attack", str(tasks), "--limit", "1"])
    for words in doors:
        done = CliRunner().invoke(app, words + ["--out", str(tmp_path / "out")] * (words[0] == "eval"))
        assert done.exit_code != 0 and "sandbox" in done.output and "it is missing" in done.output
    assert not (tmp_path / "out").exists()
