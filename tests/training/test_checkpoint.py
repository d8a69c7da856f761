"Markers, signals and buffers: what is whole counts, what is broken or foreign is refused. Processes: test_trainer_processes."
import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from kept_trainer import made
from transformers import TrainerControl, TrainerState, TrainingArguments

from composer_replication.core import holding as lock
from composer_replication.core.errors import InputProblem
from composer_replication.core.holding import holding
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.training import checkpoint
from composer_replication.training.checkpoint import (
    MARKER,
    InterruptCallback,
    incomplete_because,
    last_complete_checkpoint,
    load_buffer,
    mark_complete,
    save_buffer,
)


class Saving:
    "As much of a trainer as the writing of a checkpoint needs."

    def __init__(self, folder, limit):
        self.args = TrainingArguments(str(folder), use_cpu=True, report_to=[], save_total_limit=limit)
        self.state = TrainerState(global_step=5)

    def _get_output_dir(self, trial):
        return self.args.output_dir


def test_the_old_checkpoint_goes_only_after_the_new_one_is_marked(tmp_path, monkeypatch):
    there, rotate, trainer = [], checkpoint.rotate_checkpoints, Saving(tmp_path, 1)

    def looked_at(folder, limit, *args, **kwargs):
        there.append(sorted((p.name, incomplete_because(p)) for p in Path(folder).glob("checkpoint-*")))
        rotate(folder, limit, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "rotate_checkpoints", looked_at)
    for trainer.state.global_step in (4, 8):
        with checkpoint.complete_checkpoint(trainer) as folder:
            folder.mkdir()
            torch.save(trainer.args, folder / "training_args.bin")
            assert trainer.args.save_total_limit is None  # transformers itself removes nothing
    assert there == [[("checkpoint-4", None)], [("checkpoint-4", None), ("checkpoint-8", None)]]
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]
    assert torch.load(folder / "training_args.bin", weights_only=False).save_total_limit == 1  # written by this test


def test_a_failed_save_is_no_checkpoint_even_over_a_complete_one(tmp_path):
    folder, trainer = tmp_path / "checkpoint-5", Saving(tmp_path, 3)
    folder.mkdir()
    (folder / "weights").write_bytes(b"old")
    mark_complete(folder)
    assert last_complete_checkpoint(tmp_path) == folder
    with pytest.raises(OSError, match="disk"), checkpoint.complete_checkpoint(trainer) as where:
        assert where == folder
        (folder / "weights").write_bytes(b"new")  # as large as before
        raise OSError("disk full")
    assert trainer.args.save_total_limit == 3 and last_complete_checkpoint(tmp_path) is None


def test_what_makes_a_checkpoint_incomplete(tmp_path, caplog):
    for step in (3, 20, 100):
        (tmp_path / f"checkpoint-{step}" / "inner").mkdir(parents=True)
        (tmp_path / f"checkpoint-{step}" / "inner" / "weights").write_bytes(b"123")
        mark_complete(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-200").write_text("a file")
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-100"  # by number, not by name
    (tmp_path / "checkpoint-100" / "inner" / "weights").unlink()
    (tmp_path / "checkpoint-20" / MARKER).write_text("{")
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-3"
    assert len(caplog.records) == 2 and "inner/weights is missing" in caplog.text and "cannot be read" in caplog.text
    (tmp_path / "checkpoint-3" / "more").write_text("added later, as by a model card")
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-3"
    assert last_complete_checkpoint(tmp_path / "none") is None


def trained(tmp_path, **options):
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options), TrainerState(), TrainerControl()


