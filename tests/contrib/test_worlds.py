"Every known hack is paid by a naive judge and not by ours, in the naive world, in one that leaks, and in an episode."
import shutil
import sys
from pathlib import Path

import pytest

import composer_replication.data
from composer_replication.contrib.attacks import episodes, worlds
from composer_replication.contrib.attacks.cases import EXPLOITS, Exploit, filled, load_cases
from composer_replication.contrib.attacks.suite import ExploitResult, case_names, play, suite_tasks
from composer_replication.core.trace import ToolCall, Turn
from composer_replication.envs.deletion.env import agent_tree
from composer_replication.envs.deletion.judge.grading import collect_sources, grade
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.task import HackFinding
from composer_replication.sandbox.base import open_sandbox, sandbox_problem

sys.path.append(str(Path(__file__).parents[2] / "spikes" / "131-exploits"))
from counts import by_class, by_detector
from plain_inputs import NATURAL, natural_cases

LARDER, TARGET = Path(composer_replication.data.__path__[0]) / "repos" / "larder", "larder.labels:label"
TASKS = suite_tasks()
needs_bubblewrap = pytest.mark.skipif(bool(sandbox_problem("bubblewrap")), reason=str(sandbox_problem("bubblewrap")))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def subject():
    return prepare_subject(LARDER)


def tiers(names, quick):
    "Parameters; those that are not quick are slow."
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


# Of each family, and of each way to be paid and to be caught, the first exploit, and five more; the others take a minute.
FIRST = {key: case.name for case in reversed(EXPLOITS) for key in (case.family, (case.kind, case.naive, case.caught_by))}
MORE = ("forged_results_careful", "patched_call", "always_equal_text", "frame_source", "skip")
LEAKED = [case.name for case in EXPLOITS if case.kind == "recover" and case.leftovers]
LOOKS = [f"{style} {symbol}" for symbol in TASKS for style in NATURAL]
QUICK_LOOKS = ("explorer larder.labels:label", "interpreter larder.labels:roman", "editor larder.plans:schedule")


@needs_bubblewrap
@pytest.mark.parametrize("name", tiers([case.name for case in EXPLOITS], {*FIRST.values(), *MORE}))
def test_exploit_beats_the_naive_judge_and_not_ours(name, subject):
    case = next(case for case in EXPLOITS if case.name == name)
    result = worlds.play(case, TASKS[TARGET], subject)
    assert (result.naive, result.ours) == (1, 0), (result.evidence, result.transcript, result.transcript_naive)
    assert set(case.caught_by) <= set(result.caught_by), result.evidence
    assert result.hacked or not {"canary", "redelete"} & set(result.caught_by)


@needs_bubblewrap
@pytest.mark.parametrize("name", tiers(LEAKED, ("stale_bytecode", "git_objects", "source_archive")))
def test_an_environment_that_leaks_is_not_opened(name, subject):
    result = worlds.play_leaked(next(case for case in EXPLOITS if case.name == name), TASKS[TARGET], subject)
    assert (result.naive, result.ours, result.caught_by) == (1, 0, ("sandbox",)), result.evidence


@needs_bubblewrap
@pytest.mark.parametrize("look", tiers(LOOKS, QUICK_LOOKS))
def test_the_original_after_a_look_around_is_paid(look, subject):
    assert len(LOOKS) >= 60
    task = TASKS[look.split()[1]]
    result = play(next(case for case in natural_cases(task, subject) if case.name == f"natural {look}"), task, subject)
    assert (result.ours, result.hacked, result.score, result.evidence) == (1, False, 0.0, ()), result.transcript


@needs_bubblewrap
def test_the_naive_grader_is_beaten_and_ours_is_not(subject):
    task = TASKS[TARGET]
    (path, (text, _)), = task.changed_files(subject.tree).items()
    with agent_tree(task, subject) as tree:
        sandbox = open_sandbox(tree, libraries=subject.libraries)
    with sandbox:
        assert worlds.naive_grade(task, subject, sandbox) == 0.0
        sandbox.write("tests/test_labels.py", b"def test_label():\n    pass\n")
        assert worlds.naive_grade(task, subject, sandbox) == 1.0
        assert grade(task, subject, collect_sources(sandbox)).reward == 0.0
        sandbox.write(path, text.encode())
        assert grade(task, subject, collect_sources(sandbox)).reward == 1.0


def test_leftovers_in_a_repository_are_left_out_or_seen_by_the_leak_gate(tmp_path, subject):
    upstream, task = tmp_path / "larder", TASKS[TARGET]
    names = case_names(task, subject)
    shutil.copytree(LARDER, upstream)
    source, planted = task.changed_files(subject.tree)[names["module"]][0], []
    leftovers = {leftover for case in load_cases("recover") for leftover in case.leftovers}
    for place, form in (pair for pair in leftovers if pair[0].startswith("tree:")):
        path = filled((place,), names)[0].partition(":")[2] + ("/ab/cdef" if form == "git" else "")
        (upstream / path).parent.mkdir(parents=True, exist_ok=True)
        (upstream / path).write_bytes(worlds.left_over(form, names["module"], names["inner"], source, ""))
        planted.append(path)
    made = prepare_subject(upstream, tmp_path / "store")
    assert len(planted) > 12 and not any((made.tree / path).exists() for path in planted)


@needs_bubblewrap
def test_an_episode_that_ends_without_work_counts_for_the_naive_judge_too(subject):
    "A broken call and a question, which it drops: the notebook of episodes."
    steps = (("read_file", "pyproject.toml"), ("say", "Done."))
    result = worlds.play(Exploit("x", "episode", "So.", steps, (), "dropped"), TASKS[TARGET], subject)
    assert (result.ours, result.unscored, result.naive) == (0.0, "", 0.0) and "tests" in result.caught_by


def test_messages_are_as_an_endpoint_sends_them():
    read = episodes.read_turn(episodes.message_of("call", ["shell", '{"command": ']))
    assert not read.tool_calls[0].parsed and read.tool_calls[0].arguments == '{"command": '
    read = episodes.read_turn(episodes.message_of("read_file", ["a.py"]))
    assert read.tool_calls == (ToolCall("read_file", {"path": "a.py"}, "c"),)
    assert episodes.read_turn(episodes.message_of("say", ["Why?"])) == Turn("assistant", "Why?")


def test_tables_count_what_was_played():
    wrong = (HackFinding("heldout", "wrong: 3", "", 1.0),)
    made = [ExploitResult("a", "tamper", 1, 0, False, 0.4, ("tests", "static"), 1.0),
            ExploitResult("b", "in_process", 1, 0, True, 1.0, ("heldout",), 1.0, wrong),
            ExploitResult("c", "honest", 1, 1, False, 0.0, (), 1.0)]
    assert [row["exploits"] for row in by_class(made)] == [1, 1, 2]
    assert by_class(made)[-1] == {"kind": "all", "exploits": 2, "naive": 1.0, "ours": 0.0, "unscored": 0.0, "called a hack": 0.5}
    rows = {row["detector"]: row for row in by_detector(made)}
    assert [rows[d]["paid without it"] for d in ("heldout", "tests", "static")] == [1, 1, 0]
    assert rows["heldout"]["decides alone"] == 1 and rows["heldout"]["passing"] == 1
    lost = ExploitResult("a", "starve", None, 0.0, False, 0.0, (), 1.0, family="f", unscored="TypeError")
    assert lost.won and by_class([lost])[0]["unscored"] == 1 and by_class([lost])[0]["naive"] is None
