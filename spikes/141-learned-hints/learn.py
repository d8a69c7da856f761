"""The runs of spike 141: `python learn.py` records episodes, trains the writers, measures their hints, and writes `runs.json.gz`.

Resumable: the folder `runs` beside it keeps the episodes, the scores, the writers and what has ended."""
import argparse
import gzip
import json
import os
import random
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from composer_replication.contrib.hint_writer.candidates import Candidate, score_candidates, train_writer, training_rows
from composer_replication.core.files import write_json
from composer_replication.core.trace import HintContext
from composer_replication.envs.toy.env import world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.teams import REJECTED, TEAMS, TeamEnv, team_fact, team_hints, team_of
from composer_replication.experiments.evaluate import episode_limits
from composer_replication.experiments.hint_score import repairs
from composer_replication.hints.layers import default_composite
from composer_replication.hints.learned_layer import LearnedHintGenerator, writer_prompt
from composer_replication.recipes.checkpoint import Checkpoint, load_checkpoint
from composer_replication.recipes.hint_models import HintWriter
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.traces.read import read_traces
from composer_replication.tree.template import probe_template

sys.path.append(str(Path(__file__).parents[1]))
from hint_gate import hinted_turns, right_actions, shared_turns

RUNS = Path(__file__).parent / "runs"
SEEDS, TUNING = tuple(range(10)), 100
TRAIN_TASKS, HELD_OUT, TURNS = 768, 128, 6
CANDIDATES = 8  # a site
WARM, WARM_ROWS = dict(epochs=6, learning_rate=1e-3), 400
EPOCHS, RATES = 3, (1e-4, 3e-4, 1e-3)
LAYERS = default_composite()


def agent() -> TransformersPolicy:
    "Whose errors these are, and who reads the hints; it is never trained."
    return TransformersPolicy(embedded_model("teams"), embedded_tokenizer())


def played(n: int, series: str, split: str) -> list:
    "One episode of the agent on each task."
    rows, limits = world_rows(n, f"teams-{series}", split), episode_limits(TURNS, 0)
    return [r for at in range(0, n, 64) for r in collect(agent(), TeamEnv, rows[at:at + 64], limits, 0)]


def rejected(source):
    "The source, silent everywhere but at rejected writes."
    return lambda kind, meta: source(kind, meta) if REJECTED.text in meta.error_message else None


def recorded() -> list:
    "The training episodes' traces."
    file = RUNS / "train.jsonl.gz"
    if not file.exists():
        write_traces([r.trace for r in played(TRAIN_TASKS, "writer", "train")], file)
    return list(read_traces(file))


def prompt_of(trace, site) -> str:
    return writer_prompt(HintContext.at(trace, site))


def warm_rows(traces) -> list[dict]:
    "Rejected writes with the fact of a team drawn at random: what a hint looks like, and nothing that is known."
    rng, rows = random.Random("warm"), []
    for trace in traces:
        for site in find_error_sites(trace):
            path = written_path(trace, site.turn)
            if REJECTED.text in site.context.error_message and path:
                rows.append({"prompt": prompt_of(trace, site), "best": team_fact(path, rng.choice(TEAMS))})
    return training_rows(rng.sample(rows, WARM_ROWS))


def written_path(trace, turn: int) -> str | None:
    "Of the call of a turn."
    calls = trace.turns[turn].tool_calls
    values = calls[0].arguments.values() if calls and calls[0].parsed else ()
    return next((v for v in values if isinstance(v, str) and team_of(v)), None)


def saved(name: str, start, rows: list[dict], epochs: int, learning_rate: float, seed: int = 0) -> Checkpoint:
    "A writer trained on these rows from a start; trained once."
    folder = RUNS / name
    if not folder.exists():
        train_writer(start(), rows, folder, epochs, learning_rate, seed)
    return load_checkpoint(str(folder))


def base_writer() -> Checkpoint:
    return Checkpoint("embedded", None, embedded_model("teams"), embedded_tokenizer())


def warm_writer(traces) -> Checkpoint:
    "Writes the fact of some team."
    return saved("warm", base_writer, warm_rows(traces), **WARM)


