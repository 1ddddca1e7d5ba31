"""A Trainer in a run that heals: it goes on from the run's newest checkpoint, at the same global batch, and ends on SIGTERM.

`hf-zero launch --max_restarts` starts such runs, and gives all their starts one name, which is in the checkpoints' manifests:
what another run has left in the same folder is nobody's to go on from.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import latest
from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.host import progress
from hf_zero.integrations.trainer import checkpoint as trainer_checkpoint

logger = logging.getLogger(__name__)
_trained_in: set[str] = set()  # by this process


def save_on_sigterm(args: Any) -> None:
    """Let the Trainer of a run that heals save when it is told to end: by a scheduler, or since a host comes or goes."""
    if progress.name_of_run() is not None:
        args.enable_jit_checkpoint = True


def where_to_go_on(trainer: Any, world: World, given: Any) -> Any:
    """The checkpoint to go on from: this run's newest, else what the script has given. Called by all ranks together.

    Raises:
        UsageError: the global batch cannot be kept on this number of ranks, or two trainings write into one folder.
    """
    run, folder = progress.name_of_run(), trainer.args.output_dir
    if run is None or folder is None:
        return given
    run = world.share(run, "the name of this run")
    if folder in _trained_in and not given:
        raise UsageError(
            f"two trainings of a run with --max_restarts have the folder {folder}, and a start could not tell which of them a "
            "checkpoint is of: give each an output_dir of its own"
        )
    _trained_in.add(folder)

    def step_in_this_run(path: Path) -> int | None:
        return trainer_checkpoint.step_of(path) if _run_of(path) == run else None

    path, manifest, _ = latest(Path(trainer.args.output_dir), step_in_this_run, world)
    if path is None or manifest is None:
        return given
    _keep_global_batch(trainer, manifest, path)
    progress.note_resumed(manifest.step)
    if world.rank == 0:
        logger.warning("going on from %s", path)
    return str(path)


def _run_of(checkpoint: Path) -> str | None:
    try:
        found = json.loads((checkpoint / MANIFEST).read_bytes()).get("run")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _keep_global_batch(trainer: Any, manifest: Manifest, path: Path) -> None:
    """Change the number of micro-batches, so that a step has as many samples as it had on another number of ranks."""
    args, wanted, ours = trainer.args, manifest.global_batch, trainer_checkpoint.global_batch_of(trainer)
    if wanted in (None, ours) or getattr(args, "zero_any_batch", False):
        return
    one = ours // args.gradient_accumulation_steps
    if wanted % one:
        raise UsageError(
            f"{path} was written with {wanted} samples a step, which the {one} samples of a micro-batch on {args.world_size} "
            "ranks do not divide: samples would be repeated or left out. Take a batch size a rank that divides on every "
            "number of ranks that may be left, more --min_processes, or zero_any_batch=True"
        )
    args.gradient_accumulation_steps = wanted // one
    logger.warning("%d ranks: %d micro-batches a step keep the %s samples", args.world_size, wanted // one, wanted)


def leave_if_told(trainer: Any) -> None:
    """End the process, after a training that a signal has ended: it has saved, and another start goes on from there."""
    if progress.name_of_run() is None:
        return
    for callback in trainer.callback_handler.callbacks:
        saves = getattr(callback, "signal_saves", None)
        if saves is not None and saves.has_asked:
            raise SystemExit(0)
