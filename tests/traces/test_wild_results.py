# ruff: noqa: E501
"""What tools answer in files of the wild (spike 151): found where it failed, and nowhere else."""

import json

import pytest

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.hints.layers import default_composite
from composer_replication.traces.error_sites import find_error_sites

TSC = "src/a.ts(3,5): error TS2322: Type 'string' is not assignable to type 'number'."
RUNS = "Script completed\nWall time 0.8 seconds\nOutput:\n\n"
SANDBOX = "failed in sandbox LinuxSeccomp with execution error: sandbox denied exec error, exit code: "


def sites(result, tool="bash", format="openai", failed=None, **arguments):
    "The sites of a trace of one call and its result."
    calls = (ToolCall(tool, arguments, "c1"),)
    turns = Turn("user", "Go."), Turn("assistant", tool_calls=calls), Turn("tool", result, tool_call_id="c1", observation=True, failed=failed)
    return find_error_sites(Trace("t", turns, format=format))


@pytest.mark.parametrize("failed", [False, None])
@pytest.mark.parametrize("end", ["tail -20", "head", "grep error", "Select-String error", "tee log.txt"])
def test_the_status_of_a_filter_says_nothing_of_the_program_before_it(end, failed):
    assert sites(TSC, failed=failed, command=f"npm run build 2>&1 | {end}")
    assert sites(f"rc=0\nbuilding\n{TSC}", command=f"npm run build 2>&1 | {end}")
    assert not sites(f"rc=0\n{TSC}", command="npm run build") and not sites(TSC, failed=False, command="npm run build")
    assert not sites(TSC, failed=False, command=f"set -o pipefail; npm run build 2>&1 | {end}")
    assert not sites("12 passed", failed=failed, command=f"pytest 2>&1 | {end}")
    assert not sites("Error: a line of the file", failed=failed, command=f"cat log.txt | {end}")


@pytest.mark.parametrize("filter", ["grep error", "grep -v warning", "rg error", "grep -E error | head -40"])
def test_a_filter_that_shows_errors_is_no_question(filter):
    "Only a program that is asked itself answers by its status: not what stands behind a pipe."
    [site] = sites(TSC, command=f"npm run check 2>&1 | {filter}")
    assert site.wanted is None


@pytest.mark.parametrize(
    "answer", [{"status": "error", "error": "HTTP 429"}, {"ok": False, "error": "no JSON"}, {"error": "no key"}, {"success": False}]
)
def test_a_tool_that_ran_may_say_itself_that_it_failed(answer):
    text = json.dumps(answer)
    assert sites(text, tool="browser", failed=False, code="go()") and sites(text, tool="get_page", failed=False, id="1")
    assert sites(text, tool="read", failed=False, path="docs/README.md")
    assert not sites(text, tool="read", failed=False, path="data/answer.json") and not sites(text, failed=False, command="cat answer.json")
    assert not sites(json.dumps(answer | {"error": None, "status": "ok", "ok": True, "success": True}), tool="browser", failed=False, code="go()")


def test_the_state_of_what_was_looked_up_is_no_failure_of_the_look():
    build = json.dumps({"status": "failed", "reason": "two tests are red"})
    assert not sites(build, tool="get_build", failed=False, id="7") and sites(build, tool="start_build", failed=False, id="7")


def test_an_output_of_nothing_but_errors_failed_though_its_status_is_0():
    assert sites("ERROR:[Errno 2] No such file\nERROR:[Errno 2] No such file", failed=False, command="python a.py; python b.py")
    assert not sites("ERROR: a\ngo on\n3 done", failed=False, command="python a.py")
    assert not sites("Error: is a name", failed=False, command="ls -1") and not sites("error: x", failed=False, command="git log -1 --format=%s")


@pytest.mark.parametrize("tool", ["bash", "exec", "write_stdin", "run_in_terminal", "terminal"])
def test_the_last_line_of_a_command_is_its_last_word(tool):
    assert sites("collecting\nbuilding\nFailed to build a", tool=tool, command="pip install a")
    assert sites("A.java:1: error: ';' expected\nint a\n     ^\n1 error", tool=tool, command="javac A.java")
    assert not sites("collecting\nFailed to build a\n3 packages installed", tool=tool, command="pip install a")


def test_what_goes_on_in_a_terminal_is_judged_without_its_command():
    assert sites(f"{RUNS}\n> vue-tsc -b\n\n{TSC}\n", tool="exec", format="codex", input="tools.write_stdin({session_id:1})")
    assert not sites(f"A report.\n{TSC}", tool="Task", prompt="Review it.")


def test_codex_shows_the_status_of_its_script_in_an_object():
    command = 'const r = await tools.exec_command({cmd:"npm test"}); text(JSON.stringify(r))'
    [site] = sites(RUNS + json.dumps({"chunk_id": "1", "exit_code": 2, "output": "no rule"}), tool="exec", format="codex", input=command)
    assert site.context.error_message == "no rule"
    assert not sites(RUNS + json.dumps({"chunk_id": "1", "exit_code": 0, "output": "Error: is a name"}), tool="exec", format="codex", input=command)


@pytest.mark.parametrize("command", ["sed -n 1,9p a b.md", "npm test"])
def test_codex_says_in_one_line_what_its_sandbox_refused(command):
    [site] = sites(f"{SANDBOX}2, stdout: , stderr: sed: can't read a: No such file", tool="shell", format="codex", command=command)
    assert site.context.error_message == "sed: can't read a: No such file"
    assert not sites(f"{SANDBOX}1, stdout: , stderr: ", tool="shell", format="codex", command="rg x")


