"""Guard, curriculum, shaped rewards, chat templates and habits by a recipe, in real runs of the embedded model."""
import json

import pytest
import torch
import yaml

from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.rewards import SharedCredit, c_length, episode_reward
from composer_replication.recipes.load import recipe_tokenizer
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.recipes.run import make_trainer
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.training.guard import HeldOutGuardCallback
from composer_replication.training.trainer import ComposerReplicationTrainer

pytestmark = pytest.mark.trainer
SMALL = dict(model="embedded", task="toy", train_rows=6, max_steps=2, per_device_train_batch_size=4, num_generations=2,
             max_completion_length=96, max_turns=2, max_turn_tokens=48, use_cpu=True, bf16=False, gradient_checkpointing=False,
             report_to="none", logging_steps=1, save_steps=1, alpha_sdpo=0.0, disable_tqdm=True)


def recipe(folder, **values):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(SMALL | dict(output_dir=str(folder / "out")) | values))
    return load_recipe(path)


# The guard

def test_the_guard_is_on_wherever_rows_are_held_out(tmp_path):
    def guards(**values):
        trainer = make_trainer(recipe(tmp_path, **values))
        return [c for c in trainer.callback_handler.callbacks if isinstance(c, HeldOutGuardCallback)]
    assert guards() == []
    [guard] = guards(held_out_rows=2, guard_steps=3, guard_settings={"min_steps": 5})
    assert (guard.every_steps, guard.guard.min_steps) == (3, 5)
    assert guards(held_out_rows=2, guard=False, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2) == []


def test_a_reward_that_parts_from_the_held_out_score_stops_the_run(tmp_path, monkeypatch):
    made = recipe(tmp_path, held_out_rows=2, guard_steps=1, max_steps=9, save_strategy="no",
                  guard_settings={"min_steps": 0, "decline_patience": 2, "ema_alpha": 1.0})
    scores, rewards = iter([0.9, 0.8, 0.7, 0.6]), iter([0.1 * i for i in range(1, 9)])
    monkeypatch.setattr(ComposerReplicationTrainer, "held_out", lambda self, model=None, step=0: {"held_out_score": next(scores)})
    trainer = make_trainer(made)

    def planted(completions, **kwargs):
        return [next(rewards)] * len(completions)
    monkeypatch.setattr(trainer, "reward_funcs", [planted])
    trainer.train()
    assert trainer.state.global_step == 3 and any("guard/declines" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("values, said", [
    (dict(held_out_rows=2, guard=False), "nothing would measure on them"),
    (dict(guard_settings={"min_steps": -1}), "min_steps=-1 must be 0 or more"),
    (dict(episode_reward={"credit": "some"}), "credit is 'some'"),
    (dict(episode_reward={"repeated_calls": -0.1}), "repeated_calls=-0.1 is no number; give one of 0 or more"),
    (dict(episode_reward={"repeated_calls": "much"}), "repeated_calls='much' is no number"),
    (dict(episode_reward={"length": {"rate": 1}}), "length=.* will not do"),
    (dict(episode_reward={"length": {"k": -1}}), "length=.* will not do; give some of .* as numbers of 0 or more"),
    (dict(episode_reward={"length": {"q": float("inf")}}), "length=.* will not do"),
    (dict(episode_reward={"floor": float("nan")}), "floor=nan is no number"),
    (dict(task=None, traces="x.jsonl", alpha_sdpo=1.0, curriculum=True), "curriculum=True without a task: there are no rollouts"),
    (dict(task=None, traces="x.jsonl", alpha_sdpo=1.0, tasks="easy"), "tasks=.* without a task"),
    (dict(beta=0.05), "beta=0.05 has TRL load the reference by its name, and model .* is made in memory; take kl_coef"),
])
def test_mistakes_are_one_sentence(tmp_path, values, said):
    with pytest.raises(RecipeProblem, match=said) as caught:
        recipe(tmp_path, **values)
    assert "\n" not in str(caught.value)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("task: toy\nmax_steps: 3\nepisode_reward:\n  floor: 0\nmax_steps: 4\n")
    with pytest.raises(RecipeProblem, match="the key 'max_steps' stands twice"):
        load_recipe(path)


# Tasks by difficulty

def test_a_curriculum_draws_what_it_says_and_a_resumed_run_the_same(tmp_path):
    whole = make_trainer(recipe(tmp_path, output_dir=str(tmp_path / "whole"), curriculum=True, max_steps=3))
    drawn, draw = [], whole.draw.draw
    whole.draw.draw = lambda *a, **k: drawn.append(draw(*a, **k)) or drawn[-1]
    whole.train()
    assert len(drawn) == 3 and [r.trace.task_id for r in whole.rollouts] == [row["task_id"] for row in drawn[-1]]
    assert all(one["task_id"] == two["task_id"] for rows in drawn for one, two in zip(rows[::2], rows[1::2]))
    seen = sum(r["episodes"] for r in whole.draw.curriculum.state_dict().values())
    assert seen == 12

    make_trainer(recipe(tmp_path, curriculum=True, max_steps=2)).train()
    again = make_trainer(recipe(tmp_path, curriculum=True, max_steps=3, resume=True))
    again.train(resume_from_checkpoint=True)
    assert again.draw.curriculum.state_dict() == whole.draw.curriculum.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(whole.student.parameters(), again.student.parameters()))


