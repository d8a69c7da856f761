"A run that goes on from a checkpoint ends, to the last bit, where it would have ended without the stop."
import shutil
import signal
from pathlib import Path

import pytest
import torch
from trainer_script import SCENES, differences, make, outcome, policy

from composer_replication.training.checkpoint import incomplete_because, last_complete_checkpoint, load_buffer, save_buffer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "Runs a scene once without a stop, saving after every step: `whole(scene)` gives its folder and outcome."
    done, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)

    def run(scene):
        if scene not in done:
            trainer = make(scene, tmp_path_factory.mktemp(scene))
            trainer.train()
            done[scene] = Path(trainer.args.output_dir), outcome(trainer)
        return done[scene]

    yield run
    torch.set_num_threads(threads)


def go_on(folder, out, scene, step):
    "A new trainer, built around other weights than the run's first, that has resumed at `step`."
    trainer = make(scene, out, model=policy(SCENES[scene].get("lora", False), elsewhere=True))
    torch.manual_seed(step)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
    return trainer


def summed(found, key):
    return sum(entry.get(key) or 0 for entry in found["log"])


@pytest.mark.parametrize("step", [1, 3])  # within a generation: in the first and in the second pass over its rows
def test_three_channels_kl_accumulation_and_rows_used_twice(whole, tmp_path, step):
    folder, expected = whole("all")
    assert summed(expected, "sdpo/sites") and summed(expected, "replay/pairs") and summed(expected, "kl/rollout")
    for moved in ("teacher", "parameters"):
        assert differences(expected[moved], expected["reference"])
    assert differences(outcome(go_on(folder, tmp_path, "all", step)), expected) == []


@pytest.mark.parametrize("scene", ["trust", "taid",
                                   *(pytest.param(s, marks=pytest.mark.slow) for s in ("frozen", "lora", "trl"))])
def test_other_teachers_adapters_and_trls_own_loop(whole, tmp_path, scene):
    folder, expected = whole(scene)
    assert summed(expected, "sdpo/sites")
    trainer = go_on(folder, tmp_path, scene, 1)
    assert differences(outcome(trainer), expected) == []
    if scene == "frozen":
        assert trainer.reference is trainer.teacher
    if scene == "trust":  # whose reference reads the teacher's copy, which is saved once
        assert trainer.reference.kept is trainer.teacher.kept is not None and (folder / "checkpoint-1" / "teacher").is_dir()
        assert not (folder / "checkpoint-1" / "reference").exists()
    if scene == "taid":
        assert trainer.schedule.steps == 3 and len({entry["sdpo/t"] for entry in expected["log"]}) == 3
    if scene == "lora":
        assert expected["teacher"] and all("lora" in name for name in expected["teacher"])


@pytest.mark.parametrize("step", [3, 5])  # at the border of two epochs and within the second, both between two logs
def test_the_order_of_the_second_epoch_and_the_loss_between_two_logs(whole, tmp_path, step):
    folder, expected = whole("epochs")
    assert differences(outcome(go_on(folder, tmp_path, "epochs", step)), expected) == []


def copied(folder, out, *steps):
    for step in steps:
        shutil.copytree(folder / f"checkpoint-{step}", out / f"checkpoint-{step}")


def test_true_goes_on_from_the_last_complete_checkpoint(whole, tmp_path):
    folder, expected = whole("frozen")
    copied(folder, tmp_path, 2, 3)
    for name in ("complete.json", "trainer_state.json"):  # cut off while it was written
        (tmp_path / "checkpoint-3" / name).unlink()
    trainer = make("frozen", tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert differences(outcome(trainer), expected) == [] and incomplete_because(tmp_path / "checkpoint-3") is None


def test_writing_over_a_complete_checkpoint_takes_its_marker_first(whole, tmp_path, monkeypatch):
    folder, _ = whole("frozen")
    copied(folder, tmp_path, 2, 3)
    trainer = make("frozen", tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def full(folder):
        raise OSError("disk full")

    monkeypatch.setattr(trainer.teacher, "save", full)
    try:
        with pytest.raises(OSError, match="disk full"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        after = {number: signal.getsignal(number) for number in before}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert after == before
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-2"


def test_a_checkpoint_of_another_trainer_is_refused(whole, tmp_path):
    folder, _ = whole("frozen")
    copied(folder, tmp_path, 2)
    (tmp_path / "checkpoint-2" / "composer-rank0.pt").unlink()
    with pytest.raises(ValueError, match="composer-rank0.pt"):  # by the marker
        make("frozen", tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(ValueError, match="is another trainer's; load its weights as the start model"):
        make("frozen", tmp_path).resume.load(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("changed, said", [
    ({"passes": {"gradient_accumulation_steps": 2, "steps_per_generation": 1}},
     "the checkpoint is of 2 processes, this run has 1, and processes times gradient_accumulation_steps is no longer the same"),
    ({"passes": {"gradient_accumulation_steps": 1, "steps_per_generation": 2}}, "processes times steps_per_generation"),
    ({"buffer": [{}]}, "within a generation that 2 processes share; resume with 2 processes, or from one that was saved between"),
])
def test_another_number_of_processes_that_cannot_go_on_is_told_why(whole, tmp_path, changed, said):
    folder, _ = whole("frozen")
    copied(folder, tmp_path, 2)
    state = load_buffer(tmp_path / "checkpoint-2" / "composer-rank0.pt") | {"processes": 2} | changed
    for rank in (0, 1):
        save_buffer(tmp_path / "checkpoint-2" / f"composer-rank{rank}.pt", state)
    with pytest.raises(ValueError, match=said):
        make("frozen", tmp_path).resume.load(tmp_path / "checkpoint-2")


def test_a_finished_run_makes_no_further_step(whole, tmp_path):
    folder, expected = whole("frozen")
    trainer = go_on(folder, tmp_path, "frozen", 3)
    assert trainer.state.global_step == 3
    assert differences(outcome(trainer), expected) == []
