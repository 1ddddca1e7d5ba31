"""Parameters as they were before their model was partitioned: whoever still holds one and uses it is told.

[Note: what the model no longer uses] Partitioning puts other objects into a model's modules. A closure, a list, a
`functools.partial`, a private attribute or an optimizer may hold a parameter from before. Used on, it would be stale after
the first step, and its gradient would be nobody's. So what has been replaced gets a class whose every use raises, and gives
its memory back. It stays an object that can be held, compared by `is`, hashed, printed and copied, and knows what it was
replaced by, so that optimizers can be bound anew. What lies below torch's overrides (a graph that was made before) finds NaN,
and a backward that reaches it raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.engine.parameters.at_rest.root import AtRest
from hf_zero.errors import PartitionError

_NOW = "_zero_now"
_FACTS = frozenset(("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex"))
_FACTS_READ = frozenset(("shape", "ndim", "dtype", "device"))


class Replaced:
    """What a parameter is turned into when another has taken its place; mixed with the class that it had."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise, but for facts that still hold: who walks over all objects of a process asks for them."""
        name = getattr(func, "__name__", "")
        if name in _FACTS or (name == "__get__" and _attribute(func) in _FACTS_READ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        refuse(next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Replaced)))

    def __repr__(self) -> str:
        return f"Replaced(shape={tuple(cast(Tensor, self).shape)}, by={_name_of(cast(Tensor, self))})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replaced:
        """Itself: a copied model may hold it, as long as it is not used."""
        return self


def replace(old: nn.Parameter, now: nn.Parameter) -> None:
    """Let every use of `old` raise, and its memory go: the model holds `now` instead."""
    if old is now or isinstance(old, Replaced):
        return
    name = functools.partial(_name_of, now)
    with torch.no_grad():
        old.grad = None
        old._backward_hooks = None  # they have gone along
        if old.requires_grad:
            old.register_hook(functools.partial(_refuse_gradient, name))  # type: ignore[no-untyped-call]
        if isinstance(old, DTensor):
            torch_compat.set_local(old, _no_values(torch_compat.local_of(old)))
        else:
            old.data = _no_values(old.data)
    setattr(old, _NOW, now)
    old.__class__ = _replaced_class(type(old))


def note_replaced(old: nn.Parameter, now: nn.Parameter) -> None:
    """Let `old` stay what it is, a plain copy; an optimizer that holds it is told that the model holds `now`."""
    setattr(old, _NOW, now)


def current(param: Tensor) -> Tensor:
    """What the model holds in place of a parameter now: itself, if it has not been replaced."""
    while is_replaced(param):
        param = vars(param)[_NOW]
    return param


@functools.cache
def _replaced_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return cast("type[nn.Parameter]", type("Replaced", (Replaced, kind), {"__module__": __name__}))


def _no_values(like: Tensor) -> Tensor:
    """A tensor of the same shape, of one element of memory."""
    value = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def _attribute(getter: Callable[..., Any]) -> str:
    return getattr(getattr(getter, "__self__", None), "__name__", "")


def is_replaced(param: object) -> bool:
    """Whether the model holds another parameter in its place; states of an optimizer may have other keys."""
    return isinstance(param, Tensor) and _NOW in vars(param)


def _name_of(param: Tensor) -> str:
    now = current(param)
    return (now.describe() if isinstance(now, AtRest) else f"a parameter of shape {tuple(now.shape)}").removeprefix(
        "parameter "
    )


def _refuse_gradient(name: Callable[[], str], gradient: Tensor) -> NoReturn:
    raise PartitionError(
        f"a graph that was made before the model was partitioned has a gradient for {name()}, {_ADVICE}"
    )


def refuse(param: Any) -> NoReturn:
    """Raise: a parameter is used that has been replaced."""
    raise PartitionError(
        f"{_name_of(param)} is used as it was before the model was partitioned, kept in an optimizer, a list, a closure or an "
        f"attribute, {_ADVICE}"
    )


_ADVICE = (
    "but the model no longer uses that: it would be stale, and its gradient lost. Read the parameter from its module where it "
    "is used"
)
