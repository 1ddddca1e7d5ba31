"""Parameters as they were before their model was partitioned: whoever still holds one uses what has taken its place.

[Note: what the model no longer uses] Partitioning puts other objects into a model's modules. A list that is clipped, a
closure, a `functools.partial`, a private attribute or an optimizer may hold a parameter from before; under DDP that would be
the model's own. So what has been replaced gets a class whose every use is one of the parameter that the model holds now, and
gives its memory back. It stays an object that can be held, compared by `is`, hashed and printed; a deep copy of it is one of
what the model holds, and a module that is given it registers that. Optimizers are bound anew. What lies below torch's overrides
(a graph that was made before) finds NaN, and a backward that reaches it raises.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.engine.parameters.at_rest.root import AtRest
from hf_zero.engine.parameters.whole import attributes_of_users, is_of_users
from hf_zero.errors import PartitionError

_changes = Changes()
_NOW = "_zero_now"
_followers: list[Callable[[nn.Parameter, nn.Parameter], None]] = []
_ACCESSES: dict[str, Callable[..., Any]] = {"__get__": getattr, "__set__": setattr, "__delete__": delattr}


class Replaced:
    """What a parameter is turned into when another has taken its place; mixed with the class that it had."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it on what has taken the place, whose class may have methods and attributes of its own."""
        given, named = pytree.tree_map_only(Replaced, current, (args, kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _ACCESSES and (attribute := _attribute(func)):
            return _ACCESSES[name](given[0], attribute, *given[1 : 2 if name == "__set__" else 1])
        if given and getattr(Tensor, name, None) is func:
            return getattr(given[0], name)(*given[1:], **named)
        return func(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == _NOW:
            raise AttributeError(name)
        return getattr(current(cast(Tensor, self)), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name) or not is_of_users(name):
            super().__setattr__(name, value)
        else:
            setattr(current(cast(Tensor, self)), name, value)

    def __repr__(self) -> str:
        return f"Replaced(shape={tuple(cast(Tensor, self).shape)}, by={_name_of(cast(Tensor, self))})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy of what has taken its place: in a copied model, what its module holds."""
        return copy.deepcopy(current(cast(Tensor, self)), memo)


def when_replaced(follow: Callable[[nn.Parameter, nn.Parameter], None]) -> Callable[[nn.Parameter, nn.Parameter], None]:
    """Call a function with a parameter and the one that takes its place, whenever one does; a decorator."""
    _followers.append(follow)
    return follow


def replace(old: nn.Parameter, now: nn.Parameter) -> None:
    """Let every use of `old` be one of `now`, which the model holds instead, and its memory go."""
    if old is now or isinstance(old, Replaced):
        return
    _register_what_is_current()
    for follow in _followers:
        follow(old, now)
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
    for attribute in attributes_of_users(old):
        if attribute in vars(now):
            delattr(old, attribute)
    setattr(old, _NOW, now)
    old.__class__ = _replaced_class(type(old))


def _register_what_is_current() -> None:
    """Let a module that is given what has been replaced register what has taken its place, from now on."""
    if not _changes:
        _changes.keep()
        _changes.also(register_module_parameter_registration_hook(cast(Any, _what_is_current)).remove)


def _what_is_current(module: nn.Module, name: str, param: Tensor | None) -> Tensor | None:
    return current(param) if isinstance(param, Tensor) and isinstance(param, Replaced) else None


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
        f"a graph that was made before the model was partitioned has a gradient for {name()}, but the model no longer uses "
        "what it was made of: run the forward again"
    )
