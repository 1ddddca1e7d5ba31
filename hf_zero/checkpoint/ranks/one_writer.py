"""Saving what every rank has whole, in stage 0: rank 0 writes, whether the others make the same call or not.

[Note: one writer] Under DDP people save on the main process alone; in the other stages all ranks call. Both work here. Rank 0
waits for nobody, but says through torch's store how far it is. Another rank that makes the call waits until as many calls for
the same place have ended there as it has made itself, and writes nothing, so that no two ranks write one file.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_zero.comm.beside.store import Notes
from hf_zero.comm.together import described
from hf_zero.engine.engine import live_engines
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError, CollectiveError
from hf_zero.parameters import parameters_of

_calls: Counter[str] = Counter()  # by place, on this rank
_POLL_S = 0.02
_BEGUN, _DONE = "begun", "done"
_LATEST = "latest"  # the key of the number of rank 0's last call, beside those of the calls


_alone = threading.local()


@contextlib.contextmanager
def saving_alone() -> Iterator[None]:
    """Within: this thread saves for all ranks, so that parts of the model which save themselves wait for nobody."""
    before, _alone.is_saving = is_saving_alone(), True
    try:
        yield
    finally:
        _alone.is_saving = before


def is_saving_alone() -> bool:
    """Whether this thread is within `saving_alone`."""
    return getattr(_alone, "is_saving", False)


def world_of_whole(model: nn.Module) -> World | None:
    """The ranks that each hold all of `model`, in stage 0; None if they are not several, or cut it."""
    param = next(parameters_of(model), None)
    if param is None:
        return None
    engine = next((each for each in live_engines() if each.find(param) is not None), None)
    world = vars(param).get("_zero_world") if engine is None else engine.world
    return world if world is not None and world.num_ranks > 1 and not world.partitions else None


def save_on_first(world: World, place: str, save: Callable[[], Any], limit_s: float) -> None:
    """Save on rank 0; on any other rank wait until that has been done.

    Args:
        world: the ranks.
        place: where to.
        save: writes the model.
        limit_s: seconds that writing may take.

    Raises:
        CheckpointError: rank 0 could not write; there, and where it is waited for.
        CollectiveError: on another rank, if rank 0 does not make the call.
    """
    _calls[place] += 1
    number, notes = _calls[place], Notes(f"saving {place}")
    if world.rank == 0:
        notes.write(number, _BEGUN)
        notes.write(_LATEST, str(number))
        try:
            with saving_alone():
                save()
        except Exception as error:
            state = f"saving {place}: rank 0: {described(error, CheckpointError)}"
            notes.write(number, state)
            raise CheckpointError(state) from error
        notes.write(number, _DONE)
        return
    started = time.monotonic()
    while (found := notes.read(number)) in (None, _BEGUN):
        if not found and int(notes.read(_LATEST) or 0) > number:
            return  # rank 0 has saved there before this process group was made
        if time.monotonic() > started + (limit_s if found else world.limit_s):
            raise CollectiveError(
                f"rank {world.rank} waited for rank 0 in save_pretrained to {place}: rank 0 "
                f"{'has not finished writing' if found else 'has not made the call, and it is the one that writes'}"
            )
        time.sleep(_POLL_S)
    if found != _DONE:
        raise CheckpointError(found)
