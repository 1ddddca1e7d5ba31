"""The parameters of one engine, as its peers may ask for them: see [Note: alone]."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.engine.parameters.at_rest.known import values
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.offers import ChangeCount
from hf_zero.engine.ranks.serving import Serving
from hf_zero.engine.units.gathering import Gathering
from hf_zero.layout import RowLayout


class _Engine(Protocol):
    @property
    def is_at_rest(self) -> bool:
        """Whether no forward and no backward is under way."""


class ServedParameters:
    """See `Served`. It lives as long as its engine; or longer, see [Note: leaving].

    Args:
        engine: whose.
        parameters: its records.
        gathering: that counts steps and edits.
        serving: gets this.
    """

    def __init__(
        self, engine: _Engine, parameters: Sequence[ZeroParameter], gathering: Gathering, serving: Serving
    ) -> None:
        self._engine = weakref.ref(engine)
        self._parameters, self._gathering = parameters, gathering
        self._numbers = {id(p.param): number for number, p in enumerate(parameters)}
        self._serving, self._reference = serving, serving.add(self)
        values.serve(serving)

    @property
    def is_at_rest(self) -> bool:
        """See `Served`. A forward that this rank computes alone waits for nobody."""
        engine = self._engine()
        return engine is None or engine.is_at_rest or self._gathering.alone.is_under_way

    @property
    def changes(self) -> ChangeCount:
        """See `Served`."""
        return self._gathering.changes

    def number_of(self, param: Tensor) -> int | None:
        """See `Served`."""
        return self._numbers.get(id(param))

    @property
    def settled(self) -> torch.Event | None:
        """See `Served`."""
        return self._gathering.home.settled

    @property
    def num_parameters(self) -> int:
        """See `Served`."""
        return len(self._parameters)

    def rows_of(self, number: int) -> tuple[Tensor, RowLayout]:
        """See `Served`."""
        p = self._parameters[number]
        before = self._serving.apart.before(p.param)
        return (torch_compat.local_of(p.param).detach() if before is None else before), p.layout

    def gradient_of(self, number: int) -> tuple[Tensor, RowLayout] | None:
        """See `Served`."""
        p = self._parameters[number]
        grad: Any = p.param.grad  # once: another thread may drop it
        return (grad.rows, p.layout) if isinstance(grad, Root) else None

    _is_exiting: ClassVar = staticmethod(sys.is_finalizing)  # by then the module has no names any more

    def __del__(self) -> None:
        if not self._is_exiting():
            self._serving.keep(self._reference, self)
