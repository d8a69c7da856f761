"An agent in a sandbox that plays rollouts of a trainer: its program, its workspace, and runs in processes of their own."

import os
import warnings
from pathlib import Path

import torch
import world
from kept_trainer import Kept
from kept_trainer import trained as trained_by

from composer_replication.envs.toy.env import WorldEnv
from composer_replication.rollout.agents import Agent, AgentFactory
from composer_replication.sandbox.base import open_sandbox

# It calls tools that fail, begins a second context with a summary, and earns what its texts are worth. By attempt, one asks
# nothing and one sends what no template carries before it goes on.
PROGRAM = """
import json, pathlib, sys, urllib.error, urllib.request
TOOLS = json.loads(%r)

def play(url, key, model, workspace, prompt):
    def ask(messages, **more):
        body = json.dumps({"model": model, "messages": messages, "tools": TOOLS, "max_tokens": 24} | more).encode()
        request = urllib.request.Request(url + "/chat/completions", body, {"Content-Type": "application/json", "x-api-key": key})
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

    number, said = int(url.split("/e/")[1].split("/")[0]), []
    pathlib.Path(workspace, "answer.txt").write_text("0")
    if "silent" in prompt and number %% 2:
        raise SystemExit("nothing to ask")
    messages = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": prompt}]
    for _ in range(2):
        message = ask(messages)
        said.append(json.dumps(message))
        messages.append(message)
        for call in message.get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Error: No such file or directory: 'x'"})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": "Go on."})
    if number %% 4 != 3:
        said.append(json.dumps(ask([{"role": "user", "content": "Summary: nothing is there. Go on."}])))
    pathlib.Path(workspace, "answer.txt").write_text(str(len("".join(said)) %% 5))
"""


class Workspace:
    "A folder of a sandbox; it earns the number that is left in it."

    tools, mounts, sandbox = (), {}, None

    def __init__(self, tree):
        self.tree = tree

    def reset(self, **row):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.sandbox = open_sandbox(self.tree, kind="local-unsafe", mounts=self.mounts)

    def call(self, call):
        raise AssertionError("an agent has tools of its own")

    def reward(self, answer=""):
        return float(self.sandbox.read("answer.txt"))

    def close(self):
        if self.sandbox is not None:
            self.sandbox.close()


def factory(folder):
    "Episodes of the program in workspaces."
    import json

    tools = json.dumps([t for t in WorldEnv().tools if t["function"]["name"] in ("list_files", "cat")])
    for name in ("tree", "agent"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "agent" / "mine.py").write_text(PROGRAM % tools)
    return AgentFactory(
        lambda: Workspace(folder / "tree"), Agent("mine:play", str(folder / "agent"), seconds=60), folder / "log"
    )


class Named(Kept):
    "Gradients by the name of the weight."

    @property
    def grads(self):
        return dict(zip((name for name, _ in self.student.named_parameters()), self.steps[-1]))


def trained(folder, environment_factory=None, **changes):
    "A trainer after a step on two tasks, of which the second has silent attempts; without a factory the program plays."
    rows, small = world.rows(2), {"per_device_train_batch_size": 8, "max_completion_length": 160}
    rows[1]["prompt"][-1]["content"] += " silent"
    return trained_by(folder / "out", environment_factory or factory(folder), rows, kind=Named, **small | changes)


def main(job):
    "A step in a process of its own, as `ranks.jobs` starts it; what it leaves goes to a file of its rank."
    os.environ.update(job["env"])
    os.dup2(os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    for task in job["tasks"]:
        rank = os.environ.get("RANK", "0")
        trainer = trained(Path(task["out"]) / rank, **task["settings"])
        rollouts = [
            (r.trace.trace_id, r.ending.value, r.reward, [s.completion_ids for s in r.segments]) for r in trainer.rollouts
        ]
        torch.save(
            {"grads": trainer.grads, "rollouts": rollouts, "log": trainer.state.log_history[0]},
            Path(task["out"]) / f"{rank}.pt",
        )
