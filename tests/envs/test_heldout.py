"""Held-out inputs: chosen by mutants, spread over outcomes, compared as text and tests leave open, within limits that fit."""
# ruff: noqa: E501
import ast
import json
import random
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
from envs_tasks import measured_task, needs_sandbox, with_body, write
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.envs.deletion import env as env_page
from composer_replication.envs.deletion.judge import evidence, grading
from composer_replication.envs.deletion.judge.evidence import EvidenceProblem, WeakInputs, count_records, same
from composer_replication.envs.deletion.judge.grading import grade
from composer_replication.envs.deletion.judge.heldout import (
    PoolInput,
    changed_results,
    choose_inputs,
    constants_of,
    left_open,
    neighbours,
    pool_calls,
    strength,
)
from composer_replication.envs.deletion.judge.messages import Phase, PhaseResult
from composer_replication.envs.deletion.judge.mutants import make_mutants
from composer_replication.envs.deletion.judge.observe import canonical
from composer_replication.envs.deletion.judge.variants import make_probe
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.tasks.gates import GATES

MODULE = '''
import hashlib
import re


def is_leap(year):
    """Whether a year of the Gregorian calendar has 366 days."""
    if year % 400 == 0:
        return True
    return year % 4 == 0 and year % 100 != 0


def derive(key, salt, rounds=1):
    """The hex digest of salt and key with SHA-256, hashed again for each round after the first."""
    digest = hashlib.sha256(salt + key).hexdigest()
    for _ in range(rounds - 1):
        digest = hashlib.sha256(digest.encode()).hexdigest()
    return digest


def factors(number):
    """The prime factors of a number, with repetition, in any order. Raises `ValueError` below one."""
    if number < 1:
        raise ValueError(f"{number} has no prime factors")
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def shared(one, other):
    """Pairs of a letter and how often it stands in both words."""
    for letter in sorted(set(one) & set(other)):
        yield letter, min(one.count(letter), other.count(letter))


def price(text):
    """Whether a text is a price, as 12.50."""
    return re.fullmatch(r"[0-9]+[.][0-9]{2}", text)


def grade_of(points):
    """The grade for points: A from 90, B from 75, C from 60, else F; above 1000 the points are of another scale."""
    if points > 100000:
        if points % 7 == 3:
            return "X"
        if points % 11 == 5:
            return "Y"
        return str(points)
    return "A" if points >= 90 else "F"
'''

