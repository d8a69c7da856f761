"Teachers behind HTTP: the real client and real sockets, what they cannot do, slow, broken and vanishing clients, and the end."
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from composer_replication.core import serving
from composer_replication.core.serving import ServeProblem
from composer_replication.core.trace import ToolCall, Turn
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.replay.teachers import TeacherCallResult, trace_states
from composer_replication.rollout import endpoint, teachers_endpoint
from composer_replication.rollout.teachers_endpoint import serve_teachers
from composer_replication.traces.siblings import action_key

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HELLO = {"model": "t", "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Slow:
    "A teacher that waits for a word before it answers, and remembers what it was asked together."

    def __init__(self, name="t", answers=None):
        self.name, self.batches, self.go, self.busy, self.answers = name, [], threading.Event(), threading.Event(), answers

    def answer(self, states):
        self.batches.append([s.turns[-1].content for s in states])
        self.busy.set()
        self.go.wait(300)
        if self.answers is not None:
            return self.answers(states)
        return [TeacherCallResult(self.name, Turn("assistant", f"You said {s.turns[-1].content}."), "", 3, 2) for s in states]


def quick(answers=None, name="t"):
    teacher = Slow(name, answers)
    teacher.go.set()
    return teacher


def says(turn, problem="", **more):
    "A teacher that always answers this."
    return quick(lambda states: [TeacherCallResult("t", turn, problem, **more) for _ in states])


def send(url, body=None, path="/v1/chat/completions", method="POST", headers=(), raw=None, timeout=300):
    "One request over a connection of its own: status, parsed body, headers."
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout)
    try:
        connection.request(method, path, json.dumps(body) if raw is None else raw,
                           {"Content-Type": "application/json"} | dict(headers))
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers
    finally:
        connection.close()


def ask(url, content="Hello", **more):
    return send(url, HELLO | {"messages": [{"role": "user", "content": content}]} | more)


def connect(url):
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=300)


def soon(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def as_sent(state):
    "Messages as a client sends them: arguments as JSON text."
    messages = json.loads(json.dumps(state.messages))
    for call in [c["function"] for m in messages for c in m.get("tool_calls", ())]:
        call["arguments"] = call["arguments"] if isinstance(call["arguments"], str) else json.dumps(call["arguments"])
    return messages


# The same answers

@pytest.fixture(scope="module")
def states():
    "States of the toy world, with and without tools' results before them."
    return [s for trace in toy_traces()[:4] for s in trace_states(trace)][:8]


@pytest.fixture(scope="module")
def panel():
    from composer_replication.experiments.teachers import embedded_teachers
    return embedded_teachers("good")


def test_lab_agents_answer_over_http_as_they_do_in_process(states, panel):
    wanted = {t.name: t.answer(states) for t in panel}
    with serve_teachers(panel) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == [t.name for t in panel]

        def told(job):
            name, state = job
            return client.chat.completions.create(model=name, messages=as_sent(state), tools=list(state.tools) or openai.omit,
                                                  max_tokens=1024)
        jobs = [(name, state) for name in wanted for state in states]
        with ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(told, jobs))
    for (name, _), result, response in zip(jobs, (r for of_one in wanted.values() for r in of_one), responses):
        [choice] = response.choices
        calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        action = Turn("assistant", choice.message.content or "", tool_calls=tuple(ToolCall.parse(n, a, i) for i, n, a in calls))
        assert action_key(action) == action_key(result.action) and action.content == result.action.content
        assert [c.id for c in action.tool_calls] == [c.id for c in result.action.tool_calls]
        assert (response.model, response.object) == (name, "chat.completion") and response.id.startswith("chatcmpl-")
        usage = response.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (result.prompt_tokens, result.completion_tokens)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        if result.votes:
            assert choice.finish_reason == ("tool_calls" if calls else "stop") and choice.message.refusal is None
    assert len({r.id for r in responses}) == len(responses) and any(r.choices[0].finish_reason == "tool_calls" for r in responses)


def test_a_state_that_is_sent_is_the_state_that_is_asked_about(states):
    "Without reasoning, whatever else clients echo; equal by its key, so that what was paid for is found again."
    asked = []
    teacher = quick(lambda given: asked.extend(given) or [TeacherCallResult("t", Turn("assistant", "so"))] * len(given))
    with serve_teachers([teacher]) as url:
        for state in states:
            messages = as_sent(state)
            for m in messages:
                if m["role"] == "assistant":
                    m |= {"reasoning_content": "zqsecret", "refusal": None, "audio": None, "annotations": []}
            assert send(url, {"model": "t", "messages": messages, "tools": list(state.tools)})[0] == 200
    assert [state.key for state in asked] == [state.key for state in states] and "zqsecret" not in repr(asked)


