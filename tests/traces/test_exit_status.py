"""What may be taken off an output beside an exit status: what wrappers are known to write, and nothing that a program said."""

import json

import pytest
from chats import came_back

from composer_replication.core.trace import Trace
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.exit_status import exit_status
from composer_replication.traces.wrapper import unwrapped

STATUS_LINES = [  # § stands for the status; the message follows on the line
    "Exit code §: ", "exit code § - ", "exit status §; ", "exited with code §: ", "Process exited with code §, ",
    "Error: Command failed with exit code §: ", "[exit code: §] ", "(exit status §) ", "exit_code: §: ",
    "CommandExecError: §: ", "**Exit code:** `§`: ",
]  # fmt: skip
MESSAGES = [
    "no such file", "bash: foo: command not found", "Error: boom", "Runtime error: (bad)", "[ERROR] Failed to execute goal",
    "cannot open a (b, c)", "0.2 s were not enough", "x" * 400, "a: b, " * 80 + "c", "Timed out: connecting to db",
]  # fmt: skip
WRAPPERS = [  # ¶ stands for the output
    "Exit code: §\n¶", "Exit code §\nWall time: 0.2 seconds\nOutput:\n¶", "¶\n[Command finished with exit code §]",
    "¶\n\n(exit status §)", "¶\nExit code: §",
    "¶\n[The command completed with exit code §.]\n[Current working directory: /w]\n[Python interpreter: /p]\n"
    "[Command finished with exit code §]",
    "Command: make\nDirectory: (root)\nOutput: ¶\nError: (none)\nExit Code: §\nSignal: (none)\nBackground PIDs: (none)\n"
    "Process Group PGID: 77",
    "<returncode>§</returncode>\n<output>\n¶\n</output>", "<returncode>§</returncode><output>¶</output>",
    "<output>¶</output><exit_code>§</exit_code>", '<shell exit_code="§">\n¶\n</shell>', '<shell exit_code="§">¶</shell>',
    "<bash_output>\n<exit_code>§</exit_code>\n¶\n</bash_output>",
    "Wall time: 1 s\nProcess exited with code §\n¶\nroot@box:/w # ",
]  # fmt: skip
OUTPUTS = [
    *MESSAGES, "[1,2,3]", "building\n[ERROR] Failed to execute goal", "['t', 's']\n['a']", "ok\n[" + "x" * 400 + "]",
    "Error: boom\nnote: (see below)", "boom\n(core dumped)", "a\n</shell> was not closed", "cwd: /w: No such file",
    "Directory: /w: No such file", "No rule: (all)", "waiting for exit status 3", "ran make\nmake exited with code 2: no rule",
    "signal: no handler, stopped", "1 %", "user> unknown command", "<b>boom</b>", "{a: 1}",
]  # fmt: skip
DECORATED = [
    "Exit code §.", "(exit code §)", "[exit code: §]", "exit status §, 0.2 s", "Exit code: § (0.2s)", "**Exit code:** `§`",
    "Process exited with code § (took 3 seconds)", "Command finished with exit code §; duration: 0.2 s",
    "exit code § | signal: 9", "exit code § (SIGKILL)", "Exit code: § (failed)", "=== exit code: § ===",
    "<exit_code>§</exit_code>", "exit code § in 1m 3s", "exit code: § [0.2 s]",
]  # fmt: skip


def sites(text, command="make"):
    return find_error_sites(Trace("t", came_back(text, given={"command": command}), format="openai"))


@pytest.mark.parametrize("code", [1, 2, 127])
@pytest.mark.parametrize("behind", ["", "\nand a second line"])
@pytest.mark.parametrize("head", STATUS_LINES)
def test_a_message_behind_a_status_on_its_line_is_output(head, behind, code):
    for message in MESSAGES:
        text = head.replace("§", str(code)) + message + behind
        assert exit_status(text) == (code, message + behind), text
        [site] = sites(text)
        assert message in site.context.error_message and (code == 127) == (site.kind == "tool_not_found")


@pytest.mark.parametrize("line", STATUS_LINES)
def test_a_message_behind_a_status_below_an_output_is_output_too(line):
    for message in MESSAGES:
        text = f"building\n{line.replace('§', '1')}{message}"
        assert exit_status(text) == (1, f"building\n{message}"), text


