"What several tests of the environments share."
import shutil
from pathlib import Path
from tempfile import mkdtemp

import envs_tasks
import pytest

from composer_replication.envs.deletion.subject import prepare_subject, store_path


@pytest.fixture(scope="session")
def larder():
    "The shipped repository, prepared."
    return prepare_subject(envs_tasks.LARDER)


@pytest.fixture(scope="session")
def initials(larder):
    "A task: the body of `initials` is gone."
    return envs_tasks.delete(larder, "initials")


@pytest.fixture(scope="module")
def store():
    "A store that every user id can reach, gone afterwards."
    store_path().parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix="test-", dir=store_path().parent))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
