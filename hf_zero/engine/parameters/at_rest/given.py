"""Whether all ranks have written the same whole tensors into tensors at rest.

[Note: given wholes] Of a plain tensor that is assigned to a gradient, or written into something at rest, each rank keeps its
rows: right where all ranks give the same, as ranks do that run the same lines on the same values. What is a rank's own (its
gradients by `torch.autograd.grad`, weights that it has trained or perturbed alone) is lost but for these rows: a sum of what is
left is no sum of what they had, and a forward computes with rows of each. So a write notes two numbers of what it was given,
and the next exchange, forward, step, or read of the whole compares them.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError

_TOLERANCE, _ROUNDINGS = 1e-3, 1e3  # of the norm, and of what one rounding changes: ranks may round differently
_given: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # sum and norm of what was written, by the id of the rows


def note_given(root: Root, whole: Tensor, is_all: bool) -> None:
    """A plain tensor is written into `root`.

    Args:
        root: of which each rank keeps its rows.
        whole: what this rank gives.
        is_all: nothing is left of what `root` was.
    """
    if not root.is_cut or is_changed_alone(root) or whole.layout is not torch.strided:
        return
    values = torch.view_as_real(whole.detach()) if whole.is_complex() else whole.detach()
    dtype = torch.promote_types(values.dtype, torch.float32)
    total = values.sum(dtype=dtype)
    norm = torch.linalg.vector_norm(values, dtype=dtype) if values.is_floating_point() else total.abs()
    numbers = torch.stack([total, norm])
    before = None if is_all else _numbers_of(root)
    _note(root.rows, numbers if before is None else 0.5 * before + numbers)


def is_changed_alone(root: Root) -> bool:
    """Whether this rank alone has changed a parameter, which has rules of its own: see [Note: edits alone]."""
    return root.param is not None and root.held[0].serving.apart.before(root.param) is not None


def note_overwritten(root: Root, source: Root | None) -> None:
    """`root` has other values now: those of `source`, or numbers that all ranks know."""
    numbers = None if source is None else _numbers_of(source)
    if numbers is None:
        _given.pop(id(root.rows), None)
    else:
        _note(root.rows, numbers)


def note_computed(made: Iterable[object], operands: Sequence[Root]) -> None:
    """These were computed of `operands`."""
    if not _given:
        return
    known = [numbers for root in operands if (numbers := _numbers_of(root)) is not None]
    for root in made if known else ():
        if isinstance(root, Root):
            _note(root.rows, torch.stack(known).sum(0))


def have_been_given(roots: Iterable[Root]) -> bool:
    """Whether ranks have written plain tensors into any of these since they were last compared."""
    return bool(_given) and any(_numbers_of(root) is not None for root in roots)


def refuse_unlike(roots: Sequence[Root], what: str, world: World) -> None:
    """Compare what ranks have given; all of them ask together.

    Args:
        roots: that are to be exchanged, or computed with.
        what: is to be done with them.
        world: the ranks.

    Raises:
        UsageError: on all ranks: not the same.
    """
    known = [_numbers_of(root) for root in roots]
    own = [number for each in known for number in ((0.0, 0.0) if each is None else each.nan_to_num().tolist())]
    found = world.everyone.combine([_as_int(number) for number in own], f"{what} of what ranks have written")
    lowest, highest = ([_as_float(number) for number in numbers] for numbers in (found.lowest, found.highest))
    for index, root in enumerate(roots):
        (total, norm), (its_total, its_norm) = (numbers[2 * index : 2 * index + 2] for numbers in (lowest, highest))
        if max(its_total - total, its_norm - norm) > _tolerance(root.rows.dtype) * its_norm:
            raise UsageError(
                f"{what}: each rank has written other values into {root.describe()}, which is partitioned, so only its own "
                "rows are left. Exchange a plain tensor, and write the result (dist.all_reduce(grad); p.grad = grad); load the "
                "same on all ranks; or seed them alike"
            )
    for root in roots:
        _given.pop(id(root.rows), None)


def _tolerance(dtype: torch.dtype) -> float:
    return min(_TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps) if dtype.is_floating_point else _TOLERANCE


def _numbers_of(root: Root) -> Tensor | None:
    rows, numbers = _given.get(id(root.rows), (None, None))
    return numbers if rows is not None and rows() is root.rows else None


def _note(rows: Tensor, numbers: Tensor) -> None:
    number = id(rows)

    def forget(reference: weakref.ref[Tensor]) -> None:
        if number in _given and _given[number][0] is reference:
            del _given[number]

    _given[number] = weakref.ref(rows, forget), numbers


def _as_int(value: float) -> int:
    """A number that is as much larger or smaller than others as the float is."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits if bits >= 0 else -(bits & (2**63 - 1))


def _as_float(number: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", abs(number)))[0]
    return value if number >= 0 else -value
