"""Offload on a device: the allocator's peak beside the plan's, and how often the host waits."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero as zero
from hf_zero.plan.activations import activations
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.shapes import shapes_of
from tests.gpu.offload import places
from tests.gpu.training import adamw
from tests.models import Stack, stack_batch

_MIB = 2**20
_BATCH, _LENGTH = 1, 64
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 2048,
}


def _model(device: Any) -> Any:
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, use_cache=False, **_SIZES))


def _measured(device: torch.device, config: dict[str, Any], micro_batches: int) -> int:
    module: Any = torch.get_device_module(device)
    gc.collect()
    torch.accelerator.synchronize()
    before = module.memory_allocated(device)
    model = _model("cpu")
    zero.shard_model(model, config)
    optimizer = adamw(model)
    ids = torch.arange(_BATCH * _LENGTH, device=device).view(_BATCH, _LENGTH)
    for step in range(2):
        if step:
            module.reset_peak_memory_stats(device)
        for _ in range(micro_batches):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return int(module.max_memory_allocated(device) - before)


def offload_memory(device: torch.device) -> dict[str, Any]:
    """The peak of a step on the device is the plan's, within a tenth."""
    if device.type == "cpu":
        return {}
    _measured(device, {"stage": 1}, 1)  # the first product of matrices takes a workspace, for good
    template, tokens = _model("meta"), torch.zeros(_BATCH, _LENGTH, dtype=torch.long, device="meta")
    found, worst = {}, 0.0
    for stage, dtype, micro_batches in itertools.product((1, 2, 3), ("float32", "bfloat16"), (1, 2)):
        kept = activations(_model("meta").to(getattr(torch, dtype)), {"input_ids": tokens, "labels": tokens})
        for place in places(stage):
            config: dict[str, Any] = {"stage": stage, "compute_dtype": dtype, "offload": place, "collectives": "native"}
            config |= {"bucket_bytes": 4 * _MIB, "prefetch_bytes": 2 * _MIB, "reshard_after_forward": True}
            setting = Setting(zero.ZeroConfig(**config), dist.get_world_size(), accumulates=micro_batches > 1)
            predicted = predict(shapes_of(template), setting, kept).peak
            measured = _measured(device, config, micro_batches)
            where = "all" if "parameters" in place else "optimizer"
            name = f"{stage} {dtype} {where} x{micro_batches}"
            found[name] = f"{predicted / _MIB:.1f} MiB predicted, {measured / _MIB:.1f} measured"
            worst = max(worst, abs(predicted / measured - 1))
    assert worst < 0.1, found
    return found


def offload_waits(device: torch.device) -> dict[str, Any]:
    """The host waits once a backward, for the gradients that are down, and for nothing else in a step."""
    module: Any = torch.get_device_module(device) if device.type != "cpu" else None
    counts = getattr(module, "counts", None)
    if counts is None:
        return {}

    def waits() -> dict[str, int]:
        return {name: number for name, number in counts().items() if name.startswith("host waits")}

    for stage, dtype, micro_batches in itertools.product((1, 2, 3), ("float32", "bfloat16"), (1, 3)):
        for place in places(stage):
            model = Stack().to(device)
            zero.shard_model(model, {"stage": stage, "compute_dtype": dtype, "offload": place, "timeout_s": 60})
            optimizer = adamw(model)
            batches = [stack_batch(micro, dist.get_rank()) for micro in range(micro_batches)]
            batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
            for step in range(4):
                before = waits()
                module.set_sync_debug_mode("default" if step < 2 else "error")  # says where it is that the host waits
                for batch in batches:
                    model(**batch).backward()
                if dist.get_world_size() == 1:  # the norms of several ranks go by way of the device
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                module.set_sync_debug_mode("default")
                new = {name: more for name, number in waits().items() if (more := number - before.get(name, 0))}
                assert step < 2 or new == {"host waits: event": micro_batches}, (stage, dtype, place, step, new)
    return {}


OF_TWO = (offload_memory, offload_waits)
