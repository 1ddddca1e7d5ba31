"""Hooks of partitioned parameters, which autograd never reaches: the engine calls them.

[Note: who holds hooks] A node of the graph that an engine holds holds the parameter, unseen by Python's collector. If the
parameter held its hooks in turn, one that knows the model would keep model, engine and process groups alive for ever. So
the engine holds the hooks, and the parameter a weak reference to them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_zero.errors import UsageError

HOOKS = _BEFORE, _AFTER = (
    "_zero_hooks",
    "_zero_post_hooks",
)  # before a gradient is reduced; after it was added to `.grad`


def grad_hooks(param: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """What `register_hook` has been given for a parameter that autograd never reaches."""
    return [*_kept(param, _BEFORE).values(), *(param._backward_hooks or {}).values()]


def have_grad_hooks(params: Iterable[Tensor]) -> bool:
    """Whether any of the parameters has `grad_hooks`."""
    hooks = [param._backward_hooks or (_BEFORE in vars(param) and _kept(param, _BEFORE)) for param in params]
    return any(hooks)


def post_accumulate_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """What `register_post_accumulate_grad_hook` has been given for a parameter that autograd never reaches."""
    known: Any = getattr(param, "_post_accumulate_grad_hooks", None)
    kept = _kept(param, _AFTER).values() if _AFTER in vars(param) else ()
    return [*kept, *(known or {}).values()]


def those_hooked_after(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that may have `post_accumulate_hooks`."""
    return [p for p in params if _AFTER in vars(p) or getattr(p, "_post_accumulate_grad_hooks", None)]


def take_hooks_along(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let `new`, which takes the place of `old`, have its hooks; their handles remove them there."""
    for name, known in ((_BEFORE, "_backward_hooks"), (_AFTER, "_post_accumulate_grad_hooks")):
        hooks = getattr(old, known, None)
        if hooks:
            for hook in hooks.values():
                _refuse_fused_step(hook)
            setattr(new, name, hooks)


def register(param: Tensor, name: str, hook: Any, holder: list[Any] | None) -> RemovableHandle:
    """Keep a hook, as `HOOKS` names them, of a parameter that autograd never reaches.

    Args:
        param: at rest.
        name: of the kind of hooks.
        hook: the user's.
        holder: where its engine holds hooks; None: it has none yet.

    Raises:
        UsageError: it would change parameters in the backward.
    """
    _refuse_fused_step(hook)
    hooks = _kept(param, name)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    setattr(param, name, hooks)
    if holder is not None:
        let_hold(holder, param)
    return handle


def let_hold(holder: list[Any], param: Tensor) -> None:
    """Let an engine hold the hooks of a parameter from now on, see [Note: who holds hooks]."""
    for name in HOOKS:
        if hooks := _kept(param, name):
            if all(held is not hooks for held in holder):
                holder.append(hooks)
            setattr(param, name, weakref.ref(hooks))


def hold_again(param: Tensor) -> None:
    """Let a parameter hold its hooks itself: its engine is closed."""
    for name in HOOKS:
        if hooks := _kept(param, name):
            setattr(param, name, hooks)


def _kept(param: Tensor, name: str) -> OrderedDict[int, Any]:
    known = vars(param).get(name)
    hooks = known() if isinstance(known, weakref.ref) else known
    return OrderedDict() if hooks is None else hooks


def _refuse_fused_step(hook: Any) -> None:
    """LOMO changes parameters in gradient hooks, where a rank has only its own gradient, and never takes a step."""
    name = getattr(hook, "__qualname__", "")
    if name.startswith(("Lomo.", "AdaLomo.")):
        raise UsageError(
            f"{name.partition('.')[0]} changes parameters while the backward runs, when gradients are not reduced yet: use "
            "another optimizer (AdamW, Adafactor, ...), or stage 0"
        )