@pytest.mark.parametrize("text", ["Invalid `path` parameter: a.py. It should be absolute.", "Ran into [Errno 2] No such file: '/w/a' while trying to write to /w/a"])
def test_an_editor_that_refuses_a_parameter_failed(text):
    assert sites(text, tool="str_replace_editor", path="a.py")


@pytest.mark.parametrize("code", [1, 123])
def test_a_status_repeated_behind_the_output_is_no_output(code):
    assert not sites(f"<returncode>{code}</returncode>\n<output>\nCommandExecError: {code}</output>", command="cat a | xargs grep x")


@pytest.mark.parametrize("last", ["grep -n total src/a.py", "grep -E 'a|b;c' x", "rg \"a|b\" src", "npm ls | grep react", "cd /w && git grep x"])
def test_a_search_that_finds_nothing_did_not_fail_whatever_was_printed_before_it(last):
    "Its status is the last program's, also where the pattern holds what ends a command elsewhere."
    assert not sites("Exit code 1\nthe first program's output", command=f"echo hi; {last}")
    assert sites("Exit code 2\ngrep: src/a.py: No such file or directory", command=f"echo hi; {last}")
    assert sites("Exit code 1\nls: x: No such file or directory", command=f"ls x; {last}")
    assert sites("Exit code 1\nboom", command=f"{last}; make")
    assert sites("Exit code 1\n/nix/bin/bash: line 1: /: Is a directory", command=last)


@pytest.mark.parametrize("refusal", ["Planning is active: this tool is blocked.", "The sandbox refused the command."])
def test_a_refusal_is_not_what_a_search_answers(refusal):
    [site] = sites(refusal, failed=True, command="cd /w; grep -rn total src")
    assert site.wanted is None
    [site] = sites(refusal, failed=True, command="cd /w && grep -rn total src | head")
    assert site.wanted is None
    assert all(site.wanted for site in sites("(no output)", failed=True, command="cd /w; grep -rn total src"))


def test_a_command_that_a_terminal_repeats_in_lines_of_its_width_is_no_output():
    command = 'grep -l "toolu_bdrk_01SueYpR2HFWrbi9jrX1USMd" /home/a/conversations/e0396/events/*.json | xargs -I {} sh -c true'
    echo = command[:48] + "\n" + command[48:90] + " " + command[90:]
    [site] = sites(f"{echo}\nxargs: command line cannot be assembled, too long\n[Command finished with exit code 1]", command=command)
    assert site.context.error_message == "xargs: command line cannot be assembled, too long"
    assert not sites(f"{echo}\n[Command finished with exit code 1]", command=command.replace("xargs -I {} sh -c", "xargs -I {} sh -d"), failed=None)[1:]


def test_a_question_that_the_user_dismissed_did_not_fail():
    assert not sites("Error: The user dismissed this question", tool="question", questions=["What?"])


@pytest.mark.parametrize(
    "error, says, never",
    [
        ("ENOENT: no such file or directory, access '/w/docs/README.md'", "There is no `/w/docs/README.md`", "'…'"),
        (f"ENOENT: no such file or directory, open '/{'folder/' * 14}docs/README.md'", "folder/docs/README.md`", "@…"),
        ("No replacement was performed. Multiple occurrences of old_str `x` in lines [3, 9]. Please ensure it is unique.", "several times", "exactly as written"),
        ("Ran into [Errno 2] No such file or directory: '/w/a/b.py' while trying to write to /w/a/b.py", "no folder `/w/a`", "before opening"),
        ("bash: sudo: command not found", "`sudo` is not installed", "od or python"),
    ],
)
def test_hints_that_were_read_as_wrong_or_weak(error, says, never):
    call = Turn("assistant", tool_calls=(ToolCall("edit", {"path": "x"}, "c1"),))
    trace = Trace("t", (Turn("user", "Go."), call, Turn("tool", error, tool_call_id="c1", observation=True, failed=True)), format="openai")
    [site] = find_error_sites(trace)
    hint = default_composite().hint(trace, site).text
    assert says in hint and never not in hint


def test_an_answer_that_lacks_fields_is_told_which():
    answer = "Previous response had parsing errors:\nERROR: Missing required fields: analysis, plan\nPlease fix these issues."
    trace = Trace("t", (Turn("user", "Go."), Turn("assistant", '{"commands": []}'), Turn("user", answer, observation=True)), format="atif")
    [site] = find_error_sites(trace)
    assert "analysis, plan" in default_composite().hint(trace, site).text


@pytest.mark.parametrize("key", ["C-c", "^C", "ctrl+c", "C-d"])
def test_a_key_that_ends_a_program_did_what_it_was_for(key):
    assert not sites("[Command finished with exit code 130]", command=key) and sites("[Command finished with exit code 130]", command="make")
    assert not sites("", failed=True, command=key) and sites("", failed=True, command="make")


@pytest.mark.parametrize("tool", ["FileSurfer", "fetch_page", "browse"])
@pytest.mark.parametrize("page", [
    "Address: file:///w/notes.pdf\nTitle: Error 404\nViewport position: Showing page 1 of 1.\n=====\n## Error 404\n\nFile not found",
    "<html><head><title>403 Forbidden</title></head><body>nginx</body></html>", "Title: HTTP 502 Bad Gateway | a.example\n\nsorry"])
def test_a_page_whose_title_is_a_status_was_not_found(page, tool):
    assert len(sites(page, tool)) == 1


@pytest.mark.parametrize("page", [
    "Title: Error handling in Go\n\n# Errors", "Title: Error: Cannot find module 'x' - Questions\n\n12 answers", "Title: 500 best recipes\n\n1. Bread",
    "<title>404 things to do</title>", "Title: What 404 Not Found means\n\nA status.", "Title: Room 404\n\nTo let."])
def test_a_page_about_errors_is_a_page(page):
    assert sites(page, "fetch_page") == []
