"""The device "sim" in Python: built with the machine's compiler, and known to torch as an accelerator.

`python -m tests.gpu.late.device` builds it, which takes a minute of one core; once, as long as its sources stay as they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import sys
import types
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import get_default_build_root, load

_HERE = Path(__file__).parent
_IS_BUILT = "is built"  # a file that says so of its folder
_BYTES, _COMMUNICATOR_BYTES = 2**31, 2**25  # of a device, and what each communicator is taken to need
_COUNTS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
)


def _name_and_folder() -> tuple[str, Path]:
    """Of what its sources are built into, under a name of their own for each content of theirs."""
    content = b"".join(each.read_bytes() for each in sorted(_HERE.glob("*.[ch]*")))
    name = f"hf_zero_late_{hashlib.sha256(content + torch.__version__.encode()).hexdigest()[:12]}"
    return name, Path(get_default_build_root(), name)


def is_built() -> bool:
    """Whether somebody has built it on this machine as it is now."""
    return (_name_and_folder()[1] / _IS_BUILT).exists()


def build() -> Any:
    """The device's library, built where it is not yet: also by another checkout of the same sources.

    Torch's own lock is a file, which a build that was killed leaves behind, and all later ones would wait for ever.
    """
    sources = sorted(_HERE.glob("*.cpp"))
    name, folder = _name_and_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "builder").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_built():
            return ExtensionFileLoader(name, str(folder / f"{name}.so")).load_module()
        (folder / "lock").unlink(missing_ok=True)
        flags = ["-O1", "-g0", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
        built = load(name, list(map(str, sources)), extra_cflags=flags, build_directory=str(folder))
        (folder / _IS_BUILT).touch()
        return built


def register() -> Any:
    """Build the device and make it torch's accelerator, once in a process; gives what `device.cpp` offers."""
    torch.utils.rename_privateuse1_backend("sim")
    built = build()
    generator = built.generator()
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: built.num_devices
    module.current_device = built.current_device
    module.set_device = lambda device: built.set_device(_index(device))
    module.synchronize = lambda *_: built.synchronize()
    module.manual_seed_all = generator.manual_seed
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda *_: generator.get_state()
    module.set_rng_state = lambda state, *_: generator.set_state(state)
    module.mem_get_info = lambda device=None: (_free(built, _index(device)), _BYTES)
    module.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="late device", total_memory=_BYTES, uuid=f"late {_index(device)}"
    )
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream or contextlib.nullcontext()
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.set_sync_debug_mode = lambda mode: built.forbid_syncs(mode == "error")
    module.counts = built.counts
    for name in _COUNTS:
        setattr(module, name, lambda device=None, read=getattr(built, name): read(_index(device)))
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def exchanges(store: Any, rank: int, size: int, timeout: Any) -> Any:
        parent = None  # as torch gives it to NCCL's, where the program's group is bound to a device
        if dist.is_initialized() and (bound := dist.group.WORLD.bound_device_id):
            parent = dist.group.WORLD._get_backend(bound)
        return built.Exchanges(dist.ProcessGroupGloo(store, rank, size, timeout), store, rank, size, parent)

    dist.Backend.backend_capability["gloo"].append("sim")  # as it has "cuda"
    dist.Backend.register_backend("late", exchanges, devices=["sim"])
    return built


def _free(built: Any, index: int) -> int:
    taken: int = built.memory_reserved(index) + _COMMUNICATOR_BYTES * built.num_communicators(index)
    return _BYTES - taken


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


if __name__ == "__main__":
    build()
