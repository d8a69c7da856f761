"The agent's tools under hostile use: links, floods, loops, odd arguments; and texts that are equal in every run."
import json
import os
import re
import shlex
import string
import time
import tracemalloc
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.core.tools import MOST, ToolHolder, bounded, tool
from composer_replication.core.trace import ERROR_KINDS, ToolCall
from composer_replication.envs.deletion.repo_tools import SHELL, RepoTools, command_words
from composer_replication.sandbox.base import Limits, open_sandbox, sandbox_problem
from composer_replication.sandbox.limits import ExecResult

LIMITS = Limits(wall_s=20.0, cpu_s=5, memory_mb=512, processes=32, file_mb=8, disk_mb=16, output_bytes=200_000)


@pytest.fixture
def tools(larder):
    if problem := sandbox_problem("bubblewrap"):
        pytest.skip(problem)
    with open_sandbox(larder.tree, larder.libraries, LIMITS, "bubblewrap") as sandbox:
        yield RepoTools(sandbox, import_roots=larder.import_roots, limits=LIMITS)


def ask(tools, name, **arguments):
    return tools.call(ToolCall(name, arguments))


def python(tools, code):
    "Run code as an agent can."
    return ask(tools, "shell", command=shlex.join(["python", "-c", code]))


# what a call may hold

ODD = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
                   lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
                   max_leaves=5)
KEYS = st.sampled_from(["path", "start", "end", "pattern", "text", "old", "new", "tests", "command", "self", "x", ""])


class Files:
    "Stands for a sandbox: no process; what was not written is the same in every file."
    limits = Limits()

    def __init__(self):
        self.written = {}

    def read(self, path):
        return self.written.get(path, b"a\nb\n")

    def write(self, path, data):
        self.written[path] = data

    def files(self):
        return ["a.py", "src/b.py"]

    def place(self, path):
        return path

    def exec(self, argv, **options):
        assert all(isinstance(word, str) and "\0" not in word for word in argv)
        return ExecResult(0, "", "", 0.0)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([*RepoTools._tools, "frobnicate", ""]), st.one_of(
    st.dictionaries(KEYS, ODD, max_size=4).map(json.dumps), st.text(max_size=30), ODD.map(json.dumps),
    st.dictionaries(KEYS, st.sampled_from(["a.py", "../a", "/etc/passwd", "a\0b", "\ud800", "src", "ls -l", 3, 0, -1, None]),
                    min_size=1, max_size=3).map(json.dumps)))
def test_whatever_is_called_is_answered(name, arguments):
    tools = RepoTools(Files())
    answer = tools.call(ToolCall.parse(name, arguments))
    assert answer.error_kind in (None, *ERROR_KINDS)
    assert "Traceback" not in answer.text
    assert answer.text.encode() and len(answer.text) < MOST + 100 or answer.text == "" and not answer.failed


@pytest.mark.parametrize("arguments, reason, words", [
    ('{"path": "a.py", "start": "1"}', "type_error", "'start' must be an integer, not '1'"),
    ('{"path": "a.py", "start": true}', "type_error", "not True"),
    ('{"path": "a.py", "start": 1.0}', "type_error", "not 1.0"),
    ('{"path": "a.py", "lines": 3}', "type_error", "no argument 'lines'; the arguments are path, start, end"),
    ("{}", "type_error", "the argument 'path' is missing"),
    ('{"path": ["a.py"]}', "type_error", "must be a string"),
    ('{"path": "a.py", "start": 3, "end": 2}', "type_error", "lines 3 to 2 are no range"),
    ('{"path": "a.py", "start": 9}', "runtime_error", "has 2 lines and no line 9"),
    ('{"path": "../b"}', "runtime_error", "outside of the repository"),
    ("[1]", "json_decode", "no JSON object"), ('"x"', "json_decode", "no JSON object"),
    ('{"path": ', "json_decode", "Invalid JSON"),
])
def test_wrong_arguments_say_what_is_wrong(arguments, reason, words):
    answer = RepoTools(Files()).call(ToolCall.parse("read_file", arguments))
    assert answer.error_kind == reason and words in answer.text and answer.text.count("\n") == 0


def test_schemas_are_those_that_transformers_makes():
    from transformers.utils import get_json_schema
    tools = RepoTools(Files())
    assert [t.schema for t in tools._tools.values()] == [get_json_schema(getattr(tools, name)) for name in tools._tools]
    assert ", ".join(SHELL) in RepoTools.shell.schema["function"]["parameters"]["properties"]["command"]["description"]


def test_a_tool_that_breaks_is_not_hidden():
    class Broken(ToolHolder):
        @tool
        def go(self) -> str:
            """
            Go.
            """
            raise KeyError("ours")

    with pytest.raises(KeyError):  # a defect of ours is no answer to an agent
        Broken().call(ToolCall("go", {}))


