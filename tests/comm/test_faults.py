"""Ranks that are slow, stall, die or cannot share memory: equal bits, an error that says who and where, nothing left."""

import contextlib
import errno
import gc
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.exchange import Exchange
from hf_zero.comm.groups.process_groups import cells_of
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.host import memory as host_memory
from hf_zero.comm.host.one_host import HostExchange
from hf_zero.comm.ledger import Ledger
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout
from tests.engine.twins import SHARDED
from tests.models import Stack, stack_batch
from tests.ranks import RankFailure, _workers, on_ranks, run_ranks

_CHOICES = ("native", "pairwise", "host")
_ANY_CHOICE = pytest.mark.parametrize("choice", _CHOICES)
_WIDTH = 5  # rows that two ranks cannot share alike
_NUM_STEPS = {"native": 5, "pairwise": 10, "host": 30}  # most where ranks see each other's memory
_LONG_S = 60.0  # a rank that waits this long is killed by the pool, and the test fails


def _make(choice: str, timeout_s: float = _LONG_S) -> Collectives:
    collectives = make_collectives(
        choice, [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), timeout_s, Ledger()
    )
    assert collectives.name == choice
    return collectives


@dataclass
class Training:
    """A tiny model in training on this rank.

    `evaluate` runs between backward and step: a rank that is early must not change what others still read.
    """

    choice: str
    stage: int
    compute_dtype: str | None = None
    timeout_s: float = 10.0
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Stack(_WIDTH, num_blocks=2)
        options = {} if self.compute_dtype is None else {"compute_dtype": self.compute_dtype}
        config = {"stage": self.stage, "collectives": self.choice, "timeout_s": self.timeout_s, **options}
        engine = zero.shard_model(self.model, config)
        assert engine.world.shards.name == self.choice
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def backward(self) -> None:
        loss = self.model(**stack_batch(len(self.losses), dist.get_rank(), _WIDTH))
        loss.backward()
        self.losses.append(loss.item())

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses.append(self.model(**stack_batch(len(self.losses), dist.get_rank(), _WIDTH)).item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.evaluate()
        self.update()

    def rows(self) -> list[Tensor]:
        return [p.to_local().clone() if isinstance(p, DTensor) else p.detach().clone() for p in self.model.parameters()]


# --- races ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def delays(training: Training) -> Iterator[None]:
    """Random pauses, others on every rank, wherever ranks could get out of step; gradients are NaN once they are settled."""
    given: list[Tensor] = []
    chance = random.Random(dist.get_rank())

    def pause(*_: object) -> None:
        if chance.random() < 0.15:
            time.sleep(chance.uniform(0, 2e-3))

    def paused(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            pause()
            result = call(*args, **kwargs)
            pause()
            return result

        return wrapper

    def remember(self: Collectives, items: Sequence[Rows], *args: Any) -> Exchange:
        given.extend(item.flat for item in items)
        return reduce_scatter(self, items, *args)

    def settle_and_spoil(self: Collectives) -> None:
        settle(self)
        for flat in given:
            flat.fill_(torch.nan)
        given.clear()

    def pause_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        pause()
        if output.requires_grad:
            output.register_hook(pause)

    made = training.model.__dict__["_zero_engine"].world.shards
    reduce_scatter, settle = type(made).reduce_scatter, type(made).settle
    seams = [(type(made), "gather", type(made).gather), (type(made), "before_write", type(made).before_write)]
    seams += [(type(made), "reduce_scatter", remember), (type(made), "settle", settle_and_spoil)]
    seams += [(owner, "wait", owner.wait) for owner in (Exchange, HostExchange)]
    with contextlib.ExitStack() as stack:
        for owner, name, call in seams:
            stack.enter_context(mock.patch.object(owner, name, paused(call)))
        stack.enter_context(mock.patch.object(training.optimizer, "step", paused(training.optimizer.step)))
        for module in training.model.modules():
            if not list(module.children()):
                stack.callback(module.register_forward_hook(pause_in_backward).remove)
        yield


def _train(
    choice: str, stage: int, compute_dtype: str | None, is_delayed: bool, num_steps: int
) -> tuple[list[float], list[Tensor]]:
    training = Training(choice, stage, compute_dtype)
    with delays(training) if is_delayed else contextlib.nullcontext():
        for _ in range(num_steps):
            training.step()
    return training.losses, training.rows()


def _race(choice: str, stage: int, compute_dtype: str | None, num_steps: int) -> None:
    expected_losses, expected_rows = _train(choice, stage, compute_dtype, False, num_steps)
    losses, rows = _train(choice, stage, compute_dtype, True, num_steps)
    differing = [step for step, pair in enumerate(zip(losses, expected_losses, strict=True)) if pair[0] != pair[1]]
    assert not differing, f"first at loss {differing[0]} of {len(losses)}"
    assert all(torch.equal(left, right) for left, right in zip(rows, expected_rows, strict=True))
    assert len(set(losses)) > len(losses) // 4  # it trains; in bfloat16 some losses repeat


@on_ranks(2, choice=_CHOICES, stage=SHARDED)
def test_training_with_ranks_out_of_step_has_the_same_bits(choice: str, stage: int) -> None:
    _race(choice, stage, None, _NUM_STEPS[choice])


@pytest.mark.slow
@on_ranks(2, choice=_CHOICES, stage=SHARDED, timeout_s=300)
def test_training_with_ranks_out_of_step_has_the_same_bits_after_200_steps(choice: str, stage: int) -> None:
    _race(choice, stage, None, 200)


@on_ranks(2)
def test_training_with_ranks_out_of_step_has_the_same_bits_when_rows_are_cast() -> None:
    _race("host", 3, "bfloat16", _NUM_STEPS["host"])


# --- ranks that stall or die ----------------------------------------------------------------------------------------

_KINDS = ("gather", "reduce_scatter", "agreement", "the optimizer's step")


def _kinds(choice: str) -> tuple[str, ...]:
    return _KINDS if choice == "host" else _KINDS[:-1]


def _exchange(collectives: Collectives, kind: str, unit: str = "unit") -> None:
    layout = RowLayout((4,), 2)
    match kind:
        case "gather":
            collectives.gather([Rows(torch.zeros(4), layout)], unit).wait()
        case "reduce_scatter":
            collectives.reduce_scatter([Rows(torch.zeros(4), layout)], [torch.empty(2)], unit).wait()
        case "agreement":
            collectives.meet(unit)
        case _:
            collectives.before_write(unit)


def _messages(made: dict[str, Collectives]) -> dict[str, str]:
    """What every kind of exchange says that the peer does not take part in."""
    messages = {}
    for kind, collectives in made.items():
        with pytest.raises(CollectiveError) as caught:
            _exchange(collectives, kind)
        messages[kind] = str(caught.value)
    return messages


def _assert_named(choice: str, messages: dict[str, str], what: str, rank: int) -> None:
    assert messages
    for kind, message in messages.items():
        is_native = choice == "native" and kind != "agreement"  # torch's collectives do not say whom they miss
        whom = "its peers" if is_native else f"rank {rank}"
        where = "unit" if kind == "the optimizer's step" else f"{kind} of 'unit'"
        assert f"{what} {whom} in {where}" in message, message


def _stall(choice: str) -> dict[str, str]:
    # gloo's own reduce-scatter goes on after the wait for it has ended, and its group cannot be closed before its end.
    kinds = [kind for kind in _kinds(choice) if (choice, kind) != ("native", "reduce_scatter")]
    made = {kind: _make(choice, timeout_s=0.25) for kind in kinds}
    for kind, collectives in made.items():
        collectives.timeout_s = _LONG_S  # an exchange of both comes first
        _exchange(collectives, kind, "of both")
        collectives.timeout_s = 0.25
    dist.barrier()
    return _messages(made) if dist.get_rank() == 0 else {}


@_ANY_CHOICE
def test_rank_that_stalls_is_named_with_the_operation_and_the_timeout(choice: str) -> None:
    messages = run_ranks(_stall, 2, choice)[0]
    _assert_named(choice, messages, "waited 0.25 s for", 1)
    assert all("timeout_s" in message for message in messages.values())


@on_ranks(2)
def test_rank_that_does_not_come_to_the_optimizers_step_is_named() -> None:
    training = Training("host", stage=2, timeout_s=2.0)
    training.backward()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveError, match="waited 2 s for rank 1 in the optimizer's step"):
            training.optimizer.step()


def _die(choice: str) -> dict[str, str]:
    made = {kind: _make(choice) for kind in _kinds(choice)}
    for kind, collectives in made.items():
        _exchange(collectives, kind, "of both")
    if dist.get_rank() == 1:
        time.sleep(0.3)  # rank 0 waits in its gather by then
        os._exit(1)
    return _messages(made)


@_ANY_CHOICE
def test_rank_that_dies_is_named_with_the_operation_long_before_the_timeout(choice: str) -> None:
    messages, death = run_ranks(_die, 2, choice, expect_failure=True, timeout_s=_LONG_S / 2)
    assert isinstance(death, RankFailure) and death.type_name == "RankDied"
    assert not isinstance(messages, RankFailure), messages
    _assert_named(choice, messages, "lost", 1)


# --- ranks of a host that are at different exchanges, or cannot share memory ----------------------------------------


@on_ranks(2, kind=["gather", "reduce_scatter", "the optimizer's step"])
def test_ranks_at_different_exchanges_of_a_host_name_both(kind: str) -> None:
    collectives = _make("host")
    rank = collectives.rank
    _exchange(collectives, kind, "of both")
    with pytest.raises(CollectiveError) as caught:
        _exchange(collectives, kind, "ab"[rank])
    units = ("a", "b") if kind == "the optimizer's step" else (f"{kind} of 'a'", f"{kind} of 'b'")
    for each in (rank, 1 - rank):
        assert f"rank {each} is at {units[each]} " in str(caught.value)


class _Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _refuse(*_: object, **__: object) -> None:
    raise host_memory.PeerMemoryError("refused")


def _refuse_handle(*_: object) -> None:
    raise OSError("refused")


def _unreadable(function: str, choice: str) -> tuple[str, list[str], int]:
    """What is made of `choice` where rank 1 cannot use `host_memory.<function>`; what is logged; what stays mapped."""
    records = _Records()
    logger = logging.getLogger("hf_zero")
    logger.addHandler(records)
    try:
        with contextlib.ExitStack() as stack:
            if dist.get_rank() == 1:
                is_call = function == "pidfd_open"
                refusal = mock.patch.object(os, function, _refuse_handle) if is_call else None
                stack.enter_context(refusal or mock.patch.object(host_memory, function, _refuse))
            made = make_collectives(
                choice, [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), _LONG_S, Ledger()
            )
    finally:
        logger.removeHandler(records)
    _exchange(made, "gather")
    gc.collect()
    return made.name, records.messages, len(_shared_mappings()) + len(_shared_descriptors())


_REASONS = {
    "read": "process_vm_readv",
    "attach": "cannot open the others'",
    "create": "cannot open the others'",
    "pidfd_open": "pidfd_open",
}


@on_ranks(2, function=list(_REASONS))
def test_ranks_that_cannot_share_memory_fall_back_together_and_say_why(function: str) -> None:
    name, messages, num_left = _unreadable(function, "host")
    assert name == "pairwise" and len(messages) == 1 and num_left == 0
    assert "host cannot be had" in messages[0] and _REASONS[function] in messages[0]


def test_auto_chooses_among_the_others_in_silence_where_memory_cannot_be_shared() -> None:
    (left, messages, _), (right, others, _) = run_ranks(_unreadable, 2, "read", "auto")
    assert left == right and left in ("pairwise", "native") and messages == others == []


@on_ranks(2, where=[("posix_fallocate", 0), ("attach", 1)])
def test_unit_without_shared_memory_is_an_error_on_all_ranks(where: tuple[str, int]) -> None:
    (function, rank), collectives, before = where, _make("host"), _left()
    error = OSError(errno.ENOSPC, "No space left on device")
    owner: Any = os if function == "posix_fallocate" else host_memory
    error = error if owner is os else host_memory.PeerMemoryError("refused")
    with contextlib.ExitStack() as stack:
        if collectives.rank == rank:
            stack.enter_context(mock.patch.object(owner, function, side_effect=error))
        caught = stack.enter_context(pytest.raises(CollectiveError))
        collectives.allocate(2**20, "unit 'a'")
    message = str(caught.value)
    assert f"rank {rank} has no shared memory for unit 'a' ({2**20} bytes)" in message
    assert "collectives: pairwise" in message
    assert collectives.rank != rank or "No space left" in message or "refused" in message
    del caught, stack
    collectives.allocate(2**12, "unit 'b'")  # the ranks are still in step
    assert _left() == before


# --- what is left behind --------------------------------------------------------------------------------------------


def _shared_mappings(process: str = "self") -> list[str]:
    return [line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "memfd:hf_zero" in line]


def _shared_descriptors(process: str = "self") -> list[str]:
    """Open files of shared memory, and handles of peers' processes."""
    links = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            links.append(os.readlink(entry))
    return [link for link in links if "memfd:hf_zero" in link or "pidfd" in link]


def _named_memory() -> set[str]:
    """Names in /dev/shm that this process has mapped or open."""
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink() and entry.exists()]
    return {name for name in maps + files if name.startswith("/dev/shm/")}


