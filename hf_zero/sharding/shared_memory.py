"""Parameters that share memory, and tensors that modules hold of a parameter's memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hf_zero.errors import UsageError


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
        with torch.set_grad_enabled(self.is_in_graph):
            source = param if self.is_in_graph else param.detach()
            size, stride, offset = self.place
            is_all = (size, stride, offset) == (param.shape, param.stride(), 0)
            setattr(
                self.module,
                self.attribute,
                source if is_all and not self.is_in_graph else source.as_strided(*self.place),
            )


def find_aliases(model: nn.Module) -> list[Alias]:
    """What modules hold of parameters' memory, before it is partitioned.

    Raises:
        UsageError: two parameters, or a parameter and a buffer, share memory: each of them would be by itself.
    """
    params: dict[int, tuple[nn.Module, str, Tensor]] = {}
    for module in model.modules():
        params |= {id(p): (module, name, p) for name, p in module._parameters.items() if _is_plain(p)}
    by_storage: dict[int, list[tuple[nn.Module, str, Tensor]]] = {}
    for each in params.values():
        by_storage.setdefault(_storage_of(each[2]), []).append(each)
    names = {id(t): name for name, t in itertools.chain(model.named_parameters(), model.named_buffers())}
    for group in by_storage.values():
        for (*_, one), (*_, other) in itertools.combinations(group, 2) if len(group) > 1 else ():
            _refuse_overlap(one, other, names)
    found = []
    for module in model.modules():
        for buffer in filter(_is_plain, module._buffers.values()):
            for *_, param in by_storage.get(_storage_of(buffer), ()):
                _refuse_overlap(param, buffer, names)
        for attribute, value in vars(module).items():
            if _is_plain(value) and not isinstance(value, nn.Parameter):
                for holder, name, param in by_storage.get(_storage_of(value), ()):
                    if value.dtype == param.dtype and _overlap(value, param) and param.is_contiguous():
                        place = (value.shape, value.stride(), int(value.storage_offset()) - int(param.storage_offset()))
                        found.append(Alias(module, attribute, holder, name, place, value.grad_fn is not None))
                        break
    return found


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with memory, which is not partitioned."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or is_lazy(value):
        return False
    has_memory = value.layout is torch.strided and value.device.type != "meta" and value.numel() > 0
    return has_memory and _storage_of(value) != 0


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refuse_overlap(one: Tensor, other: Tensor, names: dict[int, str]) -> None:
    if _overlap(one, other):
        raise UsageError(
            f"{names.get(id(one))!r} and {names.get(id(other))!r} share memory, and each would be partitioned by itself: let "
            "both modules hold one parameter (head.weight = embed.weight), or compute with a view of it in the forward "
            "(F.linear(x, self.enc.weight.t()))"
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
