"""Trace files that people have: the shared minimal cases, each as a test of its whole kind, with further members."""

import gzip
import json
import zipfile

import pytest
from chats import answered, asked, came_back, chat_of, problems_of, read, says, written

from composer_replication.core.trace import ToolCall, Trace
from composer_replication.traces.calls_in_text import calls_in_text
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.error_text import ERROR_WORDS
from composer_replication.traces.export import write_traces
from composer_replication.traces.formats.base import read_record
from composer_replication.traces.read import read_traces, tally

# file -> (kind, tool, error message) of its only error turn, None where it has none; format
CASES = {
    "atif.json": (("runtime_error", "bash_command", "make: *** No rule to make target. Stop."), "atif"),
    "claude-subagent.jsonl": (("runtime_error", "Read", "EISDIR: illegal operation on a directory, read"), "claude-code"),
    "claude-user-comment.jsonl": (None, "claude-code"),
    "cline-text-results.json": (("runtime_error", "execute_command", "npm error missing script"), "cline"),
    "codex-rollout.jsonl": (("runtime_error", "exec_command", "make: no rule"), "codex"),
    "dup-ids-one-turn.jsonl": (("runtime_error", "read", "Error: cannot read"), "openai"),
    "echoed-command-no-hint.jsonl": (
        (
            "runtime_error",
            "execute_bash",
            'Traceback (most recent call last):\n  File "/w/repo/check_everything.py", '
            "line 3, in <module>\n    go()\nBadState: the store is locked by another process",
        ),
        "openai",
    ),
    "error-behind-prefix.jsonl": (
        ("runtime_error", "str_replace_editor", "ERROR:\nThe `view_range` parameter is not allowed for a directory."),
        "openai",
    ),
    "exit-codex-text.jsonl": (("runtime_error", "exec_command", "2 tests failed"), "openai"),
    "exit-json.jsonl": (("runtime_error", "bash", "make: *** [test] Segmentation fault"), "openai"),
    "exit-openhands.jsonl": (("runtime_error", "execute_bash", "src/a.py:3: error: bad type\nFound 1 error"), "openai"),
    "gemini-session.json": (("runtime_error", "run_shell_command", "make: no rule"), "gemini-cli"),
    "hermes-tags.jsonl": (("runtime_error", "get_rate", "unknown currency XX"), "openai"),
    "hint-pytest-head.jsonl": (("runtime_error", "Bash", None), "anthropic"),
    "import-error-kind.jsonl": (("runtime_error", "bash", None), "openai"),
    "inspect-log.json": (("runtime_error", "web_go", "The page did not load within 30 seconds."), "inspect-ai"),
    "inspect-messages.jsonl": (("runtime_error", "web_go", "The page did not load within 30 seconds."), "openai"),
    "langchain-roles.jsonl": (("runtime_error", "read", "the file was not there"), "openai"),
    "openhands-v1-events.jsonl": (("runtime_error", "execute_bash", "make: no rule"), "openhands"),
    "qwen-coder-xml.jsonl": (None, "openai"),
    "responses-items.jsonl": (("runtime_error", "bash", "Error: no rule to make target"), "responses"),
    "result-id-only.jsonl": (("runtime_error", "read", "Error: no file"), "openai"),
    "sharegpt-function-call.json": (("runtime_error", "get_rate", "unknown currency XX"), "conversations"),
    "tool-calls-as-json-strings.jsonl": (("runtime_error", "bash", "Error: no rule to make target"), "openai"),
    "tools-as-string.jsonl": (("runtime_error", "bash", "Error: no such target"), "openai"),
    "unknown-block.jsonl": (("runtime_error", "bash", "Error: no rule"), "openai"),
    "vercel-ui.jsonl": (("runtime_error", "read", "no file"), "openai"),
    "verifiers-results.jsonl": (("runtime_error", "bash", "Error: no rule to make target"), "verifiers"),
}


@pytest.mark.data
@pytest.mark.parametrize("name", CASES)
def test_shared_cases(shared_data, name, tmp_path):
    path = shared_data.parent / "cases" / "traces" / name
    if not path.exists():
        pytest.skip("the shared cases are not beside the checkout")
    expected, format = CASES[name]
    [trace] = read_traces(path, strict=True)
    assert trace.format == format
    found = [(s.kind, s.context.tool_name, s.context.error_message) for s in find_error_sites(trace)]
    if expected is None:
        assert found == []
    else:
        assert [f[:2] for f in found] == [expected[:2]] and expected[2] in (None, found[0][2])
    counts = tally(trace)
    assert counts["calls"] and counts["calls"] == counts["results"] and not counts["unanswered"] + counts["loose"]
    write_traces([trace], tmp_path / "own.jsonl")
    assert list(read_traces(tmp_path / "own.jsonl", strict=True)) == [trace]


@pytest.mark.data
def test_every_shared_case_is_tested(shared_data):
    folder = shared_data.parent / "cases" / "traces"
    if not folder.exists():
        pytest.skip("the shared cases are not beside the checkout")
    assert {p.name for p in folder.glob("*.json*")} == {*CASES, "repeated-unlike.jsonl"}
    [trace] = read_traces(folder / "repeated-unlike.jsonl", strict=True)
    assert [s.kind for s in find_error_sites(trace)] == ["runtime_error"] * 3


