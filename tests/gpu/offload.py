"""Offload to host memory, as cases of two ranks and of one: the same bits as without, whatever runs late."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from tests.gpu.training import BLOCKS, LLAMA, STEPS, adamw, batch_of
from tests.models import make_model

HOST: dict[str, Any] = {"optimizer": "host"}
ALL_ON_HOST: dict[str, Any] = {"optimizer": "host", "parameters": "host"}


def places(stage: int) -> list[dict[str, Any]]:
    """What can be offloaded in a stage."""
    return [HOST, ALL_ON_HOST] if stage == 3 else [HOST]


def trained(device: torch.device, config: dict[str, Any], micro_batches: int = 1, clips: bool = False) -> Tensor:
    """The losses of some steps."""
    model = make_model(LLAMA).to(device)
    zero.shard_model(model, {**BLOCKS, **config})
    optimizer, losses = adamw(model), []
    if ratio := config.get("offload", {"ratio": 0}).get("ratio", 1):
        on_host = sum(param.numel() for param in model.parameters() if param.device.type == "cpu")
        share = on_host / sum(param.numel() for param in model.parameters())
        assert share == 1 or (device.type != "cpu" and ratio <= share < 0.9), share
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = model(**batch_of(step * micro_batches + micro, dist.get_rank(), device)).loss
            loss.backward()
            losses.append(loss.detach())
        if clips:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).to(device))
        optimizer.step()
        optimizer.zero_grad()
    assert all(value.device == param.device for param, state in optimizer.state.items() for value in state.values())
    return torch.stack(losses)


def offload(device: torch.device) -> dict[str, Any]:
    """Losses have the bits of a run that offloads nothing."""
    for stage, dtype in itertools.product((1, 2, 3), ("float32", "bfloat16")):
        config = {"stage": stage, "compute_dtype": dtype}
        expected = trained(device, config).cpu()
        assert expected.isfinite().all()
        for place in places(stage):
            found = trained(device, {**config, "offload": place}).cpu()
            assert torch.equal(found, expected), (config, place, found, expected)
    return {}


def offload_in_parts(device: torch.device) -> dict[str, Any]:
    """So have those of several micro-batches, of clipped gradients, and of a part that stays on the device."""
    for stage in (1, 2, 3):
        config = {"stage": stage, "compute_dtype": "bfloat16"}
        expected = trained(device, {**config, "stage": max(stage, 2)}, 3, clips=True).cpu()
        for place in (*places(stage), {**HOST, "pin": False}, {**HOST, "ratio": 0.4}):
            found = trained(device, {**config, "offload": place}, 3, clips=True).cpu()
            # Torch adds the norms of one device up before those of another.
            near = 1e-5 if "ratio" in place else 0
            assert torch.allclose(found, expected, rtol=0, atol=near), (config, place, found, expected)
    return {}
