"Episodes to look at: every number against a plain forward pass of text rendered anew, and a ladder's folder, whole and damaged."
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file

from composer_replication.envs.toy.env import WorldEnv, make_world, world_rows
from composer_replication.envs.toy.model import build_model, embedded_tokenizer
from composer_replication.experiments import episodes
from composer_replication.experiments.arm import Components, run_arm
from composer_replication.experiments.episodes import SHOWN, episode_view, final_policy, ladder_episodes, play_views, task_view
from composer_replication.experiments.evaluate import episode_limits
from composer_replication.experiments.ladder import arm_setting
from composer_replication.experiments.schedule import Job
from composer_replication.experiments.setting import Setting
from composer_replication.hints.layers import default_composite
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy, TransformersPolicy
from composer_replication.traces.error_sites import find_error_sites

TOKENIZER = embedded_tokenizer()
SCRIPT = ('<|call|>{"name": "no_such_tool", "arguments": {"path": "."}}<|end|>',
          '<|call|>{"name": "LIST", "arguments": {"no": 1}}<|end|>',
          '<|call|>{"name": "LIST", "arguments": {"path" "."}}<|end|>', "Done.<|end|>")


def model_of(seed=0):
    return build_model(len(TOKENIZER), seed).eval()


def scripted(row):
    "A policy that says the lines of `SCRIPT`, with the log-prob -0.5 for every token."
    listing = next(t.name for t in make_world(row["seed"], row["split"]).tools if t.role == "list")

    def generate(ids, sampling, limits, seeds):
        turns = [i.count(TOKENIZER.convert_tokens_to_ids("<|assistant|>")) - 1 for i in ids]
        said = [TOKENIZER(SCRIPT[t].replace("LIST", listing), add_special_tokens=False)["input_ids"] for t in turns]
        return said, [[-0.5] * len(s) for s in said]

    return CallablePolicy(generate, TOKENIZER)


@pytest.fixture(scope="module")
def slips():
    "An episode of four turns, three of them errors: the rollout, its view, and the model that reads the hints."
    row, model = world_rows(1, "slips", "test")[0], model_of()
    rollout = collect(scripted(row), WorldEnv, [row], episode_limits(8, 0))[0]
    return rollout, episode_view(rollout, task_view(row), TransformersPolicy(model, TOKENIZER), "A1", "first"), model


def plainly(model, context, said):
    "The next-token distribution before each token of `said`, by one pass without a cache for each."
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([[*context, *said[:i]]]), use_cache=False).logits[0, -1].softmax(-1)
                            for i in range(len(said))])


def rendered(trace, turn, hint=None):
    "The context before a turn, as the chat template alone makes it."
    messages = trace.to_messages()[:turn]
    if hint:
        messages[-1]["content"] += f"\n\n{hint}"
    return TOKENIZER.apply_chat_template(messages, tools=list(trace.tools), add_generation_prompt=True)["input_ids"]


def test_hinted_probabilities_are_those_of_a_plain_pass_over_text_rendered_anew(slips):
    rollout, view, model = slips
    sites = {s.turn: s for s in reversed(find_error_sites(rollout.trace))}
    shown = dict(zip([i for i, t in enumerate(rollout.trace.turns) if t.role in ("assistant", "tool")], view.turns, strict=True))
    assert [sites[i].kind for i in sorted(sites)] == ["tool_not_found", "type_error", "json_decode"]
    for place, site in sites.items():
        turn, said = shown[place], rollout.trace.turns[place].token_ids
        hint = default_composite().hint(rollout.trace, site)
        assert (turn.error, turn.hint.text, turn.hint.layer, turn.unhinted) == (site.kind, hint.text, hint.layer, "")
        assert shown[site.evidence_turn].error == site.kind and shown[site.evidence_turn].role == "tool"
        plain, told = (plainly(model, rendered(rollout.trace, place, text), said) for text in (None, hint.text))
        want = told[range(len(said)), list(said)]
        torch.testing.assert_close(torch.tensor([t.hinted for t in turn.tokens]), want, rtol=1e-4, atol=1e-7)
        distance = (plain - told).abs().sum(-1) / 2
        assert turn.hint.at == int(distance.argmax()) and math.isclose(turn.hint.distance, distance.max().item(), rel_tol=1e-4)
        likely = {i for p in (plain, told) for i in p[turn.hint.at].topk(SHOWN).indices.tolist()}
        assert Counter(text for text, _, _ in turn.hint.alternatives) == Counter(TOKENIZER.decode([i]) for i in likely)
        found = torch.tensor(sorted(pair[1:] for pair in turn.hint.alternatives))
        want = torch.tensor(sorted((plain[turn.hint.at, i].item(), told[turn.hint.at, i].item()) for i in likely))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-7)
        best = [max(p, q) for _, p, q in turn.hint.alternatives]
        assert best == sorted(best, reverse=True)


