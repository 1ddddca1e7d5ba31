"""Which implementation of `Collectives` serves some ranks, and the process groups that nobody needs any more."""

from __future__ import annotations

import gc
import logging
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from hf_zero.comm.alone import AloneCollectives
from hf_zero.comm.backends.native import NativeCollectives
from hf_zero.comm.backends.pairwise import PairwiseCollectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.exchange import InFlight
from hf_zero.comm.groups.devices import device_number
from hf_zero.comm.groups.process_groups import Axis, default_group
from hf_zero.comm.host.memory import host_number
from hf_zero.comm.host.one_host import HostCollectives, connect
from hf_zero.comm.ledger import Ledger
from hf_zero.config.zero_config import COLLECTIVES_VARIABLE
from hf_zero.errors import ConfigError

logger = logging.getLogger(__name__)

_BY_NAME: dict[str, Callable[[Axis], Collectives]] = {
    each.name: each for each in (PairwiseCollectives, NativeCollectives)
}


def plain_choice(device: torch.device) -> Literal["native", "pairwise"]:
    """What serves ranks that send each other what lives on a device, where nothing else is asked for."""
    return "pairwise" if device.type == "cpu" else "native"


def make_collectives(
    choice: str, ranks: Sequence[int], device: torch.device, timeout_s: float, ledger: Ledger
) -> Collectives:
    """Exchanges over these ranks, which all call this together, because it creates process groups.

    "auto" takes "host" for ranks of one host that can share memory, else "pairwise" on gloo, else "native": no measurement,
    which would choose by how busy a machine is, and otherwise on each run. "host" gives way by the same rule, with a warning.

    Args:
        choice: as in `ZeroConfig.collectives`.
        ranks: their numbers in the program; this rank alone needs no process group.
        device: where the exchanged tensors live.
        timeout_s: seconds that a single exchange may take.
        ledger: counts the exchanges.

    Raises:
        ConfigError: "pairwise" on a device, gloo for a device, or ranks have another choice.
    """
    if len(ranks) == 1:
        return AloneCollectives(ranks[0], device, ledger)
    made = _make(choice, Axis.over(ranks, device, timeout_s, ledger))
    _close_unused_groups(made)
    return made


def all_collectives(ranks: Sequence[int], device: torch.device, timeout_s: float) -> list[Collectives]:
    """Every implementation that can serve these ranks; called by all of them together."""
    axis = Axis.over(ranks, device, timeout_s, Ledger())
    made: list[Collectives] = [NativeCollectives(axis)]
    if made[0].backend == "gloo":
        made = [PairwiseCollectives(axis), *made]
        board = connect(made[0])
        if not isinstance(board, str):
            made = [HostCollectives(board, axis), *made]
    return made


def _make(choice: str, axis: Axis) -> Collectives:
    pairwise, own = PairwiseCollectives(axis), zlib.crc32(choice.encode())
    number = 0 if pairwise.backend == "gloo" else device_number(axis.device)
    place = (host_number(), os.getpid())
    told = pairwise.agree([own, number, *place], "the choice of collectives")
    for rank, (other, *_) in enumerate(told):
        if other != own:
            raise ConfigError(
                f"rank {axis.ranks[axis.rank]} has collectives: {choice}, but rank {axis.ranks[rank]} has another choice: "
                f"check the configuration, and the environment variable {COLLECTIVES_VARIABLE}"
            )
    for rank, (_, _, host, process) in zip(axis.ranks, told, strict=True):
        if host == place[0] and process != place[1]:
            axis.processes[rank] = process
    if pairwise.backend != "gloo":
        _refuse_shared_devices(axis, [number for _, number, *_ in told])
    if axis.device.type != "cpu" and pairwise.backend == "gloo":
        kind = axis.device.type
        native = dist.Backend.default_device_backend_map.get(kind, "...")
        raise ConfigError(
            f"the parameters are on {kind}, but the program's group is gloo's, which exchanges the host's memory: call "
            f"init_process_group() without a backend, or with 'cpu:gloo,{kind}:{native}'"
        )
    if choice == "pairwise" and pairwise.backend != "gloo":
        raise ConfigError(
            f"collectives: pairwise runs on gloo, but {pairwise.backend} serves the parameters on {axis.device.type}: use "
            f"native, or auto, which takes it there (the environment variable {COLLECTIVES_VARIABLE} says what auto stands for)"
        )
    if choice in _BY_NAME:
        return _BY_NAME[choice](axis)
    made, reason = _by_rule(pairwise, axis)
    if choice == "auto":
        made.reason = f"auto: {reason}"
    elif made.name != "host":
        logger.warning("collectives: host cannot be had here, but %s: %s", made.name, reason)
    return made


