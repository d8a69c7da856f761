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

from composer_replication.recipes.memory_estimate import MemoryEstimate
from composer_replication.recipes.settings import Recipe

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


def _widths(recipe):
    "Bytes of a weight as stored, of a trained weight, and of a weight in computation."
    size = BYTES[recipe.model.dtype or "float32"]
    return size, 4 if recipe.model.use_peft else size, 2 if recipe.config.bf16 or recipe.config.fp16 else size


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

# What a step computes, by tokens that pass through the model, at assumed rates of an H200. Measured on one: with all channels
# a step took 2.6 to 3.2 policy-only steps in place of the 1.5 to 1.8 of these costs (spike 200).
BRANCHES = 0.05  # tokens of a trunk's branches over its own


def _policy_passes(recipe):
    "Forward passes of plain GRPO over a row; without a task, of one that is read and learned from."
    c = recipe.config
    stale = recipe.arguments.task is not None and c.gradient_accumulation_steps % (c.steps_per_generation * c.num_iterations) != 0
    return (4 if c.gradient_checkpointing else 3) + stale


def _replay_sources(recipe):
    "Whether pairs come from rollouts, and from what was recorded."
    names = set(recipe.arguments.replay_pairs or ())
    return names & {"group", "recovery"} and recipe.arguments.task, names - {"group", "recovery"} or recipe.arguments.traces


def channel_costs(
    recipe: Recipe,
    share: float = BRANCHES,  # a branch set's own tokens over its trunk's
    prompt: int = 512,  # tokens
) -> dict[str, float]:  # units of plain GRPO's loss and backward
    "Cost of each channel and of all together."
    c, a, offline, unit = recipe.config, recipe.arguments, recipe.arguments.task is None, _policy_passes(recipe)
    length = a.max_trace_tokens / (prompt + c.max_completion_length)  # of a recorded trace, over a rollout's
    rows = 1 if offline else length * c.replay_batch_size / c.per_device_train_batch_size  # recorded for one of a rollout
    recorded = rows if a.traces else 0
    kl = 0 if offline or not c.kl_coef else 1 if c.kl_in_loss else 2
    parts = {"policy objective": 0 if offline else unit, "kl": kl, "sdpo at error turns": 0, "trace-replay dpo": 0}
    if c.alpha_sdpo:
        teacher = {"live": share, "trust_region": 2 * (1 + share)}.get(c.teacher, 1 + share)
        parts["sdpo at error turns"] = teacher * ((not offline) + recorded) + (4 if c.gradient_checkpointing else 3) * recorded
    if c.beta_replay:
        reference, (played, kept) = 1 + 2 * share if c.replay_form == "dpo" else 0, _replay_sources(recipe)
        read = c.alpha_sdpo and recorded  # channel 2 has read the recorded trunks
        parts["trace-replay dpo"] = (3 * 2 * share + reference if played else 0) + (
            (3 * (2 * share + (not read)) + reference) * rows if kept else 0)
    return {k: round(v / unit, 3) for k, v in parts.items()} | {"all": round(sum(parts.values()) / unit, 3)}


@dataclass(frozen=True)
class Rates:
    "What a device does in a second."

    operations: float
    bytes: float  # read from memory
    layer: float  # seconds to start a layer's kernels once


CARD_RATES = Rates(3e14, 2.1e12, 4e-4)  # operations of a 7B step; sampling assumed


def computed_seconds(
    recipe: Recipe,
    shape: PretrainedConfig,
    parameters: int,
    units: float,  # forward passes over a row in loss and backward, all channels
    prompt: int,  # tokens
    rates: Rates = CARD_RATES,
) -> dict[str, float]:
    "Seconds of sampling, of loss and backward, of a step, and of the run, on one device."
    c, a, size = recipe.config, recipe.arguments, BYTES[recipe.model.dtype or "float32"]
    rows, tokens = c.per_device_train_batch_size * c.gradient_accumulation_steps, prompt + c.max_completion_length
    if a.task is None:
        rows, tokens = c.replay_batch_size * c.gradient_accumulation_steps, a.max_trace_tokens
    forward = 2 * parameters * tokens * rows / rates.operations
    sampled = min(c.max_completion_length, c.max_turns * (c.max_turn_tokens or c.max_completion_length))
    batches = c.gradient_accumulation_steps / c.steps_per_generation
    token = parameters * size / rates.bytes + shape.num_hidden_layers * rates.layer
    once = forward + sampled * (batches * token + rows * 2 * parameters / rates.operations)
    sampling = 0.0 if a.task is None else once / c.num_iterations
    step = sampling + units * forward
    return {"sampling": sampling, "loss and backward": units * forward, "step": step, "run": step * max(c.max_steps, 0)}


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
    kl = 0 if not (plays and c.kl_coef) else 1 if c.kl_in_loss else 2
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


def step_seconds(recipe: Recipe, shape: PretrainedConfig, plan: MemoryEstimate, devices: int) -> dict[str, float]:
    "The plan's seconds with what is sent; beside trunks it costs time where it takes longer than their arithmetic."
    sent = sent_seconds(recipe, shape, (plan.parameters, plan.trained), devices, H200)
    units = channel_costs(recipe)["all"] * _policy_passes(recipe)
    made = computed_seconds(recipe, shape, plan.parameters, units, plan.prompt_tokens)
    step = made["sampling"] + max(made["loss and backward"], sent.beside) + sent.alone
    return made | {"sent between devices": sent.beside + sent.alone, "step": step}
