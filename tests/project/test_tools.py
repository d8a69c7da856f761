"""The checks must be able to fail: each is shown a tree with one thing wrong."""
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check  # noqa: E402
import figures  # noqa: E402
import readme  # noqa: E402

PROJECT = {"settings.ini": None, "pyproject.toml": None, "composer_replication/__init__.py": '__version__ = "0.1.0"\n',
         "spikes/.keep": ""}
SOURCE = "#| default_exp room.thing", "#| export\ndef double(x):\n    return 2 * x"


@pytest.fixture
def project(tmp_path, monkeypatch):
    "A small project with one notebook, exported and clean, that the checks take for the real one."
    for name, content in PROJECT.items():
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


def test_a_project_in_order_passes(project, tmp_path_factory):
    assert problems("export", tmp_path_factory) == problems("clean", tmp_path_factory) == []


def test_a_module_edited_by_hand_is_found(project, tmp_path_factory):
    module = project / "composer_replication/room/thing.py"
    module.write_text(module.read_text().replace("2 * x", "3 * x"))
    assert len(problems("export", tmp_path_factory)) == 1


def test_a_module_without_a_notebook_is_found(project, tmp_path_factory):
    (project / "nbs/room/00_thing.ipynb").unlink()
    assert any("thing.py" in problem for problem in problems("export", tmp_path_factory))


def test_a_notebook_that_is_not_clean_is_found(project, tmp_path_factory):
    path = project / "nbs/room/00_thing.ipynb"
    nb = json.loads(path.read_text())
    nb["cells"][0]["metadata"]["scrolled"] = True
    path.write_text(json.dumps(nb))
    assert len(problems("clean", tmp_path_factory)) == 1


def notebook(path, source, output=None):
    outputs = [nbformat.v4.new_output("execute_result", output, execution_count=1)] if output else []
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, outputs=outputs)]), path)


@pytest.mark.parametrize("output, bare", [
    ({"text/plain": "<Figure size 10x10 with 1 Axes>"}, True),
    ({"text/plain": "<Figure size 10x10 with 1 Axes>", "image/png": "iVBO"}, False), ({"text/plain": "a <Figure size"}, False)])
def test_a_figure_without_a_picture_is_found(tmp_path, output, bare):
    notebook(tmp_path / "spikes/009-x/009-x.ipynb", "fig", output)
    notebook(tmp_path / "nbs/room/00_x.ipynb", "fig", output)
    assert len(check.check_outputs(tmp_path)) == 2 * bare


@pytest.mark.parametrize("prints, stale", [
    ("took 0.25 s", False), ("took +3e-05 s", False), ("took 2. s", False), ("takes 1.0 s", True), ("", True)])
def test_a_page_that_shows_something_else_than_it_gives_is_found(tmp_path, monkeypatch, prints, stale):
    "Numbers may differ."
    page = tmp_path / "nbs/room/00_x.ipynb"
    page.parent.mkdir(parents=True)
    outputs = [nbformat.v4.new_output("stream", text=f"{prints}\n")] if prints else []
    cell = nbformat.v4.new_code_cell("print('took -1.5 s')", outputs=outputs)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), page)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    before = page.read_bytes()
    assert len(check.check_shown(tmp_path)) == stale and page.read_bytes() == before


def test_a_room_without_pages_is_no_room_whose_pages_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setenv("ROOM", "rooom")
    assert check.check_shown(tmp_path) == ["no notebook was found in rooom: name a room of nbs/."]


