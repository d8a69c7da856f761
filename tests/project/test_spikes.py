"""Every experiment is made alike: parameters, a quick look that writes no result, a hypothesis, a verdict."""
import ast
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SPIKES = sorted((ROOT / "spikes").glob("*/*.ipynb"))
VERDICTS = {"VALIDATED", "REFUTED", "UNDECIDED", "NOT RUN"}
QUICKEST = "001-replay-cost"


def named(nodes) -> set[str]:
    "The names that statements set."
    return {target.id for node in nodes for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}


def unguarded(tree: ast.AST, guarded: bool = False) -> list[int]:
    "Lines that write results.json where `quick` may be true."
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("write"):
            found += [node.lineno] if not guarded and "results.json" in ast.unparse(node.func.value) else []
        held = guarded or isinstance(tree, ast.If) and node in tree.body and "not quick" in ast.unparse(tree.test)
        found += unguarded(node, held)
    return found


def problems(notebook, results: dict) -> list[str]:
    "One sentence for each rule that a spike breaks."
    found, code = [], [cell for cell in notebook.cells if cell.cell_type == "code"]
    at = [i for i, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", [])]
    if len(at) != 1:
        return [f"{len(at)} cells are tagged `parameters`, not one"]
    settable = named(ast.parse(code[at[0]].source).body)
    if "quick" in settable:
        body = ast.parse(code[at[0] + 1].source).body
        if len(body) != 1 or not isinstance(body[0], ast.If) or ast.unparse(body[0].test) != "quick" or body[0].orelse:
            found.append("the cell after the parameters is not `if quick:` alone")
        elif not all(isinstance(node, ast.Assign) for node in body[0].body) or named(body[0].body) - settable:
            found.append("`if quick:` sets what is no parameter")
        found += [f"results.json is written in quick mode: {line}" for cell in code for line in unguarded(ast.parse(cell.source))]
    started = notebook.cells.index(code[at[0]])
    text = "\n\n".join(cell.source for cell in notebook.cells[:started] if cell.cell_type == "markdown")
    for what, pattern in (("title", r"\A# "), ("line of what it is", r"^> \S"), ("hypothesis", r"(?i)hypothes[ie]s"),
                          ("threshold", r"(?i)threshold|\bat least\b")):
        if not re.search(pattern, text, re.M):
            found.append(f"before the parameters stands no {what}")
    if not notebook.metadata.get("kernelspec", {}).get("name"):
        found.append("no kernel is named")
    verdict = str(results.get("verdict")).partition(":")[0]
    if verdict not in VERDICTS:
        found.append(f"the verdict is {verdict!r}")
    if verdict == "NOT RUN" and not results.get("reason") and ":" not in results["verdict"]:
        found.append("NOT RUN without a reason")
    return found


@pytest.mark.parametrize("path", SPIKES, ids=lambda path: path.stem)
def test_a_spike_keeps_the_rules(path):
    assert problems(nbformat.read(path, 4), json.loads((path.parent / "results.json").read_text())) == []


@pytest.mark.parametrize("path", [path for path in SPIKES if "_screen(" in path.read_text()], ids=lambda path: path.stem)
def test_the_first_screen_shows_the_saved_verdict(path, monkeypatch):
    first = next(cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    shown = "".join(output.get("data", {}).get("text/markdown", "") for output in first.outputs)
    seen = []
    monkeypatch.setattr("IPython.display.display", lambda view: seen.append(view.data))
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "first_screen", raising=False)
    monkeypatch.chdir(path.parent)
    exec(compile(first.source, str(path), "exec"), {"__name__": "__main__"})
    assert seen and shown == "".join(seen)
    results = json.loads(Path("results.json").read_text())
    assert results["verdict"] in shown.splitlines()[0]


OTHER_WORDS = re.compile(r"\b(?:INVALIDATED|PARTIAL|MIXED|INCONCLUSIVE|CONFIRMED|FALSIFIED|SUPPORTED)\b")


def other_words(root: Path, names) -> list[str]:
    "Where a verdict is told in a word of none of the four."
    return [f"{name}: {found[0]}" for name in names if (found := OTHER_WORDS.findall((root / name).read_text()))]


def test_no_page_tells_a_verdict_in_another_word():
    command = ["git", "ls-files", "spikes", "docs", "nbs", "README.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert other_words(ROOT, [name for name in names if name.endswith((".ipynb", ".json", ".md", ".py"))]) == []


def test_another_word_is_found(tmp_path):
    (tmp_path / "page.md").write_text("**INVALIDATED**: none of it; a partial answer")
    assert other_words(tmp_path, ["page.md"]) == ["page.md: INVALIDATED"]


def test_there_are_spikes():
    assert len(SPIKES) >= 18


QUICK = "if quick:\n    steps = 1"
BARE = 'Path("results.json").write_text("{}")'
WRITE = f"if ready:\n    if not quick:\n        {BARE}"


TEXT = "# 1: A\n\n> B\n\n**Hypothesis.** C. **Threshold**: D"


def made(parameters="quick = False\nsteps = 9", quick=QUICK, write=WRITE, text=TEXT, kernel="python3"):
    "A small spike in order, but for what is given."
    cells = [nbformat.v4.new_code_cell(source) for source in (parameters, quick, write)]
    cells[0].metadata["tags"] = ["parameters"]
    metadata = {"kernelspec": {"name": kernel, "display_name": kernel}} if kernel else {}
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text), *cells], metadata=metadata)


