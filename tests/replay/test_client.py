"What goes to an endpoint and what is read from it; the openai package's own types are the oracle for both forms."

import asyncio
import json
import sys
from dataclasses import replace

import pytest
from bad_server import BadServer, Reply, answer_to, completion, failed
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.replay.answer import is_model, read_answer, to_answer
from composer_replication.replay.client import PaidEndpoint, complete
from composer_replication.replay.endpoint import Endpoint, read_key
from composer_replication.replay.failures import may_be_billed, no_completion, read_failure
from composer_replication.replay.ledger import BudgetReached, Ledger, LedgerProblem
from composer_replication.replay.prices import Price
from composer_replication.replay.request import chat_body, request_key, request_text
from composer_replication.replay.teachers import TeacherProblem, TraceState, trace_states
from composer_replication.traces.read import read_traces

ENDPOINT = Endpoint("gpt", "openai/gpt-4.1", Price(2.0, 8.0, 0.5))
STATE = TraceState("t", (Turn("user", "go"),))
REQUEST = TypeAdapter(CompletionCreateParamsNonStreaming)


def request_body(endpoint, state):
    return chat_body(endpoint, state.turns, state.tools)


def plain(value):
    "What pydantic validates lazily, as lists and dicts."
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else [plain(v) for v in value]


def check_request(body):
    "The openai package's own types take the body, and every tool message answers a call that waits."
    checked = REQUEST.validate_python(body)
    list(map(plain, checked["messages"]))
    waiting = []
    for message in body["messages"]:
        waiting += [c["id"] for c in message.get("tool_calls", ())]
        assert all(isinstance(c["function"]["arguments"], str) for c in message.get("tool_calls", ()))
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
    assert "reasoning" not in json.dumps([list(m) for m in body["messages"]])


def test_a_key_is_found_also_where_json_has_escaped_its_slashes():
    from composer_replication.replay.attempt import _without
    key = "ab/cd+ef/gh"
    assert _without(key, f"a {key} b ab\\/cd+ef\\/gh c ab/cd+ef") == "a [key] b [key] c ab/cd+ef"


def test_bodies_of_demo_traces():
    for trace in toy_traces():
        for state in trace_states(trace):
            check_request(request_body(ENDPOINT, state))


def test_bodies_of_real_traces(shared_data):
    states = 0
    for name in ("tau2_airline_multimodel.jsonl.gz",):
        for trace, _ in zip(read_traces(shared_data / "traces" / name), range(12)):
            for state in trace_states(trace)[-2:]:
                check_request(request_body(ENDPOINT, state))
                assert json.loads(request_text(ENDPOINT, state)) == request_body(ENDPOINT, state)
                states += 1
    assert states > 12


def test_thinking_of_the_student_is_not_sent():
    turns = (
        Turn("user", "go"),
        Turn("assistant", "I look.", thinking="SECRET", tool_calls=(ToolCall("a", {}),)),
        Turn("tool", "x"),
        Turn("assistant", "done"),
    )
    [_, state] = trace_states(Trace("t", turns))
    assert "SECRET" not in request_text(ENDPOINT, state) and "I look." in request_text(ENDPOINT, state)


def test_calls_without_ids_and_results_of_unknown_calls():
    turns = (
        Turn("user", "go"),
        Turn("assistant", tool_calls=(ToolCall("a", {}, "x"), ToolCall("b", {}))),
        Turn("tool", "B", tool_call_id="?"),
        Turn("tool", "A", tool_call_id="x"),
        Turn("assistant", "look[a]"),
        Turn("tool", "seen", name="look"),
    )
    body = request_body(ENDPOINT, TraceState("t", turns))
    ids = [m.get("tool_call_id") for m in body["messages"] if m["role"] == "tool"]
    assert sorted(ids) == ["call_1_1", "x"] and len(body["messages"]) == len(turns)
    assert body["messages"][-1] == {"role": "user", "content": "seen"}
    check_request(body)


def test_results_by_id_come_in_any_order():
    calls = (ToolCall("a", {}, "x"), ToolCall("b", {}, "y"))
    turns = (
        Turn("user", "go"),
        Turn("assistant", tool_calls=calls),
        Turn("tool", "B", tool_call_id="y"),
        Turn("tool", "A", tool_call_id="x"),
    )
    assert [m["tool_call_id"] for m in request_body(ENDPOINT, TraceState("t", turns))["messages"][2:]] == ["y", "x"]


