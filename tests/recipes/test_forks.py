"""`forks`: failed turns of recorded episodes are played again, and channel 3 learns the pairs."""
import json
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest

from composer_replication.recipes import hint_models, run, stages
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.recipes.run import run_data, run_recipe
from composer_replication.recipes.stages import forked
from composer_replication.recipes.tasks import recipe_tasks
from composer_replication.replay.examples import read_pairs
from composer_replication.report.train import step_line
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.traces.read import read_traces


def small(tmp_path, **settings):
    plain = {
        "record": True, "forks": {"times": 1}, "train_rows": 6, "held_out_rows": 0, "max_steps": 1, "max_turns": 5,
        "output_dir": str(tmp_path / "run"), "alpha_sdpo": 0.0, "beta_replay": 0.1, "replay_pairs": None, "save_steps": 1,
        "logging_steps": 1, "report_to": "none"}
    return load_recipe("toy", {key: json.dumps(value) for key, value in (plain | settings).items()})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder, logged = tmp_path_factory.mktemp("forks"), []
    return folder, logged, run_recipe(small(folder), logged.append)


def test_channel_3_learns_from_what_was_played_again(ran):
    folder, logged, done = ran
    made, = [entry for entry in logged if "branches" in entry]
    assert all(step_line(entry) for entry in logged if "stage" in entry)
    traces = {trace.trace_id: trace for trace in read_traces(folder / "run" / "start.jsonl")}
    failed = {(trace.trace_id, site.turn) for trace in traces.values() for site in find_error_sites(trace)}
    pairs = read_pairs(folder / "run" / "forks.jsonl")
    assert done.step == 1 and 0 < made["pairs"] == len(pairs) and made["branches"] == 2 * made["step"] == 2 * len(failed)
    for one in pairs:
        assert (one.pair.trace_id, one.pair.turn) in failed and one.pair.source.startswith("fork:")
        before = traces[one.pair.trace_id].turns[:one.pair.turn]  # no hint, and nothing of another branch
        assert [turn.to_message() for turn in one.state.turns] == [turn.to_message() for turn in before]
    learnt = [entry["replay/pairs"] for entry in logged if "replay/pairs" in entry]
    assert learnt and learnt[0] > 0


def test_a_resumed_run_plays_nothing_again(ran, monkeypatch):
    folder, *_ = ran
    os.utime(folder / "run" / "forks.jsonl", (1, 1))
    monkeypatch.setattr(stages, "play_forks", None)
    assert run_recipe(small(folder, resume=True, max_steps=2)).step == 2
    assert (folder / "run" / "forks.jsonl").stat().st_mtime == 1


def test_a_fork_of_a_held_out_task_is_neither_played_nor_learnt(ran, tmp_path, monkeypatch):
    "The same episodes as recorded traces, of which a task is held out."
    folder, asked, played = ran[0], [], stages.play_forks
    traces = list(read_traces(folder / "run" / "start.jsonl"))
    taken = {pair.task_id for pair in read_pairs(folder / "run" / "forks.jsonl")}
    aside = sorted(taken)[0]
    settings = {"record": False, "traces": [str(folder / "run" / "start.jsonl")], "held_out_rows": 2, "guard": True}
    recipe = small(tmp_path, **settings)
    tasks = recipe_tasks(recipe)
    row, = [row for row in recipe_tasks(small(tmp_path)).train if row["task_id"] == aside]
    held = replace(tasks, held_out=[*tasks.held_out, row], train=[r for r in tasks.train if r["task_id"] != aside])
    for module in (stages, run):
        monkeypatch.setattr(module, "recipe_tasks", lambda recipe: held)

    def play(policy, branches, *rest, **more):
        asked.extend(branches)
        return played(policy, branches, *rest, **more)

    monkeypatch.setattr(stages, "play_forks", play)
    trained = forked(recipe, recipe)
    assert asked and {fork.task for fork, *_ in asked} == {t.task_id for t in traces if find_error_sites(t)} - {aside}
    assert {pair.task_id for pair in read_pairs(tmp_path / "run" / "forks.jsonl")} <= taken - {aside}
    whole = replace(trained, arguments=replace(trained.arguments, replay_pairs=[str(folder / "run" / "forks.jsonl")]))
    sources = run_data(whole)[1]  # a file that holds them all the same
    assert any(e.pairs for e in sources.traces) and aside not in {e.trace.task_id for e in (*sources.traces, *sources.pairs)}

