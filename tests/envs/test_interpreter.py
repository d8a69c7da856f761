"""The walked subset of Python against CPython itself, and against text that nobody should have to run."""

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
from composer_replication.envs.toy.interpreter import Limit, Unsupported, _Program, _verdicts, parse, run_tests

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
            if isinstance(mine[2], (Unsupported, Limit)):
                counts[type(mine[2]).__name__] += 1
                if isinstance(mine[2], Limit):
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
VALUES = (
    "True", "False", "None", "'ab'", "''", "[1, 2, 3]", "[]", "(4, 5)", "()", "(7,)", "[[1], [2, 3]]", "'7'", "range(4)",
    "...", "10 ** 20", "[0] * 3", "'ab' * 2", "K", "red", "int", "NotImplementedError",
)
USUAL = (
    *("E + E", "E - E") * 6, *("E // I", "E % I") * 3, "E // E", "E % E", "E * I", "-E", *("E C E",) * 4, *("E C E C E",) * 2,
    "E C E C E C E", "E and E", "E or E", "E and E or E", "not E", *("E if E else E",) * 2, "[3, E, 2][E % 3]", "(5, E)[-1]",
    "divmod(E, 7)[1]", *("abs(E)", "min(E, E)", "max(E, E)") * 2, "max(E, E, E)", "sum([E, E])", "len([E, E])", "int(E)",
    "max([E, E])", "sum(range(E % 9))", "min((E, E))", "abs(E - E)",
)
GROWING = ("E * E",) * 4 + ("(E) ** 2", "(E) ** 3", "3 ** (E % 4)")  # not in loops, where CPython would never end
ODD = (
    "[E, E]", "(E, E)", "[E] + [E]", "E[E]", "N(E)", "f(1)", "g()", "g(1, 2, 3)", "E in [E, E]", "E not in (E,)", "E is None",
    "E is not True", "len(E)", "int(E, E)", "max(E)", "sum(E)", "int('1E')", "red.f(1, 2)", "red.K", "red.g", "min(E, [])",
    "max(())", "abs('a')", "E // 0", "divmod(E, 0)", "range(3)[1]", "len(range(3, 9, 2))", "[1] < [2, E] <= [2, 4]",
    "sum([[1], [2]], [])", "'ab'[E]", "(1, 2)[E]", "-[E]",
)
OUTSIDE = (
    "[i for i in (1, 2)]", "(lambda: 1)()", "f'{a}'", "{1: 2}", "sorted([2, 1])", "a[0:1]", "1.5", "str(a)", "a.b",
    "min(1, 2, key=abs)", "+E", "~E", "E & 3", "red.__doc__", "E / 2", "2 ** -1", "b'x'", "E is 5", "'%d' % E", "(a := E)",
)
ODD_STATEMENTS = (
    "return", "pass", "...", "raise NotImplementedError('x')", "raise NotImplementedError", "max = E", "f = E", "a, b = E",
    "x += E", "E", "return E, E", "assert E, E", "b = [a]\nb += [1]\nreturn b", "x = y = [1]\nx += (2,)\nreturn y",
    "a = 'x'\na *= 2", "assert E C E",
)
OUTSIDE_STATEMENTS = (
    "global K", "del a", "break", "import red", "a: int = 1", "a[0] = 1", "yield a", "def h(): pass", "raise",
    "raise ValueError", "return [i for i in range(3)]", "try: pass\nfinally: pass", "x = lambda: 2", "a, *b = [1, 2]",
    "nonlocal a", "return 1.5",
)
FIRST_LINES = (
    "import red\n", "from blue import k\n", "from blue import g\n", "import blue\nK = blue.k\n", "from math import pi\n",
    "if K: pass\n", "K = f(1, 2)\n", "K = 1.5\n", "import bleu\n", "from blue import *\n", "from . import blue\n", "1 // 0\n",
    "import blue.k\n",
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
            template = self.one_of(*USUAL, *(() if self.in_loop else GROWING))
        text = self.fill(template, depth)
        return f"({text})" if self.chance(75) else text

    def assign(self, template, *names):
        lines = self.fill(template, 2).split("\n")
        self.known += [name for name in names if name not in self.known]
        return lines

    def statement(self, depth):
        kind = self.rng.randrange(100)
        if self.chance(self.wild):
            return self.fill(self.one_of(*ODD_STATEMENTS, *OUTSIDE_STATEMENTS), 2).split("\n")
        if kind < 30 or depth <= 0:
            name = self.one_of(*NAMES)
            return self.assign(f"{name} = E", name)
        if kind < 42:
            operator = self.one_of("+= E", "-= E", "//= I", "%= I", "%= E", *(("*= E",) * (not self.in_loop)))
            return [self.fill(f"{self.one_of(*self.known) if self.known else 'x'} {operator}", 2)]
        if kind < 48:
            return self.assign(*self.one_of(("x, y = E, E", "x", "y"), ("x = y = E", "x", "y"), ("a, b = b, a", "a", "b"),
                                            ("(a, [b, c]) = E, (E, E)", "a", "b", "c")))
        if kind < 56:
            return [self.fill("return E", 4)]
        if kind < 76:
            lines = [self.fill("if E:", 3), *self.inner(depth)]
            lines += [self.fill("elif E:", 3), *self.inner(depth)] if self.chance(30) else []
            return lines + (["else:", *self.inner(depth)] if self.chance(40) else [])
        if kind < 86:
            items = self.one_of("range(4)", "range(N % 5)", "range(1, 9, 3)", "range(5, 0, -2)", "[E, E]")
            return self.loop(f"for {self.one_of('i', 'x', 'a')} in {items}:", depth, "pass")
        if kind < 92:
            name = self.one_of(*self.known) if self.known else "x"
            step = self.one_of("-= 1", "//= 2", "-= 2", "-= 1", "+= 1")
            return self.loop(f"while {name} > {self.one_of('0', '3', 'N')}:", depth, f"{name} {step}")
        return [self.fill("assert E C E", 2)] if self.chance(30) else self.assign("y = E", "y")

    def inner(self, depth):
        known = list(self.known)
        lines = ["    " + line for _ in range(self.one_of(1, 1, 2)) for line in self.statement(depth - 1)]
        self.known = known
        return lines

    def loop(self, head, depth, last):
        outer, self.in_loop = self.in_loop, True
        lines = [self.fill(head, 2), *self.inner(depth), f"    {last}", *(["else:", *self.inner(0)] if self.chance(8) else [])]
        self.in_loop = outer
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
        before = self.one_of("", "", '"A module."\n', "K = 5\n", "K = max(1, 2) + 1\n", "x, y = 1, [2]\n")
        before = self.one_of(*FIRST_LINES) if self.chance(self.wild * 3) else before
        after = self.one_of("K = f(1, 2)\n", "a = g\n", "f = 3\n", "f = abs\n", "def f(a): return a\n")
        return before + g + f + (after if self.chance(self.wild) else "")

    def repository(self):
        self.wild, self.in_loop = self.one_of(0, 0, 0, 1, 2, 5), False
        circular = self.one_of("import red\n", "from red import g\n", "import test_red\n")
        files = {"lib/red.py": self.module(), "app/blue.py": "k = 3\n" + (circular if self.chance(self.wild * 3) else "")}
        head = self.one_of("from red import f, g\n", "from red import f, g\n", "import red as r\nf, g = r.f, r.g\n",
                           "import red\nfrom red import f\nfrom red import g as g\n")
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
        repository = _Program({**files, "ask.py": f"from red import f, g\nanswer = {call}\n"}, 10_000)
        try:
            value = repository.load("ask.py").names["answer"]
        except Exception:
            return f"{call} == 0"
        if type(value) is bool:
            return f"{call} is {value}"
        if type(value) not in (int, str, list, tuple, type(None)) or "<" in repr(value):
            return f"{call} != 0"
        return f"{call} == {value!r}" + (" + 1" if type(value) is int and self.chance(10) else "")


TOKENS = (
    "(", ")", "[", "]", ":", ",", "=", "==", "+", "-", "*", "//", "%", "<", "not", "and", "or", "if", "else", "in", "is",
    "for", "while", "def", "return", "assert", "pass", "raise", "lambda", "yield", "break", "continue", "global", "nonlocal",
    "del", "import", "from", "as", "a", "b", "x", "f", "g", "red", "1", "0", "7", "'", '"', "#", "\n", "\n    ", "\n        ",
    "    ", "\t", ".", "@", ";", "->", ":=", "{", "}", "None", "True", "\\", "...", "0x1", "08", "1_0", "async", "await",
    "with", "try", "class", "match", "print", "é", "\f", "!", "$", "?",
)


def mutated(files, rng):
    "A repository with a few tokens of one file lost, doubled, swapped or replaced."
    path = rng.choice(["lib/red.py", "lib/red.py", "tests/test_red.py"])
    tokens = re.findall(r"\w+|\s+|[^\w\s]", files[path])
    for _ in range(rng.choice((1, 1, 2, 3))):
        i = rng.randrange(len(tokens))
        action = rng.randrange(5)
        if action == 0:
            del tokens[i]
        elif action == 1:
            tokens.insert(i, tokens[i])
        elif action == 2:
            tokens.insert(i, rng.choice(TOKENS))
        elif action == 3:
            tokens[i] = rng.choice(TOKENS)
        else:
            j = min(i + 1, len(tokens) - 1)
            tokens[i], tokens[j] = tokens[j], tokens[i]
    return {**files, path: "".join(tokens)}


def may_grow(files):
    "Whether some number would grow so that CPython takes forever; we stop there."
    return any(isinstance(e, Limit) and "too l" in str(e) for _, _, e in _verdicts(files, 10_000))


# ---- equal verdicts


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_drawn_programs_have_the_verdicts_of_cpython(tmp_path, count):
    programs = Programs("drawn")
    counts, at_limits = compare([programs.repository() for _ in range(count)], tmp_path)
    assert counts["passed"] > 1.3 * count and counts["AssertionError"] > 0.25 * count
    assert counts["Unsupported"] < 0.05 * counts.total()
    assert at_limits["RecursionError"] + at_limits["OutOfTime"] > 0.95 * at_limits.total()  # elsewhere we stop without need


@pytest.mark.parametrize("count", [300, pytest.param(900, marks=pytest.mark.slow)])
def test_mutated_programs_have_the_verdicts_of_cpython(tmp_path, count):
    programs = Programs("mutated")
    repositories = [mutated(programs.repository(), programs.rng) for _ in range(count)]
    counts, at_limits = compare([files for files in repositories if not may_grow(files)], tmp_path)
    assert counts["passed"] > count / 4.5 and counts["SyntaxError"] > count / 1.8
    assert counts["Unsupported"] < 0.05 * counts.total()


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
    assert counts["passed"] == 6 and counts["Unsupported"] == counts["Limit"] == 0


TRICKY = (
    "assert -7 // 2 == -4 and 7 // -2 == -4 and -7 // -2 == 3 and -7 % 3 == 2 and 7 % -3 == -2 and -7 % -3 == -1",
    "assert -2 ** 2 == -4 and (-2) ** 2 == 4 and 2 ** 3 ** 2 == 512 and -(-3) == 3 and 0 ** 0 == 1 and (-3) ** 3 == -27",
    "assert divmod(-7, 2) == (-4, 1) and divmod(7, -2)[1] == -1\nassert 2 * 3 % 4 - 1 // 2 + 5 == 7",
    "assert 1 < 2 < 3 and not 1 < 3 < 2\nassert (1 < 2) == True != False\nassert 1 < 2 == 2 > 0 != 1 or True",
    "x = 0\nassert 0 > x > 1 // x",  # the chain stops before the division
    "x = 0\nassert 0 < x == 1 // 0", "x = 0\nassert 0 <= x < 1 // 0",
    "assert (0 or [] or 'a') == 'a' and (1 and [] and 1 // 0) == [] and (3 and 4) == 4 and (not []) is True",
    "assert True + True == 2 and True * 3 == 3 and -True == -1 and True // True == 1\n"
    "assert (True, False) == (1, 0) and True ** 2 is not True",
    "assert 'a' in 'cab' and 'x' not in 'cab' and 3 in range(4) and 4 not in range(4) and [1] in [[1]]",
    "a = [1, 2]\nb = a\nb += [3]\nassert a == [1, 2, 3] and a is not None",
    "a = [1, 2]\nb = a\nb = b + [3]\nassert a == [1, 2]",
    "a = (1, 2)\nb = a\nb += (3,)\nassert a == (1, 2) and b == (1, 2, 3)",
    "a = [0] * 3\nb = a\nb *= 2\nassert a == [0] * 6 and [1] * -1 == [] and 2 * 'ab' == 'abab'",
    "a = [1]\na += range(3)\na += 'xy'\na += (5,)\nassert a == [1, 0, 1, 2, 'x', 'y', 5]",
    "a = [1]\na += 5", "a = (1,)\na += [5]",
    "a, b = 1, 2\na, b = b, a\nassert (a, b) == (2, 1)\n(a, [b, c]) = 'xy'[0], range(2)\nassert a == 'x'\n"
    "assert c == 1\na, b = 'xyz'", "a, b = 5", "a, b = [1]", "a = b = c = []\na += [1]\nassert c == [1]",
    "x = 1\nx, y = 2, x\nassert (x, y) == (2, 1)",
    "total = 0\nfor i in range(3):\n    for j in range(i):\n        total += 10 * i + j\nassert total == 51 and (i, j) == (2, 1)",
    "for i in []:\n    pass\nassert i", "for i in 5:\n    pass",
    "for i, j in [(1, 2), (3, 4)]:\n    pass\nassert i + j == 7\nfor i in [1, 2]:\n    pass\nelse:\n    i = 9\nassert i == 9",
    "a = [1]\nfor i in a:\n    if len(a) < 5:\n        a += [i + 1]\nassert a == [1, 2, 3, 4, 5]",
    "n = 5\nwhile n:\n    n -= 1\nelse:\n    n = -1\nassert n == -1", "assert x\nx = 1", "x += 1",
    "if False:\n    max = 1\nassert max(1, 2)", "len = 3\nassert len([1])",
    "assert int('12') + int(' -3 ') + int('1_0') + int('ff', 16) + int() + int(True) == 275",
    "int('x')", "int([])", "int(None)", "int(3, 10)", "range('a')", "abs('a')", "sum(['a'])", "max([])", "max(1, 'a')",
    "min(3)", "len(3)", "[1, 2][2]", "[1, 2]['a']", "5[0]", "abs[0]", "divmod(1, 0)", "1 % 0", "0 ** -1", "'a' + 1",
    "1 + 'a'", "[] < 3", "None < None", "-'a'", "'a' * 'b'", "1 in 5", "1 in 'a'", "abs + 1", "abs()", "abs(1, 2)", "7()",
    "'a'()", "None()", "assert abs is not None and len == len and max != min and int == int",
    "assert [1, 2] < [1, 3] < [2] and (1,) < (1, 0) and 'a' < 'b' <= 'b' and [] == [] and () == () and [1] != (1,)",
    "assert [[1, 2], [3]][0][1] == 2 and (1, 2)[-1] == 2 and 'abc'[1] == 'b' and range(5)[-1] == 4 and [7][True - 1] == 7",
    "assert len('') == 0 == sum([]) == sum(()) and sum(range(5)) == 10 and max('ab') == 'b'\n"
    "assert min((3, 1)) == 1 and sum([[1], [2]], []) == [1, 2]", "assert False, 1 // 0", "assert True, 1 // 0",
    "assert 0, 'text'",
    "assert (1 // 0 if False else 5) == 5 and (1 if 0 else 2 if 0 else 3) == 3",
    "raise NotImplementedError", "raise NotImplementedError('later')", "return 1", "...", "'text'\n5\nNone", "zz", "red.zz",
    "assert red.f(1) == 2 and red.K == 7\nassert red.h() is None and red.dots() is None",
    "assert red.fib(10) == 55 and red.even(7) is False", "red.f()", "red.f(1, 2)", "red.f('a')",
    "f = red.f\nassert f(f(f(1))) == 4\nf(f)", "red.f + 1", "red.f < red.h", "red + 1", "red()", "red[0]",
    "for i in red: pass", "assert red and red.f and abs and not None",
    "assert red.changed == [1]\nx = red.changed\nx += [2]\nassert red.changed == [1, 2]",
    "assert red.shadow(3) == 4 and red.late(1) == 6",
)
RED = """"A module."
K = 7
changed = [1]
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
    bodies = ["import red\ndef test_it():\n" + indent(lines, "    ") for lines in TRICKY]
    counts, _ = compare([{"lib/red.py": RED, "tests/test_it.py": body} for body in bodies], tmp_path)
    assert counts["Limit"] == counts["Unsupported"] == counts["SyntaxError"] == 0


USE_A = "from a import a\ndef test_a():\n    assert a == 1\n"
MODULES = (
    {"a.py": "a = 1\n", "tests/test_a.py": USE_A, "tests/test_b.py": USE_A.replace("test_a", "test_b")},
    {"x/a.py": "a = 1\n", "y/a.py": "a = 2\n", "tests/test_a.py": USE_A},
    {"x/b/c.py": "a = 2\n", "x/c.py": "a = 1\n", "test_a.py": USE_A.replace("from a", "from c")},  # the folder x comes first
    {"x/a.py": "a = 1 // 0\n", "tests/test_a.py": USE_A, "tests/test_b.py": USE_A},  # fails twice
    {"x/a.py": "a = (\n", "tests/test_a.py": USE_A, "tests/test_b.py": USE_A},
    {"x/a.py": "import b\na = b.b\n", "x/b.py": "import a\nb = 1\n", "tests/test_a.py": USE_A},  # circular, and well
    {"x/a.py": "import b\na = 1\n", "x/b.py": "from a import a\n", "tests/test_a.py": USE_A},  # circular, and too early
    {"x/a.py": "import b\na = 1\n", "x/b.py": "import a\nb = a.a\n", "tests/test_a.py": USE_A},
    {"x/a.py": "import b\na = 1 // 0\n", "x/b.py": "b = [1]\n",
     "tests/test_a.py": "import b\ndef f(x): x += [2]\nf(b.b)\nimport a\n",
     "tests/test_b.py": "import b\ndef test_b():\n    assert b.b == [1, 2]\n"},  # b stays imported though a failed
    {"x/a.py": "a = 1\nfrom a import b\n", "tests/test_a.py": USE_A},
    {"x/a.py": "from a import a\na = 1\n", "tests/test_a.py": USE_A},
    {"x/a.py": "a = 1\ndef test_i(): assert a == 1\n", "test_a.py": "from a import test_i\nfrom a import test_i as test_b\n"},
    {"tests/test_a.py": "def test_a(): return 1\ndef test_b(): return test_a() == 1\n",
     "test_b.py": "import test_a\ndef test_c(): assert test_a.test_b()\n"},
    {"lib/a.txt": "a = (", "tests/test_a.txt": "(", "tests/a_test.py": "1 // 0", "tests/mytest_a.py": "("},  # no tests here
)
ALONE = (  # texts of a test file
    "def test_a(): assert 0\ndef test_b(): pass\ndef test_a(): pass\ntest_c = test_a\ntest_d = 3\ndef tes(): assert 0\n",
    "def test_a(x): pass\n",
    "x = 1\ndef test_a():\n    x = 2\n    assert x == 2\ndef test_b(): assert x == 1\ndef test_c():\n    x += 1\n",
    "import nowhere\ndef test_a(): pass\n",
    "int = 3\nprint = 4\ndef f(a: int) -> int: return a\ndef test_a(): assert f(print) + int == 7\n",
    "NotImplementedError_ = 3\ndef test_a(): raise NotImplementedError('x', 1)\n",
    "ª = 1\ndef test_a(): assert a == 1\n",  # Python reads both as one name
    "def test_a():\r\n    x = 1\r\n    assert x == 2\r",
    "def test_a():\n" + "".join("    " * i + "for i in [1]:\n" for i in range(1, 25)) + "    " * 25 + "pass\n",  # nested too deep
    "return 1\n", "def f(a, a): pass\n", "f() = 1\n", "None = 1\n", "x = 1\n\0", "(" * 300,
    "x = '\\N{no}'\n", "x = '\\d'\nassert", "x: int = yield\n",
    "def test_a():\n    for i in [1]:\n        pass\n   x = 1\n", "if 1:\n\tx = 1\n        x = 2\n", "x = 5 if 1 else\n", "08\n",
    "def test_a():\n    break\n", "def test_a():\n    x = 1\n    global x\n", "def f():\n    return [\ndef test_a(): pass\n",
)


def test_modules_have_the_verdicts_of_cpython(tmp_path):
    # before 3.11.4 a null byte was another exception
    alone = [text for text in ALONE if "\0" not in text or sys.version_info >= (3, 11, 4)]
    counts, _ = compare([*MODULES, *({"tests/test_a.py": text} for text in alone)], tmp_path)
    assert counts["Limit"] == counts["Unsupported"] == 0


# ---- what is outside


@pytest.mark.parametrize("line, named", (
    ("[i for i in range(3)]", "ListComp"), ("lambda: 1", "Lambda"), ("f'{1}'", "JoinedStr"), ("{1: 2}", "Dict"),
    ("{1}", "Set"), ("1.5", "float"), ("2j", "complex"), ("b'a'", "bytes"), ("2 ** -1", "float"), ("1 / 2", "Div"),
    ("1 & 2", "BitAnd"), ("1 << 9", "LShift"), ("+1", "UAdd"), ("~1", "Invert"), ("[1][0:1]", "Slice"),
    ("min(1, 2, key=abs)", "keyword argument"), ("min(*[1, 2])", "Starred"), ("sorted([1])", "name sorted"),
    ("print(1)", "name print"), ("__import__('os')", "name __import__"), ("eval('1')", "name eval"),
    ("open('a')", "name open"), ("__name__", "name __name__"), ("'a'.upper()", "Attribute"), ("(1).real", "Attribute"),
    ("test_it.__globals__", "Attribute"), ("abs.__self__", "Attribute"), ("5 is 5", "is"), ("'%d' % 5", "string formatting"),
    ("(a := 1)", "NamedExpr"), ("import os", "Import"), ("global a", "Global"), ("del a", "Delete"), ("yield", "Yield"),
    ("break_ = [1]\nbreak_[0] = 2", "assignment to Subscript"), ("test_it.a = 1", "assignment to Attribute"),
    ("try:\n    pass\nfinally:\n    pass", "Try"), ("with abs: pass", "With"), ("a: int = 1", "AnnAssign"),
    ("raise ValueError", "Raise"), ("raise", "Raise"), ("raise NotImplementedError from abs", "Raise"),
    ("def f(): pass", "FunctionDef"), ("class A: pass", "ClassDef"), ("while 1: break", "Break"),
    ("for i in [1]: continue", "Continue"), ("match 1:\n    case 1: pass", "Match"), ("a, *b = [1]", "Starred"),
    ("NotImplementedError = 1\nraise NotImplementedError", "Raise"), ("raise NotImplementedError(1 // 0)", "Raise"),
))
def test_a_construct_outside_the_subset_is_named(line, named):
    report = run_tests({"test_a.py": "def test_it():\n" + indent(line, "    ") + "\ndef test_other(): pass\n"})
    assert (report.passed, report.failed, report.message) == (1, 1, f"2 run, 1 failed: unsupported {named} in test_it")


@pytest.mark.parametrize("text, named", (
    ("import os", "import of os"), ("from math import pi", "import of math"), ("import a.b", "import of a.b"),
    ("from . import a", "kind of import"), ("from a import *", "kind of import"),
    ("from __future__ import annotations", "import of __future__"), ("if 1: pass", "If outside a function"),
    ("class A: pass", "ClassDef outside a function"), ("x = lambda: 1", "Lambda"), ("x = [i for i in 'a']", "ListComp"),
    ("@abs\ndef f(): pass", "decorator"), ("def f(a=1): pass", "kind of parameter"), ("def f(*a): pass", "kind of parameter"),
    ("def f(a, /): pass", "kind of parameter"), ("def f(*, a): pass", "kind of parameter"),
    ("def f(**a): pass", "kind of parameter"), ("def f(a: zz): pass", "annotation"),
    ("def f() -> list[int]: pass", "annotation"), ("async def f(): pass", "AsyncFunctionDef outside a function"),
    ("x = __name__", "name __name__"), ("from a import __name__", "name __name__"),
    ("import a\nx = a.__dict__", "name __dict__"),
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
    (str(2**256 - 1), str(2**256), "number too large"), ("int('9' * 77)", "int('9' * 78)", "number too large"),
    ("[0] * 1000", "[0] * 1001", "value too long"), ("1000 * 'a'", "1001 * 'a'", "value too long"),
    ("(0,) * 10 ** 3", "(0,) * 10 ** 60", "value too long"), ("'a' * -10 ** 9", "10 ** 60 * 'a'", "value too long"),
    ("'a' * 500 + 'a' * 500", "'a' * 500 + 'a' * 501", "value too long"),
    ("sum(range(9000))", "sum(range(10 ** 60))", "out of steps"),
    ("max(range(9000))", "max(range(10 ** 60, -1, -1))", "out of steps"),
    ("range(10 ** 60)", "len(range(10 ** 60))", "out of steps"),
    ("'a' in range(9000)", "'a' in range(10 ** 60)", "out of steps"),
    ("a = []\na += range(900)", "a = []\na += range(10 ** 60)", "out of steps"),
    ("a = []\na += range(1000)", "a = []\na += range(1001)", "value too long"),
    ("for i in range(900): pass", "for i in range(10 ** 60): pass", "out of steps"),
    ("n = 900\nwhile n: n -= 1", "while True: pass", "out of steps"),
    ("x = " + "-" * 190 + "1", "x = " + "-" * 210 + "1", "nested too deep"),
    ("x = " + "1 + " * 190 + "1", "x = " + "1 + " * 210 + "1", "nested too deep"),
    ("a = [0]\nfor i in range(8): a = [a, a]", "a = [0]\nfor i in range(40): a = [a, a]", "out of steps"),
    ("a = []\na += [a]\nassert 1", "a = []\na += [a]\nb = []\nb += [b]\na == b", "out of steps"),
))
def test_whatever_grows_has_a_limit(inside, beyond, what):
    if "a += [a]" not in inside:  # a list inside itself never counts as small
        assert said(inside) == "0 failed"
    assert said(beyond) == f"1 failed: {what} in test_it"


def test_a_list_that_grows_after_it_was_shared_is_charged_where_it_is_used():
    start = "a = []\nb = [a, a]\nc = [b, b]\nd = [c, c]\ne = [d, d]\nx = [e, e]\na += range(400)\n"
    assert said(start) == "0 failed"
    for line in ("x == [x]", "x in [x]", "x + [1]", "len(x)", "max(x)", "y, z = x", "[x]"):
        assert said(start + line) == "1 failed: out of steps in test_it", line


def test_recursion_ends_by_depth_and_not_by_the_stack_of_the_caller():
    function = "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
    files = {"test_a.py": f"{function}def test_a(): f(1000)\ndef test_b(): assert f(35) == 35\n"}
    expected = "2 run, 1 failed: nested too deep in test_a"

    def called_from(frames):
        return run_tests(files).message if frames == 0 else called_from(frames - 1)

    assert run_tests(files).message == called_from(300) == expected


def test_steps_are_counted_over_all_tests_and_end_together():
    files = {"test_a.py": "def test_a():\n    while 1: pass\ndef test_b(): pass\n", "test_b.py": "def test_c(): pass\n"}
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
    files = {"lib/red.py": text, "tests/test_a.py": "import red\ndef test_a(): pass\n"}
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
    "!def test_a():\n    while 1: pass", "!def test_a():\n    while 1: sum(range(1000))",
    "!def test_a():\n    x = 3\n    while 1: x = x * x", "!def test_a():\n    while 1: 7 ** 90 % 3 ** 80 // 3 ** 20",
    "!def test_a():\n    x = [0] * 900\n    while 1: max(x)",
    "!def test_a():\n    x = [[0] * 30] * 30\n    while 1: sum(x, [])",
    "!def test_a():\n    s = '" + "a" * 7000 + "'\n    while 1: max(s)",
    "!def test_a():\n    s = '" + "1" * 4000 + "'\n    while 1: s == int(s)",
    "!def f(n): return f(n - 1) + f(n - 1)\ndef test_a(): f(9)", "!def test_a():\n    a = []\n    while 1: a = [a]",
    "!def test_a():\n    '%1000000000d' % 5", "'{:999999999}'", "!def test_a():\n    a, b = range(10 ** 60)",
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
files = {"a.py": "def f(a): return a + 1\\nK = f(2)\\n", "test_a.py": "import a\\ndef test_a(): assert a.f(a.K) == 4\\n"}
run_tests({**files, "b.py": ""})
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event))
report = run_tests({**files, "test_b.py": "__import__('os')\\n", "test_c.py": "import os\\n", "test_d.py": "x = eval\\n"})
print(report.passed, report.failed, sorted(set(seen)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.stdout.split(" ", 2)[:2] == ["1", "3"], done.stderr
    assert done.stdout.split(" ", 2)[2] == "['compile']\n"
