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

ROOT = Path(__file__).resolve().parents[2]
SPIKE = ROOT / "spikes" / "200-gpu"


@pytest.fixture
def stages(monkeypatch):
    "The programme's modules."
    monkeypatch.syspath_prepend(str(SPIKE))
    names = "common", "stage_a", "stage_b", "stage_c", "stage_d"
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
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
    monkeypatch.setattr(sys, "argv", ["stage_a", "--tiny", "--seconds", "5", "--out", str(tmp_path)])
    (tmp_path / "stage_a.xml").write_text('<x><testcase classname="tests.old" name="test_of_an_earlier_call"/></x>')
    stages.stage_a.main()
    stage = kept(tmp_path)["a"]
    assert stage["verdict"] == "NOT RUN" and stage["reason"].startswith("pytest did not end within 5 s; its last line: begun ")
    child = psutil.Process(int(stage["reason"].split()[-1])) if psutil.pid_exists(int(stage["reason"].split()[-1])) else None
    assert child is None or child.wait(timeout=100) is None or child.status() == psutil.STATUS_ZOMBIE
    assert stage["facts"] == {} and stage["checks"] == {}


def stage(verdict, tiny=False):
    return {"verdict": verdict, "tiny": tiny, "reason": None}


@pytest.mark.parametrize("made, verdict, left", [
    ({}, "NOT RUN", 0), ({"a": "VALIDATED"}, "PARTIAL", 3), (dict.fromkeys("abcd", "VALIDATED"), "VALIDATED", 0),
    (dict.fromkeys("abcd", "INVALIDATED"), "INVALIDATED", 0),
    (dict.fromkeys("abc", "VALIDATED") | {"d": "INVALIDATED"}, "PARTIAL", 0),
    (dict.fromkeys("abc", "VALIDATED") | {"d": "NOT RUN"}, "PARTIAL", 1)])
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


def test_the_ladder_wants_three_seeds_and_an_interval_above_zero(stages):
    run = lambda score: {"held_out": score, "steps": 2, "of": 2, "loss": 0.1}
    scores = {"policy": [.1, .2, .3], "sdpo": [.5, .6, .8], "sdpo, filler hint": [.5, .7, .7]}
    runs = {f"{arm}/{seed}": run(score) for arm, each in scores.items() for seed, score in enumerate(each)}
    checks, gains = stages.stage_c.judged(runs)
    assert checks["sdpo - policy"] and not checks["sdpo - sdpo, filler hint"] and gains["sdpo - policy"]["seeds"] == 3
    assert "sdpo - policy" not in stages.stage_c.judged({k: v for k, v in runs.items() if "2" not in k})[0]
    runs["sdpo/0"]["loss"] = float("nan")
    assert not stages.stage_c.judged(runs)[0]["sdpo/0: ended"]


def test_scores_are_paired_by_task(stages):
    row = lambda low, high: {"held_out": 0.5, "rewards": [low, high] * 20, "steps": 2, "of": 2, "loss": 0.1}
    runs = {f"sdpo/{n}": row([0, 1], [1, 1]) for n in range(3)} | {f"policy/{n}": row([0, 0], [0, 1]) for n in range(3)}
    gain = stages.stage_c.judged(runs)[1]["sdpo - policy"]  # half a pass at every task, while tasks differ by as much
    assert gain["estimate"] == 0.5 and gain["low"] > 0.35


def late(*about):
    import time
    if about[-1] == 2:
        raise MemoryError("the card is full")
    time.sleep(0 if about[-1] == 0 else 600)
    return about


def test_runs_beside_one_another_end_with_the_stage_and_one_that_fails_costs_no_other(stages, monkeypatch, tmp_path):
    monkeypatch.setattr(stages.stage_c, "run", late)
    made, stage = {}, begun(stages, monkeypatch, "c", "--tiny", "--seconds", "500", "--out", tmp_path)
    monkeypatch.setattr(stage, "fits", lambda: True)

    def ended(key, row):
        made[key] = row
        stage.given.seconds = 0 if len(made) == 2 else 500  # then the time is over, and b has not ended

    stages.stage_c.together(stage, [("a", 2), ("b", 1), ("c", 0)], 2, (), ended)
    assert made == {"a/2": {"reason": "MemoryError: the card is full"}, "c/0": ("c", 0)}
    assert not [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


def test_a_run_that_failed_is_no_score(stages):
    checks, gains = stages.stage_c.judged({"sdpo/0": {"reason": "MemoryError"}})
    assert checks == {"sdpo/0: ended": False} and gains["sdpo - policy"] is None


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
    assert len(wheels) > 20 and set(wheels) <= tested


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
