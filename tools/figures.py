"""Does every measured figure in the prose say where it comes from?

    python tools/figures.py                       one line for each that does not; exit 1 where there is one

Prose is the Markdown cells of nbs/ and spikes/ and the pages of docs/; README.md and docs/report.md are made from notebooks.
A figure is a number with a unit that says that somebody measured it. It is in order where its paragraph, list item or table row

- links a page of the web, a notebook or a results.json, or names a paper by its arXiv number;
- says what it is if it was not measured: a limit, a default, a setting, the level of an interval, or the sum that gives it
  (12,000 × 4 bytes = 48 kB);
- states, in an experiment, the hypothesis or threshold;
- or names its source in a comment: `<!-- figure: FILE-OR-URL -->`. Where the file is JSON and a key follows, as in
  `<!-- figure: spikes/100-tree-forward/results.json summary.as_trained_worst.mini-swe -->`, the paragraph must show that value,
  and only the figures that equal a value named in it are excused.
"""
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from gaps import promised  # noqa: E402

NUMBER = r"(?<![\w.,:/-])[-+]?\d[\d,]*(?:\.\d+)?"
UNIT = "|".join((
    r"\s?%", r"\s(?:per ?cent|percentage points|points?|nats|bits)\b",
    r"\s(?:seconds?|s|ms|µs|minutes?|min|hours?|GB|GiB|MB|MiB|kB|KiB)\b",
    r"\s?×(?!\s?\d)", r"x\b", r"-fold\b", r"\stimes\s(?:as|faster|slower|more|less|its|that|the)\b",
    r"\s(?:of|out of)\s(?:the\s)?\d[\d,]*\b"))
FIGURE = re.compile(rf"\\?\$\s?(?P<dollars>\d[\d,]*(?:\.\d+)?)|(?P<number>{NUMBER})(?:{UNIT})"
                    r"|\bp\s?[<=>≤]\s?(?P<chance>0?\.\d+)|\breward of (?P<reward>-?\d+\.\d+)")
SOURCE = re.compile(r"\]\((?:https?:|[^)\s]*\.ipynb|[^)\s]*results\.json)|https?://|arXiv|\b\d{4}\.\d{5}\b")
SETTING = re.compile(r"\b(limits?|limited|defaults?|time-?outs?|budgets?|thresholds?|bounds?|tolerances?|settings?|set to"
                     r"|(ends?|stop(s|ped)?|killed) after)\b", re.I)
LEVEL = re.compile(r"\s(confidence )?interval", re.I)  # 95 % interval
WORKED_OUT = re.compile(r"\d [×*/] [^=;:]+= $")  # 12,000 × 4 bytes = 48 kB
NEAR = 45  # characters between a figure and the word that says what it is
COMMENT = re.compile(r"<!--\s*figure:\s*(\S+)(?:\s+(.+?))?\s*-->", re.S)


@dataclass(frozen=True)
class Block:
    "A paragraph, a list item or a table row."

    file: str
    text: str


# Prose

def plain(text: str) -> str:
    "Without code and formulas: neither is prose."
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
    return re.sub(r"(`+).+?\1|\$\$.+?\$\$|(?<![\w\\$])\$(?!\s)(?:[^$\n]|\n(?!\n))+?\$(?!\d)", "", text, flags=re.S)


def parts(markdown: str) -> list[str]:
    "Its paragraphs, list items and table rows."
    return [part for part in re.split(r"\n\s*\n|\n(?=\s*(?:\d+\.|[-*])\s|\|)", markdown) if part.strip()]


def prose(root: Path) -> Iterator[Block]:
    "All of it, an experiment's promises left out."
    for path in sorted([*root.glob("nbs/**/*.ipynb"), *root.glob("spikes/*/*.ipynb"), *root.glob("docs/**/*.md")]):
        file = path.relative_to(root).as_posix()
        if re.search(r"(^|/)[._]", file) or file == "docs/report.md":
            continue
        for text in cells(path) if path.suffix == ".ipynb" else [path.read_text()]:
            if file.startswith("spikes/"):
                for block in promised(text):
                    text = text.replace(block, "")
            yield from (Block(file, part) for part in parts(plain(text)))


def cells(notebook: Path) -> list[str]:
    "The Markdown cells."
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "markdown"]


# Figures and their sources

def figures(text: str) -> list[tuple[str, str]]:
    "The measured figures of a text, as written, each with the number in it; limits and the like are none."
    measured, text = [], " ".join(COMMENT.sub("", text).split())
    for match in FIGURE.finditer(text):
        number = next(match[name] for name in ("dollars", "number", "chance", "reward") if match[name])
        before = re.split(r"[.;!?]\s", text[max(0, match.start() - NEAR):match.start()])[-1]
        after = re.split(r"[.;:!?](?:\s|$)", text[match.end():match.end() + NEAR])[0]
        if not (SETTING.search(before) or SETTING.search(after) or LEVEL.match(after) or WORKED_OUT.search(before)):
            measured.append((match[0], number.replace(",", "")))
    return measured


def looked_up(value: object, key: str) -> object:
    "The value at a dotted key; names may hold dots themselves, so the longest that is there is taken."
    if not key:
        return value
    words = key.split(".")
    for end in range(len(words), 0, -1):
        name = ".".join(words[:end])
        inside = isinstance(value, dict) and name in value
        if inside or isinstance(value, list) and name.isdigit() and int(name) < len(value):
            return looked_up(value[name if inside else int(name)], ".".join(words[end:]))
    raise KeyError(key)


def equal(written: str, value: float) -> bool:
    "Whether a number as printed is the value, or as a share its percentage, rounded."
    digits, sign = len(written.partition(".")[2]), written[0] in "+-−"
    read, value = float(written.replace("−", "-")), value if sign else abs(value)
    return any(abs(read - round(times * value, digits)) < 1e-9 for times in (1, 100))


def sources(block: Block, root: Path) -> tuple[bool, list[float], list[str]]:
    "Whether a block names a source for all its figures, the values that it names for some, and what is wrong with either."
    whole, named, wrong = bool(SOURCE.search(COMMENT.sub("", block.text))), [], []
    for source, key in COMMENT.findall(block.text):
        if not source.startswith("https://") and not (root / source).is_file():
            wrong.append(f"{block.file}: there is no {source}, which a figure names as its source.")
        elif not key:
            whole = True
        else:
            try:
                named.append(float(looked_up(json.loads((root / source).read_text()), key)))
            except (KeyError, TypeError, ValueError):
                wrong.append(f"{block.file}: {source} has no number {key}.")
    return whole, named, wrong


def problems_of(block: Block, root: Path) -> list[str]:
    "One sentence for each figure of a block that has no source, and for each source that says another value."
    measured = figures(block.text)
    whole, named, wrong = sources(block, root)
    wrong += [f"{block.file}: {value:g} is the value of a source; the text has no such figure: {start(block)}"
              for value in named if not any(equal(number, value) for _, number in measured)]
    return wrong + [f"{block.file}: {written!r} has no source: {start(block)}" for written, number in measured
                    if not whole and not any(equal(number, value) for value in named)]


def start(block: Block) -> str:
    "The first words of a block."
    return " ".join(block.text.split())[:110]


def problems(root: Path = ROOT) -> list[str]:
    "One sentence for each figure without a source."
    return [problem for block in prose(root) for problem in problems_of(block, root)]


if __name__ == "__main__":
    unsourced = problems()
    print("\n".join(unsourced) or "every figure has its source")
    sys.exit(bool(unsourced))