@pytest.mark.parametrize("result, wanted", [
    (dict(turn=Turn("assistant", "Red, I thi"), problem="Only three tokens were left.", cut=True),
     ("length", "Red, I thi", None, [])),
    (dict(turn=Turn("assistant", "No."), problem="refused: your access was cut off"),
     ("stop", "No.", "refused: your access was cut off", [])),
    (dict(turn=Turn("assistant", tool_calls=(ToolCall("look", '{"at": '),)), problem="Invalid JSON."),
     ("tool_calls", None, None, [("call_0", "look", '{"at": ')])),
    (dict(turn=Turn("assistant", tool_calls=(ToolCall("", "look"),)), problem="No name."),
     ("tool_calls", None, None, [("call_0", "unreadable", "look")])),
    (dict(turn=Turn("assistant", "No, never."), problem="It refuses."), ("stop", "No, never.", "It refuses.", [])),
    (dict(turn=Turn("assistant", "so", tool_calls=(ToolCall("look", {"a": 1}, "x"), ToolCall("look", {})))),
     ("tool_calls", "so", None, [("x", "look", '{"a": 1}'), ("call_1", "look", "{}")])),
    (dict(turn=Turn("assistant", ""), completion_tokens=7), ("stop", "", None, [])),
    (dict(turn=Turn("assistant", "long"), completion_tokens=9), ("length", "long", None, []))])
def test_trouble_comes_back_as_such(result, wanted):
    with serve_teachers([says(**result)]) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        response = client.chat.completions.create(**HELLO, max_tokens=8, temperature=0.5)
    [choice] = response.choices
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    assert (choice.finish_reason, choice.message.content, choice.message.refusal, calls) == wanted
    assert response.model_extra["unused"] == ["temperature"]


# What is refused

@pytest.fixture(scope="module")
def parrot():
    teacher = quick()
    with serve_teachers([teacher, quick(name="u")]) as url:
        yield url, teacher


@pytest.mark.parametrize("change, status, words", [
    ({"logprobs": True}, 400, "has no stop texts and no logprobs"), ({"stop": ["x"]}, 400, "has no stop texts"),
    ({"tool_choice": "none", "tools": [TOOL]}, 400, "may hold any calls"),
    ({"parallel_tool_calls": False}, 400, "may hold any calls"),
    ({"response_format": {"type": "json_object"}}, 400, "fits no schema"),
    ({"tool_choice": "required", "tools": [TOOL]}, 400, "may hold any calls"), ({"n": 2}, 400, "n=2 cannot be had"),
    ({"max_tokens": 0}, 400, "max_tokens=0"), ({"functions": [{}]}, 400, "'functions' is not known"),
    ({"model": "v"}, 404, "there is no model 'v' here; ask one of t, u"), ({"model": ["t"]}, 404, "there is no model"),
    ({"messages": [{"role": "user", "content": "x" * 17_000_000}]}, 413, "larger than")])
def test_what_cannot_be_had_is_refused(change, status, words, parrot):
    url, teacher = parrot
    asked = len(teacher.batches)
    got, body, _ = send(url, HELLO | change)
    assert got == status and words in body["error"]["message"] and body["error"]["message"].endswith(".")
    assert len(teacher.batches) == asked
    assert set(body["error"]) == {"message", "type", "param", "code"} and ask(url)[0] == 200  # and the server lives


