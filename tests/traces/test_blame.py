# ruff: noqa: E501
"""Whose fault: the earlier turn that wrote the failing lines, where file and line prove it, and nobody else where they do not."""

from dataclasses import replace

import pytest

from composer_replication.core.trace import Segment, ToolCall, Trace, Turn
from composer_replication.hints.layers import default_composite
from composer_replication.traces.blame import written
from composer_replication.traces.error_sites import SiteFinder, find_error_sites


def trace(*steps):
    "Steps are (tool, arguments, answer)."
    turns = [Turn("user", "Build the shop.")]
    for n, (tool, arguments, answer) in enumerate(steps):
        turns += [
            Turn("assistant", tool_calls=(ToolCall(tool, arguments, f"c{n}"),), source_index=len(turns)),
            Turn("tool", answer, tool_call_id=f"c{n}", observation=True, failed=answer.startswith(("Traceback", "error", "E ", "x.c", "src/"))),
        ]
    return Trace("t", tuple(turns), format="openai")


def python(path, line, code, error="TypeError: unsupported operand type(s) for +: 'int' and 'str'"):
    return f'Traceback (most recent call last):\n  File "/w/run.py", line 1, in <module>\n    main()\n  File "{path}", line {line}, in total\n    {code}\n{error}'


SHOP = "def total(items):\n    return sum(items) + 'x'\n"
RUN = ("bash", {"command": "python run.py"})
WRITES = {
    "Write": ("Write", {"file_path": "/w/shop.py", "content": SHOP}),
    "create": ("str_replace_editor", {"command": "create", "path": "/w/shop.py", "file_text": SHOP}),
    "here-document": ("bash", {"command": f"cd /w && cat > shop.py <<'EOF'\n{SHOP}EOF"}),
    "here-document, marked first": ("bash", {"command": f"cat <<EOF > shop.py\n{SHOP}EOF\nls"}),
    "tee": ("bash", {"command": f"tee shop.py <<'END'\n{SHOP}END"}),
    "Edit": ("Edit", {"file_path": "/w/shop.py", "old_string": "    pass", "new_string": "    return sum(items) + 'x'"}),
    "MultiEdit": ("MultiEdit", {"file_path": "/w/shop.py", "edits": [{"old_string": "a", "new_string": "    return sum(items) + 'x'"}]}),
    "str_replace": ("edit", {"command": "str_replace", "path": "shop.py", "old_str": "pass", "new_str": "return sum(items) + 'x'"}),
    "apply_patch": ("apply_patch", {"input": "*** Begin Patch\n*** Update File: shop.py\n@@\n-    pass\n+    return sum(items) + 'x'\n*** End Patch"}),
    "diff": ("bash", {"command": "patch -p1 <<'EOF'\n--- a/shop.py\n+++ b/shop.py\n@@ -2 +2 @@\n-    pass\n+    return sum(items) + 'x'\nEOF"}),
    "sed": ("bash", {"command": "sed -i 's/    pass/    return sum(items) + 'x'/' shop.py"}),
}  # fmt: skip


