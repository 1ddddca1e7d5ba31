"""Which implementation of `Collectives` serves a model, and the process groups that it uses."""

from __future__ import annotations

import datetime
import gc
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_zero.engine.collectives import Collectives
from hf_zero.engine.native import NativeCollectives
from hf_zero.engine.pairwise import PairwiseCollectives
from hf_zero.ledger import Ledger

_CONNECT_S = 60.0

IMPLEMENTATIONS: dict[str, type[Collectives]] = {"native": NativeCollectives, "pairwise": PairwiseCollectives}


def choose(choice: str, backend: str) -> type[Collectives]:
    """The implementation for `choice`; "auto" is `pairwise` on gloo, where it is the faster one, and `native` elsewhere."""
    if choice == "auto":
        choice = "pairwise" if backend == "gloo" else "native"
    return IMPLEMENTATIONS[choice]


def make_collectives(choice: str, device: torch.device, timeout_s: float, ledger: Ledger) -> Collectives | None:
    """Exchanges over all ranks of the default process group; None where there is one rank or no group.

    Must be called by all ranks together: it makes process groups.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # Each exchange is waited for with its own time; connecting the ranks may take longer than a short one.
    timeout = datetime.timedelta(seconds=max(timeout_s, _CONNECT_S))
    group, gather_group = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)
    backend = str(dist.get_backend(group))
    control_group = group if backend == "gloo" else dist.new_group(timeout=timeout, backend="gloo")
    made = choose(choice, backend)(group, gather_group, control_group, device, timeout_s, ledger)
    _close_unused_groups(made)
    return made


@dataclass(frozen=True)
class _Groups:
    """The process groups of one `Collectives`, which torch keeps: peers may still be in its last exchange when it goes."""

    owner: weakref.ref[Collectives]
    default_group: weakref.ref[dist.ProcessGroup]
    groups: tuple[weakref.ref[dist.ProcessGroup], ...]


_groups: list[_Groups] = []


def _close_unused_groups(made: Collectives) -> None:
    """Close the groups of models that are gone on every rank: each has threads that poll, for as long as it is there."""
    global _groups
    world = dist.group.WORLD
    assert world is not None
    _groups = [each for each in _groups if each.default_group() is world]  # torch has closed the others
    if len(_groups) > 1:
        gc.collect()  # a model that was dropped may lie in a cycle
    uses = [int(each.owner() is not None) for each in _groups]
    in_use = [any(column) for column in zip(*made.agree(uses, "the models that are still in use"), strict=True)]
    for each, is_used in zip(_groups, in_use, strict=True):
        for group in () if is_used else each.groups:
            dist.destroy_process_group(group())
    _groups = [each for each, is_used in zip(_groups, in_use, strict=True) if is_used]
    groups = {id(group): weakref.ref(group) for group in (made.group, made.gather_group, made.control_group)}
    _groups.append(_Groups(weakref.ref(made), weakref.ref(world), tuple(groups.values())))
