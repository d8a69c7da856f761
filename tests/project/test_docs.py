"""The site builds without a warning, no link within it is dead, it needs no network, and who cannot see it can read it."""
import json
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import gaps  # noqa: E402
import stage  # noqa: E402

LARGEST = 500_000  # bytes of a page
LARGER: dict[str, str] = {}  # a page that may be larger, and why


class Names(HTMLParser):
    "The anchors of a page and what it refers to."

    def __init__(self):
        super().__init__()
        self.anchors, self.links, self.loads = {""}, [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        source = given.get("src") or (given.get("href") if tag == "link" and given.get("rel") != "canonical" else None)
        if source:
            self.loads.append(source)


@cache
def names(page: Path) -> Names:
    "What a page holds."
    parser = Names()
    parser.feed(page.read_text())
    return parser


@cache
def target_of(folder: Path, path: str) -> Path | None:
    "The file that a link in a folder leads to, where there is one: most links stand in the sidebar of every page."
    target = (folder / unquote(path)).resolve()
    target = target / "index.html" if target.is_dir() else target
    return target if target.is_file() else None


def dead_links(site: Path) -> list[str]:
    "One line for each link or file within the site that leads nowhere."
    dead = []
    for page in sorted(site.rglob("*.html")):
        for link in names(page).links + names(page).loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = target_of(page.parent, parts.path) if parts.path else page
            if not target or (parts.fragment and target.suffix == ".html"
                              and unquote(parts.fragment) not in names(target).anchors):
                dead.append(f"{page.relative_to(site)}: {link}")
    return dead


def test_no_link_is_dead(site):
    assert dead_links(site) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text("<h1 id=top></h1><a href='#top'></a><a href='b.html#here'></a><img src='c.png'>")
    (tmp_path / "b.html").write_text("<p id=there></p><a href='a.html'></a>")
    assert dead_links(tmp_path) == ["a.html: b.html#here", "a.html: c.png"]


def test_every_notebook_and_prose_page_is_there(site):
    assert [page.name for page in stage.pages() if not (site / f"{page.name}.html").exists()] == []


def test_every_public_definition_has_an_anchor(site):
    anchors = {anchor for page in site.rglob("*.html") for anchor in names(page).anchors}
    missing = {full for several in stage.symbols().values() for full in several} - anchors
    assert missing == set()
    assert "composer_replication.core.trace.Trace.to_json" in names(site / "core" / "trace.html").anchors


def test_names_in_prose_lead_to_the_api(site):
    assert any(link.endswith("#composer_replication.core.trace.TraceProblem")
               for link in names(site / "core" / "trace.html").links)


def test_pages_need_no_network(site):
    if not (ROOT / "docs" / "_static" / "vendor" / "complete").exists():
        pytest.skip("the scripts were not fetched: apt-get install npm, then make docs")
    loads = {load for page in site.rglob("*.html") for load in names(page).loads}
    assert {load for load in loads if urlsplit(load).scheme in ("http", "https")} == set()


def test_search_knows_the_words_and_the_names(site):
    index = (site / "searchindex.js").read_text()
    assert "TraceProblem" in index and "observ" in index


def test_no_page_is_half_a_megabyte(site):
    sizes = {page.relative_to(site).as_posix(): page.stat().st_size for page in site.rglob("*.html")}
    assert {page: size for page, size in sizes.items() if size >= LARGEST and page not in LARGER} == {}


# Who cannot see it

NAMED = ("aria-label", "aria-labelledby", "title")
CONTROLS = ("a", "button", "label")  # a drawing in one of these is decoration where the control has a text of its own
EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
NO_HEADING = {"search.html": "Sphinx's script writes it when it searches"}


class Seen(HTMLParser):
    "What a page shows without a word for it."

    def __init__(self):
        super().__init__()
        self.headings, self.language, self.faults = 0, "", []
        self.open = []  # elements that are open, each with the words in it, and whether it is a picture with a name
        self.inputs = set()  # those with a name, which is also that of their labels
        self.drawings = []  # those without a name of their own, each with the words of the control that it stands in

    def handle_starttag(self, tag, attrs):
        told = {key: value or "" for key, value in attrs}
        self.headings += tag == "h1"
        self.language = told.get("lang", "") if tag == "html" else self.language
        if tag == "img" and (not told.get("alt", "").strip() or re.search(r"\.(png|svg|jpe?g|gif)$", told["alt"].strip())):
            self.faults.append(f"img {told.get('src')}: alt is {told.get('alt')!r}")
        if tag == "iframe" and not told.get("title", "").strip():
            self.faults.append(f"iframe without a title: {str(told)[:80]}")
        hidden = told.get("aria-hidden") == "true" or "display: none" in told.get("style", "")
        named = told.get("role") == "img" and any(told.get(key, "").strip() for key in NAMED)
        if tag == "svg" and not (hidden or named or any(name == "svg" or picture for name, _, picture in self.open)):
            control = next((words for name, words, _ in reversed(self.open) if name in CONTROLS), None)
            self.drawings.append((control, f"svg without a name: {str(told)[:80]}"))
        words = [told[key] for key in NAMED if told.get(key, "").strip()]
        if tag == "input" and words and told.get("id"):
            self.inputs.add(told["id"])
        if tag not in EMPTY:
            self.open.append((tag, words + [told["for"]] if told.get("for") in self.inputs else words, named))

    def handle_data(self, data):
        if data.strip():
            for _, words, _ in self.open:
                words.append(data)

    def handle_endtag(self, tag):
        while self.open and any(name == tag for name, _, _ in self.open) and self.open.pop()[0] != tag:
            pass

    def close(self):
        super().close()
        self.faults += [fault for control, fault in self.drawings if not control]


def unseen(page: Path) -> list[str]:
    "One line for each thing of a page that has no words for who cannot see it."
    seen = Seen()
    seen.feed(page.read_text())
    seen.close()
    heading = [] if seen.headings == 1 or page.name in NO_HEADING else [f"{seen.headings} headings of the first level"]
    return heading + ([] if seen.language else ["no language"]) + seen.faults


def test_every_page_has_words_for_what_it_shows(site):
    faults = {page.relative_to(site).as_posix(): unseen(page) for page in sorted(site.rglob("*.html"))}
    assert {page: found for page, found in faults.items() if found} == {}


GOOD = """<html lang=en><h1>A</h1><img src=a.png alt="Two bars"><iframe title=Player></iframe>
<svg role=img aria-label=Bars><svg/></svg><div role=img aria-label=Lines><svg></svg></div>
<svg aria-hidden=true></svg><a href=b><svg></svg> Next</a>
<button aria-label=Menu><svg></svg></button><input id=i aria-label=Index><label for=i><svg></svg></label></html>"""


@pytest.mark.parametrize("good, bad", [
    ("alt=\"Two bars\"", ""), ("alt=\"Two bars\"", "alt=' '"), ("Two bars", "_images/a.png"), ("title=Player", ""),
    ("svg role=img", "svg"), ("div role=img", "div"), ("aria-label=Bars", ""), ("aria-label=Lines", ""),
    ("aria-hidden=true", ""), (" Next", ""), ("aria-label=Menu", ""),
    ("<h1>A</h1>", ""), (" lang=en", ""), ("aria-label=Index", "")])
def test_what_has_no_words_is_found(tmp_path, good, bad):
    page = tmp_path / "a.html"
    page.write_text(GOOD)
    assert unseen(page) == []
    page.write_text(GOOD.replace(good, bad))
    assert len(unseen(page)) == 1


# Links to elsewhere

ELSEWHERE = re.compile(r"(?<![`\w])(?:\]\(|<|)(https?:[^\s)>`\"'\]|]*)")


def prose(path: Path) -> str:
    "The Markdown of a page, code left out."
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    else:
        text = path.read_text()
    return re.sub(r"(`+).+?\1", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.S)


def ill_formed(text: str) -> list[str]:
    "Links to the web that are not https, or lead to no host."
    def good(link):
        parts = urlsplit(link)
        return parts.scheme == "https" and re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc) and "//" not in parts.path
    links = [link.rstrip(".,;:") for link in ELSEWHERE.findall(text)]
    return [link for link in links if not good(link)]


