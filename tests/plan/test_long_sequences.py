"""What ranks that share sequences hold and exchange, as it is planned, beside runs."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_zero as zero
from hf_zero.cli.planning.sequences import activations_of
from tests.ranks import run_ranks

_AXES = {"sp2": (2, {"sp_size": 2}), "cp2": (2, {"cp_size": 2}), "sp2 x cp2": (4, {"sp_size": 2, "cp_size": 2})}
_TOKENS = 512


def _make(shared: int) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 64, "use_cache": False}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=shared)
    return AutoModelForCausalLM.from_config(config).train()


def _run(axes: dict[str, int], shared: int, checkpoints: bool) -> tuple[int, int]:
    """The peak of activations, and what is received on the axes of sequences, of a forward and backward."""
    model = _make(shared)
    if checkpoints:
        model.gradient_checkpointing_enable()
    engine = zero.shard_model(model, zero.ZeroConfig(stage=0, collectives="pairwise", **axes))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)  # there before, as what is counted is activations
    tokens = torch.randint(0, 64, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    engine.world.ledger.reset()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model(input_ids=tokens, labels=tokens).loss.backward()
    events = recorded.profiler.kineto_results.events()
    peak = max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    kinds = [kind for kind in engine.world.ledger.kinds() if "sequence axis" in kind]
    return peak, sum(engine.world.ledger.total(kind).bytes for kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("shared", [8, 1])
@pytest.mark.parametrize("axes", list(_AXES))
def test_activations_and_traffic_of_slices_are_those_of_a_run(axes: str, shared: int, checkpoints: bool) -> None:
    num_ranks, sizes = _AXES[axes]
    given = {"sp": sizes.get("sp_size", 1), "cp": sizes.get("cp_size", 1), "batch_size": 1, "tile_mlp": 0}
    with torch.device("meta"):
        model = _make(shared)
    kept = activations_of(model, argparse.Namespace(**given, dtype="float32"), _TOKENS, 0)[checkpoints]
    for peak, received in run_ranks(_run, num_ranks, sizes, shared, checkpoints):
        assert kept.received == pytest.approx(received, rel=0.01)
        ratio = (kept.total + kept.largest) / peak
        assert 0.9 < ratio < (1.15 if shared == 8 else 1.35), ratio  # keys may be repeated, and here were not
