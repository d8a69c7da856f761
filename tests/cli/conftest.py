"Commands in this process."
import json

import pytest
from typer.testing import CliRunner

from composer_replication.cli import console
from composer_replication.cli.app import app


@pytest.fixture(autouse=True)
def no_line_a_minute(monkeypatch):
    "A busy machine makes an import take longer than a minute, and tests count lines."
    monkeypatch.setattr(console, "EVERY", 3600.0)


@pytest.fixture
def call(tmp_path, monkeypatch):
    "Runs a command in a folder of its own, `tmp_path`; the words may be paths and numbers."
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def rows(call):
    "The JSON lines of a command that ends well."
    def rows(*words):
        done = call(*words, "--json")
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]
    return rows
