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


def test_search_finds_by_intent_and_says_what_it_found(site, visit):
    page = visit((site / "search.html").as_uri())
    missed = {}
    for words, wanted in INTENTS.items():
        page.goto((site / "search.html").as_uri() + "?q=" + words.replace(" ", "+"))
        page.locator("#search-results p.search-summary", has_text=re.compile("Search finished|matching")).wait_for()
        first = page.locator("#search-results li > a").evaluate_all("links => links.slice(0, 3).map(a => a.getAttribute('href'))")
        pages = [link.split(".html")[0] for link in first]
        if not set(pages) & set(wanted):
            missed[words] = pages
    assert missed == {}
    label = "getComputedStyle(document.querySelector('#search-results li > a'), '::after').content"
    assert page.evaluate(label) == '"API"'


def test_the_keyboard_reaches_the_search(site, visit):
    page = visit((site / "core/trace.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.type("hint")
    assert page.locator("input.sidebar-search").input_value() == "hint"


def test_the_sidebar_has_six_sections_and_shows_where_one_is(site, visit):
    page = visit((site / "cli/traces.html").as_uri())
    top = page.locator(".sidebar-tree > ul > li > a")
    assert top.all_inner_texts() == ["Start", "Guides", "Commands", "Experiments", "API", "Background"]
    here = page.locator(".sidebar-tree .current-page > a").last.bounding_box()
    box = page.locator(".sidebar-scroll").bounding_box()
    assert box["y"] <= here["y"] and here["y"] + here["height"] <= box["y"] + box["height"]
    assert page.locator(".sidebar-tree a").locator("visible=true").count() < 60  # of other rooms only the names


def test_no_page_is_wider_than_its_window(site, visit):
    wide = {}
    page = visit((site / "index.html").as_uri())
    for name in (*PAGES, "api", "experiments", "guides/my-model"):
        page.goto((site / f"{name}.html").as_uri())
        for width in (360, 768, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            if (over := page.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
                wide[name, width] = over
    assert wide == {}


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


def test_an_episode_is_stepped_through(site, visit):
    page = visit((site / "episodes.html").as_uri())
    frame = page.frame_locator("iframe").first
    heading = frame.locator("#heading")
    heading.wait_for()
    before = heading.inner_text()
    frame.locator("#next").click()
    assert heading.inner_text() != before and page.complaints == []
