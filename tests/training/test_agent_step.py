"A training step whose rollouts are played by an agent in a sandbox: its gradient, its rewards, its endings."

import re

import agent_script
import pytest
import torch
import world
from agent_script import trained
from ranks import ended, jobs

from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import latest_traces, run_recipe
from composer_replication.report.run import RunPage
from composer_replication.rollout.compaction import REQUEST, Compacting
from composer_replication.rollout.types import Ending

pytestmark = pytest.mark.trainer


def reference_gradient(trainer):
    "Dr.GRPO on policy, segment by segment, without a batch: the mean over episodes of advantage times sampled log-probabilities."
    model, rollouts = trainer.student, trainer.rollouts
    model.zero_grad()
    rewards = [r.reward for r in rollouts]
    for i, rollout in enumerate(rollouts):
        group = [
            r
            for j, r in enumerate(rewards)
            if trainer.generation.rows[j]["task_id"] == trainer.generation.rows[i]["task_id"] and r is not None
        ]
        if rollout.reward is None:
            continue
        advantage = rollout.reward - sum(group) / len(group)
        for segment in rollout.segments:
            ids = torch.tensor([[*segment.prompt_ids, *segment.completion_ids]])
            logprobs = torch.log_softmax(model(ids).logits[0, :-1] / trainer.args.temperature, -1)
            own = logprobs.gather(1, ids[0, 1:, None])[:, 0][len(segment.prompt_ids) - 1 :]
            loss = (
                -advantage
                * (own * torch.tensor(segment.completion_mask)).sum()
                / (len(rollouts) * trainer.args.max_completion_length)
            )
            loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def test_the_gradient_is_that_of_the_segments_one_by_one(tmp_path):
    trainer = trained(tmp_path, learning_rate=0.0)
    endings = [r.ending for r in trainer.rollouts]
    assert Ending.TURNS not in endings and endings.count(Ending.DONE) >= 6
    assert sum(len(r.segments) == 2 for r in trainer.rollouts) >= 4 and len(set(r.reward for r in trainer.rollouts)) > 2
    for name, wanted in reference_gradient(trainer).items():
        torch.testing.assert_close(trainer.grads[name], wanted, rtol=1e-3, atol=1e-6)
    assert any(g.abs().max() > 1e-5 for g in trainer.grads.values())


@pytest.mark.parametrize("way", ["summary", "left"])
def test_the_gradient_of_episodes_whose_contexts_were_too_long(way, tmp_path):
    "The final reward falls on every sampled token, those of the summaries included."
    trainer = trained(
        tmp_path,
        environment_factory=Compacting(world.Files, 200, way),
        learning_rate=0.0,
        max_turns=4,
        max_completion_length=400,
        max_turn_tokens=40,
    )
    turns = [r.trace.turns for r in trainer.rollouts]
    assert sum(len(r.segments) > 1 for r in trainer.rollouts) >= 3 and len({r.reward for r in trainer.rollouts}) > 1
    assert any(t.content == REQUEST for each in turns for t in each) is (way == "summary")
    for name, wanted in reference_gradient(trainer).items():
        torch.testing.assert_close(trainer.grads[name], wanted, rtol=1e-3, atol=1e-6)
    assert any(g.abs().max() > 1e-6 for g in trainer.grads.values())
    log = trainer.state.log_history[0]
    assert log["context/compactions"] > 0 and ("context/summary_tokens" in log) is (way == "summary")


def test_a_recipe_trains_on_an_agents_answers_and_its_page_shows_them(tmp_path):
    "Task sql: the agent's folder holds the database; its second context begins with a summary."
    agent_script.factory(tmp_path)  # lays the agent's program out
    (tmp_path / "agent" / "mine.py").write_text(
        (tmp_path / "agent" / "mine.py").read_text().replace("answer.txt", "answer.sql")
    )
    settings = {
        "task": "sql",
        "tasks": "easy",
        "train_rows": 2,
        "agent": {"command": "mine:play", "path": str(tmp_path / "agent"), "seconds": 60},
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_generations": 2,
        "max_completion_length": 160,
        "max_turns": 3,
        "tool_timeout": 3600,
    }
    pages = []

    def watch(trainer, record):
        pages.append(RunPage(record, lambda: latest_traces(trainer)))
        return pages

    finished = run_recipe(load_recipe("toy", {key: str(value) for key, value in settings.items()}), watch=watch)
    assert finished.step == 1 and finished.metrics["rollout/done"] == 1.0 and finished.metrics["reward"] == 0.0
    shown = (tmp_path / "out" / "index.html").read_text()
    links = re.findall(r'href="(agents/[^"]+)"', shown)
    assert "2 segments" in shown and len(links) == 2 and all((tmp_path / "out" / link).is_file() for link in links)


def test_sdpo_at_the_error_turns_of_an_agent(tmp_path):
    trainer = trained(tmp_path, alpha_sdpo=1.0)
    log = trainer.state.log_history[0]
    assert log["sdpo/sites"] > 0 and log["sdpo/loss"] > 0


def test_two_processes_have_the_gradient_of_one(tmp_path):
    "Each plays half of the episodes with an endpoint of its own; the numbers of their segments differ."
    objectives, half = ("dapo", "dr_grpo"), {"per_device_train_batch_size": 4}
    for loss in objectives:
        (tmp_path / loss).mkdir()
    with jobs(agent_script, tmp_path) as start:
        ended(start([{"out": str(tmp_path / loss), "settings": half | {"loss_type": loss}} for loss in objectives], ranks=2))
    for loss in objectives:
        one = trained(tmp_path / loss / "one", loss_type=loss)
        two = [torch.load(tmp_path / loss / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
        played = [rollout for each in two for rollout in each["rollouts"]]
        assert played == [
            (r.trace.trace_id, r.ending.value, r.reward, [s.completion_ids for s in r.segments]) for r in one.rollouts
        ]
        counts = [sum(len(ids) for *_, ids in each["rollouts"]) for each in two]
        assert counts[0] != counts[1] and two[0]["log"]["rollout/done"] == one.state.log_history[0]["rollout/done"]
        for name, wanted in one.grads.items():
            torch.testing.assert_close(two[0]["grads"][name], wanted, rtol=2e-3, atol=2e-6)
