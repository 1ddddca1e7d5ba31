"""A loop of one's own that may be started again: it goes on from its newest whole state, or starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import latest
from hf_zero.checkpoint.files.manifest import MANIFEST
from hf_zero.errors import CheckpointError, UsageError
from hf_zero.host import progress
from hf_zero.integrations.accelerate.checkpoint import load_state, world_of_accelerator


def resume_or_start(accelerator: Any, folder: str | os.PathLike[str]) -> Path | None:
    """Load the newest state that `accelerator.save_state` has saved in a folder, if there is one.

    Called by all ranks together, after `prepare`; on any number of ranks. Schedulers, data order and registered objects are
    loaded, too, as by `accelerator.load_state`: register what counts your steps, or take the step from the folder's name. On
    another number of ranks, keeping the samples of a step is the loop's own business.

    Args:
        accelerator: has at least one partitioned model.
        folder: has the states, each in a folder of any name.

    Returns:
        The state's folder; None if there is none, and the training starts.

    Raises:
        CheckpointError: on all ranks, if there are states and none of them is whole, or the newest is of another model.
        UsageError: no model of the accelerator is partitioned.
    """
    world = world_of_accelerator(accelerator)
    if world is None:
        raise UsageError("resume_or_start needs a partitioned model: call it after accelerator.prepare(model, ...)")
    place = world.share(Path(folder).expanduser().absolute(), "the folder of states")
    path, manifest, skipped = latest(place, _saved_at, world)
    if path is None or manifest is None:
        if skipped:
            raise CheckpointError(f"no state in {place} is whole: {'; '.join(skipped)}. Remove them to start anew")
        return None
    load_state(accelerator, path, False, {})
    progress.note_saved(manifest.step, place)
    return path


def _saved_at(path: Path) -> int | None:
    """When a state was saved, in ns; None for a folder that is not a state, 0 for one that is about to be put back."""
    if path.name.startswith(".") or not path.exists():
        return None if path.name.startswith(".") else 0
    manifest = path / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.is_file() else None