def test_links_to_the_web_are_https_and_well_formed():
    pages = [page.source for page in stage.pages() if page.source.exists()]
    found = {page.relative_to(ROOT).as_posix(): ill_formed(prose(page)) for page in [*pages, ROOT / "README.md"]}
    assert {page: links for page, links in found.items() if links} == {}


@pytest.mark.parametrize("link", ["http://example.org/a", "https:/example.org", "https://example", "https://exa mple.org", "https://"])
def test_an_ill_formed_link_is_found(link):
    assert ill_formed(f"See [this]({link}).") and not ill_formed("See [this](https://example.org/a_b?c=d#e), <https://arxiv.org/>.")


# API entries

SOURCE = """
class Cat:
    def purr(self): ...

@patch
def walk(self: Cat, far: int): ...

@patch(as_prop=True)
def age(self: "Cat"): ...

@patch
def _hide(self: Cat): ...
"""


def test_a_patched_method_belongs_to_its_class():
    assert [name for name, _ in stage.definitions(SOURCE)] == ["Cat", "Cat.walk", "Cat.age"]
    entries = stage.api("room.thing", SOURCE)[0].source
    for line in (".. autoclass:: room.thing.Cat", "   :members: purr", ".. automethod:: room.thing.Cat.walk",
                 ".. autoproperty:: room.thing.Cat.age"):
        assert line in entries.splitlines()
    assert stage.resolve("Trace.to_json", None) == "composer_replication.core.trace.Trace.to_json"


