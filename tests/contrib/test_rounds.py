"""Rounds in a store alone: the same mean everywhere, whoever is killed at any access, late, or comes back."""
import threading
from itertools import count

import pytest
import torch
from fused import Fused, Killed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_replication.contrib.islands.diloco import IslandsProblem, OuterStep
from composer_replication.contrib.islands.rounds import Round, Rounds, _delivered, _put_json, expect, has_met
from composer_replication.contrib.queue.store import QueueProblem, Store

LIMIT = 60.0
roots = count()


class End:
    "An island of a few weights, with a clock of the test's own unless it has none."

    def __init__(self, store, number, lr=0.7, momentum=0.9, clock=None, wait=LIMIT, saved=None, size=5):
        torch.manual_seed(0)
        self.model, self.step = torch.nn.Linear(size, 2), 0
        if number and saved is None:  # whoever is not first takes the first one's weights
            torch.nn.init.normal_(self.model.weight)
        self.outer = OuterStep(self.model.parameters(), lr, momentum)
        self.rounds = Rounds(store, number, self.outer, wait, self.state, self.load, self.go_to)
        if clock:
            self.rounds.now = lambda: clock[0]
        self.rounds.meet({"diloco_lr": lr})
        if saved:
            self.rounds.number = saved[1]
            self.load(saved[0])
        self.rounds.join(fresh=saved is None)

    def state(self):
        momentum = self.outer.state_dict()["momentum"]
        momentum = None if momentum is None else momentum.clone()
        return {"anchor": self.outer.anchor.clone(), "momentum": momentum, "step": self.step}

    def load(self, state):
        self.outer.load_state_dict(state)
        self.outer.step(None)
        self.step = state["step"]

    def go_to(self, step):
        self.step = max(self.step, step)

    def learn(self, seed, steps=2):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.step += 1
            for weight in self.model.parameters():
                weight.data.sub_(torch.randn(weight.shape, generator=generator) * 0.1)

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/run{next(roots)}"
    return str(tmp_path / "store") if request.param == "folder" else f"memory://rounds{next(roots)}"


def by_hand(start, parts, lr, momentum):
    "DiLoCo's outer steps as the paper writes them: `parts` holds what each island has moved, round by round."
    weights, velocity, after = start.clone(), torch.zeros_like(start), []
    for moved in parts:
        mean = sum(moved) / len(moved)
        velocity = momentum * velocity + mean
        weights = weights - lr * (mean + momentum * velocity)
        after.append(weights.clone())
    return after


@pytest.mark.parametrize("islands", [2, 3])
def test_islands_have_equal_weights_after_each_round_and_those_of_a_plain_loop(url, islands):
    ends, after, moved, failed = [], [[] for _ in range(islands)], [[] for _ in range(islands)], []
    expect(Store(url), islands)
    for number in range(islands):
        ends.append(End(Store(url), number))
    start = ends[0].weights()
    assert all(torch.equal(end.weights(), start) for end in ends)

    def live(number):
        try:
            for turn in range(3):
                ends[number].learn(10 * turn + number)
                moved[number].append(ends[number].outer.difference())
                assert ends[number].rounds.exchange(ends[number].step) == [Round(turn, tuple(range(islands)))]
                assert ends[number].rounds.moved == 4 * len(start) * (1 + islands)
                after[number].append(ends[number].weights())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    assert not failed
    for turn, weights in enumerate(by_hand(start, list(zip(*moved)), 0.7, 0.9)):
        assert all(torch.equal(mine[turn], after[0][turn]) for mine in after)
        torch.testing.assert_close(after[0][turn], weights, rtol=0, atol=1e-6)
    store = Store(url)
    assert {name[:6] for name in store.names("rounds")} == {"000002"} and store.names("states") == ["000002.pt", "000003.pt"]


def trio(url, **more):
    clock = [0.0]
    return clock, [End(Store(url), number, 1.0, 0.0, clock, **more) for number in range(3)]


def settle(ends, over):
    for end in ends:
        end.rounds.decide(over)
    return [end.rounds.catch_up() for end in ends]


def test_one_that_is_killed_after_it_has_delivered_is_in_the_mean_and_then_missed_once(url):
    clock, ends = trio(url)
    start, moved = ends[0].weights(), []
    for end in ends:
        end.learn(end.rounds.island)
        moved.append(end.outer.difference())
        end.rounds.deliver(end.step)
    one, two, _ = ends  # the third is gone
    assert settle([one, two], over=False) == [[Round(0, (0, 1, 2))]] * 2
    torch.testing.assert_close(one.weights(), start - sum(moved) / 3, rtol=0, atol=1e-6)
    for end in (one, two):
        end.learn(7)
        end.rounds.deliver(end.step)
    assert settle([one, two], over=False) == [[], []]
    assert settle([one, two], over=True) == [[Round(1, (0, 1))]] * 2
    for end in (one, two):
        end.rounds.deliver(end.step)
    assert settle([one, two], over=False) == [[Round(2, (0, 1))]] * 2  # nobody waits for it any more
    back = End(Store(url), 2, 1.0, 0.0, clock)
    assert torch.equal(back.weights(), one.weights()) and (back.rounds.number, back.step) == (3, one.step)
    one.rounds.deliver(one.step)
    two.rounds.deliver(two.step)
    assert settle([one, two], over=False) == [[], []]  # they wait for it again


