"""How much memory a rank could have taken beside what it had at its peak: of its device, or of its part of the host's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from hf_zero.host.memory import available_bytes

_STATUS = Path("/proc/self/status")


def room_at_peak(device: torch.device, num_sharing: int) -> int | None:
    """Bytes that were still free when this process held most, whatever it held them for; None: unknown.

    A device's allocator counts its peak, and the system that of a process. What others hold is taken as it is now.

    Args:
        device: where parameters live.
        num_sharing: ranks that share its memory, each of which may take as much.
    """
    return _of_host(num_sharing) if device.type == "cpu" else _of_device(device, num_sharing)


def _of_host(num_sharing: int) -> int | None:
    available, resident = available_bytes(), _resident()
    if available is None or resident is None:
        return None
    peak, now = resident
    return max(0, available // num_sharing - (peak - now))


def free_bytes(device: torch.device, num_sharing: int) -> int:
    """Memory that is free now for this rank; 0 if nobody knows.

    Args:
        device: of the rank.
        num_sharing: processes that share the host's memory.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return (available_bytes() or 0) // num_sharing


def _resident() -> tuple[int, int] | None:
    """Bytes of this process in memory: the most at a time so far, and now."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        lines = [line.split() for line in _STATUS.read_text().splitlines() if line.startswith("Vm")]
        sizes = {name: int(number) * 1024 for name, number, *_ in lines}
        return max(sizes["VmHWM:"], sizes["VmRSS:"]), sizes["VmRSS:"]
    return None


def _of_device(device: torch.device, num_sharing: int) -> int | None:
    module: Any = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("mem_get_info", "memory_reserved", "max_memory_allocated")):
        return None
    free = int(module.mem_get_info(device)[0])  # what the allocator keeps for later is not in it
    return max(0, free // num_sharing + int(module.memory_reserved(device)) - int(module.max_memory_allocated(device)))
