"""What every kind of sandbox must keep, as classes of tests; and a Docker daemon for the time of the tests."""
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import pytest
from waiting import wait_until

from composer_replication.sandbox.base import Limits, Sandbox, open_sandbox, sandbox_problem
from composer_replication.sandbox.boxes import state_folder
from composer_replication.sandbox.folders import SandboxProblem

HERE = Path(__file__).parents[1]


def make_tree(top: Path) -> Path:
    "A small tree with everything a copy must keep."
    (top / "src").mkdir(parents=True)
    (top / "src/one.py").write_text("x = 1\n")
    (top / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (top / "run.sh").chmod(0o755)
    (top / "empty").mkdir()
    (top / "link").symlink_to("src/one.py")
    (top / "Grüße.txt").write_bytes("ä\n".encode())
    (top / "bytes.bin").write_bytes(bytes(range(256)))
    return top


def make_libraries(top: Path) -> Path:
    (top / "helper").mkdir(parents=True)
    (top / "helper/__init__.py").write_text("y = 2\n")
    top.chmod(0o755)
    return top


def look(top: Path) -> dict:
    "Kind, permissions and content of all below a folder."
    seen = {}
    for path in sorted(top.rglob("*")):
        mode, name = path.lstat().st_mode, str(path.relative_to(top))
        seen[name] = (mode, os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None)
    return seen


@contextlib.contextmanager
def own_state(patch):
    "A state of our own, so that other runs on this machine do not count; what takes long to make is shared with them."
    whole = state_folder()
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="composer-test-") as folder:
        os.chmod(folder, 0o755)
        for path in (*whole.glob("rootfs-*"), *whole.glob("trees")):
            os.symlink(path, f"{folder}/{path.name}")
        patch.setenv("COMPOSER_STATE", folder)
        yield Path(folder)


class Promises:
    "The protocol, on any kind. A subclass names its `kind`."
    kind: str

    @pytest.fixture(scope="class")
    def shared(self, tmp_path_factory):
        "One sandbox for the whole class."
        if problem := sandbox_problem(self.kind):
            pytest.skip(problem)
        top = tmp_path_factory.mktemp("trees")
        with open_sandbox(make_tree(top / "tree"), make_libraries(top / "libraries"), Limits(wall_s=120.0), self.kind,
                          {"/judge": make_libraries(top / "judge")}) as box:
            box.original = top / "tree"
            yield box

    @pytest.fixture
    def box(self, shared):
        "The shared sandbox, as it was at the start."
        shared.reset()
        return shared

    def python(self, box, code, **settings):
        return box.exec(["python", "-c", code], **settings)

    def test_what_comes_of_a_command(self, box, monkeypatch):
        assert isinstance(box, Sandbox)
        result = self.python(box, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
        assert (result.exit_code, result.stdout, result.stderr, result.cut) == (3, "out\n", "err\n", None)
        assert 0 < result.seconds < 120
        assert self.python(box, "import os; os.kill(os.getpid(), 9)").exit_code == 137  # 128 and the signal
        result = box.exec(["no-such-program"])
        assert (result.exit_code, result.cut) == (127, None) and "no-such-program" in result.stderr
        words = ["a b", "$HOME", "", "'\"", "-x", "ü", "line\nbreak", "*"]
        result = box.exec(["python", "-c", "import sys; print(ascii(sys.argv[1:]))", *words])
        assert result.stdout.strip() == ascii(words)
        monkeypatch.setenv("COMPOSER_SECRET", "told")
        code = "import os; print(os.environ.get('COMPOSER_SECRET'), os.environ['MINE'], os.environ['LANG'])"
        assert self.python(box, code, env={"MINE": "a=b c"}).stdout == "None a=b c C.UTF-8\n"
        for bad in ([], [""], ["a\0b"]):
            with pytest.raises(SandboxProblem):
                box.exec(bad)
        with pytest.raises(SandboxProblem):
            box.exec(["true"], env={"A=B": "c"})

    def test_standard_input(self, box):
        data = os.urandom(1 << 20)
        result = box.exec(["python", "-c", "import sys,zlib; print(zlib.crc32(sys.stdin.buffer.read()))"], stdin=data)
        assert result.stdout.strip() == str(zlib.crc32(data))
        assert self.python(box, "print(repr(input()))").stderr.endswith("EOFError: EOF when reading a line\n")
        assert box.exec(["true"], stdin=b"x" * (1 << 22)).exit_code == 0  # nobody reads it

    def test_working_folder(self, box):
        assert self.python(box, "import one; print(one.x)", cwd="src").stdout == "1\n"
        assert box.exec(["pwd"], cwd="src").stdout.strip() == box.place("/repo/src")
        for bad in ("none", "../..", "/etc", "link", "src/one.py"):
            with pytest.raises(SandboxProblem):
                box.exec(["true"], cwd=bad)

    def test_python_has_the_libraries_and_nothing_of_ours(self, box):
        assert box.exec(["python", "-I", "-c", "import helper; print(helper.y)"]).stdout == "2\n"
        assert box.exec(["python3", "-I", "-c", "import helper"]).exit_code == 0
        for name in ("torch", "composer_replication", "pip"):
            assert box.exec(["python", "-I", "-c", f"import {name}"]).exit_code == 1
        assert self.python(box, "import sys; print(sys.version_info[:2])").stdout.strip() == str(tuple(sys.version_info[:2]))
        assert box.exec(["cat", box.place("/judge/helper/__init__.py")]).stdout == "y = 2\n"

    def test_copy_is_complete_and_the_tree_untouched(self, box):
        before = look(box.original)
        assert box.files() == sorted(name for name, (mode, content) in before.items()
                                     if (box.original / name).is_file() and not (box.original / name).is_symlink())
        for name in box.files():
            assert box.read(name) == before[name][1]
        assert box.exec(["./run.sh"]).stdout == "ran\n" and box.exec(["cat", "link"]).stdout == "x = 1\n"
        box.exec(["sh", "-c", "echo y >> src/one.py; rm run.sh; chmod 777 empty; echo more >> link"])
        assert look(box.original) == before

    def test_read_and_write(self, box):
        box.write("new/deep/two.py", b"y = 2\n")
        assert box.exec(["cat", "new/deep/two.py"]).stdout == "y = 2\n"
        assert self.python(box, "open('new/deep/two.py', 'a').write('z = 3\\n'); open('new/three', 'w')").exit_code == 0
        assert box.read("new/deep/two.py") == b"y = 2\nz = 3\n"
        box.write("run.sh", b"#!/bin/sh\necho again\n")
        assert box.exec(["./run.sh"]).stdout == "again\n"
        for bad in ("", ".", "/etc/passwd", "../x", "src/../../x", "a\0b", "\ud800", "src", "missing", "src/one.py/x", "x" * 300):
            with pytest.raises(SandboxProblem) as told:
                box.read(bad)
            assert len(str(told.value)) < 500 and "\n" not in str(told.value)
        for bad in ("", "/x", "../x", "src", "link/x", "x" * 300):
            with pytest.raises(SandboxProblem):
                box.write(bad, b"")

    def test_links_are_never_followed(self, box, tmp_path):
        secret = tmp_path / "secret.txt"
        secret.write_text("secret")
        box.exec(["sh", "-c", f"ln -s {secret} leak; ln -s {tmp_path} out; ln -s /etc etc; ln -sf {secret} src/one.py"])
        for path in ("leak", "out/secret.txt", "etc/passwd", "src/one.py"):
            assert path not in box.files()
            with pytest.raises(SandboxProblem):
                box.read(path)
        with pytest.raises(SandboxProblem):
            box.write("out/planted", b"x")
        box.write("leak", b"mine")  # in place of the link, not through it
        assert secret.read_text() == "secret" and box.read("leak") == b"mine" and os.listdir(tmp_path) == ["secret.txt"]

    def test_reset_restores_exactly(self, box):
        where = Path(box._repo)
        first = look(where)
        box.exec(["sh", "-c", "rm -rf * .[a-z]*; echo x > run.sh; mkdir a; mkfifo p; mkdir -p 1/2/3; chmod 000 1/2; ln -s / l"])
        assert look(where) != first
        box.reset()
        assert look(where) == look(box.original) == first
        assert box.exec(["./run.sh"]).stdout == "ran\n"  # commands see the reset tree, and may write to it
        assert box.exec(["sh", "-c", "echo n >> src/one.py && touch empty/new"]).exit_code == 0

    def test_odd_names(self, box):
        names = r"b'\xff\xfe', b'a\nb', b'-rf', b' ', b'x' * 255, '\u202e'.encode()"
        code = f"for n in ({names}): open(n, 'wb').write(b'o')"
        assert self.python(box, code).exit_code == 0
        odd = [name for name in box.files() if name not in ("bytes.bin", "Grüße.txt", "run.sh", "src/one.py")]
        assert len(odd) == 6 and all(box.read(name) == b"o" for name in odd)
        box.reset()
        assert not set(odd) & set(box.files())

    def test_wall_time(self, box):
        began = time.monotonic()
        result = box.exec(["sleep", "60"], limits=Limits(wall_s=0.3))
        assert result.cut == "wall" and result.exit_code is None and time.monotonic() - began < 50
        assert box.exec(["true"]).exit_code == 0

    def test_command_that_closes_its_output_and_goes_on(self, box):
        result = box.exec(["sh", "-c", "echo first; exec >&- 2>&-; sleep 0.5; echo x > later; exit 3"])
        assert (result.exit_code, result.stdout, box.read("later")) == (3, "first\n", b"x\n")
        assert box.exec(["sh", "-c", "exec >&- 2>&-; sleep 60"], limits=Limits(wall_s=0.5)).cut == "wall"

    def test_output(self, box):
        limits = Limits(output_bytes=10_000, wall_s=120.0)
        for argv in (["yes"], ["sh", "-c", "yes >&2"], ["sh", "-c", "yes & yes >&2"]):
            result = box.exec(argv, limits=limits)
            assert result.cut == "output" and 10_000 <= len(result.stdout) + len(result.stderr) <= 20_000
        exact = box.exec(["python", "-c", "print('x' * 9999)"], limits=limits)
        assert exact.cut is None and len(exact.stdout) == 10_000
        assert "\ufffd" in box.exec(["cat", "bytes.bin"]).stdout

    def test_processor_time(self, box):
        busy = ("import os, signal as s\nfor n in (s.SIGXCPU, s.SIGTERM, s.SIGINT): s.signal(n, s.SIG_IGN)\n"
                "os.fork()\nwhile True: pass")  # two of them share the limit
        assert self.python(box, busy, limits=Limits(cpu_s=1, wall_s=120.0)).cut == "cpu"

    def test_limits_of_one_process_and_of_a_write(self, box):
        result = self.python(box, "bytearray(3 << 30)")
        assert result.exit_code == 1 and "MemoryError" in result.stderr
        result = self.python(box, "f = open('big', 'wb', buffering=0)\nfor _ in range(9): f.write(b'x' * (1 << 20))",
                             limits=Limits(file_mb=4))
        assert result.exit_code == 1 and "File too large" in result.stderr
        assert len(box.read("big")) == 4 << 20
        with pytest.raises(SandboxProblem, match="limit"):
            box.write("big", bytes((64 << 20) + 1))

    def test_memory_of_many_processes(self, box):
        code = "import os, time\nfor _ in range(6):\n  if not os.fork(): x = b'x' * (100 << 20); time.sleep(30)\ntime.sleep(30)"
        result = self.python(box, code, limits=Limits(memory_mb=300, wall_s=120.0))
        assert result.cut == "memory" or result.exit_code, result
        assert box.exec(["true"]).exit_code == 0

    def test_a_full_disk_may_shrink(self, box):
        fill = "for i in range(60):\n  with open(f'f{i}', 'wb') as f: f.write(b'x' * (1 << 20))"
        limits = Limits(disk_mb=20, wall_s=120.0)
        assert self.python(box, fill, limits=limits).cut == "disk"
        remove = "import os\nfor n in os.listdir('.'):\n  if n[0] == 'f': os.remove(n)"
        assert self.python(box, remove, limits=limits).exit_code == 0
        assert self.python(box, "open('f', 'wb').write(b'x' * (1 << 20))", limits=limits).exit_code == 0

    def test_close_ends_a_running_command(self, tmp_path):
        if problem := sandbox_problem(self.kind):
            pytest.skip(problem)
        box, results = open_sandbox(make_tree(tmp_path / "t"), kind=self.kind), []
        sleeps = ["sh", "-c", "touch begun; sleep 600"]
        runner = threading.Thread(target=lambda: results.append(box.exec(sleeps, limits=Limits(wall_s=600.0))))
        runner.start()
        assert wait_until(Path(box._repo, "begun").exists)
        box.close()
        runner.join(120)
        assert not runner.is_alive() and results[0].cut == "closed" and not box._box.path.exists()
        box.close()
        for call in (box.files, lambda: box.exec(["true"]), lambda: box.read("run.sh"), box.reset):
            with pytest.raises(SandboxProblem, match="dead"):
                call()

    def test_bad_trees(self, tmp_path):
        if problem := sandbox_problem(self.kind):
            pytest.skip(problem)
        good = make_tree(tmp_path / "t")
        bad = [{"tree": tmp_path / "none"}, {"tree": good / "run.sh"}, {"libraries": tmp_path / "none"}]
        bad += [{"mounts": {name: good}} for name in ("/usr", "judge", "/repo", "/a/b")]
        bad += [{"mounts": {"/judge": tmp_path / "none"}}]
        for arguments in bad:
            with pytest.raises(SandboxProblem) as told:
                open_sandbox(**{"tree": good, "kind": self.kind} | arguments)
            assert "\n" not in str(told.value)


class Isolation:
    "What a kind that isolates must keep besides, against a hostile command."

    def still_works(self, box):
        result = box.exec(["sh", "-c", "echo fine"])
        assert (result.exit_code, result.stdout) == (0, "fine\n")

    def test_network_is_unreachable(self, box):
        with socket.create_server(("127.0.0.1", 0)) as server:
            places = [("1.1.1.1", 53), ("10.0.0.1", 80), server.getsockname()]
            code = (f"import socket\nfor place in {places}:\n  try: print(socket.create_connection(place, 2))\n"
                    "  except OSError as error: print(error)\nprint([n for _, n in socket.if_nameindex()])")
            *problems, interfaces = self.python(box, code).stdout.splitlines()
        assert [problem.split()[-1] for problem in problems] == ["unreachable", "unreachable", "refused"]
        assert interfaces in ("['lo']", "[]")

    def test_no_writes_outside(self, box):
        library = f"/usr/lib/python{sys.version_info.major}.{sys.version_info.minor}"
        for place in ("/x", "/usr/x", "/usr/bin/sh", "/etc/passwd", "/dev/x", "/proc/x", "/proc/sys/kernel/core_pattern",
                      "/judge/x", "/judge/helper/__init__.py", f"{library}/os.py", f"{library}/site-packages/helper/__init__.py"):
            result = box.exec(["sh", "-c", f"echo x >> {place}"])
            assert result.exit_code not in (0, None), place

    def test_scratch_is_bounded(self, box):
        for place in ("/tmp", "/dev/shm"):
            code = f"for i in range(9):\n  with open(f'{place}/{{i}}', 'wb') as f: f.write(b'x' * (30 << 20))"
            assert "No space left" in self.python(box, code).stderr
            box.exec(["sh", "-c", f"rm -f {place}/*"])

    def test_nothing_of_the_host_in_sight(self, box):
        assert int(self.python(box, "import os; print(sum(map(str.isdigit, os.listdir('/proc'))))").stdout) <= 3
        for place in ("/root", "/home", "/work", "/var", "/opt", "/srv", "/run/docker.sock", str(HERE)):
            assert not os.path.exists(place) or box.exec(["ls", place]).exit_code != 0, place
        assert "COMPOSER" not in box.exec(["env"]).stdout
        assert str(HERE) not in box.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"]).stdout

    def test_no_rights(self, box):
        code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print('uid', os.getuid() != 0, os.geteuid() != 0)
print('setuid', libc.setuid(0)); print('mount', libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))
print('userns', libc.unshare(0x10000000)); print('netns', libc.unshare(0x40000000)); print('chroot', libc.chroot(b'/tmp'))
print(open('/proc/self/status').read())"""
        told = self.python(box, code).stdout
        assert "uid True True" in told
        for what in ("setuid", "mount", "userns", "netns", "chroot"):
            assert f"{what} -1" in told, what
        assert "CapEff:\t0000000000000000" in told and "CapBnd:\t0000000000000000" in told and "NoNewPrivs:\t1" in told

    def test_fork_bomb(self, box):
        limits = Limits(wall_s=2.0, processes=32)
        bomb = "import os, time\nfor _ in range(12):\n  try: os.fork()\n  except OSError: pass\ntime.sleep(60)"  # 4,096 at most
        result = self.python(box, bomb, limits=limits)
        assert result.cut in ("wall", "cpu", "processes") and result.seconds < 300  # a second or two on a quiet machine
        self.still_works(box)

    def test_threads_are_counted(self, box):
        code = ("from threading import Timer\ntry:\n  for n in range(500): Timer(1, print).start()\n"
                "except RuntimeError: pass\nprint(n, flush=True)\nimport os; os._exit(0)")
        assert int(self.python(box, code, limits=Limits(processes=64, wall_s=120.0)).stdout) <= 90

    def test_kills_its_parent(self, box):
        code = "import os\nfor p in (os.getppid(), 1, -1):\n  try: os.kill(p, 9)\n  except OSError: pass\nprint('here')"
        result = self.python(box, code)
        assert result.stdout in ("here\n", "")
        self.still_works(box)

    def test_memory_that_forks_share_counts_once(self, box):
        code = "import os, time\nx = b'x' * (100 << 20)\nfor _ in range(6):\n  if not os.fork(): break\ntime.sleep(1)"
        assert self.python(box, code, limits=Limits(memory_mb=300, wall_s=120.0)).exit_code == 0

    @pytest.mark.parametrize("code", [
        pytest.param("for i in range(99):\n  with open(f'f{i}', 'wb') as f: f.write(b'x' * (8 << 20))", id="large files"),
        pytest.param("import os\nwhile True: os.close(os.open(os.urandom(8).hex(), os.O_CREAT | os.O_WRONLY))", id="empty files"),
        pytest.param("import os\nfor i in range(10**6): os.mkdir('d'); os.chdir('d')", id="deep folders"),
        pytest.param("import os\nkeep = []\nwhile True:\n  f = open('f', 'wb', buffering=0); os.unlink('f'); keep.append(f)\n"
                     "  f.write(b'x' * (8 << 20))", id="files without a name"),
        pytest.param("import os\nopen('f', 'w')\nwhile True: os.link('f', os.urandom(8).hex())", id="hard links"),
        pytest.param("import os\nwhile True: os.symlink('x' * 4000, os.urandom(8).hex())", id="links"),
        pytest.param("import os\nos.makedirs('a/b'); os.chdir('a/b'); os.chmod('..', 0)\nwhile True:\n"
                     "  with open(os.urandom(8).hex(), 'wb') as f: f.write(b'x' * (8 << 20))", id="below a closed folder")])
    def test_fills_the_disk(self, box, code):
        result = self.python(box, code, limits=Limits(disk_mb=5, file_mb=9, wall_s=120.0))
        assert result.cut == "disk", result
        self.still_works(box)
        try:
            box.files()
        except SandboxProblem as problem:  # hard links cost no disk: a fast machine makes more of them than a tree may hold
            assert "files and folders: remove some of them" in str(problem)
        began = time.monotonic()
        box.reset()
        assert time.monotonic() - began < 120 and look(Path(box._repo)) == look(box.original)

    def test_the_limit_on_disk_holds_after_it_was_passed(self, box):
        small = Limits(disk_mb=8, file_mb=9, wall_s=120.0)
        deep = "import os\nfor i in range(80): os.mkdir('d'); os.chdir('d')"  # too deep to be counted
        assert self.python(box, deep, limits=small).cut == "disk" and box._files.usage.bytes < 2 << 20
        filled = "for i in range(99):\n  with open(f'f{i}', 'wb') as f: f.write(b'x' * (8 << 20))"
        assert self.python(box, filled, limits=small).cut == "disk"
        assert box.exec(["sh", "-c", "rm -rf d f*"], limits=small).cut is None  # it may shrink
        assert self.python(box, filled, limits=small).cut == "disk"
        with pytest.raises(SandboxProblem, match="filled the disk again and again"):
            box.exec(["ls"])
        box._dead = None  # the tests of this class share it
        box.reset()
        self.still_works(box)

    def test_a_file_counts_what_it_holds_and_once(self, box):
        for _ in range(40):
            box.write("same.bin", b"x" * (box.limits.disk_mb << 20 >> 5))
        assert len(box.read("same.bin")) == box.limits.disk_mb << 20 >> 5
        assert self.python(box, "open('f', 'wb').truncate(60 << 20)", limits=Limits(disk_mb=20)).exit_code == 0
        assert box._files.usage.bytes < 20 << 20

    def test_no_daemon_outlives_its_command(self, box):
        code = ("import os, time\nif not os.fork():\n  os.setsid()\n  if not os.fork():\n"
                "    while True: open('beat', 'a').write('.'); time.sleep(0.02)\n  os._exit(0)\n"
                "while not os.path.exists('beat'): time.sleep(0.02)")
        assert self.python(box, code).exit_code == 0
        size = len(box.read("beat"))
        time.sleep(0.5)
        assert len(box.read("beat")) == size

    def test_pipes_devices_and_closed_folders_are_no_trap(self, box):
        self.python(box, "import os, socket\nos.mkfifo('src/pipe.py'); socket.socket(socket.AF_UNIX).bind('sock')\n"
                         "os.mkdir('shut'); open('shut/in', 'w')\nfor n in ('shut', 'src', '.'): os.chmod(n, 0)")
        began = time.monotonic()
        assert {"src/one.py", "shut/in"} <= set(box.files()) and not {"src/pipe.py", "sock"} & set(box.files())
        for path in ("src/pipe.py", "sock"):
            with pytest.raises(SandboxProblem):
                box.read(path)
        assert box.exec(["pwd"], cwd="shut").exit_code == 0
        self.still_works(box)
        assert time.monotonic() - began < 60

    def test_terminal_and_tracing_of_others(self, box):
        code = ("import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))\n"  # 16: attach
                "try: print(open('/proc/1/mem', 'rb').read(1))\nexcept OSError: print('no')")
        assert self.python(box, code).stdout == "-1\nno\n"
        assert box.exec(["sh", "-c", "echo x > /dev/tty"]).exit_code

    def test_two_sandboxes_do_not_see_each_other(self, box, tmp_path):
        with open_sandbox(make_tree(tmp_path / "t"), kind=self.kind) as other:
            other.write("other-file", b"x")
            assert "other-file" not in box.exec(["find", "/", "-name", "other-file"]).stdout
            if os.getuid() == 0:
                assert other._box.user != box._box.user


# Memory that is shared

# Four processes of 100 MB each, under a limit of 300 MB: none is too large by itself.
FOUR = """
import ctypes, mmap, os, threading, time
libc = ctypes.CDLL(None)

