"Layouts that `tasks make` takes tasks from, the limit of time, reasons for nothing kept, and outcomes that nobody can know."

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.envs.deletion import subject as subjects
from composer_replication.envs.deletion.subject import import_roots, imported_modules, needed_requirements, prepare_subject, store_path
from composer_replication.envs.deletion.tasks.coverage import measure_coverage
from composer_replication.envs.deletion.tasks.select import find_targets, module_name, read_sources

CODE = '''
def spread(values, width):
    """Values in rows of a width, the last one shorter."""
    rows = []
    for start in range(0, len(values), width):
        rows.append(list(values[start:start + width]))
    return rows
'''
TEST = """
from {module} import spread

def test_spread():
    assert spread([1, 2, 3], 2) == [[1, 2], [3]]

def test_empty():
    assert spread([], 2) == []
"""


def write(folder: Path, files: dict) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def store():
    "A store that every user id can reach, gone afterwards."
    folder = store_path().parent / f"test-layouts-{os.getpid()}"
    folder.mkdir(mode=0o755, parents=True)
    yield folder
    shutil.rmtree(folder)


LAYOUTS = {
    "namespace below src": ({"src/ns/pkg/__init__.py": "", "src/ns/pkg/a.py": CODE, "tests/test_a.py": TEST.format(module="ns.pkg.a")},
                            ("src",), "src/ns/pkg/a.py", "ns.pkg.a"),
    "deep namespace": ({"src/com/ns/pkg/a.py": CODE, "tests/__init__.py": "", "tests/test_a.py": TEST.format(module="com.ns.pkg.a")},
                       ("src",), "src/com/ns/pkg/a.py", "com.ns.pkg.a"),
    "namespace at the top": ({"ns/pkg/__init__.py": CODE, "test_a.py": TEST.format(module="ns.pkg")}, (".",), "ns/pkg/__init__.py", "ns.pkg"),
    "python folder": ({"python/pkg/__init__.py": CODE, "rust/x.rs": "", "python/tests/test_a.py": TEST.format(module="pkg")},
                      ("python",), "python/pkg/__init__.py", "pkg"),
    "any folder": ({"implementation/pkg/a.py": CODE, "implementation/pkg/__init__.py": "", "setup.py": "", "tests/test_a.py":
                    TEST.format(module="pkg.a")}, ("implementation",), "implementation/pkg/a.py", "pkg.a"),
    "tests inside, relative": ({"python/pkg/__init__.py": "", "python/pkg/a.py": CODE, "python/pkg/tests/__init__.py": "",
                                "python/pkg/tests/test_a.py": TEST.format(module="..a")}, ("python",), "python/pkg/a.py", "pkg.a"),
    "tests inside a namespace": ({"src/ns/pkg/__init__.py": "", "src/ns/pkg/a.py": CODE, "src/ns/pkg/tests/__init__.py": "",
                                  "src/ns/pkg/tests/test_a.py": TEST.format(module="..a")}, ("src/ns",), "src/ns/pkg/a.py", "pkg.a"),
    "vendored": ({"pkg/__init__.py": "", "pkg/a.py": CODE, "pkg/_vendor/six.py": "", "tests/test_a.py": "import six\n" + TEST.format(module="pkg.a")},
                 (".",), "pkg/a.py", "pkg.a"),
    "helpers beside": ({"src/pkg/a.py": CODE, "helpers.py": "", "tests/helpers2.py": "", "tests/test_a.py":
                        "import helpers, helpers2\nimport pkg\nfrom pkg import a\n" + TEST.format(module="pkg.a")}, ("src",), "src/pkg/a.py", "pkg.a"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_roots_are_where_imports_lead(tmp_path, name):
    files, roots, path, module = LAYOUTS[name]
    assert import_roots(write(tmp_path, files)) == roots
    assert module_name(path, roots) == module


TWINS = {"pkg/__init__.py": CODE, "tests/a/test_x.py": TEST.format(module="pkg"), "tests/b/test_x.py": TEST.format(module="pkg")}
FOLDERS = {
    "names of the standard library": ({"pkg.py": CODE, "tests/test_a.py": "from tests import unittest, OrderedDict\nfrom tests import json, mock\n" +
                                       TEST.format(module="pkg")}, 2, "import json\nfrom unittest import mock\nimport unittest\n"),
    "relative": ({"pkg.py": CODE, "tests/test_a.py": TEST.format(module="pkg"), "tests/test_b.py": "from .test_a import *\n"}, 4, ""),
    "two levels": ({"pkg.py": CODE, "tests/base.py": "X = 1\n", "tests/unit/test_a.py": "from ..base import X\n" + TEST.format(module="pkg")}, 2, ""),
    "a name of the standard library": ({"pkg.py": CODE, "test/helper.py": "X = 1\n", "test/test_a.py": "from test.helper import X\n" +
                                        TEST.format(module="pkg")}, 2, ""),
    "twins": (TWINS, 4, ""),
    "twins by path": (TWINS | {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-ra --import-mode=importlib"\n'}, 4, None),
    "twins by path, in a list": (TWINS | {"pyproject.toml": '[tool.pytest]\naddopts = ["--import-mode", "importlib"]\n'}, 4, None),
    "twins by path, in an ini file": (TWINS | {"pytest.ini": "[pytest]\naddopts=\n\t--doctest-modules\n\t--import-mode importlib\n"}, 4, None),
    "neighbours by bare names": ({"pkg.py": CODE, "tests/helper.py": "X = 1\n", "tests/test_a.py": "from helper import X\n" +
                                  TEST.format(module="pkg"), "tests/test_b.py": "from tests.nothing import x\n"}, 2, None),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_tests_without_init(tmp_path, name):
    files, passed, written = FOLDERS[name]
    tree = write(tmp_path / "repo", files)
    notes = subjects._write_test_packages(tree, tmp_path / "libraries")
    added = [path for path in tree.rglob("__init__.py") if path.relative_to(tree).as_posix() not in files]
    assert bool(added) == (written is not None) and len(notes) == len(added)
    assert all(path.read_text() in (written, "") or "OrderedDict" in path.read_text() for path in added)
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "tests" if (tree / "tests").is_dir() else "test"], cwd=tree,
                         env={"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True, timeout=60)
    assert f"{passed} passed" in ran.stdout, ran.stdout  # an oracle: pytest itself, with the settings of the repository


def test_what_an_sdist_lacks_is_said(tmp_path, store):
    files = {"pkg.py": CODE, "tests/test_a.py": "from tests import ServerCase, os\n", "tests/test_b.py": "from tests import unittest\n" +
             TEST.format(module="pkg")}
    subject = prepare_subject(write(tmp_path / "repo", files), store)
    assert (subject.tree / "tests/__init__.py").read_text() == "import os\nimport unittest\n"
    assert len(measure_coverage(subject, store).passed) == 2
    assert "without ServerCase" in subject.notes[0] and "a checkout of the repository" in subject.notes[0]


LAYOUTS["twins by path"] = (FOLDERS["twins by path"][0], (".",), "pkg/__init__.py", "pkg")
RUN = ("namespace below src", "tests inside a namespace", "twins by path")


@pytest.mark.parametrize("name", RUN)
def test_tests_of_every_layout_run(tmp_path, store, name):
    files, _, path, module = LAYOUTS[name]
    subject = prepare_subject(write(tmp_path / "repo", files), store)
    measured = measure_coverage(subject, store)
    assert len(measured.passed) == sum(text.count("def test_") for text in files.values()), measured.errors
    [target], _ = find_targets(subject, measured, granularity=("function",))
    assert target.name == f"{module}:spread" and target.tests == measured.passed


def test_requirements_of_namespaces_are_found_by_their_dotted_names(tmp_path):
    tree = write(tmp_path, {"ns/pkg/__init__.py": "", "test_a.py": "import jaraco.classes as c\nfrom zope import interface\nfrom google.cloud import (\n    x)\n"})
    imported = imported_modules(tree)
    assert {"jaraco", "jaraco.classes", "zope.interface", "google.cloud"} <= imported
    stated = ["jaraco.classes", "jaraco-packaging", "zope.interface>=5", "zope.event", "google-cloud", "sphinx"]
    assert needed_requirements([], stated, imported, "ns.pkg") == ["google-cloud", "jaraco.classes", "zope.interface>=5"]
