"""Where our sampler's CPU seconds go in the typical setting, what a decode step's matrix products take, and a layer's attention.

    .venv/bin/python spikes/109-engines/parts.py

writes `parts.json` beside itself."""
import json
import time
from collections import Counter
from functools import partial
from statistics import fmean

import torch
from engines import HERE, ROLLOUTS, SETTINGS, TURNS, by_batch, played, read_model
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AutoTokenizer
from transformers.integrations.sdpa_attention import repeat_kv

from composer_replication.recipes.models import fetched_model
from composer_replication.rollout.decode import CachedBatch

TIMES = 20  # repeats of one call


def spent_by(cls, names: tuple[str, ...]) -> Counter:
    "CPU seconds in methods of a class, from now on."
    spent = Counter()

    def timed(name, method):
        def run(self, *given, **more):
            begun = time.process_time()
            try:
                return method(self, *given, **more)
            finally:
                spent[name] += time.process_time() - begun
        return run
    for name in names:
        setattr(cls, name, timed(name, getattr(cls, name)))
    return spent


def seconds(call) -> float:
    "CPU seconds of a call, after a first one."
    call()
    begun = time.process_time()
    for _ in range(TIMES):
        call()
    return (time.process_time() - begun) / TIMES


def products(model) -> dict[str, float]:
    "CPU seconds of all matrix products of one decode step: with weights as they are, and packed for oneDNN."
    taken = dict(plain=0.0, packed=0.0)
    for weight in (m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)):
        x, packed = torch.randn(ROLLOUTS, weight.shape[1]), torch.ops.mkldnn._reorder_linear_weight(weight, ROLLOUTS)
        taken["plain"] += seconds(partial(linear, x, weight))
        taken["packed"] += seconds(partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], ""))
    return taken


def mean_keys() -> int:
    "Positions that a decode step of the typical setting reads, on average."
    prompt, new, result = SETTINGS["typical"]
    return round(fmean(prompt + turn * (new + result) + step for turn in range(TURNS) for step in range(new)))


def attention(config) -> dict[str, float]:
    """CPU seconds of one layer's attention in a decode step: with the query heads of a key head put together, as transformers
    5.23 does it for one new token, and with key heads copied, as 5.17 does."""
    heads, kept = config.num_attention_heads, config.num_key_value_heads
    size, keys = config.hidden_size // heads, mean_keys()
    q, (k, v) = torch.randn(ROLLOUTS, heads, 1, size), torch.randn(2, ROLLOUTS, kept, keys, size)
    mask = torch.zeros(ROLLOUTS, 1, 1, keys)
    together, wide = q.view(ROLLOUTS, kept, heads // kept, size), lambda x: repeat_kv(x, heads // kept)
    return dict(together=seconds(lambda: scaled_dot_product_attention(together, k, v, attn_mask=mask)),
                copied=seconds(lambda: scaled_dot_product_attention(q, wide(k), wide(v), attn_mask=mask)))


@torch.inference_mode()
def main():
    folder = str(fetched_model("smollm2"))
    torch.set_num_threads(1)
    model, spent = read_model(folder), spent_by(CachedBatch, ("_read", "_next"))
    _, _, cpu = played(by_batch(model), "typical", AutoTokenizer.from_pretrained(folder))
    # Since continuous batching prompts are read like results; in parts.json, made before, they stand apart.
    parts = {"_open": 0.0, "_read": spent["_read"], "step": spent["_next"]}
    found = dict(cpu=cpu, parts=parts, products=products(model), attention=attention(model.config), keys=mean_keys(),
                 layers=model.config.num_hidden_layers)
    print(found)
    (HERE / "parts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
