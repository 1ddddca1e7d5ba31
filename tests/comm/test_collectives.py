"""The exchanges between ranks: what they compute, what they count, and what they say when ranks do not agree."""

import contextlib
import dataclasses
import datetime
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.backends.native import NativeCollectives
from hf_zero.comm.backends.pairwise import _PART_NUMEL
from hf_zero.comm.collectives import Collectives, Rows, in_messages
from hf_zero.comm.exchange import Exchange, Work
from hf_zero.comm.groups import axes, select, torch_groups
from hf_zero.comm.groups.process_groups import cells_of
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.host import board, one_host
from hf_zero.comm.host import memory as host_memory
from hf_zero.comm.ledger import Ledger
from hf_zero.config.zero_config import COLLECTIVES_VARIABLE, ZeroConfig
from hf_zero.errors import CollectiveError, ConfigError
from hf_zero.layout import RowLayout
from tests.ranks import RankFailure, on_ranks, run_alone, run_ranks

_SHAPES = [(7, 3), (1, 4), (6,), (0, 5), (2, 2, 2), (401, 40)]  # rows that do not divide, fewer than ranks, none; large
_CHOICES, _DTYPES = ("pairwise", "native", "host"), (torch.float32, torch.bfloat16)


def _make(choice: str, timeout_s: float = 20.0) -> Collectives:
    dist.barrier()  # a worker that imports for the first time is late, and some tests wait for a short time only
    collectives = make_collectives(
        choice, [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), timeout_s, Ledger()
    )
    assert collectives.name == choice
    return collectives


def _layouts(num_ranks: int) -> list[RowLayout]:
    return [RowLayout(shape, num_ranks) for shape in _SHAPES]


def _values(rank: int, index: int, layout: RowLayout, dtype: torch.dtype) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(10 * rank + index)).to(dtype)


def _gather(choice: str, dtype: torch.dtype) -> None:
    collectives = _make(choice)
    rank, num_ranks = collectives.rank, collectives.num_ranks
    items = []
    for index, layout in enumerate(_layouts(num_ranks)):
        flat = torch.full((layout.padded_numel,), torch.nan, dtype=dtype)
        layout.elements_of(flat, rank).copy_(layout.elements_of(_values(0, index, layout, dtype), rank))
        items.append(Rows(flat, layout))
    exchange = collectives.gather(items, "unit")
    for _ in range(2):
        exchange.wait()
    for index, item in enumerate(items):
        assert torch.equal(item.flat[: item.layout.numel], _values(0, index, item.layout, dtype))
    entry = collectives.ledger.entries["gather", "unit"]
    received = {
        "native": sum(item.flat.nbytes * (num_ranks - 1) // num_ranks for item in items),
        "host": sum((i.layout.numel - i.layout.local_numel(rank)) * dtype.itemsize for i in items),
        "pairwise": sum((i.layout.numel - i.layout.local_numel(rank)) * dtype.itemsize for i in items),
    }
    assert (entry.calls, entry.bytes) == (1, received[choice])


@on_ranks(2, 3, choice=_CHOICES, dtype=_DTYPES)
def test_gather_completes_every_ranks_rows(choice: str, dtype: torch.dtype) -> None:
    _gather(choice, dtype)


def _edit_during_gather(ranks: list[int]) -> bool:
    """Whether own rows, changed while a late peer keeps the gather from its end, stay as they were changed."""
    if dist.get_rank() not in ranks:
        return True
    collectives = make_collectives("native", ranks, torch.device("cpu"), 20.0, Ledger())
    layout = RowLayout((4, 3), len(ranks))
    flat = torch.zeros(layout.padded_numel)
    if collectives.rank:
        time.sleep(0.3)
    exchange = collectives.gather([Rows(flat, layout)], "unit")
    layout.elements_of(flat, collectives.rank).fill_(1.0)
    exchange.wait()
    return bool(layout.elements_of(flat, collectives.rank).eq(1.0).all())


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 2]])  # torch names the backend of groups of some ranks otherwise
def test_gloo_leaves_own_rows_as_they_are_changed_meanwhile(ranks: list[int]) -> None:
    assert run_ranks(_edit_during_gather, 3, ranks) == [True] * 3


