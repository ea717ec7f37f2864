"""A real model small enough to be told what to say."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def says(tokenizer, *follows: tuple[int, int]) -> Qwen2ForCausalLM:
    """A real Qwen2 in which `then` follows `now` for each pair (now, then); after any other token all is alike."""
    size = len(tokenizer)
    config = Qwen2Config(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for now, then in follows:
            model.lm_head.weight[then, now] = 50.0
    return model
