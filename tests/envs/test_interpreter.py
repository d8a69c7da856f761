"""The walked subset of Python against CPython itself, and against text that nobody should have to run."""
# ruff: noqa: E501

import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from textwrap import indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.envs.toy.functions import SPLITS, draw_function, test_code
from composer_replication.envs.toy.interpreter import LimitReached, Program, Unsupported, _verdicts, parse, run_tests

# ---- CPython as the judge: many repositories in one process, each in its own folder with a limit of its own

JUDGE = r'''
import importlib, json, os, resource, shutil, signal, sys, types, warnings
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

class OutOfTime(BaseException): pass

def stop(*_): raise OutOfTime

def error_of(action, *arguments):
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.04)  # processor time, so that a busy machine judges alike
    try:
        action(*arguments)
    except BaseException as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

def judge(files, root):
    folders, files = [], {p: text for p, text in files.items() if p.endswith(".py")}
    for path in sorted(files, key=lambda p: p.rpartition("/")[::2]):
        target = os.path.join(root, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8", newline="") as file:
            file.write(files[path])
        if os.path.dirname(target) not in folders:
            folders.append(os.path.dirname(target))
    known, sys.path[:0], found = set(sys.modules), folders, []
    for path in sorted(files, key=lambda p: p.rpartition("/")[::2]):
        name = path.rpartition("/")[2][:-3]
        if name.startswith("test_"):
            if error := error_of(importlib.import_module, name):
                found.append((path, None, error))
                continue
            for test, value in list(vars(sys.modules[name]).items()):
                if test.startswith("test_") and isinstance(value, types.FunctionType):
                    found.append((path, test, error_of(value)))
    del sys.path[:len(folders)]
    for name in set(sys.modules) - known:
        del sys.modules[name]
    return found

signal.signal(signal.SIGVTALRM, stop)
answers, sys.stdout = sys.stdout, open(os.devnull, "w")
sys.path_importer_cache.clear()
for i, line in enumerate(open(sys.argv[1], encoding="utf-8")):
    root = os.path.join(sys.argv[2], str(i))
    found = judge(json.loads(line), root)
    shutil.rmtree(root)
    sys.path_importer_cache.clear()
    print(json.dumps(found), file=answers, flush=True)
'''


def judge(repositories, folder):
    "What CPython says of every repository: [path, test or None, type of the error or None] each."
    (folder / "judge.py").write_text(JUDGE)
    (folder / "repositories").write_text("".join(json.dumps(files) + "\n" for files in repositories))
    command = [sys.executable, "-I", "-S", "-B", folder / "judge.py", folder / "repositories", folder]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(repositories, folder):
    "Count verdicts by kind, and what CPython says at our limits; fail at the first one where it says otherwise."
    counts, theirs_of_limits = Counter(), Counter()
    theirs = judge(repositories, folder)
    assert len(theirs) == len(repositories)
    for files, their in zip(repositories, theirs):
        ours = _verdicts(files, 10_000)
        for mine, other in zip(ours, their):
            if isinstance(mine[2], (Unsupported, LimitReached)):
                counts[type(mine[2]).__name__] += 1
                if isinstance(mine[2], LimitReached):
                    theirs_of_limits[other[2]] += 1
                break  # what this test did not do, a later one may miss
            said = [mine[0], mine[1], type(mine[2]).__name__ if mine[2] else None]
            assert said == other, f"we say {said}, CPython {other} of\n" + "\n".join(f"# {p}\n{t}" for p, t in files.items())
            counts[said[2] or "passed"] += 1
        else:
            assert len(ours) == len(their), files
    print(f"\n{len(repositories)} repositories, {sum(counts.values())} verdicts: {dict(counts.most_common())}; "
          f"at our limits CPython says {dict(theirs_of_limits)}")
    return counts, theirs_of_limits


# ---- programs

