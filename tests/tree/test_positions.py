"Padding, caches and lengths for every way in which models know where a token stands; the oracle is a plain forward of one row."

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from kept_trainer import made as trainer_of
from rollouts import Folder

from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.losses.chunked import lm_head
from composer_replication.rollout.decode import open_batch
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.rollout.sampling import Sampling
from composer_replication.rollout.types import Ending, RolloutConfig
from composer_replication.training.fit import check_positions
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.build import Branch, Span, Tree
from composer_replication.tree.forward import forward_branches, forward_trunk, trunk_problem
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.positions import counts_positions, place_tokens, positions, steady_positions

END = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
SIZE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
TINY = SIZE | END | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 256}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3} | END
OPT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.3} | END
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | options}


def longrope(border):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.1, 1.5, 2.0, 4.0],
               "original_max_position_embeddings": border}
    return TINY | {"original_max_position_embeddings": border} | rope("longrope", **factors)


FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**TINY),
    "qwen2": lambda: tf.Qwen2Config(**TINY),
    "qwen3": lambda: tf.Qwen3Config(**TINY, head_dim=8),
    "mistral": lambda: tf.MistralConfig(**TINY, sliding_window=8),
    "phi3": lambda: tf.Phi3Config(**TINY),
    "gemma": lambda: tf.GemmaConfig(**TINY, head_dim=8),
    "gemma3": lambda: tf.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=8),
    "yarn": lambda: tf.LlamaConfig(**TINY, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "linear": lambda: tf.LlamaConfig(**TINY, **rope("linear", factor=4.0)),
    "llama3": lambda: tf.LlamaConfig(
        **TINY, **rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    ),
    "phi3-longrope": lambda: tf.Phi3Config(**longrope(32)),
    "llama-longrope": lambda: tf.LlamaConfig(**longrope(32)),
    "dynamic": lambda: tf.LlamaConfig(**TINY | {"max_position_embeddings": 32}, **rope("dynamic", factor=4.0)),
    "gpt2": lambda: tf.GPT2Config(**GPT),
    "gpt_bigcode": lambda: tf.GPTBigCodeConfig(**GPT),
    "gptj": lambda: tf.GPTJConfig(**GPT, rotary_dim=4),
    "codegen": lambda: tf.CodeGenConfig(**GPT, rotary_dim=4),
    "openai-gpt": lambda: tf.OpenAIGPTConfig(**GPT),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=97,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        window_size=8,
        initializer_range=0.3,
        max_position_embeddings=256,
        attention_types=[[["global", "local"], 1]],
        **END,
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**SIZE, intermediate_size=48),
    "opt": lambda: tf.OPTConfig(**OPT, ffn_dim=64, dropout=0.0, word_embed_proj_dim=32, max_position_embeddings=256),
    "opt-350m": lambda: tf.OPTConfig(**OPT, ffn_dim=64, dropout=0.0, word_embed_proj_dim=16, do_layer_norm_before=False),
    "xglm": lambda: tf.XGLMConfig(
        vocab_size=97, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, init_std=0.3, dropout=0.0, **END
    ),
    "biogpt": lambda: tf.BioGptConfig(**SIZE, **END, intermediate_size=48, hidden_dropout_prob=0.0, max_position_embeddings=256),
    "bloom": lambda: tf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
    "mpt": lambda: tf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97, max_seq_len=256, initializer_range=0.3),
    "falcon": lambda: tf.FalconConfig(**SIZE, **END, alibi=False),
    "falcon-alibi": lambda: tf.FalconConfig(**SIZE, **END, alibi=True),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**TINY | {"num_key_value_heads": 4}, **LATENT),
}
ROWS = {"gpt_neo", "openai-gpt", "bloom", "mpt", "falcon-alibi"}  # whose branches are read a row each
COUNTS = {
    "gpt2",
    "gpt_bigcode",
    "openai-gpt",
    "gpt_neo",
    "opt",
    "opt-350m",
    "xglm",
    "biogpt",
    "phi3-longrope",
    "llama-longrope",
    "dynamic",
}


