"""The models that benchmarks run: Llamas of a few sizes by name, or the model that a local folder configures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _thin(num_layers: int) -> dict[str, int]:
    """Layers that compute next to nothing: what is left is the cost of running them."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 256}
    return sizes | {"num_hidden_layers": num_layers}


# Arguments of a LlamaConfig.
SIZES: dict[str, dict[str, int]] = {
    **{f"llama-thin-{layers}": _thin(layers) for layers in (8, 16, 32, 111)},
    "llama-10m": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 12000,
    },
    "llama-34m": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 8192,
    },
    "llama-92m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "vocab_size": 32000,
    },
    "llama-125m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 25600,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}


def config_of(name_or_folder: str) -> PretrainedConfig:
    """The configuration of a model to measure.

    Args:
        name_or_folder: a name in `SIZES`, whose embeddings are not tied, or a local folder with a `config.json`.

    Raises:
        UsageError: it is neither.
    """
    from transformers import AutoConfig, LlamaConfig

    if name_or_folder in SIZES:
        return LlamaConfig(tie_word_embeddings=False, **SIZES[name_or_folder])
    if not Path(name_or_folder, "config.json").is_file():
        raise UsageError(
            f"{name_or_folder!r} is not known, nor a folder with a config.json; choose from {', '.join(SIZES)}"
        )
    config: PretrainedConfig = AutoConfig.from_pretrained(name_or_folder)
    return config
