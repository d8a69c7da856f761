"A format and a detector of the user's own, named as package.module:name, from every command that reads traces."
import json
import sys

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.traces.error_detectors import DETECTORS
from composer_replication.traces.formats.base import FORMATS, known_formats

MODULE = '''
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.traces.error_detectors import Detection
from composer_replication.traces.formats.base import Format

PARAMETERS = {"type": "object", "properties": {"n": {}}}
TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_bed", "get_hole"))


def read(record, trace_id):
    turns = [Turn("user", record["goal"])]
    for n, (tool, came) in enumerate(record["did"]):
        turns.append(Turn("assistant", tool_calls=(ToolCall(tool, {"n": n}, f"c{n}"),)))
        turns.append(Turn("tool", came, tool_call_id=f"c{n}", observation=True))
    return Trace(trace_id, tuple(turns), task_id=record["goal"], format="steps", tools=TOOLS)


STEPS = Format("steps", lambda record: "did" in record, read)


def rained(trace, position):
    turn = trace.turns[position]
    return Detection("runtime_error", turn.content) if turn.observation and "rain" in turn.content else None
'''
NAMED = ["--formats", "garden:STEPS", "--detectors", "garden:rained"]
COMMANDS = {  # and what each says only with the detector
    "traces show FILE --json": '"sites":{"runtime_error":1}',
    "traces errors FILE --json": '"kind":"runtime_error"',
    "hints list FILE --json": '"error":"it begins to rain"',
    "hints rules FILE --json --hints raw_error --least 1": "it begins to rain",
    "explore FILE --json --out page.html": '"error_turns":1',
    "pairs FILE --make recovery --out pairs.jsonl --json": '"given":1',
    "dataset traces FILE --out DATA --licence mit --json": "error sites, runtime_error",
    "replay FILE --teachers a=m@http://127.0.0.1:1 --price m=1,1 --only-errors --estimate --json": '"calls":1',
}  # fmt: skip


@pytest.fixture
def garden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "garden.py").write_text(MODULE)
    did = [["get_bed", "it begins to rain"], ["get_hole", "done"]]
    (tmp_path / "runs.jsonl").write_text(json.dumps({"goal": "Plant a tree.", "did": did}) + "\n")
    yield
    sys.modules.pop("garden", None)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:2]))
def test_a_command_takes_a_format_and_a_detector_by_name(command, garden):
    known_formats()  # loads those of contributions
    before = list(FORMATS), {name: list(some) for name, some in DETECTORS.items()}
    words = command.replace("FILE", "runs.jsonl").split()
    without = CliRunner().invoke(app, words)
    assert without.exit_code == 1 and "no known trace format" in without.stderr
    def said(named):
        return CliRunner().invoke(app, [word.replace("DATA", f"set{len(named)}") for word in words] + named).stdout

    plain, done = said(NAMED[:2]), said(NAMED)
    assert COMMANDS[command] in done and COMMANDS[command] not in plain
    assert (list(FORMATS), {name: list(some) for name, some in DETECTORS.items()}) == before


def test_a_name_that_is_none_is_one_sentence(garden):
    done = CliRunner().invoke(app, ["traces", "show", "runs.jsonl", "--formats", "garden:rained"])
    assert done.exit_code == 1 and "module 'garden' has no 'rained' that makes a format" in done.stderr
    done = CliRunner().invoke(app, ["traces", "show", "runs.jsonl", "--formats", "garden:STEPS", "--detectors", "meadow:rained"])
    assert done.exit_code == 1 and "there is no detector 'meadow:rained'" in done.stderr


FAULTY = '''
from garden import Detection, STEPS, rained
from dataclasses import replace


def torn(trace, position):
    return {}[trace.turns[position].role]


def says_yes(trace, position):
    return True


class Silent:
    name = "silent"

    def generate(self, error_kind, error_meta):
        raise RuntimeError


class Lists(Silent):
    name = "lists"

    def generate(self, error_kind, error_meta):
        return ["Wait."]


def misread(record, trace_id):
    return record["had"]


TORN = replace(STEPS, read=misread)
'''
FAULTS = {  # what is asked, and what is said of it
    "traces show --formats garden:STEPS --detectors faulty:torn": "the detector torn ended with KeyError ('assistant')",
    "hints list --formats garden:STEPS --detectors faulty:says_yes":
        "the detector says_yes ended with TypeError (bool in place of a Detection or None)",
    "hints list --hints faulty:Silent": "the hint layer silent ended with RuntimeError",
    "hints list --hints faulty:Lists": "the hint layer lists ended with TypeError (list in place of a text or None)",
    "traces show --formats faulty:TORN": "had",
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_ones_own_code_ends_with_is_one_sentence(words, garden, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = CliRunner().invoke(app, [*words.split(), *(() if "--formats" in words else NAMED), "runs.jsonl"])
    sys.modules.pop("faulty", None)
    said = " ".join(done.stderr.split())
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit) and FAULTS[words] in said, said
    assert "TORN" in words or said.startswith("error: trace runs, turn 1: ") and said.endswith("; mend it, or leave it out.")
