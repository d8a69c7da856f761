"""Launch and jobs as commands: a real run ended by its budget, dry runs, keys that stay out, programs that are absent."""
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.contrib.launch.commands import named_files
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import shipped_recipes
from composer_replication.training.checkpoint import last_complete_checkpoint

COMMAND = Path(sys.executable).with_name("composer-rl")
CONTAINER = ["--image", "registry.invalid/composer:1", "--storage", "runs", "--hardware", "H100"]
SKY = ["--storage", "s3://bucket"]
SMALL = ["--set", "train_rows=8", "--set", "max_completion_length=64", "--set", "max_turns=2",
         "--set", "gradient_accumulation_steps=1", "--set", "save_steps=1000", "--set", "max_steps=100000"]


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_programs(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))


# A real run

def jobs(word, folder):
    done = subprocess.run([COMMAND, "jobs", word, folder, "--json"], capture_output=True, text=True, timeout=900, check=True)
    return json.loads(done.stdout)


def launched(*words):
    words = ["toy", "--on", "local", *SMALL, "--set", "output_dir=run", "--json", *map(str, words)]
    done = subprocess.run([COMMAND, "launch", *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait(until, seconds=900):
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, jobs("logs", "run")["log"]
        time.sleep(0.5)


@pytest.mark.slow
def test_a_run_is_launched_cancelled_gone_on_with_and_ended_by_its_budget():
    begun = time.monotonic()
    record = launched("--hours", 2)
    assert record["submitted"] and jobs("status", "run")["state"] == "running"
    wait(lambda: "step 2 of 100000" in jobs("logs", "run")["log"])
    two_steps = time.monotonic() - begun  # on this machine as busy as it is
    assert jobs("cancel", "run") == {"state": "stopped"}
    first = last_complete_checkpoint("run")
    assert first is not None and jobs("status", "run")["code"] == 130

    seconds = jobs("status", "run")["used"] + 3 * two_steps + 60
    launched("--budget", 5, "--price", 5 / seconds * 3600)
    wait(lambda: jobs("status", "run")["state"] != "running", 900 + seconds)
    status = jobs("status", "run")
    assert status["state"] == "spent" and int(seconds) - 1 <= status["seconds"] <= seconds and status["used"] <= seconds + 30
    step = [int(folder.name.rpartition("-")[2]) for folder in (first, last_complete_checkpoint("run"))]
    assert step[1] > step[0], jobs("logs", "run")["log"]
    again = run("launch", "toy", "--on", "local", "--set", "output_dir=run", "--hours", status["seconds"] / 3600)
    assert again.exit_code == 1 and "of the limit are used" in again.stderr


# Dry runs, and what is refused

AWS = ["--role", "arn:aws:iam::123456789012:role/x", "--hardware", "ml.p5.48xlarge", "--storage", "s3://b/x"]


@pytest.mark.parametrize(("name", "on"), [
    *((name, "slurm") for name in shipped_recipes()),
    *(("toy", on) for on in ("local", "kubernetes", "sky", "modal", "sagemaker"))])
def test_every_shipped_recipe_and_every_place_can_be_planned(name, on, tmp_path):
    given = [*CONTAINER, *(AWS if on == "sagemaker" else SKY if on == "sky" else []), "--gpus", 8, "--budget", 20, "--price", 10]
    done = run("launch", name, "--on", on, *given, "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert done.exit_code == 0 and plan["seconds"] == 7200 and "20.00 dollars at 10 an hour" in plan["limit"]
    assert "torchrun" in plan["spec"] and "resume=true" in plan["spec"] and not list(tmp_path.iterdir())


def test_what_reaches_the_machine_is_the_recipe_and_the_settings(tmp_path):
    (tmp_path / "my recipe; rm -rf x.yaml").write_text("task: toy  # of mine\nmax_steps: 3\n")
    done = run("launch", "my recipe; rm -rf x.yaml", "--on", "kubernetes", *CONTAINER, "--hours", 1,
               "--set", "learning_rate=2e-6", "--name", "mine", "--dry-run")
    files, job = yaml.safe_load_all(done.stdout)
    assert files["data"] == {"my-recipe-rm-rf-x.yaml": "task: toy  # of mine\nmax_steps: 3\n"}
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words[7:] == ["composer-rl", "train", "--config", "/job/my-recipe-rm-rf-x.yaml", "--set", "learning_rate=2e-6",
                         "--set", "output_dir=/runs/mine", "--set", "resume=true"]


def test_a_job_is_named_by_its_runs_folder(tmp_path):
    "Two runs of one recipe have two folders there; one run has one, however its folder is written."
    def plan(folder):
        words = ["--on", "kubernetes", *CONTAINER, "--hours", 1, "--set", f"output_dir={folder}", "--dry-run", "--json"]
        row = json.loads(run("launch", "toy", *words).stdout)
        assert f"output_dir=/runs/{row['name']}" in row["spec"]
        return row["name"]
    long = "a" * 30 + "-b" * 20
    names = [plan(folder) for folder in ("first", "second", "other/first", long, tmp_path / "second", "other/../first")]
    assert len(set(names[:4])) == 4 and names[4:] == [names[1], names[0]] and names[0].startswith("first-")


@pytest.mark.parametrize(("words", "said"), [
    (["--on", "local"], "can run for ever"),
    (["--on", "local", "--budget", "5"], "give --price"),
    (["--on", "kubernetes", "--hours", "1"], "give --image and --storage"),
    (["--on", "modal", "--hours", "1", *CONTAINER, "--machines", "2"], "one machine here"),
    (["--on", "modal", "--hours", "25", *CONTAINER], "24 hours"),
    (["--on", "sky", "--hours", "1", *CONTAINER], "a whole bucket"),
    (["--on", "slurm", "--hours", "1", "--env", "A=b"], "no name of a variable"),
    (["--on", "slurm", "--hours", "1", "--env", "NOT_SET_HERE"], "no such variable here"),
    (["--on", "slurm", "--hours", "1", "--set", "alpha_sdpo=-1"], "out of range"),
    (["--on", "slurm", "--hours", "1", "--set", "hub_token=x"], "hub_token in the recipe"),
    (["--on", "slurm", "--hours", "1", "--set", "output_dir=sk-" + "a" * 30], "a key in the recipe"),
])
def test_what_cannot_be_launched_is_one_sentence_and_leaves_nothing(words, said, tmp_path):
    done = run("launch", "toy", *words)
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_value_of_a_variable_stays_out_of_spec_and_log(monkeypatch, no_programs, tmp_path):
    monkeypatch.setenv("MY_KEY", "a-very-secret-value")
    done = run("launch", "toy", "--on", "slurm", "--hours", "1", "--env", "MY_KEY", "--set", "output_dir=run")
    texts = [done.output, *(path.read_text() for path in (tmp_path / "run").iterdir())]
    assert done.exit_code == 3 and any("MY_KEY" in text for text in texts)
    assert not any("a-very-secret-value" in text for text in texts)
    named = ["--env", "MY_KEY", "--set", "hub_model_id=a-very-secret-value"]
    refused = run("launch", "toy", "--on", "slurm", "--hours", "1", *named)
    assert refused.exit_code == 1 and "a-very-secret-value" not in refused.output


@pytest.mark.parametrize(("on", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl"), ("sky", "sky"), ("modal", "modal")])
def test_without_the_places_program_the_spec_is_written_and_one_sentence_says_what_to_run(on, program, no_programs, tmp_path):
    given = [*CONTAINER, *(SKY if on == "sky" else [])]
    done = run("launch", "toy", "--on", on, "--hours", "1", *given, "--set", "output_dir=run", "--json")
    row = json.loads(done.stdout)
    assert done.exit_code == 3 and not row["submitted"] and f"{program} is not installed here" in done.stderr
    words = shlex.split(row["run"])
    assert words[0] == program and any(word.endswith(row["spec"]) for word in words) and Path(row["spec"]).is_file()
    status = run("jobs", "status", "run")
    assert status.exit_code == 1 and status.stderr.count("\n") == 1 and os.listdir("run")


def test_a_model_of_this_machine_is_named_and_one_of_the_hub_is_not(tmp_path):
    "A recipe as read, without its checks: those would load each."
    arguments = {"model": tmp_path / "m", "tokenizer": tmp_path / "t", "hint_writer": tmp_path / "h", "warm_up": tmp_path / "w"}
    for path in arguments.values():
        path.mkdir()
    values = {key: str(path) for key, path in arguments.items()}
    recipe = load_recipe("toy", {}, estimating=True)
    here = replace(recipe.arguments, **values | {"model": f"random:{values['model']}", "warm_up": {"folder": values["warm_up"]}})
    assert set(named_files(replace(recipe, arguments=here))) == set(values.values())
    there = replace(recipe.arguments, model="Qwen/Qwen3-8B", tokenizer="Qwen/Qwen3-8B", warm_up={"folder": "not made yet"})
    assert named_files(replace(recipe, arguments=there)) == named_files(recipe) == []


def test_a_spec_is_printed_without_torch_and_says_what_it_did_not_check(tmp_path):
    code = ("import sys; from composer_replication.cli.app import main\n"
            "try: main()\nfinally: print([name for name in ('torch', 'transformers') if name in sys.modules], file=sys.stderr)")
    words = ["launch", "toy", "--on", "slurm", "--hours", "1", "--dry-run"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash")
    assert done.stderr.splitlines()[-1] == "[]" and "train --config toy --dry-run does that" in done.stderr


def test_a_dry_run_writes_the_same_spec_as_a_launch(no_programs, tmp_path):
    words = ["launch", "toy", "--on", "slurm", "--hours", "1", "--set", "output_dir=run", "--json"]
    planned, left = (json.loads(run(*words, *more).stdout) for more in (["--dry-run"], []))
    assert planned["spec"] == Path(left["spec"]).read_text()


@pytest.mark.parametrize("gpus, warned", [(1, False), (1000, True)])
def test_gpus_that_are_not_here_are_named(gpus, warned, tmp_path):
    done = run("launch", "toy", "--on", "local", "--hours", "1", "--gpus", gpus, "--dry-run")
    assert done.exit_code == 0 and ("does nothing here" in done.stderr) == warned


def test_files_that_a_container_does_not_have_are_named(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b"")
    (tmp_path / "agents").mkdir()
    named = ["--dry-run", "--set", "traces=[mine.jsonl]", "--set", "agent={command: a, path: agents}"]
    done = run("launch", "toy-traces", "--on", "kubernetes", "--hours", "1", *CONTAINER, *named)
    assert done.exit_code == 0 and "the recipe names mine.jsonl, which is not sent" in done.stderr
    assert "the recipe names agents, which is not sent" in done.stderr