# In these templates E is an expression, N a name, S a small expression, C a comparison, I an integer.
NAMES = ("a", "b", "c", "x", "y")
VALUES = ("True", "False", "None", "'ab'", "''", "...", "10 ** 20", "K", "int", "max")
USUAL = (
    *("E + E", "E - E") * 6, *("E // I", "E % I") * 3, "E // E", "E % E", "E * I", "-E", *("E C E",) * 4, *("E C E C E",) * 2,
    "E C E C E C E", "E and E", "E or E", "E and E or E", "not E", *("E if E else E",) * 2,
    *("abs(E)", "min(E, E)", "max(E, E)") * 2, "max(E, E, E)", "int(E)", "abs(E - E)", *("E * E",) * 4, "(E) ** 2", "(E) ** 3", "3 ** (E % 4)",
)
ODD = ("N(E)", "f(1)", "g()", "g(1, 2, 3)", "int(E, E)", "max(E)", "E // 0", "-None", "E + None", "None < E", "E == None", "abs(None)", "min()")
OUTSIDE = (
    "[i for i in (1, 2)]", "(lambda: 1)()", "f'{a}'", "{1: 2}", "[E][0]", "1.5", "str(a)", "a.b", "min(1, 2, key=abs)", "+E", "E / 2",
    "2 ** -1", "E is 5", "'a' + E", "(a := E)", "(E, E)", "sum((E, E))",
)
ODD_STATEMENTS = ("return", "pass", "...", "max = E", "f = E", "E", "x = y = E", "assert E, E", "assert E C E")
OUTSIDE_STATEMENTS = (
    "global K", "del a", "break", "import red", "a: int = 1", "a += 1", "yield a", "def h(): pass", "raise NotImplementedError",
    "for i in E: pass", "while E: a = 1", "a, b = E", "return [E]", "try: pass\nfinally: pass",
)
FIRST_LINES = (
    "from blue import k\n", "from blue import g\n", "from math import pi\n", "if K: pass\n", "K = f(1, 2)\n", "K = 1.5\n", "import bleu\n",
    "from blue import *\n", "from . import blue\n", "1 // 0\n",
)


