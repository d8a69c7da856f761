"""Spike 010: `python score.py` writes `scores.jsonl.gz`, what each hint changes at each error turn, as SmolLM2 reads it.

The hints that it asks about are those of commit e30d054: since then templates leave the name out, and hardly any error turn
is found here.

    COMPOSER_DATA=FOLDER .venv/bin/python spikes/010-named-values/score.py --model smollm2"""
import argparse
import gzip
import json
import os
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

from composer_replication.experiments.hint_score import Repair, action_logprobs, hinted_pairs, repairs
from composer_replication.hints.layers import default_composite
from composer_replication.hints.text import action_text
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.traces.read import read_traces
from composer_replication.tree.chat import TemplateProblem
from composer_replication.tree.template import probe_template
from composer_replication.tree.text import AlignmentError

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from named_values import without, wrong_name  # noqa: E402

SETS = {"SQL": ("intercode_sql_multimodel",), "airline": ("tau2_airline_multimodel", "taubench_airline_gpt4o")}
MAX_TOKENS = 4096  # of a state


def named(case: Repair) -> str | None:
    "The wrong name in the hint of an error turn."
    return wrong_name(case.hint.text, action_text(case.pair.rejected))


def texts(cases: list[Repair]) -> list[dict[str, str]]:
    "For each case its hint, the hint without the value, and with the value of another task's hint of the same words."
    kinds = defaultdict(list)
    for case in cases:
        kinds[without(case.hint.text, named(case))].append((case.task, named(case)))
    rows = []
    for case in cases:
        own, value = case.hint.text, named(case)
        bare = without(own, value)
        others = sorted({v for task, v in kinds[bare] if task != case.task and v not in action_text(case.pair.rejected)})
        row = {"own": own, "unnamed": bare}
        if others:
            other = random.Random(f"{case.trace.trace_id}/{case.site.turn}").choice(others)
            row["renamed"] = own.replace(f"`{value}`", f"`{other}`")
        rows.append(row)
    return rows


def drawn(name: str, data: Path) -> list[Repair]:
    "Error turns whose hint names the value that failed; of SQL those of tasks that spike 008 has not scored."
    files = [data / f"{file}.jsonl.gz" for file in SETS[name]]
    cases = [case for file in files for case in repairs(read_traces(file), default_composite(), Counter())]
    if name == "SQL":
        spoken = HERE.parent / "008-hint-scores/sql.jsonl.gz"
        seen = {json.loads(line)["task_id"] for line in gzip.open(spoken, "rt")}
        cases = [case for case in cases if case.task not in seen]
    return [case for case in cases if named(case)]


def scored(name: str, cases: list[Repair], checkpoint) -> list[dict]:
    "Nats a token of both actions of each error turn that fits, behind each hint and none."
    chat, by_trace, rows = probe_template(checkpoint.tokenizer), defaultdict(list), []
    for case, row in zip(cases, texts(cases)):
        by_trace[case.trace.trace_id].append((case, row))
    for group in by_trace.values():
        mine, hints = zip(*group)
        try:
            tree, labels = hinted_pairs(mine, hints, chat, MAX_TOKENS)
        except (AlignmentError, TemplateProblem):  # it cannot become a tree
            continue
        found = action_logprobs(checkpoint.model, tree, labels) if labels else {}
        for number in sorted({n for n, _ in labels}):
            case, of = mine[number], {label: found[n, label] for n, label in labels if n == number}
            worked, failed = ({label: actions[at][1].mean().item() for label, actions in of.items()} for at in (0, 1))
            about = {"set": name, "trace_id": case.trace.trace_id, "task": case.task, "turn": case.site.turn}
            rows.append(about | {"hints": hints[number], "worked": worked, "failed": failed})
    return rows


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--model", default="smollm2")
    given.add_argument("--count", action="store_true", help="only say how many error turns there are")
    given = given.parse_args()
    data = Path(os.environ.get("COMPOSER_DATA", HERE / "../../../shared/data")) / "traces"
    checkpoint = None if given.count else load_checkpoint(given.model)
    rows = []
    for name in SETS:
        cases = drawn(name, data)
        print(f"{name}: {len(cases)} error turns of {len({case.task for case in cases})} tasks", flush=True)
        rows += scored(name, cases, checkpoint) if checkpoint else []
    if rows:
        (HERE / "scores.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))


if __name__ == "__main__":
    main()
