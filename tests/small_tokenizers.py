"Byte-level tokenizers with chat templates that TRL ships, for tests that need a family's markup and not its vocabulary."
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils as trl

CHATML = ("<|im_start|>", "<|endoftext|>", "<|im_end|>")  # the last one ends a turn
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>", "<|eot_id|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|endoftext|>", "<|user|>")
FAMILIES = {  # control tokens, tokens of the markup, template
    "qwen2.5": (CHATML, ("<tool_call>", "</tool_call>"), trl.qwen2_5_chat_template),
    "qwen3": (CHATML, ("<think>", "</think>", "<tool_call>", "</tool_call>"), trl.qwen3_chat_template),
    "qwen3.5": (CHATML, ("<think>", "</think>", "<tool_call>", "</tool_call>"), trl.qwen3_5_nothink_training_chat_template),
    "glm4moe": (GLM, ("<think>", "</think>", "<tool_call>", "</tool_call>"), trl.glm4moe_chat_template),
    "llama3.1": (LLAMA, (), trl.llama3_1_chat_template)}

REAL = ("deepseek-r1-distill-qwen", "deepseek-v3.1", "gemma3-STANDIN-vocab", "gemma4-STANDIN-vocab", "kimi-k2", "llama3.1",
        "mistral-v3", "phi-3-mini", "phi-4-mini", "qwen2.5", "qwen3", "qwen3-coder")  # folders of the fixture `tokenizers`


def small_tokenizer(
    family: str,  # of FAMILIES
) -> PreTrainedTokenizerFast:
    "Make a tokenizer whose tokens are bytes, the family's control tokens and its markup."
    controls, markup, template = FAMILIES[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in markup])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=controls[-1], pad_token=controls[1])
    tokenizer.chat_template = template
    return tokenizer
