"One run of one arm: the same numbers after any kill, fair between arms, and one sentence for every damaged file."
import json
import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import arm_script
import pytest
import torch
from arm_script import BOTH, COMPONENTS, MOMENTS
from forks import SERVER
from played import played_once
from ranks import processes
from trainer_script import make

from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.env import WorldEnv, world_rows
from composer_replication.envs.toy.model import embedded_model
from composer_replication.experiments.arm import run_arm
from composer_replication.experiments.setting import RunResult, Setting

SMALL = Setting(turns=1, steps=1, tasks=1, rollouts=2, held_out=2, measure_every=1)


FEW = ("saving", "playing step 3")  # within the first checkpoint, and after it


def played(folder, moments, more=()):
    "How the processes ended: for each moment a run that was killed there, and the one that went on with it."
    jobs = list(more)
    for moment in moments:
        jobs += [{"folder": str(folder / moment), "moment": moment}, {"folder": str(folder / moment)}]
    with processes() as begun:
        begun.append(SERVER.Process(target=arm_script.main, args=(jobs, folder / "codes")))
        begun[0].start()
        begun[0].join(900)
        assert begun[0].exitcode == 0
    return json.loads((folder / "codes").read_text())


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    "Where each run lies, and how its processes ended: one whole run, one killed at each of few moments and gone on with."
    folder = tmp_path_factory.mktemp("killed")
    return folder, played(folder, FEW, [{"folder": str(folder / "whole")}])


def numbers(folder):
    return RunResult(**json.loads((folder / "result.json").read_text())).numbers()


def told(folder):
    "Steps that a run's processes reported, in order."
    lines = [json.loads(line) for line in Path(f"{folder}.told").read_text().splitlines()]
    return [line["step"] for line in lines if "seconds" in line]


AGAIN = [1, 1, 2, 3]
STEPS = {"playing step 3": [1, 2, 3], "loss of step 2": AGAIN, "second measurement": AGAIN, "saving": [1, 2, 1, 2, 3],
         "marker": [1, 2, 1, 2, 3], "result": [1, 2, 3]}  # what a checkpoint holds is not computed again


