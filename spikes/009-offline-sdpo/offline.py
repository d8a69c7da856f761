"""States, arms and runs of spike 009; the notebook and the tests share them.

    SMOLLM2=FOLDER .venv/bin/python spikes/009-offline-sdpo/offline.py --minutes 60

goes on with the runs of `plan`, in its order, and keeps each one in runs.jsonl.gz as it ends. A row says the device it ran on.
"""
import argparse
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from multiprocessing import get_context
from pathlib import Path

import orjson
import torch

from composer_replication.core.files import read_jsonl, write_jsonl
from composer_replication.core.trace import Trace, Turn
from composer_replication.experiments.hint_score import Repair, control_hints, next_actions, repairs
from composer_replication.hints.layers import default_composite
from composer_replication.hints.text import action_text
from composer_replication.losses.channels import (
    SDPO_DIVERGENCE,
    at,
    pair_logprobs,
    pair_logps,
    preference_loss,
    reference_logps,
    sdpo_terms,
    teacher_states,
)
from composer_replication.losses.chunked import lm_head
from composer_replication.losses.compose import compose_loss
from composer_replication.losses.divergences import Divergence
from composer_replication.recipes.checkpoint import checkpoint_tokenizer, load_checkpoint
from composer_replication.replay.pairs import DPOPair
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.sampling import Sampling
from composer_replication.traces.read import read_traces
from composer_replication.traces.siblings import action_key, failed_turns
from composer_replication.training.teacher import clone_policy, make_teacher
from composer_replication.tree.build import Tree, build_tree
from composer_replication.tree.chat import ChatFormat, TemplateProblem
from composer_replication.tree.forward import forward_trunk
from composer_replication.tree.pack import PackedBatch, pack_trees
from composer_replication.tree.template import probe_template
from composer_replication.tree.text import AlignmentError

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from named_values import without, wrong_name  # noqa: E402

MAX_TOKENS = 256  # of a state with the action that failed
TEST, DEV = 7, 3  # databases; the others are for training
SIZES = {"test": 48, "dev": 24, "sound test": 24, "sound dev": 12}  # the rest: all tasks of their databases
STEPS, BATCH, RATE, FACTORS = 20, 3, 2e-5, (1, 3, 10)
SEEDS, TUNING = (0, 1, 2, 3, 4), 100
SOUND = 0.02  # nats a token that the loss on sound turns may rise by
ACTED, ACTED_TOKENS = 200, 48  # states in which the model itself acts, and the most that it may say


# ---- states

@dataclass(frozen=True)
class State:
    "A recorded error turn with the hints to train with, or a trace whose turns are all sound."

    split: str  # "train", "dev", "test", "sound dev" or "sound test"
    group: str  # its database
    trace: Trace  # up to the observation after the action that worked; a sound one whole
    turn: int = -1  # of the action that failed; -1 for a sound trace
    hints: dict[str, str] | None = None  # for training, by name

    @property
    def task(self) -> str:
        return self.trace.task_id or self.trace.trace_id

    @cached_property
    def pair(self) -> DPOPair:
        "The action that worked over the one that failed."
        return next_actions(self.trace)[self.turn]

    def hint(self, name: str) -> str:
        "A hint for training; `unnamed` is the own one without the name that the failed action got wrong."
        if name != "unnamed":
            return self.hints[name]
        value = wrong_name(self.hints["own"], action_text(self.trace.turns[self.turn]))
        return without(self.hints["own"], value) if value else self.hints["own"]

    def tree(self, chat: ChatFormat, hint: str | None = None, acted: Turn | None = None) -> Tree:
        """The state, what was done in it (as recorded, or by the model itself), behind a hint too, and the pair.

        Raises as `build_tree`, and `AlignmentError` where a branch has no place."""
        if self.turn < 0:
            return build_tree(self.trace, chat)
        turns = self.trace.turns[:self.turn + 1] if acted is None else (*self.trace.turns[:self.turn], acted)
        pairs = [] if acted else [self.pair]
        tree = build_tree(replace(self.trace, turns=turns), chat, {self.turn: hint} if hint else {}, pairs)
        if tree.refused:
            raise AlignmentError(f"trace {self.trace.trace_id!r}, turn {self.turn}: {tree.refused[0].reason}")
        return tree

    def to_row(self) -> dict:
        about = {"split": self.split, "group": self.group, "turn": self.turn, "hints": self.hints}
        return about | {"trace": orjson.loads(self.trace.to_json())}

    @classmethod
    def from_row(cls, row: dict) -> "State":
        return cls(row["split"], row["group"], Trace.from_json(row["trace"]), row["turn"], row["hints"])


