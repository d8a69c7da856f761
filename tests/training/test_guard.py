"""The guard: properties over generated runs, and the real `transformers.Trainer` around it."""
import json

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PrinterCallback, Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from composer_replication.core.held_out import HeldoutSplit, content_hash
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.training.guard import GuardFired, HeldOutGuard, HeldOutGuardCallback

score = st.integers(-8, 8).map(lambda x: x / 4)  # with the weights below every smoothed value is exact in float64
runs = st.lists(st.tuples(score, score, st.floats(0, 1)), min_size=1, max_size=20)
guards = st.fixed_dictionaries({"min_steps": st.integers(0, 120), "decline_patience": st.integers(1, 4),
                                "ema_alpha": st.sampled_from([0.25, 0.5, 1.0]), "kl_hard_stop": st.sampled_from([None, 0.9]),
                                "proxy_gap_stop": st.sampled_from([None, 1.0]),
                                "collapse_drop": st.sampled_from([None, 0.25, 1.0])})


def follow(guard, run, first=0):
    for n, (held_out, reward, kl) in enumerate(run, first + 1):
        guard.update(10 * n, held_out, reward, kl)
    return guard


def verdict(run, min_steps, decline_patience, ema_alpha, kl_hard_stop, proxy_gap_stop, collapse_drop):
    "Which evaluation fires by the rules as the page writes them, from whole series; None where none does."
    def smoothed(values):
        made = values[:1]
        for value in values[1:]:
            made.append((1 - ema_alpha) * made[-1] + ema_alpha * value)
        return made

    held, reward = (smoothed([row[i] for row in run]) for i in (0, 1))
    for n in range(len(run)):
        recent = range(n - decline_patience + 1, n + 1)
        declined = recent[0] > 0 and all(held[i] < held[i - 1] and reward[i] > reward[i - 1] for i in recent)
        ahead = (reward[n] - held[n]) - (reward[0] - held[0])
        late = 10 * (n + 1) >= min_steps
        tops = max(held[:n + 1]), max(reward[:n + 1])
        fell = collapse_drop is not None and min(tops) > 0 and tops[0] - held[n] >= collapse_drop
        collapsed = fell and held[n] / tops[0] < 0.5 and reward[n] / tops[1] < 0.3
        if kl_hard_stop is not None and run[n][2] > kl_hard_stop:
            return n
        if late and (declined or collapsed or proxy_gap_stop is not None and ahead > proxy_gap_stop):
            return n


# Properties

@settings(max_examples=300, deadline=None)
@given(runs, guards)
def test_fires_where_the_rules_say_and_stays_so(run, options):
    guard, fired, reason = HeldOutGuard(**options), None, None
    for n, row in enumerate(run):
        follow(guard, [row], n)
        if fired is None and guard.should_halt:
            fired, reason = n, guard.reason
        assert guard.should_halt == (fired is not None) and guard.reason == reason  # latched, and the first reason stands
    assert fired == verdict(run, **options)
    assert reason is None or reason.startswith(f"Stopped at step {10 * (fired + 1)}: ") and reason.count("\n") == 0


@settings(max_examples=100, deadline=None)
@given(runs, guards, st.data())
def test_state_round_trip_equals_uninterrupted(run, options, data):
    whole = follow(HeldOutGuard(**options), run)
    cut = data.draw(st.integers(0, len(run)))
    first, second = follow(HeldOutGuard(**options), run[:cut]), HeldOutGuard(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert follow(second, run[cut:], cut).state_dict() == whole.state_dict()


@pytest.mark.parametrize("options", (dict(min_steps=-1), dict(decline_patience=0), dict(ema_alpha=1.1), dict(kl_hard_stop=0.0),
                                     dict(proxy_gap_stop=float("nan"))))
def test_settings_that_cannot_be_are_named(options):
    (name, value), = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        HeldOutGuard(**options)


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match="another version"):
        HeldOutGuard().load_state_dict({"step": 3})
    state = follow(HeldOutGuard(), [(0.5, 0.5, 0.0)]).state_dict()
    with pytest.raises(ValueError, match="another version"):  # as before the guard knew the best of both
        HeldOutGuard().load_state_dict(state | {"last": {k: v for k, v in state["last"].items() if "best" not in k}})


