"""Files of tensors that all ranks write and read together, without a gather."""

from __future__ import annotations

import contextlib
import logging
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hf_zero import torch_compat
from hf_zero.checkpoint import disk
from hf_zero.checkpoint.background import WRITING_S
from hf_zero.checkpoint.by_rows import empty_rows, from_rows, is_exchanged, to_rows
from hf_zero.checkpoint.manifest import check_name
from hf_zero.checkpoint.model_plan import Plan
from hf_zero.checkpoint.pieces import Piece
from hf_zero.checkpoint.tensor_file import (
    Extent,
    Source,
    TensorFile,
    TensorInfo,
    in_order,
    read_layout,
    read_rows,
    write_parts,
    write_rows,
)
from hf_zero.engine.world import World
from hf_zero.errors import CheckpointError, CollectiveError
from hf_zero.layout import OwnerLayout, RowLayout

logger = logging.getLogger(__name__)

Extents = dict[str, list[Extent]]


def write_plan(plan: Plan, sources: Mapping[str, Source], folder: Path, world: World) -> Extents:
    """Write the files of a plan, called by all ranks together; an older file of the same name is replaced at the end.

    No rank holds more than its rows and about twice 8 MiB, or, if the ranks do not share the folder, one whole tensor.

    Args:
        plan: the same on every rank.
        sources: this rank's part of everything in it.
        folder: exists on rank 0.
        world: the ranks.

    Returns:
        What this rank wrote, by file, with its checksums.

    Raises:
        CheckpointError: on all ranks, if any of them could not write; older files are left as they were.
    """
    partial = {file.name: replace(file, name=f".{file.name}.partial") for file in plan.files}
    try:
        return _write_all(partial, plan, sources, folder, world)
    except CheckpointError:
        if world.rank == 0:
            for file in partial.values():
                with contextlib.suppress(OSError):  # the disk may be full
                    disk.remove_file(folder / file.name)
        raise


def _write_all(
    partial: Mapping[str, TensorFile], plan: Plan, sources: Mapping[str, Source], folder: Path, world: World
) -> Extents:
    with world.together(f"preparing files in {folder}", CheckpointError, WRITING_S):
        if world.rank == 0:
            for file in partial.values():
                disk.write_file(folder / file.name, file.header, file.nbytes)
    is_shared = shares_folder(folder, world)
    if not is_shared and world.rank == 0:
        logger.info(
            "the ranks do not share %s: rank 0 writes it, and gets the others' rows one tensor at a time", folder
        )
    extents: Extents = {name: [] for name in partial}
    with world.together(f"writing {folder}", CheckpointError, WRITING_S):
        if not is_shared:
            _write_streamed(extents, partial, plan, sources, folder, world)
        elif world.is_first_replica and any(map(is_exchanged, sources.values())):
            extents = _write_exchanged(partial, plan, sources, folder, world)
        elif world.is_first_replica:
            for name, file in partial.items():
                extents[name] = write_rows(folder, file, plan.pieces, sources, world.shard_rank)
    with world.together(f"renaming files in {folder}", CheckpointError):
        if world.rank == 0:
            for name, file in partial.items():
                extents[name].insert(0, header_extent(file))
                disk.rename(folder / file.name, folder / name)
            disk.sync_folder(folder)
    return extents


def header_extent(file: TensorFile) -> Extent:
    """The extent of a file's header."""
    return Extent(0, len(file.header), zlib.crc32(file.header))


def _write_streamed(
    extents: Extents,
    partial: Mapping[str, TensorFile],
    plan: Plan,
    sources: Mapping[str, Source],
    folder: Path,
    world: World,
) -> None:
    """All ranks gather one tensor after another; rank 0 writes. An error is raised at the end: the others are gathering."""
    first: Exception | None = None

    def write(name: str, file: TensorFile, tensor: TensorInfo) -> None:
        # A separate function, so that what is whole here is freed before the next tensor is gathered.
        names = {piece.source for piece in plan.pieces[tensor.name]}
        whole = {source: _gather(sources[source], source, world) for source in sorted(names)}
        if world.rank == 0 and first is None:
            extents[name].extend(write_rows(folder, replace(file, tensors=(tensor,)), plan.pieces, whole, 0))

    for name, file in partial.items():
        for tensor in file.tensors:
            try:
                write(name, file, tensor)
            except CollectiveError:
                raise
            except Exception as error:
                first = first or error
    if first is not None:
        raise first


def _write_exchanged(
    partial: Mapping[str, TensorFile], plan: Plan, sources: Mapping[str, Source], folder: Path, world: World
) -> Extents:
    """The ranks that hold the model exchange one source after another for rows, and write these; see [Note: rows for files]."""
    first: Exception | None = None
    extents: Extents = {name: [] for name in partial}
    parts = _by_source(plan.pieces, {name: file.tensors for name, file in partial.items()})
    paths = {name: folder / file.name for name, file in partial.items()}
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(disk.rows_file(path)) for name, path in paths.items()}
        for source in sorted(parts):
            given = sources[source]
            rows = to_rows(given, source, world) if is_exchanged(given) else given
            for name, tensor, pieces in parts[source] if first is None else ():
                try:
                    to = opened[name], paths[name], tensor, pieces
                    write_parts(*to, {source: rows}, world.holders.rank, extents[name])
                except Exception as error:  # raised at the end: the others go on exchanging
                    first = first or error
        if first is not None:
            raise first
    return {name: in_order(found) for name, found in extents.items()}


