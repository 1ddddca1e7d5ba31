"""Steps in host memory, beside a device: what has been stepped on goes up while the rest is still stepped on.

[Note: up behind the step] A step comes to the units in the order in which the next forward uses them. Once it is done with
some, engines hear of it: the rows are cast, their copies to the device are queued, and where whole parameters stay there the
unit's gather begins behind them. So the device is busy with one part while the host's cores step on the next, and only the way
of the last part is beside nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hf_zero.config.offload import Offload
from hf_zero.engine.engine import live_engines
from hf_zero.errors import UsageError
from hf_zero.optim.kinds import wrapped_optimizers
from hf_zero.optim.offloaded.chunked import ChunkedStep, Piece
from hf_zero.optim.offloaded.pieces import refuse_in_pieces
from hf_zero.optim.on_rows import RowStepping, choose_fused
from hf_zero.optim.stepping import Arguments, StepCall, params_of

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 2**22  # of the parameters at rest of all ranks: less is not worth a step of its own


class HostStepping(RowStepping):
    """Steps on this rank's rows in host memory, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self._is_whole: bool | None = None  # the optimizer's step is not to be taken in pieces; None: not known yet

    def begin(self, call: StepCall) -> Arguments | None:
        """See `Stepping.begin`."""
        choose_fused(call.optimizer)
        if self._is_whole is None:
            self._is_whole = _minds_pieces(call.optimizer)
        if self._is_whole or call.has_closure:  # which may run the model where the parameters have moved
            if not any(world.partitions for world in call.worlds.values()):
                call.before_change()
                return None
            return super().begin(call)
        call.before_change()
        params = [param for param in params_of(call.optimizer) if id(param) in call.worlds]
        step = HostStep(call.optimizer, params, call.args, call.kwargs)
        stand_in = step.run()
        self._under_way = step
        return (stand_in, *call.args), call.kwargs

    def fits(self, offload: Offload, steps_on_host: bool) -> bool:
        """See `Stepping.fits`."""
        return steps_on_host


def _minds_pieces(optimizer: torch.optim.Optimizer) -> bool:
    try:
        if not wrapped_optimizers(optimizer):
            refuse_in_pieces(optimizer, has_closure=False)
            return False
        why = f"{type(optimizer).__name__} wraps another optimizer"
    except UsageError as error:
        why = str(error).partition(", so ")[0]
    logger.info("offload: a step on the host ends before its rows go up: %s", why)
    return True


class HostStep(ChunkedStep):
    """One step under way: see [Note: up behind the step]."""

    def _cut(self) -> Iterator[list[Piece]]:
        trained = {id(param): param for param in self.trained}
        engines = [engine for engine in live_engines() if any(map(engine.find, self.trained))]
        resting: list[list[Tensor]] = []
        for engine in engines:
            for members in engine.gathering.by_first_use():
                found = [p.param for p in members if p.host is not None and id(p.param) in trained]
                resting.append([trained.pop(id(param)) for param in found])
        if trained or self.others:  # on the device, where it is only queued
            yield list(map(Piece.of, trained.values()))
        for chunk in _joined(resting):
            yield list(map(Piece.of, chunk))

    def _done(self, index: int) -> None:
        """See `ChunkedStep`: it goes up."""
        if index == len(self.chunks) - 1:
            return  # the step is over, of which engines hear anyway
        params = [piece.param for piece in self.chunks[index]]
        for engine in live_engines():
            engine.gathering.during_step([p for p in map(engine.find, params) if p is not None])


def _joined(units: Iterable[list[Tensor]]) -> Iterator[list[Tensor]]:
    """Neighbours together, as far as they are small; alike on all ranks."""
    chunk: list[Tensor] = []
    for unit in units:
        chunk = chunk + unit
        if sum(param.numel() * param.itemsize for param in chunk) >= _CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
