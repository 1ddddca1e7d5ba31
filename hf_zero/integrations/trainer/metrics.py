"""What a training under the Trainer waits for and receives, for whatever tracker the run has; and which rank is slow."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from hf_zero.comm.ledger import Ledger
from hf_zero.engine.engine import ZeroEngine
from hf_zero.plan.summary import peak_of

logger = logging.getLogger(__name__)

_EVERY = 50  # steps, after which ranks compare how long they have waited
_MUCH = 0.1  # of the time
_ON_THE_WAY = ("gather", "reduce", "all_reduce")  # kinds that carry parameters and gradients begin so


@dataclass(frozen=True)
class _Mark:
    """Sums at some step of this rank."""

    step: int
    at_s: float
    num_bytes: int
    waited_s: float
    exposed_s: float

    @classmethod
    def of(cls, ledger: Ledger, step: int) -> _Mark:
        total = ledger.total()
        exposed_s = sum(ledger.total(kind).seconds for kind in ledger.kinds() if kind.startswith(_ON_THE_WAY))
        return cls(step, time.monotonic(), total.bytes, total.seconds, exposed_s)


class Metrics:
    """Of one training on this rank.

    Args:
        engine: of the model that is trained.
        step: at which the training begins.
    """

    def __init__(self, engine: ZeroEngine, step: int) -> None:
        self._engine = engine
        self._logged = self._compared = _Mark.of(engine.world.ledger, step)
        self._is_told = False

    def since_last(self, step: int) -> dict[str, float]:
        """Of this rank, since it was asked last; empty if there has been no step.

        Args:
            step: the number of steps so far.

        Returns:
            `zero/waiting`: share of the time in which the rank waited for others. `zero/exposed`: for gathers and reductions
            alone. `zero/traffic`: MiB received a step. `zero/peak`: GiB at most so far, of the device, or of the process.
        """
        before, now = self._logged, _Mark.of(self._engine.world.ledger, step)
        num_steps, time_s = step - before.step, now.at_s - before.at_s
        if num_steps < 1 or time_s <= 0:
            return {}
        self._logged = now
        return {
            "zero/waiting": round((now.waited_s - before.waited_s) / time_s, 4),
            "zero/exposed": round((now.exposed_s - before.exposed_s) / time_s, 4),
            "zero/traffic": round((now.num_bytes - before.num_bytes) / num_steps / 2**20, 3),
            "zero/peak": round(peak_of(self._engine.world.device) / 2**30, 3),
        }

    def compare(self, step: int) -> None:
        """After each step, on all ranks: every 50 steps, name the rank for which all others wait, once in a training."""
        before, world = self._compared, self._engine.world
        if step - before.step < _EVERY or world.num_ranks == 1:
            return
        self._compared = now = _Mark.of(world.ledger, step)
        rows = world.everyone.agree_on_floats([now.waited_s - before.waited_s], "how long ranks have waited")
        waited_s = [row[0] for row in rows]
        slowest = min(range(len(waited_s)), key=waited_s.__getitem__)
        others_s = [each for rank, each in enumerate(waited_s) if rank != slowest]
        share = (sum(others_s) / len(others_s) - waited_s[slowest]) / (now.at_s - before.at_s)
        if share > _MUCH and world.rank == 0 and not self._is_told:
            self._is_told = True
            logger.warning(
                "rank %d is slow: the others waited for it %.0f%% of the last %d steps (its batches are larger, or its "
                "device, host or data loader slower); `hf-zero trace` shows where",
                slowest,
                100 * share,
                step - before.step,
            )
