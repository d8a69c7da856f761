# ruff: noqa: E501
"""What is shown of a long result: the lines with the failure, tool by tool, each in the form that the tool prints."""

import re

import pytest

from composer_replication.traces.failure import GAP, failure_gist, failure_part, plain

FILL = "\n".join(f"compiling unit {n} of the project with its usual options and paths" for n in range(30))

# name: (what the tool printed, with FILL where it says much that is no failure; what must be shown; what must not)
SAMPLES = {
    "pytest": (
        f"""============================= test session starts ==============================
platform linux -- Python 3.12.1, pytest-8.1.0, pluggy-1.5.0
plugins: {", ".join(f"plug{n}-1.{n}" for n in range(40))}
collected 3 items

test_a.py ..F    [100%]

=================================== FAILURES ===================================
__________________________________ test_total __________________________________

    def test_total():
>       assert total([1, 2]) == 4
E       assert 3 == 4
E        +  where 3 = total([1, 2])

test_a.py:9: AssertionError
=========================== short test summary info ============================
FAILED test_a.py::test_total - assert 3 == 4
========================= 1 failed, 2 passed in 0.05s ==========================""",
        ["assert 3 == 4", "test_a.py:9: AssertionError", "1 failed, 2 passed", "total([1, 2]) == 4"],
        ["plug3", "platform"],
    ),
    "pytest, short traces": (
        f"{FILL}\ntests/test_b.py:31: in test_name\n    assert name() == 'b'\nE   AssertionError: assert 'a' == 'b'\nE     - b\nE     + a\n1 failed in 2.1s",
        ["AssertionError: assert 'a' == 'b'", "tests/test_b.py:31: in test_name", "1 failed in 2.1s"],
        ["unit 3"],
    ),
    "pytest, collection": (
        f"{FILL}\n_________ ERROR collecting tests/test_c.py _________\nImportError while importing test module '/w/tests/test_c.py'.\n"
        "tests/test_c.py:1: in <module>\n    from shop import total\nE   ImportError: cannot import name 'total' from 'shop' (/w/shop.py)\n"
        "=========================== short test summary info ============================\nERROR tests/test_c.py\n1 error in 0.11s",
        ["cannot import name 'total' from 'shop'", "ERROR tests/test_c.py", "1 error in 0.11s"],
        ["unit 3"],
    ),
    "unittest": (
        f"""{FILL}
.F.
======================================================================
FAIL: test_total (test_shop.Shop.test_total)
----------------------------------------------------------------------
Traceback (most recent call last):
  File "/w/test_shop.py", line 9, in test_total
    self.assertEqual(total([1, 2]), 4)
  File "/usr/lib/python3.11/unittest/case.py", line 873, in assertEqual
    assertion_func(first, second, msg=msg)
AssertionError: 3 != 4

----------------------------------------------------------------------
Ran 3 tests in 0.001s

FAILED (failures=1)""",
        ["AssertionError: 3 != 4", 'File "/w/test_shop.py", line 9', "FAIL: test_total", "FAILED (failures=1)"],
        ["unit 3", "case.py"],
    ),
    "chained traceback": (
        f'{FILL}\nTraceback (most recent call last):\n  File "/w/a.py", line 2, in load\n    return store[name]\nKeyError: \'b\'\n\n'
        "During handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "/w/a.py", line 9, in <module>\n    load("b")\n  File "/w/a.py", line 4, in load\n    raise NoStore(name)\n'
        f"store.NoStore: there is no store b\n{FILL}",
        ["store.NoStore: there is no store b", "raise NoStore(name)", "line 4"],
        ["KeyError", "unit 3"],
    ),
    "exception group": (
        f"{FILL}\n  + Exception Group Traceback (most recent call last):\n  |   File \"/w/a.py\", line 3, in <module>\n  |     raise ExceptionGroup('two', [OSError('x')])\n"
        "  | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n    | OSError: x\n    +------------------------------------",
        ["ExceptionGroup: two"],
        ["unit 3"],
    ),
    "syntax error": (
        f'{FILL}\n  File "/w/shop.py", line 12\n    def total(items:\n             ^\nSyntaxError: \'(\' was never closed\n{FILL}',
        ["SyntaxError: '(' was never closed", 'File "/w/shop.py", line 12'],
        ["unit 3"],
    ),
    "jest": (
        f"""{FILL}
FAIL src/total.test.js
  ✓ adds one (2 ms)
  ✕ adds two (5 ms)

  ● totals › adds two

    expect(received).toBe(expected) // Object.is equality

    Expected: 4
    Received: 3

      3 | test('adds two', () => {{
    > 4 |   expect(total([1, 2])).toBe(4);
        |                         ^

      at Object.toBe (src/total.test.js:4:25)
      at node_modules/jest-circus/build/run.js:12:3

Test Suites: 1 failed, 1 total
Tests:       1 failed, 1 passed, 2 total
Ran all test suites.""",
        ["Expected: 4", "Received: 3", "● totals › adds two", "src/total.test.js:4:25", "Tests:       1 failed"],
        ["unit 3", "jest-circus"],
    ),
    "vitest": (
        f"""{FILL}
 ❯ src/total.test.ts (2 tests | 1 failed) 9ms
   × adds two 7ms
     → expected 3 to be 4 // Object.is equality

 FAIL  src/total.test.ts > adds two
AssertionError: expected 3 to be 4 // Object.is equality

- Expected
+ Received

- 4
+ 3

 ❯ src/total.test.ts:6:23

 Test Files  1 failed (1)
      Tests  1 failed | 1 passed (2)""",
        ["AssertionError: expected 3 to be 4", "src/total.test.ts:6:23", "Tests  1 failed"],
        ["unit 3"],
    ),
    "mocha": (
        f"{FILL}\n  1 passing (4ms)\n  1 failing\n\n  1) totals\n       adds two:\n\n      AssertionError [ERR_ASSERTION]: 3 == 4\n      + expected - actual\n\n      -3\n      +4\n\n"
        "      at Context.<anonymous> (test/total.js:5:12)\n      at process.processImmediate (node:internal/timers:476:21)",
        ["AssertionError [ERR_ASSERTION]: 3 == 4", "1 failing", "test/total.js:5:12"],
        ["unit 3", "node:internal"],
    ),
    "node": (
        f"{FILL}\n/w/app.js:7\n  boot.start();\n       ^\n\nTypeError: boot.start is not a function\n    at Object.<anonymous> (/w/app.js:7:8)\n    at Module._compile (node:internal/modules/cjs/loader:1105:14)\n\nNode.js v20.1.0",
        ["TypeError: boot.start is not a function", "/w/app.js:7:8"],
        ["unit 3", "node:internal"],
    ),
    "go test": (
        f"{FILL}\n--- FAIL: TestTotal (0.00s)\n    total_test.go:12: total = 3, want 4\nFAIL\nFAIL\texample.com/shop\t0.003s\nok  \texample.com/other\t0.1s",
        ["total_test.go:12: total = 3, want 4", "--- FAIL: TestTotal", "FAIL\texample.com/shop"],
        ["unit 3"],
    ),
    "go build": (f"# example.com/shop\n./main.go:5:2: undefined: total\n{FILL}", ["./main.go:5:2: undefined: total"], ["unit 3"]),
    "go panic": (
        f"{FILL}\npanic: runtime error: index out of range [5] with length 3\n\ngoroutine 1 [running]:\nmain.main()\n\t/w/main.go:9 +0x1d\nexit status 2",
        ["panic: runtime error: index out of range [5] with length 3"],
        ["unit 3"],
    ),
    "cargo build": (
        f"   Compiling shop v0.1.0\nwarning: unused variable: `y`\n{FILL}\nerror[E0425]: cannot find value `x` in this scope\n --> src/main.rs:4:20\n  |\n4 |     println!(\"{{}}\", x);\n"
        "  |                    ^ not found in this scope\n\nerror: could not compile `shop` (bin \"shop\") due to 1 previous error",
        ["error[E0425]: cannot find value `x` in this scope", "src/main.rs:4:20", "could not compile"],
        ["unit 3", "unused"],
    ),
    "cargo test": (
        f"{FILL}\ntest tests::adds ... FAILED\n\nfailures:\n\n---- tests::adds stdout ----\nthread 'tests::adds' panicked at src/lib.rs:12:9:\nassertion `left == right` failed\n  left: 3\n right: 4\n"
        "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n\ntest result: FAILED. 2 passed; 1 failed; 0 ignored",
        ["panicked at src/lib.rs:12:9", "left: 3", "right: 4", "test result: FAILED"],
        ["unit 3"],
    ),
    "tsc": (f"{FILL}\nsrc/a.ts(3,5): error TS2322: Type 'string' is not assignable to type 'number'.\nFound 1 error.", ["src/a.ts(3,5): error TS2322"], ["unit 3"]),
    "tsc, pretty": (
        f"{FILL}\nsrc/a.ts:3:5 - error TS2322: Type 'string' is not assignable to type 'number'.\n\n3     n = 'a'\n      ~\n\nFound 1 error in src/a.ts:3",
        ["src/a.ts:3:5 - error TS2322", "Found 1 error"],
        ["unit 3"],
    ),
    "gcc": (
        f"cc -c shop.c\nshop.c: In function 'total':\nshop.c:7:12: error: 'sum' undeclared (first use in this function)\n    7 |     return sum;\n{FILL}\nmake: *** [Makefile:4: shop.o] Error 1",
        ["shop.c:7:12: error: 'sum' undeclared", "make: *** [Makefile:4: shop.o] Error 1"],
        ["unit 3"],
    ),
    "ld": (f"{FILL}\n/usr/bin/ld: main.o: in function `main':\nmain.c:(.text+0xa): undefined reference to `total'\ncollect2: error: ld returned 1 exit status", ["undefined reference to `total'", "collect2"], ["unit 3"]),
    "npm": (
        f"{FILL}\nnpm error code ERESOLVE\nnpm error ERESOLVE unable to resolve dependency tree\nnpm error Found: react@18.2.0\nnpm error A complete log of this run can be found in: /root/.npm/_logs/a.log",
        ["ERESOLVE unable to resolve dependency tree"],
        ["unit 3", "complete log"],
    ),
    "eslint": (
        f"{FILL}\n/w/src/a.js\n  3:5   warning  Unexpected console statement  no-console\n  7:10  error    'total' is defined but never used  no-unused-vars\n\n✖ 2 problems (1 error, 1 warning)",
        ["7:10  error    'total' is defined but never used", "2 problems"],
        ["unit 3", "no-console"],
    ),
    "ruff": (f"{FILL}\nF401 [*] `os` imported but unused\n --> shop.py:1:8\n  |\n1 | import os\n  |        ^^\n\nFound 1 error.", ["F401 [*] `os` imported but unused", "shop.py:1:8", "Found 1 error"], ["unit 3"]),
    "ruff, concise": (f"{FILL}\nshop.py:1:8: F401 [*] `os` imported but unused\nFound 1 error.", ["shop.py:1:8: F401", "Found 1 error"], ["unit 3"]),
    "mypy": (f"{FILL}\nshop.py:3: error: Incompatible return value type (got \"str\", expected \"int\")  [return-value]\nFound 1 error in 1 file (checked 9 source files)", ["shop.py:3: error: Incompatible", "Found 1 error in 1 file"], ["unit 3"]),
    "javac": (f"{FILL}\nShop.java:5: error: cannot find symbol\n    return sum;\n           ^\n  symbol:   variable sum\n1 error", ["Shop.java:5: error: cannot find symbol"], ["unit 3"]),
    "java": (
        f"{FILL}\nException in thread \"main\" java.lang.IllegalStateException: boot\n\tat shop.Main.main(Main.java:9)\nCaused by: java.io.IOException: the store is locked\n\tat shop.Store.open(Store.java:14)\n\t... 1 more",
        ["Caused by: java.io.IOException: the store is locked", "Store.java:14"],
        ["unit 3"],
    ),
    "maven": (
        f"{FILL}\n[ERROR] /w/src/Shop.java:[5,12] cannot find symbol\n[INFO] BUILD FAILURE\n[ERROR] Failed to execute goal org.apache.maven.plugins:maven-compiler-plugin:3.8:compile",
        ["Shop.java:[5,12] cannot find symbol"],
        ["unit 3"],
    ),
    "gradle": (
        f"> Task :compileJava FAILED\n{FILL}\nFAILURE: Build failed with an exception.\n\n* What went wrong:\nExecution failed for task ':compileJava'.\n> Compilation failed; see the compiler output.\n\nBUILD FAILED in 2s",
        ["Execution failed for task ':compileJava'", "BUILD FAILED"],
        ["unit 3"],
    ),
    "shell": (f"{FILL}\nbash: line 3: shopctl: command not found\n{FILL}", ["shopctl: command not found"], ["unit 3"]),
    "shell, a file": (f"{FILL}\ncat: notes/today.md: No such file or directory", ["cat: notes/today.md: No such file or directory"], ["unit 3"]),
    "git": (f"{FILL}\nCONFLICT (content): Merge conflict in a.py\nerror: could not apply 1a2b3c4... total\nhint: after resolving the conflicts", ["error: could not apply 1a2b3c4... total"], ["unit 3"]),
    "make alone": (f"{FILL}\nthe generator met a cycle in shop.dot\nmake: *** [Makefile:9: graph] Error 3", ["make: *** [Makefile:9: graph] Error 3", "a cycle in shop.dot"], ["unit 3 "]),
    "docker": (f"{FILL}\nERROR: failed to solve: process \"/bin/sh -c npm ci\" did not complete successfully: exit code: 1", ["failed to solve"], ["unit 3"]),
    "rspec": (f"{FILL}\n  1) Shop totals\n     Failure/Error: expect(total).to eq(4)\n\n       expected: 4\n            got: 3\n     # ./spec/shop_spec.rb:5\n\n2 examples, 1 failure", ["Failure/Error: expect(total).to eq(4)", "expected: 4", "got: 3", "2 examples, 1 failure"], ["unit 3"]),
    "terraform": (f"{FILL}\n╷\n│ Error: Reference to undeclared resource\n│ \n│   on main.tf line 7\n╵", ["Error: Reference to undeclared resource"], ["unit 3"]),
    "psql": (f"{FILL}\nERROR:  relation \"shops\" does not exist\nLINE 1: select * from shops\n{FILL}", ['relation "shops" does not exist', "LINE 1"], ["unit 3"]),
}  # fmt: skip