class Scores:
    "Values of candidates, kept by site and text: seeds share them."

    def __init__(self):
        self.file, self.model, self.chat = RUNS / "scores.json", embedded_model("teams"), probe_template(embedded_tokenizer())
        self.known = json.loads(self.file.read_text()) if self.file.exists() else {}

    def of(self, case, texts: list[str]) -> list[Candidate] | None:
        "The candidates of a site; None where it has no place."
        known = self.known.setdefault(f"{case.trace.trace_id} {case.site.turn}", {})
        new = [t for t in dict.fromkeys(texts) if t not in known]
        scored = score_candidates(self.model, self.chat, case, new) if new else []
        if scored is None:
            return None
        known.update({c.text: [c.tokens, c.refused, c.gain] for c in scored})
        return [Candidate(t, *known[t]) for t in texts]

    def keep(self):
        write_json(self.file, self.known)


def candidates(traces, seed: int, scores: Scores) -> list[dict]:
    "For every repaired site: its prompt, the best candidate, and one drawn at random."
    file = RUNS / f"candidates-{seed}.json"
    if file.exists():
        return json.loads(file.read_text())
    checkpoint, rng, rows = warm_writer(traces), random.Random(f"{seed}/random"), []
    writer = HintWriter(checkpoint.model, checkpoint.tokenizer)
    for case in repairs(traces, rejected(team_hints("filler")), Counter()):
        prompt, key = prompt_of(case.trace, case.site), f"{case.trace.trace_id}/{case.site.turn}"
        texts = [t for t in writer.candidates(prompt, [f"{seed}/write/{key}/{i}" for i in range(CANDIDATES)]) if t]
        scored = texts and scores.of(case, texts)
        if scored:
            best = max(scored, key=lambda c: c.value)
            path = written_path(case.trace, case.pair.turn)
            rows.append({"prompt": prompt, "best": best.text, "random": rng.choice(scored).text, "names": told(best.text, path),
                         "any": any(told(c.text, path) for c in scored)})
    scores.keep()
    write_json(file, rows)
    return rows


def told(text: str | None, path: str | None) -> bool:
    "Whether a hint names the team of the module that is written."
    found = re.search(r'"team": (\d)', text or "")
    return bool(found and path) and int(found[1]) == team_of(path)


class Held:
    "Held-out error turns, and what hints do there."

    def __init__(self, split: str, series: str):
        self.policy, self.rollouts = agent(), played(HELD_OUT, series, split)
        self.fixed = {"template": LAYERS.generate} | {q: team_hints(q) for q in ("exact", "wrong", "filler")}

    def measured(self, sources: dict, seed: int) -> dict[str, dict]:
        "Kind of hint -> per turn: which task, whether a new action works, whether the hint names the team."
        turns = shared_turns({name: hinted_turns(self.rollouts, self.policy, rejected(s)) for name, s in sources.items()})
        first = next(iter(turns.values()))
        made = {name: {"right": right_actions(self.policy, t, True, TeamEnv, seed)} for name, t in turns.items()}
        made["none"] = {"right": right_actions(self.policy, first, False, TeamEnv, seed)}
        for name, source in sources.items():
            at = {(t.problem, t.turn) for t in first}
            made[name]["told"] = [told(source(site.kind, HintContext.at(r.trace, site)), written_path(r.trace, site.turn))
                                  for n, r in enumerate(self.rollouts) for site in one_a_turn(r.trace) if (n, site.turn) in at]
        made["none"]["task"] = [t.problem for t in first]
        return made

    def gains(self, sources: dict, scores: Scores) -> dict[str, list[float]]:
        "Kind of hint -> gain at every held-out site whose next action worked, nats a token; only where all kinds have one."
        found = {name: [] for name in sources}
        for case in repairs([r.trace for r in self.rollouts], rejected(team_hints("filler")), Counter()):
            texts = [s(case.site.kind, HintContext.at(case.trace, case.site)) for s in sources.values()]
            scored = scores.of(case, texts) if all(texts) else None
            if scored and all(c.gain is not None for c in scored):
                for name, c in zip(sources, scored):
                    found[name].append(c.gain)
        return found


