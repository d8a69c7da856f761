"Whatever messages an agent sends: a request is answered or refused with a 400, and its episode becomes a scored rollout."

import json
import random

import httpx2
import pytest
from rollouts import Folder, config, scripted
from small_tokenizers import small_tokenizer
from transformers import AutoTokenizer

from composer_replication.core.environment import environment_of
from composer_replication.core.tools import ToolResult
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.rollout.endpoint import foreign_episodes, serve_recorder
from composer_replication.rollout.loop import collect
from composer_replication.rollout.protocols import ChatCompletions, Messages, Refused, Responses
from composer_replication.rollout.record import RecordedEpisode, Recorder
from composer_replication.rollout.types import Ending
from composer_replication.traces.read import read_traces

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
]
SAID = [
    "fine",
    "  spaces  ",
    "",
    "<think>hm</think>ok",
    "\n\nx",
    "a <|im_end|> b",
    "{}",
    '<|call|>{"name": "f", "arguments": {}}',
]
TEXTS = [
    "hello",
    "",
    "  pad ",
    "<|im_start|>system\nx<|im_end|>",
    "\ud800 half",
    "<think>t</think>",
    "a\r\nb",
    None,
    "</s>[INST]",
    "x" * 50,
]


def message(draw, answers):
    "A message as agents send them: what was answered, what another model said, results of calls that nobody made."
    role = draw.choice(["user", "user", "user", "system", "tool", "assistant", "answer", "answer", "developer"])
    if role == "answer" and answers:
        return draw.choice(answers)
    made = {"role": "user" if role == "answer" else role, "content": draw.choice(TEXTS)}
    if role == "tool":
        made["tool_call_id"] = draw.choice(["call_0", "zz", ""])
    if role == "assistant" and draw.random() < 0.5:
        function = {"name": draw.choice(["f", "g", ""]), "arguments": draw.choice(['{"a": 1}', "{bad", "[]", ""])}
        made["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
    return made


def played(recorder, seed):
    "An episode of such messages; how many requests were answered and refused."
    draw, episode, answers, history = (
        random.Random(seed),
        RecordedEpisode(f"e{seed}"),
        [],
        [{"role": "user", "content": "start"}],
    )
    answered = refused = 0
    for _ in range(8):
        try:
            asked = ChatCompletions.read(
                {"model": "m", "messages": history} | ({"tools": TOOLS} if draw.random() < 0.5 else {})
            )
            said = ChatCompletions.write(asked, recorder.answer(episode, asked))["choices"][0]["message"]
            answers.append(said)
            history = [*history, said]
            answered += 1
        except Refused as problem:
            assert problem.status == 400 and "\n" not in str(problem)
            history = history[: draw.randint(1, len(history))]
            refused += 1
        history = [*history, *(message(draw, answers) for _ in range(draw.randint(1, 2)))]
        history = history[draw.randint(0, len(history) - 1) :] if draw.random() < 0.2 else history
    rollout = episode.rollout(recorder, Ending.DONE)
    assert rollout.ending is Ending.DONE and sum(len(s.sampled) for s in rollout.trace.segments) in (0, answered)
    return answered, refused


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen3", "mistral-v3"])
def test_any_messages_in_a_real_template(tokenizers, name):
    test_any_messages(AutoTokenizer.from_pretrained(tokenizers / name), 12)


@pytest.mark.parametrize("tokenizer, seeds", [(embedded_tokenizer(), 40)])
def test_any_messages(tokenizer, seeds):
    with Recorder(scripted(lambda text: random.Random(text).choice(SAID), tokenizer), max_tokens=16) as recorder:
        answered, refused = zip(*(played(recorder, seed) for seed in range(seeds)))
    assert sum(answered) > 2 * seeds / 3 and sum(refused)


def test_a_turn_of_another_model_in_the_history_begins_a_segment():
    with Recorder(scripted(lambda text: "fine"), max_tokens=16) as recorder:
        episode, history = RecordedEpisode("e"), [{"role": "user", "content": "start"}]
        for more in (
            [],
            [{"role": "assistant", "content": "mine"}, {"role": "user", "content": "on"}],
            [{"role": "user", "content": "on"}],
        ):
            history = [*history, *more]
            asked = ChatCompletions.read({"model": "m", "messages": history})
            history = [*history, ChatCompletions.write(asked, recorder.answer(episode, asked))["choices"][0]["message"]]
        rollout = episode.rollout(recorder, Ending.DONE)
    assert [(s.turns, s.sampled) for s in rollout.trace.segments] == [((0, 1), (1,)), ((0, 1, 2, 3, 4, 5, 6), (4, 6))]
    assert len(rollout.more[0].completion_ids) < len(rollout.more[0].prompt_ids)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "who?"}, {"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "a", "extra": 1}, {"role": "user", "content": "\udfff"}],
    ],
)
def test_a_request_that_breaks_the_template_ends_nothing(messages):
    "Refused in the protocol's form; the next one is answered and the episode is scored."
    with Recorder(scripted(lambda text: "fine"), max_tokens=16) as recorder:
        episode = RecordedEpisode("e")
        for protocol, more in ((ChatCompletions, {}), (Messages, {"max_tokens": 9})):
            recorder.answer(episode, protocol.read({"model": "m", "messages": [{"role": "user", "content": "start"}]} | more))
            with pytest.raises(Refused, match="cannot carry this conversation") as refused:
                recorder.answer(episode, protocol.read({"model": "m", "messages": messages} | more))
            assert refused.value.status == 400 and protocol.error(refused.value)["error"]["type"] == "invalid_request_error"
        assert episode.ending is None and episode.rollout(recorder, Ending.DONE, 1.0).reward == 1.0


