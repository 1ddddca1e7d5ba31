"""What rank 0 reads alone while the others go on: as under DDP, or one error."""

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero import torch_compat
from hf_zero.comm.beside.progress import progress
from hf_zero.engine.gathered_parameters import GatheredAlone
from tests.engine.twins import EXCHANGES, SHARDED, Twins, sgd, whole
from tests.ranks import on_ranks

SOON_S = 10  # of the 60 s that ranks wait for each other

Elsewhere = Callable[[Twins], None]


def _average(weight: Tensor) -> Tensor:
    """What an average is that rank 0 alone keeps: a plain tensor, written to."""
    average = torch.ones(weight.shape)
    average.copy_(weight.data)
    average.lerp_(weight.data, 0.5)
    average.mul_(0.9).add_(weight.data, alpha=0.1)
    torch._foreach_lerp_([average], [weight.data], 0.25)
    return torch.sub(average, weight.data, out=torch.empty(weight.shape))


def _reads(model: nn.Module) -> list[Tensor]:
    """What people log of weights."""
    weight, bias = model.blocks[1].up.weight, model.head.bias
    found = [
        weight.norm(),
        weight.data.norm(),
        weight.detach().norm(1),
        weight.detach().clone().norm(),
        weight.abs().max(),
        bias.sum(),
        weight[1:3],
        weight.t() @ weight,
        bias.full_tensor(),
        _average(weight),
    ]
    return [torch.as_tensor(each).detach().clone() for each in found]


def _plain_reads(model: nn.Module) -> list[Tensor]:
    weight, bias = model.blocks[1].up.weight, model.head.bias
    found = [
        weight.norm(),
        weight.data.norm(),
        weight.detach().norm(1),
        weight.detach().clone().norm(),
        weight.abs().max(),
        bias.sum(),
        weight[1:3],
        weight.t() @ weight,
        bias,
        _average(weight),
    ]
    return [each.detach().clone() for each in found]


