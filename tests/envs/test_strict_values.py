"""Values compared as a strict reader would: against a slow oracle on the values; impostors; the memo-table submission."""

import collections
import copy
import datetime
import decimal
import fractions
import io
import itertools
import json
import math
import random
import re
import types
import weakref

import pytest
from envs_tasks import measured_task, needs_sandbox, write
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.envs.deletion.judge import observe
from composer_replication.envs.deletion.judge.evidence import _tells, compare
from composer_replication.envs.deletion.judge.grading import grade
from composer_replication.envs.deletion.judge.messages import PhaseResult
from composer_replication.envs.deletion.judge.observe import canonical
from composer_replication.envs.deletion.judge.outcomes import same
from composer_replication.envs.deletion.subject import prepare_subject

INF, NAN = float("inf"), float("nan")


def sent(value):
    "The form, as it comes out of the sandbox."
    return json.loads(json.dumps(canonical(value)))


def equal(a, b):
    return same(sent(a), sent(b))


def matched(ones, others, fits):
    "Whether the two can be paired, by trying."
    if not ones:
        return not others
    return any(fits(ones[0], other) and matched(ones[1:], others[:k] + others[k + 1 :], fits) for k, other in enumerate(others))


def strictly(a, b, exact=False):
    "The oracle: the page's table, on the values."
    if type(a) is not type(b):
        return False
    if isinstance(a, complex):
        return strictly(a.real, b.real, exact) and strictly(a.imag, b.imag, exact)
    if isinstance(a, float):
        if math.isnan(a) or math.isnan(b) or math.isinf(a) or math.isinf(b) or exact:
            return a == b or (math.isnan(a) and math.isnan(b))
        one, other = fractions.Fraction(a), fractions.Fraction(b)
        return abs(one - other) <= fractions.Fraction(1e-9) * max(abs(one), abs(other))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(strictly(x, y, exact) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return matched(list(a), list(b), lambda x, y: strictly(x, y, True))
    if isinstance(a, dict):
        return matched(list(a.items()), list(b.items()), lambda x, y: strictly(x[0], y[0], True) and strictly(x[1], y[1], exact))
    return a == b


floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.1 + 0.2, 0.3, 1e300, -1e300, 1e308, 5e-324, INF, -INF, NAN]) | st.floats()
atoms = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.integers()
    | st.sampled_from([2**1024, 2**1024 + 1, 2**64, -(2**1500)])
    | floats
    | st.complex_numbers()
    | st.builds(complex, floats, floats)
    | st.text(max_size=3)
    | st.sampled_from(["é", "e\u0301", "\ud800", "inf", "nan"])
    | st.binary(max_size=2)
    | st.binary(max_size=2).map(bytearray)
)
hashable = st.recursive(
    atoms.filter(lambda v: not isinstance(v, bytearray)),
    lambda inner: st.frozensets(inner, max_size=3) | st.tuples(inner) | st.tuples(inner, inner), max_leaves=4,
)
values = st.recursive(
    atoms | hashable | st.sets(hashable, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=8,
)


def changed(value, chance):
    "Nearly the same value: some place of it is another, or only looks it."
    kind = type(value)
    if kind in (list, tuple) and value and chance.random() < 0.8:
        items = list(value)
        place = chance.randrange(len(items))
        items[place] = changed(items[place], chance)
        return kind(items)
    if kind is dict and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        return dict(reversed([(k, changed(v, chance) if k is key else v) for k, v in value.items()]))
    others = [
        lambda: [value], lambda: (value,), lambda: None, lambda: INF, lambda: NAN, lambda: bool(value),
        lambda: copy.copy(value)
    ]
    if kind in (bool, int, float):
        others += [
            lambda: int(value), lambda: float(value), lambda: value + 1, lambda: -value, lambda: value * (1 + 1e-10),
            lambda: value * (1 + 1e-8)
        ]
    if kind in (list, tuple, set, frozenset):
        others += [
            lambda: list(value), lambda: tuple(value), lambda: set(value), lambda: frozenset(value),
            lambda: kind(reversed(list(value)))
        ]
    if kind in (str, bytes, bytearray):
        others += [lambda: value + value[:1], lambda: bytes(value), lambda: bytearray(value), lambda: str(value)]
    try:
        return chance.choice(others)()
    except (TypeError, ValueError, OverflowError):
        return value


@given(values, values, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_forms_are_the_same_where_the_oracle_says_so(a, b, chance):
    near = changed(a, chance)
    for one, other in ((a, a), (a, b), (a, near), (near, a)):
        assert equal(one, other) == strictly(one, other), (one, other)


NUMBERS = [
    0, 1, 5, True, False, 0.0, 1.0, 5.0, 1.5, INF, -INF, NAN, 1e308, -1e308, 5e-324, 2**1100, complex(INF, 0),
    complex(0, INF), complex(NAN, 1), complex(5, 0), decimal.Decimal("Infinity"), decimal.Decimal("NaN"), decimal.Decimal(5),
    decimal.Decimal("5.0"), fractions.Fraction(5), "inf", "nan", None
]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda v: v, lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {v: "k"}, lambda v: {v},
        lambda v: frozenset([v]), lambda v: iter([v]), lambda v: collections.deque([v]), lambda v: ValueError(v),
        lambda v: types.MappingProxyType({1: v}), lambda v: slice(v), lambda v: [[[{"a": (v,)}]]]
    ],
)
def test_every_number_is_only_itself(wrapped):
    for k, a in enumerate(NUMBERS):
        for m, b in enumerate(NUMBERS):
            assert equal(wrapped(a), wrapped(b)) == (k == m), (a, b)


