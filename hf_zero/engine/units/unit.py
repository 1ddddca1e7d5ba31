"""Unit: parameters that are gathered, released and reduced together, with the one state machine of their whole memory.

[Note: one storage a unit] Autograd's saved tensors remember the *storage* of a gathered parameter. So a unit keeps one
storage object for good, and only its memory comes and goes: resized to nothing at a release, and to its full size at the
next gather, whatever address that gives. A graph that is alive then sees the new bytes, and a read in between raises
torch's "data is not allocated yet" instead of reading somebody else's parameters.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.collectives import Rows
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.parameters.quantised import is_quantised
from hf_zero.engine.parameters.records import ZeroParameter, as_dtype, gathered
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.storage.axes import UnitAxes
from hf_zero.engine.units.storage.from_host import Upload, go_ahead, going_up
from hf_zero.engine.units.storage.memory import GatheredMemory, Slot, fill_own_rows, release_rows
from hf_zero.engine.units.storage.residency import NEXT, WHOLE, Lease, LiveCalls, Residency, Tenure
from hf_zero.engine.units.storage.second_copy import SecondCopy
from hf_zero.errors import ZeroError
from hf_zero.layout import place

logger = logging.getLogger(__name__)


class Unit:
    """A set of parameters that are made whole together.

    Args:
        index: its number; the same on every rank.
        name: for the ledger, errors and summaries.
        parameters: in a fixed order; none belongs to another unit.
        entries: the modules whose calls need the parameters.
        world: the ranks.
        memory: what counts gathered bytes.
        stays_whole: between uses, in stage 3 too.

    Attributes:
        axes: among which ranks its exchanges are.
        epoch: counts the changes of its rows, alike on all ranks: a backward whose forward saw another one raises.
        nbytes: of the whole of each parameter.
        num_leases: how many read the whole tensors.
        guarded: views that nodes of graphs keep, which make the unit whole before they run.
        is_shared: the host's ranks read the same memory.
        stays: whether it is kept beyond its backward, until its parameters change; alike on all ranks.
        live_calls: whose graphs live: gradients are reduced after the last of them that a backward comes to.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: list[ZeroParameter],
        entries: list[nn.Module],
        world: World,
        memory: GatheredMemory,
        stays_whole: bool = False,
    ) -> None:
        self.index, self.name, self.parameters = index, name, parameters
        self._entries = [weakref.ref(module) for module in entries]  # weak, as in `ZeroParameter`
        self.epoch, self.residency = 0, Residency.RELEASED
        self.guarded: list[weakref.ref[Tensor]] = []
        self._world, self._memory, self.axes = world, memory, UnitAxes.of(parameters, world)
        self.num_leases, self.stays, self.live_calls = 0, False, LiveCalls()
        self._pending: list[Exchange | Upload] = []
        self._second: SecondCopy | None = None
        self._arriving = -1  # the epoch of the gather under way that the second copy is to be made of
        # A parameter that is whole at rest, in the compute dtype, is read where it lives.
        self._buffered = [p for p in parameters if p.is_spread or p.compute_dtype != p.param.dtype or p.host]
        self.nbytes = [p.whole_nbytes for p in parameters]
        self._offsets, self.buffer_nbytes = place([p.whole_nbytes for p in self._buffered])
        self._stale = list(parameters)  # of shared memory: what has changed since it was gathered
        self._slots: dict[ZeroParameter, Slot] = {}  # once there has been memory
        self._storage = torch.UntypedStorage(0, device=world.device)  # type: ignore[no-untyped-call]
        self.keeps_whole = stays_whole or not world.shards_parameters  # and gathers new rows at once
        self.tenure = Tenure.OWNED if self.keeps_whole else Tenure.RESIZED
        if self.axes.shards.shares_memory and any(p.is_spread for p in parameters):
            self.tenure = Tenure.SHARED
        self.is_shared = self.tenure is Tenure.SHARED
        for p in self._buffered:
            p.is_shared = self.is_shared
        if not self.is_releasable:
            self._move_in()

    def _move_in(self) -> None:
        """Take the memory for good; rows of the same dtype move into it, so the gather copies nothing.

        So it is in stages 0 to 2, and wherever ranks share memory, since nobody could give back what the others read.
        """
        if self.is_shared:
            self._storage = self.axes.shards.allocate(self.buffer_nbytes, f"unit {self.name!r}")
        else:
            self._storage.resize_(self.buffer_nbytes)
        # In another format, this rank's own rows are not what it computes with.
        is_exact = self.has_exact_wholes
        for p, offset in zip(self._buffered, self._offsets, strict=True):
            is_same = p.is_spread and p.param.dtype == p.compute_dtype and not p.host
            if is_same and is_exact and not p.layout.dim:
                p.move_into(self._storage, offset)
            else:
                p.has_master = True

    @property
    def entries(self) -> list[nn.Module]:
        """The modules whose calls need the parameters."""
        return [module for entry in self._entries if (module := entry()) is not None]

    @property
    def is_releasable(self) -> bool:
        """Whether the memory comes and goes."""
        return self.tenure is Tenure.RESIZED

    @property
    def comes_and_goes(self) -> bool:
        """Whether it is whole for a while only: gathered for each use, or kept from one to the next."""
        return self.tenure in (Tenure.RESIZED, Tenure.PINNED)

    @property
    def is_in_numpy(self) -> bool:
        """Whether NumPy has been given the memory, which nobody can resize then, and may write into it uncounted."""
        return not self.is_shared and not self._storage.resizable()

    def differs_from_rows(self, p: ZeroParameter) -> bool:
        """Whether this rank's rows of a whole are not those at rest, as where NumPy has written; `p` has not been edited."""
        slot = self._slots.get(p)
        if slot is None or not self.has_exact_wholes:
            return False
        return not torch.equal(slot.own, as_dtype(p.local.to(slot.own.device), p.compute_dtype))

    def pin(self) -> None:
        """Somebody has kept a view of the memory: it stays for good, if it would not anyway."""
        if self.is_releasable:
            self.tenure = Tenure.PINNED
            logger.warning(
                "a view of the parameters of %r outlives their module's call (an attribute, a list, a custom function's "
                "context): its memory stays from now on",
                self.name,
            )

    @property
    def address(self) -> int:
        """Where the memory is, while the unit is whole."""
        return self._storage.data_ptr()

    def num_holders(self) -> int:
        """How many tensors hold the memory; those of nodes that see to themselves do not count."""
        return torch_compat.num_holders(self._storage) - sum(view() is not None for view in self.guarded)

    def view(self, offset_bytes: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the memory; the unit must be whole."""
        assert self.residency in WHOLE, f"{self.name} is {self.residency.value}"
        empty = torch.empty(0, dtype=dtype, device=self._storage.device)
        return empty.set_(self._storage, offset_bytes // dtype.itemsize, shape, strides)

    @property
    def is_whole_elsewhere(self) -> bool:
        """Whether modules hold any of its parameters whole, inside `GatheredParameters`."""
        return bool(gathered) and any(p.is_whole_elsewhere for p in self.parameters)

    @property
    def is_whole(self) -> bool:
        """Whether the whole tensors may be read."""
        return self.residency in WHOLE

    @property
    def is_to_come(self) -> bool:
        """Whether ranks have to wait for each other before the whole tensors may be read."""
        return not self.is_whole and self.comes_and_goes

    def start_gather(self, only: Iterable[ZeroParameter] | None = None) -> None:
        """Begin to make the whole tensors, as every rank does at this point; `acquire` waits for it.

        Args:
            only: parameters of this unit whose rows have changed; by default all, or those that have in shared memory.
        """
        assert self.keeps_whole or self.stays or not self.is_whole, (
            f"{self.name} would be gathered over what others read"
        )
        self.settle()
        self._arriving = -1  # whatever broke off
        if self.comes_and_goes:  # also where it is held: nothing happens then
            self._memory.take(self._storage, self.buffer_nbytes)
        self._slots = self._slots or self._make_slots()
        if only is None and self.is_shared:
            only, self._stale = self._stale, []
        chosen = list(self._slots.values()) if only is None else [self._slots[p] for p in only if p in self._slots]
        items = [slot.rows for slot in chosen if slot.parameter.is_spread]
        if items and (nearby := self._world.nearby).num_ranks > 1 and not self.keeps_whole:
            self._second = self._second or SecondCopy(items, nearby, self.name)
        if self._second is not None and self._second.epoch == self.epoch:
            whole = [slot for slot in chosen if not slot.parameter.is_spread]
            fill_own_rows([slot for slot in whole if not slot.parameter.host])
            with self._going_up([slot for slot in whole if slot.parameter.host]):
                self._pending.append(self._second.gather())
        else:
            fill_own_rows([slot for slot in chosen if not slot.parameter.host])
            if self._world.config.offload.is_anything:
                release_rows(chosen)
            with self._going_up([slot for slot in chosen if slot.parameter.host]):
                if items:
                    self._pending.append(self.axes.wired.gather(items, self.name))
                    self._arriving = self.epoch
        self._become(Residency.GATHERING)

    @contextlib.contextmanager
    def _going_up(self, slots: list[Slot]) -> Iterator[None]:
        """Within: rows that rest in host memory have gone up; see [Note: on the way up]."""
        if not slots:
            yield
            return
        with going_up(slots, self._world.device) as upload:
            yield
        self._pending.append(upload)

    def _become(self, new: Residency) -> None:
        """The only way from one state to another; see `Residency`."""
        is_regathered = (self.keeps_whole or self.stays) and new is Residency.GATHERING
        assert is_regathered or new in NEXT[self.residency], (
            f"{self.name} goes from {self.residency.value} to {new.value}"
        )
        self.residency = new

    @torch.inference_mode(False)
    def _make_slots(self) -> dict[ZeroParameter, Slot]:
        """The tensors over this unit's memory, made once: its storage keeps its identity as memory comes and goes."""
        slots = {}
        for p, offset in zip(self._buffered, self._offsets, strict=True):
            layout = p.computed.layout
            flat = torch_compat.tensor_on(self._storage, offset, (layout.padded_numel,), p.compute_dtype)
            values = torch_compat.tensor_on(self._storage, offset, (layout.numel,), p.compute_dtype)
            rows, own = Rows(flat, layout, not is_quantised(p.param)), layout.rows_of(flat, p.computed.rank)
            slots[p] = Slot(p, rows, own, layout.in_shape(values, layout.shape))
        return slots

    def settle(self) -> None:
        """Wait for a gather that is under way."""
        while self._pending:
            self._pending[0].wait()
            self._pending.pop(0)  # only now: should a wait raise, the next one does too, and nobody reads half a unit
        if self._second is not None and self._arriving >= 0:
            self._second.keep(self._arriving)
            self._arriving = -1

    _is_exiting: ClassVar = staticmethod(sys.is_finalizing)  # by then the module has no names any more

    def __del__(self) -> None:
        """Wait for what was to be gathered, so that its memory is free: peers have begun it, too, or do so soon."""
        if self._pending and not self._is_exiting() and not self.axes.shards.in_flight.is_broken:
            with contextlib.suppress(ZeroError):
                self.settle()

    def acquire(self) -> Lease:
        """Wait until the whole tensors are there, and hold them.

        Raises:
            CollectiveError: a peer did not take part.
        """
        if self.residency is Residency.RELEASED:
            self.start_gather()
        self.settle()
        if self.residency is Residency.GATHERING:
            self._become(Residency.WHOLE)
        self.num_leases += 1
        return Lease(self)

    def take_back(self, keeps: bool) -> None:
        """A lease ends; see `Lease.give_back`."""
        self.num_leases -= 1
        if keeps and self.residency is Residency.WHOLE:
            self._become(Residency.KEPT)
        self.release_if_unused()

    def stop_keeping(self) -> None:
        """The backward that the unit was kept for is over, or will not come; see `release_if_unused`."""
        self.stays = False
        if self.residency is Residency.KEPT:
            self._become(Residency.WHOLE)

    def release_if_unused(self) -> None:
        """Release the tensors, if nobody holds a lease and the unit does not stay whole."""
        if self.num_leases or self.stays or self.residency in (Residency.RELEASED, Residency.KEPT):
            return
        if not self.comes_and_goes:
            return  # until its parameters change
        # A transport that still writes would write into somebody else's memory. On a GPU the compute stream waits, on which
        # the allocator hands the memory out again: so what was queued there before has read it by then.
        self.settle()
        if self.is_in_numpy:
            self.pin()
        if self.tenure is Tenure.RESIZED:
            self._memory.give_back(self._storage)
        self._become(Residency.RELEASED)

    def whole_tensors(self) -> list[Tensor]:
        """The whole parameters, in the compute dtype, as new tensors over the unit's memory; needs a lease."""
        assert self.is_whole, f"{self.name} is {self.residency.value}"
        # `.data` gives each call a version counter of its own: the transport and other calls bump others.
        slots = self._slots
        return [slots[p].whole.data if p in slots else p.local.detach() for p in self.parameters]

    def refresh(self) -> None:
        """Cast plain parameters again, as autocast would for every forward: nobody tells when users edit those."""
        if not self.keeps_whole:
            return
        plain = [s for s in self._slots.values() if not isinstance(s.parameter.param, DTensor)]
        fill_own_rows([s for s in plain if not s.parameter.host])
        with self._going_up([s for s in plain if s.parameter.host and s.parameter.host.has_changed(s.parameter.param)]):
            pass  # nothing is gathered behind them

    @torch.inference_mode(False)
    def read_whole(self, p: ZeroParameter) -> Tensor:
        """One whole parameter in the compute dtype: in this unit's memory where that stays, else in memory of its own."""
        is_part = p.computed.is_part
        if p not in self._buffered and not is_part:
            return p.local.detach()
        if not self.comes_and_goes and not is_part:
            self.acquire().give_back()
            return self._slots[p].whole.data
        self._world.meet(f"a read of parameter {p.name!r} outside its module's call (all ranks must read it)")
        over = self._world.shards if is_quantised(p.param) else self._world.wired
        own = as_dtype(p.local.to(self._world.device), p.compute_dtype)
        return self._world.gather_whole(own, p.layout, self.name, over)

    @property
    def has_exact_wholes(self) -> bool:
        """Whether whole tensors have the bits of the rows, in the compute dtype."""
        return self._world.config.wire.gather == "float32"

    def whole_at_hand(self, p: ZeroParameter) -> Tensor | None:
        """The whole tensor of a parameter, with its bits at rest, where it stays whole between uses."""
        slot, is_exact = self._slots.get(p), self.has_exact_wholes and p.rests_as_seen
        is_there = self.keeps_whole and self.residency is not Residency.RELEASED
        if slot is None or not is_there or not is_exact or p.compute_dtype != p.param.dtype:
            return None
        self.settle()
        return slot.whole

    @torch.no_grad()
    def keep_written(self, p: ZeroParameter, whole: Tensor) -> None:
        """Keep this rank's rows of what a module has written into a whole tensor, on every rank, of `p`.

        The epoch stays: the graphs of this forward go on with what they find, as in torch.
        """
        local, slot = p.local, self._slots.get(p)
        if self._second is not None:
            self._second.epoch = -1
        if slot is not None and not self.is_shared:
            self.settle()
            if self.residency is not Residency.RELEASED and slot.whole.data_ptr() != whole.data_ptr():
                slot.whole.copy_(whole)  # it was read, into memory of its own
        own = p.layout.rows_of(whole.detach(), p.rank).to(local.device)
        if p.host is not None:
            p.host.is_stale = True
        if own.dtype != local.dtype:  # what was not written keeps the digits that this dtype has not
            local.copy_(torch.where(own != local.to(own.dtype), own.to(local.dtype), local))
        elif own.data_ptr() != local.data_ptr():
            local.copy_(own)
        if slot is not None and self.is_shared:
            self.changed([p])

    def changed(self, parameters: Iterable[ZeroParameter]) -> None:
        """`parameters` of this unit have new rows on every rank, and `epoch` is a new one: whole tensors made before are old.

        Units that stay whole start to gather the new rows at once; the next use waits for them.
        """
        parameters = list(parameters)
        for p in parameters:
            if p.host is not None:
                p.host.is_stale = True
        if not (renews := self.keeps_whole or self.stays):
            self.stop_keeping()
            go_ahead([p for p in parameters if p.host is not None], self._world.device)
        if renews:
            self.start_gather(parameters)
            if torch_compat.is_profiling():
                self.settle()  # torch's profiler corrupts memory when a send that it saw begin ends after the profile does
        elif self.num_leases or self.is_shared:
            self.settle()
            self._stale += [p for p in parameters if p not in self._stale]
            if self.residency is not Residency.RELEASED:
                self._become(Residency.RELEASED)  # a graph may still hold the old bytes; the next use gathers again
        else:
            self.release_if_unused()
