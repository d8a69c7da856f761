"""Spike 150: what our detectors find of the steps that people labelled as wrong.

Keeps steps, labels and sites, no text of a trace. In a folder of your own:

    git clone https://github.com/microsoft/AgentRx
    git -C AgentRx checkout f228165bfec60a801fd5fedd9d8ffe0f9de0c69d
    git clone https://github.com/ag2ai/Agents_Failure_Attribution WhoWhen
    git -C WhoWhen checkout f4d2b6da464a826580e59b3a0eae15ea2d642d7c
    .venv/bin/python spikes/150-step-labels/score.py AgentRx WhoWhen
"""
import json
import logging
import sys
import warnings
from pathlib import Path

from composer_replication.core.files import write_jsonl
from composer_replication.core.trace import Trace
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

HERE = Path(__file__).resolve().parent


def read(path: Path) -> list[Trace]:
    "The traces of a file; none where no message is left of a conversation whose roles are unknown."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(read_traces(path))


def row(group: str, name: str, messages: int, trace: Trace | None, labels: list[dict]) -> dict:
    "What is kept of one trace; steps are positions of messages in its file, from 0."
    turns = trace.turns if trace else ()
    found = find_error_sites(trace) if trace else []
    sites = [{"step": turns[site.turn].source_index, "kind": site.kind} for site in found]
    places = [t.source_index for t, after in zip(turns, turns[1:]) if t.role == "assistant" and after.role != "assistant"]
    calls, results = sum(bool(t.tool_calls) for t in turns), sum(t.observation or t.role == "tool" for t in turns)
    return {"group": group, "trace": name, "messages": messages, "read": len(turns), "actions": calls, "results": results,
            "places": places, "labels": labels, "sites": sites}


def of_agentrx(found: dict, first: int) -> list[dict]:
    "Labels of a trajectory of AgentRx, whose steps count from `first`."
    cause = (found.get("root_cause") or {}).get("failure_id")
    return [{"step": int(f["step_number"]) - first, "category": f["failure_category"], "root": f["failure_id"] == cause}
            for f in found["failures"]]


def retail(folder: Path) -> list[dict]:
    "AgentRx's labelled trajectories of tau-bench's retail tasks; a step is a message, from 1."
    file = folder / "data/tau_retail/tau_dataset_failed.json"
    raw = json.loads(file.read_bytes())
    traces = dict(zip((each["task_id"] for each in raw), zip(raw, read(file), strict=True), strict=True))
    kept = []
    for found in json.loads((folder / "data/ground_truth/tau_retail.json").read_bytes()):
        record, trace = traces[int(found["trajectory_id"])]
        kept.append(row("retail", str(found["trajectory_id"]), len(record["traj"]), trace, of_agentrx(found, 1)))
    return kept


def magentic(folder: Path) -> list[dict]:
    "AgentRx's labelled trajectories of Magentic-One; a step is a message, from 1."
    kept = []
    for found in json.loads((folder / "data/ground_truth/magentic_one_ground_truth.json").read_bytes()):
        file = folder / "data/magentic_dataset" / f"{found['trajectory_id']}.json"
        if file.exists():
            messages = len(json.loads(file.read_bytes()))
            kept.append(row("magentic", file.stem, messages, next(iter(read(file)), None), of_agentrx(found, 1)))
    return kept


def who_and_when(folder: Path, part: str) -> list[dict]:
    "One part of Who&When: the decisive step of each conversation, from 0."
    kept = []
    for file in sorted((folder / "Who&When" / part).glob("*.json"), key=lambda path: int(path.stem)):
        raw = json.loads(file.read_bytes())
        label = {"step": int(raw["mistake_step"]), "category": "decisive step", "root": True}
        kept.append(row(part.lower(), file.stem, len(raw["history"]), next(iter(read(file)), None), [label]))
    return kept


def main() -> None:
    logging.disable(logging.WARNING)
    agentrx, whowhen = map(Path, sys.argv[1:])
    rows = retail(agentrx) + magentic(agentrx)
    rows += who_and_when(whowhen, "Algorithm-Generated") + who_and_when(whowhen, "Hand-Crafted")
    write_jsonl(HERE / "rows.jsonl", rows)
    print(f"{len(rows)} traces")


if __name__ == "__main__":
    main()
