"""Mistakes that a GPU forgives most of the time, put in one at a time: the late device has to show each of them.

Each is a place where a stream, or the host, waits for another, and a run that goes through it. The run is right as it is,
and comes out otherwise once the place waits no more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.checkpoint.optimizer_state import source_of
from hf_zero.checkpoint.ranks.background import BackgroundSaves
from hf_zero.engine.backward import landing as landing_module
from hf_zero.engine.backward.landing import Landing
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.modules.beside import Arrival, CopyStream
from hf_zero.engine.parameters.host_rows import HostRows
from hf_zero.engine.ranks.home import Home
from hf_zero.engine.units import unit as unit_module
from hf_zero.engine.units.storage import from_host
from hf_zero.engine.units.unit import Unit
from tests.gpu.training import BLOCKS, adamw, train
from tests.models import CASES, Stack, make_model, stack_batch

_CONFIG: dict[str, Any] = {"stage": 3, "units": ["_StackBlock"], "timeout_s": 20}


def _stack(device: torch.device, **config: Any) -> Stack:
    torch.manual_seed(0)
    model = Stack().to(device)
    zero.shard_model(model, {**_CONFIG, **config})
    return model


def _engine(model: nn.Module) -> ZeroEngine:
    engine = zero.engine_of(model)
    assert engine is not None
    return engine


def _loss(model: nn.Module, step: int, device: torch.device) -> Tensor:
    loss: Tensor = model(**{name: each.to(device) for name, each in stack_batch(step, dist.get_rank()).items()})
    return loss


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, device: torch.device) -> Tensor:
    loss = _loss(model, step, device)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _training(device: torch.device, **config: Any) -> Tensor:
    """The losses of three steps."""
    model = _stack(device, **config)
    optimizer = adamw(model)
    return torch.stack([_step(model, optimizer, step, device) for step in range(3)]).cpu()


def _dropping(device: torch.device) -> Tensor:
    """Numbers in the memory of a gather that nobody has waited for."""
    engine = _engine(_stack(device))
    unit = next(each for each in engine.gathering.units if each.buffer_nbytes)
    unit.start_gather()
    engine.gathering.drop()
    # Other numbers on each rank, since the gather sends what it finds there.
    again = torch.full((unit.buffer_nbytes // 4,), 7.0 + dist.get_rank(), device=device)
    torch.accelerator.synchronize()
    return again.cpu()


def _saving(device: torch.device) -> Tensor:
    """What a thread finds in the rows that it is to save."""
    model, found = _stack(device), []
    optimizer, saves = adamw(model), BackgroundSaves(_engine(model).world)
    for step in range(3):
        _step(model, optimizer, step, device)
        kept = saves.keep({name: source_of(param) for name, param in model.named_parameters()})
        saves.start(
            lambda _, kept=kept: found.extend(each.rows.flatten().clone() for each in kept.values()), lambda: None
        )
        _step(model, optimizer, 7, device)
        saves.wait()
    return torch.cat(found)


def _reading_alone(device: torch.device) -> Tensor:
    """What rank 0 reads of a weight by itself, while the others are in the next step, behind one that is queued."""
    model = _stack(device)
    optimizer, found = adamw(model), [torch.zeros(())]
    for step in range(3):
        _step(model, optimizer, step, device)
        if dist.get_rank() == 0:
            found.append(model.blocks[1].up.weight.norm().cpu())
    _step(model, optimizer, 3, device)
    return torch.stack(found)


def _lending(device: torch.device) -> Tensor:
    """Numbers that a stream of the program's own makes of memory that is given back meanwhile."""
    main, other = torch.accelerator.current_stream(device), torch.Stream(device)
    lent = torch.full((1000,), 3.0, device=device)
    other.wait_stream(main)
    with other:
        found = lent * 2
    lent.record_stream(other)
    del lent
    again = torch.full((1000,), 7.0, device=device)  # in the same memory, if that is thought to be free
    assert (again.cpu() == 7).all()
    other.synchronize()
    return found.cpu()


@contextlib.contextmanager
def _switched(switch: Callable[[bool], None]) -> Iterator[None]:
    switch(True)
    try:
        yield
    finally:
        switch(False)


