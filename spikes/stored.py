"""Run all cells of a spike's notebook in seconds: they show what is stored, or make all anew in a folder of its own."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
from IPython import get_ipython
from IPython.display import display


class _Result:
    "A stored result, shown as it was."

    def __init__(self, output: dict):
        self.output = output

    def _repr_mimebundle_(self, include=None, exclude=None):
        return dict(self.output["data"]), dict(self.output.get("metadata", {}))


def _show(outputs: list[dict]) -> _Result | None:
    "Show outputs again; the last cell's value is returned, so that it is a value again."
    value = None
    for output in outputs:
        if output["output_type"] == "stream":
            (sys.stdout if output["name"] == "stdout" else sys.stderr).write(output["text"])
        elif output["output_type"] == "display_data":
            display(dict(output["data"]), metadata=dict(output.get("metadata", {})), raw=True)
        elif output["output_type"] == "execute_result":
            value = _Result(output)
    return value


class _Stored:
    "Replaces each cell below by its stored outputs."

    def __init__(self, cells: dict[str, list[dict]]):
        self.cells = cells

    def __call__(self, lines: list[str]) -> list[str]:
        source = "".join(lines).strip()
        return [f"__stored__({source!r})\n"] if source in self.cells else lines


def _own_folder(spike: Path) -> Path:
    "Copy what the spike keeps, but for its notebook, to a folder beside it that git ignores."
    made = spike.with_name(f"{spike.name}.made")
    names = subprocess.run(["git", "ls-files"], cwd=spike, capture_output=True, text=True).stdout.splitlines()
    for name in names or [path.name for path in spike.iterdir() if path.is_file()]:
        if not name.endswith(".ipynb") and (spike / name).exists() and not (made / name).exists():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(spike / name, made / name)
    return made


def stored(
    run: bool,  # make everything below anew, in `NAME.made` beside the spike's folder
    quick: bool = False,  # a look: the cells are run here, and write no result
) -> None:
    "Decide what the cells below do when they are run: show their stored outputs, or run."
    shell, here = get_ipython(), Path.cwd()
    spike = here.with_name(here.name.removesuffix(".made"))
    transformers = shell.input_transformers_cleanup
    transformers[:] = [one for one in transformers if not isinstance(one, _Stored)]
    os.chdir(_own_folder(spike) if run else spike)
    if run:
        print(f"made anew in spikes/{spike.name}.made")
    elif not quick:
        cells = [cell for cell in nbformat.read(spike / f"{spike.name}.ipynb", 4).cells if cell.cell_type == "code"]
        at = next(i for i, cell in enumerate(cells) if cell.source.rstrip().endswith(CALLS))
        shown = {cell.source.strip(): cell.outputs for cell in cells[at + 1:]}
        shell.user_ns["__stored__"] = lambda source: _show(shown[source])
        transformers.insert(0, _Stored(shown))
        print(f"{len(shown)} cells below show what is stored; run = True makes it anew in spikes/{spike.name}.made")


CALLS = ("stored(run)", "stored(run, quick)")  # how a notebook's last line below its parameters calls it
