"""Checkpoints of the plain `transformers.Trainer`: the same folders and names, written by all ranks and committed at once.

A checkpoint still contains what the Trainer puts there: weights as `save_pretrained` writes them, scheduler, random states,
`trainer_state.json`. The optimizer's state is in files of its own, and a manifest describes everything.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_zero.changes import Changes
from hf_zero.checkpoint.commit import StagedCheckpoint, newest, staged_in, tidying, verify
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest
from hf_zero.checkpoint.files.others import refuse_foreign
from hf_zero.checkpoint.files.rotation import remove_oldest
from hf_zero.checkpoint.files.stored import whole_name
from hf_zero.checkpoint.model_state import read_model
from hf_zero.checkpoint.optimizer_state import LoadedState, capture, read_state, state_files
from hf_zero.checkpoint.ranks.background import WRITING_S, background_of, wait_for
from hf_zero.checkpoint.ranks.cooperative import read_plan, write_plan
from hf_zero.checkpoint.ranks.one_place import one_place
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError, UsageError
from hf_zero.host import progress

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer"
_PLAIN_OPTIMIZER, _SCHEDULER, _STATE = "optimizer.pt", "scheduler.pt", "trainer_state.json"
_VERIFIED = "_zero_verified"  # an attribute of a Trainer: the checkpoint that is about to be read
_NAME = re.compile(r"^checkpoint-(\d+)$")


def engine_under(model: nn.Module | None) -> ZeroEngine | None:
    """The engine of a Trainer's model, with or without torch.compile's wrapper."""
    return None if model is None else engine_of(getattr(model, "_orig_mod", model))


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name."""
    found = _NAME.match(path.name)
    return None if found is None else int(found.group(1))


def global_batch_of(trainer: Any) -> int:
    """Samples of one optimizer step, over all ranks."""
    args = trainer.args
    return int(trainer._train_batch_size * args.gradient_accumulation_steps * _num_batches(trainer))


def _num_batches(trainer: Any) -> int:
    """Ranks that see different batches."""
    return int(trainer.args.world_size) // int(trainer.get_tp_size())


def agree_on_folder(args: Any, model: nn.Module | None) -> None:
    """Let a Trainer's output folder be rank 0's on all ranks; called by all of them together."""
    engine = engine_under(model)
    if engine is not None and engine.world.num_ranks > 1 and args.output_dir is not None:
        args.output_dir = str(one_place(args.output_dir, engine.world))


def check_folder(trainer: Any, first: int, world: World) -> None:
    """Look for folders of others where this training would save.

    Args:
        trainer: about to train.
        first: the step that it begins after.
        world: all ranks call this together.

    Raises:
        CheckpointError: on all ranks, since a save would fail there, when the steps before it are done.
    """
    args = trainer.args
    if args.save_strategy != "no" and args.output_dir is not None:
        saves_itself = _saves_itself(trainer)
        world.from_first(
            lambda: _check_folder(args, first, saves_itself), f"looking into {args.output_dir}", CheckpointError
        )


def _check_folder(args: Any, first: int, saves_itself: bool) -> None:
    if saves_itself and _newest_plain(Path(args.output_dir), saves_itself):
        return  # nothing is committed
    last = args.max_steps if args.max_steps > 0 else math.inf
    every = args.save_steps if args.save_strategy == "steps" and args.save_steps >= 1 else 1
    for path in Path(args.output_dir).glob("checkpoint-*"):
        step = step_of(path)
        if step is not None and first < step <= last and (step % every == 0 or step == last):
            refuse_foreign(path)


