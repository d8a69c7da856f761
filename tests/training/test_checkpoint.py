"""Real processes that are told to stop, that are killed while they write, and that go on; broken and foreign buffers."""
import collections
import json
import os
import runpy
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from forks import SERVER
from ranks import processes
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

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

STEPS, SAVE = 12, 4
LIMIT = 60  # seconds that any process may take
SCRIPT = f"""
import os, sys, time
from pathlib import Path
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from composer_replication.training.checkpoint import InterruptCallback, complete_checkpoint, last_complete_checkpoint

out, rank = Path(os.environ["OUT"]), os.environ.get("RANK", "0")
pause, slow_at, limit = float(os.environ.get("PAUSE", 0)), int(os.environ.get("SLOW_AT", 0)), os.environ.get("SAVE_LIMIT")


class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        with open(out / f"steps-{{rank}}", "a") as file:
            print(state.global_step, file=file, flush=True)
        time.sleep(pause)


class Whole(Trainer):
    def _save_checkpoint(self, model, trial):
        with complete_checkpoint(self):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, folder):
        if self.state.global_step == slow_at:
            (out / "writing").touch()
            time.sleep({LIMIT})
        super()._save_optimizer_and_scheduler(folder)


out.mkdir(exist_ok=True)
torch.set_num_threads(1)
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=40, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4,
                                     num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.3,
                                     bos_token_id=0, eos_token_id=1, pad_token_id=2))
data = [dict(input_ids=ids, labels=ids) for ids in torch.randint(3, 40, (40, 6))]
args = TrainingArguments(str(out), use_cpu=True, report_to=[], max_steps={STEPS}, save_steps={SAVE}, learning_rate=1e-2,
                         per_device_train_batch_size=2, disable_tqdm=True, logging_strategy="no", seed=3,
                         save_total_limit=int(limit) if limit else None, ddp_backend="gloo" if "RANK" in os.environ else None)
interrupt = InterruptCallback()
trainer = Whole(model, args, train_dataset=data, callbacks=[interrupt, Tell()])
try:
    trainer.train(resume_from_checkpoint=(last := last_complete_checkpoint(out)) and str(last))
finally:
    interrupt.restore()
"""


@pytest.fixture
def start(tmp_path):
    "Starts the script in a process of its own, which does not outlive the test."

    def begin(out, **env):
        out.mkdir(exist_ok=True)
        script, log = (tmp_path / f"{len(begun)}{end}" for end in (".py", ".log"))
        script.write_text(f"import os\nos.environ.update({env | dict(OUT=str(out))})\n"
                          f"os.dup2(os.open({str(log)!r}, os.O_CREAT | os.O_WRONLY), 2)\n{SCRIPT}")
        process = SERVER.Process(target=runpy.run_path, args=(str(script),))
        process.start()
        process.log = log
        begun.append(process)
        return process

    with processes() as begun:
        yield begin


def ended(process) -> str:
    "What it said, once it has ended by itself and well."
    process.join(LIMIT)
    said = process.log.read_text()
    assert process.exitcode == 0, f"{process.exitcode}: {said[-2000:]}"
    return said


def wait_for(path: Path, process, lines=0):
    end = time.monotonic() + LIMIT
    while not (path.exists() and len(path.read_text().splitlines()) >= lines):
        assert process.is_alive(), process.log.read_text()[-2000:]
        assert time.monotonic() < end, f"{path.name} did not come in {LIMIT} s"
        time.sleep(0.01)


def run_here(folder, monkeypatch, **env):
    "The script in this process."
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (folder / "here.py").write_text(SCRIPT)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(folder / "here.py"))
    finally:
        torch.set_num_threads(threads)


def steps(out, rank=0):
    return [int(line) for line in (out / f"steps-{rank}").read_text().split()]


