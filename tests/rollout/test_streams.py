"Streams: bytes at once, text as it is sampled, the same turn as without a stream; and requests that a client repeats."

import json
import threading
from contextlib import contextmanager

import httpx2
import pytest
from rollouts import scripted
from small_tokenizers import small_tokenizer
from trl import chat_template_utils as trl

from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.rollout import responses
from composer_replication.rollout.decode import TokenBatch
from composer_replication.rollout.endpoint import foreign_episodes, serve_recorder
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.protocols import ChatCompletions
from composer_replication.rollout.record import RecordedEpisode, Recorder
from composer_replication.rollout.sampling import Sample
from composer_replication.rollout.tool_call_parser import TurnReader

HI = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
    "type": "object", "properties": {"a": {"type": "string"}}}}}]
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"


class Typist:
    "A policy that samples id by id; `pause` is called with the text so far before each."

    def __init__(self, say, tokenizer, pause=lambda text: None):
        policy = scripted(say, tokenizer)
        self.say, self.chat, self.stops, self.pause = say, policy.chat, policy.stops, pause
        self.name, self.positions = "typist", float("inf")

    @contextmanager
    def batch(self, sampling):
        yield Typing(self, sampling)


class Typing(TokenBatch):
    def __init__(self, policy, sampling):
        super().__init__(None, policy.stops, sampling)
        self.policy, self.typed = policy, {}

    def step(self):
        done, tokenizer = [], self.policy.chat.tokenizer
        self.waiting = [question for question in self.waiting if not question.gone]
        for question in list(self.waiting):
            text = self.policy.say(tokenizer.decode(question.ids))
            ids = [*tokenizer.encode(text, add_special_tokens=False), min(self.policy.stops)][: question.limit]
            typed = self.typed.setdefault(question, [])
            self.policy.pause(tokenizer.decode(typed))
            typed.append(ids[len(typed)])
            if question.heard:
                question.heard(typed[-1])
            if len(typed) == len(ids):
                self.waiting.remove(question)
                done.append((question, Sample(tuple(ids), (-0.5,) * len(ids), ids[-1] not in self.policy.stops)))
        return done