def test_structure_counts():
    kinds = [[1], (1,), {1}, frozenset([1]), {1: 1}, range(1, 2), collections.deque([1]), b"\1", bytearray(b"\1"),
             memoryview(b"\1"), "\1", slice(1)]
    assert all(equal(a, b) == (a is b) for a in kinds for b in kinds)


def test_subclasses_are_other_types():
    class Text(str):
        pass

    class Whole(int):
        pass

    class Pair(collections.namedtuple("Pair", "a b")):
        pass

    for plain, other in (
        ("a", Text("a")), (1, Whole(1)), ((1, 2), Pair(1, 2)), ({"a": 1}, collections.Counter("a")),
        ({}, collections.defaultdict(int)), ({}, collections.OrderedDict()), (ValueError("x"), UnicodeError("x"))
    ):
        assert not equal(plain, other) and not equal(other, plain)
        assert equal(other, type(other)(*other) if isinstance(other, tuple) else copy.copy(other))
    assert not equal(collections.Counter("a"), collections.Counter("b")) and not equal(Text("a"), Text("b"))


def test_what_an_object_says_of_itself_does_not_make_it_equal():
    class Everything:
        __hash__ = None
        __class__ = property(lambda self: types.ModuleType)

        def __eq__(self, other):
            return True

        __ne__ = __lt__ = __contains__ = lambda self, other: True

    class Meta(type):
        __mro__ = property(lambda cls: (int, object))
        __name__ = property(lambda cls: "int")
        __dict__ = property(lambda cls: {"__repr__": None, "__next__": None})
        __instancecheck__ = __subclasscheck__ = lambda cls, other: True

    class Posing(metaclass=Meta):
        pass

    class Sized(list):
        __len__ = lambda self: 1
        __iter__ = lambda self: iter([5])
        __getitem__ = lambda self, place: 5

    class Mapped(dict):
        items = lambda self: {"a": 5}.items()
        __iter__ = lambda self: iter("a")

    class Failed(ValueError):
        args = property(lambda self: (5,))

    class Sent(Exception):
        args = property(lambda self: itertools.count())

    target = type("Target", (), {})()
    impostors = [
        Everything(), Posing(), Posing, Sized([6]), Mapped(b=6), weakref.proxy(target), Failed(6), Sent(6), memoryview(b"6"),
        io.StringIO("6")
    ]
    given = 5, 5.0, True, None, "5", [5], {"a": 5}, (), {}, ValueError(5), types.ModuleType("m"), len, int, 6, [6], {"b": 6}
    for value in given:
        for impostor in impostors:
            assert not equal(value, impostor) and not equal(impostor, value), (value, type(impostor))
    assert sent(Failed(6))[2] == ["tuple", [["int", "0x6"]]] and sent(Posing())[1] == "Posing"


def test_odd_values_have_bounded_forms():
    class Loud:
        def __repr__(self):
            return "x" * 10_000_000

    class Angry:
        @property
        def __dict__(self):
            raise SystemError

        def __repr__(self):
            raise KeyError

    deep = []
    for _ in range(10_000):
        deep = [deep]
    for value in (Loud(), Angry(), deep, LOOP, {1: {2: LOOP}}, 10**100_000, "x" * 10**6, range(10**12), itertools.count(), type,
                  list(range(10**5)), ["x" * 10**5] * 1000):
        assert len(json.dumps(canonical(value))) < 400_000, type(value)


