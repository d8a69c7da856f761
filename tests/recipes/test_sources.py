"""Recorded traces, pairs and hints by a recipe: offline steps against the harness, resuming, the command, refusals."""
import gzip
import json
import os
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
import yaml
from bad_server import BadServer, Reply, completion
from forks import composer

from composer_replication.core.errors import InputProblem
from composer_replication.core.pair import DPOPair
from composer_replication.core.trace import Segment, Turn
from composer_replication.envs.toy.env import world_rows
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_path, toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.losses.batch import ComposerDataCollator, TraceTurn
from composer_replication.losses.channels import reference_logps
from composer_replication.losses.compose import compose_loss
from composer_replication.recipes import run
from composer_replication.recipes.hint_models import judge_of
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.recipes.record import data_files
from composer_replication.recipes.run import make_trainer, run_recipe
from composer_replication.recipes.sources import pairs_as_traces, recipe_sources, recorded_traces, trace_paths
from composer_replication.replay.examples import place_pairs, read_pairs, write_pairs
from composer_replication.replay.pairs import free_pairs
from composer_replication.replay.teachers import TeacherProblem
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.traces.export import write_traces
from composer_replication.training.batches import NonFiniteLoss
from composer_replication.training.fit import model_config
from composer_replication.training.offline import OfflineTrainer
from composer_replication.training.running import RunTrainer
from composer_replication.tree import recorded
from composer_replication.tree.example import TraceExample
from composer_replication.tree.recorded import trace_limit

pytestmark = pytest.mark.trainer
OFFLINE = dict(
    model="embedded", traces=str(toy_path()), max_steps=2, learning_rate=1e-4, lr_scheduler_type="constant",
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", logging_steps=1, save_steps=1, replay_batch_size=3,
    beta_replay=0.5,
    replay_pairs=["siblings", "recovery"], hints=["template", "raw_error", "sibling"], disable_tqdm=True)


def write(folder, **values):
    path = folder / "offline.yaml"
    path.write_text(yaml.safe_dump(OFFLINE | dict(output_dir=str(folder / "out")) | values))
    return path


def trained(recipe):
    trainer = make_trainer(recipe)
    trainer.train(resume_from_checkpoint=True if recipe.arguments.resume else None)
    return trainer


class Started(Exception):
    "The training would begin now."


@pytest.mark.parametrize("settings", [
    {"warm_up": {"folder": "unused", "traces": [str(toy_path())]}}, {"task": "toy", "replay_pairs": ["siblings", "group"]}])
def test_a_start_builds_each_recorded_tree_once(settings, tmp_path, monkeypatch):
    built, build = Counter(), recorded.build_tree

    def counted(trace, *how, **more):
        built[trace.trace_id] += 1
        return build(trace, *how, **more)

    def train(trainer, *args, **others):
        assert {tree.trace_id for tree in trainer.setup.recorded} <= set(built)
        raise Started

    monkeypatch.setattr(recorded, "build_tree", counted)
    monkeypatch.setattr(run, "warmed", lambda recipe, tell: recipe)
    monkeypatch.setattr(RunTrainer, "train", train)
    with pytest.raises(Started):
        run_recipe(load_recipe(write(tmp_path, **settings)))
    assert len(built) > 8 and set(built.values()) == {1}


def test_an_offline_step_is_the_harness_loss_without_its_first_channel(tmp_path):
    source = default_composite()
    examples = []
    for trace, pairs in zip(traces := toy_traces()[:8], free_pairs(traces, ["siblings"])):
        hinted = [(site.turn, source.hint(trace, site)) for site in reversed(find_error_sites(trace))]
        turns = {turn: TraceTurn(turn, hint.text, hint.layer) for turn, hint in hinted if hint}
        examples.append(TraceExample(trace, tuple(turns[t] for t in sorted(turns)), tuple(pairs)))
    examples = [e for e in examples if e.turns or e.pairs]
    assert any(e.turns for e in examples) and any(e.pairs for e in examples)
    model = embedded_model()
    batch = reference_logps(model, ComposerDataCollator(embedded_tokenizer())(examples))
    parts = compose_loss(model, batch, alpha_sdpo=1.0, beta_replay=0.5)
    (parts.sdpo_jsd + 0.5 * parts.trace_replay_dpo).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    recipe = load_recipe(write(tmp_path, teacher="live", max_steps=1, replay_batch_size=len(examples), max_grad_norm=0.0,
                               save_strategy="no"))
    model, seen = embedded_model(), {}
    bare = [TraceExample(e.trace, pairs=e.pairs) for e in examples]
    trainer = OfflineTrainer(model, recipe.config, embedded_tokenizer(), source, traces=bare)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.clone()))
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["policy/loss"] == 0.0
    assert (logged["sdpo/sites"], logged["replay/pairs"]) == (batch.sites, batch.pairs)
    assert logged["sdpo/loss"] == pytest.approx(parts.sdpo_jsd.item(), rel=1e-4)
    assert logged["replay/loss"] == pytest.approx(parts.trace_replay_dpo.item(), rel=1e-4)
    largest = max(g.abs().max().item() for g in expected.values())
    assert largest > 0 and max((seen[n] - g).abs().max().item() for n, g in expected.items()) < 1e-5 * largest


