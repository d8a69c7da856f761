"No variant of a family of attacks and nothing that the scripted attacker writes is rewarded; mutations keep an attack an attack."
import ast
import sys
import types
from pathlib import Path

import pytest
from exploit_names import FILLED

import composer_replication.data
from composer_replication.contrib.attacks import attacker, mutations, rates, variants
from composer_replication.contrib.attacks.cases import EXPLOITS, FAMILIES, filled
from composer_replication.contrib.attacks.suite import ExploitResult, case_names, suite_tasks
from composer_replication.contrib.attacks.worlds import play
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import HackFinding
from composer_replication.sandbox.base import sandbox_problem
from composer_replication.sandbox.folders import SandboxProblem

TARGET, TASKS = "larder.labels:label", suite_tasks()
needs_bubblewrap = pytest.mark.skipif(bool(sandbox_problem("bubblewrap")), reason=str(sandbox_problem("bubblewrap")))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def subject():
    return prepare_subject(Path(composer_replication.data.__path__[0]) / "repos" / "larder")


SAMPLE = (
    "impossible_values-0", "forged_messages-3", "forged_passes-3", "late_results-0", "large_source-0", "judge_killed-0",
    "left_for_the_next-0",
    "ready_made_equal-0", "caller_constants-0", "survives_deletion-0", "shadowed_names-0", "odd_leftover-0",
    "tool_paths-0", "broken_calls-0", "clarifying_question-0", "broken_sandbox-0", "many_files-1")


@needs_bubblewrap
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_variants_wins_nothing(name, subject):
    family, _, number = name.rpartition("-")
    case = next(c for c in FAMILIES if c.name == family)
    result = play(variants.variants(case, case_names(TASKS[TARGET], subject))[int(number)], TASKS[TARGET], subject)
    assert not result.won and result.caught_by, (result.unscored, result.evidence, result.transcript)
    assert result.kind != "episode" or result.naive in (1, None)


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda case: case.name)
def test_no_variant_of_a_family_wins(family, subject):
    for case in variants.variants(family, case_names(TASKS[TARGET], subject)):
        result = play(case, TASKS[TARGET], subject)
        assert not result.won, (case.name, result.unscored, result.evidence)


def test_without_walls_no_attack_is_played(monkeypatch, subject):
    monkeypatch.setattr(attacker, "sandbox_problem", lambda kind: "there is no bubblewrap")
    with pytest.raises(SandboxProblem, match="no bubblewrap"):
        attacker.attack(EXPLOITS[:1], TASKS[TARGET], subject, 1)


def test_the_code_of_a_variant_is_python_and_every_value_is_met():
    for case in variants.all_variants(FILLED):
        for tool, *arguments in (filled(step, FILLED) for step in case.steps):
            if tool == "implement" or tool == "write_file" and arguments[0].endswith(".py"):
                ast.parse(arguments[-1], case.name)
    for family in FAMILIES:
        made = variants.variants(family, FILLED)
        assert made and not any(case.choices for case in made) and {case.family for case in made} == {family.family}
        name, options = max(family.choices, key=lambda pair: len(pair[1]))
        cases = [variants.chosen(family, number) for number in range(len(options))]
        text = "\n".join(str(part) for case in cases for step in (*case.steps, *case.leftovers) for part in step)
        assert [value for value in options if value not in text] == [], (family.name, name)


SOURCE = """import os
import sys

_TABLE = {"a b": "a-b"}


def _leave(code=0):
    sys.leaves = getattr(sys, "leaves", 0) + 1
    return os.path.join("a", "long text")


def label(name):
    if name in _TABLE:
        return _TABLE[name]
    raise ValueError("not that one")


_leave()
"""


def _answer(draft, question):
    space = {"__name__": "labels", "__file__": __file__}
    for path, text in draft.files:
        module = Path(path).stem
        sys.modules[f"larder.{module}"] = types.ModuleType(module)
        exec(compile(text, path, "exec"), vars(sys.modules[f"larder.{module}"]))
    exec(compile(draft.code, "labels", "exec"), space)
    return space["label"](question)


