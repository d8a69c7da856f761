"The views of the workbench: hostile text stays text, size has a bound, nothing shown gives a solution away, live ones answer."
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib import import_module

import pytest
import torch

from composer_replication.core.hint import Hint
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.deletion.env import find_tasks
from composer_replication.envs.deletion.judge.grading import Grade
from composer_replication.envs.deletion.task import HackFinding, read_tasks
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.replay.pairs import DPOPair
from composer_replication.replay.panel import Replayed
from composer_replication.replay.teachers import TeacherCallResult, asked_turns
from composer_replication.report import live
from composer_replication.report.display import VIEWS, html_of
from composer_replication.report.html import Tab, page, table, tabs
from composer_replication.report.replay import replay_body
from composer_replication.report.tokens import TokenRow, token_tabs
from composer_replication.report.trace import WHOLE, trace_html
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.tree.build import Branch, Span, Tree

HOSTILE = "</pre></style><script>alert(1)</script><img src=x onerror=alert(1)>' onmouseover='alert(1)\" x=\""


class Tags(HTMLParser):
    "What a browser would find: tags, and attributes that run code."

    def __init__(self, html):
        super().__init__()
        self.tags, self.handlers = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def hostile_things():
    call = ToolCall(HOSTILE, {"path": HOSTILE})
    failed = Turn("tool", f"Error: unknown tool {HOSTILE}", observation=True, failed=True)
    trace = Trace(HOSTILE, (Turn("user", HOSTILE), Turn("assistant", HOSTILE, thinking=HOSTILE, tool_calls=(call,)), failed,
                            Turn("assistant", HOSTILE)),
                  tools=({"type": "function", "function": {"name": HOSTILE + "2"}},), model=HOSTILE)
    sites = find_error_sites(trace)
    assert sites
    tree = Tree(HOSTILE, (1, 2, 3, 4, 5), (Span(1, 2, 4),), (Branch("hint", 1, 1, (7, 3, 4), 1, label=HOSTILE),))
    finding = HackFinding("static", HOSTILE, HOSTILE, 0.5)
    return [trace, sites[0], Hint(HOSTILE, HOSTILE), tree, DPOPair(HOSTILE, 1, trace.turns[1], trace.turns[3], HOSTILE),
            Grade(0.0, False, 0.5, (finding,), 1.0, True)]


def test_text_from_a_trace_stays_text():
    rows = [TokenRow(HOSTILE, -0.1, -0.2, 0.3, ((HOSTILE, 0.5, 0.5),))]
    views = [html_of(thing) for thing in hostile_things()]
    views += [tabs([Tab(HOSTILE, HOSTILE, HOSTILE)], HOSTILE), token_tabs(rows)]
    views += [table([HOSTILE], [[HOSTILE]]), page(HOSTILE, "")]
    for view in views:
        parsed = Tags(view)
        assert not {"script", "img", "iframe"} & set(parsed.tags) and not parsed.handlers, view


def resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"composer_replication.{module}"), attribute)


def test_every_view_and_its_class_are_there():
    for kind, view in VIEWS.items():
        assert isinstance(resolve(kind), type) and callable(resolve(f"report.{view}"))
        assert resolve(kind).__module__ == f"composer_replication.{kind.rpartition('.')[0]}"  # asked by its home


SESSION = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("from composer_replication import Trace, Turn; from matplotlib.figure import Figure")
shell.run_cell("class Mine(Trace): pass")
shell.run_cell("class Hint: text, layer = 'a < b', 'mine'")
for value in ("Trace('<one>', (Turn('user', 'go'),))", "Mine('two', ())", "Hint()", "Figure()", "{}"):
    print("\\0", shell.display_formatter.format(shell.ev(value))[0].get("text/html"))
