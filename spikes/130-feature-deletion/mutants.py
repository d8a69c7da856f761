"""Stage of spike 130: mutants of originals, judged by held-out inputs made before and by those made now.

    python spikes/130-feature-deletion/mutants.py TASKS    a file that `composer-rl tasks make` of an earlier commit wrote

Eight mutants of each task's original are drawn (of all its modules together). A mutant that passes the task's tests and all
held-out inputs is paid. Each task gives a row of `mutants.jsonl`: which mutants were paid with the inputs that it came with, and
which with inputs made by today's `add_evidence`, or why today's gate drops the task.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from composer_replication.envs.deletion.judge import evidence
from composer_replication.envs.deletion.judge.evidence import EvidenceProblem, add_evidence, compare, heldout_phase, modules_of
from composer_replication.envs.deletion.judge.messages import Phase
from composer_replication.envs.deletion.judge.mutants import make_mutants
from composer_replication.envs.deletion.judge.runner import run_phases
from composer_replication.envs.deletion.subject import subject_of
from composer_replication.envs.deletion.task import read_tasks
from composer_replication.sandbox.limits import Limits

DRAWN, LIMITS = 8, Limits(wall_s=25)


def measured(task) -> dict:
    "A row: mutants drawn, and those that are paid before and after."
    subject, began, worth = subject_of(task), time.monotonic(), []
    modules = modules_of(task, [str(p.relative_to(subject.tree)) for p in subject.tree.rglob("*.py")], subject.import_roots)
    mutants = [
        (path, mutant)
        for module, path in modules.items()
        for mutant in make_mutants(
            (subject.tree / path).read_text(),
            [s.partition(":")[2] for s in task.deleted_symbols if s.partition(":")[0] == module],
            "measure",
            DRAWN // len(modules),
        )
        if not mutant.crash
    ]
    wanted, measure = task.fail_to_pass + task.pass_to_pass, evidence.strength
    evidence.strength = lambda *given: worth.append(measure(*given)) or worth[0]  # what the gate itself finds is kept
    try:
        new, dropped = add_evidence(replace(task, heldout_records=(), canaries=()), subject), ""
    except EvidenceProblem as problem:
        new, dropped = None, str(problem).partition(": ")[2]
    finally:
        evidence.strength = measure
    passed = [
        pair
        for pair, run in zip(mutants, run_phases(subject, [Phase("tests", {p: m.text}, wanted) for p, m in mutants], LIMITS))
        if run.passed(wanted)
    ]

    def paid(task):
        runs = run_phases(subject, [heldout_phase(task, {p: m.text}) for p, m in passed], LIMITS)
        return [m.name for (_, m), run in zip(passed, runs) if not compare(task.heldout_records, run)[0]]

    return {
        "package": task.repo,
        "task": task.task_id,
        "mutants": len(mutants),
        "pass the tests": len(passed),
        "paid before": paid(task),
        "paid after": new and paid(new),
        "dropped": dropped,
        "not told apart": list(worth[0].alike) if worth else [],
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(time.monotonic() - began),
    }


if __name__ == "__main__":
    for task in read_tasks(sys.argv[1]):
        row = measured(task)
        print(row["task"], len(row["paid before"]), "->", row["dropped"] or len(row["paid after"]), flush=True)
        with Path(__file__).with_name("mutants.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
