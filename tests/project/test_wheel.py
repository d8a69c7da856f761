"The wheel, installed where the sources are not: every file is in it and every command answers."
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300  # seconds that a command may take; on an idle machine none but the demo needs 20


def tracked(*folders):
    found = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in found.decode().split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "Built from a copy of what git tracks."
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so what belongs into the wheel is not known")
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "tree" / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder,
                    folder / "tree"],
                   check=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def composer(wheel, tmp_path_factory):
    "Runs `composer-rl` of an environment that has the wheel and, of this one, only the packages that it needs."
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False)
    at = lambda name: Path(sysconfig.get_path(name, "venv", {"base": str(folder), "platbase": str(folder)}))
    options = ["-q", "--no-deps", "--ignore-installed"]  # the last, or ours is taken out of this environment
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--prefix", folder, wheel],
                   check=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    (at("purelib") / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth, our sources, is not read
    script = at("scripts") / "composer-rl"
    script.write_text(script.read_text().replace(sys.executable, str(at("scripts") / "python")))

    def run(*words):
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"COLUMNS": "100"}
        done = subprocess.run([script, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT,
                              stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.python = at("scripts") / "python"
    return run


def test_all_files_of_the_package_are_in_it(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    ours = [name for name in tracked("composer_replication") if (ROOT / name).is_file()]
    assert "composer_replication/data/repos/larder/src/larder/labels.py" in inside
    assert len(ours) > 200 and [name for name in ours if name not in inside] == []


def test_it_is_the_wheel_that_answers_and_its_data_is_there(composer):
    where = subprocess.run([composer.python, "-I", "-c", "import composer_replication as c; print(c.__file__)"],
                           capture_output=True, text=True, timeout=LIMIT)
    assert str(composer.python.parents[1]) in where.stdout
    assert "smollm2-sql" in composer("recipes", "list", "--json")
    assert "template" in composer("hints", "list", "--json")


@pytest.mark.slow
def test_every_command_answers_and_the_demo_runs(composer):
    from typer.main import get_command

    from composer_replication.cli.app import app
    root = get_command(app)
    for name, command in root.commands.items():
        for words in [(name,), *((name, sub) for sub in getattr(command, "commands", ()))]:
            assert "Usage" in composer(*words, "--help")
    assert "out/demo/index.html" in composer("demo")
