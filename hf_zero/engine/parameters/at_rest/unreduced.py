"""Gradients that wait for their reduction, under `no_sync` in stage 1."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.engine.parameters.at_rest.operators import writes_of
from hf_zero.engine.parameters.at_rest.root import AtRest
from hf_zero.engine.parameters.at_rest.rule import run


@torch_compat.dispatch_by_class
class UnreducedGradient(DTensor):
    """What `.grad` is under `no_sync` in stage 1: this rank's whole gradient, with the placement `Partial`.

    What users compute of it is their rank's own, and plain, as under DDP.
    """

    @classmethod
    def over(cls, whole: Tensor, parameter: DTensor, averages: bool) -> UnreducedGradient:
        """A gradient of the shape of `parameter` over this rank's own `whole`."""
        plain = torch_compat.wrap_partial(whole, parameter, averages)
        return cast(UnreducedGradient, cls.__new__(cls, plain._local_tensor, plain._spec, requires_grad=False))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return cls.__new__(cls, args[0]._local_tensor, args[0]._spec, requires_grad=False)
        written = [t for i, _ in writes_of(func) if i < len(args) for t in pytree.tree_leaves(args[i])]
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._local_tensor, (args, kwargs))
        result = (
            run(func, args, kwargs)
            if any(isinstance(t, AtRest) for t in pytree.tree_leaves(args))
            else func(*args, **kwargs)
        )
        return written[0] if written and isinstance(result, Tensor) else result
