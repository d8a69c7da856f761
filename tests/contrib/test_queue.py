"""The rollout queue alone: any order of steps, crashes at any access to the store, signs of life that fail to come."""
import asyncio
import json
import os
import socket
import threading
from itertools import count

import pytest
from fused import Fused, Killed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_replication.contrib.queue.claims import Claims, Liveness, heartbeat, problems
from composer_replication.contrib.queue.rollouts import (
    PlayedGroup,
    ask,
    begin_generation,
    begin_run,
    decode,
    encode,
    folder_of,
    forget,
    join_run,
    latest_version,
    missing,
    take,
    weights_of,
)
from composer_replication.contrib.queue.store import QueueProblem, Store, StoreDown, until
from composer_replication.core.trace import Segment, Trace, Turn
from composer_replication.rollout.types import Ending, Rollout, SegmentTokens

GENERATIONS, GROUPS, LEASE = 5, 2, 60.0
roots = count()


def groups_of(generation):
    return [({"prompt": f"{generation}/{number}"}, [f"step{generation}-rank0-{number}"]) for number in range(GROUPS)]


class Trainer:
    "Its weights are the list of all that it was trained on."

    def __init__(self, world):
        self.world, self.saved = world, []
        self.start()

    def start(self):
        self.store, self.weights, self.begun = self.world.open(), list(self.saved), False

    def begin(self):
        now, bound = len(self.weights) // GROUPS, self.world.bound
        if now < GENERATIONS:
            last = min(now + bound, GENERATIONS - 1)
            begin_generation(self.store, now, last, bound, json.dumps(self.weights).encode(), groups_of)
            self.begun = True

    def take(self):
        now = len(self.weights) // GROUPS
        if not self.begun or missing(self.store, now, GROUPS):
            return
        played = take(self.store, now, GROUPS, max(now - self.world.bound, 0))
        for number, group in enumerate(played or ()):
            self.world.learnt(now, number, group)
            self.weights.append([now, number, group.version])
        self.begun = self.begun and played is None

    def learn(self):
        self.begin()
        self.take()

    def save(self):
        self.saved = list(self.weights)


class Player:
    "A generator; it may lie about its weights."

    def __init__(self, world):
        self.world = world
        self.start()

    def start(self):
        self.store, self.group, self.number = self.world.open(), None, count()
        self.claims = Claims(self.store, LEASE, f"player{next(self.world.names)}")
        self.version = self.weights = None
        self.live()

    def live(self):
        self.store.put(f"generators/{self.claims.name}", str(next(self.number)).encode())

    def load(self):
        version = latest_version(self.store)
        weights = None if version is None or self.group else weights_of(self.store, version)
        if weights is not None:
            self.version, self.weights = version, weights

    def claim(self):
        if self.group is None and self.version is not None:
            self.group = self.claims.claim(self.version)
            assert self.group is None or self.group.generation - self.version <= self.world.bound

    def deliver(self, behind=0):
        if self.group is not None:
            trace = Trace(self.group.names[0], (Turn("user", self.weights.decode()), Turn("user", self.claims.name)))
            self.claims.deliver(self.group, self.version - behind, [Rollout(trace, (), (), (), (), Ending.DONE, 1.0)])
            self.group = None

    def work(self, behind=0):
        self.live()
        self.load()
        self.claim()
        self.deliver(behind)

    def lie(self):
        self.work(behind=self.world.bound + 1)


class World:
    def __init__(self, bound):
        self.bound, self.root, self.clock, self.names, self.first = bound, f"memory://queue{next(roots)}", 0.0, count(), {}
        self.trainer, self.players = Trainer(self), [Player(self), Player(self)]
        self.actors = [self.trainer, *self.players]

    def open(self):
        store = Fused(self.root)
        store.now = lambda: self.clock
        return store

    def learnt(self, generation, number, group):
        "What the trainer was given is fresh enough, was played by the weights that it says, and is the same in every life."
        assert 0 <= generation - group.version <= self.bound
        [rollout] = group.rollouts
        assert rollout.trace.trace_id == f"step{generation}-rank0-{number}"
        trained_on = json.loads(rollout.trace.turns[0].content)
        assert [place[:2] for place in trained_on] == in_order(group.version)
        assert self.first.setdefault((generation, number), group) == group

    def act(self, actor, what, fuse=None, after=False):
        store = actor.store
        store.fuse, store.after = fuse, after
        try:
            getattr(actor, what)()
        except Killed:
            actor.start()
        store.fuse = None


