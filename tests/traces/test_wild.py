# ruff: noqa: E501
"""Small traces after real files: what is read, where it failed, what is wanted, and what the hint says."""

import json
import sys
from pathlib import Path

import pytest

from composer_replication.core.trace import ToolCall, Trace, TraceProblem, Turn
from composer_replication.hints.layers import default_composite
from composer_replication.traces.chat.turns import chat_turns
from composer_replication.traces.error_detectors import DETECTORS
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

FOLDER = Path(__file__).parents[1] / "fixtures" / "traces_2"
CASES = sorted(path.name.removesuffix(".expect.json") for path in FOLDER.glob("*.expect.json"))


@pytest.mark.parametrize("name", CASES)
def test_a_small_trace_is_read_as_it_should(name):
    expected = json.loads((FOLDER / f"{name}.expect.json").read_text())
    path = next(p for p in FOLDER.glob(f"{name}.json*"))
    traces = list(read_traces(path, on_problem=lambda problem: None))
    assert len(traces) == expected["traces"]
    [trace] = traces
    sites = find_error_sites(trace)
    if "calls" in expected:
        assert sum(len(t.tool_calls) for t in trace.turns) == expected["calls"]
    if "results" in expected:
        assert sum(t.observation for t in trace.turns) == expected["results"]
    assert len(sites) == len(expected["sites"])
    for found, given in zip(sites, expected["sites"], strict=True):
        got = {"message_index": found.message_index, "evidence_index": found.evidence_index, "kind": found.kind}
        assert {key: got[key] for key in given} == given
    assert sum(bool(s.wanted) for s in sites) <= expected.get("wanted", len(sites))
    hints = [str(default_composite().hint(trace, s) or "") for s in sites]
    if word := expected.get("hint_should_mention"):
        assert any(word in hint for hint in hints)
    if word := expected.get("hint_should_not_mention"):
        assert not any(word in hint for hint in hints)
    if word := expected.get("error_should_mention"):  # a hint never repeats a name that does not exist
        assert any(word in site.context.error_message for site in sites)


def says(role, content="", **more):
    return {"role": role, "content": content} | more


def asked(name, id="c1", **arguments):
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return says("assistant", tool_calls=[call])


def read(tmp_path, rows, name="t.jsonl"):
    "The traces of a file with these rows, and what was reported."
    path, problems = tmp_path / name, []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_traces(path, on_problem=problems.append)), [p.what for p in problems]


MIDDLE = [asked("ls"), says("tool", "Error: no such folder", tool_call_id="c1"), says("assistant", "Well.")]


@pytest.mark.parametrize("role", ["session_meta", "Orchestrator (thought)"])
@pytest.mark.parametrize("form", ["messages", "lines", "prompt", "conversations", "trajectory"])
def test_a_message_of_an_unknown_role_is_left_out_and_said(tmp_path, role, form):
    messages = [says("user", "Go."), *MIDDLE, says(role, "x"), says(role, "y")]
    rows = {"lines": messages, "prompt": [{"prompt": messages[:1], "completion": messages[1:]}]}
    traces, problems = read(tmp_path, rows.get(form, [{form: messages}]))
    assert [len(t.turns) for t in traces] == [4] and len(find_error_sites(traces[0])) == 1
    assert problems == [f"role {role!r} is unknown, its 2 messages were left out"]


@pytest.mark.parametrize("messages", [[says("user", "Hi"), says("critic", "Hm")], [says("critic", "Hm")]])
def test_a_trace_without_an_answer_but_of_an_unknown_role_is_refused(tmp_path, messages):
    assert read(tmp_path, [{"messages": messages}]) == ([], ["role 'critic' is unknown"])


def test_outside_of_files_an_unknown_role_is_refused():
    with pytest.raises(TraceProblem, match="role 'critic' is unknown"):
        list(chat_turns([says("user", "Hi"), says("critic", "Hm")], strict=True))


@pytest.mark.parametrize("format", [name for name in DETECTORS if name != "*"])
@pytest.mark.parametrize("text", ["what no reader knows", '{"answer": 7}', "collected 3 items\n\nFAILED a.py::x"])
def test_a_detector_that_does_not_recognise_a_result_has_no_opinion(format, text):
    turns = (Turn("assistant", tool_calls=(ToolCall("run", {"command": "make"}),)), Turn("tool", text, observation=True))
    trace = Trace("t", turns, format=format)
    assert [detector(trace, 1) for detector in DETECTORS[format]] == [None] * len(DETECTORS[format])