@contextmanager
def served(policy, folder=None, **options):
    with (
        Recorder(policy, max_tokens=300) as recorder,
        serve_recorder(recorder, foreign_episodes(folder, "m"), "m", **options) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        client.recorder = recorder
        yield client


def body_of(path, stream, **more):
    named = {"input": "Hello"} if path == "responses" else {"messages": HI}
    return {"model": "m", "stream": stream} | named | ({"max_tokens": 300} if path == "messages" else {}) | more


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def heard_in(path, events):
    "Reasoning, text and arguments of calls, as a client puts them together, and how it ended."
    made = {"thinking": "", "content": "", "calls": ""}
    for event in events:
        if path == "chat/completions":
            for choice in event["choices"]:
                delta = choice["delta"]
                made["thinking"] += delta.get("reasoning_content") or ""
                made["content"] += delta.get("content") or ""
                made["calls"] += "".join(c["function"]["arguments"] for c in delta.get("tool_calls", ()))
        elif path == "messages" and event["type"] == "content_block_delta":
            delta = event["delta"]
            made["thinking"] += delta.get("thinking", "")
            made["content"] += delta.get("text", "")
            made["calls"] += delta.get("partial_json", "")
        elif path == "responses" and event["type"].endswith(".delta"):
            kinds = {"response.output_text.delta": "content", "response.reasoning_text.delta": "thinking"}
            made[kinds.get(event["type"], "calls")] += event["delta"]
    return made


def told_in(path, whole):
    "The same of an answer that came whole."
    made = {"thinking": "", "content": "", "calls": ""}
    if path == "chat/completions":
        message = whole["choices"][0]["message"]
        made["thinking"], made["content"] = message.get("reasoning_content") or "", message["content"] or ""
        made["calls"] = "".join(c["function"]["arguments"] for c in message.get("tool_calls", ()))
    for block in whole.get("content", ()):
        made["thinking"] += block.get("thinking", "")
        made["content"] += block.get("text", "")
        made["calls"] += json.dumps(block["input"]) if "input" in block else ""
    for item in whole.get("output", ()):
        kind = {"message": "content", "reasoning": "thinking"}.get(item["type"], "calls")
        made[kind] += item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
    return made


PATHS = ["chat/completions", "responses", "messages"]


@pytest.mark.parametrize("path", PATHS)
def test_text_comes_while_the_answer_is_sampled(path):
    "The policy goes on only when the client has read what it said before."
    read = threading.Event()

    def pause(text):
        if text.endswith("Hello there"):
            assert read.wait(30), "nobody has read it"

    with served(Typist(lambda text: "Hello there, and good day.", embedded_tokenizer(), pause)) as client:
        with client.stream("POST", f"/e/one/v1/{path}", json=body_of(path, True)) as reply:
            lines = []
            for line in reply.iter_lines():
                lines.append(line)
                if heard_in(path, events_of("\n".join(lines)))["content"].startswith("Hello there"):
                    read.set()
        assert heard_in(path, events_of("\n".join(lines)))["content"] == "Hello there, and good day." and reply.status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_at_once_that_the_answer_is_on_its_way(path, monkeypatch):
    monkeypatch.setattr(responses, "PING_S", 0.01)
    read = threading.Event()

    def say(text):
        assert read.wait(30), "no byte has come"
        return "Done."

    with served(scripted(say)) as client, client.stream("POST", f"/v1/{path}", json=body_of(path, True)) as reply:
        pieces = reply.iter_text()
        got = next(pieces)
        while "sampled" not in got and '"ping"' not in got:
            got += next(pieces)
        assert heard_in(path, events_of(got))["content"] == ""
        read.set()
        assert heard_in(path, events_of(got + "".join(pieces)))["content"] == "Done."


SAID = [
    "fine",
    "",
    " pads ",
    "So <b>bold</b> [1] `x` {y} | z, and no call at all, though much markup",
    "a long line of plain words without any mark of markup in it, to be shown as it comes, é and 😀",
    f"I look.\n{HERMES}",
    HERMES,
    f"<think>Where?</think>\n\nHere.\n{HERMES}",
    "<think>a < b, and so on</think>\n\nfine",
    "<think>never closed",
    "half a <tool_call>",
    "one STOP two",
    "x" * 400,
]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("said", SAID)
def test_a_stream_tells_the_turn_that_is_recorded(family, said, monkeypatch):
    monkeypatch.setattr(responses, "STEP_S", 0.0)
    said = said.replace(HERMES, XML) if family == "qwen3.5" else said
    tokenizer = small_tokenizer(family)
    tokenizer.response_template = trl.qwen3_5_template if family == "qwen3.5" else None
    with served(Typist(lambda text: said, tokenizer)) as client:
        for path in PATHS:
            tools = {"tools": [t["function"] | {"type": "function"} for t in TOOLS] if path == "responses" else TOOLS}
            if path == "messages":
                schema = TOOLS[0]["function"]["parameters"]
                tools = {"tools": [{"name": "f", "input_schema": schema}], "thinking": {"type": "enabled"}}
            stop = {"chat/completions": {"stop": ["STOP"]}, "messages": {"stop_sequences": ["STOP"]}}.get(path, {})
            whole = client.post(f"/e/whole-{path[0]}/v1/{path}", json=body_of(path, False, **tools, **stop))
            stream = client.post(f"/e/stream-{path[0]}/v1/{path}", json=body_of(path, True, **tools, **stop))
            assert heard_in(path, events_of(stream.text)) == told_in(path, whole.json()), path


@pytest.mark.parametrize("said, most", [("plain words, one after the other " * 60, 2), ("[f(x) for x in {1, 2}] " * 60, 24),
                                        ("<think>" + "so and so " * 90 + "</think>" + "and so on " * 90, 8)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_what_a_stream_reads_grows_with_the_answer_and_not_with_its_square(said, most, family, monkeypatch):
    "Told id by id; every id that is decoded in a reading of the whole turn is counted."
    tokenizer, read = small_tokenizer(family), []
    tokenizer.response_template = trl.qwen3_5_template if family == "qwen3.5" else None
    text = TurnReader.text
    monkeypatch.setattr(TurnReader, "text", lambda self, ids, stops: read.append(len(ids)) or text(self, ids, stops))
    with Recorder(Typist(lambda text: said, tokenizer)) as recorder:
        pending = recorder.begin(RecordedEpisode("e"), ChatCompletions.read({"model": "m", "messages": HI, "tools": TOOLS}))
        ids, heard = tokenizer.encode(said), ("", "")
        for n in range(1, len(ids) + 1):
            before, heard = heard, recorder.partial(pending, ids[:n])
            assert all(now.startswith(then) for then, now in zip(before, heard))
        assert len("".join(heard)) > .75 * len(ids) > 750
        assert sum(read) <= most * len(ids)


def test_a_thought_behind_text_that_was_told_is_said_in_the_log(caplog):
    "The text belongs to the thought; nothing can be taken back from the client."
    with served(Typist(lambda text: "Well, " * 30 + "<think>second thoughts</think> fine", small_tokenizer("qwen3"))) as client:
        text = client.post("/e/a/v1/chat/completions", json=body_of("chat/completions", True)).text
    told = heard_in("chat/completions", events_of(text))["content"]
    assert told.strip() == "fine" or "Well, Well".startswith(told[:6]) and "begins otherwise" in caplog.text  # told in time


def test_a_model_of_this_process_is_heard_token_by_token():
    policy = TransformersPolicy(embedded_model(), embedded_tokenizer())
    with served(policy) as client:
        asked = {"temperature": 1.5, "seed": 3, "max_tokens": 100}
        whole = client.post("/e/a/v1/chat/completions", json=body_of("chat/completions", False, **asked)).json()
        stream = client.post("/e/b/v1/chat/completions", json=body_of("chat/completions", True, **asked)).text
    assert heard_in("chat/completions", events_of(stream)) == told_in("chat/completions", whole)


@pytest.mark.parametrize("path", PATHS)
def test_what_goes_wrong_in_a_stream_is_its_last_event(path):
    def say(text):
        raise ValueError("the card is on fire")

    with served(scripted(say)) as client:
        reply = client.post(f"/e/one/v1/{path}", json=body_of(path, True))
        last = events_of(reply.text)[-1]
        assert reply.status_code == 200 and "the card is on fire" in json.dumps(last) and "error" in json.dumps(last)
        while client.get("/health").json()["requests"]:
            pass
        short = client.post(f"/e/one/v1/{path}", json=body_of(path, True) | {"messages": [], "input": []})
        assert short.status_code == 400  # what is known before anything is sampled


# ---- requests that a client repeats

AGAIN = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", ["/e/one", ""])
@pytest.mark.parametrize("stream", [True, False])
def test_a_repeated_request_gets_the_answer_that_was_sampled(path, place, stream, tmp_path):
    said = iter(range(100))
    with served(scripted(lambda text: f"{next(said)}."), tmp_path) as client:
        def heard(**headers):
            reply = client.post(f"{place}/v1/{path}", json=body_of(path, stream), headers=headers)
            return (heard_in(path, events_of(reply.text)) if stream else told_in(path, reply.json()))["content"]

        assert heard() == heard(**AGAIN) == heard(**AGAIN | {"x-stainless-retry-count": "2"}) == "0."
        assert heard(**{"x-stainless-retry-count": "0"}) == "1."  # an equal request alone may want another answer
        assert heard(**AGAIN) == "1."
    assert sum(path.read_text().count('"assistant"') for path in tmp_path.iterdir()) == 2


def test_a_repeated_request_whose_answer_was_never_sampled_is_sampled():
    with served(scripted(lambda text: "Done.")) as client:
        reply = client.post("/e/one/v1/chat/completions", json=body_of("chat/completions", False), headers=AGAIN)
        assert reply.json()["choices"][0]["message"]["content"] == "Done."


def test_the_last_answer_of_an_episode_that_has_ended_can_be_asked_for_again():
    with served(scripted(lambda text: "Done.")) as client:
        body = body_of("chat/completions", False)
        client.post("/e/one/v1/chat/completions", json=body)
        client.post("/e/one/end", json={"reward": 1.0})
        assert client.post("/e/one/v1/chat/completions", json=body, headers=AGAIN).status_code == 200
        assert client.post("/e/one/v1/chat/completions", json=body).status_code == 410
