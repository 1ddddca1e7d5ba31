"""Windows that ranks collect, whatever they hold; files of models cut over a tensor axis."""

from __future__ import annotations

import contextlib
import filecmp
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

import hf_zero as zero
from hf_zero.checkpoint.files import disk, windows
from hf_zero.checkpoint.files.manifest import record_of
from hf_zero.checkpoint.files.model_plan import FilePlan
from hf_zero.checkpoint.files.pieces import Piece, identity
from hf_zero.checkpoint.files.stored import StoredFile, stored
from hf_zero.checkpoint.files.tensor_file import Source, TensorInfo, layout_file
from hf_zero.checkpoint.ranks import collecting, cooperative
from hf_zero.checkpoint.ranks.cooperative import read_plan, write_plan
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError
from hf_zero.layout import Cut, OwnerLayout, RowLayout, TensorCut, row_major
from tests.ranks import by_hand, on_ranks, run_ranks
from tests.tensor_axis import CONFIGS, load, saved


@contextlib.contextmanager
def small_windows(num_bytes: int = 64) -> Iterator[None]:
    """While active, windows have so many bytes."""
    with mock.patch.object(windows, "CHUNK_BYTES", num_bytes), mock.patch.object(collecting, "CHUNK_BYTES", num_bytes):
        yield


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


def _sources(world: World, dtype: torch.dtype) -> dict[str, tuple[Tensor, Source]]:
    """Whole tensors, and what this rank holds of each: by all kinds of cuts."""
    size, shards, found = world.tensor.num_ranks, world.num_shards, {}
    for number, (shape, dim, groups, is_sharded) in enumerate(_CUTS):
        tensor = None if dim is None else TensorCut(shape, dim, size, groups)
        if tensor is not None and groups > 1 and not tensor.divides:
            continue
        part = shape if tensor is None else tensor.local_shape(world.tensor.rank)
        whole = torch.arange(1, RowLayout(shape, 1).numel + 1).view(shape).to(dtype)
        for rows_dim in range(len(part)) if is_sharded else (0,):
            rows = RowLayout(part, shards if is_sharded else 1, dim=rows_dim)
            cut = Cut(shape, rows, world.shard_rank, tensor, world.tensor.rank)
            found[f"cut {number} {rows_dim}"] = whole, Source(cut.of(whole).contiguous(), rows, cut)
    whole = torch.arange(1, 36.0).view(5, 7).to(dtype)
    owner = OwnerLayout(whole.shape, shards, owner=shards - 1)
    found["owned"] = whole, Source(whole if world.shard_rank == shards - 1 else whole[:0], owner)
    found["whole"] = whole, Source(whole, RowLayout(whole.shape, 1))
    rows = RowLayout(whole.shape, shards)
    found["rows"] = whole, Source(rows.rows_of(whole, world.shard_rank).clone(), rows)
    other = found["rows"][1].rows.t().contiguous().t()  # as an optimizer may keep its states
    found["other order"] = whole, Source(other, rows)
    return found


def _plan(sources: Mapping[str, tuple[Tensor, Source]], filed: torch.dtype) -> tuple[FilePlan, dict[str, Tensor]]:
    """A file with all tensors, transposed ones too, and such that two others make up; and what it should hold."""
    pieces, tensors = {}, {}
    for name, (whole, _) in sources.items():
        pieces[name], tensors[name] = (identity(name, tuple(whole.shape)),), whole
        if whole.ndim > 1 and whole.numel():
            turned = whole.transpose(0, 1)
            strides = row_major(tuple(turned.shape))
            pieces[f"t {name}"] = (Piece(tuple(turned.shape), name, 0, turned.stride(), 0, strides),)
            tensors[f"t {name}"] = turned.contiguous()
    left, right = identity("rows", (5, 7)), replace(identity("owned", (5, 7)), target_offset=35)
    pieces["both"] = left, right
    tensors["both"] = torch.cat([sources["rows"][0], sources["owned"][0]])
    infos = [TensorInfo(name, filed, tuple(tensor.shape)) for name, tensor in tensors.items()]
    values = {name: tensor.to(filed, copy=True).contiguous() for name, tensor in tensors.items()}
    return FilePlan((layout_file("a.safetensors", infos, {"format": "pt"}),), pieces), values


@on_ranks(
    4,
    config=({"replicate": 2}, {"tp_size": 2}, *by_hand({}, {"tp_size": 4})),
    dtype=(torch.float32, torch.bfloat16),
    filed=(torch.float32, torch.bfloat16),
)
def test_windows_of_every_cut_come_to_the_file_and_back(
    config: dict[str, int], dtype: torch.dtype, filed: torch.dtype
) -> None:
    world = World.create(ZeroConfig(stage=3, collectives="pairwise", **config), torch.device("cpu"))
    folder = Path(world.share(tempfile.mkdtemp(), "a folder"))
    given = _sources(world, dtype)
    plan, values = _plan(given, filed)
    sources = {name: source for name, (_, source) in given.items()}
    with small_windows(), mock.patch.object(cooperative, "_collects", lambda *_: True):
        extents = write_plan(plan, sources, folder, world)
        if world.rank == 0:
            save_file(values, folder / "expected.safetensors", {"format": "pt"})
        world.meet("the expected file")
        assert (folder / "a.safetensors").read_bytes() == (folder / "expected.safetensors").read_bytes()
        everything = world.share(world.collect(extents, "extents"), "extents")
        written = [extent for each in everything for extent in each.get("a.safetensors", ())]
        record_of(folder / "a.safetensors", written)
        assert {each.offset % 64 for each in written} == {0}
        again = {name: replace(source, rows=torch.zeros_like(source.rows)) for name, source in sources.items()}
        read_plan(["a.safetensors"], plan.pieces, again, folder, world)
    for name, source in sources.items():
        assert torch.equal(again[name].rows, source.rows), (config, name)
        assert again[name].rows.stride() == source.rows.stride()