def test_recorded_probabilities_and_texts_are_kept(slips):
    rollout, view, _ = slips
    assert {t.probability for turn in view.turns for t in turn.tokens} == {math.exp(-0.5)}
    assert [turn.role for turn in view.turns] == ["assistant", "tool"] * 3 + ["assistant"]
    assert "".join(t.text for t in view.turns[-1].tokens) == "Done.<|end|>" and view.turns[-1].text == "Done."
    assert (view.turns[-1].error, view.turns[-1].hint, view.reward, view.ending) == (None, None, 0.0, "done")
    assert view.turns[1].text.startswith("Tool 'no_such_tool' not found") or "no_such_tool" in view.turns[1].text


def test_a_turn_without_a_hint_says_why(slips, monkeypatch):
    rollout, view, model = slips
    with pytest.raises(ValueError, match="^hint quality 'loud' is unknown"):
        episode_view(rollout, view.task, TransformersPolicy(model, TOKENIZER), "A1", "first", "loud")
    monkeypatch.setattr("composer_replication.experiments.episodes.world_hints", lambda quality: lambda kind, meta: None)
    bare = episode_view(rollout, view.task, TransformersPolicy(model, TOKENIZER), "A1", "first")
    assert [t.unhinted for t in bare.turns if t.role == "assistant"] == ["no layer had a hint"] * 3 + [""]
    assert all(t.hint is None and t.error for t in bare.turns[:6])
    assert all(t.hinted is None for turn in bare.turns for t in turn.tokens)


def test_sampled_probabilities_are_the_models():
    rows, model, limits = world_rows(2, "sampled", "test"), model_of(3), replace(episode_limits(2, 5), max_turn_tokens=24)
    views = play_views(model, TOKENIZER, rows, limits, "A0", "first", ["a", "b"])
    rollouts = collect(TransformersPolicy(model, TOKENIZER), WorldEnv, rows, limits, trace_ids=["a", "b"])
    for view, rollout in zip(views, rollouts, strict=True):
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        with torch.no_grad():
            chances = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        mask = [0] * len(rollout.prompt_ids) + list(rollout.completion_mask)
        want = [chances[i - 1, ids[i]].item() for i in range(len(ids)) if mask[i]]
        found = [t.probability for turn in view.turns for t in turn.tokens]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-4, atol=1e-7)


def test_the_task_is_what_the_agent_finds():
    for row in world_rows(5, "tasks", "dev"):
        view, task = task_view(row), make_world(row["seed"], row["split"])
        assert (view.task_id, view.prompt, dict(view.files)) == (row["task_id"], row["prompt"][-1]["content"], task.files)
        system = TOKENIZER.apply_chat_template(row["prompt"], tools=[t.schema for t in task.tools], tokenize=False)
        assert all(f"\n{line}" in system for line in view.tools) and len(view.tools) == len(task.tools) == 4


def test_an_episode_that_was_not_played_is_shown_as_such(monkeypatch):
    def broken(self, **row):
        raise OSError("disk")
    rows, task = world_rows(1, "broken", "test"), task_view(world_rows(1, "broken", "test")[0])
    monkeypatch.setattr("composer_replication.experiments.episodes.task_view", lambda row: task)
    monkeypatch.setattr(WorldEnv, "reset", broken)
    view, = play_views(model_of(), TOKENIZER, rows, episode_limits(2, 0), "A0", "first", ["a"])
    assert (view.turns, view.reward, view.ending, view.problem) == ((), None, "error", "reset raised OSError: disk")


# ---- a ladder's folder

SMALL = Setting(turns=2, steps=2, tasks=1, rollouts=2, held_out=3, learning_rate=0.01,
                held_out_series="second")