def test_long_texts_keep_both_ends():
    text = bounded("first" + "x" * 10**6 + "last")
    assert text.startswith("first") and text.endswith("last") and f"[cut: {10**6 + 9 - MOST} characters]" in text


# the shell

@pytest.mark.parametrize("command", [
    "ls; id", "ls | wc", "ls > x", "ls>x", "cat < x", "ls && id", "ls & id", "(ls)", "ls\nid", "ls || id", "bash -c ls", "sh",
    "curl x", "wget x", "git log", "nc x 1", "/bin/ls", "./x", "env ls", "xargs ls", "sudo ls", "'ls' '", "", "   ",
    "$(ls)", "`ls`", "ls 2>&1"])
def test_only_single_allowed_commands_run(command):
    answer = ask(RepoTools(Files()), "shell", command=command)
    assert answer.error_kind == "runtime_error" and answer.text.startswith("Error: ") and answer.text.count("\n") == 0


@given(st.lists(st.text(string.printable, max_size=8), max_size=4))
def test_words_reach_the_command_as_they_were_quoted(words):
    spoken = shlex.join(["echo", *words])
    odd = [w for w in words if w and not w.strip("();<>|&\n")]
    if not odd:
        assert command_words(spoken) == ["echo", *words]


def test_exit_codes(tools):
    assert ask(tools, "shell", command="grep zzz pyproject.toml").text == "[exit code 1]"
    assert ask(tools, "shell", command="grep zzz pyproject.toml").error_kind is None  # "no" is an answer
    assert ask(tools, "shell", command="grep zzz none").error_kind == "runtime_error"
    assert ask(tools, "shell", command="cat none").error_kind == "runtime_error"
    assert python(tools, "1/0").error_kind == "runtime_error"
    assert python(tools, "print(1)").text == "1"
    assert python(tools, "import larder; print(larder.roman(9))").text == "IX"
    assert ask(tools, "shell", command="pytest -q tests/test_plans.py").text.endswith("6 passed")


# the tree

