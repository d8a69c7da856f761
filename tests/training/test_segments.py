"A step's gradient with episodes cut into segments is that of the same episodes in one piece, whatever the objective divides by."

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import world
from kept_trainer import trained

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import Segment, Trace, Turn
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.protocols import ChatCompletions
from composer_replication.rollout.record import RecordedEpisode, Recorder
from composer_replication.rollout.types import Ending, SegmentTokens
from composer_replication.training import segments
from composer_replication.training import trainer as trainer_page
from composer_replication.training.episodes import completion_turns
from composer_replication.training.segments import advantage_scale, check_segments
from composer_replication.training.trainer import kl_sums


def cut(rollout):
    "The rollout with a segment of its own for the turns after the first, which shows all that came before."
    trace, mask = rollout.trace, rollout.completion_mask
    sampled = trace.sampled_turns
    starts = [i for i, kept in enumerate(mask) if kept and not (i and mask[i - 1])]
    if len(sampled) < 2:
        return rollout
    end = next(i for i, kept in enumerate(mask) if not kept)
    first, rest = (
        [part[:end] for part in (rollout.completion_ids, mask, rollout.logprobs)],
        [part[starts[1] :] for part in (rollout.completion_ids, mask, rollout.logprobs)],
    )
    more = SegmentTokens((*rollout.prompt_ids, *rollout.completion_ids[: starts[1]]), *rest)
    segments = Segment(tuple(range(sampled[0] + 1)), sampled[:1]), Segment(tuple(range(len(trace.turns))), sampled[1:])
    return replace(
        rollout,
        trace=replace(trace, segments=segments),
        completion_ids=first[0],
        completion_mask=first[1],
        logprobs=first[2],
        more=(more,),
    )


class Cutting:
    "A factory that plays its rows itself, and cuts every second episode."

    def __init__(self, every):
        self.every = every

    def __call__(self):
        return world.Files()

    def collect(self, policy, rows, config, seed, stop, trace_ids):
        played = collect(policy, world.Files, rows, config, seed, stop, trace_ids)
        return [cut(r) if self.every and not i % self.every else r for i, r in enumerate(played)]


def train(folder, every, **changes):
    return trained(folder, Cutting(every), max_completion_length=96, **changes)


ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "alpha_sdpo": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dapo", "kl_coef": 0.1, "kl_estimator": "k3"},
        {"loss_type": "grpo", "alpha_sdpo": 1.0},
        {"loss_type": "dr_grpo", **ACCUMULATED},
        {"loss_type": "dapo", "filled": True, **ACCUMULATED},
        {"loss_type": "grpo", "filled": True, **ACCUMULATED},
    ],
    ids=["dapo-kl", "grpo-sdpo", "accumulated-sdpo", "filled-dapo", "filled-grpo"],
)
def test_an_episode_in_segments_gives_the_gradient_of_one_piece(changes, tmp_path):
    changes = dict(changes)
    filled = changes.pop("filled", False)  # the number of segments is no multiple of the backward passes
    whole, cut_up = (train(tmp_path / str(every), every, **changes) for every in (0, 3 if filled else 2))
    some = sum(len(r.segments) > 1 for r in cut_up.rollouts)
    assert not filled or some % 4
    assert some > 2 and len(cut_up.batch["advantages"]) >= 16 + some and len(whole.batch["advantages"]) == 16
    assert sum(r.sampled for r in cut_up.rollouts) == sum(r.sampled for r in whole.rollouts) == whole.batch["num_items_in_batch"]
    assert any(g.abs().max() > 1e-5 for g in whole.grads)
    logs = [trainer.state.log_history[0] for trainer in (cut_up, whole)]
    lengths = [{key: log[key] for key in log if key.startswith("completions/") and key.endswith("_length")} for log in logs]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 6
    if changes.get("kl_coef"):  # what the guard reads
        a, b = (kl_sums(t._models(), [part for r in t.rollouts for part in r.segments], "cpu") for t in (cut_up, whole))
        assert a["tokens"] == b["tokens"] and a["kl"] == pytest.approx(b["kl"], rel=5e-2, abs=1e-3)
    if changes.get("alpha_sdpo"):
        assert whole.state.log_history[0]["sdpo/sites"] == cut_up.state.log_history[0]["sdpo/sites"] > 0
    for a, b in zip(cut_up.grads, whole.grads):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo", "sapo", "luspo", "dapo", "bnpo"])
