"""What torch's process groups are asked, and given, where no GPU is: by fakes of NCCL's backends."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm.groups import torch_groups

CUDA = torch.device("cuda", 3)
CORE: Any = dist.distributed_c10d


class Group:
    """The program's group, or another, with one backend."""

    def __init__(self, name: str, bound: torch.device | None = None) -> None:
        self.implementation, self.bound_device_id = name, bound

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    def name(self) -> str:
        return self.implementation


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy"])
def test_every_backend_of_nccl_is_nccl(name: str) -> None:
    group: Any = Group(name)
    assert torch_groups.backend_on(group, CUDA) == "nccl"


@pytest.mark.parametrize("name", ["gloo", "xccl", "mpi"])
def test_other_backends_are_called_by_their_names(name: str) -> None:
    group: Any = Group(name)
    assert torch_groups.backend_on(group, CUDA) == name


def made(
    monkeypatch: pytest.MonkeyPatch, config: str, bound: torch.device | None, backend: str | None
) -> dict[str, Any]:
    """What torch is told when ranks 1 and 2 alone make a group of `backend` in a program of `config`."""
    parent, told = Group("nccl2", bound), {}

    def helper(size: int, place: int, ranks: list[int], backend: str, store: object, name: str, **rest: Any) -> Any:
        told.update(rest, bound=parent.bound_device_id, place=place)
        return Group(str(backend)), None

    monkeypatch.setattr(CORE, "_get_default_group", lambda: parent)
    monkeypatch.setattr(CORE, "_get_default_store", lambda: None)
    monkeypatch.setattr(CORE, "_new_process_group_helper", helper)
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: config)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 2)
    group = torch_groups.new_group_among([1, 2], "ours", datetime.timedelta(seconds=9), backend)
    assert CORE._world.pg_group_ranks.pop(group) == {1: 0, 2: 1}
    assert parent.bound_device_id == bound
    return told


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("backend", [None, "nccl"])
def test_a_group_of_some_ranks_splits_nothing_and_is_bound_to_the_device_of_the_program(
    monkeypatch: pytest.MonkeyPatch, config: str, backend: str | None
) -> None:
    told = made(monkeypatch, config, CUDA, backend)
    assert told["bound"] is None  # what torch would split for, which all ranks of the program would have to do
    assert told["device_id"] == CUDA  # which NCCL's newer backends would guess
    assert told["place"] == 1


@pytest.mark.parametrize(
    ("config", "bound", "backend"),
    [
        ("cuda:nccl", CUDA, "gloo"),
        ("cpu:gloo,cuda:nccl", CUDA, "gloo"),
        ("cuda:gloo", CUDA, None),
        ("cuda:nccl", None, None),
    ],
)
def test_a_group_is_bound_to_no_device_that_its_backend_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, config: str, bound: torch.device | None, backend: str | None
) -> None:
    assert made(monkeypatch, config, bound, backend)["device_id"] is None


def test_the_public_name_sets_a_timeout_where_torch_has_it() -> None:
    """The private one warns there."""
    expected = getattr(dist, "set_timeout", None) or CORE._set_pg_timeout
    assert torch_groups._set_timeout is expected
