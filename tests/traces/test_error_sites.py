"""Error sites: who caused what, streaks against a naive count, and the rules that are easy to get wrong."""

from itertools import groupby

import pytest
from chats import came_back
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.traces.error_detectors import DETECTORS, Detection
from composer_replication.traces.error_sites import find_error_sites, register_detector

ANSWERS = {
    "r": "Error: gone",
    "t": "Error: missing required parameter x",
    "j": "Error: invalid JSON arguments",
    "s": "found it",
}
KIND = {"r": "runtime_error", "t": "type_error", "j": "json_decode"}


def trace_of(steps: str, **fields) -> Trace:
    "One turn a letter: a failing call of a kind (r, t, j), a success (s), or talk (-)."
    turns: list[Turn] = []
    for i, step in enumerate(steps):
        if step == "-":
            turns += [Turn("assistant", "Well?"), Turn("user", "Go on.")]
        else:
            turns += [
                Turn("assistant", "I try.", tool_calls=(ToolCall("f", {"i": i}, f"c{i}"),)),
                Turn("tool", ANSWERS[step], tool_call_id=f"c{i}", observation=True),
            ]
    return Trace("t", tuple(turns), **fields)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("rtjs-", min_size=1, max_size=14))
def test_streaks_against_a_naive_count(steps):
    sites = find_error_sites(trace_of(steps))
    acted = [s for s in steps if s != "-"]
    expected = [(KIND[letter], n) for letter, run in groupby(acted) for n, _ in enumerate(run, 1) if letter != "s"]
    assert [(s.cause or s.kind, s.streak) for s in sites] == expected
    assert all((s.kind == "repeated_failure") == (s.streak >= 3) and (s.cause is None) == (s.streak < 3) for s in sites)


def test_calls_side_by_side_are_one_failure_in_a_row():
    def parallel(n):
        calls = tuple(ToolCall("f", {}, f"{n}{i}") for i in range(4))
        return (
            Turn("assistant", tool_calls=calls),
            *(Turn("tool", "Error: gone", tool_call_id=c.id, observation=True) for c in calls),
        )

    sites = find_error_sites(Trace("t", parallel("a") + parallel("b") + parallel("c")))
    assert [s.streak for s in sites] == [1] * 4 + [2] * 4 + [3] * 4
    assert {s.evidence_turn for s in sites[:4]} == {1, 2, 3, 4} and {s.turn for s in sites[:4]} == {0}


def test_results_out_of_order_find_their_calls():
    calls = (ToolCall("a", {}, "1"), ToolCall("b", {}, "2"))
    turns = (
        Turn("assistant", tool_calls=calls, source_index=7),
        Turn("tool", "fine", tool_call_id="2", observation=True, source_index=8),
        Turn("tool", "Error: gone", tool_call_id="1", observation=True, source_index=9),
    )
    [site] = find_error_sites(Trace("t", turns))
    assert (site.context.tool_name, site.message_index, site.evidence_index) == ("a", 7, 9)
    assert site.context.available_tools == ("b",)  # no tools were recorded: those used with success


