"Pages to touch, in a real browser by mouse and keyboard: the explorer of error sites, plots, tables."
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from matplotlib import rc_context

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.report.explorer import (
    CONTROL,
    call_start,
    explored,
    explorer_data,
    explorer_page,
    site_data,
    trace_data,
)
from composer_replication.report.html import STUDENT, TEACHER, page, table
from composer_replication.report.plots import THEME, Plot
from composer_replication.report.tokens import TokenRow
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.siblings import SiblingIndex
from composer_replication.tree.build import build_tree
from composer_replication.tree.template import probe_template

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u2028'\"&amp;"
WIDTHS, MODES = (360, 768, 1440), ("light", "dark")
LAYERS = SimpleNamespace(layers=[SimpleNamespace(name=name) for name in ("template", "raw_error", "sibling")])


def failing(name, tool):
    "A trace that calls a tool which is not there, twice."
    def call(text):
        return Turn("assistant", text, tool_calls=(ToolCall(tool, {"path": text}),))
    answer = Turn("tool", f"Error: unknown tool {tool}", observation=True, failed=True)
    return Trace(name, (Turn("user", "Read it."), call("one"), answer, call("two"), answer, Turn("assistant", "I give up.")),
                 tools=({"type": "function", "function": {"name": "ls"}},), reward=0.0)


def rows(hinted, words=("call ", "cat")):
    "Tokens of a turn: the last has these probabilities before and after a hint."
    others = ("ls", .05, .5), ("rare", .001, .001)
    return (TokenRow(words[0], 0.0, 0.0, 0.001), TokenRow(words[1], math.log(.9), math.log(hinted), 2.0, others))


def hinted(trace, times=1):
    "As `explored`, by hand: of each turn's layers the sibling is silent."
    return trace_data(trace, times * [site_data(site, {
        "template": (f"Use ls at {site.turn}.", rows(.1)), "raw_error": ("It failed.", rows(.4)),
        CONTROL: ("The morning", rows(.88))}) for site in find_error_sites(trace)])


@pytest.fixture
def explorer(tmp_path):
    data = explorer_data([hinted(failing("first", "cat")), hinted(failing("second", "dog"))], LAYERS)
    (tmp_path / "explore.html").write_text(explorer_page(data, {"command": "composer-rl explore", "seed": 0}))
    return (tmp_path / "explore.html").as_uri()


def columns(page):
    "The probability of each token without and with the hint, as drawn."
    return page.locator(".explorer .token").evaluate_all(
        "all => all.map(one => ['--p', '--q'].map(name => Number(getComputedStyle(one).getPropertyValue(name))))")


def test_the_explorer_by_mouse(visit, explorer):
    page = visit(explorer)
    said = page.get_by_role("status")
    assert columns(page) == [[1, 1], [.9, .1]]
    assert said.inner_text().startswith("Most at “cat”: from probability 0.900 to 0.100.")
    assert page.get_by_label("sibling: has no hint here").is_disabled()
    heights = "e => ['::before', '::after'].map(s => parseFloat(getComputedStyle(e, s).height))"
    tall = page.locator(".token i").last.evaluate(heights)
    assert tall[0] == pytest.approx(9 * tall[1], rel=.05)
    page.get_by_label("raw_error", exact=True).check()
    assert columns(page)[1] == [.9, .4] and "It failed." in page.locator(".explorer .hint").inner_text()
    cells = page.locator("[data-is=others] tr").all_inner_texts()
    assert [text.split() for text in cells] == [["cat", "sampled", "0.900", "0.400"], ["ls", "0.050", "0.500"]]  # not the rare
    page.get_by_label("no hint", exact=True).check()
    assert columns(page) == [[1, 1], [.9, .9]]
    assert not page.get_by_label("turn 2, tool").count()  # error turns alone
    page.get_by_label("all turns").check()
    page.get_by_label("turn 2, tool").check()
    assert page.locator("[data-is=text]").inner_text() == "Error: unknown tool cat"
    assert not page.locator("[data-is=site]").is_visible()
    page.get_by_label("all turns").uncheck()
    assert page.locator("h2").inner_text() == "Turn 1 of 5: assistant"  # the error turn before it
    page.get_by_label("turn 3, assistant, error: tool_not_found").check()
    assert "Use ls at 3." in page.locator(".explorer .hint").inner_text()
    page.get_by_label("second: 2 error turns, 2 with bars, reward 0").check()
    assert "dog" in page.locator("[data-is=text]").inner_text() and page.complaints == []


