"""Spike 009's states, losses and runs: against plain loops over whole rows, and what must not leak or be done twice."""
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from composer_replication.core.trace import Trace, Turn
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_path
from composer_replication.traces.read import read_traces
from composer_replication.tree.template import probe_template

sys.path.append(str(Path(__file__).parent))
import offline
from offline import Lab, Run


@pytest.fixture(scope="module")
def toy():
    traces = list(read_traces(toy_path()))
    return traces, {task: f"part {i % 20}" for i, task in enumerate(sorted({t.task_id for t in traces}))}


@pytest.fixture(scope="module")
def states(toy):
    "Of twelve tasks, each its own database: eight for training, one for development, three for test."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "TEST", 3)
        patch.setattr(offline, "DEV", 1)
        yield made(toy)


def made(toy):
    return offline.make_states(*toy, probe_template(embedded_tokenizer()), lambda cases: set())


@pytest.fixture
def lab(states, monkeypatch):
    monkeypatch.setattr(offline, "STEPS", 2)
    few = {"train": 8, "dev": 1, "test": 3, "sound dev": 1, "sound test": 2}
    chosen = [s for name, n in few.items() for s in [s for s in states if s.split == name][:n]]
    return Lab(embedded_model(), embedded_tokenizer(), chosen)


def logprobs(model, ids):
    "Log-probabilities `(time - 1, vocab)` of what follows each id, read as one row."
    return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def answer(model, tree, side):
    "Log-probabilities of the tokens of one side of the pair."
    branch, = (b for b in tree.branches if b.kind == side)
    ids = tree.ids[:branch.fork] + branch.ids
    start = branch.fork + branch.start
    return logprobs(model, ids)[range(start - 1, len(ids) - 1), ids[start:]]


def test_databases_are_apart_and_a_task_gives_one_state(states):
    groups = {name: {s.group for s in states if s.split.endswith(name)} for name in ("train", "dev", "test")}
    assert all(groups.values()) and sum(map(len, groups.values())) == len(set.union(*groups.values()))
    for name in ("train", "dev", "test", "sound dev", "sound test"):
        tasks = [s.task for s in states if s.split == name]
        assert tasks and len(tasks) == len(set(tasks))
    assert all(bool(s.hints) == (s.split == "train") for s in states)
    assert all(set(s.hints) == set(offline.HINTED) for s in states if s.split == "train")


def test_a_task_that_was_drawn_before_is_in_no_test(toy, states):
    used = {s.task for s in states if s.split == "test"}
    again = offline.make_states(*toy, probe_template(embedded_tokenizer()), lambda cases: used)
    assert not used & {s.task for s in again if s.split.endswith("test")}


def test_a_hint_never_shows_what_comes_after_the_failed_turn(states):
    chat = probe_template(embedded_tokenizer())
    for state in [s for s in states if s.split == "train"][:5]:
        assert state.tree(chat).spans[-1].turn == state.turn  # the trunk ends there
        assert offline.action_text(state.pair.chosen) in state.hints["exact"]
        assert offline.action_text(state.pair.rejected) in state.hints["wrong"]


def test_the_database_is_the_one_that_mysql_names():
    def trace(task, *pairs):
        turns = (Turn(role, text) for pair in pairs for role, text in zip(("assistant", "user"), pair))
        return Trace("t", tuple(turns), task_id=task)
    found = offline.databases([
        trace("1", ("SELECT a FROM b", "Error executing query: Table 'pets.b' doesn't exist"), ("SHOW TABLES", "[('cat',)]")),
        trace("2", ("SHOW TABLES;", "[('cat',)]")), trace("3", ("SHOW TABLES", "[('ship',)]")),
        trace("4", ("SELECT 1", "[(1,)]"))])
    assert found == {"1": "pets", "2": "pets"}


@pytest.mark.parametrize("name, beta", [("forward", 0.0), ("jsd", 0.5)])
def test_the_sdpo_loss_is_that_of_a_plain_loop(lab, name, beta):
    values = []
    for number in (0, 1):
        tree = lab.tree("train", number, "own")
        hint, span = next(b for b in tree.branches if b.kind == "hint"), tree.spans[-1]
        with torch.no_grad():
            student = logprobs(lab.model, tree.ids)[span.start - 1:span.end - 1]
            ids = tree.ids[:hint.fork] + hint.ids
            teacher = logprobs(lab.model, ids)[hint.fork + hint.start - 1:]
        mix = torch.log((1 - beta) * student.exp() + beta * teacher.exp()) if beta else student
        kl = teacher.exp() * (teacher - mix)
        values.append((kl if not beta else beta * kl + (1 - beta) * student.exp() * (student - mix)).sum(-1))
    batch = lab.batch([0, 1], "own")
    hidden = torch.cat([lab.frozen(n, "own", False) for n in (0, 1)])
    loss = offline.sdpo_loss(lab.model, batch, hidden, offline.lm_head(lab.start), offline.DIVERGENCES[name])
    assert loss.item() == pytest.approx(torch.cat(values).mean().item(), rel=1e-4) and loss.requires_grad


