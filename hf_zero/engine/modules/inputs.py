"""Floating inputs in the compute dtype, at the entry of the model and of its units, as FSDP2's `cast_forward_inputs` does it.

Weights are in the compute dtype, and torch's kernels want their inputs in the same. Where autocast is on, it sees to that
itself, operator by operator, and knows better (a loss of targets in float32 stays one): then nothing is cast here.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.modules.float32 import find_modules
from hf_zero.engine.modules.hooks import Hook

_OTHERS = (bool, int, float, str, type(None))  # most often, and torch's trees cost more than the rest of a call's hook


class CastInputs:
    """The pre-hook that casts; registered on the model and on the entries of its units.

    Args:
        model: of one engine.
        config: may switch it off, and names the modules that compute in float32, whose inputs stay as they are.
        dtype: the compute dtype; None if each parameter has its own, where nothing is cast.
    """

    def __init__(self, model: nn.Module, config: ZeroConfig, dtype: torch.dtype | None) -> None:
        self._dtype = dtype if config.cast_forward_inputs else None
        kept = (inner for module in find_modules(model, config) for inner in module.modules())
        self._kept = weakref.WeakSet(kept)

    def register(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Cast what goes into `modules`, before any other hook; returns the handles."""
        if self._dtype is None:
            return []
        once = [module for module in dict.fromkeys(modules) if module not in self._kept]
        return [module.register_forward_pre_hook(Hook(self), with_kwargs=True, prepend=True) for module in once]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The inputs of a call as they are to be; None if they stay as they are."""
        if self._dtype is None or module in self._kept:
            return None
        if not _any(self._is_cast, (args, kwargs)):
            return None
        found: tuple[Any, Any] = _map_tensors(lambda x: x.to(self._dtype) if self._is_cast(x) else x, (args, kwargs))
        return found

    def _is_cast(self, tensor: Tensor) -> bool:
        is_other = tensor.is_floating_point() and tensor.dtype != self._dtype
        return is_other and not torch.is_autocast_enabled(tensor.device.type)


def _any(holds: Callable[[Tensor], bool], tree: Any) -> bool:
    """Whether it holds for any tensor that `_map_tensors` would change."""
    kind = type(tree)
    if kind is Tensor:
        return holds(tree)
    if kind in (tuple, list, dict):
        held = tree.values() if kind is dict else tree
        return True in [_any(holds, each) for each in held if type(each) not in _OTHERS]
    if kind in _OTHERS:
        return False
    if isinstance(tree, Tensor):
        return holds(tree)
    if isinstance(tree, PackedSequence):
        return holds(tree.data)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return any(_any(holds, getattr(tree, field.name)) for field in dataclasses.fields(tree) if field.init)
    leaves = pytree.tree_leaves(tree)
    return not (len(leaves) == 1 and leaves[0] is tree) and _any(holds, leaves)


def _map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with changed tensors, also in dataclasses and packed sequences, which torch's trees do not know."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, PackedSequence):
            return PackedSequence(change(leaf.data), leaf.batch_sizes, leaf.sorted_indices, leaf.unsorted_indices)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{name: _map_tensors(change, getattr(leaf, name)) for name in names})
        return leaf

    return pytree.tree_map(changed, tree)