def _refuse_shared_devices(axis: Axis, numbers: list[int]) -> None:
    """Two ranks cannot exchange on one device: NCCL says so in the first exchange, or waits for ever."""
    first: dict[int, int] = {}
    for rank, number in zip(axis.ranks, numbers, strict=True):
        if number and (other := first.setdefault(number, rank)) != rank:
            raise ConfigError(
                f"ranks {other} and {rank} are both on one device of a host, where they cannot exchange: start one process a "
                f"device, and let each take its own (`torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK']))`, or "
                f"init_process_group(device_id=...)); rank {axis.ranks[axis.rank]} is on {axis.device}"
            )


def _by_rule(pairwise: Collectives, axis: Axis) -> tuple[Collectives, str]:
    """What serves these ranks where they may share memory if they can; and why."""
    if pairwise.backend != "gloo":
        return NativeCollectives(
            axis
        ), "the parameters are not in the host's memory"  # NCCL's own collectives are right
    board = connect(pairwise)
    if isinstance(board, str):
        return pairwise, board
    return HostCollectives(board, axis), "the ranks share the memory of one host"


@dataclass(frozen=True)
class _Groups:
    """The process groups of one `Collectives`. They outlive it, because peers may still be in its last exchange."""

    owner: weakref.ref[Collectives]
    ranks: tuple[int, ...]
    default_group: weakref.ref[dist.ProcessGroup]
    groups: tuple[weakref.ref[dist.ProcessGroup], ...]
    in_flight: InFlight  # peers may still want it


_groups: list[_Groups] = []


_LetGo = Callable[[tuple[int, ...]], None]
_hear_of_meetings: list[_LetGo] = []


def when_met(let_go: _LetGo) -> _LetGo:
    """Call this whenever ranks have met to make groups of their own, before those of models that are gone are closed."""
    _hear_of_meetings.append(let_go)
    return let_go


def _close_unused_groups(made: Collectives) -> None:
    """Close the groups of models that are gone on every rank: each group has threads that poll as long as it exists."""
    global _groups
    for let_go in _hear_of_meetings:
        let_go(made.ranks)
    world = default_group()
    assert world is not None
    _groups = [each for each in _groups if each.default_group() is world]  # torch has closed the others
    same = [each for each in _groups if each.ranks == made.ranks]  # the same on all of these ranks, in the same order
    if len(same) > 1:
        gc.collect()  # a dropped model may be part of a reference cycle
    uses = [int(each.owner() is not None) for each in same]
    reports = made.agree(uses, "the models that are still in use")
    unused = [each for each, *is_used in zip(same, *reports, strict=True) if not any(is_used)]
    for group in (group for each in unused for group in each.groups):
        dist.destroy_process_group(group())
    _groups = [each for each in _groups if each not in unused]
    made_groups = (made.axis.group, made.axis.gather_group, made.axis.control_group)
    groups = tuple({id(group): weakref.ref(group) for group in made_groups}.values())
    _groups.append(_Groups(weakref.ref(made), made.ranks, weakref.ref(world), groups, made.in_flight))