def databases(traces: Sequence[Trace]) -> dict[str, str]:
    "Task to database, from MySQL's own messages and from lists of tables; tasks of which neither is known are left out."
    named, listed, names = {}, {}, defaultdict(Counter)
    for trace in traces:
        for turn, after in zip(trace.turns, trace.turns[1:]):
            if found := re.search(r"Table '(\w+)\.\w+' doesn't exist", after.content):
                named[trace.task_id] = found[1]
            if re.search(r"show\s+tables\W*$", turn.content, re.I) and after.content.startswith("[("):
                listed[trace.task_id] = after.content
    for task, tables in listed.items():
        names[tables].update([named[task]] if task in named else [])
    known = {task: names[tables].most_common(1)[0][0] for task, tables in listed.items() if names[tables]}
    return known | named


def fits(state: State, chat: ChatFormat) -> bool:
    "Whether a state is short enough and each of its branches has a place."
    if state.turn >= 0 and state.turn not in next_actions(state.trace):
        return False
    try:
        return len(state.tree(chat, "Look first." if state.turn >= 0 else None).ids) <= MAX_TOKENS
    except (AlignmentError, TemplateProblem):
        return False


def spoken_for(cases: Sequence[Repair]) -> set[str]:
    "Tasks that spike 008 has drawn a site of, as its command draws them."
    return {cases[i].task for i in random.Random("0/sites").sample(range(len(cases)), min(900, len(cases)))}


def make_states(
    traces: Sequence[Trace],
    groups: dict[str, str],  # task to database
    chat: ChatFormat,
    drawn: Callable[[Sequence[Repair]], set[str]] = spoken_for,  # tasks that no test may use
) -> list[State]:
    "One error turn a task, databases apart; for test and development sound traces beside them."
    every, names = list(repairs(traces, default_composite(), Counter())), sorted(set(groups.values()))
    random.Random("009/databases").shuffle(names)
    split = {name: "test" if i < TEST else "dev" if i < TEST + DEV else "train" for i, name in enumerate(names)}
    by_task, sound = defaultdict(list), defaultdict(list)
    for case in every:
        if case.task in groups:
            by_task[case.task].append(case)
    for trace in traces:
        if trace.task_id in groups and not failed_turns(trace) and any(t.role == "assistant" for t in trace.turns):
            sound[trace.task_id].append(trace)
    used = drawn(every)
    states = list(_drawn(by_task, groups, split, used, chat)) + list(_drawn(sound, groups, split, used, chat))
    return _hinted(states, by_task)


def _drawn(by_task, groups, split, used, chat) -> Iterator[State]:
    "One item a task, at random among those that fit, in a random order, as many as wanted."
    tasks, taken = sorted(by_task), Counter()
    random.Random("009/tasks").shuffle(tasks)
    for task in tasks:
        sound, part = isinstance(by_task[task][0], Trace), split[groups[task]]
        name = f"sound {part}" if sound else part
        if (part == "test" and task in used) or (sound and part == "train") or taken[name] >= SIZES.get(name, len(tasks)):
            continue
        items = random.Random(f"009/{task}").sample(by_task[task], len(by_task[task]))
        made = (State(name, groups[task], i) if sound else State(name, groups[task], _cut(i), i.site.turn, {}) for i in items)
        if state := next((s for s in made if fits(s, chat)), None):
            taken[name] += 1
            yield state


def _cut(case: Repair) -> Trace:
    "The trace up to the observation after the action that worked."
    worked = int(case.pair.source.removeprefix("next:"))
    return replace(case.trace, turns=case.trace.turns[:worked + 2])


