"The ledger on real files with real processes: killed, side by side, on a full disk; counted anew by plain SQL and plain logs."
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from composer_replication.replay import ledger as ledger_module
from composer_replication.replay.ledger import Answer, BudgetReached, Claim, Ledger, LedgerProblem

MOST, COST = 0.01, 0.004
FORK = get_context("fork")


def answered(key, cost=COST, body="{}", **changed):
    return Answer(**{"key": key, "teacher": "t", "model": "m", "served": "m-1", "provider": "p", "body": body, "prompt_tokens": 9,
                     "completion_tokens": 3, "cached_tokens": 1, "cost": cost, "cost_from": "table", "seconds": 0.5,
                     "asked_at": "2026-11-21T10:00:00Z"} | changed)


def ask(ledger, key, most=MOST, request='{"q": 1}'):
    return ledger.claim(key, request, "t", "m", most)


def pay(ledger, key, cost=COST, **changed):
    ledger.settle(ask(ledger, key, max(MOST, cost)), answered(key, cost, **changed))


def counted(path):
    "All money in a ledger, added up call by call by plain SQL, in billionths of a dollar; and that the file is sound."
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        calls = db.execute("SELECT state, COUNT(*), SUM(counted) FROM calls GROUP BY state").fetchall()
        totals = db.execute("SELECT state, calls, counted FROM totals WHERE calls > 0").fetchall()
    db.close()
    assert sorted(calls) == sorted(totals)
    return {state: (n, money) for state, n, money in calls}


def log(path, *words):
    "One line, in one write: what other processes write at once never mixes with it."
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (" ".join(map(str, words)) + "\n").encode())
    os.close(handle)


def lines(path):
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def start(what, *args):
    process = FORK.Process(target=what, args=args, daemon=True)
    process.start()
    return process