def _check(twins: Twins) -> None:
    for found, expected in zip(_reads(twins.model), _plain_reads(twins.reference), strict=True):
        torch.testing.assert_close(found, expected)


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_reads_of_rank_0_alone_are_those_of_the_whole_model(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    for _ in range(2):
        twins.step()
        if dist.get_rank() == 0:
            _check(twins)
            with torch.inference_mode():
                torch.testing.assert_close(twins.model.head.weight.full_tensor(), twins.reference.head.weight.data)
        dist.barrier()


def _step(twins: Twins) -> None:
    for optimizer in twins.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    twins.steps_done += 1


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_reads_of_rank_0_alone_before_the_step_that_others_have_come_to(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    for _ in range(2):
        twins.backward_reference()
        twins.backward()
        if dist.get_rank() == 0:
            time.sleep(0.1)  # the others need nothing of this rank for a step
            _check(twins)
        _step(twins)
    dist.barrier()


def _of_gradients(model: nn.Module) -> list[Tensor]:
    """What people log of gradients before a step."""
    found: list[Tensor] = []
    for param in model.parameters():
        grad = param.grad
        assert grad is not None
        whole = grad.detach().cpu().numpy()
        found += [
            grad.norm(),
            grad.abs().max(),
            (grad * grad).mean(),
            torch.from_numpy(whole),
            grad.sum() / grad.numel(),
        ]
    return [each.detach().clone() for each in found]


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_rank_0_reads_gradients_alone_before_the_step_that_others_have_come_to(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    for step in range(3):
        twins.backward_reference()
        twins.backward()
        for model in (twins.model, twins.reference) if step == 1 else ():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if dist.get_rank() == 0:
            time.sleep(0.1)
            torch.testing.assert_close(_of_gradients(twins.model), _of_gradients(twins.reference))
        _step(twins)
    _check(twins)
    dist.barrier()


class Normed(torch.optim.SGD):
    """Writes into gradients in its step, which stays what it is between a step and `zero_grad`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad.div_(param.grad.norm() + 1.0)
        super().step(closure)


@on_ranks(2, 3, stage=SHARDED)
def test_all_ranks_read_gradients_wherever_they_come_from(stage: int) -> None:
    """Assigned, where one rank's memory has the place of an earlier gradient; or written to in a step, of a part by owners."""
    twins = Twins(stage)
    pairs = [(model, Normed(model.parameters(), lr=0.01)) for model in (twins.model, twins.reference)]
    kept = []
    for step in range(3):
        twins.backward_reference()
        twins.backward()
        kept.append([torch.ones(1)] * dist.get_rank() * step)
        for model, optimizer in pairs:
            grads = [torch.as_tensor(whole(param.grad)).clone() for param in model.parameters()]
            optimizer.zero_grad()
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad * 0.5
        _check_norms(twins)
        for _, optimizer in pairs:
            optimizer.step()
        _check_norms(twins)
        for _, optimizer in pairs:
            optimizer.zero_grad()
        twins.steps_done += 1


def _check_norms(twins: Twins) -> None:
    for param, expected in zip(twins.model.parameters(), twins.reference.parameters(), strict=True):
        assert param.grad is not None and expected.grad is not None
        torch.testing.assert_close(param.grad.norm(), expected.grad.norm(), rtol=1e-4, atol=1e-6)


@on_ranks(2, stage=SHARDED)
def test_gradients_that_are_read_alone_are_not_kept(stage: int) -> None:
    twins = Twins(stage)
    twins.backward()
    if dist.get_rank() == 0:
        twins.model.head.weight.grad.norm()
    dist.barrier()
    rows = [weakref.ref(torch_compat.local_of(param.grad)) for param in twins.model.parameters()]
    twins.optimizers[0].step()
    twins.optimizers[0].zero_grad()
    gc.collect()
    assert not any(reference() is not None for reference in rows)


@on_ranks(2, stage=SHARDED)
def test_gradients_that_other_ranks_have_changed_since_cannot_be_read(stage: int) -> None:
    twins = Twins(stage)
    for change in ("written", "replaced", "dropped"):
        twins.backward()
        weight = twins.model.head.weight
        if dist.get_rank() == 0:
            time.sleep(0.1)
            with pytest.raises(zero.CollectiveError, match="run the line that reads it before it changes"):
                weight.grad.norm()
        if change == "written":
            weight.grad.mul_(2.0)
        else:
            weight.grad = weight.grad * 2.0 if change == "replaced" else None
        twins.optimizers[0].step()
        twins.optimizers[0].zero_grad()
    dist.barrier()


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES, prefetch_bytes=[0, 10**6])
def test_reads_of_rank_0_alone_others_in_the_next_step(stage: int, collectives: str, prefetch_bytes: int) -> None:
    twins = Twins(stage, collectives=collectives, prefetch_bytes=prefetch_bytes)
    for _ in range(2):
        twins.backward_reference()
        twins.backward()
        twins.optimizers[0].step()
        twins.optimizers[0].zero_grad()
        twins.optimizers[1].step()
        twins.optimizers[1].zero_grad()
        twins.steps_done += 1
        if dist.get_rank() == 0:
            _check(twins)
    _check(twins)  # the others take it for what rank 0 has read alone, and rank 0 is alone once more
    dist.barrier()


@on_ranks(2, stage=SHARDED)
def test_reads_of_rank_0_alone_others_make_a_group(stage: int) -> None:
    twins = Twins(stage, collectives="pairwise", timeout_s=5)
    twins.step()
    if dist.get_rank() == 0:
        _check(twins)
    dist.new_group()  # in which the others wait for rank 0


@on_ranks(2, 3, stage=SHARDED)
def test_reads_of_rank_0_alone_others_wait_in_a_group_of_the_program(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    group, began = dist.new_group(), time.monotonic()
    if twins.rank == 0:
        torch.testing.assert_close(_reads(twins.model), _plain_reads(twins.reference))
    found = [None] * twins.num_ranks
    dist.all_gather_object(found, twins.rank, group)
    assert found == [*range(twins.num_ranks)] and time.monotonic() < began + SOON_S
    twins.step()


@on_ranks(2, 3, stage=SHARDED)
def test_reads_of_rank_0_alone_others_meet_for_another_model(stage: int) -> None:
    twins, others = Twins(stage), Twins(stage)
    twins.step()
    others.step()
    began = time.monotonic()
    if twins.rank == 0:
        _check(twins)
    others.assert_same_output()
    if twins.rank == 0:
        _check(others)
        _check(twins)
    twins.assert_same_output()
    assert time.monotonic() < began + SOON_S
    twins.step()
    others.step()


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_ranks_are_equally_far_after_each_step(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    for _ in range(2):
        twins.step()
        with torch.no_grad():
            twins.model(twins.own())
        everyone = twins.engine.world.everyone
        found: list[object] = [None] * everyone.num_ranks
        dist.all_gather_object(found, (progress(), twins.engine.world.serving.version))
        assert all(each == found[0] for each in found)


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_what_rank_0_does_alone_does_not_part_the_ranks_that_wait_for_it(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    twins.step()
    rank, world = dist.get_rank(), twins.engine.world
    for part in range(dist.get_world_size() - 1):  # of two ranks, the first is taken for the one that is alone
        if rank == 0:
            _check(twins)
            twins.assert_same_output()
        assert world.all_come("what all do", [])  # as `save_state`
        if rank == part:
            twins.model.head.weight.detach().norm()
        twins.assert_same_output()
        assert world.all_come("what all do", [])
    twins.step()


@on_ranks(2, stage=SHARDED)
def test_what_one_rank_opens_alone_to_read_it_is_no_change(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    if dist.get_rank() == 0:
        before = twins.engine.world.serving.version
        with GatheredAlone(twins.model):
            torch.testing.assert_close(twins.model.head.weight.data, twins.reference.head.weight.data)
        assert twins.engine.world.serving.version == before
    twins.step()
    if dist.get_rank() == 0:
        _check(twins)  # for which the others are no step ahead
    dist.barrier()


@on_ranks(2, stage=SHARDED)
def test_a_model_that_one_rank_has_kept_longer_than_another_does_not_part_them(stage: int) -> None:
    twins = Twins(stage)
    averaged = copy.deepcopy(twins.model)
    averaged(twins.own()).sum().backward()
    sgd(averaged).step()
    if dist.get_rank() == 0:
        del averaged
        gc.collect()
    total = (twins.model.head.weight.detach() * 2).sum()  # which one rank could not compute alone
    torch.testing.assert_close(total, (twins.reference.head.weight.detach() * 2).sum())


@on_ranks(2, stage=SHARDED)
def test_what_one_rank_cannot_read_alone_is_an_error_at_once(stage: int) -> None:
    twins = Twins(stage, collectives="pairwise")
    twins.step()
    if dist.get_rank() == 0:
        drawn = torch.randn_like(twins.model.head.weight)
        with pytest.raises(zero.UsageError, match="rank 0 runs this alone"):
            drawn.sum()
    dist.barrier()
    twins.step()


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_what_one_rank_loads_alone_is_what_all_have_or_an_error(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    twins.step()
    values = {name: value.full_tensor() for name, value in twins.model.state_dict().items()}
    with torch.no_grad():
        twins.model(twins.own())  # all ranks have gathered what they need, and none does again
    dist.barrier()
    if twins.rank == 0:
        twins.model.load_state_dict(values)
    twins.assert_same_output()
    twins.step()
    if twins.rank == 0:
        twins.model.load_state_dict(values)
        with pytest.raises(zero.UsageError, match="this rank has changed parameter"):
            twins.model(twins.own()).sum().backward()
    dist.barrier()


@on_ranks(2, 3, stage=SHARDED)
def test_what_one_rank_has_changed_alone_is_an_error_at_once(stage: int) -> None:
    twins = Twins(stage, collectives="pairwise")  # under "host", an edit meets the other ranks by itself
    twins.step()
    averages = [torch.ones_like(param) for param in twins.reference.parameters()]
    dist.barrier()
    if dist.get_rank() == 0:
        for param, average in zip(twins.model.parameters(), averages, strict=True):
            param.data.copy_(average)
        assert twins.model.head.weight.norm() == averages[-2].norm()  # of which this rank knows the whole
        with torch.no_grad():
            twins.model.head.weight.add_(1)
        began = time.monotonic()
        with pytest.raises(zero.CollectiveError, match=r"rank 0 has changed a model alone.* let all ranks run"):
            twins.model.head.weight.norm()
        assert time.monotonic() < began + SOON_S
    dist.barrier()
