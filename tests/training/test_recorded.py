"Recorded traces are read up to the last turn that is learnt from, and the channels' losses and gradients stay what they were."
import math

import pytest
import torch

from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.hints.layers import default_composite
from composer_replication.losses.batch import TraceExample
from composer_replication.losses.compose import compose_loss
from composer_replication.replay.pairs import free_pairs
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.offline import OfflineTrainer, RecordedSteps
from composer_replication.training.step import Steps
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import target_hints, target_turns
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.pass_cost import LAYER_WORTH
from composer_replication.tree.recorded import recorded_parts
from composer_replication.tree.template import probe_template


@pytest.fixture(scope="module")
def both():
    "Trees as they are trained on, and the same traces' trees to their ends."
    tokenizer, traces, hints = embedded_tokenizer(), toy_traces(), default_composite()
    chat, config = probe_template(tokenizer), ComposerReplicationConfig("out", report_to="none", bf16=False, beta_replay=0.5)
    short, whole = [], []
    for trace, pairs in zip(traces, free_pairs(traces, ["siblings", "recovery"])):
        trees, _ = recorded_parts(TraceExample(trace, pairs=tuple(pairs)), chat, config, hints)
        if trees:
            short += trees
            whole.append(build_tree(trace, chat, target_hints(trace, target_turns(trace), hints), tuple(pairs)))
    return short, whole


def test_a_trunk_ends_with_the_last_turn_that_is_learnt_from(both):
    short, whole = both
    for cut, full in zip(*both):
        last = max(branch.turn for branch in full.branches)
        end = next(span.end for span in full.spans if span.turn == last)
        assert cut.ids == full.ids[:end] and cut.branches == full.branches and cut.spans[-1].turn == last
    assert sum(len(tree.ids) for tree in short) < sum(len(tree.ids) for tree in whole)


@pytest.mark.parametrize("channel", ("sdpo_jsd", "trace_replay_dpo"))
def test_losses_and_gradients_are_those_of_whole_traces(both, channel):
    found = []
    for trees in both:
        torch.manual_seed(0)
        model = embedded_model().eval()
        weights = float(channel == "sdpo_jsd"), float(channel == "trace_replay_dpo")
        loss = getattr(compose_loss(model, pack_trees(trees[:12], 0), *weights, dpo_variant="simpo"), channel)
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, grads), (wanted, wanted_grads) = found
    assert wanted > 0 and grads.keys() == wanted_grads.keys()
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grads, wanted_grads, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("teacher, checkpointing", (("frozen", False), ("live", True)))
def test_an_optimizer_step_reads_less_and_has_the_same_loss_and_gradients(teacher, checkpointing, tmp_path, monkeypatch):
    "Against backward passes in the order of the draw, over whole rows."
    traces, found = sorted(toy_traces(), key=lambda trace: len(trace.turns))[:120:10], []
    examples = [TraceExample(t, pairs=tuple(p)) for t, p in zip(traces, free_pairs(traces, ["siblings", "recovery"]))]
    monkeypatch.setitem(LAYER_WORTH, "cpu", -math.inf)
    for kind in (Steps, RecordedSteps):
        config = ComposerReplicationConfig(
            str(tmp_path), report_to="none", bf16=False, use_cpu=True, disable_tqdm=True, teacher=teacher, beta_replay=0.5,
            gradient_checkpointing=checkpointing, replay_batch_size=2, gradient_accumulation_steps=2, num_generations=2,
            per_device_train_batch_size=2, max_steps=1, save_strategy="no", logging_steps=1)
        trainer = OfflineTrainer(embedded_model().double(), config, embedded_tokenizer(), default_composite(), traces=examples)
        for name in ("recorded_trees", "_pack_recorded"):
            monkeypatch.setattr(trainer.optimizer_steps, name, getattr(kind, name).__get__(trainer.optimizer_steps))
        tokens, grads = [], {}
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda module, args, out, tokens=tokens: tokens.append(args[0].numel() * torch.is_grad_enabled()))
        for name, p in trainer.model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, grads=grads: grads.update({name: p.grad.clone()}))
        drawn = [[tree.trace_id for tree in trainer.optimizer_steps.recorded_trees(step)] for step in range(4)]
        trainer.train()
        logged = trainer.state.log_history[0]
        logged = {name: logged[name] for name in ("loss", "sdpo/loss", "sdpo/sites", "replay/loss", "replay/pairs")}
        found.append((drawn, sum(tokens), logged, grads))
    (drawn, tokens, loss, grads), (again, fewer, same, others) = found
    assert loss["sdpo/sites"] and loss["replay/pairs"] and fewer < tokens
    for step in (0, 2):
        assert sorted(drawn[step] + drawn[step + 1]) == sorted(again[step] + again[step + 1])
    torch.testing.assert_close(same, loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(others, grads, rtol=1e-5, atol=1e-7)