def result(content, tool="bash", given=None, **fields):
    "The error sites of one call that came back with this content."
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": tool, "arguments": json.dumps(given or {"command": "make test"})},
    }
    return find_error_sites(
        chat_of(says("assistant", tool_calls=[call]), answered(content, **fields), says("assistant", "Well."))
    )


def outcome(*args, **fields):
    "Kind and message of the only error site, or None."
    sites = result(*args, **fields)
    assert len(sites) <= 1
    return (sites[0].kind, sites[0].context.error_message) if sites else None


LONG = "boom\n[The command completed with exit code §.]\n[Current working directory: /w]\n[Python interpreter: /p]\n"
LONG += "[Command finished with exit code §]"
FIELDS = "Command: make\nDirectory: (root)\nStdout: boom\nStderr: (empty)\nError: (none)\nExit Code: §\nSignal: 0"


@pytest.mark.parametrize(
    "content",  # § stands for the status
    [
        '{"output": "boom", "exit_code": §, "error": null}',
        '{"stdout": "", "stderr": "boom", "returncode": §}',
        '{"output": "boom", "metadata": {"exit_code": §, "duration_seconds": 0.1}}',
        '{"result": {"exitCode": §, "stderr": "boom"}, "error": null}',
        "{'output': 'boom', 'exit_code': §, 'error': None}",
        "Chunk ID: a1\nWall time: 0.2 seconds\nProcess exited with code §\nOriginal token count: 9\nOutput:\nboom",
        "Exit code §\nboom",
        "Command exited with non-zero status §\nboom",
        LONG,
        "boom\n\nExit code: §",
        "boom\n\nCommand exited with code §",
        "boom\n(exit code §)",
        "boom\n[exit §]",
        '<shell_output exit_code="§">\nboom\n</shell_output>',
        "<returncode>§</returncode>\n<output>\nboom\n</output>",
        "<output>boom</output>\n<exit_code>§</exit_code>",
        FIELDS,
    ],
)
def test_an_exit_status_is_found_wherever_tools_put_it(content):
    kind, said = outcome(content.replace("§", "2"))
    assert kind == "runtime_error" and (said == "boom" or content == FIELDS)
    assert outcome(content.replace("§", "0")) is None


def test_a_status_beside_the_text_is_read():
    for fields in (
        {"exit_code": 2},
        {"metadata": {"exit_code": 2}},
        {"status": "error"},
        {"is_error": True},
        {"error": {"type": "timeout", "message": "boom"}},
        {"artifact": {"returncode": 2}},
        {"additional_kwargs": {"is_error": True}},
    ):
        assert outcome("boom", **fields) == ("runtime_error", "boom"), fields
    for fields in ({"exit_code": 0}, {"status": "success"}, {"error": None}, {"error": ""}, {"is_error": False}):
        assert outcome("fine", **fields) is None, fields
    assert outcome("", given={"command": "grep x a"}, exit_code=1) is None  # grep found nothing
    assert outcome("boom", tool="run", exit_code=127)[0] == "tool_not_found"


@pytest.mark.parametrize(
    "content",
    [
        "OBSERVATION:\nERROR:\nno view",
        "Error: no view",
        "EXECUTION RESULT of [str_replace_editor]:\nERROR:\nno view",
        "<tool_response>\nError: no view\n</tool_response>",
        "Tool result:\nError: no view",
        "<observation>Error: no view</observation>",
        "Result:\nError: no view",
        "<error>Error: no view</error>",
        "[ERROR] no view",
        "Tool execution failed: no view",
        "The tool execution failed with the following error:\n<error>\nno view\n</error>",
        "Failed to open no view",
        '{"status": "error", "message": "no view"}',
        '{"success": false, "message": "no view"}',
        '{"ok": false, "reason": "no view"}',
        '{"isError": true, "content": "no view"}',
        '{"data": {"error": "no view"}, "error": null}',
        '{"error": {"code": 3, "message": "no view"}}',
        '{"status": 404, "message": "no view"}',
        '[{"error": "no view"}]',
        'Output:\n{"error": "no view"}',
        "An error occurred: no view",
        "Command timed out after 30 seconds: no view",
        "ValueError: no view",
    ],
)
def test_error_marks_behind_prefixes_and_in_objects(content):
    kind, message = outcome(content, "view", {"path": "x"})
    assert kind == "runtime_error" and "no view" in message


@pytest.mark.parametrize(
    "content, command",
    [
        ("python /w/check.py\nError: boom", "python /w/check.py"),
        ("OBSERVATION:\r\npython /w/check.py\r\nError: boom\r\nroot@box:/w # ", "python /w/check.py"),
        ("$ python /w/check.py\nError: boom", "python /w/check.py"),
        ("root@box:/w# cat <<EOF | sh\n> exit 1\n> EOF\nError: boom\nroot@box:/w#", "cat <<EOF | sh\nexit 1\nEOF"),
        ("(base) user@host:~/w$ python /w/check.py\nError: boom", "python /w/check.py"),
    ],
)
def test_the_echoed_command_is_cut_off_first(content, command):
    assert outcome(content, "bash", {"command": command}) == ("runtime_error", "Error: boom")
    assert outcome(content, "shell", {"command": ["bash", "-lc", command]}) == ("runtime_error", "Error: boom")
    fine = content.replace("Error: boom", "fine")
    assert outcome(fine, "bash", {"command": command}) is None


def test_an_echo_with_the_word_error_is_no_error():
    assert outcome("echo Error: x > a\nok", "bash", {"command": "echo Error: x > a"}) is None
    assert outcome("Error: cat\nok", "bash", {"command": "Error: cat"}) is None


@pytest.mark.parametrize(
    "content, kind",
    [
        (
            "Traceback (most recent call last):\n  File \"a\"\nImportError: cannot import name 'parse_json' from 'a'",
            "runtime_error",
        ),
        ("ModuleNotFoundError: No module named 'invalid_arguments'", "runtime_error"),
        ("KeyError: 'unknown tool'", "runtime_error"),
        ("json.decoder.JSONDecodeError: Expecting value", "json_decode"),
        ("TypeError: run() got an unexpected keyword argument 'x'", "type_error"),
        ("TypeError: 'int' object is not iterable", "runtime_error"),
        ("pydantic.ValidationError: 1 validation error for Run", "type_error"),
        ("InputValidationError: path is missing", "type_error"),
        ("TypeError: the call does not fit run: the argument command is missing.", "type_error"),
        *((row["example"], row["kind"]) for row in ERROR_WORDS["kind"]),
    ],
)
def test_kinds_come_from_the_exceptions_class(content, kind):
    assert outcome(content, is_error=True)[0] == kind


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_rate", "arguments": {"cur": "XX"}}\n</tool_call>',
        '<tool_call>{"arguments": {"cur": "XX"}, "name": "get_rate"}',
        "<tool_call>\n{'name': 'get_rate', 'arguments': {'cur': 'XX'}}\n</tool_call>",
        "<tool_call>\n<function=get_rate>\n<parameter=cur>\nXX\n</parameter>\n</function>\n</tool_call>",
        "<function=get_rate>\n<parameter=cur>XX</parameter>\n</function>",
        '<function=get_rate>{"cur": "XX"}</function>',
        '<|python_tag|>{"name": "get_rate", "parameters": {"cur": "XX"}}<|eom_id|>',
        '<|python_tag|>get_rate.call(cur="XX")',
        '{"name": "get_rate", "parameters": {"cur": "XX"}}',
        '[get_rate(cur="XX")]',
        '[TOOL_CALLS][{"name": "get_rate", "arguments": {"cur": "XX"}}]',
        '[TOOL_CALLS]get_rate[ARGS]{"cur": "XX"}',
        "<tool_call>get_rate\n<arg_key>cur</arg_key>\n<arg_value>XX</arg_value>\n</tool_call>",
        '<minimax:tool_call>\n<invoke name="get_rate">\n<parameter name="cur">XX</parameter>\n</invoke>\n</minimax:tool_call>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_rate<｜tool▁sep｜>{"cur": "XX"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_rate:0<|tool_call_argument_begin|>{"cur": "XX"}<|tool_call_end|><|tool_calls_section_end|>',  # noqa: E501
    ],
)
@pytest.mark.parametrize(
    "role, wrapped",
    [
        ("tool", '{"error": "no XX"}'),
        ("user", '<tool_response>\n{"error": "no XX"}\n</tool_response>'),
        ("ipython", '{"error": "no XX"}'),
    ],
)
def test_calls_in_text(text, role, wrapped):
    said = says("assistant", f"I look.\n{text}" if text[0] == "<" else text)
    trace = chat_of(said, says(role, wrapped), says("assistant", "Which one?"), says("user", "Error: is what I see."))
    assert trace.turns[1].tool_calls == (ToolCall("get_rate", {"cur": "XX"}),)
    assert trace.turns[1].content == ("I look." if text[0] == "<" else "")
    assert [(s.kind, s.turn, s.context.error_message) for s in find_error_sites(trace)] == [("runtime_error", 1, "no XX")]


def test_several_calls_and_results_in_one_text():
    two = "".join(f'<tool_call>\n{{"name": "f", "arguments": {{"n": {n}}}}}\n</tool_call>\n' for n in (1, 2))
    said = "<tool_response>\nfine\n</tool_response>\n<tool_response>\nError: gone\n</tool_response>"
    trace = chat_of(says("assistant", two), says("user", said))
    assert [t.role for t in trace.turns] == ["user", "assistant", "tool", "tool"]
    [site] = find_error_sites(trace)
    assert site.evidence_turn == 3 and tally(trace)["unanswered"] == 0


def test_a_broken_call_in_text_is_a_call():
    broken = '<tool_call>\n{"name": "f", "arguments": {"x": \n</tool_call>'
    assert calls_in_text(broken)[1] == (ToolCall("f", '{"name": "f", "arguments": {"x":'),)
    trace = chat_of(says("assistant", '<tool_call>\n{"name": "f", "argum'))
    assert [s.kind for s in find_error_sites(trace)] == ["json_decode"]


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> tags.",
        "`<function=` opens a call.",
        '<think>maybe <tool_call>{"name": "x"}</tool_call></think>Hello',
        '{"name": "Anna", "arguments": 3}',
        "f(x) = 2",
    ],
)
def test_prose_is_no_call(text):
    trace = chat_of(says("assistant", text), says("user", "Thanks."))
    assert trace.turns[1].content == text and not trace.turns[1].tool_calls and not any(t.observation for t in trace.turns)


