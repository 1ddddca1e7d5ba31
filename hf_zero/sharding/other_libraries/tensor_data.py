"""`plain.data = w`, where `w` is at rest: torch would give a plain tensor the shape of the whole and no memory, and a read of
it ends the process.

A value that was computed (`w.data.clone()`) is given as the whole, as one process has it. What shares the memory of a parameter
(`w.data`, a view) cannot be shared with a plain tensor: that is an error, before anything has changed.

`hf_zero.undo()` puts the original back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_zero.changes import Changes
from hf_zero.engine.parameters.at_rest.root import AtRest, Root
from hf_zero.errors import UsageError

_changes = Changes()
_data: Any = torch._C.TensorBase.data


class _Data(property):
    """As torch's own, which tells its name to whoever sees torch's functions, as `Init` does."""

    __name__ = "data"


def install() -> None:
    """Let assignments to `.data` come by here; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        _changes.replace(torch.Tensor, "data", _Data(_data.__get__, _assign, _data.__delete__, _data.__doc__))


def _assign(tensor: Tensor, value: Tensor) -> None:
    if isinstance(value, AtRest) and not isinstance(tensor, AtRest):
        if not isinstance(value, Root) or value.param is not None:
            raise UsageError(
                f"`.data = ` of a tensor that is not partitioned takes no {value.describe()}, whose memory it would share: "
                "assign a copy (`w.data.clone()`), or write into it (`.data.copy_(w)`), on all ranks"
            )
        value = value.full_tensor()
    _data.__set__(tensor, value)