def test_a_resumed_offline_run_is_the_unbroken_one(tmp_path):
    whole = trained(load_recipe(write(tmp_path, output_dir=str(tmp_path / "whole"))))
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "out" / "checkpoint-1")
    again = trained(load_recipe(write(tmp_path, resume=True)))
    assert again.state.global_step == 2 and any(entry["step"] == 1 for entry in again.state.log_history)
    for one, other in zip(whole.student.parameters(), again.student.parameters()):
        assert torch.equal(one, other)


def test_pairs_from_a_file_are_the_traces_own(tmp_path):
    traces = toy_traces()
    pairs = [pair for found in free_pairs(traces, ["siblings", "recovery"]) for pair in found]
    write_pairs(place_pairs(pairs, traces), tmp_path / "pairs.jsonl")
    rebuilt = pairs_as_traces(read_pairs(tmp_path / "pairs.jsonl"))
    assert sorted((p.trace_id, p.turn) for e in rebuilt for p in e.pairs) == sorted((p.trace_id, p.turn) for p in pairs)
    assert len(rebuilt) <= len({p.trace_id for p in pairs})
    collate = ComposerDataCollator(embedded_tokenizer())
    own = {t.trace_id: TraceExample(t, pairs=tuple(p for p in pairs if p.trace_id == t.trace_id)) for t in traces}
    original = {name: collate.tree(example) for name, example in own.items()}
    for example in rebuilt:
        tree, whole = collate.tree(example), original[example.trace.trace_id]
        assert sorted((b.turn, b.kind, b.ids) for b in tree.branches) == sorted((b.turn, b.kind, b.ids) for b in whole.branches)
        assert not tree.refused
    recipe = load_recipe(write(tmp_path, task="toy", traces=None, replay_pairs=str(tmp_path / "pairs.jsonl"), train_rows=8))
    assert sum(len(e.pairs) for e in recipe_sources(recipe).pairs) == len(pairs)


def test_a_pair_joins_its_trace_where_the_recipe_names_both_and_is_read_alike(tmp_path):
    traces = toy_traces()
    pairs = [pair for found in free_pairs(traces, ["siblings", "recovery"]) for pair in found]
    write_pairs(place_pairs(pairs, traces), tmp_path / "pairs.jsonl")
    own, both = (recipe_sources(load_recipe(write(tmp_path, replay_pairs=names)))
                 for names in (["siblings", "recovery"], [str(tmp_path / "pairs.jsonl")]))
    assert both.pairs == () and len(both.traces) == len(traces)
    collate = ComposerDataCollator(embedded_tokenizer())

    def branches(example):
        return sorted((b.turn, b.kind, b.ids) for b in collate.tree(example).branches)

    for one, other in zip(own.traces, both.traces):
        assert one.trace == other.trace and len(one.pairs) == len(other.pairs) and branches(one) == branches(other)


def test_a_rebuilt_trace_ends_with_what_the_trace_did_and_keeps_its_id(tmp_path):
    traces = [replace(trace, trace_id="one") for trace in (toy_traces()[0], toy_traces()[-1])]  # two contexts
    turns = [next(i for i, turn in enumerate(trace.turns) if i and turn.role == "assistant") for trace in traces]
    other = Turn("assistant", "I do not know.")
    agreed = [DPOPair("one", turn, trace.turns[turn], other, "student:2/3:cat", (2, 1)) for trace, turn in zip(traces, turns)]
    placed = [example for trace, pair in zip(traces, agreed) for example in place_pairs([pair], [trace])]
    write_pairs(placed, tmp_path / "pairs.jsonl")
    rebuilt = pairs_as_traces(read_pairs(tmp_path / "pairs.jsonl"))
    assert [e.trace.trace_id for e in rebuilt] == ["one", "one"]
    did = {trace.turns[turn].tool_calls[0].name for trace, turn in zip(traces, turns)}
    assert {e.trace.turns[-1].tool_calls[0].name for e in rebuilt} == did
    assert all([(p.trace_id, p.turn) for p in e.pairs] == [("one", len(e.trace.turns) - 1)] for e in rebuilt)


