"""How a checkpoint is made: staged in a hidden sibling folder, synced, agreed on, described by a manifest, renamed.

[Note: commit] At every moment, the folder of the final name is either absent or a whole checkpoint. Everything is written to
`.NAME.staged/NAME`, the manifest last. Then one rename gives the folder its name, and the parent is synced. If a folder of
that name already exists (a state is saved to the same place again), it first moves to `.NAME.replaced`; `recover` moves it
back if the process ended between the two renames. Files of the program are in either of the two then, see [Note: files of the
program].
"""

from __future__ import annotations

import itertools
import logging
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    damages,
    extents_of,
    files_in,
    read_manifest,
    read_text,
    record_of,
)
from hf_zero.checkpoint.files.model_plan import FilePlan
from hf_zero.checkpoint.files.others import keep_own, refuse_foreign
from hf_zero.checkpoint.files.tensor_file import Source
from hf_zero.checkpoint.ranks.background import WRITING_S, BackgroundSaves
from hf_zero.checkpoint.ranks.cooperative import Extents, ranks_that_see, write_plan
from hf_zero.checkpoint.ranks.one_place import one_place
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError, CollectiveError
from hf_zero.host import progress

logger = logging.getLogger(__name__)

_open: dict[Path, StagedCheckpoint] = {}


