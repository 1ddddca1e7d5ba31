"""What one backward pass holds, from its first event to its end."""

from __future__ import annotations

import weakref

from hf_zero.engine.backward.accumulation import Accumulation
from hf_zero.engine.backward.passes import makes_graph
from hf_zero.engine.units.calls.call import Call, next_event
from hf_zero.engine.units.storage.residency import Lease


class Session:
    """One backward pass, from its first event to its end.

    Attributes:
        gradients: what has come of them.
        has_gradients: any has come; not in `torch.autograd.grad(loss, activation)`.
        leases: of units that autograd's saved tensors need, see [Note: saved weights].
        open_calls: those whose backward has begun, and not ended.
        began: after the forwards that it may reach.
        reached: when the forward ended whose backward began last: what has begun later is over.
        is_for_all: whatever it reaches gets a gradient; see `Pass`.
        is_differentiated: it makes a graph of its own, see [Note: gradients of gradients].
        token: dead once autograd has dropped its callback.
    """

    def __init__(self, gradients: Accumulation, is_for_all: bool) -> None:
        self.gradients = gradients
        self.is_for_all = is_for_all
        self.is_differentiated = makes_graph()
        self.has_gradients = False
        self.leases: list[Lease] = []
        self.open_calls: set[Call] = set()
        self.began = self.reached = next_event()
        self._token = _Token()
        self.token = weakref.ref(self._token)

    def take_token(self) -> _Token:
        """An object that lives as long as autograd may still call back; if backward raises, it is gone."""
        token = self._token
        del self._token
        return token

    @property
    def is_dead(self) -> bool:
        """Whether the backward broke off with an exception: known for certain to the call only, see `passes`."""
        return self.token() is None

    def give_back(self) -> None:
        """Give the leases back."""
        for lease in self.leases:
            lease.give_back()
        self.leases.clear()


class _Token:
    """See `Session.take_token`."""