@on_ranks(4)
def test_files_whose_elements_begin_anywhere_are_read() -> None:
    world = World.create(ZeroConfig(stage=3, collectives="pairwise"), torch.device("cpu"))
    folder = Path(world.share(tempfile.mkdtemp(), "a folder"))
    wholes = {"a": torch.arange(37.0).view(37, 1), "b": torch.arange(33.0).view(11, 3).double(), "c": torch.ones(3)}
    infos = [TensorInfo(name, whole.dtype, tuple(whole.shape)) for name, whole in wholes.items()]
    for padding in range(8):
        file = layout_file("a.safetensors", infos, {})
        text = file.header[8:] + b" " * padding
        data = b"".join(wholes[tensor.name].numpy().tobytes() for tensor in file.tensors)
        if world.rank == 0:
            (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        layouts = {name: RowLayout(tuple(whole.shape), 4 if whole.ndim > 1 else 1) for name, whole in wholes.items()}
        sources = {
            name: Source(torch.zeros(layout.local_shape(world.rank), dtype=wholes[name].dtype), layout)
            for name, layout in layouts.items()
        }
        pieces = {name: (identity(name, tuple(whole.shape)),) for name, whole in wholes.items()}
        world.meet("the file")
        for num_bytes in (16, 20, 64):
            with small_windows(num_bytes), mock.patch.object(cooperative, "_collects", lambda *_: True):
                read_plan(["a.safetensors"], pieces, sources, folder, world)
            for name, source in sources.items():
                assert torch.equal(source.rows, layouts[name].rows_of(wholes[name], world.rank)), (padding, num_bytes)
                source.rows.zero_()


@on_ranks(2)
def test_newer_files_take_the_place_of_older_ones_in_either_form() -> None:
    worlds = [
        World.create(ZeroConfig(stage=3, collectives="pairwise", checkpoint_files=kind), torch.device("cpu"))
        for kind in ("shared", "per_writer")
    ]
    folder = Path(worlds[0].share(tempfile.mkdtemp(), "a folder"))
    given = _sources(worlds[0], torch.float32)
    plan, values = _plan(given, torch.float32)
    sources = {name: source for name, (_, source) in given.items()}
    forms = ["a.safetensors"], [f"a.safetensors.0000{number}-of-00002" for number in (1, 2)]
    for world, names in (*zip(worlds, forms, strict=True), (worlds[0], forms[0])):
        with small_windows():
            write_plan(plan, sources, folder, world, in_parts=True)
        assert sorted(path.name for path in folder.iterdir()) == names
        with stored(folder / "a.safetensors") as file:
            content = bytearray(file.size)
            file.read_into(content, 0)
        assert content == save(values, {"format": "pt"})
        world.meet("the next files")
    if worlds[0].rank == 0:
        (folder / forms[1][0]).write_bytes(b"")
    worlds[0].meet("an older part")
    with pytest.raises(CheckpointError, match=r"as one file and in parts .*remove the older"):
        read_plan(["a.safetensors"], plan.pieces, sources, folder, worlds[0])


@on_ranks(4)
def test_a_rank_that_cannot_read_or_write_fails_all_and_they_go_on() -> None:
    world = World.create(ZeroConfig(stage=3, collectives="pairwise"), torch.device("cpu"))
    folder = Path(world.share(tempfile.mkdtemp(), "a folder"))
    given = _sources(world, torch.float32)
    plan, _ = _plan(given, torch.float32)
    sources = {name: source for name, (_, source) in given.items()}
    with small_windows(), mock.patch.object(cooperative, "_collects", lambda *_: True):
        write_plan(plan, sources, folder, world)
        before = (folder / "a.safetensors").read_bytes()
        for owner, name in ((disk, "write_at"), (StoredFile, "read_into")):
            broken = mock.patch.object(owner, name, side_effect=OSError("the disk is gone"))
            with (
                broken if world.rank == 2 else contextlib.nullcontext(),
                pytest.raises(CheckpointError, match=r"rank 2.*is gone"),
            ):
                if owner is disk:
                    write_plan(plan, sources, folder, world)
                else:
                    read_plan(["a.safetensors"], plan.pieces, sources, folder, world)
            world.meet("after the error")
            assert [path.name for path in folder.iterdir()] == ["a.safetensors"]
        read_plan(["a.safetensors"], plan.pieces, sources, folder, world)
        write_plan(plan, sources, folder, world)
    assert (folder / "a.safetensors").read_bytes() == before


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

    with Watching(), small_windows(2 * largest):
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
