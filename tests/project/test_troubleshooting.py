"""Every message on the page about trouble really appears: the trouble is made, and the page must quote what is said."""
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import nbformat
import pytest
import torch
from bad_server import BadServer, Reply, completion
from datasets import Dataset
from typer.testing import CliRunner

from composer_replication.cli import app as cli
from composer_replication.core.errors import InputProblem
from composer_replication.envs.deletion.subject import SubjectProblem, subject_of
from composer_replication.envs.deletion.task import read_tasks
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.experiments.schedule import Job, read_result
from composer_replication.experiments.setting import Measurement, RunResult, Setting, TrainingStep
from composer_replication.hints.layers import default_composite
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import run_recipe
from composer_replication.sandbox.base import open_sandbox
from composer_replication.traces.export import write_traces
from composer_replication.training.batches import NonFiniteLoss
from composer_replication.training.checkpoint import load_buffer, mark_complete, save_buffer
from composer_replication.training.setup import prepare
from composer_replication.tree.chat import TemplateProblem
from composer_replication.tree.template import probe_template

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^(\S[^\n]*)\n((?:: .*\n(?:  .*\n)*)+)", PAGE, re.M))
REPRODUCED: set[str] = set()  # symptoms that a test below brings about, filled as they are collected


def symptom(start: str):
    "Mark a test as bringing about the entry whose symptom starts so; the test gets the texts in its back-ticks."
    [entry] = [s for s in ENTRIES if s.startswith(start)] or [None]
    REPRODUCED.add(entry)
    return pytest.mark.parametrize("quoted", [re.findall(r"`([^`]+)`", entry or "")], ids=[start[:24]])


def is_quoted(quoted: list[str], said: object) -> None:
    "Every text that the page quotes occurs in what was said; where lines were broken does not matter."
    said = " ".join(str(said).split())
    assert quoted and all(text in said for text in quoted), f"the page quotes {quoted}; what was said: {said}"


