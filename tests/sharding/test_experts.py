"""Expert parallelism: some experts on each rank, each with its own batch, against one process with all of them."""

from __future__ import annotations

from typing import Any

from tests.engine.twins import SHARDED
from tests.experts import CONFIGS, make
from tests.ranks import on_ranks
from tests.sequence_axis import BATCHES, Pair

_KERNELS = ("eager", "grouped_mm", "batched_mm")
_AXES = {
    "ep4": {"ep_size": 4},
    "efsdp2 x ep2": {"ep_size": 2},
    "replicate2 x ep2": {"ep_size": 2, "replicate": 2},
}


def _pair(name: str, experts: str = "eager", **config: Any) -> Pair:
    return Pair(make(name, experts), **{"stage": 3, "ep_size": 2, **config})


@on_ranks(2, name=list(CONFIGS), experts=_KERNELS)
def test_models_train_as_in_one_process(name: str, experts: str) -> None:
    _pair(name, experts).steps(BATCHES["ragged"])


@on_ranks(4, axes=list(_AXES), stage=SHARDED)
def test_axes_train_as_one_process(axes: str, stage: int) -> None:
    _pair("qwen3_moe", stage=stage, **_AXES[axes]).steps(BATCHES["ragged"])
