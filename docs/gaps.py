"""The page `gaps`: every experiment with its verdict, and of those that are not VALIDATED what was expected, what failed, why.

Nothing here is written by hand: words come from the notebooks of spikes/ and docs/recipe.md, numbers from results.json.
"""
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("REFUTED", "NOT RUN", "UNDECIDED", "VALIDATED")
ABOUT_THE_RUN = {"seed", "seeds", "parameters", "hardware", "machine", "versions", "settings", "setting", "prices"}
MANY = 60  # more numbers than this under one name are raw data, for the experiment's own page
NEXT = re.compile(r"what\s+would\s+help|next\s+thing\s+to\s+run|should\s+confirm|changes\s+that\s+the\s+counts\s+suggest", re.I)

INTRO = """# Honest gaps

What was expected and did not come, or was not tried: made from the notebooks and their `results.json` when the site is built."""


@dataclass(frozen=True)
class Experiment:
    "One folder of spikes/: its notebook, and the results that its last run wrote."

    notebook: Path

    @cached_property
    def results(self) -> dict:
        return json.loads(self.notebook.with_name("results.json").read_text())

    @cached_property
    def prose(self) -> list[str]:
        "The Markdown cells."
        cells = json.loads(self.notebook.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]

    @property
    def verdict(self) -> str:
        return self.results["verdict"]

    @property
    def title(self) -> str:
        return self.prose[0].splitlines()[0].removeprefix("# ").removeprefix("Spike ")

    @property
    def question(self) -> str:
        "The subtitle, on one line."
        return next((" ".join(re.sub("^> ?", "", line) for line in block.splitlines())
                     for block in blocks(self.prose[0]) if block.startswith(">")), "")

    @property
    def printed(self) -> str:
        "What the cells below its heading `Verdict` print, without the verdict itself."
        cells = json.loads(self.notebook.read_text())["cells"]
        starts = [i for i, cell in enumerate(cells) if "".join(cell["source"]).startswith("## Verdict")]
        outputs = [output for cell in cells[starts[-1]:] for output in cell.get("outputs", ())] if starts else []
        lines = "".join("".join(output.get("text", "")) for output in outputs).splitlines()
        return "; ".join(filter(None, (line.removeprefix(self.verdict).lstrip(": ") for line in lines)))

    @property
    def why(self) -> str:
        "The reason for its verdict, with the checks that did not come out; of its page where results.json has none."
        if self.results.get("reason"):
            return reason(self.results)
        def named(wanted):
            names = "; ".join(name for name, state in checks(self.results) if state == wanted)
            return f" {wanted.capitalize()}: {names}." if names else ""
        counted = reason(self.results) + named("not met") + named("not run")
        held = "Every clause of the hypothesis held" if self.verdict == "VALIDATED" else "Its page gives the reason"
        return counted or f"{self.printed or held}.".capitalize()


def experiments(root: Path = ROOT) -> list[Experiment]:
    "All of them: what failed first, what holds last."
    every = [Experiment(path) for path in sorted(root.glob("spikes/*/*.ipynb")) if path.with_name("results.json").exists()]
    return sorted(every, key=lambda one: ORDER.index(one.verdict))


def blocks(markdown: str) -> list[str]:
    "Paragraphs, lists and tables: what empty lines part."
    return [block for block in re.split(r"\n\s*\n", markdown.strip()) if block.strip()]


def promised(markdown: str) -> list[str]:
    "The blocks that state hypothesis and threshold, with their lists and tables."
    stated, within = [], False
    for block in blocks(markdown):
        listed = re.match(r"\s*(\d+\.|[-*] |\|)", block)
        within = bool(re.match(r"\*\*(Hypothes|Threshold)", block)) or within and bool(listed)
        if within or block.startswith("|") and re.search("hypothesis|threshold", block.splitlines()[0]):
            stated.append(block)
    return stated


def checks(results: dict) -> list[tuple[str, str]]:
    "What the run was judged by: name, and met, not met, not run, or a verdict of its own."
    words = {True: "met", False: "not met", None: "not run"}
    def within(name, value):
        if not isinstance(value, dict):
            return [(name, value if isinstance(value, str) else words[value])]
        return [check for key, inner in value.items() for check in within(f"{name}: {key}" if name else key, inner)]
    own = [(name, effect["verdict"]) for name, effect in results.get("effects", {}).items()]
    return within("", results.get("checks", {})) + own


def reason(results: dict) -> str:
    "Why the verdict is what it is: as the run says it, else counted from its checks."
    if results.get("reason"):
        return results["reason"][0].upper() + results["reason"][1:].rstrip(".") + "."
    if not (states := [state for _, state in checks(results)]):
        return ""
    counted = [f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states))]
    return f"Of {len(states)} checks: {', '.join(counted)}."


def shown(number: float) -> str:
    "A number, four digits of it where it is no count."
    return str(number) if isinstance(number, int) else f"{number:.4g}"


