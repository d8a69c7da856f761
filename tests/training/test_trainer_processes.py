"The trainer in processes of its own: killed, told to stop, and two that train together."
import json
import os
import random
import signal
import time

import pytest
import torch
import trainer_script
from ranks import LIMIT, ended, jobs, left, run
from trainer_script import Stored, Tell, differences, make, outcome, played_rows, policy

from composer_replication.training.checkpoint import MARKER, incomplete_because, last_complete_checkpoint, load_buffer


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    "Starts a job; none outlives the tests."
    with jobs(trainer_script, tmp_path_factory.mktemp("logs")) as begin:
        yield begin


def wait_for(path, processes, lines):
    end = time.monotonic() + LIMIT
    while not (path.exists() and len(path.read_text().splitlines()) >= lines):
        assert all(p.is_alive() for p in processes), processes[0].log.read_text()[-3000:]
        assert time.monotonic() < end, f"{path.name} did not come in {LIMIT} s"
        time.sleep(0.01)


# ---- one process


@pytest.fixture(scope="module")
def unharmed(start, tmp_path_factory):
    out = tmp_path_factory.mktemp("unharmed")
    ended(start([run("end", "kill", out)], kill=0))
    return left(out, "end"), int((out / "ticks").read_text())


def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(start, unharmed, tmp_path):
    expected, ticks = unharmed
    draw, halves, kills = random.Random(1), 0, 0
    for _ in range(4):
        kill = draw.randrange(ticks // 6, ticks // 2)  # beyond the first step's
        processes = start([run("end", "kill", tmp_path, resume="last")], kill=kill)
        processes[0].join(LIMIT)
        if processes[0].exitcode == 0:
            break
        assert processes[0].exitcode == -signal.SIGKILL, processes[0].log.read_text()[-3000:]
        kills += 1
        halves += any(incomplete_because(f) for f in tmp_path.glob("checkpoint-*"))
        assert last_complete_checkpoint(tmp_path) or kills == 1
    else:
        ended(start([run("end", "kill", tmp_path, resume="last")]))
    assert kills >= 2 and halves, "the draws no longer meet a checkpoint in the making; choose another seed"
    assert differences(left(tmp_path, "end"), expected) == []
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2  # save_total_limit


def test_told_to_stop_it_leaves_a_checkpoint_that_goes_on(start, unharmed, tmp_path):
    "By SIGINT; by SIGTERM: two processes, below."
    processes = start([run("stopped", "kill", tmp_path, save_strategy="no", hold=2)])
    wait_for(tmp_path / "steps-0", processes, 2)
    os.kill(processes[0].pid, signal.SIGINT)
    (tmp_path / "go").touch()
    assert "SIGINT: finishing this step" in ended(processes)[0]
    reached = int((tmp_path / "steps-0").read_text().split()[-1])
    assert reached < 6 and last_complete_checkpoint(tmp_path).name == f"checkpoint-{reached}"
    ended(start([run("end", "kill", tmp_path, resume="last")]))
    assert differences(left(tmp_path, "end"), unharmed[0]) == []


# ---- two processes


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    "Eight rows played by one process, of two tasks: all with hints and pairs, or those of one task only."
    def play(which):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        folder = tmp_path_factory.mktemp(which)
        try:
            source = played_rows(folder, one_side=which == "one side")
            one = make("union", folder, Stored, policy().double(), [told := Tell(folder / "steps")],
                       per_device_train_batch_size=8, replay_batch_size=4)
            one.source = source
            one.train()
        finally:
            torch.set_num_threads(threads)
        return source, outcome(one) | {"grads": told.grads}

    return {which: play(which) for which in ("both", "one side")}


@pytest.fixture(scope="module")
def pair(start, stored, tmp_path_factory):
    "What two processes that train together leave behind, after several runs one after another; the folder."
    out = tmp_path_factory.mktemp("pair")
    union = {"kind": "Stored", "double": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    ended(start([run("trl", "zero", out / "zero", kind="GRPOTrainer"), run("ours", "zero", out / "zero"),
                 *(run(which, "union", out / "union", rows=str(rows), **union) for which, (rows, _) in stored.items()),
                 run("whole", "two", out / "two"), run("broken", "two", out / "broken", kind="Broken")], ranks=2))
    return out


SPREAD = {n: {"gradient_accumulation_steps": 4 // n, "double": True} for n in (1, 2)}  # eight episodes a step


@pytest.fixture(scope="module")
def spread(start, tmp_path_factory):
    "The same three steps by one process and by two."
    out = tmp_path_factory.mktemp("spread")
    processes = [p for n, more in SPREAD.items() for p in start([run("whole", "spread", out / str(n), **more)], ranks=n)]
    ended(processes)
    return out


def test_at_zero_weights_two_processes_are_trls_trainer_to_the_bit(pair):
    for rank in (0, 1):
        theirs, ours = left(pair / "zero", "trl", rank), left(pair / "zero", "ours", rank)
        assert any(entry.get("tools/call_frequency") for entry in theirs["log"])
        assert differences(ours, theirs) == []
    assert differences(theirs["parameters"], dict(policy().named_parameters()))


@pytest.mark.parametrize("which", ["both", "one side"])
def test_two_processes_have_the_gradient_of_one_with_all_rows(pair, stored, which):
    rows, one = stored[which]
    sites = [sum(b["kind"] == "hint" for b in row["tree"]["branches"]) for row in load_buffer(rows)["composer_rows"]]
    assert sum(sites[:4]) and bool(sum(sites[4:])) == (which == "both")
    found = [left(pair / "union", which, rank) for rank in (0, 1)]
    assert one["log"][0]["sdpo/sites"] and one["log"][0]["replay/pairs"] and one["log"][0]["kl/token"] is not None
    for key in ("sdpo/sites", "sdpo/tokens", "replay/pairs"):
        assert found[0]["log"][0][key] == one["log"][0][key]
    for key in ("policy/loss", "sdpo/loss", "sdpo/gap", "replay/loss", "replay/margin", "kl/token"):
        assert found[0]["log"][0][key] == pytest.approx(one["log"][0][key], abs=1e-8)
    for name, grad in one["grads"].items():
        for rank in (0, 1):
            assert (found[rank]["grads"][name] - grad).abs().max() < 1e-8, name
            assert (found[rank]["parameters"][name] - one["parameters"][name]).abs().max() < 1e-8


def test_ranks_keep_the_same_parameters_and_teacher(pair):
    first, second = (left(pair / "two", "whole", rank) for rank in (0, 1))
    for key in ("parameters", "teacher", "optimizer", "reference"):
        assert first[key] and differences(first[key], second[key]) == []
    assert differences(first["teacher"], first["reference"])


def test_a_nan_on_one_rank_stops_both(pair):
    said = [left(pair / "broken", "broken", rank)["problem"] for rank in (0, 1)]
    assert all(s.startswith("NonFiniteLoss") for s in said)
    assert "another device" in said[0] and "channel 'policy'" in said[1]
    assert len(list((pair / "broken").glob("not-finite-*"))) == 1


def test_one_of_two_is_told_to_stop_and_the_run_goes_on_to_the_same_end(start, pair, tmp_path):
    processes = start([run("stopped", "two", tmp_path, save_strategy="no", hold=1)], ranks=2)
    wait_for(tmp_path / "steps-1", processes, 1)
    processes[1].terminate()
    (tmp_path / "go").touch()
    ended(processes)
    reached = [(tmp_path / f"steps-{rank}").read_text().split()[-1] for rank in (0, 1)]
    assert reached[0] == reached[1] and int(reached[0]) < 3
    assert [f.name for f in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{reached[0]}"]
    listed = json.loads((last_complete_checkpoint(tmp_path) / MARKER).read_text())["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth", "composer-rank1.pt"} <= listed.keys()  # marked once all had written
    ended(start([run("end", "two", tmp_path, resume="last")], ranks=2))
    for rank in (0, 1):
        assert differences(left(tmp_path, "end", rank), left(pair / "two", "whole", rank)) == []


@pytest.mark.parametrize("written, read", [(1, 2), (2, 1)])
def test_another_number_of_processes_goes_on_to_the_same_end(start, spread, tmp_path, written, read):
    "The same tasks, episodes, losses and weights up to rounding."
    ended(start([run("end", "spread", tmp_path, resume=str(spread / str(written) / "checkpoint-1"), **SPREAD[read])], ranks=read))
    found, whole = left(tmp_path, "end"), left(spread / str(written), "whole")
    assert [e["reward"] for e in found["log"]] == [e["reward"] for e in whole["log"]] and len(found["log"]) == 3
    assert sum(e["sdpo/sites"] for e in whole["log"][1:]) and sum(e["replay/pairs"] for e in whole["log"][1:])
    for mine, entry in zip(found["log"], whole["log"], strict=True):
        for key in ("loss", "sdpo/loss", "replay/loss", "sdpo/sites", "replay/pairs"):
            assert mine[key] == pytest.approx(entry[key], rel=1e-6, abs=1e-9), key
    for part in ("parameters", "teacher"):
        assert all((found[part][n] - p).abs().max() < 1e-8 for n, p in whole[part].items())
        assert any((found[part][n] - p).abs().max() > 1e-6 for n, p in policy().double().named_parameters())
