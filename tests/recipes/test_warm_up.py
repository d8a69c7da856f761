"""The warm-up of a recipe: what it is trained on, that runs share it, that a kill loses little, and that a mistake is told."""
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from composer_replication.core.files import write_jsonl
from composer_replication.envs.sql.agents import demonstrations, hinted_demonstrations
from composer_replication.envs.sql.env import SqlEnv
from composer_replication.envs.sql.tasks import task_of
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes import warm_up
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.recipes.run import run_recipe
from composer_replication.recipes.stages import warm_up_data, warmed
from composer_replication.recipes.tasks import recipe_tasks
from composer_replication.training.checkpoint import mark_complete
from composer_replication.tree.template import probe_template

SMALL = dict(model="embedded", task="sql", tasks="easy", train_rows=4, max_steps=1, per_device_train_batch_size=4,
             num_generations=2, max_completion_length=96, max_turns=2, max_turn_tokens=32, use_cpu=True, bf16=False,
             gradient_checkpointing=False, report_to="none", logging_steps=1, save_strategy="no", hints=["sql"],
             detectors=["wrong_result"])


def recipe(folder, **values):
    stage = dict(folder=str(folder / "warm"), demonstrations=4, steps=2, batch_size=2) | values.pop("stage", {})
    stage = {key: value for key, value in stage.items() if value is not None}
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


def facts_of(made):
    return warm_up.warm_up_facts(made, warm_up.warm_up_settings(made.arguments.warm_up))


def test_hints_and_the_base_are_part_of_what_a_warm_up_is_made_of(tmp_path):
    plain, none, some = (facts_of(recipe(tmp_path, stage=stage)) for stage in ({}, {"hinted": 0}, {"hinted": 4}))
    assert plain == none and some == plain | {"hinted": 4}
    for base in ("a", "b"):
        embedded_model().save_pretrained(tmp_path / base / "checkpoint-30")
    one, other = (facts_of(recipe(tmp_path, model=str(tmp_path / base / "checkpoint-30"))) for base in "ab")
    assert {key for key in one if one[key] != other[key]} == {"model"}