def in_order(generations):
    return [[generation, number] for generation in range(generations) for number in range(GROUPS)]


ACTS = [(0, act) for act in ("learn", "learn", "learn", "begin", "take", "save", "start", "wait", "wait")]
ACTS += [(player, act) for player in (1, 2) for act in ("work", "work", "load", "claim", "deliver", "live", "lie", "start")]
STEPS = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 50), st.booleans()), min_size=10, max_size=60)
# A generator plays a group that seemed free, the trainer learns from it, who had it first delivers too, the trainer dies.
LATE = [(0, "begin"), (1, "load"), (2, "load"), (1, "claim"), (2, "claim"), (2, "deliver"), (2, "claim"), (0, "wait"),
        (0, "wait"), (2, "live"), (2, "claim"), (2, "deliver"), (0, "take"), (1, "deliver"), (0, "start")]

FIRST = [(0, "begin"), (1, "load"), (2, "work"), (2, "work"), (0, "learn"), (0, "begin")]  # generation 0; generation 1 begins


@settings(max_examples=80)
@given(bound=st.integers(0, 2), steps=STEPS)
@example(bound=0, steps=[(step, 50, False) for step in LATE])
@example(bound=0, steps=[(step, 50, False) for step in [*FIRST, (1, "claim")]])  # with weights of generation 0
@example(bound=0, steps=[(step, 50, False) for step in [*FIRST, (1, "lie"), (2, "work"), (0, "learn")]])
def test_every_group_is_learnt_once_in_order_and_in_time_whoever_dies(bound, steps):
    world = World(bound)
    for (number, what), fuse, after in steps:
        if what == "wait":
            world.clock += 40
        else:
            world.act(world.actors[number], what, fuse, after)
    for _ in range(20 * GENERATIONS):  # from now on nobody dies
        world.clock += 40
        for player in world.players:
            world.act(player, "work")
        world.act(world.trainer, "learn")
        if len(world.trainer.weights) == GENERATIONS * GROUPS:
            break
    assert [place[:2] for place in world.trainer.weights] == in_order(GENERATIONS)


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request, tmp_path):
    if request.param == "s3":
        return Store(f"{request.getfixturevalue('bucket')}/store{next(roots)}")
    return Store(str(tmp_path / "queue") if request.param == "folder" else f"memory://store{next(roots)}")


def test_of_many_who_put_a_new_file_one_succeeds(store):
    ready, won = threading.Barrier(8), []

    def put(number):
        ready.wait()
        if store.put_new("a/file", bytes([number]) * 100_000):
            won.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = won
    assert store.read("a/file") == bytes([winner]) * 100_000 and store.names("a") == ["file"]


@pytest.mark.parametrize("at", ["link", "replace"])
def test_a_file_whose_writing_was_cut_off_is_not_there(tmp_path, monkeypatch, at):
    def killed(*arguments):
        raise Killed

    store = Store(str(tmp_path))
    monkeypatch.setattr(os, at, killed)
    with pytest.raises(Killed):
        (store.put_new if at == "link" else store.put)("a/file", b"whole")
    assert store.names("a") == [] and store.read("a/file") is None
    (tmp_path / "a" / ".file.partial").write_bytes(b"ha")  # as a kill leaves it
    monkeypatch.undo()
    assert store.names("a") == [] and store.put_new("a/file", b"whole") and store.names("a") == ["file"]