@pytest.mark.parametrize("tool", SAMPLES)
def test_the_failure_is_shown_of_a_long_result(tool):
    text, shown, hidden = SAMPLES[tool]
    part = failure_part(text, 457)
    assert len(part) <= 457 < len(text)
    assert [s for s in shown if s not in part] == [] and [s for s in hidden if s in part] == [], part
    for line in part.split("\n"):  # nothing is made up: every line stands in the text, in its order
        assert line == GAP or line.removesuffix(GAP) in text


@pytest.mark.parametrize("tool", SAMPLES)
def test_a_small_room_is_kept_to(tool):
    text = SAMPLES[tool][0]
    assert all(len(failure_part(text, room)) <= room for room in (0, 1, 5, 40, 120))
    first = failure_part(text, 120)
    assert any(line.removesuffix(GAP).strip() in " ".join(SAMPLES[tool][1]) or any(s in line or line.removesuffix(GAP).strip() in s for s in SAMPLES[tool][1])
               for line in first.split("\n") if line != GAP), first  # fmt: skip


def test_head_and_tail_where_nothing_is_recognised():
    text = "begin " + "la li lu " * 300 + "end"
    part = failure_part(text, 100)
    assert part.startswith("begin la") and part.endswith("lu end") and part.count(GAP) == 1 and len(part) <= 100
    assert failure_part("all of it", 100) == "all of it"


