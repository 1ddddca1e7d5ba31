"""One parameter's life: its rows at rest, its whole tensor while modules compute, its gradient. Sole writer of its storage."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.comm.copies import in_dtypes
from hf_zero.engine.parameters.at_rest.known.lineage import note_parameter
from hf_zero.engine.parameters.experts import Computed
from hf_zero.engine.parameters.host_rows import HostParameter, HostRows
from hf_zero.engine.parameters.partitioned_tensor import (
    PartitionedTensor,
    attributes_of,
    forget_owner,
    set_grads,
    shown_by_gatherer,
)
from hf_zero.engine.parameters.tensor_axis import Seen
from hf_zero.engine.parameters.user_hooks import take_hooks_along
from hf_zero.engine.parameters.whole import RECORD, STANDS_FOR, attributes_of_users, let_stand, nums_of_writes, retire
from hf_zero.engine.ranks.world import World
from hf_zero.host.scratch import Place
from hf_zero.layout import RowLayout

is_trainable = operator.attrgetter("param.requires_grad")  # of a `ZeroParameter`: whether it gets gradients now
_set = cast(Callable[[Any, str, Tensor], None], dict.__setitem__)


class Gatherer(Protocol):
    """`GatheredParameters`, inside of which modules hold whole parameters."""

    def keep(self) -> None:
        """Write what has changed into the shards; all ranks together."""

    def show(self) -> None:
        """Show what the shards hold now; all ranks together."""


gathered: dict[int, Gatherer] = {}  # id(parameter) -> what lets modules hold it whole


def gatherers_of(parameters: Iterable[ZeroParameter]) -> list[Gatherer]:
    """The `GatheredParameters` under way that hold some of these parameters, in their order."""
    return list(dict.fromkeys(gathered[id(p.param)] for p in parameters if id(p.param) in gathered))


@dataclass(eq=False)
class ZeroParameter:
    """A parameter as the engine knows it.

    Attributes:
        name: its first qualified name in the model; `aliases` are the others of a tied parameter.
        param: what the module, the optimizer and the user hold at rest: a `DTensor` over this rank's rows (a plain
            tensor in stage 0 and at world size 1).
        holders: the modules that hold it, and the attributes' names. Weak: graphs refer to parameters, and a module that
            keeps its output (`self.last = y`) keeps a graph.
        layout: how it is cut at rest; one rank where it stays whole.
        rank: this rank.
        computed: what modules compute with, and how that is cut: the same, but for experts.
        compute_dtype: dtype of the whole tensor that modules see.
        averages: whether gradients are averaged over the ranks, or summed.
        seen: how modules see what is gathered, if not as it is: see [Note: tensor axis].
        is_shared: its whole tensor lies in memory that the host's ranks share.
        host: what it exchanges with the device, if its rows rest in host memory.
    """

    name: str
    param: nn.Parameter
    holders: list[tuple[weakref.ref[nn.Module], str]]
    layout: RowLayout
    rank: int
    computed: Computed
    compute_dtype: torch.dtype
    averages: bool = True
    seen: Seen | None = None
    aliases: list[str] = field(default_factory=list)
    has_own_grad: bool = False  # `param.grad` is what no backward has reduced yet, see `accumulation`
    has_master: bool = False  # rows that no module computes with, beside a whole copy in another dtype
    is_shared: bool = False
    host: HostRows | None = None
    read: list[Tensor] = field(default_factory=list)  # what stands for it outside of calls, in the running pass
    _own_names: frozenset[str] = frozenset()  # of its attributes, if no user has set any
    _seen: list[tuple[object, Tensor, int]] = field(default_factory=list)  # with the writes before

    def __post_init__(self) -> None:
        self.dtype_at_rest = self.param.dtype

    def everywhere(self) -> list[Tensor]:
        """See [Note: attributes of users]."""
        shown = shown_by_gatherer(self.param)
        return [self.param, *(whole for _, whole, _ in self._seen), *self.read, *([] if shown is None else [shown])]

    @property
    def locations(self) -> list[tuple[nn.Module, str]]:
        """The modules that hold it, and the attributes' names."""
        return [(module, name) for holder, name in self.holders if (module := holder()) is not None]

    @cached_property
    def is_sharded(self) -> bool:
        """Whether each rank holds only its rows."""
        return self.layout.num_ranks > 1

    @cached_property
    def is_spread(self) -> bool:
        """Whether several ranks hold what modules compute with."""
        return self.computed.layout.num_ranks > 1

    @property
    def local(self) -> Tensor:
        """This rank's rows, in the dtype at rest, without autograd."""
        return torch_compat.local_of(self.param)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's rows."""
        return self.layout.local_shape(self.rank)

    @cached_property
    def local_numel(self) -> int:
        """The number of elements of this rank's rows."""
        return self.layout.local_numel(self.rank)

    @property
    def whole_nbytes(self) -> int:
        """Bytes, padded, of what modules compute with."""
        return self.computed.layout.padded_numel * self.compute_dtype.itemsize

    @property
    def is_whole_elsewhere(self) -> bool:
        """Whether modules see a whole tensor that is not the engine's: inside `GatheredParameters`."""
        if id(self.param) in gathered and not self._seen:
            for module, name in self.locations:
                held = module._parameters.get(name)
                if held is not self.param and at_rest_id(held) == id(self.param):
                    return True
        return False

    def move_into(self, storage: torch.UntypedStorage, offset_bytes: int) -> None:
        """Let the rows at rest live inside a whole buffer, so that the optimizer writes where the gather reads."""
        start, stop = self.computed.layout.span(self.computed.rank)
        itemsize = self.param.dtype.itemsize
        alias = torch_compat.storage_alias(storage, offset_bytes + start * itemsize, (stop - start) * itemsize)
        rows = torch_compat.tensor_on(alias, 0, self.local_shape, self.param.dtype)
        rows.copy_(self.local)
        torch_compat.set_local(self.param, rows)

    def move_to(self, place: Place) -> None:
        """Let the rows at rest live on a disk."""
        place.tensor.copy_(self.local)
        torch_compat.set_local(self.param, place.tensor)
        self.param._zero_place = place  # type: ignore[attr-defined]  # outlives this engine
        place.release()

    @property
    def on_disk(self) -> Place | None:
        """Where the rows at rest lie, if that is on a disk."""
        place = getattr(self.param, "_zero_place", None)
        is_there = isinstance(place, Place) and place.tensor.data_ptr() == self.local.data_ptr()
        return place if is_there else None

    @cached_property
    def _is_in_rnn(self) -> bool:
        return any(isinstance(module, nn.RNNBase) for module, _ in self.locations)

    @property
    def rests_as_computed(self) -> bool:
        """Whether modules can compute with it as it is at rest, but for being cut."""
        return self.compute_dtype == self.param.dtype and self.host is None

    @property
    def rests_as_seen(self) -> bool:
        """Whether what modules see is the whole of it, a plain tensor, and its rows lie where it is gathered."""
        return self.seen is None and self.host is None and not self.computed.is_part

    def leave(self, engine: Any) -> None:
        """Its engine ends: it is an ordinary parameter again."""
        forget_owner(self.param, engine)
        if type(self.param) is HostParameter:
            cast(Any, self.param).__class__ = nn.Parameter


