"""What a hint is worth to a model: against a plain loop over whole rows, and on planted hints."""
import gzip
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
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_path
from composer_replication.experiments.hint_score import control_hints, own_against, repairs, score_sites
from composer_replication.experiments.statistics import clustered_mean
from composer_replication.hints.layers import Hint, default_composite
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
    assert told[-1][3] < rows / 2


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


def test_what_is_known_is_not_read_again_and_long_states_are_counted(cases):
    model, tokenizer, left_out = embedded_model(), embedded_tokenizer(), Counter()
    first = list(score_sites(model, tokenizer, cases[:6]))
    known = {(s.case.trace.trace_id, s.case.site.turn): s for s in first}
    assert list(score_sites(None, tokenizer, cases[:6], known=known)) == first
    assert list(score_sites(model, tokenizer, cases[:6], max_tokens=16, left_out=left_out)) == []
    assert sum(left_out.values()) == 6


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


def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch):
    import composer_replication.experiments.hint_score as module
    out, run = tmp_path / "out", CliRunner()
    whole = run.invoke(app, ["hints", "score", "--sites", "6", "--out", str(out), "--json"])
    assert whole.exit_code == 0
    rows = (out / "scores.jsonl").read_text().splitlines()
    assert len(rows) == 6
    (out / "scores.jsonl").write_text("\n".join(rows[:3]) + "\n")
    read = []
    real = module.hinted_pairs
    monkeypatch.setattr(module, "hinted_pairs", lambda mine, *more: read.append(len(mine)) or real(mine, *more))
    again = run.invoke(app, ["hints", "score", "--sites", "6", "--out", str(out), "--json"])
    assert json.loads(again.stdout) == json.loads(whole.stdout) and sum(read) < 6
    assert "nothing to score" in run.invoke(app, ["hints", "score", str(_clean_trace(tmp_path))]).stderr


def _clean_trace(folder):
    path = folder / "clean.jsonl"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def test_one_cluster_has_no_bounds():
    alone = clustered_mean([0.1, 0.3], ["a", "a"])
    assert alone.estimate == pytest.approx(0.2) and (alone.low, alone.high) == (-np.inf, np.inf) and alone.sign == 0


def test_scores_of_other_hints_or_another_template_are_not_taken_up(tmp_path):
    run, rows, out = CliRunner(), toy_path().read_bytes(), tmp_path / "out"
    (tmp_path / "t.jsonl.gz").write_bytes(rows)
    words = ["hints", "score", str(tmp_path / "t.jsonl.gz"), "--sites", "4", "--out", str(out)]
    assert run.invoke(app, words).exit_code == 0
    first = (out / "settings.json").read_text()
    again = run.invoke(app, [*words, "--chat-template", "plain-tools"])
    assert again.exit_code == 0 and (out / "settings.json").read_text() != first
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(b"\n".join(gzip.decompress(rows).splitlines()[::2]), mtime=0))
    assert run.invoke(app, words).exit_code == 0 and (out / "settings.json").read_text() != first


def saved(folder, size="mild"):
    embedded_model(size).save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return str(folder)


def test_scores_of_a_model_trained_again_are_not_taken_up_nor_those_of_unnamed_weights(tmp_path, monkeypatch):
    import composer_replication.experiments.hint_score as module
    read, real = [], module.hinted_pairs
    monkeypatch.setattr(module, "hinted_pairs", lambda mine, *more: read.append(len(mine)) or real(mine, *more))
    run, out = CliRunner(), tmp_path / "out"
    words = ["hints", "score", "--sites", "4", "--model", saved(tmp_path / "model"), "--out", str(out)]

    def scored():
        read.clear()
        done = run.invoke(app, words)
        assert done.exit_code == 0, done.stderr
        return sum(read)

    assert scored() == 4 and scored() == 0
    settings = json.loads((out / "settings.json").read_text())
    assert str(tmp_path) not in settings["weights"]
    (out / "settings.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "weights"}))
    assert scored() == 4 and json.loads((out / "settings.json").read_text()) == settings
    saved(tmp_path / "model", "strong")
    assert scored() == 4
