"""`tasks attack`: one that was rewarded or not scored ends it with 1, and without walls nothing is played."""
import json
from dataclasses import replace
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from composer_replication.cli import console
from composer_replication.cli.app import app
from composer_replication.cli.console import ExitCode
from composer_replication.contrib.attacks import attack, attacker
from composer_replication.contrib.attacks import suite as naming
from composer_replication.contrib.attacks.cases import filled, implemented
from composer_replication.contrib.attacks.mutations import Draft
from composer_replication.contrib.attacks.suite import ExploitResult
from composer_replication.core.errors import InputProblem
from composer_replication.envs.deletion.task import read_tasks, write_tasks
from composer_replication.sandbox.base import sandbox_problem

needs_bubblewrap = pytest.mark.skipif(sandbox_problem("bubblewrap") is not None, reason=f"{sandbox_problem('bubblewrap')}")
TASKS = {t.deleted_symbols[0]: t for t in read_tasks(files("composer_replication") / "data" / "repos" / "larder.tasks.jsonl")}
LABEL = TASKS["larder.labels:label"]
LOST = ExploitResult("lookup_table", "in_process", None, 0.0, True, 1.0, ("heldout",), 0.1, family="lookup_table")


@pytest.fixture
def file(tmp_path):
    write_tasks([LABEL], tmp_path / "tasks.jsonl")
    return tmp_path / "tasks.jsonl"


def run(*words):
    return CliRunner().invoke(app, ["tasks", "attack", *map(str, words)])


@pytest.fixture
def feigned(monkeypatch):
    "Attacks that are not played: what the command makes of given results."
    def feign(*results):
        asked = []
        monkeypatch.setattr(attack, "attack_task", lambda task, subject, *settings: asked.append(settings) or iter(results))
        monkeypatch.setattr(attack, "count_unfit", lambda task, subject, seed: 17)
        monkeypatch.setattr("composer_replication.sandbox.base.sandbox_problem", lambda kind: None)
        return asked
    return feign


@needs_bubblewrap
def test_attacks_on_a_shipped_task_earn_nothing(file):
    done = run(file, "--limit", 2, "--attempts", 2, "--seed", 5, "--json")  # no attack that waits for a limit
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == ExitCode.DONE, done.output
    assert len(rows) == 4 and [row["kind"] for row in rows].count("attacker") == 2
    assert {row["task_id"] for row in rows} == {LABEL.task_id} and all(row["caught_by"] for row in rows)
    assert not any(row["rewarded"] or row["unscored"] for row in rows) and {row["not_fitting"] for row in rows} == {0}


@pytest.mark.parametrize("won, said", [
    (replace(LOST, ours=1.0, caught_by=()), "lookup_table (in_process) was rewarded"),
    (replace(LOST, unscored="RunnerProblem: it ended"), "lookup_table (in_process) was not scored: RunnerProblem: it ended")])
def test_a_rewarded_and_an_unscored_attack_end_it_with_1(file, feigned, won, said):
    asked = feigned(LOST, won)
    done = run(file, "--limit", 7, "--attempts", 3, "--seed", 5, "--jobs", 1)
    assert done.exit_code == ExitCode.FAILED and done.stderr.count("warning") == 1 and f"{LABEL.task_id}: {said}" in done.stderr
    assert asked == [(7, 3, 5, 1)]
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines()]
    counts = {row[1]: row[2:4] for row in rows if len(row) > 4}
    assert counts["in_process"] == counts["all"] == ["2", "1"]  # attacks, families
    assert "1 of 2" in done.stdout and "heldout" in done.stdout
    assert any(row[1:3] == [LABEL.task_id, "17"] for row in rows if len(row) > 3)


def test_where_nothing_won_it_ends_well(file, feigned, monkeypatch):
    feigned(LOST)
    monkeypatch.setattr(console.out, "width", 200)
    done = run(file)
    assert done.exit_code == ExitCode.DONE and not done.stderr
    assert done.stdout.startswith("1 attacks on 1 tasks: 0 rewarded, 0 that the judge could not score\n")
    assert "0 of 0" not in done.stdout  # of held-out families none was played
    assert "0 of 1 (0.0% to 79.3%)" in done.stdout  # Wilson: z^2 / (n + z^2) with z = 1.96


def test_without_walls_nothing_is_played(file, feigned, monkeypatch):
    asked = feigned(LOST)
    monkeypatch.setattr("composer_replication.sandbox.base.sandbox_problem", lambda kind: "there is no bubblewrap")
    done = run(file)
    assert done.exit_code == ExitCode.FAILED and not done.stdout and not asked
    assert done.stderr == "error: attacks need a sandbox: there is no bubblewrap\n"


