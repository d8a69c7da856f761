"""Spike 019, described only: what does the agent do next where a filler stands, and behind other texts without any advice?

    OMP_NUM_THREADS=1 .venv/bin/python spikes/019-cheap-score/follows.py

Declared after toy's first seed showed that its filler gains: the same failed turns, three repetitions, common random numbers.
Arms: none, the page's filler and wrong hint, `weather` (as many words as the exact hint has, the filler of `hints try`), and
`dot` (a full stop alone). Then none and filler nine times more: with numbers of their own the filler gained half as much.
Each part's branches are written to `follows.jsonl`; a part that is there is not played again.
"""
from dataclasses import replace

import orjson
import plan

from composer_replication.core.hint import Hint
from composer_replication.envs.toy.hints import ROLE_OF
from composer_replication.experiments.evaluate import one_thread
from composer_replication.rollout.fork import Fork, ForkBranch, checked_forks, play_forks, unrelated_words
from composer_replication.rollout.fork_result import fork_result

KEPT = plan.HERE / "follows.jsonl"


def action(turn) -> list:
    "Role, name and arguments of a turn's first call; `none` without a call that can be read."
    call = next(iter(turn.tool_calls), None)
    return [ROLE_OF.get(call.name, "unknown"), call.name, call.arguments] if call else ["none", "", {}]


def follow(seed: int, repetitions: range, arms: tuple[str, ...]) -> list[dict]:
    "Of each failed turn: the recorded actions, and by arm each branch's action, whether it works, and whether it fails alike."
    of, cases, refused = plan.WORLDS["toy"], plan.cases_of("toy", seed), {}
    forks = [Fork(case.trace, case.site, Hint(texts["exact"], "exact"), {"task_id": case.trace.task_id}) for case, texts in cases]
    kept = checked_forks(forks, of.environment, refused)
    assert len(kept) == len(cases), refused
    said = [{"none": None, "filler": texts["filler"], "wrong": texts["wrong"], "weather": unrelated_words(texts["exact"]),
             "dot": "."} for _, texts in cases]
    said = [{arm: row[arm] for arm in arms} for row in said]
    branches = [ForkBranch(fork, arm, text, n) for fork, row in zip(kept, said) for n in repetitions for arm, text in row.items()]
    rows = {fork.name: {"seed": seed, "first": repetitions[0], "task": case.task, "turn": case.site.turn, "error": case.site.kind,
                        "failed": action(case.pair.rejected), "worked": action(case.pair.chosen),
                        "played": {arm: [] for arm in said[0]}}
            for fork, (case, _) in zip(kept, cases)}
    config = replace(of.recorded, max_turns=1, max_tokens=4096, seed=seed, coupled=True)
    for one in play_forks(plan.start_of("toy"), branches, of.environment, config, scored=False):
        if result := fork_result(one):
            new = action(result.trace.turns[result.turn])
            rows[one.fork.name]["played"][one.arm].append([new, int(result.works), int(result.again)])
    return list(rows.values())


PARTS = {0: (range(3), ("none", "filler", "wrong", "weather", "dot")), 3: (range(3, 12), ("none", "filler"))}


if __name__ == "__main__":
    rows = [orjson.loads(line) for line in KEPT.read_bytes().splitlines()] if KEPT.exists() else []
    there = {(row["first"], row["seed"]) for row in rows}
    for first, seed in sorted({(first, seed) for first in PARTS for seed in plan.SEEDS} - there):
        with one_thread():
            made = follow(seed, *PARTS[first])
        with KEPT.open("ab") as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in made)
        print(first, seed, len(made), flush=True)