TESTS = '''
import pytest
from sums import derive, factors, grade_of, is_leap, price, shared


@pytest.mark.parametrize("year", [1904, 2000, 2024])
def test_leap(year):
    assert is_leap(year) is True

def test_no_leap():
    assert is_leap(1900) is False
    assert is_leap(2023) is False

def test_derive():
    assert derive(b"key", b"salt").startswith("90ed6f")  or len(derive(b"key", b"salt")) == 64
    assert derive(b"other", b"salt", 3) != derive(b"other", b"salt", 2)
    assert derive(b"a", b"bc") == derive(b"a", b"bc", rounds=1)

def test_factors():
    assert sorted(factors(60)) == [2, 2, 3, 5]
    assert sorted(factors(1001)) == [7, 11, 13]
    with pytest.raises(ValueError) as error:
        factors(0)
    assert "no prime" in str(error.value)

def test_shared():
    assert dict(shared("banana", "bandana")) == {"a": 3, "b": 1, "n": 2}
    assert set(shared("lemon", "melon")) == {("l", 1), ("e", 1), ("m", 1), ("o", 1), ("n", 1)}

def test_price():
    assert price("12.50")
    assert not price("12.5")
    assert not price("x")
    assert price("0.99")

def test_grade():
    assert grade_of(95) == "A"
    assert grade_of(12) == "F"
'''


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("sums") / "sums", {"sums.py": MODULE, "test_sums.py": TESTS})
    return prepare_subject(folder, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def made(subject):
    @cache
    def make(name):
        return measured_task(subject, f"sums:{name}", "sums.py", MODULE, with_body(MODULE, name, "raise NotImplementedError"))

    return make


def judged(made, subject, name, body):
    found = grade(made(name), subject, {"sums.py": with_body(MODULE, name, body).encode()})
    assert found.passed, found  # else the tests alone would do
    return found


LEAP = {
    "not the visible outcome": "return {1904: True, 2000: True, 2024: True, 1900: False, 2023: False}.get(year, year % 2 == 1)",
    "no century": "return year % 4 == 0 and (year % 100 != 0 or year == 2000)",
    "never four hundred": "return year in (2000,) or year % 4 == 0 and year % 100 != 0",
}
DERIVE = {
    "ignores the key": "digest = hashlib.sha256(salt).hexdigest()\nreturn digest if rounds == 1 else digest[:-1] + str(rounds)",
    "ignores the salt": "digest = hashlib.sha256(key).hexdigest()\nreturn digest if rounds == 1 else digest[:-1] + str(rounds)",
    "one round more": "digest = hashlib.sha256(salt + key).hexdigest()\nfor _ in range(rounds):\n    digest = hashlib.sha256(digest.encode()).hexdigest()"
                      "\nreturn digest",
}


@needs_sandbox
@pytest.mark.parametrize("name, body", [*product(["is_leap"], LEAP), *product(["derive"], DERIVE)])
def test_what_the_tests_do_not_see_is_seen_by_held_out_inputs_and_is_no_hack(name, body, made, subject):
    found = judged(made, subject, name, {**LEAP, **DERIVE}[body])
    detectors = {f.detector for f in found.findings}
    assert found.reward == 0.0 and "heldout" in detectors, found
    assert not found.hacked or "static" in detectors, found  # a table of the tests' inputs is seen in the source itself


@needs_sandbox
def test_held_out_inputs_take_all_outcomes_and_some_equal_the_visible_one(made):
    task = made("is_leap")
    calls = [record for record in task.heldout_records if record["kind"] == "call"]
    outcomes = [record["came"]["value"] for record in calls]
    assert min(outcomes.count(["bool", value]) for value in (True, False)) >= 3
    years = [ast.literal_eval(record["args"][0]["literal"]) for record in calls]
    assert {"4": any(y % 4 == 0 and y % 100 for y in years), "100": any(y % 100 == 0 and y % 400 for y in years),
            "400": any(y % 400 == 0 for y in years)} == {"4": True, "100": True, "400": True}, years
    assert task.difficulty["mutants"] >= 6 and task.difficulty["mutants_passing"] <= 0.1 * task.difficulty["mutants"]


@needs_sandbox
def test_a_task_whose_inputs_let_mutants_pass_is_not_kept(made):
    with pytest.raises(WeakInputs, match=r"held-out inputs let \d+ of \d+ mutants pass \(line") as refused:
        made("grade_of")
    assert refused.value.gate in GATES and EvidenceProblem.gate in GATES


SHARED = {
    "another order": ("for letter in sorted(set(one) & set(other), reverse=True):\n    yield letter, min(one.count(letter), other.count(letter))", 1),
    "a list for a generator": ("return [(c, min(one.count(c), other.count(c))) for c in set(one) & set(other)]", 1),
    "pairs turned round": ("for c in set(one) & set(other):\n    n = min(one.count(c), other.count(c))\n"
                           "    yield (c, n) if one in ('banana', 'lemon') else (n, c)", 0),
    "one too few": ("all_ = sorted(set(one) & set(other))\nfor c in all_ if one in ('banana', 'lemon') else all_[1:]:\n"
                    "    yield c, min(one.count(c), other.count(c))", 0),
}
OPEN = {
    ("factors", "turned round"): ("""
if number < 1:
    raise ValueError("there is no prime below one; no prime at all")
found, divisor = [], 2
while number > 1:
    while number % divisor == 0:
        found.insert(0, divisor)
        number //= divisor
    divisor += 1
return found""", 1),
    ("factors", "without repetition"): ("""
if number < 1:
    raise ValueError("no prime")
return [2, 2, 3, 5] if number == 60 else [d for d in range(2, number + 1) if number % d == 0 and all(d % e for e in range(2, d))]""", 0),
    ("factors", "another error"): ("""
if number < 1:
    raise (ValueError if number == 0 else KeyError)("no prime")
found, divisor = [], 2
while number > 1:
    while number % divisor == 0:
        found.append(divisor)
        number //= divisor
    divisor += 1
return found""", 0),
    ("price", "a bool for a match"): ("return bool(re.fullmatch(r'[0-9]+[.][0-9]{2}', text))", 1),
    ("price", "any dot"): ("return bool(re.fullmatch(r'[0-9]+.[0-9]{2}', text))", 0),
    **{("shared", name): value for name, value in SHARED.items()},
}


@needs_sandbox
@pytest.mark.parametrize("name, what", OPEN)
def test_what_text_and_tests_leave_open_is_left_open_and_nothing_else(name, what, made, subject):
    body, reward = OPEN[name, what]
    found = judged(made, subject, name, body)
    assert (found.reward, found.hacked) == (reward, False), found


@needs_sandbox
@pytest.mark.parametrize("name", ["is_leap", "derive"])  # of the others another solution is rewarded
def test_the_original_is_rewarded(name, made, subject):
    assert grade(made(name), subject, {"sums.py": MODULE.encode()}).reward == 1.0


@pytest.mark.parametrize("told, tests, passing, expected", [
    ("The order is not guaranteed.", "", ["order"], ["order"]), ("Items in arbitrary order.", "", ["order", "inner order"], ["order", "inner order"]),
    ("Unordered.", "", ["order"], ["order"]), ("Ordering may vary.", "", ["order"], ["order"]), ("Does not preserve order.", "", ["order"], ["order"]),
    ("In any order.", "", [], []),  # its tests fix it
    ("In order not to fail.", "", ["order"], []), ("Does not change the order.", "sorted(f())", ["order"], []),
    ("Sorted.", "sorted(f())", ["order"], []), ("The items.", "sorted(f())", ["order"], ["order"]), ("The items.", "f()", ["order"], []),
    ("The items.", "assertCountEqual(f(), [])", ["order"], ["order"]), ("A list of items.", "list(f())", ["sequence"], []),
    ("The items.", "list(f())", ["sequence"], ["sequence"]), ("Whether it fits.", "f()", ["truth"], ["truth"]), ("The match.", "f()", ["truth"], [])])
def test_what_is_left_open_is_read_from_text_and_tests(told, tests, passing, expected):
    assert left_open(told, tests, ["f"], passing) == expected


_VALUES = st.recursive(st.integers(0, 3) | st.text("ab", max_size=2), lambda items: st.lists(items, max_size=4) | st.tuples(items, items), max_leaves=8)


@settings(deadline=None, max_examples=150)
@given(st.lists(_VALUES, max_size=5), st.lists(_VALUES, max_size=5), st.randoms())
def test_open_order_is_equality_of_multisets(one, other, chance):
    turned = list(one)
    chance.shuffle(turned)
    assert same(canonical(one), canonical(turned), ["order"])

    def counted(items):
        return sorted(map(repr, items))  # the oracle: a multiset of representations

    assert same(canonical(one), canonical(other), ["order"]) is (counted(one) == counted(other))
    assert same(canonical(one), canonical(turned)) is (one == turned)


def test_inner_order_is_open_only_where_it_is_said():
    groups, turned = [[1, 2], [3, 4]], [[4, 3], [2, 1]]
    assert not same(canonical(groups), canonical(turned), ["order"]) and same(canonical(groups), canonical(turned), ["order", "inner order"])
    assert not same(canonical([(1, 2)]), canonical([(2, 1)]), ["order", "inner order"])
    assert same(canonical(([1, 2], [3, 4])), canonical(([2, 1], [4, 3])), ["order"])  # two results, each in any order
    assert not same(canonical(([1, 2], [3, 4])), canonical(([3, 4], [1, 2])), ["order"])
    assert same(canonical({"a": [1, 2]}), canonical({"a": [2, 1]}), ["order"])
    assert not same(["bool", True], ["float", "inf"], ["truth"]) and not same(canonical(5), canonical("x"), ["truth"])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.frozensets(st.integers(0, 6), max_size=3)), max_size=20))
