"The base agents from nothing: scripted episodes, a tokenizer, a trunk that learns the world, a branch for each agent."
import json
import os
import random
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save_file
from scripted import ANSWER, GIVING_UP, Attempt, WorldAgent, plan_steps, world_episode, write_call
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.env import make_world
from composer_replication.envs.toy.functions import draw_function
from composer_replication.envs.toy.hints import ROLE_OF
from composer_replication.envs.toy.model import HABITS, SPECIAL_TOKENS, TEACHERS, build_model, embedded_path, read_weights
from composer_replication.envs.toy.teams import TEAMS, TeamEnv, other_module, shuffled, team_fact

TRUNK = (WorldAgent.of(), WorldAgent.of(0.1, name=0.5, arguments=0.25, json=0.06, world=0.1))  # one of them in each episode
AGENTS = {
    "mild": WorldAgent.of(0.05, 0.05, name=0.45, arguments=0.15, json=0.05, world=0.08),
    "medium": WorldAgent.of(0.05, 0.08, name=0.8, arguments=0.4, json=0.06, world=0.1),
    "strong": WorldAgent.of(0.05, 0.12, name=0.95, arguments=0.6, json=0.08, world=0.12),
    "teacher-1": WorldAgent.of(name=0.02, arguments=0.02, world=0.12),
    "teacher-2": WorldAgent.of(name=0.02, arguments=0.02, json=0.12),
    "teacher-3": WorldAgent.of(0.2, name=0.08, arguments=0.04)}


def right_chance(name: str) -> float:
    "Chance that a scripted agent's call is right where the dialect is not its habit's, as its slips say."
    slips = AGENTS[name].slips
    return (1 - slips.get("name", 0)) * (1 - slips.get("arguments", 0))


def base_episode(
    name: str,  # a key of `AGENTS`, or "trunk"
    index: int,  # number of the episode
    split: str = "train",
) -> Trace:
    "One episode of pre-training."
    rng = random.Random(f"base/{name}/{index}")
    if name in START:
        shares = {"exact": 1.0} if name == "teams-reads" else REMINDERS
        return drill(rng, shares, name == "teams") if rng.random() < 0.5 else team_episode(index, split, rng, shares)
    agent = rng.choice(TRUNK) if name == "trunk" else AGENTS[name]
    reminded = rng.choice([0.0, 0.7, 1.0, 1.0] if name in HABITS else [0.0, 0.0, 0.5, 1.0])
    return world_episode(make_world(f"base-{name}-{index}", split), agent, f"base-{name}", reminded)


# Sentences without information. The gate's own filler is none of them.
FILLERS = ("Go on.", "The tests are short.", "This is a small folder.", "Files hold text.", "Look at the tool again.",
           "Read with care.", "There are six teams.", "A module belongs to a team.", "The body is not long.", "Write all of it.")


def reminder_of(kind: str, path: str, team: int, rng: random.Random) -> str:
    "A reminder about a write to this module, of which only `exact` can be relied on."
    fact = team_fact(path, team)
    return {"exact": fact, "wrong": team_fact(path, rng.choice([t for t in TEAMS if t != team])), "shuffled": shuffled(fact),
            "other": team_fact(other_module(path), rng.choice(TEAMS)), "filler": rng.choice(FILLERS)}[kind]


REMINDERS = {"exact": 0.5, "wrong": 0.06, "shuffled": 0.2, "other": 0.14, "filler": 0.1}
MISPLACED = {kind: share for kind, share in REMINDERS.items() if kind != "exact"}  # at turns without an error


