"""The checks must be able to fail: each is shown a tree with one thing wrong."""
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import check  # noqa: E402
import readme  # noqa: E402

HOUSE = {"settings.ini": None, "pyproject.toml": None, "composer_replication/__init__.py": '__version__ = "0.1.0"\n',
         "spikes/.keep": ""}
SOURCE = "#| default_exp room.thing", "#| export\ndef double(x):\n    return 2 * x"


@pytest.fixture
def house(tmp_path, monkeypatch):
    "A small project with one notebook, exported and clean, that the checks take for the real one."
    for name, content in HOUSE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text() if content is None else content)
    cells = [nbformat.v4.new_code_cell(source, id=f"cell{i}") for i, source in enumerate(SOURCE)]
    (tmp_path / "nbs/room").mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "nbs/room/00_thing.ipynb")
    for command in (["nbdev_export"], ["nbdev_clean"]):
        assert check.run([str(check.BIN / command[0]), *command[1:]], tmp_path, 60)[0]
    monkeypatch.setattr(check, "ROOT", tmp_path)
    return tmp_path


def problems(name, tmp_path_factory):
    return check.CHECKS[name](check.copy_tree(tmp_path_factory.mktemp("copy")))


def test_a_house_in_order_passes(house, tmp_path_factory):
    assert problems("export", tmp_path_factory) == problems("clean", tmp_path_factory) == []


def test_a_module_edited_by_hand_is_found(house, tmp_path_factory):
    module = house / "composer_replication/room/thing.py"
    module.write_text(module.read_text().replace("2 * x", "3 * x"))
    assert len(problems("export", tmp_path_factory)) == 1


def test_a_module_without_a_notebook_is_found(house, tmp_path_factory):
    (house / "nbs/room/00_thing.ipynb").unlink()
    assert any("thing.py" in problem for problem in problems("export", tmp_path_factory))


def test_a_notebook_that_is_not_clean_is_found(house, tmp_path_factory):
    path = house / "nbs/room/00_thing.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["metadata"]["scrolled"] = True
    path.write_text(json.dumps(notebook))
    assert len(problems("clean", tmp_path_factory)) == 1


def test_a_readme_that_is_behind_is_found(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# New\nSee [this](../README.md).")])
    (tmp_path / "nbs").mkdir()
    nbformat.write(notebook, tmp_path / "nbs/index.ipynb")
    (tmp_path / "README.md").write_text("# Old\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "NOTEBOOK", tmp_path / "nbs/index.ipynb")
    assert len(readme.stale()) == 1
    readme.write()
    assert readme.stale() == []
    assert "[this](README.md)" in (tmp_path / "README.md").read_text()


def test_a_command_that_hangs_is_stopped(tmp_path):
    code = "import time; print('on', flush=True); time.sleep(60)"
    ended_well, said = check.run([sys.executable, "-c", code], tmp_path, 2)
    assert not ended_well
    assert said.startswith("on") and "stopped after 2 s" in said


@pytest.mark.parametrize("source, told", [("1 / 0", "ZeroDivisionError"), ("import time; time.sleep(60)", "--timeout")])
def test_a_notebook_that_fails_is_left_as_it_was(tmp_path, source, told):
    path = tmp_path / "x.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, ROOT / "tools/run_nb.py", path, "--timeout", "4"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 1 and told in done.stderr
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_the_same_run_gives_the_same_file(tmp_path):
    cells = [nbformat.v4.new_code_cell("n = 1", metadata={"tags": ["parameters"]}),
             nbformat.v4.new_code_cell("#| slow\nraise SystemError"),
             nbformat.v4.new_code_cell("import ipywidgets\nipywidgets.IntSlider(n)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "x.ipynb")
    for out in ("a.ipynb", "b.ipynb"):
        command = [sys.executable, ROOT / "tools/run_nb.py", "x.ipynb", "--out", out, "-p", "n", "7"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "a.ipynb").read_bytes() == (tmp_path / "b.ipynb").read_bytes()
    assert "IntSlider(value=7)" in (tmp_path / "a.ipynb").read_text()
