"""`tasks show`: one task by its id or a part of it, names whole, figures in words; what `tasks make` says while it works."""
import json
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.cli.console import Ending
from composer_replication.cli.tasks import gate_table, now, task_table, watcher
from composer_replication.envs.deletion.task import read_tasks, write_tasks
from composer_replication.envs.deletion.tasks.gates import GATES
from composer_replication.envs.deletion.tasks.make import DIFFICULTY, Report

SHIPPED = files("composer_replication") / "data" / "repos" / "larder.tasks.jsonl"
FIRST = read_tasks(SHIPPED)[0]


@pytest.mark.parametrize("name", ["cheapest", "plans.cheapest.stub", FIRST.task_id])
def test_a_part_of_the_id_is_enough(name):
    done = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED), name])
    assert done.exit_code == Ending.DONE and FIRST.task_id in done.stdout and FIRST.problem_statement.split()[0] in done.stdout


def test_a_whole_id_is_that_task_alone(tmp_path):
    write_tasks([FIRST, replace(FIRST, task_id=f"{FIRST.task_id}.again")], tmp_path / "tasks.jsonl")
    done = CliRunner().invoke(app, ["tasks", "show", str(tmp_path / "tasks.jsonl"), FIRST.task_id, "--json"])
    assert done.exit_code == Ending.DONE and [json.loads(line)["task_id"] for line in done.stdout.splitlines()] == [FIRST.task_id]


def test_a_name_that_no_task_has_is_one_sentence():
    done = CliRunner().invoke(app, ["tasks", "show", str(SHIPPED), "nobody"])
    assert done.exit_code == Ending.FAILED and "holds no task nobody" in done.stderr


LONG = "-".join(["package"] * 8) + ".module.function.stub.0123ab"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_name_is_broken_and_no_line_too_wide(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code = "from composer_replication.cli.app import main; main()"
    words = [sys.executable, "-c", code, "tasks", "show", str(SHIPPED)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    names = [task.task_id for task in read_tasks(SHIPPED)]
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-len(names):]] == names
    assert max(map(len, lines)) <= width


def test_columns_give_way_in_order_and_are_named():
    task = replace(FIRST, task_id=LONG)
    wide, none = task_table([task], 300)
    some, left = task_table([task], len(LONG) + 30)
    alone, all_ = task_table([task], 20)
    names = lambda table: [column.header for column in table.columns]
    assert none == [] and names(wide)[0] == "task" and set(names(wide)[1:]) == set(all_)
    assert {"held-out inputs", "hidden tests"} <= set(names(some)) and set(names(some)) | set(left) == set(names(wide))
    assert names(alone) == ["task"]


def test_hidden_tests_and_held_out_inputs_are_told_apart():
    task = next(task for task in read_tasks(SHIPPED) if task.heldout_records)
    inputs = sum(len(r["came"]) if r["kind"] == "probe" else 1 for r in task.heldout_records)  # what the judge compares
    table, _ = task_table([task], 300)
    row = {column.header: next(iter(column.cells)) for column in table.columns}
    assert row["hidden tests"] == str(len(task.hidden_tests)) and row["held-out inputs"] == str(inputs) and inputs >= 4
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


# `tasks make`: what it says while it works, and after it

def report(**more):
    return Report("./my-package", **{"source": "my-package", "stage": "deleting", "tried": 7, "kept": 6, "candidates": 24,
                                     "last": "my.tally:group_totals stub: kept"} | more)


@pytest.mark.parametrize("more, said", [
    ({"last": ""}, "my-package: deleting, 24 candidates"), ({}, "my-package: 7 tried, 6 kept, last group_totals"),
    ({"last": "a:f+a:g stub: trivial"}, "my-package: 7 tried, 6 kept, last f and 1 more"),
    ({"stage": "done", "seconds": 99.4}, "my-package: done, 7 tried, 6 kept, 99 s"),
    ({"problem": "no Python file", "source": ""}, "./my-package: ended, 7 tried, 6 kept, 0 s")])
def test_a_report_in_words(more, said):
    assert now(report(**more)) == said


def test_a_line_at_begin_and_end_of_each_package_and_few_between():
    told = []
    watch = watcher(lambda words, at_once: told.append((words, at_once)), 3)
    for stage in ("fetching", "deleting", "done"):
        for name in ("a", "b"):
            watch(Report(name, stage=stage))
    watch(Report("c", problem="c holds no Python file"))
    assert [words.partition("; ")[2][0] for words, at_once in told if at_once] == ["a", "b", "a", "b", "c"]
    assert [words[:1] for words, _ in told] == ["0", "0", "0", "0", "1", "2", "3"] and len(told) == 7


def test_the_gates_that_dropped_something_are_explained_and_no_others():
    table = gate_table([report(dropped={"no evidence": 2}), report(dropped={"trivial": 1, "slow": 0})])
    gates = ["trivial", "no evidence"]
    assert [[*column.cells] for column in table.columns] == [gates, [GATES[gate][0] for gate in gates]]
    assert all(words[0].isupper() and words.endswith(".") and ". " not in words for words, _ in GATES.values())
