"""What hf_zero needs of torch's process groups and torch does not show; tests/test_seams.py fails when a name moves."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_zero.host.beside import let_threads_rest

_LEAVING_S = 0.1  # for a thread of gloo to let go of tensors, unless it has no core
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"

# torch 2.13 renamed both, and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Public since torch 2.14, which warns of the old name.
_set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout

_BOUND_BY_THEMSELVES = ("nccl2", "nccl-lazy")

_cached_for: weakref.ref[object] | None = None
_ours: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # made by `new_group_among`


def forget_old_groups(default_group: object) -> None:
    """Empty DTensor's caches, if they were filled under another default process group than the one in place now.

    They take meshes of equal ranks for one another, and would hand out one whose group has been destroyed.
    """
    global _cached_for
    if _cached_for is None or _cached_for() is not default_group:
        # As `torch.distributed.tensor.debug` does, which would import torch's compiler.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
        torch._C._clear_DTensor_sharding_propagator_cache()
        _cached_for = None if default_group is None else weakref.ref(default_group)


@functools.cache
def leave_after_gloo() -> None:
    """Let this process end when gloo's threads have let go of the tensors of its last collective, and rest.

    A thread of gloo that drops a tensor of Python while the interpreter is taken down ends the process by SIGABRT
    ("terminate called without an active exception", https://github.com/pytorch/pytorch/issues/190489): so a run that trained
    well fails at its very end. Destroying the groups would not join these threads, since torch's caches keep the groups.
    """
    atexit.register(let_threads_rest, _LEAVING_S, 2.0)


def new_group_among(
    ranks: list[int], name: str, timeout: datetime.timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group of some of the program's ranks, made by these alone.

    `new_group` needs all ranks of the program; and with `use_local_synchronization` it makes the name of the ranks and the
    number of groups that this process happens to know, so that names differ between ranks, or come again after a group
    has been destroyed, when the store still has the addresses of the old one.

    Args:
        ranks: ascending.
        name: the same on all of these ranks, and new.
        timeout: of its exchanges.
        backend: by default that of the default group.
    """
    core: Any = dist.distributed_c10d
    chosen = backend or dist.get_backend_config()
    place, parent = ranks.index(dist.get_rank()), core._get_default_group()
    device = _device_for(chosen, parent)
    with _unbound(parent):
        group, _ = core._new_process_group_helper(
            len(ranks),
            place,
            ranks,
            core.Backend(chosen),
            core._get_default_store(),
            name,
            timeout=timeout,
            device_id=device,
        )
    core._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    _ours.add(group)
    return cast(dist.ProcessGroup, group)


def _device_for(backend: str, parent: Any) -> torch.device | None:
    """The device that a new group is to be bound to: that of the program's group, where both have one backend for it.

    As `new_group` does. Backends that insist on a device (`nccl2`) would take the one of the process's number on its host.
    """
    bound, config = parent.bound_device_id, dist.get_backend_config()
    if bound is None:
        return None
    chosen, of_program = (_by_device(each).get(bound.type) for each in (backend, config))
    return bound if chosen == of_program != "gloo" else None


def _by_device(config: str) -> dict[str, str]:
    core: Any = dist.distributed_c10d
    return dict(core.BackendConfig(core.Backend(config)).get_device_backend_map())


@contextlib.contextmanager
def _unbound(parent: Any) -> Iterator[None]:
    """While active, torch does not know that the program's group is bound to a device.

    Else it splits NCCL's communicator of the program (`ncclCommSplit`), for which all of its ranks would have to come.
    """
    bound, parent.bound_device_id = parent.bound_device_id, None
    try:
        yield
    finally:
        parent.bound_device_id = bound


@contextlib.contextmanager
def connecting_on_demand() -> Iterator[None]:
    """Within: new groups of gloo's connect two ranks when they first talk to each other, and not each rank to all at once.

    Torch reads it whenever it makes such a group; tests/comm/groups/test_process_groups.py fails where it does no more.
    """
    before = os.environ.get(_LAZY_GLOO)
    os.environ[_LAZY_GLOO] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY_GLOO]
        else:
            os.environ[_LAZY_GLOO] = before


