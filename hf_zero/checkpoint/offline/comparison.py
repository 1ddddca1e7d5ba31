"""Two checkpoints side by side: which tensors differ, by how much, and on which rank's rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest, read_manifest
from hf_zero.checkpoint.files.stored import whole_name
from hf_zero.checkpoint.files.tensor_file import read_layout
from hf_zero.errors import CheckpointError
from hf_zero.layout import RowLayout

_STATE = "trainer_state.json"
_LOGGED = ("loss", "grad_norm")


@dataclass(frozen=True)
class Difference:
    """Of one tensor.

    Attributes:
        name: of the tensor; that of an optimizer's state has the state's name in it.
        file: of the first checkpoint.
        what: how they differ, where it is not by values: a shape, a dtype, or that one of them is missing.
        largest: the largest absolute difference; NaN on one side alone is infinitely far.
        at: the index where it is.
        count: elements that differ.
        numel: elements.
        rank: that holds `at` of the first checkpoint, on the ranks that wrote it; None if it is unknown.
    """

    name: str
    file: str
    what: str = ""
    largest: float = 0.0
    at: tuple[int, ...] = ()
    count: int = 0
    numel: int = 0
    rank: int | None = None


def tensors_of(folder: Path) -> dict[str, str]:
    """The file of each tensor in a folder's safetensors files, by file group and name."""
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if not whole_name(path.name).endswith(".safetensors"):
            continue
        if whole_name(path.name) != path.name:
            raise CheckpointError(
                f"{path} is a part of a file that several hosts have written: put its parts together (`cat NAME.*`) first"
            )
        group = path.name.split("-")[0].removesuffix(".safetensors")
        found |= {f"{group}: {name}": path.name for name in _names(path)}
    if not found:
        raise CheckpointError(
            f"{folder} has no safetensors files: compare checkpoints, or runs with folders like checkpoint-N"
        )
    return found


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """Where two checkpoints differ, one tensor in memory at a time.

    Args:
        first: a checkpoint, or any folder of safetensors files.
        second: the like.

    Raises:
        CheckpointError: one of them has no tensors.
    """
    here, there = tensors_of(first), tensors_of(second)
    num_ranks = _ranks_that_cut(read_manifest(first)) if (first / MANIFEST).exists() else 1
    for key in sorted(here.keys() | there.keys()):
        name = key.partition(": ")[2]
        if key not in here or key not in there:
            missing = first if key not in here else second
            yield Difference(name, here.get(key) or there[key], f"is not in {missing}")
            continue
        one, other = _read(first / here[key], name), _read(second / there[key], name)
        found = _compare(name, here[key], one, other, num_ranks)
        if found is not None:
            yield found


def _ranks_that_cut(manifest: Manifest) -> int:
    """How many ranks each tensor was cut over; 1 where they were not all cut over all of them."""
    config = manifest.config
    is_plain = all(config.get(key, 1) == 1 for key in ("replicate", "tp_size")) and not config.get("keep_whole_numel")
    return manifest.world_size if manifest.stage > 0 and is_plain else 1


def _names(path: Path) -> list[str]:
    return [info.name for info in read_layout(path).tensors]


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor


def _compare(name: str, file: str, one: Tensor, other: Tensor, num_ranks: int) -> Difference | None:
    if one.shape != other.shape or one.dtype != other.dtype:
        kinds = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (one, other)]
        return Difference(name, file, f"is {kinds[0]}, and {kinds[1]}")
    if one.dtype.is_floating_point and one.element_size() == 1:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if not differs.any():
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    distance = (one.to(wide) - other.to(wide)).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    distance = distance.where(differs, 0.0)
    at = tuple(int(each) for each in torch.unravel_index(distance.argmax(), one.shape))
    rows = RowLayout.balanced(tuple(one.shape), num_ranks)
    rank = None if num_ranks == 1 or not at else at[rows.dim] // -(-one.shape[rows.dim] // num_ranks)
    return Difference(name, file, "", float(distance.max()), at, int(differs.sum()), one.numel(), rank)


def first_difference_of_logs(first: Path, second: Path) -> tuple[int, int, str, Any, Any] | None:
    """The first step whose loss or gradient norm two Trainer checkpoints have logged otherwise.

    Returns:
        The last equal step, the step, the name, and both values; None if what both have logged is equal.
    """
    here, there = _logs(first), _logs(second)
    last = 0
    for step in sorted(here.keys() & there.keys()):
        for name in _LOGGED:
            one, other = here[step].get(name), there[step].get(name)
            if None not in (one, other) and one != other:
                return last, step, name, one, other
        last = step
    return None


def _logs(folder: Path) -> Mapping[int, Mapping[str, Any]]:
    path = folder / _STATE
    history = json.loads(path.read_text())["log_history"] if path.is_file() else []
    return {entry["step"]: entry for entry in history if "loss" in entry}
