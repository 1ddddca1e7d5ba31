"""Rows that rest in host memory go up to a unit's memory, in a stream of their own: see [Note: rows on the host].

[Note: on the way up] A unit's memory is taken on the compute stream. So the stream that copies waits for what is queued there
now, which may still read what was in that memory; the unit's gather is begun on the copying stream, behind the copies; and who
reads the unit waits for both. What a unit computes meanwhile, behind this place, is not waited for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from hf_zero.engine.parameters.host_rows import HostRows, wait_for_computation
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.units.storage.memory import Slot
from hf_zero.host.cores import on_all_cores


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device, priority=-1)


class Upload:
    """Copies on their way, that somebody may wait for as for an exchange."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait."""
        torch.accelerator.current_stream().wait_event(self._event)


@contextlib.contextmanager
def going_up(slots: Sequence[Slot], device: torch.device) -> Iterator[Upload]:
    """Copy the rows of slots into their places; within, what is begun comes behind the copies.

    Args:
        slots: of parameters that rest in host memory.
        device: of the unit.
    """
    changed = [slot for slot in slots if _rows_of(slot).has_changed(slot.parameter.param)]
    with on_all_cores():
        for slot in changed:
            _rows_of(slot).refresh(slot.parameter.param)
    up, event = _stream(device), torch.Event(device)
    wait_for_computation(up, device)
    with up, torch.no_grad():
        for slot in slots:
            rows = _rows_of(slot)
            if rows.kept is None:
                slot.own.copy_(rows.sent, non_blocking=True)
                continue
            if slot in changed:
                rows.kept.copy_(rows.sent, non_blocking=True)
            slot.own.copy_(rows.kept)
        yield Upload(event)
        event.record(up)
    for slot in slots:
        _rows_of(slot).note_copies(event)


def go_ahead(parameters: Sequence[ZeroParameter], device: torch.device) -> None:
    """Rows that have changed go as far as they can before they are gathered: beside the step on those that are still to change.

    Args:
        parameters: at rest in host memory.
        device: of their unit.
    """
    changed = [(p, rows) for p in parameters if (rows := p.host) is not None and rows.has_changed(p.param)]
    with on_all_cores():
        for p, rows in changed:
            rows.refresh(p.param)
    staying = [(rows, rows.kept) for _, rows in changed if rows.kept is not None]
    if not staying:
        return
    up, event = _stream(device), torch.Event(device)
    wait_for_computation(up, device)
    with up, torch.no_grad():
        for rows, kept in staying:
            kept.copy_(rows.sent, non_blocking=True)
        event.record(up)
    for rows, _ in staying:
        rows.note_copies(event)


def _rows_of(slot: Slot) -> HostRows:
    rows = slot.parameter.host
    assert rows is not None
    return rows
