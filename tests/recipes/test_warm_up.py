"""The warm-up of a recipe: what it is trained on, that runs share it, that a kill loses little, and that a mistake is told."""
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from composer_replication.envs.sql.agents import demonstrations, hinted_demonstrations
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import task_of
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes import warm_up
from composer_replication.recipes.recipe import RecipeProblem, load_recipe
from composer_replication.recipes.run import run_recipe, warmed
from composer_replication.tree.template import probe_template

SMALL = dict(model="embedded", task="sql", tasks="easy", train_rows=4, max_steps=1, per_device_train_batch_size=4,
             num_generations=2, max_completion_length=96, max_turns=2, max_turn_tokens=32, use_cpu=True, bf16=False,
             gradient_checkpointing=False, report_to="none", logging_steps=1, save_strategy="no", hints=["sql"],
             detectors=["wrong_result"])


def recipe(folder, **values):
    stage = dict(folder=str(folder / "warm"), demonstrations=4, steps=2, batch_size=2) | values.pop("stage", {})
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(SMALL | dict(output_dir=str(folder / "out"), warm_up=stage) | values))
    return load_recipe(path)


def test_only_what_the_assistant_wrote_is_trained_on():
    tokenizer, traces = embedded_tokenizer(), demonstrations(6, "labels", ("hard",))
    rows = warm_up.supervised_rows(traces, probe_template(tokenizer))
    for trace, row in zip(traces, rows):
        learnt = tokenizer.decode([i for i in row["labels"] if i != -100])
        assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))
        for turn in trace.turns:
            for call in turn.tool_calls:
                assert call.name in learnt and all(str(v) in learnt for v in call.arguments.values())
            if turn.role in ("system", "user"):
                assert turn.content not in learnt


def test_behind_a_hint_the_right_action_alone_is_learned():
    tokenizer, hinted = embedded_tokenizer(), hinted_demonstrations(24, "labels", ("easy", "medium", "hard"))
    rows = warm_up.supervised_rows([], probe_template(tokenizer), hinted)
    assert {trace.turns[-1].tool_calls[0].name for trace, _ in hinted} == {"tables", "describe", "query"}
    for (trace, hint), row in zip(hinted, rows, strict=True):
        learnt = tokenizer.decode([i for i in row["labels"] if i != -100])
        told = tokenizer.decode([i for i, label in zip(row["input_ids"], row["labels"]) if label == -100])
        call, = trace.turns[-1].tool_calls
        assert call.name in learnt and hint in told and hint not in learnt
        assert row["labels"][0] == -100 and row["labels"][-1] == row["input_ids"][-1]


def test_the_right_action_is_right():
    for trace, _ in hinted_demonstrations(12, "right", ("easy", "medium")):
        env = SqlEnv()
        env.reset(trace.task_id)
        for turn in trace.turns:
            for call in turn.tool_calls:
                assert not env.call(call).failed
        if trace.turns[-1].tool_calls[0].name == "query":
            assert env.reward() == 1 and trace.turns[-1].tool_calls[0].arguments["sql"] == task_of(trace.task_id).reference


def test_hints_are_part_of_what_a_warm_up_is_made_of(tmp_path):
    facts = [warm_up.warm_up_facts(made, warm_up.warm_up_settings(made.arguments.warm_up))
             for made in (recipe(tmp_path), recipe(tmp_path, stage={"hinted": 0}), recipe(tmp_path, stage={"hinted": 4}))]
    assert facts[0] == facts[1] and facts[2] == facts[0] | {"hinted": 4}


@pytest.mark.trainer
def test_a_warm_up_with_hints_trains(tmp_path):
    logged = []
    made = warmed(recipe(tmp_path, stage={"demonstrations": 2, "hinted": 4, "steps": 3}), logged.append)
    assert len([entry for entry in logged if "loss" in entry]) == 3 and made.arguments.model == str(tmp_path / "warm")


@pytest.mark.parametrize("values, said", [
    (dict(stage={"hinted": -1}), "hinted=-1 will not do"), (dict(stage={"hinted": True}), "hinted=True will not do"),
    (dict(task="toy", tasks=None, hints=["template"], detectors=None), "makes no demonstrations; take the task sql"),
    (dict(stage={"epochs": 2}), "warm_up has no 'epochs'; use folder, demonstrations, steps"),
    (dict(stage={"steps": 0}), "steps=0 will not do"), (dict(stage={"batch_size": 3}), "batch_size=3 is odd"),
    (dict(stage={"folder": ""}), "needs the folder"),
    (dict(tasks="simple"), "")])
def test_a_mistake_is_told_before_anything_runs(tmp_path, values, said):
    if said:
        with pytest.raises(RecipeProblem, match=said):
            recipe(tmp_path, **values)
    else:
        with pytest.raises(ValueError, match="'simple' is no level of them"):
            warmed(recipe(tmp_path, **values))
        assert not (tmp_path / "warm").exists()


@pytest.mark.trainer
def test_runs_share_the_checkpoint_and_others_are_refused(tmp_path):
    logged = []
    finished = run_recipe(recipe(tmp_path), logged.append)
    assert finished.step == 1 and [entry["step"] for entry in logged if entry.get("stage") and "loss" in entry] == [1, 2]
    first = (tmp_path / "warm" / "model.safetensors").stat().st_mtime_ns
    again = []
    other = warmed(recipe(tmp_path, seed=7), again.append)
    assert again == [] and other.arguments.model == str(tmp_path / "warm")
    assert (tmp_path / "warm" / "model.safetensors").stat().st_mtime_ns == first
    with pytest.raises(ValueError, match="was made with steps=2, not 3"):
        warmed(recipe(tmp_path, stage={"steps": 3}))
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "warm").state_dict()
    assert any(not torch.equal(value, moved[name]) for name, value in embedded_model().state_dict().items())
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.trainer
def test_two_bases_of_one_name_have_two_warm_ups(tmp_path):
    facts = []
    for base in ("a", "b"):
        folder = tmp_path / base / "checkpoint-30"
        embedded_model().save_pretrained(folder)
        embedded_tokenizer().save_pretrained(folder)
        made = recipe(tmp_path, model=str(folder))
        facts.append(warm_up.warm_up_facts(made, warm_up.warm_up_settings(made.arguments.warm_up)))
    assert {key for key in facts[0] if facts[0][key] != facts[1][key]} == {"model"}


def test_two_runs_that_begin_together_make_one_checkpoint(tmp_path, monkeypatch):
    made = []

    def make(recipe, settings, model, tokenizer, scratch, tell):
        made.append(scratch)
        time.sleep(1)
        return model

    monkeypatch.setattr(warm_up, "train_warm_up", make)
    mine, base = recipe(tmp_path), (embedded_model(), embedded_tokenizer())
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: warm_up.warm_up_checkpoint(mine, lambda: base), range(2)))
    assert len(made) == 1 and set(folders) == {tmp_path / "warm"} and (tmp_path / "warm" / "model.safetensors").exists()


def test_a_killed_stage_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_up, "KEPT", 1)
    whole = warmed(recipe(tmp_path, stage={"folder": str(tmp_path / "whole"), "steps": 3})).arguments.model

    def killed(logged):
        if logged["step"] == 2:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        warmed(recipe(tmp_path, stage={"steps": 3}), killed)
    logged = []
    again = warmed(recipe(tmp_path, stage={"steps": 3}), logged.append).arguments.model
    assert [entry["step"] for entry in logged if "loss" in entry] == [2, 3]
    mine, theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (again, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
