"""Unit: parameters that are gathered, released and reduced together, with the one state machine of their whole memory.

[Note: one storage a unit] Autograd's saved tensors remember the *storage* of a gathered parameter. So a unit keeps one
storage object for good, and only its memory comes and goes: resized to nothing at a release, and to its full size at the
next gather, whatever address that gives. A graph that is alive then sees the new bytes, and a read in between raises
torch's "data is not allocated yet" instead of reading somebody else's parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.collectives import Rows
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.parameters.quantised import is_quantised
from hf_zero.engine.parameters.records import ZeroParameter, as_dtype, gathered
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.second_copy import SecondCopy
from hf_zero.layout import place


class Residency(Enum):
    """Where the whole tensors of a unit stand.

    RELEASED -> (start_gather) -> GATHERING -> (acquire) -> WHOLE -> (last lease given back) -> RELEASED. Units that stay
    whole between uses go from WHOLE to GATHERING when the optimizer has stepped.
    """

    RELEASED = "released"
    GATHERING = "gathering"
    WHOLE = "whole"


@dataclass
class GatheredMemory:
    """Counts the bytes of gathered units, and poisons what is released where a test asks for it.

    Attributes:
        bytes: bytes held now.
        peak_bytes: the most bytes held at once since the last `reset_peak`.
        poison: fill released memory with NaN and keep it, so that a stale read shows in the numbers.
    """

    bytes: int = 0
    peak_bytes: int = 0
    poison: bool = False
    _held: dict[int, int] = field(default_factory=dict)

    def take(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give `storage` memory for `num_bytes`; what it holds is undefined."""
        if storage.nbytes() != num_bytes:
            storage.resize_(num_bytes)
        if id(storage) not in self._held:
            self._held[id(storage)] = num_bytes
            self.bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of `storage` away again."""
        self.bytes -= self._held.pop(id(storage), 0)
        if self.poison:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xFF)  # NaN in any float dtype
        else:
            storage.resize_(0)

    def reset_peak(self) -> None:
        """Start a new `peak_bytes` at what is held now."""
        self.peak_bytes = self.bytes


@dataclass(frozen=True)
class _Slot:
    """A parameter's place in its unit's memory.

    Attributes:
        parameter: whose.
        rows: the padded whole, flat, as the transport sees it.
        own: this rank's rows of it.
        whole: the whole, in its shape.
    """

    parameter: ZeroParameter
    rows: Rows
    own: Tensor
    whole: Tensor


def _fill_own_rows(slots: Sequence[_Slot]) -> None:
    """Copy this rank's rows at rest into their place, in the compute dtype, unless they live there already."""
    moved = [(slot.own, slot.parameter.local) for slot in slots]
    moved = [(own, local) for own, local in moved if own.data_ptr() != local.data_ptr()]
    if moved:
        with torch.no_grad():
            torch._foreach_copy_([own for own, _ in moved], [local for _, local in moved])


def _release_rows(slots: Iterable[_Slot]) -> None:
    """Let go of rows that were read from a disk."""
    for slot in slots:
        if (on_disk := slot.parameter.on_disk) is not None:
            on_disk.release()