@pytest.fixture
def play_all(ran, tmp_path, monkeypatch):
    "What resumes a run's forks on the first episodes of a recorded run, and returns how many branches it played."
    traces, play, ends = list(read_traces(ran[0] / "run" / "start.jsonl")), stages.play_forks, []
    failed = [trace for trace in traces if find_error_sites(trace)]

    def playing(*given, each, **named):
        def ended(one):
            each(one)
            ends.append(one)
            if len(ends) == killed:
                raise KeyboardInterrupt
        return play(*given, each=ended, **named)

    def make(episodes, kill=None, **settings):
        nonlocal killed
        killed = kill
        ends.clear()
        write_traces(failed[:episodes], tmp_path / "mine.jsonl")
        recipe = small(tmp_path, record=False, traces=[str(tmp_path / "mine.jsonl")], resume=True, max_turns=4, **settings)
        with pytest.raises(KeyboardInterrupt) if kill else nullcontext():
            forked(recipe, recipe)
        return len(ends)

    killed = None
    monkeypatch.setattr(stages, "play_forks", playing)
    return make


@pytest.mark.parametrize("changed, said", [
    ({"episodes": 1}, "traces"), ({"forks": {"times": 2}}, "forks"), ({"temperature": 0.5}, "rollout"), ({"seed": 7}, "rollout"),
    ({"hints": ["raw_error"]}, "hints")])
@pytest.mark.parametrize("kill", [None, 1])
def test_branches_are_reused_only_for_the_traces_and_settings_they_were_played_from(play_all, tmp_path, changed, said, kill):
    asked, run = {"episodes": 2}, tmp_path / "run"
    first = play_all(**asked, kill=kill)
    before = {path.name: path.read_bytes() for path in run.glob("forks*")}
    assert first and set(before) == {"forks.part.jsonl" if kill else "forks.jsonl", "forks.from.json"}
    with pytest.warns(UserWarning, match=f"from other .*{said}.* kept in .*forks.1") as caught:
        again = play_all(**asked | changed)
    assert len(caught) == 1 and play_all(**asked | changed) == 0  # nothing is said and nothing is played a third time
    assert {path.name: path.read_bytes() for path in (run / "forks.1").iterdir()} == before
    fresh = tmp_path / "fresh"
    assert again == play_all(**asked | changed, output_dir=str(fresh))
    assert (run / "forks.jsonl").read_bytes() == (fresh / "forks.jsonl").read_bytes()


def test_what_does_not_say_where_it_comes_from_is_not_reused(play_all, tmp_path):
    "Such as a file of a version that did not write it down."
    first, run = play_all(2), tmp_path / "run"
    (run / "forks.from.json").unlink()
    with pytest.warns(UserWarning, match="does not say what"):
        assert play_all(2) == first and play_all(2) == 0
    assert (run / "forks.1" / "forks.jsonl").read_bytes() == (run / "forks.jsonl").read_bytes()