def _reduce_rows(choice: str, dtype: torch.dtype, method: str, kind: str, sum_dtype: torch.dtype | None = None) -> None:
    collectives = _make(choice)
    rank, num_ranks = collectives.rank, collectives.num_ranks
    layouts = _layouts(num_ranks)
    items = [Rows(_values(rank, index, layout, dtype), layout) for index, layout in enumerate(layouts)]
    sum_dtype = sum_dtype or dtype
    outputs = [torch.full((layout.local_numel(rank),), torch.nan, dtype=sum_dtype) for layout in layouts]
    getattr(collectives, method)(items, outputs, "unit").wait()
    collectives.settle()
    for index, (layout, output) in enumerate(zip(layouts, outputs, strict=True)):
        assert torch.equal(items[index].flat, _values(rank, index, layout, dtype)), "autograd may own what was given"
        terms = [_values(peer, index, layout, dtype)[slice(*layout.span(rank))] for peer in range(num_ranks)]
        expected = terms[0].to(sum_dtype, copy=True)
        for term in terms[1:]:
            expected += term  # in rank order, in `sum_dtype`
        if (choice != "native" and kind == "reduce_scatter") or num_ranks == 2:
            assert torch.equal(output, expected)
        else:  # the transport adds in an order of its own: one rounding of a sum below 8
            torch.testing.assert_close(output, expected, rtol=0, atol=8 * torch.finfo(sum_dtype).eps)
    assert set(collectives.ledger.kinds()) == {"agree", kind} and collectives.ledger.total(kind).calls == 1


def _rows_of(collectives: Collectives, numel: int) -> Rows:
    layout = RowLayout((numel,), collectives.num_ranks)
    item = Rows(torch.full((layout.padded_numel,), torch.nan), layout)
    layout.elements_of(item.flat, collectives.rank).fill_(collectives.rank)
    return item


@on_ranks(2, 3, choice=_CHOICES, numel=[6, 12 * 10**5])
def test_an_exchange_dropped_in_flight_keeps_none_of_those_that_follow(choice: str, numel: int) -> None:
    collectives = _make(choice)
    for _ in range(3):
        collectives.gather([_rows_of(collectives, numel)], "nobody wants it")
        item = _rows_of(collectives, numel)
        own = torch.empty(item.layout.local_numel(collectives.rank))
        collectives.reduce_scatter([item], [own], "nobody wants it")
        wanted = _rows_of(collectives, 9)
        collectives.gather([wanted], "wanted").wait()
        for rank in range(collectives.num_ranks):
            assert (wanted.layout.elements_of(wanted.flat, rank) == rank).all()
    assert not collectives.in_flight.dropped  # their memory is free again


@on_ranks(2, 3, choice=["pairwise", "native"], numel=[6, 12 * 10**5])
def test_peers_get_the_rows_of_a_rank_that_has_dropped_them_in_flight(choice: str, numel: int) -> None:
    collectives: Collectives | None = _make(choice)
    assert collectives is not None
    item = _rows_of(collectives, numel)
    if collectives.rank == 0:
        exchange = collectives.gather([item], "the last one")
        del exchange, item, collectives
        gc.collect()
        dist.barrier()
    else:
        dist.barrier()
        collectives.gather([item], "the last one").wait()
        assert (item.layout.elements_of(item.flat, 0) == 0).all()
    dist.barrier()


@on_ranks(2, 3, choice=_CHOICES, dtype=_DTYPES)
def test_reduce_scatter_sums_own_rows_in_rank_order(choice: str, dtype: torch.dtype) -> None:
    _reduce_rows(choice, dtype, "reduce_scatter", "reduce_scatter")


@on_ranks(2, 3, dtype=_DTYPES)
def test_rows_of_a_hosts_ranks_are_summed_in_pieces_of_one_item_or_several(dtype: torch.dtype) -> None:
    with mock.patch.object(one_host, "_PIECE_BYTES", 192):  # two small items fit, the large one takes many
        _reduce_rows("host", dtype, "reduce_scatter", "reduce_scatter")


