"""Agents as they ask: each plays the episodes of one training step, and what it was answered is recorded and learnt from.

Requests of Codex 0.171 and Claude Code 2.1 are written after what the programs themselves sent here; texts and tools are ours."""
import json
import os
from pathlib import Path

import agent_script
import pytest
import world
from agent_script import Workspace

from composer_replication.rollout.agents import Agent, AgentFactory
from composer_replication.rollout.types import Ending

pytestmark = pytest.mark.trainer
SHARED = '''
import json, pathlib, urllib.request

def sent(url, key, body):
    "The answer, or the events of a stream."
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key, "x-api-key": key}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as reply:
        if not body.get("stream"):
            return json.load(reply)
        return [json.loads(line[6:]) for line in reply if line.startswith(b"data: {")]

def earn(workspace, said):
    pathlib.Path(workspace, "answer.txt").write_text(str(len(json.dumps(said)) % 5))

MISSING = "cat: plans.txt: No such file or directory"
'''
CODEX = SHARED + '''
CALL = {"type": "object", "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}, "sandbox_permissions": {
    "type": "string", "enum": ["use_default", "require_escalated"]}}, "required": ["cmd"], "additionalProperties": False}
TOOLS = [{"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False, "parameters": CALL},
         {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [
             {"type": "function", "name": "close_agent", "strict": False, "parameters": {"type": "object", "properties": {}}}]},
         {"type": "web_search", "external_web_access": True}]

def item(role, *texts):
    return {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}

def play(url, key, model, workspace, prompt):
    input, said = [item("developer", "You are a coding agent."), item("developer", "<skills>", "<permissions>"),
                   item("user", "<environment_context>"), item("user", prompt)], []
    for _ in range(2):
        events = sent(url + "/responses", key, {
            "model": model, "stream": True, "input": input, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a",
            "client_metadata": {"a": "b"}})
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert events[-1]["type"] == "response.completed" and done, events[-1]
        input, said = [*input, *done], [*said, *done]
        for made in done:
            if made["type"] == "function_call":
                input.append({"type": "function_call_output", "call_id": made["call_id"],
                              "output": "Process exited with code 1\\n" + MISSING})
    earn(workspace, said)
'''
CLAUDE = SHARED + '''
BASH = {"name": "Bash", "description": "Executes a command.", "input_schema": {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {"command": {"type": "string"},
    "timeout": {"type": "number"}}, "required": ["command"], "additionalProperties": False}}
KEPT = {"cache_control": {"type": "ephemeral"}}

def text(said, **more):
    return {"type": "text", "text": said} | more

def play(url, key, model, workspace, prompt):
    messages = [{"role": "user", "content": [text("<system-reminder>"), text(prompt, **KEPT)]},
                {"role": "system", "content": "Agents: none."}]
    told = []
    for _ in range(2):
        events = sent(url + "/messages?beta=true", key, {
            "model": model, "messages": messages, "tools": [BASH], "metadata": {"user_id": "{}"}, "max_tokens": 32000,
            "system": [text("x-anthropic-billing-header: a"), text("You are an agent.", **KEPT)], "stream": True,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}})
        blocks, arguments = [], {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            if event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[-1]
                for kind in {"text", "thinking", "signature"} & set(delta):
                    block[kind] = block.get(kind, "") + delta[kind]
                arguments[len(blocks) - 1] = arguments.get(len(blocks) - 1, "") + delta.get("partial_json", "")
        assert events[-1]["type"] == "message_stop" and blocks, events[-1]
        for number, block in enumerate(blocks):
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments.get(number) or "{}")
        told += blocks
        results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "Exit code 1\\n" + MISSING, "is_error": True}
                   for b in blocks if b["type"] == "tool_use"]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results or [text("Go on.")]}]
    earn(workspace, told)
'''
SMOLAGENTS = SHARED + '''
FILE = {"type": "object", "properties": {"file": {"type": "string", "description": "Its path."}}, "required": ["file"]}
ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": "Do it.", "parameters": given}}
         for name, given in (("cat", FILE), ("final_answer", ANSWER))]

def message(role, text):
    return {"role": role, "content": [{"type": "text", "text": text}]}

def play(url, key, model, workspace, prompt):
    messages, said = [message("system", "You solve tasks by tool calls."), message("user", "New task:\\n" + prompt)], []
    for _ in range(2):
        made = sent(url + "/chat/completions", key, {
            "model": model, "messages": messages, "stop": ["Observation:", "Calling tools:"], "tool_choice": "required",
            "tools": TOOLS})["choices"][0]["message"]
        said.append(made)
        for call in made.get("tool_calls") or ():  # none where the turn was cut
            wanted = {"cat": "file", "final_answer": "answer"}[call["function"]["name"]]
            assert isinstance(json.loads(call["function"]["arguments"])[wanted], str)
            messages += [message("assistant", "Calling tools:\\n" + repr([call])), message("user", "Observation:\\n" + MISSING)]
    earn(workspace, said)
'''
PYDANTIC_AI = SHARED + '''
PERSON = {"properties": {"name": {"enum": ["ada", "bob"], "type": "string"}, "age": {"enum": [7, 8], "type": "integer"}},
          "required": ["name", "age"], "type": "object", "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "final_result", "description": "The final response which ends this conversation",
                                         "parameters": PERSON, "strict": True}}

def play(url, key, model, workspace, prompt):
    messages, said = [{"role": "user", "content": prompt}], []
    for _ in range(2):
        made = sent(url + "/chat/completions", key, {
            "model": model, "stream": False, "messages": messages, "tool_choice": "required",
            "tools": [TOOL]})["choices"][0]["message"]
        said.append(made)
        call, = made["tool_calls"]
        person = json.loads(call["function"]["arguments"])
        assert person["name"] in ("ada", "bob") and person["age"] in (7, 8), person
        messages += [made, {"role": "tool", "tool_call_id": call["id"], "content": "Error: ada is unknown. Try again."}]
    earn(workspace, "a" * (person["age"] - 6 + 2 * (person["name"] == "ada")))
'''
REAL = {
    "smolagents": '''
from smolagents import OpenAIServerModel, ToolCallingAgent as Kind, tool
''', "smolagents-code": '''
from smolagents import CodeAgent as Kind, OpenAIServerModel, tool
''', "pydantic-ai": '''
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

class Person(BaseModel):
    name: Literal["ada", "bob"]
    age: Literal[7, 8]

def play(url, key, model, workspace, prompt):
    agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key=key)), output_type=Person)
    person = agent.run_sync(prompt).output
    assert isinstance(person, Person)
    pathlib.Path(workspace, "answer.txt").write_text(str(person.age - 6 + 2 * (person.name == "ada")))
'''}
SMOL = '''
@tool
def cat(file: str) -> str:
    """Read a file.

    Args:
        file: Its path.
    """
    raise FileNotFoundError(f"No such file or directory: '{file}'")

def play(url, key, model, workspace, prompt):
    agent = Kind(tools=[cat], model=OpenAIServerModel(model_id=model, api_base=url, api_key=key), max_steps=2)
    pathlib.Path(workspace, "answer.txt").write_text(str(len(str(agent.run(prompt))) % 5))
'''