CALL_FORMS = [
    {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"p": 1}'}},
    {"id": "c1", "function": "read", "arguments": {"p": 1}},
    {"name": "read", "args": {"p": 1}, "id": "c1", "type": "tool_call"},
    '{"id": "c1", "name": "read", "arguments": "{\\"p\\": 1}"}',
    {"toolCallId": "c1", "toolName": "read", "args": {"p": 1}},
    {"id": "c1", "name": "read", "input": {"p": 1}},
]


@pytest.mark.parametrize("call", CALL_FORMS)
def test_every_way_to_write_a_call(call):
    trace = chat_of(says("assistant", tool_calls=[call]), answered("Error: no"))
    assert trace.turns[1].tool_calls == (ToolCall("read", {"p": 1}, "c1"),) and len(find_error_sites(trace)) == 1


VERCEL = {"toolCallId": "c1", "toolName": "read"}
LANGCHAIN = {"content": "", "tool_calls": [{"name": "read", "args": {"p": 1}, "id": "c1", "type": "tool_call"}]}
FAILED = {"content": "no file", "tool_call_id": "c1", "status": "error"}
DUMPED = {"lc": 1, "type": "constructor"}


def vercel(given, **outcome):
    call = says("assistant", [{"type": "tool-call", given: {"p": 1}} | VERCEL])
    return [call, says("tool", [{"type": "tool-result"} | VERCEL | outcome])]


def part(kind, **fields):
    return {"type": kind, "toolCallId": "c1", "state": "output-error", "input": {"p": 1}, "errorText": "no file"} | fields


BLOCK_CHATS = {
    "vercel model messages": vercel("input", output={"type": "error-text", "value": "no file"}),
    "vercel error json": vercel("input", output={"type": "error-json", "value": {"message": "no file"}}),
    "vercel v4": vercel("args", result="no file", isError=True),
    "vercel ui parts": [{"id": "m", "role": "assistant", "parts": [{"type": "step-start"}, part("tool-read")]}],
    "vercel dynamic tool": [{"role": "assistant", "parts": [part("dynamic-tool", toolName="read")]}],
    "langchain dicts": [{"type": "ai", "data": LANGCHAIN}, {"type": "tool", "data": FAILED}],
    "langchain dumps": [
        DUMPED | {"id": ["langchain", "schema", "messages", "AIMessage"], "kwargs": LANGCHAIN},
        DUMPED | {"id": ["langchain", "schema", "messages", "ToolMessage"], "kwargs": FAILED},
    ],
    "langchain model_dump": [{"type": "ai"} | LANGCHAIN, {"type": "tool"} | FAILED],
    "bedrock": [
        says("assistant", [{"toolUse": {"toolUseId": "c1", "name": "read", "input": {"p": 1}}}]),
        says("user", [{"toolResult": {"toolUseId": "c1", "content": [{"text": "no file"}], "status": "error"}}]),
    ],
    "gemini parts": [
        {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "read", "args": {"p": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "read", "response": {"error": "no file"}}}]},
    ],
    "llama-factory": [
        says("assistant", [{"type": "tool_call", "value": '{"name": "read", "arguments": {"p": 1}}'}]),
        says("tool", [{"type": "text", "value": "Error: no file"}]),
    ],
}


@pytest.mark.parametrize("name", BLOCK_CHATS)
def test_chats_in_blocks_of_other_libraries(name):
    first = says("user", "Go.") if "langchain" not in name else {"type": "human", "content": "Go."}
    trace = read_record({"messages": [first, *BLOCK_CHATS[name]]})
    assert [t.role for t in trace.turns] == ["user", "assistant", "tool"]
    assert [(c.name, c.arguments) for c in trace.turns[1].tool_calls] == [("read", {"p": 1})]
    [site] = find_error_sites(trace)
    assert "no file" in site.context.error_message and site.context.tool_name == "read"


def test_results_find_their_calls():
    def chat(calls, results):
        return chat_of(asked(*calls), *(says("tool", text, **fields) for text, fields in results))

    def blamed(*args):
        return [s.context.tool_name for s in find_error_sites(chat(*args))]

    no = "Error: no"
    assert blamed([("a", "x"), ("b", "x")], [("ok", {"tool_call_id": "x"}), (no, {"tool_call_id": "x"})]) == ["b"]
    assert blamed(
        [("a", "x"), ("b", "x"), ("c", "y")],
        [("ok", {"tool_call_id": "y"}), (no, {"tool_call_id": "x"}), ("ok", {"tool_call_id": "x"})],
    ) == ["a"]
    assert blamed([("a", None), ("b", None)], [("ok", {"tool_call_id": "1"}), (no, {"tool_call_id": "2"})]) == ["b"]
    assert blamed([("a", None), ("b", None)], [(no, {"name": "b"}), ("ok", {"name": "a"})]) == ["b"]
    assert blamed([("a", "x"), ("b", "y")], [("ok", {}), (no, {})]) == ["b"]
    loose = chat([("a", "x")], [(no, {"tool_call_id": "z"})])
    assert find_error_sites(loose) == [] and tally(loose)["loose"] == 1