def made(family):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


def plain(model, ids):
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)


HINT = (30, 31, 32)


def tree(name, trunk, *spans):
    branches = (Branch("hint", s.turn, s.start - 1, (*HINT, *trunk[s.start - 1 : s.end]), 4) for s in spans)
    return Tree(name, trunk, spans, tuple(branches))


TREES = [tree("a", tuple(range(3, 23)), Span(1, 9, 13), Span(3, 15, 18)),
         tree("b", tuple(range(40, 52)), Span(1, 6, 9))]


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_unequal_rows_have_the_log_probabilities_of_plain_forwards(family):
    model = made(family)
    batch, prompts = open_batch(model, frozenset({1}), Sampling()), [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22], [30] * 6]
    whole, contexts = [[], [], []], prompts
    for turn in range(2):
        for row, sample in enumerate(batch.sample([0, 1, 2], contexts, [6, 5, 4], [f"{turn}/{row}" for row in range(3)])):
            whole[row] += [*contexts[row], *sample.ids]
            wanted = plain(model, whole[row])[-len(sample.ids) - 1 : -1].gather(-1, torch.tensor(sample.ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=1e-5, rtol=0)
        contexts = [[50, 51], [60], [61, 62, 63]]


@pytest.mark.parametrize("lead", [(0, 13), (2, 7)])
@pytest.mark.parametrize("family", FAMILIES)
def test_trunks_and_branches_under_padding_are_plain_forwards(family, lead):
    model = made(family)
    assert bool(trunk_problem(model)) == (family in ROWS) and counts_positions(model) == (family in COUNTS)
    batch = pack_trees(TREES, 0, list(lead), max(n + len(t.ids) for n, t in zip(lead, TREES)))
    with torch.no_grad():
        hidden, cache = forward_trunk(model, batch)
        branches = {method: forward_branches(model, batch, method=method, kinds=("hint",))
                    for method in ("two_pass", "rows")}
        branches["cache"] = forward_branches(model, batch, cache, kinds=("hint",))
        head = lm_head(model)
        for row, (n, t) in enumerate(zip(lead, TREES)):
            logprobs = head.logits(hidden[row, n : n + len(t.ids)]).log_softmax(-1)
            torch.testing.assert_close(logprobs, plain(model, t.ids), atol=3e-5, rtol=0)
        wanted = []
        for t in TREES:
            for s in t.spans:
                ids = [*t.ids[: s.start - 1], *HINT, *t.ids[s.start - 1 : s.end]]
                wanted.append(plain(model, ids)[s.start + 2 : -1])
        for method, states in branches.items():
            found = head.logits(states[batch.sdpo_teacher[:, 0], batch.sdpo_teacher[:, 1]]).log_softmax(-1)
            torch.testing.assert_close(found, torch.cat(wanted), atol=3e-5, rtol=0,
                                       msg=lambda text, m=method: f"{m}: {text}")


@pytest.mark.parametrize("family", sorted(COUNTS | {"llama", "bloom", "mpt"}))
def test_a_padded_pass_of_a_placed_model_is_a_plain_forward(family):
    model = made(family)
    place_tokens(model)
    place_tokens(model)
    rows, width = [list(range(3, 20)), list(range(40, 45))], 40 if family in ("phi3-longrope", "dynamic") else 19
    ids, mask = (
        [[fill] * (width - len(r)) + (r if value is None else [value] * len(r)) for r in rows]
        for fill, value in ((0, None), (0, 1))
    )
    with torch.no_grad():
        logits = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
    for row, found in zip(rows, logits):
        torch.testing.assert_close(found[-len(row) :].log_softmax(-1), plain(model, row), atol=3e-5, rtol=0)
    assert len(model.base_model._forward_pre_hooks) == (family in COUNTS)


CHANGES = ["phi3-longrope", "llama-longrope", "dynamic"]


@pytest.mark.parametrize("family", CHANGES)
def test_sequences_beyond_the_border_of_frequencies_are_refused_by_name(family):
    model = made(family)
    assert steady_positions(model.config) == positions(model.config) == 32
    refused = lambda: pytest.raises(InputProblem, match=rf"{type(model).__name__[:4]}.*more than 32 tokens")
    for prompts, limit in (([list(range(3, 43)), list(range(3, 13))], 8), ([list(range(3, 23))], 30)):
        with refused():
            open_batch(model, frozenset({1}), Sampling()).sample(range(len(prompts)), prompts, [limit] * len(prompts), "ab")
    long, hinted = tree("l", tuple(range(3, 43)), Span(1, 9, 13)), tree("h", tuple(range(3, 33)), Span(1, 26, 30))
    with refused():
        forward_trunk(model, pack_trees([long], 0))
    for method in ("two_pass", "rows"):
        with refused(), torch.no_grad():
            forward_branches(model, pack_trees([hinted], 0), method=method)
    place_tokens(model)
    with refused():
        model(torch.zeros(1, 40, dtype=torch.long), attention_mask=torch.ones(1, 40, dtype=torch.long))


@pytest.mark.parametrize("family", CHANGES)
def test_a_run_that_would_cross_the_border_is_refused_before_weights_are_loaded(family, tmp_path):
    FAMILIES[family]().save_pretrained(tmp_path)  # a configuration, and no weights
    config = SimpleNamespace(model_init_kwargs=None, max_completion_length=32, use_vllm=False,
                             vllm_max_model_length=None)
    with pytest.raises(InputProblem, match="beyond 32 tokens, and max_completion_length=32"):
        check_positions(config, str(tmp_path))
    config.max_completion_length = 20
    check_positions(config, str(tmp_path))
    config.use_vllm = True
    with pytest.raises(InputProblem, match="vllm_max_model_length to 32"):
        check_positions(config, str(tmp_path))


def test_episodes_end_at_the_border(tmp_path):
    torch.manual_seed(0)
    tokenizer = embedded_tokenizer()
    sizes = TINY | {"vocab_size": len(tokenizer), "max_position_embeddings": 250} | rope("dynamic", factor=4.0)
    policy = TransformersPolicy(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).eval(), tokenizer)
    (rollout,) = collect(policy, Folder, [{"prompt": "Look."}], RolloutConfig(max_turns=3, max_tokens=2000))
    assert rollout.ending in (Ending.TOKENS, Ending.DONE) and len(rollout.prompt_ids) + len(rollout.completion_ids) <= 250