def save_checkpoint(original: Callable[..., None], trainer: Any, model: Any, trial: Any) -> None:
    """Save as `Trainer._save_checkpoint` does, into a staged folder, and commit it.

    Raises:
        CheckpointError: on all ranks, if any of them failed; older checkpoints are left as they were.
    """
    engine = engine_under(trainer.model)
    assert engine is not None
    wait_for(engine.world)
    name = f"checkpoint-{trainer.state.global_step}"
    staged = StagedCheckpoint(
        Path(trainer._get_output_dir(trial=trial), name), engine.world, background_of(engine.world)
    )
    best_before = trainer.state.best_model_checkpoint
    with staged.filling(), _into(trainer, staged):
        original(trainer, model, trial)
        _name_best(trainer, staged)
    world = engine.world
    manifest = Manifest(
        step=trainer.state.global_step,
        world_size=world.num_ranks,
        stage=world.config.stage,
        global_batch=global_batch_of(trainer),
        config=json.loads(json.dumps(world.config.to_dict(), default=str)),
    )
    try:
        staged.commit(manifest, after=functools.partial(_push_and_rotate, trainer, staged.final, world))
    except CheckpointError:
        trainer.state.best_model_checkpoint = best_before
        raise


def _push_and_rotate(trainer: Any, folder: Path, world: World) -> None:
    """What the Trainer does with a checkpoint once it is there."""
    if trainer.args.push_to_hub:
        with world.together(f"pushing {folder} to the hub", CheckpointError, WRITING_S):
            trainer._push_from_checkpoint(str(folder))  # on rank 0
    if world.rank == 0:
        with tidying(f"old checkpoints in {folder.parent}"):
            _remove_old(trainer, folder.parent)


@contextmanager
def _into(trainer: Any, staged: StagedCheckpoint) -> Iterator[None]:
    """While active, the Trainer writes to the staged folder, and a step that fails does not stop this rank from the next."""

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with staged.filling():
                return method(*args, **kwargs)

        return run

    names = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
    with Changes() as changes:
        for name in names:
            changes.replace(trainer, name, guarded(getattr(trainer, name)))
        changes.replace(trainer, "_get_output_dir", lambda trial=None: str(staged.outer))
        changes.replace(trainer, "_push_from_checkpoint", lambda folder: None)  # uploads read it on a thread, later
        yield


def _name_best(trainer: Any, staged: StagedCheckpoint) -> None:
    """Record the best checkpoint under the name that it will have."""
    state = trainer.state
    if state.best_model_checkpoint == str(staged.folder):
        state.best_model_checkpoint = str(staged.final)
        if trainer.args.should_save:
            state.save_to_json(str(staged.folder / _STATE))


def _remove_old(trainer: Any, run: Path) -> None:
    """Rotate as the Trainer does, but only committed checkpoints."""
    limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
    ours = [path for path in run.iterdir() if step_of(path) is not None and (path / MANIFEST).is_file()]
    ours.sort(key=lambda path: (path / MANIFEST).stat().st_mtime)
    kept = {ours[-1], *([] if best is None else [run / Path(best).name])}
    remove_oldest(run, ours, limit if limit and limit > 0 else None, kept)


def save_optimizer(trainer: Any, folder: Path) -> None:
    """Write the optimizer's state, every rank its rows, and the scheduler's."""
    engine = engine_under(trainer.model)
    assert engine is not None and engine.model is not None
    plan, sources, content = capture(trainer.optimizer, engine.model, OPTIMIZER)
    staged = staged_in(folder)
    if staged is None:
        write_plan(plan, sources, folder, engine.world)
    else:
        staged.write(plan, sources)
    if trainer.args.should_save:
        disk.write_file(folder / state_files(OPTIMIZER)[1], json.dumps(content).encode(), syncs=staged is None)
        torch.save(trainer.lr_scheduler.state_dict(), folder / _SCHEDULER)


