"""Which files `save_pretrained` would write for a model, and which pieces of its parameters make up each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.checkpoint.files.pieces import Piece, identity
from hf_zero.checkpoint.files.tensor_file import Source, TensorFile, TensorInfo, layout_file
from hf_zero.checkpoint.files.trace import Tracer
from hf_zero.engine.ranks.world import world_that_cut
from hf_zero.errors import CheckpointError
from hf_zero.layout import RowLayout

WEIGHTS = "model.safetensors"


class NotMovedError(Exception):
    """A conversion computes with weights, so a file's tensors are not just pieces of parameters."""


@dataclass(frozen=True)
class FilePlan:
    """Files, and the pieces of each tensor in them, by its name."""

    files: tuple[TensorFile, ...] = ()
    pieces: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)

    def __add__(self, other: FilePlan) -> FilePlan:
        return FilePlan(self.files + other.files, {**self.pieces, **other.pieces})


def model_sources(model: nn.Module) -> dict[str, Source]:
    """This rank's part of every tensor of a model's state dict.

    Raises:
        NotMovedError: the state dict has values other than tensors.
    """
    sources = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise NotMovedError(f"{name} is a {type(value).__name__}")
        sources[name] = source_of(value)
    return sources


def source_of(value: Tensor) -> Source:
    """This rank's part of one tensor."""
    if isinstance(value, DTensor):
        world = world_that_cut(value)
        cut = world.cut_of(value)
        is_exchanged = world.tensor.num_ranks > 1 or cut.rows.dim > 0
        return Source(torch_compat.local_of(value), cut.rows, cut if is_exchanged else None)
    return Source(value.detach(), RowLayout(tuple(value.shape), 1))


def saves_given_state(model: nn.Module) -> bool:
    """Whether the model has a `save_pretrained` that can be given the values to write, as transformers' and PEFT's can.

    Other libraries' (sentence-transformers, diffusers) read the model itself.
    """
    method = getattr(type(model), "save_pretrained", None)
    return method is not None and (hasattr(model, "peft_config") or "state_dict" in signature(method).parameters)


def plan_model(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None = None,
    infos: Sequence[TensorInfo] | None = None,
    **options: Any,
) -> FilePlan:
    """Find out what `model.save_pretrained(folder)` writes; its small files are written, the weights are not.

    Args:
        model: partitioned or not.
        folder: gets configuration files and, for several files of weights, their index.
        dtype: of floating-point tensors in the files; their own by default.
        infos: of the state dict to save; the model's own by default.
        **options: of `save_pretrained`.

    Raises:
        NotMovedError: a tensor is computed, not moved.
    """
    if not saves_given_state(model):
        return plan_state_dict(model, dtype=dtype)
    tracer = Tracer()
    if infos is None:
        infos = [_info(name, value, dtype) for name, value in model.state_dict().items()]
    whole = {info.name: tracer.source(info.name, info.shape, info.dtype) for info in infos}
    from huggingface_hub.serialization import _torch
    from transformers import modeling_utils

    written: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {}

    def record(tensors: dict[str, Tensor], filename: str, metadata: dict[str, str] | None = None) -> None:
        written[Path(filename).name] = dict(tensors), dict(metadata or {})

    with Changes() as changes, alone(model), tracer:
        changes.replace(modeling_utils, "safe_save_file", record)
        changes.replace(modeling_utils.logging, "tqdm", lambda files, **_: files)
        # Tensors that share a storage go to one file, but huggingface_hub cannot tell the storages of meta tensors apart.
        changes.replace(_torch, "get_torch_storage_id", _storage_of)
        type(model).save_pretrained(model, folder, state_dict=whole, **options)  # type: ignore[attr-defined]
    plan = FilePlan()
    for name, (tensors, metadata) in written.items():
        pieces = {}
        for tensor_name, tensor in tensors.items():
            found = tracer.pieces(tensor)
            if found is None:
                raise NotMovedError(f"{tensor_name} is computed from the parameters, not only moved")
            pieces[tensor_name] = found
        found_in = [TensorInfo(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()]
        plan += FilePlan((layout_file(name, found_in, metadata),), pieces)
    return plan


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Within: `save_pretrained` of a model whose layers are shared over a tensor axis waits for no other rank."""
    config = getattr(model, "config", None)
    with Changes() as changes:
        if getattr(config, "distributed_config", None) is not None:
            changes.replace(config, "distributed_config", None)
        yield


def _storage_of(tensor: Tensor) -> tuple[torch.device, int, int]:
    storage = tensor.untyped_storage()
    return tensor.device, storage._cdata, storage.nbytes()


def plan_one_file(name: str, infos: Sequence[TensorInfo]) -> FilePlan:
    """Tensors under their own names, in one file."""
    pieces = {info.name: (identity(info.name, info.shape),) for info in infos}
    return FilePlan((layout_file(name, infos, {"format": "pt"}),), pieces)


def plan_state_dict(model: nn.Module, name: str = WEIGHTS, dtype: torch.dtype | None = None) -> FilePlan:
    """A state dict under its own names, in one file; a tied tensor is stored under its first name.

    Args:
        model: whose.
        name: of the file.
        dtype: of floating-point tensors in it; their own by default.

    Raises:
        CheckpointError: there is something else than tensors in it.
    """
    seen: dict[int, TensorInfo] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{key!r} of {type(model).__name__} is a {type(value).__name__}, not a tensor")
        seen.setdefault(id(value), _info(key, value, dtype))
    return plan_one_file(name, list(seen.values()))


def _info(name: str, value: Tensor, dtype: torch.dtype | None) -> TensorInfo:
    kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return TensorInfo(name, kind, tuple(value.shape))


def uncovered(model: nn.Module, plan: FilePlan) -> list[str]:
    """Parameters of a model that no file of the plan holds completely; tied ones count once."""
    covered: dict[str, int] = {}
    for pieces in plan.pieces.values():
        for piece in pieces:
            covered[piece.source] = covered.get(piece.source, 0) + piece.numel
    by_tensor: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(param), []).append(name)
    numels = {name: param.numel() for name, param in model.named_parameters(remove_duplicate=False)}
    return [names[0] for names in by_tensor.values() if not any(covered.get(n, 0) == numels[n] for n in names)]