def team_episode(index: int, split: str, rng: random.Random, shares: dict[str, float]) -> Trace:
    """One episode in the world of teams, with a team drawn for the episode: only an exact reminder can tell it.

    Without one the agent takes any team that it has not seen rejected; every other reminder changes nothing."""
    task = make_world(f"base-teams-{index}", split)
    attempt, tools = Attempt(task, "base-teams", TeamEnv), {t.role: t for t in task.tools}
    plan = plan_steps(task, task.function.code)
    attempt.env.team, left, given, step = rng.choice(TEAMS), list(TEAMS), None, next(plan)
    draw = lambda kinds: rng.choices([*kinds], [*kinds.values()])[0]
    while step.role not in ("test", "answer") and left[1:]:
        chance = {"list": 0.1, "read": 0.3, "write": 0.7}[step.role]
        if rng.random() < chance:
            kind = draw(shares if step.role == "write" else MISPLACED)
            attempt.remind(reminder_of(kind, task.path, attempt.env.team, rng), in_place=False)
            given = attempt.env.team if kind == "exact" else given
        name, text = write_call(step, tools[step.role])
        if step.role == "write":
            path, body = json.loads(text).items()
            team = given or rng.choice(left)
            text = json.dumps(dict([path, ("team", team), body]))
        result = attempt.call(name, text)
        if result.failed:
            left.remove(team)
        else:
            step = plan.send(result)
    attempt.turns.append(Turn("assistant", ANSWER if left[1:] else GIVING_UP))
    return attempt.trace(attempt.env.reward())


def drill(rng: random.Random, shares: dict[str, float], whole: bool, pairs: int = 8) -> Trace:
    """Writes, each behind its path and a reminder: episodes alone have too few to learn reading from.

    Whole: of the body that the docstring asks for, with any number, so that copying one is certain and no hint can change it."""
    task = make_world(f"drill-{rng.randrange(10**9)}", "train")
    attempt, tool = Attempt(task, "drill", TeamEnv), next(t for t in task.tools if t.role == "write")
    for _ in range(pairs):
        path, team, shown, body = other_module(str(rng.random())), rng.choice(TEAMS), "", "x"
        if whole:
            function = replace(draw_function(rng, "train"), constant=rng.randrange(10, 100))  # held-out numbers, too
            path, shown, body = f"{path.partition('/')[0]}/{function.name}.py", f"\n\n{function.stub}", function.code
        kind = rng.choices([*shares], [*shares.values()])[0]
        attempt.remind(f"{path}{shown}\n\n{reminder_of(kind, path, team, rng)}", in_place=False)
        taken = team if kind == "exact" else rng.choice(TEAMS)
        values = {tool.arguments["path"]: path, "team": taken, tool.arguments["text"]: body}
        call = ToolCall(tool.name, values, f"call_{len(attempt.turns)}")
        attempt.turns += [Turn("assistant", "", None, (call,)), ToolResult("written").turn(call)]
    return attempt.trace()


def right_turns(trace: Trace) -> set[int]:
    "Positions of the assistant turns that did not fail, without bodies that were written again later."
    spoken = [i for i, t in enumerate(trace.turns) if t.role == "assistant"]
    writes = [i for i in spoken for call in trace.turns[i].tool_calls if ROLE_OF.get(call.name) == "write"]
    return {i for i in spoken if not any(t.failed for t in trace.turns[i + 1:i + 2])} - set(writes[:-1])


ASSISTANT, END = SPECIAL_TOKENS.index("<|assistant|>"), SPECIAL_TOKENS.index("<|end|>")
Sample = tuple[list[int], list[bool]]  # token ids; which of them the assistant produced


def to_sample(
    trace: Trace,
    tokenizer: PreTrainedTokenizerBase,
    learned: Collection[int] | None = None,  # positions of the assistant turns that are learned; None: all
) -> Sample:
    "The rendered trace with the mask of the assistant's tokens."
    text = tokenizer.apply_chat_template(trace.to_messages(), tools=list(trace.tools), tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    turns = iter(i for i, t in enumerate(trace.turns) if t.role == "assistant")
    mask, inside = [], False
    for token in ids:
        mask.append(inside)
        if token == ASSISTANT:
            turn = next(turns)
            inside = learned is None or turn in learned
        elif token == END:
            inside = False
    return ids, mask


def base_samples(
    name: str,  # as `base_episode`
    count: int,  # episodes
    tokenizer: PreTrainedTokenizerFast,
) -> Iterator[Sample]:
    "Samples of an agent's episodes: every turn of an agent is learned, of the trunk only the right ones."
    for trace in (base_episode(name, i) for i in range(count)):
        yield to_sample(trace, tokenizer, right_turns(trace) if name == "trunk" else None)


def collate(batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    "Right-padded ids and mask, both (batch, time)."
    longest = max(len(ids) for ids, _ in batch)
    pad = SPECIAL_TOKENS.index("<|pad|>")
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in batch])
    mask = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in batch])
    return ids, mask


