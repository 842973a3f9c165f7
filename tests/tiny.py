"""Tiny random models of the real transformers classes, for tests on the CPU."""

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

_ROPE = {
    "llama-rope-llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    # Scales cos and sin too: attention_scaling is about 1.139.
    "llama-rope-yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama-rope-linear": {"rope_type": "linear", "factor": 4.0},
}

TINY_MODELS = ("llama", *_ROPE, "qwen2", "qwen3", "mistral")


def _tiny_config(name, vocab_size):
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": vocab_size,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_theta": 10000.0,
            **_ROPE.get(name, {"rope_type": "default"}),
        },
    }
    if name == "llama" or name in _ROPE:
        return LlamaConfig(head_dim=8, **sizes)
    if name == "qwen2":
        return Qwen2Config(**sizes)  # head_dim 48 / 6 = 8; biases on q, k, v
    if name == "qwen3":
        return Qwen3Config(head_dim=16, **sizes)  # not hidden / heads
    if name == "mistral":
        return MistralConfig(head_dim=8, sliding_window=None, **sizes)
    raise ValueError(f"unknown tiny model {name!r}; one of {TINY_MODELS}")


def tiny_model(name, seed=0, vocab_size=199):
    """A frozen float32 model in eval mode; same name, seed and size give the same weights.

    Every parameter is drawn anew, wide enough that attention is far from uniform: biases (zero by
    default) and norm weights (one by default) too, so that leaving one out shows.
    """
    config = _tiny_config(name, vocab_size)
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state alone
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                if "norm" in key:
                    parameter.copy_(1 + 0.2 * noise)
                elif key.endswith(".bias"):
                    parameter.copy_(0.5 * noise)
                elif "embed_tokens" in key:
                    parameter.copy_(noise)
                else:
                    parameter.copy_(0.2 * noise)
    return model.eval().requires_grad_(False)
