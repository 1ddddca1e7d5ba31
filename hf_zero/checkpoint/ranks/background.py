"""Saving while training continues: rows are copied, a thread writes and commits them, and all ranks learn the outcome."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hf_zero import torch_compat
from hf_zero.checkpoint.files.tensor_file import Source
from hf_zero.comm.together import described
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError
from hf_zero.host import beside

logger = logging.getLogger(__name__)

WRITING_S = 3600.0  # ranks wait this long for one that writes
_RUNNING, _DONE, _FAILED = range(3)


class BackgroundSaves:
    """The saves of one model that run beside its training, one at a time.

    The thread has its own process groups, so that its exchanges cannot be mistaken for those of training.

    Args:
        world: the ranks; all of them create this together.
    """

    def __init__(self, world: World) -> None:
        self._get_world = weakref.ref(world)  # which `_by_world` lets go with its model
        self._own_world = world.beside(WRITING_S)
        self._kept: dict[str, torch.Tensor] = {}
        self._copied: torch.Event | None = None  # the last copies from a device have arrived
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._after: Callable[[], None] = lambda: None

    @property
    def _world(self) -> World:
        world = self._get_world()
        assert world is not None, "the model is gone"
        return world

    @property
    def kept_bytes(self) -> int:
        """Memory that copies of rows take on this rank; it is kept from save to save."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def keep(self, sources: Mapping[str, Source]) -> dict[str, Source]:
        """Copy this rank's rows, into the memory of the last save if shape and dtype are the same.

        From a device, copies are in flight when this returns: the thread waits for them, and later work of the device does.
        """
        copies, is_on_device = {}, self._world.device.type != "cpu"
        for name, source in sources.items():
            rows = torch_compat.local_of(source.rows)
            kept = self._kept.get(name)
            if kept is None or kept.shape != rows.shape or kept.dtype != rows.dtype:
                kept = self._kept[name] = torch.empty(
                    rows.shape, dtype=rows.dtype, pin_memory=is_on_device, device="cpu"
                )
            kept.copy_(rows, non_blocking=is_on_device)
            copies[name] = replace(source, rows=kept)
        if is_on_device:
            self._copied = torch.Event(self._world.device)
            self._copied.record()
        return copies

    def start(self, work: Callable[[World], None], after: Callable[[], None]) -> None:
        """Run `work` on a thread of every rank, with the thread's own world; `after` runs here once all have succeeded."""
        assert self._thread is None, "the last save has not been waited for"

        def run() -> None:
            try:
                if self._copied is not None:
                    self._copied.synchronize()
                work(self._own_world)
            except Exception as error:
                self._error = CheckpointError(described(error, CheckpointError))

        self._error, self._after = None, after
        self._thread = beside.start("hf_zero save", run, self._wait_at_exit)

    def _wait_at_exit(self) -> None:
        """The program has not waited for its last save: it is completed all the same, unless an error has ended the program."""
        if self._thread is not None and getattr(sys, "last_value", None) is None:
            self._thread.join()
            if self._error is not None:
                logger.error("saving in the background: %s", self._error)

    def poll(self) -> None:
        """Finish a save that has ended on every rank; all ranks call this at the same point, such as after a step.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self._thread is None:
            return
        status = _RUNNING if self._thread.is_alive() else _FAILED if self._error else _DONE
        statuses = self._statuses(status)
        if all(status != _RUNNING for (status,) in statuses):
            self._end()

    def _statuses(self, status: int) -> list[tuple[int, ...]]:
        return [tuple(row) for row in self._world.everyone.agree([status], "the save in the background")]

    def wait(self) -> None:
        """Wait for the save in progress, if there is one; called by all ranks together.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._world.meet("the end of a save in the background", WRITING_S)
            self._end()

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        after, self._after = self._after, lambda: None
        with self._world.together("saving in the background", CheckpointError):
            if error is not None:
                raise error
        after()


_by_world: weakref.WeakKeyDictionary[World, BackgroundSaves] = weakref.WeakKeyDictionary()


def background_of(world: World) -> BackgroundSaves | None:
    """The saves in the background of a model's ranks; None if the configuration does not ask for them."""
    if not world.config.async_save:
        return None
    if world not in _by_world:
        _by_world[world] = BackgroundSaves(world)
    return _by_world[world]


def wait_for(world: World) -> None:
    """Wait for a save in the background, if one is in progress."""
    if world in _by_world:
        _by_world[world].wait()
