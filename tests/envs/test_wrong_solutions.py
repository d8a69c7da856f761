"Wrong solutions of the shipped tasks that pass every test of theirs: held-out inputs tell each from the original."
from pathlib import Path

import pytest
from envs_tasks import needs_sandbox

import composer_replication.data
from composer_replication.envs.deletion.judge.grading import grade
from composer_replication.envs.deletion.subject import subject_of
from composer_replication.envs.deletion.task import read_tasks

REPOS = Path(composer_replication.data.__path__[0], "repos")
WRONG = {  # what is wrong: (symbol, old, new), and an input where it differs
    "a default in place of an argument": (  # label("ab cd ef", "--", 7)
        "larder.labels:label", "len(separator.join(words)) > longest", 'len("-".join(words)) > longest'),
    "capitals do not count in an order": (  # [("b", "x"), ("C", "x")]
        "larder.shelves:group_by_shelf", "sorted(things) for", "sorted(things, key=str.lower) for"),
    "no KeyError, though the docstring names it": (
        "larder.shelves:Shelf.take", "left = self._jars[name] - grams", "left = self._jars.get(name, 0) - grams"),
    "equal names are one": (
        "larder.shelves:Queue.add", "self._jars.append((day, self._count, name))",
        "self._jars = [(day, self._count, name)] + [j for j in self._jars if j[2] != name]"),
    "two arguments of three": ("larder.amounts:add_amounts", "for text in texts)", "for text in texts[:2])"),
    "equal arguments are one": ("larder.amounts:add_amounts", "for text in texts)", "for text in set(texts))"),
    "a range that includes its end": ("larder.labels:roman", "1 <= number <= 3999", "1 <= number"),
    "a later word is cut": ("larder.labels:label", "return separator.join(words)[:longest]", "return separator.join(words)"),
}


@needs_sandbox
@pytest.mark.parametrize("what", WRONG)
def test_it_earns_nothing_and_the_original_one(what):
    symbol, old, new = WRONG[what]
    task = next(task for task in read_tasks(REPOS / "larder.tasks.jsonl") if task.deleted_symbols == (symbol,))
    subject = subject_of(task)
    (path, (text, _)), = task.changed_files(subject.tree).items()
    assert text.count(old) == 1
    assert grade(task, subject, {path: text.encode()}).reward == 1.0
    assert grade(task, subject, {path: text.replace(old, new).encode()}).reward == 0.0


RIGHT = {  # other right solutions, which differ where an argument is of another type than in any test
    "a number in the place of a list": ("larder.plans:cheapest", "if not offers:", "if len(offers) == 0:"),
    "a shelf in the place of a number": (
        "larder.shelves:Shelf.take", "left = self._jars[name] - grams",
        "grams = 0 + grams\n        left = self._jars[name] - grams"),
}


@needs_sandbox
@pytest.mark.parametrize("what", RIGHT)
def test_another_right_solution_is_not_asked_about_senseless_input(what):
    symbol, old, new = RIGHT[what]
    task = next(task for task in read_tasks(REPOS / "larder.tasks.jsonl") if task.deleted_symbols == (symbol,))
    subject = subject_of(task)
    (path, (text, _)), = task.changed_files(subject.tree).items()
    assert text.count(old) == 1
    assert grade(task, subject, {path: text.replace(old, new).encode()}).reward == 1.0