class Programs:
    "Draws repositories. `wild` is how often, in percent, a type is wrong, a name missing or a construct outside the subset."

    def __init__(self, seed):
        self.rng = random.Random(f"interpreter-{seed}")

    def one_of(self, *choices):
        return choices[int(self.rng.random() * len(choices))]

    def chance(self, percent):
        return self.rng.random() * 100 < percent

    def fill(self, template, depth):
        draw = {"E": lambda: self.expression(depth - 1), "N": self.name, "S": self.small,
                "I": lambda: self.one_of("2", "-3", "7", "-7", "10"), "C": lambda: self.one_of("<", "<=", "==", "!=", ">", ">=")}
        return re.sub(r"\b[ENSCI]\b", lambda match: draw[match[0]](), template)

    def literal(self):
        return self.one_of(*VALUES) if self.chance(self.wild) else str(self.rng.randrange(-9, 30))

    def name(self):
        if self.chance(self.wild):
            return self.one_of(*NAMES, *NAMES, "zz", "f", "max", "sorted", "__name__")
        return self.one_of(*self.known) if self.known else self.literal()

    def small(self):  # arguments of calls do not grow, so that recursion ends by depth and not by size
        return self.one_of("{} - 1", "{} // 2", "1", "2", "{}", "{} % 3", "0", "3").format(self.name())

    def expression(self, depth):
        if depth <= 0 or self.chance(12):
            return self.name() if self.chance(70) else self.literal()
        if self.chance(self.wild):
            template = self.one_of(*ODD, *ODD, *OUTSIDE)
        elif self.chance(12):
            template = self.one_of("f(S, S)", "g(S)") if self.callable == "fg" else "g(S)" if self.callable else "abs(E)"
        else:
            template = self.one_of(*USUAL)
        text = self.fill(template, depth)
        return f"({text})" if self.chance(75) else text

    def statement(self, depth):
        kind = self.rng.randrange(100)
        if self.chance(self.wild):
            return self.fill(self.one_of(*ODD_STATEMENTS, *OUTSIDE_STATEMENTS), 2).split("\n")
        if kind < 45 or depth <= 0:
            names = self.one_of(("x",), ("y",), ("a",), ("x", "y"), ("b", "c"))
            line = self.fill(" = ".join([*names, "E"]), 2)
            self.known += [name for name in names if name not in self.known]
            return [line]
        if kind < 55:
            return [self.fill("return E", 4)]
        if kind < 95:
            lines = [self.fill("if E:", 3), *self.inner(depth)]
            lines += [self.fill("elif E:", 3), *self.inner(depth)] if self.chance(30) else []
            return lines + (["else:", *self.inner(depth)] if self.chance(40) else [])
        return [self.fill("assert E C E", 2)]

    def inner(self, depth):
        known = list(self.known)
        lines = ["    " + line for _ in range(self.one_of(1, 1, 2)) for line in self.statement(depth - 1)]
        self.known = known
        return lines

    def function(self, head, *parameters):
        self.known = list(parameters)
        lines = ['"What it does."'] if self.chance(40) else []
        for _ in range(self.one_of(0, 1, 1, 2, 3)):
            lines += self.statement(2)
        return f"def {head}:\n" + "".join(f"    {line}\n" for line in [*lines, self.fill("return E", 5)])

    def module(self):
        self.callable = ""
        odd = self.one_of("g(c, b=2)", "g(*c)", "g(c: list[int])", "g()", "g(max)")
        g = self.function(odd if self.chance(self.wild) else "g(c)", "c")
        self.callable = self.one_of("g", "g", "fg")
        f = self.function(self.one_of("f(a, b)", "f(a, b)", "f(a: int, b: int) -> int"), "a", "b")
        before = self.one_of("", "", '"A module."\n', "K = 5\n", "K = max(1, 2) + 1\n", "x = y = 2\n")
        before = self.one_of(*FIRST_LINES) if self.chance(self.wild * 3) else before
        after = self.one_of("K = f(1, 2)\n", "a = g\n", "f = 3\n", "f = abs\n", "def f(a): return a\n")
        return before + g + f + (after if self.chance(self.wild) else "")

    def repository(self):
        self.wild = self.one_of(0, 0, 0, 1, 2, 5)
        circular = self.one_of("from red import f\n", "from red import g\n")
        files = {"lib/red.py": self.module(), "app/blue.py": "k = 3\n" + (circular if self.chance(self.wild * 3) else "")}
        head = self.one_of("from red import f, g\n", "from red import f\nfrom red import g as g\n")
        if self.chance(self.wild * 2):
            head = self.one_of("from red import f, g, K\n", "from read import f\n", "from red import f\n", "import red\n")
        tests = (f"def test_{i}():\n{self.test(files)}" for i in range(self.one_of(2, 3, 4)))
        return {**files, "tests/test_red.py": head + "".join(tests)}

    def test(self, files):
        self.known = []
        if self.chance(8):
            return "".join(f"    {line}\n" for line in self.statement(2))
        return "".join(f"    assert {self.right(files)}\n" for _ in range(self.one_of(1, 2, 3)))

    def right(self, files):
        "An assertion of the value that we find, for CPython to check; now and then a wrong one."
        call = self.one_of("f({}, {})", "g({})").format(self.rng.randrange(-3, 12), self.rng.randrange(-3, 12))
        repository = Program({**files, "ask.py": f"from red import f, g\nanswer = {call}\n"}, 10_000)
        try:
            value = repository.load("ask.py")["answer"]
        except Exception:
            return f"{call} == 0"
        if type(value) not in (bool, int, type(None)):
            return f"{call} != 0"
        return f"{call} == {value!r}" + (" + 1" if type(value) is int and self.chance(10) else "")


TOKENS = (
    "(", ")", "[", "]", ":", ",", "=", "==", "+", "-", "*", "//", "%", "<", "not", "and", "or", "if", "else", "in", "is",
    "for", "while", "def", "return", "assert", "pass", "raise", "lambda", "yield", "break", "continue", "global", "nonlocal",
    "del", "import", "from", "as", "a", "b", "x", "f", "g", "red", "1", "0", "7", "'", '"', "#", "\n", "\n    ", "\n        ",
    "    ", "\t", ".", "@", ";", "->", ":=", "{", "}", "None", "True", "\\", "...", "0x1", "08", "1_0", "async", "await",
    "with", "try", "class", "match", "print", "é", "\f", "!", "$", "?",
)


# ---- equal verdicts


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_drawn_programs_have_the_verdicts_of_cpython(tmp_path, count):
    programs = Programs("drawn")
    counts, at_limits = compare([programs.repository() for _ in range(count)], tmp_path)
    assert counts["passed"] > 1.3 * count and counts["AssertionError"] > 0.25 * count
    assert counts["Unsupported"] < 0.08 * counts.total()
    assert at_limits["RecursionError"] + at_limits["OutOfTime"] > 0.95 * at_limits.total()  # elsewhere we stop without need


def test_the_functions_of_the_world_have_the_verdicts_of_cpython(tmp_path):
    rng, repositories = random.Random("interpreter-world"), []
    for split in SPLITS:
        for _ in range(2):
            function = draw_function(rng, split)
            tests = test_code(function, rng)
            for first in range(8):
                for second in range(6):
                    code = replace(function, first=first, second=second).code
                    repositories.append({f"core/{function.name}.py": code, f"tests/test_{function.name}.py": tests})
            repositories.append({f"core/{function.name}.py": function.stub, f"tests/test_{function.name}.py": tests})
    counts, _ = compare(repositories, tmp_path)
    assert counts["passed"] == 6 and counts["Unsupported"] == counts["LimitReached"] == 0


TRICKY = (
    "assert -7 // 2 == -4 and 7 // -2 == -4 and -7 // -2 == 3 and -7 % 3 == 2 and 7 % -3 == -2 and -7 % -3 == -1",
    "assert -2 ** 2 == -4 and (-2) ** 2 == 4 and 2 ** 3 ** 2 == 512 and -(-3) == 3 and 0 ** 0 == 1 and (-3) ** 3 == -27",
    "assert 2 * 3 % 4 - 1 // 2 + 5 == 7", "assert 1 < 2 < 3 and not 1 < 3 < 2\nassert (1 < 2) == True != False\nassert 1 < 2 == 2 > 0 != 1 or True",
    "x = 0\nassert 0 > x > 1 // x",  # the chain stops before the division
    "x = 0\nassert 0 < x == 1 // 0", "x = 0\nassert 0 <= x < 1 // 0",
    "assert (0 or None or 'a') and (1 and 0 and 1 // 0) == 0 and (3 and 4) == 4 and (not None) == True",
    "assert True + True == 2 and True * 3 == 3 and -True == -1 and True // True == 1 and True ** 2 == 1",
    "a = b = 3\na = b + 1\nassert a == 4 and b == 3", "assert x\nx = 1", "if False:\n    max = 1\nassert max(1, 2)", "max = 3\nassert max(1)",
    "assert int() + int(True) + int(7) == 8", "int(None)", "int(3, 10)", "abs(None)", "max(1, None)", "min(3)", "1 % 0", "0 ** -1", "1 + None",
    "None < None", "-None", "-'a'", "abs + 1", "abs()", "abs(1, 2)", "7()", "'a'()", "None()", "assert max != min and int == int",
    "assert False, 1 // 0", "assert True, 1 // 0", "assert 0, 'text'",
    "assert (1 // 0 if False else 5) == 5 and (1 if 0 else 2 if 0 else 3) == 3", "return 1", "...", "'text'\n5\nNone", "zz",
    "assert f(1) == 2 and K == 7\nassert h() == None and dots() == None", "assert fib(10) == 55 and even(7) == False", "f()", "f(1, 2)",
    "assert f(f(f(1))) == 4\nf(f)", "f + 1", "f < h", "assert f and abs and not None", "assert shadow(3) == 4 and late(1) == 6",
)
RED = """"A module."
K = 7
def f(a):
    return a + 1
def h(): pass
def dots(): ...
def fib(n):
    if n < 2:
        return n
    return fib(n - 1) + fib(n - 2)
def even(n): return True if n == 0 else odd(n - 1)
def odd(n): return False if n == 0 else even(n - 1)
def shadow(max):
    K = max
    return K + 1
def late(a): return a + defined_below
defined_below = 5
"""


def test_tricky_lines_have_the_verdicts_of_cpython(tmp_path):
    bodies = ["from red import K, dots, even, f, fib, h, late, shadow\ndef test_it():\n" + indent(lines, "    ") for lines in TRICKY]
    counts, _ = compare([{"lib/red.py": RED, "tests/test_it.py": body} for body in bodies], tmp_path)
    assert counts["LimitReached"] == counts["Unsupported"] == counts["SyntaxError"] == 0


USE_A = "from a import a\ndef test_a():\n    assert a == 1\n"
MODULES = (
    {"a.py": "a = 1\n", "tests/test_a.py": USE_A, "tests/test_b.py": USE_A.replace("test_a", "test_b")},
    {"x/a.py": "a = 1\n", "y/a.py": "a = 2\n", "tests/test_a.py": USE_A},
    {"x/b/c.py": "a = 2\n", "x/c.py": "a = 1\n", "test_a.py": USE_A.replace("from a", "from c")},  # the folder x comes first
    {"x/a.py": "a = 1 // 0\n", "tests/test_a.py": USE_A, "tests/test_b.py": USE_A},  # fails twice
    {"x/a.py": "a = (\n", "tests/test_a.py": USE_A, "tests/test_b.py": USE_A},
    {"x/a.py": "a = 1\nfrom b import b\n", "x/b.py": "from a import a\nb = a\n", "tests/test_a.py": USE_A},  # circular, and well
    {"x/a.py": "from b import b\na = 1\n", "x/b.py": "from a import a\nb = a\n", "tests/test_a.py": USE_A},  # circular, and too early
    {"x/a.py": "from b import b\na = 1 // 0\n", "x/b.py": "b = 1\n", "tests/test_a.py": USE_A,
     "tests/test_b.py": "from b import b\ndef test_b():\n    assert b == 1\n"},  # b stays imported though a failed
    {"x/a.py": "a = 1\nfrom a import b\n", "tests/test_a.py": USE_A},
    {"x/a.py": "from a import a\na = 1\n", "tests/test_a.py": USE_A},
    {"x/a.py": "a = 1\ndef test_i(): assert a == 1\n", "test_a.py": "from a import test_i\nfrom a import test_i as test_b\n"},
    {"tests/test_a.py": "def test_a(): return 1\ndef test_b(): return test_a() == 1\n",
     "test_b.py": "from test_a import test_b\ndef test_c(): assert test_b()\n"},
    {"lib/a.txt": "a = (", "tests/test_a.txt": "(", "tests/a_test.py": "1 // 0", "tests/mytest_a.py": "("},  # no tests here
)
ALONE = (  # texts of a test file
    "def test_a(): assert 0\ndef test_b(): pass\ndef test_a(): pass\ntest_c = test_a\ntest_d = 3\ndef tes(): assert 0\n",
    "def test_a(x): pass\n",
    "x = 1\ndef test_a():\n    x = 2\n    assert x == 2\ndef test_b(): assert x == 1\n",
    "int = 3\nprint = 4\ndef f(a: int) -> int: return a\ndef test_a(): assert f(print) + int == 7\n",
    "ª = 1\ndef test_a(): assert a == 1\n",  # Python reads both as one name
    "def test_a():\r\n    x = 1\r\n    assert x == 2\r",
    "return 1\n", "def f(a, a): pass\n", "f() = 1\n", "None = 1\n", "x = 1\n\0", "(" * 300,
    "x = '\\N{no}'\n", "x = '\\d'\nassert", "x: int = yield\n",
    "def test_a():\n    if 1:\n        pass\n   x = 1\n", "if 1:\n\tx = 1\n        x = 2\n", "x = 5 if 1 else\n", "08\n",
    "def test_a():\n    break\n", "def test_a():\n    x = 1\n    global x\n", "def f():\n    return [\ndef test_a(): pass\n",
)


def test_modules_have_the_verdicts_of_cpython(tmp_path):
    # before 3.11.4 a null byte was another exception
    alone = [text for text in ALONE if "\0" not in text or sys.version_info >= (3, 11, 4)]
    counts, _ = compare([*MODULES, *({"tests/test_a.py": text} for text in alone)], tmp_path)
    assert counts["LimitReached"] == counts["Unsupported"] == 0


# ---- what is outside


@pytest.mark.parametrize("line, named", (
    ("[i for i in range(3)]", "ListComp"), ("lambda: 1", "Lambda"), ("f'{1}'", "JoinedStr"), ("{1: 2}", "Dict"), ("[1]", "List"), ("1, 2", "Tuple"),
    ("1.5", "float"), ("2j", "complex"), ("b'a'", "bytes"), ("2 ** -1", "float"), ("1 / 2", "Div"), ("1 & 2", "BitAnd"), ("+1", "UAdd"),
    ("~1", "Invert"), ("'a'[0]", "Subscript"), ("min(1, 2, key=abs)", "keyword argument"), ("min(*'ab')", "Starred"), ("sum(1)", "name sum"),
    ("print(1)", "name print"), ("__import__('os')", "name __import__"), ("eval('1')", "name eval"), ("open('a')", "name open"),
    ("__name__", "name __name__"), ("'a'.upper()", "Attribute"), ("(1).real", "Attribute"), ("test_it.__globals__", "Attribute"),
    ("5 is 5", "Is"), ("1 in 'a'", "In"), ("'%d' % 5", "calculation with a text"), ("'a' * 9", "calculation with a text"),
    ("'a' < 'b'", "calculation with a text"), ("int('7')", "calculation with a text"), ("(a := 1)", "NamedExpr"), ("import os", "Import"),
    ("global a", "Global"), ("del a", "Delete"), ("yield", "Yield"), ("test_it.a = 1", "Attribute"), ("a = 1\na += 1", "AugAssign"),
    ("try:\n    pass\nfinally:\n    pass", "Try"), ("with abs: pass", "With"), ("a: int = 1", "AnnAssign"), ("raise ValueError", "Raise"),
    ("def f(): pass", "FunctionDef"), ("class A: pass", "ClassDef"), ("while 1: pass", "While"), ("for i in 'a': pass", "For"),
    ("match 1:\n    case 1: pass", "Match"),
))
def test_a_construct_outside_the_subset_is_named(line, named):
    report = run_tests({"test_a.py": "def test_it():\n" + indent(line, "    ") + "\ndef test_other(): pass\n"})
    assert (report.passed, report.failed, report.message) == (1, 1, f"2 run, 1 failed: unsupported {named} in test_it")


@pytest.mark.parametrize("text, named", (
    ("import os", "Import outside a function"), ("from math import pi", "import of math"), ("from a.b import c", "import of a.b"),
    ("from . import a", "kind of import"), ("from a import *", "kind of import"),
    ("from __future__ import annotations", "import of __future__"), ("if 1: pass", "If outside a function"),
    ("class A: pass", "ClassDef outside a function"), ("x = lambda: 1", "Lambda"),
    ("@abs\ndef f(): pass", "decorator"), ("def f(a=1): pass", "kind of parameter"), ("def f(*a): pass", "kind of parameter"),
    ("def f(a, /): pass", "kind of parameter"), ("def f(*, a): pass", "kind of parameter"),
    ("def f(**a): pass", "kind of parameter"), ("def f(a: zz): pass", "annotation"),
    ("def f() -> list[int]: pass", "annotation"), ("async def f(): pass", "AsyncFunctionDef outside a function"),
    ("x = __name__", "name __name__"), ("from a import __name__", "name __name__"),
))
def test_a_construct_outside_the_subset_stops_its_module(text, named):
    report = run_tests({"a.py": "", "test_a.py": f"{text}\ndef test_it(): pass\n"})
    assert (report.passed, report.failed, report.message) == (0, 1, f"1 run, 1 failed: unsupported {named} in test_a.py")


