"docs/guides/metrics.md names what real runs log, and what else the code may log."
import re
from dataclasses import fields
from pathlib import Path

import pytest

from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.rollout.types import Ending
from composer_replication.training.guard import GuardReading
from composer_replication.training.health import RULES

PAGE = (Path(__file__).parents[2] / "docs/guides/metrics.md").read_text()
NAMED = set(re.findall(r"`([^`]+)`", PAGE))
PATTERNS = [re.compile(re.sub("LAYER|NAME", r"[\\w./]+", name) + "$")
            for name in NAMED - {"LAYER", "NAME"} if re.fullmatch(r"[\w/]+", name)]
EVENTS = {"step", "of"}  # which step of how many: no metric
CASES = {
    "toy": {"held_out_rows": "4", "guard_steps": "1", "kl_coef": "0.1", "log_conflict": "true",
            "replay_pairs": "[embedded, group, recovery]"},
    "toy-traces": {"sdpo_divergence": "taid", "replay_form": "simpo"},
}


def unnamed(keys):
    return sorted(key for key in keys if not any(p.match(key) for p in PATTERNS))


@pytest.mark.trainer
@pytest.mark.parametrize("name", CASES)
def test_what_a_run_logs_stands_on_the_page(name, tmp_path):
    logged, trainers = [], []
    settings = {"max_steps": "2", "output_dir": str(tmp_path / "out")} | CASES[name]
    run_recipe(load_recipe(name, settings), logged.append, lambda trainer, record: trainers.append(trainer) or ())
    keys = {key for entry in [*logged, *trainers[0].state.log_history] for key in entry}
    assert {"sdpo/loss", "replay/loss", "step"} <= keys
    assert not unnamed(keys - EVENTS)


def test_endings_readings_and_rules_stand_on_the_page():
    names = [f"rollout/{ending.value}" for ending in Ending]
    names += [f"guard/{field.name}" for field in fields(GuardReading) if field.name != "step"]
    assert not unnamed(names)
    assert {rule.key for rule in RULES} <= NAMED


def test_a_name_that_is_not_there_is_told():
    assert unnamed(["sdpo/sites", "sdpo/layer_template", "sdpo/unheard_of"]) == ["sdpo/unheard_of"]
