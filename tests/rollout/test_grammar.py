"Forced calls and schemas: what a turn may be, what is recorded of it, and what is learnt from it."

import json
from contextlib import contextmanager

import httpx2
import jsonschema
import pytest
import torch
from rollouts import scripted
from small_tokenizers import FAMILIES, small_tokenizer
from trl import chat_template_utils as trl

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.model import build_model, embedded_model, embedded_tokenizer
from composer_replication.rollout import grammar as grammars
from composer_replication.rollout.decode import CachedBatch, RereadBatch
from composer_replication.rollout.endpoint import Episodes, serve_recorder
from composer_replication.rollout.grammar import Grammars
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.protocols import ChatCompletions, Messages, Refused, Responses
from composer_replication.rollout.record import RecordedEpisode, Recorder
from composer_replication.rollout.sampling import LEFT_OUT, SampleRequest, Sampling
from composer_replication.rollout.types import Ending
from composer_replication.training.episodes import rollout_columns
from composer_replication.training.model_check import SAMPLED_NATS, sampling_difference
from composer_replication.training.segments import segment_columns

pytest.importorskip("llguidance")
HI = [{"role": "user", "content": "Hello"}]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
MOVE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "to": {"$ref": "#/$defs/Point"}, "how": {"enum": ["slow", "fast"]}},
    "required": ["path", "to"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}
PICK = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"enum": [7, 8]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": parameters}}


TOOLS = [tool("move", MOVE), tool("pick", PICK), tool("stop", {"type": "object", "properties": {}})]
# What pydantic-ai 1.x sends for `Agent(model, output_type=Person)`; the type's fields are ours.
PYDANTIC_AI = {
    "messages": [{"role": "user", "content": "Who is it?"}],
    "model": "m",
    "stream": False,
    "tool_choice": "required",
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "final_result",
                "description": "The final response which ends this conversation",
                "strict": True,
                "parameters": {
                    "additionalProperties": False,
                    "title": "Person",
                    "type": "object",
                    "required": ["name", "age"],
                    "properties": {
                        "name": {"enum": ["ada", "bob"], "title": "Name", "type": "string"},
                        "age": {"enum": [7, 8], "title": "Age", "type": "integer"},
                    },
                },
            },
        }
    ],
}


def tokenizer_of(family):
    made = embedded_tokenizer() if family == "embedded" else small_tokenizer(family)
    if family == "qwen3.5":
        made.response_template = trl.qwen3_5_template
    return made


def policy_of(family, model=None):
    made = tokenizer_of(family)
    model = model or build_model(len(made))
    model.generation_config.eos_token_id = made.eos_token_id
    return TransformersPolicy(model, made)


def asked(**more):
    return ChatCompletions.read({"model": "m", "messages": HI} | more)


def fits(policy, request, text):
    "True where the whole text is a turn of the request's grammar."
    grammar, ids = Grammars(policy).of(request), policy.chat.tokenizer.encode(text, add_special_tokens=False)
    for i in ids:
        if not grammar.allowed(len(policy.chat.tokenizer))[i]:
            return False
        grammar.take(i)
    return bool(grammar.allowed(len(policy.chat.tokenizer))[sorted(policy.stops)].all())