def test_a_run_that_loses_score_and_reward_is_stopped_and_a_weak_one_is_not():
    lost = [(0.5, 0.9, 0.0)] * 8 + [(0.0, 0.02, 0.0)] * 6
    guard = follow(HeldOutGuard(), lost)
    assert guard.reason.startswith("Stopped at step 120: the policy has collapsed: the held-out score fell from 0.5 to 0.1")
    assert not follow(HeldOutGuard(collapse_drop=None), lost).should_halt
    assert not follow(HeldOutGuard(), [(s, 0.8, k) for s, _, k in lost]).should_halt  # the reward stands
    assert not follow(HeldOutGuard(), [(0.125, 0.1, 0.0), *[(0.0, 0.0, 0.0)] * 30]).should_halt  # one task of eight, by luck


# The split

def test_check_names_what_leaks():
    base = {"id": "a", "prompt": "Fix  It", "files": {"m.py": "x = 1\n"}}
    with pytest.raises(ValueError, match="1 task ids are held out and in the training pool: a;"):
        HeldoutSplit(({"id": "a", "prompt": "other"},), (base,)).check()
    with pytest.raises(ValueError, match=r"content of a held-out one: b \(held out as a\)"):
        HeldoutSplit(({**base, "id": "b", "prompt": "fix it"},), (base,)).check()
    HeldoutSplit(({**base, "id": "b", "files": {"m.py": "x = 2\n"}},), (base,)).check()
    many = tuple({"id": n, "prompt": "p"} for n in range(9))
    with pytest.raises(ValueError, match="0, 1, 2, 3, 4 and 4 more"):
        HeldoutSplit(many, many).check()


def test_rows_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="no prompt or files to compare"):
        content_hash({"id": 1, "question": "?"})
    assert content_hash({"question": "A  b"}, ("question",)) == content_hash({"question": "a b "}, ("question",))
    with pytest.raises(ValueError, match="1 of 1 rows have no 'id'"):
        HeldoutSplit(({"prompt": "p"},), ()).check()


# Around a real trainer: one number per step is drawn with dropout, so that a disturbed random state would show

class OneNumber(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(8))

    def forward(self, n):
        return {"loss": -torch.nn.functional.dropout(self.x + 1, 0.5, self.training).mean()}


class Climber(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        self.reward = model.x.mean().item()
        return model(**inputs)["loss"]

    def log(self, logs, start_time=None):
        super().log({**logs, "reward": self.reward}, start_time)


def trainer_for(folder, guard=None, peak=3.0, every_steps=2, **options):
    def evaluate(model, step):
        torch.rand(step)  # an evaluation samples
        assert not model.training and not torch.is_grad_enabled()
        return {"held_out_score": peak - abs(model.x.mean().item() - peak), "kl": 0.01 * step}

    options = dict(max_steps=30, logging_steps=7, save_strategy="steps", save_steps=5) | options
    arguments = TrainingArguments(str(folder), learning_rate=1.0, optim="sgd", lr_scheduler_type="constant",
                                  per_device_train_batch_size=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=3,
                                  **options)
    callbacks = [HeldOutGuardCallback(guard, evaluate, every_steps)] if guard else []
    trainer = Climber(OneNumber(), arguments, train_dataset=[{"n": n} for n in range(100)], callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    return trainer


def callback_of(trainer):
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, HeldOutGuardCallback))


def readings(trainer):
    return [{k: v for k, v in entry.items() if k.startswith("guard/")} | {"step": entry["step"]}
            for entry in trainer.state.log_history if "guard/declines" in entry]


def test_stops_cleanly_with_a_checkpoint_and_one_sentence(tmp_path, capsys):
    guard = HeldOutGuard(min_steps=4, decline_patience=3)
    trainer = trainer_for(tmp_path, guard, peak=1.0)
    trainer.train()
    assert guard.should_halt and trainer.state.global_step == guard.last.step < 30
    assert capsys.readouterr().err.count(guard.reason) == 1
    saved = tmp_path / f"checkpoint-{guard.last.step}"
    assert (saved / "model.safetensors").is_file()
    with pytest.raises(GuardFired, match="Stopped at step"):
        trainer_for(tmp_path, HeldOutGuard(), peak=1.0).train(resume_from_checkpoint=str(saved))


@pytest.mark.parametrize("cut, restore", [(5, False), (10, True)])
def test_resume_equals_uninterrupted(cut, restore, tmp_path):
    "Cut between two evaluations and on one; with transformers' own restoring of callbacks on and off."
    def made(folder):
        return trainer_for(folder, HeldOutGuard(min_steps=25, decline_patience=3, kl_hard_stop=0.27), peak=0.8,
                           restore_callback_states_from_checkpoint=restore)

    whole = made(tmp_path)
    whole.train()
    resumed = made(tmp_path / "elsewhere")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{cut}"))
    one, other = callback_of(whole).guard, callback_of(resumed).guard
    assert one.should_halt and one.state_dict() == other.state_dict()
    assert readings(whole) == readings(resumed) and len(readings(whole)) >= 6
    assert whole.state.global_step == resumed.state.global_step
    assert torch.equal(whole.model.x, resumed.model.x)


