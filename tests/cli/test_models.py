"The commands that fetch a model and look at the machine."
import json

from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.sandbox.base import sandbox_kinds


def run(*words):
    return CliRunner().invoke(app, list(words))


def test_an_unknown_model_is_one_sentence():
    done = run("models", "get", "gpt5")
    assert done.exit_code == 1 and not done.stdout
    assert done.stderr == "error: there is no model 'gpt5' to fetch; name one of smollm2, qwen2.5-coder-0.5b.\n"


def test_a_fetched_model_is_listed_with_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_MODELS", str(tmp_path))
    row, *_ = map(json.loads, run("models", "list", "--json").stdout.splitlines())
    assert row["name"] == "smollm2" and row["folder"] == ""
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    row, *_ = map(json.loads, run("models", "list", "--json").stdout.splitlines())
    assert row["folder"] == str(tmp_path / "smollm2") == json.loads(run("models", "get", "smollm2", "--json").stdout)["folder"]


def test_the_doctor_names_every_sandbox_and_no_key(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "k-secret-123")
    done = run("doctor", "--json")
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.exit_code == 0 and "k-secret-123" not in done.output
    assert {f"sandbox {kind}" for kind in sandbox_kinds()} <= set(rows)
    assert rows["OPENROUTER_API_KEY"]["present"] and rows["torch"]["detail"].startswith("2.13.0")
    assert all(row["cost"] for row in rows.values() if not row["present"])
