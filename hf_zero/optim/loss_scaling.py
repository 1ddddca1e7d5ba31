"""Loss scaling for float16: torch's `GradScaler` with what DeepSpeed's scaler has beside it.

[Note: overflows] All ranks skip a step, or none. A rank whose gradients overflow gives infinite terms to the sums, and every
rank looks at the sums of its own rows. `GradScaler` asks the other ranks, since gradients are `DTensor`s. So any `GradScaler`
works with a partitioned model; the step that it skips is never seen by the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_zero.config.loss_scale import LossScale
from hf_zero.errors import UsageError


class LossScaler(torch.amp.GradScaler):
    """A `GradScaler` that may wait for several overflows, has a smallest scale, or keeps its scale.

    With the defaults of `LossScale` it does what `torch.amp.GradScaler` does.

    Args:
        config: the scale and when it changes.
        device: the type of the device that the loss is on.

    Example:
        scaler = zero.LossScaler(engine.world.config.loss_scale, "cpu")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Raises:
        UsageError: in `update`, on all ranks: gradients overflow at the smallest scale.

    Source: DeepSpeed 0.19, `runtime/fp16/loss_scaler.py` (`DynamicLossScaler`).
    """

    def __init__(self, config: LossScale | None = None, device: str = "cuda") -> None:
        self._config = config or LossScale()
        self._overflows_left = self._config.hysteresis  # until the scale is halved
        super().__init__(device, self._config.initial, growth_interval=self._config.window or 2000)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale after a step, as `GradScaler.update` does."""
        before = self.get_scale()
        super().update(new_scale)
        after = self.get_scale()
        if new_scale is not None or not self.is_enabled():
            return
        if not self._config.is_dynamic:
            super().update(before)
        elif after < before:
            self._after_overflow(before, after)
        elif after > before or self._config.consecutive_hysteresis:
            self._overflows_left = self._config.hysteresis

    def _after_overflow(self, before: float, after: float) -> None:
        if self._overflows_left > 1:
            self._overflows_left -= 1
            super().update(before)
        elif before <= self._config.minimum or after == 0:
            raise UsageError(
                f"the gradients overflow at the smallest loss scale, {before:g}: the model diverges, or its gradients are too "
                "large for float16; lower the learning rate, compute in bfloat16, or lower loss_scale.minimum"
            )
        else:
            super().update(max(after, self._config.minimum))

    def state_dict(self) -> dict[str, Any]:
        """The state of `GradScaler`, and how many overflows are left before the scale is halved."""
        return {**super().state_dict(), "overflows_left": self._overflows_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one that a plain `GradScaler` saved."""
        super().load_state_dict(state_dict)
        self._overflows_left = state_dict.get("overflows_left", self._config.hysteresis)