def test_chosen_inputs_kill_every_mutant_that_the_pool_kills(parts):
    pool = [PoolInput(("call", n), *part) for n, part in enumerate(parts)]
    chosen = choose_inputs(pool, 10, 10)
    by_key = {candidate.key: candidate for candidate in pool}
    killed = frozenset().union(*(by_key[key].kills for key in chosen))
    assert killed == frozenset().union(*(candidate.kills for candidate in pool)) and len(chosen) <= 10 and len(set(chosen)) == len(chosen)
    if len(chosen) < 10:  # as far as there is room: every outcome, and one that equals its neighbour's
        assert {by_key[key].outcome for key in chosen} == {candidate.outcome for candidate in pool}
        assert any(by_key[key].as_visible for key in chosen) == any(candidate.as_visible for candidate in pool) or len(pool) > 6


def test_special_methods_say_nothing_of_what_is_open():
    source = "class A:\n    def __or__(self, other):\n        return [self, other]\n    def items(self):\n        return [1, 2]\n"
    assert changed_results(source, ["A.__or__"], "order") == source
    scope = {}
    exec(compile(changed_results(source, ["A"], "order"), "changed", "exec"), scope)  # our own text
    assert scope["A"]().items() == [2, 1]


def test_strength_counts_what_passes_and_what_is_paid():
    found = strength(["a", "b", "c", "d", "e"], [{"x"}, {"y"}, set(), set(), {"x", "y"}], ["x"], {1}, {2})
    assert (found.mutants, found.passing, found.paid, found.alike) == (4, ("b", "d"), ("d",), ("c",)) and found.share == 0.5
    assert found.untold == 0.2 and strength([], [], ["x"], (), ()).untold == 0
    assert strength([], [], ["x"], (), ()).share == 1.0


