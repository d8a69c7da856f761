"""`tasks show`: one task by its id or a part of it."""
import json
from dataclasses import replace
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.cli.console import Ending
from composer_replication.envs.deletion.task import read_tasks, write_tasks

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