def test_long_prose_is_folded_and_tables_are_not():
    assert max(map(len, stage.fold("word " * 60).split("\n"))) <= stage.WIDEST
    wide = "name" + " " * 80 + "value" + " " * 20 + "unit"
    assert stage.fold(wide) == wide and stage.fold("─" * 120) == "─" * 120


# Pages that are generated

def test_llms_txt_lists_every_page_with_its_purpose(site):
    title, _, purpose, *rest = (site / "llms.txt").read_text().splitlines()
    assert title == "# composer_replication" and purpose.startswith("> An open replication")
    assert [line[3:] for line in rest if line.startswith("## ")] == [*stage.SECTIONS, "Optional"]  # llmstxt.org: may be left out
    entries = [re.fullmatch(r"- \[(.+?)\]\(([\w/.-]+)\)(: .+)?", line) for line in rest if line.startswith("- ")]
    assert [entry for entry in entries if not entry or not (site / entry[2]).is_file()] == []
    listed = [entry[2].removesuffix(".html") for entry in entries]
    assert sorted(listed) == sorted(page.name for page in stage.pages() if page.name != "index")
    assert sum(not entry[3] for entry in entries) < 10 and not any("](" in (entry[3] or "") for entry in entries)


def test_decisions_are_listed_as_they_are():
    rows = re.findall(r"^\| (\d+) \| \[(.+?)\]\((.+?)\) \| (.+\.) \| (.+?) \|$", (ROOT / "docs/adrs/index.md").read_text(), re.M)
    files = sorted((ROOT / "docs/adrs").glob("0*.md"))
    assert [(int(number), title, name) for number, title, name, _, _ in rows] == [
        (int(file.stem[:3]), file.read_text().splitlines()[0].partition(". ")[2], file.name) for file in files]
    assert {status.split(" on ")[0] for *_, status in rows} <= {"in force", "changed"}
    for file, (*_, status) in zip(files, rows, strict=True):
        assert ("**Changed on" in file.read_text()) == status.startswith("changed"), file.name
    assert "adrs/index" in stage.contents()["background"] and len(stage.contents()["adrs/index"]) == len(files)


def test_every_page_has_one_place_in_the_contents():
    contents = stage.contents()
    placed = [name for names in contents.values() for name in names]
    sections = set(stage.SECTIONS.values())
    assert sorted(placed) == sorted(page.name for page in stage.pages() if page.name not in {"index", *sections})
    assert set(contents) == sections - {"commands"} | {"adrs/index"} | set(contents["api"])
    assert contents["start"] == stage.START and contents["experiments"][0] == "gaps"