def test_text_holds_anything_a_trace_can():
    state = TraceState("t", (Turn("user", "half a pair \ud800, 中文, \x00"),))
    text = request_text(ENDPOINT, state)
    assert json.loads(text.encode("utf-8"))["messages"][0]["content"] == "half a pair ?, 中文, \x00"
    with pytest.raises(TeacherProblem, match="before turn 1 of t cannot be written as JSON"):
        request_text(ENDPOINT, replace(state, tools=({"name": "look", "parameters": {"maximum": float("inf")}},)))


def test_keys_tell_questions_apart():
    other_state = replace(STATE, turns=(Turn("user", "stop"),))
    other_tools = replace(STATE, tools=({"type": "function", "function": {"name": "a"}},))
    questions = {
        request_key(e, s)
        for s in (STATE, other_state, other_tools)
        for e in (
            ENDPOINT,
            replace(ENDPOINT, model="x"),
            replace(ENDPOINT, max_tokens=5),
            replace(ENDPOINT, base_url="http://x/v1"),
        )
    }
    assert len(questions) == 12
    same = replace(ENDPOINT, name="n", price=Price(0.0, 0.0), key_env=None)
    assert request_key(same, replace(STATE, trace_id="u")) == request_key(ENDPOINT, STATE)
    known = Endpoint("a", "m", Price(1.0, 2.0), "http://x/v1")
    assert request_key(known, STATE) == "838d73d0228249f3ff07689f154a983d"  # as ledgers of earlier versions hold it


def test_key_from_the_environment(monkeypatch):
    endpoint = replace(ENDPOINT, key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", " sk-1\n")
    assert read_key(endpoint) == "sk-1" and read_key(replace(endpoint, key_env=None)) is None
    for value in ("", "  "):
        monkeypatch.setenv("MY_KEY", value)
        with pytest.raises(TeacherProblem, match="'gpt' needs a key and MY_KEY is not set"):
            read_key(endpoint)
    monkeypatch.setenv("MY_KEY", "sk-\nsecret")
    with pytest.raises(TeacherProblem) as problem:
        read_key(endpoint)
    assert "secret" not in str(problem.value)


@pytest.mark.parametrize(
    "base_url", ["x", "ftp://x/v1", "https:///v1", "https://me:secret@x/v1", "https://x/v1?key=secret", "https://x/v1#a"]
)
def test_addresses_that_cannot_be_asked(base_url):
    with pytest.raises(TeacherProblem) as problem:
        replace(ENDPOINT, base_url=base_url)
    assert "secret" not in str(problem.value)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"name": ""}, {"model": ""}])
def test_endpoints_that_cannot_be(bad):
    with pytest.raises(TeacherProblem):
        replace(ENDPOINT, **bad)


# status, body, (billed, again, stops)
JSON, HTML = '{"error": {"message": "no"}}', "<html>"
FLAGGED = '{"error": {"message": "flagged", "metadata": {"reasons": ["violence"]}}}'
FAILURES = [
    *((s, JSON, (False, False, True)) for s in (301, 302, 307, 308, 401, 402, 403, 404, 405, 410)),
    *((s, JSON, (False, False, False)) for s in (400, 406, 413, 422, 425)),
    (403, FLAGGED, (False, False, False)),
    *((s, JSON, (False, True, False)) for s in (409, 429, 500, 502, 503, 529)),
    (503, HTML, (False, True, False)),
    *((s, JSON, (True, True, False)) for s in (408, 504)),
    *((s, HTML, (True, True, False)) for s in (500, 502, 504, 520, 524)),
    *((200, b, (True, True, False)) for b in (
        "", "[]", "null", "{", JSON, "{}", '{"choices": []}', '{"choices": {}}', '{"choices": [null]}', '{"choices": null}',
        '{"choices": [{"message": null}]}', '{"choices": [{"message": []}]}',
        '{"choices": [{"message": {"content": "x"}, "finish_reason": "error"}]}')),
]