@pytest.mark.parametrize("at", ["file", "marker"])
def test_one_that_is_killed_while_it_delivers_counts_only_when_all_is_there(tmp_path, at):
    clock, ends = trio(str(tmp_path))
    start, moved, third = ends[0].weights(), [], ends[2]
    for end in ends:
        end.learn(end.rounds.island)
        moved.append(end.outer.difference())
    for end in ends[:2]:
        end.rounds.deliver(end.step)
    third.rounds.store = Fused(str(tmp_path))
    third.rounds.store.fuse, third.rounds.store.after = 2, at == "marker"  # life, names, then the file
    with pytest.raises(Killed):
        third.rounds.deliver(third.step)
    assert third.rounds.has_delivered() is (at == "marker")
    assert settle(ends[:2], over=False) == [[], []]
    back = End(Store(str(tmp_path)), 2, 1.0, 0.0, clock)
    assert back.rounds.number == 0 and torch.equal(back.weights(), start)
    if at == "file":
        back.learn(2)  # the same once more
    back.rounds.deliver(back.step)
    assert settle([*ends[:2], back], over=False) == [[Round(0, (0, 1, 2))]] * 3
    torch.testing.assert_close(ends[0].weights(), start - sum(moved) / 3, rtol=0, atol=1e-6)
    assert back.step == 2 and torch.equal(back.weights(), ends[0].weights())


def test_one_that_is_late_takes_what_the_others_have(url):
    _, ends = trio(url)
    one, two, late = ends
    for turn in range(4):
        for end in (one, two):
            end.learn(turn)
            end.rounds.deliver(end.step)
        settle([one, two], over=True)
        if turn == 0:  # its own part comes too late, for the first round
            late.learn(9)
            assert late.rounds.exchange(late.step) == [Round(0, (0, 1))]
            assert torch.equal(late.weights(), one.weights())
    late.learn(9)
    taken = late.rounds.exchange(late.step)  # files of round 1 are gone: it has to take a state
    assert taken[0] == Round(1, ()) and late.rounds.number == 4
    assert torch.equal(late.weights(), one.weights()) and late.step == one.step


def test_a_decision_that_comes_after_a_round_was_cleared_away_is_taken_by_nobody(url):
    "An island stands still between its look at the store and its write, while the others finish three rounds without it."
    _, ends = trio(url)
    one, two, late = ends
    late.learn(9)
    late.rounds.deliver(late.step)
    there = _delivered(late.rounds.store, 0)
    for turn in range(3):
        for end in (one, two):
            end.learn(turn)
            end.rounds.deliver(end.step)
        for name in ("000000-2.safetensors", "000000-2.json"):
            late.rounds.store.remove(f"rounds/{name}")
        settle([one, two], over=True)
    _put_json(late.rounds.store, "rounds/000000-members", {"2": there["2"]})
    other = End(Store(url), 3, 1.0, 0.0)
    for end in (late, other):
        end.rounds.number = 0
        assert end.rounds.catch_up()[-1].number <= 2 and torch.equal(end.weights(), one.weights())


def test_an_island_that_was_stopped_while_it_waited_finds_its_part_in_the_mean(url):
    clock, (one, two, three) = trio(url)
    for end in (one, two, three):
        end.learn(end.rounds.island)
    saved = one.state(), one.rounds.number
    assert one.rounds.exchange(one.step, lambda: True) == []
    one.rounds.leave()
    for end in (two, three):
        end.rounds.deliver(end.step)
    assert settle([two, three], over=False) == [[Round(0, (0, 1, 2))]] * 2
    again = End(Store(url), 0, 1.0, 0.0, clock, saved=saved)
    assert torch.equal(again.weights(), two.weights()) and again.rounds.number == 1


def test_nobody_waits_longer_than_the_limit(tmp_path):
    clock, (one, *_) = trio(str(tmp_path))
    waited = []

    def pause(seconds):
        waited.append(seconds)
        clock[0] += seconds

    one.rounds.pause = pause
    one.learn(0)
    assert one.rounds.exchange(one.step) == [Round(0, (0,))]
    assert sum(waited) == pytest.approx(LIMIT) and max(waited) <= 1
    one.rounds.decide, one.rounds.catch_up = lambda over: None, list  # as if nothing could be written
    with pytest.raises(IslandsProblem, match="round 1 at .* came to no end"):
        one.rounds.exchange(one.step)


