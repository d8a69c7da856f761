"""The demo as people run it, with a training that is too short to learn: what it says, in which order, how wide."""
import os
import signal
import subprocess
import sys
import time

import pytest

from composer_replication.experiments import demo as room
from composer_replication.experiments.demo import Demo, DemoSetting, Scores, demo_experiment
from composer_replication.report.demo import FIGURES, demo_rows, demo_verdict, percent

TINY = DemoSetting(episodes=8, steps=1, trees=2, held_out=6)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(room, "DEMO", TINY)


@pytest.mark.process
def test_it_says_three_things_in_order_and_writes_a_page(tiny, call, tmp_path):
    done = call("demo")
    assert done.exit_code == 0, done.output
    said = done.stdout
    order = ("1. What went wrong", "tool_not_found", "call ", "answer ", "hint ", "2. What the hint does", "without the hint",
             "3. What training on it does", "The lab:", "before training", "trained behind a filler", "trained behind hints",
             "hints - filler", "Next:")
    places = [said.index(text) for text in order]
    assert places == sorted(places)
    assert all(len(line) <= 80 for line in said.splitlines())
    assert all(name in said for name in FIGURES.values())
    page = (tmp_path / "out/demo/index.html").read_text()
    assert "composer-rl hints list --mine" in page and page.count("class=interval") == 6


@pytest.mark.process
def test_the_same_seed_gives_the_same_figures_in_processes_and_without(tiny, rows):
    line, = rows("demo", "--seed", 3)
    alone = room.demo_experiment(TINY, 3)
    assert {arm: tuple(scores["right"] + scores["passed"]) for arm, scores in line["arms"].items()} == \
        {arm: scores.right + scores.passed for arm, scores in alone.arms.items()}


@pytest.mark.process
def test_ctrl_c_ends_all_processes_with_one_word(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", "from composer_replication.cli.app import main; main()", "demo"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    lines = []
    while not any("2. What the hint does" in line for line in lines):
        lines.append(program.stdout.readline())
    time.sleep(1)
    os.killpg(program.pid, signal.SIGINT)
    _, complained = program.communicate(timeout=120)
    assert program.returncode == 130 and complained.strip().endswith("interrupted") and "Traceback" not in complained


def test_the_parent_loads_no_torch():
    rooms = ("cli.demo", "experiments.demo", "report.demo")
    code = (f"import sys, {', '.join(f'composer_replication.{room}' for room in rooms)}; "
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def scores(right, passed):
    return Scores(tuple(range(len(right))), tuple(right), tuple(passed), tuple(right))


def test_a_figure_that_does_not_move_is_printed_and_called_so():
    same, more = scores([0, 1] * 20, [0, 1] * 20), scores([1] * 40, [0, 1] * 20)
    found = Demo({"start": same, "filler": same, "exact": more})
    said = demo_verdict(found)
    assert "more right next actions, +50" in said and "no difference is shown in new tasks passed, +0" in said
    assert demo_rows(found)[-1][2].startswith("+0 ")
    worse = Demo({"start": same, "filler": more, "exact": same})
    assert "fewer right next actions, -50" in demo_verdict(worse)


def test_intervals_of_actions_are_over_tasks():
    one_task = Scores((0,) * 10 + tuple(range(1, 11)), (1,) * 10 + (0,) * 10, (0,) * 11)
    many = Scores(tuple(range(20)), (1,) * 10 + (0,) * 10, (0,) * 20)
    wide, narrow = (Demo({"start": one}).level("start", "right") for one in (one_task, many))
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)
    assert percent(narrow).startswith("50 % (")


def test_progress_reaches_its_end_with_the_last_work():
    done = []
    demo_experiment(TINY, split="dev", done=done.append)
    assert sum(done) == TINY.units and done[-1] == TINY.held_out