def test_a_readme_that_is_behind_is_found(tmp_path, monkeypatch):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# New\nSee [this](../README.md).")])
    (tmp_path / "nbs").mkdir()
    for notebook in readme.PAGES.values():
        nbformat.write(nb, tmp_path / notebook)
    (tmp_path / "README.md").write_text("# Old\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert len(readme.stale()) == 2
    readme.write()
    assert readme.stale() == []
    for page, link in (("README.md", "README.md"), ("docs/report.md", "../README.md")):
        assert f"[this]({link})" in (tmp_path / page).read_text()


@pytest.fixture
def pages(tmp_path):
    "Writes a page and tells what is wrong with its figures; an experiment has passed 12.34 % in 0.6543 s."
    (tmp_path / "docs").mkdir()
    (tmp_path / "spikes/009-x").mkdir(parents=True)
    (tmp_path / "spikes/009-x/results.json").write_text(json.dumps({"runs": [{"v1.2": {"passed": 0.1234, "seconds": 0.6543}}]}))
    def written(text):
        (tmp_path / "docs/page.md").write_text(text)
        return figures.problems(tmp_path)
    return written


RESULT = "<!-- figure: spikes/009-x/results.json runs.0.v1.2"


@pytest.mark.parametrize("text", [
    "The judge takes 0.65 s.", "It takes at most 3 minutes.", "A2 passes 3.4 points more (95 % interval 1 to 5).",
    "It costs $4.03 a trace.", "Ours is 3.7x faster.", "It was 2.5 times as fast.", "It needs 7 GB.",
    "553 of 563 were rewarded.", "Seen with p < 0.01.", "The shift is 0.2 nats.", "| judge | 12 % |",
    "- [a](https://x.org) says so\n- it takes 3 s", "A timeout is 30 s. The judge took 3 s."])
def test_a_figure_without_a_source_is_found(pages, text):
    assert len(pages(f"# Page\n\n{text}\n")) == 1


@pytest.mark.parametrize("text", [
    "The judge takes 0.65 s ([how](../spikes/009-x/009-x.ipynb)).", "SDPO gained 3.8 points (arXiv:2601.20802).",
    "`sleep 3 s` and $3 s$.", "```\ntook 3 s\n```", "Its limit is 30 s.", "The default timeout: 30 s.",
    "Python 3.11, 95 % intervals, 2 cores, GPT-5.",
    "The logits take 12,000 × 4 bytes = 48 kB.", "It took 9 s. <!-- figure: https://example.org/run -->",
    f"It passes 12.3 %. {RESULT}.passed -->", f"It takes 0.65 s and passes 12 %. {RESULT}.passed -->{RESULT}.seconds -->"])
def test_a_figure_with_a_source_passes(pages, text):
    assert pages(f"# Page\n\n{text}\n") == []


@pytest.mark.parametrize("text, problem", [
    (f"It takes 0.66 s. {RESULT}.seconds -->", "no such figure"),
    (f"It passes 12.4 %. {RESULT}.passed -->", "'12.4 %' has no source"),
    (f"It takes 0.65 s. {RESULT}.hours -->", "has no number"),
    ("It takes 0.65 s. <!-- figure: spikes/none.json -->", "there is no"),
    (f"It takes 0.65 s, not 3 s. {RESULT}.seconds -->", "'3 s' has no source")])
def test_a_figure_that_its_source_does_not_hold_is_found(pages, text, problem):
    assert problem in " ".join(pages(text))


def test_an_experiment_may_promise_and_its_outputs_may_say(pages, tmp_path):
    cells = ["# 009: X\n\n**Hypothesis.** It takes 3 s.\n\n**Thresholds**:\n\n1. below 3 s;\n2. above 5 %.", "It took 2 s."]
    output = nbformat.v4.new_output("display_data", {"text/markdown": "It took 2 s."})
    cells = [*map(nbformat.v4.new_markdown_cell, cells), nbformat.v4.new_code_cell(outputs=[output])]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "spikes/009-x/009-x.ipynb")
    assert len(pages("")) == 1


def test_a_command_that_hangs_is_stopped(tmp_path):
    succeeded, output = check.run(["sh", "-c", "echo on; sleep 600"], tmp_path, 2)
    assert not succeeded
    assert output.startswith("on") and "stopped after 2 s" in output


@pytest.mark.parametrize("source, problem, limit", [
    ("1 / 0", "ZeroDivisionError", "300"), ("import time; time.sleep(600)", "--timeout", "4")])
def test_a_notebook_that_fails_is_left_as_it_was(tmp_path, source, problem, limit):
    path = tmp_path / "x.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, ROOT / "tools/run_nb.py", path, "--timeout", limit], capture_output=True,
                          text=True, timeout=400)
    assert done.returncode == 1 and problem in done.stderr
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_the_same_run_gives_the_same_file(tmp_path):
    cells = [nbformat.v4.new_code_cell("n = 1", metadata={"tags": ["parameters"]}),
             nbformat.v4.new_code_cell("#| slow\nraise SystemError"),
             nbformat.v4.new_code_cell("import ipywidgets\nipywidgets.IntSlider(n)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "x.ipynb")
    for out in ("a.ipynb", "b.ipynb"):
        command = [sys.executable, ROOT / "tools/run_nb.py", "x.ipynb", "--out", out, "-p", "n", "7"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    assert (tmp_path / "a.ipynb").read_bytes() == (tmp_path / "b.ipynb").read_bytes()
    assert "IntSlider(value=7)" in (tmp_path / "a.ipynb").read_text()


# Make

def test_what_make_starts_keeps_its_bytecode():
    "Also where the environment forbids it: a run starts dozens of processes, and each would compile all that it imports."
    words = ["make", "-s", "--eval", "shown: ; @echo $${PYTHONDONTWRITEBYTECODE:-kept}", "shown"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True)
    assert done.stdout == "kept\n", done.stderr