@pytest.fixture(scope="module")
def own_steps(tmp_path_factory):
    "Two runs of two steps, with forks of the steps' own episodes and without; branches and pairs of each step, and the log."
    played, made, play, pairs_of, found, logged = [], [], stages.play_forks, stages.fork_pairs, {}, {"forks": [], "none": []}
    loaded, load = [], hint_models.load_checkpoint

    def playing(policy, branches, *rest, **more):
        played.append((branches, sum(w.double().sum().item() for w in policy.model.parameters())))
        return play(policy, branches, *rest, **more)

    def pairing(results, traces):
        made.append(pairs_of(results, traces))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "play_forks", playing)
        patch.setattr(stages, "fork_pairs", pairing)
        patch.setattr(hint_models, "load_checkpoint", lambda name: loaded.append(name) or load(name))
        writer = {"hints": ["template", "raw_error", "learned"], "hint_writer": "embedded"}
        for name, settings in (("forks", writer), ("none", {"forks": None, "replay_pairs": ["recovery"]})):
            folder = tmp_path_factory.mktemp(name)
            few = {"max_steps": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "keep_rollouts": True}
            run_recipe(small(folder, record=False, **few | settings), logged[name].append)
            found[name] = [list(read_traces(path)) for path in sorted((folder / "run" / "rollouts").glob("step*.jsonl.gz"))]
    return found, played, made, logged, loaded


def test_the_writer_of_hints_is_loaded_once_for_all_steps(own_steps):
    assert own_steps[4] == ["embedded"] and len(own_steps[1]) == 2


def test_what_came_of_a_steps_own_forks_is_in_its_log(own_steps):
    "Against what was played; a run without forks says nothing of them."
    _, played, made, logged, _ = own_steps
    steps = [entry for entry in logged["forks"] if "forks/pairs" in entry]
    branches = [[branch.fork.name for branch in of] for of, _ in played]
    assert [entry["forks/branches"] for entry in steps] == [len(of) for of in branches]
    assert [entry["forks/played_again"] for entry in steps] == [len(set(of)) for of in branches]
    assert [entry["forks/pairs"] for entry in steps] == [len(pairs) for pairs in made]
    assert all(entry["forks/failed_turns"] >= entry["forks/played_again"] for entry in steps) and len(steps) == 2
    assert not any(name.startswith("forks/") for entry in logged["none"] for name in entry)


def test_failed_turns_of_a_steps_own_episodes_are_played_again_by_the_policy_as_it_is(own_steps):
    episodes, played, made = own_steps[0]["forks"], *own_steps[1:3]
    assert len(played) == len(made) == len(episodes) == 2 and played[0][1] != played[1][1]  # weights of each step
    for traces, (branches, _), pairs in zip(episodes, played, made):
        failed = {(trace.trace_id, site.turn) for trace in traces for site in find_error_sites(trace)}
        assert {(fork.trace.trace_id, fork.site.turn) for fork, *_ in branches} == failed
        assert {(pair.trace_id, pair.turn) for pair in pairs} <= failed
    assert sum(map(len, made)) > 0


def test_branches_change_no_reward_and_no_random_number_of_the_policy(own_steps):
    "The first step's episodes are the same with and without them."
    with_forks, without = (own_steps[0][name][0] for name in ("forks", "none"))
    assert [(t.reward, [turn.to_message() for turn in t.turns]) for t in with_forks] == [
        (t.reward, [turn.to_message() for turn in t.turns]) for t in without]


@pytest.mark.parametrize("settings, said", [
    ({"forks": {"time": 2}}, "its keys are times"), ({"forks": {"arms": ["none", "rules"]}}, "arms, of none, own, other, filler"),
    ({"forks": {"times": 0}}, "at least 1"), ({"beta_replay": 0.0, "alpha_sdpo": 1.0}, "forks with beta_replay=0"),
    ({"record": False, "rollout": "trl"}, "forks with rollout: trl"),
    ({"record": False, "traces": ["embedded"], "context_tokens": 99}, "with context_tokens"),
    ({"record": False, "task": None, "traces": ["embedded"]}, "without a task")])
def test_what_cannot_be_forked_is_refused(settings, said, tmp_path):
    with pytest.raises(RecipeProblem, match=said):
        small(tmp_path, **settings)