class StagedCheckpoint:
    """A checkpoint that is being written; created, filled and committed by all ranks together.

    Args:
        final: the folder that it will become; rank 0's counts.
        world: the ranks.
        background: writes and commits it while training continues; None: that is done before `commit` returns.

    Attributes:
        outer: the hidden folder, until the commit.
        folder: inside it, where the files are written.

    Raises:
        CheckpointError: on all ranks, if rank 0 cannot make the folder.
    """

    def __init__(self, final: Path, world: World, background: BackgroundSaves | None = None) -> None:
        self.final = one_place(final.absolute(), world)
        self.outer = self.final.parent / f".{self.final.name}.staged"
        self.folder = self.outer / self.final.name
        self._world = world
        self._extents: Extents = {}
        self._background = background
        self._deferred: list[tuple[FilePlan, Mapping[str, Source]]] = []
        self._error: Exception | None = None
        with self._agreed(world):
            if world.rank == 0:
                self._make()
        _open[self.folder] = self

    def _make(self) -> None:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        recover_one(self.final)
        refuse_foreign(self.final)
        if self.outer.exists():
            disk.remove_tree(self.outer)  # left by an interrupted save
        disk.make_folder(self.outer)
        disk.make_folder(self.folder)
        for path in self.final.parent.iterdir():  # programs copy what lies beside a checkpoint into it
            if path.is_file() and not path.name.startswith("."):
                with suppress(OSError):
                    (self.outer / path.name).symlink_to(path)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Let an error in the block wait for `commit`, which then commits nothing: the other ranks are still writing."""
        try:
            yield
        except CollectiveError:
            raise  # there is nobody to agree with
        except Exception as error:
            self._error = self._error or error

    def write(self, plan: FilePlan, sources: Mapping[str, Source]) -> None:
        """Write files into the folder, all ranks together, or copy their rows for later.

        Raises:
            CheckpointError: on all ranks, if any of them could not write.
        """
        if self._background is None:
            self._write(plan, sources, self._world)
        else:
            self._deferred.append((plan, self._background.keep(sources)))

    def _write(self, plan: FilePlan, sources: Mapping[str, Source], world: World) -> None:
        for name, found in write_plan(plan, sources, self.folder, world, in_parts=True).items():
            self._extents.setdefault(name, []).extend(found)

    def commit(self, manifest: Manifest, after: Callable[[], None] = lambda: None) -> None:
        """Make the checkpoint valid, or leave an older one as it was.

        Args:
            manifest: without files, which are added here.
            after: runs once the checkpoint is committed; for a save in the background, once all ranks know that it is.

        Raises:
            CheckpointError: on all ranks, if any of them failed.
        """

        def finish() -> None:
            progress.note_saved(manifest.step, self.final.parent)
            after()

        _open.pop(self.folder, None)
        with self._agreed(self._world, WRITING_S):
            if self._error is not None:
                raise self._error
        self._bring_home()
        if self._background is None:
            self._commit(manifest, self._world)
            finish()
        else:
            logger.info("saving in the background, with %.0f MiB a rank", self._background.kept_bytes / 2**20)
            self._background.start(lambda world: self._commit(manifest, world), finish)

    def _bring_home(self) -> None:
        """Give rank 0 the small files (random states) of ranks that do not see its folder."""
        with self._agreed(self._world):
            sees = ranks_that_see(self.folder, self._world)
        if all(sees):
            return
        own: dict[str, bytes] = {}
        with self._agreed(self._world):
            if not sees[self._world.rank] and self.folder.is_dir():
                own = {name: path.read_bytes() for name, path in files_in(self.folder).items() if path.is_file()}
        by_rank = self._world.collect(own, "files of a checkpoint")
        with self._agreed(self._world, WRITING_S):
            for name, content in itertools.chain.from_iterable(found.items() for found in by_rank):
                path = self.folder / name
                if not path.exists():  # what rank 0 has written itself stays
                    path.parent.mkdir(exist_ok=True)
                    disk.write_file(path, content)
        if not sees[self._world.rank]:
            shutil.rmtree(self.outer, ignore_errors=True)  # another rank of this host may be at it, too

    @contextmanager
    def _agreed(self, world: World, timeout_s: float | None = None) -> Iterator[None]:
        """Continue together, or together remove what was written; an older checkpoint stays."""
        try:
            with world.together(f"saving {self.final}", CheckpointError, timeout_s):
                yield
        except CheckpointError:
            if self._world.rank == 0 and self.outer.exists():
                with tidying(self.outer):
                    disk.remove_tree(self.outer)
            raise

    def _commit(self, manifest: Manifest, world: World) -> None:
        with self._agreed(world):
            for plan, sources in self._deferred:
                self._write(plan, sources, world)
        by_rank = world.collect(self._extents, "checksums")
        with self._agreed(world, WRITING_S):
            if world.rank == 0:
                self._finish(manifest, by_rank)

    def _give_back(self) -> None:
        """What the program has put beside where the checkpoint is written is not lost."""
        for path in self.outer.iterdir():
            if path.is_file() and not path.is_symlink():  # perhaps in place of what it was shown there
                disk.rename(path, self.final.parent / path.name)

    def _finish(self, manifest: Manifest, by_rank: Iterable[Extents]) -> None:
        self._give_back()
        written: Extents = {}
        for extents in by_rank:
            for name, found in extents.items():
                written.setdefault(name, []).extend(found)
        files: dict[str, FileRecord] = {}
        for name, path in files_in(self.folder).items():
            if path.is_dir():
                raise CheckpointError(f"{path} is a folder: those in a checkpoint have plain files only")
            if name not in written:
                disk.sync_file(path)
            files[name] = record_of(path, written.get(name) or extents_of(path))
        for inner in {path.parent for name, path in files_in(self.folder).items() if "/" in name}:
            disk.sync_folder(inner)
        added = {"files": files, "versions": _versions(), "run": progress.name_of_run()}
        text = Manifest(**{**vars(manifest), **added}).to_json()
        disk.write_file(self.folder / MANIFEST, text.encode())
        disk.sync_folder(self.folder)
        replaced = _replaced(self.final)
        if self.final.exists():
            shutil.copymode(self.final, self.folder)
            disk.rename(self.final, replaced)
        try:
            disk.rename(self.folder, self.final)
        except OSError:
            recover_one(self.final)
            raise
        disk.sync_folder(self.final.parent)
        with tidying(self.outer):  # already committed: failing to remove these does not change that
            disk.remove_tree(self.outer)
        if replaced.exists():
            with tidying(replaced):
                _remove_replaced(self.final)


@contextmanager
def tidying(what: object) -> Iterator[None]:
    """Log an error in the block, which removes what is not needed any more, and go on."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: not needed any more, but still there: %s: %s", what, type(error).__name__, error)


def staged_in(folder: Path) -> StagedCheckpoint | None:
    """The checkpoint that is being written into `folder`, if there is one."""
    return _open.get(folder.absolute())


def _replaced(final: Path) -> Path:
    return final.parent / f".{final.name}.replaced"