def test_what_does_not_fit_is_one_sentence(tmp_path):
    url = str(tmp_path)
    _, (one, two, three) = trio(url)
    with pytest.raises(IslandsProblem, match="run with weights=12, and here it is 14"):
        End(Store(url), 3, 1.0, 0.0, size=6)
    twin = End(Store(url), 0, 1.0, 0.0)
    with pytest.raises(IslandsProblem, match="island 0 runs twice at"):
        one.rounds.deliver(2)
    two.outer.anchor[0] += 1
    for end in (twin, two, three):
        end.rounds.deliver(2)
    twin.rounds.decide(False)
    with pytest.raises(IslandsProblem, match="islands 1 and 2 began round 0 with different weights|islands 1 and 0 began"):
        twin.rounds.catch_up()
    with pytest.raises(IslandsProblem, match="holds nothing of the run of this checkpoint"):
        End(Store(f"{url}/other"), 0, 1.0, 0.0, saved=(one.state(), 3))


def test_a_store_that_writes_over_what_is_there_is_refused():
    store = Store(f"memory://rounds{next(roots)}")
    request = store._request
    store._request = lambda method, *given, mode=None, **how: request(method, *given, **how)
    with pytest.raises(QueueProblem, match="writes over a file that it was asked to leave as it is"):
        End(store, 0)
    assert store.names("") == []


def test_a_damaged_file_is_one_sentence(tmp_path):
    _, (one, *_) = trio(str(tmp_path))
    one.rounds.deliver(2)
    file = tmp_path / "rounds" / "000000-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    one.rounds.decide(True)
    with pytest.raises(IslandsProblem, match="000000-0.safetensors at .* is not what island 0 wrote"):
        one.rounds.catch_up()
    file.unlink()
    with pytest.raises(IslandsProblem, match="round 0 at .* lacks a file"):
        one.rounds.catch_up()


def test_who_starts_islands_sees_which_have_come(url):
    store = Store(url)
    expect(store, 2)
    End(store, 0)
    assert [has_met(store, number) for number in range(2)] == [True, False]


# ---- whoever dies, at any access to the store


class Actor:
    "An island that may be killed at any access, and comes back from what it saved, or from nothing."

    def __init__(self, world, number):
        self.world, self.number, self.saved, self.end, self.seeds = world, number, None, None, count(100 * number)
        self.store = Fused(world.root)

    def start(self):
        self.end = None
        self.end = End(self.store, self.number, saved=self.saved)

    def learn(self):
        self.end.learn(next(self.seeds))

    def deliver(self):
        self.end.rounds.deliver(self.end.step)

    def look(self, over=False):
        self.end.rounds.decide(over)
        for taken in self.end.rounds.catch_up():
            self.world.took(taken)
        self.end.rounds._enter()

    def wait(self):
        self.look(over=True)

    def save(self):
        self.saved = self.end.state(), self.end.rounds.number

    def turn(self):
        self.learn()
        self.deliver()
        self.look()

    def leave(self):
        self.end.rounds.leave()


class World:
    def __init__(self):
        self.root, self.after, self.members = f"memory://rounds{next(roots)}", {}, {}
        self.actors = [Actor(self, number) for number in range(3)]

    def took(self, taken):
        "Of one round there is one mean."
        assert not taken.members or self.members.setdefault(taken.number, taken.members) == taken.members

    def act(self, actor, what, fuse=None, after=False):
        actor.store.fuse, actor.store.after = fuse, after
        try:
            if actor.end is None:
                actor.start()
            else:
                getattr(actor, what)()
        except Killed:
            actor.end = None
        actor.store.fuse = None
        if actor.end:  # its anchor is that of all who have taken as many outer steps
            end = actor.end
            assert torch.equal(self.after.setdefault(end.rounds.number, end.outer.anchor.clone()), end.outer.anchor)


ACTS = [(number, act) for number in range(3)
        for act in ("turn", "turn", "learn", "deliver", "look", "look", "wait", "save", "start", "leave")]
STEPS = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 30), st.booleans()), min_size=10, max_size=60)
ROUND = [(0, "turn"), (1, "turn"), (0, "wait"), (1, "look")]


@settings(max_examples=40)
@given(steps=STEPS)
@example(steps=[(step, 99, False) for step in [(2, "start"), (2, "save"), *ROUND * 3, (2, "turn"), (2, "start"), *ROUND]])
def test_all_take_the_same_rounds_whoever_dies(steps):
    world = World()
    for (number, what), fuse, after in steps:
        world.act(world.actors[number], what, fuse, after)
    for _ in range(4):  # from now on nobody dies
        for what in ("turn", "look", "wait", "look"):
            for actor in world.actors:
                world.act(actor, what)
    numbers = [actor.end.rounds.number for actor in world.actors]
    assert min(numbers) == max(numbers) > 0
