"""Every notebook of nbs/ runs, none lets a reader go long without a value, and each stands behind those that it imports."""
import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 100  # exported lines without a value shown
SPINE = 60  # the same, on the pages that a newcomer reads first
READ_FIRST = (
    "core/02_trace", "core/12_hint", "traces/11_error_sites", "hints/04_templates", "tree/02_template", "tree/01_chat",
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


def module_of(page: Path) -> str | None:
    "Return the module that a page exports, as `losses/compose`."
    code = ["".join(cell["source"]) for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "code"]
    name = re.search(r"^#\| default_exp (\S+)$", "\n".join(code), re.M)
    return name and name[1].replace(".", "/")


def imported(module: str) -> set[str]:
    "Return the modules of the package that a module imports, wherever it does."
    found = set()
    for node in ast.walk(ast.parse((ROOT / "composer_replication" / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            base = f"composer_replication/{module}".split("/")[:-node.level] if node.level else []
            whole = [*base, *(node.module or "").split(".")]
            if whole[0] == "composer_replication":
                found |= {"/".join(whole[1:]), *("/".join([*whole[1:], name.name]) for name in node.names)}
    return found


def test_pages_of_a_folder_are_numbered_in_the_order_in_which_they_import_each_other():
    pages = {page: module_of(page) for page in ROOT.glob("nbs/**/[0-9]*_*.ipynb")}
    page_of = {(page.parent, module): page.name for page, module in pages.items() if module}
    of_own_folder = {page: {page_of.get((page.parent, other)) for other in imported(module)} - {None, page.name}
                     for page, module in pages.items() if module}
    later = [f"{page.relative_to(ROOT)} imports {name}" for page, names in of_own_folder.items()
             for name in names if name > page.name]
    numbers = Counter((page.parent.relative_to(ROOT), page.name[:2]) for page in pages)
    assert (later, [f"{folder}: two pages {number}" for (folder, number), n in numbers.items() if n > 1]) == ([], [])
