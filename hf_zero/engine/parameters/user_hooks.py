"""Hooks of partitioned parameters, which autograd never reaches: the engine calls them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_zero.errors import UsageError


def grad_hooks(param: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """What `register_hook` has been given for a parameter that autograd never reaches."""
    return [*vars(param).get("_zero_hooks", {}).values(), *(param._backward_hooks or {}).values()]


def has_grad_hooks(param: Tensor) -> bool:
    """Whether there are any `grad_hooks`."""
    return bool(vars(param).get("_zero_hooks") or param._backward_hooks)


def post_accumulate_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """What `register_post_accumulate_grad_hook` has been given for a parameter that autograd never reaches."""
    known: Any = getattr(param, "_post_accumulate_grad_hooks", None)
    return [*vars(param).get("_zero_post_hooks", {}).values(), *(known or {}).values()]


def take_hooks_along(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let `new`, which takes the place of `old`, have its hooks; their handles remove them there."""
    for name, known in (("_zero_hooks", "_backward_hooks"), ("_zero_post_hooks", "_post_accumulate_grad_hooks")):
        hooks = getattr(old, known, None)
        if hooks:
            for hook in hooks.values():
                _refuse_fused_step(hook)
            setattr(new, name, hooks)


def register(tensor: Tensor, name: str, hook: Any) -> RemovableHandle:
    """Keep a hook in the attribute `name` of a parameter that autograd never reaches.

    Raises:
        UsageError: it would change parameters in the backward.
    """
    _refuse_fused_step(hook)
    hooks = vars(tensor).setdefault(name, OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse_fused_step(hook: Any) -> None:
    """LOMO changes parameters in gradient hooks, where a rank has only its own gradient, and never takes a step."""
    name = getattr(hook, "__qualname__", "")
    if name.startswith(("Lomo.", "AdaLomo.")):
        raise UsageError(
            f"{name.partition('.')[0]} changes parameters while the backward runs, when gradients are not reduced yet: use "
            "another optimizer (AdamW, Adafactor, ...), or stage 0"
        )
