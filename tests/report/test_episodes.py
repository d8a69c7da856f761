"The page that replays episodes: what it holds, hostile text, and a real browser that reads, clicks and types."
import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from pages import faint

from composer_replication.core.files import write_file
from composer_replication.experiments.episodes import EpisodeView, HintEffect, TaskView, TokenView, TurnView
from composer_replication.report.episodes import episodes_data, episodes_frame, episodes_page
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
    path = write_file(tmp_path / "episodes.html", episodes_page(hostile(), HOSTILE.replace("\ud800", "")))
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


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match="^arm 'A1 policy only' has two attempts 'before' at task 'test-7'; name"):
        episodes_page([BEFORE, replace(BEFORE, reward=1.0)])
    with pytest.raises(ValueError, match="^there are no episodes to show"):
        episodes_page([])
    with pytest.raises(ValueError, match=r"more than 1,000,000; show fewer tasks or arms\.$"):
        episodes_page([replace(BEFORE, problem="x" * 10**6)])


# ---- in a browser


def told(page, name):
    return page.locator(f"#{name}").inner_text()


def choose(page, name, text):
    option = page.locator(f"#{name} option").evaluate_all(f"all => all.find(o => o.text.startsWith({json.dumps(text)})).value")
    page.locator(f"#{name}").select_option(option)


@pytest.fixture
def page(visit, tmp_path):
    return visit(write_file(tmp_path / "episodes.html", episodes_page(VIEWS)).as_uri())


def test_next_and_previous_by_click(page):
    assert told(page, "heading") == "Turn 1 of 4: assistant" and told(page, "outcome").endswith("✗ not solved; ended: done")
    for button, heading in (("#previous", "1 of 4: assistant"), ("#next", "2 of 4: tool"),
                            ("#turns li:nth-child(4) button", "4 of 4: assistant"), ("#next", "4 of 4: assistant")):
        page.locator(button).click(force=True)  # some are marked as disabled
        assert told(page, "heading") == f"Turn {heading}"
    assert page.locator("#next").get_attribute("aria-disabled") == "true"
    assert page.locator("#turns [aria-current=step]").count() == 1 and page.complaints == []


