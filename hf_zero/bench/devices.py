"""The devices that ranks of a benchmark run on: the machine's accelerators, of whatever kind, else its CPUs."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist

_HOST = torch.device("cpu")


def kind() -> str:
    """The kind of device that ranks run on: "cuda", "xpu", or "cpu" where there is none that ranks can exchange on."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    backend = None if found is None else dist.Backend.default_device_backend_map.get(found.type)
    return "cpu" if found is None or backend in (None, "gloo") else found.type


def count() -> int:
    """How many devices of that kind there are; 0 on a machine without any."""
    return 0 if kind() == "cpu" else torch.accelerator.device_count()


def join() -> torch.device:
    """Join the group that the environment describes, if this process has not; returns this rank's device."""
    which = kind()
    device = _HOST if which == "cpu" else torch.device(which, int(os.environ.get("LOCAL_RANK", "0")) % count())
    if device != _HOST:
        torch.accelerator.set_device_index(device.index)
    if not dist.is_initialized():
        backend = dist.Backend.default_device_backend_map[which]
        dist.init_process_group("gloo" if device == _HOST else f"cpu:gloo,{which}:{backend}")
    return device


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued on a device."""
    if device != _HOST:
        torch.accelerator.synchronize(device)


def name_of(device: torch.device) -> str:
    """What its maker calls it."""
    properties = getattr(_module(device), "get_device_properties", None)
    return str(getattr(properties(device), "name", device.type)) if properties else device.type


def transport_of(which: str) -> tuple[str, str]:
    """The library that ranks on a kind of device exchange by, and its version where torch tells; "" where there is none."""
    backend = dist.Backend.default_device_backend_map.get(which, "")
    told = getattr(getattr(torch.get_device_module(which), backend, None), "version", None) if backend else None
    return backend, ".".join(map(str, told())) if told else ""


def memory_of(device: torch.device) -> tuple[int, int]:
    """Free bytes of a device, and all it has; (0, 0) where it does not tell."""
    told = getattr(_module(device), "mem_get_info", None)
    free, total = told(device) if told else (0, 0)
    return int(free), int(total)


def reset_peak(device: torch.device) -> int:
    """Count the peak from now on; returns what is allocated now."""
    module = _module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return 0
    gc.collect()  # what is gone on one rank is gone on all
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def peak_of(device: torch.device) -> int:
    """The most bytes that were allocated at a time; 0 where the device does not count."""
    counted = getattr(_module(device), "max_memory_allocated", None)
    return int(counted(device)) if counted else 0


def reserved_on(device: torch.device) -> int:
    """The bytes that the allocator has taken from the device, with what it holds for later; 0 where it does not count."""
    counted = getattr(_module(device), "max_memory_reserved", None) or getattr(_module(device), "memory_reserved", None)
    return int(counted(device)) if counted else 0


def give_back(device: torch.device) -> None:
    """Let the allocator give back to the device what nobody uses."""
    gc.collect()
    getattr(_module(device), "empty_cache", lambda: None)()


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
