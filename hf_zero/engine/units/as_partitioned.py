"""How a model was when it was partitioned, to see at a forward whether users have changed it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hf_zero.engine.parameters.records import ZeroParameter, gathered
from hf_zero.engine.units.grouping import Structure
from hf_zero.errors import PartitionError, UsageError
from hf_zero.under_way import is_function_running

CAST_TO = "_zero_cast_to"


class AsPartitioned:
    """The parameters that a model held, where, and in which dtypes."""

    def __init__(self, model: nn.Module, parameters: Sequence[ZeroParameter]) -> None:
        self._structure = Structure(model)
        self._parameters = parameters
        self._has_other_dtypes = False

    def note_cast(self, function: Callable[[Tensor], Tensor]) -> None:
        """`model._apply(function)` is about to run: which dtypes it means parameters to have that rest in another, float32.

        Their rows may be in that dtype already, so that nothing is changed that could be seen.
        """
        wanted: dict[torch.dtype, torch.dtype] = {}
        for p in self._parameters:
            if p.compute_dtype not in wanted:
                wanted[p.compute_dtype] = p.compute_dtype
                with contextlib.suppress(Exception):  # of one that is no cast, and wants values
                    wanted[p.compute_dtype] = function(torch.empty(0, dtype=p.compute_dtype, device="cpu")).dtype
            if wanted[p.compute_dtype] != p.compute_dtype and p.param.is_floating_point():
                setattr(p.param, CAST_TO, wanted[p.compute_dtype])
                self._has_other_dtypes = True

    def has_changed(self, is_model: bool, minds_dtypes: bool) -> bool:
        """Whether the model holds others now, or in other dtypes, and has to be partitioned anew.

        Inside `GatheredParameters`, and in a part that was given other tensors for one call, that can wait.

        Args:
            is_model: whether the model itself is called, not a part of it.
            minds_dtypes: whether other dtypes matter to this forward.

        Raises:
            UsageError: the model has been given other tensors for one call.
            PartitionError: it was cast, and cannot be partitioned anew just now.
        """
        cast = self._cast() if minds_dtypes else None
        if cast is None and self._structure.is_unchanged():
            return False
        if any(id(p.param) in gathered for p in self._parameters):
            can_wait = True
        else:
            can_wait = is_function_running("functional_call")
            if can_wait and is_model:
                raise UsageError(
                    "torch.func.functional_call puts other tensors into the modules of a partitioned model for one call, which "
                    "the engine cannot tell from new parameters: call it on a whole copy (`copy.deepcopy` before shard_model)"
                )
        if can_wait and cast is not None:
            raise PartitionError(
                f"parameter {cast.name!r} was cast from {cast.dtype_at_rest} to {cast.param.dtype} after the model was "
                "partitioned (`model.to(dtype)`, `.half()`, ...): call the model next, outside GatheredParameters; or cast it "
                "before, or set compute_dtype and master_dtype"
            )
        return not can_wait

    def _cast(self) -> ZeroParameter | None:
        """A parameter whose dtype users have changed: `model.double()`, `.half()`."""
        if self._has_other_dtypes and (found := next((p for p in self._parameters if CAST_TO in vars(p.param)), None)):
            return found
        return next((p for p in self._parameters if p.param.dtype != p.dtype_at_rest), None)
