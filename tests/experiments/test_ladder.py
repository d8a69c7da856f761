"""The ladder as people run it: whole commands, killed and stopped ladders, missing runs; and its numbers by other means."""
import dataclasses
import hashlib
import json
import os
import re
import signal
import sys
import time
from importlib.metadata import version

import ladder_script
import numpy as np
import pytest
from forks import SERVER

from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.model import embedded_path
from composer_replication.experiments import ladder as room
from composer_replication.experiments.ladder import (
    ARMS,
    PRESETS,
    arm_row,
    arm_setting,
    gain_over,
    ladder,
    ladder_rows,
    pooled,
    verdict,
)
from composer_replication.experiments.setting import Measurement, Preparation, RunResult, Setting, TrainingStep
from composer_replication.experiments.statistics import Interval, generations_to_reach
from composer_replication.report.html import PALETTE
from composer_replication.report.ladder import ladder_json, ladder_page

LIGHT = '''
"""An arm without torch: made-up numbers, kept after each step, one step in a while."""
import json, os, random, time
from dataclasses import asdict, field, make_dataclass

DEFAULTS = dict(
    habit="strong", turns=8, hints="template", alpha_sdpo=0.0, beta_replay=0.0, teachers="good", steps=4, learning_rate=5e-4,
    held_out=40, held_out_split="test", held_out_series="held-out", measure_every=2, teacher="ema", target_turns="error",
    hint_placement="target", importance_clip=2.0, replay_dpo_beta=0.1, sdpo_beta=1.0, sdpo_steps=None, policy_start=0,
    all_fail="policy")
Setting = make_dataclass("Setting", [(name, object, field(default=value)) for name, value in DEFAULTS.items()], frozen=True)
RunResult = make_dataclass(
    "RunResult", "setting seed task_ids curve steps preparation versions hardware seconds".split(), frozen=True)

def point(setting, seed, step):
    rate = 0.1 + 0.1 * step * (1 + setting.alpha_sdpo)
    return {"step": step, "generations": 64 * step, "tokens": 1000 * step, "turns": 4.0, "entropy": 0.5, "endings": {},
            "passed": [int(random.Random(f"{seed} {step} {i}").random() < rate) for i in range(setting.held_out)],
            "episode_errors": {"unknown_tool": 1 - rate}, "seconds": 0.1}

def run_arm(setting, seed, folder, tell, device):
    folder.mkdir(exist_ok=True)
    fault = os.environ.get("FAULT", "")
    kept, steps = folder / "kept", []
    steps = json.loads(kept.read_text()) if kept.exists() else []
    for step in range(len(steps), setting.steps):
        if fault == "replay" and setting.beta_replay:
            raise ValueError("the teachers are ill; ask again tomorrow.")
        if fault == "hold" and step == 1 and not setting.alpha_sdpo + setting.beta_replay:
            time.sleep(120)
        steps.append({"step": step + 1, "reward": 0.5, "seconds": 1.0, "tokens": 100, "rollout_seconds": 0.5,
                      "policy_seconds": 0.5, "sdpo_seconds": 0.0, "replay_seconds": 0.0, "entropy": 0.5})
        (folder / "part").write_text(json.dumps(steps))
        os.replace(folder / "part", kept)
        tell({"step": step + 1, "of": setting.steps, "reward": 0.5})
    curve = [point(setting, seed, s) for s in range(0, setting.steps + 1, setting.measure_every)]
    if fault == "unscored":
        curve[-1]["passed"] = [None] * 3 + curve[-1]["passed"][3:]
    result = RunResult(asdict(setting), seed, [f"task-{i}" for i in range(setting.held_out)], curve, steps, {}, {"torch": "0"},
                       {"cpus": 2}, 4.0)
    (folder / "part").write_text(json.dumps(asdict(result)))
    os.replace(folder / "part", folder / "result.json")
'''


