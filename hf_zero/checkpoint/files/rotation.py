"""Old checkpoints of a run, removed when there are too many."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from hf_zero.checkpoint.files import disk

_REMOVED = ".removed"


def remove_oldest(run: Path, checkpoints: Sequence[Path], limit: int | None, kept: Container[Path]) -> None:
    """Remove committed checkpoints until `limit` are left, and what an interrupted removal has left.

    Args:
        run: the folder that they are in.
        checkpoints: the oldest first.
        limit: how many stay; None for all.
        kept: they stay in any case.
    """
    for path in run.glob(f".checkpoint*{_REMOVED}"):
        disk.remove_tree(path)
    if limit is None:
        return
    removable = [path for path in checkpoints if path not in kept]
    num_kept = len(checkpoints) - len(removable)
    for path in removable[: max(len(checkpoints) - max(limit, num_kept), 0)]:
        gone = run / f".{path.name}{_REMOVED}"
        disk.rename(path, gone)  # in one step: half a checkpoint would be reported as damaged
        disk.remove_tree(gone)
