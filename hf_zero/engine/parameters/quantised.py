"""Quantised weights (bitsandbytes' `Params4bit`): bytes that mean something together with a class and its attributes.

[Note: quantised weights] A frozen parameter of a class of its own is left as it is, whole on every rank. In stage 3 the 4-bit
ones are cut like others: at rest their packed bytes are rows of a `PartitionedTensor`, which takes their attributes along.
The state that tells how to dequantise them stays whole: 1/8 of the bytes in blocks of 64 weights, about 1/30 with double
quantisation. Modules are shown the whole bytes as the class they came in. No dtype is ever applied to them.

Their products keep a view of the bytes in the graph, as an attribute of its node that no saved-tensor hook sees. So the node
makes the unit whole before it runs, where its memory has been released, see [Note: saved weights].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.engine.parameters.host_rows import HostParameter
from hf_zero.engine.parameters.whole import WholeParameter

_CLASS, _SOURCE = "_zero_class", "_zero_source"


class Memory(Protocol):
    """A unit, as its views know it."""

    epoch: int
    guarded: list[weakref.ref[Tensor]]

    @property
    def is_whole(self) -> bool:
        """Whether the memory is there."""


class _Source:
    """Where the bytes that a module sees come from.

    Args:
        memory: the unit.
        make_whole: makes a unit whole until the backward ends.
    """

    def __init__(self, memory: Memory, make_whole: Callable[[Any, int], None]) -> None:
        self._memory, self._make_whole, self._epoch = memory, make_whole, memory.epoch

    def guard(self, node: Any, views: list[Tensor]) -> None:
        """Let `node` of a graph have its bytes when it runs; `views` are what it keeps of them."""
        node.register_prehook(self._ensure)
        alive = [view for view in self._memory.guarded if view() is not None]
        self._memory.guarded = alive + [weakref.ref(view) for view in views]

    def _ensure(self, gradients: Any) -> None:
        if not self._memory.is_whole:
            self._make_whole(self._memory, self._epoch)


def _guard_product(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a module that multiplies by a quantised weight."""
    shown = module._parameters.get("weight")
    source = None if shown is None else vars(shown).get(_SOURCE)
    node = output.grad_fn if isinstance(output, Tensor) else None
    if source is None or node is None:
        return
    nodes: list[Any] = [node, *(before for before, _ in node.next_functions)]
    for each in nodes:
        if type(each).__name__ == "MatMul4BitBackward":
            kept = [tensor for tensor in each.tensors if isinstance(tensor, Tensor)]
            source.guard(each, [*kept, *(tensor._base for tensor in kept if tensor._base is not None)])


def is_of_own_class(param: nn.Parameter) -> bool:
    """Whether this is a frozen parameter whose class alone knows what its values mean: quantised weights."""
    is_own = isinstance(param, nn.Parameter) and not isinstance(param, DTensor | WholeParameter | HostParameter)
    return is_own and type(param) is not nn.Parameter and not param.requires_grad


def can_be_cut(param: nn.Parameter) -> bool:
    """Whether a parameter of a class of its own is packed bytes that its class reads from whole memory only: 4-bit weights.

    8-bit weights are kept by their module, outside of its parameters.
    """
    return (
        is_of_own_class(param) and type(param).__name__ == "Params4bit" and bool(getattr(param, "bnb_quantized", False))
    )


def plain_parts(value: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor of any class is made of: itself, or what a wrapper of several (torchao's) holds."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value.detach().as_subclass(Tensor)]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(value, name))]


def remember_class(param: nn.Parameter, before: nn.Parameter, holders: list[tuple[nn.Module, str]]) -> None:
    """Let `param` be shown as the class of `before`, whose attributes it has."""
    setattr(param, _CLASS, type(before))
    for module, _ in holders:
        module.register_forward_hook(_guard_product)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # In evaluation it would repack what it is shown, and change the state that it shares with the rows.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def is_quantised(param: Tensor) -> bool:
    """Whether a partitioned parameter holds bytes of a class of their own."""
    return _CLASS in vars(param)


def as_shown(
    params: Sequence[Tensor],
    wholes: Sequence[Tensor],
    memory: Memory | None = None,
    make_whole: Callable[[Any, int], None] | None = None,
) -> list[Tensor]:
    """Whole tensors, in the class and with the attributes of the quantised parameters that they are the whole of.

    Args:
        params: any parameters; most have no class of their own.
        wholes: their whole values.
        memory: the unit that `wholes` are views of, if its memory may be released.
        make_whole: makes that unit whole again, in a backward.
    """
    found = list(wholes)
    for place, (param, whole) in enumerate(zip(params, wholes, strict=True)):
        kind: Any = vars(param).get(_CLASS)
        if kind is not None:
            found[place] = shown = torch.Tensor._make_subclass(kind, whole.detach(), False)
            vars(shown).update({key: value for key, value in vars(param).items() if not key.startswith("_")})
            if memory is not None and make_whole is not None:
                vars(shown)[_SOURCE] = _Source(memory, make_whole)
    return found
