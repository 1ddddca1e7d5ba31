"""How a value at rest came to be: its key, and the call that makes it, for ranks that have not made it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hf_zero.engine.parameters.at_rest.operators import writes_of
from hf_zero.engine.parameters.at_rest.root import AtRest, Root

Key = bytes
_KEY_BYTES = 16
_SAID = (int, float, complex, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class UnknownError(Exception):
    """An operand has no key."""


class _Number(NamedTuple):
    """A tensor of one element, on the host."""

    value: float
    dtype: torch.dtype


class _Device(NamedTuple):
    """Each rank has one of its own."""

    type: str


class _Place(NamedTuple):
    """One place of a list that an operator goes through place by place."""

    part: Any


def digest(*parts: object) -> Key:
    """A key that tells these apart from all others; the same on every rank."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=_KEY_BYTES).digest()


@dataclass(frozen=True)
class Called:
    """An operator's call on values that have keys.

    Args:
        name: the operator's.
        overload: likewise.
        args: keys, and what else can be sent.
        kwargs: likewise.
    """

    name: str
    overload: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls, func: Any, args: Any, kwargs: Any, place: int | None, num_places: int, key_of: Callable[[Root], Key | None]
    ) -> Called:
        """What is about to run, or one place of its lists.

        Raises:
            UnknownError: it cannot be told to others.
        """
        parts = [_part(arg, place, num_places, key_of) for arg in args]
        named = {name: _part(value, place, num_places, key_of) for name, value in sorted(kwargs.items())}
        return cls(func._schema.name, func._overloadname, parts, named)

    @property
    def key(self) -> Key:
        """The same for all calls that make the same."""
        return digest(self.name, self.overload, self.args, self.kwargs)


class Recipe(NamedTuple):
    """How one value is made of others, on the rows that a rank has of them.

    Attributes:
        called: the operator.
        is_written: it is one of those that the operator writes to, not of those that it gives.
        which: of them.
        device: type of the device where it was made.
    """

    called: Called
    is_written: bool
    which: int
    device: str

    @property
    def operands(self) -> list[Key]:
        """What it is made of."""
        return [part for part in _leaves((self.called.args, self.called.kwargs)) if isinstance(part, Key)]

    def make(self, rows_of: Callable[[Key], Tensor]) -> Tensor:
        """This rank's rows of it, in memory of their own.

        Args:
            rows_of: this rank's rows of an operand, on the right device.
        """
        namespace, name = self.called.name.split("::")
        func = getattr(getattr(getattr(torch.ops, namespace), name), self.called.overload or "default")
        args = [_given(part, rows_of) for part in self.called.args]
        kwargs = {key: _given(part, rows_of) for key, part in self.called.kwargs.items()}
        writes = writes_of(func)
        for index, name in writes:
            if index < len(args):
                args[index] = _own(args[index])
            elif name in kwargs:
                kwargs[name] = _own(kwargs[name])
        result = func(*args, **kwargs)
        if self.is_written:
            result = [args[index] if index < len(args) else kwargs.get(name) for index, name in writes]
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)][self.which]
        shares = any(made.data_ptr() == rows_of(key).data_ptr() for key in self.operands)
        return made.clone() if shares else made


def _own(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)


def _part(value: Any, place: int | None, num_places: int, key_of: Callable[[Root], Key | None]) -> Any:
    if isinstance(value, AtRest):
        key = key_of(value) if isinstance(value, Root) else None
        if key is None:
            raise UnknownError
        return key
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.ndim or value.device.type != "cpu":
            raise UnknownError
        return _Number(value.item(), value.dtype)
    if isinstance(value, list | tuple):
        if place is not None and len(value) == num_places:
            return _Place(_part(value[place], None, 0, key_of))
        return [_part(each, None, 0, key_of) for each in value]
    if isinstance(value, torch.device):
        return _Device(value.type)
    if not isinstance(value, _SAID):
        raise UnknownError
    return value


def _given(part: Any, rows_of: Callable[[Key], Tensor]) -> Any:
    """The argument that `_part` has made into a part."""
    match part:
        case bytes():
            return rows_of(part)
        case _Number():
            return torch.tensor(part.value, dtype=part.dtype, device="cpu")
        case _Device():
            return torch.device(part.type)
        case _Place():
            return [_given(part.part, rows_of)]
        case list():
            return [_given(each, rows_of) for each in part]
    return part


def _leaves(part: Any) -> list[Any]:
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, _Place):
        return _leaves(part.part)
    if isinstance(part, list | tuple) and not isinstance(part, _Number | _Device):
        return [leaf for each in part for leaf in _leaves(each)]
    return [part]