def recover(parent: Path, key: Callable[[Path], object] = lambda final: True) -> None:
    """Restore the names of a folder's checkpoints that were being replaced when the process ended.

    Args:
        parent: their folder.
        key: None for a name that is not a checkpoint's, so that other files are left alone.
    """
    for replaced in parent.glob(".*.replaced"):
        final = parent / replaced.name.removeprefix(".").removesuffix(".replaced")
        if key(final) is not None:
            recover_one(final)


def recover_one(final: Path) -> None:
    """Restore the name of one checkpoint, if it was being replaced when the process ended."""
    replaced, removed = _replaced(final), _removed(final)
    if removed.exists():
        with tidying(removed):
            disk.remove_tree(removed)
    if not replaced.exists():
        return
    if (final / MANIFEST).exists():
        with tidying(replaced):
            _remove_replaced(final)
        return
    if final.exists():  # the program has made it again, for files of its own
        refuse_foreign(final)
        keep_own(final, replaced, overwrites=True)
        disk.remove_tree(final)
    disk.rename(replaced, final)
    disk.sync_folder(final.parent)


def _remove_replaced(final: Path) -> None:
    """Remove an older checkpoint, without what is the program's own."""
    replaced, removed = _replaced(final), _removed(final)
    keep_own(replaced, final)
    disk.rename(replaced, removed)  # half removed, it would have no manifest to tell what is a checkpoint's
    disk.remove_tree(removed)


def _removed(final: Path) -> Path:
    return final.parent / f".{final.name}.removed"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate", "safetensors", "hf_zero"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def verify(folder: Path, world: World | None) -> Manifest:
    """Check all files of a checkpoint against its manifest before anything is loaded; the ranks share the work.

    Raises:
        CheckpointError: on all ranks, naming each damaged file.
    """
    if world is None:
        manifest = read_manifest(folder)
        _refuse(folder, damages(folder, manifest))
        return manifest
    text = world.from_first(lambda: read_text(folder), "reading a checkpoint", CheckpointError)
    with world.together("reading a checkpoint", CheckpointError):
        if world.is_first_on_host and read_text(folder) != text:
            raise CheckpointError(
                f"{folder} is another checkpoint on this host than on that of rank 0: copy it from there ({MANIFEST} differs)"
            )
        manifest = read_manifest(folder, text)
    with world.together("verifying a checkpoint", CheckpointError):
        _refuse(folder, damages(folder, manifest, world.rank, world.num_ranks, looks=world.is_first_on_host))
    return manifest


def _refuse(folder: Path, found: list[str]) -> None:
    if found:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(found)}. Take an older checkpoint")


def latest(
    folder: Path, key: Callable[[Path], int | None], world: World | None = None
) -> tuple[Path | None, Manifest | None, list[str]]:
    """The newest checkpoint in a folder that verifies, its manifest, and why each newer one was skipped.

    Args:
        folder: of a run.
        key: a checkpoint's place in time, by its path; None for a path that is not a checkpoint.
        world: the ranks, which share the reading; None: this process alone.
    """

    def newest_first() -> list[Path]:
        if not folder.is_dir():
            return []
        recover(folder, key)
        steps = [(step, path) for path in folder.iterdir() if path.is_dir() and (step := key(path)) is not None]
        return [path for _, path in sorted(steps, reverse=True)]

    what = f"looking for a checkpoint in {folder}"
    candidates = newest_first() if world is None else world.from_first(newest_first, what, CheckpointError)
    skipped: list[str] = []
    for path in candidates:
        try:
            return path, verify(path, world), skipped
        except (CheckpointError, OSError) as error:
            skipped.append(str(error))
            if world is None or world.rank == 0:
                logger.warning("checkpoint skipped: %s", error)
    return None, None, skipped


def newest(folder: Path, key: Callable[[Path], int | None], world: World) -> tuple[Path, Manifest]:
    """The newest checkpoint in a folder that verifies, with its manifest; called by all ranks together.

    Raises:
        CheckpointError: on all ranks, if there is none.
    """
    path, manifest, skipped = latest(folder, key, world)
    if path is None or manifest is None:
        found = f" ({'; '.join(skipped)})" if skipped else ""
        raise CheckpointError(
            f"no valid checkpoint in {folder}{found}: name another folder, or start anew without resuming"
        )
    return path, manifest
