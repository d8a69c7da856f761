"What 017 plans, plays and learns from."
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import make_trainer

spec = importlib.util.spec_from_file_location("plan_017", Path(__file__).with_name("plan.py"))
plan = sys.modules["plan_017"] = importlib.util.module_from_spec(spec)  # spikes have a `plan` each
spec.loader.exec_module(plan)


def test_the_trainer_plays_the_chosen_tasks(tmp_path):
    recipe = load_recipe("toy", {"output_dir": str(tmp_path / "run"), "max_steps": "1"})
    rows = [{"prompt": [{"role": "user", "content": "write f"}], "task_id": f"chosen-{n}"} for n in range(8)]
    assert make_trainer(recipe, plan.on(rows)).train_dataset["task_id"] == [row["task_id"] for row in rows]


def test_opsa_lowers_the_fifth_of_each_rows_tokens_that_is_least_likely():
    "Against numpy, a row at a time; no gradient reaches another token."
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 31, 7, requires_grad=True), torch.randint(7, (2, 31))
    labels[0, :6] = labels[1, 20:] = -100
    loss = plan.opsa_loss(SimpleNamespace(logits=logits), labels)
    loss.backward()
    total, count, touched = 0.0, 0, set()
    for row in range(2):
        z = logits[row].detach().double().numpy()
        said = z - np.log(np.exp(z).sum(-1, keepdims=True))
        own = sorted((said[at - 1, labels[row, at]], at) for at in range(1, 31) if labels[row, at] >= 0)
        count += len(own)
        total += sum(logprob for logprob, _ in own[:round(len(own) / 5)])
        touched |= {(row, at - 1) for _, at in own[:round(len(own) / 5)]}
    assert abs(loss.item() - 0.5 * total / count) < 1e-6
    assert {(row, at) for row, at in logits.grad.abs().sum(-1).nonzero().tolist()} == touched
    given = plan.opsa_loss(SimpleNamespace(logits=logits), labels, num_items_in_batch=torch.tensor(4 * count))
    assert abs(given.item() - loss.item() / 4) < 1e-6


def test_what_is_only_described_runs_last():
    "After every run that a verdict needs."
    primary = {arm: 4.5e-5 for arm in plan.SEEDS}
    done = {plan.Run(arm, 1000, rate).name: {"rewards": [[float(rate == best)]]} for arm, best in primary.items()
            for rate in plan.RATES}
    runs = [run for run in plan.plan(done) if run and run.name not in done]
    arms = [run.arm for run in runs]
    assert sorted(arms[-3:]) == ["opsa"] * 3 and "opsa" not in arms[:-3] and len(runs) == 1 + 42 + 3
