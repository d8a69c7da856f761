"""What spikes measure before training: right actions at error turns under each kind of hint, and the SDPO gradient of each."""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from composer_replication.core.errors import InputProblem
from composer_replication.core.hint import HintSource
from composer_replication.core.trace import Trace
from composer_replication.envs.toy.env import WorldEnv
from composer_replication.experiments.statistics import Interval, bootstrap_mean
from composer_replication.losses.divergences import Divergence
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.tool_call_parser import ParsedTurn, TurnReader
from composer_replication.rollout.types import Rollout, RolloutConfig
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import target_hints, target_turns


@dataclass(frozen=True)
class HintedTurn:
    "What stands before an error turn of a rollout, with the hint and without."

    problem: int  # which task
    trace: Trace
    turn: int  # position in the trace
    plain: tuple[int, ...]  # ids before the turn
    hinted: tuple[int, ...]  # ids before the turn, hint included
    ids: tuple[int, ...]  # the turn's own


def hinted_turns(
    rollouts: Sequence[Rollout],
    policy: TransformersPolicy,
    source: HintSource,
) -> list[HintedTurn]:
    "Every error turn that has a hint, in the order of the rollouts."
    turns = []
    for problem, r in enumerate(rollouts):
        sampled = ((*r.prompt_ids, *r.completion_ids), [0] * len(r.prompt_ids) + list(r.completion_mask))
        tree = build_tree(r.trace, policy.chat, target_hints(r.trace, target_turns(r.trace), source), sampled=sampled)
        turns += [HintedTurn(problem, r.trace, b.turn, tree.ids[:tree.span(b.turn).start],
                             (*tree.ids[:b.fork], *b.ids[:b.start]), b.ids[b.start:]) for b in tree.branches]
    return turns


def works(
    trace: Trace,  # of a toy world, its task's seed and split in `task_id`
    turn: int,  # position of the turn that is replaced
    action: ParsedTurn,  # what is done there instead
    environment: Callable[[], WorldEnv] = WorldEnv,
) -> bool:
    "Whether the action's first call succeeds in the state before the turn."
    split, _, seed = trace.task_id.partition("-")
    env = environment()
    env.reset(seed, split)
    for call in (c for before in trace.turns[:turn] for c in before.tool_calls if c.parsed):
        env.call(call)
    return bool(action.calls) and not env.call(action.calls[0]).failed


def right_actions(
    policy: TransformersPolicy,
    turns: Sequence[HintedTurn],
    hinted: bool,  # with the hint in the context
    environment: Callable[[], WorldEnv] = WorldEnv,
    seed: int = 0,  # names the random numbers
) -> list[bool]:  # one a turn
    "Whether one newly sampled action at each turn works."
    reader, done = TurnReader.of(policy.chat), []
    contexts = [t.hinted if hinted else t.plain for t in turns]
    for at in range(0, len(turns), 64):
        part = contexts[at:at + 64]
        with policy.batch(Sampling()) as batch:
            names = [f"{seed}/{hinted}/{at + i}" for i in range(len(part))]
            samples = batch.sample(range(len(part)), part, [128] * len(part), names)
        actions = [reader.read(s.ids, policy.stops, context, s.cut, t.trace.tools)
                   for t, context, s in zip(turns[at:], part, samples)]
        done += [works(t.trace, t.turn, action, environment) for t, action in zip(turns[at:], actions)]
    return done


def sdpo_gradient(
    model: PreTrainedModel,  # student and, with the hint in its context, teacher
    turns: Sequence[HintedTurn],
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
    by_quality: Mapping[str, Sequence[HintedTurn]],
) -> dict[str, list[HintedTurn]]:
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
