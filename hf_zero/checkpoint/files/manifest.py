"""The manifest of a checkpoint: what it is, and the size and checksums of every file; written last."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.files.tensor_file import CHUNK_BYTES, Extent
from hf_zero.errors import CheckpointError

MANIFEST = "hf_zero_manifest.json"
SCHEMA = 1
_INDEX = ".index.json"
_EDITABLE = re.compile(r"(?!optimizer|data_order|.*\.index\.json).*\.json|README\.md")  # by programs and by hand
TEMPLATES = "additional_chat_templates"  # the one folder in which a tokenizer keeps files; not verified


@dataclass(frozen=True)
class FileRecord:
    """One file: its size, and the extents that the ranks wrote, in order and without gaps."""

    size: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder contains.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        stage: ZeRO stage that they trained under.
        global_batch: samples of one optimizer step over all ranks; None if unknown.
        config: of ZeRO.
        versions: of the libraries that wrote it.
        files: by name; in the folder itself, or in a folder in it ("adapter/name", as PEFT keeps further adapters).
        run: what all starts of a run that heals have in common; None for any other run.
    """

    step: int
    world_size: int
    stage: int
    global_batch: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    run: str | None = None

    def to_json(self) -> str:
        """The manifest with a digest of its own text."""
        content: dict[str, Any] = {"schema": SCHEMA, **{name: getattr(self, name) for name in _PLAIN_FIELDS}}
        if self.run is not None:  # else versions before it read the rest
            content["run"] = self.run
        content["files"] = {
            name: {"size": record.size, "extents": [[e.offset, e.length, e.crc] for e in record.extents]}
            for name, record in sorted(self.files.items())
        }
        content = json.loads(json.dumps(content, default=str))  # as it will be read: keys are strings, and sort so
        return json.dumps({"digest": _digest(content), **content}, separators=(",", ":")) + "\n"


_PLAIN_FIELDS = ("step", "world_size", "stage", "global_batch", "config", "versions")


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def read_text(folder: Path) -> bytes:
    """What the manifest of a checkpoint folder says.

    Raises:
        CheckpointError: there is none.
    """
    check_name(folder, MANIFEST)
    try:
        return (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: there is no such folder on this host (hosts that share none need a copy each)"
            ) from None
        raise CheckpointError(
            f"{folder} is not a complete checkpoint of hf_zero: it has no {MANIFEST}. Another library wrote it, or it "
            "was copied in parts: take another one, or load its weights with from_pretrained and begin anew"
        ) from None


def read_manifest(folder: Path, text: bytes | None = None) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Args:
        folder: of the checkpoint.
        text: what the manifest says, where somebody has read it already.

    Raises:
        CheckpointError: there is none, it is damaged or of a newer version, or a name in it leaves the folder.
    """
    path, text = folder / MANIFEST, read_text(folder) if text is None else text
    try:
        content = json.loads(text)
        digest, schema = content.pop("digest"), content["schema"]
        if schema > SCHEMA:
            raise CheckpointError(
                f"{path} has schema {schema}, newer than {SCHEMA}, which this version reads: update hf_zero"
            )
        # Compare the text and not only the values: a flipped bit may leave the values unchanged.
        is_whole = digest == _digest(content) and text == _again(digest, content)
        del content["schema"]
        files = {name: _record(entry) for name, entry in content.pop("files").items()}
        manifest = Manifest(**content, files=files)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}): take an older checkpoint") from error
    if not is_whole:
        raise CheckpointError(f"{path} is damaged (its digest differs): take an older checkpoint")
    for name in manifest.files:
        inner, _, leaf = name.rpartition("/")
        if "/" in name:
            check_name(folder, inner)
        check_name(folder / inner, leaf)
    return manifest


def _again(digest: str, content: Mapping[str, Any]) -> bytes:
    return (json.dumps({"digest": digest, **content}, separators=(",", ":")) + "\n").encode()


def _record(entry: Mapping[str, Any]) -> FileRecord:
    return FileRecord(int(entry["size"]), tuple(Extent(*map(int, extent)) for extent in entry["extents"]))


def check_name(folder: Path, name: str, source: str = MANIFEST) -> None:
    """Raise if a name that was read from the file `source` would leave the checkpoint's folder.

    Raises:
        CheckpointError: it has separators, is absolute or "..", or is a symbolic link.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{folder / source}: the name {name!r} leaves the folder; this checkpoint was tampered with"
        )
    if (folder / name).is_symlink():
        raise CheckpointError(f"{folder / name} is a symbolic link; a checkpoint has plain files only")


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint's folder and of the folders in it, by name; hidden ones and chat templates are left out."""
    found = {path.name: path for path in folder.iterdir() if not path.name.startswith(".") and path.name != TEMPLATES}
    inner = {name: path for name, path in found.items() if path.is_dir() and not path.is_symlink()}
    for name, path in inner.items():
        if files := {f"{name}/{each.name}": each for each in path.iterdir()}:
            del found[name]
            found |= files
    return dict(sorted(found.items()))


