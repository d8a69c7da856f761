"""Islands by torchft: equal weights at the end, whoever was killed; alone plain training; torchft's own DiLoCo as oracle."""
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import islands_script
import pytest
import torch
import trainer_script
from forks import SERVER, composer
from ranks import processes
from safetensors.torch import load_file
from trainer_script import are_equal

from composer_replication.contrib.islands.diloco import (
    Island,
    Islands,
    IslandsProblem,
    OuterStep,
    diloco_problem,
    need_torchft,
    split_parameters,
)
from composer_replication.contrib.islands.start import IslandProcesses, Lighthouse
from composer_replication.training.checkpoint import load_buffer
from composer_replication.training.guard import HeldOutGuard, HeldOutGuardCallback

LIMIT = 180  # seconds that any wait may take; on an idle machine none needs 40
COMMAND = Path(sys.executable).with_name("composer-rl")
needs_torchft = pytest.mark.skipif(bool(diloco_problem()), reason=str(diloco_problem()))
SETTINGS = {"teacher": "ema", "diloco_every": 2, "max_steps": 4, "ddp_timeout": LIMIT, "save_strategy": "no"}
SMALL = [word for setting in (
    "train_rows=8", "max_completion_length=64", "max_turns=2", "gradient_accumulation_steps=1", "report_to=none",
    "diloco_every=2", "save_steps=2", f"ddp_timeout={LIMIT}") for word in ("--set", setting)]


@pytest.fixture
def sea(tmp_path):
    "Gives a function that starts an island of so many; nothing outlives the test."
    need_torchft()
    from torch.distributed import TCPStore
    from torchft.coordination import LighthouseServer
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=LIMIT * 1000, heartbeat_timeout_ms=5000)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

    def begin(number, islands, returns=False, settings=SETTINGS, **job):
        island = {"number": number, "lighthouse": lighthouse.address(), "returns": returns,
                  "meeting": f"127.0.0.1:{store.port}/{islands}"}
        out = tmp_path / f"island{number}"
        process = SERVER.Process(target=islands_script.main, args=(
            {"out": str(out), "log": f"{out}.log", "settings": settings, "island": island} | job,))
        process.start()
        process.out = out
        begun.append(process)
        return process

    with processes() as begun:
        yield begin
    lighthouse.shutdown()


def ended(process, code=0):
    process.join(LIMIT)
    log = Path(f"{process.out}.log")
    assert process.exitcode == code, f"{process.exitcode}: {log.read_text()[-3000:] if log.exists() else ''}"
    return load_buffer(f"{process.out}.pt") if code == 0 else None


@needs_torchft
@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 2])
def test_two_islands_learn_from_different_episodes_and_end_with_equal_weights(sea, fragments):
    settings = SETTINGS | {"diloco_fragments": fragments}
    one, other = map(ended, [sea(0, 2, settings=settings), sea(1, 2, settings=settings)])
    assert are_equal(one["parameters"], other["parameters"]) and one["step"] == other["step"] == 4
    assert not are_equal(one["teacher"], other["teacher"])  # each follows its own island in between
    tokens = [[entry["num_tokens"] for entry in end["log"] if "num_tokens" in entry] for end in (one, other)]
    assert tokens[0] != tokens[1]
    exchanges = [entry for entry in one["log"] if "islands/number" in entry]
    assert [entry["islands/number"] for entry in exchanges] == [2] * (3 if fragments == 1 else 4)
    size = 4 * sum(weight.numel() for weight in one["parameters"].values())
    if fragments == 1:  # with two, each exchange moves a part, and the log holds means of several
        assert [entry["islands/bytes"] for entry in exchanges] == [size] * 3


@needs_torchft
@pytest.mark.slow
@pytest.mark.parametrize("dies", [["step", 3], ["allreduce", 8], ["should_commit", 3], ["configure", 1]])
@pytest.mark.parametrize("fragments", [1, 2])
def test_one_of_three_is_killed_and_comes_back(sea, tmp_path, dies, fragments):
    "At a step of its own; during the second outer step, before its sum and before its commit; and as the group is formed."
    settings = SETTINGS | {"max_steps": 8, "diloco_fragments": fragments}
    hold = [6, [str(tmp_path / "island2-begun-True")]]  # the others wait for it, or it would find nobody
    stay = [sea(number, 3, settings=settings, hold=hold) for number in (0, 1)]
    ended(sea(2, 3, settings=settings, dies=dies), code=-signal.SIGKILL)
    ends = list(map(ended, [*stay, sea(2, 3, returns=True, settings=settings)]))
    assert [end["step"] for end in ends] == [8, 8, 8]
    assert are_equal(ends[0]["parameters"], ends[1]["parameters"]) and are_equal(ends[0]["parameters"], ends[2]["parameters"])


