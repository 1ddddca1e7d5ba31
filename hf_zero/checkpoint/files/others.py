"""The files in a checkpoint's folder that no checkpoint wrote.

[Note: files of the program] Programs put files of their own into a checkpoint's folder: before it is saved (arguments), after
(a tokenizer, a callback's metrics, a further export), and again when a state is saved to the same place. They are not listed in
the manifest, nobody checks them, and they stay when a checkpoint replaces an older one. Not so what could be taken for a
checkpoint: weights that `from_pretrained` would read in place of ours are a damage, and another library's checkpoint is not
replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, WEIGHTS, read_manifest
from hf_zero.errors import CheckpointError

MARKER = "checkpoint-is-incomplete.txt"  # the Trainer leaves it in a folder before it saves on a signal
_STATE = re.compile(
    rf"{WEIGHTS}|(optimizer|scheduler|sampler)(_\d+)?\.(bin|pt)|random_states_\d+\.pkl|rng_state.*\.pth|trainer_state\.json"
)
_STATE_FOLDER = re.compile(r"(pytorch_model|optimizer|global_step).*")  # of FSDP's and DeepSpeed's checkpoints


def refuse_foreign(folder: Path) -> None:
    """Raise a `CheckpointError` for a folder that a checkpoint would replace, and that is another library's."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return
    if found := min(filter(_is_state, folder.iterdir()), default=None):
        raise CheckpointError(
            f"{folder} exists already, and is no checkpoint of hf_zero (it has {found.name}): move it away, or save to "
            "another folder"
        )


def _is_state(path: Path) -> bool:
    return (_STATE_FOLDER if path.is_dir() else _STATE).fullmatch(path.name) is not None


def keep_own(old: Path, new: Path) -> None:
    """Move what the program has put into the folder of an older checkpoint to the one that replaces it.

    Where both have a file, that of the new checkpoint stays.
    """
    left = {MANIFEST, MARKER}
    try:
        left |= read_manifest(old).files.keys()
    except CheckpointError:  # half removed, damaged, or never one: what is a checkpoint's is told by its name
        left |= {path.name for path in old.iterdir() if _is_state(path)}
    _move(old, new, "", left)


def _move(old: Path, new: Path, inside: str, left: Collection[str]) -> None:
    for path in sorted(old.iterdir()):
        name, target = inside + path.name, new / path.name
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder and (target.is_dir() or any(each.startswith(f"{name}/") for each in left)):
            _move(path, target, f"{name}/", left)
        elif name not in left and not os.path.lexists(target):
            target.parent.mkdir(exist_ok=True)
            disk.rename(path, target)