def test_a_run_killed_at_a_moment_ends_where_it_would_have_ended(killed):
    folder, codes = killed
    assert codes == [0] + [-signal.SIGKILL, 0] * len(FEW)
    whole = numbers(folder / "whole")
    assert sum(step["sdpo_sites"] for step in whole["steps"]) and sum(step["replay_pairs"] for step in whole["steps"])
    assert whole["curve"][0]["entropy"] != whole["curve"][1]["entropy"] != whole["curve"][2]["entropy"]
    for moment in FEW:
        assert numbers(folder / moment) == whole and told(folder / moment) == STEPS[moment], moment
        assert [p.name for p in folder.glob(f"{moment}/checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.slow
def test_a_run_killed_at_any_moment_and_in_a_storm_ends_where_it_would_have_ended(killed, tmp_path):
    others = [moment for moment in MOMENTS if moment not in FEW]
    codes = played(tmp_path, others, [{"folder": str(tmp_path / "storm"), "storm": True}])
    assert codes == [0] + [-signal.SIGKILL, 0] * len(others)
    assert {moment: told(tmp_path / moment) for moment in others} == {moment: STEPS[moment] for moment in others}
    assert all(numbers(tmp_path / run) == numbers(killed[0] / "whole") for run in ("storm", *others))


def damaged(killed, tmp_path, name, change):
    "A copy of a run that ended, without its result unless that is what is damaged."
    folder = tmp_path / "run"
    shutil.copytree(killed[0] / "whole", folder)
    if name != "result.json":
        (folder / "result.json").unlink()
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    return folder


@pytest.mark.parametrize("name", ["result.json", "setting.json"])
def test_a_damaged_file_is_named_in_one_sentence(killed, tmp_path, name):
    folder = damaged(killed, tmp_path, name, lambda data: data[:20])
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as problem:
        run_arm(BOTH, 5, folder, components=COMPONENTS)
    assert "\n" not in str(problem.value) and str(problem.value).endswith(".")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_another_runs_folder_is_refused_with_or_without_its_result_and_names_the_difference(killed, tmp_path):
    def older(data):  # from before a setting existed
        claim = json.loads(data)
        del claim["setting"]["sdpo_steps"]
        return json.dumps(claim).encode()

    whole, before = killed[0] / "whole", damaged(killed, tmp_path, "setting.json", older)
    for folder, setting, seed, name in ((whole, BOTH, 6, "seed"), (whole, replace(BOTH, alpha_sdpo=0.5), 5, "alpha_sdpo"),
                                        (before, BOTH, 5, "sdpo_steps")):
        with pytest.raises(ValueError, match=rf"another setting or seed \(they differ in {name}\)"):
            run_arm(setting, seed, folder, components=COMPONENTS)


def test_a_checkpoint_cut_short_is_passed_over_and_the_numbers_stay(killed, tmp_path):
    folder = damaged(killed, tmp_path, "checkpoint-3/model.safetensors", lambda data: data[:-9])
    run_arm(BOTH, 5, folder, components=COMPONENTS)
    assert numbers(folder) == numbers(killed[0] / "whole")


class Seen(WorldEnv):
    "Writes down what it is reset to."

    log = []

    def reset(self, seed, **row):
        self.log.append(seed)
        super().reset(seed=seed, **row)


def test_arms_of_a_seed_see_the_same_tasks_and_start_from_the_same_numbers(tmp_path):
    seen, results = {}, {}
    shared = replace(SMALL, steps=2, tasks=2)
    for name, setting in {"A0": replace(SMALL, steps=0), "A1": shared, "A2": replace(shared, alpha_sdpo=1.0)}.items():
        Seen.log = []
        results[name] = run_arm(setting, 2, tmp_path / name, components=replace(COMPONENTS, environment=Seen))
        seen[name] = [sorted(Seen.log[a:b]) for a, b in pairwise((0, 2, 6, 8, 12, 14, None))]  # resets run side by side
    assert seen["A1"] == seen["A2"]  # three measurements of two, between them two steps of two by two
    assert [len(block) for block in seen["A1"]] == [2, 4, 2, 4, 2, 0]
    training = seen["A1"][1] + seen["A1"][3]
    assert training == [s for s in dict.fromkeys(training) for _ in range(2)] and len(set(training)) == 4
    plain = lambda point: {k: v for k, v in point.items() if k != "seconds"}
    assert plain(results["A0"]["curve"][0]) == plain(results["A1"]["curve"][0]) == plain(results["A2"]["curve"][0])
    assert [p["generations"] for p in results["A1"]["curve"]] == [p["generations"] for p in results["A2"]["curve"]] == [0, 4, 8]
    assert results["A1"]["steps"][0]["reward"] == results["A2"]["steps"][0]["reward"]
    assert results["A1"]["steps"][0]["tokens"] == results["A2"]["steps"][0]["tokens"] == results["A1"]["curve"][1]["tokens"]
    assert [step["sdpo_sites"] > 0 for step in results["A2"]["steps"]] == [True, True]
    assert results["A1"]["curve"][2]["entropy"] != results["A2"]["curve"][2]["entropy"]


def test_another_seed_draws_other_numbers_for_the_same_held_out_tasks(tmp_path):
    "Random weights, which sample every token alike: a shipped model says the same under most seeds."
    random_weights = replace(COMPONENTS, model=lambda habit: embedded_model(habit, pretrained=False))
    first, again, other = (run_arm(replace(SMALL, steps=0), seed, tmp_path / name, components=random_weights)
                           for name, seed in (("first", 2), ("again", 2), ("other", 3)))
    assert first["task_ids"] == again["task_ids"] == other["task_ids"]
    assert first["curve"][0]["entropy"] == again["curve"][0]["entropy"] != other["curve"][0]["entropy"]


def test_another_series_of_held_out_tasks_has_none_of_the_first(tmp_path):
    setting = replace(SMALL, habit="teams", steps=0, held_out=3)
    first, second = (run_arm(replace(setting, held_out_series=series), 0, tmp_path / series) for series in ("held-out", "second"))
    assert [name.rsplit("-", 1)[0] for name in second["task_ids"]] == ["test-teams-second"] * 3
    asked = [[row["prompt"] for row in world_rows(3, f"teams-{series}", "test")] for series in ("held-out", "second")]
    assert not any(prompt in asked[0] for prompt in asked[1]) and len(first["curve"][0]["passed"]) == 3


class Fails(WorldEnv):
    "Every second one cannot say what was earned."

    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.number = self.made

    def reward(self, answer=""):
        if self.number % 2:
            raise OSError("no disk")
        return 1.0


def test_what_the_machinery_failed_in_is_counted_and_never_a_zero(tmp_path):
    result = run_arm(SMALL, 0, tmp_path, components=replace(COMPONENTS, environment=Fails))
    for point in result["curve"]:
        assert point["passed"] == [None, 1] and point["endings"]["error"] == 1
    assert (result["steps"][0]["unscored"], result["steps"][0]["reward"]) == (1, 1.0)


class Solved(WorldEnv):
    "Every episode has passed."

    def reward(self, answer=""):
        return 1.0


def test_imitation_learns_from_episodes_that_all_passed_and_the_policy_objective_does_not(tmp_path):
    from safetensors.torch import load_file
    moved = {}
    for imitate in (False, True):
        setting = replace(SMALL, steps=2, rollouts=2, measure_every=1, imitate=imitate, learning_rate=1e-2)
        run_arm(setting, 0, tmp_path / str(imitate), components=replace(COMPONENTS, environment=Solved))
        end = load_file(tmp_path / str(imitate) / "checkpoint-2" / "model.safetensors")
        start = embedded_model("strong").state_dict()
        moved[imitate] = max((end[name] - start[name]).abs().max().item() for name in end)
    assert moved[False] == 0 and moved[True] > 1e-4


@pytest.mark.parametrize("values, name", [
    (dict(habit="teams", beta_replay=0.1, teachers="poor"), "teachers"),
    (dict(habit="teams", beta_replay=0.1, teachers="fair"), "teachers"), (dict(beta_replay=0.1, teachers="recovery"), "teachers"),
    (dict(habit="teams", alpha_sdpo=0.1), "hints"), (dict(alpha_sdpo=0.1, hints="shuffled"), "hints")])
def test_what_belongs_to_another_world_is_refused_where_it_is_used(values, name):
    with pytest.raises(InputProblem, match=f"{name}='.*' does not belong to the world of habit="):
        Setting(**values)
    Setting(**values | {"alpha_sdpo": 0.0, "beta_replay": 0.0})


def test_the_agent_of_the_teams_acts_in_their_world(tmp_path):
    setting = replace(SMALL, habit="teams", turns=3, tasks=2, rollouts=4, hints="exact", alpha_sdpo=0.1, beta_replay=0.1)
    result = run_arm(setting, 0, tmp_path)
    assert all(name.startswith("test-teams-held-out") for name in result["task_ids"])
    assert result["steps"][0]["sdpo_sites"] and result["preparation"]["replay_pairs"]


def test_a_signal_leaves_a_checkpoint_and_no_result(tmp_path):
    stop = lambda said: said["step"] == 1 and os.kill(os.getpid(), signal.SIGTERM)
    setting = replace(SMALL, steps=3, measure_every=3, alpha_sdpo=1.0)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="of 3; run again"):
        run_arm(setting, 0, tmp_path / "a", stop, components=COMPONENTS)
    assert signal.getsignal(signal.SIGTERM) == before and not (tmp_path / "a" / "result.json").exists()
    assert list((tmp_path / "a").glob("checkpoint-*"))
    run_arm(setting, 0, tmp_path / "a", components=COMPONENTS)
    run_arm(setting, 0, tmp_path / "b", components=COMPONENTS)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


def test_two_steps_on_each_generation(tmp_path):
    result = run_arm(replace(SMALL, steps=3, iterations=2, alpha_sdpo=1.0), 0, tmp_path, components=COMPONENTS)
    assert [p["generations"] for p in result["curve"]] == [0, 2, 2, 4]
    assert [step["reward"] is None for step in result["steps"]] == [False, True, False] and result["steps"][1]["tokens"] == 0


@pytest.mark.parametrize("scene", ["all", pytest.param("two", marks=pytest.mark.slow)])
def test_sorted_rows_make_the_same_step_but_for_rounding(tmp_path, scene):
    moved = {}
    for ordered in (False, True):
        trainer = make(scene, tmp_path / str(ordered), sort_by_length=ordered, max_steps=1, optim="sgd", max_grad_norm=0.0,
                       save_strategy="no", max_turns=2, max_completion_length=160, gradient_accumulation_steps=2,
                       seed=5, learning_rate=1.0)  # so large that the float32 of a parameter rounds no change away
        start = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        played_once(trainer).train()
        moved[ordered] = {n: p.detach() - start[n] for n, p in trainer.model.named_parameters()}
        masks = [torch.cat([b["prompt_mask"], b["completion_mask"]], 1) for b in trainer._buffered_inputs]
        lengths = torch.cat([m.sum(1) for m in masks[:2]])  # of one optimizer step
        assert (lengths.diff() <= 0).all() == ordered
        assert not ordered or all(m.any(0).all() for m in masks)  # no column is padding throughout
    assert any(change.abs().max() > 1e-6 for change in moved[False].values())
    for name, change in moved[False].items():
        assert (moved[True][name] - change).norm() <= 1e-4 * change.norm(), name


def test_the_learning_rate_rises_to_its_value_so_that_the_first_gradient_decides_nothing(tmp_path):
    run_arm(replace(SMALL, steps=6, measure_every=6, learning_rate=1e-3, alpha_sdpo=1.0), 0, tmp_path, components=COMPONENTS)
    logged = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert [e["learning_rate"] for e in logged if "learning_rate" in e] == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("teacher, checkpointing", [("frozen", False), ("live", True)])  # live: on the shared pass's cache
def test_prompts_read_once_make_the_same_step_but_for_rounding(tmp_path, teacher, checkpointing):
    moved, read = {}, {}
    for shared in (False, True):
        trainer = make("all", tmp_path / str(shared), share_prompts=shared, teacher=teacher, sort_by_length=True, max_steps=1,
                       optim="sgd", max_grad_norm=0.0, save_strategy="no", max_turns=2,
                       max_completion_length=160, seed=5, learning_rate=1.0, gradient_checkpointing=checkpointing)
        tokens, start = Counter(), {n: p.detach().clone() for n, p in trainer.model.named_parameters()}

        def count(module, args, out, tokens=tokens):  # without gradient: of the policy that sampled, of the reference
            tokens["trained" if torch.is_grad_enabled() else "read"] += args[0].numel()

        with trainer.reference.using() as (reference,):
            for model in (trainer.model, reference):
                model.base_model.embed_tokens.register_forward_hook(count)
        played_once(trainer).train()
        moved[shared] = {n: p.detach() - start[n] for n, p in trainer.model.named_parameters()}
        read[shared] = tokens
    saved = read[False] - read[True]
    assert saved["trained"] > 0 and saved["read"] > saved["trained"]
    for name, change in moved[False].items():
        assert change.norm() and (moved[True][name] - change).norm() <= 1e-4 * change.norm(), name