def test_a_section_tells_what_its_pages_are_for():
    page = stage.section_page("start", "Start", "Purpose.")
    assert [line.count("](/") for line in page.splitlines()[6:]] == [1] * len(stage.START)
    assert stage.summary("core/errors") == (
        "Errors", "One base class for what this package refuses: what is wrong, where, and what to do.")
    assert [name for names in stage.contents().values() for name in names if not stage.summary(name)[0]] == []


def test_signatures_of_commands_hold_no_addresses(site):
    assert [page.name for page in (site / "cli").glob("*.html") if "OptionInfo" in page.read_text()] == []


def folded(markdown: str) -> dict[str, str]:
    "What a page folds away, by the line that stays."
    return {title: text for title, text in re.findall(r"^:{5}\{dropdown\} ([^\n]+)\n(.*?)^:{5}$", markdown, re.M | re.S)}


def test_the_gaps_tell_every_experiment_and_why_it_failed():
    page = gaps.page(stage.at_gaps)
    every, parts = gaps.experiments(), folded(page)
    counted = dict(re.findall(r"(?:^|, )(\d+) ([A-Z ]+)(?=[,.])", page.partition("**")[2].partition("**")[0]))
    assert {verdict: int(number) for number, verdict in counted.items()} == {
        verdict: sum(one.verdict == verdict for one in every) for verdict in gaps.ORDER}
    order = [title.rpartition(": ")[2] for title in parts if re.match(r"\d{3}", title)]
    assert order == sorted(order, key=gaps.ORDER.index)
    for one in every:
        section = parts.get(f"{gaps.cell(one.title)}: {one.verdict}", "")
        assert bool(section) == (one.verdict != "VALIDATED")
        assert not section or "**What was expected.**" in section
        for name, state in gaps.checks(one.results):
            assert not section or (f"| {gaps.cell(name)} | {state} |" in section) == (state not in ("met", "VALIDATED"))


def test_what_an_experiment_says_comes_out_as_it_is(tmp_path):
    cells = ["# 009: X\n\n> Is it\n> so?\n\n**Hypothesis.** It is.\n\n**Threshold**: 6.\n\n1. Once.\n\nMore.",
             "**What would help**: time."]
    notebook = {"cells": [{"cell_type": "markdown", "source": [cell]} for cell in cells]}
    results = {"verdict": "PARTIAL", "checks": {"a|b": False, "c": None, "d": {"e": True}},
               "gain": {"estimate": 0.25, "low": 0, "high": 1}}
    (tmp_path / "spikes/009-x").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/recipe.md").write_text("| Muon | blog | not built yet |\n")
    (tmp_path / "spikes/009-x/009-x.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "spikes/009-x/results.json").write_text(json.dumps(results))
    page = gaps.page(lambda text, notebook: text, tmp_path)
    for line in (":::::{dropdown} 009: X: PARTIAL", "[The notebook](009-x.ipynb). Is it so?", "1. Once.",
                 "Of 3 checks: 1 met, 1 not met, 1 not run.",
                 "| a\\|b | not met |", "| c | not run |", "| gain | 0.25 (0 to 1) |", "**What would help**: time.", "- Muon"):
        assert line in page.splitlines()
    assert "More." not in page


def test_the_evidence_of_the_coverage_is_there():
    lines = (ROOT / "docs/coverage.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| (?!aim|step|invariant|---)", line)]
    columns = [[part.strip() for part in row.strip("|").split(" | ")] for row in rows]
    assert len(rows) > 40
    assert [row[0] for row in columns if not {"done", "part", "not run", "not built"} & set(row[1:3])] == []
    missing = [name for row in rows for name in re.findall(r"`(tests/[\w/.]+)`", row) if not (ROOT / name).is_file()]
    for row in rows:
        text = "".join((ROOT / name).read_text() for name in re.findall(r"`(tests/[\w/.]+)`", row))
        missing += [name for name in re.findall(r"`(test_\w+)`", row) if f"def {name}(" not in text]
    assert missing == []


