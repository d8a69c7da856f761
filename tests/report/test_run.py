"The page of a run: true at every moment, one file, text of a run as text only; the guard's mark, and what failed."
import json
import math
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from composer_replication.core.trace import Segment, Trace, Turn
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import data_counts, latest_traces, run_recipe
from composer_replication.report.html import PALETTE, script_for
from composer_replication.report.run import SHOWN, RunPage, rollout_views, run_curves, run_page
from composer_replication.traces.export import write_traces

RECORD = {"run": "mine", "began": "then", "command": ["composer-rl", "train"], "commit": None, "seeds": {"seed": 3},
          "settings": {"model": "embedded", "task": "toy"}, "trained_on": ["a"]}
HISTORY = [{"step": i, "loss": 1 / i, "reward": i / 10} for i in range(1, 6)]


def state_of(step=5, **callbacks):
    return SimpleNamespace(global_step=step, max_steps=9, log_history=list(HISTORY), stateful_callbacks=callbacks)


def test_text_of_a_run_is_only_text():
    bad = "<script>alert(1)</script>"
    trace = Trace(bad, (Turn("user", bad), Turn("assistant", f"</pre>{bad}")), reward=1.0)
    record = RECORD | {"command": [bad], "run": bad, "settings": {"model": bad, "task": bad}}
    shown = run_page(record, [*HISTORY, {"step": 6, "health/warning": f"look {bad}"}], rollout_views([trace]), bad)
    shown = shown.replace(script_for(shown), "")
    assert "<script" not in shown and shown.count("&lt;script&gt;") >= 7
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", shown)


def test_the_guards_reason_and_its_step_stand_on_the_page(tmp_path):
    page = RunPage(RECORD, list)
    guard = {"guard": {"reason": "The held-out score falls while the reward rises.", "last": {"step": 4}}}
    page.on_train_begin(SimpleNamespace(output_dir=tmp_path), state_of(HeldOutGuard=guard), None)
    page.on_train_end(None, state_of(), None)
    shown = (tmp_path / "index.html").read_text()
    assert 'class="verdict paid">The held-out score falls' in shown and "guard stopped" in shown and "refresh" not in shown
    page.state.stateful_callbacks.clear()
    page.on_train_end(None, page.state, None)
    assert "guard stopped" not in (tmp_path / "index.html").read_text()


def test_where_the_guards_line_stands():
    axis = run_curves(HISTORY, halted=4).axes[0]
    line = next(line for line in axis.lines if line.get_label() == "guard stopped")
    assert list(line.get_xdata()) == [4, 4] and line.get_color() == PALETTE["bad"][0]
    assert list(axis.lines[0].get_xdata()) == [1, 2, 3, 4, 5]


def test_values_that_are_no_numbers_make_no_curve():
    assert run_curves([{"step": 1, "loss": math.nan, "reward": math.inf, "note": "words here"}]) is None
    assert "Nothing is logged yet." in run_page(RECORD) and "words here" in run_page(RECORD, [{"step": 1, "note": "words here"}])


def test_an_agents_episode_shows_its_segments_and_links_to_its_output(tmp_path):
    turns = Turn("user", "a"), Turn("assistant", "b"), Turn("user", "so far: b"), Turn("assistant", "c")
    segments = Segment((0, 1), (1,)), Segment((2, 3), (3,))
    traces = [Trace(name, turns, reward=1.0, segments=segments) for name in ("pack/one:0", "two")]
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "pack_one_0.log").write_text("said")
    (title, one), (_, two) = rollout_views(traces, folder=tmp_path)
    assert title == "pack/one:0: 2 segments, 0 error turns, reward 1"
    assert '<a href="agents/pack_one_0.log">output of the agent</a>' in one
    assert "turn 3, assistant, segment 2" in two and "agents/" not in two


def test_rollouts_with_errors_come_first_and_are_few():
    views = rollout_views(toy_traces())
    assert len(views) == SHOWN and all("⚠" in view for _, view in views) and "0 error turns" not in str([t for t, _ in views])


def test_drawing_takes_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    import composer_replication.report.run as module
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    written = []

    def write(path, text):
        clock[0] += 2.0  # what drawing took
        written.append(clock[0])

    monkeypatch.setattr(module, "write_file", write)
    page = RunPage(RECORD, list)
    page.on_train_begin(SimpleNamespace(output_dir=tmp_path), state_of(), None)
    for _ in range(100):
        clock[0] += 1.0
        page.on_log(None, state_of(), None, {"loss": 1.0})
    assert len(written) == 3  # at 102, and after 40 seconds each


def test_a_run_before_its_first_step_that_fails_has_no_page():
    RunPage(RECORD, list).failed(ValueError("no"))


@pytest.mark.trainer
def test_a_real_run_writes_its_page_as_it_goes(tmp_path):
    pages, seen = [], []

    def watch(trainer, record):
        pages.append(RunPage(record, lambda: latest_traces(trainer), trainer.hint_source))
        return pages

    def tell(logged):  # called before the page is written, so it sees the last one
        seen.append((tmp_path / "index.html").read_text())

    small = {"output_dir": str(tmp_path), "max_steps": "2", "max_completion_length": "128", "max_turns": "2",
             "train_rows": "8", "gradient_accumulation_steps": "1", "replay_pairs": "null", "beta_replay": "0",
             "save_steps": "2"}
    run_recipe(load_recipe("toy", small), tell, watch)
    last = (tmp_path / "index.html").read_text()
    assert "Step 0 of 2: running." in seen[0] and "Step 2 of 2: done." in last and "http-equiv=refresh" in seen[0]
    assert "step1-" in last or "step0-" in last  # a rollout of training
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["attention"] == "sdpa" and record["attention"] in (tmp_path / "index.html").read_text()
    commit = record["commit"]
    assert "sdpo/sites" in last and (commit or "not in a repository") in last


