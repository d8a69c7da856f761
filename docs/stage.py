"""Stage the site's pages for Sphinx: nbs/, spikes/, the prose of docs/ and pages made here, into docs/_staged.

Notebooks are not run. Their hidden cells are left out, exported cells become API entries, and back-ticked names of the
package become links to these. Links between files of the repository become links between pages.
"""
import ast
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from pathlib import Path

import gaps
import nbformat
from nbdev.process import extract_directives

ROOT = Path(__file__).resolve().parents[1]
DOCS, NBS, SPIKES, STAGED = ROOT / "docs", ROOT / "nbs", ROOT / "spikes", ROOT / "docs" / "_staged"
PACKAGE = "composer_replication"

START = ("explorer", "error_site", "training_step", "episodes", "exploits", "replay", "results", "report")
GUIDES = ("guides/one-road", "guides/my-model", "guides/other-machines", "guides/my-traces", "guides/my-agent",
          "guides/my-repository", "guides/my-teachers", "guides/hint-layer", "guides/own-format", "guides/own-detector",
          "guides/own-habit",
          "guides/objective", "guides/metrics", "guides/integrations", "guides/read-a-ladder")
BACKGROUND = ("recipe", "coverage", "comparison", "glossary", "adrs/index", "method")
ROOMS = {  # folders of nbs/, from the ground up (an import only goes down): caption, and what they hold
    "core": ("Core", "Traces, tool calls, errors, files: what all other rooms speak of."),
    "traces": ("Traces", "Readers of trace formats, and where a trace went wrong."),
    "hints": ("Hints", "What would have helped at an error turn: templates, judges, siblings, and the leak check."),
    "sandbox": ("Sandboxes", "Where code that a model wrote may run."),
    "tree": ("Tree", "A trace with its hinted turns as one packed batch, read in one forward."),
    "losses": ("Losses", "The terms of the objective."),
    "replay": ("Replay", "Other models at recorded states, and the pairs that come of it (ours, not Cursor's)."),
    "rollout": ("Rollout", "Sampling with tools, turn by turn."),
    "envs": ("Environments", "Tasks with a reward: deletion from a repository, SQL, arithmetic, a toy."),
    "training": ("Training", "The trainer with all channels, its teachers, guard and health."),
    "recipes": ("Recipes", "A run as one file: planned, checked, run, resumed."),
    "experiments": ("Experiments' parts", "Arms, ladders, statistics, hint scores."),
    "report": ("Reports", "Pages and figures of traces, runs and ladders."),
    "cli": ("Commands' code", "One module per command."),
    "contrib": ("Contributions", "Optional, never imported by the rest: other machines, islands, Muon, other trainers.")}


@dataclass(frozen=True)
class Page:
    "One page of the site."

    source: Path  # the notebook or Markdown file; of a generated page, where it would lie
    name: str  # its place in the site, without a suffix: core/trace

    @property
    def staged(self) -> Path:
        return STAGED / f"{self.name}{self.source.suffix}"


@cache
def pages() -> tuple[Page, ...]:
    "All pages, in reading order within each folder."
    def room(path):
        stem = re.sub(r"^\d+[a-z]?_", "", path.stem)
        return (path.parent.relative_to(NBS) / stem).as_posix()
    def visible(path):
        return not any(part.startswith(("_", ".")) for part in path.relative_to(ROOT).parts)
    prose = set(DOCS.rglob("*.md")) - {DOCS / "report.md"} | {DOCS / f"{name}.md" for name in generated()}
    every = [*(Page(path, room(path)) for path in sorted(NBS.rglob("*.ipynb"))),
             *(Page(path, f"spikes/{path.stem}") for path in sorted(SPIKES.glob("*/*.ipynb"))),
             *(Page(path, path.relative_to(DOCS).with_suffix("").as_posix()) for path in sorted(prose))]
    return tuple(page for page in every if visible(page.source))


# Generated pages

@cache
def generated() -> dict[str, Callable[[], str]]:
    "Pages without a file: name, and what makes it."
    import commands  # here, since `tools/readme.py` needs only the links

    rooms = {f"api/{room}": about for room, about in ROOMS.items() if (NBS / room).is_dir()}
    return {"gaps": lambda: gaps.page(at_gaps), "commands": commands.page,
            **{name: partial(section_page, name, *about) for name, about in rooms.items()},
            "start": lambda: section_page("start", "Start", "Pages that each show one thing, with real values, in seconds."),
            "experiments": experiments_page,
            "api": lambda: section_page("api", "API", "The package, room by room; an import only goes down this list."),
            "background": lambda: section_page("background", "Background", "Sources, words, decisions, and what was tried.")}


