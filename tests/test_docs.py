"""The site builds without a warning, no link within it is dead, and it needs no network."""
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import stage  # noqa: E402


@pytest.fixture(scope="module")
def site() -> Path:
    "The site, built once for all tests."
    out = ROOT / "docs" / "_build" / "html"
    done = subprocess.run([sys.executable, ROOT / "docs" / "build.py", "--out", out], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


class Names(HTMLParser):
    "The anchors of a page and what it refers to."

    def __init__(self):
        super().__init__()
        self.anchors, self.links, self.loads = {""}, [], []

    def handle_starttag(self, tag, attrs):
        told = dict(attrs)
        self.anchors |= {told[key] for key in ("id", "name") if told.get(key)}
        if tag == "a" and told.get("href"):
            self.links.append(told["href"])
        source = told.get("src") or (told.get("href") if tag == "link" and told.get("rel") != "canonical" else None)
        if source:
            self.loads.append(source)


@cache
def names(page: Path) -> Names:
    "What a page holds."
    parser = Names()
    parser.feed(page.read_text())
    return parser


def dead_links(site: Path) -> list[str]:
    "One line for each link or file within the site that leads nowhere."
    dead = []
    for page in sorted(site.rglob("*.html")):
        for link in names(page).links + names(page).loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (parts.fragment and target.suffix == ".html"
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
    assert "composer_replication.traces.schema.Trace.to_json" in names(site / "traces" / "schema.html").anchors


def test_names_in_prose_lead_to_the_api(site):
    assert any(link.endswith("#composer_replication.traces.schema.TraceProblem")
               for link in names(site / "traces" / "schema.html").links)


def test_pages_need_no_network(site):
    if not (ROOT / "docs" / "_static" / "vendor" / "complete").exists():
        pytest.skip("the scripts were not fetched: apt-get install npm, then make docs")
    loads = {load for page in site.rglob("*.html") for load in names(page).loads}
    assert {load for load in loads if urlsplit(load).scheme in ("http", "https")} == set()


def test_search_knows_the_words_and_the_names(site):
    index = (site / "searchindex.js").read_text()
    assert "TraceProblem" in index and "observ" in index