def test_stopped_killed_and_resumed_it_ends_as_if_nothing_had_happened(start, tmp_path, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"

    process = start(out, PAUSE="0.1")  # told to stop
    wait_for(out / "steps-0", process, lines=2)
    process.terminate()
    assert "SIGTERM: finishing this step" in ended(process)
    stopped_at = steps(out)[-1]
    assert stopped_at < STEPS and stopped_at % SAVE  # in the middle
    assert last_complete_checkpoint(out).name == f"checkpoint-{stopped_at}"

    saved_at = next(s for s in range(stopped_at + 1, STEPS + 1) if s % SAVE == 0)
    process = start(out, SLOW_AT=str(saved_at))  # goes on, and is killed while it writes
    wait_for(out / "writing", process)
    process.kill()
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL
    half = out / f"checkpoint-{saved_at}"
    assert get_last_checkpoint(out) == str(half)  # what transformers would go on from
    assert (half / "model.safetensors").exists() and not (half / "optimizer.pt").exists()
    assert last_complete_checkpoint(out).name == f"checkpoint-{stopped_at}"
    assert half.exists()

    said = ended(start(out))  # goes on to the end, writing over the half
    assert f"checkpoint-{saved_at} is passed over" in said
    assert steps(out)[-1] == STEPS and incomplete_because(half) is None

    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    run_here(tmp_path, monkeypatch, OUT=str(whole))
    assert before == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    expected, got = (load_file(o / f"checkpoint-{STEPS}" / "model.safetensors") for o in (whole, out))
    first = load_file(out / f"checkpoint-{stopped_at}" / "model.safetensors")
    assert expected.keys() == got.keys() and all(torch.equal(expected[n], got[n]) for n in expected)
    assert not all(torch.equal(first[n], got[n]) for n in got)


def test_one_process_is_told_and_all_stop_after_the_same_step(start, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = tmp_path / "out"
    world = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PAUSE="0.1")
    processes = [start(out, RANK=r, LOCAL_RANK=r, **world) for r in ("0", "1")]
    wait_for(out / "steps-1", processes[1], lines=1)
    processes[1].terminate()
    assert ["SIGTERM" in ended(process) for process in processes] == [False, True]
    assert steps(out, 0) == steps(out, 1) and steps(out)[-1] < STEPS
    folder = last_complete_checkpoint(out)
    assert folder.name == f"checkpoint-{steps(out)[-1]}"
    listed = json.loads((folder / MARKER).read_text())["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "trainer_state.json"} <= listed.keys()


def test_the_old_checkpoint_goes_only_after_the_new_one_is_marked(tmp_path, monkeypatch):
    out, there = tmp_path / "out", []
    rotate = checkpoint.rotate_checkpoints

    def looked_at(folder, limit, *args, **kwargs):
        there.append(sorted((p.name, incomplete_because(p)) for p in Path(folder).glob("checkpoint-*")))
        rotate(folder, limit, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "rotate_checkpoints", looked_at)
    run_here(tmp_path, monkeypatch, OUT=str(out), SAVE_LIMIT="1")
    assert there == [[("checkpoint-4", None)], [("checkpoint-4", None), ("checkpoint-8", None)],
                     [("checkpoint-12", None), ("checkpoint-8", None)]]
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-12"]
    saved = torch.load(out / "checkpoint-12" / "training_args.bin", weights_only=False)  # written by this test
    assert saved.save_total_limit == 1


def test_a_failed_save_is_no_checkpoint_even_over_a_complete_one(tmp_path):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "weights").write_bytes(b"old")
    mark_complete(folder)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], save_total_limit=3)
    trainer = type("Trainer", (), dict(args=args, state=TrainerState(global_step=5),
                                       _get_output_dir=lambda self, trial: str(tmp_path)))()
    assert last_complete_checkpoint(tmp_path) == folder
    with pytest.raises(OSError, match="disk"), checkpoint.complete_checkpoint(trainer) as where:
        assert where == folder
        (folder / "weights").write_bytes(b"new")  # as large as before
        raise OSError("disk full")
    assert args.save_total_limit == 3 and last_complete_checkpoint(tmp_path) is None


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
