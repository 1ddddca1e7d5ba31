"""The type of a partitioned parameter at rest: a `DTensor` over this rank's rows that tells its engine what is done to it.

[Note: an edit is seen] Users change parameters by hand: `p.mul_()`, `p.data.copy_()`, `torch._foreach_add_`, a data
assignment. Torch's version counters miss most of that, so no bookkeeping stands on them. Instead every in-place operation
on a parameter, on an alias of it (`p.data`, `p.detach()`) or on a view of its rows passes `__torch_dispatch__` here,
which tells the engine *before* the rows change. Ranks that share memory then meet first, so no peer still computes with
the old values; and every rank gathers the changed parameters before their next use. All ranks run the same code, so they
meet and gather alike. A write to what is only a copy (a row picked by an index has to be fetched from its owner) is an
error, not a lost edit. Optimizers of torch tell the engine themselves, by torch's step hooks.

[Note: an error in our own words] An operation that mixes a partitioned parameter with an ordinary tensor raises torch's
"got mixed torch.Tensor and DTensor", which never says why the parameter is a `DTensor`. Here it becomes a `UsageError`
that does. Values computed from a parameter are of this type too while gradients are recorded, so they do the same; but
for numbers, which are made whole (`ComputedScalar`).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hf_zero import torch_compat
from hf_zero.engine.parameters import foreach
from hf_zero.engine.parameters.computed import with_mean_gradient
from hf_zero.engine.parameters.user_hooks import register
from hf_zero.engine.ranks.world import own_rows, world_that_cut
from hf_zero.errors import UsageError
from hf_zero.layout import Cut


class Owner(Protocol):
    """What a parameter tells: its engine."""

    def before_edit(self, param: Tensor) -> None:
        """The rows of `param` are about to be changed by hand, on every rank."""

    def whole_at_rest(self, param: Tensor) -> Tensor:
        """The whole parameter in its dtype at rest, in the graph."""

    def name_of(self, param: Tensor) -> str:
        """Its name in the model."""


_owners: dict[
    int, weakref.ref[Owner]
] = {}  # id(parameter) -> its engine. Not an attribute: `module.to` swaps those away


def set_owner(param: Tensor, owner: Owner) -> None:
    """Let `owner` be told from now on."""
    _owners[id(param)] = weakref.ref(owner)


def forget_owner(param: Tensor, owner: Owner) -> None:
    """Undo `set_owner`, if nobody else has become the owner since."""
    known = _owners.get(id(param))
    if known is not None and known() in (None, owner):
        del _owners[id(param)]


# What torch says of operations that it cannot do on rows.
_NEEDS_WHOLE = ("Sharding propagation failed", "unevenly sharded", "in-place operations that require placement changes")


class PartitionedTensor(DTensor):
    """A `DTensor` that is a parameter of hf_zero, or stands for one: see the notes above."""

    _zero_base: PartitionedTensor | None  # of an alias or view: the parameter; None for a value computed from one
    _zero_is_copy: bool  # a view whose memory is not that of the rows

    @classmethod
    def over(cls, local: Tensor, cut: Cut, mesh: Any) -> PartitionedTensor:
        """A tensor of `cut.shape` of which this rank holds the elements `local`; no communication."""
        return cls._like(torch_compat.wrap_local(local, cut, mesh))

    @classmethod
    def _like(cls, plain: DTensor) -> PartitionedTensor:
        return cast(PartitionedTensor, cls.__new__(cls, plain._local_tensor, plain._spec, requires_grad=False))

    def as_parameter(self, requires_grad: bool) -> nn.Parameter:
        """A parameter over the same rows."""
        param = nn.Parameter(self, requires_grad=requires_grad)
        del vars(param)["_zero_base"], vars(param)["_zero_is_copy"]  # torch has made it by `detach`
        return param

    def _plain(self) -> DTensor:
        return DTensor.__new__(DTensor, self._local_tensor, self._spec, requires_grad=False)

    @property
    def _zero_param(self) -> PartitionedTensor | None:
        """The parameter that this is, or is a view of."""
        return cast("PartitionedTensor | None", vars(self).get("_zero_base", self))

    @property
    def _zero_owner(self) -> Owner | None:
        param = self._zero_param
        reference = None if param is None else _owners.get(id(param))
        return None if reference is None else reference()

    def _describe(self) -> str:
        owner, param = self._zero_owner, self._zero_param
        if owner is not None and param is not None:
            return f"parameter {owner.name_of(param)!r}"
        return f"a {'value computed from a ' if param is None else ''}parameter of shape {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation as `DTensor` does, and tell the engine of what it changes."""
        kwargs = kwargs or {}
        if foreach.mixes(func, args):
            return foreach.apart(func, args, kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, PartitionedTensor)]
        if _needs_whole_matrices(func):
            raise UsageError(
                f"{func} needs whole matrices, but {given[0]._describe()} is partitioned: compute inside "
                "`with zero.GatheredParameters(param):`"
            )
        written = list(_written(func, args, kwargs))
        for tensor in written:
            tensor._before_edit()
        if func is torch.ops.aten.copy_.default and _copy_whole(*args[:2]):
            return args[0]
        if not written and torch.is_grad_enabled():
            _check_plain_operands(given, func, args, kwargs)
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and (drawn := _draw_whole(func, args, kwargs, written)) is not None
        ):
            return drawn
        run = foreach.copy_each if func is torch.ops.aten._foreach_copy_.default else func
        plain_args, plain_kwargs = pytree.tree_map_only(PartitionedTensor, PartitionedTensor._plain, (args, kwargs))
        try:
            result = run(*plain_args, **plain_kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                _refuse_mix(given[0], str(func), error)
            if any(words in str(error) for words in _NEEDS_WHOLE):
                raise UsageError(
                    f"{func} needs the whole of {given[0]._describe()}, which is partitioned: take its `.full_tensor()`, or "
                    "compute inside `with zero.GatheredParameters(param):`"
                ) from error
            raise
        if written:
            return written[0] if isinstance(result, Tensor) else result
        if func.is_view or func is torch.ops.aten.detach.default:
            view = functools.partial(_as_view, base=given[0])
            return pytree.tree_map_only(DTensor, view, result)
        if torch.is_grad_enabled() and not func._schema.name.endswith("_like"):
            return pytree.tree_map_only(DTensor, _as_computed, result)
        return result

    def _before_edit(self) -> None:
        if vars(self).get("_zero_is_copy"):
            raise UsageError(
                f"this slice of {self._describe()} is a copy, since the rows lie on several ranks, so a change of it would "
                "be lost: change the parameter inside `with zero.GatheredParameters(param):`"
            )
        owner, param = self._zero_owner, self._zero_param
        if owner is not None and param is not None:
            owner.before_edit(param)

    @property
    def data(self) -> Tensor:
        """An alias outside the graph; assigning copies the values of a tensor of the same shape and dtype, whole or not."""
        return cast(Tensor, torch._C.TensorBase.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if has_torch_function_unary(self):  # a mode: a default device, or `Init`'s, which shows parameters whole
            handle_torch_function(_set_data, (self,), self, value)
            return
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UsageError(
                f"{self._describe()} is partitioned as {tuple(self.shape)} {self.dtype}: `.data = ` takes the same shape "
                f"and dtype only, not {tuple(value.shape)} {value.dtype}; resize or cast the model before it is partitioned"
            )
        self._before_edit()
        with torch.no_grad():
            if isinstance(value, DTensor):
                rows = torch_compat.local_of(value.redistribute(self.device_mesh, self.placements))
            else:
                rows = own_rows(value.detach(), self)
            self._local_tensor.copy_(rows)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor; in the graph, its gradient is reduced over the ranks as that of any use in the model."""
        owner, param = self._zero_owner, self._zero_param
        if owner is not None and param is self and torch.is_grad_enabled() and self.requires_grad:
            return owner.whole_at_rest(self)
        if param is self and self.device_mesh.ndim > 1:  # torch knows no uneven rows of rows
            world = world_that_cut(self)
            return world.gather_parameter(self._local_tensor, world.cut_of(self), "whole parameters")
        whole = super().full_tensor(grad_placements=grad_placements)
        return (
            with_mean_gradient(self, whole)
            if param is None and grad_placements is None and whole.requires_grad
            else whole
        )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call `hook` with this rank's whole gradient, once a backward, before it is reduced."""
        return register(self, "_zero_hooks", hook) if self.is_leaf else super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call `hook` with the parameter when its reduced rows have been added to `.grad`, at the end of a backward."""
        return register(self, "_zero_post_hooks", hook)

    def share_memory_(self) -> NoReturn:
        """Raise: torch would move the rows out of the memory that the engine reads."""
        raise UsageError(f"share_memory_: {self._describe()} is partitioned; share the memory of a whole copy instead")

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedTensor:
        if has_torch_function_unary(self):
            return handle_torch_function(PartitionedTensor.__deepcopy__, (self,), self, memo)
        if id(self) in memo:
            return cast(PartitionedTensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user made can be deep-copied, not results of a graph")
        plain = self._plain()
        local, spec = plain._local_tensor.detach().clone(), copy.copy(plain._spec)
        new = PartitionedTensor._like(DTensor.__new__(DTensor, local, spec, requires_grad=False))
        new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        for key, value in vars(self).items():
            if key not in ("_zero_base", "_zero_hooks", "_zero_post_hooks"):
                setattr(new, key, copy.deepcopy(value, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"{self._describe()} is partitioned: pickling it (torch.save) would keep this rank's rows only. Save whole weights "
            "with `model.save_pretrained`, `trainer.save_model` or `accelerator.get_state_dict(model)`, called on every rank, "
            "or take `model.state_dict()` inside `with zero.GatheredParameters(model):`"
        )


class UnreducedGradient(DTensor):
    """What `.grad` is under `no_sync` in stage 1: this rank's whole gradient, with the placement `Partial`.

    Its mesh is the replica's: where there are several replicas, what torch computes of it (a norm) is of one of them.
    """

    @classmethod
    def over(cls, whole: Tensor, parameter: DTensor, averages: bool) -> UnreducedGradient:
        """A gradient of the shape of `parameter` over this rank's own `whole`."""
        plain = torch_compat.wrap_partial(whole, parameter, averages)
        return cast(UnreducedGradient, cls.__new__(cls, plain._local_tensor, plain._spec, requires_grad=False))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """As `DTensor`, which has no way to clear a list of such gradients, as `zero_grad` of fused optimizers does."""
        if func is torch.ops.aten._foreach_zero_.default:
            for tensor in args[0]:
                torch_compat.local_of(tensor).zero_()
            return None
        plain = pytree.tree_map_only(cls, lambda t: torch_compat.wrap_like(t._local_tensor, t), (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return args[0] if isinstance(result, Tensor) and _writes_of(func) else result


def _copy_whole(target: Tensor, source: Tensor) -> bool:
    """Copy this rank's rows of an ordinary tensor into a parameter, as `load_state_dict` of a part of the model does."""
    base = target._zero_param if isinstance(target, PartitionedTensor) else None
    if base is None or isinstance(source, DTensor):
        return False
    assert isinstance(target, PartitionedTensor)
    if (target.shape, target.placements) != (base.shape, base.placements):
        return False  # a view of some of it
    target._local_tensor.copy_(own_rows(source.expand(target.shape), target))
    return True


def _draw_whole(func: Any, args: Any, kwargs: Any, written: list[PartitionedTensor]) -> Tensor | None:
    """Draw random numbers for the whole tensor and keep this rank's rows, as an unsharded model would draw them.

    On rows alone, ranks with equal generators would draw the same rows.
    """
    subject = args[0] if args else None
    if not isinstance(subject, PartitionedTensor) or not any(placement.is_shard() for placement in subject.placements):
        return None
    is_like = func._schema.name.endswith("_like")
    if not is_like and written != [subject]:
        return None
    whole = func(torch.empty(subject.shape, dtype=subject.dtype, device=subject.device), *args[1:], **kwargs)
    cut = world_that_cut(subject).cut_of(subject)
    rows = cut.of(whole)
    if is_like:
        return torch_compat.wrap_like(rows.clone(memory_format=torch.contiguous_format), subject)
    subject._local_tensor.copy_(rows)
    return subject


def _as_view(result: DTensor, base: PartitionedTensor) -> PartitionedTensor:
    is_number = base._zero_param is None and result.ndim == 0  # such as an entry of a vector of norms
    view = (ComputedScalar if is_number else PartitionedTensor)._like(result)
    vars(view).update(vars(base))  # `module.to` makes a parameter of such a view, and swaps it with the old one
    view._zero_base = base._zero_param
    local, own = result._local_tensor, base._local_tensor
    view._zero_is_copy = (
        bool(vars(base).get("_zero_is_copy"))
        or local.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
        or (own.numel() == 0) != (local.numel() == 0)
    )
    return view


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """What modes of torch see of `tensor.data = value`: by its names torch's own, which knows no property of a subclass."""
    if isinstance(tensor, PartitionedTensor):
        tensor.data = value
    else:
        _set_data.__self__.__set__(tensor, value)  # type: ignore[attr-defined]


_set_data.__name__ = "__set__"
_set_data.__self__ = torch._C.TensorBase.data  # type: ignore[attr-defined]


class ComputedScalar(PartitionedTensor):
    """A number computed from parameters while gradients are recorded, such as the penalty of a regulariser.

    Where it meets an ordinary tensor (`loss + 0.1 * penalty`), it is taken whole, of all rows, and its gradient is averaged:
    see [Note: gradient of a computed value].
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            if any(not isinstance(each, DTensor) for each in tensors):
                args, kwargs = pytree.tree_map_only(ComputedScalar, ComputedScalar.full_tensor, (args, kwargs))
            return func(*args, **kwargs)


def _as_computed(result: DTensor) -> PartitionedTensor:
    computed = (PartitionedTensor if result.ndim else ComputedScalar)._like(result)
    computed._zero_base = None
    return computed


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[PartitionedTensor]:
    """The tensors among the arguments that an in-place operation changes."""
    for index, name in _writes_of(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, PartitionedTensor):
                yield tensor


@functools.cache
def _needs_whole_matrices(func: Any) -> bool:
    """Factorisations: torch would gather unasked, and a plain parameter given such a value as its `.data` crashes."""
    name = func._schema.name.removeprefix("aten::").lstrip("_")
    return bool(name.startswith("linalg_") and name != "linalg_vector_norm")


@functools.cache
def _writes_of(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _check_plain_operands(given: list[PartitionedTensor], func: Any, args: Any, kwargs: Any) -> None:
    """Torch takes a scalar tensor for one that is the same on every rank, which the loss of a rank's own batch is not."""
    for tensor in pytree.tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.requires_grad:
            _refuse_mix(given[0], str(func), RuntimeError("a scalar of this rank's own graph"))


def _refuse_mix(tensor: PartitionedTensor, operation: str, error: RuntimeError) -> NoReturn:
    raise UsageError(
        f"{operation} mixes {tensor._describe()}, which hf_zero has partitioned over the ranks, with an ordinary tensor. While "
        "a forward of the model runs, its modules hold whole tensors; elsewhere read the parameter inside "
        "`with zero.GatheredParameters(param):`, or take its `.full_tensor()` (of a value computed from it: that value's)"
    ) from error
