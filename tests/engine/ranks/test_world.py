"""The ranks as one: an error on one of them is an error on all."""

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm.groups import torch_groups
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError, CollectiveError
from tests.ranks import on_ranks


def _world() -> World:
    return World.create(ZeroConfig(stage=3, collectives="pairwise", timeout_s=5), torch.device("cpu"))


@on_ranks(2)
def test_exchanges_may_take_as_long_as_the_program_lets_its_own_take() -> None:
    group = dist.group.WORLD
    assert group is not None
    for of_program, asked, expected in ((600.0, "auto", 600.0), (60.0, "auto", 120.0), (600.0, 5.0, 5.0)):
        torch_groups.set_timeout(group, of_program)
        world = World.create(ZeroConfig(timeout_s=asked), torch.device("cpu"))
        assert world.limit_s == world.everyone.timeout_s == expected
        assert world.config.timeout_s == asked  # by which the same configuration is known again


_ERRORS = [
    (ValueError("no room"), "ValueError: no room"),
    (CheckpointError("no room"), "no room"),
    (CheckpointError(), "CheckpointError"),
]


@on_ranks(2, case=_ERRORS)
def test_an_error_on_one_rank_is_raised_on_all(case: tuple[Exception, str]) -> None:
    error, text = case
    world = _world()
    with (
        pytest.raises(CheckpointError, match=f"^packing: rank 1: {text}$") as found,
        world.together("packing", CheckpointError, timeout_s=5),
    ):
        if world.rank == 1:
            raise error
    assert found.value.__cause__ is (error if world.rank == 1 else None)
    with world.together("packing", CheckpointError):
        done = True
    assert done


@on_ranks(2)
def test_a_failed_exchange_is_not_told_again() -> None:
    world = _world()
    with pytest.raises(CollectiveError, match="gone"), world.together("packing", CheckpointError):
        raise CollectiveError("gone")


@on_ranks(2)
def test_what_the_first_rank_finds_is_known_to_all() -> None:
    world = _world()
    assert world.from_first(lambda: [world.rank], "looking", CheckpointError) == [0]
    with pytest.raises(CheckpointError, match=r"^looking: rank 0: ZeroDivisionError"):
        world.from_first(lambda: 1 / world.rank, "looking", CheckpointError)


@on_ranks(2)
def test_a_device_is_told_as_tensors_tell_it() -> None:
    world = World.create(ZeroConfig(stage=3), torch.device("cpu", 0))  # as transformers tells a rank's
    assert world.device == torch.empty(0).device == torch.device("cpu")