_KINDS = {"reduce_scatter": "reduce_scatter", "reduce_whole": "all_reduce", "reduce_to_owners": "reduce"}


@on_ranks(2, 3, method=["reduce_whole", "reduce_to_owners"], dtype=_DTYPES)
def test_other_reductions_sum_own_rows(method: str, dtype: torch.dtype) -> None:
    _reduce_rows("pairwise", dtype, method, _KINDS[method])


@on_ranks(3, choice=_CHOICES, method=list(_KINDS))
def test_reductions_sum_bfloat16_in_float32(choice: str, method: str) -> None:
    _reduce_rows(choice, torch.bfloat16, method, _KINDS[method], torch.float32)


def _peak_of(call: Callable[[], None]) -> int:
    """The most bytes that tensors made in `call` take together, temporary ones inside torch included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


def _reduce_embedding(dtype: torch.dtype, staging_bytes: int) -> tuple[Tensor, int]:
    """This rank's sum of a large and a small gradient, and the peak of memory."""
    collectives = _make("pairwise")
    collectives.staging_bytes = staging_bytes
    layouts = [RowLayout((10007, 100), collectives.num_ranks), RowLayout((7, 3), collectives.num_ranks)]
    items = [Rows(_values(collectives.rank, index, layout, dtype), layout) for index, layout in enumerate(layouts)]
    outputs = [torch.empty(layout.local_numel(collectives.rank)) for layout in layouts]
    peak = _peak_of(lambda: collectives.reduce_scatter(items, outputs, "embedding").wait())
    return torch.cat(outputs), peak


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_staging_of_a_large_gradient_is_bounded_whatever_its_size(num_ranks: int, dtype: torch.dtype) -> None:
    budget = 2**17
    bounded = run_ranks(_reduce_embedding, num_ranks, dtype, budget)
    unbounded = run_ranks(_reduce_embedding, num_ranks, dtype, 2**40)
    num_staged = num_ranks - 1 - int(dtype == torch.float32)  # one peer's rows land in the output
    for (result, peak), (expected, whole) in zip(bounded, unbounded, strict=True):
        assert torch.equal(result, expected)
        staged = num_staged * 10007 * 100 * dtype.itemsize // num_ranks
        assert whole >= 0.99 * staged
        widened = 4 * _PART_NUMEL if dtype == torch.bfloat16 else 0  # what torch makes of a term in float32
        assert peak < budget + widened + 1000