def until(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


# One process

def test_a_question_is_claimed_once_and_paid_once(tmp_path):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        claim = ask(ledger, "k")
        assert isinstance(claim, Claim) and claim.key == "k"
        assert ask(ledger, "k") is None and ledger.get(["k"]) == {}
        ledger.settle(claim, answered("k"))
        assert ask(ledger, "k") == answered("k") and ledger.get(["k", "other", "k"]) == {"k": answered("k")}
        for again in (lambda: ledger.settle(claim, answered("k")), lambda: ledger.fail(claim, "no", True)):
            with pytest.raises(ValueError, match="already"):
                again()
        with pytest.raises(ValueError, match="each claim with its own"):
            ledger.settle(ask(ledger, "k2"), answered("k"))
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert ledger.get(["k"]) == {"k": answered("k")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l.sqlite"]


def test_a_failed_question_may_be_asked_again_and_stays_counted_where_it_may_have_been_billed(tmp_path):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        ledger.fail(ask(ledger, "a"), "half a body", billed=True)
        ledger.fail(ask(ledger, "b"), "too many requests", billed=False)
        told = ledger.spent()
        assert (told.lost_usd, told.lost, told.paid, told.in_flight, told.total_usd) == (MOST, 1, 0, 0, MOST)
        pay(ledger, "a")
        pay(ledger, "b", cost=0.5)  # more than was set aside
        held = ask(ledger, "c")
        told = ledger.spent()
        assert (told.paid_usd, told.lost_usd, told.in_flight_usd) == pytest.approx((COST + 0.5, MOST, MOST))
        assert (told.paid, told.lost, told.in_flight) == (2, 1, 1)
        ledger.fail(held, "cancelled", billed=False)
    assert counted(tmp_path / "l.sqlite") == {"paid": (2, 504_000_000), "lost": (1, 10_000_000), "failed": (2, 0)}


def test_the_budget_is_exact_over_sums_that_floating_point_gets_wrong(tmp_path):
    with Ledger(tmp_path / "l.sqlite", budget_usd=0.3) as ledger:
        assert 0.1 + 0.1 + 0.1 > 0.3  # so a sum of floats refuses the third
        for key in "abc":
            pay(ledger, key, cost=0.1)
        with pytest.raises(BudgetReached, match="0.300000 dollars are spent"):
            ask(ledger, "d", most=1e-9)
        assert isinstance(ask(ledger, "d", most=0), Claim)
        assert isinstance(ask(ledger, "a", most=5), Answer)  # what is there costs nothing


def test_calls_in_flight_and_lost_ones_count_against_the_budget(tmp_path):
    with Ledger(tmp_path / "l.sqlite", budget_usd=2 * MOST) as ledger:
        held, lost = ask(ledger, "a"), ask(ledger, "b")
        with pytest.raises(BudgetReached):
            ask(ledger, "c", most=0.0001)
        ledger.fail(lost, "stalled", billed=True)
        with pytest.raises(BudgetReached):
            ask(ledger, "c", most=0.0001)
        ledger.settle(held, answered("a"))  # frees what it did not cost
        assert isinstance(ask(ledger, "c", most=MOST - COST), Claim)
        with pytest.raises(BudgetReached):
            ask(ledger, "d", most=1e-9)


def test_a_closed_ledger_leaves_its_claims_lost_even_in_a_living_process(tmp_path):
    first = Ledger(tmp_path / "l.sqlite")
    claim = ask(first, "k")
    with Ledger(tmp_path / "l.sqlite") as second:
        assert ask(second, "k") is None and second.spent().in_flight == 1
        first.close()
        with pytest.raises(LedgerProblem, match="closed"):
            first.settle(claim, answered("k"))
        assert (second.spent().lost, second.spent().in_flight) == (1, 0)
        pay(second, "k")


def test_an_answer_that_comes_after_all_is_not_thrown_away(tmp_path):
    "Somebody removes the file that shows that a ledger is open: its claim looks lost, but its answer is paid for."
    with Ledger(tmp_path / "l.sqlite") as first, Ledger(tmp_path / "l.sqlite") as second:
        claims = [ask(first, key) for key in "ab"]
        for file in tmp_path.glob("l.sqlite-open-*"):
            file.unlink()
        assert second.spent().lost == 2
        first.settle(claims[0], answered("a"))
        assert ask(second, "a") == answered("a")
        pay(second, "b")
        first.settle(claims[1], answered("b", cost=1))  # paid for as well: who asked gets it, and the ledger keeps the other
        assert second.spent().paid == 2 and second.spent().lost == 1 and ask(second, "b") == answered("b")
        with pytest.raises(ValueError, match="already"):
            first.settle(claims[0], answered("a"))


@pytest.mark.parametrize("most", [-1e-9, float("nan"), float("inf"), 1e7])
def test_a_price_that_is_none_claims_nothing(tmp_path, most):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        with pytest.raises(ValueError, match="no price of a call"):
            ask(ledger, "k", most)
        assert ledger.spent().in_flight == 0
    with pytest.raises(ValueError, match="a budget"):
        Ledger(tmp_path / "m.sqlite", budget_usd=most)


@pytest.mark.parametrize("changed", [{"cost": -1}, {"cost": float("nan")}, {"prompt_tokens": -1}, {"completion_tokens": 2**63},
                                     {"cached_tokens": "3"}, {"seconds": -0.1}, {"seconds": float("nan")}])
def test_an_answer_that_cannot_be_is_refused_before_it_is_filed(changed):
    with pytest.raises(ValueError):
        answered("k", **changed)


def test_any_text_is_kept(tmp_path):
    "NUL, quotes, other planes; half a surrogate pair, which no file can hold, as JSON writes it."
    body = json.dumps({"a": "\x00'\";--\U0001f98a\u2028"}, ensure_ascii=False)
    broken = '{"a": "\ud83e"}'
    with Ledger(tmp_path / "l.sqlite") as ledger:
        pay(ledger, "a", body=body, served="Ω\x00")
        pay(ledger, "b", body=broken, provider="\udcff")
        got = ledger.get("ab")
        assert got["a"].body == body and got["a"].served == "Ω\x00"
        assert json.loads(got["b"].body) == json.loads(broken)
        assert [row["key"] for row in ledger.rows()] == ["a", "b"]


def test_many_keys_at_once(tmp_path):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        for i in range(300):
            pay(ledger, f"k{i}")
        ledger.fail(ask(ledger, "lost"), "stalled", True)
        ask(ledger, "asked")
        wanted = [f"k{i}" for i in range(0, 100_000, 2)] + ["lost", "asked"]
        assert set(ledger.get(wanted)) == {f"k{i}" for i in range(0, 300, 2)} and ledger.get([]) == {}


def test_rows_hold_every_answer_with_its_request_and_nothing_else(tmp_path):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        expected = []
        for i in range(50):
            claim = ask(ledger, f"k{i}", request=json.dumps({"n": i}))
            if i % 5 == 0:
                ledger.fail(claim, "stalled", billed=True)
                claim = ask(ledger, f"k{i}", request=json.dumps({"n": i})) if i % 10 else None
            if claim:
                ledger.settle(claim, answered(f"k{i}", cost=i / 1000, body=json.dumps([i])))
                expected.append({**vars(answered(f"k{i}", cost=i / 1000, body=json.dumps([i]))), "request": json.dumps({"n": i})})
        assert list(ledger.rows()) == expected and len(expected) == 45
    with Ledger(tmp_path / "empty.sqlite") as ledger:
        assert list(ledger.rows()) == []



def test_answers_are_settled_while_others_are_read(tmp_path):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        for i in range(100):
            pay(ledger, f"k{i}")
        seen = []
        for row in ledger.rows():  # as they stood when the reading began
            pay(ledger, "new" + row["key"])
            seen.append(row["key"])
        assert seen == [f"k{i}" for i in range(100)] and ledger.spent().paid == 200


# Threads

def test_eight_threads_pay_for_each_key_once(tmp_path):
    keys, paid = [f"k{i}" for i in range(60)], []

    def work(seed):
        todo = random.Random(seed).sample(keys, len(keys))
        while todo:
            got = ask(ledger, todo[0])
            if isinstance(got, Claim):
                paid.append(got.key)
                ledger.settle(got, answered(got.key))
            todo = todo[1:] + ([todo[0]] if got is None else [])

    with Ledger(tmp_path / "l.sqlite", budget_usd=1) as ledger:
        threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert sorted(paid) == sorted(keys) and ledger.spent().paid == 60
        assert ledger.spent().paid_usd == pytest.approx(60 * COST)


# Killed

def write_until_killed(path, events, first, budget=None):
    with Ledger(path, budget) as ledger:
        for i in range(first, 10**6):
            try:
                claim = ask(ledger, f"k{i}")
            except BudgetReached:
                log(events, "stop", "-")
                time.sleep(60)
            log(events, "asked", claim.key)
            ledger.settle(claim, answered(claim.key, body=json.dumps("x" * (i % 7) * 1500)))
            log(events, "settled", claim.key)


def kill_one(path, events, rng, *args):
    "Start a writer, let it do some calls, kill it somewhere in the next milliseconds."
    before = len(lines(events))
    writer = start(write_until_killed, path, events, *args)
    until(lambda: len(lines(events)) > before + rng.randrange(8) or ["stop", "-"] in lines(events))
    time.sleep(rng.uniform(0, 0.012))
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()


@pytest.mark.parametrize("kills", [14, pytest.param(40, marks=pytest.mark.slow)])
def test_a_writer_killed_at_many_moments_loses_nothing_and_frees_nothing(tmp_path, kills):
    path, events, rng = tmp_path / "l.sqlite", tmp_path / "events", random.Random(6)
    lost = 0
    for turn in range(kills):
        kill_one(path, events, rng, 10_000 * turn)
        settled = [key for what, key in lines(events) if what == "settled"]
        in_flight = len([key for what, key in lines(events) if what == "asked"]) - len(settled)
        with Ledger(path) as ledger:
            got, told = ledger.get(settled), ledger.spent()
        assert set(got) == set(settled)  # whatever `settle` returned from is there
        assert told.in_flight == 0 and 0 <= told.lost - lost <= 1  # one call was under way, or none
        assert told.lost_usd == pytest.approx(told.lost * MOST)
        assert 0 <= told.paid - len(settled) and told.paid + told.lost >= len(settled) + in_flight
        lost = told.lost
        made = counted(path)
        assert made.get("asking") is None and made["paid"] == (told.paid, round(told.paid_usd * 1e9))
    assert kills // 8 <= lost <= kills  # the kills did hit calls under way
    assert [p.name for p in tmp_path.glob("*-open-*")] == []

    with Ledger(path) as ledger:  # resumed: what an uninterrupted run holds
        asked = sorted({key for _, key in lines(events)})
        for key in asked:
            if isinstance(claim := ask(ledger, key), Claim):
                ledger.settle(claim, answered(key, body=json.dumps("x" * (int(key[1:]) % 7) * 1500)))
        assert ledger.get(asked) == {k: answered(k, body=json.dumps("x" * (int(k[1:]) % 7) * 1500)) for k in asked}


def test_kills_at_the_edge_of_the_budget_never_pass_it(tmp_path):
    path, events, rng = tmp_path / "l.sqlite", tmp_path / "events", random.Random(7)
    budget, stopped = 0.15, 0
    for turn in range(12):
        kill_one(path, events, rng, 10_000 * turn, budget)
        money = sum(m for _, m in counted(path).values())
        assert money <= budget * 1e9
        stopped += ["stop", "-"] in lines(events)
    assert stopped and money + MOST * 1e9 > budget * 1e9  # it was used up, too


def test_a_killed_process_that_nobody_has_noticed_yet_is_dead_and_a_stopped_one_is_alive(tmp_path):
    path = tmp_path / "l.sqlite"
    child = subprocess.Popen([sys.executable, "-c", "import time\nfrom composer_replication.replay.ledger import Ledger\n"
                              f"l = Ledger({str(path)!r}); l.claim('k', '', 't', 'm', 0.01)\n"
                              "print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"up\n"
        with Ledger(path) as ledger:
            os.kill(child.pid, signal.SIGSTOP)
            os.utime(next(tmp_path.glob("*-open-*")), (0, 0))  # as if the clock had jumped by decades
            assert ask(ledger, "k") is None and ledger.spent().in_flight == 1
            os.kill(child.pid, signal.SIGKILL)
            until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
            pay(ledger, "k")  # a zombie: its parent, this test, has not waited for it
            assert (ledger.spent().lost, ledger.spent().paid) == (1, 1)
    finally:
        child.kill()
        child.communicate()


def test_an_owner_of_whom_nothing_can_be_known_is_neither_dead_nor_alive(tmp_path):
    with Ledger(tmp_path / "l.sqlite") as first, Ledger(tmp_path / "l.sqlite") as second:
        held = ask(first, "k")
        [file] = [f for f in tmp_path.glob("*-open-*") if f.name.endswith(first._file.name)]
        file.unlink()
        file.symlink_to(file)
        for look in (lambda: ask(second, "k"), second.spent, lambda: Ledger(tmp_path / "l.sqlite")):
            with pytest.raises(LedgerProblem, match="cannot be used"):
                look()
        pay(second, "other")
        first.settle(held, answered("k"))
        assert second.spent().paid == 2


def test_a_forked_process_may_not_use_its_parents_ledger(tmp_path):
    def use(told):
        try:
            ask(ledger, "k")
        except LedgerProblem as problem:
            told.write_text(str(problem))
        ledger.close()

    with Ledger(tmp_path / "l.sqlite") as ledger:
        held = ask(ledger, "mine")
        start(use, tmp_path / "told").join()
        assert "open it again in this one" in (tmp_path / "told").read_text()
        with Ledger(tmp_path / "l.sqlite") as other:  # the child's end took nothing with it
            assert ask(other, "mine") is None
        ledger.settle(held, answered("mine"))


# Side by side

def work_beside_others(path, events, keys, seed, budget):
    rng = random.Random(seed)
    with Ledger(path, budget) as ledger:
        todo = rng.sample(keys, len(keys))
        while todo:
            key = todo.pop(0)
            try:
                got = ask(ledger, key)
            except BudgetReached:
                log(events, "stop", seed)
                continue
            if isinstance(got, Claim):
                log(events, "sent", key)
                time.sleep(rng.uniform(0, 0.002))
                if rng.random() < 0.2:
                    log(events, billed := rng.choice(["lost", "refused"]), key)
                    ledger.fail(got, "no answer", billed=billed == "lost")
                    todo.append(key)
                else:
                    log(events, "paid", key)
                    ledger.settle(got, answered(key, cost=MOST, served=str(seed)))
            elif got is None:
                todo.append(key)


@pytest.mark.parametrize("budget", [None, 1.0])
def test_four_processes_settle_each_key_once_within_the_budget(tmp_path, budget):
    path, events, keys = tmp_path / "l.sqlite", tmp_path / "events", [f"k{i}" for i in range(150)]
    workers = [start(work_beside_others, path, events, keys, seed, budget) for seed in range(4)]  # they race for making it, too
    until(path.exists)
    with sqlite3.connect(path, timeout=20) as watch:
        while any(w.is_alive() for w in workers):  # by its own sum, all the time
            assert (watch.execute("SELECT SUM(counted) FROM calls").fetchone()[0] or 0) <= (budget or 99) * 1e9
            time.sleep(0.002)
    watch.close()
    for w in workers:
        w.join(30)
        assert w.exitcode == 0
    told = [tuple(line) for line in lines(events)]
    paid, lost = [k for w, k in told if w == "paid"], [k for w, k in told if w == "lost"]
    assert len(paid) == len(set(paid))  # nothing was paid for twice
    made = counted(path)
    assert made["paid"] == (len(paid), len(paid) * 10_000_000) and made["lost"] == (len(lost), len(lost) * 10_000_000)
    assert "asking" not in made
    with Ledger(path) as ledger:
        assert set(ledger.get(keys)) == set(paid)
        assert len({a.served for a in ledger.get(keys).values()}) > 1  # several did work
    if budget is None:
        assert set(paid) == set(keys)
    else:  # to the cent: 100 calls at one cent, paid or lost, and somebody was refused
        assert len(paid) + len(lost) == 100 and any(w == "stop" for w, _ in told)


# Trouble with the file

def fill(path, told, most_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    done = 0
    with Ledger(path) as ledger:
        try:
            while True:
                claim = ask(ledger, f"k{done}")
                ledger.settle(claim, answered(f"k{done}", body="x" * 20_000))
                done += 1
        except LedgerProblem as problem:
            log(told, done, str(problem))
        spent = ledger.spent()
        assert spent.paid == done == len(ledger.get([f"k{i}" for i in range(done + 1)]))  # it still answers
        for i in range(3):  # and refuses again, in the same way
            with pytest.raises(LedgerProblem, match="make room"):
                pay(ledger, f"again{i}", body="x" * 2_000_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if isinstance(got := ask(ledger, f"k{done}"), Claim):  # the claim itself had found no room
            claim = got
        ledger.settle(claim, answered(f"k{done}"))  # room was made: the same claim is settled
        assert len(list(ledger.rows())) == done + 1


@pytest.mark.parametrize("most_bytes", [300_000, 310_001, 999_999])
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, most_bytes):
    path, told = tmp_path / "l.sqlite", tmp_path / "told"
    child = start(fill, path, told, most_bytes)
    child.join(30)
    assert child.exitcode == 0
    done, *sentence = told.read_text().split(" ")
    assert int(done) >= 3 and "make room and run again, all that was settled is kept." in " ".join(sentence)
    assert told.read_text().count("\n") == 1
    with Ledger(path) as ledger:
        got = ledger.get([f"k{i}" for i in range(int(done) + 1)])
        assert len(got) == int(done) + 1 and {a.body for k, a in got.items() if k != f"k{done}"} == {"x" * 20_000}
    counted(path)
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def full_from_the_start(path, told):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    try:
        Ledger(path)
    except LedgerProblem as problem:
        log(told, problem)


def test_no_half_ledger_is_left_where_there_is_no_room_for_one(tmp_path):
    start(full_from_the_start, tmp_path / "l.sqlite", tmp_path / "told").join(200)
    assert "make room" in (tmp_path / "told").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["told"]
    Ledger(tmp_path / "l.sqlite").close()


def text_file(path):
    path.write_text("call the fox\n" * 1000)


def empty_file(path):
    path.touch()


def other_database(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE calls (key TEXT)")
    db.close()


def newer_ledger(path):
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 2")
    db.close()


def damaged_ledger(path):
    with Ledger(path) as ledger:
        for i in range(50):
            pay(ledger, f"k{i}", body="x" * 3000)
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8 * 4096))


def moved_away(path):
    path.with_name(path.name + "-wal").write_bytes(b"answers")


@pytest.mark.parametrize("make, sentence", [
    (text_file, "not a ledger; give the path of one"), (empty_file, "not a ledger; give the path of one"),
    (other_database, "not a ledger; give the path of one"), (newer_ledger, "format 2, known here: 1.; upgrade"),
    (damaged_ledger, "damaged; bring back a copy"), (Path.mkdir, "check that it is a file"),
    (moved_away, "bring the ledger back beside it"),
])
def test_what_is_no_ledger_is_named_and_left_as_it_is(tmp_path, make, sentence):
    path = tmp_path / "l.sqlite"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(LedgerProblem, match=sentence) as told:
        with Ledger(path) as ledger:
            ledger.get(["k1"])
            ask(ledger, "new")
    assert str(path) in str(told.value) and "\n" not in str(told.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(LedgerProblem, match="folder does not exist"):
        Ledger(tmp_path / "none" / "l.sqlite")


def test_a_ledger_that_another_process_keeps_locked_is_waited_for_and_then_named(tmp_path, monkeypatch):
    path = tmp_path / "l.sqlite"
    Ledger(path).close()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with Ledger(path) as ledger:
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.15, other.execute, ("COMMIT",)).start()
        pay(ledger, "a")  # it waited
    monkeypatch.setattr(ledger_module, "_WAIT_S", 0.4)
    with Ledger(path) as ledger:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(LedgerProblem, match="locked for 0.4 s"):
            ask(ledger, "b")
        assert 0.3 < time.monotonic() - began < 60
        assert set(ledger.get("ab")) == {"a"}  # reading goes on
        other.execute("COMMIT")
        pay(ledger, "b")
    other.close()


def test_the_wall_clock_may_jump(tmp_path, monkeypatch):
    path = tmp_path / "l.sqlite"

    def jumps():
        real = time.time
        for step, jump in enumerate((0, -10**9, 10**9, -5 * 10**8)):
            for name, scale in (("time", 1), ("time_ns", 10**9)):
                setattr(time, name, lambda jump=jump, scale=scale: scale * (real() + jump))
            with Ledger(path, budget_usd=0.1) as ledger, Ledger(path) as beside:
                pay(ledger, f"k{step}")
                claim = ask(ledger, "held")
                time.time = lambda: 0.0
                assert ask(beside, "held") is None and beside.spent().in_flight == 1
                ledger.fail(claim, "no", billed=False)
                assert len(ledger.get([f"k{i}" for i in range(4)])) == step + 1

    child = start(jumps)
    child.join(200)
    assert child.exitcode == 0


# Memory

GROWTH = """
import sys, tempfile
from composer_replication.replay.ledger import Answer, Ledger
few, many = map(int, sys.argv[1:])
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
with tempfile.TemporaryDirectory() as folder, Ledger(folder + "/l.sqlite", 1e5) as ledger:
    for i in range(many):
        claim = ledger.claim(f"{i:032x}", '{"q": "%s"}' % ("y" * 1000), "t", "m", 0.001)
        ledger.settle(claim, Answer(claim.key, "t", "m", "m", "p", "x" * 500, 9, 3, 0, 0.0005, "table", 0.1, "now"))
        if i + 1 == few:
            before = resident()
    print(resident() - before, ledger.spent().paid)
"""


def growth(few, many):
    command = [sys.executable, "-c", GROWTH, str(few), str(many)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    grown, paid = told.stdout.split()
    assert int(paid) == many
    return float(grown)


@pytest.mark.parametrize("few, many", [(500, 2500), pytest.param(10_000, 100_000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_calls(few, many):
    assert growth(few, many) < 4  # MiB
