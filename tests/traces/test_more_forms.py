"""Further forms in which people keep traces: envelopes, columns, one message a line, other tools' fields; and results in words."""  # noqa: E501

import json
import re
import zipfile

import pytest
from chats import answered, asked, chat_of, problems_of, read, says

from composer_replication.core.trace import ToolCall, Trace, TraceProblem
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.error_text import ERROR_WORDS
from composer_replication.traces.exit_status import exit_status
from composer_replication.traces.export import write_traces
from composer_replication.traces.formats.base import read_record
from composer_replication.traces.read import read_traces, tally

CHAT = [says("user", "Go."), asked(("bash", "c1")), answered("Error: no rule"), says("assistant", "Done.")]
TRACEBACK = 'start\nTraceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: x'
CHAT_ROLES = ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "value",
    [
        {"data": [{"messages": CHAT}, {"messages": CHAT}]},
        {"records": [CHAT, CHAT]},
        {"features": [], "rows": [{"row_idx": n, "row": {"messages": CHAT}} for n in range(2)], "num_rows_total": 2},
        {"examples": [{"trace": {"messages": json.dumps(CHAT)}}, {"messages": CHAT}]},
        {"task-1": {"messages": CHAT}, "task-2": {"messages": CHAT}},
        [{"values": {"messages": CHAT}, "next": []}, {"values": {"messages": CHAT}}],
        [CHAT, CHAT],
        [{"row": {"messages": CHAT}}, {"row": {"messages": CHAT}}],
        [{"run": {"messages": CHAT}, "project": "p"}, {"run": {"messages": CHAT}}],
        {"payload": [{"attempt": CHAT}, {"attempt": CHAT}], "version": 3},
        {"train": [{"messages": CHAT}], "test": [{"messages": CHAT}]},
        {"train": {"data": [{"messages": CHAT}]}, "test": {"data": [{"messages": CHAT}]}},
        {"T-1": {"data": [{"messages": CHAT}, {"messages": CHAT}]}},
    ],
)
def test_records_in_envelopes(tmp_path, value):
    traces = read(tmp_path, value)
    assert [[t.role for t in trace.turns] for trace in traces] == [CHAT_ROLES] * 2
    assert len({trace.trace_id for trace in traces}) == 2


def test_an_envelope_keeps_what_stands_beside_the_chat(tmp_path):
    [one, two] = read(tmp_path, {"a": {"messages": CHAT}, "b": {"messages": CHAT}})
    assert (one.trace_id, two.trace_id) == ("a", "b")
    [trace] = read(tmp_path, [{"trace_id": "x", "reward": 1, "played": {"messages": CHAT}}], "t.jsonl")
    assert (trace.trace_id, trace.reward) == ("x", 1.0)
    [trace] = read(tmp_path, {"django-1234": {"messages": CHAT}})
    assert trace.trace_id == "django-1234"


@pytest.mark.parametrize(
    "value",
    [
        {"steps": [1]},
        {"steps": [None]},
        {"events": [[]]},
        {"data": [1, 2]},
        {"data": []},
        [[[1]]],
        [[]],
        {"samples": [3], "eval": 4},
        {"trajectory": [None], "query": "Q"},
        {"nodes": [], "verifiers": 1},
        {"eval": {"model": "m"}, "samples": []},
        {"simulations": []},
        {"type": "user", "uuid": "u", "sessionId": "s", "message": {"role": "user", "content": "Hello"}},
        {"x": {"trajectory": ["text"]}},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[2:]},
        {"prompt": CHAT[0], "chosen": CHAT[3], "rejected": CHAT[3]},
        {"trajectory": [{"thought": "a", "action": "b", "observation": "c"}, "text"], "query": "Q"},
        {"trajectory": [{"action": "b", "observation": "c"}], "instruction": "do it"},
    ],
)
def test_what_is_in_no_form_is_refused_in_a_sentence(tmp_path, value):
    assert problems_of(tmp_path, value)


@pytest.mark.parametrize(
    "key", ["trace", "steps", "turns", "history", "chat_history", "dialogue", "traj", "contents", "conversation"]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_columns_of_messages(key, as_text):
    trace = read_record({key: json.dumps(CHAT) if as_text else CHAT})
    assert [t.role for t in trace.turns] == CHAT_ROLES and [s.turn for s in find_error_sites(trace)] == [1]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT[:3], "response": {"choices": [{"message": CHAT[3]}]}},
        {"messages": CHAT[:3], "choices": [{"message": CHAT[3]}]},
        {"request": {"model": "m", "messages": CHAT[:3]}, "response": {"choices": [{"message": CHAT[3]}], "model": "m"}},
        {"inputs": {"messages": CHAT[:3]}, "outputs": CHAT[3]},
        {"input": {"messages": CHAT[:3]}, "output": CHAT[3]},
        {"input": CHAT[:3], "output": CHAT[3]},
        {"body": {"messages": CHAT}, "custom_id": "x"},
        {"messages": CHAT[:3], "response": {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}},
    ],
)
def test_the_last_answer_may_stand_beside_the_messages(record, tmp_path):
    [trace] = read(tmp_path, [record], "t.jsonl")
    assert [(t.role, t.content) for t in trace.turns][-1] == ("assistant", "Done.") and len(trace.turns) == 4


