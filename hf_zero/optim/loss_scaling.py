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
        device: the type of the device that the loss is on; by default this machine's accelerator, or the CPU without one.

    Example:
        scaler = zero.LossScaler(engine.world.config.loss_scale, "cpu")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Raises:
        UsageError: in `update`, on all ranks: gradients overflow at the smallest scale. On a device it comes one step later,
            since nothing waits for the step that is queued; until then, steps are skipped.

    Source: DeepSpeed 0.19, `runtime/fp16/loss_scaler.py` (`DynamicLossScaler`).
    """

    def __init__(self, config: LossScale | None = None, device: str | None = None) -> None:
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = "cpu" if accelerator is None else accelerator.type
        self._config, self._on = config or LossScale(), torch.device(device)
        self._left = torch.tensor(self._config.hysteresis, device="cpu")  # overflows until the scale is halved
        self._has_ended: Tensor | None = None  # on the host, once the event has passed
        self._is_known: torch.Event | None = None
        super().__init__(device, self._config.initial, growth_interval=self._config.window or 2000)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale after a step, as `GradScaler.update` does: nothing waits for the device."""
        if new_scale is not None or not self.is_enabled():
            super().update(new_scale)
            return
        self._raise_where_it_has_ended()
        one = torch.ones((), device=self._on)
        before = self.scale(one)
        super().update()
        after = self.scale(one)
        super().update(self._next(before, after) if self._config.is_dynamic else before)
        if self._on.type == "cpu":
            self._raise_where_it_has_ended()

    def _next(self, before: Tensor, after: Tensor) -> Tensor:
        """The scale, where `GradScaler` has made `after` of `before`: smaller if gradients have overflowed."""
        config, left = self._config, self._left.to(before.device, non_blocking=True)
        overflows = after < before
        is_patient = overflows & (left > 1)
        has_ended = overflows & ~is_patient & ((before <= config.minimum) | (after == 0))
        self._tell(has_ended)
        is_anew = ~overflows & ((after > before) | config.consecutive_hysteresis)
        self._left = torch.where(is_patient, left - 1, torch.where(is_anew, config.hysteresis, left))
        halved = torch.where(overflows, after.clamp(min=config.minimum), after)
        return torch.where(is_patient | has_ended, before, halved)

    def _tell(self, has_ended: Tensor) -> None:
        """Let the host know, once the device has come so far."""
        if self._on.type == "cpu":
            self._has_ended = has_ended
            return
        if self._has_ended is None:
            self._has_ended = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
        self._has_ended.copy_(has_ended, non_blocking=True)
        self._is_known = torch.Event(self._on)
        self._is_known.record()

    def _raise_where_it_has_ended(self) -> None:
        if self._is_known is not None:
            self._is_known.synchronize()  # of the step before: what is queued of this one goes on
        if self._has_ended is not None and self._has_ended:
            raise UsageError(
                f"the gradients overflow at the smallest loss scale, {self.get_scale():g}: the model diverges, or its "
                "gradients are too large for float16; lower the learning rate, compute in bfloat16, or lower loss_scale.minimum"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of `GradScaler`, and how many overflows are left before the scale is halved."""
        return {**super().state_dict(), "overflows_left": int(self._left)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one that a plain `GradScaler` saved."""
        super().load_state_dict(state_dict)
        self._left = torch.tensor(state_dict.get("overflows_left", self._config.hysteresis), device="cpu")