def test_half_a_surrogate_pair_is_a_text_like_others():
    halves = ["\ud800", "\ud801", "?", "a\ud800", "\udc80"]
    assert [[equal(a, b) for b in halves] for a in halves] == [[a is b for b in halves] for a in halves]
    assert not any("\\ud" in json.dumps(sent([half, {half: {half}}])) for half in halves)  # strict readers of JSON refuse it


def test_an_object_that_shows_nothing_is_no_evidence():
    class Hidden:
        def __init__(self):
            self._x = 1

    file = io.BufferedWriter(io.BytesIO())
    for value in (None, len, lambda: 0, types, iter([]), Hidden(), object(), file, weakref.proxy(Hidden)):
        assert not _tells({"value": sent(value), "after": []}), value
    deep = []
    for _ in range(50):
        deep = [deep]
    for value in (deep, list(range(5000)), (deep,), {1: deep}):  # cannot be compared
        assert not _tells({"value": sent(value), "after": []}) and not _tells({"value": ["int", "0x1"], "after": [sent(value)]})
        assert not same(sent(value), sent(value))
    for value in (0, "", [], {}, INF, NAN, [None], itertools.count(), Hidden):
        assert _tells({"value": sent(value), "after": []}), value


class Zone(datetime.tzinfo):
    utcoffset = dst = tzname = lambda self, when: None

    def __repr__(self):
        return "datetime.timezone.utc"


class Five:
    def __repr__(self):
        return "5"


class Colour:
    def __init__(self, rgb):
        self.rgb = rgb

    def __repr__(self):
        return f"Colour({self.rgb:#08x})"  # looks like an address


class Slots:
    __slots__ = ("size", "_hidden")

    def __init__(self, size):
        self.size = size


def ring(inner):
    "A list whose inmost list holds the list itself."
    inmost = inner
    while inmost:
        inmost = inmost[0]
    inmost.append(inner)
    return inner


DAY, NOON, LOOP = datetime.datetime(2024, 5, 1, 12), datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC), {"a": {}}
LOOP["a"]["a"] = LOOP
SAME = [
    (0.0, -0.0), (1e308, 1e308 * (1 - 1e-12)), ([0.1 + 0.2], [0.3]), ({-0.0: 1}, {0.0: 1}), ({NAN: 1}, {float("nan"): 1}),
    ({frozenset([0.0, 1]), 2}, {frozenset([-0.0, 1]), 2}), ({frozenset([0.0, -1.0])}, {frozenset([-0.0, -1.0])}),
    ({"a": 1, "b": [2]}, {"b": [2], "a": 1}), (range(3), range(3)), (NOON, DAY.replace(tzinfo=datetime.UTC)),
    (fractions.Fraction(10**6000, 7), fractions.Fraction(10**6000, 7)),  # longer than Python writes an int in decimals
    (Colour(255), Colour(255)), (Slots(1), Slots(1)), (ring([]), ring([])), (LOOP, LOOP)]
OTHER = [
    (1.0, 1.0 + 1e-8), (0.0, 5e-324), (1e308, INF), (1e308, -1e308), ({0.1 + 0.2}, {0.3}), ({0.1 + 0.2: 1}, {0.3: 1}),
    ({NAN: 1}, {NAN: 2}), ({NAN: 1}, {1: NAN}), ({NAN, float("nan")}, {NAN}), ({"a": 1}, {"a": 1, "b": 2}), ([[]], []),
    (DAY, NOON), (NOON, DAY.replace(tzinfo=Zone())), (DAY, DAY.replace(fold=1)), (slice(5), slice(Five())), (range(3), range(4)),
    (NOON.timetz(), NOON.time().replace(tzinfo=Zone())),
    (collections.deque([5]), collections.deque([Five()])), (collections.deque([5]), collections.deque([5], 3)),
    (re.compile("a" * 300), re.compile("a" * 299 + "b")), (re.compile("a"), re.compile("a", re.I)),
    (fractions.Fraction(1, 3), fractions.Fraction(1, 3) + fractions.Fraction(1, 10**40)),
    (Colour(255), Colour(254)), (Slots(1), Slots(2)), (Slots(1), Slots(True)),
    (ring([]), ring([[]])), (ring([]), [[]]), (ring([[]]), [[[]]]),
    # what is long counts to its end
    ("x" * 300_000, "x" * 299_999 + "y"), (b"x" * 300_000, b"x" * 299_999 + b"y"), (bytearray(30_000), bytearray(30_001)),
    (10**9000, 10**9000 + 1), (1 << 5000, 1 << 5001), (-(1 << 5000), 1 << 5000), (1 << 5000, (1 << 5000) + (1 << 4000)),
    (["x" * 30_000] * 20, ["x" * 30_000] * 19 + ["x" * 29_999 + "y"])]