SHOWN = "OBSERVATION:\n{}\n(Open file: n/a)\n(Current directory: /w)\nbash-$"


@pytest.mark.parametrize("text", ["collected 2 items\nFAILED a.py::x - assert 1 == 2\n==== 1 failed, 1 passed in 0.20s ====", '{"error": "no such host"}', "[exit 2]\nmake: no rule"])
def test_what_swe_agent_does_not_know_is_left_to_the_detectors_for_all(tmp_path, text):
    rows = [says("system", "s"), says("user", "Go."), says("assistant", "I run it.\n```\nmake test\n```"), says("user", SHOWN.format(text)), says("assistant", "Well.\n```\nls\n```")]
    [trace], _ = read(tmp_path, [{"trajectory": "", "history": rows}])
    assert trace.format == "swe-agent" and [s.evidence_index for s in find_error_sites(trace)] == [3]


GEMINI = [
    {"type": "init", "session_id": "s", "model": "gemini-3"},
    {"type": "message", "role": "user", "content": "Go."},
    {"type": "tool_use", "tool_id": "c1", "tool_name": "ls", "parameters": {}},
    {"type": "tool_result", "tool_id": "c1", "status": "error", "output": "no such folder"},
    {"type": "message", "role": "assistant", "content": "Well."},
]
CODEX = [
    {"type": "session_meta", "payload": {"id": "s"}},
    {"type": "response_item", "payload": {"type": "function_call", "name": "ls", "arguments": "{}", "call_id": "c1"}},
    {"type": "response_item", "payload": {"type": "function_call_output", "call_id": "c1", "output": "Error: no such folder"}},
    {"type": "response_item", "payload": {"type": "message", "role": "assistant", "content": "Well."}},
]
COPILOT = [
    {"type": "session.start", "data": {"sessionId": "s"}},
    {"type": "assistant.message", "data": {"content": "", "toolRequests": [{"toolCallId": "c1", "name": "ls", "arguments": {}}]}},
    {"type": "tool.execution_complete", "data": {"toolCallId": "c1", "success": False, "error": {"message": "no such folder"}}},
    {"type": "assistant.message", "data": {"content": "Well."}},
]


@pytest.mark.parametrize("rows, format", [(GEMINI, "gemini-cli"), (CODEX, "codex"), (COPILOT, "copilot-cli")])
@pytest.mark.parametrize("first", [says("user", "Go."), {"type": "message", "role": "user", "content": "Go."}])
def test_the_first_line_alone_does_not_decide_the_format(tmp_path, rows, format, first):
    [trace], problems = read(tmp_path, [first, *rows])
    assert trace.format == format and len(find_error_sites(trace)) == 1 and not problems
    assert trace.turns[0].content == "Go."


def claude(uuid, parent, role, content, **more):
    message = {"role": role, "content": content} | ({"id": more.pop("id", uuid)} if role == "assistant" else {})
    return {"uuid": uuid, "parentUuid": parent, "sessionId": "s", "type": role, "message": message} | more


def calls(id, name="Bash", **given):
    return {"type": "tool_use", "id": id, "name": name, "input": given}


def answers(id, text, **more):
    return {"type": "tool_result", "tool_use_id": id, "content": text} | more


TREE = [
    claude("u1", None, "user", "Go."),
    claude("a1", "u1", "assistant", [calls("c1", command="ls")], id="m1"),
    claude("a2", "a1", "assistant", [calls("c2", command="pwd")], id="m1"),
    claude("u2", "a1", "user", [answers("c1", "a b", is_error=False)]),
    claude("u3", "a2", "user", [answers("c2", "Exit code 1\nno such folder", is_error=True)]),
    {"uuid": "x", "parentUuid": "u3", "sessionId": "s", "type": "attachment"},
    claude("a3", "x", "assistant", [{"type": "text", "text": "Well."}], id="m2"),
    claude("u4", "a3", "user", "And?"),
    claude("a4", "u4", "assistant", [{"type": "text", "text": "Done."}], id="m3"),
]


