"How many operations a step asks of the device, over GRPO's: on a GPU they decide what the step of a small model costs."
import importlib
import sys
from pathlib import Path

import pytest

from composer_replication.tree.pass_cost import LAYER_WORTH

SPIKE = Path(__file__).resolve().parents[2] / "spikes" / "200-gpu"
MODULES = "common", "stage_b", "operations"


@pytest.fixture
def operations(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SPIKE))
    monkeypatch.setattr(sys, "argv", ["operations", "--tiny", "--out", str(tmp_path)])
    module = importlib.import_module("operations")
    monkeypatch.setattr(module, "TOKENS", 256)
    monkeypatch.setattr(module.stage_b, "ERRORS", 3)
    yield module
    for name in (*MODULES, "plan"):
        sys.modules.pop(name, None)


def test_channels_add_less_to_a_step_than_their_bounds(operations, monkeypatch):
    "Each layer asks for as many, so two shallow models tell of a deep one."
    monkeypatch.setitem(LAYER_WORTH, "cpu", LAYER_WORTH["cuda"])
    stage, deep = operations.Stage("b", "operations"), operations.LAYERS["0.5B"]

    def count(arm):
        one, two = (operations.counted(stage, "0.5B", arm, layers)["operations"] for layers in (1, 2))
        return one + (deep - 1) * (two - one)

    base = count("grpo")
    over = {arm: count(arm) / base for arm in operations.BOUND}
    assert all(1 < over[arm] <= bound for arm, bound in operations.BOUND.items()), over
