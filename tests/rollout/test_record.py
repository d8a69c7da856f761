"The endpoint over raw HTTP: what is recorded is what our own loop records; what cannot be had is refused; faults lose nothing."

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from rollouts import scripted

from composer_replication.core.trace import ToolCall, Turn
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.rollout.endpoint import Episodes, foreign_episodes, serve_recorder
from composer_replication.rollout.engine import Engine
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy, TransformersPolicy
from composer_replication.rollout.protocols import Answered, ChatCompletions, Messages, Refused, Responses
from composer_replication.rollout.record import RecordedEpisode, Recorder, same
from composer_replication.rollout.sampling import SampleRequest, Sampling
from composer_replication.rollout.types import Ending, RolloutConfig
from composer_replication.traces.read import read_traces
from composer_replication.training.kl import completion_logprobs

LIMITS = RolloutConfig(max_turns=4, max_tokens=400, temperature=0)
HI = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def policy():
    return TransformersPolicy(embedded_model("teacher-1"), embedded_tokenizer())


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory):
    "A client of a server that records into a folder."
    folder = tmp_path_factory.mktemp("episodes")
    with (
        Recorder(policy, max_tokens=24, sampling=Sampling(0.0)) as recorder,
        serve_recorder(recorder, foreign_episodes(folder, "agent"), "agent", at_once=16, body_bytes=2**20) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        client.folder = folder
        yield client


@contextmanager
def served(policy, *records, max_tokens=1024, **settings):
    "A client of a server that takes requests to these episodes."
    episodes = Episodes()
    for record in records:
        episodes.add(record.trace_id, record)
    with (
        Recorder(policy, max_tokens=max_tokens) as recorder,
        serve_recorder(recorder, episodes, "m", **settings) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def half_sent(client, path, body, length=None):
    "A connection on which a request was sent, or a part of one."
    connection = socket.create_connection(("127.0.0.1", client.base_url.port))
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def asked(messages=HI, **more):
    return ChatCompletions.read({"model": "m", "messages": messages} | more)


def traces_of(folder):
    return {trace.trace_id: trace for file in folder.glob("*.jsonl") for trace in read_traces(file)}


# ---- equality with our own loop


def through_chat(client, row, tools, world):
    "An agent of three lines in OpenAI's chat form, messages echoed as they came."
    messages = list(row["prompt"])
    for _ in range(LIMITS.max_turns):
        message = client.post("chat/completions", json={"model": "x", "messages": messages, "tools": tools}).json()["choices"][0][
            "message"
        ]
        messages.append(message)
        calls = message.get("tool_calls") or []
        for call in calls:
            made = world.call(ToolCall.parse(call["function"]["name"], call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": made.text})
        if not calls:
            return


def test_an_agent_over_http_is_recorded_as_our_loop_records(policy):
    "In OpenAI's chat form; the others read the same turns and tools, below."
    rows = world_rows(3, 1, "test")
    ours = collect(policy, WorldEnv, rows, LIMITS)
    episodes, records = Episodes(), []
    with (
        Recorder(policy, max_tokens=LIMITS.max_tokens, sampling=LIMITS.sampling, fixed=True) as recorder,
        serve_recorder(recorder, episodes, "policy") as url,
    ):
        for row, rollout in zip(rows, ours):
            world = WorldEnv()
            world.reset(**row)
            record = RecordedEpisode(rollout.trace.trace_id, rollout.trace.task_id, LIMITS, key="k")
            records.append(record)
            episodes.add(rollout.trace.trace_id, record)
            with httpx2.Client(
                base_url=f"{url}/e/{rollout.trace.trace_id}/v1/", headers={"Authorization": "Bearer k"}, timeout=60
            ) as client:
                through_chat(client, row, list(world.tools), world)
        seen = [record.rollout(recorder, Ending.DONE) for record in records]
    for mine, theirs in zip(ours, seen):
        assert (theirs.prompt_ids, theirs.completion_ids, theirs.completion_mask) == (
            mine.prompt_ids,
            mine.completion_ids,
            mine.completion_mask,
        )
        assert theirs.logprobs == pytest.approx(mine.logprobs, abs=1e-5) and not theirs.trace.segments
        assert [t.tool_calls for t in theirs.trace.turns] == [t.tool_calls for t in mine.trace.turns[: len(theirs.trace.turns)]]
        inputs = {
            name: torch.tensor([ids])
            for name, ids in (("prompt_ids", theirs.prompt_ids), ("completion_ids", theirs.completion_ids))
        }
        inputs |= {name.replace("ids", "mask"): torch.ones_like(ids) for name, ids in inputs.items()}
        again = completion_logprobs(policy.model, inputs, 1.0, 1)[0].tolist()
        assert [a for a, kept in zip(again, theirs.completion_mask) if kept] == pytest.approx(
            [a for a, kept in zip(theirs.logprobs, theirs.completion_mask) if kept], abs=1e-4
        )
    assert sum(len(r.completion_ids) for r in seen) > 100


# ---- segments


def test_a_summary_and_an_edit_begin_segments(server):
    def ask(messages, **more):
        return server.post("/e/summed/v1/chat/completions", json={"model": "any", "messages": messages} | more).json()["choices"][
            0
        ]["message"]

    first = [*HI, ask(HI), {"role": "user", "content": "Go on."}]
    second = [*first, ask(first)]
    ask([{"role": "user", "content": "Summary: hello was said."}])
    ask([*second[:2], {"role": "user", "content": "Go on, shorter."}])  # an edited history, from the second turn on
    trace = traces_of(server.folder)["summed"]
    assert [(s.turns, s.sampled) for s in trace.segments] == [((0, 1, 2, 3), (1, 3)), ((4, 5), (5,)), ((0, 1, 6, 7), (7,))]
    assert all(
        trace.turns[i].token_ids and len(trace.turns[i].logprobs) == len(trace.turns[i].token_ids) for i in trace.sampled_turns
    )
    ended = server.post("/e/summed/end", json={"reward": 0.5})
    assert (
        ended.json() == {"episode": "summed", "turns": 4, "segments": 3, "reward": 0.5}
        and traces_of(server.folder)["summed"].reward == 0.5
    )
    late = server.post("/e/summed/v1/messages", json={"model": "any", "messages": HI, "max_tokens": 3})
    assert late.status_code == 410 and late.json()["type"] == "error" and "has ended" in late.json()["error"]["message"]
    assert server.post("/e/summed/end", json={}).status_code == 410


def test_a_request_without_a_path_goes_on_with_its_history(server):
    before = set(traces_of(server.folder))
    answers = [
        server.post("/v1/chat/completions", json={"model": "agent", "messages": m}).json()["choices"][0]["message"]
        for m in ([{"role": "user", "content": "One"}], [{"role": "user", "content": "Two"}])
    ]
    for first, answer in zip(("One", "Two"), answers):
        history = [{"role": "user", "content": first}, answer, {"role": "user", "content": "And?"}]
        server.post("/v1/chat/completions", json={"model": "agent", "messages": history})
    made = [trace for name, trace in traces_of(server.folder).items() if name not in before]
    assert sorted([t.content for t in trace.turns if t.role == "user"] for trace in made) == [["One", "And?"], ["Two", "And?"]]


def test_other_tools_begin_a_segment(policy):
    with Recorder(policy, max_tokens=8, sampling=Sampling(0.0)) as recorder:
        episode, tools = RecordedEpisode("t"), list(WorldEnv().tools)
        for some in (tools, tools[:1]):
            recorder.answer(episode, asked(tools=some))
        trace = episode.rollout(recorder, Ending.DONE).trace
    assert len(trace.segments) == 2 and trace.segments[0].tools is None and len(trace.segments[1].tools) == 1
    assert trace.segments[1].turns[0] == 0  # the message that both show is stored once


def test_the_same_request_twice_at_once_is_two_turns(policy):
    with Recorder(policy, max_tokens=8) as recorder:
        episode = RecordedEpisode("twice")
        pending = [recorder.begin(episode, asked()) for _ in range(2)]
        for one in pending:
            recorder.finish(one, one.answer.result(60))
        rollout = episode.rollout(recorder, Ending.DONE)
    assert [s.sampled for s in rollout.trace.segments] == [(1,), (2,)] and len(rollout.segments) == 2
    assert rollout.trace.turns[1].token_ids != rollout.trace.turns[2].token_ids  # other random numbers


# ---- what is sampled and what is shown


def test_a_stop_text_ends_the_turn_where_it_is_complete():
    policy = scripted(lambda text: "one STOP two")
    with Recorder(policy) as recorder:
        episode = RecordedEpisode("s")
        answer = recorder.answer(episode, asked(stop=["never", "STOP"], logprobs=True))
        turn = episode.turns[-1]
        assert answer.turn.content.strip() == "one" and (answer.finish, answer.stop) == ("stop", "STOP")
        said = policy.chat.tokenizer.decode(list(turn.token_ids))
        assert "STOP" in said and "STOP" not in policy.chat.tokenizer.decode(list(turn.token_ids[:-1])) and "two" not in said
        assert len(answer.tokens) == len(turn.token_ids) == answer.completion_tokens
        history = [*HI, {"role": "assistant", "content": "one"}, {"role": "user", "content": "And?"}]
        recorder.answer(episode, asked(history))
        assert len(episode.contexts) == 1  # what was sampled stays, the end that was not sampled follows it
        episode.rollout(recorder, Ending.DONE)


def test_one_call_at_most_ends_the_turn_behind_the_first():
    calls = '<|call|>{"name": "tree", "arguments": {"path": "a"}}<|call|>{"name": "tree", "arguments": {"path": "b"}}'
    path = {"type": "object", "properties": {"path": {"type": "string", "description": "p"}}}
    tools = [{"type": "function", "function": {"name": "tree", "description": "d", "parameters": path}}]
    with Recorder(scripted(lambda text: calls)) as recorder:
        both, one, none = (
            recorder.answer(RecordedEpisode("c"), asked(tools=tools, **more))
            for more in ({}, {"parallel_tool_calls": False}, {"tool_choice": "none"})
        )
    assert [len(a.turn.tool_calls) for a in (both, one, none)] == [2, 1, 0] and (both.finish, none.finish) == ("calls", "stop")
    assert one.turn.tool_calls[0].arguments == {"path": "a"} and len(one.turn.token_ids) < len(both.turn.token_ids)
    assert "tree" in none.turn.content


def test_arguments_that_do_not_parse():
    tools = [{"type": "function", "function": {"name": "tree", "parameters": {"type": "object", "properties": {}}}}]
    with Recorder(scripted(lambda text: '<|call|>{"name": "tree", "arguments": {"path": }}')) as recorder:
        chat = asked(tools=tools)
        raw = recorder.answer(RecordedEpisode("a"), chat)
        empty = recorder.answer(RecordedEpisode("b"), replace(chat, objects=True))
    (call,) = ChatCompletions.write(chat, raw)["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "tree", "arguments": '{"path": }}'}
    assert Messages.write(chat, empty)["content"][-1]["input"] == {} == empty.turn.tool_calls[0].arguments


def test_budgets_end_an_episode(policy):
    with Recorder(scripted(lambda text: "word " * 30, stop=False)) as recorder:
        turns = RecordedEpisode("turns", config=RolloutConfig(max_turns=2, max_tokens=500, max_turn_tokens=5))
        tokens = RecordedEpisode("tokens", config=RolloutConfig(max_turns=9, max_tokens=12))
        for episode, ending in ((turns, Ending.TURNS), (tokens, Ending.TOKENS)):
            for _ in range(9):
                try:
                    recorder.answer(episode, asked())
                except Refused as refused:
                    assert refused.status == 410
                    break
            assert episode.ending is ending
        assert turns.sampled == 2 and [sum(c.mask) for c in turns.contexts] == [5, 5] and tokens.used == 12


@pytest.mark.parametrize("limits, ending", [({"max_turns": 1}, Ending.TURNS), ({"max_tokens": 6}, Ending.TOKENS)])
def test_an_episode_that_spent_its_limits_gets_the_reward_it_earned_once(policy, limits, ending):
    episode = RecordedEpisode("spent", config=RolloutConfig(**{"max_turns": 9, "max_tokens": 500, "max_turn_tokens": 6} | limits))
    with served(policy, episode) as client:
        def ask():
            return client.post("/e/spent/v1/chat/completions", json={"model": "m", "messages": HI}).status_code
        assert ask() == 200 and ask() == 410
        ended = client.post("/e/spent/end", json={"reward": 1.0})
        assert (ended.status_code, episode.reward, episode.ending) == (200, 1.0, ending)
        assert client.post("/e/spent/end", json={"reward": 0.0}).status_code == 410 and episode.reward == 1.0


# ---- refusals in each protocol's form


@pytest.mark.parametrize(
    "path, body, said",
    [
        ("chat/completions", {"n": 2}, "n=2"),
        ("chat/completions", {"tool_choice": "required"}, "no such tool"),
        ("chat/completions", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ("chat/completions", {"response_format": {"type": "grammar"}}, "response_format"),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text only"),
        ("chat/completions", {"messages": [*HI, {"role": "assistant", "content": "So"}]}, "the assistant's"),
        ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}, "unknown role"),
        ("chat/completions", {"messages": "Hello"}, "list"),
        ("chat/completions", {"stop": ""}, "stop"),
        ("chat/completions", {"stream": "yes"}, "true or false"),
        ("chat/completions", {"seed": 1.5}, "seed"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "same name"),
        ("responses", {"previous_response_id": "r"}, "previous_response_id"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"background": True}, "background"),
        ("responses", {"input": [{"role": "assistant", "content": {"type": "output_text", "text": "a"}}]}, "list of parts"),
        ("responses", {"input": [{"type": "reasoning", "content": 7}]}, "list of parts"),
        ("responses", {"input": [{"type": "reasoning", "content": {"text": "a"}}]}, "list of parts"),
        ("responses", {"input": [{"role": "assistant", "content": 7}]}, "text only"),
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "text only"),
        ("messages", {"temperature": 3}, "temperature"),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config"),
        ("messages", {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": 5}}}, "output_config"),
        ("messages", {"output_format": {"type": "json_schema", "schema": 5}}, "output_config.format"),
        ("messages", {"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_cannot_be_had_is_refused_in_the_protocols_form(path, body, said, server):
    base = {"model": "agent", "input": "Hello"} if path == "responses" else {"model": "agent", "messages": HI}
    before = set(traces_of(server.folder))
    sent = json.dumps(base | ({"max_tokens": 5} if path == "messages" else {}) | body)
    answer = server.post(f"/e/refused/v1/{path}", content=sent, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (
        answer.status_code == 400
        and said in error["message"]
        and "\n" not in error["message"]
        and error["type"] == "invalid_request_error"
    )
    assert (answer.json().get("type") == "error") is (path == "messages") and set(traces_of(server.folder)) == before


@pytest.mark.parametrize(
    "method, path, content, status",
    [
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/unheard", b"{}", 404),
        ("POST", "/e/..%2Fup/v1/messages", b"{}", 404),
        ("POST", "/v1/messages", b"{not json", 400),
        ("POST", "/v1/messages", b"[" * 100_000, 400),
        ("POST", "/v1/responses", b'"text"', 400),
        ("POST", "/v1/chat/completions", b'{"a": "' + b"x" * 2**20 + b'"}', 413),
        ("POST", "/e/never/end", b"{}", 404),
    ],
)
def test_bad_http(method, path, content, status, server):
    answer = server.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_keys_hold_for_their_episode(policy):
    with served(policy, *(RecordedEpisode(name, key=f"key-{name}") for name in "ab"), max_tokens=3) as client:
        body = {"model": "m", "messages": HI}
        for name, headers, status in (
            ("a", {"x-api-key": "key-a"}, 200),
            ("a", {"Authorization": "Bearer key-a"}, 200),
            ("a", {"x-api-key": "key-b"}, 401),
            ("a", {}, 401),
            ("c", {"x-api-key": "key-a"}, 404),
        ):
            assert client.post(f"/e/{name}/v1/chat/completions", json=body, headers=headers).status_code == status
        headers = {"x-api-key": "key-a", "Content-Type": "application/json"}
        for path in ("chat/completions", "messages/count_tokens", "responses"):  # refused before the body is read
            assert client.post(f"/e/c/v1/{path}", content=b"{no json", headers=headers).status_code == 404
            assert client.post(f"/v1/{path}", content=b"{no json", headers=headers).status_code == 404
        assert client.post("/e/c/end", content=b"{no json", headers=headers).status_code == 404
        assert client.post("/v1/chat/completions", json=body).status_code == 404  # every request names an episode here


# ---- faults


def test_many_at_once_are_counted_once_each(policy):
    "Sixteen conversations side by side: each is what it is alone, up to rounding."

    def play(n):
        with Recorder(policy, max_tokens=12, sampling=Sampling(0.0)) as recorder:
            return play_in(recorder, n)

    def play_in(recorder, n):
        episode, messages = RecordedEpisode(f"m{n}"), [{"role": "user", "content": f"Question {n}"}]
        for _ in range(3):
            answer = recorder.answer(episode, asked(messages))
            messages += [{"role": "assistant", "content": answer.turn.content}, {"role": "user", "content": "And?"}]
        return episode.rollout(recorder, Ending.DONE)

    with Recorder(policy, max_tokens=12, sampling=Sampling(0.0)) as recorder, ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda n: play_in(recorder, n), range(16)))
    for n in (0, 7, 15):
        assert together[n].completion_ids == play(n).completion_ids
    assert all(len(r.segments) == 1 and len(r.trace.turns) == 6 for r in together)


def test_a_client_that_hangs_up_leaves_nothing():
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        name, patience = "slow", 60.0

        def reply(self, trace, sampling, limit, seed):
            begun.set()
            go_on.wait(30)
            return Turn("assistant", "late"), False, 1

    episode, body = RecordedEpisode("h"), {"model": "m", "messages": HI}
    with served(Slow(), episode) as client:
        with half_sent(client, "/e/h/v1/chat/completions", json.dumps(body).encode()):
            assert begun.wait(30)
        while client.get("/health").json()["requests"]:
            pass
        go_on.set()
        assert client.post("/e/h/v1/chat/completions", json=body).status_code == 200
    assert episode.sampled == 1 and len(episode.contexts) == 1


def test_what_the_policy_raises_reaches_the_client_and_the_engine_goes_on():
    class Broken(CallablePolicy):
        broken = True

        def batch(self, sampling):
            if self.broken:
                raise ValueError("the policy's logits are not finite")
            return super().batch(sampling)

    good = scripted(lambda text: "fine")
    policy = Broken(good.generate, embedded_tokenizer())
    episode = RecordedEpisode("b")
    with served(policy, episode) as client:
        broken = client.post("/e/b/v1/messages", json={"model": "m", "messages": HI, "max_tokens": 9})
        assert broken.status_code == 500 and "not finite" in broken.json()["error"]["message"] and "not finite" in episode.failed
        policy.broken = False
        assert client.post("/e/b/v1/chat/completions", json={"model": "m", "messages": HI}).status_code == 200


def test_the_engine_drops_what_nobody_waits_for(policy):
    "A question that is gone gets no answer, or one that nobody reads; the others get theirs."
    ids = policy.chat.encode("Hello there")
    with Engine(policy, rows=2) as engine:
        gone = [SampleRequest((*ids, i), Sampling(1.0), 400, f"gone{i}") for i in range(4)]
        for question in gone:
            engine.ask(question)
            question.gone = True
        answers = [engine.ask(SampleRequest((*ids, i), Sampling(0.0), 6, "n")) for i in range(8)]
        found = [answer.result(60).ids for answer in answers]
    with policy.batch(Sampling(0.0)) as batch:
        fresh = batch.sample(range(8), [(*ids, i) for i in range(8)], [6] * 8, ["n"] * 8)
    assert found == [sample.ids for sample in fresh]


def test_one_request_too_many_is_told_so_in_its_own_form():
    "A body that never comes holds a place until its time is over; the next one gets 429, and nothing hangs."
    body = {"model": "m", "messages": HI, "max_tokens": 9}
    with served(scripted(lambda text: "fine"), RecordedEpisode("f"), at_once=1) as client:
        with half_sent(client, "/e/f/v1/messages", b"{", 99):
            while not client.get("/health").json()["requests"]:
                pass
            full = client.post("/e/f/v1/messages", json=body)
            assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error" and full.headers["Retry-After"]
            assert client.post("/e/f/v1/messages/count_tokens", json={"model": "m", "messages": HI}).status_code == 429
            assert client.post("/e/f/end", json={"reward": 1.0}).status_code == 429
            assert client.get("/e/f/v1/models").status_code == 200  # which holds no place
        while client.get("/health").json()["requests"]:
            pass
        assert client.post("/e/f/v1/messages", json=body).status_code == 200


# ---- clients that nobody here wrote


def test_openais_client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.base_url}/e/openai/v1".replace("//e", "/e"), api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="any", messages=HI, logprobs=True)
        stream = client.chat.completions.create(model="any", messages=HI, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        assert (
            chunks[-1].usage.total_tokens == whole.usage.total_tokens
            and len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        )
        asked = {"model": "any", "input": "Hello", "instructions": "Be brief."}
        answer = client.responses.create(**asked, store=False, reasoning={"effort": "low"})
        first, *_, last = client.responses.create(**asked, stream=True)
        assert first.type == "response.created" and last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == answer.output_text != ""


FOREIGN = """
import asyncio, sys
import anthropic
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
url, hi = sys.argv[1], [{"role": "user", "content": "Hello"}]
with anthropic.Anthropic(base_url=url + "/e/anthropic", api_key="none", max_retries=0) as client:
    whole = client.messages.create(model="any", max_tokens=9, messages=hi, system="Be brief.")
    with client.messages.stream(model="any", max_tokens=9, messages=hi, system="Be brief.") as stream:
        assert stream.get_final_message().content[0].text == whole.content[0].text
    assert client.messages.count_tokens(model="any", messages=hi).input_tokens > 0
    try:
        client.messages.create(model="any", max_tokens=9, messages=hi, tool_choice={"type": "any"})
        raise SystemExit("not refused")
    except anthropic.BadRequestError as refused:
        assert "no such tool" in str(refused)

@function_tool
def look(path: str) -> str:
    "Look at a path."
    return "nothing"

set_tracing_disabled(True)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    client = AsyncOpenAI(base_url=url + "/e/agents/v1", api_key="none", max_retries=0)
    agent = Agent("a", instructions="Be brief.", model=kind("any", client), tools=[look])
    assert asyncio.run(Runner.run(agent, "Hello", max_turns=3)).final_output
print("fine")
"""


def test_anthropics_client_and_openais_agents():
    path = os.environ.get("COMPOSER_AGENTS", "")
    if not (Path(path, "anthropic").is_dir() and Path(path, "agents").is_dir()):
        pytest.skip("COMPOSER_AGENTS names no folder with anthropic and openai-agents; make test-agents installs them")
    policy = scripted(lambda text: "Hello there.")
    with Recorder(policy) as recorder, serve_recorder(recorder, foreign_episodes(None, "m"), "m") as url:
        done = subprocess.run(
            [sys.executable, "-c", FOREIGN, url],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.stdout.strip().endswith("fine"), done.stderr[-2000:]


def test_every_protocol_reads_its_own_answer_as_the_recorded_turn():
    "Whatever was answered, an agent that echoes it goes on with its segment, with the same system message and tools."
    turn = Turn("assistant", "Look.", "I think so.", (ToolCall("f", {"a": [1, None]}, "call_0"), ToolCall("g", {}, "call_1")))
    request, answered, ids = asked(), Answered(turn, "calls"), ("call_0", "call_1")
    chat = ChatCompletions.write(request, answered)["choices"][0]["message"]
    outputs = [{"type": "function_call_output", "call_id": i, "output": "r"} for i in ids]
    own = {"role": "assistant", "content": Messages.write(request, answered)["content"]}
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": "r"} for i in ids]}
    tools, brief = list(WorldEnv().tools), "Be brief."
    flat = [{"type": "function"} | t["function"] for t in tools]
    theirs = [
        {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in flat
    ]
    system = {"role": "system", "content": brief}
    items = HI + Responses.write(request, answered)["output"] + outputs
    echo = [
        asked([system, *HI, chat, *({"role": "tool", "tool_call_id": i, "content": "r"} for i in ids)], tools=tools),
        Responses.read({"model": "m", "instructions": brief, "input": items, "tools": flat}),
        Messages.read(
            {
                "model": "m",
                "max_tokens": 1,
                "system": [{"type": "text", "text": brief}],
                "messages": [*HI, own, results],
                "tools": theirs,
            }
        ),
    ]
    for each in echo:
        assert each.tools == tuple(tools) and (each.turns[0].role, each.turns[0].content) == ("system", brief)
        assert same(each.turns[2], turn)
        assert [(t.role, t.name) for t in each.turns[3:]] == [("tool", "f"), ("tool", "g")] and len(each.turns) == 5
