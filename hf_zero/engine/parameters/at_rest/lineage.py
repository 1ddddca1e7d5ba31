"""Which value a tensor at rest has, whatever rank names it.

[Note: lineage] Ranks that run the same lines compute the same values: copies of weights, averages of them. A rank that reads
one alone, see [Note: alone], has to say which one it means. So a value has a key that tells how it came to be: of a parameter,
which one, and after how many steps and edits; of one that belongs to no engine, as of an average's model, how many were
made before it; of what an operator gives or writes, the operator, the keys of its operands, and
numbers. What comes from anything else (a gradient, a plain tensor, random numbers) has none. A rank gives its part of a value
that it has under the same key, or that a copy of its parameter would have: nobody has to keep those. Where it has several
that are not the same, or none since this rank alone has computed it, it says so. A rank that copies such values into a model
alone (an average, to save it) reads them in the model, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.engine.parameters.at_rest.operators import base_name
from hf_zero.engine.parameters.at_rest.root import AtRest, Root
from hf_zero.engine.ranks.serving import Serving
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout

Key = bytes

VALUES = "values computed from parameters"
_KEY_BYTES = 16
_COPIES = ("clone", "_to_copy", "contiguous", "lift_fresh")
_SAID = (int, float, complex, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class _UnknownError(Exception):
    """An operand has no key."""


class _Entry(NamedTuple):
    """A value that has a key.

    Attributes:
        rows: this rank's.
        key: its own.
        layout: which rows are whose.
        ready: on a device, passes when they are there.
    """

    rows: weakref.ref[Tensor]
    key: Key
    layout: RowLayout
    ready: torch.Event | None


_entries: dict[int, _Entry] = {}  # by the id of the rows


def key_of(root: Root) -> Key | None:
    """Of a parameter as it is now, or of a value; None: it has none."""
    world, _ = root.held
    param = root.param
    number = None if param is None else world.serving.number_of(param)
    if number is not None:
        return _key_of_parameter(world.serving, number, world.serving.apart.tick)  # which nobody else has
    entry = _entries.get(id(root.rows))
    return entry.key if entry is not None and entry.rows() is root.rows else None


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
    """

    keys: Sequence[Key | None]
    source: Key | _Plain | None = None

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, num_places: int | None = None) -> Call:
        """Before it runs.

        Args:
            func: the operator.
            args: its own.
            kwargs: likewise.
            num_places: of the lists that it goes through place by place; None: it takes its operands together.
        """
        if func is torch.ops.aten.copy_.default and (source := _source(*args[:2])) is not None:
            return cls([source if isinstance(source, Key) else None], source)
        if base_name(func) in _COPIES and (key := _key_of_copy(args, kwargs)) is not None:
            return cls([key], key)
        places = [None] if num_places is None else range(num_places)
        return cls([_key_of_call(func, args, kwargs, place, num_places or 0) for place in places])

    def begin(self, written: Sequence[Tensor]) -> None:
        """These are about to be written to: nobody gets what is half done."""
        for tensor in written:
            if isinstance(tensor, Root):
                _entries.pop(id(tensor.rows), None)

    def note_written(self, written: Sequence[Tensor]) -> None:
        """These, all places of the first list and then of the next, have been written to."""
        for index, tensor in enumerate(written):
            if isinstance(tensor, Root):
                _note(tensor, self._key(index, "written") if self.source is None else self.keys[0])
                _note_source(tensor, self.source)

    def note_made(self, made: Sequence[object]) -> None:
        """These are what it gives."""
        for index, tensor in enumerate(made):
            if isinstance(tensor, Root):
                _note(tensor, self._key(index, "made") if self.source is None else self.keys[0])

    def _key(self, index: int, how: str) -> Key | None:
        key = self.keys[index % len(self.keys)]
        return None if key is None else _digest(how, key, index // len(self.keys))


NOTHING = Call([None])  # has keys


def forget(rows: Tensor) -> None:
    """These rows change without a note here: they are written back to."""
    _entries.pop(id(rows), None)


_made: weakref.WeakKeyDictionary[Serving, Key] = (
    weakref.WeakKeyDictionary()
)  # the last key of a parameter that was made


def note_parameter(made: Root) -> None:
    """A parameter has been made, and filled, or will be at once; the same on every rank."""
    serving = made.held[0].serving
    # A chain, so that ranks which have made others before have no key in common, rather than that of another parameter.
    tensor = cast(Tensor, made)
    _made[serving] = key = _digest("made", serving.name, _made.get(serving), tuple(tensor.shape), tensor.dtype)
    _note(made, key)


def note_copy(copy: Root, original: Root) -> None:
    """A tensor has the values of another."""
    _note(copy, key_of(original))


def _note(root: Root, key: Key | None) -> None:
    world, cut = root.held
    rows, param = root.rows, root.param
    if key is None:
        _entries.pop(id(rows), None)
    elif root.is_cut and world.serving.is_asked and (param is None or world.serving.number_of(param) is None):
        _offer(world.serving)
        ready = None if rows.device.type == "cpu" else torch.Event(rows.device)
        if ready is not None:
            ready.record()
        _entries[id(rows)] = _Entry(weakref.ref(rows, functools.partial(_forget, id(rows))), key, cut.rows, ready)


def _forget(number: int, reference: weakref.ref[Tensor]) -> None:
    with contextlib.suppress(KeyError):
        if _entries[number].rows is reference:
            del _entries[number]


# ---- copies ----------------------------------------------------------------------------------------------------------


class _Plain:
    """A plain tensor that is not kept alive.

    Args:
        tensor: whole.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._taken = tensor.dtype, tensor.device, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        """It, if its memory is still there."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        dtype, device, *place = self._taken
        return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)


