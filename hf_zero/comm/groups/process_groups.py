"""Which ranks exchange with each other: one axis of a mesh, with the process groups that reach them.

The only file that makes process groups, and that reads torch's default one.
"""

from __future__ import annotations

import datetime
import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_zero.comm.groups import torch_groups
from hf_zero.comm.ledger import Ledger
from hf_zero.errors import ConfigError, UsageError

SHARD_AXIS, TENSOR_AXIS = "fsdp", "tp"  # transformers' names of the axes of its mesh
_CONNECT_S = 60.0


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks of one axis, in order, and what every exchange among them is given.

    Attributes:
        ranks: their numbers in the program: exchanges count them from 0, errors name these.
        rank: this rank's place among them.
        mesh: over these ranks, for `DTensor`s. Equal for all models over the same ranks, and without a name: PEFT takes any
            named mesh that is not called "fsdp" for tensor parallelism, and then uses local shapes.
        group: for reductions; a separate group, so that other exchanges of the program cannot get in between.
        gather_group: the same ranks, for gathers.
        control_group: the same ranks over gloo, for agreements, which then need no device and can name a missing rank.
        device: where the exchanged tensors live.
        timeout_s: seconds that a single exchange may take.
        ledger: counts the exchanges.
        processes: of those other ranks that are on this one's host, once they have told each other.
    """

    ranks: tuple[int, ...]
    rank: int
    mesh: DeviceMesh
    group: dist.ProcessGroup
    gather_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    device: torch.device
    timeout_s: float
    ledger: Ledger
    processes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def over(cls, ranks: Sequence[int], device: torch.device, timeout_s: float, ledger: Ledger) -> Axis:
        """Connect these ranks; called by all of them together, and by no others.

        Raises:
            UsageError: this process is not one of them.
        """
        torch_groups.leave_after_gloo()
        chosen = tuple(sorted(ranks))
        # Each exchange is waited for with its own timeout. If that is short, connecting the ranks may take longer; and a
        # device's watchdog, which ends the process, must leave time for an agreement to fail, which names the rank.
        on_host, on_device = max(timeout_s, _CONNECT_S), 2 * timeout_s + _CONNECT_S
        timeout = datetime.timedelta(seconds=on_host if device.type == "cpu" else on_device)
        backend = _backend_of(device)
        group, gather_group = _new_group(chosen, timeout, backend), _new_group(chosen, timeout, backend)
        is_gloo = torch_groups.backend_on(group, device) == "gloo"
        control_group = group
        if not is_gloo:  # its agreements talk to a few peers each, see `Agreements.combine`
            with torch_groups.connecting_on_demand():
                control_group = _new_group(chosen, timeout, "gloo")
        rank, mesh = chosen.index(dist.get_rank()), _mesh_over(chosen, device.type)
        return cls(chosen, rank, mesh, group, gather_group, control_group, device, timeout_s, ledger)


def default_group() -> dist.ProcessGroup | None:
    """Torch's default process group, if there is one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def default_device() -> torch.device:
    """Where this process's parameters live: on its accelerator, unless the process group is for CPUs.

    On the one that the group is bound to (`init_process_group(device_id=...)`), else on the current one. While nobody has set
    one, the current one is the first: then it is the one of this process's number on its host, as launchers tell it, since
    ranks that share a device cannot exchange over NCCL.

    Raises:
        UsageError: torch has bound the group to another device than the one that the program has set.
    """
    group = default_group()
    backend = str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else ""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or backend == "gloo":
        return torch.device("cpu")
    bound = None if group is None else group.bound_device_id
    index, number = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK")
    local_number = None if number is None else int(number)
    if group is not None and bound is not None and bound.type == accelerator.type:
        if index not in (0, bound.index) and torch_groups.may_be_bound_by_torch(group, local_number):
            raise UsageError(
                f"the process group is bound to {bound}, which torch has taken by the number of this process, but the program "
                f"has set device {index}: NCCL could exchange nothing of it. Name the device where the group is made: "
                f"`init_process_group(..., device_id=torch.device({accelerator.type!r}, {index}))`"
            )
        return bound
    if index == 0 and group is not None:
        place = local_number or 0
        index = place if place < torch.accelerator.device_count() else index
    return torch.device(accelerator.type, index)


Cell = tuple[int, ...]
"""Ranks that hold one shard together, each the part of it that the tensor axis gives to that rank."""