@pytest.mark.parametrize(
    "text, by_a_person",
    [
        ("please add the other file too first", True),
        ("no, use uv instead", True),
        ("why not pytest?", True),
        ("Stop. I want to think about it", True),
        ("Exit code 2\nmake: no rule", False),
        ("Command timed out after 2m 0s", False),
        ("(eval):1: command not found: foo", False),
        ("Permission to use Bash with command rm has been denied.", False),
        ("<tool_use_error>File has not been read yet</tool_use_error>", False),
        ("Error: spawn ENOENT", False),
    ],
)
def test_a_person_s_comment_is_no_error_and_what_claude_code_says_itself_is_one(text, by_a_person):
    trace = Trace("t", came_back(text, "Bash", {"command": "x"}, failed=True), format="claude-code")
    assert (find_error_sites(trace) == []) is by_a_person


@pytest.mark.parametrize(
    "text",
    [
        "The user doesn't want to proceed with this tool use. The tool use was rejected.",
        "[Request interrupted by user for tool use]",
        "The user denied this operation and provided the following feedback:\n<feedback>no</feedback>",
        "exec command rejected by user",
        "[Operation Cancelled] Reason: User denied execution.",
        *(row["example"] for row in ERROR_WORDS["declined"]),
    ],
)
def test_a_declined_call_is_no_error_in_any_format(text):
    assert outcome(text, is_error=True) is None


def line(uuid, parent, role, content, **fields):
    "A line of a Claude Code session."
    head = {"uuid": uuid, "parentUuid": parent, "sessionId": "s1", "type": role, "message": says(role, content)}
    return head | fields


def block(words):
    return [{"type": "text", "text": words}]


def test_sub_agents_are_traces_of_their_own_linked_to_the_main_one(tmp_path):
    def side(agent):
        own = {"isSidechain": True, "agentId": agent}
        return [
            line(f"{agent}1", None, "user", "Search.", **own),
            line(f"{agent}2", f"{agent}1", "assistant", block(f"I am {agent}."), **own),
        ]

    main = [line("u1", None, "user", "Go."), line("u2", "u1", "assistant", block("Done."))]
    traces = read(tmp_path, [main[0], *side("x"), *side("y"), main[1]], "s.jsonl")
    assert [t.trace_id for t in traces] == ["s1", "s1/x", "s1/y"] and traces[2].turns[-1].content == "I am y."


def test_a_parent_that_is_not_in_the_file_loses_no_turn(tmp_path):
    rows = [line("a", None, "user", "Go."), line("b", "a", "assistant", block("One."))]
    rows += [line("d", "gone", "user", "And?"), line("e", "d", "assistant", block("Two."))]
    [problem] = problems_of(tmp_path, rows, "s.jsonl", traces=1)
    assert "parent" in problem and "line 3" in problem
    [trace] = read_traces(tmp_path / "s.jsonl", on_problem=lambda problem: None)
    assert [t.content for t in trace.turns] == ["Go.", "One.", "And?", "Two."]


def test_columns_of_json_text_are_opened():
    messages = [says("user", "Go."), says("assistant", tool_calls=[CALL_FORMS[0]]), answered("Error: no")]
    tools = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
    for record in (
        {"messages": json.dumps(messages), "tools": json.dumps(tools)},
        {"conversations": json.dumps(messages), "tools": json.dumps(tools)},
        {"messages": [json.dumps(m) for m in messages], "tools": tools},
        {"trajectory": json.dumps(messages, indent=1), "tools": tools},
        {"prompt": json.dumps(messages[:1]), "completion": json.dumps(messages[1:]), "tools": json.dumps(tools)},
    ):
        trace = read_record(record)
        assert trace.tool_names == ("read",) and len(find_error_sites(trace)) == 1, record


@pytest.mark.parametrize("between", ["\n", "", "\n\n", ",\n"])
def test_several_pretty_printed_objects_in_one_file(tmp_path, between):
    chats = [
        {"messages": [{"role": "user", "content": f"{n} }} {{ \ud83d"}, {"role": "assistant", "content": "ok"}]} for n in range(3)
    ]
    path = tmp_path / "many.json"
    path.write_text(between.join(json.dumps(c, indent=2) for c in chats))
    assert len(list(read_traces(path, strict=True))) == 3
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert [t.trace_id for t in read_traces(path, strict=True)][0] == "many"


def test_loose_ends_are_counted_in_one_sentence(tmp_path):
    results = [answered(text, id) for text, id in (("7", "c1"), ("8", "z"), ("9", "y"))]
    chat = {"messages": [asked(*(("f", f"c{n}") for n in range(4))), *results, says("assistant", "well")]}
    problems = problems_of(tmp_path, [chat] * 9, "t.jsonl", traces=9)
    assert "3 of 4 calls have no result" in problems[0] and "2 of 3 results answer no call" in problems[0]
    assert len(problems) == 6 and "4 more traces" in problems[-1] and "27 and 18 in all" in problems[-1]