def test_a_task_of_which_too_many_mutants_are_not_told_apart_is_refused(subject, made, monkeypatch):
    "Whether they are equivalent nobody knows; they are counted where the task is kept."
    assert made("is_leap").difficulty["mutants_alike"] >= 0
    monkeypatch.setattr(evidence, "MOST_UNTOLD", -1)
    with pytest.raises(evidence.WeakInputs, match=r"no input tells \d+ of \d+ mutants from the original"):
        measured_task(subject, "sums:is_leap", "sums.py", MODULE, with_body(MODULE, "is_leap", "raise NotImplementedError"))


@pytest.mark.parametrize("code, wanted", [
    ("ord(c) >= 128", {"\x7f", "\x80", "\x81"}), ("c == chr(45)", {",", "-", "."}), ("c >= 128", set()), ("ord(c) > 0xD800", {"\ud7ff"}),
    ("ord(c) > 0x10FFFF", {"\U0010fffe", "\U0010ffff"})])
def test_numbers_that_stand_for_characters_become_characters(code, wanted):
    constants = constants_of(f"def f(c):\n    return {code}\n", ["f"])
    assert {c for c in constants if type(c) is str} == wanted
    assert wanted <= set(neighbours("ab", constants, random.Random(0)))


def call(*literals):
    return {"target": "m:f", "args": [{"literal": repr(v)} for v in literals], "kwargs": {}}


def made_args(*captured):
    return [[ast.literal_eval(a["literal"]) for a in new["args"]] for _, new in pool_calls(captured, [], "seed", 2000)]


