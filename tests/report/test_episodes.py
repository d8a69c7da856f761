"The page that replays episodes: what it holds, hostile text, and a real browser that reads, clicks and types."
import base64
import hashlib
import json
import re
import shutil
import subprocess
import time
import urllib.request
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from composer_replication.experiments.episodes import EpisodeView, HintEffect, TaskView, TokenView, TurnView
from composer_replication.report.episodes import episodes_data, episodes_frame, episodes_page, write_episodes
from composer_replication.report.html import asset

SCRIPT = asset("episodes.js")
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!--\u2028\ud800'\"&amp;"
TASK = TaskView("test-7", "Write the body of `pear` again.", (("src/pear.py", "def pear(a, b):\n    ...\n"),),
                ("ls(folder: string) List.",))
HINT = HintEffect("No tool `cat` is offered.", "template", 1, 0.875, (("cat", 0.92, 0.0301234), ("ls", 0.05, 0.95)))
ERROR = TurnView("assistant", "call cat", (TokenView("call ", 1.0, 1.0), TokenView("cat", 0.92, 0.0301234)), "tool_not_found",
                 HINT)
TURNS = (ERROR, TurnView("tool", "Tool 'cat' not found", error="tool_not_found"),
         TurnView("assistant", "give up", (TokenView("give", 0.5), TokenView(" up", 1 / 3)), "runtime_error",
                  unhinted="no layer had a hint"),
         TurnView("assistant", "Done.", (TokenView("Done.", 0.25), TokenView("\n", 0.75))))
BEFORE = EpisodeView("A1 policy only", "before", TASK, TURNS, 0.0, "done")
OTHER = replace(TASK, task_id="test-8", prompt="Write the body of `plum` again.")
VIEWS = [BEFORE, EpisodeView("A1 policy only", "after", TASK, TURNS[3:], 1.0, "done"),
         replace(BEFORE, arm="A2 + SDPO"), EpisodeView("A2 + SDPO", "after", TASK, TURNS[1:], 1.0, "turns"),
         EpisodeView("A2 + SDPO", "before", OTHER, (), None, "error", "reset raised OSError: disk"), replace(BEFORE, task=OTHER),
         replace(BEFORE, arm="A3 + replay DPO, ours", task=OTHER, attempt="only")]


class Parts(HTMLParser):
    "The elements of a document and the text of its scripts."

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        self.scripts += [""] if self.inside else []

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, text):
        if self.inside:
            self.scripts[-1] += text


def test_the_data_is_what_was_measured():
    data = json.loads(Parts(episodes_page(VIEWS)).scripts[0])
    assert data == json.loads(json.dumps(episodes_data(VIEWS)))
    assert [(data["menu"][i]["arm"], data["menu"][i]["attempt"], data["menu"][i]["episode"]) for i in (0, 2)] == [
        ("A1 policy only", "before", 0), ("A2 + SDPO", "before", 0)]
    turn = data["episodes"][0]["turns"][0]
    assert turn["tokens"] == ["call·", "cat"] and turn["p"] == [1.0, 0.92] and turn["hint"]["p"] == [1.0, 0.03012]
    assert turn["hint"]["alternatives"][0] == ["cat", 0.92, 0.03012] and turn["hint"]["distance"] == 0.875
    assert data["episodes"][0]["turns"][2] == {
        "role": "assistant", "text": "give up", "error": "runtime_error", "p": [0.5, 0.3333], "unhinted": "no layer had a hint",
        "tokens": ["give", "·up"]}
    assert len(data["episodes"]) == 5 and [t["name"] for t in data["tasks"]] == ["test-7", "test-8"]


def hostile():
    "Everything that a model, a tool or a task can write, written by an enemy."
    tokens = (TokenView(HOSTILE, 0.5, 0.25), TokenView(HOSTILE, 0.5, 0.25))
    hint = HintEffect(HOSTILE, HOSTILE, 0, 0.5, ((HOSTILE, 0.5, 0.25),))
    task = TaskView(HOSTILE, HOSTILE, ((HOSTILE, HOSTILE),), (HOSTILE,))
    turns = (TurnView("assistant", HOSTILE, tokens, HOSTILE, hint), TurnView("tool", HOSTILE, error=HOSTILE),
             TurnView("assistant", HOSTILE, tokens[:1], HOSTILE, None, HOSTILE))
    return [EpisodeView(HOSTILE, HOSTILE, task, turns, 0.0, HOSTILE, HOSTILE)]


