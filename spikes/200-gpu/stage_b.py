"""Stage b: seconds and peak memory of a step of each channel on the shapes of Qwen2.5-0.5B and 7B, random weights, bf16.

Every case is the shipped recipe of that size with one row of a synthetic rollout; measured memory stands beside `--dry-run`'s
estimate, measured seconds beside the bounds of spike 101, its multiply-adds beside what the card can do. Then the sampler alone.
"""
import gc
import json
import sys
import time
from statistics import median

from common import ROOT, Stage

ALL = "grpo", "sdpo, live", "sdpo, frozen", "sdpo, ema", "replay", "all, live", "all, frozen", "all, ema"
FEW = "grpo", "sdpo, live", "sdpo, frozen", "all, frozen"
# recipe, whether activations are computed again, attention, a shape in the place of the recipe's, arms; most telling first
CASES = {"0.5B": ("qwen2.5-0.5b-gsm8k", False, "sdpa", None, FEW), "7B LoRA": ("qwen2.5-coder-7b-lora", False, "sdpa", None, FEW),
         "0.5B, flex_attention": ("qwen2.5-0.5b-gsm8k", False, "flex_attention", None, FEW),
         "7B full, checkpointing": ("qwen2.5-coder-7b-full", True, "sdpa", None, FEW),
         "7B LoRA, flex_attention": ("qwen2.5-coder-7b-lora", False, "flex_attention", None, FEW),
         "hybrid": ("qwen2.5-0.5b-gsm8k", False, "sdpa", "hybrid", FEW),
         "0.5B, checkpointing": ("qwen2.5-0.5b-gsm8k", True, "sdpa", None, FEW),
         "7B LoRA, checkpointing": ("qwen2.5-coder-7b-lora", True, "sdpa", None, FEW)}
ARMS = {"grpo": (0, 0, "frozen"), "sdpo, live": (1, 0, "live"), "sdpo, frozen": (1, 0, "frozen"), "sdpo, ema": (1, 0, "ema"),
        "replay": (0, 1, "frozen"), "all, live": (1, 1, "live"), "all, frozen": (1, 1, "frozen"), "all, ema": (1, 1, "ema")}
BOUND = {"sdpo, live": 1.2, "sdpo, frozen": 1.4, "sdpo, ema": 1.4,  # spike 101's, in GRPO steps
         "all, live": 1.6, "all, frozen": 1.6, "all, ema": 1.6}
MEMORY = (0.7, 1.25)  # measured over estimated
TINY = dict(model_type="qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=4096, max_position_embeddings=4096, tie_word_embeddings=True)
HYBRID = dict(model_type="lfm2", hidden_size=1024, intermediate_size=4608, block_auto_adjust_ff_dim=False, num_hidden_layers=16,
              num_attention_heads=16, num_key_value_heads=8, vocab_size=65536, max_position_embeddings=32768,
              layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)])  # about LFM2-350M's
TINY_HYBRID = TINY | dict(model_type="lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
TINY_CASES = {"tiny": ("qwen2.5-coder-7b-lora", False, "sdpa", None, ALL),  # FlexAttention has no backward pass on a CPU
              "tiny hybrid": ("qwen2.5-0.5b-gsm8k", False, "sdpa", "hybrid", FEW)}
TOKENS, ERRORS, REPEATS = 4096, 8, 5
WARM = range(3, 21)  # steps before those that are timed, until steady; one, on 27 November 2026, was too few
SAMPLED = dict(rows=64, prompt=512, new=256)  # of the sampler's case
# bf16, dense, operations a second, as the makers give them
PEAK = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}


