"""`tasks show`: one task by its id or a part of it, names whole, figures in words; what `tasks make` says of its gates."""
import json
import os
from dataclasses import replace
from importlib.resources import files

import pytest
from forks import composer
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.cli.console import ExitCode
from composer_replication.cli.tasks import show_reports
from composer_replication.envs.deletion.task import read_tasks, write_tasks
from composer_replication.envs.deletion.tasks.gates import GATES
from composer_replication.envs.deletion.tasks.make import PackageReport
from composer_replication.envs.deletion.tasks.write_up import DIFFICULTY

SHIPPED = files("composer_replication") / "data" / "repos" / "larder.tasks.jsonl"
FIRST = read_tasks(SHIPPED)[0]


@pytest.mark.parametrize("name", ["cheapest", "plans.cheapest.stub", FIRST.task_id])
def test_a_part_of_the_id_is_enough(name):
    done = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED), name])
    assert done.exit_code == ExitCode.DONE and FIRST.task_id in done.stdout and FIRST.problem_statement.split()[0] in done.stdout


def test_a_whole_id_is_that_task_alone(tmp_path):
    write_tasks([FIRST, replace(FIRST, task_id=f"{FIRST.task_id}.again")], tmp_path / "tasks.jsonl")
    done = CliRunner().invoke(app, ["tasks", "show", str(tmp_path / "tasks.jsonl"), FIRST.task_id, "--json"])
    assert done.exit_code == ExitCode.DONE
    assert [json.loads(line)["task_id"] for line in done.stdout.splitlines()] == [FIRST.task_id]


def test_a_name_that_no_task_has_is_one_sentence():
    done = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED), "nobody"])
    assert done.exit_code == ExitCode.FAILED and "holds no task nobody" in done.stderr


@pytest.mark.parametrize("columns", ["60", "200"])
def test_no_name_is_broken(columns):
    done = composer("tasks", "show", SHIPPED, env=os.environ | {"COLUMNS": columns})
    names = [task.task_id for task in read_tasks(SHIPPED)]
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["task", *names]


def test_hidden_tests_and_held_out_inputs_are_told_apart():
    task = next(task for task in read_tasks(SHIPPED) if task.heldout_records)
    inputs = sum(len(r["came"]) if r["kind"] == "probe" else 1 for r in task.heldout_records)  # what the judge compares
    rows = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED)]).stdout.splitlines()
    assert rows[0].endswith("hidden tests  held-out inputs")
    [row] = [line.split() for line in rows if line.startswith(f"{task.task_id} ")]
    assert row[-2:] == [str(len(task.hidden_tests)), str(inputs)] and inputs >= 4
    shown = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED), task.task_id, "--json"])
    assert json.loads(shown.stdout)["held_out_inputs"] == inputs
    one = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED), task.task_id]).stdout
    assert f"held-out inputs {inputs}" in one and f"hidden tests {len(task.hidden_tests)}" in one


def test_every_figure_of_difficulty_is_said_in_words():
    shown = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED), FIRST.task_id]).stdout
    assert FIRST.difficulty.keys() <= DIFFICULTY.keys()
    for name, figure in FIRST.difficulty.items():
        [line] = [line for line in shown.splitlines() if line.split()[:2] == [name, f"{figure:g}"]]
        assert line.split()[2:8] == DIFFICULTY[name].split()[:6], line


def test_the_gates_that_dropped_something_are_explained_and_no_others(capsys):
    report = lambda dropped: PackageReport("a", tried=3, dropped=dropped)
    show_reports([report({"no evidence": 2}), report({"trivial": 1, "slow": 0})], False)
    said = [line for line in capsys.readouterr().out.splitlines() if line.partition(", ")[0] in GATES]
    assert said == [f"{gate}, {n} dropped: {GATES[gate][0]}" for gate, n in (("trivial", 1), ("no evidence", 2))]
    assert all(words[0].isupper() and words.endswith(".") and ". " not in words for words, _ in GATES.values())