@pytest.mark.parametrize(
    "rows", [CHAT, [{"type": "human", "content": "Go."}, *CHAT[1:]], [{"from": "human", "value": "Go."}, *CHAT[1:]]]
)
@pytest.mark.parametrize("end, start", [("\n", b""), ("\r\n", b"\xef\xbb\xbf")])
def test_one_message_a_line(tmp_path, rows, end, start):
    [trace] = read(tmp_path, start + (end.join(map(json.dumps, rows)) + end).encode(), "m.jsonl")
    assert trace.trace_id == "m" and [t.role for t in trace.turns] == CHAT_ROLES and len(find_error_sites(trace)) == 1


def test_messages_of_several_chats_in_lines_are_parted_by_their_id(tmp_path):
    rows = [message | {"session_id": id} for message in CHAT for id in ("a", "b")]
    assert [(t.trace_id, len(t.turns)) for t in read(tmp_path, rows, "m.jsonl")] == [("a", 4), ("b", 4)]


def test_a_line_that_is_no_message_is_said(tmp_path):
    [problem] = problems_of(tmp_path, [*CHAT, {"level": "info"}], "m.jsonl", traces=1)
    assert "line 5" in problem


def kimi(*rows):
    return [{"role": "_system_prompt", "content": "S"}, {"role": "_checkpoint", "id": 0}, says("user", "Go."), *rows]


def kimi_call(command):
    made = [{"type": "function", "id": "c1", "function": {"name": "Shell", "arguments": json.dumps({"command": command})}}]
    return says(
        "assistant", [{"type": "think", "think": "Hm.", "encrypted": None}, {"type": "text", "text": "I look."}], tool_calls=made
    )


def kimi_result(*texts):
    return says("tool", [{"type": "text", "text": text} for text in texts], tool_call_id="c1")


@pytest.mark.parametrize(
    "command, texts, message",
    [
        ("make", ["<system>ERROR: Command failed with exit code: 2.</system>", "make: no rule"], "make: no rule"),
        ("grep x a", ["<system>ERROR: Command failed with exit code: 1.</system>"], None),
        ("make", ["<system>Command executed successfully.</system>", "Error: 0 found"], None),
        ("make", ["<system>ERROR: Invalid arguments: command missing</system>"], "ERROR: Invalid arguments: command missing"),
        ("make", ["<system>Tool output is empty.</system>"], None),
    ],
)
def test_kimi_cli(tmp_path, command, texts, message):
    rows = kimi(
        kimi_call(command),
        {"role": "_usage", "token_count": 9},
        kimi_result(*texts),
        {"role": "_checkpoint", "id": 1},
        says("assistant", "Done."),
    )
    [trace] = read(tmp_path, rows, "context.jsonl")
    assert (trace.format, [t.role for t in trace.turns]) == ("kimi-cli", ["system", "user", "assistant", "tool", "assistant"])
    assert trace.turns[2].thinking == "Hm." and trace.turns[2].tool_calls == (ToolCall("Shell", {"command": command}, "c1"),)
    assert [s.context.error_message for s in find_error_sites(trace)] == [message] * (message is not None)


def event(type, **data):
    return {"type": type, "data": data, "id": "e", "timestamp": "t", "parentId": None}


def copilot(*rows):
    return [
        event("session.start", sessionId="s", selectedModel="m", context={"cwd": "/w"}),
        event("user.message", content="Go.", transformedContent="+"),
        event("assistant.turn_start", turnId="0"),
        *rows,
        event("assistant.turn_end", turnId="0"),
    ]


def requests(*names, text="", **more):
    return event(
        "assistant.message",
        messageId="m",
        content=text,
        toolRequests=[{"toolCallId": name, "name": name, "arguments": {"command": name}, "type": "function"} for name in names],
        **more,
    )


def completed(name, **fields):
    return event("tool.execution_complete", toolCallId=name, **fields)


@pytest.mark.parametrize(
    "outcome, message",
    [
        ({"success": True, "result": {"content": "boom\n<exited with exit code 2>"}}, "boom"),
        ({"success": True, "result": {"content": "fine\n<exited with exit code 0>", "detailedContent": "fine"}}, None),
        ({"success": False, "error": {"message": "no such path", "code": "failure"}}, "no such path"),
        ({"success": False, "error": {"message": "The user rejected this tool call.", "code": "rejected"}}, None),
        ({"success": False, "error": {"message": "Denied by a hook", "code": "denied"}}, "Denied by a hook"),
        ({"success": True, "result": "fine"}, None),
        ({"success": True}, None),
    ],
)
def test_copilot_cli(tmp_path, outcome, message):
    rows = copilot(
        requests("bash", text="I make.", reasoningText="Hm."),
        event("tool.execution_start", toolCallId="bash", toolName="bash"),
        completed("bash", **outcome),
        requests(text="Done."),
    )
    [trace] = read(tmp_path, rows, "events.jsonl")
    assert (trace.format, trace.trace_id, trace.model, trace.source) == ("copilot-cli", "s", "m", "/w")
    assert [(t.role, t.thinking) for t in trace.turns] == [
        ("user", None),
        ("assistant", "Hm."),
        ("tool", None),
        ("assistant", None),
    ]
    assert [s.context.error_message for s in find_error_sites(trace)] == [message] * (message is not None)
    assert tally(trace)["unanswered"] == tally(trace)["loose"] == 0


def test_copilot_cli_in_parallel_with_a_sub_agent_and_resumed(tmp_path):
    inner = [
        requests("view", parentToolCallId="task"),
        completed("view", success=False, error={"message": "no file"}, parentToolCallId="task"),
    ]
    first = copilot(
        requests("task", "bash"),
        completed("bash", success=True, result={"content": "ok"}),
        *inner,
        completed("task", success=True, result={"content": "found"}),
    )
    rows = [*first, event("session.resume", resumeTime="t"), event("user.message", content="And?"), requests(text="Done.")]
    main, side = read(tmp_path, rows, "events.jsonl")
    assert [t.role for t in main.turns] == ["user", "assistant", "tool", "tool", "user", "assistant"] and find_error_sites(
        main
    ) == []
    assert side.trace_id == "s/task" and [s.context.tool_name for s in find_error_sites(side)] == ["view"]


