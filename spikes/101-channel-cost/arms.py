"Rollouts and arms of spike 101; the notebook and its child processes share them."
import json
import random
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as TRL_TILE

from composer_replication.core.trace import Trace
from composer_replication.hints.layers import default_composite
from composer_replication.losses.channels import teacher_states
from composer_replication.losses.chunked import LMHead, token_logprobs, token_terms
from composer_replication.losses.divergences import Divergence
from composer_replication.replay.pairs import DPOPair, group_pairs
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.training.passes import score_sampled
from composer_replication.training.reading import Models
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.build import build_tree
from composer_replication.tree.example import RolloutTree, target_hints, target_turns

warnings.filterwarnings("ignore")


def tokenizer_of(data):
    made = AutoTokenizer.from_pretrained(Path(data) / "tokenizers" / "qwen2.5")
    made.pad_token = made.pad_token or made.eos_token
    return made


# ---- rollouts

def rounds_of(traces, chat):
    """Every call with its result of the traces: (assistant turn, result, tokens of either, whether it is a detected error).

    Errors without a hint are left out."""
    found = []
    for trace in traces:
        tree, wrong = build_tree(trace, chat), dict(target_hints(trace, target_turns(trace), default_composite()))
        for span, after in zip(tree.spans, tree.spans[1:]):
            said, answer = trace.turns[span.turn], trace.turns[span.turn + 1]
            alone = after.turn == span.turn + 2 and answer.role == "tool" and len(said.tool_calls) == 1
            if alone and wrong.get(span.turn, "") is not None:
                found.append((said, answer, span.end - span.start, after.start - span.end, span.turn in wrong))
    return found


def assemble(name, prompt, rounds):
    "A trace of a prompt and calls with results, the call ids made unique."
    turns = list(prompt)
    for i, (said, answer, *_) in enumerate(rounds):
        call = replace(said.tool_calls[0], id=f"call-{i}")
        turns += [replace(said, tool_calls=(call,)), replace(answer, tool_call_id=f"call-{i}")]
    return Trace(name, tuple(turns), format="mini-swe-agent")


def rollout(traces, pool, chat, length, errors, seed):
    "A multi-turn rollout of about `length` tokens with `errors` error turns, and other answers for its pairs."
    draw = random.Random(f"{seed}/{length}")
    wrong, right = [r for r in pool if r[4]], [r for r in pool if not r[4]]
    every = wrong
    usual, result = median(r[2] for r in wrong), median(r[3] for r in wrong)
    share = min(result, 0.85 * length / max(errors, 1) - usual)  # what is left for a result when all errors must fit
    wrong = sorted(wrong, key=lambda r: (r[3] > 1.3 * share, abs(r[2] - usual)))[:errors]
    right = [r for r in right if r[2] + r[3] < 400]
    room, rounds = 0.75 * length - sum(r[2] + r[3] for r in wrong), []
    while room > 60 and (fits := [r for r in right if r[2] + r[3] <= room]):
        rounds.append(draw.choice(fits))
        room -= rounds[-1][2] + rounds[-1][3]
    last = min(right, key=lambda r: abs(r[2] - 20))
    rounds = rounds + wrong
    draw.shuffle(rounds)
    rounds.append(last)  # the rollout ends with a turn that does not fail
    system, task = traces[0].turns[:2]
    text = " ".join(t.turns[1].content for t in traces[:3])
    low, high = 1, len(text)
    while low < high:  # the longest prompt with which the rollout is no longer than asked for
        middle = (low + high + 1) // 2
        tree = build_tree(assemble("x", (system, replace(task, content=text[:middle])), rounds), chat)
        low, high = (middle, high) if tree.spans[-1].end <= length else (low, middle - 1)
    trace = assemble(f"rollout-{length}", (system, replace(task, content=text[:low])), rounds)
    other = sorted(right, key=lambda r: abs(r[2] - usual))[:errors]
    facts = {"error_turn_median": usual, "error_turn_mean": sum(r[2] for r in every) / len(every), "result_median": result,
             "error_turns_used": [r[2] for r in wrong], "results_used": [r[3] for r in wrong],
             "answers_used": [r[2] for r in other]}
    return trace, [r[0] for r in other], facts


