"""A tiny Llama in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

TINY = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
EOS, BOS, PAD, END_OF_TURN = 260, 261, 262, 263


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**TINY)).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    leave_out: str = "",
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a tiny Llama and a byte-level tokenizer the way llama.cpp's converter does.

    ``types`` maps names of parameters to types that they are quantised to.
    """
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [
        *bytes_to_unicode().values(),
        "th",
        "the",
        "Ġ" + "the",
        "er",
        "<eos>",
        "<bos>",
        "<pad>",
        "<turn>",
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 260 + [gguf.TokenType.CONTROL] * 4)
    writer.add_token_merges(["t h", "th e", "Ġ the", "e r"])
    writer.add_eos_token_id(EOS)
    writer.add_bos_token_id(BOS)
    writer.add_pad_token_id(PAD)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        name = names.get_name(key.removesuffix(".weight"))
        data = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in key:  # llama.cpp rotates neighbouring pairs, transformers the two halves of a head
                data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if types and key in types:
            blocks = gguf.quantize(np.ascontiguousarray(data), types[key])
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=types[key])
        elif name != leave_out:
            writer.add_tensor(f"{name}.weight", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
