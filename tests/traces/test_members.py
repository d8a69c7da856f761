# ruff: noqa: E501
"""Other members of the kinds of tests/fixtures/traces_2: other programs, agents, words and languages."""

import json

import pytest
from chats import answered, chat_of, read, says

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.hints.layers import default_composite
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.error_text import tallied
from composer_replication.traces.read import read_traces

PRINTED = {  # what programs print where nothing says their exit status
    "pytest -q": "F\nE   assert 1 == 2\n1 failed in 0.1s",
    "python -m unittest": "F\n=====\nFAIL: test_a (t.A)\nAssertionError: 2 != 3\n\nRan 1 test in 0.0s\n\nFAILED (failures=1)\n",
    "npx mocha": "  sum\n    1) adds\n\n  0 passing (5ms)\n  1 failing\n\n  1) sum\n       adds:\n     x\n      at a.js:1:1\n      at b\n",
    "npx vitest run": " FAIL  a.test.ts > adds\n\n Test Files  1 failed (1)\n      Tests  1 failed (1)\n   Duration  300ms\n",
    "npx jest": "Test Suites: 1 failed, 1 total\nTests:       1 failed, 1 total\nSnapshots:   0 total\nTime:        0.5 s\n",
    "npx eslint .": "/w/src/a.js\n  1:7  error  x  no-unused-vars\n\n✖ 1 problem (1 error, 0 warnings)\n",
    "bundle exec rspec": "F\n\nFailures:\n\n  1) Sum adds\n\n2 examples, 1 failure\n\nFailed examples:\n\nrspec ./a.rb:3\n\nx\n",
    "rake test": "# Running:\n\nF\n\n1 runs, 1 assertions, 1 failures, 0 errors, 0 skips",
    "phpunit": "F\n\nThere was 1 failure:\n\n1) A::t\n\nFAILURES!\nTests: 1, Assertions: 1, Failures: 1.\n",
    "mix test": "\n  1) test adds (SumTest)\n\nFinished in 0.02 seconds\n2 tests, 1 failure\n",
    "ctest": "0% tests passed, 1 tests failed out of 1\n\nThe following tests FAILED:\n\t  1 - sum (Failed)\nErrors while running CTest\n",
    "bun test": "a.test.ts:\n(fail) adds [0.1ms]\n\n 0 pass\n 1 fail\nRan 1 tests across 1 files.",
    "node --test": "✖ adds (0.5ms)\nℹ tests 1\nℹ pass 0\nℹ fail 1",
    "swift test": "Test Case 'A.testSum' failed (0.1 seconds).\nExecuted 1 test, with 1 failure (0 unexpected)",
    "deno test": "running 1 test\n\nFAILED | 0 passed | 1 failed (5ms)\n",
    "dotnet test": "Failed!  - Failed:     1, Passed:     3, Skipped:     0, Total:     4, Duration: 3 ms",
    "mypy .": "a.py:3: error: Incompatible types\nFound 1 error in 1 file (checked 1 source file)",
    "javac A.java": "A.java:1: error: ';' expected\nint a\n     ^\n1 error",
    "clang a.c": "a.c:1:2: error: expected ';'\n1 error generated.",
    "kotlinc a.kt": "a.kt:1:9: error: unresolved reference: x\n",
    "swift build": "Building for debugging...\n/w/a.swift:3:5: error: cannot find 'x' in scope\n",
    "zig build": "a.zig:1:1: error: expected type expression, found 'x'\n",
    "psql": 'psql: error: connection to server at "localhost" failed: Connection refused\n',
    "sqlite3 a.db": "Parse error near line 1: no such column: x\n",
    "php a.php": "PHP Fatal error:  Uncaught Error: Call to undefined function x() in /w/a.php:1\n",
    "perl a.pl": "reading\nno such town: X at a.pl line 3.\n", "perl b.pl": "no such town at lib/B.pm line 3, <STDIN> line 7.",
    "perl c.pl": 'syntax error at c.pl line 2, near "my $"\nExecution of c.pl aborted due to compilation errors.\n',
    "perl d.pl": "Can't locate A.pm in @INC (you may need to install the A module) (@INC entries checked: "
                 + " ".join(f"/usr/lib/perl5/{n}" for n in range(9)) + ") at d.pl line 1.\nBEGIN failed--compilation aborted at d.pl line 1.",
    "lua a.lua": "lua: a.lua:1: attempt to call a nil value (global 'x')\nstack traceback:\n\t[C]: in ?\n",
}
FINE = {
    "pytest": "12 passed, 1 xfailed in 0.2s", "cargo test": "test result: ok. 3 passed; 0 failed; 0 ignored",
    "npx jest": "Tests:       3 passed, 3 total\nSnapshots:   0 total", "npx eslint .": "✖ 2 problems (0 errors, 2 warnings)\n2 fixed",
    "ruff check --fix": "Found 1 error (1 fixed, 0 remaining).", "make help": "Exit codes:\n0 fine\n1 failed",
    "python a.py": "errors: 12", "python train.py": "step 100\ntest error: 0.02", "./logs": "12:00:01 ERROR retried, went on",
    "mvn test": "Tests run: 3, Failures: 0, Errors: 0, Skipped: 0", "pytest a; pytest b": "1 failed in 0.1s\n==== 3 passed in 0.1s ====",
    "perl a.pl": "Use of uninitialized value $x in addition (+) at a.pl line 3.\n7", "perl b.pl": "7\nArgument \"a\" isn't numeric at b.pl line 2.",
    "perl c.pl": "we met at noon, see line 3.",
    "git log -3": "a.c:1:2: error: expected ';'\n1 error generated.", "cat log": "2 tests, 1 failure", "ls": "no error: all fine",
}  # fmt: skip


