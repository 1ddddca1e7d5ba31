"""Tiny causal language models with every kind of head, and their batches."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB, WIDTH = 67, 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_implementation": "eager",
    "use_cache": False,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {**_COMMON, "tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, {**_COMMON, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {**_COMMON, "tie_word_embeddings": False, "sliding_window": 4}),
    "gpt2": (transformers.GPT2Config, _GPT2),
    "gemma2": (transformers.Gemma2Config, {**_COMMON, "final_logit_softcapping": 2.0}),
    "cohere": (transformers.CohereConfig, {**_COMMON, "logit_scale": 0.3}),
    "granite": (transformers.GraniteConfig, {**_COMMON, "logits_scaling": 3.0}),
    "phi": (transformers.PhiConfig, {**_COMMON, "tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}


def make(name: str, seed: int = 0) -> nn.Module:
    """A model in training mode."""
    kind, values = CONFIGS[name]
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(kind(**values)).train()


def batch(step: int, rank: int, num_tokens: int = 0) -> dict[str, Tensor]:
    """Sequences of another length on every rank, with tokens that do not count, and padding."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    length = num_tokens or 9 + 4 * rank
    ids = torch.randint(1, VOCAB, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class LargestLogits(TorchDispatchMode):
    """Sees how many logits a tensor holds at most, while it is active.

    Attributes:
        numel: of the largest tensor of so many words.
    """

    def __init__(self, num_words: int = VOCAB, but: tuple[int, ...] = (WIDTH,)) -> None:
        super().__init__()
        self.numel, self._words, self._but = 0, num_words, but

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, Tensor) and each.ndim > 1 and each.shape[-1] == self._words:
                is_weight = each.ndim == 2 and each.shape[0] in self._but
                self.numel = max(self.numel, 0 if is_weight else each.numel())
        return found
