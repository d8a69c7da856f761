"`composer-rl export`: what it prints, and what it refuses in one sentence."
import json

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app


def run(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_whole_weights_and_one_line_for_machines(tmp_path):
    row = json.loads(run("embedded", "--out", tmp_path / "a", "--json").stdout)
    assert row == {"folder": str(tmp_path / "a"), "parameters": 869760, "dtype": "float32", "merged": False, "difference": 0.0,
                   "step": None}
    shown = run("embedded", "--out", tmp_path / "b", "--merge")
    assert shown.exit_code == 0 and "869,760 parameters, float32, step not recorded. Logits differ by 0.0e+00" in shown.stdout
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("name, said", [("nobody/nothing", "HF_HUB_OFFLINE is set"), ("./nowhere", "there is no folder of"),
                                        ("adapter", "is a LoRA adapter; add --merge"), ("empty", "neither a model nor a run")])
def test_what_cannot_be_exported(name, said, tmp_path, monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for folder in ("adapter", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    done = run(name if "/" in name else f"./{name}", "--out", "plain")
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "plain").exists()