def rollout(chat, tokens: int, errors: int):
    "A trace of about so many tokens in which the given number of calls fail, and another answer for each of those."
    from composer_replication.core.trace import ToolCall, Trace, Turn
    from composer_replication.tree.build import build_tree
    tool = {"type": "function", "function": {"name": "read_file", "description": "Read a file.", "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}
    call = lambda path, name: Turn("assistant", "", tool_calls=(ToolCall("read_file", {"path": path}, id=name),))
    turns, broken = [Turn("user", "Say which of the files holds the function, and what it returns.")], []
    while len(broken) < errors or len(build_tree(Trace("row", tuple(turns), (tool,)), chat).ids) < tokens:
        number, failing = len(turns) // 2, len(turns) % 4 == 3 and len(broken) < errors
        if failing:
            broken.append(len(turns))
        text = "No such file or directory" if failing else "def part(value):\n    return value + 1\n" * 8
        turns += [call(f"src/part_{number}.py", f"c{number}"), Turn("tool", text, tool_call_id=f"c{number}", name="read_file",
                                                                     observation=True, failed=failing)]
    others = [call(f"src/whole_{turn}.py", f"c{turn // 2}") for turn in broken]
    return Trace("row", (*turns, Turn("assistant", "It is the last one.")), (tool,)), dict(zip(broken, others))


def row_of(trace, answers, chat, alpha: float, beta: float):
    "The rollout's tree with what the arm's channels read, and 1 where the assistant sampled a token."
    from composer_replication.hints.layers import default_composite
    from composer_replication.replay.pairs import DPOPair
    from composer_replication.tree.build import build_tree
    from composer_replication.tree.example import RolloutTree, target_hints, target_turns
    bare = build_tree(trace, chat)
    ids, mask = bare.ids[:bare.spans[-1].end], [0] * bare.spans[-1].end
    for span in bare.spans:
        mask[span.start:span.end] = [1] * (span.end - span.start)
    hints = target_hints(trace, target_turns(trace), default_composite()) if alpha else ()
    pairs = [DPOPair(trace.trace_id, turn, answer, trace.turns[turn], "programme") for turn, answer in answers.items()]
    tree = build_tree(trace, chat, hints, pairs if beta else (), sampled=(ids, mask))
    if tree.refused or len(tree.branches) != len(answers) * (bool(alpha) + 2 * bool(beta)):
        raise RuntimeError(f"the rollout has other branches than it should: {tree.refused}")
    return RolloutTree(trace, tree), mask


def inputs_of(row, mask, device):
    "What TRL's loss reads, for one row."
    import torch
    ids, first = row.tree.ids, mask.index(1)
    t = lambda x: torch.tensor([x], device=device)
    return {"prompt_ids": t(ids[:first]), "prompt_mask": t([1] * first), "completion_ids": t(ids[first:]),
            "completion_mask": t([1] * (len(ids) - first)), "tool_mask": t(mask[first:]),
            "advantages": torch.tensor([0.7], device=device),
            "num_items_in_batch": torch.tensor(float(sum(mask)), device=device), "composer_rows": [row]}


def shape_of(stage: Stage, name: str, other: str | None) -> dict:
    "The model's, as config.json has it."
    from published_shapes import SHAPES

    from composer_replication.recipes.recipe import load_recipe
    if stage.tiny:
        return TINY_HYBRID if other else TINY
    return HYBRID if other else SHAPES[load_recipe(name, estimating=True).arguments.model]


def recipe_of(stage: Stage, name: str, checkpointing: bool, attention: str, shape: dict, arm: str, completion: int):
    "The shipped recipe of this size, on one row, with the arm's channels."
    from composer_replication.recipes.recipe import load_recipe
    alpha, beta, teacher = ARMS[arm]
    folder = stage.out / "work" / f"{name}-{shape['model_type']}{'-tiny' * stage.tiny}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    values = dict(model=f"random:{folder / 'config.json'}", tokenizer="embedded", task="toy", tasks="null", train_rows=4,
                  held_out_rows=0, curriculum="false", rollout="transformers", alpha_sdpo=alpha, beta_replay=beta,
                  teacher=teacher, replay_pairs="[group]" if beta else "null", per_device_train_batch_size=1,
                  gradient_accumulation_steps=2, num_generations=2, max_completion_length=completion,
                  gradient_checkpointing=str(checkpointing).lower(), output_dir=str(folder / "run"),
                  report_to="none", attn_implementation=attention, disable_tqdm="true")
    if stage.tiny:
        values |= dict(use_cpu="true", bf16="false", dtype="float32")
    return load_recipe(name, {key: str(value) for key, value in values.items()})


def trainer_of(recipe, device):
    "The recipe's trainer around random weights made on the device; never run, only asked for its loss."
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import get_peft_config

    from composer_replication.envs.toy.model import embedded_tokenizer
    from composer_replication.hints.layers import default_composite
    from composer_replication.recipes.memory_estimate import model_shape
    from composer_replication.replay.pairs import group_pairs
    from composer_replication.training.trainer import ComposerReplicationTrainer
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_shape(recipe.arguments.model), dtype=getattr(torch, recipe.model.dtype),
                                                 attn_implementation=recipe.model.attn_implementation)
    data, config = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * 2), recipe.config
    made = ComposerReplicationTrainer(
        model, lambda completions, **kwargs: [0.0] * len(completions), config, data, processing_class=embedded_tokenizer(),
        hint_source=default_composite() if config.alpha_sdpo else None, pair_source=group_pairs if config.beta_replay else None,
        peft_config=get_peft_config(recipe.model))
    made.current_gradient_accumulation_steps, made.prepared = 1, made.accelerator.prepare_model(made.model)
    made.prepared.train()
    made.create_optimizer()
    return made