def rows_of(trace, answers, chat, counts):
    "The rollout's tree with all hints and pairs, cut to each number of error turns: {count: {channels: RolloutTree}}."
    bare = build_tree(trace, chat)
    ids, mask = bare.ids[:bare.spans[-1].end], [0] * bare.spans[-1].end
    for span in bare.spans:
        mask[span.start:span.end] = [1] * (span.end - span.start)
    trace = replace(trace, turns=trace.turns[:bare.spans[-1].turn + 1])
    targets = target_turns(trace)
    assert len(targets) == max(counts), f"{len(targets)} error turns were found"
    hints = target_hints(trace, targets, default_composite())
    pairs = [DPOPair(trace.trace_id, turn, a, trace.turns[turn], "spike") for turn, a in zip(targets, answers)]
    made = {}
    for count in counts:
        taken = [i for i in range(len(targets)) if (i + 1) * count // len(targets) > i * count // len(targets)]  # spread evenly
        some, ours = [hints[i] for i in taken], [pairs[i] for i in taken]
        build = lambda h, p: RolloutTree(trace, build_tree(trace, chat, h, p, sampled=(ids, mask)))
        made[count] = {"hints": build(some, ()), "pairs": build((), ours), "both": build(some, ours)}
        for row in made[count].values():
            assert not row.tree.refused, row.tree.refused
    return made, mask


def batch_of(row, mask, pad):
    "What TRL's `_compute_loss` reads, for one row."
    ids, first = row.tree.ids, row.tree.spans[0].start if row.tree.spans else mask.index(1)
    t = lambda x: torch.tensor([x])
    return {"prompt_ids": t(ids[:first]), "prompt_mask": t([1] * first), "completion_ids": t(ids[first:]),
            "completion_mask": t([1] * (len(ids) - first)), "tool_mask": t(mask[first:]), "advantages": torch.tensor([0.7]),
            "num_items_in_batch": torch.tensor(float(sum(mask))), "composer_rows": [row]}


def sdpo_batch(row, pad):
    "What TRL's SDPOTrainer reads: one row per error turn, the trunk before it as its prompt; the teacher's with the hint."
    tree, prompts, told, said = row.tree, [], [], []
    for b in (b for b in tree.branches if b.kind == "hint"):
        span = tree.span(b.turn)
        prompts.append(tree.ids[:span.start])
        told.append((*tree.ids[:b.fork], *b.ids[:b.start]))
        said.append(tree.ids[span.start:span.end])
    left = lambda rows, fill: torch.tensor([[fill] * (max(map(len, rows)) - len(r)) + list(r) for r in rows])
    right = lambda rows, fill: torch.tensor([list(r) + [fill] * (max(map(len, rows)) - len(r)) for r in rows])
    ones = lambda rows: [[1] * len(r) for r in rows]
    end, end_mask = right(said, pad), right(ones(said), 0)
    return {"prompt_ids": left(prompts, pad), "prompt_mask": left(ones(prompts), 0),
            "completion_ids": end, "completion_mask": end_mask,
            "teacher_input_ids": torch.cat([left(told, pad), end], 1),
            "teacher_attention_mask": torch.cat([left(ones(told), 0), end_mask], 1), "advantages": torch.full((len(said),), 0.7)}


# ---- arms

def make_model(shape, checkpointing=False, device="cpu"):
    "A random Qwen2 of the given shape."
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{"max_position_embeddings": 32768, "tie_word_embeddings": True} | shape)).to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class ReadsRows(Models):
    def behind_hints(self, model, part, batch, forward):
        return teacher_states(model, batch, method="rows")


class RowPerTurn(ComposerReplicationTrainer):
    "Arm (c): the teacher reads every hinted turn in a row of its own, trunk included."

    def _models(self):
        return ReadsRows(**vars(super()._models()))


ARMS = {"frozen": ("frozen", 1, 0, "hints"), "ema": ("ema", 1, 0, "hints"), "live": ("live", 1, 0, "hints"),
        "replay": ("ema", 0, 1, "pairs"), "all, frozen": ("frozen", 1, 1, "both"), "all, ema": ("ema", 1, 1, "both"),
        "all, live": ("live", 1, 1, "both"), "rows": ("ema", 1, 0, "hints")}


