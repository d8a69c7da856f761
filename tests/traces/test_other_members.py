# ruff: noqa: E501
"""What an outsider wrote of the same kinds: other programs, other agents, other words, and clean results that speak of errors."""

import json
import time

import pytest
from chats import read, says

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.traces.calls import last_program, printed_status, programs, reads
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.exit_status import exit_status


def sites(result, command="make", tool="bash", format="openai", failed=None, said="", **given):
    "The sites of a trace of one call and its result."
    call = ToolCall(tool, given or {"command": command}, "c1")
    shown = Turn("tool", result, tool_call_id="c1", observation=True, failed=failed)
    turns = Turn("user", "Go."), Turn("assistant", said, tool_calls=(call,)), shown, Turn("assistant", "Well.")
    return find_error_sites(Trace("t", turns, format=format))


BELOW = [  # what programs write below their last error
    "hint: Updates were rejected\nhint: its remote counterpart.\nhint: use 'git pull'\nhint: See the note\nhint: for details", "    at shop.Store.open(Store.java:14)\n" * 6,
    "\tfrom /w/a.rb:9:in '<main>'\n" * 5, "│\n│   on main.tf line 5\n│\n│ It is not there.\n╵", "\n[notice] A new release of pip\n[notice] To update, run pip", "  5 | x\n    | ^\nhelp: try y",
]  # fmt: skip


@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("error", ["error: failed to push some refs", "Error: Invalid index", "fatal: no such remote", "ERROR: No matching distribution"])
def test_lines_that_belong_to_an_error_do_not_hide_it(error, below):
    assert len(sites(f"one\ntwo\nthree\nfour\n{error}\n{below}")) == 1
    assert not sites(f"start\n{error}\none\ntwo\nthree\nfour, then it ran\n{below}")


@pytest.mark.parametrize("command, line", [
    ("patch -p1 < a.patch", "patch: **** malformed patch at line 35:"), ("cd /w && python -m pytest -q", "/opt/bin/python: No module named pytest"), ("python a.py", "a.py: invalid month"),
    ("wget http://x", "wget: unable to resolve host address 'x'"), ("docker run -d x", "docker: Error response from daemon: Conflict."), ("sudo tar xzf a.tgz", "tar: Error is not recoverable: exiting now"),
    ("./bin/shopctl go", "shopctl: bad magic"), ("FOO=1 timeout 5 shopctl go", "shopctl: connection refused"), ("make; ssh h true", "ssh: connect to host h port 22: Connection refused"), ("foo", "foo : unknown option"),
])  # fmt: skip
def test_a_program_complains_under_its_own_name(command, line):
    assert len(sites(f"one\ntwo\nthree\n{line}", command)) == 1 and len(sites(f"{line}\nSee --help.", command)) == 1
    assert not sites(f"one\ntwo\nthree\n{line}", "./else")
    assert not sites(f"{line}\none\ntwo\nthree\nfour", command)


@pytest.mark.parametrize("command, line", [
    ("file release", "release: ELF 64-bit LSB executable, not stripped"), ("gcc a.c", "gcc: warning: no input is bad"), ("make", "make: Nothing to be done for 'all'."), ("./check a.txt", "check: no errors found"),
    ("tar xf a.tar", "tar: Removing leading `/' from member names"), ("python a.py", "note: not all rows were read"), ("python -c 'note: 3'", "note: not all rows were read"),
])  # fmt: skip
def test_what_else_begins_with_a_name_is_no_complaint(command, line):
    assert not sites(f"one\n{line}", command)