def test_what_a_terminal_overwrote_and_coloured_is_left_out():
    assert plain("\x1b[31mred\x1b[0m\n10%\r50%\r100% done\r\nend") == "red\n100% done\nend"
    noisy = "".join(f"\rloading {n}%" for n in range(400)) + "\n\x1b[1m\x1b[91merror\x1b[0m: no such crate"
    assert "error: no such crate" in failure_part(noisy, 60)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("Error: user a_1 not found", "Error: user b_2 not found", True),
        ("KeyError: 'k1'", "KeyError: 'other'", True),
        ("open /tmp/a/b.txt: No such file or directory", "open /srv/c.txt: No such file or directory", True),
        ("x.c:3:5: error: 'sum' undeclared\n" + FILL, FILL + "\ny.c:70:1: error: 'all' undeclared", True),
        ("E       assert 3 == 4", "E       assert 30 == 41", True),
        ("at 0x7fabc: bad magic", "at 0x10: bad magic", True),
        ("Error: certificate expired", "Error: seat is taken", False),
        ("Error: seat is taken", "Error: seat is free", False),
        ("Table 'a' doesn't exist", "Unknown column 'a' in 'field list'", False),
        ("ValueError: bad month", "ValueError: bad day", False),
        (FILL + "\nTraceback (most recent call last):\n  File \"a.py\", line 1, in f\n    x\nKeyError: 1", FILL + "\nTypeError: no", False),
    ],
)  # fmt: skip
def test_errors_are_alike_where_only_what_varies_differs(one, other, same):
    assert (failure_gist(one) == failure_gist(other)) is same
    assert failure_gist(one) and not re.search(r"\d", failure_gist(one))


@pytest.mark.parametrize("line", ["a" * 200_000, "( " * 100_000, "a:" * 100_000, "E   " + " ." * 50_000, "\x1b[" * 50_000, "/a" * 90_000, "\r" * 100_000])
def test_no_text_takes_long(line):
    from time import process_time

    start = process_time()
    failure_part(line, 500), failure_part(f"{line}\n" * 2, 500), failure_gist(line)
    assert process_time() - start < 2