def _coalesced(coalesces: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """What a gather and sums of several parameters give, averages of them, and how many launches all of these take."""
    collectives = _make("native")
    assert isinstance(collectives, NativeCollectives)
    launches: list[dist.ProcessGroup] = []

    @contextlib.contextmanager
    def count(group: dist.ProcessGroup, device: torch.device) -> Iterator[list[Any]]:
        launches.append(group)
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:  # which gloo has
            yield manager.works

    if coalesces:
        collectives.backend, collectives.coalesces = "nccl", True  # gloo can do it as well, but for averages
    rank, layouts = collectives.rank, _layouts(collectives.num_ranks)
    items = [Rows(_padded(_values(rank, i, layout, torch.float32), layout), layout) for i, layout in enumerate(layouts)]
    outputs = [torch.empty(layout.local_numel(rank)) for layout in layouts]
    gradients = [Rows(item.flat[: item.layout.numel].clone(), item.layout) for item in items]
    with (
        mock.patch.object(torch_groups, "coalesced", count),
        mock.patch.object(dist.ReduceOp, "AVG", dist.ReduceOp.SUM),
    ):
        collectives.gather(items, "unit").wait()
        collectives.reduce_scatter(gradients, outputs, "unit", divisor=2).wait()
        sums = [_values(rank, i, layout, torch.float32) for i, layout in enumerate(layouts)]
        collectives.all_reduce(sums, "unit", divisor=8).wait()
    return [item.flat for item in items] + sums, outputs, len(launches)


def _padded(values: Tensor, layout: RowLayout) -> Tensor:
    return torch.nn.functional.pad(values, (0, layout.padded_numel - layout.numel))


def test_native_collectives_of_a_unit_are_one_launch_where_the_backend_coalesces_and_averages() -> None:
    apart, together = run_ranks(_coalesced, 2, False), run_ranks(_coalesced, 2, True)
    for (expected, averages, none), (found, left_to_nccl, launches) in zip(apart, together, strict=True):
        assert (none, launches) == (0, 3)
        assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
        assert all(torch.equal(2 * left, right) for left, right in zip(averages, left_to_nccl, strict=True))


def _bytes_of_whole_rows(choice: str) -> tuple[int, ...]:
    collectives = _make(choice)
    layout = RowLayout((6, 4), collectives.num_ranks)
    collectives.gather([Rows(torch.zeros(24), layout)], "a").wait()
    collectives.reduce_scatter([Rows(torch.zeros(24), layout)], [torch.empty(24 // collectives.num_ranks)], "a").wait()
    collectives.settle()
    collectives.all_reduce([torch.zeros(24), torch.zeros(0)], "a").wait()
    collectives.reduce_to_owners(
        [Rows(torch.zeros(24), layout)], [torch.empty(24 // collectives.num_ranks)], "a"
    ).wait()
    return tuple(collectives.ledger.total(kind).bytes for kind in ("gather", "reduce_scatter", "all_reduce", "reduce"))


@on_ranks(2, 3, choice=_CHOICES)
def test_ledger_counts_what_a_rank_receives(choice: str) -> None:
    one = 24 * 4 * (dist.get_world_size() - 1) // dist.get_world_size()
    assert _bytes_of_whole_rows(choice) == (one, one, 2 * one, one)


def _all_reduce(choice: str) -> list[Tensor]:
    collectives = _make(choice)
    tensors = [torch.randn(5, generator=torch.Generator().manual_seed(collectives.rank)), torch.ones(3), torch.ones(0)]
    collectives.all_reduce(tensors, "unit").wait()
    return tensors


@pytest.mark.parametrize("choice", _CHOICES)
def test_all_reduce_gives_the_same_bits_on_every_rank(choice: str) -> None:
    results = run_ranks(_all_reduce, 3, choice)
    terms = [torch.randn(5, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    torch.testing.assert_close(results[0][0], sum(terms))
    assert torch.equal(results[0][1], torch.full((3,), 3.0))
    for other in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], other, strict=True))


def _broadcast(source: int) -> tuple[Tensor, Tensor, int]:
    collectives = _make("pairwise")
    rank = collectives.rank
    strided, scalar = torch.full((4, 3), float(rank)).t(), torch.tensor(rank)
    collectives.broadcast(strided, source, "strided")
    collectives.broadcast(scalar, source, "scalar")
    collectives.broadcast(torch.empty(0), source, "nothing")
    return strided, scalar, collectives.ledger.total("broadcast").bytes


def _broadcast_beside_a_device() -> tuple[list[str], Tensor]:
    """Which group carries a tensor of the host where rows live on a device."""
    collectives = make_collectives(
        "pairwise", [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), 20.0, Ledger()
    )
    names = {id(collectives.axis.group): "rows", id(control := dist.new_group()): "control"}
    collectives.axis = dataclasses.replace(collectives.axis, control_group=control, device=torch.device("meta"))
    collectives.device = torch.device("meta")
    used: list[str] = []
    plain = dist.broadcast

    def broadcast(tensor: Tensor, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        used.append(names[id(group)])
        return plain(tensor, group=group, **kwargs)

    value = torch.full((3,), float(dist.get_rank()))
    with mock.patch.object(dist, "broadcast", broadcast):
        collectives.broadcast(value, 1, "a note")
    return used, value


def test_what_lives_on_the_host_goes_over_the_control_group() -> None:
    for used, value in run_ranks(_broadcast_beside_a_device, 2):
        assert used == ["control"] and value.tolist() == [1.0] * 3


def test_broadcast_copies_from_its_source_whatever_the_strides() -> None:
    for rank, (strided, scalar, received) in enumerate(run_ranks(_broadcast, 3, 1)):
        assert torch.equal(strided, torch.ones(3, 4)) and scalar.item() == 1
        assert received == (0 if rank == 1 else 12 * 4 + 8)


@on_ranks(2, choice=_CHOICES)
def test_gathers_and_reductions_keep_an_order_each(choice: str) -> None:
    """A rank without gradients for a unit reduces it later, after other gathers: no kind may wait for the other."""
    collectives = _make(choice)
    layout = RowLayout((4,), 2)
    rank = collectives.rank
    whole = torch.zeros(4)
    whole[2 * rank : 2 * rank + 2] = rank + 1.0
    output = torch.empty(2)

    def gather() -> None:
        collectives.gather([Rows(whole, layout)], "a").wait()

    def reduce() -> None:
        started.append(collectives.reduce_scatter([Rows(torch.arange(4.0), layout)], [output], "b"))

    started: list = []
    calls: list[Callable[[], None]] = [reduce, gather] if rank else [gather, reduce]
    for call in calls:
        call()
    started[0].wait()
    collectives.settle()
    assert torch.equal(whole, torch.tensor([1.0, 1.0, 2.0, 2.0]))
    assert torch.equal(output, 2 * torch.arange(4.0)[2 * rank : 2 * rank + 2])


@on_ranks(2, choice=_CHOICES)
def test_what_a_peer_has_not_come_to_yet_is_not_waited_for(choice: str) -> None:
    collectives, layout = _make(choice, timeout_s=5), RowLayout((4,), 2)
    for first in (0, 1):
        outputs, started = [torch.empty(2), torch.empty(2)], list[Exchange]()
        for turn in (False, True):
            for number, output in enumerate(outputs) if turn is (collectives.rank == first) else ():
                started.append(collectives.reduce_scatter([Rows(torch.ones(4), layout)], [output], f"unit {number}"))
            dist.barrier()
        if choice == "host" and collectives.rank == first:  # it sees both there, and reads the second one by the way
            cast(Any, collectives)._board.lanes["reduce_scatter"].advance()
        started[0].wait()
        collectives.settle()
        dist.barrier()  # until here the other waits for the second one no more than for anything else
        started[1].wait()
        collectives.settle()
        assert torch.equal(torch.stack(outputs), torch.full((2, 2), 2.0))


@on_ranks(2)
def test_a_rank_may_begin_more_exchanges_than_the_board_of_a_host_has_room_for() -> None:
    collectives, layout, count = _make("host"), RowLayout((2,), 2), board._SLOTS + 50
    rank = collectives.rank
    wholes = [torch.full((2,), float(number)) * (1 + rank) for number in range(count)]
    if rank:
        time.sleep(0.5)  # the other has posted as many as it may meanwhile
    exchanges = [collectives.gather([Rows(each, layout)], f"unit {number}") for number, each in enumerate(wholes)]
    for exchange in exchanges:
        exchange.wait()
    assert torch.equal(torch.stack(wholes), torch.arange(float(count))[:, None] * torch.tensor([1.0, 2.0]))


@on_ranks(2)
def test_what_is_to_come_is_asked_for_before_anything_is_sent() -> None:
    """Else gloo may send and receive in turn, where a line could do both: twice the time of a large gradient."""
    collectives = _make("pairwise")
    begun: list[str] = []
    for name in ("_send", "_receive"):
        call = getattr(collectives, name)
        setattr(collectives, name, lambda *args, name=name, call=call: [begun.append(name), call(*args)][1])
    layout = RowLayout((4, 3), 2)
    whole, rows = torch.ones(layout.padded_numel), torch.empty(layout.local_numel(collectives.rank))
    for exchange in (
        lambda: collectives.gather([Rows(whole, layout)], "weight"),
        lambda: collectives.reduce_scatter([Rows(whole, layout)], [rows], "weight"),
        lambda: collectives.all_to_all([[whole]] * 2, [[torch.empty_like(whole)]] * 2, "all_to_all", "weight"),
    ):
        exchange().wait()
        assert begun == ["_receive", "_send"]
        begun.clear()


def _swapped_units(kind: str) -> str:
    collectives = _make("pairwise", timeout_s=1.0)
    layout = RowLayout((4,), 2)
    with pytest.raises(CollectiveError) as caught:
        for name in ("a", "b") if collectives.rank else ("b", "a"):
            if kind == "gather":
                collectives.gather([Rows(torch.zeros(4), layout)], name).wait()
            else:
                collectives.reduce_scatter([Rows(torch.zeros(4), layout)], [torch.empty(2)], name).wait()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["gather", "reduce_scatter"])
def test_exchange_of_another_unit_of_equal_shape_raises(kind: str) -> None:
    left, right = run_ranks(_swapped_units, 2, kind)
    assert f"rank 1 in {kind} of 'b'" in left and f"rank 0 in {kind} of 'a'" in right


def _leave() -> None:
    collectives = _make("pairwise", timeout_s=20.0)
    if collectives.rank == 1:
        raise ValueError("on rank 1 only")
    collectives.gather([Rows(torch.zeros(4), RowLayout((4,), 2))], "unit").wait()


def test_rank_that_is_gone_is_named_at_once() -> None:
    left, right = run_ranks(_leave, 2, expect_failure=True, timeout_s=15.0)
    assert isinstance(left, RankFailure) and left.type_name == "CollectiveError"
    assert "lost rank 1 in gather of 'unit'" in left.message
    assert isinstance(right, RankFailure) and right.type_name == "ValueError"


def _cannot_start() -> str:
    collectives = _make("native")
    if collectives.rank == 1:
        time.sleep(0.5)  # the others look again until it has ended
        os._exit(1)

    @contextlib.contextmanager
    def coalesced(*_: object) -> Iterator[list[Any]]:
        yield []
        raise RuntimeError("NCCL error: remote process exited")

    with mock.patch.object(torch_groups, "coalesced", coalesced), pytest.raises(CollectiveError) as caught:
        collectives.coalesces = True
        collectives.gather([Rows(torch.zeros(6), RowLayout((6,), 3))], "unit")
    return str(caught.value)


def test_rank_whose_loss_keeps_an_exchange_from_starting_is_named_by_its_process() -> None:
    for reply in run_ranks(_cannot_start, 3, expect_failure=True)[::2]:
        assert "lost rank 1 in gather of 'unit'" in str(reply) and "remote process exited" in str(reply)


def _agree() -> list[list[int]]:
    collectives = _make("pairwise")
    collectives.meet("here")
    assert collectives.agree((), "nothing") == [[], [], []]
    return collectives.agree([collectives.rank, -(2**62)], "numbers")


def test_agree_shows_every_ranks_values_to_every_rank() -> None:
    assert run_ranks(_agree, 3) == [[[0, -(2**62)], [1, -(2**62)], [2, -(2**62)]]] * 3


def _disagree(labels: list[str], counts: list[int]) -> str:
    collectives = _make("pairwise")
    rank = dist.get_rank()
    with pytest.raises(CollectiveError) as caught:
        collectives.agree([7] * counts[rank], labels[rank])
    return str(caught.value)


@pytest.mark.parametrize(("labels", "counts"), [(["save", "load"], [1, 1]), (["save", "save"], [1, 2])])
def test_agree_names_what_each_rank_was_at(labels: list[str], counts: list[int]) -> None:
    for rank, buffer in enumerate(run_ranks(_disagree, 2, labels, counts)):
        peer = 1 - rank
        assert f"rank {rank} is at {labels[rank]!r} ({counts[rank]} values)" in buffer
        assert f"rank {peer} is at {labels[peer]!r} ({counts[peer]} values)" in buffer


def _chosen(choice: str, hosts: list[int]) -> tuple[str, str, list[str], int]:
    """What is made of ranks that take themselves for ones of these hosts, why, what is said, and what it has exchanged."""
    said: list[str] = []
    with (
        mock.patch.object(host_memory, "host_number", lambda: hosts[dist.get_rank()]),
        mock.patch.object(select.logger, "warning", lambda text, *words: said.append(text % words)),
    ):
        made = make_collectives(choice, range(len(hosts)), torch.device("cpu"), 20.0, Ledger())
    assert set(made.ledger.kinds()) == {"agree"}
    return made.name, made.reason, said, made.sequence_hash


def test_auto_takes_the_memory_of_a_host_where_all_ranks_are_on_it_and_measures_nothing() -> None:
    reason = "auto: the ranks share the memory of one host"
    assert run_ranks(_chosen, 2, "auto", [0, 0]) == [("host", reason, [], 0)] * 2


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1]])
def test_ranks_of_several_hosts_exchange_pairwise(hosts: list[int]) -> None:
    reason = "the ranks are on several hosts"
    found = run_ranks(_chosen, len(hosts), "auto", hosts)
    assert found == [("pairwise", f"auto: {reason}", [], 0)] * len(hosts)
    said = [f"collectives: host cannot be had here, but pairwise: {reason}"]
    assert run_ranks(_chosen, len(hosts), "host", hosts) == [("pairwise", "", said, 0)] * len(hosts)


def _in_replicas(choice: str) -> tuple[str, str, list[str]]:
    """Two ranks that cut parameters on one host, and two on a host each."""
    said: list[str] = []
    config = ZeroConfig(stage=3, replicate=2, collectives=choice)  # type: ignore[arg-type]
    with (
        mock.patch.object(host_memory, "host_number", lambda: [0, 0, 1, 2][dist.get_rank()]),
        mock.patch.dict("os.environ", {COLLECTIVES_VARIABLE: ""}),
        mock.patch.object(select.logger, "warning", lambda text, *words: said.append(text % words)),
        mock.patch.object(axes.logger, "warning", lambda text, *words: said.append(text % words)),
    ):
        made = axes.Axes.connect(config, torch.device("cpu"), None, Ledger()).shards
    return made.name, made.reason, said


@pytest.mark.parametrize("choice", ["auto", "host"])
def test_every_group_that_cuts_parameters_exchanges_in_the_same_way(choice: str) -> None:
    for rank, (name, reason, said) in enumerate(run_ranks(_in_replicas, 4, choice)):
        why = "the ranks are on several hosts" if rank > 1 else axes._NOT_ALL_SHARE
        assert name == "pairwise"
        if choice == "auto":
            assert (reason, said) == (f"auto: {why}", [])
        else:
            assert (reason, said) == ("", [f"collectives: host cannot be had here, but pairwise: {why}"])


def _other_choice() -> str:
    choice = "pairwise" if dist.get_rank() else "native"
    with pytest.raises(ConfigError) as caught:
        make_collectives(choice, [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), 20.0, Ledger())
    return str(caught.value)


def test_another_choice_on_one_rank_is_an_error_on_all() -> None:
    for rank, buffer in enumerate(run_ranks(_other_choice, 2)):
        assert f"rank {rank} has collectives:" in buffer and "HF_ZERO_COLLECTIVES" in buffer


def _on_a_device(choice: str) -> tuple[str, list[str]]:
    """What is made where NCCL serves the parameters, and what is said of it."""
    said: list[str] = []
    with (
        mock.patch.object(torch_groups, "backend_on", lambda *_: "nccl"),
        mock.patch.object(select.logger, "warning", lambda text, *words: said.append(text % words)),
    ):
        ranks = [rank for (rank,) in cells_of(None, 1)[0]]
        try:
            name = make_collectives(choice, ranks, torch.device("cpu"), 20.0, Ledger()).name
        except ConfigError as error:
            name = str(error)
    return name, said


def test_on_a_device_it_is_native_or_an_error() -> None:
    assert run_ranks(_on_a_device, 2, "auto") == [("native", [])] * 2
    for name, (said,) in run_ranks(_on_a_device, 2, "host"):
        assert name == "native" and "host cannot be had here, but native" in said
    for name, said in run_ranks(_on_a_device, 2, "pairwise"):
        assert "pairwise runs on gloo, but nccl serves" in name and not said


@on_ranks(2)
def test_one_launch_sums_tensors_of_one_dtype_as_nccl_can() -> None:
    launches: list[list[torch.dtype]] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        launches[-1].append(tensor.dtype)
        works.append(reduce(tensor, *args, **kwargs))

    @contextlib.contextmanager
    def coalesced(group: object, device: torch.device) -> Iterator[list[Any]]:
        launches.append([])
        works.clear()
        yield works

    works: list[Any] = []
    with (
        mock.patch.object(torch_groups, "backend_on", lambda *_: "nccl"),
        mock.patch.object(torch_groups, "coalesces_on", lambda *_: True),
        mock.patch.object(torch_groups, "coalesced", coalesced),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        collectives = _make("native")
        sums = [torch.full((3,), 1.0 + dist.get_rank(), dtype=dtype) for dtype in (*_DTYPES, *_DTYPES)]
        collectives.all_reduce(sums, "unit").wait()
    assert launches == [[torch.float32] * 2, [torch.bfloat16] * 2]
    assert all(torch.equal(each, torch.full_like(each, 3)) for each in sums)


def _nobody() -> bool:
    return (
        make_collectives("auto", [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), 1.0, Ledger()).name
        == "alone"
    )


def test_one_rank_has_nothing_to_exchange() -> None:
    assert run_alone(_nobody)
    assert run_ranks(_nobody, 1) == [True]


def _one_after_the_other(num_models: int) -> list[int]:
    num_groups = []
    for _ in range(num_models):
        collectives = _make("pairwise")
        num_groups.append(len(dist.distributed_c10d._world.pg_map))
        collectives.meet("the end")
        del collectives
    return num_groups


def test_process_groups_of_dropped_models_are_closed() -> None:
    first, second, *others = run_ranks(_one_after_the_other, 2, 5)[0]
    assert second == first and set(others) == {first}


def _kept_on_one_rank() -> int:
    kept = [_make("pairwise") for _ in range(2)]
    kept[0].meet("on both")
    if kept[0].rank == 0:
        kept.clear()
    before = len(dist.distributed_c10d._world.pg_map)
    collectives = _make("pairwise")
    collectives.meet("the end")
    return len(dist.distributed_c10d._world.pg_map) - before


def test_process_groups_stay_while_a_rank_uses_them() -> None:
    assert run_ranks(_kept_on_one_rank, 2) == [2, 2]


def _packed(num_small: int) -> int:
    """Messages of one gather of `num_small` small parameters and a large one."""
    collectives = _make("pairwise")
    layouts = [RowLayout((8, 4), collectives.num_ranks)] * num_small + [RowLayout((400, 100), collectives.num_ranks)]
    exchange = collectives.gather([Rows(torch.zeros(layout.padded_numel), layout) for layout in layouts], "unit")
    num_messages = len(exchange._parts)
    exchange.wait()
    return num_messages


def test_small_parameters_travel_in_one_message() -> None:
    assert run_ranks(_packed, 2, 0) == [2, 2]  # one sent, one received
    assert run_ranks(_packed, 2, 9) == [4, 4]


def test_a_message_is_no_larger_than_what_may_be_held_of_the_peers() -> None:
    sizes = {"a": 60, "b": 60, "c": 10, "large": 2**17, "half": 80, "d": 50}
    dtypes = {"half": torch.float16}
    messages = in_messages(list(sizes), lambda name: (dtypes.get(name, torch.float32), sizes[name]), 100)
    assert messages == [["large"], ["a"], ["b", "c"], ["half"], ["d"]]


class _Recorded:
    """A handle that remembers how it was waited for."""

    def __init__(self) -> None:
        self.waits: list[tuple[object, ...]] = []

    def wait(self, *args: object) -> None:
        self.waits.append(args)


def test_waiting_for_work_on_a_device_does_not_stop_the_process() -> None:
    host, device, followed = _Recorded(), _Recorded(), list[tuple[str, float]]()
    parts = [Work(host, None), Work(device, None, lambda *given: followed.append(given))]  # type: ignore[arg-type]
    Exchange("gather of 'unit'", 3.0, parts).wait()
    assert host.waits == [(datetime.timedelta(seconds=3),)]  # torch blocks the process when it is given a time
    assert device.waits == [()]
    assert followed == [("gather of 'unit'", 3.0)]
