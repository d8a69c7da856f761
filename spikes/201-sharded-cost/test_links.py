"Spike 201's seconds between devices: rings as they run, and gathers counted by hand."
import sys
from pathlib import Path

import pytest

from composer_replication.recipes.recipe import load_recipe

sys.path.append(str(Path(__file__).parent))
from links import Gathered, Network, gathered, ring_seconds


def by_steps(size, devices, network):
    "A ring as it runs: at each of its steps every device sends one part, and all wait for the slowest link."
    seconds, part = 0.0, size / devices
    machines = -(-devices // network.node)
    pace = network.inside if machines == 1 else min(network.inside, network.between * network.node)
    for step in range(devices - 1):
        seconds += part / pace + (network.hop_between if step < machines - 1 else network.hop_inside)
    return seconds


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 9, 16, 64, 512])
def test_a_ring_takes_the_sum_of_its_steps(devices):
    network = Network(node=8, inside=7e9, between=2e8, hop_inside=3e-6, hop_between=2e-5)
    assert ring_seconds(1.5e9, 1, devices, network) == pytest.approx(by_steps(1.5e9, devices, network))
    in_pieces = sum(by_steps(1.5e9 / 29, devices, network) for _ in range(29))
    assert ring_seconds(1.5e9, 29, devices, network) == pytest.approx(in_pieces)


def test_cards_of_a_machine_that_send_slower_than_its_inside_set_the_pace():
    slow, fast = (Network(8, 1e9, card, 0.0, 0.0) for card in (1e8, 1e9))
    assert ring_seconds(1e9, 1, 16, slow) == pytest.approx(15 / 16 / 0.8)
    assert ring_seconds(1e9, 1, 16, fast) == pytest.approx(15 / 16)


def gathers(**given):
    given = {key: str(value) for key, value in given.items()}
    return gathered(load_recipe("qwen2.5-coder-7b-fsdp2", given, estimating=True), branches=3, idle=0.25)


@pytest.mark.parametrize("given, expected", [  # the policy alone gathers before its forward and its backward pass
    ({"alpha_sdpo": 0, "beta_replay": 0}, Gathered(2, 0)),
    ({"alpha_sdpo": 0, "beta_replay": 0, "kl_coef": 0.1, "kl_estimator": "k3"}, Gathered(3, 0)),
    ({"beta_replay": 0}, Gathered(3, 4)),  # the frozen teacher's trunk, and hinted branches
    ({"beta_replay": 0, "teacher": "live"}, Gathered(2, 4)),
    ({"beta_replay": 0, "teacher": "trust_region"}, Gathered(4, 8)),
    ({"alpha_sdpo": 0}, Gathered(3, 12)),  # the reference's trunk and answers, and the student's answers twice
    ({"alpha_sdpo": 0, "replay_form": "simpo"}, Gathered(2, 8))])
def test_gathers_by_hand(given, expected):
    assert gathers(**given) == expected