def test_a_second_interrupt_does_not_wait(tmp_path, monkeypatch):
    callback, arguments = InterruptCallback(), trained(tmp_path)
    before = signal.getsignal(signal.SIGINT)  # a shell that runs the tests in the background has it ignored
    monkeypatch.setattr(checkpoint, "SAME_KEYPRESS", 1000.0)  # a busy machine takes long between the two
    callback.on_train_begin(*arguments)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher passing on the same keypress
        monkeypatch.setattr(checkpoint, "SAME_KEYPRESS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)  # asks for nothing new
        assert callback.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        callback.restore()
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_go_back_once_and_two_that_answer_sigterm_are_refused(tmp_path):
    mine = lambda number, frame: None
    before = signal.signal(signal.SIGTERM, mine)
    try:
        callback, arguments = InterruptCallback(), trained(tmp_path)
        callback.on_train_begin(*arguments)
        callback.on_train_begin(*arguments)  # a run that was not ended by on_train_end
        assert signal.getsignal(signal.SIGTERM) == callback._handle
        callback.restore()
        assert signal.getsignal(signal.SIGTERM) is mine
        signal.signal(signal.SIGTERM, before)
        callback.restore()
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(ValueError, match="enable_jit_checkpoint"):
            callback.on_train_begin(*trained(tmp_path, enable_jit_checkpoint=True))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_buffer_survives_a_failed_write_and_refuses_what_is_not_plain(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "buffer.pt"
    rows = {"a": [torch.tensor([1.5, float("inf")], dtype=torch.bfloat16, requires_grad=True)], "b": (1, 2.5, None, True, "é")}
    save_buffer(path, rows)
    back = load_buffer(path)
    assert torch.equal(back["a"][0], rows["a"][0]) and not back["a"][0].requires_grad and back["b"] == rows["b"]

    def full_disk(data, partial):
        Path(partial).write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(OSError):
            save_buffer(path, rows)
    assert load_buffer(path)["b"] == rows["b"] and [p.name for p in path.parent.iterdir()] == ["buffer.pt"]
    for bad in (collections.OrderedDict(), {1, 2}, b"x", torch.nn.Parameter(torch.zeros(1)), Path("x")):
        with pytest.raises(ValueError, match=r"rows\['x'\]\[0\] is a"):
            save_buffer(path, {"x": [bad]})


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def test_reading_a_buffer_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    torch.save({"rows": Evil()}, tmp_path / "buffer.pt")
    with pytest.raises(ValueError, match="save_buffer wrote whole"):
        load_buffer(tmp_path / "buffer.pt")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "empty.pt").touch()
    with pytest.raises(ValueError, match="save_buffer wrote whole"):
        load_buffer(tmp_path / "empty.pt")
    with pytest.raises(FileNotFoundError):
        load_buffer(tmp_path / "none.pt")


# ---- one run in a folder

HOLDS = """
import sys, time
from composer_replication.core.holding import holding
with holding(sys.argv[1]):
    print(1, flush=True)
    time.sleep(600)
"""


def other_run(folder):
    held = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE)
    assert held.stdout.readline() == b"1\n"
    return held


def test_two_runs_do_not_write_into_one_folder_before_the_first_checkpoint(tmp_path):
    other = other_run(tmp_path / "run")
    trainer = made(tmp_path / "run")
    try:
        with pytest.raises(InputProblem, match=rf"another run writes into .*\(process {other.pid} on .*set output_dir"):
            trainer.train()
        assert not trainer.state.log_history and os.listdir(tmp_path / "run") == [".run.lock"]
    finally:
        other.kill()  # its lock ends with it
        other.wait()
    trainer.train()
    assert trainer.state.log_history
    later = other_run(tmp_path / "run")  # this process has ended its run
    later.kill()
    later.wait()


def test_a_second_recipe_is_refused_before_it_writes_anything(tmp_path):
    other = other_run(tmp_path / "run")
    try:
        with pytest.raises(InputProblem, match="another run writes into"):
            run_recipe(load_recipe("toy", {"output_dir": str(tmp_path / "run")}))
        assert os.listdir(tmp_path / "run") == [".run.lock"]
    finally:
        other.kill()
        other.wait()


def test_a_lock_ends_with_its_block_and_holds_for_callers_in_the_same_process(tmp_path):
    with pytest.raises(ZeroDivisionError), holding(tmp_path), holding(tmp_path):
        raise ZeroDivisionError
    other = other_run(tmp_path)
    other.kill()
    other.wait()


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch, caplog):
    def unsupported(handle, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with caplog.at_level("WARNING"), holding(tmp_path):
        assert "cannot be locked (Operation not supported)" in caplog.text
