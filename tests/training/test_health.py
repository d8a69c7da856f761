"Sentences and verdicts of a run against a slow reading of the same facts, and on real runs that had nothing to learn from."
import json
import random
import statistics
from pathlib import Path

import pytest
import world
from kept_trainer import made
from transformers import TrainerCallback

from composer_replication.envs.toy.model import embedded_model
from composer_replication.hints.layers import default_composite
from composer_replication.rollout.tool_call_parser import ParsedTurn, TurnReader
from composer_replication.traces.read import read_traces
from composer_replication.training.health import RULES, HealthWatch, StepFacts, rise
from composer_replication.training.trainer import ComposerReplicationTrainer

# ---- the watch alone


def spoken(flags, patience):
    "By a plain loop: the steps at which a rule speaks."
    at, streak = [], 0
    for step, flag in enumerate(flags, 1):
        streak = streak + 1 if flag else 0
        if streak in [patience * 2**n for n in range(12)]:
            at.append(step)
    return at


FACTS = {"no_call": lambda flag: {"called": 0 if flag else 1},
         "equal_rewards": lambda flag: {"equal_groups": 1.0 if flag else 0.75},
         "unscored": lambda flag: {"unscored": 2 if flag else 0},
         "no_error_turn": lambda flag: {"error_turns": 0 if flag else 3, "hints": 3},
         "no_hint": lambda flag: {"error_turns": 2, "hints": 0 if flag else 1, "cut": 0},
         "hints_cut": lambda flag: {"error_turns": 2, "hints": 1, "cut": 1 if flag else 0},
         "clipped": lambda flag: {"clipped": 0.5 if flag else 0.49},
         "reward": lambda flag: {"reward": 0.14 if flag else 0.5},
         "entropy": lambda flag: {"entropy": 0.09 if flag else 1.0},
         "length": lambda flag: {"length": 24.0 if flag else 100.0},
         "teacher_gap": lambda flag: {"gap": 0.0009 if flag else 0.1}}
COMPARED = ("reward", "entropy", "length", "teacher_gap")  # with the run's first five values


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_a_rule_speaks_when_it_has_held_for_its_patience_and_each_time_that_doubles(rule):
    dice = random.Random(rule.key)
    flags = [False] * 5 + [dice.random() < 1 - 0.5 / rule.patience for _ in range(400)]  # others are compared with the first five
    watch, at = HealthWatch(), []
    for step, flag in enumerate(flags, 1):
        sentences = watch.take(StepFacts(step, **FACTS[rule.key](flag)))
        if rule.key in sentences:
            at.append(step)
            assert sentences[rule.key].startswith(f"Step {step}: ") and sentences[rule.key].count("\n") == 0
        assert watch.take(StepFacts(step)) == {}  # a step that measured nothing neither speaks nor breaks a row
    assert at == spoken(flags, rule.patience) and len(at) > 3
    assert watch.held[rule.key] == sum(flags) and watch.measured[rule.key] == len(flags) - 5 * (rule.key in COMPARED)


def test_a_reward_that_starts_at_zero_or_below_does_not_collapse():
    watch = HealthWatch()
    assert not any(watch.take(StepFacts(step, 0.0 if step % 2 else -1.0)) for step in range(1, 100))


def test_the_verdict_names_what_held_in_most_steps():
    watch = HealthWatch()
    for step in range(1, 31):
        watch.take(StepFacts(step, 0.5, equal_groups=0.5, error_turns=0 if step % 3 else 2, hints=2, clipped=0.9 * (step % 2)))
    assert "The reward did not rise: 0.5 in the first third of 30 steps, 0.5 in the last" in watch.verdict()
    assert "no turn failed in 20 of 30 steps" in watch.verdict()


def test_one_unscored_episode_or_hint_cut_of_many_is_no_reason_that_nothing_was_learned():
    rare, often = HealthWatch(), HealthWatch()
    for step in range(1, 31):
        said = rare.take(StepFacts(step, 0.5, equal_groups=0.5, error_turns=9, hints=8, cut=1, episodes=64, unscored=1))
        assert step > 1 or {"unscored", "hints_cut"} <= said.keys()
        often.take(StepFacts(step, 0.5, equal_groups=0.5, error_turns=9, hints=8, cut=1, episodes=64, unscored=32))
    assert "no condition held in half of the steps" in rare.verdict()
    assert "half of the episodes or more were unscored in 30 of 30 steps" in often.verdict()


def test_the_rise_is_that_of_two_means_with_their_error():
    dice = random.Random(1)
    for _ in range(50):
        rewards = [dice.random() + 0.005 * n for n in range(dice.randrange(20, 70))]
        third = len(rewards) // 3
        first, last = rewards[:third], rewards[len(rewards) - third:]
        error = (statistics.variance(first) / third + statistics.variance(last) / third) ** 0.5
        before, after, rose = rise(rewards)
        assert before == pytest.approx(statistics.mean(first)) and after == pytest.approx(statistics.mean(last))
        assert rose == (statistics.mean(last) - statistics.mean(first) > error)


# ---- real runs


class Told(TrainerCallback):
    "Another callback: what it was given."

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


