"""Parameters that one rank changes alone, for a while: an average swapped in on the main process, to be validated or saved.

[Note: edits alone] Under DDP each rank has a model of its own, and the main process may swap an average in (`ema.copy_to`) and
out (`ema.restore`). Here the others compute with this rank's rows. So before the first edit of several ranks meet, as before
what reads parameters at rest (see [Note: alone]). Where the others have gone on, the rows that are edited move into memory of
their own, which this rank alone sees; what others gather or ask for stays as it is. Before this rank does anything together
with them again, the values must be back, bit for bit.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.errors import UsageError

_ticks = itertools.count(1)


class Apart:
    """What this rank has changed alone.

    Attributes:
        tick: of the last such change; 0: there is none.
    """

    def __init__(self) -> None:
        self.tick = 0
        self._taken: dict[int, tuple[Tensor, Tensor, str]] = {}  # parameters, their rows before, names

    @torch.no_grad()
    @torch.inference_mode(False)
    def take(self, param: Tensor, name: str) -> None:
        """A parameter is about to be changed by this rank alone."""
        self.tick = next(_ticks)
        if id(param) not in self._taken:
            rows = torch_compat.local_of(param)
            before = rows.detach()
            rows.set_(before.clone())  # type: ignore[call-overload]  # aliases of the parameter have the same tensor
            self._taken[id(param)] = param, before, name

    def before(self, param: Tensor) -> Tensor | None:
        """The rows that others may see; None: those that the parameter has."""
        taken = self._taken.get(id(param))
        return None if taken is None else taken[1]

    def has_changed(self, param: Tensor) -> bool:
        """Whether a parameter has other values than others may see."""
        before = self.before(param)
        return before is not None and _differ(param, before)

    @torch.no_grad()
    @torch.inference_mode(False)
    def join(self) -> None:
        """Let parameters have the rows again that others see, if all values are back."""
        if self.tick and not any(_differ(param, before) for param, before, _ in self._taken.values()):
            for param, before, _ in self._taken.values():
                torch_compat.local_of(param).set_(before)  # type: ignore[call-overload]
            self._taken.clear()
            self.tick = 0

    def check(self, what: str) -> None:
        """This rank is about to do something together with others.

        Args:
            what: for the error.

        Raises:
            UsageError: values are not back.
        """
        self.join()
        for param, _, name in self._taken.values():
            if self.has_changed(param):
                raise UsageError(
                    f"this rank has changed parameter {name!r} alone (an EMA's `copy_to` on the main process, say), and comes "
                    f"to {what} with the others, who do not have the change: put the values back first (`ema.restore`), or "
                    "let all ranks run the line that changes them"
                )


def _differ(param: Tensor, before: Tensor) -> bool:
    rows = torch_compat.local_of(param)
    if rows.shape != before.shape or rows.dtype != before.dtype or rows.device != before.device:
        return True
    return not torch.equal(rows.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))