def _kill_in_training(victims: list[int]) -> tuple[str, bool]:
    names = _named_memory()
    training = Training("host", stage=3, timeout_s=_LONG_S)
    training.step()
    assert len(_shared_mappings()) > 2
    has_new_names = _named_memory() != names
    if dist.get_rank() in victims:
        for module in training.model.modules():
            module.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CollectiveError) as caught:
        for _ in range(3):
            training.step()
    return str(caught.value), has_new_names


def _left() -> int:
    for _ in range(2):  # what a graph's node holds goes with the node, and what it is in a cycle with the next time
        gc.collect()
    return len(_shared_mappings()) + len(_shared_descriptors())


@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_killed_ranks_leave_nothing_behind(victims: list[int]) -> None:
    pids = {rank: worker.process.pid for rank, worker in _workers.items()}
    replies = run_ranks(_kill_in_training, 2, victims, expect_failure=True, timeout_s=_LONG_S / 2)
    for rank, reply in enumerate(replies):
        if rank in victims:
            assert isinstance(reply, RankFailure) and "SIGKILL" in reply.message
            assert rank not in pids or not Path(f"/proc/{pids[rank]}").exists()
        else:
            assert not isinstance(reply, RankFailure), reply
            message, has_new_names = reply
            assert "rank 0 lost rank 1 in" in message and "has ended" in message and not has_new_names
    for worker in _workers.values():
        assert not _shared_mappings(str(worker.process.pid)) and not _shared_descriptors(str(worker.process.pid))


@on_ranks(2, stage=[1, 3])
def test_dropped_model_takes_its_shared_memory_along(stage: int) -> None:
    counts = []
    assert _left() == 0
    for _ in range(2):
        training = Training("host", stage)
        training.step()
        counts.append(len(_shared_mappings()) + len(_shared_descriptors()))
        del training
        assert _left() == 0
    assert counts[0] == counts[1] > 2


@on_ranks(2, stage=[1, 3])
def test_loading_new_weights_does_not_disturb_a_peer_that_still_computes(stage: int) -> None:
    """Rank 1's forward, slow in its last layer, sees the old weights while rank 0 goes on to load new ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    zero.shard_model(model, {"stage": stage, "collectives": "host", "units": {"min_numel": 1}, "timeout_s": _LONG_S})
    states = {name: torch.zeros(4, 4) for name in model.state_dict()}
    with torch.no_grad():
        expected = model(torch.ones(1, 4))
        if dist.get_rank() == 1:
            model[1].register_forward_pre_hook(lambda *_: time.sleep(0.5))
        found = model(torch.ones(1, 4))
        model.load_state_dict(states)
        assert torch.equal(found, expected) and not model(torch.ones(1, 4)).any()
