"A first recipe of one's own: written, read, and planned as it stands."
import yaml
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.envs.toy.traces import toy_path
from composer_replication.recipes.recipe import load_recipe


def new(*words):
    return CliRunner().invoke(app, ["recipes", "new", *map(str, words)])


def test_it_reads_what_was_named_and_is_a_recipe(tmp_path):
    file = tmp_path / "my run.yaml"
    done = new(file, "--model", "embedded", "--traces", toy_path())
    assert done.exit_code == 0 and f"--config '{file}' --dry-run" in done.stderr.replace("\n", "")
    recipe = load_recipe(file)
    assert recipe.arguments.traces == [str(toy_path())] and recipe.arguments.task is None
    assert (recipe.config.alpha_sdpo, recipe.config.beta_replay, recipe.config.max_steps) == (1.0, 0.0, 2)


def test_tasks_bring_rollouts(tmp_path):
    assert new(tmp_path / "a.yaml", "--model", "embedded", "--tasks", "larder").exit_code == 0
    recipe = load_recipe(tmp_path / "a.yaml")
    assert (recipe.arguments.task, recipe.arguments.tasks, recipe.arguments.traces) == ("deletion", "larder", None)


def test_names_that_yaml_would_read_otherwise_stay_texts(tmp_path):
    assert new(tmp_path / "a.yaml", "--model", "no: #1", "--traces", "*.jsonl", "--traces", "é'\"").exit_code == 0
    values = yaml.safe_load((tmp_path / "a.yaml").read_text(encoding="utf-8"))
    assert (values["model"], values["traces"]) == ("no: #1", ["*.jsonl", "é'\""])


def test_nothing_to_train_on_and_a_file_that_exists_are_refused(tmp_path):
    done = new(tmp_path / "a.yaml", "--model", "embedded")
    assert done.exit_code == 1 and "give --traces" in done.stderr and not (tmp_path / "a.yaml").exists()
    (tmp_path / "a.yaml").write_text("mine")
    done = new(tmp_path / "a.yaml", "--model", "embedded", "--tasks", "larder")
    assert done.exit_code == 1 and "this file exists" in done.stderr and (tmp_path / "a.yaml").read_text() == "mine"
