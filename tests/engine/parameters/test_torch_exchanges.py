"""Exchanges of `torch.distributed` on gradients and parameters: scripts average gradients by hand, though DDP has done so."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional

import hf_zero as zero
from hf_zero import UsageError
from hf_zero.engine.parameters.at_rest.operators import differs_by_rank, writes_of
from tests.engine.twins import Net, batch, square_loss, whole
from tests.ranks import by_hand, on_ranks


def _model(stage: int) -> Any:
    torch.manual_seed(0)
    model = Net()
    zero.shard_model(model, {"stage": stage})
    square_loss(model, batch(0, dist.get_rank())).backward()
    return model


def _later(grads: list[Tensor]) -> list[Tensor]:
    work = dist.all_reduce(grads[0], async_op=True)
    work.wait()
    return grads[:1]


def _coalesced(grads: list[Tensor]) -> list[Tensor]:
    with dist._coalescing_manager():
        for grad in grads:
            dist.all_reduce(grad)
    return grads


def _by_view(grads: list[Tensor]) -> list[Tensor]:
    dist.all_reduce(grads[0].view(-1))
    return grads[:1]


def _gathered(grads: list[Tensor]) -> list[Tensor]:
    """Into tensors that are at rest, too."""
    rooms = [torch.zeros_like(grads[0]) for _ in range(2)]
    dist.all_gather(rooms, grads[0])
    return [rooms[0] + rooms[1]]


_SUMS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "all_reduce": lambda grads: [dist.all_reduce(grad) or grad for grad in grads],
    "later": _later,
    "coalesced": _coalesced,
    "by_view": _by_view,
    "gathered": _gathered,
    "in_graph": lambda grads: [functional.all_reduce(grads[0])],
}


@on_ranks(2, stage=[1, 3], way=list(_SUMS))
def test_sums_over_the_ranks_are_those_of_plain_tensors(stage: int, way: str) -> None:
    """Each rank has the same gradients, so that the sum over two ranks is twice as much."""
    grads = [param.grad.clone() for param in _model(stage).parameters()]
    expected = [2 * whole(grad) for grad in grads]
    for found, wanted in zip(_SUMS[way](grads), expected, strict=False):
        assert torch.equal(whole(found), wanted)


@on_ranks(2, stage=[1, 3])
def test_gradients_averaged_by_hand_stay_what_they_are(stage: int) -> None:
    model = _model(stage)
    expected = [whole(param.grad).clone() for param in model.parameters()]
    for param in model.parameters():
        total = param.grad.clone()
        dist.all_reduce(total)
        param.grad = total / 2
    for param, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(whole(param.grad), wanted)


@on_ranks(2, stage=[1, 3])
def test_parameters_that_are_averaged_or_sent_out_again_are_used_so(stage: int) -> None:
    model = _model(stage)
    expected = [whole(param).detach().clone() for param in model.parameters()]
    output = model(batch(0, 0)).detach().clone()
    with torch.no_grad():
        for param in model.parameters():
            dist.all_reduce(param)
            param /= 2
            dist.broadcast(param.data, 0)
    assert torch.equal(model(batch(0, 0)), output)
    for param, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(whole(param), wanted)


@on_ranks(2, stage=[3])
def test_what_gives_other_values_on_each_rank_is_refused(stage: int) -> None:
    (grad, *_) = (param.grad for param in _model(stage).parameters())
    with pytest.raises(UsageError, match="reduce writes other values on each rank"):
        dist.reduce(grad, 0)


def test_what_each_exchange_of_torch_writes_is_known() -> None:
    """Their schemas do not say so: for a name that is new here, look whether `writes_of` and `differs_by_rank` are right."""
    known = {
        "allreduce_",
        "allreduce_coalesced_",
        "broadcast_",
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
    }
    known |= {"allgather_into_tensor_coalesced_", "send", "barrier", "monitored_barrier_", "check_for_nan"}
    apart = {
        "reduce_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "scatter_",
        "gather_",
    }
    apart |= {"alltoall_", "alltoall_base_", "recv_", "recv_any_source_"}
    names = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    assert names <= known | apart
    for name in names:
        exchange = getattr(torch.ops.c10d, name).default
        assert differs_by_rank(exchange) == (name in apart), name
        assert bool(writes_of(exchange)) == (name not in ("send", "barrier", "monitored_barrier_", "check_for_nan")), (
            name
        )


def _sent(param: Tensor, room: Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(param, 1)
    else:
        dist.recv(room, 0)


def _sent_later(param: Tensor, room: Tensor) -> None:
    if dist.get_rank() == 0:
        dist.isend(param.detach() * 2, 1).wait()
    else:
        dist.irecv(room, 0).wait()
        room /= 2


def _sent_in_a_group(param: Tensor, room: Tensor) -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.send(param.data.clone(), 1, group=group)
    else:
        dist.recv(room, 0, group=group)


def _sent_around(param: Tensor, room: Tensor) -> None:
    """To the next rank, by all of them."""
    other = 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, param.data, other), dist.P2POp(dist.irecv, room, other)])
    for work in works:
        work.wait()


def _broadcast(param: Tensor, room: Tensor) -> None:
    dist.broadcast(param.data if dist.get_rank() == 0 else room, 0)


def _broadcast_in_a_group(param: Tensor, room: Tensor) -> None:
    dist.broadcast(param.data if dist.get_rank() == 0 else room, 0, group=dist.new_group())


@on_ranks(
    2,
    stage=[1, 3],
    way=[_sent, _sent_in_a_group, _sent_around, _broadcast, *by_hand(_sent_later, _broadcast_in_a_group)],
)
def test_one_rank_may_send_parameters_to_those_that_take_them_as_plain_tensors(
    stage: int, way: Callable[[Tensor, Tensor], None]
) -> None:
    model = _model(stage)
    output = model(batch(0, 0)).detach().clone()
    wanted = [whole(param).detach().clone() for param in model.parameters()]
    for param, expected in itertools.islice(zip(model.parameters(), wanted, strict=True), 3):
        room = torch.zeros(param.shape)
        with torch.no_grad():
            way(param, room)
        if dist.get_rank():
            assert torch.equal(room, expected)
    assert torch.equal(model(batch(0, 0)), output)


@on_ranks(2, stage=[1, 3])
def test_one_rank_alone_does_not_receive_into_parameters(stage: int) -> None:
    model = _model(stage)
    if dist.get_rank() == 0:
        dist.broadcast(torch.zeros(model.enter.weight.shape), 0)
    else:
        with pytest.raises(UsageError, match=r"broadcast: this rank alone receives values into .*'enter.weight'"):
            dist.broadcast(model.enter.weight.data, 0)
    dist.barrier()
    model(batch(0, 0))
