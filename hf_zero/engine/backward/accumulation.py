"""What has come of one backward's gradients, until they are reduced: the one place that adds whole gradients up.

[Note: gradients under no_sync] In stages 0 and 1, a backward under `no_sync` leaves in `.grad` what it leaves there under
DDP: this rank's own whole gradient. In stage 1 it is a `DTensor` with the placement `Partial`: torch's word for a tensor
whose ranks' parts are still to be averaged. It *is* the accumulated gradient, not a picture of it: what users do to it
(`mul_`, `zero_`, `= None`) counts, and what a rank cannot do alone (`clamp_`) is torch's error. Gradients that an earlier
backward has reduced are added to it so that the average gives them back. The next backward outside `no_sync` takes it and
reduces it.

[Note: one reduction] What several calls use (a head tied to the embedding, layers that share their weights) has gradients of
each of them. As autograd does for a parameter of any model, the first waits for the last that the running backward comes to,
and their sum is reduced: one exchange, and DDP's order of additions. So it is in stages 2 and 3 too, where it costs a whole
gradient's memory as long as it waits. Apart from that are uses in parts that reentrant checkpoints run, each a backward of its
own; and gradients in half precision that an exchange sends as they are, and adds up in float32 where they arrive: their sum
would be rounded on the way, and two exchanges of them have the bytes of one in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.copies import in_dtypes
from hf_zero.engine.backward.reduction import Reducer
from hf_zero.engine.parameters.at_rest.unreduced import UnreducedGradient
from hf_zero.engine.parameters.records import ZeroParameter, is_trainable
from hf_zero.engine.parameters.user_hooks import grad_hooks, have_grad_hooks
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.unit import Unit

WholeGradients = dict[ZeroParameter, Tensor]  # those that were not used are missing


def add_up(into: WholeGradients, found: WholeGradients) -> None:
    """Add gradients to what has come before; none of the tensors is written to."""
    for p, grad in found.items():
        into[p] = into[p] + grad if p in into else grad


class Accumulation:
    """The gradients of one backward.

    Args:
        world: the ranks.
        reducer: where they go; None under `no_sync` in stages 0 and 1: then `.grad` keeps them, unreduced.
        comes_again: whether this backward will give a unit gradients of another use.
        takes_part: whether a parameter may have a gradient to be reduced.
        follows_no_sync: some ranks may have kept gradients since the last reduction.
    """

    def __init__(
        self,
        world: World,
        reducer: Reducer | None,
        comes_again: Callable[[Unit], bool],
        takes_part: Callable[[ZeroParameter], bool],
        follows_no_sync: bool,
    ) -> None:
        self.reducer = reducer
        self._comes_again = comes_again
        self._takes_part = takes_part
        self._follows_no_sync = follows_no_sync
        self._world = world
        # Stages 0 and 1 reduce once a step.
        self._keeps_whole = world.data.num_ranks > 1 and not world.shards_gradients
        self._hooked: dict[Unit, WholeGradients] = {}  # that wait for users' hooks, until all of them are there
        self._sums: dict[Unit, WholeGradients] = {}
        self._own: set[ZeroParameter] = set()  # whose sums are in memory of their own
        self._kept: dict[ZeroParameter, None] = {}
        self._taken: set[ZeroParameter] = set()  # whose `.grad` may hold what this backward has reduced already

    def add(self, unit: Unit, found: WholeGradients, is_part: bool = False) -> None:
        """Whole gradients of one use of a unit are there; those that users' hooks are to see wait until all have come.

        Args:
            unit: the unit.
            found: its gradients.
            is_part: of a use of some of its parameters: those of others wait for the rest of them, or for the end.
        """
        if any(map(Tensor._is_zerotensor, found.values())):  # what autograd gives without memory
            found = {p: grad.clone() for p, grad in found.items()}
        if unit in self._hooked or have_grad_hooks([p.param for p in found]):
            add_up(self._hooked.setdefault(unit, {}), found)
        else:
            self._hand_on(unit, found, is_part)

    def run_hooks(self) -> None:
        """Pass this rank's whole gradients through what users have registered, once a backward, as autograd does."""
        hooked, self._hooked = self._hooked, {}
        for unit in list(hooked):
            waiting = hooked.pop(unit)
            for p in unit.parameters:
                if p in waiting and grad_hooks(p.param):
                    p.computed.refuse_part(f"the gradient of {p.name!r} has a hook")
                for hook in grad_hooks(p.param) if p in waiting else ():
                    changed = hook(waiting[p])
                    waiting[p] = waiting[p] if changed is None else changed
            self._hand_on(unit, waiting)

    def finish(self, units: Iterable[Unit]) -> None:
        """Reduce what is left, and what earlier backwards have kept.

        Args:
            units: of the model, in the order in which a backward comes to them.
        """
        if self.reducer is None:
            return
        for unit in units if self._keeps_whole else list(self._sums):
            self._reduce_sums(unit, self.reducer)
        self.reducer.finish()

    def given(self) -> list[ZeroParameter]:
        """The parameters whose `.grad` has got something in this backward."""
        return list(self._kept if self.reducer is None else self.reducer.given)

    def abandon(self) -> None:
        """The backward broke off."""
        self._hooked.clear()
        self._sums.clear()
        if self.reducer is not None:
            self.reducer.abandon()

    def _hand_on(self, unit: Unit, found: WholeGradients, is_part: bool = False) -> None:
        waits = is_part or self._keeps_whole or unit in self._sums or self._comes_again(unit)
        if self.reducer is not None and not waits:
            self.reducer.ready(unit, found)
            return
        among = unit.parameters if len(found) > 1 else found  # of many reads, each has one
        given = {p: found[p] for p in filter(is_trainable, among) if p in found}
        if self.reducer is None:
            grads = list(given.values())
            values = in_dtypes(grads, [self._world.precision.reduce_for(grad.dtype) for grad in grads])
            for (p, grad), value in zip(given.items(), values, strict=True):
                self._kept[p] = None
                _keep(p, grad, value, self._world)
            return
        if unit in self._sums:
            self._add(self._sums[unit], given)
        else:
            self._sums[unit] = given
        if is_part and len(self._sums[unit]) < len([*filter(is_trainable, unit.parameters)]):
            return
        if not (self._comes_again(unit) and all(map(self.reducer.sends_sums, given))):  # see [Note: one reduction]
            self._reduce_sums(unit, self.reducer)

    def is_waiting(self, unit: Unit) -> bool:
        """Whether something has come of a unit that is not reduced yet."""
        return unit in self._sums

    def _add(self, sums: WholeGradients, given: WholeGradients) -> None:
        """Add the gradients of another use; autograd may have handed those of the first to somebody else, too."""
        for p, grad in given.items():
            if p not in sums:
                sums[p] = grad
                continue
            total = sums[p].to(self._world.precision.reduce_for(grad.dtype))
            is_own = p in self._own or total is not sums[p]
            sums[p] = total.add_(grad) if is_own else total + grad
            self._own.add(p)

    def _reduce_sums(self, unit: Unit, reducer: Reducer) -> None:
        sums, found = self._sums.pop(unit, {}), {}
        for p in filter(self._takes_part, unit.parameters):
            total = sums.get(p)
            if self._keeps_whole and (p.has_own_grad or self._follows_no_sync):
                total = self._take(p, total)
            if total is not None:
                found[p] = total
        self._own.difference_update(sums)
        if found:
            reducer.ready(unit, found)

    def _take(self, p: ZeroParameter, total: Tensor | None) -> Tensor | None:
        """What is to be reduced: the running backward's sum, and what earlier ones have left in `.grad`."""
        before, is_own = p.param.grad, _is_own(p, p.param.grad)
        # A whole gradient that was reduced is part of what other ranks have kept, so it is part of what this one gives.
        is_shared = self._follows_no_sync and before is not None and not p.is_sharded and p not in self._taken
        self._taken.add(p)
        if is_own or is_shared:
            p.param.grad = None
        if p.has_own_grad and p.param.grad is None and p.param.grad_dtype != p.param.dtype:
            p.param.grad_dtype = p.param.dtype
        p.has_own_grad = False
        if not is_own and not (is_shared and (p.averages or self._world.data.rank == 0)):
            return total
        local = torch_compat.local_of(before)  # type: ignore[arg-type]
        if not is_own:
            local = local.to(self._world.precision.reduce_for(p.compute_dtype), copy=True)
        return local if total is None else local.add_(total.to(local.dtype))


