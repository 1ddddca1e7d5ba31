"""The type of a partitioned parameter at rest: a `DTensor` over this rank's rows, under one rule for every operator of torch.

[Note: the rule for tensors at rest] Users hold parameters, gradients, and what they compute from them.
1. *On rows*: an operator that works element by element, on tensors that are cut alike, and numbers. Whole tensors are cut
   where they are written into one that is partitioned; else (`p * mask`) a rank's own values may be in them, so 2. holds.
2. *On the whole*: for any other operator the operands are gathered, it runs once on plain tensors, what it has written to
   is cut back, and what it gives is a plain tensor. All ranks run the same line, so all come; a rank that does not is the
   error that names it. What random numbers fill is drawn whole, too.
3. *In the graph* operators run on the whole. Autograd keeps the tensors at rest, and a parameter's gradient comes to its
   engine as this rank's own whole gradient, like that of any use in the model.
4. A *view* remembers the tensor and how it was taken. Read, it is the whole's view; written to, the whole is cut back.
Norms are added up from rows, so that clipping gathers nothing.

[Note: an edit is seen] Users change parameters by hand: `p.mul_()`, `p.data.copy_()`, `torch._foreach_add_`, a data
assignment. Torch's version counters miss most of that, so no bookkeeping stands on them. Instead every in-place operation
on a parameter, on an alias of it (`p.data`, `p.detach()`) or on a view passes `__torch_dispatch__` here,
which tells the engine *before* the rows change. Ranks that share memory then meet first, so no peer still computes with
the old values; and every rank gathers the changed parameters before their next use. All ranks run the same code, so they
meet and gather alike. Optimizers of torch tell the engine themselves, by torch's step hooks.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.hooks import RemovableHandle

from hf_zero import torch_compat
from hf_zero.engine.parameters.addresses import StorageAtRest
from hf_zero.engine.parameters.at_rest.assigned import ASSIGNED, assign
from hf_zero.engine.parameters.at_rest.given import note_given
from hf_zero.engine.parameters.at_rest.known import entries
from hf_zero.engine.parameters.at_rest.known.lineage import note_copy
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.at_rest.rule import run
from hf_zero.engine.parameters.at_rest.views import Readable, View, views
from hf_zero.engine.parameters.user_hooks import HOOKS, hold_again, let_hold, register
from hf_zero.engine.parameters.whole import WHEN_EXCHANGED, Shares
from hf_zero.engine.ranks.world import World, world_that_cut
from hf_zero.errors import UsageError
from hf_zero.layout import Cut


class Owner(Protocol):
    """What a parameter tells: its engine."""

    user_hooks: list[Any]  # see [Note: who holds hooks]

    def before_edit(self, param: Tensor, mark: int = 0) -> None:
        """The rows of `param` are about to be changed by hand, on every rank, see `Root.before_edit`."""

    def after_edit(self) -> None:
        """The change has been begun."""

    def name_of(self, param: Tensor) -> str:
        """Its name in the model."""

    def whole_at_hand(self, param: Tensor) -> Tensor | None:
        """Its whole tensor, where this rank has it between uses, as it is now."""

    def everywhere(self, param: Tensor) -> list[Tensor]:
        """Itself, and all that stands for it now."""


_owners: dict[
    int, weakref.ref[Owner]
] = {}  # id(parameter) -> its engine. Not an attribute: `module.to` swaps those away


def set_owner(param: Tensor, owner: Owner) -> None:
    """Let `owner` be told from now on."""
    _owners[id(param)] = weakref.ref(owner)
    let_hold(owner.user_hooks, param)
    entries.forget(torch_compat.local_of(param))  # steps change it, which nobody notes


def forget_owner(param: Tensor, owner: Owner) -> None:
    """Undo `set_owner`, if nobody else has become the owner since."""
    known = _owners.get(id(param))
    if known is not None and known() in (None, owner):
        del _owners[id(param)]
        hold_again(param)


_grad: Any = torch._C.TensorBase.grad
_MEMORY = "_zero_memory"
_SHOWN = "_zero_shown"
_PLACE = "_zero_place_of_whole"
_SLOTS = ("_zero_base", "_zero_world", "_zero_cut", _MEMORY, _SHOWN, _PLACE, WHEN_EXCHANGED, ASSIGNED)
_OWN_REFERENCES = 2  # to a `_Memory`, when no alias has it: the local name's, and that of the call that counts


class _Memory:
    """What a parameter and its aliases share, until `.data =` gives the parameter another: `old` is then the aliases' own.

    Not weak references to aliases: `module.to` cannot swap tensors that have any.
    """

    old: Tensor | None = None


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What users and libraries have set on a parameter, without what says how it is cut."""
    return {key: value for key, value in vars(tensor).items() if key not in _SLOTS}


