"""Spike 151: our error turns anew on the files of `rows.json`, whose content is not kept here.

In a folder of your own, for each file of `rows.json` (GitHub has the repositories):

    git show COMMIT:PATH > FOLDER/SHA256.SUFFIX        # the first 64 signs of its name are its hash, the suffix is the path's own
    .venv/bin/python spikes/151-wild-traces/score.py FOLDER

Prints which labels an error turn of today meets; writes nothing.
"""
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces

HERE = Path(__file__).resolve().parent


def sites(path: Path) -> set[tuple[int, int]]:
    "Return the error turns of a file: number of the trace, and position of the result."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {(number, site.evidence_turn) for number, trace in enumerate(read_traces(path)) for site in find_error_sites(trace)}


def main(folder: Path) -> None:
    rows = json.loads((HERE / "rows.json").read_text())
    found, count = {path.name[:16]: sites(path) for path in sorted(folder.iterdir())}, Counter()
    for label in rows["labels"]:
        if label["file"] in found:
            met = (label["trace"], label["turn"]) in found[label["file"]]
            count[label["group"], label["label"], met] += 1
    for (group, label, met), number in sorted(count.items()):
        print(f"{group}: labelled {label}, {'an' if met else 'no'} error turn: {number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
