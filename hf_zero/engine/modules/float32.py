"""Modules that compute in float32 while the model computes in half precision: norms, routers of experts, a head.

Parameters that transformers keeps in float32 (`_keep_in_fp32_modules`) stay so too. Their modules get no hooks, since
transformers' own code casts what goes into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.modules.hooks import Hook
from hf_zero.engine.units.named import find_named
from hf_zero.parameters import parameters_of

_HALF = (torch.float16, torch.bfloat16)
# transformers': what it keeps in float32 where a model is loaded in these dtypes.
_KEPT_BY_TRANSFORMERS = {
    "float16": ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    "bfloat16": ("_keep_in_fp32_modules_strict",),
}


def find_modules(model: nn.Module, config: ZeroConfig) -> list[nn.Module]:
    """The outermost modules that `keep_fp32` names, by class or by name.

    Raises:
        ConfigError: an entry fits no module.
    """
    return find_named(model, config.keep_fp32, "keep_fp32")


def kept_parameters(model: nn.Module, config: ZeroConfig) -> set[nn.Parameter]:
    """The parameters that modules see in float32, whatever the compute dtype is."""
    kept = {param for module in find_modules(model, config) for param in parameters_of(module)}
    return kept | set(_kept_by_transformers(model, config))


def _kept_by_transformers(model: nn.Module, config: ZeroConfig) -> Iterator[nn.Parameter]:
    for module in model.modules():
        lists = (getattr(module, name, None) for name in _KEPT_BY_TRANSFORMERS.get(config.compute_dtype, ()))
        names = sorted({name for each in lists for name in each or ()})
        if not names:
            continue
        pattern = re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in names))
        yield from (param for name, param in module.named_parameters() if pattern.search(name))


def compute_in_float32(model: nn.Module, config: ZeroConfig) -> list[Any]:
    """Let the modules that `keep_fp32` names compute in float32; returns the handles of their hooks.

    Half-precision inputs are cast to float32, and autocast is off inside. A single output of the shape of an input gets that
    input's dtype back, as the next module expects it; others stay in float32 (logits, what a router returns).
    """
    handles: list[Any] = []
    for module in find_modules(model, config):
        casts = _Casts()
        handles += [
            module.register_forward_pre_hook(Hook(casts.before), with_kwargs=True),
            module.register_forward_hook(Hook(casts.after), with_kwargs=True, always_call=True),
        ]
    return handles


class _Casts:
    """The hooks of one module."""

    def __init__(self) -> None:
        self._calls: list[tuple[ExitStack, dict[torch.Size, torch.dtype]]] = []  # under way: it may call itself

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        stack = ExitStack()
        for kind in {each.device.type for each in given}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        self._calls.append((stack, {each.shape: each.dtype for each in given if each.dtype in _HALF}))
        cast: tuple[Any, Any] = pytree.tree_map(_widened, (args, kwargs))
        return cast

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._calls:
            return None
        stack, dtypes = self._calls.pop()
        stack.close()
        if not isinstance(output, Tensor) or output.dtype != torch.float32:
            return None
        return output.to(dtypes.get(output.shape, torch.float32))


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf
