"""Memory that processes share, in whatever way, counts towards the limit on memory, and counts once."""
import mmap
import os
import sys

import pytest
from sandboxes import FOUR, WAYS, make_tree

from composer_replication.sandbox import limits as limits_page
from composer_replication.sandbox.base import Limits, open_sandbox, sandbox_problem

pytestmark = [pytest.mark.filterwarnings("ignore:LocalSubprocessSandbox"),
              pytest.mark.skipif(sys.platform != "linux", reason="the watch reads /proc")]
MB = 1 << 20


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    "Of the best kind; the same watch looks after every kind's processes."
    kind = "local-unsafe" if sandbox_problem("bubblewrap") else "bubblewrap"
    with open_sandbox(make_tree(tmp_path_factory.mktemp("shared") / "t"), kind=kind) as box:
        yield box


@pytest.mark.parametrize("way", WAYS)
def test_it_counts(box, way):
    code = f"{FOUR}\n{WAYS[way]}\ntime.sleep(60)"
    result = box.exec(["python", "-c", code], limits=Limits(memory_mb=300, wall_s=100.0))
    assert result.cut == "memory", result


# What stays within the limit however it is counted, but for twice.
HONEST = {
    "one block of many processes":
        "m = make(); fill(m)\nfor _ in range(8):\n  if not os.fork(): break\nm[::4096]\ntime.sleep(0.5)",
    "a mapped file of many processes":
        "open('f', 'wb').truncate(60 << 20)\nm = mmap.mmap(os.open('f', os.O_RDWR), 60 << 20); fill(m, 60)\n"
        "for _ in range(8):\n  if not os.fork(): break\nm[::4096]\ntime.sleep(0.5); m.close()",
    "blocks that come and go": "for _ in range(8):\n  m = make(); fill(m); m.close()",
}


@pytest.mark.parametrize("way", HONEST)
def test_it_counts_once(box, way):
    result = box.exec(["python", "-c", f"{FOUR}\n{HONEST[way]}"], limits=Limits(memory_mb=300, wall_s=100.0))
    assert (result.exit_code, result.cut) == (0, None), result
    box.reset()


SCRATCH = {
    "large files":
        "for place in ('/tmp', '/dev/shm'):\n  with open(f'{place}/x', 'wb') as f:\n    for _ in range(60):\n"
        "      f.write(bytes(1 << 20))",
    "empty files": "import os\nfor k in range(10**6): os.close(os.open(f'/dev/shm/{k}', os.O_CREAT | os.O_WRONLY))",
    "folders": "import os\nfor k in range(10**6): os.mkdir(f'/tmp/{k}')",
    "links": "import os\nfor k in range(10**6): os.symlink('x' * 100, f'/tmp/{k}')",
}


@pytest.mark.parametrize("what", SCRATCH)
def test_what_lies_in_scratch_folders_counts(box, what):
    if "Local" in repr(box):
        pytest.skip("its commands share this machine's scratch folders with everybody")
    code = SCRATCH[what] + "\nimport time; time.sleep(60)"
    result = box.exec(["python", "-c", code], limits=Limits(memory_mb=100, wall_s=100.0))
    assert result.cut == "memory", result


SOCKETS = """
import os, socket, time

def tcp():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0)); server.listen()
        return socket.create_connection(server.getsockname()), server.accept()[0]

def udp():
    one, other = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
    other.bind(("127.0.0.1", 0)); one.connect(other.getsockname())
    return one, other

def raised():
    pair = socket.socketpair()
    for side in pair: side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    return pair

def full(make, number):
    kept = []
    for _ in range(number):
        kept.append(make())
        for side in kept[-1]:
            side.setblocking(False)
            try:
                for _ in range(100): side.send(bytes(60_000))
            except OSError: pass
    return kept
"""


@pytest.mark.parametrize("kind", ["tcp", "udp", "socket.socketpair", "raised"])
def test_what_sockets_hold_counts(box, kind):
    if "Local" in repr(box):
        pytest.skip("its commands share this machine's network with everybody")
    code = f"{SOCKETS}\nfor _ in range(9):\n  if not os.fork(): kept = full({kind}, 100); break\ntime.sleep(60)"
    result = box.exec(["python", "-c", code], limits=Limits(memory_mb=300, wall_s=100.0))
    assert result.cut == "memory", result


def test_what_goes_through_sockets_does_not_count(box):
    "Fifty event loops, and 100 MB that are read as they come."
    code = f"""{SOCKETS}
import asyncio, threading
loops = [asyncio.new_event_loop() for _ in range(50)]
one, other = tcp()
threading.Thread(target=lambda: [one.sendall(bytes(1 << 20)) for _ in range(100)] and one.close()).start()
print(sum(map(len, iter(lambda: other.recv(1 << 16), b""))), flush=True)
for loop in loops: loop.close()
"""
    result = box.exec(["python", "-c", code], limits=Limits(memory_mb=300, wall_s=100.0))
    assert (result.stdout, result.cut) == (f"{100 << 20}\n", None), result


def test_without_the_right_to_look_a_block_counts_with_the_length_that_was_seen(monkeypatch):
    "An ordinary user may not look at blocks; one that is unmapped but for a page still counts."
    def closed(path, *given, **more):
        if "map_files" in str(path):
            raise PermissionError(1, "Operation not permitted")
        return look(path, *given, **more)

    look, pids, longest = os.stat, [os.getpid()], {}
    monkeypatch.setattr(os, "stat", closed)
    before = limits_page._shared(pids)
    with mmap.mmap(-1, 50 * MB) as block:
        assert limits_page._shared(pids, longest) - before == 50 * MB
        block.resize(4096)
        assert limits_page._shared(pids, longest) - before == 50 * MB
    assert limits_page._shared(pids, longest) == before


def test_memory_of_a_process_that_hides_is_its_own_status(monkeypatch):
    "To an ordinary user `smaps_rollup` of such a process is closed, its `status` is not."
    def closed(path, *given):
        if "smaps" in str(path):
            raise PermissionError(13, "Permission denied")
        return read(path, *given)

    read = limits_page.Path.read_text
    monkeypatch.setattr(limits_page.Path, "read_text", closed)
    with mmap.mmap(-1, 50 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(bytes(50 * MB))
        assert limits_page._exact_memory(os.getpid()) > 45 * MB


def test_a_process_of_very_many_mappings_is_cut(box):
    "Looking at them would take the watch longer than filling a machine takes."
    code = FOUR + "libc.mmap.restype = ctypes.c_void_p\nkeep = libc.mmap(None, 240 << 20, 1, 0x22, -1, 0)\n" \
        "for k in range(0, 60_000, 2): libc.mprotect(ctypes.c_void_p(keep + 4096 * k), 4096, 3)\ntime.sleep(60)"
    assert box.exec(["python", "-c", code], limits=Limits(memory_mb=600, wall_s=100.0)).cut == "memory"