def sites(result, command="make", tool="bash", format="openai", failed=None, **given):
    "The sites of a trace of one call and its result."
    call = ToolCall(tool, given or {"command": command}, "c1")
    shown = Turn("tool", result, tool_call_id="c1", observation=True, failed=failed)
    turns = Turn("user", "Go."), Turn("assistant", tool_calls=(call,)), shown, Turn("assistant", "Well.")
    return find_error_sites(Trace("t", turns, format=format))


@pytest.mark.parametrize("command", PRINTED)
def test_a_program_s_last_words_say_that_it_failed(command):
    assert len(sites(PRINTED[command], command)) == 1


@pytest.mark.parametrize("command", FINE)
def test_what_counts_no_failure_is_none(command):
    assert not sites(FINE[command], command)


@pytest.mark.parametrize("line", ["failed: 3", "3 failed", "we saw that 3 failed of those which had run before it", "3 passed", "Error: 1 validation error for Foo", "x" * 999 + "1 error"])
def test_a_tally_counts_more_than_one_thing_and_is_no_sentence(line):
    assert not tallied(line) and tallied("3 failed, 1 passed")


@pytest.mark.parametrize("output", [
    *(PRINTED[command] for command in ("rake test", "bun test", "node --test", "swift test", "pytest -q")),
    "would reformat a.py\n\nOh no! 💥 💔 💥\n1 file would be reformatted.", "Checking formatting...\n[warn] src/a.ts",
    "On branch main\nnothing to commit, working tree clean", "trim trailing whitespace......Failed", "2 tests failed",
    "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
    "nothing to commit, working tree clean", "permission denied", "Segmentation fault", "command not found", "cannot change locale (en_US.UTF-8)",
    'no pull requests found for branch "main"', "Auto-merging a.txt\nCONFLICT (content): Merge conflict in a.txt", "Run `npm audit` for details.",
])  # fmt: skip
def test_a_flagged_output_of_claude_code_is_a_failure_unless_somebody_speaks_to_the_agent(output):
    assert len(sites(output, "x", "Bash", "claude-code", True)) == 1


@pytest.mark.parametrize("said", [
    "no, use pnpm instead", "Don't run the tests yet. First read the parser and tell me what it does.", "stop - use `uv run`",
    "that belongs into src/a.py, not here", "No.\nPlease write the test first.", "why do you need this?", "non, utilise plutôt npm",
    "look at src/a.ts:12 first, that is generated", "wait:\n- first the parser\n- then the tests", "使用 pnpm",
    "nimm bitte pnpm statt npm", "Nein, erst die Tests lesen und dann den Parser anpassen.", "das gehoert nach src/a.py, nicht hierher", "mach das mit uv",
    "utilise plutot pnpm", "il ne faut pas toucher a ce fichier", "usa pnpm en vez de npm, por favor", "non toccare il file, prima i test", "gebruik pnpm en niet npm",
    "the tests fail on CI, please look there", "there was an error in the last edit, undo it",
])  # fmt: skip
def test_a_person_who_speaks_to_the_agent_is_no_failure(said):
    assert not sites(said, "x", "Bash", "claude-code", True)