CALLS = [  # name, arguments, what came back
    ("bash", {"command": "cat build.log"}, "Error: disk full\nmore text"),  # a file's content
    ("read_file", {"path": "notes.txt"}, "Error: none so far\nError: of any kind"),
    ("bash", {"command": "ls"}, "a.py b.py"),
    ("bash", {"command": "grep -rn cat ."}, "[exit code 1]"),  # nothing matched
    ("bash", {"command": "diff a b"}, "1c1\n< x\nexit code: 1"),
    ("bash", {"command": "pytest -q | tail -3"}, "exit code: 0\noutput:\n2 failed, 7 passed in 0.2s"),
    ("bash", {"command": "python a.py"}, 'Traceback (most recent call last):\n  File "a.py", line 1\nBadState: locked'),
    ("bash", {"command": "# this should fail\npython b.py"}, "exit code: 1\nValueError: as it should"),
    ("bash", {"command": "C-c"}, "exit code: 130"),
    ("get_user", {"id": 7}, "Error: user not found"),
    ("bash", '{"comm', "Error: invalid JSON"),
    ("fly", {}, "Unknown tool fly"),
]
OFFERED = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("bash", "read_file", "get_user"))
STEP = st.tuples(
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 3), st.integers(0, 9)), max_size=3),  # call, delay, rank
    st.booleans(),  # a user's message behind the turn
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(STEP, min_size=1, max_size=5), st.sampled_from(["openai", "anthropic", "claude-code", "codex", "mini-swe-agent"]))
def test_parallel_and_late_results_give_the_sites_of_results_that_stand_behind_their_calls(steps, format):
    def sites(late):
        turns, open_results = [], []
        for k, (made, word) in enumerate(steps):
            calls = tuple(ToolCall(name, given, f"c{k}.{n}") for n, ((name, given, _), *_) in enumerate(made))
            turns.append(Turn("assistant", f"Step {k}.", tool_calls=calls))
            for n, ((*_, text), delay, rank) in enumerate(made):
                due = (k + delay, rank) if late else (k, 0)
                open_results.append((due, Turn("tool", text, tool_call_id=f"c{k}.{n}", observation=True)))
            open_results.sort(key=lambda item: item[0])
            while open_results and (open_results[0][0][0] <= k or k == len(steps) - 1):
                turns.append(open_results.pop(0)[1])
            turns += [Turn("user", "Go on.")] * word
        found = find_error_sites(Trace("t", tuple(turns), tools=OFFERED, format=format))
        return {(turns[s.turn].content, turns[s.evidence_turn].tool_call_id, s.kind, s.cause, s.streak, s.wanted, s.detector,
                 s.context.error_message, s.context.tool_name) for s in found}

    assert sites(late=True) == sites(late=False)


def test_a_call_that_does_not_parse_is_one_failure_however_late_its_result():
    asked = Turn("assistant", tool_calls=(ToolCall("f", '{"a": ', "a"), ToolCall("f", {}, "b")))
    answers = [Turn("tool", "Error: no JSON" if id == "a" else "fine", tool_call_id=id, observation=True) for id in "ab"]
    other = came_back("fine", "f")
    for turns, evidence in (((asked, *answers), 1), ((asked, *other, *reversed(answers)), 4), ((asked, answers[1]), 0)):
        assert [(s.turn, s.evidence_turn, s.kind) for s in find_error_sites(Trace("t", turns))] == [(0, evidence, "json_decode")]


@pytest.mark.parametrize(
    "turns",
    [
        (Turn("tool", "Error: gone", observation=True),),  # no call at all
        (Turn("assistant", "Hi"), Turn("tool", "Error: gone", observation=True)),  # an assistant that called nothing
        (
            Turn("assistant", tool_calls=(ToolCall("f", {}, "1"),)),
            Turn("tool", "Error: gone", tool_call_id="9", observation=True),
        ),
    ],
)
def test_a_failure_without_its_cause_is_no_site(turns):
    assert find_error_sites(Trace("t", turns)) == []


def test_mini_swe_complaint_about_a_message_that_was_not_recorded():
    complaint = Turn("user", "Tool call error:\n\nError parsing tool call arguments", observation=True)
    turns = (*came_back("<returncode>0</returncode>\n<output>\na\n</output>", "bash", {"command": "ls"}), complaint)
    assert find_error_sites(Trace("t", turns, format="mini-swe-agent")) == []
    recorded = (*turns[:2], Turn("assistant", "x", tool_calls=(ToolCall("bash", '{"comm'),)), turns[2])
    [site] = find_error_sites(Trace("t", recorded, format="mini-swe-agent"))
    assert (site.turn, site.evidence_turn, site.kind) == (2, 3, "json_decode")


def test_an_unparsable_call_is_json_decode_whatever_the_words():
    turns = came_back("Error: gone", "f", '{"a": ')
    answered, alone = Trace("t", turns), Trace("t", turns[:1])
    assert [(s.kind, s.evidence_turn) for s in find_error_sites(answered)] == [("json_decode", 1)]
    assert [(s.kind, s.evidence_turn) for s in find_error_sites(alone)] == [("json_decode", 0)]


def test_an_unoffered_tool_is_tool_not_found_only_if_it_failed():
    tools = ({"type": "function", "function": {"name": "g", "parameters": {}}},)
    assert [s.kind for s in find_error_sites(trace_of("rs", tools=tools))] == ["tool_not_found"]


