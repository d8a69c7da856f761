"""Rewards and curriculum against integrals and simulation."""
import dataclasses
import json
import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.curriculum import DifficultyCurriculum
from composer_replication.envs.deletion.task import read_tasks, write_tasks
from composer_replication.envs.rewards import EffortWeights, EpisodeReward, c_length, effort, failed_calls


@given(st.floats(0, 50), st.floats(0, 5), st.floats(-2, 4))
@example(1.5, 5e-324, 0.0)
@example(0.0, 5e-324, 1.5)
@example(1e-320, 0.5, 1.7)
def test_the_penalty_is_the_integral_of_its_slope(x, k, q):
    nodes, weights = np.polynomial.legendre.leggauss(60)
    at = (nodes + 1) * x / 2
    assert c_length(x, k, q) == pytest.approx(float(weights @ (1 + k * at) ** -q) * x / 2, rel=1e-4, abs=1e-9)


@given(st.floats(0, 1e6), st.floats(1e-9, 10), st.floats(-15, -6))
def test_near_its_limit_the_penalty_loses_no_digits(x, k, power):
    # the first terms of the series in u = 1 - q: L/k (1 + u L / 2 + ...)
    u, grown = 10.0 ** power, math.log1p(k * x)
    assert c_length(x, k, 1 - u) == pytest.approx(grown / k * (1 + u * grown / 2 + (u * grown) ** 2 / 6), rel=1e-9)
    assert c_length(x, k, 1) == pytest.approx(grown / k, rel=1e-14)


@pytest.mark.parametrize("kind", ["thinking", "tool_call", "tool_output", "final_message", "call", "turn"])
def test_each_kind_of_effort_counts_its_own(kind):
    trace = Trace("t", (
        Turn("system", "ignored " * 9), Turn("user", "ignored"),
        Turn("assistant", "a b", thinking="c", tool_calls=(ToolCall("n", {"x": 1}), ToolCall("n", "broken args"))),
        Turn("tool", "o o o o", observation=True, failed=True), Turn("assistant", "f f f f f"),
    ))
    only = EffortWeights(**{k: float(k == kind) for k in vars(EffortWeights())})
    want = {"thinking": 1, "tool_call": 2 + 1 + 2 + 1 + 2, "tool_output": 4, "final_message": 5, "call": 2, "turn": 2}
    assert effort(trace, only, lambda text: len(text.split())) == want[kind]
    assert failed_calls(trace) == 1


@given(st.floats(0, 1), st.floats(0, 3))
def test_shaping_never_raises_a_reward_nor_takes_it_below_the_floor(earned, cost):
    reward = EpisodeReward(((cost, lambda trace: 1.0),))
    trace = Trace("t", (Turn("user", "x"),))
    assert reward(0.0, trace) == 0
    assert 0 <= reward(earned, trace) <= earned


def test_the_curriculum_draws_by_variance():
    rates = {f"t{i}": i / 10 for i in range(1, 10)}
    curriculum, rng = DifficultyCurriculum(rates), random.Random(0)
    curriculum.memory, curriculum.patience = 1.0, 10**6
    for name, rate in rates.items():
        for _ in range(4000):
            curriculum.record(name, float(rng.random() < rate))
    total = sum(p * (1 - p) for p in rates.values())
    assert curriculum.weights() == pytest.approx({name: p * (1 - p) / total for name, p in rates.items()}, abs=0.01)
    drawn = curriculum.draw(20_000, seed="s")
    assert drawn.count("t5") / 20_000 == pytest.approx(0.25 / total, abs=0.01)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1)), max_size=60))
def test_weights_are_a_distribution_whatever_happened(seen):
    curriculum = DifficultyCurriculum("abcd")
    curriculum.patience = 3
    for name, reward in seen:
        curriculum.record(name, reward)
    weights = curriculum.weights()
    assert sum(weights.values()) == pytest.approx(1) and min(weights.values()) > 0


def test_a_class_tells_of_its_other_tasks_only():
    "Against the posterior mean written out: two episodes at the rate of the others, which starts at one pass in two."
    rng, sizes = random.Random(1), {"a": "small", "b": "small", "c": "small", "d": "large", "e": "large"}
    curriculum, played = DifficultyCurriculum("abcdef", classes=sizes), {name: [] for name in "abcdef"}
    curriculum.memory = 1.0
    for _ in range(40):
        name = rng.choice("abdf")
        played[name].append(float(rng.random() < 0.3))
        curriculum.record(name, played[name][-1])
    for name in "abcdef":
        alike = [other for other in sizes if other != name and sizes[other] == sizes.get(name)]
        others = [reward for other in alike for reward in played[other]]
        prior = (1 + sum(others)) / (2 + len(others))
        assert curriculum.rates()[name] == pytest.approx((2 * prior + sum(played[name])) / (2 + len(played[name])))
    of_two = played["a"] + played["b"]
    assert curriculum.rates()["c"] == pytest.approx((1 + sum(of_two)) / (2 + len(of_two)))
    with pytest.raises(InputProblem, match="'z' has a class"):
        DifficultyCurriculum("a", classes={"z": "small"})


def test_a_recipe_s_curriculum_knows_the_sizes_of_the_deletion_tasks(tmp_path):
    from composer_replication.core.environment import TasksWanted, task_set
    from composer_replication.envs.deletion.env import find_tasks
    from composer_replication.training.groups import TaskDraw
    weights = (6, 19, 20, 60, 5, None)  # the last was made before tasks were weighed
    made = [dataclasses.replace(task, difficulty={} if weight is None else {"weight": weight})
            for task, weight in zip(read_tasks(find_tasks("larder")), weights)]
    write_tasks(made, tmp_path / "tasks.jsonl")
    rows = task_set("deletion", TasksWanted(file=str(tmp_path / "tasks.jsonl"))).rows
    assert [row["size"] for row in rows] == ["small", "small", "medium", "large", "tiny", ""]
    draw, names = TaskDraw(rows), [row["task_id"] for row in rows]
    draw.record(names[:1] * 6, [0.0] * 6)
    rates = draw.curriculum.rates()
    assert rates[names[1]] < 0.2 and [rates[name] for name in names[2:]] == [0.5] * 4


def test_the_curriculum_goes_on_after_a_restart():
    one, two = DifficultyCurriculum("ab"), DifficultyCurriculum("ab")
    for reward in (1.0, 0.0, 1.0):
        one.record("a", reward)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.draw(50, 3) == one.draw(50, 3)