def _hinted(states, by_task) -> list[State]:
    "The states, those for training with every hint."
    hint = {(c.trace.trace_id, c.site.turn): c for cases in by_task.values() for c in cases}
    train = [s for s in states if s.split == "train"]
    texts = control_hints([hint[s.trace.trace_id, s.turn] for s in train], seed=9)
    past = "Another attempt at this task got past this point with: {}"  # as the layer `sibling` says it
    made = [replace(s, hints=t | {"exact": past.format(action_text(s.pair.chosen)),
                                  "wrong": past.format(action_text(s.pair.rejected))}) for s, t in zip(train, texts)]
    return made + [s for s in states if s.split != "train"]


# ---- arms

DIVERGENCES = {"forward": Divergence(beta=0.0), "reverse": SDPO_DIVERGENCE, "jsd": Divergence(beta=0.5),
               "forward, top 20": Divergence(beta=0.0, support="student_top_k", top_k=20)}
HINTED = ("own", "exact", "other site", "shuffled", "neutral", "wrong")
REFERENCES = ("dpo", "sft", "unlikelihood")


@dataclass(frozen=True)
class Run:
    "One training run."

    arm: str  # of `HINTED`, "unnamed", "ema" (a moving average without a hint), of `REFERENCES`, or "no update"
    divergence: str  # of `DIVERGENCES`; empty for a reference
    seed: int  # `TUNING`: measured on development tasks
    factor: int | None = None  # of the learning rate; None: what tuning says
    acted: bool = False  # at the model's own actions instead of the recorded ones

    @property
    def key(self) -> tuple:
        return self.arm, self.divergence, self.seed, self.factor, self.acted


def plan() -> list[Run]:
    "Every run, the primary contrast first; a learning rate is tuned before it is used."
    base = [Run("no update", "", TUNING), Run("no update", "", 0)]
    primary, others = ("own", "exact", "neutral"), ("other site", "shuffled", "wrong", "ema")
    first = [run for name in ("forward", "reverse") for run in _tuned(primary, name, SEEDS[:1])]
    more = [run for name in ("forward", "reverse") for run in _tuned(primary, name, SEEDS[1:], tune=False)]
    controls = _tuned(others, "forward", SEEDS) + _tuned(REFERENCES, "", SEEDS)
    controls += _tuned(("unnamed",), "forward", SEEDS)  # added on 26 November 2026, after spike 010
    acted = [replace(run, acted=True) for run in _tuned(primary, "forward", SEEDS, tune=False)]
    cheap = _tuned(("exact", "own"), "forward, top 20", SEEDS)  # added on 25 November 2026: no clause reads it
    rest = _tuned(others, "reverse", SEEDS) + acted + _tuned((*primary, *others), "jsd", SEEDS)
    return base + first + more + controls + rest + cheap


def _tuned(arms, divergence, seeds, tune=True):
    tuning = [Run(arm, divergence, TUNING, factor) for arm in arms for factor in FACTORS] if tune else []
    return tuning + [Run(arm, divergence, seed) for seed in seeds for arm in arms]


# ---- training

class Lab:
    "The model at its start, the states as trees, and the frozen teacher's states of those that were read once."

    def __init__(self, model: torch.nn.Module, tokenizer, states: Sequence[State], acted: dict[int, Turn] | None = None):
        self.model, self.tokenizer, self.chat = model.eval(), tokenizer, probe_template(tokenizer)
        self.pad = tokenizer.pad_token_id or 0
        self.start, self.acted = clone_policy(model), acted or {}
        self.by_split = defaultdict(list)
        for state in states:
            self.by_split[state.split].append(state)
        self.tree = cache(self._tree)
        self.frozen = cache(self._frozen)

    def reset(self):
        self.model.load_state_dict(self.start.state_dict())

    def _tree(self, split: str, number: int, hint: str | None = None, acted: bool = False) -> Tree:
        state = self.by_split[split][number]
        text = state.hint(hint) if hint else None
        return state.tree(self.chat, text, self.acted[number] if acted else None)

    def batch(self, numbers: Sequence[int], hint: str | None, acted: bool = False, split: str = "train") -> PackedBatch:
        made = pack_trees([self.tree(split, n, hint, acted) for n in numbers], self.pad)
        return made.to(next(self.model.parameters()).device)

    def _frozen(self, number: int, hint: str, acted: bool) -> torch.Tensor:
        "States `(n, hidden)` of the model at its start that reads the hint."
        return teacher_states(self.start, self.batch([number], hint, acted))

    def drawn(self, seed: int, acted: bool = False) -> list[list[int]]:
        "Training states of every step, those of a step about as long; the same for all arms of a seed."
        usable, rng = sorted(self.acted) if acted else range(len(self.by_split["train"])), random.Random(f"009/train/{seed}")
        numbers = rng.sample(list(usable), min(STEPS * BATCH, len(usable)))
        numbers.sort(key=lambda n: len(self.tree("train", n, None, acted).ids))
        steps = [numbers[i:i + BATCH] for i in range(0, len(numbers), BATCH)]
        return rng.sample(steps, len(steps))