def test_an_eval_archive_is_read(tmp_path):
    sample = {
        "id": 1,
        "epoch": 1,
        "input": "Q",
        "scores": {"m": {"value": "C"}},
        "messages": [says("user", "Q"), says("assistant", "A")],
    }
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"eval": {"model": "m", "task": "t"}}))
        for epoch in (1, 2):
            archive.writestr(f"samples/1_epoch_{epoch}.json", json.dumps(sample | {"epoch": epoch}))
    assert [(t.trace_id, t.model, t.reward) for t in read_traces(path, strict=True)] == [("1/1", "m", 1.0), ("1/2", "m", 1.0)]
    assert "archive" in problems_of(tmp_path, path.read_bytes()[:200], "log.eval")[0]


def test_sessions_of_other_agents_as_lists_and_documents(tmp_path):
    def action(id, call, command):
        made = {"id": call, "name": "terminal", "arguments": json.dumps({"command": command})}
        return {"id": id, "source": "agent", "kind": "ActionEvent", "thought": [], "tool_name": "terminal", "tool_call_id": call,
                "llm_response_id": "r", "tool_call": made}  # fmt: skip

    named = {"tool_name": "terminal", "source": "environment"}
    events = [
        {"id": "e1", "source": "user", "kind": "MessageEvent", "llm_message": says("user", block("Make it."))},
        action("e2", "c1", "make"),
        action("e3", "c2", "ls"),
        named | {"id": "e4", "kind": "AgentErrorEvent", "tool_call_id": "c1", "error": "no such tool parameter"},
        named | {"id": "e5", "kind": "UserRejectObservation", "tool_call_id": "c2", "rejection_reason": "not now"},
    ]
    rows = {"list.json": events, "row.jsonl": {"instance_id": "i", "history": events}, "rows.jsonl": {"events": events}}
    for name, value in rows.items():
        [trace] = read(tmp_path, json.dumps(value).encode(), name)
        assert [(t.role, len(t.tool_calls)) for t in trace.turns] == [("user", 0), ("assistant", 2), ("tool", 0), ("tool", 0)]
        assert [s.context.error_message for s in find_error_sites(trace)] == ["no such tool parameter"]
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Run."}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Exit code: 1\nOutput:\npatch does not apply"},
    ]
    for name in ("items.json", "old-rollout.jsonl"):
        [trace] = read(tmp_path, items, name)
        assert trace.turns[1].tool_calls[0].arguments == {"input": "*** Begin Patch"}
        assert [s.context.error_message for s in find_error_sites(trace)] == ["patch does not apply"]


def test_a_compacted_codex_session_is_two_traces(tmp_path):
    def item(payload):
        return {"timestamp": "t", "type": "response_item", "payload": payload}

    def said(role, words):
        return {"type": "message"} | says(role, block(words))

    rows = [
        {"type": "session_meta", "payload": {"id": "s"}},
        item(said("user", "Go.")),
        item(said("assistant", "One.")),
        {"type": "compacted", "payload": {"message": "so far", "replacement_history": [said("user", "Go on.")]}},
        item(said("assistant", "Two.")),
    ]
    traces = list(read_traces(written(tmp_path / "r.jsonl", rows), strict=True))
    assert [(t.trace_id, [x.content for x in t.turns]) for t in traces] == [("s", ["Go.", "One."]), ("s#2", ["Go on.", "Two."])]


@pytest.mark.parametrize("form", ["stream", "export"])
def test_claude_code_without_parents(tmp_path, form):
    call = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "make"}}
    done = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "Exit code 2\nno rule"}
    messages = (
        says("user", "Go."),
        says("assistant", [call], id="m1"),
        says("user", [done]),
        says("assistant", block("No rule."), id="m2"),
    )
    said = [{"type": message["role"], "message": message} for message in messages]
    content = {"loglines": said}
    if form == "stream":
        inner = [r | {"session_id": "s", "parent_tool_use_id": "t9"} for r in said[:1] + said[3:]]
        rows = [r | {"session_id": "s", "parent_tool_use_id": None} for r in said]
        content = [{"type": "system", "subtype": "init", "session_id": "s"}, *rows, *inner]
    main, *side = read(tmp_path, content, "s.json" if form == "export" else "s.jsonl")
    assert [t.role for t in main.turns] == ["user", "assistant", "tool", "assistant"] and len(side) == (form == "stream")
    assert [s.context.error_message for s in find_error_sites(main)] == ["no rule"]


@pytest.mark.data
@pytest.mark.parametrize("name", ["codex-rollout.jsonl", "claude-subagent.jsonl", "claude-user-comment.jsonl", "atif.json"])
def test_atif_make_reads_the_same_calls_and_results(shared_data, name, tmp_path):
    "atif-make (PyPI, Python 3.12 and above) is the oracle: its ATIF of a session, read by us, is what we read of the session itself."  # noqa: E501
    atif_make = pytest.importorskip("atif_make.convert", reason="atif-make is not installed")
    path = shared_data.parent / "cases" / "traces" / name
    if not path.exists():
        pytest.skip("the shared cases are not beside the checkout")
    trajectory, _ = atif_make.convert(path)
    (tmp_path / "t.json").write_text(
        json.dumps(trajectory.to_dict() if hasattr(trajectory, "to_dict") else trajectory.to_json_dict())
    )

    def acted(trace):
        return [
            (t.role, [(c.name, c.arguments) for c in t.tool_calls], t.content if t.role != "tool" else "")
            for t in trace.turns
            if t.content or t.tool_calls
        ]

    [theirs], [ours] = read_traces(tmp_path / "t.json", strict=True), read_traces(path, strict=True)
    assert acted(theirs) == acted(ours)
    assert [t.content for t in theirs.turns if t.role == "tool"] == [t.content for t in ours.turns if t.role == "tool"]