def test_an_error_turn_that_no_model_read_shows_its_error_and_hint(visit, tmp_path):
    trace = failing("first", "cat")
    site = find_error_sites(trace)[1]
    long = site_data(site, {"template": ("Use ls.", ())}, "No token bars: it is long.")
    data = explorer_data([trace_data(trace, [hinted(trace)["sites"][0], long, site_data(site, {}, "No hint here.")])],
                         LAYERS)
    data["traces"][0]["sites"][2]["turn"] = 5  # an error turn without any hint
    (tmp_path / "page.html").write_text(explorer_page(data))
    page = visit((tmp_path / "page.html").as_uri())
    assert "3 error turns, 1 with bars" in page.locator("[data-is=trace]").inner_text() and columns(page) == [[1, 1], [.9, .1]]
    page.get_by_label("turn 3, assistant, error: tool_not_found").check()
    assert page.locator("[data-is=unread]").inner_text() == "No token bars: it is long."
    assert page.locator(".explorer .hint").inner_text() == "Use ls." and not page.locator("[data-is=bars]").is_visible()
    assert "unknown tool cat" in page.locator("[data-is=answer]").inner_text()
    page.get_by_label("no hint", exact=True).check()
    assert page.locator(".explorer .hint").inner_text() == "No hint."
    page.get_by_label("turn 5, assistant, error: tool_not_found").check()
    assert page.locator("[data-is=unread]").inner_text() == "No hint here."
    page.get_by_label("turn 1, assistant, error: tool_not_found").check()
    assert page.locator("[data-is=bars]").is_visible() and columns(page) == [[1, 1], [.9, .1]] and page.complaints == []


def test_the_explorer_by_keyboard_alone(visit, explorer):
    page, focused = visit(explorer), "document.activeElement.ariaLabel ?? document.activeElement.dataset.is ?? ''"
    def tab(wanted):
        for _ in range(20):
            page.keyboard.press("Tab")
            if wanted in page.evaluate(focused):
                return
        raise AssertionError(f"the Tab key does not reach {wanted}")
    tab("first: 2 error turns")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused).startswith("second") and "dog" in page.locator("[data-is=text]").inner_text()
    tab("turn 1")
    page.keyboard.press("ArrowRight")
    assert page.locator("h2").inner_text() == "Turn 3 of 5: assistant" and "turn 3" in page.evaluate(focused)
    tab("template")
    page.keyboard.press("ArrowRight")
    assert columns(page)[1] == [.9, .4]
    page.keyboard.press("ArrowRight")  # past the layer that has no hint
    assert page.evaluate(focused) == CONTROL and columns(page)[1] == [.9, .88]
    tab("probability 0.900, with the hint 0.880")
    page.keyboard.press("ArrowLeft")
    assert page.locator("[data-is=caption]").inner_text().startswith("Token 1 of 2") and page.complaints == []


def test_all_layers_stand_side_by_side_and_the_share_of_the_call_is_said(visit, tmp_path):
    def read(*nats):
        return tuple(TokenRow(word, 0.0, -1.0, value) for word, value in zip(("Now", " ls", "(", ")"), nats))
    trace = replace(failing("first", "cat"), model="the/sampler")
    site, *_ = find_error_sites(trace)
    layers = {"template": ("Use ls.", read(1.5, 0.3, 0.15, 0.05)), CONTROL: ("The morning", read(0.2, 0.1, 0.6, 0.1))}
    data = explorer_data([trace_data(trace, [site_data(site, layers, call=2)])], LAYERS, reader="the/reader")
    (tmp_path / "page.html").write_text(explorer_page(data))
    page = visit((tmp_path / "page.html").as_uri())
    rows = [[cell.strip() for cell in row.split("\t")]
            for row in page.locator("[data-is=layered] tr").all_inner_texts()]
    assert rows == [["template ✓", "2.00", "10 %"], [CONTROL, "1.00", "70 %"]]
    assert page.locator("[data-is=size]").inner_text() == "Divergence of the turn's 4 tokens, 2 of them its call"
    sentence = page.locator("[data-is=prose]")
    assert sentence.inner_text() == ("The hint moves the text before the call more than the call: "
                                     "10 % of the divergence lies on the call's 2 tokens.")
    assert page.locator("[data-is=by]").inner_text() == "Sampled by the/sampler; read by the/reader."
    page.get_by_label(CONTROL).check()
    assert sentence.inner_text() == "" and page.complaints == []  # its largest move lies in the call