def _released_under_a_gather() -> AbstractContextManager[Any]:
    release = Unit.release_if_unused

    def without_a_wait(unit: Unit) -> None:
        with patch.object(Unit, "settle", lambda unit: None):
            release(unit)

    return patch.object(Unit, "release_if_unused", without_a_wait)


def _saved_early() -> AbstractContextManager[Any]:
    keep = BackgroundSaves.keep

    def without_an_event(saves: BackgroundSaves, *args: Any) -> Any:
        kept = keep(saves, *args)
        saves._copied = None
        return kept

    return patch.object(BackgroundSaves, "keep", without_an_event)


def _answered_early() -> AbstractContextManager[Any]:
    def without_a_record(home: Home) -> None:
        home.settled = torch.Event(home._device)

    return patch.object(Home, "note_that_rows_settle", without_a_record)


def _offloading(device: torch.device) -> Tensor:
    """The losses of steps whose parameters and gradients go up and down."""
    return _training(device, offload={"optimizer": "host", "parameters": "host"})


def _read_before_they_are_down() -> AbstractContextManager[Any]:
    wait = Landing.wait

    def without_an_event(landing: Landing) -> None:
        landing._last = None
        wait(landing)

    return patch.object(Landing, "wait", without_an_event)


def _sent_before_they_are_up() -> AbstractContextManager[Any]:
    go_up = unit_module.going_up

    @contextlib.contextmanager
    def behind_nothing(*args: Any) -> Iterator[Any]:
        with go_up(*args) as upload:
            pass
        yield upload  # what is begun here is on the compute stream

    return patch.object(unit_module, "going_up", behind_nothing)


_ALL_ON_HOST: dict[str, Any] = {"offload": {"optimizer": "host", "parameters": "host"}}


def _offloading_what_is_not_cut(device: torch.device) -> Tensor:
    """The same of parameters that no exchange brings."""
    return _training(device, keep_whole_numel=10**6, **_ALL_ON_HOST)


def _offloading_with_early_copies(device: torch.device) -> Tensor:
    """The same, where copies up run as soon as they may."""
    go_up = unit_module.going_up

    @contextlib.contextmanager
    def at_once(*args: Any) -> Iterator[Any]:
        with go_up(*args) as upload:
            yield upload
        from_host._stream(device).synchronize()

    with patch.object(unit_module, "going_up", at_once):
        return _offloading(device)


def _offloading_with_late_copies(device: torch.device) -> Tensor:
    """The same, where the device has computed a whole backward before anything comes down."""
    wait = Landing.wait

    def later(landing: Landing) -> None:
        torch.accelerator.current_stream(device).synchronize()
        wait(landing)

    with patch.object(Landing, "wait", later):
        return _training(device, bucket_bytes=1, **_ALL_ON_HOST)


def _accumulating(device: torch.device) -> Tensor:
    """The losses of steps of several micro-batches, whose gradients come into rooms that are soon full."""
    with patch.object(landing_module, "_ROOM_BYTES", 1024):
        model = _stack(device, **_ALL_ON_HOST)
        optimizer, losses = adamw(model), []
        for step in range(3):
            for micro in range(3):
                losses.append(_loss(model, 3 * step + micro, device))
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).detach().cpu()


def _editing(device: torch.device) -> Tensor:
    """The losses of weights that are edited between forwards, none of which anybody waits for."""
    model, losses = _stack(device, **_ALL_ON_HOST), []
    with torch.no_grad():
        for step in range(3):
            losses.append(_loss(model, step, device))
            for param in model.parameters():
                param.mul_(0.5)
    return torch.stack(losses).cpu()


def _waits_for_no_computation(module: Any) -> AbstractContextManager[Any]:
    return patch.object(module, "wait_for_computation", lambda copies, device: None)


def _given_back_before_they_are_down() -> AbstractContextManager[Any]:
    take = Landing.take

    def without_a_wait(landing: Landing, results: Any) -> None:
        take(landing, results)
        landing._descents.clear()

    return patch.object(Landing, "take", without_a_wait)


def _added_before_they_are_down() -> AbstractContextManager[Any]:
    mark = Landing._mark

    def with_other_events(landing: Landing) -> torch.Event:
        parts = list(landing._unmarked)
        event = mark(landing)
        for part in parts:
            part.event = torch.Event(landing._world.device)
        return event

    return patch.object(Landing, "_mark", with_other_events)


