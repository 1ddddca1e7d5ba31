"""Activations counted by shape, beside those that a forward with values keeps."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

import hf_zero as zero
from hf_zero.plan.activations import _Count, activations

_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
_KINDS = {
    "mixtral": (MixtralConfig, {"num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
        },
    ),
}


@pytest.mark.parametrize("vocab", [256, 8192])  # blocks are the greatest, or logits
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("tile_tokens", [0, 64])
@pytest.mark.parametrize("tile_mlp", [0, 64])
def test_peak_of_activations_is_within_a_tenth_of_that_of_a_run(
    vocab: int, checkpoints: bool, tile_tokens: int, tile_mlp: int
) -> None:
    planned, measured = _peaks(vocab, checkpoints, tile_tokens, tile_mlp)
    assert planned == pytest.approx(measured, rel=0.1)


def _peaks(vocab: int, checkpoints: bool, tile_tokens: int, tile_mlp: int) -> tuple[int, int]:
    """The peak of activations of a forward and backward, planned and measured."""
    config = LlamaConfig(
        **_SMALL | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": vocab}, use_cache=False
    )
    model = AutoModelForCausalLM.from_config(config).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    engine = zero.shard_model(model, zero.ZeroConfig(stage=0, tile_tokens=tile_tokens, tile_mlp=tile_mlp))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)  # there before, as what is counted is activations
    tokens = torch.randint(0, vocab, (2, 256), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model(input_ids=tokens, labels=tokens).loss.backward()
    engine.close()
    events = recorded.profiler.kineto_results.events()
    now = list(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(config).train()
    batch = {"input_ids": tokens.to("meta"), "labels": tokens.to("meta")}
    kept = activations(planned, batch, checkpoints, tile_tokens, tile_mlp)
    return kept.total + kept.largest, max(now)


def test_a_count_of_a_million_tokens_is_not_made_of_a_million_slices() -> None:
    class Operations(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**_SMALL, use_cache=False))
    counts = {}
    for length in (512, 1 << 20):
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        with Operations() as operations:
            activations(model, {"input_ids": tokens, "labels": tokens}, False, 256, 256)
        counts[length] = operations.count
    assert counts[512] == counts[1 << 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _KINDS)
def test_experts_keep_what_a_forward_with_values_keeps(kind: str, dtype: torch.dtype) -> None:
    make, more = _KINDS[kind]
    config: Any = make(**_SMALL, **more, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    count = _Count()
    for tensor in (*model.parameters(), *model.buffers()):
        count.leave_out(tensor)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    by_shape = activations(planned, {"input_ids": tokens.to("meta"), "labels": tokens.to("meta")}).total
    assert by_shape == pytest.approx(count.result(False).total, rel=0.05)
