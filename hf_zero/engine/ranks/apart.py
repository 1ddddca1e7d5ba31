"""Parameters that one rank changes alone, for a while: an average swapped in on the main process, to be validated or saved.

[Note: edits alone] Under DDP each rank has a model of its own, and the main process may swap an average in (`ema.copy_to`) and
out (`ema.restore`). Here the others compute with this rank's rows. So before the first edit of several ranks meet, as before
what reads parameters at rest (see [Note: alone]). Where the others have gone on, the rows that are edited move into memory of
their own, which this rank alone sees; what others gather or ask for stays as it is. Before this rank does anything together
with them again, the values must be back, bit for bit.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.errors import UsageError

_MOST_FRAMES = 64
_ticks = itertools.count(1)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype and number of elements have the same bits, NaNs too."""
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


@dataclass
class _Taken:
    """A parameter that this rank has changed alone, or is about to."""

    param: Tensor
    name: str
    before: Tensor  # its rows, as others may see them
    num_edits: int = 0

    def differs(self) -> bool:
        """Whether its rows are others now."""
        rows, before = torch_compat.local_of(self.param), self.before
        if rows.shape != before.shape or rows.dtype != before.dtype or rows.device != before.device:
            return True
        return not same_bits(rows, before)


class Apart:
    """What this rank has changed alone.

    Attributes:
        tick: of the last such change; 0: there is none.
    """

    def __init__(self) -> None:
        self.tick = 0
        self._taken: dict[int, _Taken] = {}

    @torch.no_grad()
    @torch.inference_mode(False)
    def take(self, param: Tensor, name: str) -> None:
        """A parameter is about to be changed by this rank alone."""
        self.tick = next(_ticks)
        if id(param) not in self._taken:
            rows = torch_compat.local_of(param)
            before = rows.detach()
            rows.set_(before.clone())  # type: ignore[call-overload]  # aliases of the parameter have the same tensor
            self._taken[id(param)] = _Taken(param, name, before)
        self._taken[id(param)].num_edits += 1

    def before(self, param: Tensor) -> Tensor | None:
        """The rows that others may see; None: those that the parameter has."""
        taken = self._taken.get(id(param))
        return None if taken is None else taken.before

    def tick_of(self, param: Tensor) -> int:
        """When this rank has changed something alone last, if the parameter has other values now than others see; else 0."""
        taken = self._taken.get(id(param)) if self.tick else None
        return self.tick if taken is not None and taken.differs() else 0

    def num_edits(self, param: Tensor) -> int:
        """How often this rank has changed a parameter alone, or begun to."""
        taken = self._taken.get(id(param))
        return 0 if taken is None else taken.num_edits

    @torch.no_grad()
    @torch.inference_mode(False)
    def join(self) -> None:
        """Let parameters have the rows again that others see, if all values are back."""
        if self.tick and not any(taken.differs() for taken in self._taken.values()):
            for taken in self._taken.values():
                torch_compat.local_of(taken.param).set_(taken.before)  # type: ignore[call-overload]
            self._taken.clear()
            self.tick = 0

    def check(self, what: str) -> None:
        """This rank is about to do something together with others.

        Args:
            what: for the error.

        Raises:
            UsageError: values are not back.
        """
        if not self.tick:
            return
        self.join()
        for taken in self._taken.values():
            if taken.differs():
                raise UsageError(
                    f"this rank has changed parameter {taken.name!r} alone (an EMA's `copy_to` on the main process, say), and "
                    f"comes to {what} with the others, who do not have the change: put the values back first "
                    "(`ema.restore`), or let all ranks run the line that changes them"
                )


def line_of_program() -> str:
    """Which line of the program runs, with those that have called it; the same on all ranks that run it."""
    found, frame = 0, sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        code = frame.f_code
        found = zlib.crc32(f"{code.co_name} {frame.f_lineno}".encode(), found)
        is_script = code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        if is_script or frame.f_back is None:
            break  # what is below has launched it, and may be other on each rank
        frame = frame.f_back
    return str(found)
