"""Every notebook of nbs/ runs, beside the other tests, and none lets a reader go long without a value."""
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 100  # exported lines without a value shown
SPINE = 60  # the same, on the pages that a newcomer reads first
READ_FIRST = (
    "core/02_trace", "core/12_hint", "traces/09_error_sites", "hints/03_templates", "tree/02_template", "tree/01_chat",
    "tree/05_build", "tree/07_pack", "tree/13_forward", "losses/00_divergences", "losses/07_channels", "losses/08_compose",
    "training/21_step")


def lines_without_value(cells: list[dict]) -> int:
    "Return the most exported lines that follow each other on a page before a cell shows something."
    most = run = 0
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        if "#| export" in source:
            run += sum(bool(line.strip()) and not line.startswith("#|") for line in source.splitlines())
            most = max(most, run)
        elif cell["outputs"] and "#| hide" not in source:
            run = 0
    return most


def test_every_notebook_runs(notebooks):
    pass


def test_no_page_goes_long_without_a_value():
    found = {path.relative_to(ROOT / "nbs").with_suffix("").as_posix(): lines_without_value(json.loads(path.read_text())["cells"])
             for path in ROOT.glob("nbs/**/*.ipynb")}
    assert set(READ_FIRST) <= set(found)
    assert {page: lines for page, lines in found.items() if lines > (SPINE if page in READ_FIRST else MOST)} == {}


def shown(*outputs):
    return {"cell_type": "code", "source": ["value"], "outputs": [*outputs]}


HIDDEN = {"cell_type": "code", "source": ["#| hide\n", "3"], "outputs": [{"text": "3"}]}


@pytest.mark.parametrize("between,lines", [([], 4), ([shown()], 4), ([shown({"text": "3"})], 2), ([HIDDEN], 4)])
def test_lines_are_counted_to_the_next_value(between, lines):
    exported = {"cell_type": "code", "source": ["#| export\n", "def f():\n", "\n", "    return 3\n"], "outputs": []}
    assert lines_without_value([exported, *between, {"cell_type": "markdown", "source": ["text"]}, exported]) == lines
