"""What `Init` and `activate` have switched on in this program, what pauses it, and which models stay whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor

from hf_zero.engine.engine import engine_of
from hf_zero.errors import UsageError
from hf_zero.parameters import parameters_of

if TYPE_CHECKING:
    from hf_zero.sharding.construct import Cutter
    from hf_zero.sharding.loading import LoadSeam

_pausable_now: list[tuple[LoadSeam, Cutter | None]] = []
_left_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def pausable(seam: LoadSeam, cutter: Cutter | None) -> Iterator[None]:
    """Within: `disabled()` and other `Init`s pause this one."""
    entry = (seam, cutter)
    _pausable_now.append(entry)
    try:
        yield
    finally:
        _pausable_now.remove(entry)


def is_constructing() -> bool:
    """Whether an `Init` is active, so that parameters are cut as they are made, and whole to whoever touches them."""
    return any(cutter is not None and not seam.is_paused for seam, cutter in _pausable_now)


@contextmanager
def disabled() -> Iterator[None]:
    """While active, models are loaded and constructed whole, as without hf_zero, and stay whole."""
    with paused(_left_whole):
        yield


@contextmanager
def paused(left_whole: weakref.WeakSet[nn.Module] | None) -> Iterator[None]:
    """Within: nothing is partitioned as it is made; `left_whole` collects the models that are loaded meanwhile."""
    entries = list(_pausable_now)
    before = [(seam.is_paused, seam.left_whole) for seam, _ in entries]
    with ExitStack() as stack:
        for seam, cutter in entries:
            seam.is_paused, seam.left_whole = True, left_whole
            if cutter is not None:
                stack.enter_context(cutter.paused())
        try:
            yield
        finally:
            for (seam, _), state in zip(entries, before, strict=True):
                seam.is_paused, seam.left_whole = state


def leave_whole(model: nn.Module) -> nn.Module:
    """Mark a model to stay whole, even if it is given to a Trainer with `ZeroTrainingArguments`; returns the model.

    Raises:
        UsageError: it is partitioned already.
    """
    if is_partitioned(model):
        raise UsageError(f"{type(model).__name__} is partitioned already; load it `with hf_zero.disabled():`")
    _left_whole.add(model)
    return model


def is_left_whole(model: nn.Module) -> bool:
    """Whether the model is to stay whole: marked by `leave_whole`, or loaded `with disabled()`."""
    return model in _left_whole


def is_partitioned(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is run by hf_zero, or was partitioned while it was made."""
    return any(engine_of(module) is not None for module in model.modules()) or any(
        isinstance(param, DTensor) for param in parameters_of(model)
    )