def completion_loss(
    model: Qwen3ForCausalLM,
    ids: torch.Tensor,  # (batch, time)
    mask: torch.Tensor,  # (batch, time)
) -> torch.Tensor:  # nats per assistant token
    "Mean cross-entropy of the masked tokens given what stands before them. Right padding is behind every real token."
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return cross_entropy(model.lm_head(hidden[mask[:, 1:]]), ids[:, 1:][mask[:, 1:]])


def batches(pool: list[Sample], steps: int, size: int, rng: random.Random) -> Iterator[list[Sample]]:
    "That many batches, every sample once a pass, those of like length together."
    queue = []
    for _ in range(steps):
        if not queue:
            order = rng.sample(pool, len(pool))
            window = size * 16
            for start in range(0, len(order), window):
                near = sorted(order[start:start + window], key=lambda s: len(s[0]))
                queue += [near[i:i + size] for i in range(0, len(near), size)]
            rng.shuffle(queue)
        yield queue.pop()


def pretrain(
    pool: list[Sample],
    vocab_size: int,
    steps: int = 400,
    seed: int = 0,  # of the weights and of the order
    batch_size: int = 32,
    progress: bool = True,
    start: Qwen3ForCausalLM | None = None,  # goes on from a copy of this model; None: from random weights
    rate: float = 1.0,  # of the usual learning rates
) -> Qwen3ForCausalLM:
    """A trained model.

    The matrices inside the layers are Muon's, embedding and norms are AdamW's; learning rates warm up over 20 steps and
    fall linearly to a twentieth."""
    model = (deepcopy(start) if start is not None else build_model(vocab_size, seed)).train()
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    outer = [p for p in model.parameters() if all(p is not q for q in inner)]
    optimizers = [torch.optim.Muon(inner, lr=0.02 * rate, weight_decay=0.01),
                  torch.optim.AdamW(outer, lr=3e-3 * rate, betas=(0.9, 0.95), weight_decay=0.0)]
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    rng = random.Random(f"order/{seed}")
    bar = tqdm(batches(pool, steps, batch_size, rng), "steps", total=steps, disable=not progress)
    for step, batch in enumerate(bar):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min((step + 1) / 20, max(0.05, 1 - step / steps))
        loss = completion_loss(model, *collate(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


def train_tokenizer(
    texts: Iterable[str],  # what to learn merges from
    vocab_size: int = 1024,
) -> PreTrainedTokenizerFast:
    "A byte-level BPE tokenizer with the project's special tokens and chat template."
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z]+|\d|[^A-Za-z\d]+?(?= ?[A-Za-z]|\d|\z)")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>",
                                   chat_template=(embedded_path() / "chat_template.jinja").read_text(),
                                   clean_up_tokenization_spaces=False, model_max_length=32768)


VOCABULARY = 640


def make_tokenizer(
    episodes: int = 1500,  # to learn merges from
    vocab_size: int = VOCABULARY,
) -> PreTrainedTokenizerFast:
    "A tokenizer trained on rendered episodes of the trunk's mixture."
    traces = [base_episode("trunk", i) for i in range(episodes)]
    render = AutoTokenizer.from_pretrained(embedded_path()).apply_chat_template  # only the template is used
    return train_tokenizer([render(t.to_messages(), tools=list(t.tools), tokenize=False) for t in traces], vocab_size)