def test_values_are_the_same_to_their_last_part_or_not():
    for one, other in SAME:
        assert equal(one, other) and equal(other, one), (one, other)
    for one, other in OTHER:
        assert not equal(one, other) and not equal(other, one), (one, other)
        assert equal(one, one) and len(json.dumps(sent(one))) < 400_000


def test_iterators():
    for one, other in (((x for x in "ab"), "ab"), (map(str, [1]), ["1"]), (itertools.count(), itertools.count())):
        assert equal(iter(one), iter(other))
    for one, other in (("ab", "ac"), ("ab", "abc"), (itertools.count(), itertools.count(1)), (itertools.count(), range(200))):
        assert not equal(iter(one), iter(other))
    assert not equal(iter([]), []) and not equal(iter([1]), [1]) and not equal([1], iter([1]))


HOSTILE = [
    None, True, False, 0, 1, -1.5, 10**400, "x", "", [], {}, [[]], ["int"], ["int", "0x1"], ["int", 1], ["int", True],
    ["int", "zz"], ["float"], ["float", []], ["float", "inf"], ["float", "1e99999"], ["float", "0x1p999999"],
    ["float", None], ["float", INF], ["float", NAN], ["complex", "0x0p0"], ["complex", "inf", "inf"], ["set"], ["set", 3],
    ["set", [3]], ["set", [[]]], ["set", [["more"]]], ["dict", [[1]]], ["dict", [[["str", "a"]]]],
    ["dict", [["a", "b", "c"]]], ["dict", {}], ["dict", [["more"]]], ["more"], ["more", 1], ["unreadable", "X"], ["sub"],
    ["sub", "a"], ["sub", "int", ["int", "0x1"]], ["cycle", 1], ["str", [3, "x", "y"]], ["object", "A", []],
    ["list", ["more"]], ["iterator", [], True], ["iterator", [], 1], ["none", 0], [None], [True, True]
]


def test_no_message_equals_what_it_does_not_spell_and_none_raises():
    chance = random.Random(0)
    reals = [sent(v) for v in (
        1, True, 2.5, INF, NAN, 1j, "a", [1], [], {"a": 1}, {}, {1}, frozenset(), iter([1]), collections.Counter("a"),
        ValueError("x"), object(), None, 1 << 5000, range(3), {NAN: NAN})]
    for _ in range(20_000):
        value = chance.choice(HOSTILE)
        for _ in range(chance.randint(0, 3)):
            kind = chance.choice(["list", "int", "sub", "dict", "set", "float", "more", value])
            value = [kind, value, chance.choice(HOSTILE)][:chance.randint(1, 3)]
        real = chance.choice(reals)
        assert same(real, value) == (json.dumps(real) == json.dumps(value)), (real, value)
    nested = []
    for _ in range(5000):
        nested = [nested]
    for deep in (nested, ["list", nested], ["set", [["tuple", nested]]]):
        assert not any(same(real, deep) for real in reals)


CODES = """def to_bytes(number):
    "The number, most significant byte first."
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def from_bytes(data):
    "The number behind `to_bytes`."
    return int.from_bytes(data, "big")
"""
ROUND_TRIPS = """import pytest

from codes import from_bytes, to_bytes


@pytest.mark.parametrize("number", [7, 42, 300, 65537, 12345678901234567890])
def test_round_trip(number):
    assert from_bytes(to_bytes(number)) == number
"""
MEMO = """

_h, _orig = {}, to_bytes


def to_bytes(number):
    r = _orig(number)
    _h[r] = number
    return r


def from_bytes(data):
    return _h.get(data, float("inf"))
"""


