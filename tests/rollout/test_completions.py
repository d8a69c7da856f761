"A server that completes ids, as vLLM's does: what it samples is recorded as if it were sampled here; the rest is refused."
import json
from contextlib import contextmanager

import httpx2
import pytest
from forks import started
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from composer_replication.core.errors import InputProblem
from composer_replication.core.serving import serve_app
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.checkpoint import served_checkpoint
from composer_replication.rollout.endpoint import foreign_episodes, serve_recorder
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy, completions_policy
from composer_replication.rollout.record import Recorder
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.read import read_traces

FIELDS = {"model", "prompt", "max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
          "stop_token_ids", "logprobs", "return_token_ids"}


@pytest.fixture(scope="module")
def policy():
    return TransformersPolicy(embedded_model("teacher-1"), embedded_tokenizer())


@contextmanager
def upstream(policy, models=("m",), change=lambda choice, asked: choice):
    "The policy behind vLLM's form of OpenAI's completions; `change` spoils an answer. Yields the address and what was asked."
    seen = []

    async def completions(request):
        asked = await request.json()
        assert set(asked) == FIELDS and asked["return_token_ids"] and asked["repetition_penalty"] == 1.0
        seen.append(asked)
        with policy.batch(Sampling(asked["temperature"], asked["top_p"], max(asked["top_k"], 0))) as batch:
            sample = batch.sample([0], [tuple(asked["prompt"])], [asked["max_tokens"]], [str(asked["seed"])])[0]
        logprobs = {"token_logprobs": list(sample.logprobs), "tokens": ["?"] * len(sample.ids),
                    "top_logprobs": [{"?": probability} for probability in sample.logprobs]}
        choice = {"index": 0, "text": "", "token_ids": list(sample.ids), "logprobs": logprobs}
        made = change(choice | {"prompt_token_ids": asked["prompt"]}, asked)
        if isinstance(made, str):
            return JSONResponse({"error": {"message": made}}, 400)
        return JSONResponse({"choices": [made]})

    async def listed(request):
        return JSONResponse({"object": "list", "data": [{"id": name, "max_model_len": 900} for name in models]})

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", listed)])
    with serve_app(app) as url:
        yield url, seen


def test_rollouts_are_those_of_the_same_weights_here(policy):
    rows, limits = world_rows(3, 1, "test"), RolloutConfig(max_turns=4, max_tokens=300, temperature=0.0)
    here = collect(policy, WorldEnv, rows, limits, trace_ids=["a", "b", "c"])
    with upstream(policy) as (url, _):
        served = completions_policy(url, embedded_tokenizer())
        there = collect(served, WorldEnv, rows, limits, trace_ids=["a", "b", "c"])
    assert served.name == "m" and served.positions == 900
    assert [r.completion_ids for r in there] == [r.completion_ids for r in here]
    assert sum(len(r.trace.sampled_turns) for r in here) > 3
    for one, two in zip(here, there):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5) and one.completion_mask == two.completion_mask


def test_an_agent_is_recorded_with_what_the_server_sampled(policy, tmp_path):
    with (upstream(policy) as (url, seen),
          Recorder(completions_policy(f"{url}/v1/", embedded_tokenizer()), max_tokens=24) as recorder,
          serve_recorder(recorder, foreign_episodes(tmp_path, "m"), "m") as own,
          httpx2.Client(base_url=own, timeout=60) as client):
        messages = [{"role": "user", "content": "Hello"}]
        for _ in range(2):
            body = {"model": "m", "messages": messages, "logprobs": True}
            said = client.post("/e/one/v1/chat/completions", json=body).json()
            messages += [said["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        assert said["choices"][0]["logprobs"]["content"]
    trace, = read_traces(tmp_path / "one.jsonl")
    first, second = (trace.turns[i] for i in trace.sampled_turns)
    prompts = [asked["prompt"] for asked in seen[2:]]  # the first two are the probe
    before = [*prompts[0], *first.token_ids]
    assert prompts[1][: len(before)] == before and second.token_ids


@pytest.mark.parametrize("spoil, said", [
    (lambda choice, asked: choice | {"token_ids": None}, "no token ids with their log-probabilities; serve by vLLM 0.10.2"),
    (lambda choice, asked: choice | {"logprobs": None}, "no token ids with their log-probabilities"),
    (lambda choice, asked: choice | {"logprobs": choice["logprobs"] | {"top_logprobs": [{"?": -1.0}]}}, "processed_logprobs"),
    (lambda choice, asked: "no such\nmodel", "answers /v1/completions with 400: .*no such"),
])
def test_what_a_server_does_not_give_is_one_sentence_before_anything_is_sampled(policy, spoil, said):
    with upstream(policy, change=spoil) as (url, _), pytest.raises(InputProblem, match=said) as refused:
        completions_policy(url, embedded_tokenizer())
    assert "\n" not in str(refused.value)


def test_which_model_and_which_address(policy):
    with upstream(policy, ("base", "tuned")) as (url, seen):
        with pytest.raises(InputProblem, match="serves base, tuned, and not 'mine'"):
            completions_policy(url, embedded_tokenizer(), "mine")
        assert completions_policy(url, embedded_tokenizer(), "tuned").name == "tuned"
        assert {asked["model"] for asked in seen} == {"tuned"}
    for address in (url, "nowhere", "http://"):
        with pytest.raises(InputProblem, match="cannot be asked"):
            completions_policy(address, embedded_tokenizer())


def test_a_failed_turn_fails_its_request_and_the_next_is_answered(policy):
    broken = []
    with (upstream(policy, change=lambda choice, asked: "busy" if broken else choice) as (url, _),
          Recorder(completions_policy(url, embedded_tokenizer()), max_tokens=8) as recorder,
          serve_recorder(recorder, foreign_episodes(None, "m"), "m") as own, httpx2.Client(base_url=own, timeout=60) as client):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
        broken.append(1)
        failed = client.post("/e/one/v1/chat/completions", json=body)
        broken.clear()
        assert (failed.status_code, client.post("/e/one/v1/chat/completions", json=body).status_code) == (500, 200)
        assert "busy" in failed.json()["error"]["message"]


def test_a_checkpoint_gives_tokenizer_and_ends_and_no_weights_are_read(policy, tmp_path):
    embedded_tokenizer().save_pretrained(tmp_path)
    policy.model.config.save_pretrained(tmp_path)
    with upstream(policy) as (url, seen):
        plain = served_checkpoint(str(tmp_path), url)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
        assert served_checkpoint(str(tmp_path), url).stops == plain.stops | {7, 9} == set(seen[-1]["stop_token_ids"])


@pytest.mark.process
def test_the_command_records_what_the_server_samples(policy, tmp_path):
    with upstream(policy) as (url, seen):
        words = ["serve", "model", "embedded", "--vllm", url, "--record", str(tmp_path), "--name", "mine", "--port", "0"]
        with (started(*words, "--json") as (_, line, _),
              httpx2.Client(base_url=json.loads(line)["url"].removesuffix("/v1"), timeout=60) as client):
            body = {"model": "mine", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
            assert client.post("/e/one/v1/chat/completions", json=body).status_code == 200
            assert client.post("/e/one/end", json={"reward": 1.0}).json()["reward"] == 1.0
    trace, = read_traces(tmp_path / "one.jsonl")
    assert len(seen) == 3 and trace.reward == 1.0 and trace.turns[-1].token_ids and len(trace.turns[-1].token_ids) <= 9