def test_the_trainer_reads_why_a_generator_ended(store):
    liveness = Liveness(store, 60)
    with pytest.raises(ValueError), heartbeat(store, "one", 60):
        assert liveness.is_alive("one")
        raise ValueError("no more disk")
    with heartbeat(store, "two", 60):
        pass
    assert problems(store) == ["no more disk"] and not liveness.is_alive("one") and store.names("generators") == ["one"]


def test_a_generator_gives_signs_from_a_thread(store):
    with heartbeat(store, "one", 0.02):
        assert until(store, lambda: store.read("generators/one") not in (b"0", None) or None, 60)


def test_a_row_that_json_cannot_hold_is_refused(store):
    with pytest.raises(QueueProblem, match="a task of generation 3 holds more than JSON can"):
        ask(store, 3, 0, [({"prompt": "x", "parts": (1, 2)}, ["step3-rank0-0"])])
    assert store.names(folder_of(3)) == []


def test_a_sign_of_life_survives_an_object_stores_own_errors(tmp_path):
    class Failing(Store):
        calls = 0

        def put(self, name, content):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("EndpointConnectionError")
            super().put(name, content)
            if self.calls == 4:
                signs.set()

    signs = threading.Event()
    with heartbeat(Failing(str(tmp_path)), "ann", 0.4):
        assert signs.wait(60)


def test_a_rollout_of_several_segments_comes_back_whole():
    turns = (Turn("user", "Find it."), Turn("assistant", "A", token_ids=(1, 2), logprobs=(-0.5, -0.5)),
             Turn("user", "Summary."), Turn("assistant", "B", token_ids=(3,), logprobs=(-1.0,)))
    trace = Trace("t", turns, segments=(Segment((0, 1), (1,)), Segment((2, 3), (3,))))
    more = (SegmentTokens((8, 9), (3,), (1,), (-1.0,)),)
    rollout = Rollout(trace, (7,), (1, 2), (1, 1), (-0.5, -0.5), Ending.DONE, 1.0, more=more)
    assert decode(encode(PlayedGroup(4, "ann", (rollout,))), "x").rollouts == (rollout,)


def test_a_file_that_is_no_gzip_inside_is_one_sentence(tmp_path):
    whole = bytearray(encode(PlayedGroup(0, "ann", ())))
    whole[12:20] = b"\xff" * 8
    with pytest.raises(QueueProblem, match="x holds no rollouts"):
        decode(bytes(whole), "x")


def test_rollouts_that_are_forgotten_are_played_again(tmp_path):
    store, player = Store(str(tmp_path)), Claims(Store(str(tmp_path)), name="ann")
    begin_generation(store, 0, 0, 0, b"w", groups_of)
    broken = Rollout(Trace("t", (Turn("user", "a"),)), (), (), (), (), Ending.ERROR, None)
    for _ in range(GROUPS):
        player.deliver(player.claim(0), 0, [broken])
    assert missing(store, 0, GROUPS) == [] and player.claim(0) is None
    forget(store, 0, range(GROUPS))
    assert len(missing(store, 0, GROUPS)) == GROUPS and player.claim(0) is not None


# ---- stores that fail


class Clock:
    "Time passes where somebody waits."

    def __init__(self, *users):
        self.seconds, self.pauses = 0.0, []
        for user in users:
            user.now, user.pause = lambda: self.seconds, self.wait

    def wait(self, seconds):
        self.seconds += seconds
        self.pauses.append(seconds)


def failing(store, error, times, after=False):
    "The store's next requests fail; `after`: they are carried out, and the answer is lost."
    left, request = [times], store._request

    def asked(*given, **how):
        left[0] -= 1
        if after or left[0] < 0:
            answer = request(*given, **how)
        if left[0] >= 0:
            raise error
        return answer

    store._request = asked
    return store


