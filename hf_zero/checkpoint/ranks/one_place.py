"""Where ranks write to together: rank 0's folder, where they were given different ones, as by `datetime.now()`."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path

from hf_zero.engine.ranks.world import World

logger = logging.getLogger(__name__)


def one_place(folder: str | os.PathLike[str], world: World) -> Path:
    """Rank 0's folder, on every rank; called by all ranks together."""
    own = os.fspath(folder)
    names = world.everyone.agree([zlib.crc32(own.encode())], "the folder to save to")
    other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if other is None:
        return Path(own)
    first: str = world.share(own, "the folder to save to")
    if world.rank == 0:
        logger.warning(
            "rank %d was given another folder to save to than rank 0, whose counts for all: %s", other, first
        )
    return Path(first)
