"""Islands of the real trainer that exchange through a folder: alone plain training, stopped and resumed, killed as commands."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import trainer_script
from islands_script import apart
from safetensors.torch import load_file
from trainer_script import are_equal, weights

from composer_replication.cli.app import main
from composer_replication.contrib.islands.diloco import IslandsProblem
from composer_replication.contrib.islands.rounds import Rounds, expect
from composer_replication.contrib.islands.store import StoreIslands
from composer_replication.contrib.queue.store import Store
from composer_replication.training.checkpoint import last_complete_checkpoint

LIMIT = 240  # seconds that any wait may take; on an idle machine none needs 60
COMMAND = Path(sys.executable).with_name("composer-rl")
SETTINGS = {"teacher": "ema", "diloco_every": 1, "diloco_lr": 1.0, "diloco_momentum": 0.0, "max_steps": 2, "save_strategy": "no"}
SMALL = [word for setting in (
    "train_rows=8", "max_completion_length=64", "max_turns=2", "gradient_accumulation_steps=1", "report_to=none",
    "diloco_every=2", "save_steps=2", f"diloco_wait={LIMIT}", "max_steps=8") for word in ("--set", setting)]


def trained(folder, number, store, resume=None, **changes):
    settings, own = apart(SETTINGS | changes)
    trainer = trainer_script.make("two", folder / str(number), **settings)
    trainer.add_callback(StoreIslands(trainer, number, store, own))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.slow
def test_one_island_that_takes_its_own_weights_is_plain_training_and_counts_its_bytes(tmp_path):
    alone = trained(tmp_path, 0, Store(str(tmp_path / "store")))
    plain = trainer_script.make("two", tmp_path / "plain", **apart(SETTINGS)[0])
    plain.train()
    for (name, one), (_, other) in zip(weights(alone).items(), weights(plain).items(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)
    size = sum(weight.numel() for weight in weights(alone).values())
    logged = [{key: entry[f"islands/{key}"] for key in ("number", "bytes", "late")}
              for entry in alone.state.log_history if "islands/bytes" in entry]
    assert logged == [{"number": 1.0, "bytes": 2.0 * 4 * size, "late": 0.0}] * 2


def test_an_island_stopped_while_it_waits_saves_and_is_in_the_mean_when_it_comes_back(tmp_path, monkeypatch):
    store = Store(str(tmp_path / "store"))
    expect(store, 2)  # the other never comes; this one is told to stop
    settings, own = apart(SETTINGS | {"save_strategy": "steps"})
    trainer = trainer_script.make("two", tmp_path / "0", **settings)
    trainer.add_callback(StoreIslands(trainer, 0, store, own))
    monkeypatch.setattr(Rounds, "pause", lambda self, seconds: setattr(trainer.interrupt, "requested", True))
    trainer.train()
    assert trainer.state.global_step == 1 and store.names("islands") == ["1.json"]
    made = weights(trainer)
    checkpoint = last_complete_checkpoint(tmp_path / "0")
    monkeypatch.undo()
    store.remove("islands/1.json")
    again = trained(tmp_path, 0, store, resume=str(checkpoint), max_steps=1)  # decides alone, before any step of its own
    assert [name for name in store.names("rounds") if "members" in name] == ["000000-members.json"]
    for (name, one), (_, other) in zip(weights(again).items(), made.items(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)


def test_who_comes_when_the_run_is_over_is_told_so(tmp_path):
    store = Store(str(tmp_path / "store"))
    trained(tmp_path, 0, store)
    with pytest.raises(IslandsProblem, match="has reached its last step without island 1"):
        trained(tmp_path, 1, store)
    with pytest.raises(IslandsProblem, match="run with diloco_lr=1.0, and here it is 0.5"):
        trained(tmp_path, 2, store, diloco_lr=0.5)
    with pytest.raises(IslandsProblem, match="diloco_fragments is 2; leave it out"):
        trained(tmp_path, 3, store, diloco_every=2, diloco_fragments=2)


@pytest.mark.parametrize("options, said", [
    (["--exchange", "x"], "--exchange is for islands; give --islands N, or --island K, too"),
    (["--islands", "2", "--exchange", "memory://x"], "is the memory of one process"),
    (["--islands", "2", "--exchange", "nowhere://x"], "'nowhere://x' cannot be opened"),
    (["--island", "0", "--exchange", "x", "--set", "diloco_wait=0"], "diloco_wait=0")])
def test_a_command_that_cannot_be_is_one_sentence(monkeypatch, capsys, tmp_path, options, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["composer-rl", "train", "--config", "toy", "--set", f"output_dir={tmp_path}/out", *options])
    with pytest.raises(SystemExit) as end:
        main()
    complaint = capsys.readouterr().err
    assert end.value.code == 1 and said in complaint and complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_starts_islands_one_is_killed_and_all_end_with_equal_weights(tmp_path):
    import psutil
    folders = [tmp_path / "out" / "toy" / f"island-{number}" for number in (0, 1)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["train", "--config", "toy", "--islands", "2", "--exchange", str(tmp_path / "store"), *SMALL]
    with (tmp_path / "said").open("w") as said:
        command = subprocess.Popen([COMMAND, *arguments], cwd=tmp_path, env=environment, stdout=said, stderr=said)
    try:
        end = time.monotonic() + LIMIT
        while not (folders[1] / "checkpoint-2" / "islands.pt").exists():
            assert time.monotonic() < end and command.poll() is None
            time.sleep(0.1)
        [victim] = [p for p in psutil.Process(command.pid).children() if p.cmdline()[-1] == "1"]
        victim.send_signal(signal.SIGKILL)
        assert command.wait(2 * LIMIT) == 0, (tmp_path / "said").read_text()[-3000:]
    finally:
        command.kill()
    assert "island 1 was lost (signal 9) and is started again" in (tmp_path / "said").read_text()
    assert are_equal(*(load_file(folder / "checkpoint-8" / "model.safetensors") for folder in folders))
