"""The device "sim" in Python: built with the machine's compiler, and known to torch as an accelerator."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load


def register() -> Any:
    """Build the device and make it torch's accelerator, once in a process; gives what `device.cpp` offers."""
    torch.utils.rename_privateuse1_backend("sim")
    source = str(Path(__file__).with_name("device.cpp"))
    built = load("hf_zero_simulated_device", [source], extra_cflags=["-O1"])
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.synchronize = module.manual_seed_all = lambda *_: None
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.mem_get_info = lambda *_: (2**30, 2**30)
    module.set_sync_debug_mode = lambda mode: built.forbid_syncs(mode == "error")
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return built