def stepped(folder, program, **changes):
    "A trainer after one step, whose eight episodes the program played."
    for name in ("tree", "agent"):
        (folder / name).mkdir()
    (folder / "agent" / "mine.py").write_text(program)
    agent = Agent("mine:play", str(folder / "agent"), seconds=500, memory_mb=4096)
    factory = AgentFactory(lambda: Workspace(folder / "tree"), agent, folder / "log")
    return agent_script.trained_by(folder / "out", factory, world.rows(2), kind=agent_script.Named, **{
        "per_device_train_batch_size": 8, "max_completion_length": 200, "max_turn_tokens": 48, "alpha_sdpo": 1.0} | changes)


def check(trainer, turns):
    "Every episode is whole and scored, its sampled ids are masked in, and the step moved the weights."
    for rollout in trainer.rollouts:
        assert rollout.ending in (Ending.DONE, Ending.TOKENS) and rollout.reward is not None, rollout.problem
        assert len(rollout.trace.sampled_turns) >= turns
        assert sum(sum(s.completion_mask) for s in rollout.segments) == sum(len(rollout.trace.turns[i].token_ids)
                                                                           for i in rollout.trace.sampled_turns)
    log = trainer.state.log_history[0]
    assert len({r.reward for r in trainer.rollouts}) > 1
    assert any(grad.abs().max() > 1e-6 for grad in trainer.grads.values())
    return log


@pytest.mark.parametrize("form, forced, sites", [
    pytest.param(CODEX, False, True, id="codex"),
    pytest.param(CLAUDE, False, True, id="claude-code"),
    pytest.param(SMOLAGENTS, True, False, id="smolagents"),  # its results come as the user's text
    pytest.param(PYDANTIC_AI, True, True, id="pydantic-ai"),
])
def test_a_step_of_an_agents_form(form, forced, sites, tmp_path):
    if forced:
        pytest.importorskip("llguidance")
    trainer = stepped(tmp_path, form)
    log = check(trainer, 2)
    calls = sum(len(turn.tool_calls) for r in trainer.rollouts for turn in r.trace.turns)
    assert calls >= (len(trainer.rollouts) if forced else 1)
    assert any(turn.forced for r in trainer.rollouts for turn in r.trace.turns) is forced
    assert (log.get("sdpo/sites", 0) > 0) is sites, "the calls failed, and channel 2 found none of them"


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_step_of_the_agent_itself(name, tmp_path):
    pytest.importorskip("llguidance")
    path = os.environ.get("COMPOSER_AGENTS", "")
    if not Path(path, name.partition("-code")[0].replace("-", "_")).is_dir():
        pytest.skip(f"COMPOSER_AGENTS names no folder with {name.partition('-code')[0]}; make test-agents installs it")
    program = f"import pathlib, sys\nsys.path.insert(0, {json.dumps(path)})\n{REAL[name]}"
    program += SMOL if name.startswith("smol") else ""
    check(stepped(tmp_path, program, max_completion_length=400), 1)
