"Commands on models, checkpoints and recipes: what they print, and what they refuse in one sentence."
import json

import pytest
import yaml

from composer_replication.cli.recipes import recipe_row
from composer_replication.envs.toy.traces import toy_path
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import shipped_recipes
from composer_replication.rollout.agents import Agent
from composer_replication.sandbox.base import sandbox_kinds


def test_an_unknown_model_is_one_sentence(call):
    done = call("models", "get", "gpt5")
    assert done.exit_code == 1 and not done.stdout
    assert done.stderr == "error: there is no model 'gpt5' to fetch; name one of smollm2, qwen2.5-coder-0.5b.\n"


def test_a_fetched_model_is_listed_with_its_folder(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_MODELS", str(tmp_path))
    assert [(row["name"], row["folder"]) for row in rows("models", "list")][0] == ("smollm2", "")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert rows("models", "list")[0]["folder"] == str(tmp_path / "smollm2") == rows("models", "get", "smollm2")[0]["folder"]


def test_the_doctor_names_every_sandbox_and_no_key(call, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "k-secret-123")
    done = call("doctor", "--json")
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.exit_code == 0 and "k-secret-123" not in done.output
    assert {f"sandbox {kind}" for kind in sandbox_kinds()} <= set(rows)
    assert rows["OPENROUTER_API_KEY"]["present"] and rows["torch"]["detail"].startswith("2.13.0")
    assert all(row["cost"] for row in rows.values() if not row["present"])


def test_an_export_of_whole_weights(call, rows, tmp_path):
    assert rows("export", "embedded", "--out", "a") == [
        {"folder": "a", "parameters": 869760, "dtype": "float32", "merged": False, "difference": 0.0, "step": None}]
    shown = call("export", "embedded", "--out", "b", "--merge").stdout
    assert "869,760 parameters, float32, step not recorded. Logits differ by 0.0e+00" in shown
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("name, said", [("nobody/nothing", "HF_HUB_OFFLINE is set"), ("./nowhere", "there is no folder of"),
                                        ("./adapter", "is a LoRA adapter; add --merge"),
                                        ("./empty", "neither a model nor a run")])
def test_what_cannot_be_exported(call, name, said, tmp_path, monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for folder in ("adapter", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    done = call("export", name, "--out", "plain")
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "plain").exists()


def test_a_first_recipe_reads_what_was_named(call):
    done = call("recipes", "new", "my run.yaml", "--model", "embedded", "--traces", toy_path())
    assert done.exit_code == 0 and "--config 'my run.yaml' --dry-run" in done.stderr.replace("\n", "")
    recipe = load_recipe("my run.yaml")
    assert recipe.arguments.traces == [str(toy_path())] and recipe.arguments.task is None
    assert (recipe.config.alpha_sdpo, recipe.config.beta_replay, recipe.config.max_steps) == (1.0, 0.0, 2)
    assert call("recipes", "new", "a.yaml", "--model", "embedded", "--tasks", "larder").exit_code == 0
    recipe = load_recipe("a.yaml")
    assert (recipe.arguments.task, recipe.arguments.tasks, recipe.arguments.traces) == ("deletion", "larder", None)


def test_a_first_recipe_with_an_agent_names_all_that_is_missing_before_it_runs(call, tmp_path):
    agent = "my-agent --url {url} --key {key} {prompt_file}"
    words = ["--model", "embedded", "--tasks", "larder", "--agent", agent, "--agent-path", "out/agents"]
    assert call("recipes", "new", "a.yaml", *words).exit_code == 0
    recipe = load_recipe("a.yaml", {"sandbox": "auto"}, estimating=True)
    assert recipe.arguments.agent == {"command": agent, "path": "out/agents", "seconds": 600}
    made = Agent(**recipe.arguments.agent)

    def told():
        return " ".join(call("train", "--config", "a.yaml", "--dry-run").stderr.split())

    assert "the agent could not start on this machine: agent: path 'out/agents' is no folder; install" in told()
    (tmp_path / "out" / "agents" / "bin").mkdir(parents=True)
    assert "there is no program 'my-agent' in out/agents/bin or on this machine; install" in told()
    program = tmp_path / "out" / "agents" / "bin" / "my-agent"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert made.missing() is None and "could not start" not in told()


@pytest.mark.parametrize("command, missing", [
    ("env A=b C={key} sh -c 'exec python'", None), ("A=b no-such-program", "no-such-program"), ("{workspace}/run.sh", None),
    ("/agent/bin/own", None), ("mine.agent:play", "module 'mine'"), ("agents:play", None)])
def test_an_agents_program_is_looked_for_by_its_name(command, missing, tmp_path):
    (tmp_path / "agents.py").touch()
    said = Agent(command, str(tmp_path)).missing()
    assert said is None if missing is None else missing in said


@pytest.mark.parametrize("words, said", [(["--agent", "a", "--traces", "*.jsonl"], "an agent plays tasks; give --tasks FILE"),
                                         (["--agent-path", "a", "--tasks", "larder"], "give its command by --agent")])
def test_an_agent_without_tasks_and_a_place_without_an_agent_are_refused(call, words, said, tmp_path):
    done = call("recipes", "new", "a.yaml", "--model", "embedded", *words)
    assert done.exit_code == 1 and said in done.stderr and not (tmp_path / "a.yaml").exists()


def test_names_that_yaml_would_read_otherwise_stay_texts(call, tmp_path):
    assert call("recipes", "new", "a.yaml", "--model", "no: #1", "--traces", "*.jsonl", "--traces", "é'\"").exit_code == 0
    values = yaml.safe_load((tmp_path / "a.yaml").read_text(encoding="utf-8"))
    assert (values["model"], values["traces"]) == ("no: #1", ["*.jsonl", "é'\""])


def test_nothing_to_train_on_and_a_file_that_exists_are_refused(call, tmp_path):
    done = call("recipes", "new", "a.yaml", "--model", "embedded")
    assert done.exit_code == 1 and "give --traces" in done.stderr and not (tmp_path / "a.yaml").exists()
    (tmp_path / "a.yaml").write_text("mine")
    done = call("recipes", "new", "a.yaml", "--model", "embedded", "--tasks", "larder")
    assert done.exit_code == 1 and "this file exists" in done.stderr and (tmp_path / "a.yaml").read_text() == "mine"


def test_a_recipe_that_is_shown_is_read_as_a_run_reads_it(call, rows, tmp_path):
    (tmp_path / "mine.yaml").write_text("learning_rate: 1e-4  # a number\ntask: toy\n")
    assert rows("recipes", "show", "mine.yaml") == [{"name": "mine", "settings": {"learning_rate": 1e-4, "task": "toy"}}]
    assert call("recipes", "show", "mine.yaml").stdout == (tmp_path / "mine.yaml").read_text()
    (tmp_path / "mine.yaml").write_text("task: toy\ntask: sql\n")
    done = call("recipes", "show", "mine.yaml")
    assert done.exit_code == 1 and "the key 'task' stands twice" in done.stderr


def test_the_list_of_recipes_says_what_was_not_run_as_the_recipe_does():
    run = {name: recipe_row(name, path.read_text())["run"] for name, path in shipped_recipes().items()}
    assert run["smollm2-larder"] == "not run with SmolLM2" and run["qwen3-8b-lora"] == "not run on a GPU"
    assert [name for name, said in run.items() if said == "yes"] == ["smollm2-sql", "toy-traces", "toy"]
