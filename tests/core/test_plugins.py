"The core asks for contributions by name, and works without any."
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


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory):
    "Runs Python code where the package has no contributions."
    folder = tmp_path_factory.mktemp("core")
    path = folder / "composer_replication"
    path.mkdir()
    for part in PACKAGE.iterdir():
        if part.name != "contrib":
            (path / part.name).symlink_to(part)

    def run(*words):
        code = f"import sys; sys.path.insert(0, {str(folder)!r}); import composer_replication as c; " \
               f"assert c.__path__ == [{str(path)!r}]; from composer_replication.cli.app import main; main()"
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=600, cwd=folder,
                              env=os.environ | {"COLUMNS": "160"})
    return run


def test_without_contributions_the_commands_of_the_core_are_there(core_alone):
    done = core_alone("--help")
    assert done.returncode == 0 and " train " in done.stdout and " launch " not in done.stdout


def test_without_contributions_a_recipe_that_needs_one_is_one_sentence(core_alone):
    done = core_alone("train", "--config", "toy", "--set", "optimizer=muon", "--dry-run")
    assert done.returncode == 1 and "no contribution gives optimizer 'muon'" in done.stderr and "Traceback" not in done.stderr