def _keep(p: ZeroParameter, grad: Tensor, value: Tensor, world: World) -> None:
    """Let `.grad` hold what is not to be reduced now: see [Note: gradients under no_sync].

    Args:
        p: the parameter.
        grad: of one use, as autograd made it; not to be written to.
        value: the same in the dtype in which gradients are added up; the tensor itself, or a copy.
        world: the ranks.
    """
    before, param = p.param.grad, p.param
    if _is_own(p, before):
        torch_compat.local_of(before).add_(value)  # type: ignore[arg-type]
        return
    own = value.clone(memory_format=torch.contiguous_format) if value is grad else value
    if before is not None:  # reduced by an earlier backward: the mean over ranks gives it back
        counts_once = world.is_first_replica if p.is_sharded else world.data.rank == 0
        factor = p.layout.num_ranks if p.averages else int(counts_once)
        p.layout.rows_of(own, p.rank).add_(torch_compat.local_of(before), alpha=factor)
    param.grad = None
    if param.dtype != own.dtype:
        param.grad_dtype = own.dtype
    param.grad = UnreducedGradient.over(own, param, p.averages) if isinstance(param, DTensor) else own
    p.has_own_grad = True


def _is_own(p: ZeroParameter, grad: Tensor | None) -> bool:
    """Whether `.grad` is what `_keep` has put there, perhaps edited since."""
    if grad is None or not p.has_own_grad:
        return False
    return not isinstance(grad, DTensor) or grad.placements[0].is_partial()
