"""What was free at the peak: of the host, shared by its ranks, and of a device."""

from __future__ import annotations

import mmap
import types
from pathlib import Path

import pytest
import torch

from hf_zero.host import room
from hf_zero.host.room import room_at_peak

_KIB, _CPU = 2**10, torch.device("cpu")
_STATUS = "Name:\tpython\nVmPeak:\t  9000 kB\nVmHWM:\t     700 kB\nVmRSS:\t     600 kB\nThreads:\t1\n"


@pytest.mark.parametrize(("num_sharing", "expected"), [(1, 900), (2, 400), (10, 0), (20, 0)])
def test_ranks_share_the_host_and_each_had_more_at_its_peak(
    num_sharing: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text(_STATUS)
    monkeypatch.setattr(room, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(room, "available_bytes", lambda: 1000 * _KIB)
    assert room_at_peak(_CPU, num_sharing) == expected * _KIB


@pytest.mark.parametrize("status", ["", "VmHWM:\t700 kB\n", "VmHWM:\tmuch kB\nVmRSS:\t1 kB\n", None])
def test_a_system_that_does_not_tell_is_not_known(
    status: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status is not None:
        (tmp_path / "status").write_text(status)
    monkeypatch.setattr(room, "_STATUS", tmp_path / "status")
    assert room_at_peak(_CPU, 1) is None
    (tmp_path / "status").write_text(_STATUS)
    assert room_at_peak(_CPU, 1) is not None
    monkeypatch.setattr(room, "available_bytes", lambda: None)
    assert room_at_peak(_CPU, 1) is None


def test_this_process_has_a_peak() -> None:
    resident = room._resident()
    if resident is not None:
        peak, now = resident
        block = mmap.mmap(-1, 2**25)  # what torch allocates may have been resident before
        block.write(bytes([1]) * len(block))
        grown = room._resident()
        assert grown is not None and grown[1] >= now + len(block) // 2 and grown[0] >= max(peak, grown[1])


def test_a_devices_allocator_keeps_memory_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(
        mem_get_info=lambda device: (1000, 5000),
        memory_reserved=lambda device: 3000,
        max_memory_allocated=lambda device: 2500,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device("cuda", 0)
    assert room_at_peak(device, 1) == 1500
    assert room_at_peak(device, 2) == 1000
    module.max_memory_allocated = lambda device: 9000
    assert room_at_peak(device, 1) == 0
    del module.mem_get_info
    assert room_at_peak(device, 1) is None