def at_gaps(text: str, notebook: Path) -> str:
    "A text of a notebook, its links as the page of the gaps must have them."
    return relink(text, notebook.parent, staged_link(Page(DOCS / "gaps.md", "gaps")))


# Links between files

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")


def relink(
    text: str,  # Markdown
    folder: Path,  # the folder that its links start from
    place: Callable[[Path], str | None],  # what to write for a file; None: leave the link as it is
) -> str:
    "The text with its relative links (and pictures) rewritten."
    def one(match):
        new = place(Path(os.path.normpath(folder / match[1])))
        return match[0] if new is None else new + (match[2] or "")
    return _LINK.sub(one, text)


def staged_link(page: Page) -> Callable[[Path], str | None]:
    "How `page` refers to another file of the repository once both are staged."
    by_source = {p.source: p for p in pages()}
    def place(path):
        if path in by_source:
            return os.path.relpath(by_source[path].staged, page.staged.parent)
        if path.is_relative_to(DOCS / "images"):
            return os.path.relpath(STAGED / path.relative_to(DOCS), page.staged.parent)
        return f"path:{os.path.relpath(path, page.staged.parent)}" if path.is_file() else None  # a download
    return place


def as_page(link: str | None) -> str | None:
    "A link within an output: Sphinx resolves none there, so it must name the page as it will be."
    return link and re.sub(r"\.(ipynb|md)$", ".html", link)


# Names of the package

def module_of(nb) -> str | None:
    "The module that a notebook exports, in full."
    for cell in nb.cells:
        if cell.cell_type == "code" and (marks := directives(cell)).get("default_exp"):
            return f"{PACKAGE}.{marks['default_exp'][0]}"
    return None


def directives(cell) -> dict:
    "The `#|` lines of a code cell."
    return extract_directives(cell, remove=False)


def patched(node: ast.stmt) -> ast.expr | None:
    "The `@patch` of a function that fastcore makes a method of the class that its first parameter names."
    decorators = getattr(node, "decorator_list", ())
    return next((d for d in decorators if ast.unparse(d).partition("(")[0] in ("patch", "patch_to")), None)


