"""Which optimizers may compute on rows alone, which need whole parameters, and whose step minds all."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")
OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])

# Classes whose `step` computes each element from that element of the gradient and of the state, and from numbers that
# are the same for all parameters. All of them are run beside one process by the tests.
_ELEMENTWISE = {
    *(
        f"torch.optim.{name.lower()}.{name}"
        for name in (
            "Adadelta",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "SGD",
        )
    ),
    "lion_pytorch.lion_pytorch.Lion",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree",
    "schedulefree.radam_schedulefree.RAdamScheduleFree",
    "schedulefree.sgd_schedulefree.SGDScheduleFree",
}
_marked: weakref.WeakSet[type] = weakref.WeakSet()

# Packages whose optimizers leave a parameter without a gradient alone, so that its values need not travel.
_LEAVES_ALONE = ("torch.optim.", "transformers.", "bitsandbytes.", "pytorch_optimizer.")


def mark_elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Let optimizers of a class step on each rank's rows alone, which costs no exchange; also a class decorator.

    Args:
        optimizer_class: computes every element of a parameter only from that element of the gradient and of its states
            (which have the parameter's shape), and from numbers that are the same for all parameters. Norms, means,
            factorisations and indices are not elementwise.

    Returns:
        The class.
    """
    _marked.add(optimizer_class)
    return optimizer_class


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class is known, or marked, to compute each element for itself; so are those it wraps."""
    kind = type(optimizer)
    if not all(map(is_elementwise, wrapped_optimizers(optimizer))):
        return False
    for base in kind.__mro__:
        if base in _marked or f"{base.__module__}.{base.__qualname__}" in _ELEMENTWISE:
            return True
        if _computes(base):
            return False
    return False


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is of a class that is known to compute each element for itself, and not of one derived from it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _ELEMENTWISE


def _computes(kind: type) -> bool:
    """Whether a class has methods of its own that a step may run; torch gives every class its wrapped `step`."""
    for name, value in vars(kind).items():
        if not inspect.isfunction(value) or (name.startswith("__") and name.endswith("__")):
            continue
        if inspect.unwrap(value).__qualname__.startswith(f"{kind.__qualname__}."):
            return True
    return False


def wrapped_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that are attributes of this one, or in its lists and dicts."""
    return _held(optimizer, torch.optim.Optimizer)


def kept_models(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The modules that are attributes of an optimizer, or in its lists and dicts."""
    return _held(optimizer, nn.Module)


def _held(optimizer: torch.optim.Optimizer, kind: type[T]) -> list[T]:
    found = []
    for name, value in vars(optimizer).items():
        if name == "state":
            continue  # an entry a parameter
        values = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)
        found += [entry for entry in values if isinstance(entry, kind)]
    return list(dict.fromkeys(found))


def in_slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """What an optimizer has in `__slots__`."""
    for base in type(optimizer).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(optimizer, name):
                yield name, getattr(optimizer, name)


def is_beside(key: str, value: object, num_params: int) -> bool:
    """Whether an entry of a group is a list that goes along with its parameters, such as their names."""
    return type(value) is list and len(value) == num_params and (key == "param_names" or num_params > 3)


def kept_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer keeps in attributes, beside its groups and states."""
    found: list[torch.Tensor] = []
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state"):
            _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple | set | deque | dict) and id(value) not in seen:
        seen.add(id(value))
        for entry in (*value, *value.values()) if isinstance(value, dict) else value:
            _collect(entry, found, seen)


def minds_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer, or one that it wraps, may change parameters that have no gradient."""
    kinds = {type(each).__module__ for each in (optimizer, *wrapped_optimizers(optimizer))}
    return not all(kind.startswith(_LEAVES_ALONE) for kind in kinds)


def step_of(optimizer: torch.optim.Optimizer) -> Any:
    """The `step` of an optimizer's class as its author wrote it, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
