"""Parameters that share memory, and tensors that modules hold of a parameter's memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hf_zero.errors import UsageError

_OF_ORIGINAL = "_orig"


@dataclass(frozen=True)
class Alias:
    """An attribute of a module that is a parameter's memory: `self.decoder = self.encoder.weight.t()`.

    Attributes:
        module: whose attribute it is.
        attribute: its name.
        holder: the module that holds the parameter.
        name: of the parameter in it.
        place: size, strides and offset in the parameter's memory, in elements.
        is_in_graph: gradients go through it to the parameter.
    """

    module: nn.Module
    attribute: str
    holder: nn.Module
    name: str
    place: tuple[Sequence[int], Sequence[int], int]
    is_in_graph: bool

    def follow(self) -> None:
        """Let the attribute be the same part of the parameter that is in place now."""
        param = getattr(self.holder, self.name)
        if not isinstance(param, DTensor):
            return  # it has not been cut, and has its memory
        with torch.set_grad_enabled(self.is_in_graph):
            source = param if self.is_in_graph else param.detach()
            size, stride, offset = self.place
            is_all = (size, stride, offset) == (param.shape, param.stride(), 0)
            setattr(
                self.module,
                self.attribute,
                source if is_all and not self.is_in_graph else source.as_strided(*self.place),
            )


class _Held(NamedTuple):
    """A parameter or a buffer, and the memory in which it is whole."""

    module: nn.Module
    name: str
    tensor: Tensor
    memory: Tensor


def find_aliases(model: nn.Module, wholes: Mapping[int, Tensor] = MappingProxyType({})) -> list[Alias]:
    """What modules hold of parameters' memory, before it is partitioned.

    Args:
        model: any module.
        wholes: of parameters that are partitioned already, by id: the memory in which code has seen them whole.

    Raises:
        UsageError: two parameters, or a parameter and a buffer, share memory: each of them would be by itself.
    """
    params: dict[int, _Held] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and _is_plain(memory := wholes.get(id(param), param)):
                params.setdefault(id(param), _Held(module, name, param, memory))
    by_storage: dict[int, list[_Held]] = {}
    for held in params.values():
        by_storage.setdefault(_storage_of(held.memory), []).append(held)
    names = {id(t): name for name, t in itertools.chain(model.named_parameters(), model.named_buffers())}
    for group in by_storage.values():
        placed = sorted([(*_extent(held.memory), held) for held in group], key=lambda each: each[:2])
        for index, (_, end, one) in enumerate(placed):
            for begin, _, other in itertools.islice(placed, index + 1, None):
                if begin >= end:
                    break
                _refuse_overlap(one, other, names)
    found = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if _is_plain(buffer):
                for held in by_storage.get(_storage_of(buffer), ()):
                    _refuse_overlap(held, _Held(module, name, buffer, buffer), names)
        for attribute, value in vars(module).items():
            # `torch.nn.utils.spectral_norm` leaves the memory of `weight_orig` in `weight` until the first forward.
            is_put_there = f"{attribute}{_OF_ORIGINAL}" not in module._parameters and not isinstance(
                value, nn.Parameter
            )
            if is_put_there and _is_plain(value):
                for held in by_storage.get(_storage_of(value), ()):
                    memory = held.memory
                    if value.dtype == memory.dtype and _overlap(value, memory) and memory.is_contiguous():
                        offset = int(value.storage_offset()) - int(memory.storage_offset())
                        place = (value.shape, value.stride(), offset)
                        found.append(Alias(module, attribute, held.module, held.name, place, value.grad_fn is not None))
                        break
    return found


def refuse_aliases(model: nn.Module, wholes: Mapping[int, Tensor]) -> None:
    """Refuse, of parameters that are cut as they are made, all that `find_aliases` finds: it cannot tell what is in a graph.

    Raises:
        UsageError: a module holds a parameter's memory.
    """
    for alias in find_aliases(model, wholes):
        raise UsageError(
            f"{type(alias.module).__name__}.{alias.attribute} is the memory of the parameter {alias.name!r} of "
            f"{type(alias.holder).__name__}, which is partitioned as it is made (zero.Init): take it in the forward "
            "(self.encoder.weight.t()), or make the model outside of zero.Init"
        )


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with memory, which is not partitioned."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or is_lazy(value):
        return False
    is_plain = type(value) is Tensor or (
        isinstance(value, nn.Parameter) and type(value.data) is Tensor
    )  # not quantised
    return (
        is_plain
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.numel() > 0
        and _storage_of(value) != 0
    )


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refuse_overlap(one: _Held, other: _Held, names: dict[int, str]) -> None:
    trains = one.tensor.requires_grad or other.tensor.requires_grad  # else nothing changes them
    if trains and _overlap(one.memory, other.memory):
        raise UsageError(
            f"{names.get(id(one.tensor))!r} and {names.get(id(other.tensor))!r} share memory, and each would be partitioned by "
            "itself: let both modules hold one parameter (head.weight = embed.weight), or compute with a view of it in the "
            "forward (F.linear(x, self.enc.weight.t()))"
        )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors over one storage have elements in common."""
    (begin, end), (its_begin, its_end) = (_extent(t) for t in (one, other))
    if end <= its_begin or its_end <= begin:
        return False
    if one.dtype != other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    low = min(begin, its_begin) // one.itemsize
    marks = torch.zeros(max(end, its_end) // one.itemsize - low, dtype=torch.bool, device="cpu")
    for tensor in (one, other):
        shown = marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - low)
        if tensor is other:
            return bool(shown.any())
        shown.fill_(True)
    return False


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a storage that a tensor shows, and the one after its last."""
    span = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + span * tensor.itemsize
