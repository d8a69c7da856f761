"""Where a command is: a line a minute in a pipe. The clock is the test's own."""
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from composer_replication.cli import console
from composer_replication.cli.app import app

MINUTE = console.EVERY  # before a fixture changes it


@pytest.fixture
def clock(monkeypatch):
    "Seconds that a test sets."
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(console, "EVERY", MINUTE)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize("calls, line", [  # each at a second
    ([], "playing"),
    ([(59, "reading: 3 found")], "reading: 3 found"),
    ([(61, "reading: 3 found")], "reading: 3 found, for 61 s"),
    ([(7200, "reading: 3 found")], "reading: 3 found, for 2 hours"),
    ([(10, "playing", 0, 8)], "playing: 0 of 8"),
    ([(10, "playing", 0, 8), (30, "playing", 2, 8)], "playing: 2 of 8, about 60 s left"),
    ([(10, "step", 4, 8), (20, "step", 5, 8)], "step: 5 of 8, about 30 s left"),  # a run that goes on
    ([(10, "playing", 8, 8)], "playing: 8 of 8"),
    ([(0, "a", 0, 10), (10, "a", 10, 10), (20, "b", 0, 4), (50, "b", 1, 4)], "b: 1 of 4, about 90 s left")])  # another stage
def test_a_line_says_how_much_how_fast_and_how_long(clock, calls, line):
    doing = console.Doing("playing")
    for clock.now, *given in calls:
        doing(*given)
    assert doing.line() == line


def test_a_pipe_gets_a_line_each_minute_until_the_end(clock, capsys):
    doing, asked = console.Doing("loading"), []

    def over(seconds):
        asked.append(seconds)
        clock.now += 60
        if clock.now == 120:
            doing("[playing]", 0, 8)
        return clock.now > 180

    console.each_minute(doing, over)
    assert asked == [60] * 4
    assert capsys.readouterr().err.splitlines() == ["loading, for 60 s", "[playing]: 0 of 8", "[playing]: 0 of 8"]


@pytest.mark.parametrize("terminal, shown, minutes", [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_the_minutes_count_in_a_pipe_alone_and_in_one_process_alone(monkeypatch, terminal, shown, minutes):
    begun = []
    monkeypatch.setattr(console, "each_minute", lambda doing, over: begun.append((doing.words, over(60.0))))
    monkeypatch.setattr(console, "err", console.Console(stderr=True, force_terminal=terminal, width=80))
    with console.working("reading", shown) as doing:
        doing("reading: 1 found")
        doing("[at] two")
    assert [over for _, over in begun] == [True] * minutes  # the end of the context ends them, and not a minute


@pytest.mark.parametrize("words", [
    "eval embedded --task toy --limit 2 --max-turns 2 --out out --against embedded", "hints score --sites 4 --out out",
    pytest.param("train --config toy --set max_steps=3 --set output_dir=out --set train_rows=8 --set max_turns=2 "
                 "--set gradient_accumulation_steps=1", marks=pytest.mark.trainer)])
def test_what_takes_long_says_done_of_all_speed_and_rest(monkeypatch, tmp_path, words):
    lines, ticks = [], iter(range(10**9))

    class Written(console.Doing):
        def __call__(self, *given, **more):
            super().__call__(*given, **more)
            lines.append(self.line())

    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    monkeypatch.setattr(console, "Doing", Written)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert any(re.search(r": \d+ of \d+, about [\d.]+ \w+ left$", line) for line in lines), lines
