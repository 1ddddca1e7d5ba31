"""Copies of many tensors at once: on a device a launch takes longer than the copy of a small tensor, so it is one for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copies_of(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Contiguous copies in other dtypes, outside of any graph."""
    if not tensors:
        return []
    copies = [torch.empty(each.shape, dtype=to, device=each.device) for each, to in zip(tensors, dtypes, strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(copies, list(tensors))
    return copies


def in_dtypes(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors, where they have these dtypes, and contiguous copies of the others."""
    found = list(tensors)
    others = [i for i, (each, dtype) in enumerate(zip(tensors, dtypes, strict=True)) if each.dtype != dtype]
    copies = copies_of([found[i] for i in others], [dtypes[i] for i in others])
    for i, copy in zip(others, copies, strict=True):
        found[i] = copy
    return found


def padded_copies_of(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], numels: Sequence[int]) -> list[Tensor]:
    """As `copies_of`, of flat tensors, each followed by zeros, so that it has so many elements."""
    if not tensors:
        return []
    wanted = list(zip(tensors, dtypes, numels, strict=True))
    copies = [torch.empty(numel, dtype=dtype, device=each.device) for each, dtype, numel in wanted]
    given = [each.numel() for each in tensors]
    pads = [copy[size:] for copy, size, numel in zip(copies, given, numels, strict=True) if numel > size]
    with torch.no_grad():
        torch._foreach_copy_([copy[:size] for copy, size in zip(copies, given, strict=True)], list(tensors))
        if pads:
            torch._foreach_zero_(pads)
    return copies
