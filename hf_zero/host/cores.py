"""The host's cores, for the work of a process that computes on a device otherwise.

[Note: one thread a process] Launchers let each process have one thread (OMP_NUM_THREADS=1), since several share a host and
compute elsewhere. What steps, casts and adds in host memory is then several times slower than the memory permits. So such
work takes this process's share of the cores, and the number is as before afterwards; another number than one is somebody's
choice, and stays.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

import torch

logger = logging.getLogger(__name__)

_before: dict[int, int] = {}  # by what has begun such work


def share_of_cores() -> int:
    """Cores that this process may use, over the processes of its host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def begin(owner: int) -> None:
    """Work begins, which `end` ends; where an earlier one of the same owner has raised, it has ended, too."""
    end(owner)
    num_threads = torch.get_num_threads()
    if num_threads == 1 and (share := share_of_cores()) > 1:
        _say_once(share)
        torch.set_num_threads(share)
        _before[owner] = num_threads


def end(owner: int) -> None:
    """Let there be as many threads as before `begin`."""
    if owner in _before:
        torch.set_num_threads(_before.pop(owner))


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Within: see [Note: one thread a process]."""
    owner = object()
    begin(id(owner))
    try:
        yield
    finally:
        end(id(owner))


@functools.cache
def _say_once(share: int) -> None:
    logger.info("offload: work in host memory takes %d threads, where OMP_NUM_THREADS or a launcher said 1", share)
