"""Which device a process's parameters live on."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm.groups import process_groups as groups
from hf_zero.comm.groups import torch_groups
from hf_zero.errors import UsageError
from tests.ranks import on_ranks


class _Group:
    bound_device_id: torch.device | None = None
    implementation = "nccl"

    def _get_backend(self, device: torch.device) -> "_Group":
        return self

    def name(self) -> str:
        return self.implementation


def _machine(patch: pytest.MonkeyPatch, current: int, local_rank: str | None, count: int = 4) -> _Group:
    """A process on a machine with GPUs, in a group of NCCL's."""
    group = _Group()
    answers: dict[str, Any] = {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": current,
        "device_count": count,
    }
    for name, answer in answers.items():
        patch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    patch.setattr(groups, "default_group", lambda: group)
    patch.setattr(dist, "is_initialized", lambda: True)
    patch.setattr(dist, "get_backend", lambda *_: "nccl")
    patch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        patch.setenv("LOCAL_RANK", local_rank)
    return group


def test_parameters_live_on_the_device_that_the_group_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 0, "1").bound_device_id = torch.device("cuda", 3)
    assert groups.default_device() == torch.device("cuda", 3)


@pytest.mark.parametrize(("current", "bound"), [(1, 3), (0, 2), (2, 2)])
def test_parameters_live_where_nccl2_is_bound_if_the_program_may_have_said_so(
    monkeypatch: pytest.MonkeyPatch, current: int, bound: int
) -> None:
    group = _machine(monkeypatch, current, "2")
    group.implementation, group.bound_device_id = "nccl2", torch.device("cuda", bound)
    assert groups.default_device() == torch.device("cuda", bound)


@pytest.mark.parametrize("implementation", ["nccl2", "nccl-lazy"])
@pytest.mark.parametrize("local_rank", ["2", "6", None])
def test_a_device_set_by_the_program_beside_one_that_torch_has_taken_is_an_error(
    monkeypatch: pytest.MonkeyPatch, implementation: str, local_rank: str | None
) -> None:
    """Those backends bind themselves to the device of the process's number, where nobody names one."""
    group = _machine(monkeypatch, 1, local_rank)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 6)
    group.implementation, group.bound_device_id = implementation, torch.device("cuda", 2)
    with pytest.raises(UsageError, match=r"bound to cuda:2.*set device 1.*device_id=torch.device\('cuda', 1\)"):
        groups.default_device()


@pytest.mark.parametrize(
    ("current", "local_rank", "count", "expected"),
    [
        (0, "2", 4, 2),  # nobody has set a device
        (1, "2", 4, 1),  # the program has
        (0, "2", 1, 0),  # each process sees one device only
        (0, None, 4, 0),
    ],
)
def test_ranks_of_a_host_live_on_devices_of_their_own(
    monkeypatch: pytest.MonkeyPatch, current: int, local_rank: str | None, count: int, expected: int
) -> None:
    _machine(monkeypatch, current, local_rank, count)
    assert groups.default_device() == torch.device("cuda", expected)


def test_parameters_live_on_the_host_where_the_group_is_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 0, "1")
    monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
    assert groups.default_device() == torch.device("cpu")


def _num_sockets() -> int:
    found = 0
    for place in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own
            found += str(place.readlink()).startswith("socket:")
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are not told here")
@on_ranks(4)
def test_ranks_are_connected_on_demand_where_they_talk_to_a_few_others() -> None:
    """A seam: torch makes such groups while a variable of the environment says so."""
    before = _num_sockets()
    with torch_groups.connecting_on_demand():
        group = dist.new_group(backend="gloo")
    made = _num_sockets()
    dist.barrier()  # before a peer connects to this rank
    assert made - before <= 1 and "TORCH_GLOO_LAZY_INIT" not in os.environ
    right, left = (dist.get_rank() + 1) % 4, (dist.get_rank() - 1) % 4
    room = torch.zeros(1)
    works = [group.recv([room], left, 5), group.send([torch.full((1,), float(dist.get_rank()))], right, 5)]
    for work in works:
        work.wait()
    assert room == left and _num_sockets() - made <= 4
    dist.barrier()
    eager = dist.new_group(backend="gloo")
    assert _num_sockets() - made > 3, eager
