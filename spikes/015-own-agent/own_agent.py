"""Spike 015: SmolLM2-135M in mini-swe-agent on SQL questions: demonstrations, a short warm-up on them, a few steps of training.

    SMOLLM2=FOLDER AGENTS=FOLDER .venv/bin/python spikes/015-own-agent/own_agent.py

SMOLLM2 is the model's folder, AGENTS one with mini-swe-agent 2.4.6 (`pip install --target`). What is done stays in `runs`;
a run that was killed goes on from there. 015-own-agent.ipynb says what was asked.
"""
import json
import os
import time
from pathlib import Path

import torch

from composer_replication.core.files import write_json
from composer_replication.core.trace import ToolCall, Turn
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import sql_rows, task_of
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import latest_traces, run_recipe
from composer_replication.report.run import RunPage
from composer_replication.rollout.agents import Agent, AgentFactory
from composer_replication.rollout.loop import collect
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.export import write_traces

RUNS = Path(__file__).parent / "runs"
COMMAND = load_recipe("agent-mini-swe", estimating=True).arguments.agent["command"].replace(  # a prompt shorter than mini's own
    " -t ", " -c mini.yaml -c agent.instance_template={{{{task}}}} -t ")
AGENT = {"command": COMMAND, "path": os.environ["AGENTS"], "seconds": 600}
LIMITS = RolloutConfig(max_turns=4, max_tokens=1200, max_turn_tokens=128, tool_workers=8)
SHOWN, STEPS = 24, 4
SCHEMA = ("python -c \"import sqlite3; [print(t[0]) for t in sqlite3.connect('database.db')"
          ".execute('SELECT sql FROM sqlite_master')]\"")


class Expert:
    "Looks at the schema, writes the reference query, and submits."

    name, patience = "expert", 60.0

    def __init__(self, questions):
        self.questions = questions  # text -> the query

    def reply(self, trace, sampling, limit, seed):
        asked = next(t.content for t in trace.turns if t.role == "user")
        query = next(query for question, query in self.questions.items() if question in asked)
        commands = [SCHEMA, f"cat > answer.sql <<'E'\n{query}\nE", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
        command = commands[sum(t.role == "assistant" for t in trace.turns)]
        return Turn("assistant", "", tool_calls=(ToolCall("bash", {"command": command}),)), False, 1


def demonstrations():
    path = RUNS / "demonstrations.jsonl"
    if not path.exists():
        rows = sql_rows(SHOWN, "spike-015-shown", "train", ["easy"])
        expert = Expert({row["prompt"][-1]["content"]: task_of(row["task_id"]).reference for row in rows})
        played = collect(expert, AgentFactory(SqlEnv, Agent(**AGENT)), rows, RolloutConfig(max_turns=4, tool_workers=2))
        print([(r.ending.value, r.reward, r.problem) for r in played][:3], sum(r.reward or 0 for r in played), flush=True)
        RUNS.mkdir(exist_ok=True)
        write_traces([r.trace for r in played], path)
    return path


def main():
    torch.set_num_threads(1)
    shown, began = demonstrations(), time.process_time()
    stage = {"folder": str(RUNS / "warm-up"), "traces": [str(shown)], "steps": 12, "batch_size": 4, "learning_rate": 1e-4}
    log = []

    def tell(entry):
        log.append(entry)
        print(entry, flush=True)

    done = run_recipe(load_recipe("agent-mini-swe", {
        "model": os.environ["SMOLLM2"], "task": "sql", "tasks": "easy", "train_rows": "8", "held_out_rows": "0",
        "agent": json.dumps(AGENT), "warm_up": json.dumps(stage), "output_dir": str(RUNS / "out"),
        "resume": "true", "save_steps": "1", "bf16": "true",
        "max_steps": str(STEPS), "gradient_checkpointing": "false", "max_completion_length": str(LIMITS.max_tokens),
        "max_turns": str(LIMITS.max_turns), "max_turn_tokens": str(LIMITS.max_turn_tokens)}), tell,
        lambda trainer, record: [RunPage(record, lambda: latest_traces(trainer), trainer.hint_source)])
    write_json(RUNS / "log.json", {"log": log, "cpu_seconds": time.process_time() - began, "checkpoint": str(done.checkpoint)})


if __name__ == "__main__":
    main()
