"""What modules have written into whole tensors during a forward, and how it is kept: see [Note: writes in a forward]."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hf_zero.engine.parameters.at_rest.given import have_been_given, refuse_unlike
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.parameters.whole import Glance, is_safe_to_keep, num_writes, retire
from hf_zero.engine.ranks.alike import checksum
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.unit import Unit
from hf_zero.errors import UsageError


def check_edits(edited: Mapping[ZeroParameter, int], world: World) -> None:
    """All ranks are about to compute with what has been edited by hand, with a mark of how: see [Note: given wholes].

    Raises:
        UsageError: each rank has edited it in another way, or given other values.
    """
    sharded = [p for p in edited if p.is_sharded]
    if any(edited[p] for p in sharded):
        found = world.everyone.combine([edited[p] for p in sharded], "a forward of what ranks have edited")
        for p, lowest, highest in zip(sharded, found.lowest, found.highest, strict=True):
            if lowest != highest:
                raise UsageError(
                    f"the ranks have changed parameter {p.name!r} in other ways (with other numbers, say, or from values of "
                    "other steps), so the rows of each are of another model: let all ranks run the same lines on the same "
                    "values"
                )
    roots = [cast(Root, p.param) for p in sharded]
    if have_been_given(roots):
        refuse_unlike(roots, "a forward", world)


class Written(NamedTuple):
    """A whole tensor that was written to."""

    unit: Unit
    parameter: ZeroParameter
    whole: Tensor


def check_written(written: Sequence[Written]) -> None:
    """Raise if something was written that cannot be kept, as all ranks see."""
    for unit, p, whole in written:
        is_in_graph = not isinstance(whole.grad_fn, BackwardCFunction | None)  # torch lets no leaf be written to there
        p.computed.refuse_part(f"parameter {p.name!r} was changed in a forward")
        if p.is_sharded and (is_in_graph or not unit.has_exact_wholes or not is_safe_to_keep(whole)):
            raise UsageError(
                f"parameter {p.name!r} was changed in place inside its module's forward in a way that cannot be kept: write "
                "under `torch.no_grad()` by its own method (`weight.copy_()`) or through its `.data` (not with wire or "
                "tp_size), or change it between forwards"
            )


def check_numpy(units: Sequence[Unit], written: Sequence[Written]) -> None:
    """Raise if NumPy has written into a unit's memory: nobody has counted that, so the other ranks may not know."""
    known = {each.parameter for each in written}
    for unit in units:
        for p in unit.parameters if unit.is_in_numpy else ():
            if p not in known and unit.differs_from_rows(p):
                raise UsageError(
                    f"parameter {p.name!r} was changed in its module's forward through an array of NumPy that shares its "
                    "memory: under `torch.no_grad()` take `weight.numpy()`, of the parameter itself; or write into a copy, and "
                    "that back (`weight.copy_(torch.from_numpy(array))`)"
                )


def check_same_on_all_ranks(written: Sequence[Written], world: World) -> None:
    """Raise on all ranks if some have written other values."""
    if not world.partitions:
        return
    names = ", ".join(repr(each.parameter.name) for each in written)
    values = checksum(each.whole.detach().clone() for each in written)  # NumPy would pin the memory down
    found = world.everyone.agree([zlib.crc32(names.encode(), values)], f"what a forward wrote into {names}")
    if len({value for (value,) in found}) > 1:
        raise UsageError(
            f"the ranks have written different values into {names} during a forward: write the same on all ranks (average "
            "what comes from a rank's own batch with torch.distributed.all_reduce; nn.Embedding: without max_norm), or keep "
            "such values in a buffer"
        )


class Reads:
    """What was read outside of calls, in the running pass: one tensor for all reads of a parameter."""

    def __init__(self) -> None:
        self._known: dict[tuple[ZeroParameter, bool], tuple[Unit, Tensor]] = {}
        self._before: dict[tuple[ZeroParameter, bool], int] = {}
        self._glance = Glance()

    def find(self, p: ZeroParameter, is_traced: bool) -> Tensor | None:
        """What was read of a parameter already, in the graph or outside of it."""
        known = self._known.get((p, is_traced))
        return None if known is None else known[1]

    def add(self, unit: Unit, p: ZeroParameter, is_traced: bool, whole: Tensor) -> None:
        """Remember what was read."""
        self._known[p, is_traced] = unit, whole
        self._before[p, is_traced] = num_writes(whole)
        self._glance.add(whole)
        p.read.append(whole)

    def source_of(self, tensor: Tensor) -> Tensor:
        """The parameter that `tensor` was read from, or itself."""
        return next((p.param for (p, _), (_, known) in self._known.items() if known is tensor), tensor)

    def take_written(self) -> Iterator[Written]:
        """What was written to since it was read, or since this was asked."""
        if self._glance.is_same():  # this is asked at every read
            return
        self._glance = Glance(whole for _, whole in self._known.values())
        for key, (unit, whole) in self._known.items():
            count = num_writes(whole)
            if count != self._before[key]:
                self._before[key] = count
                yield Written(unit, key[0], whole)

    def forget(self, p: ZeroParameter, but: Tensor) -> None:
        """A parameter has new values, which `but` has: others are read again."""
        for is_traced in (False, True):
            if self._known.get((p, is_traced), (None, but))[1] is not but:
                del self._known[p, is_traced]
                self._glance = Glance(whole for _, whole in self._known.values())

    def clear(self) -> None:
        """The pass is over."""
        retire((whole, p.param) for (p, _), (_, whole) in self._known.items())
        for p, _ in self._known:
            p.read.clear()
        self._known.clear()
        self._before.clear()
        self._glance = Glance()
