"A frozen teacher that is the reference too reads the trunks once for hinted branches and pairs, where that is less to read."
import math
import random

import pytest
import torch
from played import played_once
from random_trees import random_tree
from trainer_script import make

from composer_replication.losses.channels import reference_logps, teacher_states
from composer_replication.report.run import run_facts
from composer_replication.training.reading import BackwardPass
from composer_replication.tree.forward import WAYS
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.pass_cost import LAYER_WORTH


@pytest.fixture(scope="module", params=["frozen", "trust_region"])
def trainer(request, tmp_path_factory):
    return make("frozen", tmp_path_factory.mktemp("run"), teacher=request.param, replay_form="dpo")


@pytest.fixture(params=["once", "dense"])
def way(request, monkeypatch):
    monkeypatch.setitem(LAYER_WORTH, "cpu", math.inf if request.param == "once" else -math.inf)
    return request.param


def test_one_pass_over_the_trunks_gives_the_same_states_and_reference(trainer, way):
    clone, draw, read, taken = trainer.reference._clone, random.Random(0), [], []
    hook = clone.model.embed_tokens.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    for _ in range(200):
        batch = pack_trees([random_tree(draw) for _ in range(draw.randrange(1, 6))], 0)
        begun = all(b.fork for tree in batch.trees for b in tree.branches)  # no real trunk is empty before a branch
        if not (batch.sites and batch.pairs and begun):
            continue
        with torch.no_grad():
            states, known = teacher_states(clone, batch), reference_logps(clone, batch, temperature=trainer.temperature)
        apart, step = sum(read), BackwardPass({}, batch=batch)
        read.clear()
        trainer._models().read_teacher(step)
        hinted, _ = step.teacher
        together, shared = sum(read), step.batch.ref_logps is not None
        read.clear()
        taken.append(shared)
        assert step.ways == {way}
        if shared:
            assert together < apart or way == "once"
            torch.testing.assert_close(step.batch.ref_logps, known.ref_logps, atol=1e-4, rtol=1e-5)
        if trainer.teacher.kind == "frozen":
            torch.testing.assert_close(hinted, states, atol=1e-4, rtol=1e-4)
    hook.remove()
    assert (0 < sum(taken) < len(taken)) if trainer.teacher.kind == "frozen" else not any(taken)


@pytest.mark.parametrize("teacher", ("live", "frozen"))
def test_gradient_checkpointing_reads_the_trunk_no_more_often(teacher, way, tmp_path):
    read = {}
    for checkpointing in (False, True):
        changes = dict(teacher=teacher, gradient_checkpointing=checkpointing, max_steps=1, save_strategy="no")
        trainer = make("frozen", tmp_path / str(checkpointing), **changes)
        tokens = []
        trainer.model.model.embed_tokens.register_forward_hook(
            lambda module, args, out, tokens=tokens: tokens.append(args[0].numel() * torch.is_grad_enabled()))
        played_once(trainer).train()
        logged = trainer.state.log_history[0]
        assert logged["replay/pairs"] and logged["sdpo/sites"]
        assert {way: logged[f"branches/{way}"] for way in WAYS} == dict.fromkeys(WAYS, 0) | {way: 1}
        read[checkpointing] = sum(tokens)
    assert read[True] == read[False] > 0


def test_the_log_says_where_each_branch_reads_the_trunk_again(tmp_path, monkeypatch):
    for name in ("training.reading.trunk_problem", "training.step.trunk_problem", "tree.forward.trunk_problem",
                 "tree.one_pass.tree_problem"):
        monkeypatch.setattr(f"composer_replication.{name}", lambda model: "its layers keep nothing")
    changes = dict(teacher="frozen", logging_steps=1, save_strategy="steps", save_steps=2)
    trainer = make("frozen", tmp_path, max_steps=2, **changes)
    played_once(trainer).train()
    first, second, *_ = trainer.state.log_history
    assert first["branches/rows"] == second["branches/rows"] == 1 == sum(first[f"branches/{way}"] for way in WAYS)
    sentence = "Hinted turns and answers of pairs are read a row each, the trunk again for each: its layers keep nothing."
    again = make("frozen", tmp_path, max_steps=3, **changes)
    played_once(again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for history in (trainer.state.log_history, again.state.log_history):
        assert [entry["branches/way"] for entry in history if "branches/way" in entry] == [sentence]
        assert dict(run_facts({}, history))["branches"] == sentence  # on the run's page


def test_a_frozen_teacher_shares_the_trunk_where_the_student_cannot(way, tmp_path):
    trainer = make("frozen", tmp_path, teacher="frozen", beta_replay=0, gradient_checkpointing=True, max_steps=1,
                   save_strategy="no")
    played_once(trainer).train()
    logged = trainer.state.log_history[0]
    assert logged["sdpo/sites"] and (logged[f"branches/{way}"], logged["branches/rows"]) == (1, 0)
