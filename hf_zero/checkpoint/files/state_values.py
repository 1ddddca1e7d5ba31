"""Values of an optimizer's state other than tensors of a parameter's shape, in JSON that runs no code when it is read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.errors import CheckpointError

SCALAR, _TENSOR, _DICT, _OBJECT = "scalar", "tensor", "dict", "object"


def to_json(value: Any, what: str, keep: Callable[[Tensor, str], str] | None = None) -> Any:
    """Numbers, tuples and tensors of one number keep their types; floats are written with all their digits.

    Args:
        value: a number, word or tensor; lists, mappings and plain objects of such.
        what: it is; tensors in it are kept under this name, with their places added.
        keep: takes a tensor of any shape, and returns the name that it is kept under; None: there is no place for it.

    Raises:
        CheckpointError: it has no safe form.
    """
    if isinstance(value, Tensor):
        if not value.ndim:
            whole = torch_compat.local_of(value)
            return {SCALAR: whole.item(), "dtype": str(value.dtype).removeprefix("torch.")}
        if keep is None or type(value) not in (Tensor, torch.nn.Parameter):
            raise CheckpointError(
                f"{what} is a {type(value).__name__} of shape {tuple(value.shape)}, not of its parameter's: cannot save it"
            )
        return {_TENSOR: keep(value, what)}
    if isinstance(value, tuple | list):
        entries = [to_json(entry, f"{what}.{index}", keep) for index, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"tuple": entries}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is dict and all(isinstance(key, str | int) for key in value):
        return {_DICT: [[key, to_json(entry, f"{what}.{key}", keep)] for key, entry in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if keep is not None and hasattr(value, "__dict__") and not callable(value):
        attributes = [[key, to_json(entry, f"{what}.{key}", keep)] for key, entry in vars(value).items()]
        return {_OBJECT: [type(value).__module__, type(value).__qualname__], "attributes": attributes}
    raise CheckpointError(f"{what} is a {type(value).__name__}, which has no safe form in a file")


def from_json(value: Any, device: torch.device, tensors: Mapping[str, Tensor], optimizer: type) -> Any:
    """What `to_json` was given.

    Args:
        value: from a file.
        device: of tensors of one number.
        tensors: those that `keep` took, by name.
        optimizer: whose state it is; objects in it may be of classes of the same package only.

    Raises:
        CheckpointError: it is damaged, or names a class of another package.
    """

    def made(entry: Any) -> Any:
        return from_json(entry, device, tensors, optimizer)

    if isinstance(value, list):
        return [made(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if SCALAR in value:
        return torch.tensor(value[SCALAR], dtype=getattr(torch, value["dtype"]), device=device)
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _DICT in value:
        return {key: made(entry) for key, entry in value[_DICT]}
    if _OBJECT in value:
        restored: Any = object.__new__(_class_of(value[_OBJECT], optimizer))
        vars(restored).update({key: made(entry) for key, entry in value["attributes"]})
        return restored
    if "tuple" in value:
        return tuple(made(entry) for entry in value["tuple"])
    return getattr(torch, value["dtype"])


def _class_of(name: list[str], optimizer: type) -> type:
    """A class of the package that the optimizer's class, or one of its bases, comes from."""
    module, qualname = name
    packages = {base.__module__.partition(".")[0] for base in optimizer.__mro__} - {"builtins", "torch"}
    if module.partition(".")[0] not in packages:
        raise CheckpointError(f"the state has a {module}.{qualname}, which is not of the optimizer's package: not read")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise CheckpointError(f"the state has a {module}.{qualname}, which is not a class: not read")
    return found


def tensors_of(value: Any) -> list[str]:
    """The names of the tensors that are part of a value in JSON."""
    if isinstance(value, list):
        return [name for entry in value for name in tensors_of(entry)]
    if not isinstance(value, dict):
        return []
    if set(value) == {_TENSOR}:
        return [value[_TENSOR]]
    return [name for entry in value.values() for name in tensors_of(entry)]