def test_the_other_protocols_and_streams_reach_a_teacher_too(parrot):
    with openai.OpenAI(base_url=parrot[0], api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**HELLO, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "You said Hello."
        assert client.responses.create(model="t", input="Hello").output_text == "You said Hello."
    status, body, _ = send(parrot[0], HELLO | {"max_tokens": 9}, path="/v1/messages")
    assert (status, body["content"]) == (200, [{"type": "text", "text": "You said Hello."}])
    assert send(parrot[0], HELLO, path="/e/a/v1/chat/completions")[0] == 404  # it keeps no episodes


@pytest.mark.parametrize("data", [b"\x16\x03\x01 what\r\n\r\n", b"GET /" + b"x" * 70_000,
                                  HEAD + b"Content-Length: -2\r\n\r\n{}", HEAD + b"Content-Length: 2_0\r\n\r\n{}"])
def test_no_request_at_all(data, parrot):
    with connect(parrot[0]) as one:
        one.sendall(data)
        answer = one.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400") and ask(parrot[0])[0] == 200


def test_a_key_where_one_is_wanted(monkeypatch):
    monkeypatch.setenv("ZQ_KEY", "zq-sécret ")
    with serve_teachers([quick()], api_key_env="ZQ_KEY") as url:
        for given in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}, {"Authorization": b"zq-s\xc3\xa9cret"},
                      {"Authorization": b"Bearer zq-s\xc3\xa9cret2"}, {"Authorization": b"Basic zq-s\xc3\xa9cret"}):
            status, body, headers = send(url, HELLO, headers=given)
            assert (status, body["error"]["type"], headers["WWW-Authenticate"]) == (401, "authentication_error", "Bearer")
            assert send(url, path="/v1/models", method="GET", raw=b"", headers=given)[0] == 401
            assert "cret" not in json.dumps(body)
        assert send(url, HELLO, headers={"Authorization": b"bearer zq-s\xc3\xa9cret"})[0] == 200
        assert send(url, raw=b"x" * 1_000_000, headers={"Authorization": "Bearer wrong"})[0] == 401
        assert send(url, path="/health", method="GET", raw=b"")[0] == 200
    monkeypatch.setenv("ZQ_KEY", "zq-secret")
    with serve_teachers([quick()], api_key_env="ZQ_KEY") as url:
        assert send(url, HELLO, headers={"Authorization": "Bearer zq-secret"})[0] == 200
        with openai.OpenAI(base_url=url, api_key="zq-secret", max_retries=0) as client:
            assert client.chat.completions.create(**HELLO).choices[0].message.content == "You said Hello."
    monkeypatch.delenv("ZQ_KEY")
    with pytest.raises(ServeProblem, match="wanted from ZQ_KEY, which is not set"):
        serve_teachers([quick()], api_key_env="ZQ_KEY").__enter__()


# Teachers that fail

def explode(states):
    raise RuntimeError("the disk\nis full")


@pytest.mark.parametrize("answers, status, code, words", [
    (explode, 500, "teacher_failed", "t failed: the disk is full."),
    (lambda states: [], 500, "teacher_failed", "it gave 0 results for 1 states"),
    (lambda states: [TeacherCallResult("v", Turn("assistant", "x"))], 500, "teacher_failed", "or not its own"),
    (lambda states: None, 500, "teacher_failed", "t failed"),
    (lambda states: [TeacherCallResult("t", None, "no template carries it")], 422, "no_answer",
     "t gave no answer: no template carries it"),
    (lambda states: [TeacherCallResult("t", None, "not asked: the budget is reached", asked=False)], 503, "not_asked",
     "not asked: the budget"),
    (lambda states: [TeacherCallResult("t", Turn("assistant", "x"), cost="?")], 500, "teacher_failed", "t failed")])
def test_a_teacher_that_fails(answers, status, code, words):
    with serve_teachers([quick(answers), quick(name="u")]) as url:
        for _ in range(2):  # it is asked again all the same
            got, body, _ = ask(url)
            assert (got, body["error"]["code"]) == (status, code) and words in body["error"]["message"]
        assert ask(url, model="u")[0] == 200


def test_two_of_one_name_and_a_port_that_is_taken():
    for teachers in ([], [quick(), quick()]):
        with pytest.raises(ValueError, match="at least one, each with a name of its own"), serve_teachers(teachers):
            pass
    with serve_teachers([quick()]) as url:
        port = urlsplit(url).port
        with pytest.raises(ServeProblem, match=f"127.0.0.1:{port} cannot be listened on .*; choose another"):
            serve_teachers([quick()], port=port).__enter__()
    with serve_teachers([quick()], port=port) as again:
        assert urlsplit(again).port == port and ask(again)[0] == 200


# Limits