def test_no_path_leads_out(tools, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    os.chmod(tmp_path, 0o777)
    for code in (f"import os; os.symlink({str(secret)!r}, 'leak')", f"import os; os.symlink({str(tmp_path)!r}, 'out')",
                 "import os; os.symlink('/etc', 'etc')", "import os; os.symlink('..', 'up')", "import os; os.mkfifo('pipe')",
                 "import os; os.symlink('src/larder/labels.py', 'inner')"):
        assert not python(tools, code).failed
    for path in ("leak", "out/secret", "etc/passwd", "up/x", "pipe", "inner", "/etc/passwd", "../x", "src/../../x",
                 "/repo/../etc/passwd"):
        for name, more in (("read_file", {}), ("edit_file", {"old": "secret", "new": "x"}), ("search", {"pattern": "."}),
                           ("list_files", {})):
            answer = ask(tools, name, path=path, **more)
            assert answer.failed and "the secret" not in answer.text and "root:" not in answer.text, (path, answer)
    for path in ("out/new", "etc/new", "up/new", "../new"):
        assert ask(tools, "write_file", path=path, text="x").failed
    for path in ("leak", "pipe"):  # what bore the name is replaced, and what it pointed to stays
        assert not ask(tools, "write_file", path=path, text="x").failed
    assert secret.read_text() == "the secret" and os.listdir(tmp_path) == ["secret"]
    assert not any(n in ask(tools, "list_files").text.split() for n in ("out", "etc", "up", "inner", "out/secret", "etc/passwd"))


def test_files_keep_their_bytes(tools):
    tools._tree.sandbox.write("crlf.py", b"a = 1\r\nb = 2\r\n")
    assert not ask(tools, "edit_file", path="crlf.py", old="a = 1", new="a = 3").failed
    assert tools._tree.sandbox.read("crlf.py") == b"a = 3\r\nb = 2\r\n"
    tools._tree.sandbox.write("latin.py", "é".encode("latin-1"))
    assert ask(tools, "read_file", path="latin.py").text == "Error: 'latin.py' is no UTF-8 text."
    assert ask(tools, "edit_file", path="latin.py", old="a", new="b").failed
    text = tools._tree.sandbox.read("src/larder/labels.py").decode()
    assert ask(tools, "read_file", path="src/larder/labels.py").text == text
    lines = text.split("\n")
    assert ask(tools, "read_file", path="src/larder/labels.py", start=3, end=5).text == "\n".join(lines[2:5])
    assert ask(tools, "edit_file", path="src/larder/labels.py", old="", new="x").failed
    ask(tools, "write_file", path="x.txt", text="aXaXa")
    assert ask(tools, "edit_file", path="x.txt", old="aXa", new="").text.startswith("Error: the text to replace occurs more")


ODD = "one\x0cstill one\ntwo\u2028still two\r\nthree\x85\x1c\x0b\rstill three\n\nfive\r\n"  # grep counts five lines


def test_search_read_file_and_sed_number_lines_alike(tools):
    "Against sed, whose line is what ends with a newline."
    for text in (ODD, ODD[:-2], "\r\n", "a\r", "a\n\n", "\n"):
        tools._tree.sandbox.write("odd.txt", text.encode())
        many = text.count("\n") + (not text.endswith("\n"))
        found = ask(tools, "search", pattern="^", path="odd.txt").text.rstrip("\n").split("\n")
        assert [line.split(":")[:2] for line in found] == [["odd.txt", str(n)] for n in range(1, many + 1)], text
        for n in range(1, many + 1):
            line = ask(tools, "read_file", path="odd.txt", start=n, end=n).text
            assert found[n - 1] == f"odd.txt:{n}: {line}" and line == text.replace("\r\n", "\n").split("\n")[n - 1]
            assert ask(tools, "search", pattern=f"^{re.escape(line)}$", path="odd.txt").text.startswith("odd.txt:")
            assert line in ask(tools, "shell", command=f"sed -n {n}p odd.txt").text.split("\r\n")[0] or not line
        assert ask(tools, "shell", command="sed -n $= odd.txt").text.strip() == str(many)
        answer = ask(tools, "read_file", path="odd.txt", start=many + 1)
        assert answer.text == f"Error: 'odd.txt' has {many} lines and no line {many + 1}."
    tools._tree.sandbox.write("none.txt", b"")
    assert ask(tools, "read_file", path="none.txt").text == "" and ask(tools, "read_file", path="none.txt", start=2).failed


@pytest.mark.parametrize("held, old, new, left", [
    ("a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\nz\n", "x\r\ny\r\nz\r\nc\r\n"),
    ("a\r\nb\r\nc\r\n", "b", "x\ny", "a\r\nx\r\ny\r\nc\r\n"),
    ("a\r\nb\r\nc\r\n", "\nb\n", "\n", "a\r\nc\r\n"),
    ("a\r\nb\r\nc\r\n", "a\r\nb", "x\ny", "x\r\ny\r\nc\r\n"),
    ("a\r\nb\r\nc\r\n", "a\r\nb", "x\r\ny", "x\r\ny\r\nc\r\n"),
    ("a\r\nb\r\nc", "b\nc", "", "a\r\n"),
    ("a\nb\nc\n", "a\r\nb", "x\r\ny", "x\ny\nc\n"),
    ("a\nb\n", "a\nb\n", "x\ny\n", "x\ny\n"),
    ("a\nb\r\nc\n", "b\nc", "x\ny", "a\nx\r\ny\n"),  # an end of the replaced text itself
    ("a\nb\r\nc\n", "a\nb", "x\ny", "x\ny\r\nc\n"),
    ("a\nb\n", "b", "b\r", "a\nb\r\n"),
    ("a", "a", "x\r\ny\n", "x\r\ny\n"),
    ("a.*b\r\n(c\r\n", ".*b\n(c", "\\1\\g<0>", "a\\1\\g<0>\r\n"),
    ("a\u2028b\r\nc", "a\u2028b\nc", "d", "d"),
    ("\r\n\r\na", "\n\na", "\nb", "\r\nb"),
    ("a\r\na\nb", "a\nb", "c", "a\r\nc"),
    ("a\r\nb\r\na\nb\n", "a\nb", "c", None),  # twice
    ("\r\n\r\n", "\n", "x", None),
    ("a\rb", "a\nb", "c", None)])
def test_an_edit_matches_either_line_end_and_keeps_the_file_s(held, old, new, left):
    tools = RepoTools(Files())
    tools._tree.sandbox.write("edit.txt", held.encode())
    assert ask(tools, "edit_file", path="edit.txt", old=old, new=new).failed is (left is None)
    assert tools._tree.sandbox.read("edit.txt") == (held if left is None else left).encode()


def test_ten_thousand_files_are_listed_in_bounds(tools):
    python(tools, "import os; os.mkdir('many')\nfor i in range(500): open(f'many/{i:0100}', 'w').close()")
    answer = ask(tools, "list_files")
    assert not answer.failed and len(answer.text) < MOST + 60 and "[cut:" in answer.text
    assert ask(tools, "search", pattern="def roman").text.startswith("src/larder/labels.py:")
    assert ask(tools, "search", pattern="x", path="many").text == "no line matches"


# what a command may do

def test_floods_loops_and_bombs_are_cut(tools):
    endless = RepoTools(tools._tree.sandbox, limits=Limits(wall_s=1.5))
    assert "Stopped: it ran for more than 1.5 seconds." in python(endless, "while True: pass").text
    for code, why in (("print('x' * 10**6)", "printed more than 200000 bytes"), ("open('big', 'w').write('x' * 10**8)", None),
                      ("x = bytearray(2 * 10**9)", None)):
        answer = python(tools, code)
        assert answer.failed and len(answer.text) < MOST + 100 and (why is None or why in answer.text), answer
    assert python(tools, "import os\nwhile True: os.fork()").failed
    assert ask(tools, "shell", command="ls src").text == "larder"  # and it still works


def test_a_pattern_that_blows_up_is_stopped(larder, tools):
    quick = RepoTools(tools._tree.sandbox, limits=Limits(wall_s=1.0))
    ask(quick, "write_file", path="a.txt", text="a" * 60)
    answer = ask(quick, "search", pattern="(a|a)*b", path="a.txt")
    assert answer.failed and "Stopped: it ran for more than 1 seconds" in answer.text
    assert ask(quick, "search", pattern="(" * 300).failed and ask(quick, "search", pattern="x" * 1001).failed
    assert ask(quick, "search", pattern="a{99999999999}").failed


def test_tests_that_hang_or_print(tools):
    quick = RepoTools(tools._tree.sandbox, limits=Limits(wall_s=2.0))
    ask(tools, "write_file", path="tests/test_odd.py", text="def test_a():\n    print('x' * 10**5)\n    assert not object()\n"
                                                         "def test_b():\n    while True: pass\n")
    answer = ask(tools, "run_tests", tests=["tests/test_odd.py::test_a"])
    assert not answer.failed and len(answer.text) < MOST + 60 and answer.text.endswith("1 failed")
    answer = ask(quick, "run_tests", tests=["tests/test_odd.py::test_b"])
    assert answer.failed and "Stopped: " in answer.text
    assert "no tests ran" in ask(tools, "run_tests", tests=["tests/none.py"]).text
    assert ask(tools, "run_tests", tests=["-p", "x"]).failed and ask(tools, "run_tests", tests=["../x"]).failed


def test_texts_are_the_same_in_every_run(larder):
    failing = ("import larder\nclass Odd: pass\ndef test_a(tmp_path):\n    print({'c', 'b', 'a'}, tmp_path)\n"
               "    assert Odd() == larder.roman\n")

    def play(kind):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sandbox = open_sandbox(larder.tree, larder.libraries, LIMITS, kind)
        with sandbox:
            tools = RepoTools(sandbox, import_roots=larder.import_roots, limits=LIMITS)
            ask(tools, "write_file", path="tests/test_x.py", text=failing)
            return [ask(tools, *call[:1], **call[1]).text for call in (
                ("run_tests", {}), ("run_tests", {"tests": ["tests/test_x.py"]}), ("search", {"pattern": "def test"}),
                ("list_files", {}), ("shell", {"command": "python -c 'import larder; print(larder.__file__, object())'"}))]

    boxed = not sandbox_problem("bubblewrap")
    first, again, *others = [play(kind) for kind in (["bubblewrap"] * 2 * boxed + ["local-unsafe"] * (2 - boxed))]
    assert "assert <test_x.Odd" in first[1] and "1 failed" in first[1]
    assert "/repo/src/larder/__init__.py <object object at 0x...>" in first[4]
    assert first == again and "boxes" not in "".join(first)
    assert all(first[2:] == other[2:] for other in others)  # the folder for tests' own files differs between the kinds


@pytest.mark.parametrize("name, held, arguments", [
    ("edit_file", "a" * 1_000_000, {"old": "a" * 400_000 + "b", "new": "c"}),
    ("edit_file", "a" * 1_000_000, {"old": "a" * 400_000, "new": "c"}),  # 600,001 overlapping matches
    ("edit_file", "\r\n" * 500_000, {"old": "\n" * 200_000 + "b", "new": "c"}),
    ("read_file", "a\n" * 5_000_000, {}),
    ("shell", "", {"command": "echo " + "a" * 1_000_000})])
def test_a_call_costs_the_host_bounded_time_and_memory(name, held, arguments):
    tools = RepoTools(Files())
    tools._tree.sandbox.write("big.txt", held.encode())
    path = {} if name == "shell" else {"path": "big.txt"}
    begin = time.process_time()
    tracemalloc.start()
    answer = ask(tools, name, **path, **arguments)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.failed and time.process_time() - begin < 5 and most < 60 << 20, (answer.text[:200], most)
