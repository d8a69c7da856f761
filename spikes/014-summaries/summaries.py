"""Spike 014: episodes longer than their context, with summaries, cut from the left, and without a limit. Go on with its runs.

    .venv/bin/python spikes/014-summaries/summaries.py               # the start, and seeds 0 to 9, some 5 CPU minutes in all
    .venv/bin/python spikes/014-summaries/summaries.py --seed 1000   # a look; nothing that the page reads

Each seed that ends is a file of `runs`; one that was killed is made again. 014-summaries.ipynb states hypotheses and thresholds.
"""
import argparse
import json
import random
import re
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from composer_replication.core.files import replacing, write_json
from composer_replication.core.tools import ToolResult
from composer_replication.envs.toy.env import WorldEnv, make_world, world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.warm_up import supervised_rows
from composer_replication.rollout.compaction import REQUEST, Compacting, compaction_metrics
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy, TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.tree.template import probe_template

HERE = Path(__file__).parent
SEEDS = range(10)
CONTEXT = 200  # tokens; an episode without a limit takes some 390
ARMS = {"no limit": 0, "summary": CONTEXT, "left": CONTEXT}
LIMITS = RolloutConfig(max_turns=10, max_tokens=1600, max_turn_tokens=120, temperature=0)
STAGES = (("shown",), 300), (("shown-1", "shown-2", "shown-3"), 300)  # series of 128 demonstrated tasks, supervised steps
BATCH, RATE = 8, 7e-4  # rows of a step
TASKS = 32  # measured, of no training task


LONG = "These are tests. They call the function, look at what it gives, and fail where that is not what its text says. " * 2


class ReadOnce(WorldEnv):
    "The toy world where a file is shown once, and nothing is written before the tests, here a long text, were read."

    def reset(self, **row):
        super().reset(**row)
        self.shown = set()

    def act(self, role, arguments):
        path = arguments.get("path")
        if role == "read" and path in self.shown:
            return ToolResult(f"Error: {path} was shown before.", "runtime_error")
        if role == "write" and not self.shown & set(self.task.tests):
            return ToolResult("Error: read the tests first.", "runtime_error")
        self.shown |= {path} if role == "read" else set()
        return ToolResult(LONG) if role == "read" and path in self.task.tests else super().act(role, arguments)

    @property
    def facts(self):
        return self.task.path, self.task.function.docstring


def name(row):
    return re.search(r"`(\w+)`", row["prompt"][-1]["content"])[1]


def expert(tasks):
    "A policy that acts right on what its context shows; where the function's docstring is gone, it guesses."
    tokenizer, known = embedded_tokenizer(), {name(row): make_world(row["seed"], row["split"]) for row in tasks}

    def say(text):
        task = known[re.search(r"Write the body of `(\w+)`", text)[1]]
        context, (tests,) = text.partition("again.")[2], task.tests
        read, written = LONG[:20] in context or "Tests read." in context, "|>written" in context or "Written." in context
        if REQUEST[:20] in context:
            doc = f" {task.function.docstring}." if task.function.docstring in context else ""
            return f"{task.path}:{doc}{' Tests read.' if read else ''}{' Written.' if written else ''}"

        def call(role, **arguments):
            tool = next(tool for tool in task.tools if tool.role == role)
            named = {tool.arguments[key]: value for key, value in arguments.items()}
            return "<|call|>" + json.dumps({"name": tool.name, "arguments": named})

        if "0 failed" in context or "1 failed" in context:
            return "Done."
        if written:
            return call("test")
        if read:
            guess = f"def {task.function.name}(a, b):\n    return a\n"
            return call("write", path=task.path, text=task.function.code if task.function.docstring in context else guess)
        if task.function.docstring in context:
            return call("read", path=tests)
        return call("read", path=task.path) if task.path in context else call("list", path=".")

    def generate(ids, sampling, limits, seeds):
        made = [[*tokenizer.encode(say(tokenizer.decode(row)), add_special_tokens=False), min(policy.stops)] for row in ids]
        return made, [[0.0] * len(row) for row in made]

    policy = CallablePolicy(generate, tokenizer, "expert")
    return policy


def played(policy, arm, tasks, config=LIMITS):
    return collect(policy, Compacting(ReadOnce, CONTEXT, arm) if ARMS[arm] else ReadOnce, tasks, config)


def start():
    "A policy that fits demonstrations of all three arms, an equal number of episodes of each; trained once, for all seeds."
    tokenizer, model = embedded_tokenizer(), embedded_model("teacher-1")
    for number, (names, steps) in enumerate(STAGES):
        folder, data = HERE / "runs" / f"stage-{number}", []
        if folder.exists():
            model = AutoModelForCausalLM.from_pretrained(folder)
            continue
        for series in names:
            tasks = list({name(row): row for row in world_rows(128, series, "train")}.values())  # no name twice
            shown = [part for arm in ARMS for made in played(expert(tasks), arm, tasks) for part in made.trace.parts()]
            data += supervised_rows(shown, probe_template(tokenizer))
        data.sort(key=lambda row: len(row["input_ids"]))  # rows of a step have about one length
        fit(model.train(), data, steps)
        with replacing(folder) as partial:
            model.save_pretrained(partial)
    return TransformersPolicy(model.eval(), tokenizer)


def fit(model, data, steps):
    rng, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        at = rng.randrange(len(data) - BATCH + 1)
        batch, width = data[at:at + BATCH], len(data[at + BATCH - 1]["input_ids"])
        ids, labels = (torch.tensor([row[name] + [pad] * (width - len(row[name])) for row in batch])
                       for name, pad in (("input_ids", 0), ("labels", -100)))
        loss = model(ids, labels=labels).loss  # causal, and padding comes last: no mask is needed
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(step, loss.item(), flush=True)


def run(policy, seed):
    found, tasks = {"seed": seed}, world_rows(TASKS, f"measured-{seed}", "test")
    for arm in ARMS:
        began, made = time.process_time(), played(policy, arm, tasks)
        endings = [r.ending.value for r in made]
        found[arm] = {"passed": [r.reward or 0.0 for r in made], "endings": {e: endings.count(e) for e in sorted(set(endings))},
                      "sampled": float(np.mean([r.sampled for r in made])), **compaction_metrics([r.counts for r in made]),
                      "seconds": time.process_time() - began}
    return found


def main():
    parser = argparse.ArgumentParser(description="Go on with the runs of spike 014.")
    parser.add_argument("--seed", type=int, action="append", help="only this one")
    torch.set_num_threads(1)
    asked, policy = parser.parse_args(), start()
    for seed in asked.seed or SEEDS:
        out = HERE / "runs" / f"{seed}.json"
        if not out.exists():
            found = run(policy, seed)
            write_json(out, found)
            print(seed, {arm: float(np.mean(found[arm]["passed"])) for arm in ARMS}, flush=True)


if __name__ == "__main__":
    main()
