"""What two axes cut, exchanged for rows of files and back: files of models, resumed on other axes, and all kinds of cuts."""

from __future__ import annotations

import filecmp
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from hf_zero.checkpoint.by_rows import empty_rows, from_rows, is_exchanged, to_rows
from hf_zero.checkpoint.tensor_file import Source
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.world import World
from hf_zero.layout import Cut, RowLayout, TensorCut
from tests.ranks import on_ranks, run_ranks
from tests.tensor_axis import CONFIGS, load, saved

_CUTS: list[tuple[tuple[int, ...], int | None, int, bool]] = [
    ((7, 3), 0, 1, True),
    ((1, 3), 0, 1, True),
    ((13, 3), 0, 1, False),
    ((8, 3), 0, 2, True),
    ((5, 7), 1, 1, True),
    ((5, 8), 1, 2, True),
    ((3, 5), 1, 1, False),
    ((3, 8, 2), 1, 2, True),
    ((9,), None, 1, True),
    ((2, 2), None, 1, True),
    ((4, 0), 0, 1, True),
    ((6, 4, 5), 2, 1, True),
]


@on_ranks(4)
def test_every_cut_comes_to_the_rows_of_the_whole_and_back() -> None:
    for config in ({"tp_size": 2}, {"tp_size": 4}):
        world = World.create(ZeroConfig(stage=3, collectives="pairwise", **config), torch.device("cpu"))
        size, shards = world.tensor.num_ranks, world.num_shards
        for (shape, dim, groups, is_sharded), dtype in product(_CUTS, (torch.float32, torch.bfloat16)):
            tensor = None if dim is None else TensorCut(shape, dim, size, groups)
            if tensor is not None and groups > 1 and not tensor.divides:
                continue
            part = shape if tensor is None else tensor.local_shape(world.tensor.rank)
            rows = RowLayout(part, shards if is_sharded else 1)
            cut = Cut(shape, rows, world.shard_rank, tensor, world.tensor.rank)
            whole = torch.arange(1, RowLayout(shape, 1).numel + 1).view(shape).to(dtype)
            source = Source(cut.of(whole).clone(), rows, cut)
            assert torch.equal(world.gather_parameter(source.rows, cut, "whole"), whole)
            if not is_exchanged(source):
                continue
            found = to_rows(source, "rows", world)
            assert torch.equal(found.rows, RowLayout(shape, 4).rows_of(whole, dist.get_rank())), (shape, dim)
            again = Source(torch.full_like(source.rows, 0), rows, cut)
            given = empty_rows(again, world)
            given.rows.copy_(found.rows)
            from_rows(given, again, "rows", world)
            assert torch.equal(again.rows, source.rows), (shape, dim)


def _save(folder: str, out: str, tp_size: int) -> None:
    with zero.Init({"stage": 3, "tp_size": tp_size, "collectives": "pairwise"}):
        model = load(folder)
    zero.shard_model(model)
    largest = max(param.numel() for param in model.parameters())
    held = [0]

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if type(result) is Tensor and result.device.type == "cpu":
                held[0] = max(held[0], result.untyped_storage().nbytes())
            return result

    with Watching():
        model.save_pretrained(out)
    assert held[0] < 4 * largest, "a whole tensor was in memory"


_FILES = [*((name, 4, 2) for name in CONFIGS), ("llama", 3, 3)]
_EVERY_DAY = [("experts", 4, 2)]


@pytest.mark.parametrize(
    ("name", "num_ranks", "tp_size"),
    [each if each in _EVERY_DAY else pytest.param(*each, marks=pytest.mark.slow) for each in _FILES],
)
def test_files_are_those_of_the_unsharded_model_byte_for_byte(
    tmp_path: Path, name: str, num_ranks: int, tp_size: int
) -> None:
    run_ranks(_save, num_ranks, saved(name), str(tmp_path), tp_size)
    expected = sorted(path.name for path in Path(saved(name)).iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    assert filecmp.cmpfiles(saved(name), tmp_path, expected, shallow=False)[0] == expected
