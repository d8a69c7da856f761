"Lines of at most 120 columns: rooms that keep to them, and how many lines above are left in the others, which may not grow."
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "composer_replication"
COLUMNS = 120
LEFT = {  # lines above `COLUMNS` without nbdev's `__all__`; a room that is not named has none
    "cli": 195, "contrib": 253, "envs": 504, "experiments": 58, "hints": 43, "replay": 150, "report": 54, "rollout": 295,
    "sandbox": 34, "traces": 394, "training": 78}


def long_lines(text: str) -> list[str]:
    "Return the lines of a module that are too long."
    own = re.sub(r"^__all__ = \[.*?\]$", "", text, flags=re.M | re.S)
    return [line for line in own.splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()))
def test_a_room_has_no_more_long_lines_than_are_known(room):
    found = [line for path in (PACKAGE / room).rglob("*.py") for line in long_lines(path.read_text())]
    assert len(found) <= LEFT.get(room, 0), found[:3]


def test_a_line_is_long_from_121_columns_on_and_names_of_a_page_do_not_count():
    assert long_lines(f"__all__ = ['{'a' * 130}',\n           '{'b' * 130}']\n{'c' * 120}\n{'d' * 121}\n") == ["d" * 121]
