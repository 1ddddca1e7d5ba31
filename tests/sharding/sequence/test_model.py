"""Sequence parallelism: slices on ranks against whole sequences in one process."""

from __future__ import annotations

from tests.engine.twins import EXCHANGES, STAGES
from tests.ranks import by_hand, on_ranks
from tests.sequence_axis import BATCHES, Pair, make

_AXES = {"dp2 x sp2": {"sp_size": 2}, "sp2 x replicate2": {"sp_size": 2, "replicate": 2}, "sp4": {"sp_size": 4}}


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_slices_train_as_whole_sequences_do(stage: int, collectives: str) -> None:
    Pair(make("llama"), stage=stage, collectives=collectives, sp_size=2).steps(BATCHES["ragged"])


@on_ranks(2, name=["gpt2", "gemma", "gemma2", *by_hand("llama", "qwen3", "mistral")])
def test_models_train_as_in_one_process(name: str) -> None:
    attention = "eager" if name == "gemma2" else "sdpa"
    Pair(make(name, attention), stage=3, collectives="pairwise", sp_size=2).steps(BATCHES["ragged"])


@on_ranks(2, batch=["one_sided", "left_padded", "packed", *by_hand("plain", "ragged")], attention=["sdpa", "eager"])
def test_batches_of_every_kind_train_as_in_one_process(batch: str, attention: str) -> None:
    Pair(make("qwen3", attention), stage=2, collectives="pairwise", sp_size=2).steps(BATCHES[batch])


@on_ranks(4, axes=[*list(_AXES)[:2], *by_hand("sp4")], name=["llama", "qwen3"])  # fewer keys than ranks: gemma above
def test_axes_together_train_as_one_process(axes: str, name: str) -> None:
    Pair(make(name), stage=3, collectives="pairwise", **_AXES[axes]).steps(BATCHES["ragged"])
