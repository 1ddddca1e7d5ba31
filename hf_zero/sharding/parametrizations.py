"""Parametrizations of torch (`nn.utils.parametrize`) on parameters that are partitioned already.

Where a parametrization has no `right_inverse`, torch exchanges a parameter of a class of its own with itself, and marks it so
that its next backward raises. Nothing is exchanged then. `hf_zero.undo()` puts the original back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero.changes import Changes

_changes = Changes()


def install() -> None:
    """Wrap torch's function; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        _changes.wrap(torch.utils, "swap_tensors", _swap)


def _swap(original: Callable[[Tensor, Tensor], None], t1: Tensor, t2: Tensor) -> None:
    if t1 is not t2:
        original(t1, t2)