def test_the_coverage_says_the_verdicts_that_the_experiments_have():
    verdicts = {one.notebook.stem: one.verdict for one in gaps.experiments()}
    told = re.findall(r"/([\w-]+)\.ipynb\)(?:,|:)? \(?(VALIDATED|PARTIAL|INVALIDATED)", (ROOT / "docs/coverage.md").read_text())
    assert len(told) > 8 and [(name, verdict) for name, verdict in told if verdicts[name] != verdict] == []


# Experiments, tutorials, methods

def test_every_experiment_shows_something_first():
    pages = [page for page in stage.pages() if page.name.startswith("spikes/")]
    cells = {page.name: json.loads(stage.notebook(page))["cells"] for page in pages}
    first = {name: next(cell for cell in every if cell["cell_type"] == "code") for name, every in cells.items()}
    assert [name for name, cell in first.items() if cell["metadata"]["tags"] != ["remove-input"] or not cell["outputs"]] == []


@pytest.mark.parametrize("name", ["104-ladder", "007-real-traces"])  # with a picture, with a table
def test_an_experiment_opens_with_question_verdict_and_picture(name):
    page = next(page for page in stage.pages() if page.name == f"spikes/{name}")
    cells = json.loads(stage.notebook(page))["cells"]
    opening, one = "".join(cells[0]["source"]), gaps.Experiment(page.source)
    assert re.match(rf"# (Spike )?{re.escape(one.title)}\n\n> ", opening)
    assert f"{{admonition}} Verdict: {one.verdict}" in opening and gaps.cell(one.why) in opening
    shown = next(number for number, cell in enumerate(cells) if cell["cell_type"] == "code")
    html = "".join(cells[shown]["outputs"][0]["data"]["text/html"])
    assert ("<svg" if name == "104-ladder" else "<table") in html and cells[shown]["metadata"]["tags"] == ["remove-input"]
    texts = ["".join(cell["source"]) for cell in cells]
    assert shown <= 2 and "Hypothesis" in texts[shown + 1] and sum("opens the page" in text for text in texts) == 1
    outputs = ["".join(output.get("data", {}).get("text/html", "")) for cell in cells for output in cell.get("outputs", ())]
    assert outputs.count(html) == 1  # taken, not copied
    assert all("hide-input" in cell["metadata"]["tags"] for cell in cells[shown + 1:] if cell["cell_type"] == "code")
    kept = json.loads(page.source.read_text())["cells"]
    assert all("".join(cell["source"])[-60:] in "".join(texts) for cell in kept
               if "checks_screen(" not in "".join(cell["source"]))  # none is lost


def test_the_reason_for_a_verdict_is_told():
    words = {one.notebook.stem: one.why for one in gaps.experiments()}
    assert words["102-rollout-speed"].startswith("4.61 times as fast")
    assert words["007-real-traces"] == "Every clause of the hypothesis held."
    assert words["104-ladder"].startswith("Of 5 checks: 3 met, 2 not met. Not met: all together gain most")


def test_imports_of_a_tutorial_are_folded():
    page = next(page for page in stage.pages() if page.name == "error_site")
    code = [cell for cell in json.loads(stage.notebook(page))["cells"] if cell["cell_type"] == "code"]
    imports = [all(re.match(r"(from|import|    |\)|$)", line) for line in "".join(cell["source"]).splitlines()) for cell in code]
    assert any(imports) and imports == ["hide-input" in cell["metadata"].get("tags", ()) for cell in code]


def test_a_method_says_what_to_watch_and_how_it_fails(site):
    shown = {"losses/distill": "sdpo/gap", "losses/preference": "replay/accuracy", "training/objectives": "entropy"}
    for name, metric in shown.items():
        text = (site / f"{name}.html").read_text()
        boxes = [re.sub("<[^>]*>", "", text.partition(f'<p class="admonition-title">{title}</p>')[2].partition("</table>")[0])
                 for title in ("Metrics to watch", "How it fails")]
        assert all(metric in box for box in boxes), name
    row = next(line for line in (ROOT / "docs/guides/metrics.md").read_text().splitlines() if line.startswith("| `sdpo/gap`"))
    page = next(page for page in stage.pages() if page.name == "losses/distill")
    assert all(part.strip() in stage.method_box(page) for part in row.split("|"))
