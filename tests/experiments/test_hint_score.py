"""What a hint is worth to a model: against a plain loop over whole rows, and on planted hints."""
import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.core.errors import InputProblem
from composer_replication.core.hint import Hint
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_path
from composer_replication.experiments.hint_score import control_hints, own_against, repairs, score_sites
from composer_replication.experiments.statistics import clustered_mean
from composer_replication.hints.layers import default_composite
from composer_replication.traces.read import read_traces
from composer_replication.tree.build import build_tree
from composer_replication.tree.template import probe_template


@pytest.fixture(scope="module")
def cases():
    return list(repairs(read_traces(toy_path()), default_composite(), Counter()))


def plain_mean(model, ids, start):
    "Mean log-probability of `ids[start:]`, read as one row."
    rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(rows[i - 1, ids[i]].item() for i in range(start, len(ids))) / (len(ids) - start)


def test_scores_are_those_of_a_plain_loop(cases):
    model, tokenizer = embedded_model(), embedded_tokenizer()
    chat, chosen = probe_template(tokenizer), cases[:40:10]
    texts = control_hints(chosen)
    scores = {(s.case.trace.trace_id, s.case.site.turn): s for s in score_sites(model, tokenizer, chosen)}
    assert len(scores) == len(chosen)
    for case, row in zip(chosen, texts):
        score = scores[case.trace.trace_id, case.site.turn]
        for name, text in (row | {"none": None}).items():
            tree = build_tree(case.trace, chat, {case.site.turn: text} if text else {}, [case.pair])
            span = tree.span(case.site.turn)
            context = tree.ids[:span.start]
            if text:
                hint, = (b for b in tree.branches if b.kind == "hint")
                context = tree.ids[:hint.fork] + hint.ids[:hint.start]
            for side, scored in (("chosen", score.repaired), ("rejected", score.failed)):
                answer, = (b for b in tree.branches if b.kind == side)
                action = answer.ids[answer.start:]
                assert plain_mean(model, context + action, len(context)) == pytest.approx(scored[name], abs=1e-5)


def test_a_trace_is_read_once_for_all_hints_and_its_tokens_are_counted_before(cases):
    model, tokenizer, read, told = embedded_model(), embedded_tokenizer(), [], []
    hook = model.base_model.embed_tokens.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    try:
        on_trace = lambda *progress: told.append((*progress, sum(read)))
        scores = list(score_sites(model, tokenizer, cases[:40:10], on_trace=on_trace))
    finally:
        hook.remove()
    assert told[0] == (0, 4, 0, told[-1][3], 0)  # all is known before anything is read
    assert all(tokens == counted for _, _, tokens, _, counted in told) and told[-1][:3] == (4, 4, told[-1][3])
    rows = 0  # what a row for each hint and action would read
    for score in scores:
        own = build_tree(score.case.trace, probe_template(tokenizer)).span(score.case.site.turn).start
        rows += 2 * len(score.repaired) * own + len(score.repaired) * sum(score.tokens)
    assert sum(read) < rows / 2


def test_a_hint_that_is_the_action_itself_is_worth_much_and_all_of_it_is_copied(cases):
    model, tokenizer = embedded_model(), embedded_tokenizer()
    case = next(c for c in cases if c.pair.chosen.tool_calls)
    call = case.pair.chosen.tool_calls[0]
    text = f'<|call|>{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}'
    spelled = replace(case, hint=Hint(text, "planted"))
    score, = score_sites(model, tokenizer, [spelled])
    assert score.uncopied == {}  # each of its tokens stands in the hint
    assert score.change("own", "uncopied") is None
    assert own_against([score], "other site") is None  # alone, there is none


def test_controls_have_the_hints_length_and_come_from_other_tasks(cases):
    texts = control_hints(cases, seed=1)
    by_text = {}
    for case in cases:
        by_text.setdefault(case.hint.text, set()).add(case.task)
    for case, row in zip(cases, texts):
        words = case.hint.text.split()
        assert sorted(row["shuffled"].split()) == sorted(words) and len(row["neutral"].split()) == len(words)
        assert row["other site"] != case.hint.text and by_text[row["other site"]] - {case.task}
    assert control_hints(cases, seed=1) == texts != control_hints(cases, seed=2)


def test_a_trace_whose_first_turn_fits_but_no_error_turn_is_counted(cases):
    model, tokenizer, left_out = embedded_model(), embedded_tokenizer(), Counter()
    late = next(c for c in cases if c.site.turn > 3)
    first = build_tree(late.trace, probe_template(tokenizer)).spans[0].end
    assert list(score_sites(model, tokenizer, [late], max_tokens=first, left_out=left_out)) == []
    assert sum(left_out.values()) == 1


def test_a_clustered_mean_is_that_of_drawing_clusters_by_hand():
    rng = random.Random(0)
    clusters = [rng.randrange(12) for _ in range(60)]
    values = [c / 10 + rng.gauss(0, .1) for c in clusters]
    mean, drawn, names = clustered_mean(values, clusters), [], sorted(set(clusters))
    for _ in range(4000):
        rows = [v for name in rng.choices(names, k=len(names)) for v, c in zip(values, clusters) if c == name]
        drawn.append(sum(rows) / len(rows))
    assert mean.estimate == pytest.approx(sum(values) / 60)
    assert (mean.low, mean.high) == pytest.approx(tuple(np.quantile(drawn, [.025, .975])), abs=.03)
    with pytest.raises(InputProblem):
        clustered_mean([1.0, float("nan")], [0, 1])


def test_the_command_writes_a_row_for_each_site_and_says_where_there_is_nothing_to_score(tmp_path):
    done = CliRunner().invoke(app, ["hints", "score", "--sites", "6", "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0 and len((tmp_path / "out" / "scores.jsonl").read_text().splitlines()) == 6
    assert "nothing to score" in CliRunner().invoke(app, ["hints", "score", str(_clean_trace(tmp_path))]).stderr


def _clean_trace(folder):
    path = folder / "clean.jsonl"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def test_one_cluster_has_no_bounds():
    alone = clustered_mean([0.1, 0.3], ["a", "a"])
    assert alone.estimate == pytest.approx(0.2) and (alone.low, alone.high) == (-np.inf, np.inf) and alone.sign == 0