@pytest.mark.parametrize("status, raw, expected", FAILURES, ids=[f"{s}-{r[:24]}" for s, r, _ in FAILURES])
def test_failures(status, raw, expected):
    if status == 200:
        assert no_completion(raw) and expected == (True, True, False)
        return
    failure = read_failure(status, raw)
    assert (may_be_billed(status, raw), failure.again, failure.stops) == expected
    assert str(status) in str(failure) and "\n" not in str(failure)


def test_failures_say_what_the_provider_says():
    for raw in ('{"error": {"message": "too\\nlong"}}', '{"error": "too long"}', '{"detail": "too long"}',
                '{"message": "too long"}', "too  long"):
        assert str(read_failure(400, raw)) == "HTTP 400: too long"
    assert len(str(read_failure(400, "x" * 10_000))) < 400
    assert not no_completion(json.dumps(completion(content="x")))


@pytest.mark.parametrize("given, stops", [
    ("12", False), ("0.5", False), ("soon", False), ("-1", False), ("9" * 400, False), ("121", True), ("86400.5", True)])
def test_retry_after(given, stops):
    assert read_failure(429, JSON, given).stops == stops


@pytest.mark.parametrize(
    "asked, served, same",
    [
        ("openai/gpt-4.1", "openai/gpt-4.1", True),
        ("openai/gpt-4.1", "gpt-4.1-2025-04-14", True),
        ("openai/gpt-4.1", "gpt-4.1-mini", False),
        ("gpt-4.1", "gpt-4.1-mini-2025-04-14", False),
        ("gpt-4", "gpt-4.1", False),
        ("gpt-4o-2024-05-13", "gpt-4o-2024-08-06", False),
        ("gpt-4o-2024-05-13", "gpt-4o-20240513", True),
        ("gpt-4o-2024-05-13", "gpt-4o", True),
        ("anthropic/claude-sonnet-4", "claude-sonnet-4-20250514", True),
        ("x/y:free", "x/y", True),
        ("Qwen/Qwen3-0.6B", "qwen/qwen3-0.6b", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@main", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", False),
        ("mistral-large", "mistral-large-2411", True),
        ("mistral-large-latest", "mistral-large-2411", True),
        ("a", "", True),
        ("a", "b", False),
        ("llama-3-8b", "llama-3-70b", False),
        ("gpt-4-32k", "gpt-4", False),
        ("o3", "o3-pro", False),
        ("anthropic/claude-sonnet-4.5", "anthropic/claude-4.5-sonnet-20250929", True),
        ("anthropic/claude-sonnet-4", "anthropic/claude-4-sonnet-20250522", True),
        ("claude-opus-4-8", "anthropic/claude-4.8-opus-20260401", True),
        ("gpt-4.5", "gpt-5.4", False),
        ("claude-sonnet-4.5", "claude-opus-4.5", False),
    ],
)
def test_models_served(asked, served, same):
    assert is_model(asked, served) is same


def filed(response, **more):
    return to_answer(ENDPOINT, "k", json.dumps(response), 1.0, 0.25, **more)


def read(**of):
    return read_answer(ENDPOINT, filed(completion("gpt-4.1", **of)))


def test_answers_are_read_as_the_openai_package_reads_them():
    for message in (
        {"content": "hello"},
        {"content": None, "calls": [("a", '{"x": 1}')]},
        {"content": "Both.", "calls": [("a", "{}"), ("b", '{"y": [1]}')]},
    ):
        response, result = completion("gpt-4.1", **message), read(**message)
        theirs = ChatCompletion.model_validate(response).choices[0].message
        assert result.votes and result.action.content == (theirs.content or "")
        assert [(c.id, c.name, c.arguments) for c in result.action.tool_calls] == [
            (c.id, c.function.name, json.loads(c.function.arguments)) for c in theirs.tool_calls or ()
        ]
        assert (result.prompt_tokens, result.completion_tokens, result.seconds) == (11, 7, 1.0)


