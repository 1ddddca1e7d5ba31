"""Which device a rank is on, told in a number, so that ranks see where two of them are on one."""

from __future__ import annotations

import hashlib
import os

import torch

from hf_zero.comm.host.memory import host_number

_HOST_VARIABLE = "NCCL_HOSTID"  # by which ranks claim to be on hosts of their own, to share a device all the same


def device_number(device: torch.device) -> int:
    """A 62-bit number: the same for processes on one device of one host. 0 on the CPU, which any number of them share.

    By what the device calls itself, or, where it has no such name, by its place among those that this process may see.
    """
    if device.type == "cpu":
        return 0
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    name = getattr(properties(device), "uuid", None) if properties else None
    masks = sorted(f"{name}={value}" for name, value in os.environ.items() if name.endswith("VISIBLE_DEVICES"))
    facts = [device.type, os.environ.get(_HOST_VARIABLE) or str(host_number()), str(name or [device.index, masks])]
    return int.from_bytes(hashlib.sha256("\n".join(facts).encode()).digest()[:8], "big") >> 2
