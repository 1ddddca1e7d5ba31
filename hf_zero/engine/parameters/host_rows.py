"""Rows of parameters that rest in host memory, beside a device: what goes up to it, and where gradients come down.

[Note: rows on the host] A parameter whose rows are offloaded is a CPU tensor at rest, and so is its gradient: whoever edits it,
clips its gradient, steps on it or saves it runs torch's ordinary code for CPUs. The device has only what modules compute with.
The rows themselves are never copied from or to while the host goes on: what goes up is a copy of them in the compute dtype, and
gradients come down into rooms of their own. Both are pinned, nobody else writes to them, and they wait for their events here
and in `landing`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError

HOST_ROWS = "_zero_host_rows"


def wait_for_computation(copies: torch.Stream, device: torch.device) -> None:
    """Let a stream of copies wait for what is queued on the device now."""
    copies.wait_stream(torch.accelerator.current_stream(device))


class HostRows:
    """What a parameter at rest in host memory exchanges with the device.

    Args:
        sent: what goes up: this rank's rows in the compute dtype, pinned.
        gradient: where the gradient comes down, pinned; None for a frozen one.
        kept: this rank's rows on the device, in the compute dtype, from which they are gathered; None: they go up each time.
        device: to which it goes up.

    Attributes:
        is_stale: rows have changed since they were last copied to `sent`.
    """

    def __init__(self, sent: Tensor, gradient: Tensor | None, kept: Tensor | None, device: torch.device) -> None:
        self.sent, self.gradient, self.kept, self.device = sent, gradient, kept, device
        self.is_stale = True
        self._copied: torch.Event | None = None  # the last copies from `sent` have been made
        self._version = -1  # of a plain parameter's rows, when they were last copied

    _is_exiting: ClassVar = staticmethod(sys.is_finalizing)  # by then the module has no names any more

    def __del__(self) -> None:
        if self._copied is not None and self.kept is not None and not self._is_exiting():
            # The memory of `kept` is used anew by what is queued on the compute stream from now on.
            torch.accelerator.current_stream(self.device).wait_event(self._copied)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied parameter gets rooms of its own, with its engine."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def has_changed(self, param: Tensor) -> bool:
        """Whether `sent` is not as new as a parameter; of a plain one, torch counts writes, and `HostParameter` aliases."""
        if isinstance(param, DTensor):
            return self.is_stale
        return self.is_stale or param._version != self._version or torch_compat.is_held_elsewhere(param)

    def refresh(self, param: Tensor) -> None:
        """Copy the rows to `sent`, once nothing reads it any more."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        with torch.no_grad():
            self.sent.copy_(torch_compat.local_of(param))
        self._version = -1 if isinstance(param, DTensor) else param._version
        self.is_stale = False

    def note_copies(self, event: torch.Event) -> None:
        """Copies from `sent` are made when `event` has passed."""
        self._copied = event

    def room_for_gradient(self) -> Tensor | None:
        """Where a gradient may come down, if nobody holds an earlier one."""
        room = self.gradient
        return None if room is None or torch_compat.is_held_elsewhere(room) else room


_grad: Any = torch._C.TensorBase.grad


class HostParameter(nn.Parameter):
    """A parameter of a process alone that rests in host memory: tells when somebody may write past torch's counter."""

    def _set_grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, None if value is None else value.to(self.device))

    grad: Any = property(  # its getter stays torch's: steps read it
        _grad.__get__,
        _set_grad,
        _grad.__delete__,
        "The gradient, in host memory. One on the device may be assigned too.",
    )

    @property
    def data(self) -> Tensor:
        """An alias outside the graph, whose writes torch counts apart. Assigning values of another device copies them."""
        rows: HostRows | None = vars(self).get(HOST_ROWS)
        if rows is not None:
            rows.is_stale = True
        return cast(Tensor, torch._C.TensorBase.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        is_elsewhere = value.device != self.device and (value.shape, value.dtype) == (self.shape, self.dtype)
        if is_elsewhere and vars(self).get(HOST_ROWS) is not None:
            with torch.no_grad():
                self.copy_(value)
        else:
            torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]


def refuse_beside_a_backward(what: str, rows: Iterable[Tensor], world: World) -> None:
    """Raise in a backward where autograd runs what lies on the host in another thread than what is on a device.

    Each rank would then meet the others for the one and the other in another order.

    Args:
        what: ranks would meet for.
        rows: of the tensors that it needs.
        world: the ranks.

    Raises:
        UsageError: any of them lies on the host.
    """
    has_others = world.num_ranks > 1 and world.device.type != "cpu"
    if has_others and torch_compat.in_backward_of_an_operator() and any(each.device.type == "cpu" for each in rows):
        raise UsageError(
            f"{what}: a term of a loss over parameters that are offloaded to host memory has its backward beside the model's. "
            "Compute it of the weights inside the model's forward, or offload the optimizer alone"
        )
