"""Methods other than `forward` that compute with parameters."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from hf_zero.errors import UsageError


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let `module.<name>(...)` see whole parameters, as `module(...)` does.

    Calling a module runs the hooks that make its parameters whole; calling one of its other methods does not. Methods
    that only call submodules need nothing. A registered method runs as if it were the module's `forward`, hooks
    included; register it on the module whose parameters it reads, before or after the model is partitioned.

    Args:
        module: a unit's module (a block, an embedding, the head) or the model.
        name: the method's name; a second registration does nothing.

    Raises:
        UsageError: there is no such method.
    """
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        raise UsageError(f"{type(module).__name__} has no method {name!r} to register")
    if not isinstance(method, _Method):
        module.__dict__[name] = _Method(module, method)


class _Method:
    """A method that runs as its module's `forward`; a deep copy of the module gets one of its own."""

    def __init__(self, module: nn.Module, method: Any) -> None:
        functools.update_wrapper(self, method)
        self._module = module
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `nn.Module.__call__` runs the hooks around whatever stands under `forward`.
        module = self._module
        before = module.__dict__.get("forward")

        def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
            _restore_forward(module, before)
            return self._method(*inner_args, **inner_kwargs)

        module.__dict__["forward"] = run
        try:
            return module(*args, **kwargs)
        finally:
            _restore_forward(module, before)


def _restore_forward(module: nn.Module, before: Any) -> None:
    if before is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = before