# ---- limits


def said(body, limit=10_000):
    return run_tests({"test_a.py": "def test_it():\n" + indent(body, "    ")}, limit).message.removeprefix("1 run, ")


@pytest.mark.parametrize("inside, beyond, what", (
    ("2 ** 255", "2 ** 256", "number too large"), ("-(2 ** 255 - 1) * 2 - 1", "-(2 ** 255) * 2", "number too large"),
    ("1 ** 10 ** 9", "3 ** 10 ** 9", "number too large"), ("(-1) ** 10 ** 9", "(-2) ** 10 ** 9", "number too large"),
    (str(2**256 - 1), str(2**256), "number too large"),
    ("x = " + "-" * 190 + "1", "x = " + "-" * 210 + "1", "nested too deep"),
    ("x = " + "1 + " * 190 + "1", "x = " + "1 + " * 210 + "1", "nested too deep"),
))
def test_whatever_grows_has_a_limit(inside, beyond, what):
    assert said(inside) == "0 failed"
    assert said(beyond) == f"1 failed: {what} in test_it"


def test_recursion_ends_by_depth_and_not_by_the_stack_of_the_caller():
    function = "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
    files = {"test_a.py": f"{function}def test_a(): f(1000)\ndef test_b(): assert f(35) == 35\n"}
    expected = "2 run, 1 failed: nested too deep in test_a"

    def called_from(frames):
        return run_tests(files).message if frames == 0 else called_from(frames - 1)

    assert run_tests(files).message == called_from(300) == expected


def test_steps_are_counted_over_all_tests_and_end_together():
    files = {"test_a.py": "def f(n): return f(n - 1) + f(n - 1) if n else 0\ndef test_a(): f(20)\ndef test_b(): pass\n",
             "test_b.py": "def test_c(): pass\n"}
    assert run_tests(files).failed == 3 and run_tests({"test_b.py": files["test_b.py"]}, 4).passed == 1
    assert run_tests({"test_b.py": files["test_b.py"]}, 3).passed == 0
    assert run_tests({"test_b.py": files["test_b.py"]}, 0).message == "1 run, 1 failed: out of steps in test_b.py"


def test_text_is_counted_over_all_files():
    files = {f"test_{i}.py": "def test_a(): pass\n#" + "x" * 3000 for i in range(4)}
    report = run_tests(files)
    assert (report.passed, report.failed) == (2, 2) and report.message.endswith("too much text in test_2.py")
    assert run_tests({"test_0.py": files["test_0.py"], "unused.py": "x" * 10**6}).failed == 0


# ---- any text


@pytest.mark.parametrize("text, what", (
    ("'\ud800'", "SyntaxError"), ("\0", "SyntaxError"), ("def f(", "SyntaxError"), (" x", "IndentationError"),
    ("a" * 10**6, "too much text"), ("x = " + "-" * 7000 + "1", "nested too deep"),
    ("a" + ".b" * 3000, "nested too deep"), ("(" * 7000, "SyntaxError"),
))
def test_text_that_is_no_python_is_named_with_its_file(text, what):
    files = {"lib/red.py": text, "tests/test_a.py": "from red import x\ndef test_a(): pass\n"}
    assert run_tests(files).message == f"1 run, 1 failed: {what} in {'red' if 'Error' in what else 'test_a'}.py"


def test_the_message_stays_short():
    message = run_tests({"test_a.py": f"def test_{'a' * 5000}(): assert 0"}).message
    assert message.startswith("1 run, 1 failed: AssertionError in test_aaa") and len(message) == 120