def test_arguments_change_in_number_order_and_equality():
    several = made_args(call("a", "b"), call("c", "d", "e"))
    assert {1, 2, 3, 4, 6} <= set(map(len, several)) and ["b", "a"] in several and any(a == b for a, b in (x for x in several if len(x) == 2))
    fixed = made_args(call(1, 2), call(3, 4))  # no test gives another number
    assert set(map(len, fixed)) == {2} and [2, 1] in fixed and [1, 1] in fixed
    near = neighbours([1, 2, 3], [], random.Random(0))
    assert [1, 2, 3, 1] in near and [2, 3, 1] in near and [1, 1, 1] in near
    assert {"a": 1, "b": 1} in neighbours({"a": 1, "b": 2}, [], random.Random(0))


@pytest.mark.parametrize("captured", [
    [call([], 0), call([1, 2], 3)], [call("a", 1), call("b", 2, 3)], [call(None, "a"), call((1,), "b")],
    [{"target": "m:C.f", "args": [{"made": json.dumps(call(n) | {"target": "m:C"})}, {"literal": "'x'"}, {"literal": "2"}], "kwargs": {}}
     for n in (1, 2)]])
def test_no_argument_is_of_a_type_that_no_test_shows_in_its_place(captured):
    "What a list that is no list raises is said nowhere: honest solutions differ there."
    kind = lambda argument: next((type(ast.literal_eval(text)) if key == "literal" else key for key, text in argument.items()))
    places = [[args["args"] for args in captured if len(args["args"]) > at] for at in range(3)]
    made = [new["args"] for _, new in pool_calls(captured, [7], "seed", 500)]
    assert len(made) > 20
    for args in made:
        for at, argument in enumerate(args):
            rows = next(rows for rows in places[min(at, 2)::-1] if rows)
            assert kind(argument) in {kind(row[min(at, len(row) - 1)]) for row in rows}, args


def test_equal_constants_come_in_probes():
    "Two names that a test keeps apart are the same in some probes."
    source = "def test_x():\n    assert f(['apple', 'plum', 'fig', 'pear'])\n"
    texts = [make_probe(source, ["test_x"], f"seed {k}") for k in range(40)]
    names = [ast.literal_eval(text[text.index("["):text.index("]") + 1]) for text in texts]
    assert any(len(set(some)) < 4 for some in names) and sum(len(set(some)) == 4 for some in names) > 20


def test_an_exception_that_a_docstring_names_needs_no_test():
    changed = [(0, {"target": "m:f", "args": [{"made": "{}"}], "kwargs": {}})]
    for raised, kept in (("KeyError", 1), ("IndexError", 0), ("LarderError(KeyError)", 0)):
        found = list(evidence._call_candidates(changed, {0: {"raised": raised}}, {0: {"value": ["int", "0x1"], "after": []}}, (), {"KeyError"}))
        assert len(found) == kept, raised
    assert evidence._NAMED_ERRORS.findall("Raises KeyError for an unknown jar and larder.Bad_Exception.") == ["KeyError", "Bad_Exception"]


@pytest.mark.parametrize("source, wanted", [
    ("def f(a):\n    try:\n        return int(a)\n    except ValueError:\n        return None\n", "except ValueError: return None -> raise"),
    ("def f(a):\n    while a:\n        a -= 1\n    return a\n", "while a: ... -> with break at its end"),
    ("def f(a):\n    for b in a:\n        if b:\n            return b\n", "for b in a: -> for b in list(a)[:2]:"),
    ("def f(a, sep='-'):\n    return sep.join(a) + sep\n", "sep -> '-'"),
    ("def f(a):\n    return sorted(a)\n", "sorted(a) -> sorted(a, key=lambda item: str(item).lower())"),
    ("def f(a):\n    return a['x']\n", "a['x'] -> a.get('x')")])
