"""Ranks that do not share the folder stream their rows; the files are the same."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.checkpoint import cooperative, disk
from hf_zero.checkpoint.model_plan import model_sources
from hf_zero.checkpoint.model_state import write_model
from hf_zero.engine.engine import engine_of
from tests.checkpoint.runs import make_trainer
from tests.integrations.trainer.test_checkpoint import mixtral
from tests.integrations.trainer.test_trainer import (
    loaded,
    undone,
)
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Streamed:
    """What a rank had in memory and on disk while rows were streamed."""

    peak_bytes: int
    largest_bytes: int
    messages: int
    changes: int


BUILDS = {"llama": loaded, "mixtral": mixtral}


@undone
def save_streamed(folder: str, name: str) -> Streamed:
    """Write weights in both ways; in the second one, rank 1 does not see what rank 0 writes."""
    model = make_trainer(folder, f"{folder}/streaming", BUILDS[name]).model
    engine = engine_of(model)
    assert engine is not None
    world, collectives = engine.world, engine.world.collectives
    write_model(model, Path(folder, f"{name}_shared"), world)
    alive: list[tuple[StorageWeakRef, int]] = []
    peak, changes, gather, is_file = 0, itertools.count(), collectives.gather, Path.is_file

    def watched(items: Any, unit: str) -> Any:
        nonlocal peak
        alive.extend((StorageWeakRef(item.flat.untyped_storage()), item.flat.nbytes) for item in items)
        peak = max(peak, sum(size for storage, size in alive if not storage.expired()))
        return gather(items, unit)

    def blind(path: Path) -> bool:
        return not path.name.startswith(".hf_zero_") and is_file(path)

    with (
        mock.patch.object(collectives, "gather", watched),
        mock.patch.object(Path, "is_file", blind if dist.get_rank() == 1 else is_file),
        mock.patch.object(disk, "on_change", lambda what, path: next(changes)),
        mock.patch.object(cooperative.logger, "info") as info,
    ):
        write_model(model, Path(folder, f"{name}_streamed"), world)
    sizes = [s.layout.padded_numel * s.rows.itemsize for s in model_sources(model).values() if s.layout.num_ranks > 1]
    return Streamed(peak, max(sizes), info.call_count, next(changes))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_streamed_files_are_the_same_and_one_tensor_is_whole_at_a_time(name: str, folder: str) -> None:
    first, second = run_ranks(save_streamed, 2, folder, name)
    left, right = (
        {p.name: p.read_bytes() for p in Path(folder, f"{name}_{k}").iterdir()} for k in ("shared", "streamed")
    )
    assert left == right
    assert first.peak_bytes == first.largest_bytes == second.peak_bytes
    assert (first.messages, second.messages, second.changes) == (1, 0, 0)
