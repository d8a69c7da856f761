"""Every message that the page about trouble quotes stands in the code, and every entry has a cause and a fix."""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^(\S[^\n]*)\n((?:: .*\n(?:  .*\n)*)+)", PAGE, re.M))


def messages() -> str:
    "Every text of the code, what is filled in left out, a line each."
    texts = [(ROOT / "Makefile").read_text()]
    for path in [*(ROOT / "composer_replication").rglob("*.py"), *(ROOT / "tools").glob("*.py"), ROOT / "tests/conftest.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(" ".join(text.split()) for text in texts)


@pytest.fixture(scope="module")
def said() -> str:
    return messages()


def test_there_are_entries():
    assert len(ENTRIES) >= 20


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_quotes_the_code_and_has_a_cause_and_a_fix(entry, said):
    quoted = re.findall(r"`([^`]+)`", entry)
    assert [text for text in quoted if text not in said] == []
    assert ": *Cause.*" in ENTRIES[entry] and ": *Fix.*" in ENTRIES[entry]
