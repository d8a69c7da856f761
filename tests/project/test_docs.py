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
import build  # noqa: E402
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


def test_a_page_that_moved_stands_in_no_sidebar_of_an_older_build(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()

    def built_with(*names):
        pages = [stage.Page(source / f"{name}.md", name) for name in ("index", *names)]
        (source / "index.md").write_text("\n".join(["# Start", "```{toctree}", *names, "```"]))
        for page in pages[1:]:
            page.source.exists() or page.source.write_text(f"# {page.name}")
        for old in set(source.iterdir()) - {page.source for page in pages}:
            old.unlink()
        monkeypatch.setattr(stage, "pages", lambda: tuple(pages))
        assert build.build(tmp_path / "out" / "html", sources=False) == 0
        return tmp_path / "out" / "html"

    for name, kept in [(name, kept) for name, kept in vars(stage).items() if hasattr(kept, "cache_clear")]:
        monkeypatch.setattr(stage, name, cache(kept.__wrapped__))  # what it finds of these pages is of this test alone
    monkeypatch.setattr(stage, "stage", lambda: source)
    monkeypatch.setattr(stage, "llms_txt", lambda: "")
    monkeypatch.setattr(build, "vendor", lambda: None)
    built_with("kept", "old")
    site = built_with("kept", "new")
    assert "new.html" in (site / "kept.html").read_text() and dead_links(site) == []
    unchanged = (site / "kept.html").stat().st_mtime_ns
    built_with("kept", "new")
    assert (site / "kept.html").stat().st_mtime_ns == unchanged


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

class Seen(HTMLParser):
    "What of a page a screen reader cannot name."

    def __init__(self, text: str):
        super().__init__()
        self.headings, self.language, self.nameless = 0, "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = {key: value or "" for key, value in attrs}
        self.headings += tag == "h1"
        self.language = given.get("lang", "") if tag == "html" else self.language
        if tag == "img" and (not given.get("alt", "").strip() or re.search(r"\.(png|svg|jpe?g|gif)$", given["alt"])):
            self.nameless.append(given.get("src"))


def faults(page: Path) -> list[str]:
    "One line for each kind of fault: pictures without words, no language, none or several first headings."
    seen = Seen(page.read_text())
    return ([f"pictures without words: {seen.nameless}"] * bool(seen.nameless) + ["no language"] * (not seen.language)
            + [f"{seen.headings} first headings"] * (seen.headings != 1 and page.name != "search.html"))  # written by a script


def test_every_page_has_words_for_what_it_shows(site):
    found = {page.relative_to(site).as_posix(): faults(page) for page in sorted(site.rglob("*.html"))}
    assert {page: lines for page, lines in found.items() if lines} == {}


@pytest.mark.parametrize("bad", ["", "<h1>B</h1>", '<img src="a.png">', '<img alt=" ">', '<img alt="a.png">'])
def test_what_has_no_words_is_found(tmp_path, bad):
    page = tmp_path / "a.html"
    page.write_text(f'<html lang="en"><h1>A</h1><img src="a.png" alt="Two bars">{bad}</html>')
    assert bool(faults(page)) == bool(bad)


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


def test_every_page_has_one_place_in_the_contents():
    contents = stage.contents()
    placed = [name for names in contents.values() for name in names]
    sections = set(stage.SECTIONS.values())
    assert sorted(placed) == sorted(page.name for page in stage.pages() if page.name not in {"index", *sections})
    assert set(contents) == sections - {"commands"} | {"adrs/index"} | set(contents["api"])
    assert contents["start"] == stage.START and contents["experiments"][0] == "gaps"


def test_signatures_of_commands_hold_no_addresses(site):
    assert [page.name for page in (site / "cli").glob("*.html") if "OptionInfo" in page.read_text()] == []


def test_what_an_experiment_says_comes_out_as_it_is(tmp_path):
    cells = ["# 009: X\n\n> Is it\n> so?\n\n**Hypothesis.** It is.\n\n**Threshold**: 6.\n\n1. Once.\n\nMore.",
             "**What would help**: time."]
    notebook = {"cells": [{"cell_type": "markdown", "source": [cell]} for cell in cells]}
    results = {"verdict": "REFUTED", "checks": {"a|b": False, "c": None, "d": {"e": True}, "f": "UNDECIDED"},
               "gain": {"estimate": 0.25, "low": 0, "high": 1}}
    (tmp_path / "spikes/009-x").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/recipe.md").write_text("| Muon | blog | not built yet |\n")
    (tmp_path / "spikes/009-x/009-x.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "spikes/009-x/results.json").write_text(json.dumps(results))
    page = gaps.page(lambda text, notebook: text, tmp_path)
    for line in (":::::{dropdown} 009: X: REFUTED", "[The notebook](009-x.ipynb). Is it so?", "1. Once.",
                 "Of 4 checks: 1 UNDECIDED, 1 met, 1 not met, 1 not run.",
                 "| a\\|b | not met |", "| c | not run |", "| f | UNDECIDED |",
                 "| gain | 0.25 (0 to 1) |", "**What would help**: time.", "- Muon"):
        assert line in page.splitlines()
    assert "More." not in page


def test_the_evidence_of_the_coverage_is_there():
    lines = (ROOT / "docs/coverage.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| (?!aim|step|invariant|---)", line)]
    columns = [[part.strip() for part in row.strip("|").split(" | ")] for row in rows]
    assert len(rows) > 40
    assert [row[0] for row in columns if not {"built", "part", "not run", "not built"} & set(row[1:3])] == []
    missing = [name for row in rows for name in re.findall(r"`(tests/[\w/.]+)`", row) if not (ROOT / name).is_file()]
    for row in rows:
        text = "".join((ROOT / name).read_text() for name in re.findall(r"`(tests/[\w/.]+)`", row))
        missing += [name for name in re.findall(r"`(test_\w+)`", row) if f"def {name}(" not in text]
    assert missing == []


def test_docs_and_recipes_say_the_verdicts_that_the_experiments_have():
    verdicts = {one.notebook.stem: one.verdict for one in gaps.experiments()}
    pages = [ROOT / "docs/coverage.md", *ROOT.glob("docs/guides/*.md"), *ROOT.glob("composer_replication/data/recipes/*.yaml")]
    told = [found for page in pages for found in re.findall(
        r"(?:/([\w-]+)\.ipynb\)|spikes/([\w-]+))(?:,|:)? \(?(VALIDATED|REFUTED|UNDECIDED|NOT RUN)", page.read_text())]
    told = [(page or spike, verdict) for page, spike, verdict in told]
    assert any(name == "016-sql-recipe" for name, _ in told)
    assert len(told) > 8 and [(name, verdict) for name, verdict in told if verdicts[name] != verdict] == []