class Flat(world.Files):
    def get_reward(self):
        return 0.0


def run(folder, environment=world.Files, hints=None, resume=None, **changes):
    base = dict(per_device_train_batch_size=4, max_turns=2, max_completion_length=96, max_steps=3, logging_steps=50,
                alpha_sdpo=1.0, learning_rate=1e-4, optim="adamw_torch", max_grad_norm=1.0, teacher="frozen")
    told = Told()
    given = {"callbacks": [told], "hint_source": hints or default_composite()}
    trainer = made(folder, environment, model=embedded_model(), kind=ComposerReplicationTrainer, given=given, **base | changes)
    trainer.train(resume_from_checkpoint=resume)
    said = " ".join(log.get("health/warning", "") for log in told.logs)
    return trainer, said, next((log["health/verdict"] for log in told.logs if "health/verdict" in log), None)


def test_a_run_of_equal_rewards_and_no_channel_says_that_it_learned_nothing(tmp_path):
    trainer, said, verdict = run(tmp_path, Flat, alpha_sdpo=0.0, max_completion_length=32)
    assert "Step 1: all rewards of this step are equal" in said and "no gradient from channel 1 (2 steps in a row)" in said
    assert "no channel had a gradient in 3 steps" in verdict and "all rewards of a step were equal in 3 of 3 steps" in verdict
    assert [h["health/equal_rewards"] for h in trainer.state.log_history if "health/equal_rewards" in h] == [1, 2]
    before = dict(embedded_model().named_parameters())
    assert all((p == before[n]).all() for n, p in trainer.student.named_parameters())  # it is true: nothing was learned


def test_a_run_without_a_tool_call_says_so_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.setattr(TurnReader, "read", lambda *args, **kwargs: ParsedTurn("So be it."))
    _, said, verdict = run(tmp_path, Flat, alpha_sdpo=0.0, max_completion_length=32)
    assert "Step 1: no episode of this step made a tool call" in said
    assert "Likeliest reason: no episode made a tool call in 3 of 3 steps; begin with a warm_up" in verdict


class Failing(world.Files):
    scored = 0

    def get_reward(self):
        Failing.scored += 1
        if Failing.scored % 4:
            raise RuntimeError("the judge cannot work")
        return 1.0


def test_episodes_that_could_not_be_scored_are_counted_in_words(tmp_path):
    trainer, said, _ = run(tmp_path, Failing, max_steps=1, alpha_sdpo=0.0, max_completion_length=32)
    assert sorted(map(str, trainer.generation.rewards)) == ["1.0", "None", "None", "None"]
    assert "Step 1: unscored episodes: 3; the environment or its judge failed" in said


def test_a_run_without_an_error_turn_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("composer_replication.training.rollouts.target_turns", lambda *args: {})
    trainer, said, _ = run(tmp_path, max_steps=6, max_completion_length=24)
    assert not any(h.get("sdpo/sites") for h in trainer.state.log_history)
    assert said.count("no error turn in 5 steps") == 1


def test_a_run_whose_rows_are_cut_says_that_its_hints_are_lost(tmp_path):
    trainer, said, _ = run(tmp_path, mask_truncated_completions=True, max_completion_length=80, max_turns=6, max_steps=2)
    cut = [h["health/hints_cut"] for h in trainer.state.log_history if "health/hints_cut" in h]
    assert cut and "hints of this step are lost to the limit of length" in said


def test_a_hint_source_that_is_silent_is_named(tmp_path):
    _, said, _ = run(tmp_path, hints=lambda kind, context: None)
    assert "no hint for any of the error turns in 3 steps" in said


def test_a_sampled_rollout_is_a_trace_of_the_run(tmp_path):
    trainer, _, _ = run(tmp_path, sample_every=2, max_steps=4, keep_rollouts=True, max_completion_length=32)
    samples = sorted(Path(tmp_path).glob("rollouts/sample*.jsonl.gz"))
    assert [p.name for p in samples] == ["sample000000.jsonl.gz", "sample000002.jsonl.gz"]
    whole = {t.trace_id: t for p in Path(tmp_path).glob("rollouts/step*.jsonl.gz") for t in read_traces(p)}
    for number, path in enumerate(samples):
        trace, = read_traces(path)
        assert trace.turns == whole[trace.trace_id].turns and trace.reward == whole[trace.trace_id].reward
        assert trace.trace_id == f"step{2 * number}-rank0-{number}"  # another row each time
    assert len(whole) == 16 and all(whole[r.trace.trace_id].turns == r.trace.turns for r in trainer.rollouts)


def test_a_resumed_run_says_the_same(tmp_path):
    def told(resume=None):
        trainer, *_ = run(tmp_path, Flat, resume=resume, max_completion_length=48, max_steps=4, logging_steps=1,
                          save_strategy="steps", save_steps=3)
        return [{k: v for k, v in h.items() if k.startswith("health/")} for h in trainer.state.log_history], trainer.health.watch

    whole, again = told(), told(str(tmp_path / "checkpoint-3"))
    assert whole == again and whole[1].streak["equal_rewards"] == 4
    assert json.loads(json.dumps(vars(whole[1]), default=str))