@pytest.mark.parametrize("change, results, said", [
    ({}, {"verdict": "UNDECIDED"}, None),
    ({}, {"verdict": "NOT RUN", "reason": "no machine"}, None),
    ({"parameters": "steps = 9", "quick": "pass", "write": BARE}, {"verdict": "VALIDATED"}, None),
    ({"quick": "steps = 1"}, {"verdict": "VALIDATED"}, "not `if quick:` alone"),
    ({"quick": "if quick:\n    stepps = 1"}, {"verdict": "VALIDATED"}, "no parameter"),
    ({"write": WRITE.replace("not quick", "quick")}, {"verdict": "VALIDATED"}, "written in quick mode"),
    ({"write": BARE}, {"verdict": "VALIDATED"}, "written in quick mode"),
    ({"write": f"if not quick:\n    pass\nelse:\n    {BARE}"}, {"verdict": "VALIDATED"}, "written in quick mode"),
    ({"text": TEXT.replace("> ", "")}, {"verdict": "VALIDATED"}, "stands no line of what it is"),
    ({"text": "# 1: A\n\n> B\n\nC"}, {"verdict": "VALIDATED"}, "stands no hypothesis"),
    ({"kernel": None}, {"verdict": "VALIDATED"}, "no kernel"),
    ({}, {"verdict": "FINE"}, "the verdict is"),
    ({}, {"verdict": "NOT RUN"}, "without a reason"),
])
def test_a_broken_rule_is_found(change, results, said):
    found = problems(made(**change), results)
    assert any(said in problem for problem in found) if said else found == []


@pytest.mark.slow
def test_a_quick_look_runs_and_writes_no_result(shared_data, tmp_path):
    folder, out = ROOT / "spikes" / QUICKEST, tmp_path / "out.ipynb"
    before = (folder / "results.json").read_bytes()
    command = [sys.executable, ROOT / "tools/run_nb.py", folder / f"{QUICKEST}.ipynb", "-p", "quick", "true", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "results.json").read_bytes() == before and nbformat.read(out, 4).cells[-1].outputs


# "Run all" shows what is committed


def executed(path, out, **environment):
    "Run all cells of a notebook as a user does, and return the CPU seconds."
    used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before = used()
    command = [sys.executable, ROOT / "tools/run_nb.py", path, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return used() - before


TIMES = re.compile(r"\d[\d.,]* ?(?:ms|s|seconds|minutes)\b")


def texts(path) -> list[str]:
    "What each code cell shows as text, without times, and of a line that is written over its last state."
    def of(output):
        data = output.get("data", {})
        text = output.get("text") or data.get("text/markdown") or ("" if "image/png" in data else data.get("text/plain", ""))
        return re.sub(r"[^\n]*\r(?!\n)", "", text)
    cells = (cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    return [TIMES.sub("", "".join(of(output) for output in cell.outputs if output.get("name") != "stderr")) for cell in cells]


def held(folder) -> dict[str, str]:
    "Every file that is no cache, with its fingerprint."
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    "What git tracks, alone in a folder."
    folder = tmp_path_factory.mktemp("alone") / "main"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", SPIKES, ids=lambda path: path.stem)
def test_all_cells_run_in_a_minute_show_what_is_committed_and_write_nothing(path, clone, tmp_path):
    here, before = clone / path.relative_to(ROOT), held(clone / "spikes")
    bare = {"COMPOSER_DATA": str(tmp_path / "none"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    assert executed(here, tmp_path / "out.ipynb", **bare) < 60
    assert held(clone / "spikes") == before
    assert texts(tmp_path / "out.ipynb") == texts(path)


def stored_spike(folder, run):
    "A spike whose second cell cannot have been run here."
    source = 'from pathlib import Path\nPath("new").write_text("x")\nprint("made")\n6 * 7'
    sources = (f"run = {run}", "from stored import stored\n\nstored(run)", source)
    cells = [nbformat.v4.new_code_cell(text) for text in sources]
    cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="kept\n"),
                        nbformat.v4.new_output("execute_result", data={"text/plain": "41"}, execution_count=3)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "python3"}})
    folder.mkdir()
    (folder / "data.json").write_text("{}")
    nbformat.write(notebook, folder / f"{folder.name}.ipynb")
    return folder / f"{folder.name}.ipynb"


@pytest.mark.process
@pytest.mark.parametrize("run, shown", [(False, ["kept\n", "41"]), (True, ["made\n", "42"])])
def test_a_stored_cell_is_shown_as_it_is_kept_and_run_where_that_is_asked(run, shown, tmp_path):
    path = stored_spike(tmp_path / "spike", run)
    executed(path, tmp_path / "out.ipynb", PYTHONPATH=str(ROOT / "spikes"))
    last = nbformat.read(tmp_path / "out.ipynb", 4).cells[-1].outputs
    assert [output.get("text") or output.data["text/plain"] for output in last] == shown
    assert [output.output_type for output in last] == ["stream", "execute_result"]
    assert not (path.parent / "new").exists() and (tmp_path / "spike.made/new").exists() == run
    assert (tmp_path / "spike.made/data.json").exists() == run