def written(policy, call):
    "The text of a turn that is one call, as the chat template writes it."
    tokenizer, trace = policy.chat.tokenizer, [*HI, Turn("assistant", tool_calls=(call,)).to_message()]
    prompt = tokenizer.apply_chat_template(HI, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(trace, tools=TOOLS, tokenize=False)
    text = whole.removeprefix(prompt) if whole.startswith(prompt) else whole.partition("Hello")[2].partition("assistant")[2]
    text = text[: text.rfind(tokenizer.eos_token)] if tokenizer.eos_token in text else text
    return text.rpartition("</think>")[2].strip()


CALLS = [
    ToolCall("move", {"path": "a/b.py", "to": {"x": 3}}, "c1"),
    ToolCall("move", {"path": 'say "hi"\n\n  <b>', "to": {"x": -1}, "how": "fast"}, "c1"),
    ToolCall("pick", {"name": "bob", "age": 8}, "c1"),
    ToolCall("stop", {}, "c1"),
]


@pytest.mark.parametrize("family", [*FAMILIES, "embedded"])
def test_the_call_that_the_template_writes_fits_and_no_other_turn_does(family):
    policy = policy_of(family)
    for call in CALLS:
        text = written(policy, call)
        for choice in ("required", {"type": "function", "function": {"name": call.name}}):
            assert fits(policy, asked(tools=TOOLS, tool_choice=choice), text), (call, choice, text)
        other = next(c.name for c in CALLS if c.name != call.name)
        assert not fits(policy, asked(tools=TOOLS, tool_choice={"type": "function", "function": {"name": other}}), text)
        for wrong in (
            "I would rather talk.",
            "",
            text.replace(call.name, "fly"),
            text.replace('"x": 3', '"x": "three"').replace('"x": -1', '"y": 1') if call.name == "move" else text[:-1] + "!",
        ):
            assert not fits(policy, asked(tools=TOOLS, tool_choice="required"), wrong), wrong


@pytest.mark.parametrize("family", [*FAMILIES, "embedded"])
def test_a_schema_holds_the_answer_and_leaves_calls_to_the_model(family):
    policy, form = policy_of(family), {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PICK}}
    alone, beside = asked(response_format=form), asked(response_format=form, tools=TOOLS)
    good, call = '{"name": "ada", "age": 7}', written(policy, CALLS[0])
    for request in (alone, beside):
        assert fits(policy, request, good) and fits(policy, request, '{\n  "name": "bob",\n  "age": 8\n}')
        for wrong in ('{"name": "eve", "age": 7}', '{"name": "ada"}', "Ada.", '["ada"]'):
            assert not fits(policy, request, wrong)
    assert (
        fits(policy, beside, call)
        and not fits(policy, alone, call)
        and not fits(policy, asked(response_format=form, tools=TOOLS, tool_choice="none"), call)
    )
    loose = asked(response_format={"type": "json_object"})
    assert fits(policy, loose, '{"any": [1, {"thing": null}]}') and not fits(policy, loose, "[1]")


def test_a_thought_may_come_first():
    for family, thought in (
        ("qwen3", "<think>\nWell.\n</think>\n\n"),
        ("qwen2.5", "<think>Well.</think>\n"),
        ("embedded", "<think>Well.</think>"),
    ):
        policy = policy_of(family)
        for request, answer in (
            (asked(tools=TOOLS, tool_choice="required"), written(policy, CALLS[0])),
            (asked(response_format={"type": "json_object"}), '{"a": 1}'),
        ):
            assert fits(policy, request, thought + answer) and not fits(policy, request, thought + "Well.")
            assert not fits(policy, request, thought.split("</")[0])


def test_each_protocols_words_ask_the_same():
    anthropic = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    responses = [{"type": "function"} | t["function"] for t in TOOLS]
    every, form = tuple(t["function"]["name"] for t in TOOLS), {"type": "json_schema", "schema": PICK}
    say = {"messages": HI, "model": "m", "max_tokens": 9}
    for choice, (chat, message, response) in {
        every: ("required", {"type": "any"}, "required"),
        ("pick",): (
            {"type": "function", "function": {"name": "pick"}},
            {"type": "tool", "name": "pick"},
            {"type": "function", "name": "pick"},
        ),
        (): ("auto", {"type": "auto"}, "auto"),
    }.items():
        for read in (
            ChatCompletions.read(say | {"tools": TOOLS, "tool_choice": chat}),
            Messages.read(say | {"tools": anthropic, "tool_choice": message}),
            Responses.read({"input": "Hello", "model": "m", "tools": responses, "tool_choice": response}),
        ):
            assert read.forced == choice and read.may_call and read.schema is None
    for read in (
        ChatCompletions.read(say | {"response_format": {"type": "json_schema", "json_schema": {"name": "a"} | form}}),
        Messages.read(say | {"output_config": {"format": form}}),
        Messages.read(say | {"output_format": form}),
        Responses.read({"input": "Hello", "model": "m", "text": {"format": {"name": "a", "strict": True} | form}}),
    ):
        assert read.schema == PICK and not read.forced and not read.unused


# ---- what is recorded


@pytest.fixture(scope="module")
def policy():
    return policy_of("embedded", embedded_model("teacher-1"))


def replayed(policy, request, ids, prompt):
    "Log-probabilities of the ids among all, and the share that the grammar left at each, from one forward pass."
    grammar = Grammars(policy).of(request)
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    left = []
    for i, row in zip(ids, logits):
        left.append(row[grammar.allowed(len(row))].exp().sum().item())
        grammar.take(i)
    return [row[i].item() for i, row in zip(ids, logits)], left


