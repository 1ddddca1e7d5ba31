"""`load_state_dict` of a partitioned model: whole tensors are cut to this rank's rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.engine.parameters.partitioned_tensor import rows_like
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.grouping import find_parameters
from hf_zero.errors import UsageError


class CutStateDict:
    """Load-state-dict pre-hook of a partitioned model, with an engine or before it has one.

    Values may be whole (each rank keeps its rows; nothing is sent) or sharded. All ranks must load together.
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
        named = [found for found in find_parameters(module) if any(prefix + name in state_dict for name in found.names)]
        if local_metadata.get("assign_to_params_buffers"):
            # What is not partitioned yet (an adapter without values) is nobody's, and may be replaced.
            if not self._world.partitions or any(isinstance(found.param, DTensor) for found in named):
                raise UsageError(
                    "load_state_dict(assign=True) would replace the parameters that the engine and the optimizer hold; "
                    "load without assign, which copies the values"
                )
            return
        if not any(isinstance(found.param, DTensor) for found in named):
            return  # inside GatheredParameters, perhaps on the rank alone whose changes count
        self._world.meet("load_state_dict")  # a rank that still computes may read the values where they lie
        for found in named:
            param = found.param
            if not isinstance(param, DTensor):
                continue
            cut = self._world.cut_of(param)
            for name in found.names:
                value = state_dict.get(prefix + name)
                if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.shape:
                    rows = cut.of(value.detach())
                    state_dict[prefix + name] = rows_like(rows.to(self._world.device), param)

    def __deepcopy__(self, memo: dict[int, Any]) -> CutStateDict:
        return self