def test_schemas_as_deep_as_they_like_are_refused_or_answered():
    deep = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": deep}}]
    with Recorder(scripted(lambda text: "fine"), max_tokens=16) as recorder:
        episode = RecordedEpisode("e")
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                recorder.answer(
                    episode,
                    ChatCompletions.read({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}),
                )
            assert refused.value.status == 400
        recorder.answer(episode, ChatCompletions.read({"model": "m", "messages": [{"role": "user", "content": "a"}]}))
        assert episode.rollout(recorder, Ending.DONE).ending is Ending.DONE


def test_a_policy_cannot_end_its_episode_by_what_it_says(monkeypatch):
    "What no template carries stands in the trace with its ids and without text, and the episode goes on."

    def refuses(chat, trace, whole):
        if trace.turns[-1].content:
            raise ValueError("not carried")

    monkeypatch.setattr("composer_replication.rollout.engine.check_turn", refuses)
    with Recorder(scripted(lambda text: "what no template carries"), max_tokens=16) as recorder:
        episode = RecordedEpisode("e")
        answer = recorder.answer(episode, ChatCompletions.read({"model": "m", "messages": [{"role": "user", "content": "a"}]}))
    assert answer.turn.content == "" and len(answer.turn.token_ids) > 3 and episode.ending is None


HOSTILE = ["\\ud83d", "cut \\ud83d", "\\udc00\\ud83d", "\\u0000", "\\ufdd0", "\\uffff", "\\u2028", "\\ufeff"]
HOSTILE += ["\\u001b[0m", "{{ x }}", "{% raw %}", "\\ud83d\\ude00"]
SAYS = '{"role": "user", "content": "TEXT"}'


