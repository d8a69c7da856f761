"Repositories as they come: archives that want out, links, encodings, caches, set-up programs, ten thousand files."

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from envs_tasks import needs_sandbox, write

from composer_replication.envs.deletion import libraries, unpack
from composer_replication.envs.deletion import subject as subjects
from composer_replication.envs.deletion.judge.trees import lay_out
from composer_replication.envs.deletion.metadata import stated_requirements
from composer_replication.envs.deletion.subject import prepare_subject, scratch, subject_of
from composer_replication.envs.deletion.tasks.select import find_symbols, read_sources
from composer_replication.envs.deletion.unpack import SubjectProblem

SMALL = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: small\nVersion: 1.2\n",
    "small.py": "def one():\n    x = 1\n    return x\n",
    "test_small.py": "import small\n\ndef test_one():\n    assert small.one() == 1\n",
}
OPENED = ["small.py", "test_small.py"]  # by its tests
LEFT_OUT = "files that no test opens or imports were left out of the tree: 1"


def sdist(folder: Path, files: dict, name="small-1.2", extra=()) -> Path:
    path = folder / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for inside, content in files.items():
            info = tarfile.TarInfo(f"{name}/{inside}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content if isinstance(content, bytes) else content.encode()))
        for info in extra:
            tar.addfile(info)
    return path


def member(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def listed(subject):
    return sorted(path.relative_to(subject.tree).as_posix() for path in subject.tree.rglob("*") if not path.is_dir())


def test_an_sdist_becomes_a_tree_and_metadata_without_code(tmp_path):
    subject = prepare_subject(sdist(tmp_path, SMALL | {"build/lib/small.py": "x = 1\n"}), tmp_path / "store")
    assert (subject.name, subject.version, subject.source, subject.import_roots) == ("small", "1.2", "small==1.2", (".",))
    assert listed(subject) == OPENED
    own = [path.relative_to(subject.libraries).as_posix() for path in subject.libraries.glob("small*")]
    assert own == ["small-1.2.dist-info"]
    assert (subject.libraries / "pytest" / "__init__.py").is_file()
    assert prepare_subject("small==1.2", tmp_path / "store") == subject  # known by name and version now


def test_links_and_devices_of_an_archive_stay_out(tmp_path):
    extra = [member("small-1.2/out", tarfile.SYMTYPE, "/etc/passwd"),
             member("small-1.2/hard", tarfile.LNKTYPE, "small-1.2/small.py"), member("small-1.2/loop", tarfile.SYMTYPE, "loop")]
    subject = prepare_subject(sdist(tmp_path, SMALL, extra=extra), tmp_path / "store")
    assert listed(subject) == OPENED
    assert subject.notes == ("3 links were left out of the tree", LEFT_OUT)
    with pytest.raises(SubjectProblem, match="small-1.2.tar.gz cannot be unpacked .small-1.2/null is neither"):
        prepare_subject(sdist(tmp_path, SMALL, extra=[member("small-1.2/null", tarfile.CHRTYPE)]), tmp_path / "store")


@pytest.mark.parametrize("name", ["../outside.py", "/tmp/composer-outside.py"])
def test_an_archive_that_writes_outside_is_refused(tmp_path, name):
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "evil.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("small-1.2/small.py", "x = 1\n")
        file.writestr(name, "x = 2\n")
    with pytest.raises(SubjectProblem, match="lies outside of its folder"):
        prepare_subject(path, tmp_path / "store")
    tar = sdist(tmp_path, SMALL, extra=[member("small-1.2/../../../outside.py", tarfile.REGTYPE)])
    with pytest.raises(SubjectProblem, match="lies outside of its folder"):
        prepare_subject(tar, tmp_path / "store")
    assert not list(tmp_path.rglob("outside.py")) and not Path("/tmp/composer-outside.py").exists()
    assert not list((tmp_path / "store" / "subjects").iterdir())


def test_a_cut_archive_is_one_sentence(tmp_path):
    path = sdist(tmp_path, SMALL | {"data.txt": os.urandom(20_000)})
    path.write_bytes(path.read_bytes()[:9_000])
    with pytest.raises(SubjectProblem, match="get the source distribution again") as caught:
        prepare_subject(path, tmp_path / "store")
    assert "\n" not in str(caught.value)


def test_a_folder_with_links_caches_and_builds(tmp_path):
    left_out = (".git/objects/ab", "__pycache__/small.pyc", "build/lib/small.py", ".mypy_cache/3.11/small.json",
                "stale.pyc", "htmlcov/small.html", ".jj/repo/store/a", ".bzr/repository/b", "_darcs/pristine.hashed/c",
                ".fslckout", ".coverage")
    folder = write(tmp_path / "repo", SMALL | dict.fromkeys(left_out, "x = 1\n"))
    secret = write(tmp_path / "elsewhere", {"secret.txt": "s"})
    os.symlink(secret, folder / "out")
    os.symlink(folder, folder / "loop")
    os.symlink("small.py", folder / "again.py")
    os.mkfifo(folder / "pipe")
    subject = prepare_subject(folder, tmp_path / "store")
    assert listed(subject) == OPENED
    assert subject.notes == ("3 links were left out of the tree", LEFT_OUT)


def test_a_package_may_be_called_build_and_a_folder_anything(tmp_path):
    files = {"pyproject.toml": "[project]\nname = 'realname'\nversion = '1.0'\n", "src/real/__init__.py": "",
             "src/real/build/core.py": "x = 1\n", "src/real/dist/a.py": "", "dist/real-1.0.tar.gz": b"\0",
             "build/lib/real/__init__.py": ""}
    subject = prepare_subject(write(tmp_path / "checkout", files), tmp_path / "store")
    assert {"src/real/build/core.py", "src/real/dist/a.py"} <= set(listed(subject))
    assert not any(name.startswith(("build", "dist")) for name in listed(subject))
    assert subject.name == "checkout" and (subject.libraries / "realname-1.0.dist-info").is_dir()
    assert not list(subject.libraries.glob("checkout*"))


@needs_sandbox
def test_no_program_of_the_repository_runs_outside_of_a_sandbox(tmp_path):
    flag = tmp_path / "ran"
    files = SMALL | {"setup.py": f"open({str(flag)!r}, 'w')\n", "conftest.py": f"open({str(flag)!r}, 'w')\n"}
    prepare_subject(sdist(tmp_path, files), tmp_path / "store")
    assert not flag.exists()


HELD = """import json, os, sqlite3, subprocess, sys
import small

HERE = os.path.dirname(os.path.abspath(__file__))

def test_text():
    assert open(os.path.join(HERE, "data", "kept.txt")).read() == "jam"

def test_descriptor(tmp_path):
    os.chdir(tmp_path)
    os.close(os.open(os.path.join(HERE, "data", "kept.bin"), os.O_RDONLY))

def test_database():
    sqlite3.connect(os.path.join(HERE, "data", "kept.db")).execute("select 1")

def test_child():
    program = "import sys; sys.path.insert(0, '.'); import other; open('data/child.json')"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=HERE)

def test_that_fails():
    open(os.path.join(HERE, "data", "failed.txt"))
    assert False

def test_that_hangs():
    open(os.path.join(HERE, "data", "slow.txt"))
    while True:
        pass
"""
LOOSE = ["README.md", "HISTORY.log", "docs/listing.tex", "data/history.git/objects/ab/cdef", "data/history.git/HEAD",
         "small.pickle", "data/blame.txt", "old/small.py", "examples/use.py", "small.ipynb"]


def test_a_tree_holds_what_its_tests_open_and_nothing_else(tmp_path):
    kept = ["other.py", "pyproject.toml"]
    kept += [f"data/{name}" for name in ("kept.txt", "kept.bin", "kept.db", "child.json", "failed.txt", "slow.txt")]
    files = dict.fromkeys(LOOSE, SMALL["small.py"]) | dict.fromkeys(kept, "") | SMALL
    files |= {"data/kept.txt": "jam", "test_held.py": HELD}
    for source in (write(tmp_path / "repo", files), sdist(tmp_path, files)):
        subject = prepare_subject(source, tmp_path / "store")
        assert listed(subject) == sorted([*kept, *OPENED, "test_held.py"])
        lay_out(subject.tree, {}, tmp_path / "judge" / subject.name)
        assert not any((tmp_path / "judge" / subject.name / path).exists() for path in LOOSE)


def test_a_run_that_is_ended_by_a_test_goes_on_with_the_other_files(tmp_path):
    files = SMALL | {"test_a.py": "import os\n\ndef test_end():\n    os._exit(3)\n", "late.txt": "",
                     "test_z.py": "def test_late():\n    open('late.txt')\n"}
    assert listed(prepare_subject(write(tmp_path / "repo", files), tmp_path / "store")) == sorted({*files} - {"PKG-INFO"})


def test_encodings(tmp_path):
    latin = "# -*- coding: latin-1 -*-\ndef caf\xe9():\n    x = 'caf\xe9'\n    return x\n".encode("latin-1")
    files = SMALL | {
        "latin.py": latin,
        "bom.py": b"\xef\xbb\xbfdef two():\n    y = 2\n    return y\n",
        "bad.py": b"x = '\xff\xfe'\n",
        "syntax.py": "print 'old'\n",
        "mac.py": b"x = 1\ry = 2\r",
        "nul.py": b"x = 1\0\n",
        "dos.py": b"def three():\r\n    z = 3\r\n    return z\r\n",
    }
    subject = prepare_subject(write(tmp_path / "odd", files), tmp_path / "store", whole=True)
    texts, notes = read_sources(subject)
    assert set(texts) == {"small.py", "bom.py", "dos.py"}
    assert [note.split(" ")[0] for note in notes] == ["bad.py", "latin.py", "mac.py", "nul.py", "syntax.py"]
    assert all("\n" not in note for note in notes)
    assert [s.name for s in find_symbols("bom.py", texts["bom.py"], "bom")] == ["bom:two"]


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "MAX_FILES", 2)
    with pytest.raises(SubjectProblem, match="at most 2 files"):
        prepare_subject(write(tmp_path / "repo", SMALL), tmp_path / "store")


def test_nothing_half_done_is_left(tmp_path, monkeypatch):
    folder = write(tmp_path / "repo", SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(subjects, "store_subject", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_subject(folder, tmp_path / "store")
    assert not list((tmp_path / "store" / "subjects").iterdir())
    assert prepare_subject(folder, tmp_path / "store").tree.is_dir()


def test_two_at_once(tmp_path):
    path, store = sdist(tmp_path, SMALL), tmp_path / "store"
    code = (
        "import sys; from composer_replication.envs.deletion.subject import prepare_subject as p; "
        "from pathlib import Path; print(p(Path(sys.argv[1]), Path(sys.argv[2])).tree)"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, path, store], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    trees = {process.communicate(timeout=600)[0] for process in running}
    assert len(trees) == 1 and all(process.returncode == 0 for process in running)
    assert len(list((store / "subjects").iterdir())) == 1


def test_a_changed_file_is_another_subject(tmp_path):
    folder = write(tmp_path / "repo", SMALL)
    first = prepare_subject(folder, tmp_path / "store")
    (folder / "small.py").write_text("def one():\n    return 1\n")
    second = prepare_subject(folder, tmp_path / "store")
    assert first.sha256 != second.sha256 and (first.tree / "small.py").read_text() == SMALL["small.py"]
    task = SimpleNamespace(task_id="t", repo="repo", base_commit=first.base_commit)
    assert subject_of(task, tmp_path / "store") == first
    with pytest.raises(SubjectProblem, match="not in the store: prepare that repository first"):
        subject_of(SimpleNamespace(task_id="t", repo="repo", base_commit="sha256:" + "0" * 64), tmp_path / "store")


@pytest.mark.parametrize("name", ["small", "Small", "small==1.2"])
def test_a_local_folder_is_no_pinned_package(tmp_path, monkeypatch, name):
    monkeypatch.setattr(subjects, "download_source", lambda *given: sdist(tmp_path, SMALL))
    local = prepare_subject(write(tmp_path / name, SMALL), tmp_path / "store")
    package = prepare_subject("small==1.2", tmp_path / "store")
    assert (local.source, package.source) == (name, "small==1.2") and local.sha256 != package.sha256
    monkeypatch.setattr(subjects, "download_source", lambda *given: pytest.fail("it is in the store"))
    assert prepare_subject("Small==1.2", tmp_path / "store") == package


@pytest.mark.parametrize("kind", ["folder", "sdist", "name"])
@pytest.mark.parametrize("first", [False, True])
def test_a_tree_with_unopened_files_and_one_without_are_two_subjects(tmp_path, monkeypatch, kind, first):
    monkeypatch.setattr(subjects, "download_source", lambda *given: sdist(tmp_path, SMALL))
    specs = {"folder": write(tmp_path / "repo", SMALL), "sdist": sdist(tmp_path, SMALL), "name": "small==1.2"}
    spec = specs[kind]
    made = {whole: prepare_subject(spec, tmp_path / "store", whole) for whole in (first, not first)}
    assert {whole: listed(subject) for whole, subject in made.items()} == {False: OPENED, True: sorted(SMALL)}
    for whole, subject in made.items():
        assert prepare_subject(spec, tmp_path / "store", whole) == subject
        assert prepare_subject(subject.tree.parent, tmp_path / "store", whole) == subject  # a folder of the store
        with pytest.raises(SubjectProblem, match="name the repository itself"):
            prepare_subject(subject.tree.parent, tmp_path / "store", not whole)
    task = SimpleNamespace(task_id="t", repo="repo", base_commit=made[False].base_commit)
    assert subject_of(task, tmp_path / "store") == made[False]


def test_another_version_of_the_shipped_repository_is_refused(tmp_path):
    task = SimpleNamespace(task_id="t", repo="larder", base_commit="sha256:" + "0" * 64)
    with pytest.raises(SubjectProblem, match="make the task again"):
        subject_of(task, tmp_path / "store")


VERSION = "[project]\nname = 'v'\nversion = '3.1'\n"


def test_the_version_file_that_a_build_would_write(tmp_path):
    hook = "[tool.hatch.build.hooks.vcs]\nversion-file = 'src/v/_version.py'\n"
    files = {"pyproject.toml": VERSION + hook, "src/v/__init__.py": "from ._version import version\n"}
    subject = prepare_subject(write(tmp_path / "repo", files), tmp_path / "store")
    scope: dict = {}
    exec((subject.tree / "src/v/_version.py").read_text(), scope)
    assert (scope["version"], scope["__version_tuple__"]) == ("3.1", (3, 1))


@pytest.mark.parametrize("scm", ["write_to = '{outside}'", "write_to = '../../out.py'", "write_to = 3", None])
def test_a_version_file_lies_in_the_tree_or_nowhere(tmp_path, scm):
    table = f"[tool.setuptools_scm]\n{scm.format(outside=tmp_path / 'out.py')}\n" if scm else "[tool]\nsetuptools_scm = ['x']\n"
    repo = write(tmp_path / "repo", {"pyproject.toml": table + VERSION, "v.py": "x = 1\n"})
    subject = prepare_subject(repo, tmp_path / "store")
    assert listed(subject) == ["pyproject.toml", "v.py"] and not list(tmp_path.rglob("out.py"))


@pytest.mark.parametrize("project", ["project = 'x'\n", "[project]\nname = 'v'\nversion = 1\n"])
def test_odd_metadata_is_no_traceback(tmp_path, project):
    repo = write(tmp_path / "repo", {"pyproject.toml": project, "v.py": "x = 1\n"})
    assert prepare_subject(repo, tmp_path / "store").version == "0"


def test_the_line_of_pip_that_says_why_is_named():
    text = ("  error: subprocess-exited-with-error\n  × installing build dependencies did not run successfully.\n"
            "  OSError: [Errno 30] Read-only file system: 'wheels'\nerror: subprocess-exited-with-error\n")
    assert libraries._root_cause(text) == "OSError: [Errno 30] Read-only file system: 'wheels'"
    assert libraries._root_cause("") == "pip found nothing"
    metadata = """  error: subprocess-exited-with-error

  × Preparing metadata (pyproject.toml) did not run successfully.
  │ exit code: 1
  ╰─> [4 lines of output]
      Checking for Rust toolchain....

      Cargo, the Rust package manager, is not installed or is not on PATH.
      This package requires Rust and Cargo to compile extensions.
      [end of output]

  note: This error originates from a subprocess, and is likely not a problem with pip.
error: metadata-generation-failed

× Encountered error while generating package metadata.
╰─> pendulum

note: This is an issue with the package mentioned above, not pip.
hint: See above for details.
"""
    assert libraries._root_cause(metadata).startswith("Checking for Rust toolchain.... Cargo, the Rust package manager, is not")
    failed = metadata.replace("      This package", "      ModuleNotFoundError: No module named 'x'\n      This package")
    assert libraries._root_cause(failed) == "ModuleNotFoundError: No module named 'x'"
    absent = "ERROR: No matching distribution found for x"
    assert libraries._root_cause(f"WARNING: retrying\n{absent}\n") == absent


@pytest.mark.parametrize("name", ["pluggy", "Pytest", "iniconfig==2.0"])
def test_what_pytest_runs_on_is_no_subject(name, tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "_pip", lambda *given: pytest.fail("it was downloaded"))
    with pytest.raises(SubjectProblem, match=rf"^{name.partition('==')[0]} is a part of pytest, which runs the tests"):
        prepare_subject(name, tmp_path / "store")
    project = f"[project]\nname = '{name.partition('==')[0]}'\nversion = '1'\n"
    folder = write(tmp_path / "mine", {"pyproject.toml": project, "v.py": "x = 1\n"})
    with pytest.raises(SubjectProblem, match="is a part of pytest"):
        prepare_subject(folder, tmp_path / "store")


def wheel(folder: Path, name: str, version: str, needs=()) -> None:
    "A wheel of one module that names its version."
    info = f"{name}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {other}\n" for other in needs)
    files = {f"{name}.py": f"version = {version!r}\n",
             f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
             f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: here\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)


@pytest.fixture
def index(monkeypatch):
    "An index of a few wheels, below a folder that pip's sandbox shows."
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="composer-index-"))
    for name, *needs in (("apart-1.0",), ("apart-2.0",), ("below-1.0", "apart<2"), ("above-1.0", "apart>=2"),
                         ("around-1.0", "small"), ("small-0.9",)):
        wheel(folder, *name.split("-"), needs)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    yield folder
    shutil.rmtree(folder)


def libraries_of(subject):
    return sorted(path.name.removesuffix(".dist-info") for path in subject.libraries.glob("*.dist-info")
                  if path.name.split("-")[0] in ("apart", "below", "above", "around", "small", "nowhere"))


def needing(*names):
    return {"PKG-INFO": SMALL["PKG-INFO"] + "".join(f"Requires-Dist: {name}\n" for name in names)}


def test_every_dependency_is_there_once_and_no_other_copy_of_the_subject(tmp_path, index):
    "Installed one after another they came in two versions: the second one's needs were resolved without the first."
    subject = prepare_subject(sdist(tmp_path, SMALL | needing("apart", "around", "below")), tmp_path / "store")
    assert libraries_of(subject) == ["apart-1.0", "around-1.0", "below-1.0", "small-1.2"]
    assert "1.0" in (subject.libraries / "apart.py").read_text() and subject.missing == ()
    assert not (subject.libraries / "small.py").exists()  # `around` brought another copy of the subject


def test_requirements_that_cannot_be_had_are_named_and_the_others_come(tmp_path, index):
    subject = prepare_subject(sdist(tmp_path, SMALL | needing("nowhere", "below", "above")), tmp_path / "store")
    assert libraries_of(subject) == ["above-1.0", "apart-2.0", "small-1.2"]  # in order of name; below contradicts above
    assert subject.missing == ("below", "nowhere") and all("\n" not in note for note in subject.notes)


