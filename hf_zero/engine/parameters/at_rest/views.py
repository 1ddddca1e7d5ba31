"""Views of tensors at rest: see [Note: the rule for tensors at rest] in `partitioned_tensor`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.engine.parameters.at_rest.gathers import gather
from hf_zero.engine.parameters.at_rest.known.weak_tensor import WeakTensor
from hf_zero.engine.parameters.at_rest.root import AtRest, Root
from hf_zero.engine.parameters.at_rest.rule import run
from hf_zero.engine.ranks.apart import same_bits
from hf_zero.errors import UsageError

Step = Callable[[Tensor], Tensor]  # takes a view
_OF_TORCH_SAVE = 2  # the protocol that it pickles by


class Readable(AtRest):
    """What needs the values themselves, in Python."""

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor; in the graph, its gradient is reduced over the ranks as that of any use in the model."""
        tensor = cast(Tensor, self)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return tensor.clone()
        (whole,) = gather([self.root], f"the whole of {self.describe()}")
        return self.of(whole if self.root.is_cut and self.root.shown is None else whole.detach())

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor's values; of a parameter, to be read only: what is written into a copy would be lost."""
        if not force and torch.is_grad_enabled() and cast(Tensor, self).requires_grad:
            raise UsageError(f"numpy() of {self.describe()}, which is in the graph: call `.detach().numpy()`")
        with torch.no_grad():
            values = self.full_tensor().numpy(force=force)
        if self.root.is_cut and self.root.shown is None and self.root.param is not None:
            values.flags.writeable = False
        return values

    def __dlpack__(self, **_: Any) -> NoReturn:
        """Raise: there is no memory for another library to read."""
        raise UsageError(f"DLPack of {self.describe()}, which is partitioned: hand on `.full_tensor()`, of all ranks")

    def data_ptr(self) -> int:
        """Where it would be if it were whole: no memory, but another place for each parameter. See `addresses`."""
        tensor = cast(Tensor, self)
        if (whole := self.root.shown) is not None:
            return self.of(whole).data_ptr()
        return self.root.place.data_ptr() + int(tensor.storage_offset()) * tensor.itemsize

    def untyped_storage(self) -> torch.UntypedStorage:
        """What tells where the whole would be, and how large, see `data_ptr`."""
        if (whole := self.root.shown) is not None:
            return whole.untyped_storage()
        return self.root.place

    def storage(self) -> Any:
        """See `untyped_storage`."""
        return torch.TypedStorage(wrap_storage=self.untyped_storage(), dtype=cast(Tensor, self).dtype, _internal=True)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """The whole tensor's values, as Python numbers."""
        with torch.no_grad():
            return self.full_tensor().tolist()

    def __format__(self, spec: str) -> str:
        tensor = cast(Tensor, self)
        if tensor.ndim or isinstance(tensor, nn.Parameter):
            return object.__format__(self, spec)
        return tensor.detach().item().__format__(spec)  # as a plain tensor, and not as a plain parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the whole tensor: what `torch.save` writes, anyone may load; tied weights once."""
        with torch.no_grad():
            whole, tensor = self.full_tensor(), cast(Tensor, self)
        if protocol == _OF_TORCH_SAVE and isinstance(self, Root):
            whole = _written_before(self.rows, whole)
        is_param = isinstance(tensor, nn.Parameter)
        saved = nn.Parameter(whole, tensor.requires_grad) if is_param else whole.requires_grad_(tensor.requires_grad)
        return saved.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_whole_of: dict[int, tuple[weakref.ref[Tensor], WeakTensor]] = {}  # by the id of rows: what a save writes of them


def _written_before(rows: Tensor, whole: Tensor) -> Tensor:
    """The whole of these rows as the save that is under way has it already, of another name; else as given."""
    number = id(rows)
    of, known = _whole_of.get(number, (None, None))
    before = known.tensor() if of is not None and known is not None and of() is rows else None
    if before is not None and before.shape == whole.shape and same_bits(before, whole):
        return before
    _whole_of[number] = weakref.ref(rows, lambda _: _whole_of.pop(number, None)), WeakTensor(whole)
    return whole


class View(Readable, Tensor):
    """A view of a tensor at rest: how it was taken, not what it shows."""

    _root: Root
    _steps: tuple[Step, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def taken_from(cls, root: Root, steps: tuple[Step, ...], seen: Tensor) -> View:
        """The view of `root` that `steps` take one after another, which looks like `seen`."""
        new: View = Tensor._make_wrapper_subclass(
            cls, seen.shape, seen.stride(), seen.storage_offset(), dtype=seen.dtype, device=cast(Tensor, root).device
        )
        torch._C._set_throw_on_mutable_data_ptr(new)
        new._root, new._steps = root, steps
        return new

    @property
    def root(self) -> Root:
        """See `AtRest.root`."""
        return self._root

    def of(self, whole: Tensor) -> Tensor:
        """See `AtRest.of`."""
        for step in self._steps:
            whole = step(whole)
        return whole

    def taken(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See `AtRest.taken`."""
        return views(self._root, self._steps, func, args, kwargs)

    def alias(self) -> View:
        """See `AtRest.alias`."""
        return View.taken_from(self._root, self._steps, self)

    def describe(self) -> str:
        """See `AtRest.describe`."""
        return f"a view of {self._root.describe()}"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"View(shape={tuple(self.shape)}, of={self._root.describe()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = new = self.detach().clone()
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """See [Note: the rule for tensors at rest]."""
        return torch_compat.outside_compiled_graphs(run)(func, args, kwargs or {})


def views(root: Root, steps: tuple[Step, ...], func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator that takes views gives: one, or several."""
    seen = _like(root)
    args, kwargs = pytree.tree_map_only(AtRest, _like, (args, kwargs))  # of others, only the shape counts
    for step in steps:
        seen = step(seen)
    result = func(seen, *args, **kwargs)
    if isinstance(result, Tensor):
        return View.taken_from(root, (*steps, lambda whole: func(whole, *args, **kwargs)), result)
    piece = functools.partial(functools.partial, _piece, func, args, kwargs)
    return type(result)(View.taken_from(root, (*steps, piece(place)), one) for place, one in enumerate(result))


def _like(shown: AtRest) -> Tensor:
    tensor = cast(Tensor, shown)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _piece(func: Any, args: Any, kwargs: Any, place: int, whole: Tensor) -> Tensor:
    return cast(Tensor, func(whole, *args, **kwargs)[place])