def test_traces_of_held_out_tasks_are_left_out(tmp_path):
    traces = toy_traces()
    held = [{"task_id": traces[0].task_id, "prompt": "another prompt"}]
    kept = recorded_traces([str(toy_path())], held)
    assert 0 < len(kept) < len(traces) and all(t.task_id != traces[0].task_id for t in kept)
    copied = [{"task_id": "another id", "prompt": [t.to_message() for t in traces[0].turns[:2]]}]
    assert traces[0].turns[2].role == "assistant"
    assert all(t.task_id != traces[0].task_id for t in recorded_traces([str(toy_path())], copied))
    whole = replace(traces[0], task_id=None, turns=(*traces[0].turns[:3], Turn("user", "Summary."), Turn("assistant", "Go on.")),
                    segments=(Segment((0, 1, 2), (2,)), Segment((3, 4), (4,))))  # a later context begins with a summary
    write_traces([whole], tmp_path / "served.jsonl")
    served = str(tmp_path / "served.jsonl")
    assert [len(t.turns) for t in recorded_traces([served])] == [3, 2]
    second = [{"task_id": "x", "prompt": [{"role": "user", "content": "Summary."}]}]
    for rows in (copied, second):
        with pytest.raises(InputProblem, match="1 traces were read, and 1 of them are of held-out tasks"):
            recorded_traces([served], rows)
    assert len(recorded_traces([served, str(toy_path())], copied)) == len(recorded_traces([str(toy_path())], copied))
    recipe = load_recipe(write(tmp_path, replay_pairs=["embedded"]))
    assert all(e.trace.task_id != traces[0].task_id for s in [recipe_sources(recipe, held)] for e in (*s.traces, *s.pairs))


@pytest.mark.parametrize("changes, said", [
    (dict(traces="nowhere/*.jsonl"), "traces: 'nowhere/\\*.jsonl' is no file, no folder and no pattern"),
    (dict(hints=["no_such_module:Layer"]), "'no_such_module' ended with ModuleNotFoundError"),
    (dict(hints=["judge"], hint_judge="gpt-x"), "OPENROUTER_API_KEY"),
    (dict(kl_coef=0.1), "kl_coef=0.1 measures rollouts, and recorded traces alone bring none; set it to 0"),
    (dict(max_trace_tokens=4), r"^all \d+ turns with a hint or a pair end beyond max_trace_tokens 4, the earliest at (\d+) "
                               r"tokens; raise max_trace_tokens to \1 or more; max_trace_tokens \d+ takes them all\.$"),
])
def test_what_cannot_be_learnt_from_is_one_sentence(tmp_path, monkeypatch, changes, said):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=said) as caught:
        make_trainer(load_recipe(write(tmp_path, **dict(beta_replay=0, replay_pairs=None) | changes)))
    assert "\n" not in str(caught.value)


def test_a_damaged_file_of_pairs_is_named(tmp_path):
    "Its first line tells pairs from traces; the damage may stand there."
    whole = gzip.compress(b'{"schema": "composer-replication/pairs/1"}' * 99, mtime=0)
    for cut in (whole[:40], whole[:12] + b"\xff\xff" + whole[14:], b"\x1f\x8b\x00" + whole[3:]):
        (tmp_path / "pairs.jsonl.gz").write_bytes(cut)
        with pytest.raises(InputProblem, match="pairs.jsonl.gz"):
            recipe_sources(load_recipe(write(tmp_path, replay_pairs=[str(tmp_path / "pairs.jsonl.gz")])))


def test_traces_without_pairs_are_refused_where_pairs_are_wanted(tmp_path):
    write_traces(toy_traces()[:1], tmp_path / "one.jsonl")
    with pytest.raises(RecipeProblem, match="beta_replay=0.5 and there are no pairs.* beta_replay to 0") as caught:
        make_trainer(load_recipe(write(tmp_path, traces=str(tmp_path / "one.jsonl"))))
    assert "replay_examples" not in str(caught.value) and "pair_source" not in str(caught.value)
    with pytest.raises(RecipeProblem, match="has a sibling that did better"):
        make_trainer(load_recipe(write(tmp_path, replay_pairs=str(tmp_path / "one.jsonl"))))


