"""Parameters that are read outside their module's call: a fused loss reads `lm_head.weight`, DeBERTa its embeddings'.

[Note: whoever reads gets the whole] While a forward of the model runs, or its backward, `module.weight` is the whole
tensor, in the graph, whoever reads it: inside the module's own call because the engine has put it there, elsewhere
because `module._parameters` is a dict that asks the engine. Such a read is remembered until the forward ends, so that all
reads see one tensor, and its gradient is reduced like that of any use. What a read needs is gathered into memory of its
own, which lives as long as the graph: nothing else tells when such a value is last needed. At rest, `module.weight` is
what the optimizer holds, as ever.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.parameters.whole import SharedWhole, Whole
from hf_zero.engine.units.unit import Unit
from hf_zero.errors import UsageError

_PUT_BY_ENGINE = (Tensor, Whole, SharedWhole, DTensor, type(None))  # for a call


class Reader(Protocol):
    """Who knows the whole tensors: the engine."""

    @property
    def is_at_rest(self) -> bool:
        """Whether no forward and no backward is under way."""

    def read(self, param: Tensor) -> Tensor:
        """The whole tensor of a parameter, if a forward or backward is under way; else the parameter itself."""

    def read_from(self, tensor: Tensor) -> Tensor:
        """The parameter that `tensor` was read from, if it is a read under way; else the tensor itself."""

    def settle(self) -> None:
        """Put everything at rest, if a forward has ended without its hooks."""


class Receiver(Protocol):
    """Who gets the gradients: the backward."""

    anchor: Tensor

    def on_read_gradient(self, read: Read, gradient: Tensor) -> Tensor | None:
        """The gradient of a read is there; returns it where `torch.autograd.grad` asks for it."""


def refuse_pickling() -> NoReturn:
    """Raise for a module that is pickled: what hf_zero has put into it is of this process."""
    raise UsageError(
        "a module that hf_zero runs cannot be pickled (torch.save(model), or sent to another process): save "
        "`model.state_dict()`, or use `model.save_pretrained`"
    )


class ReadableParameters(dict[str, Any]):
    """`module._parameters` of a partitioned model. Copies are plain dicts."""

    __slots__ = ("_reader",)

    def __init__(self, reader: Reader, known: dict[str, Any]) -> None:
        super().__init__(known)
        self._reader = weakref.ref(reader)

    def __getitem__(self, name: str) -> Any:
        tensor = super().__getitem__(name)
        if type(tensor) in _PUT_BY_ENGINE:
            return tensor
        reader = self._reader()
        return tensor if reader is None or reader.is_at_rest else _outside_compiled_graphs()(reader, tensor)

    def __setitem__(self, name: str, tensor: Any) -> None:
        """What was read may be put back: `functional_call` of a block does so. The parameter itself is then held again."""
        reader = self._reader() if type(tensor) in _PUT_BY_ENGINE else None
        super().__setitem__(name, tensor if reader is None else reader.read_from(tensor))

    def items(self) -> Any:
        """What is held at rest, also after a forward that Ctrl-C has ended."""
        if (reader := self._reader()) is not None and not reader.is_at_rest:
            _outside_compiled_graphs()(reader, None)
        return super().items()

    def values(self) -> Any:
        """See `items`."""
        if (reader := self._reader()) is not None and not reader.is_at_rest:
            _outside_compiled_graphs()(reader, None)
        return super().values()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        memo[id(self)] = new = {}
        new.update({name: copy.deepcopy(tensor, memo) for name, tensor in self.items()})
        return new

    def __reduce__(self) -> NoReturn:
        refuse_pickling()


@functools.cache
def _outside_compiled_graphs() -> Callable[[Reader, Tensor | None], Tensor | None]:
    """Reads, or settles (None), where `torch.compile` looks away, as it does from hooks; made late: it imports a compiler."""

    def ask(reader: Reader, tensor: Tensor | None) -> Tensor | None:
        if tensor is not None:
            return reader.read(tensor)
        reader.settle()
        return None

    return cast(Callable[[Reader, Tensor | None], Tensor | None], torch.compiler.disable(ask))  # type: ignore[no-untyped-call]


class Read:
    """A parameter that was read outside its module's call, and where its gradient goes: a `LiveCall` like any.

    Attributes:
        parameter: which.
        unit: its unit.
        epoch: of the unit, when it was read.
        session: the last pass in which its gradient has come.
        node: gives the node of the graph, as long as it lives; weak.
    """

    is_done, began = True, 0  # nothing but the graph tells whether a backward comes to it

    def __init__(self, parameter: ZeroParameter, unit: Unit) -> None:
        self.parameter, self.unit, self.epoch = parameter, unit, unit.epoch
        self.session: object | None = None
        self.node: Callable[[], object | None] = lambda: None


class _Read(torch.autograd.Function):
    """Puts a whole tensor into the graph; its backward hands its gradient to the engine."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, leaf: Tensor | None, read: Read, receiver: Receiver, whole: list[Tensor]
    ) -> Tensor:
        ctx.read, ctx.receiver = read, receiver
        read.node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return whole[0].data  # no view of an input, of which autograd would let nobody write into views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        asked = None if gradient is None else ctx.receiver.on_read_gradient(ctx.read, gradient)
        return None, asked, None, None, None


def in_graph(receiver: Receiver, read: Read, whole: Tensor) -> Tensor:
    """`whole` (of no other use) with the gradient function of a read."""
    (leaf,) = connected([read.parameter])
    result: Tensor = _Read.apply(receiver.anchor, leaf, read, receiver, [whole])  # type: ignore[no-untyped-call, unused-ignore]
    read.unit.live_calls.add(read)
    return result


def connected(parameters: Sequence[ZeroParameter]) -> list[Tensor | None]:
    """Parameters as inputs of the function that stands for them in the graph, so that `backward(inputs=[p])` finds them.

    Autograd passes gradients on to them where `torch.autograd.grad` asks for those. Else it would call a plain parameter's own
    hooks, with None.
    """
    leaves: list[Tensor | None] = []
    for p in parameters:
        param = p.param
        is_hooked = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
        leaves.append(None if is_hooked or not param.requires_grad else param)
    return leaves


def tensors_in(output: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of what a module returns, in objects that torch's trees do not know too (plain dataclasses).

    But for those that are put off, see [Note: logits put off]: what computes them sees to itself.
    """
    if type(output) is Tensor:  # most often, and torch's trees cost more than the rest of a call's hook
        yield output
        return
    if type(output) in (tuple, list, dict):
        for each in output.values() if type(output) is dict else output:
            if each is not None:
                yield from tensors_in(each, depth)
        return
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            if not hasattr(type(leaf), "is_put_off"):
                yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            yield from tensors_in(list(vars(leaf).values()), depth - 1)


def replace_tensors(output: Any, new: dict[int, Tensor], depth: int = 3) -> Any:
    """`output` with tensors replaced by id; objects that torch's trees do not know are changed in place."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return new.get(id(leaf), leaf)
        if depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            for name, value in list(vars(leaf).items()):
                changed = replace_tensors(value, new, depth - 1)
                if changed is not value:
                    vars(leaf)[name] = changed
        return leaf

    return pytree.tree_map(replaced, output)
