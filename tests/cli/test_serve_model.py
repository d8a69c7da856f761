"`composer-rl serve model`: a checkpoint as a process, asked over HTTP by OpenAI's own client; what it refuses."
import json

import openai
import pytest
import torch
from forks import started
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.core.trace import Turn
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.replay.endpoint import Endpoint
from composer_replication.replay.prices import Price
from composer_replication.rollout.endpoint import foreign_episodes, serve_recorder
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import ClientPolicy, TransformersPolicy
from composer_replication.rollout.protocols import Asked, Refused
from composer_replication.rollout.record import RecordedEpisode, Recorder
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.types import RolloutConfig


def first_state():
    row, env = world_rows(1, 0, "test")[0], WorldEnv()
    env.reset(**row)
    return row["prompt"], list(env.tools)


@pytest.fixture(scope="module")
def client():
    model = embedded_model("teacher-1")
    with (Recorder(TransformersPolicy(model, embedded_tokenizer()), max_tokens=128, positions=600) as recorder,
          serve_recorder(recorder, foreign_episodes(None, "agent"), "agent", at_once=4) as url,
          openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client):
        yield client


@pytest.mark.process
def test_a_checkpoint_with_an_adapter_answers_openais_client(tmp_path):
    torch.manual_seed(0)
    adapted = get_peft_model(embedded_model("teacher-1"), LoraConfig(r=2, target_modules=["q_proj"]))  # which changes nothing yet
    adapted.save_pretrained(tmp_path / "run" / "checkpoint-1")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"settings": {"model": str(tmp_path / "base")}}))
    embedded_model("teacher-1").save_pretrained(tmp_path / "base")
    embedded_tokenizer().save_pretrained(tmp_path / "base")
    words = ["serve", "model", str(tmp_path / "run" / "checkpoint-1"), "--name", "mine", "--port", "0", "--json"]
    with started(*words) as (server, line, _):
        said = json.loads(line)
        assert said["model"] == "mine"
        messages, tools = first_state()
        with openai.OpenAI(base_url=said["url"], api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["mine"]
            answer = client.chat.completions.create(model="mine", messages=messages, tools=tools, temperature=0, seed=1)
        call, = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and call.function.name in {t["function"]["name"] for t in tools}
        assert isinstance(json.loads(call.function.arguments), dict) and answer.usage.completion_tokens > 0
        assert answer.model_extra["unused"] == []
        server.terminate()
        server.join(120)
        assert server.exitcode == 0


def test_an_agent_played_over_http_earns_what_it_earns_here(client):
    "At temperature 0 the served model and the same weights in our own loop play the same episodes."
    rows, limits = world_rows(3, "served", "test"), RolloutConfig(max_turns=8, max_tokens=500, temperature=0)
    url = str(client.base_url).rstrip("/")
    over_http = collect(ClientPolicy(Endpoint("agent", "agent", Price(0, 0), url, None)), WorldEnv, rows, limits)
    here = collect(TransformersPolicy(embedded_model("teacher-1"), embedded_tokenizer()), WorldEnv, rows, limits)
    assert [r.reward for r in over_http] == [r.reward for r in here] and sum(r.reward for r in here) > 0
    played = [[[(t.role, t.content, t.fail_reason, [(c.name, c.arguments) for c in t.tool_calls]) for t in r.trace.turns]
               for r in rollouts] for rollouts in (over_http, here)]
    assert played[0] == played[1] and all(r.completion_ids == () for r in over_http)


def test_a_request_sets_the_sampling(client):
    messages, tools = first_state()

    def ask(**settings):
        return client.chat.completions.create(model="agent", messages=messages, tools=tools, **settings)

    hot = [ask(temperature=2.0, seed=seed).choices[0].message for seed in (1, 1, 2, 3)]
    assert hot[0] == hot[1] and any(other != hot[0] for other in hot[2:])
    assert ask(temperature=0, seed=1).choices[0].message == ask(temperature=0, seed=9).choices[0].message
    short = ask(max_tokens=2)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 2
    assert ask(max_completion_tokens=3, temperature=1.5).usage.completion_tokens <= 3


@pytest.mark.parametrize("change, status, said", [
    ({"temperature": -1}, 400, "temperature=-1 cannot be used"), ({"temperature": "hot"}, 400, "give a number from 0 to 2"),
    ({"top_p": 0}, 400, "top_p=0"), ({"seed": 1.5}, 400, "a whole number"), ({"seed": True}, 400, "a whole number"),
    ({"max_tokens": 0}, 400, "give 1 or more"), ({"response_format": {"type": "xml"}}, 400, "cannot be had here"),
    ({"n": 2}, 400, "cannot be had here"),
    ({"model": "gpt"}, 404, "there is no model 'gpt' here; ask one of agent"), ({"messages": []}, 400, "at least one message"),
    ({"messages": [{"role": "user", "content": "and " * 900}]}, 400, "and the model reads 600; send a shorter one"),
])
def test_bad_requests_get_one_sentence(change, status, said, client):
    request = {"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**request, extra_body=change) if "model" not in change and "messages" not in change else \
            client.chat.completions.create(**request | change)
    message = refused.value.body["message"]
    assert refused.value.status_code == status and said in message and "\n" not in message


def test_an_answer_gets_the_room_that_is_left():
    policy = TransformersPolicy(embedded_model("teacher-1"), embedded_tokenizer())
    asked = Asked("agent", (Turn("user", "one two three"),), seed=3)
    with Recorder(policy, sampling=Sampling(2.0)) as recorder:
        length = recorder.count(asked)
        recorder.positions = length + 4
        answer = recorder.answer(RecordedEpisode("short"), asked)
        assert answer.completion_tokens <= 4 and answer.prompt_tokens == length
        recorder.positions = length
        with pytest.raises(Refused, match="send a shorter one"):
            recorder.answer(RecordedEpisode("full"), asked)


@pytest.mark.parametrize("words, said", [
    (["nobody/nothing"], "HF_HUB_OFFLINE is set"),
    (["embedded", "--chat-template", "no"], "neither a file nor a shipped template"),
    (["embedded", "--api-key-env", "ZQ_KEY"], "wanted from ZQ_KEY, which is not set"),
    (["embedded", "--vllm", "http://127.0.0.1:1"], "cannot be asked"),
    (["embedded", "--record", "out/nowhere", "--host", "0.0.0.0"], "name the server's key by --api-key-env"),
])
def test_what_cannot_be_served(words, said, monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("ZQ_KEY", raising=False)
    done = CliRunner().invoke(app, ["serve", "model", *words])
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1