@needs_torchft
@pytest.mark.slow
def test_three_islands_killed_at_twenty_moments_end_with_equal_weights(sea):
    """Moments of Random(0): after some steps of a life, in a sum, before a commit. Whoever is killed comes back at once.

    Island 0 stays: where all are gone at once and none has a checkpoint, nobody has the state any more."""
    settings, dice, moments = SETTINGS | {"max_steps": 100}, random.Random(0), [[], [], []]
    for _ in range(20):
        how = dice.choice([["steps", dice.randint(1, 4)], ["allreduce", dice.randint(2, 7)],
                           ["should_commit", dice.randint(1, 3)]])
        moments[dice.choice((1, 2))].append(how)
    start = lambda number, returns: sea(number, 3, returns, settings, dies=moments[number].pop(0) if moments[number] else None)
    living, killed, end = {number: start(number, False) for number in range(3)}, 0, time.monotonic() + 5 * LIMIT
    while any(process.is_alive() for process in living.values()):
        assert time.monotonic() < end
        time.sleep(0.05)
        for number, process in living.items():
            if process.exitcode == -signal.SIGKILL:
                killed += 1
                living[number] = start(number, any(other.is_alive() for other in living.values()))
    ends = list(map(ended, living.values()))
    assert killed == 20 and [found["step"] for found in ends] == [100] * 3
    assert all(are_equal(ends[0]["parameters"], other["parameters"]) for other in ends)


@needs_torchft
@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_one_island_that_takes_its_own_weights_is_plain_training(sea, tmp_path, every):
    outer = {"diloco_every": every, "diloco_fragments": every, "diloco_lr": 1.0, "diloco_momentum": 0.0}
    settings = SETTINGS | outer | {"max_steps": 3, "teacher": "live"}
    alone, plain = ended(sea(0, 1, settings=settings)), ended(training(tmp_path / "plain", settings))
    for name, weights in plain["parameters"].items():
        torch.testing.assert_close(alone["parameters"][name], weights, rtol=0, atol=1e-6)
    ours = [{k: v for k, v in entry.items() if not k.startswith("islands/")} for entry in alone["log"]]
    assert [entry.get("reward") for entry in ours] == [entry.get("reward") for entry in plain["log"]]


@needs_torchft
@pytest.mark.slow
def test_islands_take_the_mean_of_what_each_makes_alone(sea, tmp_path):
    settings = SETTINGS | {"diloco_lr": 1.0, "diloco_momentum": 0.0, "max_steps": 2}
    together = ended([sea(number, 2, settings=settings) for number in (0, 1)][0])
    alone = list(map(ended, [training(tmp_path / f"alone{seed}", settings | {"seed": seed}) for seed in (3, 1003)]))
    for name, weights in together["parameters"].items():
        mean = (alone[0]["parameters"][name] + alone[1]["parameters"][name]) / 2
        torch.testing.assert_close(weights, mean, rtol=0, atol=1e-6)
    assert not are_equal(*(end["parameters"] for end in alone))


def training(out, settings):
    "Plain training in a process of its own, which ends by itself."
    process = SERVER.Process(target=islands_script.main, args=({"out": str(out), "log": f"{out}.log", "settings": settings},))
    process.out = out
    process.start()
    return process


@contextmanager
def manager(address):
    "Of one island that has nobody beside it."
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo
    soon = timedelta(seconds=60)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=soon)
    made = Manager(pg=ProcessGroupGloo(timeout=soon), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=1,
                   use_async_quorum=False, rank=0, world_size=1, store_addr="localhost", store_port=store.port,
                   lighthouse_addr=address)
    yield made
    made.shutdown(wait=False)


