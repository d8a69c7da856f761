# ruff: noqa: E501
"""What real files hold, per format: files, traces, calls, results, error turns, hints by layer, none silently empty.

    python files.py FOLDER > files.json

Shared files (`../shared/data/traces`, minimal cases beside them) are read where they lie. Files of public repositories are read from
FOLDER/FORMAT/..., where `sources.json` of this folder says which file of which repository and commit each of them is
(`git show COMMIT:PATH`); their content is not kept here.
"""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path

from judge import paths

from composer_replication.hints.layers import default_composite
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces, tally

warnings.simplefilter("ignore")


def counted(path: Path, **more) -> dict:
    "What one file holds, and the first problem that reading it met."
    count, layers, formats, problems, generator = Counter(), Counter(), Counter(), [], default_composite()
    for trace in read_traces(path, on_problem=problems.append):
        count += tally(trace) + Counter(traces=1)
        formats[trace.format] += 1
        for site in find_error_sites(trace):
            hint = generator.hint(trace, site)
            layers[hint.layer if hint else "wanted" if site.wanted else "no hint"] += 1
    return more | {"format": ", ".join(formats), **{k: count[k] for k in ("traces", "turns", "calls", "results", "unanswered", "loose")},
                   "problems": len(problems), "problem": problems[0].what[:160] if problems else "", "errors": layers.total(), "layers": dict(layers)}  # fmt: skip


if __name__ == "__main__":
    shared = [counted(p, file=p.name, source="shared" if p.parent.name == "traces" and p.parent.parent.name == "data" else "case") for p in paths()]
    public = [counted(Path(sys.argv[1]) / s["file"], file=s["path"], source="public", repository=s["repo"], commit=s["commit"], sought=s["format"])
              for s in json.loads((Path(__file__).parent / "sources.json").read_text())]  # fmt: skip
    print("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in shared + public) + "\n]")