def _recomputing(device: torch.device) -> Tensor:
    """The losses of steps in which the inputs of layers go down to the host, and come up to be computed again."""
    model = make_model(CASES["llama"]).to(device)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    zero.shard_model(model, {"stage": 3, **BLOCKS, "activations": {"offload": True}})
    return train(model, device, range(3)).cpu()


def _computed_before_they_are_up() -> AbstractContextManager[Any]:
    return patch.object(Arrival, "wait", lambda arrival: None)


def _given_back_while_they_go_down() -> AbstractContextManager[Any]:
    def without_a_wait(copies: CopyStream) -> None:
        copies._under_way = None

    return patch.object(CopyStream, "settle", without_a_wait)


@dataclass(frozen=True)
class Mistake:
    """One place that does not wait.

    Attributes:
        make: the mistake, while the context is open; given what the device offers.
        run: what goes through the place, and gives numbers.
        seen_in: the orders of the device in which it has to show.
    """

    make: Callable[[Any], AbstractContextManager[Any]]
    run: Callable[[torch.device], Tensor]
    seen_in: tuple[str, ...] = ("late", "early")


MISTAKES = {
    "compute does not wait for exchanges": Mistake(
        lambda device: _switched(device.wait_for_no_exchange), _training, ("late",)
    ),
    "exchanges start before their tensors are written": Mistake(
        lambda device: _switched(device.start_exchanges_at_once), _training
    ),
    "memory is given back under a gather": Mistake(lambda device: _released_under_a_gather(), _dropping, ("late",)),
    "a background save reads before its copies are there": Mistake(lambda device: _saved_early(), _saving),
    "what is read for a rank alone does not wait for the step": Mistake(
        lambda device: _answered_early(), _reading_alone
    ),
    "gradients are read before they are down": Mistake(lambda device: _read_before_they_are_down(), _offloading),
    "a gather begins before its rows are up": Mistake(lambda device: _sent_before_they_are_up(), _offloading),
    "rows are computed with before they are up": Mistake(
        lambda device: patch.object(from_host.Upload, "wait", lambda upload: None), _offloading_what_is_not_cut
    ),
    "rows go up into memory that is still in use": Mistake(
        lambda device: _waits_for_no_computation(from_host), _offloading_with_early_copies
    ),
    "rows are cast where others still go up from": Mistake(
        lambda device: patch.object(HostRows, "note_copies", lambda rows, event: None), _editing
    ),
    "gradients go down before they are computed": Mistake(
        lambda device: _waits_for_no_computation(landing_module), _offloading
    ),
    "gradients are given back while they go down": Mistake(
        lambda device: _given_back_before_they_are_down(), _offloading_with_late_copies
    ),
    "gradients are added before they are down": Mistake(lambda device: _added_before_they_are_down(), _accumulating),
    "inputs are computed with before they are up": Mistake(lambda device: _computed_before_they_are_up(), _recomputing),
    "inputs are given back while they go down": Mistake(
        lambda device: _given_back_while_they_go_down(), _recomputing, ("early",)
    ),
    "memory that another stream uses is not recorded": Mistake(
        lambda device: patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None), _lending
    ),
}


def is_seen(mistake: Mistake, device: torch.device, built: Any) -> bool:
    """Whether a run with the mistake comes out otherwise on any rank.

    A host that stands still lets its device catch up, and then nothing is early: a busy machine has three tries.
    """
    right = mistake.run(device)
    assert right.isfinite().all(), right
    return any(_comes_out_otherwise(mistake, right, device, built) for _ in range(3))


def _comes_out_otherwise(mistake: Mistake, right: Tensor, device: torch.device, built: Any) -> bool:
    before = built.counts().get("failures", 0)
    built.forgive_failures(True)
    try:
        with mistake.make(built):
            try:
                found = mistake.run(device)
            except (zero.ZeroError, AssertionError):
                found = None
            built.synchronize()
    finally:
        built.forgive_failures(False)
    has_failed = built.counts().get("failures", 0) > before
    differs = torch.tensor([found is None or has_failed or not torch.equal(right, found)], dtype=torch.int32)
    dist.all_reduce(differs)
    return bool(differs)
