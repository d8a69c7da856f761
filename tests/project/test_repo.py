"""House rules that no notebook can hold: imports go down, importing is quick, nothing private or huge is committed."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import composer_replication

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "composer_replication"
ROOMS = ("data", "core", "traces", "hints", "sandbox", "tree", "losses", "replay", "rollout", "envs", "training", "recipes",
         "experiments", "report", "cli", "contrib")  # an import only ever goes down this list, or stays in its room
FLOORS = {room: floor for floor, room in enumerate(ROOMS)}


def kept_files() -> list[Path]:
    "The files of the repository: committed or about to be."
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                              capture_output=True, text=True, check=True, timeout=600).stdout
        return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
    ignored, files = {".git", ".venv", "out", "_build", "_staged", "vendor", "__pycache__", "node_modules"}, []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = set(folders) - ignored
        files += [Path(folder, name) for name in names if not name.endswith(".scratch.py")]
    return files


@cache  # each file of the package is looked at three times
def parsed(path: Path) -> ast.Module:
    "The syntax tree of a file."
    return ast.parse(path.read_text())


# Importing

def test_import_is_quick_and_lazy():
    code = ("import sys, time; start = time.process_time(); import composer_replication;"
            "print(time.process_time() - start, *({'torch', 'transformers', 'datasets'} & set(sys.modules)))")
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True, timeout=600).split() for _ in range(3)]
    assert all(len(run) == 1 for run in runs), f"heavy modules are imported at once: {runs[0][1:]}"
    assert min(float(run[0]) for run in runs) < 0.3


@pytest.mark.parametrize("name", composer_replication.__all__)
def test_public_name_resolves(name):
    assert getattr(composer_replication, name) is not None


def test_a_class_name_has_one_meaning():
    names = Counter(node.name for path in PACKAGE.rglob("*.py") if "data" not in path.relative_to(PACKAGE).parts
                    for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == {"Plugin"}  # of pytest, in programs that run apart


def test_a_public_name_has_one_meaning_in_its_room():
    "Rooms are the folders, and of the environments each world."
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if "data" in parts or parts[0] == "contrib" or path.name == "__init__.py":
            continue
        room = parts[:2 if parts[0] == "envs" else 1]
        body = parsed(path).body
        own = {name.id for node in body if isinstance(node, ast.Assign) for target in node.targets
               for name in ast.walk(target) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        own |= {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        for name in {name for name in own if name[0] != "_"} - {"logger", "main"}:
            names.setdefault((*room, name), []).append("/".join(parts))
    assert {name[-1]: files for name, files in names.items() if len(files) > 1} == {}


# Floors

def imported(tree: ast.Module, module: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    "Line and dotted parts of everything that a module of the package imports: at the top, within a function, or by name."
    places = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            places += [(node.lineno, tuple(arg.value.split("."))) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        elif isinstance(node, ast.ImportFrom):
            base = module[:len(module) - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            places += [(node.lineno, (*base, alias.name)) for alias in node.names]
    return places


def upward_imports(package: Path) -> list[str]:
    "One sentence for each import that does not go down."
    problems = []
    for path in sorted(package.rglob("*.py")):
        module = (package.name, *path.relative_to(package).with_suffix("").parts)
        room = module[1]
        if room.startswith("_"):
            continue  # the package's own __init__ and nbdev's index
        if room not in FLOORS:
            problems.append(f"{path.relative_to(package)}: room {room} has no floor")
            continue
        for line, parts in imported(parsed(path), module):
            if parts[0] != package.name:
                continue
            to = next((part for part in parts[1:2] if part in FLOORS), None)
            if to != room and (to is None or FLOORS[to] >= FLOORS[room]):
                problems.append(f"{path.relative_to(package)}, line {line}: {room} imports {'.'.join(parts)}")
    return problems


def test_imports_go_down():
    assert upward_imports(PACKAGE) == []


@pytest.mark.parametrize("room, line", [
    ("traces", "from composer_replication.tree.build import Tree"),
    ("traces", "def f():\n    import composer_replication.losses.divergences"),
    ("hints", "from composer_replication.replay.pairs import DPOPair"),
    ("tree", "from ..losses import jsd"),
    ("tree", "from ..replay.pairs import DPOPair"),
    ("losses", "from composer_replication.replay.pairs import sibling_pairs"),
    ("losses", "from composer_replication import Trace"),  # the front door leads to every floor
    ("experiments", "from composer_replication.report.html import page"),
    ("training", "from ..contrib.muon import BlockMuon"),
    ("cli", "def f():\n    from composer_replication.contrib.launch.job import LaunchJob"),
    ("recipes", "from importlib import import_module\nqueue = import_module('composer_replication.contrib.queue.store')"),
    ("core", "from composer_replication import contrib"),
])
def test_an_upward_import_is_found(tmp_path, room, line):
    path = tmp_path / "composer_replication" / room / "new.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(upward_imports(tmp_path / "composer_replication")) == 1


def test_a_downward_import_is_fine(tmp_path):
    path = tmp_path / "composer_replication" / "tree" / "new.py"
    path.parent.mkdir(parents=True)
    path.write_text("import torch\nfrom composer_replication.core.trace import Trace\nfrom .build import Tree\n"
                    "from ..hints import layers")
    assert upward_imports(tmp_path / "composer_replication") == []


# Circles

def module_imports(package: Path) -> dict[str, set[str]]:
    "Each file of the package to the files it imports, at the top or within a function."
    files = {path: (package.name, *path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")}
    kept = {path: parts for path, parts in files.items() if parts[-1] != "_modidx" and parts[1] != "data"}
    names = {path: ".".join(parts).removesuffix(".__init__") for path, parts in kept.items()}
    imports = {}
    for path, name in names.items():
        targets = {".".join(to) for _, to in imported(parsed(path), kept[path])}
        imports[name] = {to if to in names.values() else to.rpartition(".")[0] for to in targets} & set(names.values()) - {name}
    return imports


def circles(imports: dict[str, set[str]]) -> set[str]:
    "The files that are left when those that import nothing that is left are taken away, again and again, from both ends."
    left = set(imports)
    while free := {name for name in left if not imports[name] & left or not any(name in imports[other] for other in left)}:
        left -= free
    return left


def test_no_file_imports_itself_by_a_detour():
    imports = module_imports(PACKAGE)
    assert len(imports) > 150 and "composer_replication.core.trace" in imports["composer_replication.tree.build"]
    assert circles(imports) == set()


def test_a_circle_is_found(tmp_path):
    package = tmp_path / "composer_replication"
    (package / "core").mkdir(parents=True)
    for name, text in {"a": "from .b import f", "b": "def f():\n    from composer_replication.core import c",
                       "c": "import composer_replication.core.a", "d": "from .a import f"}.items():
        (package / "core" / f"{name}.py").write_text(text)
    assert circles(module_imports(package)) == {f"composer_replication.core.{name}" for name in "abc"}


# What is committed

PRIVATE = re.compile(
    r"(?:/home/|/Users/|/root/|/work/|/tmp/|/var/folders/|\\Users\\)[\w.-]+"  # somebody's machine
    r"|\.venv/"
    r"|\b(?:hf_|sk-|ghp_|gho_|xox[abp]-)[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b")


def outputs(notebook: Path) -> list[str]:
    "The text of every output, pictures left out."
    texts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", ()):
            data = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/png")}
            texts.append(json.dumps([data, output.get("text", ""), output.get("traceback", "")], ensure_ascii=False))
    return texts


def private(text: str) -> list[str]:
    "What in the text belongs to one machine or one person."
    return [match[0] for match in PRIVATE.finditer(text)]


def test_nothing_private_is_committed():
    found = {}
    for path in kept_files():
        texts = outputs(path) if path.suffix == ".ipynb" else [path.read_text()] if path.suffix == ".html" else []
        if hits := [hit for text in texts for hit in private(text)]:
            found[str(path.relative_to(ROOT))] = hits[:3]
    assert found == {}


@pytest.mark.parametrize("text", ["see /home/ann/runs", "/root/x.py", "hf_" + "a" * 30, "sk-" + "b" * 40,
                                  ".venv/lib/python3.11/site-packages/torch"])
def test_private_text_is_found(text):
    assert private(text)


MODELS = ("mild", "medium", "strong", "teacher-1", "teacher-2", "teacher-3", "teams")
LARGE = {f"composer_replication/data/models/{name}/model.safetensors": 2_000_000  # the shipped models' weights
         for name in MODELS}


def test_no_file_is_huge():
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in kept_files()}
    assert {name: size for name, size in sizes.items() if size > LARGE.get(name, 1_500_000)} == {}


def test_readme_links_lead_somewhere():
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_notebook_names_its_kernel():
    unnamed = [path for path in kept_files() if path.suffix == ".ipynb"
               and "kernelspec" not in json.loads(path.read_text()).get("metadata", {})]
    assert unnamed == []  # JupyterLab would ask which one before it opens the page


def test_the_readme_is_one_page_with_the_figures_of_the_runs():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    table = readme.split("## Does it help?")[1].split("\n## ")[0]
    assert sum(line.startswith("| ") for line in table.splitlines()) - 1 <= 9
    runs = json.loads((ROOT / "spikes/004-real/alone.json").read_text())["runs"]
    passed = lambda arm: [100 * sum(map(sum, run["rewards"])) / sum(map(len, run["rewards"]))
                          for run in runs if run["arm"] == arm and "rewards" in run]
    own, filler = passed("own"), passed("filler")
    assert len(own) == len(filler) and f"{sum(own) / len(own) - sum(filler) / len(filler):+.1f} (" in table
    for figure in ("-35.9 (-45.3 to -26.6)", "+12.5 (+5.9 to +19.1)", "+0.6 (-2.2 to +3.4)"):
        assert figure in table
