"""What several tests share."""
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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
        folder = Path(tempfile.mkdtemp(prefix="site-build-"))
        # An orphan: tests that look at the children of this process must not find it, running or ended.
        script = '("$@" > said 2>&1; echo $? > code.new; mv code.new code) &'
        command = ["sh", "-c", script, "sh", sys.executable, str(ROOT / "docs" / "build.py"), "--out", str(SITE)]
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        started = subprocess.Popen(command, cwd=folder, start_new_session=True, **nowhere)
        started.wait(60)
        session.config.stash[BUILD] = folder, started.pid


def pytest_sessionfinish(session):
    if BUILD in session.config.stash:
        folder, group = session.config.stash[BUILD]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def site(request) -> Path:
    "The site, built once for all tests."
    folder, _ = request.config.stash[BUILD]
    end = time.monotonic() + 900
    while not (folder / "code").exists():
        assert time.monotonic() < end, "the site was not built in time"
        time.sleep(0.2)
    assert (folder / "code").read_text().strip() == "0", (folder / "said").read_text()[-4000:]
    return SITE