def definitions(source: str) -> list[tuple[str, ast.stmt]]:
    "Public functions, classes, constants and patched methods (`Trace.to_json`) of an exported cell, in order."
    named = []
    for node in ast.parse(source).body:
        if patched(node):
            owner = node.args.args[0].annotation
            named.append((f"{getattr(owner, 'value', None) or ast.unparse(owner)}.{node.name}", node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named.append((node.name, node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            named += [(name, node) for name in names if name[0].isupper()]
    return [(name, node) for name, node in named if not re.search(r"(^|\.)_", name)]


def members(node: ast.stmt) -> list[str]:
    "Public methods and properties in the body of a class."
    inner = node.body if isinstance(node, ast.ClassDef) else ()
    return [n.name for n in inner if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name[0] != "_"]


@cache
def symbols() -> dict[str, tuple[str, ...]]:
    "Every documented name, short (`Trace`, `Trace.to_json`), to the full names it may stand for."
    homes: dict[str, set[str]] = {}
    for page in pages():
        if page.source.suffix != ".ipynb":
            continue
        nb = nbformat.read(page.source, 4)
        module = module_of(nb)
        for cell in nb.cells if module else ():
            if cell.cell_type == "code" and directives(cell).keys() & {"export", "exports"}:
                for name, node in definitions(cell.source):
                    for short in [name, *(f"{name}.{member}" for member in members(node))]:
                        homes.setdefault(short, set()).add(f"{module}.{short}")
    return {short: tuple(sorted(full)) for short, full in homes.items()}


def resolve(name: str, module: str | None) -> str | None:
    "The full name that a back-ticked one stands for: of the same module first, else where it is the only one."
    places = symbols().get(name, ())
    own = f"{module}.{name}"
    if own in places:
        return own
    distinct = re.search("[A-Z_.]", name)  # `table` alone may be just a word
    return places[0] if len(places) == 1 and distinct else None


_CODE = re.compile(r"(?<![\[`])`([A-Za-z_][\w.]*)(\(\))?`(?![\]`])")


def link_names(markdown: str, module: str | None) -> str:
    "Back-ticked names outside of code blocks and headings made links to their API entries."
    def one(match):
        full = resolve(match[1], module)
        return f"[{match[0]}](#{full})" if full else match[0]
    lines, fenced = [], False
    for line in markdown.splitlines():
        fence = line.lstrip().startswith(("```", "~~~"))
        fenced ^= fence
        plain = fence or fenced or line.startswith(("    ", "#"))
        lines.append(line if plain else _CODE.sub(one, line))
    return "\n".join(lines)


def docstring_to_rst(line: str, module: str | None) -> str:
    "One line of a docstring or docment, which is written as plain prose with back-ticks, as reStructuredText."
    parts = re.split(r"(`+)(.+?)\1", line)
    out = []
    for i in range(0, len(parts), 3):
        out.append(re.sub(r"([\\*|])|_(?!\w)", lambda m: "\\" + m[0], parts[i]))
        if i + 2 < len(parts):
            code = parts[i + 2]
            full = resolve(code.removesuffix("()"), module)
            out.append(f":py:obj:`{code} <{full}>`" if full else f"``{code}``")
            if parts[i + 3][:1].isalnum():
                out.append("\\ ")
    return "".join(out)


# API entries

def entry(module: str, name: str, node: ast.stmt) -> str:
    "The API entry of one definition, as reStructuredText."
    full = f"{module}.{name}"
    if mark := patched(node):
        return f".. {'autoproperty' if 'as_prop' in ast.unparse(mark) else 'automethod'}:: {full}\n"
    if isinstance(node, ast.ClassDef):
        inner = members(node)
        return f".. autoclass:: {full}\n" + (f"   :members: {', '.join(inner)}\n   :undoc-members:\n" if inner else "")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f".. autofunction:: {full}\n"
    value = ast.unparse(node.value) if node.value is not None else ""
    shown = f"   :value: {value}\n" if len(value) < 100 else ""
    return f".. py:data:: {name}\n   :module: {module}\n{shown}"


def api(module: str, source: str) -> list:
    "The API entries of an exported cell: one Markdown cell, or none."
    entries = [entry(module, name, node) for name, node in definitions(source)]
    return [nbformat.v4.new_markdown_cell("```{entries}\n" + "\n".join(entries) + "```")] if entries else []


# Staging

SHOWN = {"echo:": ("false", "remove-input"), "output:": ("false", "remove-output"),
         "code-fold:": ("true", "hide-input")}  # directive: its value, the tag that myst-nb reads


def name_drawings(html: str, words: str) -> str:
    "Drawings without a name get one. What stands in a frame or is written by a script has to name its own."
    if "<iframe" in html or "<script" in html:
        return html
    return re.sub(r"<svg(?![^>]*\s(?:role|aria-[a-z]+)=)", f'<svg role="img" aria-label="{escape(words)}"', html)


WIDEST = 92  # characters of an output that fit the page
TABULAR = re.compile(r"\S {2,}\S|[─━│┃|]")  # gaps or rules within a line


def fold(text: str) -> str:
    "Long lines of prose folded; tables and trees of characters are left as they are."
    def one(line):
        prose = len(line) > WIDEST and not TABULAR.search(line)
        return textwrap.fill(line, WIDEST, break_long_words=False) if prose else line
    return "\n".join(map(one, text.split("\n")))


def show(output, words: str) -> None:
    "Change an output to what the site shows: drawings with a name, prose that fits."
    data = output.get("data", {})
    if "text/html" in data:
        data["text/html"] = name_drawings(data["text/html"], words)
    if output.output_type == "stream":
        output.text = fold(output.text)
    elif "text/plain" in data:
        data["text/plain"] = fold(data["text/plain"])


def code_cell(
    cell,
    module: str | None,
    heading: str,  # what it stands under: the text of a figure that has none of its own
) -> list:
    "What a code cell becomes: nothing, API entries, itself."
    marks = extract_directives(cell)
    if marks.keys() & {"hide", "exporti", "default_exp"}:
        return []
    cells = api(module, cell.source) if module and marks.keys() & {"export", "exports"} else []
    if "export" in marks:
        return cells
    tags = {tag for key, (value, tag) in SHOWN.items() if marks.get(key) == [value]}
    cell.metadata["tags"] = sorted({*cell.metadata.get("tags", ()), *tags})
    words = " ".join(marks.get("fig-alt:", [f"Figure: {heading}"]))
    cell.metadata["mystnb"] = {"image": {"alt": words}}
    for output in cell.outputs:
        show(output, words)
    cell.source = "\n".join(line for line in cell.source.splitlines() if not re.match(r"\s*#\s*\|", line))
    return [*cells, cell] if cell.source.strip() or cell.outputs else cells


# What experiments, tutorials and methods have beside what their notebooks say

def tag(cell, *names: str) -> None:
    cell.metadata["tags"] = sorted({*cell.metadata.get("tags", ()), *names})


def fold_imports(cells: list) -> None:
    "Cells that only import are folded."
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        if all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(cell.source).body):
            tag(cell, "hide-input")


def is_picture(output) -> bool:
    data = output.get("data", {})
    return "image/png" in data or "image/svg+xml" in data or "<svg" in data.get("text/html", "")


def is_table(output) -> bool:
    data = output.get("data", {})
    return "<table" in data.get("text/html", "") or "|---" in data.get("text/markdown", "")


def is_printed_table(output) -> bool:
    lines = output.get("text", "").splitlines()
    return 2 < len(lines) <= LOUD and all(map(TABULAR.search, lines[:3]))


def is_printed(output) -> bool:
    return 0 < output.get("text", "").count("\n") <= LOUD


def caption(before: list) -> str:
    "What stands before an output: the last paragraph where it is short, else the last heading."
    said = [block for cell in before if cell.cell_type == "markdown" for block in gaps.blocks(cell.source)]
    headings = [block.splitlines()[0].lstrip("# ") + "." for block in said if block.startswith("#")]
    short = said and len(said[-1]) < 300 and re.match(r"[\w`*$]", said[-1])
    return said[-1] if short else headings[-1] if headings[1:] else ""


def take_first(cells: list, wanted: Callable[..., bool]) -> list:
    "The first output of a kind, out of its cell, with a caption, as cells of its own; none where there is none."
    for number, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            if wanted(output):
                cell.outputs.remove(output)
                words = caption(cells[:number])
                cells.insert(number + 1, nbformat.v4.new_markdown_cell("*What this cell shows opens the page.*"))
                shown = nbformat.v4.new_code_cell("...", outputs=[output], metadata={**cell.metadata, "tags": ["remove-input"]})
                return [*([nbformat.v4.new_markdown_cell(words)] if words else ()), shown]
    return []


def merge_printed(cell) -> None:
    "What was printed in pieces, as one."
    for first, second in zip(cell.outputs[:-1], cell.outputs[1:], strict=True):
        if first.output_type == second.output_type == "stream" and first.name == second.name:
            first.text, second.text = "", first.text + second.text
    cell.outputs = [output for output in cell.outputs if output.output_type != "stream" or output.text]


LOUD = 40  # lines of printed text that are folded as well
BOXES = {"VALIDATED": "tip", "UNDECIDED": "warning", "REFUTED": "danger", "NOT RUN": "note"}  # verdict: the theme's colour


def opened(cells: list, one: gaps.Experiment, place: Callable[[Path], str | None]) -> list:
    "An experiment's page: title, question, verdict with its reason, the first picture or table, then the rest, code folded."
    cells = [cell for cell in cells if "checks_screen(" not in cell.source]  # the box of the verdict says it here
    for cell in (cell for cell in cells if cell.cell_type == "code" and "remove-input" not in cell.metadata["tags"]):
        merge_printed(cell)
        printed = sum(output.text.count("\n") for output in cell.outputs if output.output_type == "stream")
        tag(cell, "hide-input", *(["hide-output"] if printed > LOUD else []))
    first = cells[0].source
    head = re.match(r"# .+\n\s*(?:>.*(?:\n|$))*", first)[0]
    cells[0].source = first.removeprefix(head)
    verdict = [f"```{{admonition}} Verdict: {one.verdict}", f":class: {BOXES[one.verdict]}", gaps.cell(one.why), "```"]
    opening = nbformat.v4.new_markdown_cell(head + "\n" + "\n".join(verdict))
    wanted = (is_picture, is_table, is_printed_table, is_printed)
    shown = next(filter(None, (take_first(cells, kind) for kind in wanted)), [])
    return [opening, *shown, *(cell for cell in cells if cell.source.strip())]


METHODS = {"training/objectives": "The policy objective", "losses/distill": "SDPO at error turns",
           "losses/preference": "Trace-replay DPO"}  # a method's page: its section of docs/guides/metrics.md


def method_box(page: Page) -> str:
    "What to watch and how it fails, of a method: its section of the page of metrics, which has the only text."
    if page.name not in METHODS:
        return ""
    guide = DOCS / "guides" / "metrics.md"
    section = guide.read_text().partition(f"\n## {METHODS[page.name]}")[2].partition("\n## ")[0]
    text = relink(section, guide.parent, staged_link(page))
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    watch = gaps.table(("metric", "what it is", "sound"), [row[:3] for row in rows if row[2]])
    fails = gaps.table(("metric", "a fault, and what to do"), [(row[0], row[3]) for row in rows if row[3]])
    whole = f"All of them: [what a run logs]({staged_link(page)(guide)})."
    return "".join(f"\n\n````{{admonition}} {title}\n:class: {look}\n{shown}\n````" for title, look, shown in (
        ("Metrics to watch", "note", f"{watch}\n\n{whole}"), ("How it fails", "warning", fails)))


def notebook(page: Page) -> str:
    "The staged form of a notebook."
    nb = nbformat.read(page.source, 4)
    module, cells, heading = module_of(nb), [], ""
    place, folder = staged_link(page), page.source.parent
    for cell in nb.cells:
        if cell.cell_type == "code":
            for data in (output["data"] for output in cell.outputs if "text/markdown" in output.get("data", ())):
                data["text/markdown"] = relink(data["text/markdown"], folder, lambda path: as_page(place(path)))
            cells += code_cell(cell, module, heading)
        else:
            heading = ([heading] + re.findall(r"^#+ (.+)$", cell.source, re.M))[-1]
            cell.source = link_names(relink(cell.source, folder, place), module)
            cells.append(cell)
    if page.name.startswith("spikes/"):
        cells = opened(cells, gaps.Experiment(page.source), place)
    if page.name in START:
        fold_imports(cells)
    if page.name == "index":
        cells.append(nbformat.v4.new_markdown_cell(toctree(f"{words} <{name}>" for words, name in SECTIONS.items())))
    elif module:
        below_title = nbformat.v4.new_markdown_cell(f"```{{py:module}} {module}\n```" + method_box(page))
        cells.insert(1, below_title)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # the same page, the same file: no needless rebuild
    nb.cells = cells
    nb.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}  # nbdev_clean takes it away
    return nbformat.writes(nb)


# Contents: six sections, each a page that lists what is in it

SECTIONS = {"Start": "start", "Guides": "guide", "Commands": "commands", "Experiments": "experiments", "API": "api",
            "Background": "background"}  # what the sidebar says: the page


@cache
def contents() -> dict[str, tuple[str, ...]]:
    "The pages below each section and room, by its name. Every page has one place; what has none named is Background."
    left = [page.name for page in pages() if page.name not in {"index", *SECTIONS.values()}]
    def take(*names):
        taken = tuple(name for name in dict.fromkeys(names) if name in left)
        left[:] = [name for name in left if name not in taken]
        return taken
    def within(folder):
        return [name for name in left if name.startswith(f"{folder}/")]
    below = {"start": take(*START), "guide": take(*GUIDES, *within("guides"), "troubleshooting"),
             "experiments": take("gaps", *within("spikes")), "api": take(*(f"api/{room}" for room in ROOMS))}
    below |= {room: take(*within(room.removeprefix("api/"))) for room in below["api"]}
    decisions = take(*(name for name in within("adrs") if name != "adrs/index"))
    return {**below, "background": take(*BACKGROUND, *left), "adrs/index": decisions}


def kinds() -> dict[str, str]:
    "What a search says that each page is."
    said = {"start": "start", "guide": "guide", "commands": "command", "experiments": "experiment", "api": "API",
            "background": "background"}
    below = contents()
    of = {name: kind for section, kind in said.items() for name in (section, *below.get(section, ()))}
    modules = {name: "module" for room in below["api"] for name in below[room]}
    return {"index": "start", **of, **modules, **dict.fromkeys(below["adrs/index"], "background")}


def plain(markdown: str) -> str:
    "A line of Markdown without its links and bold type."
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown).replace("**", "")


def llms_txt() -> str:
    "The contents with a line of purpose each, for language models: https://llmstxt.org."
    below, title = contents(), summary("index")
    def listed(names):
        told = [(name, *map(plain, summary(name))) for name in names]
        return [f"- [{head}]({name}.html)" + f": {purpose}" * bool(purpose) for name, head, purpose in told]
    parts = [f"# {title[0]}", f"> {plain(title[1])}"]
    for words, section in SECTIONS.items():
        parts += [f"## {words}", "\n".join(listed([section, *below.get(section, ())]))]
    optional = [name for group in (*below["api"], "adrs/index") for name in below[group]]
    return "\n\n".join([*parts, "## Optional", "\n".join(listed(optional))]) + "\n"


@cache
def summary(name: str) -> tuple[str, str]:
    "A page's title, and its purpose: the quoted line below the title, else its first sentence."
    page = next(page for page in pages() if page.name == name)
    if name.startswith("api/"):
        return ROOMS[name.removeprefix("api/")]
    if page.source.suffix == ".ipynb":
        text = next(cell.source for cell in nbformat.read(page.source, 4).cells if cell.cell_type == "markdown")
    else:
        text = generated()[name]() if name in generated() else page.source.read_text()
    title, *rest = gaps.blocks(re.sub(r"<!--.*?-->", "", text, flags=re.S))
    first, *below = title.splitlines()  # the line of purpose may follow the title without an empty one
    said = " ".join(re.sub("^> ?", "", line) for line in (below or (rest or [""])[0].splitlines()))
    said = relink(said, page.source.parent, staged_link(Page(DOCS / "section.md", "section")))
    return first.lstrip("# "), re.split(r"(?<=[.?!]) (?=[A-Z])", said)[0] if "|" not in said else ""


def toctree(names: Iterable[str]) -> str:
    "A hidden table of contents: the sidebar shows it."
    return "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```"


def section_page(name: str, title: str, purpose: str) -> str:
    "The page of a section or room: what is in it, with a line of purpose each."
    rows = [(f"[{gaps.cell(head)}](/{one}.{'ipynb' if is_notebook(one) else 'md'})", gaps.cell(said))
            for one in contents()[name] for head, said in [summary(one)]]
    return "\n\n".join([f"# {title}", purpose, gaps.table(("page", "purpose"), rows)])


def is_notebook(name: str) -> bool:
    "Whether the page of this name is a notebook."
    return any(page.name == name and page.source.suffix == ".ipynb" for page in pages())


def experiments_page() -> str:
    "The page of all experiments, by number, each with its question and verdict."
    every = sorted(gaps.experiments(), key=lambda one: one.notebook.stem)
    rows = [(f"[{gaps.cell(one.title)}](/spikes/{one.notebook.stem}.ipynb)", gaps.cell(one.question), f"**{one.verdict}**")
            for one in every]
    return "\n\n".join(["# Experiments", "Each states its hypothesis and threshold before the run. What failed, and why: "
                         "[honest gaps](/gaps.md).", gaps.table(("experiment", "question", "verdict"), rows)])


def prose(page: Page) -> str:
    "A page that is Markdown, its links as the site has them."
    text = generated()[page.name]() if page.name in generated() else page.source.read_text()
    text = relink(text, page.source.parent, staged_link(page))
    return f"{text}\n\n{toctree(f'/{name}' for name in contents()[page.name])}\n" if contents().get(page.name) else text


def put(path: Path, content: str) -> Path:
    "Write where the content is new, so that Sphinx reads again only what changed."
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != content:
        path.write_text(content)
    return path


def stage() -> Path:
    "Bring docs/_staged up to date; what has no source any more goes."
    kept = set()
    for page in pages():
        if page.source.suffix == ".ipynb":
            content = notebook(page)
        else:
            content = link_names(prose(page), None)
        kept.add(put(page.staged, content))
    for image in (DOCS / "images").glob("*.*"):
        target = STAGED / "images" / image.name
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(image, target)
        kept.add(target)
    for old in STAGED.rglob("*"):
        if old.is_file() and old not in kept:
            old.unlink()
    return STAGED


if __name__ == "__main__":
    print(stage())