def test_copilot_cli_without_requests_takes_calls_from_their_start(tmp_path):
    rows = copilot(
        event("assistant.message", content="I look."),
        event("tool.execution_start", toolCallId="c", toolName="view", arguments={"path": "a"}),
        completed("c", success=False, error={"message": "no file"}),
    )
    [trace] = read(tmp_path, rows, "events.jsonl")
    assert [s.context.tool_name for s in find_error_sites(trace)] == ["view"] and tally(trace)["calls"] == 1


def action(id, kind, call=None, response="r", source="agent", **args):
    made = {"id": id, "source": source, "action": kind, "message": "...", "args": args}
    if call:
        wanted = [
            {"id": c, "type": "function", "function": {"name": "execute_bash", "arguments": json.dumps({"command": c})}}
            for c in (call, "other")
        ]
        made["tool_call_metadata"] = {
            "function_name": "execute_bash",
            "tool_call_id": call,
            "total_calls_in_response": 1,
            "model_response": {
                "id": response,
                "model": "m",
                "choices": [
                    {"message": {"role": "assistant", "content": "I make.", "tool_calls": wanted, "reasoning_content": "Hm."}}
                ],
            },
        }
    return made


def seen(id, cause, kind, content, call=None, **fields):
    made = {"id": id, "source": "agent", "cause": cause, "observation": kind, "content": content, "message": "..."} | fields
    return made | ({"tool_call_metadata": {"function_name": "execute_bash", "tool_call_id": call}} if call else {})


TOOLS = [{"type": "function", "function": {"name": "execute_bash", "parameters": {}}}]
NOISE = [
    {"id": 8, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {"agent_state": "running"}},
    {"id": 9, "source": "user", "action": "recall", "args": {"query": "Go."}},
    {"id": 10, "source": "user", "cause": 9, "observation": "recall", "content": "x"},
]
EVENTS = [
    action(0, "system", content="S", tools=TOOLS),
    action(1, "message", source="user", content="Go."),
    *NOISE,
    action(2, "run", "c1", command="c1", thought="I make."),
    seen(3, 2, "run", "make: no rule", "c1", extras={"command": "c1", "metadata": {"exit_code": 2}}, success=False),
    action(4, "finish", final_thought="Done."),
]
OLD_EVENTS = [  # 0.9: no metadata of calls, the exit code beside the command
    action(0, "message", source="user", content="Go."),
    action(1, "run", command="c1", thought="I make."),
    seen(2, 1, "run", "make: no rule", extras={"command": "c1", "command_id": 1, "exit_code": 2}),
    action(3, "message", content="Done."),
]


@pytest.mark.parametrize("events, roles, tool", [(EVENTS, "suata", "execute_bash"), (OLD_EVENTS, "uata", "run")])
@pytest.mark.parametrize("form", ["list", "history", "trajectory", "lines", "pairs"])
def test_openhands_before_1(tmp_path, events, roles, tool, form):
    if form == "pairs":  # SWE-bench outputs of 0.9: [[action, observation], ...]
        if events is EVENTS:
            pytest.skip("only old outputs hold pairs")
        events = {
            "instance_id": "i",
            "history": [
                [events[0], {"observation": "null", "content": "", "source": "agent"}],
                events[1:3],
                [events[3], {"observation": "null", "content": "", "source": "user"}],
            ],
        }
    value = {"list": events, "history": {"instance_id": "i", "history": events}, "trajectory": {"trajectory": events}}.get(
        form, events
    )
    [trace] = read(tmp_path, value, "output.jsonl" if form == "lines" else "t.json")
    assert trace.format == "openhands" and "".join(t.role[0] for t in trace.turns).replace("s", "s") == roles
    assert [(s.kind, s.context.tool_name, s.context.error_message) for s in find_error_sites(trace)] == [
        ("runtime_error", tool, "make: no rule")
    ]
    assert tally(trace)["unanswered"] == 0 and trace.turns[-1].content == "Done."
    if events is EVENTS:
        assert trace.tool_names == ("execute_bash",) and trace.turns[2].thinking == "Hm." and trace.model == "m"


@pytest.mark.parametrize(
    "kind, content, extras, message",
    [
        ("error", "No such tool parameter", {}, "No such tool parameter"),
        ("user_rejected", "No.", {}, None),
        ("edit", "ERROR:\nNo replacement was performed", {}, "ERROR:\nNo replacement was performed"),
        ("run", "still running", {"metadata": {"exit_code": -1}}, None),
        ("run", "", {"metadata": {"exit_code": 1}}, None),
        ("browse", "page", {"error": True}, "page"),
        ("mcp", '{"isError": true, "content": "bad"}', {}, "bad"),
    ],
)
def test_results_of_openhands_before_1(kind, content, extras, message, tmp_path):
    events = [*EVENTS[:2], action(2, "run", "c1", command="grep x a"), seen(3, 2, kind, content, "c1", extras=extras), EVENTS[-1]]
    [trace] = read(tmp_path, events)
    assert [s.context.error_message for s in find_error_sites(trace)] == [message] * (message is not None)


