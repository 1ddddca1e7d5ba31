"""Small models of transformers that have a plan for tensor parallelism, and folders of them to load."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import compare_versions
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

NEEDS_TENSOR_PARALLELISM = pytest.mark.skipif(
    compare_versions("transformers", "<", "5.23"), reason="tp_size needs 5.23"
)
VOCAB, LENGTH, BATCH = 67, 9, 2  # 67 rows divide neither by the ranks of one axis nor by all

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 32,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "num_attention_heads": 4}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "tied": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "biased": lambda: transformers.Qwen2Config(**_SIZES),  # of the projections of queries, keys and values
    "heads": lambda: transformers.Qwen3Config(**_SIZES, head_dim=8),  # norms of single heads
    "experts": lambda: transformers.MixtralConfig(**{**_SIZES, **_EXPERTS}, num_local_experts=4),
}


@functools.cache
def saved(name: str) -> str:
    """A folder with such a model, as `save_pretrained` writes it."""
    folder = tempfile.mkdtemp(prefix=f"{name}-")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.save_pretrained(folder)
    return folder


def shared_folder(name: str) -> str:
    """Such a folder, for all ranks of a job."""
    box = [saved(name) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    return box[0]


def load(folder: str, **options: object) -> PreTrainedModel:
    """The model of a folder, in training mode."""
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.train()


def tokens(step: int, cell: int) -> Tensor:
    """The batch that the ranks of one cell see."""
    generator = torch.Generator().manual_seed(100 * step + cell)
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)


def loss_of(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Of predicting the batch."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss
