"""Where ranks write and read together: rank 0's folder, where they were given different ones, as by `datetime.now()`."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path

from hf_zero.engine.ranks.world import World

logger = logging.getLogger(__name__)


def one_place(folder: str | os.PathLike[str], world: World, verb: str = "save to") -> Path:
    """Rank 0's folder, on every rank; called by all ranks together, which `verb` there."""
    own = os.fspath(folder)
    names = world.everyone.agree([zlib.crc32(own.encode())], f"the folder to {verb}")
    other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if other is None:
        return Path(own)
    first: str = world.share(own, f"the folder to {verb}")
    if world.rank == 0:
        logger.warning(
            "rank %d was given another folder to %s than rank 0, whose counts for all: %s", other, verb, first
        )
    return Path(first)
