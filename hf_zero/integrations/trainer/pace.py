"""When to save, so that saving takes a given share of the time: what a crash costs is then bounded by what saving costs."""

from __future__ import annotations

import math
import os
import re
import time
from typing import Any

from hf_zero.engine.ranks.world import World
from hf_zero.errors import ConfigError

VARIABLE = "HF_ZERO_SAVE_EVERY"  # for scripts whose arguments have no field for it
_FIRST = 10  # steps until the first save, whose cost is not known before


def share_of_time(args: Any) -> float | None:
    """The share of the time that saving may take, 0 to 1; None if steps alone decide.

    Raises:
        ConfigError: it is no percentage, or the best of the evaluated steps is to be kept, which such steps are not.
    """
    text = getattr(args, "zero_save_every", None) or os.environ.get(VARIABLE)
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if found is None or not 0 < float(found[1]) < 100:
        raise ConfigError(f"zero_save_every is {text!r}: give the share of the time that saving may take, such as 2%")
    if args.load_best_model_at_end:
        raise ConfigError(
            f"zero_save_every is {text}, so steps that were evaluated need not be saved: leave out load_best_model_at_end, or "
            "save by save_steps"
        )
    return float(found[1]) / 100


class Pace:
    """Decides at which steps to save. Ranks agree once a save, never in between.

    Args:
        share: of the time that may go into saving.
        world: the ranks.
        step: at which the training begins.
    """

    def __init__(self, share: float, world: World, step: int) -> None:
        self._share, self._world = share, world
        self._since, self._since_s = step, time.monotonic()
        self._next = step + _FIRST

    def is_due(self, step: int) -> bool:
        """Whether to save after this step; the same on all ranks."""
        return step >= self._next

    def saved(self, step: int, took_s: float) -> None:
        """A save is done, for whatever reason; called by all ranks.

        Args:
            step: that was saved.
            took_s: seconds that training stood still.
        """
        now = time.monotonic()
        a_step_s = max(now - self._since_s - took_s, 1e-6) / max(step - self._since, 1)
        distance = math.ceil(took_s * (1 / self._share - 1) / a_step_s)
        self._next = step + max(1, self._world.share(distance, "the steps until the next save"))
        self._since, self._since_s = step, now
