"What counts as a reward: a number, and no text of one."

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from rollouts import Folder, config, scripted

from composer_replication.rollout.loop import collect
from composer_replication.rollout.types import Ending

GOOD = [
    (0.5, 0.5),
    (1, 1.0),
    (True, 1.0),
    (np.float32(0.5), 0.5),
    (np.bool_(True), 1.0),
    (np.array([0.5]), 0.5),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([0.5]), 0.5),
    (Fraction(1, 2), 0.5),
    (Decimal("0.5"), 0.5),
    (None, None),
]
BAD = [
    "0.5",
    b"0.5",
    bytearray(b"1"),
    np.str_("0.5"),
    np.array("0.5"),
    "much",
    "",
    "nan",
    math.nan,
    math.inf,
    np.float64("nan"),
    torch.tensor([0.5, 1.0]),
    np.array([]),
    [0.5],
    {},
    1j,
    10**400,
    object(),
]


def rollout_with(value):
    class Scored(Folder):
        def get_reward(self):
            return value

    return collect(scripted(lambda text: "Done."), Scored, [{"prompt": "Look."}], config())[0]


@pytest.mark.parametrize("value, reward", GOOD)
def test_numbers_count(value, reward):
    rollout = rollout_with(value)
    assert rollout.reward == reward and rollout.ending is Ending.DONE and type(rollout.reward) in (float, type(None))


@pytest.mark.parametrize("value", BAD, ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_refused_in_one_sentence(value):
    rollout = rollout_with(value)
    assert rollout.reward is None and rollout.ending is Ending.ERROR
    assert (
        rollout.problem.startswith("reward gave ")
        and "which is no number; return a finite one" in rollout.problem
        and len(rollout.problem) < 200
    )
