"""Whole tensors that ranks write into tensors at rest: what is each rank's own is an error, not a mixture of all."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import Net, batch, square_loss, whole
from tests.ranks import on_ranks


def _model(stage: int) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    return model


def _own(param: Tensor, is_own: bool) -> Tensor:
    return torch.full(param.shape, 1.0 + (dist.get_rank() if is_own else 0), dtype=param.dtype)


def _grads(model: nn.Module, is_own: bool) -> list[Tensor]:
    for p in model.parameters():
        p.grad = _own(p, is_own)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return [p.grad for p in model.parameters()]


def _added(model: nn.Module, is_own: bool) -> list[Tensor]:
    params = list(model.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)
        p.grad.add_(_own(p, is_own))
    sums = [p.grad / 2 for p in params]
    for each in sums:
        dist.all_reduce(each)
    return sums


def _weights(model: nn.Module, is_own: bool) -> list[Tensor]:
    with torch.no_grad():
        for p in model.parameters():
            p.data.copy_(_own(p, is_own))
            dist.all_reduce(p.data)
    return list(model.parameters())


def _rows(model: nn.Module, is_own: bool) -> list[Tensor]:
    param = next(model.parameters())
    with torch.no_grad():
        param[:2] = _own(param, is_own)[:2]
    dist.all_reduce(param.data)
    return [param]


@on_ranks(2, 3, stage=[1, 3], how=[_grads, _added, _weights, _rows])
def test_an_exchange_of_what_is_each_ranks_own_is_an_error(
    stage: int, how: Callable[[nn.Module, bool], list[Tensor]]
) -> None:
    given = how(_model(stage), False)
    assert all(torch.isfinite(whole(each)).all() for each in given)
    if how is _weights:
        assert all(torch.equal(whole(p), torch.full_like(whole(p), dist.get_world_size())) for p in given)
    with pytest.raises(
        zero.UsageError, match=r"allreduce: each rank has written other values into .*Exchange a plain tensor"
    ):
        how(_model(stage), True)


@on_ranks(2, 3, stage=[1, 3], is_own=[True, False])
def test_a_forward_with_each_ranks_own_weights_is_an_error(stage: int, is_own: bool) -> None:
    """As of evolution strategies, where each rank tries a direction of its own."""
    model, params = _model(stage), []
    square_loss(model, batch(0, 0)).backward()
    params = list(model.parameters())
    before = [whole(p).clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.add_(_own(p, is_own))
    if is_own:
        with pytest.raises(
            zero.UsageError, match=r"a forward: each rank has written other values into parameter 'enter.weight'"
        ):
            square_loss(model, batch(0, 0))
    else:
        square_loss(model, batch(0, 0))
        assert all(torch.equal(whole(p), b + 1) for p, b in zip(params, before, strict=True))


@on_ranks(2, stage=[1, 3], is_own=[True, False])
def test_a_read_of_each_ranks_own_weights_is_an_error(stage: int, is_own: bool) -> None:
    """As of zeroth-order methods, which write what they have computed of a mixture alike."""
    param = next(_model(stage).parameters())
    before, drawn = whole(param).clone(), torch.rand(param.shape)
    param.data = param.data + _own(param, is_own)
    if is_own:
        with pytest.raises(zero.UsageError, match="each rank has written other values into"):
            param.data = param.data + drawn
    else:
        param.data = param.data + drawn
        torch.testing.assert_close(whole(param), before + 1 + drawn)


def _subtracted(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad)
    model(batch(0, 0))


def _stepped(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _gathered(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight.copy_(_own(model.head.weight, True))
        with zero.GatheredParameters(model.head.weight):
            model.head.weight.add_(1)


@on_ranks(2, stage=[1, 3], use=[_subtracted, _stepped, _gathered])
def test_a_step_with_each_ranks_own_gradients_is_an_error(stage: int, use: Callable[[nn.Module], None]) -> None:
    for is_own in (False, True):
        model = _model(stage)
        for p in model.parameters():
            p.grad = _own(p, is_own)
        if is_own or use is _gathered:
            with pytest.raises(zero.UsageError, match="each rank has written other values into"):
                use(model)
        else:
            before = [whole(p).clone() for p in model.parameters()]
            use(model)
            scale = 1.0 if use is _subtracted else 0.1
            assert all(torch.equal(whole(p), b - scale) for p, b in zip(model.parameters(), before, strict=True))


@on_ranks(2, stage=[1, 3])
def test_what_has_been_put_back_is_no_rank_s_own(stage: int) -> None:
    model = _model(stage)
    params = list(model.parameters())
    saved = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, kept in zip(params, saved, strict=True):
            p.copy_(_own(p, True))
            p.copy_(kept)
    square_loss(model, batch(0, 0)).backward()


@on_ranks(2, stage=[1, 3])
def test_what_one_rank_writes_alone_and_puts_back_is_not_compared(stage: int) -> None:
    """An average of plain tensors, to be validated on the main process; then all clip weights."""
    model = _model(stage)
    params = list(model.parameters())
    wholes = [whole(p).clone() for p in params]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for _ in range(2):
        if dist.get_rank() == 0:
            with torch.no_grad():
                averages = [0.9 * kept for kept in wholes]
                for p, average in zip(params, averages, strict=True):
                    p.copy_(average)
                model(batch(0, 0))
                for p, kept in zip(params, wholes, strict=True):
                    p.copy_(kept)
        dist.barrier()
        with torch.no_grad():
            for p in params:
                p.clamp_(-0.5, 0.5)
        square_loss(model, batch(0, 0)).backward()
        optimizer.step()
        wholes = [whole(p).clone() for p in params]


@on_ranks(2, stage=[1, 3])
def test_other_libraries_read_a_parameter_at_rest_but_do_not_write_it(stage: int) -> None:
    model = _model(stage)
    param = next(model.parameters())
    values = param.detach().numpy()
    assert torch.equal(torch.tensor(values), whole(param))
    with pytest.raises(ValueError, match="read-only"):
        values *= 0.5
    with pytest.raises(zero.UsageError, match=r"DLPack of parameter 'enter.weight', which is partitioned"):
        torch.from_dlpack(param.detach())
    copied = param.detach().clone().numpy()
    copied *= 0.5


Edit = Callable[[nn.Module, list[dict[str, Tensor]], int], None]


@torch.no_grad()
def _multiplied(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    for p in model.parameters():
        p.mul_(1.0 + rank)


@torch.no_grad()
def _filled(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    for p in model.parameters():
        p.data.fill_(rank)


@torch.no_grad()
def _all_at_once(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    torch._foreach_mul_(list(model.parameters()), torch.tensor(1.0 + rank))


@torch.no_grad()
def _row(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    model.enter.weight[rank] = 1.0


def _loaded(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    model.load_state_dict({key: torch.full(value.shape, 1.0 + rank) for key, value in model.state_dict().items()})


def _assigned(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    values = {key: torch.full(value.shape, 1.0 + rank) for key, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def _best(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    model.load_state_dict(best[rank])


@torch.no_grad()
def _best_copied(model: nn.Module, best: list[dict[str, Tensor]], rank: int) -> None:
    for name, p in model.named_parameters():
        p.copy_(best[rank][name])


@on_ranks(
    2,
    stage=[1, 3],
    edit=[_multiplied, _filled, _all_at_once, _row, _loaded, _assigned, _best, _best_copied],
)
def test_a_forward_after_edits_that_differ_by_rank_is_an_error(stage: int, edit: Edit) -> None:
    """Under DDP each rank would have a model of its own: here the rows of each would be of another model."""
    model, best = _model(stage), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        square_loss(model, batch(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        best.append({key: value.clone() for key, value in model.state_dict().items()})
    for rank in (0, 1):
        edit(model, best, rank)  # the same on all ranks
        square_loss(model, batch(0, 0))
    edit(model, best, dist.get_rank())
    with pytest.raises(
        zero.UsageError, match=r"(changed parameter|written other values into parameter) 'enter.weight'"
    ):
        square_loss(model, batch(0, 0))
