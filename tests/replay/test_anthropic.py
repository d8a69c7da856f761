"An address that ends in `/messages` is asked in Anthropic's form, by our own server and by the ledger's rules."
import json

import pytest
from bad_server import BadServer, Reply

from composer_replication.core.trace import ToolCall, Turn
from composer_replication.replay.answer import read_turn
from composer_replication.replay.client import complete
from composer_replication.replay.endpoint import Endpoint, parse_teacher
from composer_replication.replay.ledger import Ledger
from composer_replication.replay.prices import Price
from composer_replication.replay.request import chat_body
from composer_replication.replay.teachers import TeacherCallResult, TeacherProblem
from composer_replication.rollout.teachers_endpoint import serve_teachers

LS = {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {
    "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}
TURNS = (Turn("system", "Use the tools."), Turn("user", "List both."),
         Turn("assistant", "Both.", tool_calls=(ToolCall("ls", {"path": "a"}, "c1"), ToolCall("ls", {"path": "b"}, "c2"))),
         Turn("tool", "a.py", tool_call_id="c1", name="ls", observation=True),
         Turn("tool", "no such folder", tool_call_id="c2", name="ls", observation=True), Turn("user", "And now?"))
ANSWER = {"type": "message", "model": "m", "stop_reason": "tool_use", "usage": {"input_tokens": 20, "output_tokens": 7},
          "content": [{"type": "thinking", "thinking": "Look."},
                      {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}}]}


class Told:
    "A teacher that keeps what it was asked."
    name = "m"

    def __init__(self):
        self.states = []

    def answer(self, states):
        self.states += states
        action = Turn("assistant", "I look.", tool_calls=(ToolCall("ls", {"path": "."}, "x"),))
        return [TeacherCallResult(self.name, action, "", 11, 7, 0.0, 0.0) for _ in states]


def endpoint(url, **settings):
    return Endpoint("m", "m", Price(1, 1), url, None, **settings)


def said(turn):
    return turn.role, turn.content, [(call.name, call.arguments) for call in turn.tool_calls]


def test_both_forms_say_the_same_to_our_own_server_and_hear_the_same():
    teacher, heard = Told(), []
    with serve_teachers([teacher]) as url:
        for address in (url, f"{url}/messages"):
            answer = complete(endpoint(address), chat_body(endpoint(address), TURNS, [LS]))
            choice = answer["choices"][0]
            heard.append((said(read_turn(choice["message"])), choice["finish_reason"], answer["usage"]["completion_tokens"]))
    plain, messages = ([said(turn) for turn in state.turns] for state in teacher.states)
    assert plain == messages and teacher.states[0].tools == teacher.states[1].tools
    assert heard[0] == heard[1] == (("assistant", "I look.", [("ls", {"path": "."})]), "tool_calls", 7)


def test_it_is_paid_for_once_with_the_key_where_it_belongs(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k" * 20)
    with BadServer(lambda request: Reply(body=ANSWER)) as server, Ledger(tmp_path / "replies.ledger", 1.0) as ledger:
        asked = Endpoint("m", "m", Price(1, 1), f"{server.url}/messages", "MY_KEY", 64)
        bodies = [chat_body(asked, TURNS, [LS], seed=seed, top_p=1.0, temperature=1.0) for seed in (0, 0, 1)]
        answers = [complete(asked, body, ledger=ledger) for body in bodies]
        assert ledger.spent().paid_usd == pytest.approx(2 * 27e-6)
    assert answers[0]["choices"][0]["message"]["reasoning_content"] == "Look." and answers[0] == answers[1]
    first, second = server.requests  # a seed is another question, though this form does not know it
    assert first.path == "/v1/messages" and first.body == second.body and not {"seed", "top_p"} & first.body.keys()
    assert first.headers["x-api-key"] == "k" * 20 and first.headers["anthropic-version"] and "authorization" not in first.headers


@pytest.mark.parametrize("status, body, said", [
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "tools are odd"}}, "HTTP 400: tools are odd"),
    (401, {"type": "error", "error": {"type": "authentication_error", "message": "bad key"}}, "the key was refused"),
    (200, {"hello": 1}, "it is no chat completion"), (200, b"no json", "the body is no JSON object")])
def test_a_refusal_is_one_sentence(status, body, said):
    with BadServer(lambda request: Reply(status, body)) as server, pytest.raises(TeacherProblem, match=said):
        complete(endpoint(f"{server.url}/messages"), chat_body(endpoint(server.url), TURNS, [LS]), tries=1)


def test_its_own_address_has_its_own_key():
    table = {"claude-x": Price(1, 1)}
    assert parse_teacher("claude-x@https://api.anthropic.com/v1/messages", table).key_env == "ANTHROPIC_API_KEY"
    assert parse_teacher("claude-x@https://elsewhere.example/v1/messages", table, "MINE").key_env == "MINE"
    assert json.dumps(parse_teacher("claude-x@https://elsewhere.example/v1", table).url).count("chat/completions") == 1
