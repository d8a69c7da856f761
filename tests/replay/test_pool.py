"The pool against a real server that misbehaves, a real ledger, and real processes that are killed."

import asyncio
import gc
import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest
from bad_server import BadServer, Reply, answer_to, completion, failed
from waiting import wait_until

from composer_replication.core.trace import Turn
from composer_replication.replay import attempt
from composer_replication.replay.endpoint import Endpoint
from composer_replication.replay.ledger import Ledger, LedgerProblem
from composer_replication.replay.pool import TeacherPool
from composer_replication.replay.prices import Price
from composer_replication.replay.request import chat_body, request_key, request_text
from composer_replication.replay.teachers import TeacherProblem, TraceState, ask_each

TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)
PRICE = Price(1.0, 2.0)
KEY = "sk-do-not-show-this-0123456789"


def states(count, start=0):
    return [TraceState(f"t{n}", (Turn("user", f"question {n}"),), TOOLS) for n in range(start, start + count)]


def endpoint(server, name="a", **more):
    return Endpoint(
        name, more.pop("model", name), PRICE, base_url=getattr(server, "url", server), key_env=more.pop("key_env", None), **more
    )


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        yield ledger


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    "Short backoffs."
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.02)


@contextmanager
def asking(server, ledger, *names, **more):
    fields = {k: more.pop(k) for k in ("key_env", "max_tokens", "model") if k in more}
    with TeacherPool([endpoint(server, n, **fields) for n in names or ("a",)], ledger, **more) as pool:
        yield pool


def ask_teachers(states, teachers):
    return [list(row) for row in zip(*ask_each([(t, states) for t in teachers]))]


def ask(behave, ledger, count=1, **more):
    "One teacher, asked `count` states; returns (results, server, pool)."
    with BadServer(behave) as server, asking(server, ledger, **more) as pool:
        return pool.teachers[0].answer(states(count)), server, pool


def most_of(results_asked=1, server="http://127.0.0.1:12345/v1"):
    return PRICE.most(len(request_text(endpoint(server), states(1)[0]).encode()), 1024)


