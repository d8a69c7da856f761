"""`record`: the start plays once, and the run learns from these episodes alone."""
import json
import os
from collections import Counter
from contextlib import nullcontext

import pytest

from composer_replication.recipes import stages
from composer_replication.recipes.memory_estimate import estimate
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.recipes.run import run_recipe
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.read import read_traces
from composer_replication.training.trainer import ComposerReplicationTrainer


def small(tmp_path, **settings):
    plain = {
        "record": True, "train_rows": 12, "held_out_rows": 0, "max_steps": 1, "output_dir": str(tmp_path / "run"),
        "alpha_sdpo": 1.0, "beta_replay": 0.0, "replay_pairs": None, "save_steps": 1, "logging_steps": 1, "report_to": "none"}
    return load_recipe("toy", {key: json.dumps(value) for key, value in (plain | settings).items()})


def test_the_start_plays_once_and_nothing_is_played_later(tmp_path, monkeypatch):
    monkeypatch.setattr(ComposerReplicationTrainer, "__init__", None)  # a trainer that plays cannot be made
    logged = []
    done = run_recipe(small(tmp_path), logged.append)
    assert estimate(small(tmp_path)).rollouts_per_step == 0
    traces = list(read_traces(str(tmp_path / "run" / "start.jsonl")))
    assert [entry["step"] for entry in logged if entry.get("stage")] == [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    learnt = {trace.task_id for trace in traces if find_error_sites(trace)}
    assert set(run["trained_on"]) == learnt and run["settings"]["task"] == "toy"  # `eval` warns of these tasks
    assert f"| tasks trained on | {len(learnt)} |" in (tmp_path / "run" / "README.md").read_text()
    assert done.step == 1 and len(traces) == len({trace.task_id for trace in traces}) == 12
    assert all(trace.reward is not None for trace in traces) and any(entry.get("sdpo/sites") for entry in logged)
    with pytest.raises(RecipeProblem, match="belongs to an earlier run"):  # before the start plays again
        run_recipe(small(tmp_path))
    path = tmp_path / "run" / "start.jsonl"
    os.utime(path, (1, 1))
    again = run_recipe(small(tmp_path, resume=True, max_steps=2))
    assert again.step == 2 and path.stat().st_mtime == 1  # the episodes are those of the start


@pytest.fixture
def make_stages(monkeypatch):
    "What makes the stages of a run and counts what each plays; `killed` ends the process at such an end of such a stage."
    plain = {name: getattr(stages, name) for name in ("collect", "play_forks")}

    def make(recipe, killed=None):
        ends = Counter()

        def watched(name):
            def playing(*given, each, **named):
                def ended(one):
                    each(one)
                    ends[name] += 1
                    if (name, ends[name]) == killed:
                        raise KeyboardInterrupt
                return plain[name](*given, each=ended, **named)
            return playing

        for name in plain:
            monkeypatch.setattr(stages, name, watched(name))
        with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
            stages.forked(recipe, stages.recorded_start(recipe))
        return ends
    return make


def test_what_was_played_before_a_kill_is_not_played_again(tmp_path, make_stages):
    settings = {"train_rows": 6, "max_turns": 5, "forks": {"times": 2}, "beta_replay": 0.1, "alpha_sdpo": 0.0}
    whole = make_stages(small(tmp_path / "whole", **settings))
    assert whole["collect"] == 6 and whole["play_forks"] > 6
    cut, again = small(tmp_path / "cut", **settings), small(tmp_path / "cut", **settings, resume=True)
    ends = make_stages(cut, ("collect", 3))
    part = tmp_path / "cut" / "run" / "start.part.jsonl"
    os.truncate(part, part.stat().st_size - 9)  # in the middle of a line
    ends += make_stages(again, ("play_forks", 5)) + make_stages(again)
    assert ends == whole + Counter(collect=1)
    for name in ("start.jsonl", "forks.jsonl"):
        assert (tmp_path / "cut" / "run" / name).read_bytes() == (tmp_path / "whole" / "run" / name).read_bytes()
    assert not list((tmp_path / "cut" / "run").glob("*.part.jsonl"))
    part.write_bytes((tmp_path / "cut" / "run" / "start.jsonl").read_bytes())
    assert make_stages(cut) == whole  # not resumed: nothing of the run before is taken


@pytest.mark.parametrize("changed, said", [
    ({"train_rows": 4}, "tasks"), ({"temperature": 0.5}, "rollout"), ({"seed": 7}, "rollout"), ({"max_turns": 2}, "rollout"),
    ({"episode_reward": {"floor": -1.0}}, "episode_reward")])
@pytest.mark.parametrize("killed", [None, ("collect", 2)])
def test_episodes_are_reused_only_for_the_tasks_and_settings_they_were_played_from(tmp_path, make_stages, changed, said, killed):
    settings, run = {"train_rows": 5, "max_turns": 5}, tmp_path / "run"
    make_stages(small(tmp_path, **settings), killed)
    before = {path.name: path.read_bytes() for path in run.glob("start*")}
    other = small(tmp_path, **settings | changed, resume=True)
    with pytest.warns(UserWarning, match=f"from other .*{said}.* kept in .*start.1") as caught:
        again = make_stages(other)
    assert len(caught) == 1 and again["collect"] == len(list(read_traces(run / "start.jsonl")))
    assert not make_stages(other)  # nothing is said and nothing is played a third time
    assert {path.name: path.read_bytes() for path in (run / "start.1").iterdir()} == before
    fresh = tmp_path / "fresh"
    assert make_stages(small(fresh, **settings | changed)) == again
    assert (run / "start.jsonl").read_bytes() == (fresh / "run" / "start.jsonl").read_bytes()


@pytest.mark.parametrize("settings, said", [
    ({"held_out_rows": 4}, "record with held_out_rows: the start plays once"),
    ({"curriculum": True}, "record with curriculum"),
    ({"task": None, "traces": ["embedded"]}, "record=True without a task"),
    ({"alpha_sdpo": 0.0}, "leaves nothing to learn"),
    ({"max_steps": -1}, "record needs a task with an environment and max_steps")])
def test_what_needs_later_rollouts_is_refused(settings, said, tmp_path):
    with pytest.raises(RecipeProblem, match=said):
        small(tmp_path, **settings)