"""


def test_a_notebook_shows_the_view_of_an_object():
    output = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120, check=True).stdout
    trace, mine, hint, *others = output.split("\0")[1:]
    assert "<b>&lt;one&gt;</b>: 1 turns" in trace
    assert "there is nothing to choose from" in mine
    assert "<p class=hint>a &lt; b" in hint  # a class that the notebook itself defines
    assert [text.strip() for text in others] == ["None", "None"]  # what is not ours is left alone


def test_a_class_made_from_another_has_its_view_and_others_are_refused():
    mine = type("Mine", (Hint,), {})("Use `cat`.", "mine")
    assert html_of(mine).startswith("<style>") and "Use `cat`." in html_of(mine)
    with pytest.raises(TypeError, match="no view of dict"):
        html_of({})


def test_a_task_shows_nothing_of_its_solution():
    for task in read_tasks(find_tasks("larder")):
        shown = html_of(task)
        added = [line[1:].strip() for line in task.golden_diff.splitlines() if line[:1] == "+" and line[:3] != "+++"]
        said = task.problem_statement
        assert not [line for line in added if len(line) > 12 and line not in said and line in shown]
        assert task.task_id in shown and not any(str(number) in shown for number in task.fingerprints)


def test_a_trace_of_any_length_has_a_page_of_bounded_size():
    said = Turn("assistant", "word " * 4000, thinking="x" * 9000), Turn("tool", "y" * 50_000, observation=True)
    for count in (3, 300, 1200):
        shown = trace_html(Trace("long", tuple(said[i % 2] for i in range(count))))
        assert len(shown) < 3 * WHOLE + 1000 * count  # three texts a turn at most, and what frames them
        assert f"turn {count - 1}" in shown


def test_two_views_of_one_thing_do_not_share_their_buttons():
    trace = toy_traces()[0]
    groups = [set(re.findall(r"name=(s\w+)", trace_html(trace))) for _ in range(2)]
    assert groups[0] and not groups[0] & groups[1]


def test_one_button_is_chosen_whatever_was_asked():
    choices = [Tab(str(i), f"view {i}") for i in range(3)]
    assert [tabs(choices, "three", i).count(" checked") for i in range(3)] == [1, 1, 1]
    with pytest.raises(ValueError, match="there is nothing to choose from"):
        tabs([], "none")


def test_a_plot_is_xml_with_a_name_and_takes_the_pages_colours():
    from matplotlib import rc_context

    from composer_replication.report.html import PALETTE, STUDENT
    from composer_replication.report.plots import THEME, Plot
    with rc_context(THEME):
        plot = Plot("A line that <rises>", 3, 2)
        plot.subplots().plot([1, 2], color=STUDENT)
    text = plot.__html__()
    svg = text[text.index("<svg"):text.rindex("</svg>") + 6]
    ET.fromstring(svg)
    assert 'aria-label="A line that &lt;rises&gt;"' in text and "var(--student)" in svg and "var(--ink)" in svg
    assert not any(light.lower() in svg for light, _ in PALETTE.values())
    assert plot._repr_html_().startswith("<style>") and "<figure" in plot._repr_html_()


@pytest.fixture(scope="module")
def model():
    return embedded_model(), embedded_tokenizer()


def test_what_a_live_view_says_of_a_hint_is_what_the_model_says(model):
    trace, site = next((t, s) for t in toy_traces() for s in find_error_sites(t) if s.kind == "tool_not_found")
    view = live.try_hints(*model, trace, site)
    layer, text = view.children[0].children
    text.value = "Use the tool `cat`."
    said = re.search(r"from probability ([\d.]+) to <b>([\d.]+)", view.picture.value)
    # The same two probabilities, from two plain forward passes over token ids.
    tree = live.hinted_tree(trace, site, text.value, live.probe_template(model[1]))
    branch, = tree.branches
    target = branch.ids[branch.start:]
    hinted = tree.ids[:branch.fork] + branch.ids
    span = tree.span(site.turn)

    def probabilities(ids, end):
        with torch.no_grad():
            logits = model[0](torch.tensor([ids[:end]])).logits[0, -len(target) - 1:-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None])[:, 0]

    student, teacher = probabilities(tree.ids, span.end), probabilities(hinted, len(hinted))
    most = int((student - teacher).abs().argmax())
    for shown, own in zip(said.groups(), (student, teacher)):
        assert float(shown) == pytest.approx(own[most].exp().item(), abs=6e-4)


def test_a_hint_that_cannot_be_placed_is_one_sentence(model):
    trace, site = next((t, s) for t in toy_traces() for s in find_error_sites(t))
    view = live.try_hints(*model, trace, site)
    text = view.children[0].children[1]
    for bad in ("", " \n", "<|end|>", "x" * 200_000):
        text.value = bad
        assert "class=bad" in view.picture.value or "Moved most" in view.picture.value
        assert len(view.picture.value) < 1_000_000
    assert "a hint of 200,000 characters is no hint" in view.picture.value
    text.value = "Use another tool."
    assert "Moved most" in view.picture.value


@pytest.mark.parametrize("own, tasks, words", [
    (1.0, 12, "12 error turns of 12 tasks: own hint better than another site's hint (+1.00 nats a token, +1.00 to +1.00)."),
    (-1.0, 12, "12 error turns of 12 tasks: own hint worse than another site's hint (-1.00 nats a token, -1.00 to -1.00)."),
    (None, 12, "own hint not shown to differ from another site's hint (+0.00 nats a token"),
    (1.0, 3, "better than another site's hint (+1.00 nats a token, +1.00 to +1.00); too few to tell (under 10 tasks)."),
    (0.0, 3, "no better than another site's hint (+0.00 nats a token, +0.00 to +0.00); too few to tell (under 10 tasks)."),
    (1.0, 1, "1 error turn of 1 task: own hint better than another site's hint (+1.00 nats a token, no interval); too few"),
])
def test_the_verdict_on_hints_follows_from_estimate_and_interval(own, tasks, words):
    from types import SimpleNamespace

    from composer_replication.report.hint_scores import score_verdict
    values = [own if own is not None else (-1) ** i for i in range(tasks)]  # None: as often better as worse
    scores = [SimpleNamespace(case=SimpleNamespace(task=str(i)), contrast={"own": value, "other site": 0.0}.get)
              for i, value in enumerate(values)]
    assert words in score_verdict(scores)
    assert "too few" in words or "too few" not in score_verdict(scores)


def test_one_task_alone_has_no_interval_in_any_table():
    from composer_replication.experiments.statistics import clustered_mean
    from composer_replication.report.hint_scores import interval
    assert interval((2, clustered_mean([0.25, 0.35], ["one", "one"]))) == "+0.30, n 2"
    assert "[" in interval((2, clustered_mean([0.25, 0.35], ["one", "two"]))) and interval(None) is None


def test_a_replay_shows_each_pair_at_its_turn():
    trace = next(trace for trace in toy_traces() if len(asked_turns(trace)) > 2)
    go = Turn("assistant", tool_calls=(ToolCall("go", {}),))
    answers = tuple(tuple(TeacherCallResult(name, go) for name in "ab") for _ in asked_turns(trace))
    shown = replay_body(Replayed(trace, tuple(asked_turns(trace)), answers))
    assert shown.count("class=pair") == shown.count("; a pair") == len(answers) and shown.count("<details name=step open") == 1