@pytest.mark.parametrize("complaint", [
    "[ERROR] You did not use a tool in your previous response! Please retry with a tool use.",
    "[ERROR] No tool was used in the last response. Please call one.", "[ERROR] You provided an empty response.",
])  # fmt: skip
def test_what_an_editor_says_of_a_turn_without_a_call(tmp_path, complaint):
    said = "<read_file>\n<path>a.txt</path>\n</read_file>", "[read_file for 'a.txt'] Result:\nred", "I have finished.", complaint, "Ok."
    rows = [says("user", "Go."), *(says(("assistant", "user")[n % 2], text) for n, text in enumerate(said))]
    [trace] = read(tmp_path, rows, "api_conversation_history.json")
    [site] = find_error_sites(trace)
    hint = default_composite().hint(trace, site).text
    assert site.turn == 3 and "tool" in hint and "JSON" not in hint


@pytest.mark.parametrize("answer", ["Your answer holds no command. Write one in a ```bash block.", "Please provide an action."])
def test_mini_swe_agent_s_own_words_about_a_turn_without_a_command(tmp_path, answer):
    rows = [says("system", "S"), says("user", "Go."), says("assistant", "I look."), says("user", answer), says("assistant", "Ok.")]
    [trace] = read(tmp_path, {"messages": rows, "info": {"exit_status": "Submitted", "submission": ""}}, "t.traj.json")
    [site] = find_error_sites(trace)
    assert "JSON" not in default_composite().hint(trace, site).text


