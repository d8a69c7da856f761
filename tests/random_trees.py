"Trees drawn at random, for passes that need nothing but their layout."
from composer_replication.tree.build import Branch, Span, Tree


def random_tree(draw):
    "A trunk of a few turns, each perhaps with a hint, and perhaps with a pair whose answers are the trunk's own or not."
    spans, at = [], draw.randrange(1, 4)
    for turn in range(draw.randrange(1, 5)):
        spans.append(Span(turn, at, at + draw.randrange(1, 6)))
        at = spans[-1].end + draw.randrange(1, 4)
    ids, branches, pairs = tuple(range(1, at + 1)), [], 0
    busy = draw.choice([0, 0, 0.4, 1.0])  # many rows have nothing to read
    for span in spans:
        own = ids[span.start:span.end]
        if draw.random() < busy:
            extra = draw.randrange(1, 30)
            branches.append(Branch("hint", span.turn, draw.randrange(span.start), (7,) * extra + own, extra))
        if draw.random() < busy / 2:
            fork = draw.randrange(span.start)
            for kind in ("chosen", "rejected"):
                text = own if draw.random() < 0.4 else (6,) * draw.randrange(1, 9)
                branches.append(Branch(kind, span.turn, fork, ids[fork:span.start] + text, span.start - fork, pairs))
            pairs += 1
    return Tree("t", ids, tuple(spans), tuple(branches))
