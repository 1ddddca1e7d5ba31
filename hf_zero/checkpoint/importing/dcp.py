"""What is where in a folder of torch.distributed.checkpoint (DCP), as FSDP's state dicts are saved.

[Note: DCP's files] `.metadata` is a plain pickle. It has the shape of each entry and, for each chunk of the entry, a file, an
offset and a length. Those bytes are what `torch.save` writes for that chunk alone. `planner_data` has the path of each entry
through the nested dictionaries that were saved: `(..., name)` for weights; `(..., "state", name, key)` and
`(..., "param_groups", number, option)` for an optimizer, or, flattened, `(..., "state.name.key")` and
`(..., "param_groups.name.option")`. (torch/distributed/checkpoint/filesystem.py, metadata.py, state_dict.py, of 2.13.)
"""

from __future__ import annotations

import io
import json
import math
import pathlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hf_zero.checkpoint.files.manifest import check_name
from hf_zero.checkpoint.importing.state import (
    ForeignState,
    Group,
    LazyTensor,
    member_of,
    needs_pickle,
    number,
    options_of,
    run_plain_pickle,
    step_number,
)
from hf_zero.errors import CheckpointError

_METADATA = ".metadata"
_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"  # folders of accelerate's FSDP plugin, each with a number
_PATHS = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}


class _Metadata(pickle.Unpickler):
    """Reads DCP's metadata; knows its few classes, which only hold values, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        if module == dcp.__name__ and isinstance(getattr(dcp, name, None), type):
            return getattr(dcp, name)
        if (module, name) == (_StorageInfo.__module__, _StorageInfo.__name__):
            return _StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):
            return member_of
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


@dataclass(frozen=True)
class _Folder:
    """One folder with a `.metadata`."""

    path: Path
    metadata: dcp.Metadata
    allow_pickle: bool

    def entries(self) -> Iterator[_SavedValue]:
        paths = self.metadata.planner_data or {}
        for key in self.metadata.state_dict_metadata:
            yield _SavedValue(self, key, tuple(paths.get(key, (key,))))

    def stored(self, index: dcp.MetadataIndex) -> _StorageInfo:
        """Where a chunk lies, in a file that is there and long enough."""
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(f"{self.path / _METADATA} does not say where {index.fqn!r} lies: it is damaged")
        check_name(self.path, info.relative_path)
        path = self.path / info.relative_path
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: copy it from the machine whose rank wrote it")
        if path.stat().st_size < info.offset + info.length:
            raise CheckpointError(f"{path} ends before {index.fqn!r}: it is truncated; copy it again")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path} is compressed ({info.transform_descriptors}): save it without transforms")
        return cast(_StorageInfo, info)

    def load(self, index: dcp.MetadataIndex) -> Any:
        """What `torch.save` wrote for one chunk, or for one object."""
        info = self.stored(index)
        path = self.path / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if not self.allow_pickle:
                raise needs_pickle(path, f"{index.fqn!r}, which is more than a tensor or a number") from error
        except (RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{path}: {index.fqn!r} is damaged: {error}") from error
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        except Exception as error:  # its own code may raise anything
            raise CheckpointError(f"{path}: {index.fqn!r} cannot be read: {error!r}") from error


@dataclass(frozen=True)
class _SavedValue:
    """One entry of a saved dictionary; `path` leads to it."""

    folder: _Folder
    key: str
    path: tuple[Any, ...]

    def value(self) -> Any:
        """The object or the tensor."""
        if isinstance(self._info, dcp.TensorStorageMetadata):
            return self.lazy().read()
        return self.folder.load(dcp.MetadataIndex(self.key))

    @property
    def _info(self) -> Any:
        return self.folder.metadata.state_dict_metadata[self.key]

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, and not a number or another object."""
        return isinstance(self._info, dcp.TensorStorageMetadata)

    def lazy(self) -> LazyTensor:
        """The tensor, to be read later; raises now if any of its chunks is missing."""
        info = self._info
        shape, dtype = tuple(info.size), info.properties.dtype
        if sum(math.prod(chunk.sizes) for chunk in info.chunks) != math.prod(shape):
            raise CheckpointError(
                f"{self.folder.path / _METADATA}: the chunks of {self.key!r} do not make up its shape {shape}: it is damaged"
            )
        indices = [dcp.MetadataIndex(self.key, chunk.offsets) for chunk in info.chunks]
        for index in indices:
            self.folder.stored(index)

        def read() -> Tensor:
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            for index, chunk in zip(indices, info.chunks, strict=True):
                part = self.folder.load(index)
                if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != dtype:
                    name = self.folder.stored(index).relative_path
                    raise CheckpointError(
                        f"{self.folder.path / name}: a chunk of {self.key!r} should be {dtype} of shape "
                        f"{tuple(chunk.sizes)} and is not: the file is of another checkpoint"
                    )
                spans = zip(chunk.offsets, chunk.sizes, strict=True)
                whole[tuple(slice(start, start + size) for start, size in spans)] = part.detach()
            return whole

        return LazyTensor(shape, dtype, read)


def read_dcp(folder: Path, allow_pickle: bool) -> ForeignState:
    """Find everything in a DCP checkpoint; tensors stay in their files.

    Args:
        folder: with `.metadata`, or a Trainer's `checkpoint-N` with `pytorch_model_fsdp_0` and `optimizer_0`.
        allow_pickle: run code of pickles that hold more than tensors, numbers and DCP's own classes.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit the others.
    """
    opened = [_open(path, allow_pickle) for path in _locate(folder)]
    entries = [entry for each in opened for entry in each.entries()]
    files = {info.relative_path for each in opened for info in each.metadata.storage_data.values()}
    num_ranks = len({name.rpartition("_")[0] for name in files})
    is_cut = any(e.is_tensor and len(e._info.chunks) > 1 for e in entries)
    state = ForeignState(f"torch {_METADATA[1:]} (DCP)", [folder], 0, num_ranks, 3 if is_cut else 0)
    trained = [entry for entry in entries if _is_optimizers(entry.path)]
    _add_weights(state, folder, [entry for entry in entries if not _is_optimizers(entry.path)])
    if trained:
        _add_optimizer(state, folder, trained)
    state.step = _step(state, folder)
    state.check()
    return state


