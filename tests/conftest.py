"""What several tests share."""
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# A shell that runs the tests in the background has Ctrl-C ignored, and every process that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    "The folder of real traces, tasks and tokenizers; skips where it is absent."
    path = Path(os.environ.get("COMPOSER_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip("the shared data is not here: set COMPOSER_DATA to its folder")
    return path


# The site takes minutes to build and one core of two: it is built while the other tests run, and its own tests come last.

ROOT = Path(__file__).parents[1]
SITE, BUILD = ROOT / "docs" / "_build" / "html", pytest.StashKey()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "site" in getattr(item, "fixturenames", ()))


def pytest_collection_finish(session):
    if session.items and "site" in getattr(session.items[-1], "fixturenames", ()) and not session.config.option.collectonly:
        said = tempfile.TemporaryFile("w+")
        command = [sys.executable, str(ROOT / "docs" / "build.py"), "--out", str(SITE)]
        session.config.stash[BUILD] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said), said


def pytest_sessionfinish(session):
    if BUILD in session.config.stash:
        session.config.stash[BUILD][0].kill()


@pytest.fixture(scope="session")
def site(request) -> Path:
    "The site, built once for all tests."
    process, said = request.config.stash[BUILD]
    code = process.wait(timeout=900)
    said.seek(0)
    assert code == 0, said.read()[-4000:]
    return SITE
