"""The real command: a run cut off by a signal and gone on with, plans without weights, and mistakes in one sentence."""
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forks import composer
from transformers import AutoConfig

from composer_replication.envs.toy.model import embedded_model
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces

COMMAND = Path(sys.executable).with_name("composer-rl")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SMALL = ["--set", "train_rows=8", "--set", "max_completion_length=128", "--set", "max_turns=2", "--set",
         "gradient_accumulation_steps=1", "--set", "save_steps=1000"]


def train(*arguments, cwd):
    return composer("train", *arguments, cwd=cwd, env=ENVIRONMENT)


def said_by(arguments, capsys, monkeypatch):
    "Exit code and both streams of `train`, in this process."
    from composer_replication.cli.app import main
    monkeypatch.setattr(sys, "argv", ["composer-rl", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_leaves_a_checkpoint_and_goes_on(tmp_path):
    with (tmp_path / "stderr").open("w") as log:
        run = subprocess.Popen([COMMAND, "train", "--config", "toy", *SMALL, "--set", "max_steps=500", "--json"],
                               stdout=subprocess.PIPE, stderr=log, text=True, cwd=tmp_path, env=ENVIRONMENT)
        try:
            first = json.loads(run.stdout.readline())  # the process ends by itself, so this ends too
            assert first["step"] == 1 and first["of"] == 500 and first["sdpo/sites"] >= 0
            run.send_signal(signal.SIGTERM)
            rest, _ = run.communicate(timeout=600)
        finally:
            run.kill()
    last = json.loads(rest.splitlines()[-1])
    assert run.returncode == 130 and last["interrupted"] and last["step"] < 500, (tmp_path / "stderr").read_text()
    assert last["checkpoint"] == f"out/toy/checkpoint-{last['step']}"
    assert (tmp_path / last["checkpoint"] / "complete.json").is_file()

    more = last["step"] + 2
    done = train("--config", "toy", *SMALL, "--set", f"max_steps={more}", "--set", "resume=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"step {last['step'] + 1} of {more}:" in done.stdout and "step 1 of" not in done.stdout
    assert f"Checkpoint: out/toy/checkpoint-{more}" in done.stdout and "sdpo/sites" in done.stdout
    begun = f"step {last['step'] + 1}: "  # what takes long is said where nobody watches, the first time
    assert done.stderr.count(f"{begun}playing ") == done.stderr.count(f"{begun}loss and backward") == 1
    assert done.stderr.count("loss and backward") == 1

    again = train("--config", "toy", *SMALL, cwd=tmp_path)
    assert again.returncode == 1 and "belongs to an earlier run" in again.stderr and not again.stdout


def test_a_run_shorter_than_guard_steps_prints_its_held_out_reward(tmp_path):
    done = train("--config", "toy", *SMALL, "--set", "max_steps=1", "--set", "held_out_rows=2", cwd=tmp_path)  # guard_steps is 10
    assert done.returncode == 0, done.stderr
    assert re.search(r"Step 1 of 1\. Held-out reward: [01]\S*\. Checkpoint: out/toy/checkpoint-1", done.stdout), done.stdout
    assert "Nothing was measured" not in (tmp_path / "out/toy/index.html").read_text()


def test_dry_run_plans_a_model_by_its_configuration_alone_and_refuses_one_without(tmp_path):
    shape = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936)
    AutoConfig.for_model("qwen3", num_key_value_heads=8, **shape).save_pretrained(tmp_path / "Qwen3-8B")
    away = train("--config", "qwen3-8b-lora", "--dry-run", cwd=tmp_path)
    assert away.returncode == 1 and not away.stdout
    assert "name a folder that has its config.json, or allow downloads" in away.stderr
    shown = train("--config", "qwen3-8b-lora", "--dry-run", "--set", "model=Qwen3-8B", cwd=tmp_path)
    assert "8,278,029,312" in shown.stdout and "memory: teacher and reference" in shown.stdout, shown.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["Qwen3-8B"]


@pytest.mark.parametrize("arguments, said", [
    (["--config", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
    (["--config", "tooy"], "there is no recipe 'tooy'; did you mean toy?"),
    (["--config", "smollm2"], "did you mean smollm2-larder or smollm2-sql?"),
    (["--config", "/tmp"], "/tmp: this is a folder"),
    (["--config", "toy", "--set", "max_steps"], "no key=value"),
    (["--config", "toy", "--set", "alpha_sdpo=-1"], "alpha_sdpo=-1.0 is out of range"),
    (["--config", "toy", "--set", "wrong=1"], "the key 'wrong' is unknown"),
])
def test_mistakes_end_in_one_sentence_and_exit_code_1(arguments, said, capsys, monkeypatch):
    code, _, error = said_by(arguments, capsys, monkeypatch)
    assert code == 1 and said in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("settings, said", [
    (["task=deletion", "tasks=nofile.jsonl"], "tasks 'nofile.jsonl' is no file"),
    (["task=deletion", "tasks=empty.jsonl", "held_out_rows=2"], "empty.jsonl holds no task that can be used: make some with"),
    (["task=deletion", "tasks=larder", "split=task", "per_device_train_batch_size=32", "gradient_accumulation_steps=4"],
     "tasks are left to train on, and one generation takes"),
    (["traces=[nofile.jsonl]"], "traces: 'nofile.jsonl' is no file, no folder and no pattern of files"),
    (["held_out_rows=3.5"], "held_out_rows=3.5"),
    (["max_steps=-3"], "max_steps=-3"),
    (["max_steps=0"], "max_steps=0"),
    (["traces=[one.jsonl]", "replay_pairs=siblings"], "replay_pairs (siblings) finds none in the 1 recorded traces"),
])
def test_a_dry_run_refuses_what_the_run_refuses_in_its_words(settings, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    write_traces(toy_traces()[:1], tmp_path / "one.jsonl")
    words = ["--config", "toy", *(word for text in settings for word in ("--set", text))]
    planned, run = said_by([*words, "--dry-run"], capsys, monkeypatch), said_by(words, capsys, monkeypatch)
    assert planned[0] == run[0] == 1 and said in planned[2] and planned[2].startswith("error: ")
    assert bool(planned[1]) == settings[0].startswith(("task", "traces"))  # of a sound recipe the plan is shown all the same
    assert planned[2].splitlines()[-1] == run[2].splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_what_the_run_would_open(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config", "toy", "--dry-run", "--set", "task=deletion", "--set", "tasks=larder", "--set", "split=task", "--set",
             "held_out_rows=2", "--set", "train_rows=9", "--set", "traces=[embedded]"]
    code, shown, _ = said_by(words, capsys, monkeypatch)
    assert code == 0 and f"11 tasks: 9 to train on, 2 held out; {len(toy_traces())} traces" in shown
    code, shown, _ = said_by([*words, "--json"], capsys, monkeypatch)
    counts = json.loads(shown)["data"]
    assert counts.items() >= {"train": 9, "held_out": 2, "traces": len(toy_traces()), "turns_beyond": 0}.items()
    assert counts["turns"] >= len({(site.trace_id, site.turn) for trace in toy_traces() for site in find_error_sites(trace)})


@pytest.mark.parametrize("settings, foreign", [
    ([], None),
    (["model=random:{config}", "tokenizer=embedded"], None),
    (["task=sql"], "with task 'sql' it tries"),
    (["task=sql", "model=random:{config}", "tokenizer=embedded"], None),
    (["traces=[one.jsonl]"], "with these traces it tries"),
    (["traces=[embedded]"], None)])
def test_a_plan_says_where_the_embedded_model_can_learn_nothing(settings, foreign, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_traces(toy_traces()[:1], tmp_path / "one.jsonl")
    embedded_model().config.save_pretrained(tmp_path)
    words = [word for text in settings for word in ("--set", text.format(config=tmp_path / "config.json"))]
    code, _, said = said_by(["--config", "toy", *words, "--dry-run"], capsys, monkeypatch)
    assert code == 0 and (foreign in said if foreign else "embedded model" not in said), said


def test_a_dry_run_names_a_package_that_is_not_here_and_plans_all_the_same(tmp_path, capsys, monkeypatch):
    import composer_replication.recipes.checks as checks
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    code, shown, said = said_by(["--config", "toy", "--dry-run", "--set", "report_to=tensorboard"], capsys, monkeypatch)
    assert code == 0 and "32 tasks" in shown and "report_to=tensorboard needs the package tensorboard" in said


def test_a_dry_run_loads_no_writer_of_hints(tmp_path, capsys, monkeypatch):
    import composer_replication.recipes.hint_models as hint_models
    monkeypatch.setattr(hint_models, "load_checkpoint", lambda name: pytest.fail("weights"))
    monkeypatch.chdir(tmp_path)
    words = ["--config", "toy", "--dry-run", "--set", "hints=[learned]", "--set", "hint_writer=embedded"]
    assert said_by(words, capsys, monkeypatch)[0] == 0


@pytest.mark.parametrize("settings, command", [
    (dict(task="toy", model="embedded"), "composer-rl eval out/a --task toy --against embedded"),
    (dict(task="sql", tasks="easy,medium", model="m"), "composer-rl eval out/a --task sql --tasks easy,medium --against m"),
    (dict(task="deletion", tasks="my tasks.jsonl", held_out_rows=2, model="m"),
     "composer-rl eval out/a --task deletion --tasks 'my tasks.jsonl' --held-out --against m"),
    (dict(task="deletion", tasks="t.jsonl", model="random:c.json"), "composer-rl eval out/a --task deletion --tasks t.jsonl"),
    (dict(task=None, model="embedded"), "composer-rl export out/a --out out/a-plain"),
])
def test_the_next_command(settings, command):
    from composer_replication.report.train import next_command
    assert next_command(settings, "out/a") == command