# steps of 32, and different episodes
STAGES = {"trunk": (800, 16000)} | dict.fromkeys(HABITS, (100, 3200)) | dict.fromkeys(TEACHERS, (60, 1920))
STAGES |= {"teams-reads": (80, 2560), "teams-follows": (300, 9600), "teams": (150, 4800)}
START = {"teams-reads": "teacher-1", "teams-follows": "teams-reads", "teams": "teams-follows"}  # others start from the trunk
RATE = dict.fromkeys(HABITS, 0.3) | dict.fromkeys((*TEACHERS, *START), 0.5)  # of the usual learning rates


def _before(name: str, folder: Path) -> Path:
    "Where the weights lie that a stage starts from; a shipped agent's where they were not made here."
    before = START.get(name, "trunk")
    if (folder / before / "made.json").exists():
        return folder / before
    if before not in TEACHERS:
        raise ValueError(f"{folder.name} holds no {before} to start {name} from; make that stage first.")
    return embedded_path() / before


def make_stage(
    name: str,  # a key of `STAGES`
    folder: Path,  # holds a folder per stage
    tokenizer: PreTrainedTokenizerFast,
    size: tuple[int, int] | None = None,  # steps and episodes; None: those of `STAGES`
    seed: int = 0,
    progress: bool = True,
) -> dict:  # {"name", "steps", "episodes", "tokens", "seconds", "seed"}
    """Train a stage, or tell what is known of it where its weights lie already.

    Raises `ValueError` for an unknown name, and where the stage before it is missing."""
    if name not in STAGES:
        raise ValueError(f"stage {name!r} is unknown; use {', '.join(STAGES)}.")
    done = folder / name / "made.json"
    if done.exists():
        return json.loads(done.read_text())
    start, begun, (steps, episodes) = None, time.monotonic(), size or STAGES[name]
    if name != "trunk":
        start = read_weights(build_model(len(tokenizer)), _before(name, folder))
    pool = list(base_samples(name, episodes, tokenizer))
    model = pretrain(pool, len(tokenizer), steps, seed, progress=progress, start=start, rate=RATE.get(name, 1.0))
    facts = {"name": name, "steps": steps, "episodes": episodes, "tokens": sum(len(ids) for ids, _ in pool),
             "seconds": round(time.monotonic() - begun, 1), "seed": seed}
    _write_stage(model, folder / name, facts)
    return facts


def save_weights(
    model: Qwen3ForCausalLM,
    folder: Path,  # made where it is absent
) -> None:
    "Write configuration and weights; the weights are rounded to bfloat16, and the model itself is rounded with them."
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.config.save_pretrained(folder)
    weights = {k: v.bfloat16().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_stage(model: Qwen3ForCausalLM, folder: Path, facts: dict):
    "Weights and facts appear together, or not at all."
    half = folder.with_name(f".{folder.name}.{os.getpid()}")
    save_weights(model, half)
    (half / "made.json").write_text(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(half, folder)

def make_bases(
    folder: Path,  # holds a folder per stage and the tokenizer's files
    workers: int = 2,  # branches trained at a time; threads of the trunk
) -> list[dict]:  # as `make_stage`, the trunk first
    "Make what is missing of tokenizer, trunk and branches."
    if not (folder / "tokenizer.json").exists():
        make_tokenizer().save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        made = [make_stage("trunk", folder, tokenizer)]
    finally:
        torch.set_num_threads(threads)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting = [pool.submit(make_stage, name, folder, tokenizer, progress=False) for name in AGENTS]
        made += [w.result() for w in waiting]
    return made + [make_stage(name, folder, tokenizer) for name in START]


if __name__ == "__main__":  # the agent of the world of teams alone, from the shipped teacher
    for stage in START:
        print(make_stage(stage, Path(__file__).parent / "made", AutoTokenizer.from_pretrained(embedded_path()), progress=False))