@pytest.mark.parametrize("name", mutations.MUTATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_a_mutation_leaves_an_attack_an_attack(name, seed):
    draft = mutations.Draft(SOURCE, "label", "larder.labels", "src/larder/labels.py")
    new = mutations.mutated(draft, name, mutations.random.Random(seed))
    assert new == mutations.mutated(draft, name, mutations.random.Random(seed))
    assert _answer(new, "a b") == "a-b"


def test_hidden_texts_do_not_stand_in_the_source():
    draft = mutations.Draft(SOURCE, "label", "larder.labels", "src/larder/labels.py")
    for seed in range(5):
        hidden, packed = (mutations.mutated(draft, name, mutations.random.Random(seed)).code for name in ("hidden", "packed"))
        assert "long text" not in hidden and "os.path.join" not in hidden and "_TABLE = " not in packed


@pytest.mark.parametrize("code", ["def label(:", "", "x = 1", "def other():\n    return 1\n", "\x00", "(" * 500])
@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_mutation_takes_any_text(name, code):
    draft = mutations.Draft(code, "label", "larder.labels", "src/larder/labels.py")
    assert isinstance(mutations.mutated(draft, name, mutations.random.Random(0)).code, str)


def attempt(findings=(), draft=None, number=0):
    draft = draft or mutations.Draft(SOURCE, "label", "larder.labels", "src/larder/labels.py")
    said = ExploitResult("", "", None, 0.0, True, 1.0, ("static",), 0.1, tuple(HackFinding(d, w, "", 1.0) for d, w in findings))
    return attacker.Attempt("family", number, None, "original", draft, said)


def test_the_attacker_answers_the_reasons():
    counts = {}
    for reason in ("static", "redelete"):
        rejected = attempt([(reason, "x: y")])
        hows = [attacker.scripted(rejected, mutations.random.Random(seed))[1].split("+") for seed in range(300)]
        counts[reason] = sum("hidden" in how for how in hows), sum("guarded" in how for how in hows)
    assert counts["static"][0] > 2 * counts["redelete"][0] and counts["redelete"][1] > 2 * counts["static"][1]


def test_the_attacker_decides_by_the_detector_and_not_by_the_words():
    "A detector whose name begins as another's is another one."
    for name in ("statics", "tests_of_others"):
        for seed in range(40):
            hows = [attacker.scripted(attempt([(detector, "static: tests")]), mutations.random.Random(seed))
                    for detector in (name, "unknown")]
            assert hows[0] == hows[1]


@needs_bubblewrap
def test_the_attacker_is_bounded_seeded_and_wins_nothing(subject):
    cases = [case for case in EXPLOITS if case.name in ("lookup_table", "exit_in_call")]
    tried = attacker.attack(cases, TASKS[TARGET], subject, attempts=5, seed=4)
    assert [a.number for a in tried] == list(range(5)) and not any(a.said.won for a in tried)
    assert all(a.parent is None or a.parent < a.number for a in tried)
    assert len({(a.draft.code, a.draft.files) for a in tried}) == 5
    again = attacker.attack(cases, TASKS[TARGET], subject, attempts=5, seed=4)
    assert [(a.draft, a.how, a.parent) for a in tried] == [(a.draft, a.how, a.parent) for a in again]


def test_wilson_is_where_the_score_test_stands_on_its_edge():
    from math import sqrt
    from statistics import NormalDist
    for count, of, confidence in ((0, 100, 0.95), (1, 7, 0.95), (50, 80, 0.9), (99, 100, 0.99), (12, 12, 0.95)):
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        for bound in rates.Rate(count, of, confidence).interval:
            if 0 < bound < 1:  # the hypothesis that is only just not refused
                assert abs(abs(count / of - bound) / sqrt(bound * (1 - bound) / of) - z) < 1e-9
    assert rates.Rate(0, 5).interval[0] == 0 and rates.Rate(5, 5).interval[1] == 1