@pytest.mark.parametrize(
    "code, command, output, kind",
    [
        (0, "make", "error: 0 errors, Traceback (most recent call last)", None),
        (1, "grep -n x a.py", "", None),
        (123, "find . | xargs grep x", "", None),
        (1, "test -f x", "", None),
        (1, "diff a b", "1c1\n< x", None),
        (1, "git diff --no-index a b", "@@", None),
        (1, "grep -c x a.py", "0", None),
        (2, "grep x nowhere", "grep: nowhere: No such file or directory", "runtime_error"),
        (2, "ls y 2>/dev/null", "", "runtime_error"),
        (1, "pytest", "1 failed, 3 passed", "runtime_error"),
        (127, "tree", "bash: tree: command not found", "tool_not_found"),
        (
            1,
            "python a.py",
            'Traceback (most recent call last):\n  File "a"\nTypeError: f() missing 1 required '
            "positional argument: 'x'",
            "type_error",
        ),
        (
            1,
            "python a.py",
            "Traceback (most recent call last):\n  File \"a\"\nTypeError: 'int' object is not iterable",
            "runtime_error",
        ),
    ],
)
def test_return_codes(code, command, output, kind):
    turns = came_back(f"<returncode>{code}</returncode>\n<output>\n{output}\n</output>", "bash", {"command": command})
    assert [s.kind for s in find_error_sites(Trace("t", turns, format="mini-swe-agent"))] == ([kind] if kind else [])


def test_reading_about_errors_is_no_error():
    text = (
        "[File: a.py (3 lines total)]\n1:raise ValueError('failed')\n"
        "2:# Traceback (most recent call last):\n3:Error = Exception"
    )
    for format in ("swe-agent", "openai", "anthropic", "claude-code"):
        turns = (
            Turn("assistant", "open", tool_calls=() if format == "swe-agent" else (ToolCall("open", {}, "1"),)),
            Turn("user" if format == "swe-agent" else "tool", text, tool_call_id="1", observation=True),
        )
        assert find_error_sites(Trace("t", turns, format=format)) == []


def test_stale_observation_of_submit_is_no_error():
    turns = (
        Turn("assistant", "SELECT x"),
        Turn("user", "Error executing query: Unknown column 'x' in 'field list'", observation=True, failed=True),
        Turn("assistant", "submit"),
        Turn("user", "Error executing query: Unknown column 'x' in 'field list'", observation=True, failed=False),
    )
    assert [s.turn for s in find_error_sites(Trace("t", turns, format="intercode"))] == [0]


def test_a_registered_detector_is_asked_first_and_kinds_of_its_own_have_no_streak():
    def polite(trace, position):
        turn = trace.turns[position]
        return (
            Detection("communication", "no please") if turn.role == "assistant" and "please" not in turn.content else None
        )

    register_detector("mail", polite)
    try:
        sites = find_error_sites(Trace("t", tuple(Turn("assistant", "Do it.") for _ in range(5)), format="mail"))
        assert [(s.kind, s.streak, s.detector) for s in sites] == [("communication", 1, "polite")] * 5
    finally:
        DETECTORS.pop("mail")


def test_intent_is_what_was_said_and_not_the_action():
    code = Turn("assistant", "I list the files.\n```\nls\n```"), Turn("user", "ERROR: no", observation=True)
    assert find_error_sites(Trace("t", code, format="swe-agent"))[0].context.intent == "I list the files."
    sql = Turn("assistant", "SELECT x"), Turn("user", "Error executing query: no", observation=True)
    assert find_error_sites(Trace("t", sql, format="intercode"))[0].context.intent is None


def test_a_huge_turn_is_judged_quickly():
    import time

    start = time.process_time()
    for text in (
        "word " * 200_000,
        "Error: " + "[" * 10**6,
        "(Open file: x\n(Current directory: " * 30_000,
        "{" + '"error" ' * 10**5,
    ):
        for format in ("openai", "mini-swe-agent", "swe-agent", "intercode", "anthropic", "claude-code", "toolalpaca"):
            find_error_sites(
                Trace("t", (Turn("assistant", "x"), Turn("user", text, observation=True, failed=True)), format=format)
            )
    assert time.process_time() - start < 60
