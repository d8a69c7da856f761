"Settings that go together, or are refused in one sentence before a step is taken."
import json

import pytest
import trainer_script as scripts
import world
from datasets import Dataset

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import Turn
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.losses.batch import TraceExample, TraceTurn
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.training import rollouts as module
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.episodes import trl_failure
from composer_replication.training.groups import TaskDraw
from composer_replication.training.offline import OfflineTrainer
from composer_replication.training.teacher_check import TeacherCheckProblem
from composer_replication.training.trainer import ComposerReplicationTrainer


def make(folder, rows=(), traces=(), others=None, **changes):
    settings = scripts.BASE | {"save_strategy": "no"} | changes
    data = {"train_dataset": Dataset.from_list(list(rows)), "environment_factory": world.Files} if rows else {}
    return (ComposerReplicationTrainer if rows else OfflineTrainer)(
        scripts.policy(), args=ComposerReplicationConfig(str(folder), **settings), processing_class=world.tokenizer(),
        traces=traces, hint_source=default_composite() if settings["alpha_sdpo"] else None, **data | (others or {}))


def recorded(folder, **changes):
    return make(folder, traces=[TraceExample(trace) for trace in toy_traces()], **{"max_steps": 2, "teacher": "frozen"} | changes)


# rollouts

def test_a_checkpoint_of_other_backward_passes_is_refused(tmp_path):
    make(tmp_path, world.rows(4), max_steps=1, save_strategy="steps").train()
    again = make(tmp_path, world.rows(4), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    with pytest.raises(InputProblem, match="made with another gradient_accumulation_steps than this run's 2"):
        again.train(resume_from_checkpoint=True)


def test_a_divergence_with_a_schedule_begins_it_on_a_checkpoint_without_one(tmp_path):
    make(tmp_path, world.rows(4), max_steps=1, save_strategy="steps").train()
    again = make(tmp_path, world.rows(4), max_steps=2, sdpo_divergence="taid")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and "sdpo/t" in again.state.log_history[-2]


def test_a_resumed_run_goes_on_counting_evaluations(tmp_path):
    data = {"others": {"eval_dataset": Dataset.from_list(world.rows(2, seed=5))}, "eval_strategy": "steps", "eval_steps": 1}
    make(tmp_path, world.rows(4), max_steps=2, save_strategy="steps", **data).train()
    again = make(tmp_path, world.rows(4), max_steps=3, **data)
    again.train(resume_from_checkpoint=True)
    assert again.evaluations == 3  # which names the episodes' random numbers


def test_a_curriculum_of_numbered_tasks_survives_json():
    rows = [{"task_id": number, "prompt": "x"} for number in range(3)]
    draw, again = TaskDraw(rows), TaskDraw(rows)
    draw.record([1, 1], [1.0, 0.0])
    again.curriculum.load_state_dict(json.loads(json.dumps(draw.curriculum.state_dict())))
    assert again.curriculum.state_dict() == draw.curriculum.state_dict() != TaskDraw(rows).curriculum.state_dict()


def test_rows_that_are_masked_have_no_kl(tmp_path, monkeypatch):
    seen = []

    def spied(advantages, kl, coef, size, scored):
        seen.append((kl, scored))
        return real(advantages, kl, coef, size, scored)

    real = module.kl_adjusted_advantages
    monkeypatch.setattr(module, "kl_adjusted_advantages", spied)
    make(tmp_path, world.rows(8), max_steps=4, kl_coef=1.0, mask_truncated_completions=True, learning_rate=1e-4, teacher="frozen",
         max_completion_length=100, per_device_train_batch_size=16).train()
    masked = [(kl == 0) & ~scored for kl, scored in seen]
    assert any(rows.any() and not rows.all() for rows in masked[1:]) and all((kl[scored] != 0).all() for kl, scored in seen[1:])


@pytest.mark.parametrize("changes", [
    {"steps_per_generation": 2, "max_steps": 2}, {"alpha_sdpo": 0.0, "max_completion_length": 6, "max_steps": 1}])
def test_sorting_goes_with_masked_rows(changes, tmp_path):
    make(tmp_path, world.rows(4), sort_by_length=True, mask_truncated_completions=True, per_device_train_batch_size=2, **{
        "gradient_accumulation_steps": 2, "steps_per_generation": 2} | changes).train()


def test_prompts_that_are_plain_texts_are_refused_before_anything_is_played(tmp_path):
    with pytest.raises(InputProblem, match="prompts are plain texts"):
        make(tmp_path, [{"prompt": "Say a number:"}] * 4, others={"environment_factory": None})


def test_a_tool_that_prints_deep_nesting_ends_no_run():
    turn = Turn("tool", "{'error': " + "-" * 100_000 + "1}")
    assert trl_failure(turn) is turn


# recorded traces

def test_a_users_own_hints_come_first(tmp_path):
    traces = [TraceExample(t, turns=tuple(TraceTurn(site.turn, "My own hint.", "mine") for site in find_error_sites(t)[:1]))
              for t in toy_traces()]
    trees = make(tmp_path, traces=traces, max_steps=1, teacher="frozen").setup.recorded
    first = {example.trace.trace_id: example.turns[0].turn for example in traces if example.turns}
    layers = [(branch.layer == "mine", branch.turn == first[tree.trace_id]) for tree in trees for branch in tree.branches]
    assert layers and all(mine == own for mine, own in layers) and not all(mine for mine, _ in layers)


def test_the_teachers_check_looks_at_recorded_traces(tmp_path):
    with pytest.raises(TeacherCheckProblem):  # an average that is the policy itself after every step
        recorded(tmp_path, teacher="ema", teacher_ema_rate=1.0, teacher_check="stop").train()


@pytest.mark.parametrize("changes, said", [
    ({"max_steps": -1, "num_train_epochs": 1}, "set max_steps"), ({"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy")])
def test_what_recorded_traces_alone_cannot_do_is_said(changes, said, tmp_path):
    with pytest.raises(InputProblem, match=said):
        recorded(tmp_path, **changes)


# settings alone

@pytest.mark.parametrize("changes", [
    {"policy_start": 3, "sdpo_steps": 0}, {"all_fail": "distil", "sdpo_steps": 5},
    {"sdpo_token_clip": 0.0}, {"sdpo_token_clip": float("nan")}, {"replay_dpo_beta": -0.1}, {"replay_dpo_beta": 0.0},
    {"sdpo_gate": "passed"}])
def test_settings_that_would_turn_a_loss_round_or_silence_it_are_refused(changes, tmp_path):
    with pytest.raises(InputProblem, match=next(iter(changes))):
        ComposerReplicationConfig(str(tmp_path), **scripts.BASE | changes)


def test_trls_own_loop_has_as_many_turns_as_ours(tmp_path):
    settings = scripts.BASE | {"rollout": "trl", "max_turns": 2, "max_tool_calling_iterations": None}
    assert ComposerReplicationConfig(str(tmp_path), **settings).max_tool_calling_iterations == 1


def test_distil_first_is_no_mistake(tmp_path):
    assert ComposerReplicationConfig(str(tmp_path), **scripts.BASE | {"policy_start": 3, "sdpo_steps": 3}).policy_start == 3
