"""The tensors among an operator's arguments, and those that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from hf_zero.engine.parameters.at_rest.operators import writes_of
from hf_zero.engine.parameters.at_rest.root import Root


def tensors_in(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments: clipping passes here for every gradient; pytree takes ten calls a tensor."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += tensors_in(argument)
    return found


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among the arguments that an operator changes."""
    for index, name in writes_of(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        yield from tensors_in((value,))


def mapped(func: Any, args: Any, kwargs: Any, plain: dict[int, Tensor]) -> Any:
    """What an operator gives of its arguments, some of which others stand for, by the ids of those."""
    return func(*(_swapped(a, plain) for a in args), **{key: _swapped(a, plain) for key, a in kwargs.items()})


def _swapped(argument: Any, plain: dict[int, Tensor]) -> Any:
    if isinstance(argument, Tensor):
        return plain.get(id(argument), argument)
    return [_swapped(a, plain) for a in argument] if isinstance(argument, list | tuple) else argument


def unique(roots: Iterable[Root]) -> list[Root]:
    """Each of them once, in their order."""
    return list({id(root): root for root in roots}.values())
