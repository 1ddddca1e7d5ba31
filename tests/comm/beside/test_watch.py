"""Exchanges that are stuck on a device: the log names them, and the ranks that have not come. Its events are made up here."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm.beside import watch
from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.exchange import Work
from hf_zero.comm.groups.process_groups import cells_of
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.ledger import Ledger
from hf_zero.layout import RowLayout
from tests.ranks import run_ranks

_LIMIT_S = 2.0


class _Event:
    """An event that passes when it is told to."""

    passes = threading.Event()

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def record(self) -> None:
        self.has_passed = self.passes

    def query(self) -> bool:
        return self.has_passed.is_set()


@contextmanager
def _watched(level: int = logging.ERROR) -> Iterator[tuple[Collectives, list[str]]]:
    """Collectives whose exchanges are taken to run on a device, and what is logged of them."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    watch.logger.addHandler(handler)
    _Event.passes = threading.Event()
    ranks = [rank for (rank,) in cells_of(None, 1)[0]]
    collectives = make_collectives("native", ranks, torch.device("cpu"), 30.0, Ledger())
    collectives._watch._device = torch.device("cuda", 0)
    collectives.timeout_s = _LIMIT_S
    try:
        with mock.patch.object(torch, "Event", _Event), mock.patch.object(watch, "_LOOKS_EVERY_S", 0.05):
            yield collectives, said
    finally:
        watch.logger.removeHandler(handler)


def _wait_for(said: list[str], count: int) -> None:
    """Until so much has been logged, or for very long."""
    deadline_s = time.monotonic() + 10 * _LIMIT_S
    while len(said) < count and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _stuck(units: list[str | None], level: int = logging.ERROR) -> list[str]:
    """What this rank logs, where each rank waits in the gather of a unit, or does not."""
    with _watched(level) as (collectives, said):
        unit = units[dist.get_rank()]
        if unit is not None:
            number = 7 + dist.get_rank()  # they may have interleaved the kinds differently
            collectives._watch.follow(f"gather of {unit!r} (exchange {number})", _LIMIT_S)
            _wait_for(said, 1 if level == logging.ERROR else 2)
        dist.barrier()
        time.sleep(0.3)  # six looks
        collectives.meet("the end")
    return said


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (
            ["a", "a", None],
            ["waited 2 s for rank 2 in gather of 'a' (exchange 7)", "for rank 2 in gather of 'a'", None],
        ),
        (["a", "a", "b"], ["for rank 2 in", "for rank 2 in", "waited 2 s for ranks 0, 1 in gather of 'b'"]),
        (["a", "a", "a"], ["waited 2 s for its peers in gather of 'a'"] * 3),
    ],
)
def test_who_has_not_come_is_named_once(units: list[str | None], expected: list[str | None]) -> None:
    for said, words in zip(run_ranks(_stuck, 3, units), expected, strict=True):
        assert len(said) == int(words is not None)
        assert words is None or words in said[0]
        if "b" in units and words == "for rank 2 in":
            assert "rank 2 waits in gather of 'b'" in said[0]


def test_who_has_not_come_is_named_long_before_the_limit() -> None:
    """The watchdog of the program's own group knows the program's limit, and ends the process then."""
    *waiting, absent = run_ranks(_stuck, 3, ["a", "a", None], logging.WARNING)
    assert not absent
    for number, said in enumerate(waiting):
        warned, told = said
        assert f"in gather of 'a' (exchange {7 + number})" in told
        assert "waited 1 s for rank 2 in gather of 'a'" in warned and "will after 2 s" in warned
        assert "waited 2 s for rank 2 in gather of 'a'" in told


def _slow() -> tuple[list[str], list[str], int]:
    """What is logged where all are slow but come, and then one stays alone; and how many events are kept."""
    with _watched() as (collectives, said):
        collectives._watch.follow("gather of 'a'", _LIMIT_S)
        time.sleep(0.6 * _LIMIT_S)
        _Event.passes.set()
        time.sleep(0.6 * _LIMIT_S)
        nothing, num_kept = list(said), len(collectives._watch._marks)
        _Event.passes = threading.Event()
        collectives.meet("all are there")
        if dist.get_rank() == 0:
            collectives._watch.follow("gather of 'a'", _LIMIT_S)
            _wait_for(said, 1)
        dist.barrier()
        collectives.meet("the end")
    return nothing, said, num_kept


def test_what_was_slow_is_forgotten() -> None:
    (nothing, alone, num_kept), (_, silent, _) = run_ranks(_slow, 2)
    assert not nothing and not silent and not num_kept
    assert "for rank 1 in gather of 'a'" in alone[0]


def _followed() -> tuple[bool, int]:
    with _watched() as (collectives, _):
        collectives._part = lambda work: Work(work, None, collectives._watch.follow)  # type: ignore[method-assign]
        layout = RowLayout((4, 2), collectives.num_ranks)
        flat = torch.full((8,), float(dist.get_rank()))
        exchange = collectives.gather([Rows(flat, layout)], "unit")
        before = len(collectives._watch._marks)
        exchange.wait()
        return not before and bool((flat.view(2, 4) == torch.tensor([[0.0], [1.0]])).all()), len(
            collectives._watch._marks
        )


def test_exchanges_on_a_device_are_followed_from_where_they_are_waited_for() -> None:
    assert run_ranks(_followed, 2) == [(True, 1)] * 2


def _dropped() -> bool:
    """Whether nothing keeps collectives that were watched."""
    with _watched() as (collectives, _):
        collectives._watch.follow("gather of 'a'", _LIMIT_S)
        thread = collectives._watch._thread
        del collectives
    assert thread is not None
    thread.join(5)
    return not thread.is_alive()


def test_the_thread_ends_with_what_it_watches() -> None:
    assert all(run_ranks(_dropped, 2))


def test_nothing_is_raised_where_the_program_has_ended_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    monkeypatch.setattr(torch, "Event", _Event)
    _Event.passes = threading.Event()
    own = watch.Watch("group", [0, 1], 0, torch.device("cuda", 0))
    own.follow("gather of 'a'", 0.0)
    own.look()
    assert not own._marks
    own._write("gather of 'a'")
