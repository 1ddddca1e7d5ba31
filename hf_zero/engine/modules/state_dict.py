"""`load_state_dict` of a partitioned model: whole tensors are cut to this rank's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.engine.parameters.at_rest.given import note_given
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.partitioned_tensor import rows_like
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.grouping import find_parameters
from hf_zero.errors import UsageError


class CutStateDict:
    """Load-state-dict pre-hook of a partitioned model, with an engine or before it has one.

    Values may be whole (each rank keeps its rows; nothing is sent) or sharded. All ranks load together; what one loads alone
    is an edit of its own, see [Note: edits alone]. With `assign=True` the values are copied too: the parameters that the engine
    and optimizers hold stay.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Cut the whole tensors of a state dict to this rank's rows."""
        assigns = bool(local_metadata.get("assign_to_params_buffers"))
        named = [found for found in find_parameters(module) if any(prefix + name in state_dict for name in found.names)]
        held = [found for found in named if self._is_held(found.param, assigns)]
        if not held:
            return  # inside GatheredParameters, perhaps on the rank alone whose changes count
        is_alone = self._world.serving.edits_alone()
        if not is_alone:
            self._world.meet("load_state_dict")  # a rank that still computes may read the values where they lie
        for found in held:
            param = found.param
            for key in [prefix + name for name in found.names if prefix + name in state_dict]:
                value = state_dict[key]
                if isinstance(value, Tensor) and value.shape == param.shape:
                    state_dict[key] = (
                        self._assigned(param, value, key, not is_alone)
                        if assigns
                        else self._rows(param, value, not is_alone)
                    )

    def _is_held(self, param: nn.Parameter, assigns: bool) -> bool:
        """Whether the engine holds it: what is not partitioned yet (an adapter without values) may be replaced."""
        return isinstance(param, DTensor) or (assigns and not self._world.partitions and not param.is_meta)

    def _rows(self, param: nn.Parameter, value: Tensor, notes: bool) -> Tensor:
        """This rank's; `notes` what all ranks load, so that it can be compared: see [Note: given wholes]."""
        if isinstance(value, DTensor):
            return value
        rows = rows_like(self._world.cut_of(param).of(value.detach()).to(param.device), param)
        if notes and isinstance(rows, Root):
            note_given(rows, value, True)
        return rows

    def _assigned(self, param: nn.Parameter, value: Tensor, key: str, notes: bool) -> nn.Parameter:
        """The parameter itself, which torch then puts where it is."""
        if value.dtype not in (param.dtype, getattr(param, "_zero_made_in", param.dtype)):
            raise UsageError(
                f"load_state_dict(assign=True) would change {key!r} from {param.dtype} to {value.dtype}, which is partitioned: "
                "load without assign, which casts the values"
            )
        with torch.no_grad():
            param.copy_(self._rows(param, value, notes) if isinstance(param, DTensor) else value)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> CutStateDict:
        return self
