"""Which implementation of `Collectives` serves a model, and the process groups that it uses."""

from __future__ import annotations

import datetime
import gc
import logging
import weakref
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.comm import measure
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.host.many_hosts import SeveralHostsCollectives
from hf_zero.comm.host.one_host import HostCollectives, connect
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.native import NativeCollectives
from hf_zero.comm.pairwise import PairwiseCollectives
from hf_zero.config.zero_config import COLLECTIVES_VARIABLE
from hf_zero.errors import ConfigError

logger = logging.getLogger(__name__)

_CONNECT_S = 60.0


def make_collectives(choice: str, device: torch.device, timeout_s: float, ledger: Ledger) -> Collectives | None:
    """Exchanges over all ranks of the default process group; None if there is only one rank, or no group.

    "auto" measures the candidates (once per process group) and takes the fastest. "host" falls back to "pairwise", with a
    warning, if ranks cannot share memory. All ranks must call this together, because it creates process groups.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    made = _make(choice, _given(device, timeout_s, ledger))
    _close_unused_groups(made)
    return made


def all_collectives(device: torch.device, timeout_s: float) -> list[Collectives]:
    """Every implementation that can serve the default process group of several ranks; called by all of them together."""
    given = _given(device, timeout_s, Ledger())
    return _candidates(PairwiseCollectives(*given), given)[0]


def _given(device: torch.device, timeout_s: float, ledger: Ledger) -> tuple[Any, ...]:
    """The arguments of every implementation, with process groups made for them."""
    # Each exchange is waited for with its own timeout. If that is short, connecting the ranks may take longer.
    timeout = datetime.timedelta(seconds=max(timeout_s, _CONNECT_S))
    group, gather_group = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)
    is_gloo = str(dist.get_backend(group)) == "gloo"
    control_group = group if is_gloo else dist.new_group(timeout=timeout, backend="gloo")
    return group, gather_group, control_group, device, timeout_s, ledger


def _make(choice: str, given: tuple[Any, ...]) -> Collectives:
    pairwise = PairwiseCollectives(*given)
    for rank, (other,) in enumerate(pairwise.agree([zlib.crc32(choice.encode())], "the choice of collectives")):
        if other != zlib.crc32(choice.encode()):
            raise ConfigError(
                f"rank {pairwise.rank} has collectives: {choice}, but rank {rank} has another choice: "
                f"check the configuration, and the environment variable {COLLECTIVES_VARIABLE}"
            )
    if choice == "pairwise":
        return pairwise
    if choice == "native":
        return NativeCollectives(*given)
    candidates, reason = _candidates(pairwise, given)
    if choice == "auto":
        return measure.fastest(candidates)
    if candidates[0].name != "host":
        logger.warning("collectives: host cannot be had here, so ranks exchange pairwise: %s", reason)
        return pairwise
    return candidates[0]


def _candidates(pairwise: Collectives, given: tuple[Any, ...]) -> tuple[list[Collectives], str]:
    """What `auto` chooses from, and why `host` is not among them."""
    native = NativeCollectives(*given)
    if pairwise.backend != "gloo":
        return [native], "the parameters are not in the host's memory"  # NCCL's own collectives are the right ones
    found = connect(pairwise)
    if isinstance(found, str):
        return [pairwise, native], found
    board, hosts = found
    host = HostCollectives(board, *given) if len(hosts) == 1 else SeveralHostsCollectives(board, hosts, *given)
    return [host, pairwise, native], ""


@dataclass(frozen=True)
class _Groups:
    """The process groups of one `Collectives`. They outlive it, because peers may still be in its last exchange."""

    owner: weakref.ref[Collectives]
    default_group: weakref.ref[dist.ProcessGroup]
    groups: tuple[weakref.ref[dist.ProcessGroup], ...]


_groups: list[_Groups] = []


def _close_unused_groups(made: Collectives) -> None:
    """Close the groups of models that are gone on every rank: each group has threads that poll as long as it exists."""
    global _groups
    world = dist.group.WORLD
    assert world is not None
    _groups = [each for each in _groups if each.default_group() is world]  # torch has closed the others
    if len(_groups) > 1:
        gc.collect()  # a dropped model may be part of a reference cycle
    uses = [int(each.owner() is not None) for each in _groups]
    in_use = [any(column) for column in zip(*made.agree(uses, "the models that are still in use"), strict=True)]
    for each, is_used in zip(_groups, in_use, strict=True):
        for group in () if is_used else each.groups:
            dist.destroy_process_group(group())
    _groups = [each for each, is_used in zip(_groups, in_use, strict=True) if is_used]
    groups = {id(group): weakref.ref(group) for group in (made.group, made.gather_group, made.control_group)}
    _groups.append(_Groups(weakref.ref(made), weakref.ref(world), tuple(groups.values())))