# The reward

def test_a_shaped_reward_is_what_the_policy_learns_from(tmp_path):
    shaping = {"failed_calls": 0.25, "floor": -1.0}
    trainer = make_trainer(recipe(tmp_path, max_steps=1, episode_reward=shaping, save_strategy="no"))
    trainer.train()
    logged = trainer.state.log_history[0]
    failed = [sum(bool(t.failed) for t in r.trace.turns if t.observation) for r in trainer.rollouts]
    own = [r.reward for r in trainer.rollouts]
    assert trainer.generation.rewards == pytest.approx([max(min(-1.0, o), o - 0.25 * f) for o, f in zip(own, failed)])
    assert logged["rewards/environment_reward/mean"] == pytest.approx(sum(own) / len(own))
    assert "rewards/episode_shaping/mean" in logged
    assert any(failed)


def test_length_costs_c_of_x():
    shaped = episode_reward({"length": {"coefficient": 0.01, "k": 0.1, "q": 0.5}}, lambda text: len(text.split()))
    trace = Trace("t", (Turn("user", "Go."), Turn("assistant", "one two three four")))
    assert shaped(1.0, trace) == pytest.approx(1 - 0.01 * c_length(4.0, 0.1, 0.5))


class Graded:
    tools = ()

    def __init__(self, reward, fraction, hacked):
        self.grade = type("Grade", (), dict(fraction=fraction, hacked=hacked))
        self.earned = reward

    def reset(self, **row): pass

    def call(self, call): return ToolResult("")

    def reward(self, answer=""): return self.earned

    def close(self): pass


@pytest.mark.parametrize("reward, fraction, hacked, earned",
                         [(0.0, 0.5, False, 0.5), (1.0, 1.0, False, 1.0), (0.0, 0.9, True, 0.0)])
def test_shared_credit_is_the_share_that_passes(reward, fraction, hacked, earned):
    environment = SharedCredit(lambda: Graded(reward, fraction, hacked))
    assert environment.reward() == earned and environment.call(ToolCall("x", {})).text == ""


# Templates and habits

def test_a_chat_template_by_name_or_file_is_the_tokenizers(tmp_path):
    own = recipe_tokenizer(recipe(tmp_path)).chat_template
    named = recipe_tokenizer(recipe(tmp_path, chat_template="chatml-tools")).chat_template
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert named != own and "tool" in named
    assert recipe_tokenizer(recipe(tmp_path, chat_template=str(tmp_path / "mine.jinja"))).chat_template == "{{ messages }}"


def test_habits_become_hinted_sites_of_an_offline_run_and_of_nobody_else(tmp_path):
    call = {"role": "assistant", "content": "I look.", "tool_calls": [{"name": "read", "arguments": {"path": "a"}, "id": None}]}
    answer = {"role": "tool", "content": "alpha", "observation": True, "failed": False}
    tool = {"type": "function", "function": {"name": "read", "description": "Read.", "parameters": {
        "type": "object", "properties": {"path": {"type": "string", "description": "A path."}}}}}
    turns = [{"role": "user", "content": "Read a."}, call, answer, call, answer, {"role": "assistant", "content": "alpha"}]
    row = {"schema": "composer-trace/1", "trace_id": "t", "turns": turns, "tools": [tool]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    offline = dict(task=None, traces=str(tmp_path / "t.jsonl"), alpha_sdpo=1.0, max_steps=1, save_strategy="no")
    with pytest.raises(ValueError, match="anything to learn from"):
        make_trainer(recipe(tmp_path, **offline))
    trainer = make_trainer(recipe(tmp_path, detectors="repeated_call", **offline))
    [tree] = trainer.setup.recorded
    [branch] = tree.branches
    assert (branch.turn, branch.layer) == (3, "template") and "stands above already" in branch.label
    assert [site.turn for site in trainer.setup.find_sites(trainer.traces[0].trace)] == [3]
    assert find_error_sites(trainer.traces[0].trace) == []
    with pytest.raises(ValueError, match="anything to learn from"):
        make_trainer(recipe(tmp_path, **offline))  # the next recipe in this process has not asked for it