@pytest.mark.parametrize("line", DECORATED)
def test_a_decoration_behind_a_status_is_no_output(line):
    for code in (0, 1, 2):
        for text, output in ((line, ""), (f"{line}\nboom", "boom"), (f"boom\n{line}", "boom")):
            assert exit_status(text.replace("§", str(code))) == (code, output), text
    assert not sites(line.replace("§", "1"), "grep -q x a") and sites(line.replace("§", "2"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_that_a_program_printed_is_taken_for_a_wrapper(wrapper):
    for output in OUTPUTS:
        for code in (1, 2):
            text = wrapper.replace("§", str(code)).replace("¶", output)
            assert exit_status(unwrapped(text)) == (code, output), text
            [site] = sites(text)
            assert site.context.error_message == output
        assert not sites(wrapper.replace("§", "0").replace("¶", output))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_output_is_empty_only_where_nothing_was_printed(wrapper):
    assert exit_status(unwrapped(wrapper.replace("§", "1").replace("¶", ""))) == (1, "")


@pytest.mark.parametrize("line", [
    'print("<exit_code>1</exit_code>") # doc', "<exit_code>1</exit_code> is what it writes", "see <returncode>1</returncode>",
    'x = \'<shell exit_code="1">\'', "The process exited with code 1 last night, the page says.", "exit code 1 is for errors",
    "Process exited with code 1. So the page says.",
])  # fmt: skip
def test_a_line_that_holds_more_than_a_wrapper_is_no_status(line):
    for text in (line, f"{line}\nand more", f"more\n{line}"):
        assert exit_status(text) == (None, text)


@pytest.mark.parametrize("text, output", [
    ("Exit code: 1\nboom\n----", "boom\n----"), ("----\nboom\nExit code: 1", "----\nboom"),
    ("Signal: 9\nboom\nExit code: 1", "Signal: 9\nboom"), ("Exit code: 1\n----\nboom", "boom"),
    ("boom\n----\nExit code: 1\nSignal: 9", "boom"), ("a\nexit code 2\n[exit code: 1]", "a\nexit code 2"),
])  # fmt: skip
def test_only_fields_next_to_a_status_are_taken_off(text, output):
    assert exit_status(text) == (1, output)


def test_a_command_repeated_behind_its_status_is_no_output():
    text = "Command failed with exit code 1: npm test"
    assert exit_status(text, command="npm test") == (1, "") and exit_status(text, command="npm") == (1, "npm test")
    [site] = sites(f"{text}\nboom", "npm test")
    assert site.context.error_message == "boom"


@pytest.mark.parametrize("held", [
    {"message": "boom"}, {"content": "boom"}, {"content": [{"type": "text", "text": "boom"}]}, {"reason": "boom"},
    {"result": "boom"}, {"logs": "boom"}, {"text": "boom"}, {"output": ["boom"]}, {"stdout_lines": [], "stderr_lines": ["boom"]},
    {"aggregatedOutput": "boom"}, {"error_text": "boom"}, {"traceback": "boom"}, {"stdout": "", "stderr": "boom"},
    {"message": "Command failed with exit code 1: boom"}, {"output": "Exit code: 1\nboom"},
    {"message": "the command failed", "stderr": "boom"},
], ids=str)  # fmt: skip
def test_what_an_object_with_a_status_says_is_its_output(held):
    about = {"command": "make", "cwd": "/w", "duration": 3, "id": "c1", "status": "done"}
    for text in (json.dumps(about | {"exit_code": 1} | held), json.dumps(about | held | {"metadata": {"exit_code": 1}})):
        [site] = sites(text)
        assert site.context.error_message == "boom"
        assert not sites(text.replace('"exit_code": 1', '"exit_code": 0'))


@pytest.mark.parametrize("held", [{}, {"stdout": "", "stderr": ""}, {"message": "Failed with exit code 1"}, {"output": None}])
def test_an_object_with_status_1_that_says_nothing_answers_no(held):
    assert not sites(json.dumps({"command": "make", "cwd": "/w", "exit_code": 1} | held))