@pytest.mark.parametrize("as_blocks", [True, False])
@pytest.mark.parametrize("command", ["ls", "cat a", "rg x"])
@pytest.mark.parametrize("error", ["TypeError: r.output is not a function", "exec_command failed: no such file", ""])
def test_a_script_of_codex_that_broke_off_failed_whatever_it_was_for(tmp_path, error, command, as_blocks):
    shown = ["Script failed\nWall time 0.1 seconds\nOutput:\n", f"Script error:\n{error}"]
    call = {"type": "custom_tool_call", "call_id": "c", "name": "exec", "input": f'text(await tools.exec_command({{"cmd":"{command}"}}));'}
    output = [{"type": "input_text", "text": text} for text in shown] if as_blocks else "".join(shown)
    done = {"type": "custom_tool_call_output", "call_id": "c", "output": output}
    last = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
    [trace] = read(tmp_path, [{"type": "response_item", "payload": item} for item in (call, done, last)], "r.jsonl")
    [site] = find_error_sites(trace)
    assert error in site.context.error_message


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("row", [{"role": None, "content": "x"}, {"content": "x"}, {"type": "session_meta"}, {"role": 3}, {"role": ["a"]}, {"role": ""}, {}])
def test_a_message_whose_role_is_none_costs_nothing_else(tmp_path, row, place):
    rows = [says("user", "Go."), says("assistant", tool_calls=[{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]), answered("Error: no")]
    rows += [says("assistant", "Well.")]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": rows[:place] + [row] + rows[place:]}))
    problems = []
    [trace] = read_traces(tmp_path / "t.jsonl", on_problem=problems.append)
    assert len(trace.turns) == 4 and len(find_error_sites(trace)) == 1 and "left out" in str(problems[0])


CELL = "-" * 75 + "\n{0}                  Traceback (most recent call last)\nCell In[1], line 3\n----> 3 run()\n\n{0}: no such column: Town"


@pytest.mark.parametrize("text", [
    CELL.format("OperationalError"), CELL.format("OperationalError").replace("OperationalError", "\x1b[0;31mOperationalError\x1b[0m"),
    "loading\n3 rows\n" + CELL.format("ValueError") + "\n[Jupyter current working directory: /w]",
    '  + Exception Group Traceback (most recent call last):\n  |   File "a.py", line 1, in <module>\n  | ExceptionGroup: two (2 sub-exceptions)\n'
    '  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File "a.py", line 1, in f\n'
    "    | ValueError: bad Town\n    +------------------------------------",
    json.dumps({"output_type": "error", "ename": "KeyError", "evalue": "'Town'", "traceback": []}),
])  # fmt: skip
def test_a_traceback_in_a_notebook_s_form(text):
    [site] = sites(text, tool="execute_ipython_cell", code="run()")
    assert "Town" in site.context.error_message


@pytest.mark.parametrize("tool", ["bash", "get_town", "browser"])
@pytest.mark.parametrize("whose", ["sandbox", "Sandbox", "network", "permission", "Rate limit", "backend service"])
def test_an_error_may_be_named_by_whose_it_is(tool, whose):
    [site] = sites(f"{whose} error: no such town\nTry another.", tool=tool, **({} if tool == "bash" else {"town": "X"}))
    assert "no such town" in site.context.error_message


def test_a_type_error_in_two_words_is_of_its_kind():
    [site] = sites('Parameter type error: "style", expected one of [\'minimal\', \'grunge\'], but got "cute".', tool="draw", style="cute")
    assert site.kind == "type_error"


@pytest.mark.parametrize("text", ["test error: 0.02\nstep 100", "No error: all is well", "Standard error: 3", "last error: none", "mean squared error: 1e-3"])
def test_an_error_that_is_measured_or_absent_is_none(text):
    assert not sites(text, tool="train", run=1)


STEP = [{"tool": "weather", "tool_input": {"city": "X"}, "log": "I ask."}, "Error: unknown city"]
CALL = {"type": "ai", "content": "", "tool_calls": [{"name": "weather", "args": {"city": "X"}, "id": "c1", "type": "tool_call"}]}
MET = [{"type": "human", "content": "Go."}, CALL, {"type": "tool", "content": "Unknown city", "tool_call_id": "c1", "status": "error"},
       {"type": "ai", "content": "I do not know."}]


@pytest.mark.parametrize("given, made", [
    ({"input": "Go."}, {"output": "I do not know.", "intermediate_steps": [STEP]}),
    ({"messages": MET[:1]}, {"agent": {"messages": MET}}), ({"state": {"messages": MET[:1]}}, {"state": {"messages": MET}}),
    ({"messages": MET[:1]}, {"messages": MET[1:]}), ({"input": "Go."}, {"messages": MET}),
])  # fmt: skip
def test_a_root_run_holds_its_conversation_under_other_keys(tmp_path, given, made):
    [trace] = read(tmp_path, [{"id": "a", "run_type": "chain", "name": "A", "inputs": given, "outputs": made}], "runs.jsonl")
    assert [t.role for t in trace.turns] == ["user", "assistant", "tool", "assistant"] and len(find_error_sites(trace)) == 1


def test_the_tool_s_last_word_on_a_status_counts_before_what_the_program_printed():
    assert not sites("Process finished with exit code 1\nsecond line\n[The command completed with exit code 0.]")
    assert len(sites("Process finished with exit code 0\nsecond line\n[The command completed with exit code 3.]")) == 1


def test_a_parameter_that_is_missing_is_a_failure_of_its_call():
    text = "Missing required parameters for function 'str_replace_editor': {'path'}"
    assert len(find_error_sites(chat_of(says("assistant", tool_calls=[{"id": "c1", "name": "edit", "arguments": "{}"}]), answered(text)))) == 1


@pytest.mark.parametrize("refusal, command", [
    ("Command is not in the allowed list: diff", "diff -u a b"), ("landlock: access denied", "cmp a b"),
    ("Command was blocked by the sandbox policy.", "git diff --exit-code"), ("sandbox-exec: sandbox_apply: Operation not permitted", "which node"),
    ("Tool blocked: plan mode is active", "grep x a || true"), ("Sandbox: the command was not run", "pytest -q || true"),
    ("This command requires approval", "grep -rn x src | head"), ("Permission denied and could not request permission", "test -f a"),
])  # fmt: skip
def test_a_refusal_is_no_answer_of_the_program(refusal, command):
    [site] = sites(refusal, command, failed=True)
    assert site.wanted is None


@pytest.mark.parametrize("answer, command", [
    ("1c1\n< a\n---\n> b", "diff a b"), ("a b differ: byte 1, line 1", "cmp a b"), ("", "test -f a"), ("", "git diff --exit-code"),
    ("/usr/bin/which: no node in (/usr/bin:/bin)", "which node"), ("package 'x' is not installed", "rpm -q x"), ("", "rg x"),
])  # fmt: skip
def test_what_a_program_prints_when_it_answers_no_was_asked_for(answer, command):
    assert all(site.wanted for site in sites(answer, command, failed=True))


def goose_call(id, name, **given):
    return {"type": "toolRequest", "id": id, "toolCall": {"status": "success", "value": {"name": name, "arguments": given}}}


def goose_result(id, text, failed=False):
    value = {"content": [{"type": "text", "text": text}], "isError": failed}
    return {"type": "toolResponse", "id": id, "toolResult": {"status": "success", "value": value}}


GOOSE = [
    says("user", [{"type": "text", "text": "Go."}]),
    says("assistant", [{"type": "thinking", "thinking": "Hm."}, goose_call("a", "developer__shell", command="make"), goose_call("b", "f", x=1)]),
    says("user", [goose_result("a", "make: no rule", True), goose_result("b", "Error: is a name in a list of names")]),
    says("assistant", [{"type": "toolRequest", "id": "c", "toolCall": {"status": "error", "error": "not JSON"}}]),
    says("user", [{"type": "toolResponse", "id": "c", "toolResult": {"status": "error", "error": "-32602: Invalid params: not JSON"}}]),
    says("assistant", [{"type": "text", "text": "Done."}]),
]


@pytest.mark.parametrize("form", ["lines", "export", "stream", "capitals", "older"])
def test_a_session_of_goose(tmp_path, form):
    older = json.loads(json.dumps(GOOSE).replace('"status": "success", "value"', '"Ok"').replace('"toolResult"', '"tool_result"'))
    capitals = {"id": "s", "conversation": [row | {"role": row["role"].title()} for row in GOOSE]}
    value = {"lines": GOOSE, "export": {"id": "s", "working_dir": "/w", "conversation": GOOSE}, "older": {"messages": older},
             "stream": [{"type": "message", "message": row} for row in GOOSE], "capitals": capitals}[form]
    [trace] = read(tmp_path, value, "s.jsonl" if form in ("lines", "stream") else "s.json")
    assert "".join(t.role[0] for t in trace.turns) == "uattata" and trace.turns[1].thinking == "Hm."
    assert [c.name for c in trace.turns[1].tool_calls] == ["developer__shell", "f"]
    assert [(s.turn, s.evidence_turn) for s in find_error_sites(trace)] == [(1, 2), (4, 5)]


ASKS = [{"id": "c1", "name": "f", "arguments": '{"x": 1}'}]
GIVES = [{"content": "Error: no", "name": "f", "call_id": "c1", "is_error": True}]
TASK, LAST = ({"source": who, "type": "TextMessage", "content": text} for who, text in (("user", "Go."), ("a", "Done.")))
AUTOGEN = [TASK, {"source": "a", "type": "ToolCallRequestEvent", "content": ASKS}, {"source": "a", "type": "ToolCallExecutionEvent", "content": GIVES}, LAST]
CODED = [TASK, {"source": "a", "type": "CodeGenerationEvent", "content": "```python\nx\n```", "code_blocks": [{"code": "x", "language": "python"}]},
         {"source": "a", "type": "CodeExecutionEvent", "result": {"exit_code": 1, "output": "NameError: name 'x' is not defined"}}, LAST]
STATE = [{"type": "UserMessage", "content": "Go.", "source": "user"}, {"type": "AssistantMessage", "content": ASKS, "source": "a"},
         {"type": "FunctionExecutionResultMessage", "content": GIVES}, {"type": "AssistantMessage", "content": "Done.", "source": "a"}]
AGENT = {"type": "ChatAgentContainerState", "agent_state": {"type": "AssistantAgentState", "llm_context": {"messages": STATE}}}


@pytest.mark.parametrize("name, value", [
    ("t.jsonl", AUTOGEN), ("t.json", {"messages": CODED}), ("c.jsonl", CODED),
    ("t.json", {"messages": [*AUTOGEN[:3], {"source": "a", "type": "StructuredMessage[Answer]", "content": {"answer": 1}}]}),
    ("t.json", {"type": "TeamState", "agent_states": {"a": AGENT, "manager": {"type": "RoundRobinManagerState", "current_turn": 0}}}),
])  # fmt: skip
def test_histories_of_autogen_in_other_forms(tmp_path, name, value):
    [trace] = read(tmp_path, value, name)
    assert "".join(t.role[0] for t in trace.turns) == "uata" and [s.turn for s in find_error_sites(trace)] == [1]


@pytest.mark.parametrize("form", ["event", "log"])
def test_an_exchange_in_one_event_or_log_record(tmp_path, form):
    blocks = [{"role": "user", "parts": [{"type": "text", "content": "Go."}]},
              {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "f", "arguments": {"x": 1}}]},
              {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "Error: no"}]}]
    made = [{"role": "assistant", "parts": [{"type": "text", "content": "Done."}]}]
    held = [{"key": f"gen_ai.{key}.messages", "value": {"stringValue": json.dumps(rows)}} for key, rows in (("input", blocks), ("output", made))]
    place = {"traceId": "t", "spanId": "s"}
    details = "gen_ai.client.inference.operation.details"
    span = place | {"name": "chat", "attributes": [], "events": [{"name": details, "attributes": held}]}
    log = place | {"timeUnixNano": "1", "eventName": details, "attributes": held}
    value = {"event": {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}, "log": {"resourceLogs": [{"scopeLogs": [{"logRecords": [log]}]}]}}
    [trace] = read(tmp_path, value[form])
    assert "".join(t.role[0] for t in trace.turns) == "uata" and len(find_error_sites(trace)) == 1
