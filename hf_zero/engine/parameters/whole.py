"""What modules see of a parameter while it is whole: a plain tensor that tells whether it was written to.

[Note: writes in a forward] Modules write into their own weights while they run: codebooks move, temperatures are clamped, rows
are kept at length 1. What they write into was gathered, and would be gone with it. So the tensor that a module sees counts
its writes: torch's version counter counts those on it and on its views, and one more those through `.data`, which torch
counts apart. As soon as modules see the rows again, each rank keeps its own rows of what was written, where all ranks have
written the same. Where they have not (statistics of a rank's own batch), no rank has the whole truth: that is an error.
In memory that a host's ranks share, all of them would write at once, and into what others still read. There a tensor moves into
memory of its own before the first write. So does one that NumPy is given, which would keep memory that is to be released, and
writes uncounted: its values are compared instead.

[Note: attributes of users] Users set attributes on parameters (`weight.mask = ...`), and find them wherever they read
`module.weight`. What stands for a parameter is made with them; who sets one, sets it on the parameter and on all that stands
for it. (Were they looked up there, by `__getattr__`, code under `torch.compile` would find none.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.errors import UsageError
from hf_zero.under_way import assigned_name, is_made_a_parameter, is_registered

_data: Any = torch._C.TensorBase.data
_grad: Any = torch._C.TensorBase.grad
STANDS_FOR = "_zero_stands_for"
_BEFORE_NUMPY = "_zero_before_numpy"
WHEN_EXCHANGED = "_zero_when_exchanged"
_OF_TORCH = ("_spec", "_local_tensor")  # that are set for every gradient
_COUNTER, _MOVED, RECORD = "_zero_counter", "_zero_moved", "_zero_record"
_IS_PARAM = "_zero_is_param"


def is_of_users(name: str) -> bool:
    """Whether an attribute of a tensor is one that users and their libraries set; the others are our own and torch's."""
    return not name.startswith(("_zero_", "_dynamo_")) and name != "_is_param"


def attributes_of_users(tensor: Tensor) -> dict[str, Any]:
    """What users have set on a tensor of any class."""
    return {name: value for name, value in vars(tensor).items() if is_of_users(name)}


