"The core asks for contributions by name, and works without any."
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import composer_replication
from composer_replication.core.errors import InputProblem
from composer_replication.core.plugins import plugin, plugin_names

PACKAGE = Path(composer_replication.__file__).parent
LISTED = tomllib.loads((PACKAGE / "contrib" / "plugins.toml").read_text())


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in LISTED.items() for name in names])
def test_every_entry_is_there(kind, name):
    assert name in plugin_names(kind) and plugin(kind, name) is not None


@pytest.mark.parametrize("kind, name, said", [
    ("optimizer", "moon", "no contribution gives optimizer 'moon'; install the whole package, or use one of: muon."),
    ("no such kind", "muon", "no contribution gives no such kind 'muon'; install the whole package, or use one of: none."),
])
def test_an_unknown_name_is_one_sentence(kind, name, said):
    with pytest.raises(InputProblem) as problem:
        plugin(kind, name)
    assert str(problem.value) == said


ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import composer_replication
assert composer_replication.__path__ == [sys.argv[2]]
from typer.testing import CliRunner
from composer_replication.cli.app import app
commands = ["--help"], ["train", "--config", "toy", "--set", "optimizer=muon", "--dry-run"]
print(json.dumps([(done.exit_code, done.output) for done in (CliRunner().invoke(app, words) for words in commands)]))
"""


def test_without_contributions_the_core_has_its_commands_and_a_recipe_that_needs_one_is_one_sentence(tmp_path):
    path = tmp_path / "composer_replication"
    path.mkdir()
    for part in PACKAGE.iterdir():
        if part.name != "contrib":
            (path / part.name).symlink_to(part)
    done = subprocess.run([sys.executable, "-c", ALONE, tmp_path, path], capture_output=True, text=True, timeout=600,
                          cwd=tmp_path, env=os.environ | {"COLUMNS": "160"})
    (code, shown), (refused, said) = json.loads(done.stdout)
    assert code == 0 and " train " in shown and " launch " not in shown
    *waits, error = said.splitlines()  # a busy machine says what it waits for
    assert refused == 1 and error.startswith("error: toy.yaml: no contribution gives optimizer 'muon'")
    assert all(line.startswith("loading ") for line in waits)
