"""Spike 200 without a GPU: its stages run at tiny size, say what a machine lacks, and can fail."""
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from waiting import alive, command_of, wait_until

ROOT = Path(__file__).resolve().parents[2]
SPIKE = ROOT / "spikes" / "200-gpu"


@pytest.fixture
def stages(monkeypatch):
    "The programme's modules."
    monkeypatch.syspath_prepend(str(SPIKE))
    names = "common", "stage_a", "stage_b", "stage_c", "stage_d", "programme"
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in (*names, "plan"):
        sys.modules.pop(name, None)


def ran(letter, out, *more):
    command = [sys.executable, SPIKE / f"stage_{letter}.py", "--out", out, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=out.parent)


@pytest.mark.parametrize("letter", ["d", *(pytest.param(each, marks=pytest.mark.slow) for each in "abc")])
def test_a_stage_runs_at_tiny_size_and_stays_not_run(letter, tmp_path):
    done = ran(letter, tmp_path / "out", "--tiny", "--seconds", "500")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    stage = found["stages"][letter]
    assert stage["tiny"] and stage["verdict"] == "VALIDATED" and all(stage["checks"].values()), stage["checks"]
    assert found["verdict"] == "NOT RUN" and "tiny, on the CPU" in found["reason"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_stage_says_so_in_one_sentence(tmp_path):
    done = ran("b", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr == "stage b: torch finds no CUDA device; take a machine with a GPU, or --tiny\n"
    found, kept = (json.loads((folder / "results.json").read_text())["stages"] for folder in (tmp_path / "out", SPIKE))
    assert found["b"] == kept["b"] and kept["b"]["facts"]  # what was measured stays


def test_what_a_python_lacks_is_named(stages, monkeypatch):
    assert stages.common.missing((), gpu=False) is None
    monkeypatch.setattr(stages.common, "here", lambda requirement: requirement.name not in ("trl", "vllm"))
    assert stages.common.missing(("vllm",), gpu=False) == (
        "this python lacks trl==1.16.0, vllm; carry the wheels of spikes/200-gpu/wheels.txt there")


@pytest.mark.parametrize("found", ["2.11.0", "2.11.0a0+nv25.12", "2.13.0"])
def test_any_torch_will_do(stages, monkeypatch, found):
    versions = {"torch": found}
    monkeypatch.setattr(stages.common, "version", lambda name: versions.get(name) or importlib.metadata.version(name))
    assert stages.common.missing(("pytest",), gpu=False) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in stages.common.missing((), gpu=True)


def begun(stages, monkeypatch, letter, *words):
    monkeypatch.setattr(sys, "argv", ["stage", *map(str, words)])
    return stages.common.Stage(letter, "")


def kept(out):
    return json.loads((out / "results.json").read_text())["stages"]


def test_a_tiny_run_has_a_folder_of_its_own(stages, monkeypatch):
    tiny, real = (begun(stages, monkeypatch, "b", *words).out for words in (["--tiny"], []))
    assert tiny != real and tiny.parent == real.parent


def test_what_was_measured_is_not_lost(stages, monkeypatch, tmp_path):
    monkeypatch.setattr(stages.common, "HERE", tmp_path / "spike")
    real = begun(stages, monkeypatch, "b", "--out", tmp_path)
    real.write({"fits": True}, {"cases": {"x": 1}})
    monkeypatch.setattr(stages.common, "missing", lambda *_, **__: "there is no GPU")
    with pytest.raises(SystemExit, match="there is no GPU"):
        real.check()
    assert kept(tmp_path)["b"]["facts"] == {"cases": {"x": 1}} and kept(tmp_path)["b"]["verdict"] == "VALIDATED"
    with pytest.raises(SystemExit, match="holds stages that were not run with --tiny; give another --out"):
        begun(stages, monkeypatch, "c", "--out", tmp_path, "--tiny").check()
    assert kept(tmp_path).keys() == {"b"}
    real.write({"fits": False}, {"cases": {"x": 2}})
    assert kept(tmp_path)["b"]["facts"] == {"cases": {"x": 2}}


def test_a_file_of_tiny_stages_hides_nothing(stages, monkeypatch, tmp_path):
    monkeypatch.setattr(stages.common, "HERE", tmp_path / "spike")
    begun(stages, monkeypatch, "b", "--out", tmp_path / "spike").write({"fits": True}, {"cases": {"x": 1}})
    begun(stages, monkeypatch, "b", "--out", tmp_path / "out", "--tiny").write({"fits": True}, {"cases": {"tiny": 1}})
    real = begun(stages, monkeypatch, "b", "--out", tmp_path / "out")
    assert real.earlier() == {"cases": {"x": 1}}


def test_the_tests_find_the_wheels(stages, monkeypatch, tmp_path):
    asked = []
    ended = lambda words, environment, log, seconds: asked.append(environment) or log.write_text("")
    monkeypatch.setattr(stages.stage_a, "ended", ended)
    monkeypatch.setenv("PYTHONPATH", "wheels")
    monkeypatch.setattr(sys, "argv", ["stage_a", "--tiny", "--out", str(tmp_path)])
    stages.stage_a.main()
    assert asked[0]["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "wheels"]


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("begun", child.pid, flush=True)
time.sleep(60)
"""


def test_tests_that_do_not_end_are_killed_with_their_children_and_the_stage_says_so(stages, monkeypatch, tmp_path):
    monkeypatch.setattr(stages.stage_a, "command", lambda report: [sys.executable, "-c", HANGS])
    monkeypatch.setattr(sys, "argv", ["stage_a", "--tiny", "--seconds", "15", "--out", str(tmp_path)])
    (tmp_path / "stage_a.xml").write_text('<x><testcase classname="tests.old" name="test_of_an_earlier_call"/></x>')
    stages.stage_a.main()
    stage = kept(tmp_path)["a"]
    assert stage["verdict"] == "NOT RUN" and stage["reason"].startswith("pytest did not end within 15 s; its last line: begun ")
    assert wait_until(lambda: not alive(int(stage["reason"].split()[-1])), 100)
    assert stage["facts"] == {} and stage["checks"] == {}


def stage(verdict, tiny=False):
    return {"verdict": verdict, "tiny": tiny, "reason": None}


@pytest.mark.parametrize("made, verdict, left", [
    ({}, "NOT RUN", 0), ({"a": "VALIDATED"}, "UNDECIDED", 3), (dict.fromkeys("abcd", "VALIDATED"), "VALIDATED", 0),
    (dict.fromkeys("abcd", "REFUTED"), "REFUTED", 0),
    (dict.fromkeys("abc", "VALIDATED") | {"d": "REFUTED"}, "REFUTED", 0),
    (dict.fromkeys("abc", "VALIDATED") | {"d": "NOT RUN"}, "UNDECIDED", 1)])
def test_the_verdict_covers_every_stage(stages, made, verdict, left):
    found = stages.common.summary({letter: stage(each) for letter, each in made.items()})
    assert found["verdict"] == verdict and (found["reason"] or "").count("was not run") == left
    assert stages.common.summary({"a": stage("VALIDATED", tiny=True)})["verdict"] == "NOT RUN"


def test_bounds_of_cost_and_memory(stages):
    row = lambda seconds, peak: {"seconds": seconds, "peak": peak, "estimated": 100, "finite": True}
    found = {"0.5B: grpo": row(1.0, 100), "0.5B: sdpo, live": row(1.3, 100), "0.5B: all, ema": row(1.5, 140),
             "7B, checkpointing: grpo": row(1.0, 60), "7B, checkpointing: all, ema": row(9.0, 100),
             "0.5B: replay": {"reason": "no memory"}, "hybrid: grpo": row(1.0, 500), "hybrid: all, ema": row(9.0, 500),
             "0.5B, flex_attention: grpo": row(1.0, 100), "0.5B, flex_attention: all, ema": row(1.7, 100)}
    checks, ratios = stages.stage_b.compared(found)
    failed = {name for name, met in checks.items() if not met}
    assert failed == {"0.5B: sdpo, live: cost in bound", "0.5B: all, ema: memory as planned",
                      "7B, checkpointing: grpo: memory as planned", "0.5B, flex_attention: all, ema: cost in bound"}
    assert ratios["7B, checkpointing: all, ema: cost"] == 9.0 and not any("replay" in name for name in checks)


@pytest.fixture
def plan(stages, monkeypatch, tmp_path):
    "Spike 012's module, with no run made."
    monkeypatch.setattr(sys, "path", [*sys.path])
    return stages.stage_c.spike012(tmp_path, tiny=False)


def test_what_h2_needs_is_chosen_first(stages, plan):
    arms = [run.arm for run in stages.stage_c.order(plan)]
    assert set(arms) == {"policy", "sdpo", "filler", "gradients"}  # no start, no rejection: neither is asked for here
    assert arms[:18] == ["sdpo"] * 9 + ["policy"] * 9 and arms[18:] == ["filler"] * 9 + ["gradients"] * 3


def test_test_runs_come_by_hypothesis_and_in_pairs(stages, plan, monkeypatch):
    monkeypatch.setattr(plan, "rates", lambda arm, alpha=None: ([], 1e-5))
    monkeypatch.setattr(plan, "switch", lambda: ([], 6))
    monkeypatch.setattr(plan, "joint", lambda: ([], (1e-5, 0.1)))
    runs = stages.stage_c.order(plan)
    assert [(run.arm, run.start, run.seed) for run in runs[:3]] == [("policy", 0, 0), ("sequence", 0, 0), ("policy", 0, 1)]
    arms = [run.arm for run in runs]
    assert set(arms[:40]) == {"policy", "sequence"} and set(arms[40:80]) == {"sdpo", "filler"}
    assert set(arms[80:]) == {"joint, gated"} and len(arms) == 100


def test_a_run_is_made_once_and_one_that_failed_is_left(stages, plan):
    first, *rest = stages.stage_c.order(plan)
    run, lock, busy = plan.resumable.claim(stages.stage_c.order(plan))
    with lock:
        assert run == first and busy and plan.resumable.claim(stages.stage_c.order(plan))[0] == rest[0]
    plan.write_json(first.path, {})
    rest[0].path.with_suffix(".failed").write_text("MemoryError")
    with plan.resumable.claim(stages.stage_c.order(plan))[1] as lock:
        assert plan.resumable.claim(stages.stage_c.order(plan))[0] == rest[2]
    for each in rest:
        each.path.with_suffix(".failed").write_text("MemoryError")
    assert plan.resumable.claim(stages.stage_c.order(plan)) == (None, None, False)  # nothing is waited for


def test_a_failed_run_costs_no_other(stages, plan, monkeypatch, tmp_path):
    class Work:
        def __init__(self, run, device):
            self.run = run

        def made(self):
            if self.run.seed == 1001:
                raise MemoryError("the card is full")
            return {"rewards": [[0.0, 1.0]], "log": []}

    runs = [plan.Run("policy", 0, seed, 1e-5) for seed in plan.TUNING]
    monkeypatch.setattr(stages.stage_c, "spike012", lambda folder, tiny: plan)
    monkeypatch.setattr(plan, "Work", Work)
    monkeypatch.setattr(plan, "plan", lambda: iter(runs))
    stages.stage_c.work(tmp_path, True, "abc")
    checks, facts = stages.stage_c.kept(plan, begun(stages, monkeypatch, "c", "--tiny", "--out", tmp_path / "out"))
    assert [(run["seed"], run["passes"], run["commit"]) for run in facts["runs"]] == [(1000, 0.5, "abc"), (1002, 0.5, "abc")]
    assert facts["failed"] == {runs[1].path.stem: "MemoryError: the card is full"} and not checks["no run failed"]
    assert (tmp_path / "out" / "runs.jsonl.gz").exists()


def test_runs_are_compared_on_one_device(stages):
    run = lambda arm, seed, device, *rewards: {"arm": arm, "start": 0, "seed": seed, "device": device, "rewards": [[*rewards]]}
    runs = [run("sequence", 0, "H100", 1, 0), run("policy", 0, "H100", 0, 0),
            run("sequence", 1, "H100", 1, 1), run("policy", 1, "cpu", 0, 0),
            run("sequence", 2, "cpu", 0, 0), run("policy", 2, "cpu", 0, 0) | {"equal": {"rewards": [[0.0, 1.0]]}},
            run("sequence", 1000, "cpu", 1, 1), run("policy", 1000, "cpu", 0, 0)]
    assert stages.stage_c.points(runs, "sequence", "policy", 0) == {"0, H100": 50.0, "2, cpu": -50.0}
    assert stages.stage_c.points(runs, "sequence", "policy", 1) == {}


def test_the_workers_end_with_the_stage(stages, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["stage_c", "--tiny", "--seconds", "0", "--together", "2", "--out", str(tmp_path)])
    stages.stage_c.main()
    assert kept(tmp_path)["c"]["reason"].startswith("no run ended in ") and kept(tmp_path)["c"]["verdict"] == "NOT RUN"
    assert not [p for p in psutil.Process().children() if "spawn_main" in command_of(p)]


@pytest.mark.parametrize("seconds, warm", [
    ([.1, .1], False), ([.1, .1, .1], True), ([.9, .1, .1], False), ([.9, .1, .1, .104], True),
    ([.1, .12] * 9 + [.1], False), ([.1, .12] * 10, True)])
def test_steps_are_timed_once_they_are_steady(stages, seconds, warm):
    assert stages.stage_b.steady(seconds) is warm


def test_another_commit_is_measured_again_and_the_first_number_stays(stages, monkeypatch, tmp_path):
    rate = iter([1.0, 2.0])
    monkeypatch.setattr(stages.stage_b, "TINY_CASES", {"tiny": ("", False, "sdpa", None, ("grpo",))})
    monkeypatch.setattr(stages.stage_b, "case", lambda *_: {"seconds": next(rate), "peak": None, "estimated": 1, "finite": True})
    monkeypatch.setattr(stages.stage_b, "sampler", lambda stage: {"tokens a second": {"ours": 1, "generate": 1}})
    for commit in ("a", "a", "b"):
        monkeypatch.setattr(sys, "argv", ["stage_b", "--tiny", "--out", str(tmp_path), "--commit", commit])
        stages.stage_b.main()
        assert kept(tmp_path)["b"]["checks"]["every case ran"]
    facts = kept(tmp_path)["b"]["facts"]
    assert facts["cases"]["tiny: grpo"]["seconds"] == 2.0 and facts["cases"]["tiny: grpo"]["commit"] == "b"
    assert [row["seconds"] for row in facts["before"]["tiny: grpo"]] == [1.0] and len(facts["before"]["sampler"]) == 1


def test_numbers_of_two_commits_or_cards_are_not_compared(stages):
    row = {"seconds": 1.0, "peak": 100, "estimated": 100, "finite": True, "card": "H100", "commit": "a"}
    for other in ({"card": "H200"}, {"commit": "b"}):
        assert "x: sdpo, live: cost" not in stages.stage_b.compared({"x: grpo": row, "x: sdpo, live": row | other})[1]
    assert stages.stage_b.compared({"x: grpo": row, "x: sdpo, live": row})[1]["x: sdpo, live: cost"] == 1.0


def test_results_are_sent_after_each_write(stages, monkeypatch, tmp_path):
    (tmp_path / "sent").mkdir()
    monkeypatch.setenv("OUT", str(tmp_path / "sent"))
    monkeypatch.setattr(stages.common, "HERE", tmp_path / "spike")
    begun(stages, monkeypatch, "b", "--out", tmp_path / "kept").write({"fits": True}, {"cases": {"x": 1}})
    assert kept(tmp_path / "sent") == kept(tmp_path / "kept")


def test_the_calls_fit_fifteen_minutes_and_the_tool(stages):
    programme = stages.programme
    assert programme.most() <= programme.TOTAL == 900
    for number, call in programme.CALLS.items():
        assert (SPIKE / f"stage_{call.stage}.py").exists() and call.stage in programme.LETTERS and call.limit <= 600
        assert len(programme.command(number, "0" * 40)) < 2000 and str(number) in programme.plan("x")
        carried = str((programme.PARTS / str(number)).relative_to(ROOT))
        assert subprocess.run(["git", "check-ignore", "-q", f"{carried}/x"], cwd=ROOT).returncode == 0
    assert {call.stage for call in programme.CALLS.values()} == set(programme.LETTERS) < set(stages.common.STAGES)


def test_the_model_is_whole_again_after_its_parts(stages, tmp_path):
    programme, home = stages.programme, tmp_path / "home"
    model, folders = tmp_path / programme.WHEEL, [tmp_path / str(number) for number in range(2, 6)]
    model.write_bytes(os.urandom(1001))
    programme.cut(model, folders)
    with pytest.raises(SystemExit, match="it is a fresh one: begin with call 1"):
        programme.unpack(2, folders[0], home)
    (home / "site").mkdir(parents=True)
    for number in (5, 2, 4):
        programme.unpack(number, tmp_path / str(number), home)
    with pytest.raises(SystemExit, match="parts of the model are missing; make calls 3 first, with --seconds 0"):
        programme.join(home)
    programme.unpack(3, tmp_path / "3", home)
    assert (programme.join(home) / programme.WHEEL).read_bytes() == model.read_bytes()
    assert max(len((folder / programme.WHEEL).read_bytes()) for folder in folders) == 251


def test_an_engine_with_other_numbers_or_endings_is_noticed(stages):
    class Engine:
        stops = frozenset({9})

        def __init__(self, ids, shift):
            self.ids, self.shift = ids, shift

        def batch(self, sampling):
            import contextlib
            return contextlib.nullcontext(self)

        def sample(self, rows, contexts, limits, names):
            return [SimpleNamespace(ids=self.ids, logprobs=tuple(-0.5 + self.shift for _ in self.ids)) for _ in rows]

    class Tokenizer:
        def apply_chat_template(self, messages, **settings):
            return {"input_ids": [1, 2, 3]}

    asked = []
    score = lambda before, new: asked.append(tuple(before)) or [-0.5] * len(new)
    compared = lambda ids, shift: stages.stage_d.compared(Engine(ids, shift), score, Tokenizer(), ["a", "b"], 4)
    assert compared((5, 6, 9), 0.0) == {"tokens": 12, "mean": 0.0, "worst": 0.0, "ends": True}
    assert asked[0] == (1, 2, 3) and asked[2] == (1, 2, 3, 5, 6, 9, 1, 2, 3)  # the second turn stands after the first
    assert compared((5, 6, 9), 0.2)["mean"] == pytest.approx(0.2)
    assert not compared((5, 9, 6), 0.0)["ends"] and not compared((5, 6), 0.0)["ends"] and compared((5, 6, 7, 8), 0.0)["ends"]


def test_the_wheels_are_the_tested_versions():
    tested = set((ROOT / "requirements" / "core.txt").read_text().split())
    wheels = (SPIKE / "wheels.txt").read_text().split()
    assert len(wheels) > 20 and set(wheels) - tested == {"gguf==0.19.0"}  # of the extra that reads SmolLM2's file


def test_what_the_stages_need_is_among_the_wheels():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    wheels = {canonicalize_name(line.split("==")[0]) for line in (SPIKE / "wheels.txt").read_text().split()}
    named, todo = set(), ["trl", "transformers", "peft", "typer", "jinja2", "pyyaml", "jsonschema"]
    todo += ["pytest-xdist", "hypothesis"]
    by_image = {"torch", "numpy", "pandas", "pyarrow", "requests", "fsspec", "xxhash", "sympy"}  # with what they need
    while todo:
        name = canonicalize_name(todo.pop())
        if name in named or name in by_image:
            continue
        named.add(name)
        needs = map(Requirement, importlib.metadata.requires(name) or [])
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    assert named <= wheels, named - wheels
