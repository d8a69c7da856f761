"Parts that stand alone: what importing one loads of the package, and what it does not load at all."
import json
import subprocess
import sys

import pytest

LOADED = """
import importlib, json, pathlib, sys
importlib.import_module("composer_replication.{part}")
files = {{name: module.__file__ for name, module in sys.modules.items()
          if name.split(".")[0] == "composer_replication" and getattr(module, "__file__", None)}}
lines = sum(len(pathlib.Path(path).read_text().splitlines()) for path in files.values())
print(json.dumps([len(files), lines, sorted({{name.split(".")[1] for name in files if "." in name}}), sorted(
    {{"torch", "transformers", "trl", "datasets"}} & set(sys.modules))]))
"""
TORCH = {"torch", "transformers", "trl", "datasets"}
# module: at most so many modules and lines of the package, the rooms it may load, the libraries it may load
PARTS = {
    "core.trace": (6, 600, {"core"}, set()),
    "core.hint": (7, 660, {"core"}, set()),
    "losses.compose": (30, 4300, {"core", "losses", "tree"}, TORCH),  # the method: what DESIGN bounds
    "tree.build": (14, 1900, {"core", "tree"}, {"transformers"}),
    "hints.layers": (62, 7440, {"core", "hints", "traces"}, set()),
    "traces.read": (47, 5700, {"core", "traces"}, set()),  # readers, one a format; what they share is five pages
    "traces.scrub": (5, 250, {"core", "traces"}, set()),
    "traces.export": (8, 700, {"core", "traces"}, set()),
    "sandbox.base": (8, 1100, {"core", "sandbox"}, set()),
    "envs.deletion.env": (50, 9250, {"core", "envs", "sandbox"}, set()),  # tasks and their judge: no trainer
    "replay.endpoint": (12, 1180, {"core", "replay"}, set()),
    "replay.client": (17, 2045, {"core", "replay"}, set()),
    "replay.pool": (19, 2310, {"core", "replay"}, set()),
    "rollout.protocols": (14, 1820, {"core", "rollout", "traces"}, set()),  # messages without the readers of formats
    "replay.pairs": (53, 6245, {"core", "replay", "traces"}, set()),  # with the readers, one a format
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_loads_no_more_than_it_needs(part):
    modules, lines, rooms, libraries = PARTS[part]
    loaded = subprocess.check_output([sys.executable, "-c", LOADED.format(part=part)], text=True, timeout=600)
    found_modules, found_lines, found_rooms, found_libraries = json.loads(loaded)
    assert set(found_rooms) <= rooms and set(found_libraries) <= libraries
    assert found_modules <= modules and found_lines <= lines