def test_a_change_that_people_made_is_left_out(file, feigned):
    asked = feigned(LOST)
    write_tasks([replace(LABEL, mode="given", granularity="patch", deleted_symbols=())], file)
    done = run(file)
    assert done.exit_code == ExitCode.FAILED and not asked
    assert "deletes no definition" in done.stderr and "no attack could be played" in done.stderr


@needs_bubblewrap
def test_attacks_are_drawn_by_the_seed_and_those_that_need_a_stub_are_left_out():
    from composer_replication.envs.deletion.subject import subject_of
    subject = subject_of(LABEL)
    everything = attack.known_attacks(LABEL, subject)
    assert len(everything) > 400 and all(case.naive == "none" and not case.choices for case in everything)
    drawn = [tuple(case.name for case in attack.known_attacks(LABEL, subject, 30, seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 30
    gone = attack.known_attacks(replace(LABEL, mode="remove"), subject)
    assert gone and not any(step[0] == "implement" for case in gone for step in case.steps)


def test_the_attacker_begins_with_a_quarter_and_its_attempts_are_results(monkeypatch):
    said = ExploitResult("", "", None, 0.0, True, 1.0, ("heldout", "static"), 0.5)
    draft = Draft("", "label", "larder.labels", "m.py")
    began = []
    monkeypatch.setattr(attack, "known_attacks", lambda *_: [])
    monkeypatch.setattr(attack, "case_names", lambda *_: {"name": "label", "dotted": "d", "module": "m.py"})
    tried = [attacker.Attempt("table", 3 + k, 1, "hidden", draft, replace(said, unscored=why)) for k, why in enumerate(("", "x"))]
    monkeypatch.setattr(attack, "attack", lambda cases, *_, **__: began.append(cases) or tried)
    results = list(attack.attack_task(LABEL, None, attempts=20))
    assert len(began[0]) == 5 and [(r.kind, r.family, r.caught_by, r.won) for r in results] == [
        ("attacker", "table", ("heldout", "static"), False), ("attacker", "table", ("heldout", "static"), True)]


def _named(task, monkeypatch):
    "What the dollar names of a task stand for, without a run of its tests."
    from composer_replication.envs.deletion.subject import subject_of
    monkeypatch.setattr(naming, "_recorded", lambda *_: [])
    monkeypatch.setattr(naming, "_KEPT", {})
    subject = subject_of(task)
    return naming.case_names(task, subject), subject


def test_attacks_that_write_a_function_do_not_fit_a_method(monkeypatch):
    put = TASKS["larder.shelves:Shelf.put"]
    names, subject = _named(put, monkeypatch)
    fitting = attack.known_attacks(put, subject)
    assert len(fitting) > 100 and attack.count_unfit(put, subject) > 250
    texts = [text for case in fitting for step in case.steps for text in filled(step, names) if isinstance(text, str)]
    assert not any("Shelf.put" in text for text in texts)
    assert attack.count_unfit(LABEL, _named(LABEL, monkeypatch)[1]) == 0


def _bundle():
    "Two modules; the first changed file is not that of the first symbol."
    other = TASKS["larder.amounts:parse_amount"]
    return replace(LABEL, task_id="bundle", granularity="bundle", deletion_patch=other.deletion_patch + LABEL.deletion_patch,
                   deleted_symbols=(*LABEL.deleted_symbols, *other.deleted_symbols))


def test_the_module_of_a_bundle_is_that_of_its_first_symbol(monkeypatch):
    task = _bundle()
    names, subject = _named(task, monkeypatch)
    given = task.changed_files(subject.tree)
    assert next(iter(given)) == "src/larder/amounts.py" and len(given) == 2
    assert [names[key] for key in ("module", "inner", "name")] == ["src/larder/labels.py", "larder/labels.py", "label"]
    assert "def label(x): pass" in implemented(given[names["module"]][1], names["name"], "def label(x): pass")


def test_a_symbol_whose_module_was_not_changed_is_refused(monkeypatch):
    with pytest.raises(InputProblem, match="larder.amounts"):
        _named(replace(LABEL, task_id="elsewhere", deleted_symbols=("larder.amounts:parse_amount",)), monkeypatch)


def test_a_task_that_cannot_be_attacked_is_reported_and_the_next_one_is_attacked(file, feigned, monkeypatch):
    feigned(LOST)

    def attack_task(task, *_):
        yield LOST
        if task.task_id == "bundle":
            raise InputProblem("there is no label in this module", "look", "here")

    monkeypatch.setattr(attack, "attack_task", attack_task)
    write_tasks([_bundle(), LABEL], file)
    done = run(file, "--json")
    assert [json.loads(line)["task_id"] for line in done.stdout.splitlines()] == ["bundle", LABEL.task_id]
    assert done.exit_code == ExitCode.FAILED
    assert done.stderr == "warning: bundle: it cannot be attacked: here: there is no label in this module; look.\n"
