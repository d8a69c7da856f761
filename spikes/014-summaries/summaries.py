"""Spike 014: episodes longer than their context, with summaries, cut from the left, and without a limit. Go on with its runs.

    .venv/bin/python spikes/014-summaries/summaries.py               # seeds 0 to 9, some 2 CPU minutes each
    .venv/bin/python spikes/014-summaries/summaries.py --seed 1000   # a look; nothing that the page reads

Each seed that ends is a file of `runs`; one that was killed is made again. 014-summaries.ipynb states hypotheses and thresholds.
"""
import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch

from composer_replication.core.files import write_json
from composer_replication.core.tools import ToolResult, refusal
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.rollout.compaction import REQUEST, Compacting, compaction_metrics
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy, TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.tree.build import build_tree
from composer_replication.tree.template import probe_template

HERE = Path(__file__).parent
SEEDS = range(10)
ALARMS, READS = "QXZK", 6  # letters that stand nowhere else; files of an episode
ASK = "Now say what you found."
CONTEXT = 110  # tokens; an episode without a limit takes some 200
ARMS = {"no limit": 0, "summary": CONTEXT, "left": CONTEXT}
LIMITS = RolloutConfig(max_turns=12, max_tokens=1600, max_turn_tokens=80, seed=0)
DEMONSTRATIONS, STEPS, BATCH, RATE = 100, 200, 8, 1e-3  # episodes of each arm; supervised steps, rows of each, rate
CALLS = 0.2  # share of the demonstrated calls, all alike, that is learnt from
TASKS = 48  # measured, of no training task


class Alarms:
    "Six files, which come in order and once. Each of four alarms stands in one of them or in none; the answer names those that stood in any."

    tools = ({"type": "function", "function": {"name": "next", "description": "Read on.", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},)

    def reset(self, task_id, **row):
        rng = random.Random(task_id)
        self.place, self.read = {alarm: rng.choice([rng.randrange(READS), None]) for alarm in ALARMS}, 0

    def call(self, call):
        if refused := refusal(call, self.tools):
            return refused
        if self.read == READS:
            return ToolResult("Error: there is no more.", "runtime_error")
        found = [alarm for alarm, place in self.place.items() if place == self.read]
        self.read += 1
        text = f"File {self.read}: {' '.join(found) or 'fine'}."
        return ToolResult(text if self.read < READS else f"{text} {ASK}")

    @property
    def facts(self):
        return tuple(alarm for alarm, place in self.place.items() if place is not None)

    def reward(self, answer=""):
        return float(self.read == READS and answer.strip() == listed("".join(self.facts)))

    def close(self):
        pass


def listed(text):
    "The alarms that stand in a text, each at its place."
    return " ".join(alarm if alarm in text else "." for alarm in ALARMS)


def rows(n, series):
    prompt = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "Read all files."}]
    return [{"task_id": f"{series}-{i}", "prompt": prompt} for i in range(n)]


def expert():
    "A policy that acts right on what its context shows."
    tokenizer = embedded_tokenizer()

    def say(text):
        if REQUEST[:20] in text:
            return f"{listed(text)} {ASK}" if ASK in text else listed(text)
        return listed(text) if ASK in text else '<|call|>{"name": "next", "arguments": {}}'

    def generate(ids, sampling, limits, seeds):
        made = [[*tokenizer.encode(say(tokenizer.decode(row)), add_special_tokens=False), min(policy.stops)] for row in ids]
        return made, [[0.0] * len(row) for row in made]

    policy = CallablePolicy(generate, tokenizer, "expert")
    return policy


def played(policy, arm, tasks, config=LIMITS):
    return collect(policy, Compacting(Alarms, CONTEXT, arm) if ARMS[arm] else Alarms, tasks, config)


def warmed(seed):
    "A policy that fits demonstrations of all three arms, an equal number of episodes of each."
    tokenizer, model = embedded_tokenizer(), embedded_model("teacher-1").train()
    chat, rng, data = probe_template(tokenizer), random.Random(seed), []
    for arm in ARMS:
        shown = played(expert(), arm, rows(DEMONSTRATIONS, f"shown-{seed}"))
        for part in [part for rollout in shown for part in rollout.trace.parts()]:
            tree, turns = build_tree(part, chat), [turn for turn in part.turns if turn.role == "assistant"]
            labels = [-100] * len(tree.ids)
            for span, turn in zip(tree.spans, turns, strict=True):
                if not turn.tool_calls or rng.random() < CALLS:
                    labels[span.start:span.end] = tree.ids[span.start:span.end]
            data.append((list(tree.ids), labels))
    data.sort(key=lambda row: len(row[0]))  # rows of a step have about one length
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    for step in range(STEPS):
        at = rng.randrange(len(data) - BATCH + 1)
        batch, width = data[at:at + BATCH], len(data[at + BATCH - 1][0])
        ids, labels = (torch.tensor([row[i] + [pad] * (width - len(row[i])) for row in batch]) for i, pad in enumerate((0, -100)))
        loss = model(ids, labels=labels).loss  # causal, and padding comes last: no mask is needed
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