def test_one_long_trace_keeps_as_many_error_turns_as_have_room(monkeypatch):
    name = "composer_replication.report.explorer.LARGEST"
    of = lambda room: (monkeypatch.setattr(name, room), explorer_data([hinted(failing("long", "cat"), 40)], LAYERS))[1]
    whole = len(json.dumps(of(10 ** 9)["traces"]))
    halved = of(whole // 2)
    assert len(of(10 ** 9)["traces"][0]["sites"]) == 80 and 35 < len(halved["traces"][0]["sites"]) < 50
    assert len(json.dumps(halved["traces"], separators=(",", ":"))) <= whole // 2
    assert len(of(1)["traces"][0]["sites"]) == 1


def test_what_a_trace_says_is_only_text(visit, tmp_path):
    trace = failing(HOSTILE, HOSTILE)
    sites = [site_data(site, {"template": (HOSTILE, rows(.2, (HOSTILE, HOSTILE)))}) for site in find_error_sites(trace)]
    data = explorer_data([trace_data(trace, sites)], LAYERS)
    path = tmp_path / "hostile.html"
    path.write_text(explorer_page(data))
    page = visit(path.as_uri())
    assert HOSTILE[:20] in page.locator(".explorer .hint").inner_text()
    assert page.evaluate("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 2]
    assert page.complaints == []


@pytest.mark.parametrize("content", ["", "Now I list the files ✓:", "  Two lines\nand ls.  "])
@pytest.mark.parametrize("thinking", [None, "I should call ls."])
def test_the_call_begins_behind_the_turns_text(content, thinking):
    "Against the text of the turn, token by token."
    tokenizer = embedded_tokenizer()
    turn = Turn("assistant", content, thinking=thinking, tool_calls=(ToolCall("ls", {"path": "a"}),))
    for before in ([content] if thinking is None else [content, f"<think>{thinking}</think>{content}"]):
        ids = tokenizer.encode(before, add_special_tokens=False)
        call = tokenizer.encode('<tool_call>{"name": "ls"}</tool_call>', add_special_tokens=False)
        spare = len(tokenizer.encode("</think>", add_special_tokens=False)) if before.endswith("</think>") else 0
        spare = spare or len(tokenizer.encode(before[len(before.rstrip()):], add_special_tokens=False))
        assert len(ids) - spare <= call_start(tokenizer, ids + call, turn) <= len(ids)
    assert call_start(tokenizer, ids, replace(turn, tool_calls=())) is None
    assert call_start(tokenizer, call, replace(turn, content="other text")) is None  # the template dropped it
    assert call_start(tokenizer, call, replace(turn, content=tokenizer.decode(call))) is None  # the call is part of the text


def test_the_columns_are_what_the_model_says():
    "Against two plain forwards over token ids."
    trace = next(trace for trace in toy_traces() if len(find_error_sites(trace)) == 1)
    model, tokenizer = embedded_model(), embedded_tokenizer()
    hints = default_composite(siblings=SiblingIndex([trace]))
    site, = explored(trace, hints, (model, tokenizer))["sites"]
    for hint in site["hints"]:
        tree = build_tree(trace, probe_template(tokenizer), {site["turn"]: hint["text"]})
        branch, = tree.branches
        end = tree.span(site["turn"]).end
        for shown, ids in ((site["p"], tree.ids[:end]), (hint["q"], tree.ids[:branch.fork] + branch.ids)):
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            size = len(shown)
            wanted = [logprobs[len(ids) - size + i - 1, ids[len(ids) - size + i]].exp().item() for i in range(size)]
            assert shown == pytest.approx(wanted, rel=6e-3, abs=1e-6)
    first, last = site["hints"][0], site["hints"][-1]
    assert last["layer"] == CONTROL and len(last["text"].split()) == len(first["text"].split())


# Plots and tables

@rc_context(THEME)
def curves():
    plot = Plot("Two arms over episodes", 6, 3)
    left, right = plot.subplots(1, 2)
    for axis, factor in ((left, 1), (right, 10)):
        for name, colour, shift in (("A1 policy", STUDENT, 0), ("A2 SDPO", TEACHER, 2)):
            values = [factor * (y + shift) for y in (1, 2, 3, 4)]
            axis.plot([0, 10, 20, 30], values, color=colour, label=name)
    left.fill_between([0, 10, 20, 30], [0, 1, 2, 3], [2, 3, 4, 5], color=STUDENT, alpha=.2)
    left.axhline(2.5, color="black", label="A0 base")
    left.set(xlabel="episodes", title="passed")
    right.set(xlabel="episodes", title="entropy")
    return plot


@pytest.fixture
def plots(tmp_path):
    heads, cells = ["task", "rate"], [["t10", 0.5], ["t9", None], ["t2", 1.0], ["t1", 0.25]]
    (tmp_path / "plots.html").write_text(page("Plots", curves().__html__() + table(heads, cells, sortable=True)))
    return (tmp_path / "plots.html").as_uri()


def test_without_a_script_the_picture_and_the_table_stand(visit, plots):
    page = visit(plots, java_script_enabled=False)
    assert page.locator("figure svg").is_visible() and page.locator("tbody tr").count() == 4


def test_a_table_is_sorted_by_its_heads(visit, plots):
    page = visit(plots)
    def order():
        return page.locator("tbody tr td:first-child").all_inner_texts()
    page.get_by_role("button", name="task").click()
    assert order() == ["t1", "t2", "t9", "t10"]
    page.get_by_role("button", name="rate").press("Enter")
    assert order() == ["t1", "t10", "t2", "t9"] and page.locator("th").nth(1).get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="rate").click()
    assert order() == ["t2", "t10", "t1", "t9"]  # what has no value stays last


@pytest.mark.parametrize("mode", MODES)
def test_no_page_to_touch_is_wider_than_its_window(visit, explorer, plots, mode):
    for url in (explorer, plots):
        page = visit(url, mode)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_function("width => innerWidth === width", arg=width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.complaints == []
