"The endpoint under faults of agents and networks: nothing hangs, is lost or counted twice; the next request is answered."

import json
import random
import socket
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from rollouts import scripted

from composer_replication.core.trace import Turn
from composer_replication.rollout import responses
from composer_replication.rollout.endpoint import Episodes, serve_recorder
from composer_replication.rollout.record import RecordedEpisode, Recorder
from composer_replication.rollout.types import Ending

HI = [{"role": "user", "content": "Hello"}]


def numbered():
    "A policy of tokens whose every turn is another number."
    said = iter(range(10**6))
    return scripted(lambda text: f"{next(said)}.")


class Loud:
    "A policy of messages with eight million letters to say to those who do not want it short."

    name, patience = "loud", 60.0

    def reply(self, trace, sampling, limit, seed):
        return Turn("assistant", "a" * (1 if trace.turns[-1].content == "short" else 8_000_000)), False, 1


def request(path, body):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


def connected(url):
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)


def read_all(connection):
    made = b""
    while data := connection.recv(65536):
        made += data
    return made


def settled(client):
    "Waits until no request is under way: a hang is a test that never ends."
    while client.get("/health").json()["requests"]:
        pass


def agent(url, name, seed):
    "Six turns; before most of them it is killed at some point of a request that it then sends again. Answers that came whole."
    draw, messages, heard = random.Random(seed), list(HI), []
    while len(heard) < 6:
        sent = request(f"/e/{name}/v1/chat/completions", {"model": "m", "messages": messages, "stream": draw.random() < 0.3})
        fault = draw.choice(["none", "none", "half a request", "no reading", "some reading", "half closed"])
        with connected(url) as connection:
            try:
                connection.sendall(sent[: draw.randrange(len(sent))] if fault == "half a request" else sent)
                if fault == "half closed":
                    connection.shutdown(socket.SHUT_WR)
                if fault == "some reading":
                    connection.recv(draw.randint(1, 40))
                answer = read_all(connection) if fault in ("none", "half closed") else b""
            except OSError:
                continue
        if fault == "none":
            body = answer.partition(b"\r\n\r\n")[2]
            assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
            if b"text/event-stream" in answer:
                events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
                text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
            else:
                text = json.loads(body)["choices"][0]["message"]["content"]
            heard.append(text)
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    return heard


def test_sixteen_agents_that_are_killed_at_random_moments():
    policy, episodes = numbered(), Episodes()
    records = [RecordedEpisode(f"e{i}") for i in range(16)]
    for record in records:
        episodes.add(record.trace_id, record)
    with (
        Recorder(policy) as recorder,
        serve_recorder(recorder, episodes, "m", at_once=64) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        heard = list(pool.map(lambda i: agent(url, f"e{i}", i), range(16)))
        settled(client)
        rollouts = [record.rollout(recorder, Ending.DONE) for record in records]
    numbers = [rollout.trace.turns[i].content for rollout in rollouts for i in rollout.trace.sampled_turns]
    assert len(numbers) == len(set(numbers)) == sum(record.sampled for record in records)  # none counted twice
    for mine, rollout, record in zip(heard, rollouts, records):
        told = [rollout.trace.turns[i].content for i in rollout.trace.sampled_turns]
        assert [text for text in told if text in mine] == mine  # what an agent heard is there, in order
        assert (
            rollout.sampled == sum(sum(c.mask) for c in record.contexts) and not record.failed and record.ending is Ending.DONE
        )
        assert all(not c.busy for c in record.contexts)


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_fifty_megabytes_are_refused_and_not_kept(framing):
    "Announced or in pieces: what is beyond the limit is read and dropped, so that the client learns why."
    episodes = Episodes()
    episodes.add("a", RecordedEpisode("a"))
    with (
        Recorder(numbered()) as recorder,
        serve_recorder(recorder, episodes, "m", body_bytes=2**18) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        connected(url) as connection,
    ):
        head = "POST /e/a/v1/messages HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 52428800\r\n\r\n" if framing == "length" else "Transfer-Encoding: chunked\r\n\r\n"
        piece = b"x" * 2**16
        piece = piece if framing == "length" else b"%x\r\n%s\r\n" % (len(piece), piece)
        tracemalloc.start()
        connection.sendall(head.encode())
        for _ in range(800):
            connection.sendall(piece)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert connection.recv(12) == b"HTTP/1.1 413" and peak < 4 * 2**20
        settled(client)
        assert client.post("/e/a/v1/chat/completions", json={"model": "m", "messages": HI}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_do_not_read_hold_up_nobody(stream, monkeypatch):
    "Eight answers that nobody reads; others are answered beside them, and one that stands still is left after a while."
    monkeypatch.setattr(responses, "SEND_S", 0)  # at once, where a client leaves more than one piece unread
    episodes = Episodes()
    for name in [*"abcdefgh", "reads"]:
        episodes.add(name, RecordedEpisode(name))
    with (
        Recorder(Loud()) as recorder,
        serve_recorder(recorder, episodes, "m", at_once=8) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        slow = [connected(url) for _ in "abcdefgh"]
        for connection, name in zip(slow, "abcdefgh"):
            connection.sendall(request(f"/e/{name}/v1/chat/completions", {"model": "m", "messages": HI, "stream": stream}))
        for connection in slow:
            assert connection.recv(8) == b"HTTP/1.1"
        settled(client)
        short = [{"role": "user", "content": "short"}]
        assert client.post("/e/reads/v1/chat/completions", json={"model": "m", "messages": short}).status_code == 200
        assert all(len(read_all(connection)) < 8_000_000 for connection in slow)  # what waited for them was dropped
        for connection in slow:
            connection.close()
    assert all(episode.sampled == 1 for episode in episodes.named.values())  # sampled, and kept, whoever reads it
