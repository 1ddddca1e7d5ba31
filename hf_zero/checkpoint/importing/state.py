"""A training state that any other library has saved, as an import writes it; and a way to read pickles with care."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, EnumMeta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.files.state_values import SCALAR
from hf_zero.errors import CheckpointError

# How a step was computed on the machine that saved; the optimizer that continues decides this for itself.
_NOT_OPTIONS = {"params", "param_names", "step", "name", "foreach", "fused", "capturable", "differentiable"}
_ADAM = {"exp_avg", "exp_avg_sq"}
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class LazyTensor:
    """A whole tensor that is read on request."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Group:
    """A group of an optimizer: names of parameters in its order, and its options in the form of `optimizer.json`."""

    params: list[str]
    options: dict[str, Any]


@dataclass
class ForeignState:
    """Weights and optimizer of a checkpoint that is not ours, checked, but not read yet.

    Attributes:
        origin: what wrote it, in words.
        folders: where small files are; the first folder that has a file counts.
        step: optimizer steps done.
        world_size: ranks that wrote it.
        stage: of ZeRO, or what comes closest.
        weights: by name in the model's state dict; a tied one only once, if the source says what is tied.
        states: parameter -> state -> tensor of the parameter's shape.
        numbers: parameter -> state -> number, in the form of `optimizer.json`.
        groups: of the optimizer; None if there is none.
        scheduler: its state, if it is not in a file of its own.
    """

    origin: str
    folders: list[Path]
    step: int
    world_size: int
    stage: int
    weights: dict[str, LazyTensor] = field(default_factory=dict)
    states: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] | None = None
    scheduler: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise unless weights, groups and states belong together.

        Raises:
            CheckpointError: a parameter or a state is missing, or has another shape.
        """
        where = self.folders[0]
        names = [name for group in self.groups or [] for name in group.params]
        if len(names) != len(set(names)):
            raise CheckpointError(f"{where}: a parameter is in two groups of the optimizer; the file is damaged")
        for name in names:
            if name not in self.weights:
                raise CheckpointError(f"{where}: the optimizer holds {name!r}, which is not among the weights")
        keys = {key for states in self.states.values() for key in states}
        for name, states in self.states.items():
            if name not in names:
                raise CheckpointError(f"{where}: the state of {name!r} belongs to no group of the optimizer")
            if states.keys() != keys:
                raise CheckpointError(
                    f"{where}: {name!r} has no state {sorted(keys - states.keys())[0]!r}: copy it again"
                )
            for key, state in states.items():
                if state.shape != self.weights[name].shape:
                    raise CheckpointError(
                        f"{where}: state {key!r} of {name!r} has shape {state.shape}, the parameter "
                        f"{self.weights[name].shape}: they are of different checkpoints"
                    )

    def optimizer(self) -> str:
        """The class of torch.optim whose states these are.

        Raises:
            CheckpointError: it is not one that can be imported.
        """
        keys = {key for states in self.states.values() for key in states}
        options = self.groups[0].options if self.groups else {}
        if _ADAM <= keys <= _ADAM | {"max_exp_avg_sq"}:
            return "AdamW" if options.get("decoupled_weight_decay", True) else "Adam"
        if keys <= {"momentum_buffer"} and "momentum" in options:
            return "SGD"
        if not keys and "betas" in options:
            return "AdamW" if options.get("decoupled_weight_decay", True) else "Adam"
        raise CheckpointError(
            f"{self.folders[0]}: the optimizer has states {sorted(keys)}; those of Adam, AdamW and SGD can be imported. "
            "To go on with another one, convert the weights alone"
        )


def number(value: Any, what: str) -> Any:
    """A number, or a list or tuple of them, in the form of `optimizer.json`.

    Raises:
        CheckpointError: it is something else.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return {SCALAR: value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [number(entry, what) for entry in value]}
    if isinstance(value, list):
        return [number(entry, what) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} is a {type(value).__name__}, which cannot be imported: only numbers can")


def step_number(value: Any, what: str) -> Any:
    """A count of steps as torch's optimizers keep it: a tensor of one float."""
    return number(value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu"), what)


def options_of(group: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The options of a group that say what is computed, in the form of `optimizer.json`.

    Raises:
        CheckpointError: torch's optimizers cannot compute this.
    """
    if not group.get("bias_correction", True):
        raise CheckpointError(f"{what} has bias_correction=False, which torch's Adam does not know")
    kept = {key: value for key, value in group.items() if key not in _NOT_OPTIONS and key != "bias_correction"}
    return {key: number(value, f"{key} of {what}") for key, value in kept.items()}


class _Inert:
    """Stands in for an object of a library's class that an import does not look at; none of its code runs."""

    def __init__(self, *args: Any) -> None:
        """Keep nothing."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""


def member_of(kind: Any, name: str) -> Any:
    """Stands in for `getattr` in a pickle, only for members of enumerations, which Python 3.11.0 to 3.11.3 pickle that way.

    Raises:
        UnpicklingError: it is used for something else.
    """
    if isinstance(kind, EnumMeta):
        return kind[name]
    if kind is _Inert:
        return _Inert()
    raise pickle.UnpicklingError("builtins.getattr")


def load_pickle(
    path: Path, allow_pickle: bool, inert: str = "", enums: Mapping[str, type[Enum]] = MappingProxyType({})
) -> Any:
    """Read what `torch.save` wrote, if possible without running code from it; tensors stay in the file.

    Args:
        path: of the file.
        allow_pickle: run its code if there is no other way.
        inert: objects of classes whose full names begin with this are replaced by empty ones.
        enums: full names of those enumerations among them that matter -> what stands in for them.

    Raises:
        CheckpointError: it is missing, damaged, or needs `allow_pickle`.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: copy it from where the checkpoint was written")
    with path.open("rb") as file:
        is_zip = file.read(4) == _ZIP
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) if is_zip else []
        stubs: list[Any] = [(enums.get(name, _Inert), name) for name in unsafe if inert and name.startswith(inert)]
        if "builtins.getattr" in unsafe:
            stubs.append((member_of, "builtins.getattr"))
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            strange = [name for name in unsafe if not (inert and name.startswith(inert))]
            raise needs_pickle(path, ", ".join(strange)) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or was not written by torch: {error}") from error
    return _run_pickle(path, lambda: torch.load(path, map_location="cpu", mmap=is_zip, weights_only=False))


def needs_pickle(path: Path, what: str) -> CheckpointError:
    """The error that says that a file can be read only by running code from it."""
    holds = f" with {what}" if what else ""
    return CheckpointError(
        f"{path} is a pickle{holds}: reading it runs code from the file. If you trust where it comes from, pass --allow-pickle"
    )


def _run_pickle(path: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{path} needs a class that is not installed here ({error}): install its package"
        ) from error
    except Exception as error:  # its own code may raise anything
        raise CheckpointError(f"{path} is damaged: {error!r}") from error


def run_plain_pickle(path: Path) -> Any:
    """Read a pickle that is not torch's, running any code in it; only with the user's consent.

    Raises:
        CheckpointError: it is damaged, or needs a class that is not installed.
    """
    with path.open("rb") as file:
        return _run_pickle(path, lambda: pickle.load(file))