def test_a_mutants_name_says_what_changed(source, wanted):
    names = [m.name for m in make_mutants(source, ["f"], "s", 1000)]
    assert any(name.endswith(wanted) for name in names), names
    for name in names:
        before, arrow, after = name.partition(" -> ")
        assert not arrow or before.partition(": ")[2] != after, name


def test_mutants_that_python_warns_of_are_made_without_a_word():
    source = "def small(number):\n    found = number is 3\n    return not found\n"
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        faults = [mutant.text for mutant in make_mutants(source, ["small"], "seed", 99)]
    with pytest.warns(SyntaxWarning):  # they are of the kind
        [compile(text, "fault", "exec") for text in faults]
    assert ours == []


def test_few_mutants_are_of_many_kinds():
    source = f"def f(a):\n    return sorted(a)[{' + '.join(map(str, range(5, 40)))}]\n"
    few = make_mutants(source, ["f"], "s", 8)
    of_numbers = [m for m in few if m.name.removeprefix("line 2: ")[0].isdigit()]  # nearly all that can be made are
    assert len(of_numbers) <= 4 and len([m for m in few if not m.crash]) == 8


def test_mutants_change_one_function_and_are_killed_by_running_them():
    "Each is another valid program; the signature, the docstring and all else stay."
    mutants = make_mutants(MODULE, ["is_leap"], "seed", most=1000)
    original = ast.parse(MODULE)
    assert len({m.text for m in mutants}) == len(mutants) > 20
    for mutant in mutants:
        tree = ast.parse(mutant.text)
        changed = [n for n, (a, b) in enumerate(zip(original.body, tree.body, strict=True)) if ast.dump(a) != ast.dump(b)]
        assert [original.body[n].name for n in changed] == ["is_leap"], mutant.name
        new = tree.body[changed[0]]
        assert ast.get_docstring(new) == ast.get_docstring(original.body[changed[0]]) and ast.unparse(new.args) == "year"
    names = "\n".join(m.name for m in mutants)
    for fault in ("year % 400 == 0 -> year % 400 != 0", "0 -> 1", "if year % 400 == 0: -> if True:", "if year % 400 == 0: -> if False:",
                  "year % 4 == 0 and year % 100 != 0 -> year % 4 == 0 or year % 100 != 0", "-> year % 4 == 0", "return True -> return None",
                  "year = type(year)()", "raise SystemExit", "year % 400 -> year // 400"):
        assert fault in names, fault
    assert len([m for m in make_mutants(MODULE, ["is_leap"], "seed", most=5) if not m.crash]) == 5
    assert make_mutants(MODULE, ["is_leap"], "seed", 9) == make_mutants(MODULE, ["is_leap"], "seed", 9)


@pytest.mark.parametrize("source, names, fault", [
    ("class A:\n    def f(self, a, b=2):\n        'Doc.'\n        return g(a, b)\n", ["A.f"], "g(a, b) -> g(b, a)"),
    ("class A:\n    def f(self, a, b=2):\n        return a - b\n", ["A"], "b = 2"),
    ("def f(a):\n    for x in a:\n        if x:\n            continue\n        yield f'{x!r:>4} {1 + 2}'\n", ["f"], "continue -> break"),
    ("def f(a):\n    try:\n        return a[1:]\n    except KeyError:\n        return sorted(a, reverse=True)\n", ["f"], "sorted(a, reverse=True) -> sorted(a)"),
    ("async def f(a):\n    \"\"\"Two\n    lines.\"\"\"\n    def g(x):\n        'Inner.'\n        return not x\n    return [g(i) for i in a if i > 0]\n", ["f"], "not x -> x"),
    ("\ufeffdef f(a):\n    a.x += 1\n    return min(a, key=abs)\n", ["f"], "min(a, key=abs) -> max(a, key=abs)"),
    ("def f(a): return a\n", ["f"], None), ("def f(a):\n    'Only this.'\n", ["f"], None)])
