"""Which parameters rest in host memory, beside a device, and whether there is enough of it: see [Note: rows on the host]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.comm.host.memory import host_number
from hf_zero.engine.parameters.host_rows import HOST_ROWS, HostParameter, HostRows
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.errors import ConfigError, OffloadError
from hf_zero.host.memory import available_bytes, rooms


def check_host(world: World) -> None:
    """Raise if a device cannot copy from and to host memory beside its computation.

    Raises:
        ConfigError: on all ranks.
    """
    try:
        torch.Event(world.device).record(torch.Stream(world.device))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"offload: {world.device.type} has no streams, on which copies to and from host memory run beside the computation "
            f"({str(error).splitlines()[0]}): use offload: none"
        ) from error


def offload_to_host(parameters: Iterable[ZeroParameter], world: World) -> None:
    """Make rooms for what parameters at rest in host memory exchange with the device; called by all ranks together.

    Raises:
        OffloadError: a host has too little memory, or cannot lock its pages; on all ranks, and nothing has changed.
    """
    chosen = [p for p in parameters if rests_on_host(p.param, world)]
    new = [p for p in chosen if not _fits(vars(p.param).get(HOST_ROWS), p)]
    if world.config.offload.goes_to_host and world.device.type != "cpu":
        check_memory(world, sum(_room_bytes(p) for p in new), "copies and gradients of parameters")
    if chosen:
        with world.together("making rooms in host memory", OffloadError):
            _make_rows(new, world)
    for p in chosen:
        p.host = vars(p.param)[HOST_ROWS]
        p.host.is_stale = True
        if type(p.param) is nn.Parameter:
            cast(Any, p.param).__class__ = HostParameter


def rests_on_host(param: Tensor, world: World) -> bool:
    """Whether a parameter's rows lie in host memory, beside a device."""
    return param.device.type == "cpu" and world.device.type != "cpu"


def computes_on(param: Tensor) -> torch.device | None:
    """The device that a parameter at rest in host memory goes up to; None: it rests where modules compute."""
    rows, world = vars(param).get(HOST_ROWS), vars(param).get("_zero_world")
    if isinstance(rows, HostRows):
        return rows.device
    return world.device if isinstance(world, World) and rests_on_host(param, world) else None


def _make_rows(new: list[ZeroParameter], world: World) -> None:
    is_pinned = world.config.offload.pin
    trained = [p for p in new if p.param.requires_grad]
    forms = [(p.local_shape, p.compute_dtype) for p in new] + [(p.local_shape, p.param.dtype) for p in trained]
    made = rooms(forms, is_pinned)
    gradients = dict(zip(trained, made[len(new) :], strict=True))
    keeps_rows = world.config.policy.shards_parameters and world.config.offload.parameters != "host"
    for p, sent in zip(new, made, strict=False):
        kept = torch.empty_like(sent, device=world.device) if keeps_rows and p.is_sharded else None
        vars(p.param)[HOST_ROWS] = HostRows(sent, gradients.get(p), kept, world.device)


def _fits(rows: object, p: ZeroParameter) -> bool:
    """Whether the rooms of an earlier engine will do."""
    if not isinstance(rows, HostRows) or (rows.sent.dtype, tuple(rows.sent.shape)) != (p.compute_dtype, p.local_shape):
        return False
    return not p.param.requires_grad or (rows.gradient is not None and rows.gradient.dtype == p.param.dtype)


def _room_bytes(p: ZeroParameter) -> int:
    return p.local_numel * (p.compute_dtype.itemsize + (p.param.dtype.itemsize if p.param.requires_grad else 0))


def check_memory(world: World, num_bytes: int, what: str) -> None:
    """Raise if a host has too little memory for what all of its ranks are about to take; called by all ranks together.

    Raises:
        OffloadError: on all ranks.
    """
    lack = lack_of_memory(world, num_bytes, what)
    if lack is not None:
        raise OffloadError(
            f"offload to host memory {lack}: use more hosts, offload less (offload.ratio), or a machine, or a container's "
            "limit, with more memory"
        )


def lack_of_memory(world: World, num_bytes: int, what: str) -> str | None:
    """What a host has too little of, in words, if all of its ranks take so much; called by all ranks together."""
    available = available_bytes()
    rows = world.everyone.agree([host_number(), num_bytes, -1 if available is None else available], "host memory")
    for host in dict.fromkeys(host for host, _, _ in rows):
        needed = sum(num for number, num, _ in rows if number == host)
        known = [left for number, _, left in rows if number == host and left >= 0]
        if known and needed > min(known):
            ranks = [rank for rank, (number, _, _) in enumerate(rows) if number == host]
            return (
                f"needs {needed:,} bytes for {what} of {len(ranks)} ranks on the host of rank {ranks[0]}, where "
                f"{min(known):,} are available"
            )
    return None
