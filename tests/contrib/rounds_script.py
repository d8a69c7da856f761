"One island of a small language model in a process of its own, which is killed at a moment that the test names."
import os
import signal
from pathlib import Path

import torch

from composer_replication.contrib.islands.diloco import OuterStep
from composer_replication.contrib.islands.rounds import Rounds
from composer_replication.contrib.queue.store import Store
from composer_replication.training.checkpoint import save_buffer

WORDS, CONTEXT, WIDTH = 24, 3, 48


def model():
    "Predicts the next word from three; the same weights each time."
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(WORDS, 16), torch.nn.Flatten(), torch.nn.Linear(16 * CONTEXT, WIDTH),
                                   torch.nn.Tanh(), torch.nn.Linear(WIDTH, WORDS))


def text(seed, rows):
    "`(rows, CONTEXT + 1)`: words of a random source, in which the third last decides most."
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1)) * 2
    words = torch.randint(WORDS, (rows, CONTEXT + 1), generator=generator)
    words[:, -1] = torch.multinomial(table[words[:, 0]].softmax(1), 1, generator=generator)[:, 0]
    return words


def loss(net, words):
    return torch.nn.functional.cross_entropy(net(words[:, :-1]), words[:, -1])


def learn(net, optimizer, seed, rows):
    optimizer.zero_grad()
    loss(net, text(seed, rows)).backward()
    optimizer.step()


def held_out(net):
    with torch.no_grad():
        return loss(net, text(10**6, 8192)).item()


class Fatal(Store):
    "Each access and each step is a moment; at the given one the process is gone."

    left = out = None

    def moment(self):
        self.left = None if self.left is None else self.left - 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


for _act in (Store.put, Store.put_new, Store.read, Store.names, Store.remove):
    def _with_moment(self, *arguments, act=_act):
        self.moment()
        result = act(self, *arguments)
        if result is True and arguments[0].endswith("-members.json"):  # the store's own goes after two rounds
            (self.out / Path(arguments[0]).name).write_bytes(arguments[1])
        return result
    setattr(Fatal, _act.__name__, _with_moment)


def main(job):
    "Train as one island; what it has delivered, and what it took, go to `OUT/`."
    torch.set_num_threads(1)
    store, out, number = Fatal(job["url"]), Path(job["out"]), job["number"]
    store.left, store.out = job.get("dies"), out
    net, at = model(), {"step": 0}
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    outer = OuterStep(net.parameters(), job["lr"], job["momentum"])

    def state():
        return {"outer": outer.state_dict(), "optimizer": optimizer.state_dict(), **at}

    def load(given):
        outer.load_state_dict(given["outer"])
        outer.step(None)
        optimizer.load_state_dict(given["optimizer"])
        at["step"] = given["step"]

    rounds = Rounds(store, number, outer, job["wait"], state, load, lambda step: at.update(step=max(at["step"], step)))
    rounds.meet({})
    rounds.join(fresh=True)
    if rounds.has_delivered():
        rounds.exchange(at["step"])
    while at["step"] < job["steps"]:
        for _ in range(job["every"]):
            store.moment()
            learn(net, optimizer, 1 + number + 100 * at["step"], job["rows"])
            at["step"] += 1
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        before, turn = store.left, rounds.number
        store.left = None  # a note for the test is no moment
        if not rounds.has_delivered():
            save_buffer(out / f"made-{turn}-{number}.pt", flat)
        store.left = before
        taken = rounds.exchange(at["step"])
        members = [[found.number, list(found.members)] for found in taken]
        save_buffer(out / f"took-{turn}-{number}.pt", {"rounds": members, "weights": outer.anchor, "now": rounds.number})
    rounds.leave()
    save_buffer(out / f"end-{number}.pt", {"weights": outer.anchor, "held_out": held_out(net), "step": at["step"]})
