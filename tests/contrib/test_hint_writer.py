"""A writer of hints: its score against a plain loop, best of n, resuming, training on the best, and a recipe that asks it."""
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.contrib.hint_writer.candidates import (
    Candidate,
    WrittenSite,
    score_candidates,
    train_writer,
    training_rows,
    write_hints,
)
from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import HintContext
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_path
from composer_replication.experiments.hint_score import repairs
from composer_replication.hints.layers import default_composite
from composer_replication.hints.learned_layer import writer_prompt
from composer_replication.recipes.checkpoint import load_checkpoint
from composer_replication.recipes.hint_models import HintWriter, recipe_hints
from composer_replication.recipes.recipe import load_recipe
from composer_replication.traces.read import read_traces
from composer_replication.tree.build import build_tree
from composer_replication.tree.template import probe_template


@pytest.fixture(scope="module")
def cases():
    return list(repairs(read_traces(toy_path()), default_composite(), Counter()))


class Scripted:
    "A writer that gives the same hints everywhere."

    def __init__(self, *texts):
        self.texts, self.asked = texts, 0

    def candidates(self, prompt, names):
        self.asked += 1
        return list(self.texts[:len(names)])


def plain_changes(model, chat, case, text):
    "For the action that worked and for the one that failed: ids, and what the hint adds to each, every row read whole."
    changes = []
    for side in ("chosen", "rejected"):
        logprobs = []
        for hints in ({case.site.turn: text}, {}):
            tree = build_tree(case.trace, chat, hints, [case.pair])
            context = tree.ids[:tree.span(case.site.turn).start]
            for hint in (b for b in tree.branches if b.kind == "hint"):
                context = tree.ids[:hint.fork] + hint.ids[:hint.start]
            answer, = (b for b in tree.branches if b.kind == side)
            action = answer.ids[answer.start:]
            rows = model(torch.tensor([context + action])).logits[0].log_softmax(-1)
            logprobs.append([rows[len(context) - 1 + i, token].item() for i, token in enumerate(action)])
        changes.append((action, [hinted - plain for hinted, plain in zip(*logprobs)]))
    return changes


@torch.no_grad()
def test_the_value_is_that_of_a_plain_loop(cases):
    model, tokenizer = embedded_model(), embedded_tokenizer()
    chat = probe_template(tokenizer)
    for case in cases[:30:10]:
        texts = [case.hint.text, "The sky is grey over the sea."]
        for text, scored in zip(texts, score_candidates(model, chat, case, texts)):
            (worked, gained), (failed, lost) = plain_changes(model, chat, case, text)
            copied = {i for i in worked if tokenizer.decode([i]).strip() in text or i in tokenizer.all_special_ids}
            expected = (sum(c for i, c in zip(worked, gained) if i not in copied) / len(worked)
                        - sum(c for i, c in zip(failed, lost) if i not in copied) / len(failed))
            assert scored.gain == pytest.approx(expected, abs=1e-4)
            length = len(tokenizer.encode(text, add_special_tokens=False))
            assert scored.tokens == length and scored.value == pytest.approx(expected - 0.002 * length, abs=1e-4)


def test_spelling_the_answer_out_is_worth_nothing_and_a_leak_costs_ten_nats(cases):
    model, chat = embedded_model(), probe_template(embedded_tokenizer())
    case = next(c for c in cases if c.pair.chosen.tool_calls)
    call = case.pair.chosen.tool_calls[0]
    spelled = f'{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}<|call|>'
    told = replace(case, trace=replace(case.trace, gold="the secret is forty-two"))
    scored = score_candidates(model, chat, told, [spelled, "So the secret is forty-two.", ""])
    with torch.no_grad():
        (worked, gained), (failed, lost) = plain_changes(model, chat, case, spelled)
    assert sum(gained) > 1  # nats: it is made likelier by being copied, and that does not count
    assert scored[0].gain == pytest.approx(-sum(c for i, c in zip(failed, lost) if i not in worked) / len(failed), abs=1e-4)
    assert [c.refused for c in scored] == [None, "leaks the reference solution", "empty"]
    assert scored[1].gain is None and scored[1].value < -10


def test_the_best_is_the_one_that_is_worth_most_and_none_below_no_hint(cases):
    def site(*gains):
        return WrittenSite(cases[0], "?", Candidate("layer", 10, None, 9.0),
                           tuple(Candidate(str(g), 10, None, g) for g in gains))
    assert site(0.1, 0.5, 0.3).best.text == "0.5"
    assert site(-0.1, 0.01).best is None  # ten tokens cost 0.02
    both = Candidate("leak", 1, "leaks", None), Candidate("good", 1, None, 0.1)
    assert replace(site(0.1), candidates=both).best.text == "good"


def test_a_site_is_written_once_and_its_candidates_depend_on_itself_alone(cases):
    model, tokenizer = embedded_model(), embedded_tokenizer()
    writer, few = HintWriter(model, tokenizer), cases[:3]
    sites = list(write_hints(model, tokenizer, writer, few, n=2))
    alone = list(write_hints(model, tokenizer, writer, few[2:], n=2))
    assert [c.text for c in alone[0].candidates] == [c.text for c in sites[2].candidates]
    other = list(write_hints(model, tokenizer, writer, few, n=2, seed=1))
    assert [[c.text for c in s.candidates] for s in other] != [[c.text for c in s.candidates] for s in sites]
    left_out, scripted = Counter(), Scripted("Look first.", "Look first.")
    assert list(write_hints(model, tokenizer, scripted, few, max_tokens=16, left_out=left_out)) == []
    assert sum(left_out.values()) == 3


def test_rows_that_cannot_be_trained_on_are_one_sentence(tmp_path):
    with pytest.raises(InputProblem, match="row 1 has no prompt"):
        training_rows([{"prompt": "?", "best": 3}])
    (tmp_path / "candidates.jsonl").write_text('{"prompt": "?", "best": "Look."}\n')
    there = CliRunner().invoke(app, ["hints", "train", str(tmp_path), "--out", str(tmp_path)])
    assert there.exit_code == 1 and "this is there already" in there.stderr


def test_a_recipe_asks_the_writer_that_was_trained_and_the_next_layer_where_it_repeats_the_failed_action(cases, tmp_path):
    taught = "Look at the list of files first."
    prompts = [writer_prompt(HintContext.at(c.trace, c.site)) for c in cases[:4]]
    rows = training_rows([{"prompt": prompt, "best": taught} for prompt in prompts])
    done = train_writer(load_checkpoint("embedded"), rows, tmp_path / "writer", epochs=20, learning_rate=3e-3)
    assert done.loss[1] < 0.5 < done.loss[0]
    assert json.loads((tmp_path / "writer" / "hint_writer.json").read_text())["examples"] == 4
    recipe = load_recipe("toy", {"hints": "[learned, template, raw_error]", "hint_writer": str(tmp_path / "writer")})
    state, hints = torch.random.get_rng_state(), recipe_hints(recipe)
    given = [hints.hint(c.trace, c.site) for c in cases[:4]]
    assert {(h.text, h.layer) for h in given} == {(taught, "learned")}
    assert torch.equal(torch.random.get_rng_state(), state)  # asking draws nothing
    hints.layers[0].write = lambda prompt: cases[0].pair.rejected.content or json.dumps(
        {"name": (c := cases[0].pair.rejected.tool_calls[0]).name, "arguments": c.arguments})
    assert hints.hint(cases[0].trace, cases[0].site).layer in ("template", "raw_error")