@pytest.mark.parametrize("values, said", [
    (dict(stage={"hinted": -1}), "hinted=-1 will not do"), (dict(stage={"hinted": True}), "hinted=True will not do"),
    (dict(task="toy", tasks=None, hints=["template"], detectors=None), "makes no demonstrations; name recorded episodes"),
    (dict(stage={"batch_size": 3}), "batch_size=3 is odd"),
    (dict(stage={"traces": ["mine.jsonl"]}), "names traces and demonstrations; name one"),
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
    finished = run_recipe(recipe(tmp_path, stage={"hinted": 2}), logged.append)
    assert finished.step == 1 and [entry["step"] for entry in logged if entry.get("stage") and "loss" in entry] == [1, 2]
    first = (tmp_path / "warm" / "model.safetensors").stat().st_mtime_ns
    again = []
    other = warmed(recipe(tmp_path, seed=7, stage={"hinted": 2}), again.append)
    assert again == [] and other.arguments.model == str(tmp_path / "warm")
    assert (tmp_path / "warm" / "model.safetensors").stat().st_mtime_ns == first
    with pytest.raises(ValueError, match="was made with other steps"):
        warmed(recipe(tmp_path, stage={"hinted": 2, "steps": 3}))
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "warm").state_dict()
    assert any(not torch.equal(value, moved[name]) for name, value in embedded_model().state_dict().items())
    assert not list(tmp_path.glob("*.partial"))


def recorded(folder, rewards):
    "A file of episodes of training tasks with these rewards."
    traces = [replace(trace, reward=reward) for trace, reward in zip(demonstrations(len(rewards), "own", ("easy",)), rewards)]
    write_jsonl(folder / "own.jsonl", (json.loads(trace.to_json()) for trace in traces))
    return {"demonstrations": None, "traces": [str(folder / "own.jsonl")]}, traces


def rows_of(made):
    settings = warm_up.warm_up_settings(made.arguments.warm_up)
    examples = warm_up.learnt_from(made, settings, *warm_up_data(made))
    return warm_up.stage_rows(made, probe_template(embedded_tokenizer()), *examples)


def test_hinted_demonstrations_are_learnt_beside_the_others(tmp_path):
    plain, more = (rows_of(recipe(tmp_path, stage={"hinted": count})) for count in (0, 3))
    assert len(plain) == 4 and more[:4] == plain and len(more) == 7


def test_own_episodes_that_passed_are_learnt_and_no_others(tmp_path):
    stage, traces = recorded(tmp_path, [1.0, 0.0, None, 0.5, 1.0])
    wanted = warm_up.supervised_rows([traces[0], traces[4]], probe_template(embedded_tokenizer()))
    assert rows_of(recipe(tmp_path, stage=stage)) == wanted
    assert len(rows_of(recipe(tmp_path, stage=stage | {"hinted": 3}))) == 5
    bare = dict(task=None, tasks=None, train_rows=1, hints=["template"], detectors=None, traces=["embedded"], alpha_sdpo=1.0)
    assert rows_of(recipe(tmp_path, stage=stage, **bare)) == wanted  # no environment with demonstrations


def test_none_that_passed_is_told_and_so_is_none_that_can_be_learnt(tmp_path):
    stage, _ = recorded(tmp_path, [0.0, None])
    with pytest.raises(ValueError, match="of 2 traces, 1 of them scored, none earned a reward of 1; name episodes that passed"):
        warmed(recipe(tmp_path, stage=stage))
    stage, _ = recorded(tmp_path, [1.0, 1.0])
    with pytest.raises(ValueError, match="2 of 2 episodes that passed cannot be learnt from; the first"):
        rows_of(recipe(tmp_path, stage=stage, max_trace_tokens=8))
    assert not (tmp_path / "warm").exists()


def test_an_episode_that_cannot_be_learnt_is_left_out_and_told(tmp_path):
    stage, traces = recorded(tmp_path, [1.0, 1.0])
    users = [json.loads(replace(trace, turns=trace.turns[:2]).to_json()) for trace in traces[1:]]
    write_jsonl(tmp_path / "own.jsonl", [json.loads(traces[0].to_json()), *users])
    with pytest.warns(UserWarning, match="1 of 2 episodes that passed cannot be .* no turn of the assistant"):
        assert len(rows_of(recipe(tmp_path, stage=stage))) == 1


def test_episodes_of_held_out_tasks_are_not_learnt(tmp_path):
    made = recipe(tmp_path, held_out_rows=2)
    row = recipe_tasks(made).held_out[0]
    stage, traces = recorded(tmp_path, [1.0, 1.0])
    traces[1] = replace(traces[1], task_id=row["task_id"])
    write_jsonl(tmp_path / "own.jsonl", [json.loads(trace.to_json()) for trace in traces])
    assert len(rows_of(recipe(tmp_path, held_out_rows=2, stage=stage))) == 1


def test_demonstrations_of_held_out_tasks_are_not_learnt(tmp_path, monkeypatch):
    made = recipe(tmp_path, held_out_rows=2)
    row = recipe_tasks(made).held_out[0]
    shown = demonstrations(2, "own", ("easy",))
    mixed = [shown[0], replace(shown[1], task_id=row["task_id"])]
    monkeypatch.setattr(SqlEnv, "demonstrations", staticmethod(lambda n, seed, tasks: mixed))
    assert rows_of(made) == warm_up.supervised_rows(shown[:1], probe_template(embedded_tokenizer()))
    monkeypatch.setattr(SqlEnv, "demonstrations", staticmethod(lambda n, seed, tasks: mixed[1:]))
    with pytest.raises(ValueError, match="every demonstration is of a held-out task"):
        rows_of(made)


def test_a_run_that_holds_out_what_a_kept_warm_up_learnt_is_refused(tmp_path, monkeypatch):
    row = recipe_tasks(recipe(tmp_path, held_out_rows=2)).held_out[0]
    shown = demonstrations(2, "own", ("easy",))
    monkeypatch.setattr(SqlEnv, "demonstrations", staticmethod(lambda *of: [shown[0], replace(shown[1], task_id=row["task_id"])]))
    monkeypatch.setattr(warm_up, "train_warm_up", lambda recipe, settings, model, *of: model)
    base = embedded_model(), embedded_tokenizer()

    def make(**values):
        made = recipe(tmp_path, **values)
        return warm_up.warm_up_checkpoint(made, lambda: base, lambda logged: None, *warm_up_data(made))
    assert make() == make() == tmp_path / "warm"
    with pytest.raises(ValueError, match="was made with other episodes"):
        make(held_out_rows=2)


@pytest.mark.trainer
def test_a_run_that_cannot_be_is_refused_before_its_warm_up(tmp_path):
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-1" / "weights").touch()
    mark_complete(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(RecipeProblem, match="belongs to an earlier run"):
        run_recipe(recipe(tmp_path))
    assert not (tmp_path / "warm").exists()


@pytest.mark.trainer
def test_other_episodes_in_the_file_make_another_warm_up(tmp_path):
    stage, _ = recorded(tmp_path, [1.0, 1.0])
    made = recipe(tmp_path, stage=stage)
    assert warmed(made).arguments.model == warmed(made).arguments.model == str(tmp_path / "warm")
    recorded(tmp_path, [1.0, 0.0])
    with pytest.raises(ValueError, match="was made with other episodes"):
        warmed(made)


def test_two_runs_that_begin_together_make_one_checkpoint(tmp_path, monkeypatch):
    made = []

    def make(recipe, settings, model, tokenizer, tell, shown, hinted):
        made.append(shown)
        time.sleep(0.3)
        return model

    monkeypatch.setattr(warm_up, "train_warm_up", make)
    mine, base = recipe(tmp_path), (embedded_model(), embedded_tokenizer())
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: warm_up.warm_up_checkpoint(mine, lambda: base), range(2)))
    assert len(made) == 1 and set(folders) == {tmp_path / "warm"} and (tmp_path / "warm" / "model.safetensors").exists()