@pytest.mark.parametrize("how", WRITES)
def test_the_turn_that_wrote_the_failing_line_is_to_blame(how):
    told = trace((*WRITES[how], "done"), ("bash", {"command": "ls"}, "shop.py"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'")))
    [shown], [caused] = find_error_sites(told), find_error_sites(told, blame="cause")
    assert (shown.turn, shown.blame, caused.turn, caused.message_index, caused.evidence_turn) == (5, None, 1, 1, 6)
    assert "shop.py, line 2 (`return sum(items) + 'x'`) was written in message 1" in caused.blame
    assert caused.context.tool_name == WRITES[how][0]
    assert default_composite().hint(told, caused)


LATER = [
    # a later turn wrote the file without the line, or the line stood there before, or the write failed: no proof
    [(*WRITES["Write"], "ok"), ("Write", {"file_path": "/w/shop.py", "content": "x = 1\n"}, "ok"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'"))],
    [("Edit", {"file_path": "/w/shop.py", "old_string": "return sum(items) + 'x'", "new_string": "return sum(items) + 'x'\nz = 1"}, "ok"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'"))],
    [(*WRITES["Write"], "error: read-only file system"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'"))],
    [(*WRITES["Write"], "ok"), (*RUN, python("/w/other.py", 2, "return sum(items) + 'x'"))],
    [(*WRITES["Write"], "ok"), (*RUN, python("/w/shop.py", 2, "return max(items)"))],
    [(*WRITES["Write"], "ok"), (*RUN, python("/usr/lib/python3.11/shop.py", 2, "return sum(items) + 'x'").replace('File "/w/run.py"', 'File "/usr/lib/python3.11/run.py"'))],
    [(*WRITES["Write"], "ok"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'", "AssertionError"))],
    [("bash", {"command": f"cat > shop.py <<'EOF'\n{SHOP}EOF\npython run.py"}, python("/w/shop.py", 2, "return sum(items) + 'x'"))],
    [(*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'"))],
]  # fmt: skip


@pytest.mark.parametrize("steps", LATER)
def test_without_a_proof_nobody_else_is_blamed(steps):
    told = trace(*steps)
    assert [s.turn for s in find_error_sites(told, blame="cause")] == [s.turn for s in find_error_sites(told)]
    assert all(s.blame is None for s in find_error_sites(told, blame="cause"))


def test_the_last_writer_of_the_line_is_to_blame():
    again = ("Edit", {"file_path": "/w/shop.py", "old_string": "pass", "new_string": "return sum(items) + 'x'"})
    told = trace((*WRITES["Write"], "ok"), (*again, "ok"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'")))
    assert [s.turn for s in find_error_sites(told, blame="cause")] == [3]


@pytest.mark.parametrize(
    "path, text, answer",
    [
        ("/w/shop.py", "x = (1\n", 'Traceback (most recent call last):\n  File "/w/run.py", line 1, in <module>\n    import shop\n  File "/w/shop.py", line 1\n    x = (1\n        ^\nSyntaxError: \'(\' was never closed'),
        ("/w/shop.py", "import sho\n", 'Traceback (most recent call last):\n  File "/w/shop.py", line 1, in <module>\n    import sho\nModuleNotFoundError: No module named \'sho\''),
        ("/w/shop.py", "def price():\n    pass\n", "Traceback (most recent call last):\n  File \"/w/test_shop.py\", line 1, in <module>\n    from shop import total\nImportError: cannot import name 'total' from 'shop' (/w/shop.py)"),
        ("/w/x.c", "int f() {\n    return sum;\n}\n", "x.c:2:12: error: 'sum' undeclared\n    2 |     return sum;\n      |            ^~~"),
        ("/w/src/a.ts", "let n: number\nn = 'a'\n", "src/a.ts(2,1): error TS2322: Type 'string' is not assignable to type 'number'."),
        ("/w/src/main.rs", "fn main() {\n    show(x);\n}\n", "error[E0425]: cannot find value `x` in this scope\n --> src/main.rs:2:10\n  |\n2 |     show(x);\n  |          ^"),
        ("/w/a_test.go", "package a\nfunc T() {\n    undefined()\n}\n", "error: build\n./a_test.go:3:5: undefined: undefined"),
        ("/w/app.js", "const b = {};\nb.start();\n", "error\nTypeError: b.start is not a function\n    at Object.<anonymous> (/w/app.js:2:3)\n    at node:internal/modules/cjs/loader:1105:14"),
        ("/w/shop.py", "def total():\n    return None + 1\n", "E       TypeError: unsupported\n    def total():\n>       return None + 1\nE       TypeError: unsupported operand\n\nshop.py:2: TypeError\n1 failed in 0.1s"),
    ],
)  # fmt: skip
def test_file_and_line_in_every_notation(path, text, answer):
    told = trace(("Write", {"file_path": path, "content": text}, "ok"), ("bash", {"command": "make"}, answer))
    assert [(s.turn, bool(s.blame)) for s in find_error_sites(told, blame="cause")] == [(1, True)]


def test_the_shown_turn_is_blamed_unless_a_finder_asks_for_the_cause():
    told = trace((*WRITES["Write"], "ok"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'")))
    assert [s.turn for s in SiteFinder(blame="cause")(told)] == [1] and [s.turn for s in find_error_sites(told)] == [3]


def test_line_0_proves_nothing_and_a_turn_of_another_context_is_not_blamed():
    answer = "src/a.ts(0,1): error TS2322: Type 'string' is not assignable to type 'number'."
    told = trace(("Write", {"file_path": "/w/src/a.ts", "content": "let n = 1\nn = 'a'"}, "ok"), ("bash", {"command": "make"}, answer))
    assert [(s.turn, s.blame) for s in find_error_sites(told, blame="cause")] == [(3, None)]
    told = trace((*WRITES["Write"], "ok"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'")))
    split = replace(told, segments=(Segment((0, 1, 2), (1,)), Segment((0, 1, 2, 3, 4), (3,))))
    assert [(s.turn, s.blame) for s in find_error_sites(split, blame="cause")] == [(3, None)]


def test_many_redirections_do_not_take_long():
    assert [*written(ToolCall("bash", {"command": "cat <<EOF " + ">" * 50_000 + "\nx"}))] == []


OUTSIDE = [
    "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "psycopg2.OperationalError: could not connect to server: Is the server running on port 5432?",
    "openai.AuthenticationError: Error code: 401 - Incorrect API key provided",
    "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "PermissionError: [Errno 13] Permission denied: '/etc/hosts'",
    "OSError: [Errno 28] No space left on device",
    "openai.RateLimitError: Error code: 429",
    "KeyError: 'OPENAI_API_KEY'",
]  # fmt: skip


@pytest.mark.parametrize("error", OUTSIDE)
def test_a_cause_outside_of_the_repository_is_not_the_line_that_met_it(error):
    told = trace((*WRITES["Write"], "done"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'", error)))
    [site] = find_error_sites(told, blame="cause")
    assert site.turn == 3 and site.blame is None


def test_a_cause_outside_is_none_for_other_languages_either():
    code = "await client.connect('127.0.0.1', 5432);"
    answer = f"error: connect ECONNREFUSED 127.0.0.1:5432\n    at main (/w/db.js:1:7)\n\n> 1 | {code}\nNode.js v20.1.0"
    told = trace(("Write", {"file_path": "/w/db.js", "content": code + "\n"}, "done"), ("bash", {"command": "node db.js"}, answer))
    assert [s.blame for s in find_error_sites(told, blame="cause")] == [None]


@pytest.mark.parametrize("error", ["ValueError: the port 404 is none", "TypeError: connect() takes 1 argument", "KeyError: 'name'"])
def test_a_cause_inside_is_still_blamed(error):
    told = trace((*WRITES["Write"], "done"), (*RUN, python("/w/shop.py", 2, "return sum(items) + 'x'", error)))
    assert [s.turn for s in find_error_sites(told, blame="cause")] == [1]