def test_a_requirement_that_names_an_address_runs_no_code_and_pip_sees_no_key(tmp_path, index, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    evil = tmp_path / "evil"
    write(evil, {"pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'b'\nbackend-path = ['.']\n",
                 "b.py": "open('/var/tmp/ran', 'w')\n"})
    subject = prepare_subject(sdist(tmp_path, SMALL | needing(f"evil @ file://{evil}", "apart")), tmp_path / "store")
    assert libraries_of(subject) == ["apart-2.0", "small-1.2"] and not Path("/var/tmp/ran").exists()
    assert len(subject.missing) == 1 and subject.missing[0].startswith("evil") and "would run its code" in " ".join(subject.notes)
    assert "HF_TOKEN" not in libraries._pip_environment() and "PIP_NO_INDEX" in libraries._pip_environment()


SPY = """import os
seen = [os.path.relpath(os.path.join(top, name), HOME) for top, _, names in os.walk(HOME) for name in names]
with open(os.path.join(os.environ["TMPDIR"], "..", "seen"), "w") as file:
    print(*(path for path in seen if not path.startswith(("venv", "wheels"))), file=file)

def prepare_metadata_for_build_wheel(folder, settings=None):
    os.mkdir(os.path.join(folder, "small-1.2.dist-info"))
    with open(os.path.join(folder, "small-1.2.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: small\\nVersion: 1.2\\n")
    return "small-1.2.dist-info"

def build_wheel(*given):
    raise NotImplementedError
"""


@needs_sandbox
def test_code_that_a_package_runs_in_pip_sees_nothing_of_the_home_folder(tmp_path, monkeypatch):
    "Python, an index of archives and pip's settings may lie there: these alone stay."
    secrets = dict.fromkeys((".ssh/id_ed25519", ".netrc", ".aws/credentials", "work/notes.txt"), "secret")
    home = write(tmp_path / "home", secrets | {".config/pip/pip.conf": "[global]\ntimeout = 9\n", "wheels/none": ""})
    (home / "venv").symlink_to(sys.prefix)
    system = "[build-system]\nrequires = []\nbuild-backend = 'spy'\nbackend-path = ['.']\n"
    sdist(home / "wheels", SMALL | {"pyproject.toml": system, "spy.py": f"HOME = {str(home)!r}\n{SPY}"})
    monkeypatch.setattr(sys, "executable", str(home / "venv/bin" / Path(sys.executable).name))
    monkeypatch.setattr(sys, "prefix", str(home / "venv"))
    for name, value in {"HOME": home, "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": home / "wheels"}.items():
        monkeypatch.setenv(name, str(value))
    work = tmp_path / "home/store"  # may lie there too
    work.mkdir()
    assert libraries.download_source("small==1.2", work).name == "small-1.2.tar.gz"
    seen = (work / "seen").read_text().split()
    assert ".config/pip/pip.conf" in seen and not set(secrets) & set(seen), seen


STATED = {
    "setup.cfg": ("[options.extras_require]\ntest =\n    apart>=1\ndocs = sphinx\n", {}),
    "tox.ini": ("[testenv]\ndeps =\n    -r more.txt\n    apart\n    py311: other\ncommands = pytest\n", {}),
    "pyproject.toml": ("[dependency-groups]\ndev = ['apart', {include-group = 'x'}]\n", {}),
    "poetry": ("[tool.poetry.group.dev.dependencies]\napart = '^1.0'\npython = '^3.8'\n", {"as": "pyproject.toml"}),
    "hatch": ("[tool.hatch.envs.test]\ndependencies = ['apart']\n", {"as": "pyproject.toml"}),
    "pdm": ("[tool.pdm.dev-dependencies]\ntest = ['apart']\n", {"as": "pyproject.toml"}),
    "uv": ("[tool.uv]\ndev-dependencies = ['apart']\n", {"as": "pyproject.toml"}),
    "small.egg-info/requires.txt": ("below\n\n[test]\napart\n\n[:python_version < '3']\nother\n", {}),
}


@pytest.mark.parametrize("path", STATED)
def test_where_projects_state_what_their_tests_need(tmp_path, path):
    text, more = STATED[path]
    folder = write(tmp_path / "repo", SMALL | {"test_apart.py": "import apart, other\n", more.get("as", path): text})
    needed = stated_requirements(folder)
    assert any(line.startswith("apart") for line in needed), needed
    assert ("below" in needed) == ("egg-info" in path)


def test_what_a_killed_run_left_is_swept_by_the_next(tmp_path):
    store = tmp_path / "store"
    code = ("import sys, time; from pathlib import Path; from composer_replication.envs.deletion.subject import scratch\n"
            "with scratch(Path(sys.argv[1]), 'subject') as folder:\n    print(folder, flush=True)\n    time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, store], stdout=subprocess.PIPE, text=True) as dead:
        left = Path(dead.stdout.readline().strip())
        with scratch(store, "subject") as own:
            assert left.is_dir() and own.is_dir()  # its owner lives
        dead.kill()
    assert left.is_dir()
    prepare_subject(sdist(tmp_path, SMALL), store)
    assert not left.exists() and not list((store / "scratch").iterdir())
