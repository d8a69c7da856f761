"""Every kind of sandbox keeps the same promises; bubblewrap keeps them against hostile commands too."""
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import fastcore
import psutil
import pytest
from sandboxes import HERE, Isolation, Promises, make_tree

from composer_replication.sandbox import bubblewrap, docker
from composer_replication.sandbox.base import _KINDS, open_sandbox, sandbox_kind, sandbox_kinds, sandbox_problem
from composer_replication.sandbox.folders import SandboxProblem
from composer_replication.sandbox.limits import ExecResult
from composer_replication.sandbox.local import LocalSubprocessSandbox
from composer_replication.sandbox.rootfs import minimal_tree, tree_site_packages


class TestLocal(Promises):
    kind = "local-unsafe"


class TestBubblewrap(Promises, Isolation):
    kind = "bubblewrap"


def test_auto_takes_bubblewrap_and_nothing_else_unless_the_code_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("COMPOSER_SANDBOX", raising=False)
    tree = make_tree(tmp_path / "t")
    if sandbox_problem("bubblewrap") is None:
        with open_sandbox(tree) as box:
            assert isinstance(box, bubblewrap.BubblewrapSandbox)
    monkeypatch.setattr(bubblewrap, "bubblewrap_problem", lambda: "it is missing: apt-get install bubblewrap")
    monkeypatch.setattr(docker, "docker_problem", lambda: "nor does a daemon answer.")
    with pytest.warns(UserWarning, match="sandbox: it is missing.* nor does a"), open_sandbox(tree, own_code=True) as box:
        assert isinstance(box, LocalSubprocessSandbox)
    with pytest.raises(SandboxProblem, match="it is missing"):
        open_sandbox(tree, kind="bubblewrap")


class Played:
    "A kind of one's own."

    def __init__(self, tree, libraries, limits, mounts):
        self.limits = limits

    def exec(self, argv, **settings):
        return ExecResult(0, " ".join(argv), "", 0.0)


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr("composer_replication.sandbox.base._KINDS", dict(_KINDS))
    return lambda problem=None, **more: sandbox_kind("played", lambda: problem, **more)(Played)


def test_a_kind_of_ones_own_is_offered_tried_in_its_turn_and_asked_why_not(played, monkeypatch):
    monkeypatch.delenv("COMPOSER_SANDBOX", raising=False)
    monkeypatch.setattr(bubblewrap, "bubblewrap_problem", lambda: "no.")
    played(rank=15)
    assert [kind for kind in sandbox_kinds() if kind in ("bubblewrap", "played", "docker", "local-unsafe")] == [
        "bubblewrap", "played", "docker", "local-unsafe"]
    assert open_sandbox(".", kind="played").exec(["ls"]).stdout == "ls"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it isolates, so auto warns of nothing
        assert isinstance(open_sandbox("."), Played)
    played("it sleeps.", rank=15)
    assert sandbox_problem("played") == "it sleeps."
    with pytest.raises(SandboxProblem, match="it sleeps"):
        open_sandbox(".", kind="played")
    with pytest.raises(SandboxProblem, match="'jail'; use bubblewrap, played, docker, local-unsafe or auto"):
        open_sandbox(".", kind="jail")


def test_auto_says_all_reasons_where_nothing_works(monkeypatch):
    monkeypatch.delenv("COMPOSER_SANDBOX", raising=False)
    monkeypatch.setattr("composer_replication.sandbox.base._KINDS", {})
    sandbox_kind("one", lambda: "one is missing.", rank=1)(Played)
    sandbox_kind("two", lambda: "two is missing.", rank=2)(Played)
    with pytest.raises(SandboxProblem, match="one is missing. two is missing."):
        open_sandbox(".")


def test_a_failure_of_bubblewrap_is_no_result_and_a_command_cannot_feign_one(tmp_path, monkeypatch):
    if problem := sandbox_problem("bubblewrap"):
        pytest.skip(problem)
    with open_sandbox(make_tree(tmp_path / "t"), kind="bubblewrap") as box:
        feigned = box.exec(["sh", "-c", "echo 'bwrap: no' >&2; exit 1"])
        assert (feigned.exit_code, feigned.cut) == (1, None)
        monkeypatch.setattr(bubblewrap, "_ISOLATION", ["--no-such-option"])
        with pytest.raises(SandboxProblem, match="bubblewrap failed"):
            box.exec(["true"])


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user's commands are its own, and seen")
def test_root_that_may_not_look_into_others_is_told(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_sees_others", lambda: False)
    assert "CAP_SYS_PTRACE" in bubblewrap.bubblewrap_problem.__wrapped__()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"),
                    reason="only root can lay a capability down, by setpriv")
def test_the_capability_is_read_as_it_is():
    ask = "from composer_replication.sandbox.bubblewrap import _sees_others; print(_sees_others())"
    without = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    said = [subprocess.run([*words, sys.executable, "-c", ask], capture_output=True, text=True, timeout=60).stdout.strip()
            for words in ([], without)]
    assert said == [str(bubblewrap._sees_others()), "False"]


