"The teacher check: five planted faults are found, twenty sound set-ups raise no alarm; measures against plain forwards."
import math
import random
from dataclasses import replace

import pytest
import torch
import world
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback

from composer_replication.core.trace import Trace
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.training import teacher_check
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.teacher import KINDS, make_teacher
from composer_replication.training.teacher_check import (
    TeacherCheckProblem,
    check_teacher,
    few_sites,
    read_hints,
    teacher_fault,
)
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import target_hints, target_turns
from composer_replication.tree.template import probe_template

CHAT = probe_template(embedded_tokenizer())
FAILED = [t for t in toy_traces() if target_turns(t)]


def trees(seed=0, placement="target", count=2, most=3):
    "A few recorded traces with hinted turns."
    some = random.Random(seed).sample(FAILED, len(FAILED))
    some = sorted(some[:12], key=lambda t: len(t.turns))[:count]
    return [build_tree(t, CHAT, target_hints(t, dict(list(target_turns(t).items())[:most]), default_composite()), (), placement)
            for t in some]


@pytest.mark.parametrize("model", ["mild", "medium", "strong", "teacher-1", "teacher-2"])
def test_no_alarm_on_twenty_sound_set_ups(model):
    "Five models by four kinds of teacher; both placements."
    for number, kind in enumerate(KINDS):
        some = trees(f"{model}{number}", ("target", "start")[number % 2])
        reading = check_teacher(make_teacher(kind, embedded_model(model)), some, CHAT)
        assert reading and teacher_fault(reading) is None
        assert reading.entropy < 0.2 and reading.effect > 1e-5  # far from the bounds


def test_the_measures_are_those_of_plain_forwards():
    model, some = embedded_model().double(), few_sites(trees(3))
    entropies, effects = [], []
    for tree in some:
        for branch in tree.branches:
            told = list(tree.ids[:branch.fork] + branch.ids)
            span, count = tree.span(branch.turn), len(branch.ids) - branch.start
            plain = list(tree.ids[:span.end])
            hinted, bare = (model(torch.tensor([ids])).logits[0, -count - 1:-1].log_softmax(-1) for ids in (told, plain))
            entropies += (-(hinted.exp() * hinted).sum(-1) / math.log(hinted.shape[-1])).tolist()
            effects += (bare.exp() * (bare - hinted)).sum(-1).tolist()
    found = read_hints(make_teacher("frozen", embedded_model()), some, CHAT.tokenizer.pad_token_id)
    assert found == pytest.approx((sum(entropies) / len(entropies), sum(effects) / len(effects)), rel=1e-3)


def uniform(monkeypatch):
    teacher = make_teacher("frozen", embedded_model())
    with torch.no_grad():
        for weight in teacher._clone.parameters():
            weight.zero_()
    return teacher, trees()


def untrained(monkeypatch):
    teacher = make_teacher("ema", embedded_model())
    teacher._clone.load_state_dict(embedded_model(pretrained=False).state_dict())
    return teacher, trees()


def inverted_setting(monkeypatch):
    return make_teacher("ema", embedded_model(), rate=1 - 0.05), trees()


def changed(change):
    return [replace(t, branches=tuple(change(t, b) for b in t.branches)) for t in few_sites(trees())]


def other_template(monkeypatch):
    "The teacher's context opens the turn as another role's."
    role = CHAT.tokenizer.convert_tokens_to_ids("<|user|>")
    made = changed(lambda t, b: replace(b, ids=(*b.ids[:b.start - 1], role, *b.ids[b.start:])))
    return make_teacher("live", embedded_model()), made


def other_end(monkeypatch):
    "The policy stops on the padding token, as one whose generation settings name another EOS; trees are built from its trace."
    pad, made = CHAT.tokenizer.pad_token_id, []
    for trace in FAILED[:2]:
        tree = build_tree(trace, CHAT)
        ends = {s.turn: (*tree.ids[s.start:s.end - 1], pad) for s in tree.spans}
        other = Trace.from_json(trace.to_json())
        other = replace(other, turns=tuple(replace(t, token_ids=ends.get(i)) for i, t in enumerate(other.turns)))
        made.append(build_tree(other, CHAT, target_hints(other, target_turns(other), default_composite())))
    assert any(t.branches for t in made)
    return make_teacher("ema", embedded_model()), made


def cut_in_front(monkeypatch):
    "A limit of length that keeps the end of the branch."
    return make_teacher("ema", embedded_model()), changed(
        lambda t, b: replace(b, ids=b.ids[b.start // 2:], start=b.start - b.start // 2))


def not_read(monkeypatch):
    "The teacher reads the trunk in the place of the branch."
    inner, plain = teacher_check.teacher_states, teacher_check.without_hints

    def blind(model, batch):
        return inner(model, teacher_check.pack_trees([plain(t) for t in batch.trees], CHAT.tokenizer.pad_token_id))

    monkeypatch.setattr(teacher_check, "teacher_states", blind)
    return make_teacher("ema", embedded_model()), trees()


FAULTS = {uniform: "as uniform as chance", untrained: "as uniform as chance", inverted_setting: "EMA follows the student at once",
          other_template: "opens the turn differently",
          other_end: "do not end with the template's", cut_in_front: "cut away", not_read: "changes nothing"}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named(plant, monkeypatch):
    fault = teacher_fault(check_teacher(*plant(monkeypatch), CHAT))
    assert FAULTS[plant] in fault and len(fault.splitlines()) == 1


def make(folder, **changes):
    config = ComposerReplicationConfig(
        str(folder), report_to="none", bf16=False, use_cpu=True, per_device_train_batch_size=4, num_generations=4, seed=3,
        max_completion_length=96, max_turns=2, max_steps=1, logging_steps=1, save_strategy="no", gradient_checkpointing=False,
        disable_tqdm=True, **changes)
    trainer = ComposerReplicationTrainer(
        embedded_model(), None, config, Dataset.from_list(world.rows(8)), processing_class=world.tokenizer(),
        environment_factory=world.Files, hint_source=default_composite())
    trainer.remove_callback(PrinterCallback)
    return trainer


def test_a_run_stops_or_warns_before_its_first_step(tmp_path):
    stopped = make(tmp_path / "stop", teacher="ema", teacher_ema_rate=0.95, teacher_check="stop")
    before = [p.detach().clone() for p in stopped.student.parameters()]
    with pytest.raises(TeacherCheckProblem, match="set teacher_ema_rate to 0.05"):
        stopped.train()
    assert stopped.state.global_step == 0 and all(torch.equal(a, b) for a, b in zip(before, stopped.student.parameters()))
    runs = []
    for check in ("warn", "off"):
        runs.append(make(tmp_path / check, teacher="ema", teacher_ema_rate=0.95, teacher_check=check))
        runs[-1].train()
    said = [[h["health/warning"] for h in t.state.log_history if "health/teacher" in h] for t in runs]
    assert len(said[0]) == 1 and "EMA follows the student at once" in said[0][0] and not said[1]
    assert all(torch.equal(a, b) for a, b in zip(*(t.student.parameters() for t in runs)))  # the check changes nothing