def test_the_scale_against_one_row_an_episode(loss_type):
    "By brute force: rows of random lengths, some of one episode, some not counted."
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        episode = torch.cat([torch.arange(4), torch.randint(4, (3,), generator=generator)])
        tokens = torch.randint(1, 6, (7,), generator=generator)
        losses = [torch.rand(int(n), generator=generator) for n in tokens]
        scale = advantage_scale(episode, tokens, 7, 4, loss_type)
        merged = [torch.cat([losses[r] for r in range(7) if episode[r] == e]) for e in range(4)]
        reduce = {
            "dr_grpo": lambda rows: sum(r.sum() for r in rows) / (len(rows) * 9),
            "luspo": lambda rows: sum(r.sum() for r in rows) / len(rows),
            "dapo": lambda rows: sum(r.sum() for r in rows) / 100,
        }
        mean = lambda rows: sum(r.mean() for r in rows) / len(rows)
        one = reduce.get(loss_type, (lambda rows: torch.cat(list(rows)).mean()) if loss_type == "bnpo" else mean)
        torch.testing.assert_close(one([row * s for row, s in zip(losses, scale)]), one(merged))


# ---- what is refused, by all processes alike


def asked(pair_source=None, **settings):
    plain = dict(kl_coef=0, kl_in_loss=True, channels=True, beta_replay=0)
    return SimpleNamespace(args=SimpleNamespace(**plain | settings), pair_source=pair_source, levels_passes=False)


FORKED, WHOLE = SimpleNamespace(more=(1,)), SimpleNamespace(more=())


@pytest.mark.parametrize(
    "trainer, output, said",
    [
        (asked(kl_coef=0.1, kl_in_loss=False), {}, "set kl_estimator to k3"),
        (asked(beta_replay=0.1, pair_source=len), {}, "set beta_replay to 0"),
        (asked(), {"ref_per_token_logps": 1}, "set beta to 0"),
        (asked(), {"importance_sampling_ratio": 1}, "vllm_importance_sampling_correction to false"),
    ],
)
def test_settings_that_know_of_the_first_segment_alone(trainer, output, said):
    check_segments(trainer, output, [WHOLE, WHOLE])
    with pytest.raises(InputProblem, match=said):
        check_segments(trainer, output, [WHOLE, FORKED])
    check_segments(asked(kl_coef=0.1, beta_replay=0.1), {}, [WHOLE, FORKED])  # the KL in the loss, pairs of recorded traces


@pytest.mark.parametrize("mine", [WHOLE, FORKED])
def test_all_processes_raise_where_one_has_segments(mine, monkeypatch):
    monkeypatch.setattr(segments, "gather_object", lambda one: [*one, True])  # the other process has some
    check_segments(asked(), {}, [mine])
    with pytest.raises(InputProblem, match="set beta_replay to 0"):
        check_segments(asked(beta_replay=0.1, pair_source=len), {}, [mine])
    sharded = asked()
    sharded.levels_passes = True
    with pytest.raises(InputProblem, match="leave fsdp out"):
        check_segments(sharded, {}, [mine])
    monkeypatch.setattr(segments, "gather_object", lambda one: [*one, False])
    check_segments(sharded, {}, [WHOLE])


# ---- further segments teach as the first does


def test_a_masked_episode_teaches_in_none_of_its_segments(tmp_path):
    "Episodes are cut at their turns' end: with `mask_truncated_completions` none of their segments has a branch."
    changes = {"loss_type": "dr_grpo", "alpha_sdpo": 1.0, "max_turns": 2}
    free, masked = (train(tmp_path / str(m), 1, mask_truncated_completions=m, **changes) for m in (False, True))
    assert free.generation.further and sum(len(r.tree.branches) for r in free.generation.further)
    for trainer in (free, masked):
        more = [r for r in trainer.rollouts for _ in r.more]
        trees = trainer.generation.further
        assert len(more) == len(trees)
        cut_off = [t for r, t in zip(more, trees) if r.ending is not Ending.DONE]
        assert cut_off
        assert any(t.tree.branches for t in cut_off) is (trainer is free)