@pytest.mark.trainer
def test_a_run_on_recorded_traces_shows_them_and_what_is_left_out(tmp_path):
    write_traces(toy_traces()[:8], tmp_path / "mine.jsonl")
    given = {"traces": str(tmp_path / "mine.jsonl"), "output_dir": str(tmp_path / "out"), "max_steps": "1",
             "beta_replay": "0", "replay_pairs": "null", "max_trace_tokens": "300"}
    recipe, counts = load_recipe("toy-traces", given), data_counts(load_recipe("toy-traces", given))
    run_recipe(recipe, watch=lambda trainer, record: [RunPage(record, lambda: latest_traces(trainer), trainer.hint_source)])
    record, shown = json.loads((tmp_path / "out/run.json").read_text())["recorded"], (tmp_path / "out/index.html").read_text()
    assert record["turns"] == counts["turns"] > 0 and counts["turns_beyond"] > 0
    assert f"{record['traces']}, with {record['turns']} turns that are learnt from" in shown and "are left out; " in shown
    assert "<h2>Recorded traces</h2>" in shown and " on recorded traces, begun" in shown and "None yet." not in shown
    tasks = {trace.task_id for trace in toy_traces()[:8]}
    assert f"<td>tasks trained on</td><td>{len(tasks)}</td>" in shown and ", by the embedded model" not in shown


def test_how_branches_are_read_is_no_warning():
    said = ["Hinted turns are read in two passes.", "Hinted turns are read a row each."]
    shown = run_page(RECORD, [{"step": step, "branches/way": way} for step, way in enumerate(said, 1)])
    assert " ".join(said) in shown and "<ul class=bad>" not in shown


def test_a_sentence_that_names_its_step_does_so_once():
    warned = {"step": 1, "health/warning": "Step 1: all rewards are equal."}
    shown = run_page(RECORD, [warned, {"step": 2, "note": "other words"}])
    assert "<li>Step 1: all rewards are equal.</li>" in shown and "<li>Step 2: other words</li>" in shown


def test_a_rollout_is_by_the_model_of_the_recipe(tmp_path):
    for model, by in (("embedded", "the embedded model"), ("org/some-model", "org/some-model")):
        record = RECORD | {"settings": RECORD["settings"] | {"model": model}}
        page = RunPage(record, lambda: [Trace("a", (Turn("user", "x"), Turn("assistant", "y")), model="Qwen3ForCausalLM")])
        page.on_train_begin(SimpleNamespace(output_dir=tmp_path), state_of(), None)
        page.on_log(None, state_of(), None, {"loss": 1.0})
        page.on_train_end(None, state_of(), None)
        shown = (tmp_path / "index.html").read_text()
        assert f", by {by}" in shown and "Qwen3ForCausalLM" not in shown


def test_held_out_tasks_that_nobody_measured_on_are_told():
    settings = {"model": "embedded", "task": "deletion", "tasks": "t.jsonl", "held_out_rows": 2, "guard": True,
                "guard_steps": 10, "output_dir": "out/a"}
    record = RECORD | {"held_out": 2, "settings": settings}
    said = "Nothing was measured on the 2 held-out tasks: the run ended before step 10. Set guard_steps lower"
    shown = run_page(record, HISTORY, status="Step 5 of 20: stopped before the end.")
    assert said in shown and "composer-rl eval out/a --task deletion --tasks t.jsonl --held-out --against embedded" in shown
    assert said not in run_page(record, HISTORY, live=True) and said not in run_page(RECORD, HISTORY)
    assert said not in run_page(record, [*HISTORY, {"step": 10, "guard/held_out_score": 0.5}])
    without = record | {"settings": settings | {"guard": False}}  # TRL's evaluation alone
    assert "the run ended before its first evaluation. Set eval_steps lower" in run_page(without, HISTORY)


def test_the_last_step_is_told_channel_by_channel():
    shown = run_page(RECORD, [{"step": 1, "clip_ratio": 0.0, "replay/loss": 3.0, "loss": 1.0, "sdpo/loss": 2.0}])
    table = shown[shown.index("All metrics of the last step"):]
    places = [table.index(f"<td>{name}<") for name in ("loss", "sdpo/loss", "replay/loss", "clip_ratio")]
    assert places == sorted(places)


@pytest.mark.parametrize("age, live, said", [(60, True, True), (60, False, False), (0, True, False)])
def test_the_page_of_a_killed_run_says_since_when_nothing_came(visit, tmp_path, age, live, said):
    "Nobody writes the page any more: it reads its own age."
    written = (datetime.now(UTC) - timedelta(minutes=age)).isoformat(timespec="seconds")
    (tmp_path / "index.html").write_text(run_page(RECORD, HISTORY, live=live, written=written))
    shown = visit(f"file://{tmp_path}/index.html").inner_text("body")
    assert (f"Nothing has come since {written}, for {age} minutes" in shown) == said and written in shown