@pytest.mark.parametrize("family", ["embedded", "qwen2.5", "qwen3", "qwen3.5", "llama3.1", "glm4moe"])
def test_no_text_of_a_client_ends_an_episode(family, tmp_path):
    "A JavaScript client cuts texts between the halves of a surrogate pair; some send bytes that are no UTF-8."
    tokenizer = embedded_tokenizer() if family == "embedded" else small_tokenizer(family)
    episodes = foreign_episodes(tmp_path, "m")
    policy, typed = scripted(lambda text: "fine", tokenizer), {"content-type": "application/json"}
    with Recorder(policy, max_tokens=16) as recorder, serve_recorder(recorder, episodes, "m") as url, \
            httpx2.Client(base_url=url, timeout=60, headers=typed) as client:
        for number, text in enumerate([*HOSTILE, None]):
            answered = SAYS.replace("user", "assistant").replace("TEXT", "fine")
            for body in (SAYS.replace("user", "system") + f", {SAYS}", f"{SAYS}, {answered}, {SAYS}"):
                body = f'{{"model": "m", "messages": [{body}]}}'.encode()
                body = body.replace(b"TEXT", b"\xed\xa0\xbd \xff" if text is None else text.encode())
                reply = client.post(f"/e/n{number}/v1/chat/completions", content=body)
                assert reply.status_code == 200, (text, reply.text)
    for name, episode in episodes.named.items():
        assert not episode.failed and episode.rollout(recorder, Ending.DONE).ending is Ending.DONE
        assert [t.turns for t in read_traces(tmp_path / f"{name}.jsonl")]


def said(role, text):
    return {"role": role, "content": text}


CODEX = [{"type": "message"} | said("developer", "sandbox: on"), {"type": "message"} | said("user", "fix it")]
MORE = [*CODEX, {"type": "message"} | said("assistant", "fine"), CODEX[0]]
CLAUDE = [said("user", "fix it"), said("assistant", "fine"), said("user", "on"), said("system", "be brief")]


@pytest.mark.parametrize("protocol, more, bodies", [
    (Responses, {"instructions": "You are Codex."}, ("input", CODEX, MORE)),
    (Messages, {"system": [{"type": "text", "text": "You are Claude."}], "max_tokens": 9}, ("messages", CLAUDE[:1], CLAUDE))])
def test_codex_and_claude_code_send_several_system_messages(protocol, more, bodies):
    field, *conversations = bodies
    with Recorder(scripted(lambda text: "fine", small_tokenizer("qwen3.5")), max_tokens=16) as recorder:
        episode = RecordedEpisode("e")
        for items in conversations:
            recorder.answer(episode, protocol.read({"model": "m", field: items} | more))
        rollout = episode.rollout(recorder, Ending.DONE)
    assert len(rollout.segments) == 1 and len(rollout.trace.sampled_turns) == 2


def test_a_tool_may_answer_with_half_a_surrogate_pair():
    class Cut(Folder):
        def ls(self, path: str = ".", depth: int = 1) -> str:
            return "\ud83d of it"

    class Raw:
        tools = environment_of(Cut()).tools
        reset, close = (lambda self, **row: "more \ud83d"), (lambda self: None)
        reward = lambda self, answer: 1.0
        call = lambda self, call: ToolResult("\ud83d of it")

    said = lambda text: "done" if "of it" in text else '<|call|>{"name": "ls", "arguments": {}}'
    for factory in (Cut, Raw):
        (rollout,) = collect(scripted(said), factory, [{"prompt": "cut \ud83d"}], config())
        texts = [turn.content for turn in rollout.trace.turns]
        assert rollout.ending is Ending.DONE and rollout.reward == 1.0, rollout.problem
        assert texts[0].startswith("cut \ufffd") and "\ufffd of it" in texts


STRICT = {"name": "f", "strict": True}


@pytest.mark.parametrize("protocol, body", [
    (ChatCompletions, {"messages": [said("user", "a")], "tools": [{"type": "function", "function": STRICT}]}),
    (Responses, {"input": "a", "tools": [{"type": "function"} | STRICT]}),
    (Messages, {"messages": [said("user", "a")], "max_tokens": 9, "tools": [STRICT | {"input_schema": {}}],
                "output_config": {"effort": "low"}})])
def test_a_strict_tool_is_named_as_unused(protocol, body):
    asked = protocol.read({"model": "m"} | body)
    assert "tools.f.strict" in asked.unused and [t["function"]["name"] for t in asked.tools] == ["f"]
    assert ("output_config.effort" in asked.unused) == ("output_config" in body)
    loose = json.loads(json.dumps(body).replace("true", "false"))
    assert "tools.f.strict" not in protocol.read({"model": "m"} | loose).unused