def sdpo_loss(model, batch, teacher_hidden, teacher_head, divergence) -> torch.Tensor:
    "Channel 2, mean over the tokens of the failed turns."
    hidden, _ = forward_trunk(model, batch)
    return sdpo_terms(hidden, lm_head(model), teacher_hidden, teacher_head, batch, divergence).divergence.mean()


def reference_loss(name: str, model, start, batch) -> torch.Tensor:
    "What needs no hint: DPO on the pairs, the likelihood of the action that worked, the unlikelihood of the one that failed."
    if name == "dpo":
        return preference_loss(*pair_logps(model, batch), reference_logps(start, batch)).loss
    logprobs, failed = pair_logprobs(model, batch), batch.pair_sequence % 2 == 1
    if name == "sft":
        return -logprobs[~failed].mean()
    return -torch.log(-torch.expm1(logprobs[failed].clamp(max=-1e-6))).mean()  # arXiv:1908.04319, eq. 4


def losses(lab: Lab, run: Run) -> Iterator[tuple[torch.Tensor, object]]:
    "The loss of every step, and what to tell of the step once it is taken."
    teacher = make_teacher("ema", lab.model) if run.arm == "ema" else None
    for numbers in lab.drawn(run.seed, run.acted):
        if run.arm in REFERENCES:
            yield reference_loss(run.arm, lab.model, lab.start, lab.batch(numbers, None)), None
            continue
        batch = lab.batch(numbers, "own" if teacher else run.arm, run.acted)
        if teacher:  # reads what the student reads
            with teacher.using() as (average,):
                hidden = at(forward_trunk(average, batch)[0], batch.sdpo_student)
            side = hidden, lm_head(average)
        else:
            side = torch.cat([lab.frozen(n, run.arm, run.acted) for n in numbers]), lm_head(lab.start)
        yield sdpo_loss(lab.model, batch, *side, DIVERGENCES[run.divergence]), teacher


def train(lab: Lab, run: Run, rate: float) -> list[float]:
    "Train the lab's model from its start; the loss of every step, before it."
    lab.reset()
    optimizer, values = torch.optim.AdamW(lab.model.parameters(), lr=rate, weight_decay=0.0, fused=True), []
    for loss, teacher in losses(lab, run):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lab.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
        if teacher:
            teacher.after_step()
    return values


# ---- measuring

@torch.no_grad()
def measure(lab: Lab, split: str, width: int = 4) -> dict:
    """Without a hint, in the order of the states: log-probability a token of the actions that worked and that failed, and the
    loss on the turns of sound traces; nats."""
    order = sorted(range(len(lab.by_split[split])), key=lambda n: len(lab.tree(split, n).ids))
    of = {}
    for first in range(0, len(order), width):  # those of a pass are about as long
        numbers = order[first:first + width]
        sums, lengths = pair_logps(lab.model, lab.batch(numbers, None, split=split))
        means = (sums / lengths).tolist()
        of |= dict(zip(numbers, zip(means[0::2], means[1::2])))
    name = f"sound {split}"
    sound = [compose_loss(lab.model, lab.batch([n], None, split=name), 0.0, 0.0) for n in range(len(lab.by_split[name]))]
    return {"repaired": _short([of[n][0] for n in sorted(of)]), "failed": _short([of[n][1] for n in sorted(of)]),
            "sound": _short([s.lm_ce.item() for s in sound]), "sound_tokens": [s.metrics["lm/tokens"] for s in sound]}


def _short(values):
    return [round(v, 6) for v in values]


