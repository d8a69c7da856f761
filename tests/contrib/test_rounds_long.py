"""Three islands in processes, killed at 20 moments and started again: equal weights, nothing lost, the loss of one process."""
import json
import random
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import rounds_script
import torch
from forks import SERVER
from ranks import processes

from composer_replication.training.checkpoint import load_buffer

LIMIT, KILLS, ISLANDS = 300, 20, 3  # seconds that all may take; on an idle machine it needs 60
JOB = {"steps": 400, "every": 10, "rows": 32, "wait": 120.0}
ALL = 0.1  # nats: so much more than one process at equal tokens the held-out loss may be; written down before the first run


def run(folder, **outer):
    "Start the islands and, whenever one is killed, start it again with its next moment. Returns how many were killed."
    dice, moments = random.Random(0), [[] for _ in range(ISLANDS)]
    for _ in range(KILLS):
        moments[dice.randrange(ISLANDS)].append(dice.randint(1, 120))
    killed, end = 0, time.monotonic() + LIMIT
    with processes() as begun:
        def begin(number):
            dies = moments[number].pop(0) if moments[number] else None
            job = JOB | outer | {"url": str(folder / "store"), "out": str(folder), "number": number, "dies": dies}
            process = SERVER.Process(target=rounds_script.main, args=(job,))
            process.start()
            process.number = number
            begun.append(process)
            return process

        living = {process.sentinel: process for process in map(begin, range(ISLANDS))}
        while living:
            assert (ready := wait(list(living), max(end - time.monotonic(), 0))), "the islands came to no end in time"
            for sentinel in ready:
                process = living.pop(sentinel)
                process.join(LIMIT)
                if process.exitcode == -signal.SIGKILL:
                    killed += 1
                    again = begin(process.number)
                    living[again.sentinel] = again
                else:
                    assert process.exitcode == 0
    return killed


def alone(steps, rows):
    net = rounds_script.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(steps):
        rounds_script.learn(net, optimizer, 1 + 100 * step, rows)
    return rounds_script.held_out(net)


def taken(folder: Path):
    "By round: who was in the mean, and, where an island lived to tell, the weights after it."
    decided = {int(file.name[:6]): json.loads(file.read_bytes()) for file in folder.glob("*-members.json")}
    members, after = {number: sorted(map(int, islands)) for number, islands in decided.items()}, {}
    for file in folder.glob("took-*.pt"):
        found = load_buffer(file)
        for number, islands in found["rounds"]:
            assert members[number] == islands
        assert torch.equal(after.setdefault(found["now"] - 1, found["weights"]), found["weights"])
    return members, after


@pytest.mark.slow
@pytest.mark.parametrize("lr, momentum", [(1.0, 0.0), (0.7, 0.9)])
def test_islands_killed_at_twenty_moments_lose_nothing(tmp_path, lr, momentum):
    killed = run(tmp_path, lr=lr, momentum=momentum)
    ends = [load_buffer(tmp_path / f"end-{number}.pt") for number in range(ISLANDS)]
    assert killed == KILLS and [end["step"] for end in ends] == [JOB["steps"]] * ISLANDS
    assert all(torch.equal(end["weights"], ends[0]["weights"]) for end in ends)
    members, after = taken(tmp_path)
    everybody = list(range(ISLANDS))  # whoever has delivered is in the mean
    assert members == {number: everybody for number in range(JOB["steps"] // JOB["every"])}
    assert len(after) > len(members) / 2
    for number, weights in after.items() if momentum == 0 else ():  # the mean of what they had made
        made = [load_buffer(tmp_path / f"made-{number}-{island}.pt") for island in members[number]]
        torch.testing.assert_close(weights, sum(made) / len(made), rtol=0, atol=1e-6)
    steps, rows = JOB["steps"], JOB["rows"]
    one, third, wide = alone(ISLANDS * steps, rows), alone(steps, rows), alone(steps, ISLANDS * rows)
    start = rounds_script.held_out(rounds_script.model())
    print(f"\nouter lr {lr}, momentum {momentum}: held-out loss {ends[0]['held_out']:.3f}; one process at equal tokens {one:.3f} "
          f"({ISLANDS * steps} steps), {wide:.3f} ({steps} steps of {ISLANDS} times as many rows); one island alone {third:.3f}; "
          f"before training {start:.3f}")
    assert ends[0]["held_out"] < one + ALL