def command(*words, monkeypatch, capsys) -> tuple[int, str]:
    "Exit code and standard error of `composer-rl`."
    monkeypatch.setattr(sys, "argv", ["composer-rl", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


# The page itself

def test_every_entry_has_a_cause_and_a_fix():
    assert len(ENTRIES) >= 20
    for entry, body in ENTRIES.items():
        assert ": *Cause.*" in body and ": *Fix.*" in body, entry


def test_every_entry_is_reproduced_or_says_that_it_is_not():
    for entry, body in ENTRIES.items():
        assert ("*Not reproduced here:*" in body) != (entry in REPRODUCED), entry
    assert None not in REPRODUCED


# Set-up, notebooks, checks

@symptom("`Python 3.11 or later")
def test_no_python(quoted, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/core.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    made = subprocess.run(["make", "test", "PYTHON="], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert made.returncode
    is_quoted(quoted, made.stderr)


@pytest.fixture
def check(tmp_path, monkeypatch):
    "`tools/check.py` on a small project with one exported notebook."
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("check_of_trouble", ROOT / "tools/check.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    (tmp_path / "nbs/room").mkdir(parents=True)
    (tmp_path / "composer_replication").mkdir()
    (tmp_path / "composer_replication/__init__.py").write_text('__version__ = "0.1.0"\n')
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    cells = [nbformat.v4.new_code_cell(source, id=f"cell{i}") for i, source in enumerate(
        ("#| default_exp room.thing", "#| export\ndef double(x):\n    return 2 * x"))]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "nbs/room/00_thing.ipynb")
    assert found.run([str(found.BIN / "nbdev_export")], tmp_path, 60)[0]
    monkeypatch.setattr(found, "ROOT", tmp_path)
    return found


@symptom("`check export: FAILED`")
def test_a_module_edited_by_hand(quoted, check, capsys):
    module = check.ROOT / "composer_replication/room/thing.py"
    module.write_text(module.read_text().replace("2 * x", "3 * x"))
    assert check.main(["export"]) == 1
    is_quoted(quoted, "".join(capsys.readouterr()))


@symptom("`check clean: FAILED`")
def test_metadata_in_a_notebook(quoted, check, capsys):
    path = check.ROOT / "nbs/room/00_thing.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["metadata"]["scrolled"] = True
    path.write_text(json.dumps(notebook))
    assert check.main(["clean"]) == 1
    is_quoted(quoted, "".join(capsys.readouterr()))


@symptom("`the shared data is not here`")
def test_no_shared_data(quoted, tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(shared_data): pass\n")
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    words = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    nowhere = {"COMPOSER_DATA": str(tmp_path / "nowhere"), "PYTHONPATH": str(ROOT / "tests")}
    said = subprocess.run(words, cwd=tmp_path, timeout=600, capture_output=True, text=True, env=nowhere)
    is_quoted(quoted, said.stdout)


# Traces and templates

@pytest.fixture
def tokenizer():
    return embedded_tokenizer()


@symptom("`the tokenizer has no chat template`")
def test_no_template(quoted, tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(TemplateProblem) as found:
        probe_template(tokenizer)
    is_quoted(quoted, found.value)


@symptom("`which the chat template drops")
def test_a_template_without_tools(quoted, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(TemplateProblem) as found:
        probe_template(tokenizer).dialect(toy_traces()[0])
    is_quoted(quoted, found.value)


@symptom("`changes earlier text")
def test_a_template_that_rewrites(quoted, tokenizer):
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(TemplateProblem) as found:
        probe_template(tokenizer)
    is_quoted(quoted, found.value)


# Teachers

@pytest.fixture
def traces(tmp_path):
    write_traces(toy_traces()[:1], tmp_path / "traces.jsonl")
    return tmp_path / "traces.jsonl"


@symptom("`no price is known")
def test_no_price(quoted, traces):
    result = CliRunner().invoke(cli.app, ["replay", str(traces), "--teachers", "nobody/one", "--teachers", "nobody/two"])
    assert result.exit_code == 1
    is_quoted(quoted, result.stderr)


def asked(traces, server, *more):
    panel = [word for name in "ab" for word in ("--teachers", f"{name}=m-{name}@{server.url}")]
    return CliRunner().invoke(cli.app, ["replay", str(traces), "--ledger", str(traces.parent / "ledger"), *panel, *more])


@symptom("`stopped: budget:`")
def test_a_budget_that_the_first_call_might_pass(quoted, traces):
    with BadServer() as server:
        prices = [word for name in "ab" for word in ("--price", f"m-{name}=1,1000")]
        result = asked(traces, server, "--budget-usd", "0.5", *prices)
        assert result.exit_code == 3 and not server.requests
    is_quoted(quoted, result.stderr)


@symptom("`answered where`")
def test_another_model_answers(quoted, traces):
    with BadServer(lambda request: Reply(body=completion("another-model", "done"))) as server:
        result = asked(traces, server)
    is_quoted(quoted, result.stderr)


# Training

SMALL = {"max_steps": "1", "save_steps": "1", "train_rows": "8", "beta_replay": "0", "replay_pairs": "null", "max_turns": "1",
         "max_completion_length": "64", "gradient_accumulation_steps": "1"}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@symptom("`is not finite at step`")
def test_a_loss_that_is_not_finite(quoted, tmp_path):
    from composer_replication import ComposerReplicationTrainer, make_po_config
    from composer_replication.envs.toy.env import WorldEnv, world_rows

    class Spoiled(ComposerReplicationTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["advantages"][:] = float("nan")
            return output

    config = make_po_config("dr_grpo", output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=4,
                            max_completion_length=64, max_turns=1, use_cpu=True, bf16=False, gradient_checkpointing=False,
                            report_to="none", disable_tqdm=True)
    trainer = Spoiled(embedded_model(), None, config, Dataset.from_list(world_rows(4, seed=0)), environment_factory=WorldEnv,
                      processing_class=embedded_tokenizer(), hint_source=default_composite())
    with pytest.raises(NonFiniteLoss) as found:
        trainer.train()
    is_quoted(quoted, found.value)
    assert list(tmp_path.glob("not-finite-*"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "The output folder of a run of one step."
    folder = tmp_path_factory.mktemp("trained") / "out"
    run_recipe(load_recipe("toy", SMALL | {"output_dir": str(folder)}))
    return folder


@symptom("`belongs to an earlier run`")
def test_a_folder_that_holds_a_run(quoted, trained, monkeypatch, capsys):
    settings = [word for key, value in (SMALL | {"output_dir": str(trained)}).items() for word in ("--set", f"{key}={value}")]
    code, said = command("train", "--config", "toy", *settings, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1
    is_quoted(quoted, said)


def resumed_alone(trained, folder, **changed):
    "What is said of a checkpoint that two processes wrote."
    shutil.copytree(trained, folder)
    [path] = folder.glob("checkpoint-*/composer-rank0.pt")
    state = load_buffer(path)
    for rank in (0, 1):
        save_buffer(path.with_name(f"composer-rank{rank}.pt"), state | {"processes": 2} | changed)
    mark_complete(path.parent)
    with pytest.raises(ValueError) as found:
        run_recipe(load_recipe("toy", SMALL | {"output_dir": str(folder), "max_steps": "2", "resume": "true"}))
    return found.value


@symptom("`is no longer the`")
def test_a_checkpoint_of_more_processes(quoted, trained, tmp_path):
    is_quoted(quoted, resumed_alone(trained, tmp_path / "out", passes={}))


@symptom("`was saved within a generation that`")
def test_a_checkpoint_within_a_generation_of_more_processes(quoted, trained, tmp_path):
    is_quoted(quoted, resumed_alone(trained, tmp_path / "out", buffer=[{}]))


def refusal_of_sharded_weights(version):
    config = load_recipe("qwen3-8b-fsdp2", {"alpha_sdpo": "1.0", "task": "toy"}, estimating=True).config
    config.fsdp_config["version"] = version
    with pytest.raises(ValueError) as found:
        prepare(config, embedded_tokenizer(), True, hint_source=default_composite())
    return found.value


@symptom("`with weights sharded by ZeRO-3 or FSDP1")
def test_old_sharding_with_a_channel_on(quoted):
    is_quoted(quoted, refusal_of_sharded_weights(1))


@symptom("`does not work with sharded weights (FSDP2)")
def test_a_setting_that_sharded_weights_do_not_know(quoted):
    is_quoted(quoted, refusal_of_sharded_weights(2))


# The ladder

@symptom("`device 'cuda' is asked for")
def test_no_gpu(quoted, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, said = command("ladder", "--device", "cuda", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1 and not list(tmp_path.iterdir())
    is_quoted(quoted, said)


@symptom("`is no result of a run`")
def test_a_result_that_is_damaged_or_anothers(quoted, tmp_path):
    assert len(quoted) == 2
    setting, path = Setting(steps=1, measure_every=1), tmp_path / "result.json"
    curve = [dict.fromkeys(Measurement.__dataclass_fields__) | {"step": step, "passed": [0]} for step in (0, 1)]
    steps = [dict.fromkeys(TrainingStep.__dataclass_fields__) | {"step": 1}]
    other = asdict(RunResult(asdict(setting), 1, ["a-task"], curve, steps, {}, {}, {}, 0.0))  # of seed 1
    job = Job(setting, 0)
    for content, text in (("{", quoted[0]), (json.dumps(other), quoted[1])):
        path.write_text(content)
        with pytest.raises(InputProblem) as found:
            read_result(tmp_path, job)
        is_quoted([text], found.value)


# Sandboxes

@symptom("`no isolation:`")
def test_no_bubblewrap(quoted, tmp_path, monkeypatch):
    monkeypatch.setattr("composer_replication.sandbox.bubblewrap.bubblewrap_problem", lambda: "bubblewrap is not installed.")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        open_sandbox(tmp_path).close()
    is_quoted(quoted, [str(w.message) for w in found])


@symptom("`which is not in the store`")
def test_a_task_of_another_machine(quoted, tmp_path):
    task = read_tasks(ROOT / "composer_replication/data/repos/larder.tasks.jsonl")[0]
    with pytest.raises(SubjectProblem) as found:
        subject_of(replace(task, repo="elsewhere", base_commit="sha256:" + 64 * "0"), tmp_path)
    is_quoted(quoted, found.value)
