"""Stage of spike 130: the first deletions of a package, without the limit of two minutes, and what the time goes to.

    python spikes/130-feature-deletion/again.py itsdangerous==2.2.0,7,9    package, deletions to try, minutes; or several

Each step gives a row of `again.jsonl`: fetching with the test runs, reading the libraries for copies, then each deletion with
its gate, its seconds and the phases (runs of tests or inputs in the judge) that it took. The load average stands in each row.
"""

import json
import os
import sys
import time
from pathlib import Path

from composer_replication.core.deadline import OutOfTime, deadline
from composer_replication.envs.deletion.fingerprints import subject_indexes
from composer_replication.envs.deletion.judge import evidence, runner
from composer_replication.envs.deletion.subject import prepare_subject
from composer_replication.envs.deletion.tasks import gates, knowable
from composer_replication.envs.deletion.tasks.make import TaskSettings, package_rows

ROWS, counted = Path(__file__).with_name("again.jsonl"), [0]


def counting(subject, phases, *others, **more):
    counted[0] += len(phases)
    return runner.run_phases(subject, phases, *others, **more)


def add(**row):
    with ROWS.open("a") as file:
        file.write(json.dumps({**row, "load": round(os.getloadavg()[0], 1)}) + "\n")


def again(package: str, most: int, minutes: float) -> None:
    began = time.monotonic()
    subject = prepare_subject(package)
    bench = gates.make_bench(subject)
    add(
        package=package,
        stage="fetched, tests run four times",
        seconds=round(time.monotonic() - began, 1),
        tests=len(bench.seconds),
    )
    began, cpu = time.monotonic(), time.process_time()
    subject_indexes(subject.tree, subject.libraries)
    add(
        package=package,
        stage="libraries read",
        seconds=round(time.monotonic() - began, 1),
        cpu_s=round(time.process_time() - cpu, 1),
        files=sum(path.is_file() for path in subject.libraries.rglob("*")),
    )
    began, counted[0] = time.monotonic(), 0
    try:
        with deadline(60 * minutes):
            for number, row in enumerate(package_rows(bench, TaskSettings(per_package=99), {}), 1):
                add(
                    package=package,
                    key=row["key"],
                    gate=row.get("dropped", ""),
                    detail=row.get("detail", "")[:300],
                    seconds=round(time.monotonic() - began, 1),
                    phases=counted[0],
                )
                began, counted[0] = time.monotonic(), 0
                if number >= most:
                    break
    except OutOfTime:
        add(package=package, stage="out of time", seconds=round(time.monotonic() - began, 1), phases=counted[0])


if __name__ == "__main__":
    for module in (evidence, gates, knowable):
        module.run_phases = counting
    for words in sys.argv[1:]:
        package, most, minutes = words.split(",")
        again(package, int(most), float(minutes))