@torch_compat.dispatch_by_class
class PartitionedTensor(Shares, Readable, Root, DTensor):
    """A `DTensor` that is a parameter of hf_zero, an alias of one, or computed from one: see the notes above."""

    _zero_base: PartitionedTensor | None  # of an alias: the parameter; None for a value
    _zero_world: World
    _zero_cut: Cut

    @classmethod
    def over(cls, local: Tensor, cut: Cut, world: World) -> PartitionedTensor:
        """A value of `cut.shape` of which this rank holds the elements `local`; no communication."""
        return cls._made(local, torch_compat.wrap_local(local, cut, world.mesh)._spec, world, cut)

    @classmethod
    def _made(cls, local: Tensor, spec: Any, world: World, cut: Cut) -> PartitionedTensor:
        new: PartitionedTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[assignment, unused-ignore]
        torch._C._set_throw_on_mutable_data_ptr(new)  # it has no memory: an error of torch in place of a crash
        new.__class__ = cls  # not at once: torch would set attributes as users do, see [Note: attributes of users]
        vars(new).update(_zero_world=world, _zero_cut=cut, _zero_base=None)
        return new

    def like(self, rows: Tensor) -> PartitionedTensor:
        """A value over this rank's elements `rows`, cut as this one is."""
        return self.values_like([self], [rows])[0]

    @classmethod
    def values_like(cls, params: Sequence[PartitionedTensor], rows: Sequence[Tensor]) -> list[PartitionedTensor]:
        """Values over this rank's elements of several parameters, cut as those are."""
        values = []
        for param, local in zip(params, rows, strict=True):
            spec, known = param._spec, vars(param)
            if local.dtype != param.dtype and spec.tensor_meta is not None:
                meta = spec.tensor_meta._replace(dtype=local.dtype)
                spec = dataclasses.replace(spec, tensor_meta=meta)
            world, cut = (known["_zero_world"], known["_zero_cut"]) if "_zero_cut" in known else param.held
            values.append(cls._made(local, spec, world, cut))
        return values

    def as_parameter(self, requires_grad: bool) -> nn.Parameter:
        """A parameter over the same rows."""
        param = nn.Parameter(self, requires_grad=requires_grad)
        vars(param).pop("_zero_base", None)  # torch has made it by `detach`
        return param

    @property
    def root(self) -> PartitionedTensor:
        """See `AtRest.root`: itself, since an alias has the same rows."""
        return self

    @property
    def rows(self) -> Tensor:  # type: ignore[override]
        """This rank's elements."""
        memory: _Memory | None = vars(self).get(_MEMORY)
        return self._local_tensor if memory is None or memory.old is None else memory.old

    @property
    def held(self) -> tuple[World, Cut]:
        """See `Root.held`."""
        known = vars(self)
        if "_zero_cut" not in known:  # torch has made it, of one whose attributes it does not copy
            self._zero_world = world = world_that_cut(self)
            self._zero_cut = world.cut_of(self)
        return self._zero_world, self._zero_cut

    @property
    def shown(self) -> Tensor | None:
        """See `Root.shown`."""
        param = self._zero_param
        whole: Tensor | None = None if param is None else vars(param).get(_SHOWN)
        return None if whole is None else whole.detach()

    @property
    def place(self) -> torch.UntypedStorage:  # type: ignore[override]
        """See `Root.place`: that of the parameter for its aliases, too."""
        known = vars(self if self._zero_param is None else self._zero_param)
        if _PLACE not in known:
            known[_PLACE] = StorageAtRest.of(self.numel() * self.itemsize)
        return cast(StorageAtRest, known[_PLACE])

    def whole_at_hand(self) -> Tensor | None:
        """See `Root.whole_at_hand`."""
        owner, param = self._zero_owner, self._zero_param
        return None if owner is None or param is None else owner.whole_at_hand(param)

    def show(self, whole: Tensor | None) -> None:
        """Let a plain whole tensor stand for this parameter and its aliases; None: no longer."""
        vars(self).pop(_SHOWN, None)
        if whole is not None:
            setattr(self, _SHOWN, whole)

    def everywhere(self) -> list[Tensor]:
        """See `Shares`: an alias or a value is by itself."""
        owner = self._zero_owner if self is self._zero_param else None
        if owner is not None:
            return owner.everywhere(self)
        whole = shown_by_gatherer(self)
        return [] if whole is None else [whole]

    def to_local(self, **options: Any) -> Tensor:
        """This rank's rows; inside `GatheredParameters`, the whole."""
        whole = self.shown
        return super().to_local(**options) if whole is None else whole

    def of(self, whole: Tensor) -> Tensor:
        """See `AtRest.of`."""
        return whole

    def taken(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See `AtRest.taken`."""
        base = self if self._zero_param is None or self is self._zero_param else self.alias()
        return views(base, (), func, args, kwargs)

    def alias(self) -> PartitionedTensor:
        """See `AtRest.alias`."""
        new = self.like(self.rows)
        vars(new).update(attributes_of(self))  # `module.to` makes a parameter of it, and swaps it with the old one
        vars(new).pop("_is_param", None)  # till then it is none: a module that is given `p.data` does not register it
        new._zero_base = base = self._zero_param
        if base is not None:
            memory = vars(base).setdefault(_MEMORY, _Memory())
            setattr(new, _MEMORY, vars(self).get(_MEMORY, memory))
        return new

    @property
    def _zero_param(self) -> PartitionedTensor | None:
        """The parameter that this is, or is an alias of."""
        memory: _Memory | None = vars(self).get(_MEMORY)
        if memory is not None and memory.old is not None:
            return None
        return cast("PartitionedTensor | None", vars(self).get("_zero_base", self))

    @property
    def _zero_owner(self) -> Owner | None:
        param = self._zero_param
        reference = None if param is None else _owners.get(id(param))
        return None if reference is None else reference()

    def describe(self) -> str:
        """See `AtRest.describe`."""
        owner, param = self._zero_owner, self._zero_param
        if owner is not None and param is not None:
            return f"parameter {owner.name_of(param)!r}"
        return f"a {'value computed from a ' if param is None else ''}parameter of shape {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """See [Note: the rule for tensors at rest]."""
        return torch_compat.outside_compiled_graphs(run)(func, args, kwargs or {})

    @property
    def param(self) -> PartitionedTensor | None:
        """See `Root.param`."""
        return self._zero_param

    def before_edit(self, mark: int = 0) -> None:
        """See `Root.before_edit`."""
        owner, param = self._zero_owner, self._zero_param
        if owner is not None and param is not None:
            owner.before_edit(param, mark)
        elif param is None:
            self.held[0].serving.before_write(self.rows)

    def after_edit(self) -> None:
        """See `Root.after_edit`."""
        if (owner := self._zero_owner) is not None:
            owner.after_edit()
        elif self._zero_param is None:
            self.held[0].serving.after_write(self.rows)

    @property
    def data(self) -> Tensor:
        """An alias outside the graph. Assigning takes a tensor of the same shape and dtype, whole or not; aliases that were
        taken before keep the old values, until one of them is assigned."""
        return cast(Tensor, torch._C.TensorBase.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if has_torch_function_unary(self):  # a mode: a default device, or `Init`'s, which shows parameters whole
            return handle_torch_function(_set_data, (self,), self, value)
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UsageError(
                f"{self.describe()} is partitioned as {tuple(self.shape)} {self.dtype}: `.data = ` takes the same shape "
                f"and dtype only, not {tuple(value.shape)} {value.dtype}; resize or cast the model before it is partitioned"
            )
        with torch.no_grad():
            memory: _Memory | None = vars(self).pop(_MEMORY, None)
            if memory is not None and sys.getrefcount(memory) > _OWN_REFERENCES:
                memory.old = self._local_tensor.clone()
            is_alias = vars(value).get("_zero_base") is self
            assign(self, value, is_alias)
            theirs: _Memory | None = vars(value).get(_MEMORY) if is_alias else None
            if theirs is not None:  # of an alias from before, which shows the parameter again
                theirs.old, vars(self)[_MEMORY] = None, theirs

    def _set_grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, DTensor) and value.shape == self.shape:
            with torch.no_grad():
                plain = value.full_tensor() if isinstance(value, View) else value.detach()
                value = self.like(self.held[1].of(plain.to(self.device)).clone(memory_format=torch.contiguous_format))
                note_given(value, plain, True)
        _grad.__set__(self, value)

    grad: Any = property(  # its getter stays torch's: steps read it
        _grad.__get__,
        _set_grad,
        _grad.__delete__,
        "The gradient, cut as the parameter is. A whole tensor may be assigned too: each rank keeps a copy of its rows.",
    )

    @torch.inference_mode(False)  # a copy is a parameter like any other, wherever it is made
    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedTensor:
        if has_torch_function_unary(self):
            return handle_torch_function(PartitionedTensor.__deepcopy__, (self,), self, memo)
        if id(self) in memo:
            return cast(PartitionedTensor, memo[id(self)])
        if (whole := self.shown) is not None:
            return cast(PartitionedTensor, memo.setdefault(id(self), nn.Parameter(whole.clone(), self.requires_grad)))
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user made can be deep-copied, not results of a graph")
        new = self.like(self.rows.detach().clone())
        vars(new).pop("_zero_base")
        note_copy(new, self)
        new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        if self.grad is not None and not isinstance(self, nn.Parameter):  # torch copies a parameter without it
            new.grad = copy.deepcopy(self.grad, memo)
        for key, value in attributes_of(self).items():
            if key not in HOOKS:
                setattr(new, key, copy.deepcopy(value, memo))
        return new

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call `hook` with this rank's whole gradient, once a backward, before it is reduced."""
        return self._keep(HOOKS[0], hook) if self.is_leaf else super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call `hook` with the parameter when its reduced rows have been added to `.grad`, at the end of a backward."""
        return self._keep(HOOKS[1], hook)

    def _keep(self, name: str, hook: Any) -> RemovableHandle:
        owner = self._zero_owner
        return register(self, name, hook, None if owner is None else owner.user_hooks)

    def share_memory_(self) -> NoReturn:
        """Raise: torch would move the rows out of the memory that the engine reads."""
        raise UsageError(f"share_memory_: {self.describe()} is partitioned; share the memory of a whole copy instead")


torch_compat.step_in_lists(PartitionedTensor)


def shown_by_gatherer(param: Tensor) -> Tensor | None:
    """The plain whole tensor that stands for a parameter inside `GatheredParameters`."""
    shown: Tensor | None = vars(param).get(_SHOWN)
    return shown


def set_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Let `.grad` of each parameter be a value over this rank's elements, cut as the parameter is."""
    cut = [(param, rows) for param, rows in zip(params, grads, strict=True) if isinstance(param, PartitionedTensor)]
    values = PartitionedTensor.values_like([param for param, _ in cut], [rows for _, rows in cut])
    for (cut_param, _), value in zip(cut, values, strict=True):
        _grad.__set__(cut_param, value)  # not as users assign it: nothing to look at
    for param, rows in zip(params, grads, strict=True):
        if not isinstance(param, PartitionedTensor):
            param.grad = rows_like(rows, param)


def rows_like(rows: Tensor, param: Tensor) -> Tensor:
    """A value over this rank's elements `rows`, cut as `param` is; a plain one as it is."""
    if isinstance(param, PartitionedTensor):
        return param.like(rows)
    return DTensor.__new__(DTensor, rows, param._spec, requires_grad=False) if isinstance(param, DTensor) else rows


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """What modes of torch see of `tensor.data = value`: by its names torch's own, which knows no property of a subclass."""
    if isinstance(tensor, PartitionedTensor):
        tensor.data = value
    else:
        _set_data.__self__.__set__(tensor, value)  # type: ignore[attr-defined]


_set_data.__name__ = "__set__"
_set_data.__self__ = torch._C.TensorBase.data  # type: ignore[attr-defined]