@pytest.mark.parametrize(
    "of, problem, kept",
    [
        ({"content": "Well,", "finish": "length"}, "cut off at max_tokens=1024", "Well,"),
        ({"content": "", "finish": "length"}, "cut off at max_tokens=1024", None),
        ({"content": "x", "finish": "content_filter"}, "withheld by the provider's content filter", "x"),
        ({"content": None, "refusal": "I can't\nhelp."}, "refused: I can't help.", "I can't\nhelp."),
        ({"content": None, "refusal": "I was cut off."}, "refused: I was cut off.", "I was cut off."),
        ({"content": ""}, "the answer is empty", None),
        ({"content": " \n"}, "the answer is empty", None),
        ({"content": None}, "the answer is empty", None),
        ({"content": "I try.", "calls": [("a", '{"x": ')]}, "the arguments of its call of 'a' are no JSON object", "I try."),
        ({"content": "", "calls": [("a", "[1]")]}, "the arguments of its call of 'a' are no JSON object", ""),
        ({"content": "", "calls": [("", "{}")]}, "a call names no tool", ""),
    ],
)
def test_answers_that_do_not_vote(of, problem, kept):
    result = read(**of)
    assert (result.problem, result.votes, result.asked, result.cut) == (problem, False, True, of.get("finish") == "length")
    assert (result.action and result.action.content) == kept
    assert result.action is None or len(result.action.tool_calls) == len(of.get("calls", ()))


def test_reasoning_is_the_actions_thinking():
    assert [read(content="x", **{f: "why"}).action.thinking for f in ("reasoning", "reasoning_content")] == ["why", "why"]
    assert read(content="x").action.thinking is None and read(content=" x ").action.content == " x "


def test_an_unknown_tool_votes():
    assert read(content="", calls=[("nobody_offered_this", "{}")]).votes


def test_a_wrong_model_is_kept_and_does_not_vote():
    result = read_answer(ENDPOINT, filed(completion("gpt-4.1-mini", content="x")))
    assert (
        result.problem == "gpt-4.1-mini answered where openai/gpt-4.1 was asked"
        and result.action.content == "x"
        and result.cost > 0
    )


@pytest.mark.parametrize(
    "usage, cost, source",
    [
        ({"prompt_tokens": 1000, "completion_tokens": 100}, (1000 * 2 + 100 * 8) / 1e6, "table"),
        (
            {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 600}},
            (400 * 2 + 600 * 0.5 + 100 * 8) / 1e6,
            "table",
        ),
        ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": 0.5}, 0.5, "provider"),
        ({"prompt_tokens": 1000, "completion_tokens": 100, "cost": 0}, 0.0, "provider"),
        *(({"prompt_tokens": 1000, "completion_tokens": 100, "cost": c}, 0.0028, "table") for c in (-1, True, "1", None, 1e300)),
        (None, 0.25, "table"),
        ([], 0.25, "table"),
        ({"prompt_tokens": -5, "completion_tokens": 2**63}, 0.25, "table"),
    ],
)
def test_costs(usage, cost, source):
    answer = filed(completion(content="x") | {"usage": usage})
    assert (answer.cost, answer.cost_from) == (pytest.approx(cost, abs=1e-15), source)


def test_odd_messages_are_read_all_the_same():
    for odd in (
        {"tool_calls": {}},
        {"tool_calls": "x"},
        {"tool_calls": [None, 3, {}]},
        {"tool_calls": [{"function": {"name": 3, "arguments": 4}}]},
        {"content": 5},
        {"content": [{"text": "a"}, 7, {"text": None}]},
        {"refusal": {"a": 1}},
        {"reasoning": 3},
    ):
        response = {"model": 5, "choices": [{"message": odd}], "usage": 3, "provider": []}
        result = read_answer(ENDPOINT, filed(response))
        assert result.action is not None or result.problem


