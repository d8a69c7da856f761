"An agent's held-out pass rate alone and with hints, and how a hint moves its next action: with intervals."
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import HintContext, ToolCall, Trace, Turn
from composer_replication.envs.toy.env import SYSTEM, WorldEnv, world_rows
from composer_replication.envs.toy.hints import world_hints
from composer_replication.experiments.statistics import Interval, bootstrap_mean
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig
from composer_replication.traces.error_sites import find_error_sites

sys.path.append(str(Path(__file__).parents[1]))
from hint_gate import FailedTurn, hinted_turns, right_actions


class RemindedEnv(WorldEnv):
    "The world, with a hint behind every failed call's answer."

    def reset(self, seed: str, split: str, **row) -> None:
        "As `WorldEnv.reset`."
        super().reset(seed, split)
        self._turns = [Turn("system", SYSTEM), Turn("user", self.task.prompt)]

    def call(self, call: ToolCall) -> ToolResult:
        "As `WorldEnv.call`, with the hint."
        result, call = super().call(call), replace(call, id=f"call_{len(self._turns)}")
        self._turns += [Turn("assistant", "", None, (call,)), result.turn(call)]
        if not result.failed:
            return result
        trace = Trace("reminded", tuple(self._turns), self.tools)
        hint = world_hints("template").generate((site := find_error_sites(trace)[-1]).kind, HintContext.at(trace, site))
        reminded = replace(result, text=f"{result.text}\n\n{hint}" if hint else result.text)
        self._turns[-1] = replace(self._turns[-1], content=reminded.text)
        return reminded


def turn_entropy(
    model: PreTrainedModel,
    contexts: Sequence[Sequence[int]],
    turns: Sequence[Sequence[int]],  # ids that follow each
) -> list[float]:  # nats per token, of each
    "Mean entropy of the model's distribution over the tokens of each turn."
    out = []
    with torch.no_grad():
        for context, ids in zip(contexts, turns):
            logits = model(input_ids=torch.tensor([[*context, *ids]])).logits[0, len(context) - 1:-1]
            out.append(torch.distributions.Categorical(logits=logits).entropy().mean().item())
    return out


def _by_problem(values: Sequence[float], turns: Sequence[FailedTurn], problems: int) -> Interval:
    "A mean over turns with an interval that resamples problems: turns are laid out by problem, the rest unscored."
    of = defaultdict(list)
    for value, turn in zip(values, turns):
        of[turn.problem].append(float(value))
    cells = np.array([np.mean(of[p]) if of[p] else np.nan for p in range(problems)])
    return bootstrap_mean(cells)


@dataclass(frozen=True)
class Card:
    "What is known of an agent; every value with its 95 % interval over held-out problems."

    agent: str
    split: str
    turns: int  # allowed per episode
    passed: Interval
    passed_hinted: Interval  # with a hint behind every failed call
    right: Interval  # a new action at an error turn works
    right_hinted: Interval  # the same, with the hint in the context
    entropy: Interval  # nats per token of the error turn
    entropy_hinted: Interval
    errors: Interval  # error turns per episode


def make_card(
    agent: str,  # how the card calls it
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: int = 128,
    split: str = "test",
    turns: int = 8,  # allowed per episode
    seed: int = 0,
) -> Card:
    "Measure an agent on held-out tasks, one sampled episode each."
    policy, config = TransformersPolicy(model, tokenizer, agent), RolloutConfig(max_turns=turns, max_turn_tokens=96)
    rows = world_rows(problems, f"card-{seed}", split)
    alone, reminded = (collect(policy, env, rows, config, seed) for env in (WorldEnv, RemindedEnv))
    failures = hinted_turns(alone, policy, world_hints("template"))
    works_again = [right_actions(policy, failures, hinted, seed=seed) for hinted in (False, True)]
    entropy = [turn_entropy(model, [t.hinted if hinted else t.plain for t in failures], [t.ids for t in failures])
               for hinted in (False, True)]
    counts = np.bincount([t.problem for t in failures], minlength=problems)
    return Card(agent, split, turns, *(bootstrap_mean([np.nan if r.reward is None else r.reward for r in played])
                                       for played in (alone, reminded)),
                *(_by_problem(v, failures, problems) for v in (*works_again, *entropy)), bootstrap_mean(counts))
