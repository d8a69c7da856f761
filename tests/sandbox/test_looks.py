"""What ends while the watch looks, a thread or a descriptor, hides nothing else of its process."""
import contextlib
import glob
import os
import sys
import threading
from pathlib import Path

import pytest

from composer_replication.sandbox import limits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the watch reads /proc")


@pytest.fixture
def gone(monkeypatch):
    "Every look into a folder also shows, first of all, what is no longer there when it is read."
    listdir, iglob = os.listdir, glob.iglob
    monkeypatch.setattr(os, "listdir", lambda path: ["999999999", *listdir(path)])
    monkeypatch.setattr(glob, "iglob", lambda path: iter([path.replace("*", "999999999"), *iglob(path)]))


@contextlib.contextmanager
def forked():
    "A child that ends with the block."
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        yield pid
    finally:
        os.close(writing), os.close(reading)
        os.waitpid(pid, 0)


def test_a_thread_that_ended_hides_no_child_of_the_others(gone):
    with forked() as child:
        assert child in limits.descendants(os.getpid())


def test_a_thread_that_ended_hides_no_living_one(gone, monkeypatch):
    fields, first = limits._fields, f"/proc/{os.getpid()}"
    monkeypatch.setattr(limits, "_fields", lambda place: ["Z"] if place == first else fields(place))
    assert limits._place(os.getpid()) == f"{first}/task/{threading.main_thread().native_id}"
    with pytest.raises(ProcessLookupError, match="has ended"):
        limits._place(999_999_999)


def test_a_descriptor_that_was_closed_hides_no_file_without_a_name(gone, tmp_path):
    path = Path(tmp_path, "file")
    before, _ = limits._nameless([os.getpid()])
    with path.open("wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        path.unlink()
        assert limits._nameless([os.getpid()])[0] - before >= 1 << 20
