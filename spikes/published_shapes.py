"""Shapes of models as their published config.json gives them, for estimates on a machine without the models."""
from transformers import AutoConfig, PretrainedConfig

COLUMNS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "vocab_size", "max_position_embeddings", "tie_word_embeddings")
SHAPES = {name: dict(zip(COLUMNS, row)) for name, row in {
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, False),
    "Qwen/Qwen2.5-Coder-32B-Instruct": ("qwen2", 5120, 27648, 64, 40, 8, 152064, 32768, False),
    "smollm2": ("llama", 576, 1536, 30, 9, 3, 49152, 8192, True),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, False)}.items()}


def published_shape(
    name: str,  # as in a recipe
    **other,  # than it was published with
) -> PretrainedConfig:
    "Return the configuration that the model was published with."
    return AutoConfig.for_model(**SHAPES[name] | other)
