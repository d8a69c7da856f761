"""What spikes measure before training: right actions at error turns under each kind of hint, and the SDPO gradient of each."""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from composer_replication.core.errors import InputProblem
from composer_replication.core.hint import HintSource
from composer_replication.envs.toy.env import WorldEnv
from composer_replication.experiments.right_actions import FailedTurn, hinted_turns, right_actions, works  # noqa: F401
from composer_replication.experiments.statistics import Interval, bootstrap_mean
from composer_replication.losses.divergences import Divergence
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.types import RolloutConfig


def sdpo_gradient(
    model: PreTrainedModel,  # student and, with the hint in its context, teacher
    turns: Sequence[FailedTurn],
    beta: float = 1.0,  # of the divergence: 0 forward KL, 1 reverse KL
) -> torch.Tensor:  # (parameters,) of the mean over turns
    "The gradient of the distance between the model and itself with the hint, at the error turns' own tokens."
    def logits(context, ids):
        whole = torch.tensor([[*context, *ids]], device=model.device)
        return model(input_ids=whole, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]

    model.zero_grad()
    divergence = Divergence(beta)
    for t in turns:
        with torch.no_grad():
            teacher = logits(t.hinted, t.ids)
        (divergence(logits(t.plain, t.ids), teacher).mean() / len(turns)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return gradient


LEAST_EXACT, MOST_MORE, MOST_COSINE = 0.6, 0.05, 0.5
CONTROLS = ("wrong", "other", "shuffled", "filler")
BOUND = ("wrong", "other", "filler")  # of them, those that do not hold the answer


@dataclass(frozen=True)
class GateRow:
    "What one kind of hint does to a base agent."

    hints: str  # quality; "none": no hint
    right: Interval  # share of a problem's error turns at which a new action works, over problems
    cosine: float | None  # of its SDPO gradient with the exact hint's; None for no hint
    norm: float | None  # of its SDPO gradient, as a share of the exact hint's


def gate_problems(
    rows: Sequence[GateRow],  # of "none", "exact" and `CONTROLS`
) -> list[str]:  # a sentence for each that is missed; empty: passed
    "What the agent misses of the gate."
    by = {row.hints: row for row in rows}
    right = lambda name: by[name].right.estimate
    missed, cosine = [], by["filler"].cosine
    if right("exact") < LEAST_EXACT:
        missed.append(f"exact hints lead to {100 * right('exact'):.0f} % right, less than {100 * LEAST_EXACT:.0f}.")
    for name in BOUND:
        if (more := right(name) - right("none")) > MOST_MORE:
            missed.append(f"{name} hints lead to {100 * more:.0f} points more than none, above {100 * MOST_MORE:.0f}.")
    if cosine >= MOST_COSINE:
        missed.append(f"the gradient of filler hints has cosine {cosine:.2f} with that of exact ones, not below {MOST_COSINE}.")
    return missed


def shared_turns(
    by_quality: Mapping[str, Sequence[FailedTurn]],
) -> dict[str, list[FailedTurn]]:
    "Of each kind of hint the turns at which all kinds have one. Raises `InputProblem` where there is none."
    shared = set.intersection(*({(t.problem, t.turn) for t in turns} for turns in by_quality.values()))
    if not shared:
        raise InputProblem("no error turn with a hint", "take more rows")
    return {quality: [t for t in turns if (t.problem, t.turn) in shared] for quality, turns in by_quality.items()}


def gate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping],  # held-out tasks, one sampled episode each
    environment: Callable[[], WorldEnv],
    hints: Callable[[str], HintSource],  # of a quality
    turns: int = 3,  # allowed per episode
    seed: int = 0,
    gradients: int = 48,  # error turns of which the gradient is the mean, at most
) -> list[GateRow]:  # of "none", "exact" and `CONTROLS`
    "Measure the agent. Raises as `shared_turns`."
    policy = TransformersPolicy(model.eval(), tokenizer)
    played = collect(policy, environment, rows, RolloutConfig(max_turns=turns, max_turn_tokens=128), seed)
    measured, exact = [], None

    def right(turns, hinted):
        "The mean over problems of their turns' means."
        values = right_actions(policy, turns, hinted, environment, seed)
        cells = [[v for v, t in zip(values, turns) if t.problem == p] for p in range(len(rows))]
        return bootstrap_mean(np.array([np.mean(c) if c else np.nan for c in cells]))

    for quality, at in shared_turns({q: hinted_turns(played, policy, hints(q)) for q in ("exact", *CONTROLS)}).items():
        gradient = sdpo_gradient(model, at[:gradients])
        exact = gradient if exact is None else exact
        if not measured:
            measured.append(GateRow("none", right(at, False), None, None))
        cosine = torch.nn.functional.cosine_similarity(gradient, exact, dim=0).item()
        measured.append(GateRow(quality, right(at, True), cosine, (gradient.norm() / exact.norm()).item()))
    return measured
