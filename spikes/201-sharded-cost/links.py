"""Seconds that devices send each other, by rings at assumed rates: each passes on what its neighbour sent until all have it.

`devices - 1` steps of an N-th each; rings leave a machine by all of its network cards, the slowest link sets the pace, and
latencies add up step by step, as in NCCL's own model. Data parallelism sums the gradients, which is two such rounds. With
FSDP2 a device gathers all weights before each forward and each backward pass through the layers (embeddings and head less
often, which is not counted), and scatters the sums of gradients once a step. At trunks the next layer's weights arrive
while one computes; nothing hides those of short branches.
"""
import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from composer_replication.recipes.memory_estimate import Estimate, _policy_passes, _replay_sources, _widths
from composer_replication.recipes.recipe import Recipe


@dataclass(frozen=True)
class Network:
    "What devices of one kind send each other."

    node: int  # devices of one machine
    inside: float  # bytes a second that a device sends to its neighbour in the machine
    between: float  # bytes a second of a device's own network card
    hop_inside: float  # seconds until a neighbour has what was sent
    hop_between: float  # the same where it is on another machine


# Assumed: 0.8 of NVLink 4's 450 GB/s a direction, 0.8 of one 400 Gb/s card a device, NCCL's table of ring latencies.
H200 = Network(8, 3.6e11, 4e10, 3.4e-6, 1.4e-5)

TENSORS = 12  # of a layer, each gathered by itself for the copy that samples


def ring_seconds(
    size: float,  # bytes of the whole
    pieces: float,  # collectives, one after another
    devices: int,
    network: Network,
) -> float:
    "Until every device has gathered the whole of which each held a part; or has its part of the sum of what each held whole."
    machines = math.ceil(devices / network.node)
    pace = network.inside if machines == 1 else min(network.inside, network.between * network.node)
    hops = (devices - machines) * network.hop_inside + (machines - 1) * network.hop_between
    return size * (devices - 1) / devices / pace + pieces * hops


@dataclass(frozen=True)
class Gathered:
    "How often a device gathers all weights in one backward pass."

    trunks: float
    branches: float


def gathered(
    recipe: Recipe,
    branches: float = 0.75,  # passes over branches of a kind
    idle: float = 0.066,  # share of idle ones among those that all ranks make
) -> Gathered:
    "With sharded weights; a pass with gradient gathers twice."
    c, plays, some = recipe.config, recipe.arguments.task is not None, branches / (1 - idle)
    own, recorded = (bool(c.beta_replay and there) for there in _replay_sources(recipe))
    kl = 0 if not (plays and c.kl_coef) else 1 if c.kl_place == "loss" else 2
    teacher = {"live": 0, "trust_region": 2}.get(c.teacher, 1) if c.alpha_sdpo else 0
    reference = own + recorded if c.replay_form == "dpo" else 0
    stale = _policy_passes(recipe) - (4 if c.gradient_checkpointing else 3)
    read = max(teacher, bool(c.alpha_sdpo)) + reference + 2 * (own + recorded)
    return Gathered(2 * (plays + recorded) + stale + kl + teacher + reference, some * read)


@dataclass(frozen=True)
class Sent:
    "Seconds that a step exchanges weights and gradients."

    beside: float  # while trunks are computed: what takes longer of the two is waited for
    alone: float  # at branches, and for the copy that samples


def sent_seconds(
    recipe: Recipe,
    shape: PretrainedConfig,
    counts: tuple[int, int],  # weights, and those that are trained
    devices: int,
    network: Network,
) -> Sent:
    "By rings; zero for one device."
    c, (total, trained), (size, own, work) = recipe.config, counts, _widths(recipe)
    ring = lambda amount, pieces: ring_seconds(amount, pieces, devices, network)
    if not c.fsdp:
        return Sent(2 * ring(own * trained, 1), 0.0)
    groups, made, steps = shape.num_hidden_layers + 1, gathered(recipe), c.gradient_accumulation_steps
    gather, scatter = ring(work * total, groups), ring(work * trained, groups)
    copies = recipe.arguments.task is not None and c.rollout == "transformers"
    copy = ring(size * (total - trained) + own * trained, TENSORS * groups) if copies else 0.0
    return Sent(steps * made.trunks * gather + scatter, steps * made.branches * gather + copy)


def step_seconds(recipe: Recipe, shape: PretrainedConfig, plan: Estimate, devices: int) -> dict[str, float]:
    "The plan's seconds with what is sent; beside trunks it costs time where it takes longer than their arithmetic."
    sent, made = sent_seconds(recipe, shape, (plan.parameters, plan.trained), devices, H200), plan.seconds
    step = made["sampling"] + max(made["loss and backward"], sent.beside) + sent.alone
    return made | {"sent between devices": sent.beside + sent.alone, "step": step}
