"What `hints score` says of itself is what spike 019 measured."
import json
from pathlib import Path

import pytest

from composer_replication.cli.hints import hints_score
from composer_replication.report.hint_scores import TRUST, trust

PRIMARY = json.loads((Path(__file__).resolve().parents[2] / "spikes/019-cheap-score/results.json").read_text())["primary"]
MEASURED = {"in the world of teams": ["H1: teams, next action"], "in the toy world": ["H2: toy, next action"],
            "on SQL": ["H3: SQL, next action"], "for the gain of training": ["H4: teams, training", "H5: toy, training"]}


def test_every_world_of_the_spike_is_named():
    assert set(MEASURED) == set(TRUST) and sorted(sum(MEASURED.values(), [])) == sorted(PRIMARY)


@pytest.mark.parametrize("where", MEASURED)
def test_a_figure_is_the_spikes(where):
    found = [PRIMARY[name]["interval"] for name in MEASURED[where] if PRIMARY[name]["verdict"] != "NOT RUN"]
    assert [TRUST[where]] * len(found) == [tuple(round(value, 2) for value in interval) for interval in found]
    assert bool(found) == bool(TRUST[where])


def test_help_and_last_line_say_the_same():
    assert trust() in " ".join(hints_score.__doc__.split())
    for where, found in TRUST.items():
        assert (f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f}) {where}" if found else where) in trust()
