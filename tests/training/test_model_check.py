"Models whose own log-probabilities differ from those that the trainer computes are refused, whatever their class is called."
import pytest
import torch
import transformers as tf
from kept_trainer import made as trainer_of
from rollouts import Folder

from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.rollout.sampling import Sampling
from composer_replication.training.model_check import branch_problem, check_scoring, scoring_problem
from composer_replication.training.trainer import ComposerReplicationTrainer
from composer_replication.tree.forward import branch_way
from composer_replication.tree.one_pass import tree_problem
from composer_replication.tree.positions import counts_positions, place_tokens

SIZE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE = SIZE | {"num_key_value_heads": 2, "max_position_embeddings": 256}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "attention_chunk_size": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}
SOUND = {
    "llama": lambda: tf.LlamaConfig(**ROPE),
    "qwen2": lambda: tf.Qwen2Config(**ROPE),
    "qwen3": lambda: tf.Qwen3Config(**ROPE, head_dim=8),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**ROPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**ROPE, head_dim=8, layer_types=["linear_attention", "full_attention"], **DELTA),
    "gemma2": lambda: tf.Gemma2Config(**ROPE, head_dim=8, sliding_window=8, final_logit_softcapping=2.0),
    "gemma3": lambda: tf.Gemma3TextConfig(**ROPE, head_dim=8, sliding_window=8),
    "mistral": lambda: tf.MistralConfig(**ROPE, sliding_window=8),
    "ministral3": lambda: tf.Ministral3Config(**ROPE, head_dim=8, rope_parameters=YARN | {"llama_4_scaling_beta": 1.0}),
    "phi": lambda: tf.PhiConfig(**SIZE),
    "phi3": lambda: tf.Phi3Config(**ROPE),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**SIZE),
    "gpt2": lambda: tf.GPT2Config(**GPT),
    "cohere": lambda: tf.CohereConfig(**ROPE, logit_scale=0.3),
    "granite": lambda: tf.GraniteConfig(**ROPE, logits_scaling=3.0),
    "falcon_h1": lambda: tf.FalconH1Config(**ROPE, lm_head_multiplier=0.3, head_dim=8, **MAMBA),
    "mamba": lambda: tf.MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2),
    "mpt": lambda: tf.MptConfig(**MPT),
    "doge": lambda: tf.DogeConfig(**ROPE),
}
HEAD, LATER, PADDING = "does more than its output head", "reads later tokens", "reads the padding on the left"
BART = {"d_model": 32, "vocab_size": 97,
        "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "init_std": 0.2}
XLM = {"vocab_size": 97, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "embed_init_std": 0.3, "init_std": 0.3}
MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 256, "initializer_range": 0.3}
STATES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED = {
    "mpt": (lambda: tf.MptConfig(**MPT, logit_scale=0.5), HEAD),
    "recurrent_gemma": (lambda: tf.RecurrentGemmaConfig(**ROPE, head_dim=8, logits_soft_cap=0.5), HEAD),
    "xlstm": (lambda: tf.xLSTMConfig(**STATES, num_heads=4, output_logit_soft_cap=0.05), HEAD),
    "bert": (lambda: tf.BertConfig(**SIZE, is_decoder=True), HEAD),
    "modernbert": (lambda: tf.ModernBertDecoderConfig(**SIZE), HEAD),
    "uncapped": (lambda: tf.RecurrentGemmaConfig(**ROPE, head_dim=8, logits_soft_cap=1e4), PADDING),
    "rwkv": (lambda: tf.RwkvConfig(**STATES, attention_hidden_size=32), PADDING),
    "bart": (lambda: tf.BartConfig(**BART), PADDING),
    "xlm": (lambda: tf.XLMConfig(**XLM), LATER),
    "bert_generation": (lambda: tf.BertGenerationConfig(**SIZE, is_decoder=False), LATER),
    "moshi": (lambda: tf.MoshiConfig(**ROPE, head_dim=8, sliding_window=8, ffn_dim=48), "reads branches in two pass"),
    "llama4": (lambda: tf.Llama4TextConfig(**ROPE, head_dim=8, **EXPERTS), "no body of Llama4ForCausalLM"),
}


def made(config):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", SOUND)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_usual_families_pass(family, dtype):
    model = made(SOUND[family]()).to(dtype)
    place_tokens(model)
    check_scoring(model)


@pytest.mark.parametrize("family", REFUSED)
def test_other_heads_directions_and_paddings_are_refused_by_name(family):
    config, words = REFUSED[family]
    model = made(config())
    place_tokens(model)
    with pytest.raises(InputProblem, match=rf"{words}(.*[0-9] nats|.*take a model)") as refused:
        check_scoring(model)
    assert type(model).__name__ in str(refused.value)


def test_recurrences_pass_where_no_row_is_padded_on_the_left():
    assert scoring_problem(made(REFUSED["uncapped"][0]()), padded=False) is None


def test_attention_that_changes_its_mask_is_read_in_two_passes(monkeypatch):
    model = made(SOUND["doge"]())
    assert "makes a mask of its own" in tree_problem(model) and branch_way(model) == "in two passes"
    assert branch_problem(model) is None
    assert not any(tree_problem(made(SOUND[name]())) for name in ("llama", "gpt2", "phi", "qwen3"))
    monkeypatch.setattr("composer_replication.training.model_check.tree_problem", lambda model: None)
    assert "DogeForCausalLM cannot read branches in one pass: The size of tensor" in branch_problem(model)


def test_attention_scaled_by_the_absolute_position_counts_without_padding():
    model = made(SOUND["ministral3"]())
    assert counts_positions(model) and "reads the padding" in scoring_problem(model)
    place_tokens(model)
    assert scoring_problem(model) is None
    assert not any(counts_positions(made(SOUND[name]())) for name in ("llama", "qwen3", "mistral", "gemma3", "phi3"))


ROWS = [{"prompt": [{"role": "user", "content": "Look."}]}] * 2
SMALL = {"num_generations": 2, "per_device_train_batch_size": 2}


def trainer(folder, model, **changes):
    given = {"processing_class": embedded_tokenizer()}
    return trainer_of(folder, Folder, ROWS, model, ComposerReplicationTrainer, given, **SMALL | changes)


def test_the_trainer_refuses_before_its_first_step(tmp_path):
    model = made(tf.BertConfig(**SIZE | {"vocab_size": len(embedded_tokenizer())}, is_decoder=True))
    with pytest.raises(InputProblem, match="BertLMHeadModel does more than its output head"):
        trainer(tmp_path, model)


@pytest.mark.parametrize("alpha", (0.0, 0.5))
def test_rollouts_of_another_distribution_are_refused_at_the_first_step(alpha, tmp_path, monkeypatch):
    sound = trainer(tmp_path, embedded_model())
    sound.train()
    assert sound.sampling_checked
    plain = Sampling.draw
    monkeypatch.setattr(Sampling, "draw", lambda self, logits, numbers: plain(self, 0.2 * logits, numbers))
    with pytest.raises(InputProblem, match=r"first rollouts of \w+ differ from those of sampling by [0-9.]+ nats"):
        trainer(tmp_path, embedded_model(), alpha_sdpo=alpha).train()