def model_that_learns(habit):
    return model_of(7)


class Uneven(WorldEnv):
    "The world, with a reward that differs between episodes, so that there is something to learn."
    rewards = cycle((0.0, 1.0))

    def reward(self, answer=""):
        return next(self.rewards)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    "A ladder's folder with one finished run of A1, and the run's folder."
    out, job = tmp_path_factory.mktemp("ladder"), Job(arm_setting("A1", SMALL), 4)
    run_arm(job.setting, job.seed, out / "runs" / job.name, components=Components(environment=Uneven, model=model_that_learns))
    return out, job


def test_a_ladders_arms_are_played_again_as_they_were_measured(finished):
    out, job = finished
    views = ladder_episodes(out, SMALL, ["A0", "A1"], 4, range(3), model_that_learns)
    assert [(v.arm, v.attempt) for v in views] == [("A0 base", "before training")] * 3 + [
        ("A1 policy only", "before training")] * 3 + [("A1 policy only", "after training")] * 3
    result = json.loads((out / "runs" / job.name / "result.json").read_text())
    assert [v.task.task_id for v in views[:3]] == result["task_ids"]
    for point, part in ((result["curve"][0], views[3:6]), (result["curve"][-1], views[6:])):
        assert Counter(v.ending for v in part) == point["endings"]
        assert sum(t.role == "assistant" for v in part for t in v.turns) / 3 == point["turns"]
    model = model_of()
    weights = load_file(out / "runs" / job.name / "checkpoint-2" / "model.safetensors")
    assert not model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False).unexpected_keys
    names = [f"held-out-{i}" for i in range(3)]
    again = play_views(model, TOKENIZER, world_rows(3, "second", "test"), episode_limits(2, 4), "A1 policy only",
                       "after training", names)
    assert again == views[6:] and views[6].turns != views[3].turns
    some = ladder_episodes(out, SMALL, ["A1"], 4, [2], model_that_learns)
    assert [[t.text for t in v.turns] for v in some] == [[t.text for t in views[i].turns] for i in (5, 8)]


def test_the_ladders_own_hints_are_shown(monkeypatch, tmp_path):
    asked, hints = set(), episodes.world_hints
    monkeypatch.setattr(episodes, "world_hints", lambda quality: asked.add(quality) or hints(quality))
    ladder_episodes(tmp_path, replace(SMALL, hints="vague", turns=1), ["A0"], 0, [0], model_that_learns)
    assert asked == {"vague"}
    asked.clear()
    ladder_episodes(tmp_path, replace(SMALL, turns=1, steps=0), ["A2f", "A2"], 0, [0], model_that_learns)
    assert "filler" in asked and SMALL.hints in asked  # each arm beside what it was trained with


def copied(finished, tmp_path):
    out, job = finished
    shutil.copytree(out, tmp_path / "out")
    return tmp_path / "out", job, tmp_path / "out" / "runs" / job.name


def test_damage_in_a_runs_folder_is_one_sentence(finished, tmp_path):
    out, job, run = copied(finished, tmp_path)
    weights = run / "checkpoint-2" / "model.safetensors"
    whole = weights.read_bytes()

    def sentence():
        with pytest.raises(ValueError) as problem:
            final_policy(out, job, model_that_learns)
        said = str(problem.value)
        assert said.endswith(".") and "\n" not in said
        return said

    weights.write_bytes(whole[:200] + b"\xff" + whole[201:])
    assert "cannot be read as a model" in sentence()
    weights.write_bytes(whole[:-1])
    assert "holds no finished run with its checkpoint-2" in sentence()
    weights.write_bytes(whole)
    (run / "checkpoint-2").rename(run / "checkpoint-3")
    assert "holds no finished run with its checkpoint-2" in sentence()
    (run / "checkpoint-3").rename(run / "checkpoint-2")
    assert final_policy(out, job, model_that_learns)
    (run / "result.json").rename(run / "kept.json")
    assert "holds no finished run with its checkpoint-2" in sentence()
    result = json.loads((run / "kept.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"seed": 5}))
    assert "belongs to another setting or seed" in sentence()
    with pytest.raises(ValueError, match="holds no finished run"):
        ladder_episodes(out, SMALL, ["A1"], 6, [0], model_that_learns)