_copied_over: dict[int, tuple[weakref.ref[Tensor], Key | _Plain]] = {}  # by the id of a parameter's rows


def copied_over(root: Root) -> Key | Tensor | None:
    """What has been copied into a parameter, and is still there and the same: a value's key, or the plain whole itself."""
    rows, source = _copied_over.get(id(root.rows), (None, None))
    if rows is None or rows() is not root.rows:
        return None
    if isinstance(source, Key):
        return source if any(torch.equal(value, root.rows) for _, value in _with(source)) else None
    plain = None if source is None else source.tensor()
    return plain if plain is not None and torch.equal(root.cut(plain), root.rows) else None


def is_back(root: Root) -> bool:
    """Whether what has been copied into a parameter last, by this rank alone, is what other ranks have there."""
    rows, source = _copied_over.get(id(root.rows), (None, None))
    number = None if root.param is None else root.held[0].serving.number_of(root.param)
    if rows is None or rows() is not root.rows or number is None:
        return False
    return isinstance(source, Key) and source == _key_of_parameter(root.held[0].serving, number)


def _source(written: object, read: object) -> Key | _Plain | None:
    if not isinstance(written, Root) or not isinstance(written, Tensor) or not isinstance(read, Tensor):
        return None
    if read.dtype != written.dtype or read.shape != written.shape:
        return None
    if isinstance(read, Root):
        return key_of(read) if read.held == written.held else None
    return _Plain(read) if type(read) in (Tensor, nn.Parameter) and read.device == written.device else None


def _note_source(root: Root, source: Key | _Plain | None) -> None:
    rows, number = root.rows, id(root.rows)
    if source is None or root.param is None:
        _copied_over.pop(number, None)
    else:
        _copied_over[number] = weakref.ref(rows, lambda _: _copied_over.pop(number, None)), source


# ---- keys ------------------------------------------------------------------------------------------------------------


def _key_of_call(func: Any, args: Any, kwargs: Any, place: int | None, num_places: int) -> Key | None:
    try:
        parts = [_part(arg, place, num_places) for arg in args]
        named = [(name, _part(value, place, num_places)) for name, value in sorted(kwargs.items())]
    except _UnknownError:
        return None
    return _digest(func._schema.name, func._overloadname, parts, named)


def _key_of_parameter(serving: Serving, number: tuple[int, int], tick: int = 0) -> Key:
    return _digest("a parameter", serving.name, number, serving.version, tick)


def _key_of_cast(key: Key, dtype: torch.dtype) -> Key:
    return _digest("cast", key, dtype)