def _by_source(
    pieces: Mapping[str, Sequence[Piece]], tensors: Mapping[str, Sequence[TensorInfo]]
) -> dict[str, list[tuple[str, TensorInfo, list[Piece]]]]:
    """The tensors of files that have something of a source: by source, the file, the tensor and its pieces from there."""
    found: dict[str, list[tuple[str, TensorInfo, list[Piece]]]] = {}
    for name, infos in tensors.items():
        for tensor in infos:
            of: dict[str, list[Piece]] = {}
            for piece in pieces[tensor.name]:
                of.setdefault(piece.source, []).append(piece)
            for source, own in of.items():
                found.setdefault(source, []).append((name, tensor, own))
    return found


def _gather(source: Source, name: str, world: World) -> Source:
    if source.cut is not None and is_exchanged(source):
        whole = world.gather_parameter(torch_compat.local_of(source.rows), source.cut, name)
        return Source(whole, RowLayout(source.cut.shape, 1))
    if source.layout.num_ranks == 1:
        return source
    if isinstance(source.layout, OwnerLayout):
        has_it = world.shard_rank == source.layout.owner
        room = torch.empty(source.layout.shape, dtype=source.rows.dtype, device=world.device)
        values = source.rows.contiguous() if has_it else room
        world.collectives.broadcast(values, source.layout.owner, name)
        return Source(values, RowLayout(source.layout.shape, 1))
    whole = world.gather_whole(torch_compat.local_of(source.rows), source.layout, name)
    return Source(whole, RowLayout(source.layout.shape, 1))


def shares_folder(folder: Path, world: World) -> bool:
    """Whether every rank sees what rank 0 writes into a folder."""
    return all(ranks_that_see(folder, world))


def ranks_that_see(folder: Path, world: World) -> list[bool]:
    """By rank, whether it sees what rank 0 writes into a folder; tested with a file of a random name."""
    if world.num_ranks == 1:
        return [True]
    name = str(world.share(f".hf_zero_{uuid.uuid4().hex}", "the folder of a checkpoint"))
    path = folder / name
    with world.together(f"writing {folder}", CheckpointError):
        if world.rank == 0:
            disk.write_file(path, name.encode())
    try:
        sees = path.is_file() and path.read_bytes() == name.encode()
    except OSError:
        sees = False
    answers = world.everyone.agree([int(sees)], "a file in the folder of a checkpoint")
    with world.together(f"writing {folder}", CheckpointError):
        if world.rank == 0:
            disk.remove_file(path)
    return [bool(answer) for (answer,) in answers]


def read_files(
    names: Iterable[str], pieces: Mapping[str, Sequence[Piece]], sources: Mapping[str, Source], folder: Path, rank: int
) -> None:
    """Read this rank's rows of files into `sources`; `match` has already found that they fit."""
    for name in names:
        read_rows(folder, read_layout(folder / name), pieces, sources, rank)


def read_plan(
    names: Iterable[str],
    pieces: Mapping[str, Sequence[Piece]],
    sources: Mapping[str, Source],
    folder: Path,
    world: World,
) -> None:
    """Read what this rank holds of files, as `read_files`; called by all ranks together."""
    if not any(map(is_exchanged, sources.values())):
        read_files(names, pieces, sources, folder, world.shard_rank)
        return
    files = {name: read_layout(folder / name) for name in names}
    first: Exception | None = None
    for source, parts in sorted(_by_source(pieces, {name: file.tensors for name, file in files.items()}).items()):
        is_moved = is_exchanged(sources[source])
        rows = empty_rows(sources[source], world) if is_moved else sources[source]
        try:
            for name, tensor, own in parts if first is None else ():
                one = replace(files[name], tensors=(tensor,))
                read_rows(folder, one, {tensor.name: own}, {source: rows}, world.holders.rank)
        except Exception as error:  # raised at the end: the others go on exchanging
            first = error
        if is_moved:
            from_rows(rows, sources[source], source, world)
    if first is not None:
        raise first


def match(plan: Plan, folder: Path, names: Iterable[str]) -> list[str]:
    """How the files of a folder differ from a plan: names, shapes and dtypes of tensors; empty if they fit.

    Args:
        plan: what is expected.
        folder: where the files are.
        names: of the files to read; they may divide the tensors differently.
    """
    expected = {tensor.name: tensor for file in plan.files for tensor in file.tensors}
    found = {}
    for name in names:
        check_name(folder, name)
        for tensor in read_layout(folder / name).tensors:
            found[tensor.name] = tensor
    problems = [f"{name!r} is missing" for name in expected if name not in found]
    problems += [f"{name!r} is not a tensor of this model" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        ours, theirs = expected[name], found[name]
        if ours.shape != theirs.shape:
            problems.append(f"{name!r} has shape {theirs.shape}, the model's has {ours.shape}")
        elif ours.dtype != theirs.dtype:
            problems.append(f"{name!r} is {theirs.dtype}, the model's is {ours.dtype}")
    return sorted(problems)
