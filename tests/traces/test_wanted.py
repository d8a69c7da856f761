# ruff: noqa: E501
"""Failures that the agent wanted, where the trace says so, and those that only look so."""

import re

import pytest

from composer_replication.core.hint import hint_at
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.hints.layers import default_composite
from composer_replication.traces import wanted
from composer_replication.traces.error_sites import find_error_sites

RED = "F\n=== FAILURES ===\nE       assert 3 == 4\ntest_a.py:9: AssertionError\n1 failed in 0.05s"
KEY = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    return d[k]\nKeyError: \'name\''
MODULE = 'Traceback (most recent call last):\n  File "/w/a.py", line 1, in <module>\n    import numpy\nModuleNotFoundError: No module named \'numpy\''
TASK = "f() raises KeyError: 'name' for an empty list."


def site(said="", after="Well.", command="pytest -q", answer=RED, thinking=None, task=TASK, **given):
    turns = (
        Turn("user", task),
        Turn("assistant", said, thinking=thinking, tool_calls=(ToolCall("bash", {"command": command} | given, "c"),)),
        Turn("tool", answer, tool_call_id="c", observation=True, failed=True),
        Turn("assistant", after),
    )
    trace = Trace("t", turns, format="openai")
    [found] = find_error_sites(trace)
    assert (default_composite().hint(trace, found) is None) == bool(found.wanted)
    assert (hint_at(lambda kind, context: "A hint.", trace, found) is None) == bool(found.wanted)
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"said": "I add the test first. It should fail now."},
        {"said": "The new test is expected to fail until the parser is changed."},
        {"said": "Let me confirm that the test fails."},
        {"said": "Run it to watch the test fail first."},
        {"said": "We want this to fail:"},
        {"thinking": "The test must fail at this point. Run it."},
        {"description": "Run the new test, which should fail"},
        {"command": "# should fail without the fix\npytest -q"},
        {"command": "echo 'this should raise' && pytest -q"},
        {"said": "Let me see whether these failures are pre-existing."},
        {"said": "Now the same tests without my change:"},
        {"said": "Do they fail before the fix, too?"},
        {"command": "git stash && pytest -q; git stash pop"},
        {"command": "pytest -q || true"},
        {"command": "pytest -q || echo 'red'"},
        {"command": "! pytest -q"},
        {"said": "Let me reproduce the issue:", "command": "python a.py", "answer": KEY},
        {"said": "First I confirm the bug.", "command": "python a.py", "answer": KEY},
        {"said": "A script that triggers the problem:", "command": "python a.py", "answer": RED.replace("E       assert", "AssertionError: assert")},
        {"command": "grep -rn total src", "answer": "(no output)"},
        {"command": "cd /w && diff -u a b | head -20", "answer": "--- a\n+++ b\n-x\n+y"},
        {"command": "which node", "answer": "/usr/bin/which: no node in (/usr/bin:/bin)"},
        {"said": "What about an empty statement?", "command": "sqlfluff lint a.sql", "answer": "== [a.sql] FAIL\nL: 1 | P: 1 | PRS | unparsable"},
        {"said": "Let me look at the current behaviour of the rule.", "command": "ruff check a.py", "answer": "a.py:1:8: F401 unused"},
        {"command": "pip show numpy", "answer": "WARNING: Package(s) not found: numpy"},
    ],
)  # fmt: skip
def test_a_wanted_failure_is_known_by_the_traces_own_words(given):
    assert site(**given).wanted


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"said": "Now the tests should not fail any more."},
        {"said": "Let me verify that the fix works:"},
        {"said": "I run the reproduction again, which should pass now.", "command": "python a.py", "answer": KEY},
        {"said": "Make sure that nothing fails:"},
        {"said": "The test should pass."},
        {"said": "Let me reproduce the issue:", "command": "python a.py", "answer": MODULE},
        {"said": "Let me reproduce the issue:", "command": "python a.py", "answer": KEY, "task": "f() is slow."},
        {"said": "This should fail with a KeyError.", "command": "python a.py", "answer": MODULE},
        {"said": "Let me fix the failing test.", "command": "pytest -q"},
        {"after": "The script has successfully reproduced the bug. Now I look at the parser.", "answer": KEY},
        {"after": "The test fails as expected. Now the fix."},
        {"after": "That confirms the issue: the sum is off by one."},
        {"said": "", "command": "python a.py", "answer": KEY + "\nit raised as expected"},
        {"after": "It does not work as expected. I look again."},
        {"after": "Good, the module is missing, which reproduced the issue that I know.", "answer": MODULE},
        {"said": "Let me see what errors we get.", "command": "pytest -q"},
        {"said": "What happens for an empty list?", "command": "python a.py", "answer": KEY},
        {"command": "grep -rn total missing/", "answer": "grep: missing/: No such file or directory"},
        {"command": "pytest -q | grep failed; make all"},
        {"command": "git stash pop && pytest -q"},
        {"command": "cat a.txt | grep b", "answer": "cat: a.txt: No such file or directory"},
        {"said": "It fails without reason. I try once more:", "answer": RED},
    ],
)
def test_what_nobody_wanted_stays_a_failure(given):
    assert site(**given).wanted is None


@pytest.mark.parametrize("part", wanted._TABLE)
def test_each_row_of_the_table_matches_its_example(part):
    for row in wanted._TABLE[part]:
        assert re.search(row["mark"], row["example"], 0 if part in ("command", "setup") else re.I), row


def test_wanted_failures_are_no_streak():
    def steps(said):
        return tuple(
            turn
            for n in range(4)
            for turn in (
                Turn("assistant", said, tool_calls=(ToolCall("bash", {"command": "pytest"}, f"c{n}"),)),
                Turn("tool", RED, tool_call_id=f"c{n}", observation=True, failed=True),
            )
        )

    assert [s.streak for s in find_error_sites(Trace("t", steps("Go."), format="openai"))] == [1, 2, 3, 4]
    assert {s.kind for s in find_error_sites(Trace("t", steps("This should fail."), format="openai"))} == {"runtime_error"}


@pytest.mark.parametrize("command", ["\n" * 100_000 + "x", "|| echo" + " " * 100_000 + "; x", "(cd " * 25_000, "; ! " * 25_000])
def test_no_command_takes_long(command):  # minutes, were it quadratic
    assert site(command=command + "; pytest -q").wanted is None or "!" in command
