"""What ordinary tests show on CPUs, on a device: wire formats, activations, DTensors, users' code."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hf_zero as zero
from tests.engine.twins import Twins
from tests.gpu.training import BLOCKS, LLAMA, STAGES, batch_of, furthest, train
from tests.models import make_model


def wire(device: torch.device) -> dict[str, Any]:
    """Rows and gradients in fewer bytes, and a second copy of rows: near one process, with rows on the host, too."""
    found = {}
    for config in (
        {"gather": "bfloat16", "reduce": "bfloat16"},
        {"gather": "int8", "reduce": "int4"},
        {"secondary": 2},
    ):
        for offload in ({}, {"parameters": "host", "optimizer": "host"}):
            model = make_model(LLAMA).to(device)
            wired = {"stage": 3, "wire": config, "collectives": "native", "offload": offload}
            zero.shard_model(model, {**wired, **BLOCKS})
            found[f"{config}, {offload}"] = far = furthest(train(model, device), device)
            assert far < (1e-5 if "secondary" in config else 0.3), found
            with torch.no_grad():
                losses = [model(**batch_of(step, dist.get_rank(), device)).loss for step in range(3)]
            assert all(map(torch.isfinite, losses)), (config, offload, losses)
    return found


def _checkpointed(device: torch.device, cell: int | None = None, **config: Any) -> Tensor:
    model = make_model(LLAMA).to(device)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    zero.shard_model(model, {**BLOCKS, **config})
    return train(model, device, cell=cell).cpu()


def activations(device: torch.device) -> dict[str, Any]:
    """The inputs of checkpointed layers go to the host and come back: the same bits."""
    for stage, offload in itertools.product((2, 3), ({}, {"optimizer": "host", "parameters": "host"})):
        given = {"optimizer": "host"} if offload and stage == 2 else offload
        config = {"stage": stage, **({"offload": given} if given else {})}
        plain = _checkpointed(device, **config)
        found = _checkpointed(device, **config, activations={"offload": True})
        assert torch.equal(found, plain), (config, found, plain)
    return {}


def dtensors(device: torch.device) -> dict[str, Any]:
    """DTensor's own exchanges make streams wait, and not the process."""
    model = make_model(LLAMA).to(device)
    mesh = zero.shard_model(model, {"stage": 3, **BLOCKS}).world.shards.mesh
    rows = torch.full((2, 3), 1.0 + dist.get_rank(), device=device)
    other = distribute_tensor(torch.ones(4, 3, device=device), mesh, [Shard(0)], src_data_rank=None)
    cut = DTensor.from_local(rows, mesh, [Shard(0)])
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.get_device_module(device).set_sync_debug_mode("error")
    try:
        whole, total = cut.full_tensor(), (cut + other).sum().full_tensor()
    finally:
        if device.type != "cpu":
            torch.get_device_module(device).set_sync_debug_mode("default")
    assert whole.cpu().tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2 and float(total) == 30
    return {}


def users_code(device: torch.device) -> dict[str, Any]:
    """Edits, norms, averages of weights, gradients under `no_sync`, frozen parts: what they are in one process."""
    for stage in STAGES:
        with device:  # where models and batches are made
            twins = Twins(stage, timeout_s=60)
            twins.step(2)
            average = [param.detach().clone() for param in twins.model.parameters()]
            for model in (twins.model, twins.reference):
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.5).add_(0.01)
                next(iter(model.parameters())).requires_grad_(False)
            twins.step(2)
            for model in (twins.model, twins.reference):
                next(iter(model.parameters())).requires_grad_(True)
            norms = [_norm(model) for model in (twins.model, twins.reference)]
            torch.testing.assert_close(*norms)
            for mean, param in zip(average, twins.model.parameters(), strict=True):
                mean.lerp_(param.detach(), 0.5)
            assert all(bool(_whole(mean).isfinite().all()) for mean in average)
            with zero.GatheredParameters(list(twins.model.parameters()), modifier_rank=0):
                for param, other in zip(twins.model.parameters(), twins.reference.parameters(), strict=True):
                    torch.testing.assert_close(param.detach(), other.detach())
            twins.step()
    return {}


def _norm(model: nn.Module) -> Tensor:
    return _whole(torch.nn.utils.get_total_norm([param.detach() for param in model.parameters()]))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


OF_TWO = (wire, activations, dtensors, users_code)
