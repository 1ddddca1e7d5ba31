"""Writes a model's weights as the folder that `save_pretrained` writes, and reads them again; every rank its own rows."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.commit import staged_in
from hf_zero.checkpoint.files.manifest import check_name
from hf_zero.checkpoint.files.model_plan import FilePlan, NotMovedError, model_sources, plan_model, uncovered
from hf_zero.checkpoint.files.stored import is_stored
from hf_zero.checkpoint.ranks.cooperative import match, read_plan, write_plan
from hf_zero.checkpoint.ranks.one_writer import saving_alone
from hf_zero.engine.engine import engine_of
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)


def write_model(model: nn.Module, folder: Path, world: World, dtype: torch.dtype | None = None, **options: Any) -> bool:
    """Write what `model.save_pretrained(folder)` writes, without a gather; called by all ranks together.

    Args:
        model: its parameters are partitioned, or whole on every rank.
        folder: created if needed; an older file of the same name is replaced once its successor is on disk.
        world: the ranks.
        dtype: of floating-point tensors; their own by default.
        **options: of `save_pretrained`.

    Returns:
        False, on all ranks, if a weight is computed and not only moved; then only the small files have been written.

    Raises:
        CheckpointError: on all ranks, if any of them could not write.
    """

    def plan_writing() -> FilePlan | None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with saving_alone():
                return plan_model(model, folder, dtype, **options)
        except NotMovedError as error:
            logger.info("weights are gathered for saving: %s", error)
            return None

    plan = world.from_first(plan_writing, f"preparing {folder}", CheckpointError)
    if plan is None:
        return False
    staged, sources = staged_in(folder), model_sources(model)
    if staged is None:
        write_plan(plan, sources, folder, world)
    else:
        staged.write(plan, sources)
    return True


def read_model(model: nn.Module, folder: Path, world: World) -> None:
    """Read the weights that `write_model` wrote, on any number of ranks, under any stage; called by all ranks together.

    Raises:
        CheckpointError: on all ranks, before any parameter is changed, if names, shapes or dtypes differ.
    """
    what = f"reading weights of {folder}"
    plan, names = world.from_first(lambda: _plan_reading(model, folder), what, CheckpointError)
    sources = model_sources(model)
    with world.together(what, CheckpointError), torch.no_grad():
        read_plan(names, plan.pieces, sources, folder, world)
    engine = engine_of(model)
    if engine is not None:
        engine.mark_dirty()


def _plan_reading(model: nn.Module, folder: Path) -> tuple[FilePlan, list[str]]:
    with tempfile.TemporaryDirectory() as scratch:
        plan = plan_model(model, Path(scratch))
    missing = uncovered(model, plan)
    if missing:
        raise CheckpointError(f"{missing[0]!r} is never saved, so it cannot be read")
    names = weight_files(folder)
    problems = match(plan, folder, names)
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{folder} is of another model: {'; '.join(problems[:3])}{more}. Load it into the model that was saved"
        )
    return plan, names


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's weight files, from its index if it has one.

    Raises:
        CheckpointError: there are none, or the index is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if not is_stored(folder / "model.safetensors"):
            raise CheckpointError(
                f"{folder} has no model.safetensors and no {index.name}: name a folder that save_pretrained or a save wrote"
            )
        return ["model.safetensors"]
    check_name(folder, index.name)
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}") from error
    for name in names:
        check_name(folder, name, index.name)
    return names