@pytest.mark.parametrize("output", [
    "epoch 1\nepoch 2\nKilled", "one\ntwo\nSegmentation fault (core dumped)", "one\nthread 'main' panicked at src/main.rs:2:5:\nboom\nnote: run with `RUST_BACKTRACE=1`", "  % Total\n  0 0\ncurl: (6) Could not resolve host: x",
    "00:02 +2 -1: Some tests failed.", "Resolving dependencies...\nBecause x needs foo, version solving failed.", "x\n ELIFECYCLE  Test failed. See above for more details.", "INSERT 0 3\npsql:/tmp/x.sql:3: ERROR:  syntax error\nLINE 1: x\n        ^",
    "Project name: x\n\nmeson.build:5:0: ERROR: Dependency \"foo\" not found\n\nA full log can be found at /w/log.txt", "Could not locate Gemfile", "Cannot connect to the Docker daemon at unix:///x. Is it running?", "Cannot read properties of undefined (reading 'id')\n    at run (a.js:1:1)\n    at go (a.js:2:1)",
    "Running 4 tests\n\n  1 failed\n    a.spec.ts:3:1 › adds ───\n  3 passed (5.1s)", "╷\n│ Error: Reference to undeclared input variable\n│ \n│   on main.tf line 5\n╵", "one\ntwo\nthree\nfour\n./run.sh: line 9: protoc: command not found",
])  # fmt: skip
def test_how_outputs_end_that_failed(output):
    assert len(sites(output, "./run")) == 1


@pytest.mark.parametrize("output, command", [
    ("[main 1a2b3c4] Fix error: no rule, tests failed\n 1 file changed", "git commit -am x"), ("Running 4 tests\n  1 flaky\n    a.spec.ts\n  3 passed (5.1s)", "npx playwright test"), ("Could not import plot\nTesting logic only\n3 of 3\nas it should", "python a.py"), ("Could not find f\nUpdated g", "python a.py"),
    ("host1 : ok=4    changed=1    unreachable=0    failed=0    skipped=1", "ansible-playbook a.yml"), ("Passed!  - Failed:     0, Passed:     3, Skipped:     1, Total:     4", "dotnet test"), ("start\npanic: boom, recovered\nOK", "./run"),
    ("running 1 test\ntest fails - should panic ... ok\n\ntest result: ok. 1 passed; 0 failed", "cargo test"), ("http_errors_total 5\nerror: 0.02\njobs_failed 3", "curl -s localhost/metrics"), ("job 1 done\n2 failed", "./status"),
])  # fmt: skip
def test_how_outputs_end_that_did_not_fail(output, command):
    assert not sites(output, command)


LOG = "10:00 start\n10:01 ERROR retry\nTraceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nValueError: x\n2 failed, 3 passed\nError: boom"


@pytest.mark.parametrize("command", [
    "tail -n 100 a.log | grep -i error", "cat a.log; cat b.log", "cat a.log && cat b.log", "cd /w; cat a.log", "sudo cat a.log", "docker compose logs web", "docker logs db 2>&1 | tail -5", "jq -r .msg a.json", "zcat a.gz | tail", "Get-Content a.log",
    "git -C /w --no-pager show HEAD:a.log", "ssh host tail -50 a.log", "docker exec web cat a.log", "echo '--- log'; sed -n '1,40p' a.log", "sort a.log | uniq -c", "kubectl -n shop logs web-1", "for f in *.log; do cat $f; done", "rustc --explain E0382",
    "ls *.log | xargs head -3", "grep 'a; b' a.log", "cat a.log | tee b.log", "python a.py --help",
])  # fmt: skip
def test_a_command_all_of_whose_parts_read_shows_errors_of_others(command):
    assert reads(command) and not sites(LOG, command)
    for more in (f"{command}; make", f"make && {command}", f"{command} | ./run", f"{command} | python"):
        assert not reads(more) and sites(LOG, more)


@pytest.mark.parametrize("command", ["cat > a.py <<EOF\nx\nEOF", "sed -i s/a/b/ a.py", "cd /w", "echo x", "git commit -m 'cat a'", "", "pytest -q"])
def test_what_does_not_read(command):
    assert not reads(command)