def run(*args):
    from typer.testing import CliRunner

    from composer_replication.cli.app import main as entry  # noqa: F401 (registers the commands)
    from composer_replication.cli.hints import hints_app
    from composer_replication.cli.traces import traces_app

    app = {"traces": traces_app, "hints": hints_app}[args[0]]
    return CliRunner().invoke(app, [str(a) for a in args[1:]])


@pytest.mark.parametrize(
    "answer, extra, words",
    [
        ({"content": "CALL read(p=1)"}, [], "hold no tool call"),
        ({"content": "", "tool_calls": [CALL_FORMS[0]]}, [], "has a result"),
        ({"content": "Hm."}, [{"role": "tool", "tool_call_id": "z", "content": "7"}], "answers a call"),
    ],
)
def test_nothing_of_many_is_an_error_with_the_way_out(tmp_path, answer, extra, words):
    turns = [says("user", "Go."), *[{"role": "assistant"} | answer, *extra, says("user", "And?")] * 12]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    shows = ("traces", "show"), ("traces", "show", "--json"), ("traces", "errors"), ("traces", "errors", "--json")
    for command in (*shows, ("hints", "list"), ("hints", "list", "--json")):
        done = run(command[0], command[1], path, *command[2:])
        assert done.exit_code == 1 and words in done.output and "register a format" in done.output, (command, done.output)


def test_show_says_what_was_read(tmp_path):
    calls, loose, path = says("assistant", tool_calls=[CALL_FORMS[0]]), answered("8", "z"), tmp_path / "t.jsonl"
    good = [calls, answered("7"), calls, says("user", "And?")]
    written(path, [{"messages": good + [loose]}, {"messages": [says("user", "Hi"), says("critic", "Hm")]}])
    done = run("traces", "show", path, "--json")
    row = json.loads(next(line for line in done.output.splitlines() if line.startswith("{")))
    assert done.exit_code == 0
    expected = {"traces": 1, "calls": 2, "results": 2, "unanswered": 1, "loose": 1, "roles": {"critic": 1}}
    assert {k: row[k] for k in expected} == expected
    assert row["problems"] == 2
    for command in (("hints", "list"), ("traces", "errors")):
        for way in ([], ["--json"]):
            listed = run(*command, path, *way)
            assert listed.exit_code == 0
            assert "no error turn was found" in listed.output and "2 calls read, 1 without a result" in listed.output


