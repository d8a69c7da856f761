"""What several tests share."""
import os
import signal
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
