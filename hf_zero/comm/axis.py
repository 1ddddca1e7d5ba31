"""Which ranks exchange with each other: one axis of a mesh, with the process groups that reach them.

The only file that makes process groups, and that reads torch's default one.
"""

from __future__ import annotations

import datetime
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_zero import torch_compat
from hf_zero.comm.ledger import Ledger
from hf_zero.errors import UsageError

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

    @classmethod
    def over(cls, ranks: Sequence[int], device: torch.device, timeout_s: float, ledger: Ledger) -> Axis:
        """Connect these ranks; called by all of them together, and by no others.

        Raises:
            UsageError: this process is not one of them.
        """
        torch_compat.leave_after_gloo()
        chosen = tuple(sorted(ranks))
        # Each exchange is waited for with its own timeout. If that is short, connecting the ranks may take longer.
        timeout = datetime.timedelta(seconds=max(timeout_s, _CONNECT_S))
        group, gather_group = _new_group(chosen, timeout), _new_group(chosen, timeout)
        is_gloo = torch_compat.backend_on(group, device) == "gloo"
        control_group = group if is_gloo else _new_group(chosen, timeout, "gloo")
        rank, mesh = chosen.index(dist.get_rank()), _mesh_over(chosen, device.type)
        return cls(chosen, rank, mesh, group, gather_group, control_group, device, timeout_s, ledger)


def default_group() -> dist.ProcessGroup | None:
    """Torch's default process group, if there is one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def ranks_of(mesh: DeviceMesh | None) -> list[list[int]]:
    """The ranks of a mesh, by replica: each row holds all parameters once.

    Args:
        mesh: one axis, over which parameters are cut; or two, of which the first repeats what the second cuts, as
            `fully_shard` takes them. None: all ranks of the program in one row.

    Raises:
        UsageError: the mesh has more axes, or this process is not in it.
    """
    if mesh is None:
        return [list(range(1 if default_group() is None else dist.get_world_size()))]
    if mesh.ndim > 2:
        raise UsageError(
            f"the mesh has {mesh.ndim} axes {mesh.mesh_dim_names or ''}: give the one over which parameters are cut, or two, "
            "the first for replicas (`mesh['replicate', 'shard']`)"
        )
    rows = mesh.mesh.tolist()
    rows = rows if mesh.ndim == 2 else [rows]
    if not any(dist.get_rank() in row for row in rows):
        raise UsageError(f"rank {dist.get_rank()} is not in the mesh over ranks {rows}: only its ranks call this")
    return [sorted(map(int, row)) for row in rows]  # as torch numbers them within a group


class _Program:
    """What this process has made under one default process group.

    Attributes:
        numbers: of groups by ranks: these ranks make them together, so they count alike.
        meshes: by ranks and type of device.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.numbers: dict[tuple[int, ...], Iterator[int]] = {}
        self.meshes: dict[tuple[tuple[int, ...], str], DeviceMesh] = {}

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


def _new_group(ranks: tuple[int, ...], timeout: datetime.timedelta, backend: str | None = None) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        made: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
        return made
    number = next(_Program.now().numbers.setdefault(ranks, itertools.count()))
    name = f"hf_zero {'-'.join(map(str, ranks))} {number}"
    return torch_compat.new_group_among(list(ranks), name, timeout, backend)


def _mesh_over(ranks: tuple[int, ...], device_type: str) -> DeviceMesh:
    """The mesh over these ranks. Torch's `DTensor` caches treat equal meshes as one, so all of them must have one group."""
    known = _Program.now().meshes
    if (ranks, device_type) not in known:
        is_all = len(ranks) == dist.get_world_size()
        group = default_group() if is_all else _new_group(ranks, datetime.timedelta(seconds=_CONNECT_S))
        known[ranks, device_type] = DeviceMesh.from_group(group, device_type)  # type: ignore[arg-type]
    return known[ranks, device_type]