def test_the_programs_of_a_command():
    command = "cd /w && FOO=1 sudo ./bin/a.sh 'x; y' 2>&1 | grep z; timeout 5 python3 -m pytest -q"
    assert programs(command) == {"cd", "a.sh", "grep", "python3", "pytest"} and last_program(command) == "python3"
    assert [last_program(c) for c in ("git -C /w grep x", "make;", "ls | xargs -n 1 grep x", "")] == ["grep", "make", "grep", ""]


@pytest.mark.parametrize("echo, line", [
    ("echo $?", "§"), ("echo status was $?", "status was §"), ('echo "=> $?"', "=> §"), ("printf 'ended: $?'", "ended: §"), ('echo -e "\\nret[$?]"', "ret[§]"), ('echo "${PIPESTATUS[0]} it was"', "§ it was"),
])  # fmt: skip
@pytest.mark.parametrize("end", ["; ", "\n"])
def test_a_command_may_print_its_own_status(echo, line, end):
    command = f"./build.sh{end}{echo}"
    assert printed_status(command)[0] == "./build.sh"
    for code in (2, 127):
        assert exit_status(f"no rule\n{line.replace('§', str(code))}", command=command) == (code, "no rule")
        for head in ("", "Exit code: 0\nWall time: 0.1 seconds\nOutput:\n"):
            [site] = sites(f"{head}no rule\n{line.replace('§', str(code))}", command)
            assert site.context.error_message == "no rule" and (site.kind == "tool_not_found") == (code == 127)
    assert not sites(f"Error: 0 of 3, went on\n{line.replace('§', '0')}", command) and not sites(f"0\n{line.replace('§', '1')}", f"grep -c x a{end}{echo}")
    assert exit_status(f"no rule\n{line.replace('§', '2')}", command="./build.sh")[0] is None or "status" in line or "ret" in line


def test_a_printed_status_behind_a_filter_is_the_filter_s():
    assert sites("1 failed, 2 passed\n0", "pytest | tail -3; echo $?") and not sites("1 failed, 2 passed\n0", "pytest | tail -3; echo ${PIPESTATUS[0]}")


@pytest.mark.parametrize("text, command", [("/bin/sh: 1: gti: not found", "gti"), ("'gti' is not recognized as an internal or external command,\noperable program or batch file.", "gti"),
                                           ("gti: The term 'gti' is not recognized as a name of a cmdlet, function, script file, or executable program.\nCheck the spelling.", "gti"), ("zsh: command not found: gti", "gti"),
                                           ("one\ntwo\nthree\nfour\n./run.sh: line 9: gti: command not found", "./run.sh")])  # fmt: skip
def test_a_program_that_no_shell_knows_is_not_found(text, command):
    assert [site.kind for site in sites(text, command)] == ["tool_not_found"]


@pytest.mark.parametrize("text, format", [("unsupported call: fly", "codex"), ("Error: fly is not a valid tool, try one of [a, b].", "openai"), ('Tool "fly" not found in registry.', "gemini-cli")])
def test_a_tool_that_no_agent_knows_is_not_found(text, format):
    assert [site.kind for site in sites(text, tool="fly", format=format, to="X")] == ["tool_not_found"]


@pytest.mark.parametrize("held, says", [
    ({"message": "Not Found", "documentation_url": "u", "status": "404"}, "Not Found"), ({"error_message": "bad key", "results": [], "status": "REQUEST_DENIED"}, "bad key"), ({"errorMessage": "'town'", "errorType": "KeyError"}, "'town'"),
    ({"Error": "no such table"}, "no such table"), ({"code": 2, "stdout": "", "stderr": "no rule"}, "no rule"), ({"status": 2, "signal": None, "stdout": "", "stderr": "no rule"}, "no rule"),
    ({"stdout": "epoch 1", "stderr": "", "exit_code": None, "timed_out": True}, "epoch 1"), ({"stdout": "x", "stderr": "", "outcome": {"type": "timeout"}}, "x"),
])  # fmt: skip
def test_objects_that_say_in_other_keys_that_they_failed(held, says):
    [site] = sites(json.dumps(held), tool="call", x=1)
    assert site.context.error_message == says


