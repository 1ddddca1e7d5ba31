"""One way to train a model, as a line of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.plan.activations import Kept
    from hf_zero.plan.memory import Holding, Setting
    from hf_zero.plan.timing.schedule import Played


@dataclass(frozen=True)
class Row:
    """One way to train the model.

    Attributes:
        setting: with its configuration.
        checkpoints: whether activations are computed again.
        holding: what a rank holds; None of its activations are known without a sequence length.
        kept: its activations.
        played: the time of a step, where it is predicted.
    """

    setting: Setting
    checkpoints: bool
    holding: Holding
    kept: Kept
    played: Played | None = None

    @property
    def name(self) -> str:
        """As the table calls it."""
        offload = self.setting.config.offload
        if offload.goes_to_host:
            where = f", {'all' if offload.parameters == 'host' else 'optimizer'} on host"
        else:
            where = ", disk" if offload.is_anything else ""
        return f"stage {self.setting.config.stage}{where}" + (", checkpointing" if self.checkpoints else "")