class Lease:
    """The right to read a unit's whole tensors; given back once, or when nobody holds it any more."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def give_back(self, keeps: bool = False) -> None:
        """Give the right back; a second call does nothing.

        Args:
            keeps: leave the unit whole until a backward of one of its calls has ended, or its parameters have changed.
        """
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.is_kept = unit.is_kept or keeps
            unit._give_back()

    def __del__(self) -> None:
        self.give_back()


class Unit:
    """A set of parameters that are made whole together.

    Args:
        index: its number; the same on every rank.
        name: for the ledger, errors and summaries.
        parameters: in a fixed order; none belongs to another unit.
        entries: the modules whose calls need the parameters.
        world: the ranks.
        memory: what counts gathered bytes.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: list[ZeroParameter],
        entries: list[nn.Module],
        world: World,
        memory: GatheredMemory,
    ) -> None:
        self.index = index
        self.name = name
        self.parameters = parameters
        self._entries = [weakref.ref(module) for module in entries]  # weak, as in `ZeroParameter`
        self.epoch = 0
        self.residency = Residency.RELEASED
        # Whole between forward and backward. Told by events that all ranks share, never by the life of a graph: ranks
        # drop theirs at different times, and must gather alike.
        self.is_kept = False
        self.is_pinned = False  # somebody has kept a view of the memory, which therefore stays
        self.guarded: list[weakref.ref[Tensor]] = []
        self.live_calls: weakref.WeakSet[object] = weakref.WeakSet()
        self._world = world
        self._memory = memory
        self._leases = 0
        self._pending: list[Exchange] = []
        self._second: SecondCopy | None = None
        self._arriving = -1  # the epoch of the gather under way that the second copy is to be made of
        # A parameter that is whole at rest, in the compute dtype, is read where it lives.
        self._buffered = [p for p in parameters if p.is_sharded or p.compute_dtype != p.param.dtype]
        self._offsets, self.buffer_nbytes = place([p.whole_nbytes for p in self._buffered])
        self._stale = list(parameters)  # of shared memory: what has changed since it was gathered
        self._slots: dict[int, _Slot] = {}  # id(ZeroParameter) -> its place, once there has been memory
        self._storage = torch.UntypedStorage(0, device=world.device)  # type: ignore[no-untyped-call]
        self.keeps_whole = not world.config.policy.shards_parameters
        self.is_shared = world.shards.shares_memory and any(p.is_sharded for p in parameters)
        if self.keeps_whole or self.is_shared:
            self._move_in()

    def _move_in(self) -> None:
        """Take the memory for good; rows of the same dtype move into it, so the gather copies nothing.

        So it is in stages 0 to 2, and wherever ranks share memory, since nobody could give back what the others read.
        """
        if self.is_shared:
            self._storage = self._world.shards.allocate(self.buffer_nbytes, f"unit {self.name!r}")
        else:
            self._storage.resize_(self.buffer_nbytes)
        # In another format, this rank's own rows are not what it computes with.
        is_exact = self._world.config.wire.gather == "float32"
        for p, offset in zip(self._buffered, self._offsets, strict=True):
            if p.is_sharded and p.param.dtype == p.compute_dtype and is_exact and not p.layout.dim:
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
        return not (self.keeps_whole or self.is_shared or self.is_pinned)

    @property
    def address(self) -> int:
        """Where the memory is, while the unit is whole."""
        return self._storage.data_ptr()

    def num_holders(self) -> int:
        """How many tensors hold the memory; those of nodes that see to themselves do not count."""
        return torch_compat.num_holders(self._storage) - sum(view() is not None for view in self.guarded)

    def view(self, offset_bytes: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the memory; the unit must be whole."""
        assert self.is_whole, f"{self.name} is {self.residency.value}"
        empty = torch.empty(0, dtype=dtype, device=self._storage.device)
        return empty.set_(self._storage, offset_bytes // dtype.itemsize, shape, strides)

    @property
    def is_whole_elsewhere(self) -> bool:
        """Whether modules hold any of its parameters whole, inside `GatheredParameters`."""
        return bool(gathered) and any(p.is_whole_elsewhere for p in self.parameters)

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters gets gradients now."""
        return any(p.param.requires_grad for p in self.parameters)

    def trainable(self) -> list[ZeroParameter]:
        """The parameters that get gradients now."""
        return [p for p in self.parameters if p.param.requires_grad]

    @property
    def is_whole(self) -> bool:
        """Whether the whole tensors may be read."""
        return self.residency is Residency.WHOLE

    @property
    def is_leased(self) -> bool:
        """Whether somebody reads the whole tensors."""
        return self._leases > 0

    def start_gather(self, only: Iterable[ZeroParameter] | None = None) -> None:
        """Begin to make the whole tensors, as every rank does at this point; `acquire` waits for it.

        Args:
            only: parameters of this unit whose rows have changed; by default all, or those that have in shared memory.
        """
        self._wait()
        self._arriving = -1  # whatever broke off
        if not self.keeps_whole and not self.is_shared:  # also where it is held: nothing happens then
            self._memory.take(self._storage, self.buffer_nbytes)
        if not self._slots:
            self._slots = self._make_slots()
        if only is None and self.is_shared:
            only, self._stale = self._stale, []
        chosen = (
            list(self._slots.values()) if only is None else [self._slots[id(p)] for p in only if id(p) in self._slots]
        )
        items = [slot.rows for slot in chosen if slot.parameter.is_sharded]
        if items and self._world.nearby.num_ranks > 1:
            self._second = self._second or SecondCopy(items, self._world.nearby, self.name)
        if self._second is not None and self._second.epoch == self.epoch:
            _fill_own_rows([slot for slot in chosen if not slot.parameter.is_sharded])
            self._pending.append(self._second.gather())
        else:
            _fill_own_rows(chosen)
            if self._world.config.offload.is_anything:
                _release_rows(chosen)
            if items:
                self._pending.append(self._world.wired.gather(items, self.name))
                self._arriving = self.epoch
        self.residency = Residency.GATHERING

    @torch.inference_mode(False)
    def _make_slots(self) -> dict[int, _Slot]:
        """The tensors over this unit's memory, made once: its storage keeps its identity as memory comes and goes."""
        slots = {}
        for p, offset in zip(self._buffered, self._offsets, strict=True):
            flat = torch_compat.tensor_on(self._storage, offset, (p.layout.padded_numel,), p.compute_dtype)
            values = torch_compat.tensor_on(self._storage, offset, (p.layout.numel,), p.compute_dtype)
            whole = p.layout.in_shape(values, p.layout.shape)
            rows = Rows(flat, p.layout, not is_quantised(p.param))
            slots[id(p)] = _Slot(p, rows, p.layout.rows_of(flat, p.rank), whole)
        return slots

    def settle(self) -> None:
        """Wait for a gather that is under way, when there will be no other use."""
        self._wait()

    def _wait(self) -> None:
        while self._pending:
            self._pending[0].wait()
            self._pending.pop(0)
        if self._second is not None and self._arriving >= 0:
            self._second.keep(self._arriving)
            self._arriving = -1

    def acquire(self) -> Lease:
        """Wait until the whole tensors are there, and hold them.

        Raises:
            CollectiveError: a peer did not take part.
        """
        if self.residency is Residency.RELEASED:
            self.start_gather()
        self._wait()
        self.residency = Residency.WHOLE
        self._leases += 1
        return Lease(self)

    def _give_back(self) -> None:
        self._leases -= 1
        self.release_if_unused()

    def release_if_unused(self) -> None:
        """Give the memory back, if no one holds a lease and the unit does not stay whole."""
        if self._leases or self.is_kept or self.keeps_whole or self.residency is Residency.RELEASED:
            return
        if self.is_shared:
            return  # until its parameters change
        self._wait()
        if not self.is_pinned:  # its memory stays, but it is gathered like others: a rank alone may hold it
            self._memory.give_back(self._storage)
        self.residency = Residency.RELEASED

    def whole_tensors(self) -> list[Tensor]:
        """The whole parameters, in the compute dtype, as new tensors over the unit's memory; needs a lease."""
        assert self.is_whole, f"{self.name} is {self.residency.value}"
        # `.data` gives each call a version counter of its own: the transport and other calls bump others.
        slots = self._slots
        return [slots[id(p)].whole.data if id(p) in slots else p.local.detach() for p in self.parameters]

    def refresh(self) -> None:
        """Cast plain parameters again, as autocast would for every forward: nobody tells when users edit those."""
        if self.keeps_whole:
            _fill_own_rows([s for s in self._slots.values() if not isinstance(s.parameter.param, DTensor)])

    def read_whole(self, p: ZeroParameter) -> Tensor:
        """One whole parameter in the compute dtype: in this unit's memory where that stays, else in memory of its own."""
        if p not in self._buffered:
            return p.local.detach()
        if self.keeps_whole or self.is_shared:
            lease = self.acquire()
            whole = self._slots[id(p)].whole.data
            lease.give_back()
            return whole
        over = self._world.shards if is_quantised(p.param) else self._world.wired
        return self._world.gather_whole(as_dtype(p.local, p.compute_dtype), p.layout, self.name, over)

    def changed(self, parameters: Iterable[ZeroParameter]) -> None:
        """`parameters` of this unit have new rows on every rank, and `epoch` is a new one: whole tensors made before are old.

        Units that stay whole start to gather the new rows at once; the next use waits for them.
        """
        self.is_kept = False
        if self.keeps_whole:
            self.start_gather(parameters)
            if torch_compat.is_profiling():
                self._wait()  # torch's profiler corrupts memory when a send that it saw begin ends after the profile does
        elif self._leases or self.is_shared:
            self._wait()
            self._stale += [p for p in parameters if p not in self._stale]
            self.residency = Residency.RELEASED  # a graph may still hold the old bytes; the next use gathers again
        else:
            self.release_if_unused()
