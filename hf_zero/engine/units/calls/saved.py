"""What autograd saves of gathered parameters: not the tensor, but where to find it.

[Note: saved weights] A backward may enter a call's graph without the engine's knowledge: by an activation that a hook has
caught, by a value left in an attribute. The weights that it reads may have been released by then, and reading memory that
is gone ends the process. So while a call runs, autograd's saved-tensor hooks replace every saved view of the unit's
memory by its place in it, and when the backward needs it, the unit is made whole if it is not. What else holds such a
view (an attribute, a custom function's `ctx`) is found by counting the holders of the memory before and after a call: the
memory then stays for good. Memory that is never released (stages 0 to 2, memory that ranks share) needs none of this.

A checkpoint's hooks are left alone: while it computes again, it keeps what is saved, until the backward takes it soon after.
Of frozen weights it would keep the very tensor that the module holds, as if the module's code had kept it for good; so it
gets an alias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.engine.parameters.partitioned_tensor import rows_like
from hf_zero.engine.parameters.whole import SharedWhole, Whole, raw_version
from hf_zero.engine.units.storage.residency import WHOLE
from hf_zero.engine.units.unit import Unit

_changes = Changes()
_PLAIN = (Tensor, nn.Parameter, Whole, SharedWhole)  # others have no memory of their own


class _SavedView(NamedTuple):
    """A view of a unit's memory; `counter` has none, and counts the writes into what was saved."""

    unit: Unit
    epoch: int
    counter: Tensor
    version: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    seen_as: DTensor | None = None  # without memory: placed as the view is, over the tensor axis


def _keep_aliases(original: Callable[..., None], hooks: Any, *args: Any) -> None:
    original(hooks, *args)
    keep = hooks.pack_hook
    hooks.pack_hook = lambda tensor: keep(tensor.detach() if isinstance(tensor, Whole) else tensor)


def _top() -> object:
    """Whose saved-tensor hooks are in force now; None: nobody's."""
    top = torch_compat.top_saved_tensor_hooks()
    return None if top is None else getattr(top[0], "__self__", top)


class SavedWeights:
    """Saved-tensor hooks of one running call, where nobody has put others.

    Args:
        units: of the call; whole.
        make_whole: makes a unit whole until the backward ends.
    """

    def __init__(self, units: Sequence[Unit], make_whole: Callable[[Unit, int], None]) -> None:
        self._ranges = [(unit.address, unit.address + unit.buffer_nbytes, unit) for unit in units]
        self._make_whole = make_whole
        self._is_ended = False
        if not _changes:
            _changes.keep()
            _changes.wrap(torch.utils.checkpoint._recomputation_hook, "__init__", _keep_aliases)
        outer = _top()
        if isinstance(outer, SavedWeights):
            self._ranges += outer._ranges
        # Hooks of others are left alone: a checkpoint's count what is saved.
        self.is_active = outer is None or isinstance(outer, SavedWeights)
        if self.is_active:
            torch_compat.push_saved_tensor_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """Take the hooks away; with those that have ended below others before, where Ctrl-C has ended all of them."""
        self._is_ended = True
        while isinstance(top := _top(), SavedWeights) and top._is_ended:
            torch_compat.pop_saved_tensor_hooks()

    def _pack(self, tensor: Tensor) -> Any:
        held = torch_compat.local_of(tensor) if type(tensor) is DTensor else tensor
        if type(held) in _PLAIN and held.layout is torch.strided:
            address = held.data_ptr()
            for start, end, unit in self._ranges:
                if start <= address < end:
                    is_seen = held is not tensor
                    as_seen = cast(DTensor, rows_like(held.new_empty(0), tensor)) if is_seen else None
                    shape, strides = tuple(held.shape), held.stride()
                    counter, place = torch_compat.counter_of(held), address - start
                    return _SavedView(
                        unit, unit.epoch, counter, raw_version(held), place, shape, strides, held.dtype, as_seen
                    )
        return tensor.detach(), raw_version(tensor)  # not itself: an output would hold its own graph

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is _SavedView:
            if raw_version(packed.counter) != packed.version:
                _refuse_changed(packed.shape, raw_version(packed.counter), packed.version)
            is_there = packed.unit.epoch == packed.epoch and packed.unit.residency in WHOLE
            if not is_there or torch.is_grad_enabled():  # then a graph may be made, see [Note: gradients of gradients]
                self._make_whole(packed.unit, packed.epoch)
            view = packed.unit.view(packed.offset_bytes, packed.shape, packed.strides, packed.dtype)
            return view if packed.seen_as is None else rows_like(view, packed.seen_as)
        saved: Tensor
        saved, version = packed  # a detached tensor counts its writes together with its source
        if raw_version(saved) != version:
            _refuse_changed(tuple(saved.shape), raw_version(saved), version)
        return saved


def _refuse_changed(shape: tuple[int, ...], now: int, then: int) -> NoReturn:
    """Raise what torch raises."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {shape}, at version {now}, was saved at version {then}"
    )
