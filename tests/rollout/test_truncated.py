"top_p, top_k and min_p choose which ids are drawn; the log-probabilities are those of all ids, as a trainer scores them."
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from composer_replication.core.errors import InputProblem
from composer_replication.rollout.decode import CachedBatch, RereadBatch
from composer_replication.rollout.sampling import Sampling
from composer_replication.training.setup import check_engine

CUTS = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.7, "top_k": 5, "min_p": 0.1}, {}]


@pytest.mark.parametrize("kind", [CachedBatch, RereadBatch])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6, 0.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_log_probabilities_are_those_of_the_whole_distribution(kind, temperature, cut):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, initializer_range=0.5)).eval()
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    batch = kind(model, frozenset({1}), Sampling(temperature, **cut))
    for prompt, sample in zip(prompts, batch.sample([0, 1], prompts, [12, 12], "ab")):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *sample.ids]])).logits[0, len(prompt) - 1 : -1].double()
        logprobs = (logits / (temperature or 1)).log_softmax(-1)
        wanted = logprobs.gather(-1, torch.tensor(sample.ids)[:, None])
        torch.testing.assert_close(torch.tensor(sample.logprobs).double(), wanted[:, 0], atol=1e-4, rtol=0)
        if temperature and "top_k" in cut:
            ranks = (logprobs > wanted).sum(-1)
            assert ranks.max() < cut["top_k"]


@pytest.mark.parametrize("cut", CUTS[:4], ids=str)
def test_vllm_is_refused_by_name_before_it_is_looked_for(cut):
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None} | cut
    config = SimpleNamespace(use_vllm=True, vllm_importance_sampling_correction=True, rollout="vllm", **given)
    with pytest.raises(InputProblem, match=" and ".join(sorted(cut, key=["top_k", "top_p", "min_p"].index))):
        check_engine(config)
    config.use_vllm = False
    check_engine(config)