def _locate(folder: Path) -> list[Path]:
    if (folder / _METADATA).is_file():
        return [folder]
    found = []
    for prefix in (_MODEL, _OPTIMIZER):
        numbered = sorted(path for path in folder.glob(f"{prefix}_*") if (path / _METADATA).is_file())
        if len(numbered) > 1:
            raise CheckpointError(f"{folder} has several models or optimizers ({numbered[1].name}): give one of them")
        found += numbered
    if not found or not found[0].name.startswith(_MODEL):
        raise CheckpointError(
            f"{folder} has no {_METADATA} and no {_MODEL}_0 with one: it is no DCP checkpoint, or its coordinator's file "
            "is missing; copy it from the machine of rank 0"
        )
    return found


def _open(path: Path, allow_pickle: bool) -> _Folder:
    file = path / _METADATA
    try:
        with file.open("rb") as stream:
            metadata = _Metadata(stream).load()
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise needs_pickle(file, str(error)) from error
        metadata = run_plain_pickle(file)
    except Exception as error:  # bytes that are not a pickle can make it raise anything
        raise CheckpointError(f"{file} is damaged: {error!r}") from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file} is not the metadata of a DCP checkpoint, or of an unknown version of it")
    return _Folder(path, metadata, allow_pickle)


def _is_optimizers(path: tuple[Any, ...]) -> bool:
    if "param_groups" in path[:-1] or (len(path) > 2 and path[-3] == "state"):
        return True
    last = str(path[-1])
    return path[-1] == "param_groups" or (len(path) > 1 and last.startswith(("state.", "param_groups.")))


def _add_weights(state: ForeignState, folder: Path, entries: list[_SavedValue]) -> None:
    by_root: dict[tuple[Any, ...], list[_SavedValue]] = {}
    for entry in entries:
        if entry.is_tensor:
            by_root.setdefault(entry.path[:-1], []).append(entry)
    roots = [root for root in by_root if "model" in root] or list(by_root)
    if len(roots) != 1:
        names = [".".join(map(str, root)) or "the top" for root in roots]
        raise CheckpointError(f"{folder}: weights are under {names}: a checkpoint of one model can be imported")
    state.weights = {str(entry.path[-1]): entry.lazy() for entry in by_root[roots[0]]}


def _add_optimizer(state: ForeignState, folder: Path, entries: list[_SavedValue]) -> None:
    groups: dict[int, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    roots = set()
    for entry in entries:
        path = entry.path
        if "param_groups" in path:
            at = path.index("param_groups")
            roots.add(path[:at])
            if len(path) == at + 1:
                groups.update(enumerate(entry.value()))
            else:
                _put(groups.setdefault(path[at + 1], {}), path[at + 2 :], entry.value())
        elif str(path[-1]).startswith("param_groups."):
            roots.add(path[:-1])
            name, _, key = str(path[-1]).removeprefix("param_groups.").rpartition(".")
            flat.setdefault(name, {})[key] = entry.value()
        else:
            is_nested = len(path) > 2 and path[-3] == "state"
            roots.add(path[:-3] if is_nested else path[:-1])
            name, _, key = (path[-2], "", path[-1]) if is_nested else path[-1].removeprefix("state.").rpartition(".")
            _add_state(state, name, key, entry)
    if len(roots) != 1:
        raise CheckpointError(f"{folder} has several optimizers, under {sorted(map(str, roots))}: one can be imported")
    state.groups = _regrouped(flat) if flat else []
    for index, group in sorted(groups.items()):
        state.groups.append(Group([str(n) for n in group["params"]], options_of(group, f"group {index} of {folder}")))


def _put(group: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Set an option of a group; lists with tensors in them were saved entry by entry."""
    if len(path) == 1:
        group[path[0]] = value
    else:
        group.setdefault(path[0], []).append(value)


def _add_state(state: ForeignState, name: str, key: str, entry: _SavedValue) -> None:
    shape = state.weights[name].shape if name in state.weights else None
    if entry.is_tensor and key != "step":
        lazy = entry.lazy()
        if lazy.shape or shape == ():
            state.states.setdefault(name, {})[key] = lazy
            return
    value = entry.value()
    state.numbers.setdefault(name, {})[key] = (step_number if key == "step" else number)(value, f"{key} of {name}")


def _regrouped(flat: dict[str, dict[str, Any]]) -> list[Group]:
    """Groups made from the options of single parameters: those with the same options, in the order of the file."""
    found: dict[str, Group] = {}
    for name, options in flat.items():
        kept = options_of(options, f"the options of {name}")
        found.setdefault(json.dumps(kept, sort_keys=True), Group([], kept)).params.append(name)
    return list(found.values())


def _step(state: ForeignState, folder: Path) -> int:
    """Steps by the Trainer's count, or else by the optimizer's."""
    try:
        return int(json.loads((folder / "trainer_state.json").read_text())["global_step"])
    except FileNotFoundError:
        steps = [entry["step"] for entry in state.numbers.values() if "step" in entry]
        return max((int(step["scalar"]) for step in steps), default=0)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'trainer_state.json'} is damaged: {error!r}") from error