def test_arrow_keys_turn_pages_and_walk_tokens(page):
    page.locator("#arm").dispatch_event("keydown", {"key": "ArrowRight"})
    assert told(page, "heading") == "Turn 1 of 4: assistant"  # a list of choices keeps its own keys
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert told(page, "heading") == "Turn 3 of 4: assistant" and "No hint: no layer had a hint." in told(page, "turn")
    for key in ("ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    for _ in range(40):  # by the keyboard alone into the first strip
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('tok')"):
            break
    assert told(page, "readout") == "“call·”: probability 1; with the hint 1"
    page.keyboard.press("ArrowRight")
    assert told(page, "readout") == "“cat”: probability 0.92; with the hint 0.03012"
    assert told(page, "heading").startswith("Turn 1")
    for key in ("ArrowRight", "Home"):
        page.keyboard.press(key)
    assert page.locator(".strip [tabindex='0']").count() == 2  # one stop of the Tab key for each strip
    assert told(page, "readout").startswith("“call·”") and page.evaluate("document.activeElement.tabIndex") == 0
    page.keyboard.press("h")
    assert told(page, "readout") != "" and page.evaluate("document.activeElement.ariaLabel") == "“call·”: probability 1"
    assert page.locator(".strip [tabindex='0']").count() == 1


def test_the_hint_layer_is_switched(page):
    on = told(page, "turn")
    assert all(part in on for part in ("No tool `cat` is offered.", "0.875 of the probability moves", "0.03012"))
    assert page.locator(".strip").count() == 2 and page.locator(".most").all_inner_texts() == ["cat", "cat"]
    page.locator("#hints").click()
    off = told(page, "turn")
    assert "offered" not in off and "0.03012" not in off and "error: tool_not_found" in off
    assert page.locator("#hints").get_attribute("aria-pressed") == "false"
    assert page.locator(".strip").count() == 1 and page.locator(".most").count() == 0
    page.keyboard.press("h")
    assert told(page, "turn") == on


def test_arm_task_and_attempt_are_chosen(page):
    page.keyboard.press("ArrowRight")
    assert page.locator("#arm option").all_inner_texts() == sorted({v.arm for v in VIEWS})
    choose(page, "attempt", "after")
    assert told(page, "outcome").startswith("Write the body of `pear` again. ✓ solved")
    choose(page, "arm", "A2")
    assert told(page, "heading") == "Turn 1 of 3: tool" and "ended: turns" in told(page, "outcome")  # task and attempt are kept
    chosen = page.locator("select").evaluate_all("all => all.map(s => s.selectedOptions[0].text)")
    assert chosen == ["A2 + SDPO", "test-7 (✓ solved)", "after (✓ solved)"]
    choose(page, "task", "test-8")
    assert told(page, "heading") == "No turn was played"
    assert told(page, "outcome").endswith("– not scored; ended: error, reset raised OSError: disk")
    page.locator("#next").click(force=True)
    choose(page, "task", "test-7")
    choose(page, "arm", "A1")
    page.keyboard.press("ArrowRight")
    choose(page, "task", "test-8")
    assert "plum" in told(page, "outcome")
    assert told(page, "heading") == "Turn 1 of 4: assistant"  # another task begins at its start
    choose(page, "task", "test-7")
    assert "pear" in told(page, "outcome") and page.complaints == []
    assert page.locator("#offered").text_content().startswith("src/pear.py")


def test_a_token_shows_its_number_under_the_pointer_and_the_less_likely_is_deeper(page):
    page.locator(".strip .tok:nth-child(2)").first.hover()
    assert told(page, "readout") == "“cat”: probability 0.92; with the hint 0.03012"
    depth = page.locator(".strip .tok").evaluate_all("all => all.map(e => Number(e.style.getPropertyValue('--u')))")
    assert depth == pytest.approx([0, 0.08, 0, 1 - 0.0301234], abs=0.02)


def test_hostile_text_does_nothing_in_a_browser(visit, tmp_path):
    page = visit(write_file(tmp_path / "episodes.html", episodes_page(hostile())).as_uri())
    for _ in range(3):
        assert page.evaluate("[window.hacked, document.images.length + document.scripts.length]") == [None, 2]
        page.keyboard.press("ArrowRight")
    shown = page.evaluate("document.querySelector('#offered pre').textContent.toWellFormed()")
    assert shown == HOSTILE.replace("\ud800", "\ufffd") and page.complaints == []


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_is_readable_in_light_and_dark_and_on_a_narrow_window(visit, tmp_path, mode):
    tokens = tuple(TokenView(f"{p:.2f}", p, 1 - p) for p in (0, 0.1, 0.25, 0.5, 1))
    views = [*VIEWS[1:], replace(BEFORE, turns=(replace(ERROR, tokens=tokens), *TURNS[1:]))]
    page = visit(write_file(tmp_path / "episodes.html", episodes_page(views)).as_uri(), mode)
    choose(page, "arm", "A1")
    assert page.locator(".tok").count() > 5 and faint(page, "main *") == []
    page.set_viewport_size({"width": 360, "height": 800})
    page.wait_for_function("innerWidth === 360")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("link, wanted", [
    ("#arm=A2", ["A2 + SDPO", "t0", "after"]), ("#task=1", ["A1 policy only", "t1", "after"]),
    ("", ["A1 policy only", "t0", "before"])])
def test_episodes_are_opened_at_an_arm_and_a_task(visit, tmp_path, link, wanted):
    tasks = [replace(TASK, task_id=name) for name in ("t0", "t1")]
    views = [EpisodeView(arm, f"{when} training", task, TURNS[3:], 0.0, "done") for arm in ("A1 policy only", "A2 + SDPO")
             for task in tasks for when in ("before", "after")]
    page = visit(write_file(tmp_path / "episodes.html", episodes_page(views)).as_uri() + link)
    chosen = page.locator("select").evaluate_all("all => all.map(one => one.selectedOptions[0].text.split(' (')[0])")
    assert [text.removesuffix(" training") for text in chosen] == wanted and page.complaints == []