def contrast(row: dict, base: dict) -> float:
    "What training changed of log p(worked) - log p(failed), nats a token, mean over states."
    gaps = [[w - f for w, f in zip(r["repaired"], r["failed"])] for r in (row, base)]
    return sum(a - b for a, b in zip(*gaps)) / len(gaps[0])


def sound_rise(row: dict, base: dict) -> float:
    "By how much the loss on sound turns rose, nats a token."
    weights = base["sound_tokens"]
    return sum(w * (a - b) for w, a, b in zip(weights, row["sound"], base["sound"])) / sum(weights)


def tuned(rows: Sequence[dict], arm: str, divergence: str) -> int:
    """The learning rate's factor of an arm: the largest contrast on development tasks among those that keep the loss on sound
    turns, else the one that raises it least."""
    base = next(r for r in rows if r["arm"] == "no update" and r["seed"] == TUNING)
    tried = [r for r in rows if (r["arm"], r["divergence"], r["seed"]) == (arm, divergence, TUNING)]
    kept = [r for r in tried if sound_rise(r, base) <= SOUND]
    best = max(kept, key=lambda r: contrast(r, base)) if kept else min(tried, key=lambda r: sound_rise(r, base))
    return best["factor"]


# ---- runs

def one_run(lab: Lab, run: Run, rows: Sequence[dict]) -> dict:
    "Train and measure; a row of runs.jsonl.gz."
    began, factor, values = time.process_time(), run.factor, []
    if run.arm == "no update":
        lab.reset()
    else:
        factor = factor or tuned(rows, run.arm, run.divergence)
        values = train(lab, run, RATE * factor)
    row = dict(zip(("arm", "divergence", "seed", "asked", "acted"), run.key)) | {"factor": factor}
    row |= {"losses": _short(values)} | measure(lab, "dev" if run.seed == TUNING else "test")
    return row | {"cpu_seconds": round(time.process_time() - began, 1), "device": lab.model.device.type}


def read_rows(path: Path) -> list[dict]:
    return [row for _, row in read_jsonl(path)] if path.exists() else []


def key_of(row: dict) -> tuple:
    return row["arm"], row["divergence"], row["seed"], row["asked"], row["acted"]


def go_on(lab: Lab, path: Path, minutes: float = float("inf"), runs: Sequence[Run] | None = None, tell=print) -> list[dict]:
    "The runs that are not there yet, in the order of the plan; no run begins after so many minutes."
    end, rows = time.monotonic() + 60 * minutes, read_rows(path)
    for run in plan() if runs is None else runs:
        if run.key in set(map(key_of, rows)):
            continue
        if time.monotonic() > end:
            break
        if run.acted and not lab.acted:
            lab.acted = act(lab)
            write_acted(path.with_name("acted.jsonl.gz"), lab.acted)
        rows.append(one_run(lab, run, rows))
        write_jsonl(path, rows)
        tell(f"{len(rows)} of {len(plan())}: {run.key}, {rows[-1]['cpu_seconds']} s of CPU", flush=True)
    return rows


def shares(runs: Sequence[Run]) -> dict[str, list[Run]]:
    "Runs that one process does in their order, by name: an arm's tuning and its seeds; all at own actions."
    by = defaultdict(list)
    for run in runs:
        by["acted" if run.acted else f"{run.arm}, {run.divergence}"].append(run)
    return by


def share(model: str, folder: Path, name: str, end: float, runs: Sequence[Run]) -> None:
    "One process's runs, each kept in a file of this share as it ends."
    torch.set_num_threads(1)
    path = folder / f"runs-{name}.jsonl.gz"
    write_jsonl(path, read_rows(folder / "runs.jsonl.gz"))
    go_on(load(model, folder), path, (end - time.monotonic()) / 60, runs)


def merged(folder: Path) -> set[tuple]:
    "Put what shares have kept, also those of a call that was killed, into runs.jsonl.gz; the keys of all runs there."
    path, parts = folder / "runs.jsonl.gz", sorted(folder.glob("runs-*.jsonl.gz"))
    rows = {key_of(row): row for part in (path, *parts) for row in read_rows(part)}
    write_jsonl(path, rows.values())
    for part in parts:
        part.unlink()
    return set(rows)