def extents_of(path: Path) -> tuple[Extent, ...]:
    """The checksums of a file that was written elsewhere."""
    extents, offset = [], 0
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            extents.append(Extent(offset, len(data), zlib.crc32(data)))
            offset += len(data)
    return tuple(extents)


def record_of(path: Path, extents: Iterable[Extent]) -> FileRecord:
    """The record of a file whose writers report `extents`.

    Raises:
        CheckpointError: they do not make up the file.
    """
    size, ordered = path.stat().st_size, tuple(sorted(extents, key=lambda extent: extent.offset))
    end = 0
    for extent in ordered:
        if extent.offset != end:
            raise CheckpointError(f"{path}: bytes from {end} on were written twice or not at all")
        end += extent.length
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, but its ranks wrote {end}")
    return FileRecord(size, ordered)


def damages(folder: Path, manifest: Manifest, rank: int = 0, num_ranks: int = 1, *, looks: bool = True) -> list[str]:
    """What is wrong with the files of a checkpoint; ranks share the reading. What a program has edited since is not.

    Args:
        folder: of the checkpoint.
        manifest: what it should contain.
        rank: of this process, which compares its share of the bytes with their checksums.
        num_ranks: how many share the work: each reads bytes that follow each other, so that few open the same file.
        looks: whether this one also looks for missing, foreign and truncated files; another rank of its host may.

    Returns:
        One line for each damaged file; empty if the checkpoint is whole.
    """
    found = _misplaced(folder, manifest) if looks else {}
    total = max(sum(record.size for record in manifest.files.values()), 1)
    done = 0
    for name, record in manifest.files.items():
        own = [e for e in record.extents if (done + e.offset) * num_ranks // total == rank]
        done += record.size
        if own and name not in found:
            try:
                if problem := _altered(folder / name, own):
                    found[name] = problem
            except OSError as error:
                found[name] = f"{name} cannot be read ({error})"
    return [problem for name, problem in found.items() if not _is_edited(folder, name)]


def _is_edited(folder: Path, name: str) -> bool:
    """Whether a file is JSON, or a readme, that was written after the manifest, and is whole: `config.json` and its like."""
    path = folder / name
    try:
        if not _EDITABLE.fullmatch(name) or path.stat().st_mtime_ns <= (folder / MANIFEST).stat().st_mtime_ns:
            return False
        text = path.read_text(encoding="utf-8")
        return bool(json.loads(text) if path.suffix == ".json" else text)
    except (OSError, ValueError, RecursionError):
        return False


def _misplaced(folder: Path, manifest: Manifest) -> dict[str, str]:
    """The weights that do not belong to a checkpoint, and the files that are missing or have another length: what is wrong."""
    sharded = [name.removesuffix(_INDEX) for name in manifest.files if name.endswith(_INDEX)]
    foreign = [name for name in sharded if name not in manifest.files and (folder / name).exists()]
    found = {
        name: f"{name} does not belong to it, and would be loaded in its place: move it elsewhere" for name in foreign
    }
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found[name] = f"{name} is missing"
        elif path.stat().st_size != record.size:
            found[name] = f"{name} has {path.stat().st_size} bytes instead of {record.size}"
    return found


def _altered(path: Path, extents: Iterable[Extent]) -> str | None:
    with path.open("rb") as file:
        for extent in extents:
            file.seek(extent.offset)
            crc, left = 0, extent.length
            while left and (data := file.read(min(left, CHUNK_BYTES))):
                crc, left = zlib.crc32(data, crc), left - len(data)
            if left or crc != extent.crc:
                return f"{path.name} was altered between bytes {extent.offset} and {extent.offset + extent.length}"
    return None
