"""Values at rest that have keys: which rows of this rank have which."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from hf_zero.engine.parameters.at_rest.known.recipes import Key, digest
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.ranks.offers import NameOfGradient
from hf_zero.engine.ranks.serving import Serving
from hf_zero.layout import RowLayout

_ANY = -1


class Entry(NamedTuple):
    """A value that has a key.

    Attributes:
        rows: this rank's.
        key: its own.
        layout: which rows are whose.
        ready: on a device, passes when they are there.
        world: the name of the ranks that have it.
        version: of the rows, which counts what is written into them past all that is noted; any, if they are filled only now.
    """

    rows: weakref.ref[Tensor]
    key: Key
    layout: RowLayout
    ready: torch.Event | None
    world: str
    version: int

    def is_of(self, rows: Tensor | None) -> bool:
        """Whether these rows have the value still."""
        return rows is not None and self.rows() is rows and self.version in (_ANY, _version_of(rows))


_entries: dict[int, Entry] = {}  # by the id of the rows
_by_key: dict[Key, dict[int, None]] = {}  # the ids of rows that have had a key, and may have another by now


def key_of_parameter(serving: Serving, number: tuple[int, int], change: object = 0) -> Key:
    """Of a parameter as it is now, with a change of one rank alone if there is one."""
    return digest("a parameter", serving.name, number, serving.version, change)


def key_of_gradient(serving: Serving, name: NameOfGradient) -> Key:
    """Of a gradient as it is now, until the next step begins."""
    return digest("a gradient", serving.name, serving.version, tuple(name))


def key_of_cast(key: Key, dtype: torch.dtype) -> Key:
    """Of a value in another dtype."""
    return digest("cast", key, dtype)


def key_of_value(root: Root) -> Key | None:
    """Of what is no engine's parameter; None: it has none."""
    entry = _entries.get(id(root.rows))
    return entry.key if entry is not None and entry.is_of(root.rows) else None


def forget(rows: Tensor) -> None:
    """These rows change without a note here: they are written back to."""
    _drop(id(rows))


def rows_with(key: Key) -> list[Tensor]:
    """This rank's rows of all that has a key."""
    return [rows for _, rows in with_key(key)]


def keep(serving: Serving, rows: Tensor, key: Key, layout: RowLayout, is_filled: bool = True) -> None:
    """These rows have a value from now on; nobody keeps them for it.

    Args:
        serving: of the ranks that have the value.
        rows: this rank's.
        key: the value's.
        layout: which rows are whose.
        is_filled: they have their values already.
    """
    ready = None if serving.device.type == "cpu" else torch.Event(serving.device)  # of a copy to the host, too
    if ready is not None:
        ready.record()
    number = id(rows)
    _drop(number)
    reference = weakref.ref(rows, functools.partial(_forget, number))
    _entries[number] = Entry(reference, key, layout, ready, serving.name, _version_of(rows) if is_filled else _ANY)
    _by_key.setdefault(key, {})[number] = None


def _forget(number: int, reference: weakref.ref[Tensor]) -> None:
    with contextlib.suppress(KeyError):
        if _entries[number].rows is reference:
            _drop(number)


def _drop(number: int) -> None:
    entry = _entries.pop(number, None)
    if entry is not None and (numbers := _by_key.get(entry.key)) is not None:
        numbers.pop(number, None)
        if not numbers:
            _by_key.pop(entry.key, None)


def _version_of(rows: Tensor) -> int:
    return 0 if rows.is_inference() else rows._version


def with_key(key: Key) -> list[tuple[Entry, Tensor]]:
    """This rank's rows of all that has a key, and what is known of them."""
    entries = [_entries.get(number) for number in list(_by_key.get(key, ()))]
    found = [(entry, entry.rows()) for entry in entries if entry is not None and entry.key == key]
    return [(entry, rows) for entry, rows in found if rows is not None and entry.is_of(rows)]


def entries_of(world: str) -> list[Entry]:
    """All that some ranks have, and that is still there."""
    entries = [entry for entry in list(_entries.values()) if entry.world == world]
    return [entry for entry in entries if entry.is_of(entry.rows())]
