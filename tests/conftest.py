"""What several tests share."""
import os
import signal
import subprocess
import sys
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


@pytest.fixture(scope="session")
def site() -> Path:
    "The site, built once for all tests."
    root = Path(__file__).parents[1]
    out = root / "docs" / "_build" / "html"
    done = subprocess.run([sys.executable, root / "docs" / "build.py", "--out", out], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return out