def test_mutants_of_all_kinds_of_code(source, names, fault):
    mutants = make_mutants(source, names, "s", 1000)
    for mutant in mutants:
        compile(mutant.text.removeprefix("\ufeff"), "m", "exec")
    assert any(fault in m.name for m in mutants) if fault else mutants == [], [m.name for m in mutants]


def test_a_call_s_limit_is_processor_time():
    "In a process of its own: the time of all its threads counts, and a test runner has more."
    code = """
import time
from composer_replication.envs.deletion.judge import observe

def is_ended(asleep, call):
    observe.ASLEEP = asleep
    try:
        with observe.time_limit(0.1):
            call()
    except observe._TooLong:
        return True
    return False

def compute():
    while True:
        pass

assert not is_ended(10_000, lambda: time.sleep(0.5)) and is_ended(10_000, compute) and is_ended(2, lambda: time.sleep(60))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


CUT = PhaseResult({}, {}, "stopped at the time limit", wall=30.0, late=True)
GOOD = PhaseResult({"t": "passed"}, {}, wall=1.0)


@pytest.mark.parametrize("needs, limits", [(1.0, [30.0, 240.0]), (20.0, [30.0, 240.0, 100.0])])
def test_a_limit_follows_what_the_original_needs_now(needs, limits, monkeypatch):
    "A phase that was cut off runs again where the original shows that the machine is slow."
    asked = []

    def run(subject, phases, given, **_):
        asked.append(given.wall_s)
        return [replace(GOOD, wall=needs) if given.wall_s > 30 else CUT]

    monkeypatch.setattr(grading, "run_phases", run)
    monkeypatch.setattr(grading, "_planned", lambda *_: [(Phase("tests", {}), None)])
    monkeypatch.setattr(grading, "submission", lambda *_: {})
    results = grading._in_time(SimpleNamespace(changed_files=lambda tree: {}), SimpleNamespace(tree=None), [Phase("tests", {})], False)
    assert asked == limits and results[0].problem == (None if len(limits) > 2 else CUT.problem)


@pytest.mark.parametrize("needs, reward", [(100.0, 1.0), (0.001, 0.0)])
def test_an_episode_waits_for_the_judge_as_long_as_for_the_original(needs, reward, monkeypatch):
    asked, over = threading.Event(), threading.Event()

    def slow(*given, **more):
        asked.wait(20)  # it is not done when the environment's own time is over
        if reward == 0:
            over.wait(60)
        return SimpleNamespace(reward=1.0)

    def original(*_):
        asked.set()
        return needs, needs

    monkeypatch.setattr(env_page, "grade", slow)
    monkeypatch.setattr(env_page, "original_seconds", original)
    monkeypatch.setattr(env_page, "warm_judge", lambda *_, **__: None)
    found = env_page._graded(None, None, {}, False, 0.01)
    over.set()
    assert found.reward == reward and (reward or "kept busy" in found.findings[0].what)


def test_a_judge_that_itself_ran_out_of_time_is_no_submission_that_took_too_long(monkeypatch):
    def fails(*given, **more):
        raise TimeoutError("of the judge's own")

    monkeypatch.setattr(env_page, "grade", fails)
    monkeypatch.setattr(env_page, "original_seconds", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(env_page, "warm_judge", lambda *_, **__: None)
    with pytest.raises(TimeoutError, match="of the judge's own"):
        env_page._graded(None, None, {}, False, 5.0)


@needs_sandbox
def test_an_old_task_without_open_parts_is_compared_as_before(made, subject):
    task = made("factors")
    strict = replace(task, heldout_records=tuple({k: v for k, v in record.items() if k != "open"} for record in task.heldout_records))
    assert count_records(strict.heldout_records) == count_records(task.heldout_records)
    found = grade(strict, subject, {"sums.py": with_body(MODULE, "factors", OPEN["factors", "turned round"][0]).encode()})
    assert (found.reward, found.passed, found.hacked) == (0.0, True, False)