class Shares:
    """A parameter, or what stands for one: see [Note: attributes of users]."""

    __slots__ = ()

    def everywhere(self) -> list[Tensor]:
        """The parameter, and all that stands for it now."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_TORCH or name.startswith("_zero_") or (name == "grad" and not torch.compiler.is_compiling()):
            object.__setattr__(self, name, value)
        else:
            torch_compat.outside_compiled_graphs(_set)(self, name, value)

    def __delattr__(self, name: str) -> None:
        torch_compat.outside_compiled_graphs(_delete)(self, name)


def when_exchanged(tensor: Tensor, call: Callable[[], None]) -> None:
    """Let `call` be called when torch exchanges the tensor for another in place, as `module.to` does; once."""
    object.__setattr__(tensor, WHEN_EXCHANGED, call)


def _set(tensor: Shares, name: str, value: Any) -> None:
    if name == "__dict__" and (call := vars(tensor).pop(WHEN_EXCHANGED, None)) is not None:
        call()
    object.__setattr__(tensor, name, value)
    if is_of_users(name) and name in vars(tensor):
        for each in tensor.everywhere():
            vars(each)[name] = value


def _delete(tensor: Shares, name: str) -> None:
    is_shared = is_of_users(name) and name in vars(tensor)
    object.__delattr__(tensor, name)
    if is_shared:
        for each in tensor.everywhere():
            vars(each).pop(name, None)


# How often a tensor's own memory has been written to; not a function of ours, since every forward asks for every parameter.
raw_version: Callable[[Tensor], int] = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


class Record(Protocol):
    """A parameter as its engine knows it."""

    param: nn.Parameter
    is_shared: bool

    def everywhere(self) -> list[Tensor]:
        """See `Shares.everywhere`."""


class Whole(Shares, Tensor):
    """A whole parameter. What is computed of it is a plain tensor, and it is copied and pickled as one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """An alias outside the graph. Assigning takes a tensor of the same shape and dtype, and copies it."""
        if torch.compiler.is_compiling():
            return self.detach()
        counter: Tensor | None = vars(self).get(_COUNTER)
        if counter is None:
            self.before_write()
            vars(self)[_COUNTER] = counter = cast(Tensor, _data.__get__(self))
        return counter.detach()  # counts together with it

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UsageError(
                f"`.data = ` of a partitioned parameter of shape {tuple(self.shape)} {self.dtype}, in a forward, takes the "
                f"same shape and dtype only, not {tuple(value.shape)} {value.dtype}; resize the model between steps"
            )
        with torch.no_grad():
            self.data.copy_(value)

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Counts changes of the parameter, too: users keep what they have computed of it until it changes."""
        record: Record | None = None if torch.compiler.is_compiling() else vars(self).get(RECORD)
        return raw_version(self) + (0 if record is None else record.param._version)

    @property
    def grad(self) -> Any:
        """The parameter's, at rest; what is compiled is of whole tensors alone."""
        if not torch.compiler.is_compiling():
            record: Record | None = vars(self).get(RECORD)
            if record is not None:
                return record.param.grad
            if _IS_PARAM in vars(self):
                return _grad.__get__(self)
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        record: Record | None = vars(self).get(RECORD)
        if record is not None:
            record.param.grad = value
        elif _IS_PARAM in vars(self):
            _grad.__set__(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Whole:
        """Torch's own where nothing changes; else an error, since the graph of this call has begun with it as it was."""
        if RECORD not in vars(self) or self.is_leaf or requires_grad == self.requires_grad:
            return cast(Whole, super().requires_grad_(requires_grad))
        raise UsageError(
            "requires_grad_() of a parameter in a forward that computes with it already: call it before the model, or compute "
            "with `weight.detach()` where no gradient is wanted"
        )

    @property
    def _is_param(self) -> bool:
        """`isinstance(self.weight, nn.Parameter)` asks so; torch, too, of what is assigned to a module."""
        if torch.compiler.is_compiling():
            return False
        if _IS_PARAM not in vars(self) and (name := assigned_name(self)) is not None:
            raise UsageError(
                f"a forward assigns another module's whole weight to {name!r}, which would tie them for a call only: tie "
                "weights before shard_model, or between forwards (`a.weight = b.weight`); to compute with it in this forward "
                "only, call torch.nn.functional with it"
            )
        return _IS_PARAM in vars(self) or not is_registered()  # a module of no sharded model would want a leaf

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        vars(self)[_IS_PARAM] = value

    def detach(self) -> Tensor:
        """Torch's own: a plain tensor; `nn.Parameter(weight)` wants one of the same class, and says itself what it is."""
        new: Tensor = super().detach()
        if not torch.compiler.is_compiling() and is_made_a_parameter():
            new.__class__ = type(self)
        return new

    def everywhere(self) -> list[Tensor]:
        """See `Shares`."""
        record: Record | None = vars(self).get(RECORD)
        return [] if record is None else record.everywhere()

    def before_write(self) -> None:
        """Somebody may be about to write."""

    def numpy(self, *, force: bool = False) -> Any:
        """The values, in memory of their own; what is written into them until the forward of the module ends stays."""
        if _BEFORE_NUMPY not in vars(self):
            self.move()
            vars(self)[_BEFORE_NUMPY] = _data.__get__(self).clone()
        return Tensor.numpy(self, force=force)

    def move(self) -> None:
        """Move into memory of its own, if it has not yet."""
        if _MOVED not in vars(self):
            vars(self)[_MOVED] = num_writes(self)
            with torch.inference_mode(False), torch.no_grad():
                _data.__set__(self, _data.__get__(self).clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = new = self.detach().clone().requires_grad_(self.requires_grad)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class SharedWhole(Whole):
    """A whole parameter in memory that the host's ranks share: it moves before it is written to."""

    def before_write(self) -> None:
        """Move into memory of its own."""
        self.move()


def _writing(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def write(self: SharedWhole, *args: Any, **kwargs: Any) -> Any:
        self.before_write()
        return method(self, *args, **kwargs)

    return write


_IN_PLACE = [
    name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
]
_IN_PLACE += [name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")]
for _name in [*_IN_PLACE, "__setitem__"]:
    setattr(SharedWhole, _name, _writing(_name))


def let_stand(pairs: Iterable[tuple[Tensor, Record]]) -> None:
    """From now on each tensor stands for a parameter and counts its writes; those of a class of their own (quantised bytes)
    stay as they are."""
    for tensor, record in pairs:
        if type(tensor) is Tensor:
            tensor.__class__ = SharedWhole if record.is_shared else Whole
            vars(tensor)[RECORD] = record


def nums_of_writes(tensors: Sequence[Tensor]) -> list[int]:
    """How often each of several whole tensors has been written to."""
    counts = []
    for tensor in tensors:
        try:
            count = raw_version(tensor)
        except RuntimeError:  # made under inference mode, as over a tensor axis: torch does not count
            counts.append(0)
            continue
        known = vars(tensor)
        if _COUNTER in known:
            count += known[_COUNTER]._version
        if _BEFORE_NUMPY in known:
            count += not torch.equal(known[_BEFORE_NUMPY], tensor.detach())
        counts.append(count)
    return counts


def num_writes(tensor: Tensor) -> int:
    """How often a whole tensor has been written to."""
    return nums_of_writes([tensor])[0]


class Glance:
    """Whole tensors as they are now: tells at little cost, for each of them, that nothing was written into any.

    Args:
        tensors: the first ones.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._num_attributes: list[int] = []  # others than torch count, too, in attributes
        self._is_certain = True
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """One more, as it is now."""
        known = vars(tensor)
        self._is_certain = self._is_certain and not (
            tensor.is_inference() or _COUNTER in known or _BEFORE_NUMPY in known
        )
        if self._is_certain:
            self._tensors.append(tensor)
            self._versions.append(raw_version(tensor))
            self._num_attributes.append(len(known))

    def is_same(self) -> bool:
        """Whether none was written to, for certain."""
        return (
            self._is_certain
            and self._versions == [*map(raw_version, self._tensors)]
            and self._num_attributes == [*map(len, map(vars, self._tensors))]
        )


def is_safe_to_keep(tensor: Tensor) -> bool:
    """Whether what was written into a whole tensor was written by this rank alone: it had left shared memory before."""
    return type(tensor) is Whole or vars(tensor).get(_MOVED) == 0


def retire(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The first of each pair stands for the second no longer: let go of the memory that counts writes through `.data`."""
    for tensor, param in pairs:
        if isinstance(tensor, Shares):
            vars(tensor).pop(_COUNTER, None)
            vars(tensor).pop(_BEFORE_NUMPY, None)
        else:
            vars(param).update(attributes_of_users(tensor))


class WholeParameter(Shares, nn.Parameter):
    """What modules hold inside `GatheredParameters`: plain, with the gradient of the parameter that it stands for."""

    def _of(self) -> nn.Parameter:
        return cast(nn.Parameter, vars(self)[STANDS_FOR])

    def everywhere(self) -> list[Tensor]:
        """See `Shares`."""
        param = vars(self).get(STANDS_FOR)
        return param.everywhere() if isinstance(param, Shares) else []

    @property
    def grad(self) -> Any:
        """The gradient at rest, reduced over the ranks; assigning takes a whole one."""
        return self._of().grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._of().grad = value

    @grad.deleter
    def grad(self) -> None:
        self._of().grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        new = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