def step(trainer, inputs) -> float:
    "One optimizer step on one row; the loss."
    trainer._buffered_inputs, trainer._step = [inputs], 0
    loss = trainer.compute_loss(trainer.prepared, inputs)
    trainer.accelerator.backward(loss)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=False)
    return loss.item()


def steady(seconds: list[float]) -> bool:
    "Whether the last three steps took the same time within a twentieth, after as many as a warm-up needs at least, or at most."
    last = seconds[-3:]
    return len(seconds) >= WARM.stop - 1 or len(seconds) >= WARM.start and max(last) <= 1.05 * min(last)


def measured(stage: Stage, recipe, row, mask) -> dict:
    "Median seconds of a step, peak bytes, and whether every loss was finite."
    import torch
    gpu = stage.device == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer, inputs = trainer_of(recipe, stage.device), inputs_of(row, mask, stage.device)
    losses, warm, seconds = [], [], []

    def timed(into: list[float]) -> None:
        begun = time.perf_counter()
        losses.append(step(trainer, inputs))  # ends with a value, so the device has ended too
        into.append(time.perf_counter() - begun)

    while not (steady(warm) or stage.tiny and warm):
        timed(warm)
    for _ in range(1 if stage.tiny else REPEATS):
        timed(seconds)
    return {"seconds": median(seconds), "each": seconds, "warm": warm, "peak": torch.cuda.max_memory_allocated() if gpu else None,
            "finite": all(map(torch.isfinite, map(torch.tensor, losses)))}


def counted(shape: dict, tree, mask, arm: str, adapter: bool, checkpointing: bool, triton: bool) -> float | None:
    "Multiply-adds of the step, as spike 101 counts them; None where its formula does not hold."
    if shape["model_type"] != "qwen2":
        return None
    sys.path.append(str(ROOT / "spikes" / "101-channel-cost"))
    import arms
    costs = arms.multiply_adds(shape, adapter, checkpointing)
    return sum(arms.predict(costs, tree, arm.removeprefix("sdpo, "), sum(mask) if triton else None).values())


def peak_rate(device: str) -> tuple[float, str]:
    "Operations a second that the device can do, and who says so: its maker, else the best of some large matrix products here."
    import torch
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    known = [rate for card, rate in PEAK.items() if card in name]
    if known:
        return known[0], "maker"
    size, best = (8192, 0.0) if device == "cuda" else (768, 0.0)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for _ in range(20):
        begun = time.perf_counter()
        (a @ a)[0, 0].item()
        best = max(best, 2 * size**3 / (time.perf_counter() - begun))
    return best, "matrix product"


def sampler(stage: Stage) -> dict:
    "Tokens a second of our loop and of transformers' `generate`, same model, prompts and number of tokens."
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from composer_replication.envs.toy.model import embedded_tokenizer
    from composer_replication.rollout.policies import TransformersPolicy
    from composer_replication.rollout.sampling import Sampling
    shape, size = dict(shape_of(stage, "qwen2.5-0.5b-gsm8k", None)), dict(rows=2, prompt=16, new=8) if stage.tiny else SAMPLED
    torch.manual_seed(0)
    with torch.device(stage.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape),
                                                 dtype=torch.float32 if stage.tiny else torch.bfloat16).eval()
    rows = range(size["rows"])
    ids = torch.randint(10, 1000, (len(rows), size["prompt"]), device=stage.device)
    policy = TransformersPolicy(model, embedded_tokenizer())

    def ours():
        with policy.batch(Sampling()) as playing:
            samples = playing.sample([*rows], ids.tolist(), [size["new"]] * len(rows), [f"row {row}" for row in rows])
        return sum(len(sample.ids) for sample in samples)

    def generate():
        new = dict(max_new_tokens=size["new"], min_new_tokens=size["new"])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **new)
        return len(rows) * (len(made[0, ids.shape[1]:].tolist()))

    found = size | {"tokens": {}, "tokens a second": {}}
    for name, run in (("ours", ours), ("generate", generate)):
        run()
        begun = time.perf_counter()
        found["tokens"][name] = run()
        found["tokens a second"][name] = found["tokens"][name] / (time.perf_counter() - begun)
    return found