def test_parallel_calls_of_openhands_before_1_are_one_turn(tmp_path):
    events = [
        *EVENTS[:2],
        action(2, "run", "c1"),
        action(3, "run", "c2"),
        seen(4, 3, "run", "ok", "c2"),
        seen(5, 2, "error", "no", "c1"),
    ]
    [trace] = read(tmp_path, events)
    assert [len(t.tool_calls) for t in trace.turns if t.role == "assistant"] == [2]
    assert [s.context.error_message for s in find_error_sites(trace)] == ["no"] and tally(trace)["loose"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"thinking": "Hm."},
        {"reasoning_text": "Hm."},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "format": "x"}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, {"type": "reasoning.summary", "summary": "Hm."}]},
        {"additional_kwargs": {"reasoning_content": "Hm."}},
        {"provider_specific_fields": {"reasoning_content": "Hm."}},
    ],
)
def test_the_reasoning_beside_an_answer_is_kept(fields):
    assert chat_of(says("assistant", "Done.", **fields)).turns[1].thinking == "Hm."


@pytest.mark.parametrize("role", ["User", "USER", "Human"])
def test_roles_in_capitals(role):
    assert [t.role for t in chat_of(says("Assistant", "Hi"), says(role, "Go."), says("AI", "ok")).turns] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_roles_of_smolagents():
    listed = "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'python', 'arguments': 'print(1)'}}]"
    trace = chat_of(
        says("tool-call", [{"type": "text", "text": listed}]),
        says("tool-response", [{"type": "text", "text": "Call id: call_1\nError:\nboom"}]),
    )
    assert trace.turns[1].tool_calls[0].name == "python" and [t.role for t in trace.turns] == ["user", "assistant", "tool"]
    assert [s.context.tool_name for s in find_error_sites(trace)] == ["python"]


@pytest.mark.parametrize(
    "content",
    [
        {"type": "text", "text": "Go."},
        [{"type": "text", "text": {"value": "Go.", "annotations": []}}],
        {"content_type": "text", "parts": ["Go."]},
        ["Go."],
    ],
)
def test_content_that_is_an_object(content):
    assert chat_of(says("user", content), says("assistant", "ok")).turns[1].content == "Go."