def fill(m, mb=100):
    global kept  # while the process lives
    kept = m
    for _ in range(mb): m.write(bytes(1 << 20))

def make(): return mmap.mmap(-1, 100 << 20)

def four(work):
    for _ in range(4):
        if not os.fork(): work(); time.sleep(60)

def after_first_thread(work):
    lock = threading.Lock()
    threading.Thread(target=lambda: (time.sleep(0.3), work(), time.sleep(60))).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit, of this thread alone
"""
WAYS = {
    "anonymous": "four(lambda: fill(make()))",
    "/dev/zero": "four(lambda: fill(mmap.mmap(os.open('/dev/zero', os.O_RDWR), 100 << 20)))",
    "handed down by a parent that lets go":
        "for _ in range(4):\n  m = make()\n  if not os.fork(): fill(m); time.sleep(60)\n  m.close()",
    "whose pages nobody maps any more":
        "keep = []\nfor _ in range(4):\n  m = make(); fill(m); m.madvise(mmap.MADV_DONTNEED)\n"
        "  if not os.fork(): time.sleep(60)\n  m.close()",
    "of which one page is left mapped":
        "def work():\n  m = make(); fill(m)\n"
        "  at = ctypes.addressof(ctypes.c_char.from_buffer(m)); rest = (100 << 20) - 4096\n"
        "  libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t(rest))\n"
        "four(work)",
    "shared by pairs": "for _ in range(4):\n  m = make(); fill(m)\n  if not os.fork(): time.sleep(60)\n  m.close()",
    "by processes that hide": "libc.prctl(4, 0)\nfour(lambda: fill(make()))",
    "by processes whose first thread ended": "four(lambda: after_first_thread(lambda: fill(make())))",
    "not shared, by processes whose first thread ended":
        "four(lambda: after_first_thread(lambda: fill(mmap.mmap(-1, 100 << 20, 0x22))))",
}


@contextlib.contextmanager
def dockerd(folder: Path):
    "A Docker daemon of our own, under `folder` (a short path: sockets' names are short), for the time of a `with` block."
    program = shutil.which("dockerd") or shutil.which("dockerd", path="/usr/sbin:/sbin")
    if program is None or os.getuid():
        pytest.skip("a Docker daemon needs root and its program: apt-get install -y docker.io")
    address = f"unix://{folder}/s"
    with open(folder / "log", "wb") as log:
        daemon = subprocess.Popen([program, "--data-root", folder / "data", "--exec-root", folder / "exec", "-H", address,
                                   "--pidfile", folder / "pid", "--iptables=false", "--bridge=none", "--storage-driver=overlay2"],
                                  stdout=log, stderr=log, start_new_session=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", address)
            until = time.monotonic() + 30
            while sandbox_problem("docker") and daemon.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
            if problem := sandbox_problem("docker"):
                pytest.skip(f"no Docker daemon can run here: {problem} {(folder / 'log').read_text()[-200:]}")
            yield address
    finally:
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout=200)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, 9)
        daemon.wait(timeout=100)