def trainer_of(arm, model, tokenizer, checkpointing=False):
    "A real trainer around the model, never run: only its loss is asked for."
    common = dict(report_to="none", use_cpu=not torch.cuda.is_available(), bf16=False, per_device_train_batch_size=1,
                  save_strategy="no", gradient_checkpointing=checkpointing, disable_tqdm=True)
    folder, reward = tempfile.mkdtemp(), lambda completions, **kwargs: [0.0] * len(completions)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * 2)
    grpo = common | dict(loss_type="dr_grpo", scale_rewards="none", num_generations=2, steps_per_generation=2)
    if arm == "grpo":
        made = GRPOTrainer(model, reward, GRPOConfig(folder, **grpo), data, processing_class=tokenizer)
    elif arm == "sdpo":
        config = SDPOConfig(folder, **common, num_generations=2, steps_per_generation=2, distillation_alpha=1.0,
                            distillation_mode="full_logits", distillation_weight=1.0, teacher_model_kind="live")
        made = SDPOTrainer(model, reward, config, data, processing_class=tokenizer)
    else:
        teacher, alpha, beta, _ = ARMS[arm]
        kind = RowPerTurn if arm == "rows" else ComposerReplicationTrainer
        config = ComposerReplicationConfig(folder, **grpo, alpha_sdpo=alpha, beta_replay=beta, teacher=teacher)
        made = kind(model, reward, config, data, processing_class=tokenizer, hint_source=default_composite() if alpha else None,
                    pair_source=group_pairs if beta else None)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def step(trainer, inputs):
    "Loss and backward pass, as one accumulation window of one row."
    trainer._buffered_inputs, trainer._step = [inputs], 0
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach()


class Clock:
    "CPU seconds and wall seconds of this process; on a GPU, seconds between events."

    def __enter__(self):
        self.gpu = torch.cuda.is_available()
        if self.gpu:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.events[0].record()
        self.start = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_):
        if self.gpu:
            self.events[1].record()
            torch.cuda.synchronize()
        self.wall = time.perf_counter() - self.start[1]
        self.seconds = self.events[0].elapsed_time(self.events[1]) / 1000 if self.gpu else time.process_time() - self.start[0]


def mib(field):
    "A line of this process's memory in /proc, MiB."
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(field))


# ---- the cost model