@pytest.mark.parametrize("order", [[8, 7, 6, 5, 4, 3, 2, 1, 0], [0, 3, 1, 4, 2, 5, 6, 7, 8], [0, 1, 2, 3, 4, 8, 5, 7, 6], [0, 1, 2, 3, 4, 5, 8, 6, 7]])
def test_lines_of_claude_code_come_in_the_order_of_their_parents(tmp_path, order):
    [as_made], _ = read(tmp_path, TREE)
    [found], problems = read(tmp_path, [TREE[n] for n in order])
    assert [(t.role, t.content, t.tool_calls) for t in found.turns] == [(t.role, t.content, t.tool_calls) for t in as_made.turns]
    assert len(as_made.turns) == 7 and not problems and len(find_error_sites(found)) == 1


@pytest.mark.parametrize("first", [{"ts": 1, "type": "say", "say": "text", "text": "Fix it."}, {"ts": 1, "type": "ask", "ask": "resume_task"}])
@pytest.mark.parametrize("lines", [False, True])
def test_what_cline_shows_names_the_file_beside_it(tmp_path, first, lines):
    rows = [first, {"ts": 2, "type": "say", "say": "api_req_started", "text": "{}"}]
    traces, problems = read(tmp_path, rows if lines else [rows])
    assert not traces and len(problems) == 1 and "api_conversation_history.json" in problems[0]


UNPARSED = "Previous response had parsing errors:\nERROR: No valid JSON found in response\n\nPlease fix these issues and provide a proper JSON response."
TYPED = json.dumps({"analysis": "x", "plan": "y", "commands": [{"keystrokes": "pytest -q\n", "duration": 5.0}]})
SCREEN = "New Terminal Output:\nroot@x:/app# pytest -q\nbash: pytest: command not found\nroot@x:/app# "


@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize("screen", ["New Terminal Output:", "Current Terminal Screen:"])
def test_what_terminus_answers_in_role_user_is_a_result(tmp_path, key, screen):
    rows = [says("user", "Task."), says("assistant", TYPED), says("user", SCREEN.replace("New Terminal Output:", screen)), says("assistant", "I look {"),
            says("user", UNPARSED), says("assistant", TYPED), says("user", f"{screen}\n3 passed in 0.2s"), says("assistant", "Done.")]
    [trace], _ = read(tmp_path, [{key: rows}])
    assert [t.observation for t in trace.turns] == [False, False, True, False, True, False, True, False]
    sites = find_error_sites(trace)
    assert [(s.message_index, s.kind) for s in sites] == [(1, "tool_not_found"), (3, "json_decode")]
    hint = default_composite().hint(trace, sites[1]).text
    assert "JSON" in hint and "arguments" not in hint


def test_terminus_parsing_errors_in_a_trajectory(tmp_path):
    steps = [{"step_id": 1, "source": "user", "message": "Task."}, {"step_id": 2, "source": "agent", "message": "I look {", "observation": {"results": [{"content": UNPARSED}]}}]
    [trace], _ = read(tmp_path, [{"schema_version": "ATIF-v1.5", "session_id": "s", "agent": {"name": "terminus-2"}, "steps": steps}])
    assert [s.kind for s in find_error_sites(trace)] == ["json_decode"]


def test_a_person_who_quotes_a_terminal_gives_no_result(tmp_path):
    [trace], _ = read(tmp_path, [{"messages": [says("user", "New Terminal Output:\nx"), says("assistant", "Hm."), says("user", "The terminal output is red.")]}])
    assert not any(t.observation for t in trace.turns)


def work_of(function):
    "How many functions were called, generators resumed included: a measure of work that no other load changes."
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event == "call"
    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("order", [1, -1])
def test_work_on_a_session_grows_with_its_length(tmp_path, order):
    def work(n):
        rows, parent = [], None
        for i in range(n):
            more = [claude(f"a{i}", f"u{i}", "assistant", [calls(f"c{i}", command="make")]), claude(f"r{i}", f"a{i}", "user", [answers(f"c{i}", "Exit code 2\nboom", is_error=True)])]
            rows += [claude(f"u{i}", parent, "user", "Reproduce the KeyError."), *more]
            parent = f"r{i}"
        path = tmp_path / f"{n}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[::order]))
        found = []
        made = work_of(lambda: found.extend(find_error_sites(trace) for trace in read_traces(path)))
        assert len(found[0]) == n
        return made
    assert work(800) < 2.2 * work(400)
