"""README.md and docs/report.md from their notebooks, and the figures as files that a plain git host shows.

    python tools/readme.py          write them and docs/images/{readme,report}-*.png
    python tools/readme.py --check  exit 1 where they differ from the notebooks

The notebooks are not run: what they show is what they were saved with.
"""
import base64
import os
import sys
from functools import partial
from pathlib import Path

import nbformat
from nbdev.process import extract_directives

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from stage import relink  # noqa: E402

from composer_replication.core.files import write_file  # noqa: E402

PAGES = {"README.md": "nbs/index.ipynb", "docs/report.md": "nbs/07_report.ipynb"}


def from_page(folder: Path, path: Path) -> str | None:
    "A linked file as a page of that folder names it, or None where there is no such file."
    return os.path.relpath(path, folder) if path.exists() and path.is_relative_to(ROOT) else None


def show_output(output: dict, image: Path, alt: str, notebook: Path, place) -> tuple[str, dict[Path, bytes]]:
    "One output as Markdown, with the files that it refers to."
    data = output.get("data", {})
    if "image/png" in data:
        return f"![{alt}]({os.path.relpath(image, place.args[0])})", {image: base64.b64decode(data["image/png"])}
    if "text/markdown" in data:
        return relink(data["text/markdown"], notebook.parent, place), {}
    if "text/html" in data:  # a view: no git host shows its style
        return "", {}
    text = data.get("text/plain", output.get("text", ""))
    return (f"```\n{text.rstrip()}\n```" if text else ""), {}


def build(page: Path, notebook: Path) -> dict[Path, bytes]:
    "Every file that a notebook gives, by path."
    parts, files, place = [], {}, partial(from_page, page.parent)
    for cell in nbformat.read(notebook, 4).cells:
        if cell.cell_type == "markdown":
            parts.append(relink(cell.source, notebook.parent, place))
            continue
        marks = extract_directives(cell)
        if marks.keys() & {"hide", "default_exp"}:
            continue
        if marks.get("echo:") != ["false"]:
            parts.append(f"```python\n{cell.source.strip()}\n```")
        for output in cell.outputs:
            image = ROOT / "docs" / "images" / f"{page.stem.lower()}-{len(files) + 1}.png"
            text, more = show_output(output, image, " ".join(marks.get("fig-alt:", ["Figure"])), notebook, place)
            parts.append(text)
            files |= more
    banner = f"<!-- Made from {notebook.relative_to(ROOT).as_posix()} by tools/readme.py: edit the notebook. -->\n\n"
    return {page: (banner + "\n\n".join(p for p in parts if p) + "\n").encode()} | files


def stale() -> list[str]:
    "One sentence for each file that differs from its notebook."
    return [f"{path.relative_to(ROOT)} is not what {notebook} gives: run `python tools/readme.py`."
            for page, notebook in PAGES.items() for path, content in build(ROOT / page, ROOT / notebook).items()
            if not path.exists() or path.read_bytes() != content]


def write() -> None:
    "Bring every file up to date."
    for page, notebook in PAGES.items():
        for path, content in build(ROOT / page, ROOT / notebook).items():
            write_file(path, content)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        problems = stale()
        print("\n".join(problems), file=sys.stderr)
        sys.exit(bool(problems))
    write()