def case(stage: Stage, name: str, checkpointing: bool, attention: str, other: str | None, arm: str) -> dict:
    "One arm of one size: tokens, measured, estimated."
    import torch

    from composer_replication.envs.toy.model import embedded_tokenizer
    from composer_replication.recipes.memory_estimate import estimate
    from composer_replication.tree.template import probe_template
    chat = probe_template(embedded_tokenizer())
    trace, answers = rollout(chat, 256 if stage.tiny else TOKENS, 2 if stage.tiny else ERRORS)
    row, mask = row_of(trace, answers, chat, *ARMS[arm][:2])
    prompt, shape = mask.index(1), shape_of(stage, name, other)
    recipe = recipe_of(stage, name, checkpointing, attention, shape, arm, len(mask) - prompt)
    plan = estimate(recipe, 1, prompt)
    need = sum(amount for part, amount in plan.memory.items() if part != "rollout cache")  # nothing is sampled here
    multiply_adds = counted(shape, row.tree, mask, arm, recipe.model.use_peft, checkpointing, stage.device == "cuda")
    found = {"tokens": len(mask), "prompt": prompt, "error_turns": len(answers), "estimated": need,
             "multiply_adds": multiply_adds, "way": plan.branches}
    if stage.device == "cuda" and need > 0.97 * torch.cuda.get_device_properties(0).total_memory:
        return found | {"reason": "the estimate is above the device's memory"}
    try:
        found |= measured(stage, recipe, row, mask)
        rate, source = peak_rate(stage.device)
        share = 2 * multiply_adds / found["seconds"] / rate if multiply_adds else None
        found |= {"peak_rate": rate, "peak_rate_by": source, "share_of_peak": share}
        return found | {"tokens_a_second": len(mask) / found["seconds"]}
    except torch.OutOfMemoryError as problem:
        return found | {"reason": str(problem).splitlines()[0]}


def compared(found: dict) -> tuple[dict[str, bool], dict]:
    "Checks against the bounds and the estimates, and the ratios."
    checks, ratios = {}, {}
    for key, row in found.items():
        size, arm = key.split(": ")
        base = found.get(f"{size}: grpo", {})
        if not row.get("seconds"):
            continue
        checks[f"{key}: finite"] = row["finite"]
        if row["peak"]:
            ratios[f"{key}: memory"] = row["peak"] / row["estimated"]
            if "hybrid" not in size:  # the estimate knows dense decoders
                checks[f"{key}: memory as planned"] = MEMORY[0] <= row["peak"] / row["estimated"] <= MEMORY[1]
        if base.get("seconds") and arm != "grpo" and all(base.get(by) == row.get(by) for by in ("card", "commit")):
            ratios[f"{key}: cost"] = row["seconds"] / base["seconds"]
            bound = arm in BOUND and not {"checkpointing", "hybrid"} & set(size.split(", "))  # without recomputation, dense
            if bound and row["peak"]:
                checks[f"{key}: cost in bound"] = row["seconds"] / base["seconds"] <= BOUND[arm]
    return checks, ratios


def main() -> None:
    stage = Stage("b", __doc__)
    stage.check()
    import torch
    earlier = stage.earlier()
    found, sampled, before = (earlier.get(part, {}) for part in ("cases", "sampler", "before"))
    cases = TINY_CASES if stage.tiny else CASES

    def tell(more: dict[str, bool] | None = None) -> None:
        checks, ratios = compared(found)
        facts = {"cases": found, "ratios": ratios, "sampler": sampled, "before": before, "bounds": BOUND, "memory": MEMORY}
        stage.write(checks | (more or {}), facts)

    for size, (*settings, arms) in cases.items():
        for arm in arms:
            key = f"{size}: {arm}"
            if stage.done(found.get(key)) or not stage.fits():
                continue
            begun = time.monotonic()
            if key in found:  # of another commit
                before.setdefault(key, []).append(found[key])
            found[key] = case(stage, *settings, arm) | stage.stamp()
            gc.collect()
            torch.cuda.empty_cache()
            stage.took(begun)
            tell()
        if not stage.done(sampled) and stage.fits():  # after the first size, which it takes the shape of
            if sampled:
                before.setdefault("sampler", []).append(sampled)
            sampled = sampler(stage) | stage.stamp()
            tell()
    keys = [f"{size}: {arm}" for size, (*_, arms) in cases.items() for arm in arms]
    more = {"every case ran": all(map(stage.done, [sampled, *map(found.get, keys)]))}
    if sampled and not stage.tiny:
        rates = sampled["tokens a second"]
        more["our sampler is as quick as generate"] = rates["ours"] >= rates["generate"]
    tell(more)


if __name__ == "__main__":
    main()