def test_a_class_without_a_body_is_refused_by_name():
    sizes = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 32,
        "attention_chunk_size": 8,
        "head_dim": 8,
    }
    model = tf.AutoModelForCausalLM.from_config(tf.Llama4TextConfig(**TINY, **sizes)).eval()
    for read in (forward_trunk, forward_branches):
        with pytest.raises(InputProblem, match="no body of Llama4ForCausalLM"):
            read(model, pack_trees(TREES, 0))


@pytest.mark.parametrize("kind", [tf.GPT2Config, tf.GPTBigCodeConfig])
def test_the_trainer_scores_unequal_prompts_as_a_plain_forward(kind, tmp_path):
    torch.manual_seed(0)
    tokenizer = embedded_tokenizer()
    model = tf.AutoModelForCausalLM.from_config(kind(**GPT | {"vocab_size": len(tokenizer), "n_positions": 512}))
    rows, small = [{"prompt": [{"role": "user", "content": "Look."}]}] * 2, dict(num_generations=2, per_device_train_batch_size=2)
    trainer = trainer_of(tmp_path, Folder, rows, model, ComposerReplicationTrainer, {"processing_class": tokenizer},
                         **small)
    trainer.model.eval()
    ids, mask = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10]]), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 3)[0]
    wanted = plain(trainer.student, ids[0, 3:])[-4:-1].gather(-1, ids[0, -3:, None])[:, 0]
    torch.testing.assert_close(found[0], wanted, atol=1e-5, rtol=0)
