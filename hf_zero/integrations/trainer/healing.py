"""A Trainer in a run that heals: it goes on from the run's newest checkpoint, at the same global batch, and ends on SIGTERM.

`hf-zero launch --max_restarts` starts such runs, and gives all their starts one name, which is in the checkpoints' manifests:
what another run has left in the same folder is nobody's to go on from.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, cast

from hf_zero.checkpoint.commit import latest
from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError, UsageError
from hf_zero.host import progress
from hf_zero.integrations.trainer import checkpoint as trainer_checkpoint

logger = logging.getLogger(__name__)
_AND = "+"  # between names
_trained_in: set[str] = set()  # by this process


def save_on_sigterm(args: Any) -> None:
    """Let the Trainer of a run that heals save when it is told to end: by a scheduler, or since a host comes or goes."""
    if progress.name_of_run() is not None:
        args.enable_jit_checkpoint = True


def where_to_go_on(trainer: Any, world: World, given: Any) -> Any:
    """The checkpoint to go on from: this run's newest, else what the script has given. Called by all ranks together.

    Raises:
        CheckpointError: the run has saved checkpoints, and rank 0 finds no whole one.
        UsageError: the global batch cannot be kept on this number of ranks, or two trainings write into one folder.
    """
    folder = trainer.args.output_dir
    progress.note_begin(0)
    if progress.name_of_run() is None or folder is None:
        return given
    if folder in _trained_in:
        if given:
            return given
        raise UsageError(
            f"two trainings of a run with --max_restarts have the folder {folder}, and a start could not tell which of them a "
            "checkpoint is of: give each an output_dir of its own"
        )
    _trained_in.add(folder)
    names, saved = _of_all_hosts(world, Path(folder))
    # Any of these hosts may be the first of the next start.
    os.environ[progress.RUN_VARIABLE] = _AND.join(sorted(names))

    def step_in_this_run(path: Path) -> int | None:
        is_known = not path.exists() or _names_in(path) & names  # else it is about to be put back
        return trainer_checkpoint.step_of(path) if is_known else None

    path, manifest, skipped = latest(Path(folder), step_in_this_run, world)
    if path is None or manifest is None:
        if saved is not None or skipped:
            raise CheckpointError(
                f"this run has saved step {saved} in {folder}, and rank 0 finds no whole checkpoint of it there"
                f"{': ' if skipped else ''}{'; '.join(skipped)}. Hosts that may go on without each other need one folder"
            )
        return given
    _take_batch_size(trainer, path, world)
    _keep_global_batch(trainer, manifest, path)
    progress.note_saved(manifest.step, Path(folder))
    if world.rank == 0:
        logger.warning("going on from %s", path)
    return str(path)


def refuse_search() -> None:
    """Raise for a hyperparameter search, whose trials another start could not tell apart.

    Raises:
        UsageError: this is a run that heals.
    """
    if progress.name_of_run() is not None:
        raise UsageError("a hyperparameter search cannot be started again where it ended: leave out --max_restarts")


def _of_all_hosts(world: World, folder: Path) -> tuple[set[str], int | None]:
    """The names that hosts have for this run, each its own, and the newest step that any of them knows to be saved."""
    found = world.collect((progress.name_of_run(), progress.last_saved(folder)), "the name of this run")
    names = {part for name, _ in found for part in name.split(_AND)}
    saved = max((step for _, step in found if step is not None), default=None)
    return cast("tuple[set[str], int | None]", world.share((names, saved), "the name of this run"))


def _names_in(checkpoint: Path) -> set[str]:
    try:
        found = json.loads((checkpoint / MANIFEST).read_bytes()).get("run")
    except (OSError, ValueError, AttributeError):
        return set()
    return set(found.split(_AND)) if isinstance(found, str) else set()


def _take_batch_size(trainer: Any, path: Path, world: World) -> None:
    """What `auto_find_batch_size` has found, before it is compared: the Trainer takes it later."""
    if trainer.args.auto_find_batch_size:
        state = world.from_first(
            lambda: json.loads((path / "trainer_state.json").read_text()), str(path), CheckpointError
        )
        trainer._train_batch_size = state.get("train_batch_size") or trainer._train_batch_size


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
    order = getattr(args, "train_sampling_strategy", "random")
    if order not in ("random", "sequential"):
        raise UsageError(
            f"train_sampling_strategy is {order!r}, which orders samples otherwise with another number of micro-batches, as "
            f"{args.world_size} ranks need: use 'random', as many ranks as before, or zero_any_batch=True"
        )
    args.gradient_accumulation_steps = wanted // one
    logger.warning("%d ranks: %d micro-batches a step keep the %s samples", args.world_size, wanted // one, wanted)


def has_ended(trainer: Any) -> bool:
    """Whether the run had made its last step before it was started again; the Trainer would make one more."""
    return progress.name_of_run() is not None and trainer.state.global_step >= trainer.state.max_steps


def leave_if_told(trainer: Any) -> None:
    """End the process, after a training that a signal has ended: it has saved, and another start goes on from there.

    Ranks whose own host was not told end with an error, so that their agent starts them again, without the others.
    """
    if progress.name_of_run() is None:
        return
    for callback in trainer.callback_handler.callbacks:
        saves = getattr(callback, "signal_saves", None)
        if saves is not None and saves.has_asked:
            raise SystemExit(0 if saves.is_told else os.EX_TEMPFAIL)