def test_a_person_between_calls_in_text_is_no_result():
    call = says("assistant", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    trace = chat_of(call, says("tool", "7"), call, says("user", "Error: stop"))
    assert [t.observation for t in trace.turns] == [False, False, True, False, False] and find_error_sites(trace) == []
    quoted = chat_of(call, says("user", "7"), says("assistant", "Well?"), says("user", "<tool_response>Error: x"))
    assert [t.observation for t in quoted.turns] == [False, False, True, False, False]


def test_a_call_that_is_answered_behind_a_later_turn_is_answered():
    results = [answered(f"Error: {id}", id) for id in "xyz"]
    chat = chat_of(*(asked((name, id)) for name, id in ("ax", "by", "cz")), *results)
    assert tally(chat)["unanswered"] == 0 and [s.context.tool_name for s in find_error_sites(chat)] == ["a", "b", "c"]
    assert tally(chat_of(asked(("a", "x")), asked(("b", "y")), asked(("c", "z")), *results[1:]))["unanswered"] == 1


@pytest.mark.parametrize("ids", [("x", "y"), (None, None)])
@pytest.mark.parametrize("key", ["content", "output", "result"])
def test_a_message_that_lists_the_results_of_several_calls(ids, key):
    listed = [{"name": "a", key: {"n": 1}, "tool_call_id": "x"}, {"name": "b", key: "Error: no", "tool_call_id": "y"}]
    chat = chat_of(asked(("a", ids[0]), ("b", ids[1])), says("tool", json.dumps(listed)))
    assert [t.content for t in chat.turns if t.role == "tool"] == ['{"n":1}', "Error: no"]
    assert [s.context.tool_name for s in find_error_sites(chat)] == ["b"] and tally(chat)["unanswered"] == 0


@pytest.mark.parametrize(
    "calls, listed",
    [
        ([("a", "x")], [{"name": "a", "content": "1"}, {"name": "a", "content": "2"}]),  # one call that gives a list
        ([("a", "x"), ("b", "y")], [{"name": "Ann", "content": "1"}, {"name": "Bob", "content": "2"}]),
        ([("a", "x"), ("b", "y")], [{"name": "a", "size": 1}, {"name": "b", "size": 2}]),
    ],
)
def test_a_result_that_is_a_list_stays_one(calls, listed):
    chat = chat_of(asked(*calls), answered(json.dumps(listed), "x"))
    assert [t.content for t in chat.turns if t.role == "tool"] == [json.dumps(listed)]


@pytest.mark.parametrize("form", ["openhands", "gemini"])
def test_a_session_without_an_answer_beside_others_is_said(tmp_path, form):
    def row(*messages):
        if form == "gemini":
            return {
                "sessionId": "s",
                "projectHash": "p",
                "messages": [{"id": f"{n}", "type": r, "content": "x"} for n, r in enumerate(messages)],
            }
        kinds = [
            {"id": r, "source": r, "kind": "MessageEvent", "llm_message": says(r.replace("gemini", "assistant"), "x")}
            for r in messages
        ]
        return {"events": kinds}

    rows = [row("user", "gemini"), row("user"), row("user", "gemini")]
    [problem] = problems_of(tmp_path, rows, "rows.jsonl", traces=2)
    assert "no answer" in problem


def test_claude_code_without_ids_of_calls(tmp_path):
    call = {"type": "tool_use", "name": "Bash", "input": {"command": "make"}}
    done = {"type": "tool_result", "is_error": True, "content": "Exit code 2\nmake: no rule"}
    rows = [("u1", None, "user", "Go."), ("a1", "u1", "assistant", [call]), ("u2", "a1", "user", [done])]
    [trace] = read(tmp_path, [line(*row) for row in rows], "s.jsonl")
    assert [s.context.tool_name for s in find_error_sites(trace)] == ["Bash"] and tally(trace)["unanswered"] == 0


def test_qwen_code_writes_gemini_s_parts_into_claude_code_s_lines(tmp_path):
    call = {"functionCall": {"id": "c1", "name": "read_file", "args": {"path": "a"}}}
    done = {"functionResponse": {"id": "c1", "name": "read_file", "response": {"error": "File not found: a"}}}
    rows = [
        ("user", "user", [{"text": "Go."}]),
        ("assistant", "model", [{"text": "I look.", "thought": True}, call]),
        ("tool_result", "user", [done]),
        ("assistant", "model", [{"text": "It is not there."}]),
    ]
    lines = [
        line(f"u{n}", f"u{n - 1}" if n else None, kind, "") | {"message": {"role": role, "parts": parts}}
        for n, (kind, role, parts) in enumerate(rows)
    ]
    [trace] = read(tmp_path, lines, "q.jsonl")
    assert [(t.role, t.content, t.thinking) for t in trace.turns] == [
        ("user", "Go.", None),
        ("assistant", "", "I look."),
        ("tool", "File not found: a", None),
        ("assistant", "It is not there.", None),
    ]
    assert [s.context.tool_name for s in find_error_sites(trace)] == ["read_file"]


@pytest.mark.parametrize(
    "value",
    [
        {"meta": {"seed": 1}, "logs": {"7": {"query": "Q", "turn_history": {"actions": ["ls"], "observations": ["a"]}}}},
        {"7": {"environment": "ic_bash", "query": "Q", "trajectory": [{"action": "ls", "observation": "a"}]}},
        {
            "7": {
                "query": "Q",
                "turn_history": {"actions": ["ls"], "observations": ["a"]},
                "summary": {"max_reward": {"a": 0.3}},
                "info": {"reward": {"a": 0.3}},
            }
        },
    ],
)
def test_result_files_of_intercode(tmp_path, value):
    [trace] = read(tmp_path, value)
    assert trace.trace_id == "7" and [t.content for t in trace.turns] == ["Q", "ls", "a"]


def test_a_bash_session_of_pairs_keeps_thoughts_and_its_errors_are_found(tmp_path):
    steps = [
        {"thought": "Build it.", "action": "make", "observation": "bash: make: command not found"},
        {"action": "ls", "observation": "a"},
    ]
    [trace] = read(tmp_path, {"7": {"query": "Q", "trajectory": steps}})
    assert [t.thinking for t in trace.turns if t.role == "assistant"] == ["Build it.", None]
    assert [s.turn for s in find_error_sites(trace)] == [1]


@pytest.mark.parametrize(
    "content, message",
    [
        ("<tool_use_error>File has not been read yet.</tool_use_error>", "File has not been read yet."),
        ("<error_message>the id is unknown</error_message>", "the id is unknown"),
        ("<error>\nquota used up\n</error>", "quota used up"),
        ("bash failed for `ls`: no such process", "bash failed for `ls`: no such process"),
        ("bash failed with a signal", "bash failed with a signal"),
    ],
)
def test_a_tag_or_the_tool_s_own_name_marks_an_error(content, message):
    assert outcome(content) == ("runtime_error", message)


@pytest.mark.parametrize(
    "content, tool",
    [
        ("<error></error>", "bash"),
        ("<error>code 5</error>", "read_file"),
        ("<error>seen</error>\nall is well", "bash"),
        ("read failed for others", "bash"),
    ],
)
def test_a_tag_that_marks_nothing(content, tool):
    assert outcome(content, tool, {"path": "a.xml"}) is None
