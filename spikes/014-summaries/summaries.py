"""Spike 014: episodes longer than their context, with summaries, cut from the left, and without a limit. Go on with the plan's runs.

    .venv/bin/python spikes/014-summaries/summaries.py               # seeds 0 to 9, some 2 CPU minutes each
    .venv/bin/python spikes/014-summaries/summaries.py --seed 1000   # a look; nothing that the page reads

Each seed that ends is a file of `runs`; one that was killed is made again. 014-summaries.ipynb states hypotheses and thresholds.
"""
import argparse
import random
import re
import time
from pathlib import Path

import numpy as np
import torch

from composer_replication.core.files import write_json
from composer_replication.core.tools import ToolResult, refusal
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.warm_up import supervised_rows
from composer_replication.rollout.compaction import REQUEST, Compacting, compaction_metrics
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy, TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.tree.template import probe_template

HERE = Path(__file__).parent
SEEDS = range(10)
WORDS = "port lamp cache timer queue label limit depth width token wheel bridge engine signal garden market".split()
READS = 6  # files of an episode
CONTEXT = 150  # tokens; an episode without a limit takes some 300
ARMS = {"no limit": 0, "summary": CONTEXT, "left": CONTEXT}
LIMITS = RolloutConfig(max_turns=12, max_tokens=1600, max_turn_tokens=80, seed=0)
DEMONSTRATIONS, STEPS, BATCH, RATE = 60, 250, 8, 2e-3  # episodes of each arm; supervised steps, rows of each, rate
REST = "The rest of this file is not needed for any answer."  # of every file
TASKS = 64  # measured, of no training task


class Codes:
    "Six files with a code each, which come in order and once; the last one asks for the code of one of them, drawn evenly."

    tools = ({"type": "function", "function": {"name": "next", "description": "Read on.", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},)

    def reset(self, task_id, **row):
        rng = random.Random(task_id)
        self.codes = dict(zip(rng.sample(WORDS, READS), rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", READS)))
        self.asked, self.read = rng.choice([*self.codes]), 0

    def call(self, call):
        if refused := refusal(call, self.tools):
            return refused
        if self.read == READS:
            return ToolResult("Error: there is no more.", "runtime_error")
        name, code = [*self.codes.items()][self.read]
        self.read += 1
        return ToolResult(f"{name} {code}. {REST}" + (f" Now say the code of {self.asked}." if self.read == READS else ""))

    @property
    def facts(self):
        return tuple(f"{name} {code}" for name, code in self.codes.items())

    def reward(self, answer=""):
        return float(self.read == READS and answer.strip() == self.codes[self.asked])

    def close(self):
        pass


def rows(n, series):
    prompt = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "Read all files."}]
    return [{"task_id": f"{series}-{i}", "prompt": prompt} for i in range(n)]


def expert():
    "A policy that acts right on what its context shows; it guesses a code that it does not show."
    tokenizer = embedded_tokenizer()

    def say(text):
        seen = dict(re.findall(rf"\b({'|'.join(WORDS)}) ([A-Z])\b", text))
        asked = re.search(r"Now say the code of ([a-z]+)", text)
        if REQUEST[:20] in text:
            return " ".join([*(f"{name} {code}" for name, code in seen.items()), *([f"{asked[0]}."] if asked else [])])
        if asked:
            return seen.get(asked[1]) or random.Random(text).choice([*seen.values()])
        return '<|call|>{"name": "next", "arguments": {}}'

    def generate(ids, sampling, limits, seeds):
        made = [[*tokenizer.encode(say(tokenizer.decode(row)), add_special_tokens=False), min(policy.stops)] for row in ids]
        return made, [[0.0] * len(row) for row in made]

    policy = CallablePolicy(generate, tokenizer, "expert")
    return policy


def played(policy, arm, tasks, config=LIMITS):
    return collect(policy, Compacting(Codes, CONTEXT, arm) if ARMS[arm] else Codes, tasks, config)


def warmed(seed):
    "A policy that fits demonstrations of all three arms, an equal number of episodes of each."
    tokenizer, model = embedded_tokenizer(), embedded_model("teacher-1").train()
    shown = [part for arm in ARMS for rollout in played(expert(), arm, rows(DEMONSTRATIONS, f"shown-{seed}")) for part in rollout.trace.parts()]
    data = supervised_rows(shown, probe_template(tokenizer))
    rng, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    for step in range(STEPS):
        batch = rng.sample(data, BATCH)
        width = max(len(row["input_ids"]) for row in batch)
        ids, labels = (torch.tensor([row[name] + [pad] * (width - len(row[name])) for row in batch]) for name, pad in (("input_ids", 0), ("labels", -100)))
        loss = model(ids, attention_mask=torch.arange(width) < torch.tensor([[len(row["input_ids"])] for row in batch]), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(step, loss.item(), flush=True)
    return TransformersPolicy(model.eval(), tokenizer), loss.item()


def run(seed):
    began = time.process_time()
    policy, loss = warmed(seed)
    found = {"seed": seed, "loss": loss, "seconds": {"warm-up": time.process_time() - began}}
    for arm in ARMS:
        began = time.process_time()
        made = played(policy, arm, rows(TASKS, f"measured-{seed}"))
        endings = [r.ending.value for r in made]
        found[arm] = {"passed": [r.reward or 0.0 for r in made], "endings": {e: endings.count(e) for e in set(endings)},
                      "sampled": float(np.mean([r.sampled for r in made])), **compaction_metrics([r.counts for r in made])}
        found["seconds"][arm] = time.process_time() - began
    return found


def main():
    parser = argparse.ArgumentParser(description="Go on with the runs of spike 014.")
    parser.add_argument("--seed", type=int, action="append", help="only this one")
    torch.set_num_threads(1)
    for seed in parser.parse_args().seed or SEEDS:
        out = HERE / "runs" / f"{seed}.json"
        if not out.exists():
            found = run(seed)
            write_json(out, found)
            print(seed, {arm: float(np.mean(found[arm]["passed"])) for arm in ARMS}, found["loss"], found["seconds"], flush=True)


if __name__ == "__main__":
    main()
