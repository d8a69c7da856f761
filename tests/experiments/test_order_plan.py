"""Spike 012's plan: which runs come next, which rates and switch are chosen, and that kept runs are found again."""
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SPIKE = ROOT / "spikes/012-order"


@pytest.fixture
def plan(tmp_path):
    spec = importlib.util.spec_from_file_location("order_plan", SPIKE / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RUNS, module.HERE = tmp_path / "runs", tmp_path
    module.RUNS.mkdir()
    return module


def end(plan, run, reward, train=100.0):
    run.path.write_text(json.dumps(dict(
        arm=run.arm, start=run.start, seed=run.seed, rate=run.rate, switch=run.switch, then=run.then, alpha=run.alpha,
        log=[{"conflict/norm_ratio": 2.0}, {"conflict/norm_ratio": 8.0}, {"loss": 1.0}],
        rewards=[[reward]], cpu_seconds={"record": 10.0, "train": train, "measure": 5.0})))


def tune(plan, arm, best, alpha=None):
    "End development runs of an arm, best at one rate, until its rate is chosen; the rates that were tried."
    tried = set()
    for _ in range(10):
        runs, rate = plan.rates(arm, alpha)
        tried |= {plan.RATES.index(run.rate) for run in runs}
        if rate is not None:
            return rate, tried
        for run in runs:
            end(plan, run, 1 - abs(plan.RATES.index(run.rate) - best) / 10)
    raise AssertionError("no rate was chosen")


@pytest.mark.parametrize("arm", ["policy", "sdpo"])
@pytest.mark.parametrize("best", range(5))
def test_the_chosen_rate_is_the_best_and_has_been_tried_on_both_sides(plan, arm, best):
    rate, tried = tune(plan, arm, best)
    assert rate == plan.RATES[best]
    assert {n for n in (best - 1, best + 1) if 0 <= n < len(plan.RATES)} <= tried
    assert len(tried) <= 5 and set(plan.FIRST[arm]) <= tried


def test_of_equal_rates_the_lower_is_taken(plan):
    for run in plan.rates("policy")[0]:
        end(plan, run, 0.5 if run.rate != plan.RATES[3] else 0.4)
    runs, rate = plan.rates("policy")
    assert rate is None and {run.rate for run in runs} == {plan.RATES[n] for n in (0, 1, 2, 3)}  # the lowest was an edge


def test_the_policy_objective_goes_on_for_what_the_sequence_costs_more(plan):
    for arm in ("sdpo", "policy"):
        tune(plan, arm, 2)
    assert plan.equal_steps() is None
    for at, reward in zip(plan.SWITCH, (0.2, 0.6, 0.4)):
        for seed in plan.TUNING:
            end(plan, plan.sequence(0, seed, at), reward, train=155.0)
    assert plan.switch()[1] == plan.SWITCH[1]
    assert plan.equal_steps() == 18  # (10 + 155) / (10 + 100) * 12


def test_the_plan_ends_and_every_test_run_comes_once(plan):
    for arm in ("sdpo", "policy", "filler", "rejection"):
        tune(plan, arm, 2)
    for at in plan.SWITCH:
        for seed in plan.TUNING:
            end(plan, plan.sequence(0, seed, at), 0.5)
    assert None in list(plan.plan())  # the weight is not measured
    for run in plan.weight()[0]:
        end(plan, run, 0.0)
    assert plan.weight()[1] == 0.25  # of ratios 2 and 8
    assert plan.joint()[1] is None
    tune(plan, "joint, gated", 2, 0.25)
    assert plan.joint()[1] == (plan.RATES[2], 0.25)
    runs = list(plan.plan())
    assert None not in runs and len({run.path for run in runs}) == len(runs)
    tested = [run for run in runs if run.split == "test"]
    assert len(tested) == len(plan.STARTS) * len(plan.SEEDS) * 7
    assert not {run.seed for run in tested} & set(plan.TUNING)


def test_nothing_is_run_twice_and_what_another_checkout_kept_is_found(plan):
    run, lock, left = plan.resumable.claim(plan.plan())
    assert (run.arm, left) == ("start", True)
    other, second, _ = plan.resumable.claim(plan.plan())
    assert other != run  # the first is locked
    end(plan, run, 0.3)
    for held in (lock, second):
        held.release()
    plan.resumable.collect(plan.RUNS, plan.HERE / "runs.jsonl.gz")
    run.path.unlink()
    plan.resumable.unpack(plan.HERE / "runs.jsonl.gz", plan.path_of)
    assert json.loads(run.path.read_bytes())["rewards"] == [[0.3]]


def test_intervals_of_the_page_are_those_of_student_by_hand():
    "The page's own contrast against numpy and the table of Student's t."
    notebook = json.loads((SPIKE / "012-order.ipynb").read_bytes())
    source = next("".join(c["source"]) for c in notebook["cells"] if "def contrast" in "".join(c["source"]))
    space = {"np": np, "T": 2.262, "SEEDS": range(10), "of": {("a", 0): {}, ("b", 0): {}}}
    exec(compile(source.split("found = {")[0], "cell", "exec"), space)  # the page's functions, not what it prints
    rng = np.random.default_rng(0)
    left, right = rng.random(10), rng.random(10)
    for seed in range(10):
        space["of"]["a", 0][seed], space["of"]["b", 0][seed] = float(left[seed]), float(right[seed])
    found, d = space["contrast"]("a", "b", 0), 100 * (left - right)
    error = (((d - d.mean()) ** 2).sum() / 9 / 10) ** 0.5
    assert found["mean"] == pytest.approx(d.sum() / 10) and found["half"] == pytest.approx(2.262 * error)
    assert space["decided"]("H1", {"mean": 3, "half": 2, "seeds": 10}) == "VALIDATED"
    assert space["decided"]("H1", {"mean": 3, "half": 2, "seeds": 9}) == "NOT RUN"
    assert space["decided"]("H1", {"mean": 3, "half": 4, "seeds": 10}) == "PARTIAL"
    assert space["decided"]("H2", {"mean": -1, "half": 4, "seeds": 10}) == "INVALIDATED"
    assert space["decided"]("H3", {"mean": -3, "half": 2, "seeds": 10}) == "VALIDATED"
    assert space["decided"]("H3", {"mean": 1, "half": 2, "seeds": 10}) == "INVALIDATED"
    assert space["decided"]("H4", {"mean": -2, "half": 2, "seeds": 10}) == "VALIDATED"
    assert space["decided"]("H4", {"mean": -8, "half": 2, "seeds": 10}) == "INVALIDATED"