def cells_of(mesh: DeviceMesh | None, tensor_size: int) -> list[list[Cell]]:
    """The ranks of a mesh: by replica, which holds all parameters once; by shard; and along the tensor axis.

    Args:
        mesh: one axis, over which parameters are cut; or two, of which the first repeats what the second cuts, as
            `fully_shard` takes them. A further last axis named "tp" is the tensor axis. None: all ranks of the program.
        tensor_size: ranks of the tensor axis; 1: as the mesh says.

    Raises:
        ConfigError: the tensor axis does not fit the ranks, or the mesh.
        UsageError: the mesh has more axes, or this process is not in it.
    """
    if mesh is None:
        count = 1 if default_group() is None else dist.get_world_size()
        if count % tensor_size:
            raise ConfigError(
                f"tp_size is {tensor_size}, but {count} {'process runs' if count == 1 else 'processes run'}: it must divide "
                "their number"
            )
        return [[tuple(range(first, first + tensor_size)) for first in range(0, count, tensor_size)]]
    if strange := {"sp", "cp", "ep"} & set(mesh.mesh_dim_names or ()):
        raise UsageError(
            f"the mesh has an axis {strange.pop()!r}: give it one axis for all ranks that shard parameters; sp_size, "
            "cp_size and ep_size say which of them share sequences or experts"
        )
    has_tensor_axis = (mesh.mesh_dim_names or ("",))[-1] == TENSOR_AXIS
    if mesh.ndim - has_tensor_axis not in (1, 2):
        raise UsageError(
            f"the mesh has {mesh.ndim} axes {mesh.mesh_dim_names or ''}: give one that shards parameters, or two, the "
            "first for replicas (`mesh['replicate', 'shard']`); a last one named 'tp' is for tensor parallelism"
        )
    ranks = mesh.mesh if has_tensor_axis else mesh.mesh.unsqueeze(-1)
    if tensor_size not in (1, ranks.shape[-1]):
        raise ConfigError(
            f"tp_size is {tensor_size}, but the mesh has {ranks.shape[-1]} ranks on its last axis, 'tp': leave tp_size out"
        )
    rows = ranks.reshape(-1, *ranks.shape[-2:]).tolist()
    if not any(dist.get_rank() in cell for row in rows for cell in row):
        raise UsageError(f"rank {dist.get_rank()} is not in the mesh over ranks {rows}: only its ranks call this")
    # In the order in which torch numbers ranks within a group.
    return [sorted(tuple(sorted(map(int, cell))) for cell in row) for row in rows]


def grid_over(num_replicas: int, num_shards: int, tensor_size: int, device_type: str, timeout_s: float) -> DeviceMesh:
    """All ranks of the program as transformers arranges them: pipeline stages, replicas, shards, tensor axis.

    Made once: torch's caches take equal meshes for one another, so their groups must be the same. transformers' own
    exchanges on it wait for `timeout_s` seconds, or for what connecting the ranks may take.
    """
    known, shape = _Program.now().grids, (1, num_replicas, num_shards, tensor_size)
    if (shape, device_type) not in known:
        names = ("pp", "dp_replicate", SHARD_AXIS, TENSOR_AXIS)
        known[shape, device_type] = init_device_mesh(device_type, shape, mesh_dim_names=names)
        # So that norms over both axes are one exchange, of the same bits everywhere.
        known[shape, device_type][SHARD_AXIS, TENSOR_AXIS]._flatten()
    grid = known[shape, device_type]
    torch_groups.set_timeout(grid[TENSOR_AXIS].get_group(), max(timeout_s, _CONNECT_S))
    return grid


class _Program:
    """What this process has made under one default process group.

    Attributes:
        numbers: of groups by ranks: these ranks make them together, so they count alike.
        meshes: by ranks and type of device.
        grids: by sizes and type of device.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.numbers: dict[tuple[int, ...], Iterator[int]] = {}
        self.meshes: dict[tuple[tuple[int, ...], str], DeviceMesh] = {}
        self.grids: dict[tuple[tuple[int, ...], str], DeviceMesh] = {}

    @staticmethod
    def now() -> _Program:
        """That of the default group in place."""
        global _program
        group = default_group()
        assert group is not None
        if _program is None or _program.group() is not group:
            _program = _Program(group)
        return _program


_program: _Program | None = None


def _backend_of(device: torch.device) -> str | None:
    """That of the program for a device alone: a group with those of the CPU, too, connects each rank to all others twice."""
    backends = dict(each.split(":") for each in dist.get_backend_config().split(",") if ":" in each)
    return None if device.type == "cpu" else backends.get(device.type)


def _new_group(ranks: tuple[int, ...], timeout: datetime.timedelta, backend: str | None = None) -> dist.ProcessGroup:
    is_all = len(ranks) == dist.get_world_size()
    if is_all and backend != "gloo":
        return cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend=backend))
    # Also of all ranks, if over gloo: where the program's group is bound to a device, torch asks the new one for that device,
    # which gloo knows by the name of "cuda" alone.
    number = next(_Program.now().numbers.setdefault(ranks, itertools.count()))
    name = f"hf_zero {'all' if is_all else '-'.join(map(str, ranks))} {number}"
    return torch_groups.new_group_among(list(ranks), name, timeout, backend)


def _mesh_over(ranks: tuple[int, ...], device_type: str) -> DeviceMesh:
    """The mesh over these ranks. Torch's `DTensor` caches treat equal meshes as one, so all of them must have one group."""
    known = _Program.now().meshes
    if (ranks, device_type) not in known:
        is_all = len(ranks) == dist.get_world_size()
        group = default_group() if is_all else _new_group(ranks, datetime.timedelta(seconds=_CONNECT_S))
        known[ranks, device_type] = DeviceMesh.from_group(group, device_type)  # type: ignore[arg-type]
    return known[ranks, device_type]
