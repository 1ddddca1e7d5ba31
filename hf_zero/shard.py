"""The public `shard_model`: the engine, and the seams that transformers and accelerate look for on a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_zero import model_seams
from hf_zero.config import ZeroConfig
from hf_zero.engine import partition
from hf_zero.engine.engine import ZeroEngine


def shard_model(
    model: nn.Module, config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None
) -> ZeroEngine:
    """Partition a model over the data-parallel ranks, in place, and run it under ZeRO from now on.

    Called by all ranks together, before the optimizer is made. Parameters become `DTensor`s of their own shape, of
    which each rank holds its rows (`Shard(0)`); values are those of rank 0, as under DDP. In stage 0 and at world size 1
    they stay plain tensors, in the master dtype. A model made under `Init` is partitioned already; whatever was
    added to it since (adapters, a new head) is partitioned now. The model gets `no_sync`, and, where it has them, a
    `save_pretrained` that gathers and a `generate` that keeps the ranks in step.

    Args:
        model: any module, on one device, not wrapped.
        config: a `ZeroConfig`, a mapping, a path, or None for the file that HF_ZERO_CONFIG names (a model made under
            `Init` needs none).

    Returns:
        The engine; `engine_of(model)` finds it again.

    Raises:
        ConfigError: the configuration has a mistake, or does not fit the model or the number of ranks.
        PartitionError: the model cannot be partitioned.

    Source: ZeRO (arXiv:1910.02054).
    """
    engine = partition.shard_model(model, config)
    model_seams.attach(model, engine.world)
    return engine