HOSTILE = tuple("x = " + text if text[0] != "!" else text[1:] for text in (
    "(" * 7000, "!" + "(" * 150, "[" * 190, "{1:" * 90, "-" * 7000 + "1", "not " * 1900 + "1", "1+" * 3900 + "1",
    "1**" * 2600 + "1", "1 if 1 else " * 650 + "1", "a" + ".b" * 3900, "a" + "()" * 3900, "lambda:" * 1100 + "1",
    "f(" * 190 + ")" * 190, "f'{" * 40, "f(a, " * 190, "(a for a in " * 90, "'" * 7900, "1<" * 3900 + "2",
    "1 and " * 1300 + "1", "!" + "a = " * 1900 + "1", "!" + "a," * 3900 + "= 1", "!" + "a;" * 3900,
    "!" + "def f():pass\n" * 600, "'ab' * 4096," * 600, "9 ** 99," * 800, "((1, 2) * 120) * 2," * 400,
    "f'" + "{x}" * 2600 + "'", "!" + "def test_a():pass\n" * 430, "!" + "a" * 10**6, "0x" + "f" * 7900, "9" * 7900,
    "!" + "".join(" " * i + "if 1:\n" for i in range(99)), "!with " + "(" * 90, "!match x:\n case " + "[" * 90,
    "!import a" + ".a" * 3900, "!" + "\\\n" * 3900, "!" + "@a\n" * 2600 + "def f(): pass", "(a:=" * 90, "!x: " + "int, " * 100,
    "!" + "*a," * 2600 + "= 1", "'\ud800'", "!\0", "!\ufeffx = 1", "!# coding: utf-16\nx = 1",
    "!def f(n): return f(n - 1) + f(n - 1) if n else 7 ** 90 % 3 ** 80 // 3 ** 20\ndef test_a(): f(40)",
    "!def f(n): return f(n - 1) + f(n - 1)\ndef test_a(): f(9)", "!def test_a():\n    '%1000000000d' % 5", "'{:999999999}'",
))


def seconds(files):
    "Processor time of a run, the least of three: the collector may walk all that other tests left, 0.2 s, in any one."
    times = []
    for _ in range(3):
        parse.cache_clear()
        start = time.thread_time()
        report = run_tests(files)
        times.append(time.thread_time() - start)
    assert report.passed + report.failed < 500
    return min(times)


def test_hostile_text_takes_little_time():
    times = {text: seconds({"tests/test_a.py": text}) for text in HOSTILE}
    times["many"] = seconds({f"tests/test_{i}.py": "a;" * 600 for i in range(100)})
    slow = sorted(times, key=times.get, reverse=True)[:3]
    print({text[:20]: round(times[text] * 1e3, 1) for text in slow}, "milliseconds")
    assert times[slow[0]] < 0.1  # processor time; about 0.03 on an idle machine


ANY = st.text(st.characters(exclude_categories=()), max_size=40)
PIECES = (*TOKENS, "def test_a():\n    ", "assert ", "\ud800", "\0", "max(", "[0]", "**", "9", "range(")
SOUP = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
BODY = SOUP.map(lambda text: f"def test_a():\n    {text}")
PATHS = st.sampled_from(("a.py", "test_a.py", "x/test_b.py", "test_.py", "/test_c.py", "test_d.py\n.py"))


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.one_of(ANY, PATHS), st.one_of(ANY, SOUP, BODY)))
def test_no_text_and_no_path_makes_it_raise(files):
    report = run_tests(files)
    assert run_tests(files) == report and min(report.passed, report.failed) >= 0
    assert len(report.message) <= 120 and report.message.isprintable()
    assert (report.message == "no tests found") == (report.passed + report.failed == 0)


def test_python_executes_no_text(tmp_path):
    "An audit hook sees every code object that Python executes; the walk must give it none."
    script = """
import sys
from composer_replication.envs.toy.interpreter import run_tests
files = {"a.py": "def f(a): return a + 1\\nK = f(2)\\n", "test_a.py": "from a import K, f\\ndef test_a(): assert f(K) == 4\\n"}
run_tests({**files, "b.py": ""})
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event))
report = run_tests({**files, "test_b.py": "__import__('os')\\n", "test_c.py": "import os\\n", "test_d.py": "x = eval\\n"})
print(report.passed, report.failed, sorted(set(seen)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.stdout.split(" ", 2)[:2] == ["1", "3"], done.stderr
    assert done.stdout.split(" ", 2)[2] == "['compile']\n"
