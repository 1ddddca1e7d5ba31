"""The files in a checkpoint's folder that no checkpoint wrote.

[Note: files of the program] Programs put files of their own into a checkpoint's folder: before it is saved (arguments), after
(a tokenizer, a callback's metrics, a further export), and again when a state is saved to the same place. They are not listed in
the manifest, nobody checks them, and they stay when a checkpoint replaces an older one. Not so what could be taken for it: a
`model.safetensors` beside our shards, which `from_pretrained` would read in their place, is a damage; and another library's
checkpoint is not replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, read_manifest
from hf_zero.errors import CheckpointError

MARKER = "checkpoint-is-incomplete.txt"  # the Trainer leaves it in a folder before it saves on a signal
_STATE = re.compile(
    r"((pytorch|adapter|diffusion_pytorch)_)?model(_\d+)?(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|(optimizer|scheduler|sampler)(_\d+)?\.(bin|pt)|random_states_\d+\.pkl|rng_state.*\.pth|trainer_state\.json"
)
# Of FSDP's and DeepSpeed's checkpoints.
_STATE_FOLDER = re.compile(r"pytorch_model(_fsdp_\d+)?|optimizer_\d+|global_step\d+")


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


def keep_own(old: Path, new: Path, *, overwrites: bool = False) -> None:
    """Move what the program has put into one folder of a checkpoint to another, which takes its place.

    Args:
        old: what no checkpoint wrote there is moved.
        new: where to.
        overwrites: the program's files there, where both have one; a checkpoint's stay in any case.
    """
    left = {MANIFEST, MARKER}
    for folder in (old, new):
        try:
            left |= read_manifest(folder).files.keys()
        except CheckpointError:  # it is none
            left |= {path.name for path in folder.iterdir() if _is_state(path)}
    _move(old, new, "", left, overwrites)


def _move(old: Path, new: Path, inside: str, left: Collection[str], overwrites: bool) -> None:
    for path in sorted(old.iterdir()):
        name, target = inside + path.name, new / path.name
        is_there = os.path.lexists(target)
        holds_others = any(each.startswith(f"{name}/") for each in left) or target.is_dir()
        if path.is_dir() and not path.is_symlink() and holds_others:
            if target.is_dir() or not is_there:
                _move(path, target, f"{name}/", left, overwrites)
        elif name not in left and ((overwrites and not target.is_dir()) or not is_there):
            target.parent.mkdir(exist_ok=True)
            disk.rename(path, target)
