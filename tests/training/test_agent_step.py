"A training step whose rollouts are played by an agent in a sandbox: its gradient, its rewards, its endings."

import agent_script
import pytest
import torch
from agent_script import trained
from ranks import ended, jobs

from composer_replication.rollout.types import Ending

pytestmark = pytest.mark.trainer


def reference_gradient(trainer):
    "Dr.GRPO on policy, segment by segment, without a batch: the mean over episodes of advantage times log-probability of each sampled token."
    model, rollouts = trainer.student, trainer.rollouts
    model.zero_grad()
    rewards = [r.reward for r in rollouts]
    for i, rollout in enumerate(rollouts):
        group = [r for j, r in enumerate(rewards) if trainer.generation.rows[j]["task_id"] == trainer.generation.rows[i]["task_id"] and r is not None]
        if rollout.reward is None:
            continue
        advantage = rollout.reward - sum(group) / len(group)
        for segment in rollout.segments:
            ids = torch.tensor([[*segment.prompt_ids, *segment.completion_ids]])
            logprobs = torch.log_softmax(model(ids).logits[0, :-1] / trainer.args.temperature, -1)
            own = logprobs.gather(1, ids[0, 1:, None])[:, 0][len(segment.prompt_ids) - 1:]
            loss = -advantage * (own * torch.tensor(segment.completion_mask)).sum() / (len(rollouts) * trainer.args.max_completion_length)
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


def test_sdpo_at_the_error_turns_of_an_agent(tmp_path):
    trainer = trained(tmp_path, alpha_sdpo=1.0)
    log = trainer.state.log_history[0]
    assert log["sdpo/sites"] > 0 and log["sdpo/loss"] > 0


@pytest.mark.parametrize("settings", [{"loss_type": "dapo"}, {"loss_type": "dr_grpo", "equal_rewards": "skip"}], ids=["dapo", "skip"])
def test_two_processes_have_the_gradient_of_one(settings, tmp_path):
    "Each plays half of the episodes with an endpoint of its own; the numbers of their segments differ."
    one = trained(tmp_path / "one", **settings)
    (tmp_path / "two").mkdir()
    with jobs(agent_script, tmp_path) as start:
        ended(start([{"out": str(tmp_path / "two"), "settings": settings | {"per_device_train_batch_size": 4}}], ranks=2))
    two = [torch.load(tmp_path / "two" / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    played = [rollout for each in two for rollout in each["rollouts"]]
    assert played == [(r.trace.trace_id, r.ending.value, r.reward, [s.completion_ids for s in r.segments]) for r in one.rollouts]
    counts = [sum(len(ids) for *_, ids in each["rollouts"]) for each in two]
    assert counts[0] != counts[1] and two[0]["log"]["rollout/done"] == one.state.log_history[0]["rollout/done"]
    for name, wanted in one.grads.items():
        torch.testing.assert_close(two[0]["grads"][name], wanted, rtol=2e-3, atol=2e-6)
