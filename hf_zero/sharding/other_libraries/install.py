"""What the three public doors (`Init`, `shard_model`, `activate`) change of other libraries, and `undo` puts back."""

from __future__ import annotations

from hf_zero.sharding.other_libraries import (
    adapters,
    comparisons,
    foreign_files,
    resting_on_host,
    tensor_data,
    tensor_swaps,
    wrappers,
)


def install() -> None:
    """Change what has not been changed yet."""
    for each in (adapters, comparisons, foreign_files, resting_on_host, tensor_data, tensor_swaps, wrappers):
        each.install()