@pytest.mark.parametrize("held", [
    {"valid": False, "errors": ["name is missing"]}, {"error": 0, "result": 5}, {"passed": 3, "failed": 0}, {"error_message": None, "status": "OK"}, {"code": 0, "stdout": "Error: 0", "stderr": ""}, {"status": 200, "stdout": "x"}, {"status": "4040"},
    {"timed_out": False, "output": "x"}, {"type": "timeline"}, {"Error": "none"}, {"status": 1, "title": "an order"},
])  # fmt: skip
def test_objects_that_did_not_fail(held):
    assert not sites(json.dumps(held), tool="call", x=1)


@pytest.mark.parametrize("said", [
    "nie rób tego, najpierw przeczytaj parser", "kor testerna forst och visa mig resultatet", "jangan pakai npm, pakai pnpm saja", "once testleri calistir sonra devam et", "spusti nejdriv testy prosim", "nimm bitte pnpm statt npm", "usa pnpm en vez de npm",
])  # fmt: skip
def test_a_person_may_speak_any_language(said):
    assert not sites(said, tool="Bash", format="claude-code", failed=True)


@pytest.mark.parametrize("printed", ["Username and password required", "Aborting commit due to empty commit message.", "zip: name not matched: x", "Resource temporarily unavailable", "Everything up-to-date", "invalid credentials supplied again"])
def test_a_program_speaks_english(printed):
    assert len(sites(printed, tool="Bash", format="claude-code", failed=True)) == 1


def test_a_filter_hides_a_status_in_claude_code_too():
    assert sites("1 failed, 2 passed", "pytest | tail -3", "Bash", "claude-code", False) and not sites("1 failed, 2 passed", "pytest", "Bash", "claude-code", False)


def test_what_agents_say_themselves(tmp_path):
    assert not sites("Chunk ID: a1\nWall time: 10.0 seconds\nProcess running with session ID 5\nOutput:\nerror: retrying", "npm run dev", "exec_command", "codex")
    assert sites('[Your command "ls" is NOT executed. The previous command is still running.]\n[Command finished with exit code -1]', "ls", "execute_bash", "openhands")
    assert exit_status("Command executed in terminal within '/w'. It was not successful.\nExit code: 1\nOutput:\nno test") == (1, "Command executed in terminal within '/w'. It was not successful.\nno test")
    assert exit_status("rc=2: no rule") == (2, "no rule") and exit_status("exit 2: north")[0] is None
    logs = [{"type": "logs", "logs": 'Traceback (most recent call last):\n  File "<cell>", line 1, in <module>\nZeroDivisionError: division by zero'}]
    ran = {"type": "code_interpreter_call", "id": "k", "code": "1/0", "status": "completed", "outputs": logs}
    [trace] = read(tmp_path, {"input": [says("user", "Go.")], "output": [ran, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}]})
    [site] = find_error_sites(trace)
    assert "ZeroDivisionError" in site.context.error_message


@pytest.mark.parametrize("text, found", [("Error: boom\n1 failed", False), ("Error: ENOENT: no such file, open 'ci.log'\nTry another.", True), ("Error: no such file", True)])
def test_the_first_words_of_a_file_of_data_are_its_own(text, found):
    assert bool(sites(text, tool="read_file", path="ci.log")) is found and sites(text, tool="read_file", path="a.py")


@pytest.mark.parametrize("said", [
    "Now I run it to see it red.", "The new test has to fail before I implement anything.", "Verify that it errors out for a bad file.", "It should exit non-zero here.", "The linter should complain about the import.", "Make sure the server refuses a wrong token.",
    "Check: a bad month must be rejected.", "I break the code on purpose.", "A baseline first.", "Do they fail without my edits, too?",
])  # fmt: skip
def test_other_words_for_a_wanted_failure(said):
    assert [bool(site.wanted) for site in sites("1 failed in 0.05s", "./run", failed=True, said=said)] == [True]


@pytest.mark.parametrize("said", ["The linter complained, so I removed it.", "The server refused my token. I try the other one.", "It must not be rejected any more.", "It was red before. Now the fix.", "Look at the rejected patch."])
def test_words_of_failing_that_want_none(said):
    assert [site.wanted for site in sites("1 failed in 0.05s", "./run", failed=True, said=said)] == [None]


@pytest.mark.parametrize("word", ["nohup ", "A=1 ", "sudo -a 1 ", "xargs -a {} ", "timeout 5 ", "env ", "cat a | ", "; echo $?"])
def test_a_command_of_many_words_is_read_in_a_time_that_grows_with_its_length(word):
    def seconds(n):
        taken = []
        for _ in range(3):
            began = time.process_time()
            reads(word * n + "!")
            taken.append(time.process_time() - began)
        return min(taken)
    assert seconds(16_000) < 60 * max(seconds(1_000), 5e-3)  # 16 times the length; one that is quadratic takes seconds


@pytest.mark.parametrize("command, output", [  # what speaks under its own name complains, in whatever words
    ("sed -i 's/a/b' f", "sed: -e expression #1, char 5: unterminated `s' command"), ("awk '{print $1' f", "awk: cmd. line:1: {print $1\nawk: cmd. line:1:          ^ unexpected newline or end of string"),
    ("grep -P '(a' f", "grep: unmatched parentheses"), ("kill 99999", "bash: kill: (99999) - No such process"), ("sudo systemctl stop web", "sudo: a terminal is required to read the password\nsudo: a password is required"),
    ("cat a.txt", "cat: a.txt: Aucun fichier ou dossier de ce nom"), ("ls /nope", "ls: nelze přistoupit k '/nope': Adresář nebo soubor neexistuje"), ("if [ -f a ]; then echo", "bash: -c: line 2: syntax error: unexpected end of file"),
])  # fmt: skip
def test_an_output_of_complaints_alone(command, output):
    assert len(sites(output, command)) == 1 and bool(sites(output, "./other")) == output.startswith(("bash", "sudo"))
    assert not sites(f"{output}\none row\ntwo rows\nthree rows", command)


@pytest.mark.parametrize("command, output", [
    ("ninja -C build", "ninja: Entering directory `build'\nninja: no work to do."), ("go mod tidy", "go: downloading github.com/pkg/x v0.9.1\ngo: finding module for package x"), ("go get x", "go: added example.org/x v0.9.1"),
    ("make", "make: 'all' is up to date."), ("grep -r a src", "grep: src/a.pyc: binary file matches"), ("nginx -t", "nginx: the configuration file a.conf syntax is ok\nnginx: configuration file a.conf test is successful"),
    ("python load.py", "load.py: three rows"), ("whereis node", "node: /usr/bin/node"), ("ls", "bash: no job control in this shell"),
])  # fmt: skip
def test_a_program_that_reports_under_its_own_name(command, output):
    assert not sites(output, command)


@pytest.mark.parametrize("output, command", [
    ("FAILED t.py::test_a - assert 1 == 2\n1 failed, 11 passed in 0.31s", "pytest -q | tail -5"), ("error[E0382]: borrow of moved value: `rows`\nerror: could not compile `x` (lib) due to 1 previous error", "cargo build 2>&1 | tail"),
    ("uploading\nFailed to upload app.tgz: no room", "./deploy.sh | tee out.log"), ("Traceback (most recent call last):\n  File \"/w/a.py\", line 1, in <module>\nValueError: x", "python a.py 2>&1 | head -3"),
])  # fmt: skip
@pytest.mark.parametrize("format, shown", [
    ("mini-swe-agent", "<returncode>0</returncode>\n<output>\n{}</output>".format), ("openai", "{}\n[The command completed with exit code 0.]\n[Command finished with exit code 0]".format),
    ("codex", lambda output: json.dumps({"output": output, "metadata": {"exit_code": 0}})),
])  # fmt: skip
def test_a_filter_s_status_does_not_hide_a_failure(format, shown, output, command):
    assert len(sites(shown(output), command, format=format)) == 1
    assert not sites(shown("11 passed in 0.31s"), command, format=format) and not sites(shown(output), "cat a.log | tail -5", format=format)


