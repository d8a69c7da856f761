"""What people see, in a real browser: the site from a disk and over HTTP."""
import functools
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pages import PAGES, picture

ROOT = Path(__file__).resolve().parents[2]
FETCHED = (ROOT / "docs" / "_static" / "vendor" / "complete").exists  # asked after the build: scripts for formulas


# The site

@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_from_a_disk_without_a_complaint(site, visit, name):
    if name in ("training_step", "gaps") and not FETCHED():
        pytest.skip("the scripts for formulas were not fetched: apt-get install npm, then make docs")
    for mode in ("light", "dark"):
        page = visit((site / f"{name}.html").as_uri(), mode)
        page.wait_for_load_state("load")
        page.wait_for_timeout(200)
        assert page.complaints == []
        assert page.locator("h1").count() == 1
        picture(page, f"{name.replace('/', '-')}-{mode}")


@pytest.fixture
def served(site):
    "The site over HTTP, as a web host would serve it."
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *said: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05}).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_search_finds_a_symbol_and_leads_to_it(served, visit):
    page = visit(f"{served}/index.html")
    page.locator("input[name=q]").fill("TraceProblem")
    page.keyboard.press("Enter")
    found = page.locator("#search-results a", has_text=re.compile("TraceProblem"))
    found.first.wait_for()
    page.wait_for_load_state("networkidle")  # it reads the pages found, to show where the word stands
    assert page.complaints == []
    found.first.click()
    page.wait_for_load_state("load")
    assert page.url.split("?")[0].split("#")[0] == f"{served}/core/trace.html"
    assert page.url.endswith("#composer_replication.core.trace.TraceProblem")


def test_search_works_from_a_disk(site, visit):
    page = visit((site / "search.html").as_uri() + "?q=TraceProblem")
    page.locator("#search-results a", has_text=re.compile("TraceProblem")).first.wait_for()


INTENTS = {  # what a user types: the pages, one of which should be among the first three
    "add a hint layer": ["guides/hint-layer"], "train my model": ["guides/my-model"], "my own traces": ["guides/my-traces"],
    "make tasks from my repository": ["guides/my-repository"], "ask other teachers": ["guides/my-teachers"],
    "change the objective": ["guides/objective"], "read a ladder": ["guides/read-a-ladder"],
    "export": ["commands", "guides/one-road"], "serve": ["commands", "guides/one-road"],
    "out of memory": ["troubleshooting", "guides/my-model"],
    "TraceProblem": ["core/trace"]}


def searched(page, site, words):
    "The results of a search: (page, label) each."
    page.goto((site / "search.html").as_uri() + "?q=" + words.replace(" ", "+"))
    page.locator("#search-results p.search-summary", has_text=re.compile("Search finished|matching")).wait_for()
    label = "getComputedStyle(a, '::after').content.replaceAll('\"', '')"
    told = f"links => links.map(a => [a.getAttribute('href').split('.html')[0], {label}])"
    return page.locator("#search-results li > a").evaluate_all(told)


def test_search_finds_by_intent(site, visit):
    page = visit((site / "search.html").as_uri())
    found = {words: [name for name, _ in searched(page, site, words)][:3] for words in INTENTS}
    assert {words: pages for words, pages in found.items() if not set(pages) & set(INTENTS[words])} == {}
    for words in ("add a hint layer", "train my model"):
        assert found[words][0] == INTENTS[words][0]


KINDS = {  # a page, words that find it, and what it is
    "index": ("open replication", "start"), "start": ("start", "start"), "explorer": ("pick a turn and a hint", "start"),
    "guides/hint-layer": ("add a hint layer", "guide"), "guide": ("how to use it", "guide"),
    "troubleshooting": ("goes wrong", "guide"),
    "commands": ("commands", "command"), "experiments": ("experiments", "experiment"), "gaps": ("honest gaps", "experiment"),
    "spikes/104-ladder": ("ladder", "experiment"), "api": ("API", "API"), "api/tree": ("tree", "API"),
    "hints/layers": ("hint layers", "module"), "core/trace": ("TraceProblem", "API"), "background": ("background", "background"),
    "method": ("what was tried", "background"), "six-changes": ("six changes", "background"), "recipe": ("recipe", "background"),
    "adrs/002-a-trace-is-a-tree": ("a trace is a tree", "background")}