def program_store() -> Any:
    """The store through which the program's processes have met."""
    return dist.distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let exchanges of a group that exists already wait for so long."""
    _set_timeout(datetime.timedelta(seconds=seconds), group)


def timeout_of(group: dist.ProcessGroup) -> float:
    """How many seconds the program lets exchanges of a group take; 0 where no backend of it tells."""
    longest = 0.0
    for backend in _backends(group):
        with contextlib.suppress(AttributeError, RuntimeError):  # not of torch's own
            longest = max(longest, backend.options._timeout.total_seconds())
    return longest


def sequence_number(group: dist.ProcessGroup) -> int:
    """How many exchanges this process has begun in a group, as torch counts them: alike on all of its ranks."""
    found = 0
    for backend in _backends(group):
        with contextlib.suppress(RuntimeError):  # not of torch's own, and does not count
            found += int(backend._get_sequence_number_for_group())
    return found


def groups_of_program() -> dict[str, dist.ProcessGroup]:
    """The groups that the program has made, with its default one, and this process is in, by their names."""
    names = dist.distributed_c10d._world.pg_names.copy()
    return {name: group for group, name in names.items() if group not in _ours}


def _backends(group: Any) -> list[Any]:
    return list({id(each): each for each in map(group._get_backend, group._device_types)}.values())


def num_groups_begun() -> int:
    """How many groups of the program this process has begun to make with `new_group`, which all ranks call alike."""
    return int(dist.distributed_c10d._world.group_count)


def backend_on(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that exchanges a group's tensors of a device: "gloo", "nccl".

    `dist.get_backend` says "cpu:gloo,cuda:nccl" of a group that was made without the name of one. torch has several on NCCL,
    of which one is called so at a time: from 2.15 on "nccl" makes one that says "nccl2".
    """
    name = _implementation(group, device)
    return "nccl" if name.startswith("nccl") else name


def _implementation(group: dist.ProcessGroup, device: torch.device) -> str:
    return str(group._get_backend(device).name())


def watches_a_device() -> bool:
    """Whether the program's group has a backend of a device, whose watchdog ends a process that has lost a peer."""
    group = dist.group.WORLD
    devices = [] if group is None else [each for each in group._device_types if each.type != "cpu"]
    return any(backend_on(cast(dist.ProcessGroup, group), each) != "gloo" for each in devices)


def may_be_bound_by_torch(group: dist.ProcessGroup, local_number: int | None) -> bool:
    """Whether torch, not the program, may have chosen the device that a group is bound to.

    Args:
        group: bound to a device.
        local_number: of this process on its host, if a launcher has told it.
    """
    bound = group.bound_device_id
    if bound is None or _implementation(group, bound) not in _BOUND_BY_THEMSELVES:
        return False
    number = dist.get_rank() if local_number is None else local_number
    return bool(bound.index == number % torch.accelerator.device_count())


def coalesces_on(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives that are `coalesced` are one launch: NCCL's are, and those of most other devices' libraries."""
    return bool(getattr(group._get_backend(device), "supports_coalescing", False))


def exchanges_on(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group can exchange tensors of a device: NCCL's cannot on the CPU."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def coalesced(group: dist.ProcessGroup, device: torch.device) -> Iterator[list[dist.Work]]:
    """Within: collectives on `group` are collected; at the end they start together. Yields what to wait for.

    Not by torch's own manager, under which NCCL starts all of them in one call of C++: where a start fails there, since a peer
    has gone, another error follows while the first one is under way, and ends the process before anybody has said why.
    """
    works: list[dist.Work] = []
    group._start_coalescing(device)
    try:
        yield works
    except BaseException:
        with contextlib.suppress(RuntimeError):  # of the same cause
            group._end_coalescing(device)
        raise
    works.append(group._end_coalescing(device))