@pytest.mark.parametrize("way", [CachedBatch, RereadBatch])
@pytest.mark.parametrize(
    "request_of",
    [
        lambda: ChatCompletions.read(PYDANTIC_AI),
        lambda: asked(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": PICK}}),
    ],
)
def test_log_probabilities_are_of_what_was_drawn_from_and_forced_tokens_are_marked(policy, way, request_of):
    request, maker = request_of(), Grammars(policy)
    batch, prompt = (
        way(policy.model, policy.stops, Sampling()),
        tuple(policy.chat.tokenizer.encode("<|user|>Who?<|end|><|assistant|>")),
    )
    free = SampleRequest(prompt, Sampling(), 6, "free")
    questions = [SampleRequest(prompt, Sampling(), 200, f"n{n}", grammar=maker.of(request)) for n in range(3)]
    batch.begin([free, *questions])
    made = {}
    while batch.busy:
        made |= {question.name: sample for question, sample in batch.step()}
    assert not made["free"].forced
    for question in questions:
        sample = made[question.name]
        scored, left = replayed(policy, request, sample.ids, prompt)
        assert sample.forced == tuple(i for i, share in enumerate(left) if share < 1 - LEFT_OUT) and 0 < len(sample.forced)
        among_left = torch.tensor(scored) - torch.tensor(left).log()
        torch.testing.assert_close(torch.tensor(sample.logprobs), among_left, atol=2e-4, rtol=0)
        for i in set(range(len(sample.ids))) - set(sample.forced):
            assert sample.logprobs[i] == pytest.approx(scored[i], abs=2 * LEFT_OUT)


def test_the_trainer_scores_what_was_not_forced_as_it_was_sampled(policy):
    "An agent with an output type, two turns: forced tokens are marked in trace, rollout and columns, and left out of the mask."
    episode = RecordedEpisode("agent")
    with Recorder(policy, max_tokens=200, fixed=True) as recorder:
        first = recorder.answer(episode, ChatCompletions.read(PYDANTIC_AI))
        (call,) = first.turn.tool_calls
        jsonschema.validate(call.arguments, PYDANTIC_AI["tools"][0]["function"]["parameters"])
        history = [
            *PYDANTIC_AI["messages"],
            ChatCompletions.write(asked(), first)["choices"][0]["message"],
            {"role": "tool", "tool_call_id": call.id, "content": "Try again."},
        ]
        recorder.answer(episode, ChatCompletions.read(PYDANTIC_AI | {"messages": history}))
        rollout = episode.rollout(recorder, Ending.DONE, 1.0)
    assert Trace.from_json(rollout.trace.to_json()) == rollout.trace and first.turn.forced
    columns = rollout_columns([rollout], 0)
    sampled, mask = torch.tensor(columns["logprobs"]), torch.tensor(columns["env_mask"]).bool()
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        every = policy.model(ids).logits.float().log_softmax(-1)[:, len(rollout.prompt_ids) - 1 : -1]
    scored = every.gather(-1, ids[:, len(rollout.prompt_ids) :, None])[..., 0]
    assert sampling_difference(sampled, scored, mask) <= 2 * LEFT_OUT
    whole = torch.tensor([rollout.completion_mask]).bool()
    assert sampling_difference(sampled, scored, whole) > SAMPLED_NATS, "else nothing was forced, and the test shows nothing"
    assert (
        whole.sum() - mask.sum() == len(rollout.forced) == sum(len(t.forced) for t in rollout.trace.turns)
        and rollout.sampled == whole.sum()
    )
    assert segment_columns(rollout.segments, 0)["tool_mask"].tolist() == [[int(m) for m in mask[0]]]


# ---- over HTTP


@contextmanager
def served(policy, max_tokens=200):
    record, episodes = RecordedEpisode("e"), Episodes()
    episodes.add("e", record)
    with (
        Recorder(policy, max_tokens=max_tokens) as recorder,
        serve_recorder(recorder, episodes, "m") as url,
        httpx2.Client(base_url=f"{url}/e/e/v1", timeout=60) as client,
    ):
        client.record = record
        yield client


def test_openais_client_gets_its_types(policy):
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    from typing import Literal

    Person = pydantic.create_model("Person", name=(Literal["ada", "bob"], ...), age=(Literal[7, 8], ...))
    with served(policy) as client, openai.OpenAI(base_url=str(client.base_url), api_key="none", max_retries=0) as agent:
        assert agent.chat.completions.parse(model="m", messages=HI, response_format=Person).choices[0].message.parsed.age in (
            7,
            8,
        )
        assert agent.responses.parse(model="m", input="Hello", text_format=Person).output_parsed.name in ("ada", "bob")
        tools = [openai.pydantic_function_tool(Person)]
        whole = agent.chat.completions.create(model="m", messages=HI, tools=tools, tool_choice="required").choices[0]
        assert whole.finish_reason == "tool_calls" and Person.model_validate_json(
            whole.message.tool_calls[0].function.arguments
        )
        named = {"type": "function", "function": {"name": "Person"}}
        with agent.chat.completions.stream(model="m", messages=HI, tools=tools, tool_choice=named) as stream:
            made = stream.get_final_completion().choices[0].message
            assert made.tool_calls[0].function.parsed_arguments.age in (7, 8)
        with agent.chat.completions.stream(model="m", messages=HI, response_format=Person) as stream:
            assert stream.get_final_completion().choices[0].message.parsed.name in ("ada", "bob")
        assert all(turn.forced for turn in client.record.turns if turn.role == "assistant")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_forms_are_held(policy, stream):
    tools = [{"name": "pick", "input_schema": PICK}]
    body = {"model": "m", "max_tokens": 200, "messages": HI, "stream": stream}
    with served(policy) as client:
        for more in (
            {"tools": tools, "tool_choice": {"type": "any"}},
            {"tools": tools, "tool_choice": {"type": "tool", "name": "pick"}},
            {"output_config": {"format": {"type": "json_schema", "schema": PICK}}},
        ):
            said = client.post("messages", json=body | more)
            assert said.status_code == 200, said.text
            if stream:
                events = [json.loads(line[6:]) for line in said.text.splitlines() if line.startswith("data: ")]
                text = "".join(
                    e["delta"].get("partial_json") or e["delta"].get("text") or ""
                    for e in events
                    if e["type"] == "content_block_delta"
                )
                reason = next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
            else:
                last, reason = said.json()["content"][-1], said.json()["stop_reason"]
                text = last.get("text") or json.dumps(last["input"])
            jsonschema.validate(json.loads(text), PICK)
            assert reason == ("tool_use" if "tools" in more else "end_turn")


def test_what_cannot_be_had_is_one_sentence_and_the_engine_goes_on(policy, monkeypatch):
    forms = {
        "cannot be followed": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}},
        "too deep": None,
    }
    deep = {}
    for _ in range(3000):
        deep = {"anyOf": [deep]}
    forms["too deep"] = deep
    with Recorder(policy, max_tokens=40) as recorder:
        for said, schema in forms.items():
            with pytest.raises(Refused, match=said):
                recorder.answer(
                    RecordedEpisode("e"), asked(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
                )
        assert recorder.answer(RecordedEpisode("e"), asked()).turn.content
        monkeypatch.setattr(grammars, "find_spec", lambda name: None)
        with pytest.raises(Refused, match=r"llguidance, which is not installed.*composer_replication\[schemas\]"):
            recorder.answer(RecordedEpisode("e"), ChatCompletions.read(PYDANTIC_AI))
    with Recorder(scripted(lambda text: "fine")) as recorder, pytest.raises(Refused, match="sampled in this process"):
        recorder.answer(RecordedEpisode("e"), ChatCompletions.read(PYDANTIC_AI))


def test_a_grammar_that_exceeds_its_limits_ends_its_own_turn_alone(policy):
    class Failing:
        def compute_bitmask(self):
            return b""

        is_error = staticmethod(lambda: True)
        get_error = staticmethod(lambda: "too many items")

    with Recorder(policy, max_tokens=40) as recorder:
        recorder.grammars.of = lambda asked: grammars.Grammar(Failing(), policy.stops) if asked.forced else None
        failing, other = (
            recorder.begin(RecordedEpisode(name), request)
            for name, request in (("a", ChatCompletions.read(PYDANTIC_AI)), ("b", asked()))
        )
        with pytest.raises(Refused, match="too many items"):
            recorder.finish(failing, failing.answer.result(60))
        assert recorder.finish(other, other.answer.result(60)).turn.content