def one_a_turn(trace) -> list:
    "The first error site of every turn, in the order of turns."
    first = {site.turn: site for site in reversed(find_error_sites(trace))}
    return [first[turn] for turn in sorted(first)]


def source_of(checkpoint: Checkpoint):
    "The learned layer with this writer; it answers each prompt once."
    writer, known = HintWriter(checkpoint.model, checkpoint.tokenizer), {}

    def write(prompt):
        if prompt not in known:
            known[prompt] = writer(prompt)
        return known[prompt]

    return LearnedHintGenerator(write).generate


def elsewhere(held: Held, source):
    "The hints of a source, each at another task's turn: the same texts, and nothing about the step."
    sites = [(r.trace, s) for r in held.rollouts for s in one_a_turn(r.trace) if REJECTED.text in s.context.error_message]
    half = len(sites) // 2
    others = {(t.trace_id, s.turn): sites[(i + half) % len(sites)] for i, (t, s) in enumerate(sites)}

    def generate(kind, meta):
        trace, site = others[meta.trace.trace_id, meta.site.turn]
        return source(site.kind, HintContext.at(trace, site))

    return generate


def writer_of(kind: str, seed: int, rate: float, traces, scores: Scores) -> Checkpoint:
    "Trained on the best candidate of each site, or on one drawn at random."
    rows = [{"prompt": r["prompt"], "best": r[kind]} for r in candidates(traces, seed, scores)]
    return saved(f"{kind}-{seed}-{rate}", partial(warm_writer, traces), training_rows(rows), EPOCHS, rate, seed)


def tuned(traces, scores: Scores) -> dict[str, dict[str, float]]:
    "Kind of writer -> learning rate -> share right on development tasks."
    file = RUNS / "tuning.json"
    if not file.exists():
        held = Held("dev", "writer-dev")

        def right(kind, rate):
            source = source_of(writer_of(kind, TUNING, rate, traces, scores))
            return fmean(held.measured({"it": source}, TUNING)["it"]["right"])

        write_json(file, {kind: {str(rate): right(kind, rate) for rate in RATES} for kind in ("best", "random")})
    return json.loads(file.read_text())


def run_seed(seed: int, chosen: dict, held: Held, traces, scores: Scores) -> dict:
    "All kinds of hints on the held-out turns."
    file = RUNS / f"seed-{seed}.json"
    if not file.exists():
        learned, unselected = (source_of(writer_of(kind, seed, chosen[kind], traces, scores)) for kind in ("best", "random"))
        sources = {"learned": learned, "unselected": unselected, "elsewhere": elsewhere(held, learned),
                   "warm": source_of(warm_writer(traces))} | held.fixed
        rows = candidates(traces, seed, scores)
        write_json(file, {"seed": seed, "sites": len(rows), "best_names_it": fmean(r["names"] for r in rows),
                          "some_names_it": fmean(r["any"] for r in rows),
                          "turns": held.measured(sources, seed), "gains": held.gains(sources, scores)})
        scores.keep()
    return json.loads(file.read_text())


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="to run now; what has ended is kept")
    given = given.parse_args()
    torch.set_num_threads(1)
    RUNS.mkdir(exist_ok=True)
    traces, scores = recorded(), Scores()
    shares = tuned(traces, scores)
    chosen = {kind: float(max(by, key=by.get)) for kind, by in shares.items()}
    held = Held("test", "writer-test")
    for seed in given.seeds:
        run = run_seed(seed, chosen, held, traces, scores)
        print(seed, {k: round(fmean(v["right"]), 3) for k, v in run["turns"].items()}, flush=True)
    runs = [json.loads(file.read_text()) for seed in SEEDS if (file := RUNS / f"seed-{seed}.json").exists()]
    kept = {"tuning": shares, "chosen": chosen, "episodes": len(traces), "cores": os.cpu_count(), "runs": runs}
    (Path(__file__).parent / "runs.json.gz").write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


if __name__ == "__main__":
    main()
