"""Stage d: vLLM as the engine of rollouts against transformers: log-probabilities, stop tokens, a second turn, and new weights.

Facts that shape it: log-probabilities must be the processed ones, an engine in this process takes new weights by `apply_model`,
and prefix caches must be emptied after that.
"""
import os
import time

from common import Stage

NATS = 0.05  # mean absolute difference of a token's log-probability that bf16 explains
PROMPTS = ("Say hello.", "Name three colours.", "What is 17 + 25?", "List the files of a small Python project.")


def compared(policy, score, tokenizer, prompts, tokens: int) -> dict:
    "Two turns of each prompt: differences to the scorer's log-probabilities, and whether each answer ends as it must."
    from composer_replication.rollout.sampling import Sampling
    ids = [context(tokenizer, text) for text in prompts]
    ask = context(tokenizer, "Go on.")
    rows, before, differences, ends = range(len(ids)), [[] for _ in ids], [], []
    with policy.batch(Sampling()) as playing:
        for turn in range(2):
            contexts = ids if turn == 0 else [ask] * len(ids)
            samples = playing.sample([*rows], contexts, [tokens] * len(ids), [f"{turn}/{row}" for row in rows])
            for row, sample in zip(rows, samples):
                before[row] += contexts[row]
                wanted = score(before[row], sample.ids)
                differences += [abs(a - b) for a, b in zip(sample.logprobs, wanted, strict=True)]
                inside = any(token in policy.stops for token in sample.ids[:-1])
                ends.append(not inside and (sample.ids[-1] in policy.stops or len(sample.ids) == tokens))
                before[row] += sample.ids
    return {"tokens": len(differences), "mean": sum(differences) / len(differences), "worst": max(differences), "ends": all(ends)}


def context(tokenizer, text: str) -> list[int]:
    "Ids of one message of the user, with the beginning of an answer."
    made = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True)
    return list(made["input_ids"] if hasattr(made, "keys") else made)


def scorer(model):
    "Log-probabilities of new ids after a context, by one plain forward pass."
    import torch

    def score(before, new):
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *new]], device=model.device)).logits[0, len(before) - 1:-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(new, device=model.device)[:, None])[:, 0].tolist()

    return score


def changed(model) -> None:
    "Other weights, as after an optimizer step that nobody could miss."
    import torch
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).to(weight.device)
            weight.add_((drawn * weight.float().std() * 0.05).to(weight.dtype))


def engine(folder: str):
    "vLLM in this process, and what gives it the weights of a model."
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    from vllm import LLM

    from composer_replication.rollout.policies import vllm_policy
    llm = LLM(folder, dtype="bfloat16", max_model_len=2048, max_num_seqs=16, gpu_memory_utilization=0.4, seed=0,
              enforce_eager=True, logprobs_mode="processed_logprobs", enable_prefix_caching=True)

    def sync(model):
        weights = [(name, weight.detach()) for name, weight in model.named_parameters()]
        llm.apply_model(lambda inner: inner.load_weights(weights))
        llm.reset_prefix_cache()

    return vllm_policy(llm, llm.get_tokenizer()), sync


def stand_in(model, tokenizer):
    "transformers in the engine's place, with weights of its own: tries this stage, says nothing of vLLM."
    from copy import deepcopy

    from composer_replication.rollout.policies import TransformersPolicy
    own = deepcopy(model)
    return TransformersPolicy(own, tokenizer), lambda other: own.load_state_dict(other.state_dict())


def loaded(stage: Stage):
    "Folder, model and tokenizer: --model, else a small one with random weights."
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
    if stage.tiny:
        return None, embedded_model().float().eval(), embedded_tokenizer()
    if stage.given.model:
        model = AutoModelForCausalLM.from_pretrained(stage.given.model, dtype=torch.bfloat16)
        return stage.given.model, model.to("cuda").eval(), AutoTokenizer.from_pretrained(stage.given.model)
    folder, tokenizer = stage.out / "work" / "vllm", embedded_tokenizer()
    shape = AutoConfig.for_model(
        "qwen2", hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), model.to("cuda").eval(), tokenizer


def main() -> None:
    stage = Stage("d", __doc__)
    stage.needs = () if stage.tiny else ("vllm",)
    stage.check()
    folder, model, tokenizer = loaded(stage)
    begun = time.monotonic()
    policy, sync = stand_in(model, tokenizer) if stage.tiny else engine(folder)
    started, tokens = time.monotonic() - begun, 8 if stage.tiny else 64
    first = compared(policy, scorer(model), tokenizer, PROMPTS, tokens)
    changed(model)
    stale = compared(policy, scorer(model), tokenizer, PROMPTS, tokens)  # the engine's weights are the old ones
    sync(model)
    synced = compared(policy, scorer(model), tokenizer, PROMPTS, tokens)
    checks = {"log-probabilities": first["mean"] <= NATS,
              "answers end at a stop token or the limit": first["ends"] and synced["ends"],
              "other weights are noticed": stale["mean"] > 2 * first["mean"] + 0.01,
              "log-probabilities after new weights": synced["mean"] <= NATS}
    stage.write(checks, {"engine": "transformers, a stand-in" if stage.tiny else "vllm", "started_seconds": round(started, 1),
                         "before": first, "stale": stale, "after": synced})


if __name__ == "__main__":
    main()
