"""ZeRO-R: the inputs of checkpointed layers, of which each rank of the tensor axis keeps a part.

[Note: parts of activations] Activation checkpointing keeps the input of a layer, and computes the rest again in backward. The
ranks of the tensor axis all have the same input. So each keeps one part of it, and before a layer is computed again they gather
it (P_a). While one layer computes, the input of the one before is on its way. Parts of one shape lie in one slab, made once and
used again in every step, so that what lives for long does not lie scattered among what comes and goes (M_D). Slabs in the
host's memory are filled and read beside the computation: see [Note: copies beside the computation].

The input reaches autograd as a saved tensor: `torch.utils.checkpoint` saves it before its own hooks for the layer's inside
are in place, so hooks around the checkpoint's call meet inputs only.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.exchange import Exchange
from hf_zero.config.activations import Activations
from hf_zero.engine.modules.beside import Arrival, CopyStream
from hf_zero.engine.ranks.alike import checksum
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.layout import RowLayout

logger = logging.getLogger(__name__)

_FUNCTION = "_gradient_checkpointing_func"  # where a module of transformers has its checkpoint function


class Slab:
    """Room for parts of one size, side by side.

    Args:
        num_parts: how many.
        numel: of each.
        dtype: of their elements.
        device: where they live.
        is_pinned: in host memory from which a device copies at full speed.
    """

    def __init__(self, num_parts: int, numel: int, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> None:
        with torch.inference_mode(False):
            self._rooms = torch.empty(num_parts, numel, dtype=dtype, device=device, pin_memory=is_pinned)
        self._free = list(reversed(range(num_parts)))
        self._num_parts = num_parts

    @property
    def nbytes(self) -> int:
        """Bytes of all rooms."""
        return self._rooms.nbytes

    @property
    def is_full(self) -> bool:
        """Whether no room is free."""
        return not self._free

    @property
    def is_empty(self) -> bool:
        """Whether all rooms are free."""
        return len(self._free) == self._num_parts

    def take(self, holder: object) -> Tensor:
        """A free room, until `holder` is gone."""
        index = self._free.pop()
        weakref.finalize(holder, self._free.append, index).atexit = False
        return self._rooms[index]


@dataclass(eq=False)
class ActivationPart:
    """What one rank keeps of an activation.

    Attributes:
        shape, dtype: of the whole.
        values: this rank's part; the last one may be followed by padding.
        arriving: the whole, flat and padded, and the exchange that fills it, once that is under way.
    """

    shape: torch.Size
    dtype: torch.dtype
    values: Tensor | None = None
    arriving: tuple[Tensor, Exchange | Arrival] | None = None


class PartitionedActivations:
    """Keeps parts of the inputs of a model's checkpointed layers.

    Args:
        world: the ranks.
        activations: how to keep them.

    Attributes:
        slabs: by shape and dtype.
    """

    def __init__(self, world: World, activations: Activations) -> None:
        self._world = world
        is_cut = activations.partition and world.tensor.num_ranks > 1
        self._over: Collectives | None = world.tensor if is_cut else None
        self._is_offloaded = activations.offload and world.device.type != "cpu"
        self._copies = CopyStream(world.device)
        self.slabs: dict[tuple[torch.Size, torch.dtype], list[Slab]] = {}
        self._layers: list[weakref.ref[nn.Module]] = []  # that are checkpointed
        self._in_order: list[weakref.ref[ActivationPart]] = []  # of the forward under way, or the last one
        self._known: list[
            tuple[weakref.ref[Tensor], int, weakref.ref[ActivationPart]]
        ] = []  # inputs, which layers may share
        self._is_checked = False
        if activations.partition and not is_cut:
            logger.warning("activations.partition: there is no tensor axis (tp_size is 1), so nothing is partitioned")
        if activations.offload and not self._is_offloaded:
            logger.warning("activations.offload: the model is in host memory already, so nothing is offloaded")

    @property
    def is_needed(self) -> bool:
        """Whether anything is kept otherwise than torch would."""
        return self._over is not None or self._is_offloaded

    def begin_forward(self, model: nn.Module) -> None:
        """A forward of the model begins: see to it that its checkpoints ask here."""
        self._copies.settle()
        self._in_order.clear()
        self._known.clear()
        self._layers.clear()
        for module in model.modules():
            function = vars(module).get(_FUNCTION)
            if function is None or not getattr(module, "gradient_checkpointing", False):
                continue
            self._layers.append(weakref.ref(module))
            if not isinstance(function, _Checkpoint) or function.owner() is not self:  # of an engine before
                vars(module)[_FUNCTION] = _Checkpoint(_given(function), self)

    # --- saving -------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """What is kept in place of a tensor that a checkpoint saves."""
        num_parts = 1 if self._over is None else self._over.num_ranks
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.numel() < num_parts:
            return tensor
        known = self._packed_before(tensor)
        if known is not None:
            return known
        self._check_alike(tensor)
        part = ActivationPart(tensor.shape, tensor.dtype)
        part.values = self._room_for(part, -(-tensor.numel() // num_parts))
        own = tensor.detach().reshape(-1)
        if self._over is not None:
            own = _layout(part, num_parts).elements_of(own, self._over.rank)
        room = part.values[: own.numel()]
        if self._is_offloaded:
            self._copies.down(own, room)
        else:
            room.copy_(own)
        self._in_order.append(weakref.ref(part))
        self._known.append((weakref.ref(tensor), tensor._version, weakref.ref(part)))
        return part

    def _packed_before(self, tensor: Tensor) -> ActivationPart | None:
        """The part of an input that another layer has been given too, such as the output of an encoder."""
        self._known = [known for known in self._known if known[0]() is not None]
        return next(
            (part() for source, version, part in self._known if source() is tensor and version == tensor._version), None
        )

    def _room_for(self, part: ActivationPart, numel: int) -> Tensor:
        key = part.shape, part.dtype
        if key not in self.slabs:
            for known in [known for known, slabs in self.slabs.items() if all(slab.is_empty for slab in slabs)]:
                del self.slabs[known]  # of batches of another shape
        slabs = self.slabs.setdefault(key, [])
        slab = next((slab for slab in slabs if not slab.is_full), None)
        if slab is None:
            device = torch.device("cpu") if self._is_offloaded else self._world.device
            slab = Slab(max(self._num_layers(), 1), numel, part.dtype, device, self._is_offloaded)
            slabs.append(slab)
        return slab.take(part)

    def _num_layers(self) -> int:
        """How many layers are checkpointed, without the models that hold them, which transformers marks too."""
        layers = [layer for reference in self._layers if (layer := reference()) is not None]
        ids = {id(layer) for layer in layers}
        return sum(sum(id(each) in ids for each in layer.modules()) == 1 for layer in layers)

    def _check_alike(self, tensor: Tensor) -> None:
        """Raise, on the first input, if the ranks of the tensor axis have others: what they gather would be of several."""
        if self._is_checked or self._over is None:
            return
        self._is_checked = True
        found = self._over.agree([tensor.numel(), checksum([tensor])], "the input of a checkpointed layer")
        if len({tuple(row) for row in found}) > 1:
            raise UsageError(
                f"activations.partition: ranks {list(self._over.ranks)} share a layer, but do not have the same input to it: "
                "give them the same batch (as a loader does that accelerate has prepared), and let them compute alike on it"
            )

    # --- reading ------------------------------------------------------------------------------------------------

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again; called by all ranks of the tensor axis in the same order."""
        if not isinstance(packed, ActivationPart):
            return packed  # type: ignore[no-any-return]
        if packed.arriving is None:
            self._start(packed)
        assert packed.arriving is not None
        (flat, exchange), packed.arriving = packed.arriving, None
        exchange.wait()
        before = self._before(packed)
        if before is not None:
            self._start(before)
        return flat[: math.prod(packed.shape)].view(packed.shape)

    def _start(self, part: ActivationPart) -> None:
        assert part.values is not None
        if self._is_offloaded:
            part.arriving = self._start_up(part.values)
        elif self._over is None:
            part.arriving = part.values, Exchange("an activation", 0.0)
        else:
            flat, layout, own = self._room_for_whole(part.values)
            own.copy_(part.values)
            part.arriving = flat, self._over.gather([Rows(flat, layout)], "activations")

    def _start_up(self, values: Tensor) -> tuple[Tensor, Arrival]:
        flat, layout, own = self._room_for_whole(values)
        with self._copies.up(values, own) as upload:
            exchange = None if self._over is None else self._over.gather([Rows(flat, layout)], "activations")
        return flat, Arrival(upload, exchange)

    def _room_for_whole(self, values: Tensor) -> tuple[Tensor, RowLayout, Tensor]:
        """Memory for all ranks' parts on the device, how they lie there, and where this rank's is."""
        num_ranks, rank = (1, 0) if self._over is None else (self._over.num_ranks, self._over.rank)
        layout = RowLayout((len(values) * num_ranks,), num_ranks)
        flat = torch.empty(layout.numel, dtype=values.dtype, device=self._world.device)
        return flat, layout, layout.elements_of(flat, rank)

    def _before(self, part: ActivationPart) -> ActivationPart | None:
        """The input of the layer before, which the backward computes again next, unless it is on its way."""
        alive = list(_alive(self._in_order))
        index = next((i for i, each in enumerate(alive) if each is part), 0)
        before = alive[index - 1] if index else None
        return None if before is None or before.arriving is not None else before


def _alive(parts: list[weakref.ref[ActivationPart]]) -> Iterator[ActivationPart]:
    for reference in parts:
        part = reference()
        if part is not None:
            yield part


def _layout(part: ActivationPart, num_parts: int) -> RowLayout:
    return RowLayout((math.prod(part.shape),), num_parts)


class _Checkpoint:
    """The checkpoint function of a module, inside hooks that keep parts of what it saves.

    Args:
        function: `torch.utils.checkpoint.checkpoint`, as transformers calls it.
        owner: of the parts. Weak: modules are copied and pickled.
    """

    def __init__(self, function: Callable[..., Any], owner: PartitionedActivations) -> None:
        self.function, self.owner = function, weakref.ref(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        owner = self.owner()
        if owner is None or not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(owner.pack, owner.unpack):
            return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _given, (self.function,)


def _given(function: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers has put there."""
    return function.function if isinstance(function, _Checkpoint) else function