@pytest.mark.parametrize(
    "call, arguments",
    [
        ({"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}, {"input": "*** Begin"}),
        ({"id": "c1", "type": "custom", "custom": {"name": "patch", "input": '{"a": 1}'}}, {"a": 1}),
        ({"id": "c1", "type": "function", "function": {"name": "patch", "arguments": {"a": 1}}, "index": 0}, {"a": 1}),
    ],
)
def test_custom_tools(call, arguments):
    trace = chat_of(says("assistant", None, tool_calls=[call]), answered("Error: no"))
    assert trace.turns[1].tool_calls == (ToolCall("patch", arguments, "c1"),) and len(find_error_sites(trace)) == 1


def test_a_server_tool_s_error_is_one():
    def search(content):
        return chat_of(
            says(
                "assistant",
                [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": content},
                ],
            )
        )

    [site] = find_error_sites(search({"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}))
    assert site.context.error_message == "max_uses_exceeded"
    assert find_error_sites(search([{"type": "web_search_result", "title": "Error: explained", "url": "u"}])) == []


def test_opencode_writes_the_exit_status_as_exit():
    def run(exit):
        state = {"status": "completed", "input": {"command": "make"}, "output": "boom", "metadata": {"exit": exit}}
        return chat_of(
            {"info": {"role": "assistant"}, "parts": [{"type": "tool", "callID": "c", "tool": "bash", "state": state}]}
        )

    assert len(find_error_sites(run(2))) == 1 and find_error_sites(run(0)) == []


def test_values_of_one_line_get_ids_of_their_own(tmp_path):
    for between in ("\r", "", " "):
        assert (
            len({t.trace_id for t in read(tmp_path, between.join([json.dumps({"messages": CHAT})] * 3).encode(), "t.jsonl")}) == 3
        )


def test_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": json.dumps(CHAT), "task_id": "x"}, {"messages": json.dumps(CHAT), "task_id": "y"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    assert [(t.task_id, len(t.turns)) for t in read_traces(tmp_path / "t.parquet", strict=True)] == [("x", 4), ("y", 4)]
    plain = [{"conversations": [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "ok"}], "n": 1}]
    datasets.Dataset.from_list(plain).to_parquet(tmp_path / "p.parquet")
    assert [len(t.turns) for t in read_traces(tmp_path / "p.parquet", strict=True)] == [2]
    assert "parquet" in problems_of(tmp_path, (tmp_path / "p.parquet").read_bytes()[:300], "cut.parquet")[0].lower()


@pytest.mark.parametrize(
    "start, name, words",
    [
        (b"SQLite format 3\x00", "t.db", "SQLite"),
        (b"id,messages\n1,2\n", "t.csv", "neither JSON"),
        (b"\x28\xb5\x2f\xfd", "t.zst", "zstd -d"),
        (b"BZh9", "t.bz2", "bzip2 -d"),
        (b"\xfd7zXZ\x00", "t.xz", "xz -d"),
    ],
)
def test_files_of_other_kinds_say_what_to_do(tmp_path, start, name, words):
    [problem] = problems_of(tmp_path, start + b"\x01" * 200, name)
    assert words in problem


def test_a_zip_of_trace_files(tmp_path):
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", json.dumps({"messages": CHAT}))
    assert "unzip it" in problems_of(tmp_path, path.read_bytes(), "t.zip")[0]


# What a command printed where nobody recorded its exit status: (command or @tool, text)
FAILED = [
    *((row["of"], row["example"]) for part in ("start", "end", "output") for row in ERROR_WORDS[part]),
    ("pytest", "==== 2 errors in 0.2s ===="),
    ("go test ./...", "--- FAIL: TestA (0.00s)\n    a_test.go:3: bad\nFAIL\nexit status 1\nFAIL\tx\t0.1s"),
    ("ruff check", "a.py:1:1: F401 `os` imported but unused\nFound 12 errors."),
    ("./a.out", "Segmentation fault (core dumped)"),
    ("git push", "To github.com:x\n ! [rejected]\nerror: failed to push some refs to 'github.com:x'"),
    ("@api", '{"code": 400, "message": "bad request"}'),
    ("@api", '{"errors": [{"message": "bad field"}], "data": null}'),
    ("@api", '{"success": "false", "message": "x"}'),
    ("@api", '{"result": "Error: bad"}'),
    ("@api", '{"name": "f", "content": "{\'error\': \'x\'}"}'),
    ("@api", '{"name": "f", "content": {"error": "x"}}'),
    ("@api", '[{"type": "text", "text": "Error: x"}]'),
    ("@api", '{"detail": [{"loc": ["body"], "msg": "field required", "type": "missing"}]}'),
    ("@api", "Tool x not found. Available tools: a, b"),
    ("@api", '"Error: quoted"'),
    ("@read_file", "Error: ENOENT: no such file or directory, open 'x'"),
    ("python x.py", "Error: 1"),
    ("make", "Error: Command failed with exit code 2\nno rule"),
    *(("@ls", text) for text in ("Error: no", "ERROR - no", "error\nno", "Error. Try again", "error_")),
    ("@ls", "sqlite3.OperationalError: no such column: nme"),
    ("@api", "Error 404: Not Found"),
    ("@api", "Error reading the overview page"),
    ("@api", "Error while opening what was asked for"),
    ("@api", "Error: what is x? See the guide."),
    ("python x.py", TRACEBACK),
    ("python x.py", TRACEBACK + "\nDone with errors"),
    ("python x.py", TRACEBACK + "\nnot finished successfully"),
    ("pytest", "3 passed\n" + TRACEBACK),
    ("make test", TRACEBACK + "\n3 passed\nmake: *** [test] Error 1"),
    ("make", "building\nProcess exited with code 1"),
    ("cat ci.log", "cat: ci.log: No such file\n[Command finished with exit code 1]"),
]
FINE = [
    *(("@open_page", row["example"]) for row in ERROR_WORDS["heading"]),
    *(("python x.py", f"{TRACEBACK}\nagain\n{row['example']}\n") for row in ERROR_WORDS["well"]),
    *(("@ls", text) for text in ("error.log\napp.py", "error_count: 0, passed: 12", "error-prone.md", "errors/a.txt")),
    *(("@ls", text) for text in ("Errors: 0", "stderror: none was written", "KeyError is what dict raises: see the page.")),
    ("@browse", "Error 500: causes and fixes\nA server answers so when it breaks."),
    ("@browse", "HTTP 404 explained\nWhat it means."),
    ("@browse", "Permission denied: what it means in Linux\nA file has a mode."),
    ("curl http://x", "Error boundaries in React - Overview\nThey catch errors."),
    ("python x.py", TRACEBACK + "\nthe row is left out\n4 passed, 1 warning in 0.1s"),
    ("rg foo", "Chunk ID: 2\nWall time: 0.1 seconds\nProcess exited with code 1\nOriginal token count: 0\nOutput:\n"),
    ("grep foo x", "Exit code: 1\nWall time: 0.1 seconds\nOutput:\n"),
    ("grep foo x", "Error: Command failed with exit code 1"),
    ("pytest -k error", "tests/test_error.py::test_error_handling PASSED\n==== 3 passed in 0.1s ===="),
    ("pytest", "==== 3 passed, 1 xfailed in 0.1s ===="),
    ("npm test", "Tests:       4 passed, 4 total\nSnapshots:   0 total\nTime: 1 s"),
    ("go test ./...", "ok  \tx\t0.1s"),
    ("cargo test", "test error_is_reported ... ok\n\ntest result: ok. 2 passed; 0 failed"),
    ("mypy .", "Success: no issues found in 3 source files"),
    ("ruff check --fix", "Found 2 errors (2 fixed, 0 remaining)."),
    ("tsc", "Found 0 errors. Watching for file changes."),
    ("make", "Build finished: 0 errors, 2 warnings"),
    ("eslint .", "0 problems (0 errors, 0 warnings)"),
    ("python x.py", "Error rate: 0.05\nAccuracy: 0.9"),
    ("python x.py", "error: 0.023"),
    ("python x.py", "Error: 1.5e-3 %"),
    ("python x.py", "ERROR:root:one row was bad\ndone"),
    ("python x.py", "Error handling is tested below\nok"),
    ("cat err.log", 'Error: boom\nTraceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: x'),
    ("tail -5 test.log", "==== 1 failed, 3 passed in 0.2s ===="),
    *((how, text) for how in ("@read_file", "cat ci.log") for text in ("building\nProcess exited with code 1", TRACEBACK)),
    ("make", "The process exited with code 1 last night, the page says.\nToday it runs."),
    ("make", "Exit codes:\n0 fine\n1 failed"),
    ("make", "[The command has no new output after 10 seconds.]\n[Command finished with exit code -1]"),
    ("make", "Failed: 0, passed: 3"),
    ("make", "No errors."),
    *(("make", text) for text in ('{"output": "ok", "exit_code": 0, "error": null}', '{"error": null}', '{"error": "none"}')),
    *(("make", text) for text in ('{"errors": 0, "passed": 3}', '{"success": true, "error": null, "output": "Error: 0 found"}')),
    *(("make", text) for text in ('{"id": 7, "status": "cancelled"}', '{"exit_code": null, "output": "running"}')),
    ("grep -rn panic src", "panic: is a word\nerror: failed to push some refs"),
    ("dotnet build", "Build succeeded.\n    0 Warning(s)\n    0 Error(s)"),
    ("git log", "commit abc\n    Fix error: no rule when failing"),
    ("@view", '{"path": "a", "content": "Error: x"}'),
    ("@lint", '{"file": "a.py", "errors": [{"message": "unused"}]}'),
    ("@api", '{"code": 0, "message": "ok"}'),
    ("@api", '{"code": 200, "msg": "ok", "errors": []}'),
    ("@api", '{"code": 404}'),
    ("@search", "No matches found"),
    ("@search_flights", "No flights found"),
]  # fmt: skip


@pytest.mark.parametrize("asked_for, text, failed", [(*row, True) for row in FAILED] + [(*row, False) for row in FINE])
def test_results_in_words(asked_for, text, failed):
    tool, given = (asked_for[1:], {"path": "x"}) if asked_for[0] == "@" else ("bash", {"command": asked_for})
    call = {"id": "c1", "type": "function", "function": {"name": tool, "arguments": json.dumps(given)}}
    assert bool(find_error_sites(chat_of(says("assistant", None, tool_calls=[call]), answered(text)))) is failed


@pytest.mark.parametrize("part", ERROR_WORDS)
def test_each_row_of_the_table_is_needed_for_its_example(part):
    front = r"[\[(*\"\s]*(?:error: )?"
    for row in ERROR_WORDS[part]:
        shown = row["example"].split("\n") if part == "end" else [row["example"]]
        bare = part in ("kind", "outside")
        ways = [re.compile(other["mark"] if bare else front + other["mark"], 0 if part in ("start", "end") else re.I)
                for other in ERROR_WORDS[part]]  # fmt: skip
        find = re.Pattern.search if bare else re.Pattern.match
        assert [way for way in ways if any(find(way, line) for line in shown)] == [ways[ERROR_WORDS[part].index(row)]], row


@pytest.mark.parametrize("row", ERROR_WORDS["status"], ids=str)
def test_each_line_of_a_status_is_read_with_any_number(row):
    assert exit_status(row["example"])[0] == 2 and exit_status(row["example"].replace("2", "0"))[0] == 0


@pytest.mark.parametrize(
    "head", ["Exit code: 2", "Command failed with exit code 2", "Exit code: 2\nWall time: 0.2 seconds\nSignal: 0"]
)
@pytest.mark.parametrize(
    "line", ["make: no rule", "Error: boom", "src/a.py: bad", "ld: symbol not found\nclang: error: linker failed",
             "Runtime error: bad index", "Command failed: git push", "Command not found: foo", "Directory not found: /w/x"]
)
def test_what_follows_an_exit_status_is_the_message(head, line):
    [site] = find_error_sites(chat_of(asked(("bash", "c1")), answered(f"{head}\n{line}")))
    assert site.context.error_message == line


BIG = 2**70 + 1
BIG_CALLS = {
    "text": [{"id": "c1", "function": {"name": "f", "arguments": f'{{"n": {BIG}}}'}}],
    "object": [{"id": "c1", "name": "f", "args": {"n": BIG}}],
    "json text": [f'{{"id": "c1", "name": "f", "arguments": {{"n": {BIG}}}}}'],
}


@pytest.mark.parametrize(
    "calls", [*BIG_CALLS.values(), f'<tool_call>{{"name": "f", "arguments": {{"n": {BIG}}}}}</tool_call>', f"[f(n={BIG})]"]
)
def test_integers_above_64_bits_stay_what_they_are(tmp_path, calls):
    answer = says("assistant", calls) if isinstance(calls, str) else says("assistant", tool_calls=calls)
    rows = [{"messages": [says("user", "Go."), answer, answered({"n": BIG})]}] * 2
    one = json.dumps(rows[0], indent=1).encode()
    for name, value in (("t.jsonl", rows), ("t.json", json.dumps(rows).encode()), ("d.json", one)):
        for trace in read(tmp_path, value, name):
            assert trace.turns[1].tool_calls[0].arguments == {"n": BIG} and trace.turns[2].content == f'{{"n":{BIG}}}'
            assert type(trace.turns[1].tool_calls[0].arguments["n"]) is int
    write_traces([trace], tmp_path / "own.jsonl")
    assert list(read_traces(tmp_path / "own.jsonl", strict=True)) == [trace] == [Trace.from_json(trace.to_json())]


def row_of_columns(*calls):
    "Messages as a table writes them: every object has the keys of all, those that it lacks hold nothing."
    made = [{"role": "user", "content": "Go.", "tool_calls": None, "tool_call_id": None}]
    for n, (name, given) in enumerate(calls):
        call = {"id": f"c{n}", "function": {"name": name, "arguments": given}}
        made.append({"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None})
        made.append({"role": "tool", "content": "ok", "tool_calls": None, "tool_call_id": f"c{n}"})
    return made


def test_keys_that_a_table_filled_with_null_are_left_out():
    given = {"path": "a", "lines": {"from": 1, "to": None}, "command": None}
    wanted = {"path": "a", "lines": {"from": 1}}
    calls = [("read", given), ("bash", {"path": None, "lines": None, "command": "ls"})]
    bare = [{k: v for k, v in message.items() if v is not None} for message in row_of_columns(*calls)]
    assert [m.keys() for m in bare] != [bare[0].keys()] * len(bare)
    for messages in (row_of_columns(*calls), bare, row_of_columns(calls[0]), [json.dumps(m) for m in row_of_columns(*calls)]):
        assert read_record({"messages": messages}).turns[1].tool_calls[0].arguments == wanted
    keys = dict.fromkeys(("type", "text", "id", "name", "input", "tool_use_id", "content"))
    blocks = [keys | {"type": "text", "text": "I look."}, keys | {"type": "tool_use", "id": "c1", "name": "read", "input": given}]
    done = keys | {"type": "tool_result", "tool_use_id": "c1", "content": "ok"}
    trace = read_record({"messages": [says("user", "Go."), says("assistant", blocks), says("user", [done])]})
    assert trace.turns[1].content == "I look." and trace.turns[1].tool_calls[0].arguments == wanted
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "command": None}, "required": None}
    trace = read_record({"messages": row_of_columns(calls[0]), "tools": [{"name": "read", "parameters": schema}]})
    assert trace.tools[0]["function"]["parameters"] == {"type": "object", "properties": {"path": {"type": "string"}}}


@pytest.mark.parametrize(
    "calls",
    [
        [("read", {"path": "a", "limit": None})],
        [("read", {"path": "a", "limit": None}), ("read", {"path": None, "limit": 3})],
        [("read", {"path": "a", "limit": None}), ("bash", {"command": None})],
    ],
)
def test_a_null_that_the_agent_wrote_stays(calls):
    messages = [{k: v for k, v in message.items() if v is not None} for message in row_of_columns(*calls)]
    kept = [t.tool_calls[0].arguments for t in read_record({"messages": messages}).turns if t.tool_calls]
    assert kept == [given for _, given in calls]


@pytest.mark.parametrize(
    "content, text", [(42, "42"), (0.5, "0.5"), (True, "true"), (None, ""), ({"rows": [1]}, '{"rows":[1]}'), ([1, 2], "[1,2]")]
)
def test_a_result_may_be_any_value(content, text):
    trace = chat_of(asked(("f", "c1")), answered(content), says("assistant", "ok"))
    assert trace.turns[2].content == text and tally(trace)["unanswered"] == 0 and find_error_sites(trace) == []


@pytest.mark.parametrize("key", ["text", "message", "utterance", "body"])
def test_words_under_other_keys(key):
    trace = read_record({"messages": [{"role": "user", key: "Go."}, {"role": "assistant", key: "ok"}]})
    assert [t.content for t in trace.turns] == ["Go.", "ok"]


def test_messages_that_hold_nothing_we_know_are_refused():
    with pytest.raises(TraceProblem, match="no message holds"):
        read_record({"messages": [{"role": "user", "phrase": "Go."}, {"role": "assistant", "phrase": "ok"}]})


def test_swe_agent_in_the_columns_of_nebius():
    said = [
        ("system", None),
        ("user", "Go."),
        ("ai", "I look.\n```\nls x\n```"),
        ("user", "ls: cannot access 'x': No such file or directory\n"),
    ]
    rows = [
        {"role": role, "text": text, "system_prompt": "S" if role == "system" else None, "mask": False} for role, text in said
    ]
    trace = read_record({"instance_id": "i", "model_name": "m", "target": True, "trajectory": rows})
    assert (trace.format, [t.content for t in trace.turns[:2]]) == ("swe-agent", ["S", "Go."])
    assert [s.turn for s in find_error_sites(trace)] == [2]


@pytest.mark.parametrize(
    "output", [{"message": CHAT[3]}, {"message": says("assistant", [{"text": "Done."}]), "stopReason": "end_turn"}]
)
def test_answers_of_other_services(output, tmp_path):
    [trace] = read(tmp_path, {"input": {"messages": CHAT[:3]}, "output": output})
    assert trace.turns[-1].content == "Done."


def test_a_terminal_s_screen():
    def screen(text):
        return chat_of(
            says("assistant", None, tool_calls=[{"id": "c1", "name": "bash_command", "arguments": {"keystrokes": "make\n"}}]),
            answered(text),
        )

    site = find_error_sites(screen("New Terminal Output:\nroot@h:/app# make\nmake: *** No targets.  Stop.\nroot@h:/app#"))[0]
    assert site.context.error_message == "make: *** No targets.  Stop."
    assert find_error_sites(screen("Current Terminal Screen:\nroot@h:/app# make\nmake: Nothing to be done.\nroot@h:/app#")) == []


GEMINI = [
    {"type": "init", "session_id": "s", "model": "m"},
    {"type": "message", "role": "user", "content": "Go."},
    {"type": "message", "role": "assistant", "content": "I ", "delta": True},
    {"type": "message", "role": "assistant", "content": "look.", "delta": True},
    {"type": "tool_use", "tool_name": "read_file", "tool_id": "c1", "parameters": {"path": "a"}},
    {"type": "tool_use", "tool_name": "list", "tool_id": "c2", "parameters": {}},
    {"type": "tool_result", "tool_id": "c1", "status": "error", "output": "", "error": {"type": "x", "message": "no file"}},
    {"type": "tool_result", "tool_id": "c2", "status": "success", "output": "Error: is a name"},
    {"type": "message", "role": "assistant", "content": "Done.", "delta": True},
    {"type": "result", "status": "success", "stats": {}},
]


def ran(id, subtype, tool, args, **result):
    return {
        "type": "tool_call",
        "subtype": subtype,
        "call_id": id,
        "session_id": "s",
        "tool_call": {tool: {"args": args} | ({"result": result} if result else {})},
    }


def streamed(role, text):
    return {"type": role, "message": says(role, block(text)), "session_id": "s"}


def block(text):
    return [{"type": "text", "text": text}]


CURSOR = [
    {"type": "system", "subtype": "init", "session_id": "s", "model": "m"},
    streamed("user", "Go."),
    streamed("assistant", "I look."),
    ran("c1", "started", "readToolCall", {"path": "a"}),
    ran("c2", "started", "shellToolCall", {"command": "ls"}),
    ran("c1", "completed", "readToolCall", {"path": "a"}, error={"errorMessage": "no file"}),
    ran(
        "c2", "completed", "shellToolCall", {"command": "ls"}, success={"exitCode": 0, "stdout": "Error: is a name", "stderr": ""}
    ),
    streamed("assistant", "Done."),
    {"type": "result", "subtype": "success", "session_id": "s", "result": "Done."},
]


@pytest.mark.parametrize("rows, format, tool", [(GEMINI, "gemini-cli", "read_file"), (CURSOR, "claude-code", "read")])
def test_streams_of_agents_on_the_command_line(tmp_path, rows, format, tool):
    [trace] = read(tmp_path, rows, "s.jsonl")
    assert (trace.format, trace.trace_id, trace.model) == (format, "s", "m")
    assert [t.role for t in trace.turns if t.content or t.tool_calls] == ["user", "assistant", "tool", "tool", "assistant"]
    assert trace.turns[1].content == "I look." and tally(trace)["calls"] == tally(trace)["results"] == 2
    [site] = find_error_sites(trace)
    assert site.context.tool_name == tool and "no file" in site.context.error_message


@pytest.mark.parametrize(
    "result, message",
    [
        ({"success": {"exitCode": 2, "stdout": "", "stderr": "no rule"}}, "no rule"),
        ({"failure": {"exitCode": 2, "stderr": "no rule"}}, "no rule"),
        ({"success": {"exitCode": 0, "stdout": "ok", "stderr": ""}}, None),
        ({"rejected": {"reason": "no"}}, None),
        ({"success": {}}, None),
    ],
)
def test_results_of_cursor_s_stream(tmp_path, result, message):
    [trace] = read(
        tmp_path,
        [
            *CURSOR[:3],
            ran("c", "started", "shellToolCall", {"command": "make"}),
            ran("c", "completed", "shellToolCall", {}, **result),
        ],
        "s.jsonl",
    )
    assert [s.context.error_message for s in find_error_sites(trace)] == [message] * (message is not None)


def test_messages_in_wrappers_one_a_line(tmp_path):
    call = {"type": "toolCall", "id": "c1", "name": "bash", "arguments": {"command": "make"}}
    done = {"role": "toolResult", "toolCallId": "c1", "toolName": "bash", "content": block("no rule"), "isError": True}
    inner = [
        says("user", "Go."),
        says("assistant", [{"type": "thinking", "thinking": "Hm."}, call]),
        done,
        says("assistant", block("Done.")),
    ]
    rows = [{"type": "message", "id": f"{n}", "parentId": f"{n - 1}", "message": message} for n, message in enumerate(inner)]
    [trace] = read(tmp_path, rows, "s.jsonl")
    assert [t.role for t in trace.turns] == CHAT_ROLES and [s.context.tool_name for s in find_error_sites(trace)] == ["bash"]


def test_instances_of_toolalpaca(tmp_path):
    steps = [
        [["getX", '{"id": 1}', "I look.\nAction: getX\nAction Input: {}"], "Status Code: 404. Response: not found"],
        [["getY", {"id": 2}], "Status Code: 200. Response: ok"],
    ]
    api = {
        "Name": "X",
        "Function_Description": {"getX": "find an X", "getY": "", "components": ""},
        "Instances": [
            {"input": "Go.", "output": "Done.", "intermediate_steps": steps},
            {"input": "And?", "output": "Yes.", "intermediate_steps": []},
        ],
    }
    one, two = read(tmp_path, [api])
    assert [t.role for t in one.turns] == ["user", *["assistant", "tool"] * 2, "assistant"] and one.tool_names == ("getX", "getY")
    assert [s.context.tool_name for s in find_error_sites(one)] == ["getX"] and [t.content for t in two.turns] == ["And?", "Yes."]
    assert one.format == "toolalpaca" and len({one.trace_id, two.trace_id}) == 2


@pytest.mark.parametrize(
    "tools, names", [(["bash"], ("bash",)), ([{"name": "bash"}], ("bash",)), ("none", ()), (None, ()), ([], ())]
)
def test_tools_that_are_names(tools, names):
    if tools == "none":
        with pytest.raises(TraceProblem, match="tool list"):
            read_record({"messages": CHAT, "tools": tools})
    else:
        assert read_record({"messages": CHAT, "tools": tools}).tool_names == names


@pytest.mark.parametrize(
    "fields, reward",
    [({"reward": "0.5"}, 0.5), ({"resolved": True}, 1.0), ({"resolved": 0}, 0.0), ({"reward": 2, "resolved": True}, 2.0)],
)
def test_rewards(fields, reward):
    assert read_record({"messages": CHAT} | fields).reward == reward


def test_the_words_of_an_mcp_error_are_its_message():
    [site] = find_error_sites(chat_of(asked(("f", "c1")), answered(json.dumps({"content": block("boom"), "isError": True}))))
    assert site.context.error_message == "boom"
