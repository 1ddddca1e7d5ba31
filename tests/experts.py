"""Small models with experts, which ranks train each with its own batch, and one process with all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.sequence_axis import VOCAB

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
_LOCAL = {"num_local_experts": 4, "head_dim": 8}
_MANY = {"num_experts": 8, "moe_intermediate_size": 12}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
}

CONFIGS: dict[str, Callable[..., Any]] = {
    "mixtral": lambda **more: transformers.MixtralConfig(**{**_SIZES, **_LOCAL, **more}),
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(**{**_SIZES, **_MANY, **more}, norm_topk_prob=True),
    "olmoe": lambda **more: transformers.OlmoeConfig(**{**_SIZES, **_MANY, **more}),
    "deepseek_v3": lambda **more: transformers.DeepseekV3Config(**{**_SIZES, **_GROUPS, **_LATENT, **more}),
    "gpt_oss": lambda **more: transformers.GptOssConfig(**{**_SIZES, **_LOCAL, **more}),  # biases, columns before rows
}


def make(name: str, experts: str = "eager", **more: Any) -> Any:
    """The same model everywhere, in training mode."""
    torch.manual_seed(0)
    config = CONFIGS[name](**more)
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts).train()
