"""Units that graphs of their own backwards read: of `torch.autograd.grad(..., create_graph=True)`, as of gradient penalties.

[Note: gradients of gradients] The gradient of an input may be differentiated again: a penalty on a critic's slope, forces that
are the gradient of an energy. The graph that autograd makes then reads the whole weights, and no hook of ours tells what it has
saved of them. So units that such a backward has needed stay whole until parameters of the model change, after which their old
values could not be read in any case. Gradients of parameters are reduced outside of autograd, and cannot be differentiated.
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_zero.engine.units.storage.residency import Lease
from hf_zero.engine.units.unit import Unit


class ForGraphs:
    """Leases of units that come and go: see [Note: gradients of gradients]."""

    def __init__(self) -> None:
        self._leases: dict[Unit, Lease] = {}

    def hold(self, units: Iterable[Unit]) -> None:
        """Let units, which are whole, stay so."""
        for unit in units:
            if unit.comes_and_goes and unit not in self._leases:
                self._leases[unit] = unit.acquire()

    def let_go(self) -> None:
        """Parameters have changed."""
        leases, self._leases = self._leases, {}
        for lease in leases.values():
            lease.give_back()