def multiply_adds(shape, adapter=False, checkpointing=False):
    "What a token costs: through the body, per key it sees, and through the head in each of its uses."
    h, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    body = layers * (2 * h * h + 2 * h * h * shape["num_key_value_heads"] // heads + 3 * h * shape["intermediate_size"])
    head = shape["vocab_size"] * h
    trained = 0 if adapter else 1  # an adapter leaves out the gradients of the weights
    return {"forward": body, "step": (2 + trained + checkpointing) * body,
            "key": 2 * layers * h, "key step": (3.5 + checkpointing) * 2 * layers * h,
            "policy head": (3 + trained) * head, "sampled head": (3 + trained) * head, "divergence": (4 + trained) * head,
            "answer head": (3 + trained) * head, "reference head": head}


def predict(costs, tree, arm, scored=None):
    """Cost of a step by part. `scored`: tokens whose logits TRL forms; None: all but one, as it does where there is no Triton.

    With a channel no token goes twice through the same weights, so that no way of making the same step multiplies less."""
    n = len(tree.ids)
    parts = {"policy body": n * costs["step"] + costs["key step"] * n * n / 2,
             "policy head": (n - 1 if scored is None else scored) * costs["policy head"]}
    if arm == "grpo" or not tree.branches:  # then TRL's own pass
        return parts
    hints = [b for b in tree.branches if b.kind == "hint"]
    sampled = sum(span.end - span.start for span in tree.spans)
    parts["policy head"] = (sampled - sum(len(b.ids) - b.start for b in hints)) * costs["sampled head"]
    chosen, rejected = ([b for b in tree.branches if b.kind == kind] for kind in ("chosen", "rejected"))
    last = lambda some: max(b.fork for b in some)
    trunk = lambda some: last(some) * costs["forward"] + costs["key"] * last(some)**2 / 2
    branch = lambda some, way="forward", key="key": sum(
        len(b.ids) * (costs[way] + costs[key] * (b.fork + len(b.ids))) for b in some)
    own = lambda some: sum(len(b.ids) - b.start for b in some)
    if hints:
        if arm == "rows":
            long = [b.fork + len(b.ids) for b in hints]
            parts["teacher's rows"] = sum(n * costs["forward"] + costs["key"] * n * n / 2 for n in long)
        else:
            parts["teacher's trunk"] = 0 if ARMS[arm][0] == "live" else trunk(hints)
            parts["teacher's branches"] = branch(hints)
        parts["divergence"] = own(hints) * costs["divergence"]
    if chosen:  # the rejected answer is the rollout's own turn: read off the reference's trunk, and judged by TRL already
        end = max(b.fork + len(b.ids) for b in rejected) - 1
        if hints and ARMS[arm][0] == "frozen":  # the same weights read both
            end, parts["teacher's trunk"] = max(end, last(hints)), 0
        parts["reference's trunk"] = end * costs["forward"] + costs["key"] * end**2 / 2
        parts["reference's answers"] = branch(chosen) + own(chosen + rejected) * costs["reference head"]
        parts["policy's answers"] = branch(chosen, "step", "key step") + own(chosen) * costs["answer head"]
    return parts


def counted(tree_rows, mask, arm, model, tokenizer):
    "Multiply-adds of the matrix products that the trainer's step runs, attention left out, as torch counts them."
    few = model.config.vocab_size
    data = json.loads(json.dumps(tree_rows.to_data()))
    data["tree"]["ids"] = [i % few for i in data["tree"]["ids"]]
    for b in data["tree"]["branches"]:
        b["ids"] = [i % few for i in b["ids"]]
    added = {torch.ops.aten.addmm_: lambda s, a, b, *_, out_shape=None, **k: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=added) as counter:
        step(trainer_of(arm, model, tokenizer), batch_of(RolloutTree.from_data(data), mask, 0))
    return sum(counter.get_flop_counts()["Global"].values()) / 2


def mean_time(run, times=3):
    "Median CPU seconds (on a GPU: seconds between events)."
    taken = []
    for _ in range(times):
        with Clock() as clock:
            run()
        taken.append(clock.seconds)
    return median(taken)


def measured_costs(shape, tokens, context, device="cpu", times=3, layers=None):
    "The same costs as seconds, each part timed alone; the body with `layers` layers, if given, and scaled to the shape's."
    few = shape | {"num_hidden_layers": layers or shape["num_hidden_layers"]}
    body = make_model(few | {"vocab_size": 512}, device=device)
    ids = torch.randint(0, 512, (1, context), device=device)

    def forward():
        with torch.no_grad():
            body.base_model(ids, use_cache=False)

    def whole():
        body.base_model(ids, use_cache=False).last_hidden_state.sum().backward()

    whole()
    scale = shape["num_hidden_layers"] / few["num_hidden_layers"] / context
    costs = {"forward": mean_time(forward, times) * scale, "step": mean_time(whole, times) * scale, "key": 0.0, "key step": 0.0}
    draw = torch.Generator().manual_seed(0)
    state = lambda: torch.randn(tokens, shape["hidden_size"], generator=draw).to(device).requires_grad_()
    weight = (torch.randn(shape["vocab_size"], shape["hidden_size"], generator=draw) * 0.02).to(device).requires_grad_()
    student, teacher, head = state(), state().detach(), LMHead(weight)
    labels = torch.randint(0, shape["vocab_size"], (tokens,), generator=draw).to(device)
    divergence = Divergence(1.0, 1.0, "student_top_k", 20, True)  # the trainer's default
    trl = lambda: ChunkedLogProbFunction.apply(student, weight, None, labels, 1.0, TRL_TILE, None, 1.0,
                                               ("log_probs", "entropy"))[0].sum().backward()
    ours = lambda: token_terms(student, head, teacher, head.detach(), labels, divergence).divergence.sum().backward()
    answers = lambda: token_logprobs(student, head, labels).sum().backward()
    every = torch.ones_like(labels[None], dtype=torch.bool)
    sampled = lambda: score_sampled(student[None], head, labels[None], every, 1.0)[0].sum().backward()

    def reference():
        with torch.no_grad():
            token_logprobs(teacher, head.detach(), labels)

    for name, run in (("policy head", trl), ("sampled head", sampled), ("divergence", ours), ("answer head", answers),
                      ("reference head", reference)):
        costs[name] = mean_time(run, times) / tokens
    return costs


def child(spec):
    "One arm in a process of its own: memory before, at the peak, and CPU seconds."
    torch.set_num_threads(1)
    tokenizer = tokenizer_of(spec["data"])
    model = make_model(spec["shape"], spec["checkpointing"], spec["device"])
    trainer = trainer_of(spec["arm"], model, tokenizer, spec["checkpointing"])
    row = RolloutTree.from_data(spec["row"])
    to = lambda inputs: {k: v.to(spec["device"]) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    pad = tokenizer.pad_token_id
    inputs = to(sdpo_batch(row, pad) if spec["arm"] == "sdpo" else batch_of(row, spec["mask"], pad))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = mib("VmRSS")
    with Clock() as clock:
        step(trainer, inputs)
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else mib("VmHWM")
    print(json.dumps({"before_mib": before, "peak_mib": peak, "weights_mib": weights, "seconds": clock.seconds,
                      "wall": clock.wall}))


if __name__ == "__main__":
    child(json.loads(Path(sys.argv[1]).read_text()))