def check_good(result, state, model="a"):
    "The result is what the server makes of exactly this request."
    body = chat_body(Endpoint("x", model, PRICE, key_env=None), state.turns, state.tools)
    expected = json.loads(answer_to(body)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert result.votes and result.action.tool_calls[0].arguments == expected, result


# What goes well.


def test_answers_come_in_order_and_once(ledger):
    asked = states(20)
    with BadServer() as server:
        with asking(server, ledger, "a", "b") as pool:
            rows = ask_teachers([*asked, asked[0]], pool.teachers)
            assert pool.calls == 40 == len(server.requests) and not pool.stopped
        for state, row in zip(asked, rows):
            for name, result in zip("ab", row):
                check_good(result, state, name)
        assert rows[-1] == rows[0]
        told = []
        with asking(server, ledger, "a", "b", on_answer=lambda name, result: told.append((name, result))) as pool:
            assert ask_teachers(asked, pool.teachers) == rows[:20]
            assert pool.calls == 0 and len(server.requests) == 40
        assert Counter(n for n, _ in told) == {"a": 20, "b": 20}
        assert all(result in [r for row in rows for r in row] for _, result in told)
    spent = ledger.spent()
    assert (spent.paid, spent.lost, spent.in_flight) == (40, 0, 0)
    assert spent.paid_usd == pytest.approx(sum(r.cost for row in rows[:20] for r in row), abs=1e-9)
    assert {r["path"] for r in map(vars, server.requests)} == {"/v1/chat/completions"}
    assert all(r.body["stream"] is False and r.body["tools"] for r in server.requests)


def test_what_is_known_needs_no_open_pool(ledger):
    asked = states(2)
    with BadServer() as server:
        with asking(server, ledger) as pool:
            results = pool.teachers[0].answer(asked)
        late = pool.teachers[0].answer([*asked, *states(1, 9)])
        closed = TeacherPool([endpoint(server)], ledger)
        assert closed.teachers[0].answer(asked) == results
        with pytest.raises(RuntimeError, match="inside `with TeacherPool"):
            closed.teachers[0].answer(states(1, 9))
        with pytest.raises(RuntimeError, match="opened before"):
            pool.__enter__()
    assert late[:2] == results and not late[2].asked and "the pool is closed" in late[2].problem


def test_concurrency_is_bounded_over_all_callers_of_one_address(ledger):
    with BadServer(lambda r: Reply(delay=0.03)) as server, BadServer(lambda r: Reply(delay=0.03)) as other:
        ends = [endpoint(server, "a"), endpoint(server, "b"), endpoint(other, "c")]
        with TeacherPool(ends, ledger, concurrency=3) as pool, ThreadPoolExecutor(5) as threads:
            jobs = [threads.submit(t.answer, states(8, start)) for t in pool.teachers for start in (0, 8)]
            assert all(r.votes for j in jobs for r in j.result())
        assert server.most_open == 3 and other.most_open == 3


def test_teachers_are_asked_side_by_side_and_told_one_at_a_time(ledger):
    inside, told, together = [], [], threading.Barrier(2)

    def on_answer(name, result):
        inside.append(name)
        time.sleep(0.002)
        told.append((name, len(inside)))
        inside.pop()

    def behave(request):
        if request.number == 0:
            together.wait(120)  # the first answer of each comes only when both are asked
        return Reply(delay=0.01)

    with BadServer(behave) as one, BadServer(behave) as two:
        with TeacherPool([endpoint(one), endpoint(two, "b")], ledger, concurrency=4, on_answer=on_answer) as pool:
            rows = ask_teachers(states(16), pool.teachers)
            pool.cancel("enough")
            assert not pool.teachers[0].answer(states(1, 50))[0].asked
    assert all(r.votes for row in rows for r in row) and not together.broken
    assert len(told) == 32 and {n for _, n in told} == {1}  # never two at once, and nothing about what was not asked


def test_a_question_that_cannot_be_written_is_not_put(ledger):
    told = []
    with BadServer() as server:
        broken = replace(states(1)[0], tools=({"name": "look", "parameters": {"maximum": float("nan")}},))
        with asking(server, ledger, on_answer=lambda *result: told.append(result)) as pool:
            [result] = pool.teachers[0].answer([broken])
    assert not result.asked and "cannot be written as JSON" in result.problem and not told and not server.requests


def test_two_names_for_one_question_pay_once(ledger):
    with BadServer(lambda r: Reply(delay=0.1)) as server, asking(server, ledger, "a", "b", model="m") as pool:
        rows = ask_teachers(states(3), pool.teachers)
    assert len(server.requests) == 3 == ledger.spent().paid
    assert all([r.teacher for r in row] == ["a", "b"] and row[0].action == row[1].action for row in rows)


def test_works_where_an_event_loop_runs_already(ledger):
    async def cell():
        with BadServer() as server, asking(server, ledger) as pool:
            return pool.teachers[0].answer(states(3))

    assert all(r.votes for r in asyncio.run(cell()))


def test_the_providers_cost_wins_and_is_filed(ledger):
    def behave(request):
        return Reply(
            200,
            answer_to(request.body) | {"provider": "Azure", "usage": {"prompt_tokens": 5, "completion_tokens": 1, "cost": 0.125}},
        )

    [result], _, _ = ask(behave, ledger)
    [filed] = ledger.rows()
    assert result.cost == 0.125 == filed["cost"] and (filed["cost_from"], filed["provider"], filed["served"]) == (
        "provider",
        "Azure",
        "a",
    )
    assert json.loads(filed["request"])["messages"][0]["content"] == "question 0" and result.seconds > 0


# What fails and goes well the second time; whether the ledger counts what was lost.

BIG = json.dumps(completion("a", content="x" * 2000)).encode()
AGAIN = {
    "429": (failed(429), 0),
    "429 with Retry-After": (failed(429, retry_after=0.05), 0),
    "500": (failed(500), 0),
    "502": (failed(502), 0),
    "503": (Reply(503, b"<html>"), 0),
    "500 without JSON": (Reply(500, b"oops"), 1),
    "504": (failed(504), 1),
    "half a body": (Reply(body=BIG, send=900), 1),
    "no body": (Reply(send=0), 1),
    "hangs up": (Reply(hang_up=True), 1),
    "invalid JSON": (Reply(body=b'{"choices": [{'), 1),
    "no choices": (Reply(body={"id": "x"}), 1),
    "null message": (Reply(body={"choices": [{"message": None}]}), 1),
    "empty list": (Reply(body={"choices": []}), 1),
    "a list": (Reply(body=b"[]"), 1),
    "an error with 200": (Reply(body={"error": {"message": "no"}}), 1),
    "a stream": (Reply(body=b"data: {}\n\n", headers={"content-type": "text/event-stream"}), 1),
    "a false encoding": (Reply(headers={"content-encoding": "gzip"}), 1),
    "not UTF-8": (Reply(body=b"\xff\xfe{}"), 1),
}


@pytest.mark.parametrize("kind", AGAIN)
def test_tried_again(kind, ledger):
    reply, lost = AGAIN[kind]
    [result], server, pool = ask(lambda r: Reply() if r.nth else reply, ledger)
    check_good(result, states(1)[0])
    spent = ledger.spent()
    assert len(server.requests) == 2 == pool.calls and (spent.paid, spent.lost, spent.in_flight) == (1, lost, 0)
    assert spent.lost_usd == pytest.approx(lost * most_of(), rel=1e-6) and not pool.stopped


@pytest.mark.parametrize(
    "reply, problem",
    [
        (failed(500, "down"), "not answered: HTTP 500: down (3 tries)"),
        (failed(429, "slow"), "not answered: HTTP 429: slow (3 tries)"),
        (Reply(body=b"{"), "not answered: HTTP 200, but the body is no JSON object (3 tries)"),
    ],
)
def test_tries_are_bounded_and_the_others_go_on(reply, problem, ledger):
    results, server, pool = ask(lambda r: reply if r.question == "question 1" else Reply(), ledger, count=4, tries=3)
    assert [r.problem for r in results] == ["", problem, "", ""] and len(server.requests) == 6
    assert not results[1].asked and results[1].action is None and not pool.stopped  # no abstention: the next run asks again
    again, server, _ = ask(lambda r: Reply(), ledger, count=4)  # another address: all four anew
    assert all(r.votes for r in again)


@pytest.mark.parametrize(
    "reply", [Reply(delay=600), Reply(drip=0.02), Reply(body=b'{"choices"', send=10, delay=600)],
    ids=["stall", "drip", "late half"]
)
def test_an_attempt_has_a_limit(reply, ledger):
    began = time.monotonic()
    [result], server, _ = ask(lambda r: reply, ledger, timeout_s=1.5, tries=2)
    assert result.problem == "not answered: no answer within 1.5 s (2 tries)" and 3.0 <= time.monotonic() - began < 120
    assert ledger.spent().lost == 2 and len(server.requests) == 2


def test_a_huge_body_is_not_read_to_its_end(ledger):
    [result], server, _ = ask(lambda r: Reply(endless=True), ledger, tries=1)
    assert result.problem == "not answered: the response is larger than 8 MiB" and server.sent < 64 << 20
    assert ledger.spent().lost == 1


def test_a_429_holds_back_the_whole_provider(ledger):
    with BadServer(lambda r: failed(429, retry_after=0.6) if r.number == 0 else Reply()) as server:
        with asking(server, ledger, "a", "b", concurrency=1) as pool:
            rows = ask_teachers(states(4), pool.teachers)
    assert all(r.votes for row in rows for r in row)
    assert len(server.requests) == 9 and server.requests[1].at - server.requests[0].at >= 0.6


def test_a_storm_of_429_is_ridden_out(ledger, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.1)
    opened = time.monotonic() + 0.7
    results, server, pool = ask(lambda r: failed(429) if time.monotonic() < opened else Reply(), ledger, count=40, tries=12)
    assert all(r.votes for r in results) and not pool.stopped
    assert len(server.requests) < 40 + 80  # without a common wait it is several hundred
    assert ledger.spent().lost == 0


@pytest.mark.parametrize("wait, more", [(86400, {}), (200, {"max_wall_s": 100})])
def test_a_wait_beyond_the_wall_time_ends_it_at_once(wait, more, ledger):
    began = time.monotonic()
    results, server, pool = ask(lambda r: failed(429, retry_after=wait), ledger, count=3, concurrency=1, **more)
    assert time.monotonic() - began < 60 and not any(r.asked for r in results) and len(server.requests) == 1
    assert f"asks to wait {wait} s" in pool.stopped and f"asks to wait {wait} s" in results[2].problem
    assert ledger.spent().total_usd == 0


# What concerns one state, and what ends a teacher.


@pytest.mark.parametrize(
    "reply, problem",
    [
        (failed(400, "maximum context length is 8192 tokens"), "HTTP 400: maximum context length is 8192 tokens"),
        (failed(413), "HTTP 413: no"),
        (Reply(403, {"error": {"message": "flagged", "metadata": {"reasons": ["x"]}}}), "HTTP 403: flagged"),
    ],
)
def test_one_state_alone(reply, problem, ledger):
    results, server, pool = ask(lambda r: reply if r.question == "question 2" else Reply(), ledger, count=5)
    assert [r.problem for r in results] == ["", "", problem, "", ""] and not pool.stopped and len(server.requests) == 5
    assert results[2].asked and ledger.spent().lost == 0


STOPS = {
    "401": (failed(401, "no such key"), "the key was refused (HTTP 401: no such key)"),
    "403": (failed(403), "the key has no right to this"),
    "402": (failed(402, "add credits"), "the account has no credit (HTTP 402: add credits)"),
    "404": (failed(404), "no such model or address"),
}


@pytest.mark.parametrize("kind", STOPS)
def test_a_refused_key_ends_its_teacher_only(kind, ledger):
    reply, problem = STOPS[kind]
    with (
        BadServer(lambda r: reply if r.model == "a" else Reply()) as server,
        asking(server, ledger, "a", "b", concurrency=2) as pool,
    ):
        rows = ask_teachers(states(12), pool.teachers)
        assert sum(r.model == "a" for r in server.requests) <= 2 and not pool.stopped
        assert problem in pool.teachers[0].stopped and not pool.teachers[1].stopped
    assert all(not a.asked and problem in a.problem and b.votes for a, b in rows)
    assert (ledger.spent().paid, ledger.spent().lost) == (12, 0)


def test_a_key_revoked_mid_run_loses_nothing(ledger, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    revoked, lock = [False], threading.Lock()

    def behave(request):
        with lock:
            revoked[0] = revoked[0] or request.number >= 10
        return failed(401) if revoked[0] else Reply()

    with BadServer(behave) as server:
        with asking(server, ledger, key_env="THE_KEY", concurrency=3) as pool:
            first = pool.teachers[0].answer(states(30))
            assert "the key was refused" in pool.stopped
        assert sum(r.votes for r in first) == 10 == ledger.spent().paid and sum(r.asked for r in first) == 10
        assert len(server.requests) <= 13
    # With a new key, at the very same address, only the rest is asked.
    with BadServer() as fresh:
        fresh_url = fresh.url
        with Ledger(ledger.path) as again, asking(fresh, again, key_env="THE_KEY") as pool:
            assert fresh_url and all(r.votes for r in pool.teachers[0].answer(states(30)))


def test_no_connection_is_retried_and_ends_the_teacher(ledger):
    with BadServer() as server:
        pass  # closed: nobody listens there any more
    with BadServer() as alive, TeacherPool([endpoint(server), endpoint(alive, "b")], ledger, tries=3) as pool:
        rows = ask_teachers(states(3), pool.teachers)
        assert pool.calls == 3 == len(alive.requests)
    assert all(not a.asked and f"no connection to {server.url}" in a.problem and b.votes for a, b in rows)
    assert ledger.spent().lost == 0 and "is the address right and the server running?" in pool.teachers[0].stopped


def test_a_redirect_is_not_followed(ledger, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    for status in (301, 302, 307, 308):
        with BadServer() as elsewhere:
            away = Reply(status, {}, {"location": f"{elsewhere.url}/chat/completions"})
            [result], server, pool = ask(lambda r, away=away: away, ledger, key_env="THE_KEY")
            assert (
                not elsewhere.requests
                and len(server.requests) == 1
                and "redirects elsewhere" in pool.stopped
                and not result.asked
            )


@pytest.mark.parametrize("body, problem", [
    (completion("other-model", content="x"), "other-model answered where a was asked"),
    (completion("a", calls=[("look", '{"at')], finish="tool_calls"), "the arguments of its call of 'look' are no JSON object"),
])
def test_an_answer_that_does_not_vote_is_paid_once_and_kept(body, problem, ledger):
    "Which answers those are: test_client."
    with BadServer(lambda r: Reply(body=body)) as server:
        for _ in range(2):
            with asking(server, ledger) as pool:
                [result] = pool.teachers[0].answer(states(1))
            assert result.problem == problem and result.action
        assert len(server.requests) == 1 == ledger.spent().paid
    [filed] = ledger.rows()
    assert (filed["model"], filed["served"]) == ("a", body["model"])


# The key.


def test_a_missing_key_is_told_before_anything_is_sent(ledger, monkeypatch):
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    with BadServer() as server, pytest.raises(TeacherProblem, match="NO_KEY_HERE is not set"):
        TeacherPool([endpoint(server), endpoint(server, "b", key_env="NO_KEY_HERE")], ledger)
    assert not server.requests


def test_the_key_is_sent_and_shown_nowhere(ledger, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("THE_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-somebody-elses")

    def behave(request):  # echoes the key wherever it can
        key = request.headers["authorization"]
        if request.question == "question 1":
            return failed(400, f"your header {key} is bad")
        if request.question == "question 2" and not request.nth:
            return Reply(500, f"trace: {key}".encode())
        if request.question == "question 3":
            return failed(401, key)
        return Reply(body=completion("a", content=f"You sent {key}"))

    with BadServer(behave) as server, asking(server, ledger, key_env="THE_KEY", concurrency=1) as pool:
        results = pool.teachers[0].answer(states(4))
        shown = [
            repr(pool),
            repr(pool.teachers),
            repr(results),
            pool.stopped,
            caplog.text,
            repr(ledger),
            repr(list(ledger.rows())),
        ]
        assert all(r.headers["authorization"] == f"Bearer {KEY}" for r in server.requests)
    assert results[0].action.content == "You sent Bearer [key]"
    for path in ledger.path.parent.iterdir():
        shown.append(path.read_bytes().decode("latin-1"))
    assert not any(KEY in text for text in shown) and len(shown) > 8
    with BadServer() as server, asking(server, ledger) as pool:
        pool.teachers[0].answer(states(1))
    assert "authorization" not in server.requests[0].headers and "somebody" not in repr(server.requests)


# Budget, wall time, cancelling.


def test_the_budget_stops_it_before_it_is_passed(tmp_path):
    # Every answer costs at least its 100 prompt tokens; eight reservations would pass the budget, one at a time does not.
    budget = 3 * most_of()
    with (
        Ledger(tmp_path / "l.db", budget) as ledger,
        BadServer(lambda r: Reply(delay=0.02)) as server,
        asking(server, ledger) as pool,
    ):
        seen, done = [], threading.Event()

        def watch():
            while not done.wait(0.003):
                seen.append(ledger.spent().total_usd)

        watcher = threading.Thread(target=watch)
        watcher.start()
        results = pool.teachers[0].answer(states(60))
        done.set()
        watcher.join()
        spent = ledger.spent()
        assert "budget" in pool.stopped and max(seen) <= budget + 1e-9 and server.most_open <= 3
        assert spent.total_usd <= budget < spent.total_usd + most_of() * 1.01  # used up as far as it can be
        assert sum(r.votes for r in results) == len(server.requests) == spent.paid < 60
        assert all("budget" in r.problem for r in results if not r.asked)


def test_a_budget_for_nothing_sends_nothing(tmp_path):
    with Ledger(tmp_path / "l.db", most_of() / 2) as ledger:
        results, server, pool = ask(lambda r: Reply(), ledger, count=5)
    assert not server.requests and not any(r.asked for r in results) and "higher budget" in pool.stopped


def test_nothing_is_sent_after_the_wall_time(ledger):
    with BadServer(lambda r: Reply(delay=0 if r.number < 4 else 600)) as server:  # it answers four times
        with asking(server, ledger, concurrency=2, max_wall_s=6.0) as pool:
            began = time.monotonic()
            results = pool.teachers[0].answer(states(50))
            took = time.monotonic() - began
            late = pool.teachers[0].answer(states(2, 90))
        assert took > 5 and len(server.requests) < 50
    assert pool.stopped == "the wall time of 6 s is over" and not any(r.asked for r in late)
    spent = ledger.spent()
    assert spent.paid == sum(r.votes for r in results) > 0 and spent.in_flight == 0
    assert spent.paid <= len(server.requests) <= spent.paid + spent.lost and spent.lost <= 2  # one cut off may not have arrived
    assert all("wall time" in r.problem for r in results if not r.votes)


def test_what_nobody_foresaw_stops_the_teacher_and_closes_the_claim(ledger, monkeypatch):
    async def broken(*_):
        raise RuntimeError("odd")

    monkeypatch.setattr(attempt, "exchange", broken)
    results, _, pool = ask(lambda r: Reply(), ledger, count=3)
    assert "RuntimeError while asking" in pool.stopped and not any(r.asked for r in results)
    assert ledger.spent().in_flight == 0 and ledger.spent().lost >= 1


def test_a_short_key_is_a_word_that_an_answer_may_hold(ledger, monkeypatch):
    monkeypatch.setenv("THE_KEY", "test")
    reply = Reply(body=completion(content="run tests/a.py"))
    [result], _, _ = ask(lambda r: reply, ledger, key_env="THE_KEY", model="m")
    assert result.action.content == "run tests/a.py"


def test_an_answer_that_could_not_be_written_is_written_at_the_end(ledger, monkeypatch):
    settle, troubles = ledger.settle, [LedgerProblem("the disk is full")]

    def full_once(*given):
        if troubles:
            raise troubles.pop()
        settle(*given)

    monkeypatch.setattr(ledger, "settle", full_once)
    _, server, pool = ask(lambda r: Reply(), ledger, count=4, concurrency=1)
    assert "the disk is full" in pool.stopped and ledger.spent().paid == len(server.requests) and ledger.spent().lost == 0


def test_cancel_from_another_thread(ledger):
    with BadServer(lambda r: Reply(delay=600)) as server, asking(server, ledger, "a", "b", concurrency=4) as pool:
        cancels = threading.Thread(target=lambda: wait_until(lambda: server.open == 4) and pool.cancel("the user said so"))
        cancels.start()
        began = time.monotonic()
        rows = ask_teachers(states(20), pool.teachers)
        assert time.monotonic() - began < 120 and pool.stopped == "the user said so"
    assert all(r.problem == "not asked: the user said so" and not r.asked for row in rows for r in row)
    spent = ledger.spent()
    assert (spent.paid, spent.lost, spent.in_flight) == (0, 4, 0) and len(server.requests) == 4


def test_what_on_answer_raises_reaches_the_caller(ledger):
    def on_answer(name, result):
        raise KeyError("mine")

    with BadServer() as server, asking(server, ledger, on_answer=on_answer) as pool:
        with pytest.raises(KeyError, match="mine"):
            pool.teachers[0].answer(states(9))
        assert "KeyError" in pool.stopped
    assert ledger.spent().in_flight == 0


def test_closing_is_quick_and_leaves_nothing(ledger):
    process = psutil.Process()
    threads = set(threading.enumerate())
    with BadServer(lambda r: Reply(delay=600)) as server:
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        pool = TeacherPool([endpoint(server)], ledger).__enter__()
        with ThreadPoolExecutor(1) as caller:
            job = caller.submit(pool.teachers[0].answer, states(9))
            while server.open < 8:
                time.sleep(0.01)
            began = time.monotonic()
            pool.__exit__(None, None, None)
            assert time.monotonic() - began < 120
            assert all(r.problem == "not asked: the pool was closed" for r in job.result(120))
        gc.collect()
        mine = [c for c in process.net_connections("tcp") if c.raddr and c.raddr.port == port and c.status == "ESTABLISHED"]
        assert not mine and not [t for t in set(threading.enumerate()) - threads if t.name == "teacher-pool"]
    assert ledger.spent().lost == 8


def test_a_ledger_that_fails_stops_it_and_the_caller_keeps_what_was_paid(tmp_path):
    def behave(request):
        if request.number == 1:
            ledger.close()  # as a disk that goes away while two calls are in flight
            closed.set()
        closed.wait(60)
        return Reply()

    closed = threading.Event()
    with Ledger(tmp_path / "l.db") as ledger, BadServer(behave) as server, asking(server, ledger, concurrency=2) as pool:
        results = pool.teachers[0].answer(states(10))
        assert "ledger" in pool.stopped and len(server.requests) == 2
    assert sum(r.votes for r in results) == 2 and all("not asked: ledger" in r.problem for r in results if not r.votes)


def replay_all(url, path, count, budget, said):
    with Ledger(path, budget) as ledger, TeacherPool([endpoint(url, n) for n in "abc"], ledger, concurrency=4) as pool:
        said.send("ready")
        rows = ask_teachers(states(count), pool.teachers)
        said.send((pool.calls, sum(r.votes for row in rows for r in row), pool.stopped))


def child(server, path, count, budget=1e6):
    "A process that replays `count` states with three teachers, once it is ready; at its end it says calls, votes and why."
    fork = multiprocessing.get_context("fork")
    said, write = fork.Pipe(duplex=False)
    process = fork.Process(target=replay_all, args=(server.url, path, count, budget, write))
    process.start()
    write.close()
    assert said.recv() == "ready"
    return process, said


def test_ctrl_c_ends_it_and_the_ledger_knows(tmp_path):
    with BadServer(lambda r: Reply(delay=600)) as server:
        process, _ = child(server, tmp_path / "l.db", 6)
        while server.open < 4:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
        assert process.exitcode
    with Ledger(tmp_path / "l.db") as ledger:
        assert (ledger.spent().lost, ledger.spent().in_flight) == (4, 0)


def test_two_processes_pay_once(tmp_path):
    with BadServer(lambda r: Reply(delay=0.02)) as server:
        both = [child(server, tmp_path / "l.db", 25) for _ in range(2)]
        said = [pipe.recv() for _, pipe in both]
        for process, _ in both:
            process.join(120)
    assert len(server.requests) == 75 == sum(calls for calls, _, _ in said) and [votes for _, votes, _ in said] == [75, 75]


def answers_of(path):
    "The ledger's answers, without the times that no two runs share."
    with Ledger(path) as ledger:
        return sorted((r["key"], r["body"], r["cost"], r["served"], r["request"], r["prompt_tokens"]) for r in ledger.rows())


def replay_with_kills(tmp_path, count, kills, seed):
    "A replay killed at random moments and resumed until it is done, against one that nobody disturbed, at the same address."
    pick = random.Random(seed)

    def behave(request):
        digest = int(answer_to(request.body)["usage"]["prompt_tokens"])
        return failed(500) if digest % 11 == 0 and not request.nth else Reply(delay=0.01 + (digest % 5) / 100)

    with BadServer(behave) as server:
        of_question = {(n, s.turns[0].content): request_key(endpoint(server, n), s) for n in "abc" for s in states(count)}
        most = max(PRICE.most(len(request_text(endpoint(server, n), s).encode()), 1024) for n in "abc" for s in states(count))
        # Enough for every answer and for what so many kills can lose, four calls each.
        budget, path = 3 * count * 0.001 + (4 * kills + 4) * most, tmp_path / "killed.db"
        peak, killed = [0.0], 0
        for _ in range(4 * kills + 4):
            settled = set()
            if path.exists():
                with Ledger(path) as ledger:
                    settled = set(ledger.get(list(of_question.values())))
            began_at, (process, said), done = len(server.requests), child(server, path, count, budget), None
            if killed < kills:
                time.sleep(pick.uniform(0.0, 0.5))
                with Ledger(path) as ledger:
                    peak.append(ledger.spent().total_usd)
                killed += process.is_alive()
                process.kill()
            with suppress(EOFError):
                done = said.recv()
            process.join(120)
            with Ledger(path) as ledger:
                peak.append(ledger.spent().total_usd)
            asked = [of_question[r.model, r.question] for r in server.requests[began_at:]]
            assert not settled & set(asked), "an answer that was filed was asked for again"
            if done and killed >= kills:
                break
        assert done[1:] == (3 * count, "") and max(peak) <= budget + 1e-9 and killed >= kills
        with Ledger(path) as ledger:
            spent = ledger.spent()
        assert spent.lost <= 4 * kills and (spent.paid, spent.in_flight) == (3 * count, 0)
        repeated = sum(c - 1 for c in Counter((r.model, r.question) for r in server.requests).values())
        failures = sum(int(answer_to(r.body)["usage"]["prompt_tokens"]) % 11 == 0 and not r.nth for r in server.requests)
        assert repeated <= failures + spent.lost
        undisturbed, said = child(server, tmp_path / "whole.db", count)
        said.recv()
        undisturbed.join(120)
        assert answers_of(path) == answers_of(tmp_path / "whole.db") and len(answers_of(path)) == 3 * count


@pytest.mark.parametrize("count, kills, seed", [(30, 2, 0), pytest.param(400, 50, 1, marks=pytest.mark.slow)])
def test_killed_and_resumed(tmp_path, count, kills, seed):
    replay_with_kills(tmp_path, count, kills, seed)