@pytest.fixture
def light(tmp_path, monkeypatch):
    "A folder with the light arm, importable here and in children."
    (tmp_path / "light_arm.py").write_text(LIGHT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(room.PRESETS, "quick", room.Preset(1, {"alpha_sdpo": 1.0, "beta_replay": 1.0}, over_seeds=False))
    yield tmp_path
    sys.modules.pop("light_arm", None)


def start(folder, *arguments, name="ladder", **environment):
    for stream in ("said", "complained"):
        (folder / stream).write_text("")
    running = SERVER.Process(target=ladder_script.main, args=(folder, [name, *arguments], {**os.environ, **environment}))
    running.start()
    return running


def ended(running, folder):
    "Exit code, standard output and standard error of a whole command."
    running.join(600)
    return running.exitcode, (folder / "said").read_text(), (folder / "complained").read_text()


def command(folder, *arguments, **environment):
    return ended(start(folder, *arguments, **environment), folder)


def same(told: dict) -> dict:
    "What two ladders must agree on: all but times and how much was computed."
    return {k: v for k, v in told.items() if k not in ("seconds", "computed")}


def wait_for(condition, seconds=600.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "this took too long"
        time.sleep(0.02)


# Whole commands

def test_the_command_prints_a_table_and_writes_a_page(light):
    code, said, complained = command(light, "--arms", "A2,A1,A0", "--out", "here")
    assert code == 0, complained
    assert [line.split()[0] for line in said.splitlines() if re.match(r" A\d", line)] == ["A0", "A1", "A2"] * 2
    assert "A2 (+ SDPO) passes" in said and "over problems only, of one seed" in said and "3 runs computed" in said
    assert len(re.findall(r"A\d, seed 0: [\d.]+ % of 40 held-out tasks pass", complained)) == 3 and "\x1b" not in complained
    code, said, complained = command(light, "--json", "--arms", "A1", "--out", "other", FAULT="unscored")
    row, = json.loads(said)["rows"]
    assert row["unscored"] == row["passed"]["unscored"] == 3 and "A1: 3 held-out episodes are unscored" in complained
    page = (light / "here" / "report.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<script") == 1
    assert not re.search(r"(src|href)=.http|url\((?!#)", page)  # nothing is fetched from anywhere
    assert "the intervals speak of other problems, not of other seeds" in page


def test_the_same_again_is_the_same_table_and_is_read(light):
    arms = ("--json", "--arms", "A0,A1,A2")
    first, second, third = (json.loads(command(light, *arms, "--out", out)[1]) for out in ("here", "here", "there"))
    assert same(first) == same(second) == same(third)
    assert [told["computed"] for told in (first, second, third)] == [3, 0, 3]


def test_a_ladder_cut_off_equals_one_that_was_not(light):
    words = ("--json", "--arms", "A1,A2,A3,A4", "--out")
    whole = json.loads(command(light, *words, "whole")[1])
    for how, ends in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        out = light / how.name
        running = start(light, *words, out.name, FAULT="hold")  # A1 waits
        wait_for(lambda: len(list(out.glob("runs/*/result.json"))) == 3)  # noqa: B023 (called here)
        os.kill(running.pid, how)
        code, said, complained = ended(running, light)
        assert code == ends, complained
        if how == signal.SIGINT:  # what had ended is shown
            told = json.loads(said)
            assert told["interrupted"] and [row["seeds"] for row in told["rows"]] == [[], [0], [0], [0]]
            assert "stopped early" in complained and "3 of 4 runs have a result" in (out / "report.html").read_text()
        code, said, complained = command(light, *words, out.name)
        assert code == 0 and json.loads(said)["computed"] == 1, complained
        assert same(json.loads(said)) == same(whole)


def test_arms_that_fail_and_damaged_results_are_named_and_the_others_shown(light):
    code, said, complained = command(light, "--json", FAULT="replay")
    told = json.loads(said)
    assert code == 1 and [bool(row["seeds"]) for row in told["rows"]] == [True, True, True, True, False, False]
    assert len(told["problems"]) == 2 and all("the teachers are ill" in p for p in told["problems"])
    assert "2 of 6 runs have no result" in complained and "A3 (+ replay DPO, ours) has no result." in told["verdicts"]
    assert "the teachers are ill" in (light / "out/ladder/report.html").read_text()
    path = sorted((light / "out/ladder/runs").glob("*/result.json"))[0]
    path.write_bytes(path.read_bytes()[:50])
    code, said, complained = command(light, "--json")  # tomorrow
    told = json.loads(said)
    assert (code, told["computed"], len(told["problems"])) == (1, 2, 1) and str(path.relative_to(light)) in complained
    assert path.stat().st_size == 50


def test_the_report_says_how_it_was_made(light):
    code, said, _ = command(light, "--json")
    assert code == 0 and json.loads(said)["seeds"] == [0] and json.loads(said)["arms"] == list(ARMS)
    end = (light / "out/ladder/report.html").read_text().partition("How this page was made")[2]
    habit = json.loads(said)["setting"]["habit"]
    digest = hashlib.sha256((embedded_path() / habit / "model.safetensors").read_bytes()).hexdigest()[:12]
    assert all(fact in end for fact in (f"embedded, {habit}", digest, f"torch {version('torch')}", f"cores {os.cpu_count()}"))


@pytest.mark.parametrize("arguments, said", [
    (["--arms", "A1,A7"], "there is no arm 'A7'"), (["--arms", ""], "there is no arm ''"), (["--seeds", "0"], "give 1 or more"),
    (["--preset", "standard", "--seeds", "1"], "give 2 seeds or more"), (["--device", "cuda"], "torch sees no GPU"),
    (["--out", "file/below"], "nothing can be written there")])
def test_mistakes_are_one_sentence_and_nothing_is_computed(arguments, said, capsys, monkeypatch, tmp_path):
    from composer_replication.cli.app import main
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["composer-rl", "ladder", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    complained = capsys.readouterr().err
    assert ended.value.code == 1 and said in complained and complained.startswith("error: ") and complained.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("preset, device, said", [
    ("slow", "cpu", "there is no preset 'slow'; use quick, standard, full"), ("quick", "tpu", "there is no device 'tpu'")])
def test_what_a_ladder_cannot_be_is_refused(preset, device, said):
    with pytest.raises(InputProblem, match=said):
        room.check_ladder(preset, None, ["A0"], device)


def test_a_run_that_ended_as_ctrl_c_came_is_shown_too(light):
    def tell(event):
        if event["event"] == "ended":
            raise KeyboardInterrupt

    run = ladder("quick", arms=("A0", "A1"), out=light / "out", workers=1, tell=tell, arm="light_arm")
    assert run.interrupted and list(run.results["A0"]) == [0] and run.results["A1"] == {} and run.computed == 0
    told = []
    run = ladder("quick", arms=("A1", "A2", "A1"), out=light / "again", workers=2, tell=told.append, arm="light_arm")
    assert run.arms == ("A1", "A2") and run.computed == 2
    for arm in run.arms:
        assert [e["event"] for e in told if e["arm"] == arm] == ["started", *["progress"] * 4, "ended", "result"]


# Arms

FIELDS = {f.name for f in dataclasses.fields(Setting)}


def test_an_arm_keeps_what_it_uses_and_drops_what_it_does_not():
    full = Setting(habit="mild", turns=6, hints="vague", alpha_sdpo=0.5, beta_replay=0.25, teachers="poor", steps=7, tasks=3,
                   rollouts=4, learning_rate=1e-3, held_out=10, held_out_split="dev", held_out_series="other", measure_every=3,
                   teacher="live", target_turns="all", hint_placement="start", importance_clip=None, iterations=2,
                   replay_dpo_beta=0.3, sdpo_beta=0.0, sdpo_steps=2, policy_start=2, all_fail="distil", imitate=True)
    assert all(getattr(full, f) != getattr(Setting(), f) for f in FIELDS)  # so that every field is seen
    kept = {arm: {f for f in FIELDS if getattr(arm_setting(arm, full), f) == getattr(full, f)} for arm in ARMS}
    sdpo = {"alpha_sdpo", "hints", "teacher", "target_turns", "hint_placement", "importance_clip", "sdpo_beta",
            "sdpo_steps", "policy_start", "all_fail"}
    replay = {"beta_replay", "teachers", "replay_dpo_beta"}
    assert kept == {"A0": {"habit", "turns", "held_out", "held_out_split", "held_out_series"}, "A1": FIELDS - sdpo - replay,
                    "A2": FIELDS - replay, "A2f": FIELDS - replay - {"hints"}, "A3": FIELDS - sdpo, "A4": FIELDS}
    assert (arm_setting("A0", full).steps, arm_setting("A1", full).alpha_sdpo, arm_setting("A2", full).beta_replay) == (0, 0, 0)
    assert arm_setting("A2f", full) == dataclasses.replace(arm_setting("A2", full), hints="filler")
    with pytest.raises(ValueError, match="there is no arm 'A5'"):
        arm_setting("A5", full)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_settings_in_which_every_channel_works(preset):
    setting = Setting(**PRESETS[preset].settings)
    assert setting.alpha_sdpo > 0 and setting.beta_replay > 0 and setting.held_out_split == "test"
    assert PRESETS[preset].seeds >= (5 if PRESETS[preset].over_seeds else 1)


# Numbers

def result(arm, seed, passed, errors=None, seconds=(4.0, 1.0, 0.5), preparation=None):
    "A result whose last measurement is `passed`."
    setting = arm_setting(arm, Setting(alpha_sdpo=1.0, beta_replay=1.0, steps=2, measure_every=1, tasks=1, rollouts=2))
    points = [[0] * len(passed), [int(i % 2 == 0) for i in range(len(passed))], passed][-setting.steps - 1:]
    errors = errors or {"unknown_tool": 1.0}
    curve = [Measurement(i, 2 * i, 100 * i, p, errors, 4.0, 0.5 + seed, {}, 1.0) for i, p in enumerate(points)]
    steps = [TrainingStep(i, 0.5, sum(seconds), 100 * i, *seconds, 0.0, 0.5, 0, 1, 1) for i in range(1, setting.steps + 1)]
    return RunResult(vars(setting), seed, [f"t{i}" for i in range(len(passed))], [*map(vars, curve)], [*map(vars, steps)],
                     vars(preparation) if preparation else {}, {}, {}, 9.0)


def test_a_row_by_hand():
    ours = {0: result("A2", 0, [1, 1, 1, None], {"a": 1.0, "b": 3.0}), 1: result("A2", 1, [1, 0, 1, 1], {"a": 2.0})}
    base = {0: result("A1", 0, [0, 1, 0, 0]), 1: result("A1", 1, [0, 0, None, 1]), 2: result("A1", 2, [1, 1, 1, 1])}
    row = arm_row("A2", ours, base)
    assert row.passed.estimate == pytest.approx(6 / 7) and row.seeds == (0, 1) and row.unscored == 1
    assert row.gain.estimate == pytest.approx((1 + 0 + 1 + 1 + 0 + 0) / 6) and row.gain.seeds == 2
    assert row.errors == {"a": 1.5, "b": 1.5} and row.entropy == 1.0 and row.seconds == 5.5 and row.tokens == 150
    assert row.shares == pytest.approx({"rollout": 4 / 5.5, "policy": 1 / 5.5, "sdpo": 0.5 / 5.5, "replay": 0})
    assert row.generations == 4 and row.reached == generations_to_reach(pooled(ours), 2 / 7)  # of the seeds that both have
    late = {1: ours[1]} | {3: result("A2", 3, [1, 1, 1, 1])}
    assert arm_row("A2", late, base).reached == generations_to_reach(pooled({1: ours[1]}), 1 / 3)
    assert arm_row("A2", {3: late[3]}, base).reached is None
    assert arm_row("A1", base, base).gain is None and arm_row("A0", {0: result("A0", 0, [0, 0, 0, 1])}, base).shares == {}
    prepared = arm_row("A3", {0: result("A3", 0, [1, 0, 0, 0], preparation=Preparation(10, 5, 700, 3.0))}, {})
    assert (prepared.preparation, prepared.teacher_tokens, prepared.gain, prepared.reached) == (3.0, 700, None, None)


def test_a_result_of_another_device_is_refused():
    there = dataclasses.replace(result("A1", 0, [1]), hardware={"device": "cuda"})
    assert "made on cuda, not on cpu; take another --out" in room._elsewhere(there, "cpu")
    assert room._elsewhere(there, "cuda") is None and room._elsewhere(result("A1", 0, [1]), "cpu") is None


def test_a_seed_without_any_score_is_left_out_of_intervals():
    ours = {0: result("A2", 0, [1, 1, 0, 0]), 1: result("A2", 1, [None] * 4)}
    row = arm_row("A2", ours, {0: result("A1", 0, [0, 0, 0, 0]), 1: result("A1", 1, [0, 0, 0, 0])})
    assert row.seeds == (0, 1) and row.passed.seeds == row.gain.seeds == 1 and row.unscored == 4
    nothing = arm_row("A2", {1: ours[1]}, {})
    assert nothing.passed is None and "has no result" in verdict(nothing)


def test_other_held_out_tasks_cannot_be_compared():
    ours, base = result("A2", 0, [1, 0, 1]), result("A1", 0, [1, 0, 1])
    other = dataclasses.replace(ours, task_ids=["x", "t1", "t2"])
    assert gain_over({0: ours}, {0: base}).estimate == 0
    with pytest.raises(ValueError, match="other held-out tasks"):
        gain_over({0: other}, {0: base})
    assert gain_over({0: ours}, {1: base}) is None


@pytest.mark.parametrize("low, high, says", [
    (0.01, 0.2, "passes 10.0 points more than A1"), (-0.2, -0.01, "passes 10.0 points fewer than A1"),
    (-0.01, 0.2, "no difference from A1 is shown"), (-0.2, 0.0, "no difference from A1 is shown")])
def test_the_verdict_follows_the_interval(low, high, says):
    row = arm_row("A2", {0: result("A2", 0, [1, 0, 1])}, {})
    estimate = 0.1 if high > 0.1 else -0.1
    gain = Interval(estimate, low, high, 3, 96)
    said = verdict(dataclasses.replace(row, gain=gain, reached=3.0))
    assert says in said and f"{100 * low:.1f} to {100 * high:.1f}, over seeds and problems" in said
    assert ("reaches A1's final pass rate after 3 of 4" in said) == (low > 0)
    assert "points more" not in verdict(dataclasses.replace(row, gain=dataclasses.replace(gain, seeds=1))) or low > 0


def test_seeds_that_disagree_forbid_a_verdict_that_pooled_problems_would_give():
    wins, loses = [1] * 40, [0] * 40
    ours = {0: result("A2", 0, wins), 1: result("A2", 1, wins), 2: result("A2", 2, loses)}
    base = {s: result("A1", s, [int(i < 14) for i in range(40)]) for s in range(3)}
    row = arm_row("A2", ours, base)
    assert row.gain.estimate == pytest.approx(2 / 3 - 14 / 40) and row.gain.sign == 0


@pytest.mark.parametrize("ours, control, says", [
    (30, 10, "A2 passes 50.0 points more than A2f"), (10, 30, "A2 passes 50.0 points fewer than A2f"),
    (20, 20, "No difference of A2 from A2f, whose hint is a filler, is shown: 0.0 points")])
def test_the_control_answers_whether_it_is_the_hint(ours, control, says):
    passing = {"A2": ours, "A2f": control}
    results = {arm: {s: result(arm, s, [int(i < passing.get(arm, 0)) for i in range(40)]) for s in range(3)} for arm in ARMS}
    run = room.Ladder("standard", {}, "cpu", 2, tuple(ARMS), (0, 1, 2), results, (), 1.0, 18)
    said = room.verdicts(run, ladder_rows(run))
    assert len(said) == len(ARMS) + 1 and says in said[-1]
    without = dataclasses.replace(run, arms=("A0", "A1", "A2"), results={arm: results[arm] for arm in ("A0", "A1", "A2")})
    assert room.verdicts(without, ladder_rows(without)) == said[:3]


# Page

def whole_ladder():
    random = np.random.default_rng(0)
    results = {arm: {s: result(arm, s, random.integers(0, 2, 12).tolist(), {"<b>kind</b>": 0.5, "never": 0.0}) for s in (0, 1)}
               for arm in ARMS}
    return room.Ladder("standard", {"habit": "<i>"}, "cpu", 2, tuple(ARMS), (0, 1), results, ("A4: <script>",), 1.0, 10)


def test_the_page_escapes_what_it_shows_and_takes_its_colours_from_css():
    run = whole_ladder()
    page = ladder_page(run, ladder_rows(run))
    assert "<b>kind" not in page and "&lt;b&gt;kind" in page and page.count("<script") == 1 and "<i>" not in page
    assert not any(light.lower() in page for light, _ in PALETTE.values()) and "var(--fourth)" in page and "never" not in page
    assert ladder_page(run, ladder_rows(run)) == page
    assert json.loads(json.dumps(ladder_json(run, ladder_rows(run))))["rows"][-1]["title"] == "all"