def test_references_are_those_of_a_plain_loop(lab):
    trees = [lab.tree("train", n) for n in (0, 1)]
    with torch.no_grad():
        worked, failed = ([answer(lab.model, t, side) for t in trees] for side in ("chosen", "rejected"))
    batch = lab.batch([0, 1], None)
    value = lambda name: offline.reference_loss(name, lab.model, lab.start, batch).item()
    assert value("sft") == pytest.approx(-torch.cat(worked).mean().item(), rel=1e-4)
    plain = -(1 - torch.cat(failed).exp()).log().mean().item()
    assert value("unlikelihood") == pytest.approx(plain, rel=1e-3)
    assert value("dpo") == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-5)  # at the start


def test_measures_are_those_of_a_plain_loop(lab):
    row = offline.measure(lab, "test", width=2)
    with torch.no_grad():
        for number in range(3):
            tree = lab.tree("test", number)
            assert row["repaired"][number] == pytest.approx(answer(lab.model, tree, "chosen").mean().item(), abs=1e-4)
            assert row["failed"][number] == pytest.approx(answer(lab.model, tree, "rejected").mean().item(), abs=1e-4)
        for number in range(2):
            tree = lab.tree("sound test", number)
            own = [i for span in tree.spans for i in range(span.start, span.end)]
            plain = -logprobs(lab.model, tree.ids)[[i - 1 for i in own], [tree.ids[i] for i in own]].mean().item()
            assert row["sound"][number] == pytest.approx(plain, abs=1e-4) and row["sound_tokens"][number] == len(own)


def test_training_leaves_the_teacher_and_begins_anew(lab):
    before, at_start = lab.frozen(0, "own", False).clone(), offline.measure(lab, "test")
    worked = lambda: offline.reference_loss("sft", lab.model, lab.start, lab.batch(lab.drawn(0)[0], None)).item()
    at_first, losses = worked(), offline.train(lab, Run("sft", "", 0), 1e-4)
    assert len(losses) == 2 and losses[0] == pytest.approx(at_first) and worked() < at_first
    assert offline.measure(lab, "test") != at_start
    lab.frozen.cache_clear()
    assert torch.equal(lab.frozen(0, "own", False), before)
    first = offline.train(lab, Run("own", "forward", 0), 1e-3)
    assert offline.train(lab, Run("own", "forward", 0), 1e-3) == first != offline.train(lab, Run("neutral", "forward", 0), 1e-3)
    lab.reset()
    assert offline.measure(lab, "test") == at_start


def test_a_teacher_that_reads_no_hint_has_nothing_to_say_at_first(lab):
    losses = offline.train(lab, Run("ema", "forward", 0), 1e-3)
    assert losses[0] == pytest.approx(0, abs=1e-5)


def test_all_arms_of_a_seed_have_the_same_states(lab):
    assert lab.drawn(0) == lab.drawn(0) != lab.drawn(1)
    numbers = [n for step in lab.drawn(0) for n in step]
    assert len(numbers) == len(set(numbers)) == 2 * offline.BATCH
    assert len({frozenset(n for step in lab.drawn(seed) for n in step) for seed in range(5)}) > 1


def test_the_rate_with_the_largest_contrast_that_keeps_sound_turns_is_taken():
    def row(factor, gain, rise, arm="own", divergence="forward"):
        return {"arm": arm, "divergence": divergence, "seed": offline.TUNING, "factor": factor, "repaired": [gain, gain],
                "failed": [0, 0], "sound": [1 + rise, 1 + rise], "sound_tokens": [3, 1]}
    base = row(None, 0, 0, "no update", "")
    assert offline.tuned([base, row(1, 0.1, 0), row(3, 0.3, 0.0199), row(10, 0.9, 0.03)], "own", "forward") == 3
    assert offline.tuned([base, row(1, 0.1, 0.2), row(3, 0.3, 0.3), row(10, 0.9, 0.05)], "own", "forward") == 10
    assert offline.sound_rise(row(1, 0, 0) | {"sound": [1.1, 2]}, base) == pytest.approx((3 * 0.1 + 1 * 1) / 4)
    assert offline.contrast(row(1, 0.5, 0) | {"failed": [0.1, 0.3]}, base) == pytest.approx(0.3)


@pytest.mark.parametrize("hint, failed, bare", [
    ("This database has no table `cars`; list them.", "SELECT * FROM cars", "This database has no such table; list them."),
    ("No table has a column `Name`; look.", "SELECT Name FROM cars", "No table has such a column; look."),
    ("`c` has no column `Name`; look.", "SELECT c.Name FROM cars AS c", "`c` has no such column; look."),
    ("It has no table `cars`; list them.", "SHOW TABLES", "It has no table `cars`; list them."),  # the action did not name it
    ("Only `cat` is here.", "cat x", "Only `cat` is here.")])  # not said to be missing
def test_an_unnamed_hint_lacks_the_wrong_name_alone(hint, failed, bare, states):
    state = next(s for s in states if s.split == "train")
    turns = list(state.trace.turns)
    turns[state.turn] = replace(turns[state.turn], content=failed, tool_calls=())
    asked = replace(state, trace=replace(state.trace, turns=tuple(turns)), hints=state.hints | {"own": hint})
    assert asked.hint("unnamed") == bare and asked.hint("own") == hint
