"""An optimizer's state as whole tensors by parameter name (`<parameter>.<state>`), with numbers and groups in JSON.

Torch's own form is numbered by position and holds one rank's rows; this form does not depend on ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.checkpoint.model_plan import Plan, source_of
from hf_zero.checkpoint.pieces import identity
from hf_zero.checkpoint.tensor_file import Source, TensorFile, TensorInfo, layout_file, read_layout
from hf_zero.errors import CheckpointError

SCALAR = "scalar"


def state_files(prefix: str) -> tuple[str, str]:
    """The names of the files of tensors and of numbers."""
    return f"{prefix}.safetensors", f"{prefix}.json"


def _names(model: nn.Module) -> dict[int, str]:
    return {id(param): name for name, param in model.named_parameters()}


def _named_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names = _names(model)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [tuple(param.shape) for param in group["params"] if id(param) not in names]
        if strange:
            raise CheckpointError(
                f"group {number} of the optimizer holds a parameter of shape {strange[0]} that is not the model's: its "
                "state has no name to be saved under"
            )
        groups.append([names[id(param)] for param in group["params"]])
    return groups


def capture(
    optimizer: torch.optim.Optimizer, model: nn.Module, prefix: str
) -> tuple[Plan, dict[str, Source], dict[str, Any]]:
    """What an optimizer's state consists of.

    Args:
        optimizer: of any class whose states have the shape of their parameters, or are numbers.
        model: names the parameters.
        prefix: of the files' names.

    Returns:
        The file of tensors, this rank's part of them, and what goes into JSON.

    Raises:
        CheckpointError: a state has another shape.
    """
    by_name = dict(model.named_parameters())
    groups = _named_groups(optimizer, model)
    sources: dict[str, Source] = {}
    infos = []
    numbers: dict[str, dict[str, Any]] = {}
    for name in (name for group in groups for name in group):
        param = by_name[name]
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.ndim and value.shape == param.shape:
                full = f"{name}.{key}"
                sources[full] = source_of(value)
                infos.append(TensorInfo(full, value.dtype, tuple(value.shape)))
            else:
                numbers.setdefault(name, {})[key] = _to_json(value, f"{name}.{key}")
    options = [
        {key: _to_json(value, f"{key} of group {number}") for key, value in group.items() if key != "params"}
        for number, group in enumerate(optimizer.param_groups)
    ]
    content = {
        "optimizer": type(_inner(optimizer)).__name__,
        "groups": [{"params": names, "options": o} for names, o in zip(groups, options, strict=True)],
        "numbers": numbers,
    }
    plan = Plan((layout_file(state_files(prefix)[0], infos, {"format": "pt"}),), _whole(infos))
    return plan, sources, content


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _whole(infos: list[TensorInfo]) -> dict[str, Any]:
    return {info.name: (identity(info.name, info.shape),) for info in infos}


def _to_json(value: Any, what: str) -> Any:
    """Numbers, tuples and tensors of one number keep their types; floats are written with all their digits."""
    if isinstance(value, Tensor):
        if value.ndim:
            raise CheckpointError(
                f"{what} has shape {tuple(value.shape)}, which is not its parameter's: cannot save it"
            )
        whole = torch_compat.local_of(value)
        return {SCALAR: whole.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(entry, what) for entry in value]}
    if isinstance(value, list):
        return [_to_json(entry, what) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} is a {type(value).__name__}, which has no safe form in a file")


def _from_json(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict) and SCALAR in value:
        return torch.tensor(value[SCALAR], dtype=getattr(torch, value["dtype"]), device=device)
    if isinstance(value, dict):
        return tuple(_from_json(entry, device) for entry in value["tuple"])
    if isinstance(value, list):
        return [_from_json(entry, device) for entry in value]
    return value


class LoadedState:
    """The state of one optimizer in a checkpoint: checked first, then read.

    Args:
        folder: of the checkpoint.
        prefix: of the files' names.
        optimizer: of the class that was saved; holds the same parameters in the same groups.
        model: names the parameters.

    Raises:
        CheckpointError: the state is missing, or belongs to another optimizer; nothing has been changed.
    """

    def __init__(self, folder: Path, prefix: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._folder, self._optimizer, self._model = folder, optimizer, model
        tensors, numbers = (folder / name for name in state_files(prefix))
        for path in (tensors, numbers):
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, so the optimizer cannot go on; to start with a fresh one, load the weights alone"
                )
        self.file: TensorFile = read_layout(tensors)
        try:
            self._content = json.loads(numbers.read_text())
            self._check(numbers)
        except CheckpointError:
            raise
        except Exception as error:  # of any kind: it must not surface while the state is being installed
            raise CheckpointError(f"{numbers} is damaged: {error!r}") from error

    def _check(self, path: Path) -> None:
        kind = type(_inner(self._optimizer)).__name__
        if self._content["optimizer"] != kind:
            raise CheckpointError(f"{path} is the state of {self._content['optimizer']}, but this is {kind}")
        saved, ours = (
            [group["params"] for group in self._content["groups"]],
            _named_groups(self._optimizer, self._model),
        )
        for number in range(max(len(saved), len(ours))):
            left, right = (groups[number] if number < len(groups) else [] for groups in (saved, ours))
            if left != right:
                other = sorted(set(left) ^ set(right)) or ["their order"]
                raise CheckpointError(
                    f"{path}: group {number} holds other parameters than this optimizer's: {other[0]}"
                )
        for values in (*(group["options"] for group in self._content["groups"]), *self._content["numbers"].values()):
            for value in values.values():
                _from_json(value, torch.device("cpu"))
        shapes = {name: tuple(param.shape) for name, param in self._model.named_parameters()}
        for tensor in self.file.tensors:
            name = tensor.name.rpartition(".")[0]
            if shapes.get(name) != tensor.shape:
                raise CheckpointError(
                    f"{self._folder / self.file.name}: {tensor.name!r} has shape {tensor.shape}, its parameter "
                    f"{shapes.get(name, 'is not in this model')}"
                )

    def install(self) -> tuple[Plan, dict[str, Source]]:
        """Give the optimizer its numbers and empty states; the caller reads this rank's rows into what is returned."""
        by_name = dict(self._model.named_parameters())
        optimizer = _inner(self._optimizer)
        optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, self._content["groups"], strict=True):
            on_device = bool(group.get("fused") or group.get("capturable"))
            for key, value in saved["options"].items():
                group[key] = _from_json(value, torch.device("cpu"))
            for name in saved["params"]:
                self._install_numbers(optimizer, by_name[name], self._content["numbers"].get(name, {}), on_device)
        sources: dict[str, Source] = {}
        for tensor in self.file.tensors:
            name, _, key = tensor.name.rpartition(".")
            param = by_name[name]
            layout = source_of(param).layout
            rows = torch.empty_like(torch_compat.local_of(param), dtype=tensor.dtype)
            optimizer.state[param][key] = torch_compat.wrap_like(rows, param) if isinstance(param, DTensor) else rows
            sources[tensor.name] = Source(rows, layout)
        return Plan((self.file,), _whole(list(self.file.tensors))), sources

    @staticmethod
    def _install_numbers(optimizer: Any, param: Tensor, numbers: Mapping[str, Any], on_device: bool) -> None:
        for key, value in numbers.items():
            is_counter = key == "step" and not on_device  # torch then keeps it on the CPU
            made = _from_json(value, torch.device("cpu") if is_counter else param.device)
            if isinstance(made, Tensor) and not is_counter and isinstance(param, DTensor) and key != "step":
                made = torch_compat.wrap_like(made, param)  # a scalar parameter's moment
            optimizer.state[param][key] = made