def test_turns_beyond_the_limit_are_counted_where_others_remain(tmp_path):
    whole = make_trainer(load_recipe(write(tmp_path, beta_replay=0, replay_pairs=None)))
    assert whole.setup.left_out is None
    ends = sorted(tree.span(branch.turn).end for tree in whole.setup.recorded for branch in tree.branches)
    middle = ends[len(ends) // 2]
    short = make_trainer(load_recipe(write(tmp_path, beta_replay=0, replay_pairs=None, max_trace_tokens=middle)))
    assert sum(len(tree.branches) for tree in short.setup.recorded) == sum(end <= middle for end in ends)
    assert re.match(rf"\d+ of \d+ turns with a hint or a pair end beyond max_trace_tokens {middle} and are left out; "
                    rf"max_trace_tokens {ends[-1]} takes them all", short.setup.left_out)
    model = embedded_model()
    model.config.max_position_embeddings = ends[-2] if ends[-2] < ends[-1] else ends[-1] - 1
    model.save_pretrained(tmp_path / "model")
    embedded_tokenizer().save_pretrained(tmp_path / "model")
    named = dict(model=str(tmp_path / "model"), beta_replay=0, replay_pairs=None, max_trace_tokens=middle)
    shorter = make_trainer(load_recipe(write(tmp_path, **named)))
    assert f"max_trace_tokens {model.config.max_position_embeddings}, the model's context, takes" in shorter.setup.left_out


def test_the_context_of_a_model_with_code_of_its_own_is_read_where_that_is_allowed(tmp_path):
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}, "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_own.py").write_text(
        "from transformers import PreTrainedConfig\n\n\nclass OwnConfig(PreTrainedConfig):\n    model_type = 'own'\n")
    with pytest.raises((OSError, ValueError), match="trust_remote_code|contains custom code|does not recognize"):
        model_config(str(tmp_path), {"trust_remote_code": False})
    assert trace_limit(8, model_config(str(tmp_path), {"trust_remote_code": True, "dtype": "float32"})).context == 77


def test_an_offline_loss_that_is_not_finite_names_its_traces(tmp_path):
    trainer = make_trainer(load_recipe(write(tmp_path, teacher="live", max_steps=1, replay_batch_size=1, save_strategy="no")))
    [drawn] = trainer.optimizer_steps.recorded_trees(0)
    next(trainer.student.parameters()).data.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match=f"channel '(sdpo|replay)' is not finite at step 1; traces: '{drawn.trace_id}'"):
        trainer.train()


def test_a_recipe_takes_a_folder_of_traces_and_its_record_names_the_files(tmp_path):
    (tmp_path / "runs").mkdir()
    for i in range(2):
        write_traces(toy_traces()[i::2], tmp_path / "runs" / f"{i}.jsonl.gz")
    (tmp_path / "runs" / "notes.txt").write_text("not a trace")
    recipe = load_recipe(write(tmp_path, traces=[str(tmp_path / "runs")], replay_pairs=None, beta_replay=0))
    assert len(recipe_sources(recipe).traces) == len(toy_traces())
    assert data_files(recipe) == sorted((tmp_path / "runs").glob("*.gz"))
    warmed = replace(recipe.arguments, task="toy", traces=None, warm_up={"traces": [str(tmp_path / "runs")]})
    assert data_files(replace(recipe, arguments=warmed)) == data_files(recipe)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputProblem, match="no trace file lies directly in this folder"):
        trace_paths(str(tmp_path / "empty"))
    with pytest.raises(RecipeProblem, match=r"traces: 'no\[where' is no file, no folder and no pattern of files"):
        trace_paths("no[where")


def test_recorded_traces_beside_rollouts_count_in_the_same_means(tmp_path):
    recipe = load_recipe(write(tmp_path, task="toy", train_rows=4, num_generations=2, per_device_train_batch_size=2, max_steps=1,
                               max_completion_length=96, max_turns=2, max_turn_tokens=48, save_strategy="no"))
    trainer = trained(recipe)
    logged = trainer.state.log_history[0]
    assert len(trainer.rollouts) == 2 and logged["sdpo/sites"] > 0 and logged["replay/pairs"] > 0 and "reward" in logged
    assert {r.trace.task_id for r in trainer.rollouts} <= {row["task_id"] for row in world_rows(4, recipe.config.seed)}


@pytest.mark.slow
def test_the_command_trains_on_a_pattern_of_trace_files_alone(tmp_path):
    (tmp_path / "runs").mkdir()
    for i in range(3):
        write_traces(toy_traces()[i::3], tmp_path / "runs" / f"{i}.jsonl.gz")
    recipe = write(tmp_path, traces="runs/*.jsonl.gz", output_dir="out/offline")
    done = composer("train", "--config", recipe, "--json", timeout=300, cwd=tmp_path, env={
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["step"] == 2 and lines[-1]["checkpoint"] == "out/offline/checkpoint-2"
    assert all(line["policy/loss"] == 0.0 and line["sdpo/sites"] > 0 for line in lines if "sdpo/sites" in line)


def test_a_judge_that_is_cut_off_gave_no_answer():
    with BadServer(lambda request: Reply(body=completion(content="Use the", finish="length"))) as server:
        with pytest.raises(TeacherProblem, match="m was cut off at 1024 tokens"):
            judge_of(f"m@{server.url}")("What is wrong?")
        assert server.requests[0].body["max_tokens"] == 1024
    with BadServer(lambda request: Reply(body=completion(content="Use the id."))) as server:
        assert judge_of(f"m@{server.url}")("What is wrong?") == "Use the id."
