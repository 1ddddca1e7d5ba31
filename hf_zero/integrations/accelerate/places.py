"""Where `ZeroAccelerator` keeps its checkpoints: names, what may be replaced, and what is removed when there are too many."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.files.manifest import MANIFEST, read_manifest
from hf_zero.checkpoint.files.rotation import remove_oldest
from hf_zero.errors import CheckpointError, UsageError

_NAME = re.compile(r"^checkpoint_(\d+)$")


def naming_folder(accelerator: Any, what: str) -> Path:
    """Where accelerate keeps the checkpoints that it names itself."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise UsageError(f"{what} needs a folder, or a ProjectConfiguration with automatic_checkpoint_naming=True")
    if accelerator.project_dir is None:
        raise UsageError(f"{what}: automatic_checkpoint_naming needs the project_dir of the ProjectConfiguration")
    return Path(accelerator.project_dir) / "checkpoints"


def number_of(path: Path) -> int | None:
    """The number of a checkpoint that accelerate has named; None for any other name."""
    found = _NAME.match(path.name)
    return None if found is None else int(found.group(1))


def check_place(final: Path, is_named_here: bool) -> None:
    """Raise unless `final` may be written, and its present content may be replaced."""
    if not os.path.lexists(final):
        return
    if is_named_here:
        raise CheckpointError(
            f"{final} exists already: set accelerator.project_configuration.iteration to the number to start with"
        )
    if final.is_symlink() or not final.is_dir():
        raise CheckpointError(f"{final} is not a folder: choose another name")
    if (final / MANIFEST).is_file():
        try:
            read_manifest(final)
        except CheckpointError as error:
            raise CheckpointError(f"{final} cannot be replaced: choose another name, or remove it ({error})") from error
    if os.path.ismount(final) or Path.cwd().is_relative_to(final):
        raise CheckpointError(
            f"{final} is mounted, or programs run in it, and a save replaces the folder: save to a folder inside it"
        )


def check_objects(accelerator: Any, folder: Path, count: int) -> None:
    """Raise unless as many objects are registered as a state has been saved of."""
    if count != len(accelerator._custom_objects):
        raise CheckpointError(
            f"{folder} has states of {count} registered objects, but {len(accelerator._custom_objects)} are "
            "registered: call register_for_checkpointing with the same objects, in the same order"
        )


def remove_old(newest: Path, limit: int) -> None:
    """Remove the oldest checkpoints beside one that has just been committed.

    Args:
        newest: stays.
        limit: how many stay, at least one.
    """
    run = newest.parent
    ours = [(n, path) for path in run.iterdir() if (n := number_of(path)) is not None and (path / MANIFEST).is_file()]
    remove_oldest(run, [path for _, path in sorted(ours)], limit, {newest})