def test_what_waits_is_asked_together_and_who_hung_up_is_not_asked():
    teacher = Slow()
    with serve_teachers([teacher]) as url, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, url, "first")
        assert teacher.busy.wait(100)
        rest = [pool.submit(ask, url, f"n{i}") for i in range(6)]
        leaver = connect(url)
        data = json.dumps(HELLO | {"messages": [{"role": "user", "content": "leaver"}]}).encode()
        leaver.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        requests = lambda: send(url, path="/health", method="GET", raw=b"")[1]["requests"]
        assert soon(lambda: requests() == 8)
        leaver.close()
        assert soon(lambda: requests() == 7)
        teacher.go.set()
        answers = [f.result(200) for f in (first, *rest)]
    assert [b["choices"][0]["message"]["content"] for _, b, _ in answers] == ["You said first.",
                                                                              *(f"You said n{i}." for i in range(6))]
    assert teacher.batches[0] == ["first"] and sorted(teacher.batches[1]) == [f"n{i}"
                                                                              for i in range(6)] and len(teacher.batches) == 2


def test_no_more_than_so_many_are_asked_together(monkeypatch):
    monkeypatch.setattr(teachers_endpoint, "TOGETHER", 3)
    teacher = Slow()
    with serve_teachers([teacher]) as url, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask, url, f"n{i}") for i in range(8)]
        assert soon(lambda: send(url, path="/health", method="GET", raw=b"")[1]["requests"] == 8)
        teacher.go.set()
        assert [j.result(200)[0] for j in jobs] == [200] * 8
    sizes = [len(batch) for batch in teacher.batches]
    assert sizes[0] <= 3 and max(sizes) == 3 and sum(sizes) == 8, sizes


def test_an_answer_that_does_not_come(monkeypatch):
    monkeypatch.setattr(teachers_endpoint, "ANSWER_S", 0.3)
    teacher = Slow()
    with serve_teachers([teacher]) as url:
        begun = time.monotonic()
        status, body, _ = ask(url)
        assert (status, body["error"]["code"]) == (504, "timeout") and 0.3 <= time.monotonic() - begun < 200
        teacher.go.set()
        assert soon(lambda: ask(url)[0] == 200)


def test_an_answer_may_take_longer_than_a_request(monkeypatch):
    "Neither the limit on reading nor the look for clients that hung up ends an answer that is slow."
    monkeypatch.setattr(endpoint, "READ_S", 1.5)
    teacher = Slow()
    with serve_teachers([teacher]) as url, ThreadPoolExecutor(1) as pool:
        job = pool.submit(ask, url)
        time.sleep(3)
        teacher.go.set()
        assert job.result(200)[0] == 200


def test_a_body_that_comes_too_slowly_is_cut_off(monkeypatch):
    monkeypatch.setattr(endpoint, "READ_S", 0.5)
    with serve_teachers([quick()]) as url, connect(url) as one:
        one.sendall(HEAD + b"Content-Length: 50\r\n\r\n{")
        said = b""
        while more := one.recv(1 << 16):  # headers and body may come one after the other
            said += more
        assert b" 408 " in said.split(b"\r\n")[0] and b'"incomplete"' in said


# The end

def test_at_the_end_requests_under_way_finish():
    teacher, threads = Slow(), threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        with serve_teachers([teacher]) as url:
            job = pool.submit(ask, url)
            assert teacher.busy.wait(100)
            threading.Timer(0.3, teacher.go.set).start()
        assert job.result(200)[0] == 200
    assert soon(lambda: threading.active_count() <= threads)
    with pytest.raises(OSError):
        ask(url)


def test_at_the_end_requests_that_do_not_finish_are_cut(monkeypatch):
    monkeypatch.setattr(serving, "GRACE_S", 0.4)
    teacher, threads = Slow(), threading.active_count()
    with ThreadPoolExecutor(2) as pool:
        with serve_teachers([teacher]) as url:
            idle = connect(url)
            jobs = [pool.submit(ask, url)]
            assert teacher.busy.wait(100)
            jobs.append(pool.submit(ask, url, "waits"))
            assert soon(lambda: send(url, path="/health", method="GET", raw=b"")[1]["requests"] == 2)
            begun = time.monotonic()
        assert 0.4 <= time.monotonic() - begun < 200
        for status, body, _ in [j.result(200) for j in jobs]:
            assert (status, body["error"]["code"], body["error"]["type"]) == (503, "ending", "server_error")
        assert idle.recv(10) == b""
    teacher.go.set()
    assert soon(lambda: threading.active_count() <= threads) and len(teacher.batches) < 3


def test_an_error_in_the_block_ends_the_server():
    with pytest.raises(KeyError), serve_teachers([quick()]) as url:
        assert ask(url)[0] == 200
        raise KeyError
    with pytest.raises(OSError):
        ask(url)