@needs_torchft
def test_the_outer_step_is_that_of_torchft():
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Linear(3, 2))
    theirs, ours = models
    inner = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    outer = OuterStep(ours.parameters(), 0.7, 0.9)
    oracle = torch.optim.SGD(theirs.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with manager(lighthouse.address()) as alone, DiLoCo(alone, [theirs], inner[0], oracle, sync_every=2):
        for step in range(6):
            for model, optimizer in zip(models, inner):
                optimizer.zero_grad()
                model(torch.arange(3.0) + step).square().sum().backward()
                optimizer.step()
            if step % 2:
                outer.step(outer.difference())
                for one, other in zip(ours.parameters(), theirs.parameters()):
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    lighthouse.shutdown()


@needs_torchft
@pytest.mark.slow
def test_a_newcomer_gets_all_that_has_moved(tmp_path):
    def island(name, steps):
        guard = HeldOutGuardCallback(HeldOutGuard(), lambda model, step: {"held_out_score": float(step)}, 1)
        trainer = trainer_script.make("two", tmp_path / name, callbacks=[guard], teacher="ema", sdpo_divergence="taid",
                                      max_steps=steps, save_strategy="no")
        trainer.train()
        islands = Islands(trainer, Island(0, "http://nowhere:1"))
        islands.fragments = [OuterStep(part, 0.7, 0.9) for part in split_parameters(trainer.student.parameters(), 2)]
        return trainer, islands, guard

    sender, its, kept = island("sender", 2)
    newcomer, own, guard = island("newcomer", 1)
    for side, much in ((its, 1e-3), (own, 2e-3)):
        for fragment in side.fragments:
            fragment.step(torch.ones_like(fragment.anchor) * much)
    assert len(trainer_script.differences(its._state(), own._state())) > 100
    own._take_over(its._state())
    assert trainer_script.differences(its._state(), own._state()) == []
    assert guard.guard.state_dict() == kept.guard.state_dict() and newcomer.state.global_step == 2
    assert are_equal(*(trainer_script.outcome(trainer)["parameters"] for trainer in (sender, newcomer)))


@needs_torchft
def test_fragments_are_exchanged_in_turn_and_a_newcomer_counts_for_each_after_its_turn(tmp_path):
    from torchft.coordination import LighthouseServer
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    settings = SETTINGS | {"diloco_fragments": 2, "diloco_lr": 1.0, "diloco_momentum": 0.0}
    settings, own = islands_script.apart(settings)
    trainer = trainer_script.make("two", tmp_path, **settings)
    trainer.create_optimizer_and_scheduler(4)
    islands = Islands(trainer, Island(0, lighthouse.address()), own)
    islands.on_train_begin(trainer.args, trainer.state, trainer.control)
    turns = []
    for newcomer in (False, False, True, False, False):  # at the outer steps 1 to 5; the start was number 0
        before = [fragment.anchor.clone() for fragment in islands.fragments]
        islands.healed |= {0, 1} if newcomer else set()
        with torch.no_grad():
            for weight in trainer.student.parameters():
                weight.add_(1.0)
        islands._exchange()
        turns.append([set((f.anchor - old).round().tolist()) for f, old in zip(islands.fragments, before)])
    islands.on_train_end(None, None, None)
    lighthouse.shutdown()
    assert turns == [[{0}, {1}], [{2}, {0}], [{0}, {0}], [{0}, {0}], [{0}, {2}]]
    assert sum(len(f.anchor) for f in islands.fragments) == sum(p.numel() for p in trainer.student.parameters())


@needs_torchft
def test_an_island_finds_no_lighthouse_in_time(tmp_path):
    trainer = trainer_script.make("two", tmp_path, max_steps=1, ddp_timeout=2)
    trainer.add_callback(Islands(trainer, Island(0, "http://127.0.0.1:9")))
    with pytest.raises(IslandsProblem, match="the lighthouse at http://127.0.0.1:9 does not answer"):
        trainer.train()


@needs_torchft
def test_an_error_before_the_islands_meet_ends_all(tmp_path):
    script, lines = "import sys, time; sys.exit(3) if sys.argv[2] == '1' else time.sleep(600)", []
    processes = IslandProcesses([sys.executable, "-c", script], 2, tmp_path, Lighthouse(2, 60.0), lines.append)
    assert processes.run() == 3 and processes.codes == {0: -signal.SIGKILL, 1: 3}
    assert lines == [f"island 1 failed; see {tmp_path / 'island-1' / 'log.txt'}"]


@needs_torchft
def test_a_signal_while_islands_start_reaches_those_to_come(tmp_path, monkeypatch):
    processes = IslandProcesses([sys.executable, "-c", "import time; time.sleep(600)"], 3, tmp_path, Lighthouse(3, 60.0), print)
    start, begun = type(processes)._start, []

    def told(self, number):
        start(self, number)
        begun.append(number)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(type(processes), "_start", told)
    assert processes.run() != 0 and begun == [0]
    early = IslandProcesses(["true"], 2, tmp_path, Lighthouse(2, 60.0), print, told=signal.SIGTERM)
    assert early.run() == 130 and begun == [0]


@needs_torchft
def test_an_island_that_dies_again_and_again_is_given_up(tmp_path):
    script = """
import os, sys, time
starts = os.path.join(sys.argv[1], "starts")
if sys.argv[3] == "1":
    print("start", file=open(starts, "a"), flush=True)
    os.kill(os.getpid(), 9)
while not os.path.exists(starts) or open(starts).read().count("start") < 4:
    time.sleep(0.05)
"""
    lines = []
    processes = IslandProcesses([sys.executable, "-c", script, str(tmp_path)], 2, tmp_path, Lighthouse(2, 60.0), lines.append)
    assert processes.run() == 0 and processes.codes == {0: 0, 1: -signal.SIGKILL} and processes.starts[1] == 4
    assert lines == ["island 1 was lost (signal 9) and is started again"] * 3 + ["island 1 was lost (signal 9)"]


def test_without_torchft_one_sentence_names_the_extra(monkeypatch, capsys, tmp_path):
    from composer_replication.cli.app import main
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torchft" else real(name, *more))
    arguments = ["train", "--config", "toy", "--set", f"output_dir={tmp_path}", "--islands", "2"]
    monkeypatch.setattr(sys, "argv", ["composer-rl", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 1 and said.count("\n") == 1 and "pip install 'composer_replication[islands]'" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("environment, said", [
    ({}, "TORCHFT_LIGHTHOUSE='' is no address"),
    ({"TORCHFT_LIGHTHOUSE": "http://here:1", "WORLD_SIZE": "2"}, "several processes is not built")])
def test_an_island_that_cannot_be_is_refused(monkeypatch, environment, said):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(IslandsProblem, match=said):
        Island.of_environment(0)


@needs_torchft
@pytest.mark.slow
def test_the_command_starts_islands_again_stops_with_a_checkpoint_and_goes_on(tmp_path):
    "The command itself: one island killed, then all stopped by SIGTERM, then resumed."
    run = [tmp_path / "out" / "toy" / f"island-{number}" for number in (0, 1)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["train", "--config", "toy", "--islands", "2", *SMALL]
    import psutil
    with (tmp_path / "said").open("w") as said:
        command = subprocess.Popen([COMMAND, *arguments, "--set", "max_steps=400"], cwd=tmp_path, env=environment, stdout=said,
                                   stderr=said)
    try:
        until(lambda: (run[1] / "checkpoint-2" / "islands.pt").exists(), command)
        [victim] = [p for p in psutil.Process(command.pid).children() if p.cmdline()[-1] == "1"]
        victim.kill()
        until(lambda: "island 1 was lost (signal 9) and is started again" in (tmp_path / "said").read_text(), command)
        until(lambda: (run[1] / "log.txt").read_text().count("The page of this run") == 2, command)
        steps = lambda: {p.name for p in run[1].glob("checkpoint-*")}
        before = steps()
        until(lambda: steps() - before, command)
        command.send_signal(signal.SIGTERM)
        assert command.wait(LIMIT) == 130, (tmp_path / "said").read_text()[-3000:]
    finally:
        command.kill()
    reached = max(int(p.name.rpartition("-")[2]) for folder in run for p in folder.glob("checkpoint-*"))
    last = reached // 2 * 2 + 4
    done = composer(*arguments, "--set", f"max_steps={last}", "--set", "resume=true", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert are_equal(*(load_file(folder / f"checkpoint-{last}" / "model.safetensors") for folder in run))


def until(true, command):
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end and command.poll() is None
        time.sleep(0.1)
