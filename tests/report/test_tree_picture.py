"The picture of a tree: every token of it is drawn once, to scale, with its text escaped."
import xml.etree.ElementTree as ET

import pytest

from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.replay.pairs import sibling_pairs
from composer_replication.report.tree import LEFT, own_tokens, token_strip, tree_picture
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.siblings import SiblingIndex
from composer_replication.tree.build import Branch, Span, Tree, build_tree
from composer_replication.tree.template import probe_template


@pytest.fixture(scope="module")
def trees():
    traces, tokenizer, hints = toy_traces(), embedded_tokenizer(), default_composite()
    chat, index, made = probe_template(tokenizer), SiblingIndex(traces), []
    for trace in traces:
        texts = {s.turn: h.text for s in find_error_sites(trace) if (h := hints.hint(trace, s))}
        pairs = sibling_pairs(trace, index)
        if texts and pairs:
            made.append(build_tree(trace, chat, texts, pairs, placement=("target", "start")[len(made) % 2]))
    return tokenizer, made[:8]


def parsed(picture):
    "The SVG as XML."
    return ET.fromstring(picture[picture.index("<svg"):picture.index("</svg>") + 6])


def test_every_token_is_drawn_once_and_to_scale(trees):
    for tree in trees[1]:
        root = parsed(tree_picture(tree))
        length = max(len(tree.ids), *(b.fork + len(b.ids) for b in tree.branches))
        scale = (float(root.get("width")) - LEFT - 10) / length
        rows = {}
        for bar in root.iter("rect"):
            first, end = map(int, bar.find("title").text.rpartition(": [")[2].rstrip(")").split(", "))
            rows.setdefault(float(bar.get("y")), []).append((first, end, float(bar.get("x")), bar.get("class")))
        order = sorted(tree.branches, key=lambda b: -b.fork)
        want = [(0, len(tree.ids)), *((b.fork, len(b.ids)) for b in order)]
        assert len(rows) == len(want)
        for (offset, size), (_, parts) in zip(want, sorted(rows.items())):
            assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])] and parts[-1][1] == size
            assert all(abs(x - (LEFT + scale * (offset + first))) < .06 for first, _, x, _ in parts)
        sampled = [p[:2] for p in sorted(rows.items())[0][1] if p[3] == "sampled"]
        assert sampled == [(s.start, s.end) for s in tree.spans]


def test_own_tokens_are_the_hint_and_nothing_behind_it(trees):
    tokenizer, made = trees
    long = 0
    for tree in made:
        for branch in (b for b in tree.branches if b.kind == "hint"):
            own = own_tokens(tree, branch)
            assert branch.label[5:-5] in tokenizer.decode(branch.ids[:own])
            same, end = len(branch.ids) - own, tree.span(branch.turn).end
            assert branch.ids[own:] == tree.ids[end - same:end]
            assert end - same == branch.fork or branch.ids[own - 1] != tree.ids[end - same - 1]
            long += own > 5
    assert long > 8


def test_text_is_escaped():
    bad = "</title><script>alert('x')</script>"
    tree = Tree(bad + "'", (1, 2, 3, 4), (Span(1, 2, 4),), (Branch("hint", 1, 1, (9, 3, 4), 1, label=bad),))
    for made in (tree_picture(tree), token_strip([bad], ["hint"], [bad + "'"])):
        assert "<script" not in made and "&lt;script" in made
    assert parsed(tree_picture(tree)).get("aria-label").startswith(f"Tree of trace {bad}'")


def test_a_tree_without_branches_has_a_trunk():
    assert tree_picture(Tree("t", (1, 2, 3), (Span(1, 1, 3),))).count("<rect") == 2


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError):
        token_strip(["a", "b"], ["hint"])