def numbers(value: object, name: str = "") -> list[tuple[str, str]]:
    "The numbers below one name, each with its path; an estimate has its interval beside it."
    if isinstance(value, dict) and {"estimate", "low", "high"} <= set(value):
        return [(name, f"{shown(value['estimate'])} ({shown(value['low'])} to {shown(value['high'])})")]
    if isinstance(value, dict):
        return [row for key, inner in value.items() for row in numbers(inner, f"{name}, {key}" if name else str(key))]
    if isinstance(value, list) and all(isinstance(item, dict) and "estimate" in item for item in value):
        return [row for item in value for row in numbers(item, name)]
    return [(name, shown(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []


def measured(results: dict) -> list[tuple[str, str]]:
    "The numbers that a run wrote down, without raw data and without what describes the run itself."
    tables = [numbers(value, name) for name, value in results.items() if name not in ABOUT_THE_RUN]
    return [row for rows in tables if len(rows) <= MANY for row in rows]


def next_steps(prose: list[str]) -> list[str]:
    "What the notebook would try next: the paragraphs that open with it, else the sentences that say so."
    steps = []
    for block in (block for text in prose for block in blocks(text) if NEXT.search(block)):
        opens = NEXT.search(block[:60])
        steps += [block] if opens else [s for s in re.split(r"(?<=\.)\s+", block) if NEXT.search(s)]
    return steps


def cell(text: str) -> str:
    "Text as it may stand in a table or in a line of Markdown: no mark of it starts a column or a formula."
    return re.sub(r"([|$])", r"\\\1", text)


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    "A Markdown table."
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def failures(one: Experiment) -> str:
    "Which checks did not come out, why, and in the run's own words where it has no checks."
    rows = [(cell(name), state) for name, state in checks(one.results) if state not in ("met", "VALIDATED")]
    verdicts = "\n".join(f"- {cell(line)}" for line in one.results.get("verdicts", ()))
    parts = [cell(reason(one.results)), table(("check", "came out"), rows) if rows else "", verdicts]
    return "\n\n".join(part for part in parts if part)


def values(one: Experiment) -> str:
    "The run's numbers, folded."
    rows = [(cell(name.replace("_", " ")), value) for name, value in measured(one.results)]
    return f"```{{dropdown}} The numbers of the run\n{table(('name', 'value'), rows)}\n```" if rows else ""


def section(one: Experiment) -> str:
    "Everything about one experiment that is not VALIDATED, folded."
    parts = [f"[The notebook]({one.notebook.name}). {one.question}"]
    if expected := promised("\n\n".join(one.prose)):
        parts += ["**What was expected.**", *expected]
    parts += ["**What came out.**" if one.verdict != "NOT RUN" else "**Why not.**", failures(one), values(one)]
    if steps := next_steps(one.prose):
        parts += ["**What would be tried next.**", *steps]
    return folded(f"{cell(one.title)}: {one.verdict}", "\n\n".join(part for part in parts if part))


def folded(title: str, text: str) -> str:
    "A text behind its title."
    return f":::::{{dropdown}} {title}\n{text}\n:::::"


def not_measured(one: Experiment) -> list[str]:
    "What the notebook of an experiment that holds says it leaves out."
    opening = re.compile(r"\*\*(What is not measured|The weights are random)")
    limits = [block for text in one.prose for block in blocks(text) if opening.match(block)]
    return [f"[{one.title}]({one.notebook.name}): " + " ".join(block.split()) for block in limits]


def not_built(root: Path = ROOT) -> list[str]:
    "Rows of the recipe's tables that say so."
    recipe = root / "docs" / "recipe.md"
    lines = recipe.read_text().splitlines()
    return [line.strip("| ").split(" | ")[0] for line in lines if line.startswith("|") and "not built yet" in line]


def page(
    linked,  # rewrites the links of a text that stands in a notebook: (text, notebook) -> text
    root: Path = ROOT,
) -> str:
    "The page, as Markdown."
    every = experiments(root)
    verdicts = [one.verdict for one in every]
    counted = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ORDER)
    parts = [linked(section(one), one.notebook) for one in every if one.verdict != "VALIDATED"]
    if holds := [linked(line, one.notebook) for one in every if one.verdict == "VALIDATED" for line in not_measured(one)]:
        parts.append(folded("What experiments that hold leave out", "\n\n".join(holds)))
    if missing := not_built(root):
        rows = "\n".join(f"- {cell(row)}" for row in missing)
        parts.append(folded("Of the recipe, not built yet", f"{rows}\n\nThe table with sources is in [the recipe](recipe.md)."))
    summed = f"**{counted}.** Each with its question: [experiments](experiments.md)."
    return "\n\n".join([INTRO, summed, "::::::{div} compact", *parts, "::::::"]) + "\n"