def load_optimizer(trainer: Any, folder: Path) -> None:
    """Give optimizer and scheduler the state of a verified checkpoint.

    Raises:
        CheckpointError: on all ranks, before anything is changed, if a file is missing or belongs to another optimizer.
    """
    engine = engine_under(trainer.model)
    assert engine is not None and engine.model is not None
    world, what = engine.world, f"reading the optimizer of {folder}"
    if world.from_first(lambda: _is_plain(folder), what, CheckpointError):
        with world.together(what, CheckpointError):
            optimizer, scheduler = (
                torch.load(folder / name, map_location="cpu", weights_only=True)
                for name in (_PLAIN_OPTIMIZER, _SCHEDULER)
            )
        trainer.optimizer.load_state_dict(optimizer)  # whole values, of which each rank keeps its rows
        trainer.lr_scheduler.load_state_dict(scheduler)
        return
    saved = world.from_first(lambda: read_state(folder, OPTIMIZER), what, CheckpointError)
    with world.together(what, CheckpointError):
        loaded = LoadedState(saved, trainer.optimizer, engine.model)
        scheduler = torch.load(folder / _SCHEDULER, weights_only=True)
    with world.together(what, CheckpointError):
        plan, sources = loaded.install()
    with world.together(what, CheckpointError):
        read_plan([file.name for file in plan.files], plan.pieces, sources, folder, world)
    trainer.lr_scheduler.load_state_dict(scheduler)


def _is_plain(folder: Path) -> bool:
    """Whether the optimizer's state is as the plain Trainer saves it."""
    return not (folder / state_files(OPTIMIZER)[0]).exists() and (folder / _PLAIN_OPTIMIZER).is_file()


def load_weights(trainer: Any, folder: Path) -> None:
    """Verify a checkpoint, unless `find_checkpoint` just has, then read this rank's rows of its weights.

    A folder without a manifest (of `save_pretrained`, of a `_save_checkpoint` of the program's own) is read as it is.
    """
    engine = engine_under(trainer.model)
    assert engine is not None and engine.model is not None
    wait_for(engine.world)
    if vars(trainer).pop(_VERIFIED, None) != folder and _is_to_be_verified(trainer, folder, engine.world):
        verify(folder, engine.world)
    read_model(engine.model, folder, engine.world)


def load_best(trainer: Any) -> None:
    """Load the best checkpoint's weights; if the program has removed it, the model stays as it is, as in the plain Trainer."""
    engine, folder = engine_under(trainer.model), Path(trainer.state.best_model_checkpoint)
    assert engine is not None
    wait_for(engine.world)
    if engine.world.from_first(folder.is_dir, "looking for the best checkpoint", CheckpointError):
        load_weights(trainer, folder)
    elif engine.world.rank == 0:
        logger.warning("%s, the best checkpoint, is not there any more: the model stays as it is now", folder)


def _is_to_be_verified(trainer: Any, folder: Path, world: World) -> bool:
    """Whether a checkpoint is ours, or is not there; what is left of one of ours is not taken for a plain one."""

    def look() -> bool:
        is_part = (folder / state_files(OPTIMIZER)[0]).exists() and not _saves_itself(trainer)
        return is_part or not folder.is_dir() or (folder / MANIFEST).exists()

    return world.from_first(look, f"looking for a manifest in {folder}", CheckpointError)


def _saves_itself(trainer: Any) -> bool:
    """Whether a subclass has a `_save_checkpoint` of its own that does not call the Trainer's."""
    classes = type(trainer).__mro__
    for cls in classes[: classes.index(Trainer)]:
        code = getattr(inspect.unwrap(vars(cls).get("_save_checkpoint", cls)), "__code__", None)
        if code is not None and not {"super", "_save_checkpoint"}.intersection(code.co_names):
            return True
    return False


def wants_weights_only(args: Any) -> bool:
    """Whether a new training is to start from a checkpoint's weights alone."""
    return bool(getattr(args, "zero_weights_only", False))