def test_a_printed_status_counts_in_a_wrapper_too():
    shown = "<returncode>0</returncode>\n<output>\nrc={}\n</output>"
    assert [len(sites(shown.format(code), "./check > out 2>&1; echo rc=$?", format="mini-swe-agent")) for code in (0, 2)] == [0, 1]


@pytest.mark.parametrize("text", [
    "### Result\nError: Ref e12 not found in the page.", "page.goto: net::ERR_CONNECTION_REFUSED at http://localhost:3000/\nCall log:\n  - navigating", "Timeout 30000ms exceeded waiting for selector \"#buy\"",
    "Input validation error: 5 is not of type 'string'", "Access denied - path outside allowed directories: /x", "错误：文件不存在：a.txt", "Fehler: keine Stadt",
    "HTTPSConnectionPool(host='x', port=443): Max retries exceeded (Caused by NewConnectionError('<object>: [Errno -2] Name or service not known'))", '{"code": "INVALID_ARGUMENT", "detail": "to is no address"}',
])  # fmt: skip
def test_tools_without_a_flag_say_that_they_failed(text):
    assert len(sites(text, tool="ask", q="x")) == 1


@pytest.mark.parametrize("text", [
    "### Result\nno city\n", "Test set error: 0.31", "Train error: 5 of 9", '{"code": "EUR", "detail": "Euro"}', '{"code": "NOT_FOUND", "detail": "a label", "rows": 3}', "Fehlerquote: 3 %", "1 EUR = 1,08 USD. Keine Fehler.",
    '{"jobs": [{"id": 1, "status": "failed", "error": "out of memory"}]}', '{"valid": true, "error_count": 0, "errors": 0}',
])  # fmt: skip
def test_tools_without_a_flag_that_did_not_fail(text):
    assert not sites(text, tool="ask", q="x")


@pytest.mark.parametrize("output, command", [
    ("1 | import { x } from \"./y\";\n           ^\nerror: Cannot find module \"./y\" from \"/w/b.ts\"\n\nBun v1.1.29 (Linux x64)", "bun run b.ts"), ("pull request create failed: GraphQL: No commits between main and x (createPullRequest)", "gh pr create"),
    ("  × No solution found when resolving dependencies:\n  ╰─▶ Because a needs b, we can conclude that it is unsatisfiable.", "uv pip install a"), ("The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?", "kubectl get svc"),
    ("The Deployment \"web\" is invalid: spec.image: Required value", "kubectl apply -f a.yaml"), ("connected.\nawaiting response... 404 Not Found\n2026-05-01 10:00:01 ERROR 404: Not Found.", "wget http://x"),
])  # fmt: skip
def test_how_other_outputs_end_that_failed(output, command):
    assert len(sites(output, command)) == 1


@pytest.mark.parametrize("output, command", [("Terraform v1.5.7\non linux_amd64", "terraform version"), ("✖ 1 problem (0 errors, 1 warning)", "eslint ."), ("Tests failed: 0", "./run"), ("Jobs failed: none", "./run")])
def test_how_other_outputs_end_that_did_not_fail(output, command):
    assert not sites(output, command)


def test_an_answer_about_json_to_a_call_that_does_not_parse():
    call, said = ToolCall("write", '{"path": "a', "c1"), "Unterminated string in JSON at position 41"
    turns = Turn("user", "Go."), Turn("assistant", tool_calls=(call,)), Turn("tool", said, tool_call_id="c1", observation=True)
    assert [site.kind for site in find_error_sites(Trace("t", turns, format="openai"))] == ["json_decode"]