def _key_of_copy(args: Any, kwargs: Any) -> Key | None:
    """Of a copy on whatever device, perhaps in another dtype."""
    read, dtype = args[0], kwargs.get("dtype")
    key = key_of(read) if isinstance(read, Root) else None
    return key if key is None or dtype in (None, read.dtype) else _key_of_cast(key, dtype)


def _part(value: Any, place: int | None, num_places: int) -> object:
    if isinstance(value, AtRest):
        key = key_of(value) if isinstance(value, Root) else None
        if key is None:
            raise _UnknownError
        return key
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.device.type != "cpu":
            raise _UnknownError
        return value.item(), value.dtype
    if isinstance(value, list | tuple):
        if place is not None and len(value) == num_places:
            return _part(value[place], None, 0)
        return [_part(each, None, 0) for each in value]
    if isinstance(value, torch.device):
        return value.type  # each rank has another
    if not isinstance(value, _SAID):
        raise _UnknownError
    return value


def _digest(*parts: object) -> Key:
    return hashlib.blake2b(repr(parts).encode(), digest_size=_KEY_BYTES).digest()


# ---- asked for -------------------------------------------------------------------------------------------------------

_offered: weakref.WeakKeyDictionary[Serving, _Copies] = weakref.WeakKeyDictionary()


def _offer(serving: Serving) -> None:
    if serving not in _offered:
        _offered[serving] = copies = _Copies(serving)
        serving.offer(VALUES, functools.partial(_give, copies), _search, outlives_edits=True)


def _search(tensor: Tensor) -> Key | None:
    return key_of(tensor) if isinstance(tensor, Root) else None


class _Copies:
    """What copies of parameters are, as these are now: nobody has to keep a copy for others to read theirs.

    Args:
        serving: has the parameters.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = weakref.ref(serving)
        self._version, self._by_key = -1, dict[Key, tuple[tuple[int, int], torch.dtype | None]]()

    def give(self, key: Key) -> tuple[Tensor, RowLayout] | None:
        """The rows that a copy has, in host memory; None: it is of no parameter as it is now."""
        serving = self._serving()
        if serving is None:
            return None
        version = serving.version
        if version != self._version:
            known = {_key_of_parameter(serving, number): number for number in serving.numbers()}
            self._by_key = {key: (number, None) for key, number in known.items()}
            for cast in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                self._by_key |= {_key_of_cast(key, cast): (number, cast) for key, number in known.items()}
            self._version = version
        if key not in self._by_key:
            return None
        number, dtype = self._by_key[key]
        rows, layout = serving.parameter(number)
        with serving.beside(rows.device):
            rows = rows.detach().cpu().clone()
        return (rows if dtype is None else rows.to(dtype)), layout


def _give(copies: _Copies, key: Key) -> tuple[Tensor, RowLayout]:
    found = [(rows, entry) for entry, rows in _with(key)]
    if not found:
        of_parameter = copies.give(key)
        if of_parameter is None:
            raise CollectiveError("it has no such value: let all ranks compute it, and keep it")
        return of_parameter
    values = [_on_host(rows, entry) for rows, entry in found]
    if any(not torch.equal(values[0], value) for value in values):
        raise CollectiveError("it has several such values, which differ: let all ranks run the line that reads")
    if len(_with(key)) != len(found):
        raise CollectiveError("it has changed the value since: let all ranks run the line that reads")
    return values[0], found[0][1].layout


def _with(key: Key) -> list[tuple[_Entry, Tensor]]:
    entries = [entry for entry in list(_entries.values()) if entry.key == key]
    return [(entry, rows) for entry in entries if (rows := entry.rows()) is not None]


def _on_host(rows: Tensor, entry: _Entry) -> Tensor:
    with _after(entry.ready, rows.device):
        return rows.detach().cpu().clone()


@contextlib.contextmanager
def _after(ready: torch.Event | None, device: torch.device) -> Iterator[None]:
    """On a device: on a stream beside what is queued behind an event."""
    if ready is None:
        yield
        return
    aside = torch.Stream(device)
    aside.wait_event(ready)
    with aside:
        yield