def find_checkpoint(trainer: Any, wanted: str | os.PathLike[str] | bool, goes_on: bool = True) -> str:
    """The folder to resume from: the given one or, for True, the newest one that verifies; the same on every rank.

    What a program's own `_save_checkpoint` has written, or plain data parallelism, has no manifest, and is taken as it is; for
    True, where nothing else is there.

    Raises:
        CheckpointError: on all ranks, if there is none that is whole.
        UsageError: it was written at another global batch size, and `zero_any_batch` is not set.
    """
    engine = engine_under(trainer.model)
    assert engine is not None
    world = engine.world
    wait_for(world)
    manifest: Manifest | None = None
    if isinstance(wanted, bool):
        run, saves_itself = Path(trainer.args.output_dir), _saves_itself(trainer)
        what = f"looking for a checkpoint in {run}"
        path = world.from_first(lambda: _newest_plain(run, saves_itself), what, CheckpointError)
        if path is None:
            path, manifest = newest(run, step_of, world)
    else:
        path = world.share(Path(wanted), "the checkpoint to resume from")
        if _is_to_be_verified(trainer, path, world):
            manifest = verify(path, world)
    if manifest is None and world.rank == 0:
        logger.warning("%s has no %s: nothing checks its files", path, MANIFEST)
    if goes_on:
        _check_goes_on(trainer, path, manifest, world)
    vars(trainer)[_VERIFIED] = path
    return str(path)


def _newest_plain(run: Path, saves_itself: bool) -> Path | None:
    """The newest checkpoint of a run of which none is ours."""
    ours = (MANIFEST,) if saves_itself else (MANIFEST, state_files(OPTIMIZER)[0])
    found = [path for path in run.glob("checkpoint-*") if step_of(path) is not None and (path / _STATE).is_file()]
    if any((path / name).exists() for path in found for name in ours):
        return None
    return max(found, key=lambda path: step_of(path) or 0, default=None)


def _check_goes_on(trainer: Any, path: Path, manifest: Manifest | None, world: World) -> None:
    """Raise unless a training can go on from a checkpoint, judging only by facts that all ranks share."""
    step: int = world.from_first(lambda: _step_in(path), f"reading {path / _STATE}", CheckpointError)
    if manifest is not None and step != manifest.step:
        raise CheckpointError(
            f"{path / _STATE} is of step {step}, and the rest of the checkpoint of step {manifest.step}"
        )
    names: Iterable[str] = [] if manifest is None else manifest.files
    if manifest is None:
        names = world.from_first(lambda: os.listdir(path), f"looking into {path}", CheckpointError)
    found = set(map(whole_name, names))
    wanted = [] if _reads_its_own(trainer) else [*state_files(OPTIMIZER), _SCHEDULER]
    if manifest is None and _PLAIN_OPTIMIZER in found:
        wanted = wanted[-1:]
    for name in wanted:
        if name not in found:
            raise CheckpointError(
                f"{path / name} is missing: it was saved with weights alone, and training cannot go on from there; to "
                "start anew from its weights, set zero_weights_only=True"
            )
    expected, ours = None if manifest is None else manifest.global_batch, global_batch_of(trainer)
    if expected not in (None, ours) and not getattr(trainer.args, "zero_any_batch", False):
        raise UsageError(
            f"{path} was written with {expected} samples a step, and now it would be {ours} "
            f"({trainer._train_batch_size} a rank x {trainer.args.gradient_accumulation_steps} micro-batches x "
            f"{_num_batches(trainer)} ranks): samples would be repeated or left out. Change the batch size or "
            "gradient_accumulation_steps, or set zero_any_batch=True to go on all the same"
        )
    progress.note_begin(step)


def _step_in(path: Path) -> int:
    try:
        return int(json.loads((path / _STATE).read_text())["global_step"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{path / _STATE} is missing: training cannot go on from there; to start anew from its weights, set "
            "zero_weights_only=True"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _STATE} is damaged ({error!r}): take an older checkpoint") from error


def _reads_its_own(trainer: Any) -> bool:
    """Whether a subclass reads the optimizer's state itself."""
    return type(trainer)._load_optimizer_and_scheduler is not Trainer._load_optimizer_and_scheduler
