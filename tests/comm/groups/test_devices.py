"""What exchanges and steps do for devices that are neither the CPU nor NVIDIA's: by what torch and their libraries can."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils import _foreach_utils

from hf_zero import torch_compat
from hf_zero.comm.groups import select, torch_groups
from hf_zero.comm.groups.devices import device_number
from hf_zero.comm.groups.process_groups import cells_of
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.ledger import Ledger
from hf_zero.errors import ConfigError
from tests.ranks import on_ranks


@pytest.mark.parametrize("end_raises", [False, True])
def test_what_is_collected_ends_once_and_its_first_error_is_told(end_raises: bool) -> None:
    told: list[object] = []

    def end(device: torch.device) -> str:
        told.append(("end", device.type))
        if end_raises:
            raise RuntimeError("of the end")
        return "work"

    group: Any = types.SimpleNamespace(
        _start_coalescing=lambda device: told.append(("start", device.type)), _end_coalescing=end
    )
    if not end_raises:
        with torch_groups.coalesced(group, torch.device("cpu")) as works:
            told.append("collective")
        assert works == ["work"]
        assert told == [("start", "cpu"), "collective", ("end", "cpu")]
    told.clear()
    with pytest.raises(RuntimeError, match="of a start"), torch_groups.coalesced(group, torch.device("cpu")):
        raise RuntimeError("of a start")
    assert told == [("start", "cpu"), ("end", "cpu")]


@on_ranks(2)
def test_a_backend_that_can_gets_one_launch_of_what_is_reduced_together() -> None:
    ranks, launches = [rank for (rank,) in cells_of(None, 1)[0]], []
    made = make_collectives("native", ranks, torch.device("cpu"), 20.0, Ledger())
    assert not made.coalesces

    @contextlib.contextmanager
    def coalesced(group: dist.ProcessGroup, device: torch.device) -> Iterator[list[Any]]:
        works: list[Any] = []
        yield works
        launches.append(group)

    made.coalesces, made.backend = True, "xccl"
    with mock.patch.object(torch_groups, "coalesced", coalesced):
        made.all_reduce([torch.ones(3), torch.ones(5), torch.ones(2)], "unit").wait()
    assert launches == [made.group]


@on_ranks(2)
def test_parameters_on_a_device_under_a_group_of_gloo_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"the parameters are on cuda, but the program's group is gloo's.*cuda:nccl"):
        make_collectives("auto", range(2), torch.device("cuda", 0), 20.0, Ledger())


def test_steps_are_fused_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_foreach_utils, "_get_fused_kernels_supported_devices", lambda: ["xpu", "privateuseone"])
    fused = [torch_compat.can_be_fused_on(torch.device(each)) for each in ("xpu", "privateuseone", "cuda")]
    assert fused == [True, True, False]


def test_two_ranks_on_one_device_are_an_error_before_anything_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = types.SimpleNamespace(
        get_device_properties=lambda device: types.SimpleNamespace(uuid=f"card {device.index}")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: cards)
    first, second = (device_number(torch.device("cuda", index)) for index in (0, 1))
    assert first == device_number(torch.device("cuda", 0)) != second
    axis: Any = types.SimpleNamespace(ranks=(4, 6), rank=1, device=torch.device("cuda", 0))
    select._refuse_shared_devices(axis, [first, second])
    with pytest.raises(ConfigError, match=r"ranks 4 and 6 are both on one device of a host.*rank 6 is on cuda:0"):
        select._refuse_shared_devices(axis, [first, first])
    monkeypatch.setenv("NCCL_HOSTID", "a host of its own")  # by which ranks share a device all the same
    assert device_number(torch.device("cuda", 0)) != first


def test_devices_without_a_name_are_told_apart_by_what_a_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    monkeypatch.setenv("ZE_VISIBLE_DEVICES", "0")
    found = device_number(torch.device("xpu", 0))
    assert found == device_number(torch.device("xpu", 0)) != device_number(torch.device("xpu", 1))
    monkeypatch.setenv("ZE_VISIBLE_DEVICES", "1")
    assert device_number(torch.device("xpu", 0)) != found
    assert device_number(torch.device("cpu")) == 0
