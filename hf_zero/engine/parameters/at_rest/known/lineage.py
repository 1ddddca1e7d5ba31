"""Which value a tensor at rest has, whatever rank names it.

[Note: lineage] Ranks that run the same lines compute the same values: copies of weights, averages of them. A rank that reads
one alone, see [Note: alone], has to say which one it means. So a value has a key that tells how it came to be: of a
parameter, which one, and after how many steps and edits; of one that belongs to no engine, as of an average's model, how many
were made before it; of what an operator gives or writes, the operator, the keys of its operands, and numbers; of a gradient,
which one, after how many backwards, and how often it was written to since. What comes from anything else (a plain tensor,
random numbers) has none. A rank gives its part of a value that it has under the same key, or that a copy of its parameter
would have: nobody has to keep those. What the reader alone has computed it computes, too: see [Note: made alone]. Where it
has several that are not the same, or can have none, it says so. A rank that copies such values into a model alone (an
average, to save it) reads them in the model, too.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.engine.parameters.at_rest.known.entries import (
    forget,
    key_of_cast,
    key_of_gradient,
    key_of_parameter,
    key_of_value,
    rows_with,
)
from hf_zero.engine.parameters.at_rest.known.recipes import Called, Key, Recipe, UnknownError, digest
from hf_zero.engine.parameters.at_rest.known.values import note
from hf_zero.engine.parameters.at_rest.known.weak_tensor import WeakTensor
from hf_zero.engine.parameters.at_rest.operators import base_name, writes_of
from hf_zero.engine.parameters.at_rest.root import AtRest, Root
from hf_zero.engine.ranks.apart import same_bits
from hf_zero.engine.ranks.serving import Serving

_COPIES = ("clone", "_to_copy", "contiguous", "lift_fresh")


def key_of(root: Root, is_read: bool = False) -> Key | None:
    """Of a parameter as it is now, or of a value; None: it has none.

    Args:
        root: the tensor.
        is_read: and nothing is written to: of a gradient, too, as it is now.
    """
    world, _ = root.held
    param = root.param
    number = None if param is None else world.serving.number_of(param)
    if number is not None:
        assert param is not None
        tick = world.serving.apart.tick_of(param)
        if tick and isinstance(source := copied_over(root), Key):
            return source  # what this rank alone has swapped in: copies of it are values that others have, or can make
        return key_of_parameter(world.serving, number, (tick, world.rank) if tick else 0)  # which nobody else has
    key = key_of_value(root)
    name = world.serving.gradient_with(root.rows) if key is None and is_read else None
    return key if name is None else key_of_gradient(world.serving, name)


def are_known_to_be_equal(one: Root, other: Root) -> bool:
    """Whether they have the same values on the same device, as far as ranks know; the same answer on every rank."""
    key = key_of(one)
    return key is not None and key == key_of(other) and one.rows.device.type == other.rows.device.type


@dataclass(frozen=True)
class Call:
    """An operator's call on tensors at rest: the keys of what it gives and writes.

    Args:
        keys: one for each place of lists, or one.
        source: what it writes or gives has the values of this.
        called: how others can do the same on their rows, for each key.
    """

    keys: Sequence[Key | None]
    source: Key | WeakTensor | None = None
    called: Sequence[Called | None] = ()

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, num_places: int | None = None, is_on_rows: bool = False) -> Call:
        """Before it runs.

        Args:
            func: the operator.
            args: its own.
            kwargs: likewise.
            num_places: of the lists that it goes through place by place; None: it takes its operands together.
            is_on_rows: each rank runs it on its own rows.
        """
        if func is torch.ops.aten.copy_.default and (source := _source(*args[:2])) is not None:
            return cls([source if isinstance(source, Key) else None], source)
        if base_name(func) in _COPIES and (copy := _copy(args, kwargs)) is not None:
            return copy
        places = [None] if num_places is None else range(num_places)
        called = [_called(func, args, kwargs, place, num_places or 0) for place in places]
        return cls([None if each is None else each.key for each in called], None, called if is_on_rows else ())

    def begin(self, written: Sequence[Tensor]) -> None:
        """These are about to be written to: nobody gets what is half done."""
        for tensor in written:
            if isinstance(tensor, Root):
                forget(tensor.rows)

    def note_written(self, written: Sequence[Tensor]) -> None:
        """These, all places of the first list and then of the next, have been written to."""
        self._note(written, is_written=True)
        for tensor in written:
            if isinstance(tensor, Root):
                _note_source(tensor, self.source)

    def note_made(self, made: Sequence[object]) -> None:
        """These are what it gives."""
        self._note(made, is_written=False)

    def _note(self, tensors: Sequence[object], is_written: bool) -> None:
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Root):
                continue
            which, place = divmod(index, len(self.keys))
            key = self.keys[place if self.source is None else 0]
            if key is not None and self.source is None:
                key = digest(is_written, key, which)
            called = self.called[place] if self.called and key is not None else None
            kind = tensor.rows.device.type
            note(tensor, key, None if called is None else Recipe(called, is_written, which, kind))


NOTHING = Call([None])  # has keys


def mark_of(func: Any, args: Any, kwargs: Any) -> int:
    """A number that tells apart calls which write other values into what is at rest, as far as that can be told on a host.

    The same on all ranks that make the same call: their numbers count, keys, and what views show; of plain tensors see
    [Note: given wholes].
    """
    return zlib.crc32(repr((base_name(func), _told((*args, *kwargs.values())))).encode())


def _told(values: Sequence[Any]) -> list[Any]:
    told: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            told += _told(value)
        elif isinstance(value, Root):
            told.append(key_of(value))
        elif isinstance(value, AtRest) and isinstance(value, Tensor):
            told.append((key_of(value.root), value.shape, value.storage_offset()))
        elif isinstance(value, Tensor) and not value.ndim and value.device.type == "cpu":
            told.append(value.item())
        elif isinstance(value, int | float | complex):
            told.append(value)
    return told


_made: weakref.WeakKeyDictionary[Serving, Key] = weakref.WeakKeyDictionary()  # the last key of a parameter made


def note_parameter(made: Root) -> None:
    """A parameter has been made, and filled, or will be at once; the same on every rank."""
    serving = made.held[0].serving
    # A chain, so that ranks which have made others before have no key in common, rather than that of another parameter.
    tensor = cast(Tensor, made)
    _made[serving] = key = digest("made", serving.name, _made.get(serving), tuple(tensor.shape), tensor.dtype)
    note(made, key, is_filled=False)


def note_copy(copy: Root, original: Root) -> None:
    """A tensor has the values of another."""
    note(copy, key_of(original))


# ---- copies ----------------------------------------------------------------------------------------------------------


_copied_over: dict[int, tuple[weakref.ref[Tensor], Key | WeakTensor]] = {}  # by the id of a parameter's rows


def copied_over(root: Root) -> Key | Tensor | None:
    """What has been copied into a parameter, and is still there and the same: a value's key, or the plain whole itself."""
    rows, source = _copied_over.get(id(root.rows), (None, None))
    if rows is None or rows() is not root.rows:
        return None
    if isinstance(source, Key):
        return source if any(same_bits(value, root.rows) for value in rows_with(source)) else None
    plain = None if source is None else source.tensor()
    return plain if plain is not None and torch.equal(root.cut(plain), root.rows) else None