def go_on_together(model: str, folder: Path, processes: int, minutes: float) -> None:
    "As `go_on`, in several processes. What was not trained is measured first; own actions take the rates that others tuned."
    end = time.monotonic() + 60 * minutes
    for chosen in (lambda run: run.arm == "no update", lambda run: not run.acted, lambda run: True):
        have = merged(folder)
        left = shares([run for run in plan() if chosen(run) and run.key not in have])
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            ended = [pool.submit(share, model, folder, name, end, runs) for name, runs in left.items()]
        merged(folder)
        for each in ended:
            each.result()


# ---- the model's own actions

def act(lab: Lab, width: int = 8) -> dict[int, Turn]:
    "What the model at its start does in states for training: sampled once. What worked in the trace is left out."
    policy, acted = TransformersPolicy(lab.start, lab.tokenizer), {}
    trees = [lab.tree("train", n) for n in range(min(ACTED, len(lab.by_split["train"])))]
    order = sorted(range(len(trees)), key=lambda n: len(trees[n].ids))
    for first in range(0, len(order), width):
        numbers = order[first:first + width]
        prompts = [list(trees[n].ids[:trees[n].spans[-1].start]) for n in numbers]
        with policy.batch(Sampling()) as batch:
            samples = batch.sample(numbers, prompts, [ACTED_TOKENS] * len(numbers), [f"009/acted/{n}" for n in numbers])
        acted |= {n: turn for n, sample in zip(numbers, samples) if (turn := _failed_turn(lab, n, sample))}
    return dict(sorted(acted.items()))


def _failed_turn(lab, number, sample):
    "A sampled turn, where it is not what worked and has a place in the tree."
    state, text = lab.by_split["train"][number], lab.tokenizer.decode(sample.ids, skip_special_tokens=True)
    turn = Turn("assistant", text, token_ids=tuple(sample.ids))
    try:
        state.tree(lab.chat, state.hints["own"], turn)
    except (AlignmentError, TemplateProblem):
        return None
    return None if action_key(turn) == action_key(state.pair.chosen) else turn


def read_acted(path: Path) -> dict[int, Turn]:
    return {row["state"]: Turn("assistant", row["content"], token_ids=tuple(row["ids"])) for row in read_rows(path)}


def write_acted(path: Path, acted: dict[int, Turn]) -> None:
    write_jsonl(path, ({"state": n, "content": t.content, "ids": list(t.token_ids)} for n, t in acted.items()))


def make_folder(folder: Path, model: str, traces: Sequence[Trace], groups: dict[str, str], drawn=spoken_for) -> None:
    "Write the states."
    states = make_states(traces, groups, probe_template(checkpoint_tokenizer(model)), drawn)
    write_jsonl(folder / "states.jsonl.gz", (state.to_row() for state in states))


def load(model: str, folder: Path = HERE) -> Lab:
    "Model, states and, where they are there, the model's own actions."
    checkpoint = load_checkpoint(model)
    states = [State.from_row(row) for row in read_rows(folder / "states.jsonl.gz")]
    return Lab(checkpoint.model, checkpoint.tokenizer, states, read_acted(folder / "acted.jsonl.gz"))


def main():
    parser = argparse.ArgumentParser(description="Go on with spike 009.")
    parser.add_argument("--model", default=os.environ.get("SMOLLM2"), help="folder of SmolLM2; else SMOLLM2 of the environment")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so many")
    parser.add_argument("--processes", type=int, default=1, help="that share the runs; a GPU carries a dozen")
    parser.add_argument("--states", metavar="TRACES", help="make states.jsonl.gz anew from InterCode's SQL traces, and stop")
    asked = parser.parse_args()
    if not asked.model:
        parser.error("name SmolLM2's folder: --model, or SMOLLM2 in the environment")
    torch.set_num_threads(1)
    if asked.states:
        traces = list(read_traces(asked.states))
        return make_folder(HERE, asked.model, traces, databases(traces))
    if asked.processes > 1:
        return go_on_together(asked.model, HERE, asked.processes, asked.minutes)
    go_on(load(asked.model), HERE / "runs.jsonl.gz", asked.minutes)


if __name__ == "__main__":
    main()