def test_minimal_tree_holds_the_interpreter_and_nothing_to_recover():
    tree = minimal_tree()
    assert not [path for kind in ("whl", "dist-info", "egg-info") for path in tree.rglob(f"*.{kind}")]
    for path in [tree, *tree.rglob("*")]:
        mode = path.lstat().st_mode
        assert path.is_symlink() or (not mode & 0o7022 and mode & 0o004), path
        if path.is_symlink():
            assert not os.readlink(path).startswith("/"), path


def test_the_trees_interpreter_finds_what_is_bound_over_its_packages():
    "Debian's own Python looks in another folder: on Debian with bubblewrap no submission could be judged."
    packages = minimal_tree() / tree_site_packages().lstrip("/")
    assert (minimal_tree() / "usr/lib/python3/dist-packages").resolve() == packages.resolve()


@pytest.mark.skipif(not Path("/lib/x86_64-linux-gnu/libpthread.so.0").exists(),
                    reason="another system's names of libraries")
def test_minimal_tree_has_what_compiled_wheels_load():
    "hypothesis and coverage's tracer name libpthread, which nothing of the interpreter does: both failed to load."
    libraries = {path.name for path in minimal_tree().rglob("*.so.*")}
    assert {"libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libgcc_s.so.1", "libstdc++.so.6"} <= libraries


ORDINARY = r"""
import os, sys
from pathlib import Path
from composer_replication.sandbox.base import Limits, open_sandbox, sandbox_problem
assert os.getuid() == 54321
problem = sandbox_problem("bubblewrap")
if problem:
    sys.exit(print("skip", problem))

COUNT = '''
import os, time
n = 0
try:
  while os.fork(): n += 1
  time.sleep(2)
except OSError: print(n)
'''
MEMORY = "import os, time\nfor _ in range(6):\n  if not os.fork(): x = b'x' * (100 << 20); time.sleep(30)\ntime.sleep(30)"
HIDE = "import ctypes\nctypes.CDLL(None).prctl(4, 0)\n"  # from now on only root can look into it
CLOSED = '''
import os
os.makedirs('a/b'); os.chdir('a/b'); os.chmod('..', 0)
while True: open(os.urandom(8).hex(), 'wb').write(b'x' * (8 << 20))
'''
NAMELESS = '''
import os
keep = []
while True:
  f = open('f', 'wb', buffering=0); os.unlink('f'); f.write(b'x' * (8 << 20)); keep.append(f)
'''

with open_sandbox(Path(sys.argv[1]), kind="bubblewrap") as box:
    def python(code, **limits):
        return box.exec(["python", "-c", code], limits=Limits(wall_s=120.0, **limits))

    assert box.exec(["./run.sh"]).stdout == "ran\n"
    counted = python(COUNT, processes=16)
    assert 5 <= int(counted.stdout) <= 18, counted
    for code, settings, cut in ((MEMORY, {"memory_mb": 300}, "memory"), (HIDE + MEMORY, {"memory_mb": 300}, "memory"),
                                (CLOSED, {"disk_mb": 24}, "disk"), (NAMELESS, {"disk_mb": 24}, "disk"),
                                (HIDE + NAMELESS, {"disk_mb": 24}, "hidden")):
        result = python(code, **settings)
        assert result.cut == cut or (result.cut, cut) == ("hidden", "memory"), (code, result)
        box.reset()
    box.exec(["sh", "-c", "mkdir -p d/e; chmod 000 d/e d ."])
    assert "run.sh" in box.files()
    box.reset()
    assert box.exec(["ls"]).stdout.split() == sorted(os.listdir(sys.argv[1]))
assert not list((Path(os.environ["COMPOSER_STATE"]) / "boxes").iterdir())
print("kept")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else; the other tests ran as an ordinary "
                    "user")
def test_promises_hold_for_an_ordinary_user(tmp_path):
    "Run by the minimal tree's own interpreter, which every user can reach."
    if problem := sandbox_problem("bubblewrap"):
        pytest.skip(problem)
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        os.chown(folder, 54321, 54321)
        os.chmod(folder, 0o755)
        tree = make_tree(tmp_path / "t")
        subprocess.run(["cp", "-a", tree, f"{folder}/t"], check=True)
        subprocess.run(["chmod", "-R", "a+rX", f"{folder}/t"], check=True)
        os.makedirs(f"{folder}/path/composer_replication")
        for source in (HERE / "composer_replication/core", HERE / "composer_replication/sandbox"):
            subprocess.run(["cp", "-r", source, f"{folder}/path/composer_replication/"], check=True)
        for package in (fastcore, psutil):  # what these rooms stand on
            subprocess.run(["cp", "-r", Path(package.__file__).parent, f"{folder}/path/"], check=True)
        subprocess.run(["chmod", "-R", "a+rX", f"{folder}/path"], check=True)
        rootfs = minimal_tree()
        library = next(rootfs.glob("usr/lib*/**/libc.so.6")).parent
        become = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"]
        env = {"PATH": "/usr/bin:/bin:/usr/sbin", "PYTHONPATH": f"{folder}/path", "COMPOSER_STATE": f"{folder}/state",
               "LD_LIBRARY_PATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([*become, rootfs / "usr/bin/python3", "-c", ORDINARY, f"{folder}/t"], env=env, cwd=folder,
                              capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        if done.stdout.startswith("skip"):
            pytest.skip(done.stdout)
        assert done.stdout == "kept\n"