def is_back(root: Root) -> bool:
    """Whether what has been copied into a parameter last, by this rank alone, is what other ranks have there."""
    rows, source = _copied_over.get(id(root.rows), (None, None))
    number = None if root.param is None else root.held[0].serving.number_of(root.param)
    if rows is None or rows() is not root.rows or number is None:
        return False
    return isinstance(source, Key) and source == key_of_parameter(root.held[0].serving, number)


def _source(written: object, read: object) -> Key | WeakTensor | None:
    if not isinstance(written, Root) or not isinstance(written, Tensor) or not isinstance(read, Tensor):
        return None
    if read.dtype != written.dtype or read.shape != written.shape:
        return None
    if isinstance(read, Root):
        return key_of(read) if read.held == written.held else None
    return WeakTensor(read) if type(read) in (Tensor, nn.Parameter) and read.device == written.device else None


def _note_source(root: Root, source: Key | WeakTensor | None) -> None:
    rows, number = root.rows, id(root.rows)
    if source is None or root.param is None:
        _copied_over.pop(number, None)
    else:
        _copied_over[number] = weakref.ref(rows, lambda _: _copied_over.pop(number, None)), source


# ---- keys ------------------------------------------------------------------------------------------------------------


def _called(func: Any, args: Any, kwargs: Any, place: int | None, num_places: int) -> Called | None:
    try:
        return Called.of(func, args, kwargs, place, num_places, partial(key_of, is_read=not writes_of(func)))
    except UnknownError:
        return None


def _copy(args: Any, kwargs: Any) -> Call | None:
    """Of a copy on whatever device, perhaps in another dtype."""
    read, dtype = args[0], kwargs.get("dtype")
    key = key_of(read, is_read=True) if isinstance(read, Root) else None
    if key is None:
        return None
    if dtype in (None, read.dtype):
        return Call([key], key)
    cast = key_of_cast(key, dtype)
    return Call([cast], cast, [Called("aten::_to_copy", "", [key], {"dtype": dtype})])