@pytest.mark.slow
def test_the_bound_on_prompt_tokens_holds(shared_data):
    "Bytes of the body against a real byte-level BPE on real prompts, with what its chat template adds."
    from transformers import AutoTokenizer

    tokenizer = (
        AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "qwen3")
        if (shared_data / "tokenizers" / "qwen3").is_dir()
        else None
    )
    if tokenizer is None:
        pytest.skip("no tokenizer here")
    for state in [TraceState("t", (Turn("user", "x"),)), *trace_states(toy_traces()[0])]:
        body = request_body(ENDPOINT, state)
        tokens = tokenizer.apply_chat_template(
            state.messages, tools=list(state.tools), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert len(tokens["input_ids"]) <= len(json.dumps(body, ensure_ascii=False).encode())


# `complete`, which rollouts use

def near(server, **more):
    return Endpoint("near", "near", Price(0.0, 0.0), base_url=server.url, key_env=more.pop("key_env", None), **more)


def ask(server, tries=3, timeout_s=20.0, **more):
    endpoint = near(server, **more)
    return complete(endpoint, chat_body(endpoint, [Turn("user", "Hello")], (), seed=7), timeout_s, tries)


def test_complete_tries_again_what_may_go_better():
    with BadServer(lambda r: (failed(503), Reply(hang_up=True), Reply())[r.number]) as server:
        assert ask(server)["choices"] == answer_to(server.requests[-1].body)["choices"]
    assert len(server.requests) == 3 and server.requests[0].body["seed"] == 7


@pytest.mark.parametrize("reply, count, words", [
    (failed(401, "no such key"), 1, "the key was refused"), (failed(500), 2, "HTTP 500"), (Reply(send=20), 2, "connection broke"),
    (Reply(body=b"no JSON"), 2, "no JSON object"), (Reply(delay=600), 2, "no answer within 1.5 s")])
def test_complete_says_why_there_is_no_answer(reply, count, words, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-do-not-show-this-0123456789")
    with BadServer(lambda r: reply) as server, pytest.raises(TeacherProblem, match=words) as problem:
        ask(server, tries=2, timeout_s=1.5 if reply.delay else 20.0, key_env="THE_KEY")
    assert len(server.requests) == count and "do-not-show" not in str(problem.value)
    assert server.requests[0].headers["authorization"] == "Bearer sk-do-not-show-this-0123456789"


def test_without_the_package_openai_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with BadServer() as server, pytest.raises(TeacherProblem) as problem:
        ask(server)
    assert str(problem.value) == "asking an endpoint needs the package openai; pip install 'composer_replication[teachers]'."
    assert not server.requests


def test_nothing_of_the_environment_is_sent_but_the_key(monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-do-not-show-this-0123456789")
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_CUSTOM_HEADERS"):
        monkeypatch.setenv(name, "x-mine: somebody-elses")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with BadServer() as server:
        ask(server, key_env="THE_KEY")
    [request] = server.requests
    assert "somebody" not in str(request) and request.headers.keys() == {
        "host", "accept", "accept-encoding", "connection", "user-agent", "content-type", "content-length", "authorization"}


@pytest.mark.parametrize("again", [False, True])
def test_what_the_ledger_did_not_take_is_given_to_it_again_after_a_failure_too(again, tmp_path, monkeypatch, caplog):
    body, calls, fail = chat_body(ENDPOINT, [Turn("user", "Hello")], ()), [], Ledger.fail

    def failing(ledger, *given):
        calls.append(given)
        if again or len(calls) == 1:
            raise LedgerProblem("the disk is full")
        fail(ledger, *given)

    monkeypatch.setattr(Ledger, "fail", failing)
    with BadServer(lambda r: failed(504)) as server, Ledger(tmp_path / "l", 1.0) as ledger:
        with pytest.raises(TeacherProblem, match="HTTP 504"):
            complete(replace(ENDPOINT, base_url=server.url, key_env=None), body, tries=1, ledger=ledger)
        assert (len(calls), ledger.spent().in_flight) == (2, int(again))
    assert ("the ledger does not take" in caplog.text) == again


def test_complete_with_a_ledger_counts_every_attempt_and_asks_nothing_twice(tmp_path):
    tools = ({"name": "f", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},)
    body = chat_body(ENDPOINT, [Turn("user", "Hello")], tools)
    with BadServer(lambda r: Reply() if r.number else failed(504)) as server:
        paid = replace(ENDPOINT, base_url=server.url, key_env=None)
        with Ledger(tmp_path / "l", 1e-6) as poor, pytest.raises(BudgetReached):
            complete(paid, body, ledger=poor)
        assert not server.requests
        with Ledger(tmp_path / "l", 1.0) as ledger:
            assert complete(paid, body, ledger=ledger) == complete(paid, body, ledger=ledger)
            spent = ledger.spent()
    assert len(server.requests) == 2 and (spent.paid, spent.lost, spent.in_flight) == (1, 1, 0)
    assert list(map(str, (r.body for r in server.requests))) == [str(body)] * 2  # in its order, which a template may show
    assert 0 < spent.paid_usd < spent.lost_usd


def test_complete_works_where_an_event_loop_runs():
    async def inside(server):
        return ask(server)
    with BadServer() as server:
        assert asyncio.run(inside(server))["choices"]


def call_of(*ids):
    return Turn("assistant", "", tool_calls=tuple(ToolCall("f", {"a": i}, i) for i in ids))


def result_of(id, text="done"):
    return Turn("tool", text, tool_call_id=id, name="f")


@pytest.mark.parametrize("turns, sent", [
    ((call_of("x"), result_of("x")), ["user", ["x"], "x"]),
    ((call_of("x", "y"), result_of("y")), ["user", ["y"], "y"]),
    ((call_of("x"), Turn("user", "stop")), ["user", "user"]),
    ((replace(call_of("x"), content="I look."), Turn("user", "stop")), ["user", "assistant", "user"]),
    ((call_of("x"), Turn("user", "stop"), result_of("x")), ["user", "user", "user"]),
    ((call_of("x"), result_of("x"), call_of("x"), Turn("user", "on")), ["user", ["x"], "x", "user"]),
    ((Turn("assistant", tool_calls=(ToolCall("f", {}), ToolCall("g", {}))), Turn("tool", "a")),
     ["user", ["call_1_0"], "call_1_0"])])
def test_a_call_that_no_result_follows_is_not_sent(turns, sent):
    "Providers refuse the whole request else."
    state = TraceState("t", (Turn("user", "go"), *turns))
    body = request_body(ENDPOINT, state)
    check_request(body)
    calls = [[c["id"] for c in m.get("tool_calls", ())] for m in body["messages"]]
    shown = [ids or m.get("tool_call_id", m["role"]) for ids, m in zip(calls, body["messages"])]
    assert shown == sent and state.turns[1:] == turns


UNSUPPORTED = "Unsupported parameter: '{}' is not supported with this model. Use 'max_completion_tokens' instead."


def refusing(*settings, words):
    "A server whose model takes none of these settings, and names the first that it finds."
    def reply(request):
        found = next((name for name in settings if name in request.body), None)
        return failed(400, words.format(found)) if found else Reply()
    return reply


@pytest.mark.parametrize("settings, words", [
    (("max_tokens", "temperature"), UNSUPPORTED),
    (("temperature",), "Unsupported value: '{}' does not support 0.0 with this model. Only the default (1) value is supported."),
    (("temperature",), "`{}` is deprecated for this model."), (("max_tokens",), "Unrecognized request argument supplied: {}")])
def test_a_setting_that_a_model_refuses_is_left_out(settings, words, monkeypatch):
    monkeypatch.setattr(PaidEndpoint, "known", {})
    with BadServer(refusing(*settings, words=words)) as server:
        endpoint = replace(ENDPOINT, base_url=server.url, key_env=None, max_tokens=77)
        for requests in (len(settings) + 1, len(settings) + 2):  # it learns once
            assert complete(endpoint, request_body(endpoint, STATE), 10, 1)["choices"]
            last = server.requests[-1].body
            assert len(server.requests) == requests and not set(settings) & last.keys()
            assert last["max_completion_tokens" if "max_tokens" in settings else "max_tokens"] == 77
            assert last["messages"] == [{"role": "user", "content": "go"}]


@pytest.mark.parametrize("words", ["max_tokens is too large: 77. This model supports at most 10.",
                                   "the messages are not supported", ""])
def test_other_refusals_change_no_request(words, monkeypatch):
    monkeypatch.setattr(PaidEndpoint, "known", {})
    with BadServer(lambda request: failed(400, words)) as server:
        endpoint = replace(ENDPOINT, base_url=server.url, key_env=None)
        with pytest.raises(TeacherProblem, match="HTTP 400"):
            complete(endpoint, request_body(endpoint, STATE), 10, 1)
        assert len(server.requests) == 1 and not any(PaidEndpoint.known.values())