# --- all parameters of a unit in one call: a host pays for calls by the parameter -------------------------------------------


def as_seen(parameters: Sequence[ZeroParameter], wholes: Sequence[Tensor]) -> list[Tensor]:
    """What modules see of gathered tensors, in their graph; made once a call."""
    let_stand([(whole, p) for p, whole in zip(parameters, wholes, strict=True) if p.seen is None])
    found = [whole if p.seen is None else p.seen.of(whole) for p, whole in zip(parameters, wholes, strict=True)]
    for p, seen in zip(parameters, found, strict=True):
        if vars(p.param).keys() != p._own_names:  # a look at a parameter without users' attributes costs nothing
            attributes = attributes_of_users(p.param)
            vars(seen).update(attributes)
            p._own_names = frozenset() if attributes else frozenset(vars(p.param))
    return found


def push(owner: object, parameters: Sequence[ZeroParameter], wholes: Sequence[Tensor]) -> None:
    """Let modules see whole tensors under the names of parameters, until `pop(owner, parameters)`."""
    moves = []
    for p, whole, count in zip(parameters, wholes, nums_of_writes(wholes), strict=True):
        moves.append((p, whole, p._seen[-1][1] if p._seen else p.param))
        p._seen.append((owner, whole, count))
    _install(moves)


def pop(owner: object, parameters: Sequence[ZeroParameter]) -> list[tuple[ZeroParameter, Tensor]]:
    """Let modules see what they saw before `push(owner, parameters, ...)`: an outer call's whole tensors, or the rows.

    Returns:
        The whole tensors that were written to meanwhile: see [Note: writes in a forward].
    """
    found, moves, places = [], [], []
    for p in parameters:
        seen = p._seen
        for place in reversed(range(len(seen))):
            if seen[place][0] is owner:
                _, whole, before = seen[place]
                if place == len(seen) - 1:
                    moves.append((p, seen[place - 1][1] if place else p.param, whole))
                found.append((p, whole, before))
                places.append(place)
                break
    _install(moves)  # first: should it be interrupted, the next `pop` does the rest
    for (p, _, _), place in zip(found, places, strict=True):
        del p._seen[place]
    counts = nums_of_writes([whole for _, whole, _ in found])
    retire([(whole, p.param) for p, whole, _ in found])
    return [(p, whole) for (p, whole, before), count in zip(found, counts, strict=True) if count != before]


def shown_by(owner: object, parameters: Sequence[ZeroParameter]) -> list[Tensor]:
    """What `push(owner, parameters, ...)` lets modules see, or will again."""
    found = []
    for p in parameters:
        for each, whole, _ in p._seen:
            if each is owner:
                found.append(whole)
                break
    return found


def _install(moves: Sequence[tuple[ZeroParameter, Tensor, Tensor]]) -> None:
    """Put the second tensor of each where the third is: what a user has assigned meanwhile stays."""
    for p, tensor, before in moves:
        if p._is_in_rnn:
            put(p.locations, tensor)
            continue
        for holder, attribute in p.holders:
            module = holder()
            if module is not None and module._parameters.get(attribute) is before:
                _set(module._parameters, attribute, tensor)  # not as users put it back


def gradient_rows(results: Sequence[tuple[ZeroParameter, Tensor]]) -> list[tuple[ZeroParameter, Tensor]]:
    """Reduced gradients of this rank's rows, in their shape; contiguous: fused steps look at memory, not at strides."""
    return [
        (p, flat if flat.ndim == len(p.local_shape) else p.layout.in_shape(flat, p.local_shape).contiguous())
        for p, flat in results
    ]


def add_gradients(results: Sequence[tuple[ZeroParameter, Tensor]]) -> None:
    """Add reduced gradients of this rank's rows to `param.grad` of each parameter: by one launch, not by one a parameter.

    Args:
        results: flat, [elements of this rank], reduce dtype; kept where they become the gradient.
    """
    found = gradient_rows(results)
    there = [(torch_compat.local_of(p.param.grad), rows) for p, rows in found if p.param.grad is not None]
    if there:
        with torch.no_grad():
            torch._foreach_add_([total for total, _ in there], [rows for _, rows in there])
    first = [(p, rows) for p, rows in found if p.param.grad is None]
    set_grads([p.param for p, _ in first], rows_at_rest(first))


def rows_at_rest(found: Sequence[tuple[ZeroParameter, Tensor]]) -> list[Tensor]:
    """Reduced rows in the dtype of their parameters at rest."""
    return in_dtypes([rows for _, rows in found], [p.param.dtype for p, _ in found])


def at_rest(param: nn.Parameter) -> nn.Parameter:
    """What a whole parameter stands for, inside `GatheredParameters` or while its module is called; any other is at rest."""
    known = vars(param)
    found: nn.Parameter = known[RECORD].param if RECORD in known else known.get(STANDS_FOR, param)
    return found


def at_rest_id(param: nn.Parameter | None) -> int:
    """The id of a parameter; of the one that it stands for."""
    return id(None if param is None else at_rest(param))


def is_gathered(param: Tensor) -> bool:
    """Whether this is a whole parameter that stands for one inside `GatheredParameters`, now."""
    return STANDS_FOR in vars(param)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which costs a microsecond where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def put(locations: list[tuple[nn.Module, str]], tensor: Tensor) -> None:
    """Let modules hold `tensor` as a parameter, without the checks and copies of an ordinary assignment."""
    for module, attribute in locations:
        _set(module._parameters, attribute, tensor)
        if isinstance(module, nn.RNNBase):  # keeps a list of its own
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def cut(param: nn.Parameter, world: World, dtype: torch.dtype, values: Tensor | None = None) -> nn.Parameter:
    """A parameter that holds this rank's elements of `param` in memory of its own, on the ranks' device; attributes come along.

    Args:
        param: the whole parameter, or a `DTensor` over the tensor axis; not changed.
        world: the ranks.
        dtype: dtype at rest.
        values: of the whole parameter, where they are not its own.
    """
    where = world.cut_of(param)
    whole = torch_compat.local_of(param) if values is None else values
    rows = where.rows.rows_of(whole, where.shard_rank)
    local = rows.to(rows.device if rows.is_meta else world.home_of(param), dtype, copy=True)
    return wrap(local, world, param)


def wrap(local: Tensor, world: World, like: nn.Parameter) -> nn.Parameter:
    """A parameter over this rank's elements `local`, moved to its device, with the attributes and `requires_grad` of `like`."""
    local = local if local.is_meta else local.to(world.home_of(like))
    new = PartitionedTensor.over(local.contiguous(), world.cut_of(like), world).as_parameter(like.requires_grad)
    if not isinstance(like, PartitionedTensor):  # it has them among its attributes
        take_hooks_along(like, new)
    for key, value in attributes_of(like).items():
        setattr(new, key, value)
    if not local.is_meta:
        note_parameter(cast(PartitionedTensor, new))
    return new