def test_hostile_text_stays_text(tmp_path):
    path = write_episodes(hostile(), tmp_path / "episodes.html", HOSTILE.replace("\ud800", ""))
    text = path.read_text()
    parts = Parts(text)
    assert len(parts.scripts) == 2 and parts.scripts[1] == SCRIPT
    assert not any(tag == "img" or any(name.startswith("on") for name in attrs) for tag, attrs in parts.tags)
    assert json.loads(parts.scripts[0])["tasks"][0]["prompt"] == HOSTILE
    assert not any(word in SCRIPT for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval", "Function(", "document.write"))
    frame = Parts(episodes_frame(hostile()))
    assert [tag for tag, _ in frame.tags] == ["style", "p", "div", "iframe"] and frame.tags[3][1]["sandbox"] == "allow-scripts"
    assert frame.tags[3][1]["srcdoc"] == episodes_page(hostile())


def test_the_page_may_load_nothing():
    parts = Parts(episodes_page(VIEWS))
    assert not any({"src", "href"} & set(attrs) for _, attrs in parts.tags)
    rule = next(attrs["content"] for tag, attrs in parts.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert rule.startswith("default-src 'none';")
    assert base64.b64encode(hashlib.sha256(parts.scripts[1].encode()).digest()).decode() in rule


def test_what_cannot_be_shown_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^arm 'A1 policy only' has two attempts 'before' at task 'test-7'; name"):
        episodes_page([BEFORE, replace(BEFORE, reward=1.0)])
    with pytest.raises(ValueError, match="^there are no episodes to show"):
        episodes_page([])
    with pytest.raises(ValueError, match=r"more than 1,000,000; show fewer tasks or arms\.$"):
        write_episodes([replace(BEFORE, problem="x" * 10**6)], tmp_path / "episodes.html")
    assert not list(tmp_path.iterdir())


# ---- a browser


class Browser:
    "A headless Chromium, spoken to in its own protocol."

    def __init__(self, program, folder):
        websocket = pytest.importorskip("websocket", reason="websocket-client is not installed: pip install websocket-client")
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-extensions", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = self.wait(lambda: (folder / "DevToolsActivePort").read_text().split()[0])
            tabs = f"http://127.0.0.1:{port}/json/list"
            pages = self.wait(lambda: [p for p in json.load(urllib.request.urlopen(tabs, timeout=5)) if p["type"] == "page"])
            self.socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=20, suppress_origin=True)
        except BaseException:
            self.close()
            raise
        self.number, self.events = 0, []

    @staticmethod
    def wait(ask, seconds=30):
        "What `ask` gives as soon as it is anything."
        until = time.monotonic() + seconds
        while True:
            try:
                if found := ask():
                    return found
            except (OSError, IndexError):
                pass
            assert time.monotonic() < until, "the browser did not answer in time"
            time.sleep(0.05)

    def do(self, method, **given):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": given}))
        while (said := json.loads(self.socket.recv())).get("id") != self.number:
            self.events.append(said)
        assert "error" not in said, said
        return said["result"]

    def ask(self, expression):
        "The value of an expression in the page."
        said = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def open(self, path, look="light", size=(1000, 900)):
        self.events.clear()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")
        self.do("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": look}])
        self.do("Page.navigate", url=path.as_uri())
        self.wait(lambda: self.ask("document.readyState === 'complete' && location.protocol === 'file:'"))

    def key(self, name, text=""):
        number = {"ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Home": 36, "End": 35, "h": 72}[name]
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.do("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=number, **typed)

    def click(self, selector):
        box = self.ask("(() => {const e = document.querySelector(" + json.dumps(selector) + "); "
                       "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
                       "return [b.x + b.width / 2, b.y + b.height / 2]})()")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="none" if kind == "mouseMoved" else "left",
                    clickCount=0 if kind == "mouseMoved" else 1)

    def choose(self, name, text):
        "Pick the option that begins with a text, as the change of a select reports it."
        self.ask(f"(() => {{const s = document.getElementById('{name}'); "
                 f"s.value = [...s.options].find(o => o.text.startsWith({json.dumps(text)})).value; "
                 "s.dispatchEvent(new Event('change', {bubbles: true}))})()")

    def text(self, selector):
        return self.ask(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector):
        return self.ask(f"document.querySelectorAll({json.dumps(selector)}).length")

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))
        return path

    def complaints(self):
        "Errors, refused resources, and requests other than for the page."
        return [e for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
                or (e["method"] == "Network.requestWillBeSent" and not e["params"]["request"]["url"].startswith("file:"))]

    def close(self):
        self.process.kill()
        self.process.wait(20)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        pytest.skip("no Chromium is here; on Debian: apt-get install chromium")
    found = Browser(program, tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture
def page(browser, tmp_path):
    browser.open(write_episodes(VIEWS, tmp_path / "episodes.html"))
    return browser


def test_next_and_previous_by_click(page):
    assert page.text("#heading") == "Turn 1 of 4: assistant" and page.text("#outcome").endswith("✗ not solved; ended: done")
    page.click("#previous")
    assert page.text("#heading") == "Turn 1 of 4: assistant"
    page.click("#next")
    assert page.text("#heading") == "Turn 2 of 4: tool" and "Tool 'cat' not found" in page.text("#turn")
    page.click("#turns li:nth-child(4) button")
    page.click("#next")
    assert page.text("#heading") == "Turn 4 of 4: assistant"
    assert page.ask("document.querySelector('#next').getAttribute('aria-disabled')") == "true"
    assert page.count('#turns [aria-current=step]') == 1
    assert page.complaints() == []


def test_arrow_keys_turn_pages_and_walk_tokens(page):
    page.ask("document.getElementById('arm').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))")
    assert page.text("#heading") == "Turn 1 of 4: assistant"  # a list of choices keeps its own keys
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert page.text("#heading") == "Turn 3 of 4: assistant" and "No hint: no layer had a hint." in page.text("#turn")
    page.key("ArrowLeft")
    page.key("ArrowLeft")
    for _ in range(40):  # by the keyboard alone into the first strip
        page.key("Tab")
        if page.ask("document.activeElement.classList.contains('tok')"):
            break
    assert page.text("#readout") == "“call·”: probability 1; with the hint 1"
    page.key("ArrowRight")
    assert page.text("#readout") == "“cat”: probability 0.92; with the hint 0.03012"
    assert page.text("#heading").startswith("Turn 1")
    page.key("ArrowRight")
    page.key("Home")
    assert page.count(".strip [tabindex='0']") == 2  # one stop of the Tab key for each strip
    assert page.text("#readout").startswith("“call·”") and page.ask("document.activeElement.tabIndex") == 0
    page.key("h", "h")
    assert page.text("#readout") != "" and page.ask("document.activeElement.className") == "tok"
    assert page.ask("document.activeElement.getAttribute('aria-label')") == "“call·”: probability 1"
    assert page.count(".strip [tabindex='0']") == 1


def test_the_hint_layer_is_switched(page):
    on = page.text("#turn")
    assert "No tool `cat` is offered." in on and "0.875 of the probability moves" in on and "0.03012" in on
    assert page.count('.strip') == 2 and page.count('.most') == 2
    assert page.text(".most") == "cat"
    page.click("#hints")
    off = page.text("#turn")
    assert "offered" not in off and "0.03012" not in off and "error: tool_not_found" in off
    assert page.ask("document.querySelector('#hints').getAttribute('aria-pressed')") == "false"
    assert page.count('.strip') == 1 and page.count('.most') == 0
    page.key("h", "h")
    assert page.text("#turn") == on


def test_arm_task_and_attempt_are_chosen(page):
    page.key("ArrowRight")
    assert page.ask("[...document.querySelectorAll('#arm option')].map(o => o.text)") == sorted({v.arm for v in VIEWS})
    page.choose("attempt", "after")
    assert page.text("#outcome").startswith("Write the body of `pear` again. ✓ solved")
    assert page.text("#heading") == "Turn 1 of 1: assistant"
    page.choose("arm", "A2")
    assert page.text("#heading") == "Turn 1 of 3: tool" and "ended: turns" in page.text("#outcome")  # task and attempt are kept
    assert page.ask("[...document.querySelectorAll('select')].map(s => s.selectedOptions[0].text)") == [
        "A2 + SDPO", "test-7 (✓ solved)", "after (✓ solved)"]
    page.choose("task", "test-8")
    assert page.text("#heading") == "No turn was played"
    assert page.text("#outcome").endswith("– not scored; ended: error, reset raised OSError: disk")
    page.click("#next")
    page.choose("task", "test-7")
    page.choose("arm", "A1")
    page.key("ArrowRight")
    page.choose("task", "test-8")
    assert "plum" in page.text("#outcome")
    assert page.text("#heading") == "Turn 1 of 4: assistant"  # another task begins at its start
    page.choose("task", "test-7")
    assert "pear" in page.text("#outcome")
    assert page.ask("document.querySelector('#offered').textContent").startswith("src/pear.py")
    assert page.complaints() == []


def test_a_token_shows_its_number_under_the_pointer(page):
    page.click(".strip .tok:nth-child(2)")
    assert page.text("#readout") == "“cat”: probability 0.92; with the hint 0.03012"
    deep = "getComputedStyle(document.querySelectorAll('.strip .tok')[{}]).backgroundColor"
    alpha = [float(re.search(r"/ ([\d.e-]+)\)", said)[1]) if "/" in (said := page.ask(deep.format(i))) else 1.0 for i in range(4)]
    assert alpha[0] == alpha[2] == 0 and 0.04 < alpha[1] < 0.06 and 0.58 < alpha[3] < 0.62


def test_hostile_text_does_nothing_in_a_browser(browser, tmp_path):
    browser.open(write_episodes(hostile(), tmp_path / "episodes.html"))
    for _ in range(3):
        assert browser.ask("window.hacked") is None and browser.ask("document.images.length + document.scripts.length") == 2
        browser.key("ArrowRight")
    shown = browser.ask("document.querySelector('#offered pre').textContent.toWellFormed()")
    assert shown == HOSTILE.replace("\ud800", "\ufffd")
    assert browser.complaints() == []


def luminance(rgb):
    parts = [c / 12.92 if (c := v / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for v in rgb]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


CONTRAST = """(() => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const over = (...colours) => { for (const c of colours) { context.fillStyle = c; context.fillRect(0, 0, 1, 1); }
                                 return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const texts = [...document.querySelectorAll('.tok, p, label, button, select, td, th, h2, h3, pre, caption')];
  return texts.filter(e => e.innerText).map(e => {
    const behind = []; for (let x = e; x; x = x.parentElement) behind.unshift(getComputedStyle(x).backgroundColor);
    return [e.innerText.slice(0, 30), over(...behind), over(...behind, getComputedStyle(e).color)]; });
})()"""


@pytest.mark.parametrize("look", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(browser, tmp_path, look):
    tokens = tuple(TokenView(f"{p:.2f}", p, 1 - p) for p in (0, 0.1, 0.25, 0.5, 1))
    views = [replace(BEFORE, turns=(replace(ERROR, tokens=tokens), *TURNS[1:]))]
    browser.open(write_episodes(views, tmp_path / "episodes.html"), look)
    seen = browser.ask(CONTRAST)
    assert len(seen) > 25
    for text, behind, ink in seen:
        high, low = sorted((luminance(behind), luminance(ink)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (look, text, behind, ink)
    assert (luminance(seen[0][1]) > 0.5) == (look == "light")
    assert browser.picture(tmp_path / f"{look}.png").stat().st_size > 10_000


def test_a_narrow_window_needs_no_sideways_scrolling(browser, tmp_path):
    browser.open(write_episodes(VIEWS, tmp_path / "episodes.html"), size=(360, 800))
    assert browser.ask("document.documentElement.scrollWidth") <= 360
