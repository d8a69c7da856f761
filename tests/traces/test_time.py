"""The time that reading one output costs: it grows with its length, not with the square."""

import importlib
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication import traces
from composer_replication.traces.exit_status import exit_status
from composer_replication.traces.failure import failure_lines
from composer_replication.traces.wrapper import unwrapped

SOURCE = {path: path.read_text(encoding="utf-8") for path in Path(traces.__path__[0]).rglob("*.py")}
UNITS = " ", "\n", "<", "[", "'", "7", "a"
BOUNDED = {"_COUNT", "FAILURE_MARKS", "VARIES", "DECLINED", "_HEADER", "_SHOWN"}  # see the first characters of a line only


def patterns(value) -> Iterator[re.Pattern]:
    "The compiled patterns of a module's value, also within tables and records."
    if isinstance(value, re.Pattern):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    inner = inner or (getattr(value, "__dataclass_fields__", None) and not isinstance(value, type) and vars(value).values()) or ()
    for each in inner:
        yield from patterns(each)


def ways() -> Iterator[tuple[str, re.Pattern, str]]:
    "Each pattern of the room with its name, and how it is used: searched, unless it is only ever matched at a start."
    seen = set()
    for found in pkgutil.walk_packages(traces.__path__, traces.__name__ + "."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            source = SOURCE[Path(module.__file__)] if name.startswith("_") else "\n".join(SOURCE.values())
            for pattern in set(patterns(value)) - seen if name not in BOUNDED else ():
                used = set(re.findall(rf"\b{re.escape(name)}\.(match|fullmatch|search|sub|finditer|findall|split)\b", source))
                way = "match" if used and used <= {"match", "fullmatch"} else "search"
                seen.add(pattern)
                yield f"{found.name}.{name}", pattern, way


def seconds(call, text) -> float:
    "Of the processor, the least of three."
    def once():
        start = time.process_time()
        call(text)
        return time.process_time() - start
    return min(once() for _ in range(3))


def grows_as_a_square(call, unit, size=10_000) -> bool:
    short, long = (f"x{unit * (n // len(unit))}x" for n in (size, 2 * size))
    return seconds(call, long) > 3 * max(seconds(call, short), 0.01)


@pytest.mark.parametrize("unit", UNITS)
def test_no_pattern_takes_the_square_of_an_outputs_length(unit):
    def call(pattern, way):
        convert = str.encode if isinstance(pattern.pattern, bytes) else str
        return lambda text: getattr(pattern, way)(convert(text if way == "search" else text[1:]))  # an x ends a match at once

    assert [name for name, pattern, way in ways() if grows_as_a_square(call(pattern, way), unit)] == []


@pytest.mark.parametrize("unit", [*UNITS, "$\n", "[x]\n", "pid: 1\n", "[Python Interpreter: x]", "</output>"])
def test_an_output_is_unwrapped_in_the_time_of_its_length(unit):
    assert not grows_as_a_square(lambda text: exit_status(unwrapped(text)), unit)
    assert not grows_as_a_square(lambda text: exit_status(unwrapped("exit code: 1\n" + text[:-1])), unit)


@pytest.mark.parametrize("begins", ["", 'File "', 'File "a.py", line 7', 'File "a.py", line 7, in f'])
@pytest.mark.parametrize("unit", [*UNITS, ", in ", '", line 7'])
def test_a_traceback_is_read_in_the_time_of_its_longest_frame(unit, begins):
    def lines(text):
        return ["Traceback (most recent call last):", "  " + begins + text[1:], "KeyError: 1"]

    assert not grows_as_a_square(lambda text: failure_lines(lines(text)), unit)