def test_a_request_that_fails_is_made_again_for_a_while(store):
    if store.local:
        pytest.skip("a folder's errors do not pass")
    clock = Clock(store)
    store.put("a", b"one")
    failing(store, OSError("SlowDown"), 3)
    assert store.read("a") == b"one" and len(clock.pauses) == 3
    failing(store, OSError("SlowDown"), 10**9)
    with pytest.raises(StoreDown, match=r"failed \(SlowDown\); see whether it can be reached from here, then go on"):
        store.read("a")
    assert store.patience <= sum(clock.pauses) < 1.5 * store.patience


@pytest.mark.parametrize("error, kind, said", [
    (ConnectionError("no route"), StoreDown, "failed (no route); see whether"),
    (TimeoutError(), StoreDown, "failed (no answer in time); see whether"),
    (PermissionError("Access Denied"), QueueProblem, "refuses (Access Denied); give this machine a key"),
    (FileNotFoundError("no bucket"), QueueProblem, "(no bucket); make the bucket")])
@pytest.mark.parametrize("end", ["begin", "join"])
def test_a_store_that_fails_from_the_start_is_one_sentence_at_once(error, kind, said, end):
    store = failing(Store(f"memory://store{next(roots)}"), error, 10**9)
    clock = Clock(store)
    with pytest.raises(QueueProblem) as problem:
        begin_run(store, {"a": 1}) if end == "begin" else join_run(store, {"a": 1}, 60)
    assert type(problem.value) is kind and said in str(problem.value) and store.url in str(problem.value) and not clock.pauses


def test_a_refusal_is_not_waited_for(store):
    store.put("a", b"one")
    clock = Clock(store)
    with pytest.raises(QueueProblem, match="refuses"):
        failing(store, PermissionError("ExpiredToken"), 10**9).names("")
    assert not clock.pauses


def test_a_folder_that_cannot_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(QueueProblem, match=r"file/queue failed \(.*Not a directory.*\); see whether"):
        begin_run(Store(str(tmp_path / "file" / "queue")), {})


def test_a_new_file_whose_answer_was_lost_is_ones_own():
    store = Store(f"memory://store{next(roots)}")
    Clock(store)
    store.put("a", b"one")
    failing(store, OSError("reset"), 1, after=True)
    assert store.put_new("b", b"mine") and not store.put_new("b", b"another's")


def test_a_claim_whose_answers_were_all_lost_is_found_again():
    "The store is down from the moment when it has written the claim, for longer than a request is repeated."
    store = Store(f"memory://lost{next(roots)}")
    player = Claims(Store(store.url))
    begin_generation(store, 0, 0, 0, b"w", groups_of)
    clock = Clock(player.store)
    player.store.put("generators/" + player.name, b"0")
    request = player.store._request

    def asked(method, *given, **how):
        answer = request(method, *given, **how)
        if "claim" in given[0] and clock.seconds < 3 * player.store.patience:
            raise OSError("reset")
        return answer

    player.store._request = asked
    group = until(player.store, lambda: player.claim(0), 5 * player.store.patience)
    assert group.number == 0 and clock.seconds >= 3 * player.store.patience
    assert player.deliver(group, 0, []) and "claim-0-0" not in player.store.names(folder_of(0))


def test_a_store_that_is_down_for_as_long_as_one_waits_is_named():
    store = failing(Store(f"memory://store{next(roots)}"), OSError("gone"), 10**9)
    clock = Clock(store)
    with pytest.raises(StoreDown, match="gone"):
        until(store, lambda: store.read("a"), 500)
    assert 500 <= clock.seconds < 501
    assert until(store, lambda: None, 500) is None


def test_an_endpoint_that_never_answers_is_given_up():
    from fsspec.asyn import AsyncFileSystem

    class Silent(AsyncFileSystem):
        cachable = False

        async def _pipe_file(self, path, value, mode="overwrite", **how):
            await asyncio.sleep(60)
            raise OSError("nobody gave up")

        async def _ls(self, path, detail=True, **how):
            await asyncio.sleep(60)
            raise OSError("nobody gave up")

    store = Store(f"memory://store{next(roots)}")
    store.files, store.limit = Silent(), 0.01
    for act in (lambda: store.put("a", b"1"), lambda: store.names("")):
        with pytest.raises(StoreDown, match="no answer in time"):
            act()