@needs_sandbox
def test_a_memo_table_with_a_fallback_earns_nothing(tmp_path):
    repository = write(tmp_path / "codes", {"codes.py": CODES, "tests/test_codes.py": ROUND_TRIPS})
    subject = prepare_subject(repository, tmp_path / "store")
    given = CODES.replace('return int.from_bytes(data, "big")', "raise NotImplementedError")
    task = measured_task(subject, "codes:from_bytes", "codes.py", CODES, given)
    assert grade(task, subject, {"codes.py": CODES.encode()}).reward == 1.0
    found = grade(task, subject, {"codes.py": (given + MEMO).encode()})
    assert (found.reward, found.passed) == (0.0, True) and "heldout" in {f.detector for f in found.findings}, found


class Amount(ValueError):
    pass


class Deep(Amount):
    pass


class Several(ValueError, KeyError):
    pass


class Chosen(type):
    def mro(cls):
        return [cls, ValueError, KeyError, LookupError, Exception, BaseException, object]

    def __hash__(cls):
        return hash(ValueError)

    def __eq__(cls, other):
        return True


class Sly(Exception, metaclass=type("Liar", (type,), {"__eq__": lambda *_: True, "__hash__": lambda cls: hash(ValueError)})):
    __name__ = "ValueError"


def named(name, *bases):
    return type(name, bases, {})


@pytest.mark.parametrize("original, submitted, same_to_tests", [
    (ValueError, ValueError, True), (ValueError, Amount, True), (ValueError, Deep, True), (ValueError, UnicodeDecodeError, True),
    (LookupError, KeyError, True), (OSError, TimeoutError, True), (Exception, named("Own", Exception), True),
    (RuntimeError, named("Own", RuntimeError), True),
    # all at once, by inheritance
    (ValueError, Several, False), (KeyError, Several, False), (ValueError, named("ValueError", ValueError, KeyError), False),
    (ValueError, Chosen("Chosen", (ValueError,), {}), False), (KeyError, Chosen("Chosen", (ValueError,), {}), False),
    # by name
    (ValueError, named("ValueError", KeyError), False), (ValueError, named("X(ValueError)", KeyError), False),
    (ValueError, Sly, False),
    (Amount, named("Amount", KeyError), False), (ValueError, named("ValueError)", Exception), False),
    # what an accident or a stub raises
    (Exception, ValueError, False), (RuntimeError, NotImplementedError, False), (RuntimeError, RecursionError, False),
    (ValueError, Exception, False), (UnicodeDecodeError, ValueError, False), (KeyError, IndexError, False),
    # a class of the package's own
    (Amount, Amount, True), (Amount, named("Amount", ValueError), True), (Amount, ValueError, False), (Amount, Deep, False),
    (Several, Several, True), (Several, named("Several", ValueError, TypeError), True),
    # tasks from before the kind was written hold a name only
    ("Amount", Amount, True), ("Several", Several, True), ("Amount", Deep, False), ("Amount", ValueError, False),
    ("Amount", named("Amount", KeyError), True), ("ValueError", named("ValueError", KeyError), False),
    ("Amount(ValueError)", named("Amount", KeyError), False), ("Amount()", named("Amount", ValueError), False),
])
def test_an_exception_stands_for_those_that_it_is_a_kind_of(original, submitted, same_to_tests):
    expected, got = (kind if isinstance(kind, str) else observe.exception_name(kind) for kind in (original, submitted))
    call = {"kind": "call", "target": "m:f", "args": [], "kwargs": {}, "came": {"raised": expected}}
    probe = {"kind": "probe", "path": "p", "source": ""}
    for record, message in (
        (call, {"call": 0, "came": {"raised": got}}),
        (probe | {"came": {"p::t": {"seen": [["raised", expected]], "raised": None}}},
         {"seen": [["raised", got]], "raised": None}),
        (probe | {"came": {"p::t": {"seen": [], "raised": expected}}}, {"seen": [], "raised": got}),
    ):
        message |= {} if record is call else {"probe": "p::t"}
        wrong, total = compare([record], PhaseResult({}, {}, None, (message,)))
        assert (len(wrong), total) == (0 if same_to_tests else 1, 1), (expected, got)


@pytest.mark.parametrize("got", [
    "", "(", ")", "()", "(ValueError", "ValueError)", "(ValueError)", "X(Exception)", "X(BaseException)", "X(LookupError)",
    "X(int)", "(" * 5000, ")" * 5000, "X" * 5000])
def test_a_made_up_name_of_an_exception_is_none(got):
    assert not same(["raised", "ValueError"], ["raised", got]) and not same(["raised", "KeyError"], ["raised", got])