def test_search_says_what_it_found(site, visit):
    page = visit((site / "search.html").as_uri())
    found = {name: dict(reversed(searched(page, site, words))).get(name) for name, (words, _) in KINDS.items()}
    assert found == {name: kind for name, (_, kind) in KINDS.items()}


def test_the_keyboard_reaches_the_search(site, visit):
    page = visit((site / "core/trace.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.type("hint")
    assert page.locator("input.sidebar-search").input_value() == "hint"


SHOWN = (*PAGES, "api", "experiments", "guides/my-model", "guides/metrics", "coverage", "adrs/index", "spikes/131-exploits")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_no_page_is_wider_than_its_window(site, visit, mode):
    wide = {}
    page = visit((site / "index.html").as_uri(), mode)
    for name in SHOWN:
        page.goto((site / f"{name}.html").as_uri())
        page.evaluate("document.querySelectorAll('article details').forEach(folded => folded.open = true)")
        for width in (360, 768, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            if (over := page.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
                wide[name, width] = over
    assert wide == {}


def test_a_table_of_many_columns_can_be_read_on_a_phone(site, visit):
    page = visit((site / "coverage.html").as_uri())
    page.set_viewport_size({"width": 360, "height": 800})
    narrow = "cells => cells.filter(c => c.textContent.trim().length > 25).map(c => c.clientWidth).filter(wide => wide < 120)"
    cells = page.locator("article table.docutils:has(th:nth-child(4)) td")
    assert cells.count() > 50 and cells.evaluate_all(narrow) == []


def test_a_table_that_scrolls_is_reached_by_keyboard(site, visit):
    page = visit((site / "recipe.html").as_uri())
    page.set_viewport_size({"width": 360, "height": 800})
    page.reload()
    scrolled = "tables => tables.filter(t => t.scrollWidth > t.clientWidth).map(t => t.tabIndex)"
    found = page.locator("table.docutils").evaluate_all(scrolled)
    assert found and set(found) == {0}


def test_an_experiment_shows_its_picture_on_the_first_screen_and_folds_its_code(site, visit):
    page = visit((site / "spikes/104-ladder.html").as_uri())
    assert page.locator("article .cell_output svg").first.bounding_box()["y"] < 900
    code = page.locator("article .cell_input")
    assert code.count() > 5 and code.locator("visible=true").count() == 0
    page.set_viewport_size({"width": 360, "height": 800})
    page.evaluate("document.querySelectorAll('article details').forEach(folded => folded.open = true)")
    page.wait_for_function("[...document.querySelectorAll('article details pre')].some(block => block.tabIndex === 0)")
    wide = "blocks => blocks.filter(b => b.scrollWidth > b.clientWidth).map(b => [b.tabIndex, getComputedStyle(b).overflowX])"
    found = page.locator("article .cell_input pre").evaluate_all(wide)
    assert found and {tuple(one) for one in found} == {(0, "auto")}


def views(strip):
    "The views below a strip of tabs that can be seen."
    return strip.locator("xpath=../*[@class='views']/*").locator("visible=true")


def test_a_strip_is_moved_by_mouse_and_by_keyboard(site, visit):
    page = visit((site / "error_site.html").as_uri())
    strip = page.locator(".tabs").first
    texts = [views(strip).inner_text()]
    strip.locator("label").nth(3).click()
    texts.append(views(strip).inner_text())
    page.keyboard.press("ArrowRight")
    texts.append(views(strip).inner_text())
    assert len(set(texts)) == 3 and texts[1].startswith("turn 3") and texts[2].startswith("turn 4")
    assert views(strip).count() == 1
    assert page.complaints == []
