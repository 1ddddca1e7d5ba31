"""Files of tensors that all ranks write and read together, without a gather."""

from __future__ import annotations

import contextlib
import logging
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import check_name
from hf_zero.checkpoint.files.model_plan import FilePlan
from hf_zero.checkpoint.files.pieces import Piece
from hf_zero.checkpoint.files.stored import Stretch, forms_of
from hf_zero.checkpoint.files.tensor_file import Extent, Source, TensorFile, read_layout, read_rows, write_rows
from hf_zero.checkpoint.files.windows import Window, divided, is_cut, joined, on_disk
from hf_zero.checkpoint.ranks.background import WRITING_S
from hf_zero.checkpoint.ranks.collecting import Writer, read_windows, write_windows
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)

Extents = dict[str, list[Extent]]


def write_plan(
    plan: FilePlan, sources: Mapping[str, Source], folder: Path, world: World, *, in_parts: bool = False
) -> Extents:
    """Write the files of a plan, called by all ranks together; an older file of the same name is replaced at the end.

    On one host, each rank writes its rows itself, of which the page cache makes whole pages. Where ranks of several hosts
    write, or one of them does not see the folder, or holds something else than rows, or no two may write one file
    (`checkpoint_files`), they collect windows of files first; see [Note: windows]. No rank holds more than its rows and about
    four times 8 MiB.

    Args:
        plan: the same on every rank.
        sources: this rank's part of everything in it.
        folder: exists on rank 0.
        world: the ranks.
        in_parts: if no two ranks may write one file, whether large ones are written as several, a rank each; see
            [Note: parts]. Otherwise one rank writes all of it.

    Returns:
        What this rank wrote, by file on disk, with its checksums.

    Raises:
        CheckpointError: on all ranks, if any of them could not write; older files are left as they were.
    """
    sees = ranks_that_see(folder, world)
    if not all(sees) and world.rank == 0:
        logger.info(
            "not all ranks share %s: those that do write it, and get the others' rows in pieces of 8 MiB", folder
        )
    is_exclusive = world.config.checkpoint_files == "per_writer"
    partial = tuple(replace(file, name=f".{file.name}.partial") for file in plan.files)
    is_direct = all(sees) and not _collects(sources, world) and not is_exclusive
    windows = _windows(partial, sees, world, is_direct, is_exclusive and not in_parts)
    whole = {file.name: [(0, Stretch(Path(file.name), 0, file.nbytes))] for file in partial}
    places = on_disk(windows) if is_exclusive and in_parts else whole
    made = [stretch.path for each in places.values() for _, stretch in each]
    try:
        with world.together(f"preparing files in {folder}", CheckpointError, WRITING_S):
            for file in partial if world.rank == 0 and not is_exclusive else ():
                disk.write_file(folder / file.name, file.header if is_direct else b"", file.nbytes)
        extents: Extents = {}
        with world.together(f"writing {folder}", CheckpointError, WRITING_S):
            if is_direct and world.is_first_replica:
                for file in partial:
                    extents[file.name] = write_rows(folder, file, plan.pieces, sources, world.shard_rank)
            elif world.is_first_replica:
                writer = Writer(folder, places, is_exclusive, extents)
                write_windows(windows, plan.pieces, sources, writer, world)
        with world.together(f"renaming files in {folder}", CheckpointError):
            if world.rank == 0:
                for file in partial if is_direct else ():
                    extents[file.name].insert(0, header_extent(file))
                _put_in_place(made, plan, folder)
    except CheckpointError:
        if world.rank == 0:
            for path in made:
                with contextlib.suppress(OSError):  # the disk may be full
                    disk.remove_file(folder / path)
        raise
    return {_final(name): found for name, found in extents.items()}


def _put_in_place(made: Sequence[Path], plan: FilePlan, folder: Path) -> None:
    """Give what was written its names, and remove older files of the same names, whole or in parts."""
    for path in made:
        disk.rename(folder / path, folder / _final(path.name))
    remains = {_final(path.name) for path in made}
    for older in (older for file in plan.files for older in forms_of(folder / file.name)):
        if older.name not in remains:
            disk.remove_file(older)
    disk.sync_folder(folder)


def _final(partial: str) -> str:
    """The name of a file once it is complete."""
    return "".join(partial.removeprefix(".").rsplit(".partial", 1))


def _collects(sources: Mapping[str, Source], world: World) -> bool:
    """Whether ranks send rows to each other before they write, and after they have read."""
    several = world.num_hosts > 1 or world.tensor.num_ranks > 1
    return several or any(source.layout.dim for source in sources.values())


def _windows(
    files: Sequence[TensorFile], sees: Sequence[bool], world: World, is_direct: bool, whole_files: bool
) -> list[list[Window]]:
    """The windows of files, by rank among those that hold the model; only ranks that see the folder have some."""
    if is_direct:
        return []
    numbers = {rank: number for number, rank in enumerate(world.everyone.ranks)}
    able = [place for place, rank in enumerate(world.holders.ranks) if sees[numbers[rank]]]
    ranges = [(file, 0, file.nbytes) for file in files]
    found: list[list[Window]] = [[] for _ in world.holders.ranks]
    for place, own in zip(able, divided(ranges, len(able), whole_files=whole_files) if able else (), strict=True):
        found[place] = own
    return found


def header_extent(file: TensorFile) -> Extent:
    """The extent of a file's header."""
    return Extent(0, len(file.header), zlib.crc32(file.header))


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
    """Read what this rank holds of files, as `read_files`; called by all ranks together.

    What is cut, ranks of several hosts read together, each byte once, and send it to those that hold it; see [Note: windows].
    What every rank holds whole, each one reads by itself: on a host, from the page cache.
    """
    if not _collects(sources, world):
        read_files(names, pieces, sources, folder, world.shard_rank)
        return
    what = f"reading {folder}"
    files = world.from_first(lambda: [read_layout(folder / name) for name in names], what, CheckpointError)
    shared = {name for name, source in sources.items() if is_cut(source)}
    ranges = []
    with world.together(what, CheckpointError):
        for file in files:
            whole = {t.name: [piece for piece in pieces[t.name] if piece.source not in shared] for t in file.tensors}
            read_rows(folder, file, whole, sources, world.shard_rank)
            for tensor in file.tensors:
                if len(whole[tensor.name]) < len(pieces[tensor.name]):
                    ranges.append((file, tensor.offset, tensor.offset + tensor.nbytes))
    collected = {name: [piece for piece in each if piece.source in shared] for name, each in pieces.items()}
    with world.together(what, CheckpointError):
        read_windows(divided(joined(ranges), world.holders.num_ranks), collected, sources, folder, world)


def match(plan: FilePlan, folder: Path, names: Iterable[str]) -> list[str]:
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