def test_a_watched_run_takes_the_same_steps(tmp_path):
    ends = []
    for guard in (None, HeldOutGuard()):
        trainer = trainer_for(tmp_path, guard)  # which seeds torch
        trainer.train()
        ends.append(trainer.model.x)
    assert torch.equal(*ends) and ends[0].std() > 0


@pytest.mark.parametrize("every_steps, steps", [(10, [6]), (4, [4, 6]), (3, [3, 6])])
def test_the_last_step_is_measured_too_and_rewards_are_means_since_the_evaluation_before(every_steps, steps, tmp_path):
    trainer = trainer_for(tmp_path, HeldOutGuard(), peak=100.0, every_steps=every_steps, logging_steps=1, max_steps=6)
    trainer.train()
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["step"] for entry in readings(trainer)] == steps
    for reading, since, step in zip(readings(trainer), [0, *steps], steps):
        assert reading["guard/proxy_reward"] == pytest.approx(sum(logged[since:step]) / (step - since))


def test_a_log_without_the_reward_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Climber, "log", Trainer.log)
    with pytest.raises(ValueError, match="no 'reward' was logged up to step 2, only .*'loss'"):
        trainer_for(tmp_path, HeldOutGuard()).train()


def test_an_evaluation_without_a_score_is_named(tmp_path):
    trainer = trainer_for(tmp_path, HeldOutGuard())
    callback_of(trainer).evaluate = lambda model, step: {"score": 1.0}
    with pytest.raises(ValueError, match=r"evaluation at step 2 returned \['score'\]"):
        trainer.train()
    assert trainer.model.training


@pytest.mark.parametrize("lost", [(2,), (4,), (2, 4, 6)])
def test_where_nothing_was_scored_the_guard_skips_and_the_run_goes_on(lost, tmp_path, capsys):
    "A judge that is away during an evaluation, or during the first steps, is no fault of the policy."
    trainer = trainer_for(tmp_path, HeldOutGuard(), every_steps=2, max_steps=6)
    callback, scored = callback_of(trainer), callback_of(trainer).evaluate
    callback.evaluate = lambda model, step: {"held_out_score": None} if step in lost else scored(model, step)
    trainer.train()
    steps = {name: [entry["step"] for entry in trainer.state.log_history if name in entry]
             for name in ("guard/unscored", "guard/held_out_score")}
    assert trainer.state.global_step == 6 and steps == {
        "guard/unscored": [*lost], "guard/held_out_score": [step for step in (2, 4, 6) if step not in lost]}
    assert capsys.readouterr().err.count("nothing was scored") == len(lost)


def test_a_reward_that_no_episode_got_yet_is_no_error_where_the_log_says_so(tmp_path):
    trainer = trainer_for(tmp_path, HeldOutGuard(), every_steps=2, max_steps=4)
    with pytest.MonkeyPatch.context() as patch:
        log = type(trainer).log
        patch.setattr(type(trainer), "log", lambda self, logs, *rest: Trainer.log(self, logs | {"health/unscored": 4}, *rest)
                      if self.state.global_step < 3 else log(self, logs, *rest))
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "guard/unscored" in entry] == [2]
    assert trainer.state.global_step == 4 and callback_of(trainer).guard.last.step == 4


def test_reads_the_reward_of_trl(tmp_path):
    "GRPOTrainer collects its metrics between logs: the guard sees the mean over all steps since its last evaluation."
    given_rewards = []

    def reward(completions, **_):
        given_rewards.append([0.1 * len(given_rewards) + 0.5 * n for n in range(len(completions))])
        return given_rewards[-1]

    guard = HeldOutGuard()
    config = GRPOConfig(str(tmp_path), max_steps=5, logging_steps=100, per_device_train_batch_size=2, num_generations=2,
                        max_completion_length=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
                        disable_tqdm=True)
    callback = HeldOutGuardCallback(guard, lambda model, step: {"held_out_score": 0.5}, every_steps=2)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "list"}]}] * 8)
    trainer = GRPOTrainer(embedded_model(), reward, config, rows, processing_class=embedded_tokenizer(), callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    means = [sum(row) / 2 for row in given_rewards]
    assert len(means) == 5 and guard.last.step == 5
    expected = [sum(means[:2]) / 2, sum(means[2:4]) / 2, means[4]]
    assert [r["guard/proxy_reward"] for r in readings(trainer)] == pytest.approx(expected)
