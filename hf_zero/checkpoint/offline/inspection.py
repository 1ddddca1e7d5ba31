"""Inspects a checkpoint, or a folder of safetensors files, without starting any ranks."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hf_zero.checkpoint.files.manifest import MANIFEST, FileRecord, Manifest, check_name, damages, read_manifest
from hf_zero.checkpoint.files.model_plan import WEIGHTS
from hf_zero.checkpoint.files.stored import whole_name
from hf_zero.checkpoint.files.tensor_file import TensorInfo, read_layout
from hf_zero.checkpoint.model_state import weight_files
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)
Item = TypeVar("Item")

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Verdict:
    """What the check of a folder against its manifest found.

    Attributes:
        folder: of the checkpoint.
        manifest: None if there is none that can be read.
        problems: one line each; empty if the checkpoint is whole.
    """

    folder: Path
    manifest: Manifest | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    Attributes:
        folder: the one that was inspected.
        manifest: None for a plain folder, and if it cannot be read.
        is_verified: whether all bytes were compared with the manifest.
        sizes: bytes of each file.
        tensors: of each safetensors file whose header can be read.
        problems: one line each.
    """

    folder: Path
    manifest: Manifest | None
    is_verified: bool
    sizes: Mapping[str, int]
    tensors: Mapping[str, tuple[TensorInfo, ...]]
    problems: tuple[str, ...]


def check(folder: Path, *, sums: bool = True) -> Verdict:
    """Check every byte of a checkpoint against its manifest; without `sums`, only which files there are and their sizes."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Verdict(folder, None, (str(error),))
    if not sums:
        manifest = replace(manifest, files={name: FileRecord(f.size, ()) for name, f in manifest.files.items()})
    return Verdict(folder, manifest, tuple(f"{folder}/{problem}" for problem in damages(folder, manifest)))


def checkpoints_in(folder: Path, key: Callable[[Path], int | None]) -> list[Path]:
    """The checkpoints of a run, oldest first; none if the folder is itself a checkpoint, or is not there.

    Args:
        folder: possibly of a run.
        key: a checkpoint's place in time, by its path; None for a path that is not a checkpoint.
    """
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return []
    steps = {path: step for path in folder.iterdir() if path.is_dir() and (step := key(path)) is not None}
    return sorted(steps, key=lambda path: (steps[path], path.name))


def look_at(folder: Path, *, verifies: bool = True) -> Contents:
    """Describe a checkpoint, or any folder of safetensors files.

    Args:
        folder: with a manifest or without.
        verifies: compare it with its manifest, if it has one; this reads all of it.

    Raises:
        CheckpointError: there is nothing to describe.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    names = list(dict.fromkeys(whole for name in sizes if (whole := whole_name(name)).endswith(".safetensors")))
    if not names and MANIFEST not in sizes:
        raise CheckpointError(
            f"{folder} has neither safetensors files nor a {MANIFEST}: name a checkpoint, like out/checkpoint-500"
        )
    verdict = check(folder, sums=verifies) if MANIFEST in sizes else Verdict(folder, None, ())
    problems = list(verdict.problems)
    files = {name: _noting(problems, functools.partial(read_layout, folder / name)) for name in names}
    if WEIGHTS in names or INDEX in sizes:
        _noting(problems, lambda: located_weights(folder))
    tensors = {name: file.tensors for name, file in files.items() if file is not None}
    is_verified = verdict.manifest is not None and verifies
    return Contents(folder, verdict.manifest, is_verified, sizes, tensors, tuple(dict.fromkeys(problems)))


def _noting(problems: list[str], work: Callable[[], Item]) -> Item | None:
    try:
        return work()
    except CheckpointError as error:
        problems.append(str(error))
        return None


@dataclass(frozen=True)
class Located:
    """A tensor, and the file that it lies in."""

    path: Path
    info: TensorInfo


def located_weights(folder: Path) -> dict[str, Located]:
    """The tensors of a folder's weights by name, checked against its index."""
    found: dict[str, Located] = {}
    for name in weight_files(folder):
        check_name(folder, name)
        for info in read_layout(folder / name).tensors:
            if info.name in found:
                raise CheckpointError(f"{folder}: {info.name!r} is in {found[info.name].path.name} and in {name}")
            found[info.name] = Located(folder / name, info)
    index = read_index(folder)
    promised = {name: found[name].path.name for name in found} if index is None else index["weight_map"]
    for name in sorted(promised.keys() | found.keys()):
        here = found[name].path.name if name in found else "no file"
        if promised.get(name) != here:
            there = promised.get(name, "no file")
            raise CheckpointError(f"{folder / INDEX}: {name!r} should be in {there}, but is in {here}")
    return found


def read_index(folder: Path) -> Any:
    """The index of a folder, whose names `weight_files` has already checked; None if it has none."""
    path = folder / INDEX
    return json.loads(path.read_text()) if path.exists() else None