def test_no_further_segment_has_a_branch_beyond_the_models_positions(tmp_path, monkeypatch):
    from composer_replication.training import episodes

    monkeypatch.setattr(episodes, "positions", lambda config: 60)
    trainer = train(tmp_path, 1, loss_type="dr_grpo", alpha_sdpo=1.0)
    trees = [r.tree for r in trainer.generation.further]
    assert any(refused.reason.startswith("its hinted branch") for t in trees for refused in t.refused)
    assert not any(b.kind == "hint" and b.fork + len(b.ids) > 60 for t in trees for b in t.branches)


# ---- messages for reward functions


def test_the_completion_of_an_agent_with_a_prompt_of_its_own():
    system, user, own = Turn("system", "S"), Turn("user", "U"), Turn("assistant", "A")
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert completion_turns(Trace("t", (system, user, own)), prompt) == (own,)
    assert completion_turns(Trace("t", (system, replace(user, content="U and what the reset says"), own)), prompt) == (own,)
    assert completion_turns(Trace("t", (Turn("user", "as the agent puts it"), own, user)), prompt) == (own, user)
    shots = [*prompt, {"role": "assistant", "content": "shown"}, {"role": "user", "content": "U"}]
    assert completion_turns(Trace("t", (system, user, Turn("assistant", "shown"), user, own)), shots) == (own,)
    assert completion_turns(Trace("t", (user,)), prompt) == ()


def test_the_held_out_kl_counts_every_segment(tmp_path, monkeypatch):
    seen, nothing = [], Counter(kl=0.0, tokens=1)
    monkeypatch.setattr(trainer_page, "kl_sums", lambda models, segments, device: seen.extend(segments) or nothing)
    trainer = train(tmp_path, 2, kl_coef=0.1, kl_estimator="k3", loss_type="dapo")
    trainer.held_out_rows = world.rows(8)
    trainer.held_out()
    assert len(seen) > 8  # episodes


PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}, "required": ["name"]}
PICK = {"name": "final_result", "strict": True, "parameters": PERSON | {"additionalProperties": False}}


class Forcing:
    "A factory whose agent wants an output type: it forces a call of one tool, twice."

    def __call__(self):
        return world.Files()

    def collect(self, policy, rows, config, seed, stop, trace_ids):
        played = []
        with Recorder(TransformersPolicy(policy.model, policy.chat.tokenizer), seed, 80, config.sampling, fixed=True) as recorder:
            for row, trace_id in zip(rows, trace_ids):
                record, messages = RecordedEpisode(trace_id, row["task_id"]), [{"role": "user", "content": "Who?"}]
                for _ in range(2):
                    tools = [{"type": "function", "function": PICK}]
                    asked = ChatCompletions.read({"model": "m", "messages": messages, "tools": tools, "tool_choice": "required"})
                    told = ChatCompletions.write(asked, recorder.answer(record, asked))["choices"][0]["message"]
                    calls = told.get("tool_calls", ())
                    messages += [told, *({"role": "tool", "tool_call_id": c["id"], "content": "Again."} for c in calls)]
                    if not calls:  # cut off
                        break
                played.append(record.rollout(recorder, Ending.DONE, float(record.used % 2)))
        return played


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_step_learns_from_no_token_that_a_grammar_forced(loss_type, tmp_path):
    pytest.importorskip("llguidance")
    trainer = trained(tmp_path, Forcing(), max_completion_length=256, loss_type=loss_type, kl_coef=0.1, kl_estimator="k3")
    forced = [sum(len(s.forced) for s in r.segments) for r in trainer.rollouts]
    mask = trainer.batch["tool_mask"] * trainer.batch["completion_mask"]
    assert all(forced) and mask.any() and mask.sum() == trainer.batch["num_items_in_batch"]
    assert mask.sum(1).tolist() == [r.sampled - n for r, n in zip(trainer.rollouts, forced)]
    assert any(g.abs().max() > 0 for g in trainer.grads)
    for row, rollout in zip(mask, trainer.rollouts):
        assert not row[list(rollout.forced)].any()
