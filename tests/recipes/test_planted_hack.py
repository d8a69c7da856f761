"A reward hack planted in a recipe's environment: the guard stops the run, and the run's page says when and why."
import html
import json
from pathlib import Path

import pytest
import world
import yaml

from composer_replication.cli.app import app
from composer_replication.core.files import write_jsonl
from composer_replication.envs.toy.model import embedded_model

pytestmark = pytest.mark.trainer
SETTINGS = dict(
    task="hacked_world:Leaky", split="time", train_rows=16, held_out_rows=8, guard_steps=2, alpha_sdpo=0.0, max_steps=60, seed=5,
    guard_settings={"min_steps": 4, "decline_patience": 2, "ema_alpha": 0.5}, learning_rate=2e-4, lr_scheduler_type="constant",
    per_device_train_batch_size=8, num_generations=8, max_turns=3, max_completion_length=96, use_cpu=True, bf16=False,
    gradient_checkpointing=False, save_strategy="no", logging_steps=1, report_to="none")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    "A recipe with a hole in its environment; the latest tasks, those of a mended judge, are held out."
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import hacked_world
    write_jsonl(tmp_path / "tasks.jsonl", hacked_world.tasks(16, 8))
    embedded_model("mild").save_pretrained(tmp_path / "model")
    world.tokenizer().save_pretrained(tmp_path / "model")
    paths = {"model": tmp_path / "model", "tasks": tmp_path / "tasks.jsonl", "output_dir": tmp_path / "run"}
    (tmp_path / "hacked.yaml").write_text(yaml.safe_dump(SETTINGS | {key: str(path) for key, path in paths.items()}))
    return tmp_path / "hacked.yaml"


def test_a_planted_hack_is_stopped_and_the_page_says_when_and_why(recipe, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        app(["train", "--config", str(recipe), "--json"])
    logged = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    last, rewards = logged[-1], [entry["reward"] for entry in logged if "reward" in entry]
    why = last["metrics"]["guard/reason"]
    assert ended.value.code in (0, None) and last["step"] < 60 and rewards[-1] > rewards[0]
    assert why.startswith(f"Stopped at step {last['step']}: the held-out score fell to ")
    assert "while the in-loop reward rose to " in why
    page = (tmp_path / "run" / "index.html").read_text()
    assert html.escape(why) in page and "http-equiv=refresh" not in page
    assert json.loads((tmp_path / "run" / "split.json").read_text())["held_out"] == [f"later-{i}" for i in range(8)]