def test_a_store_that_writes_over_what_is_there_is_refused():
    store = Store(f"memory://store{next(roots)}")
    request = store._request
    store._request = lambda method, *given, mode=None, **how: request(method, *given, **how)
    with pytest.raises(QueueProblem, match="writes over a file that it was asked to leave as it is; take a folder"):
        begin_run(store, {})
    assert store.names("") == []


@pytest.mark.parametrize("groups", [4, 64])
def test_who_finds_nothing_to_play_asks_as_often_whatever_the_number_of_groups(groups):
    url, asked = f"memory://store{next(roots)}", []
    one, two = (Claims(Store(url), name=name) for name in ("one", "two"))
    one.store.put("generators/one", b"0")
    begin_generation(one.store, 0, 0, 0, b"w", lambda g: [({"prompt": str(n)}, [f"{g}-{n}"]) for n in range(groups)])
    for number in range(groups):
        one.store.put(f"{folder_of(0)}/claim-{number}-0", b"one")
    assert two.claim(0) is None
    request = two.store._request
    two.store._request = lambda method, name, *given, **how: asked.append(name) or request(method, name, *given, **how)
    assert two.claim(0) is None
    assert sorted(asked) == ["generations/000000", "generators/one", "progress.json"]


def test_a_claim_that_changed_hands_is_looked_up_after_a_lease():
    url = f"memory://store{next(roots)}"
    one, two, three = (Claims(Store(url), LEASE, name) for name in ("one", "two", "three"))
    clock = Clock(three.store)
    begin_generation(one.store, 0, 0, 0, b"w", lambda g: [({}, ["x"])])
    one.store.put("generators/one", b"0")
    assert one.claim(0) and three.claim(0) is None
    one.release()
    assert two.claim(0)  # and is killed; one lives on
    found = []
    for sign in range(4):
        clock.wait(LEASE / 2)
        one.store.put("generators/one", b"%d" % (sign + 1))
        found.append(three.claim(0))
    assert [group and group.number for group in found] == [None, 0, None, None]


# ---- S3, as moto plays it


def test_a_bucket_that_is_not_there_is_one_sentence(bucket):
    store = Store("s3://not-there/run")
    with pytest.raises(QueueProblem, match="s3://not-there/run .*bucket does not exist.*; make the bucket, or name another"):
        join_run(store, {}, 600)


def test_an_endpoint_where_nobody_listens_is_one_sentence(bucket, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
    store = Store("s3://bucket/run")
    store.files = type(store.files)(skip_instance_cache=True)
    with pytest.raises(StoreDown, match="s3://bucket/run failed .Could not connect.*; see whether it can be reached from here"):
        begin_run(store, {})


def test_an_endpoint_that_takes_a_request_and_never_answers_is_given_up(bucket, monkeypatch):
    "s3fs alone waits without end for the leave to send a file."
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = Store("s3://bucket/run")
        store.files, store.limit = type(store.files)(skip_instance_cache=True), 1.0
        acts = (lambda: store.put("a", b""), lambda: store.put_new("a", b""), lambda: store.read("a"), lambda: store.names(""))
        for act in acts:
            with pytest.raises(StoreDown, match="no answer in time"):
                act()


def test_a_key_that_is_missing_is_one_sentence(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    store = Store("s3://bucket/run")
    store.files = type(store.files)(skip_instance_cache=True)
    with pytest.raises(QueueProblem, match="refuses .Unable to locate credentials.; give this machine a key"):
        begin_run(store, {})


def test_a_file_of_many_parts_is_new_once(bucket):
    store = Store(f"{bucket}/store{next(roots)}")
    big = os.urandom(101 * 2**20)  # s3fs sends it in parts
    assert store.put_new("big", big) and not store.put_new("big", big[1:]) and store.read("big") == big
