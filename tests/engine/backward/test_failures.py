"""Exceptions on one rank or all, ranks that die or call other units: named errors, and a clean next step."""

import gc
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from hf_zero.engine.units.unit import Unit
from tests.engine.twins import EXCHANGES, SHORT_S, STAGES, Net, Twins, square_loss
from tests.ranks import RankFailure, by_hand, on_ranks, run_ranks


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: "Fragile") -> Tensor:
        ctx.net = net
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.net.breaks_in == "backward":
            raise ZeroDivisionError("a fault in backward")
        return gradient, None


class Fragile(Net):
    """Breaks between its second and third block where `breaks_in` says so."""

    breaks_in = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.enter(x)))
        if self.breaks_in == "forward":
            raise ZeroDivisionError("a fault in forward")
        return self.head(self.blocks[2](_Fuse.apply(x, self)))


@on_ranks(2, stage=STAGES, where=["forward", "backward"])
def test_step_after_an_exception_on_all_ranks_is_clean(stage: int, where: str) -> None:
    twins = Twins(stage, Fragile)
    for _ in range(2):
        twins.model.breaks_in = where
        with pytest.raises(ZeroDivisionError):
            square_loss(twins.model, twins.own()).backward()
        twins.model.breaks_in = ""
        twins.optimizers[0].zero_grad()
        twins.step(2)
    assert twins.engine.memory.bytes == 0


def _one_rank_breaks(stage: int, where: str) -> None:
    twins = Twins(stage, Fragile, timeout_s=20.0)
    twins.step()
    if twins.rank == 1:
        twins.model.breaks_in = where
    square_loss(twins.model, twins.own()).backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_exception_on_one_rank_is_a_named_error_on_the_other(stage: int, where: str) -> None:
    left, right = run_ranks(_one_rank_breaks, 2, stage, where, expect_failure=True)
    assert isinstance(right, RankFailure) and right.type_name == "ZeroDivisionError"
    assert isinstance(left, RankFailure) and left.type_name == "CollectiveError"
    assert "rank 1" in left.message


def _one_rank_dies(stage: int) -> None:
    twins = Twins(stage, timeout_s=20.0)
    twins.step()
    if twins.rank == 1:
        os._exit(3)
    square_loss(twins.model, twins.own()).backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_rank_that_dies_is_named_by_those_that_wait(stage: int) -> None:
    left, right = run_ranks(_one_rank_dies, 2, stage, expect_failure=True)
    assert isinstance(right, RankFailure) and right.type_name == "RankDied"
    assert isinstance(left, RankFailure) and left.type_name == "CollectiveError"
    assert "lost rank 1" in left.message


@on_ranks(2)
def test_call_on_one_rank_only_names_the_missing_rank() -> None:
    twins = Twins(3, timeout_s=SHORT_S)
    twins.step()
    if twins.rank == 0:
        with pytest.raises(zero.CollectiveError, match="rank 1") as caught:
            twins.model(twins.own())
        assert "gather of 'enter'" in str(caught.value)


@on_ranks(2, collectives=EXCHANGES)
def test_a_model_that_is_dropped_after_an_error_waits_for_nobody_again(collectives: str) -> None:
    twins = Twins(3, collectives=collectives, timeout_s=SHORT_S, prefetch_bytes=2**20)
    twins.step(2)  # so that there is an order to prefetch in
    if twins.rank == 0:
        with pytest.raises(zero.CollectiveError, match=r"rank 1|its peers"):
            twins.model(twins.own())
        assert sum(bool(unit._pending) for unit in twins.engine.units) > 2
        with mock.patch.object(Unit, "settle") as settle:
            del twins
            gc.collect()
        settle.assert_not_called()


class Branching(Net):
    """Calls its blocks in the order given."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def _calls_differ(order: tuple[int, ...], prefetch_bytes: int) -> str:
    config = {"timeout_s": SHORT_S, "prefetch_bytes": prefetch_bytes, "reshard_after_forward": True}
    twins = Twins(3, Branching, **config)
    twins.step(2)  # so that there is an order to prefetch in
    orders = ((0, 1, 2), order)
    twins.model.order = orders[twins.rank]
    try:
        square_loss(twins.model, twins.own()).backward()
    except zero.CollectiveError as error:
        return str(error)
    for rank in range(2):
        twins.reference.order = orders[rank]
        (square_loss(twins.reference, twins.draw(twins.steps_done, rank)) / 2).backward()
    twins.update()
    return "right"


_ORDERS = {"skipped": (0, 2), "swapped": (1, 0, 2), "twice": (0, 1, 2, 2)}


@pytest.mark.parametrize("order", _ORDERS)
@on_ranks(2)
def test_ranks_that_call_other_units_name_each_other(order: str) -> None:
    peer = 1 - dist.get_rank()
    assert f"rank {peer} in gather of " in _calls_differ(_ORDERS[order], 0)


@on_ranks(2, order=[_ORDERS["skipped"], *by_hand(_ORDERS["swapped"], _ORDERS["twice"])])
def test_ranks_that_call_other_units_never_see_other_weights_where_all_are_prefetched(order: tuple[int, ...]) -> None:
    messages = [""] * 2
    dist.all_gather_object(messages, _calls_differ(order, 2**20))
    assert messages == ["right", "right"] or "right" not in messages


class FragileLate(Net):
    """Its backward breaks before the block whose number `breaks_at` is."""

    breaks_at = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if x.requires_grad and index == self.breaks_at:
                x.register_hook(_break)
        return self.head(x)


def _break(gradient: Tensor) -> None:
    raise ZeroDivisionError("a user's hook")


def _breaks_apart(stage: int) -> str:
    twins = Twins(stage, FragileLate, timeout_s=SHORT_S)
    twins.step()
    twins.model.breaks_at = (2, 0)[twins.rank]
    with pytest.raises(ZeroDivisionError):
        square_loss(twins.model, twins.own()).backward()
    twins.model.breaks_at = -1
    twins.optimizers[0].zero_grad()
    try:
        twins.step()
    except zero.CollectiveError as error:
        return str(error)
    return "right"


@on_ranks(2)
def test_ranks_whose_users_hooks_raise_at_different_places_name_each_other_or_go_on() -> None:
    assert _breaks_apart(0) == "right"  # had exchanged nothing yet
    assert f"rank {1 - dist.get_rank()}" in _breaks_apart(3)


@on_ranks(2)
def test_backward_that_reaches_a_second_model_on_one_rank_only_names_the_ranks() -> None:
    twins, others = Twins(3, timeout_s=SHORT_S), Twins(3, timeout_s=SHORT_S)
    for _ in range(2):
        square_loss(others.model, twins.model(twins.own())).backward()
    hidden = twins.model(twins.own())
    output = others.model(hidden if twins.rank == 0 else hidden.detach()).pow(2).mean()
    loss = hidden.pow(2).mean() + (output if twins.rank == 0 else output.detach())
    with pytest.raises(zero.CollectiveError, match=f"rank {1 - twins.rank}"):
        loss.backward()


@on_ranks(2)
def test_gradients_of_different_steps_never_meet_unseen() -> None:
    twins = Twins(0, timeout_s=SHORT_S)
    if twins.rank:  # its first backward reaches no parameter, so nobody waits for the other rank
        twins.own().requires_grad_().sum().backward()
        twins.optimizers[0].step()
    with pytest.raises(zero.CollectiveError, match=r"different numbers of optimizer steps \(\[0, 1\], by rank\)"):
        twins.backward()
