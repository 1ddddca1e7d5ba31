"""The host's memory: how much of it this process may still take, and rooms in it that a device copies to and from.

[Note: pinned] A device copies beside its computation only to and from pages that are locked. Torch rounds each pinned tensor up
to a power of two, so small ones lie together in slabs, whose sizes are such powers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.errors import OffloadError

_ALIGNMENT = 64
_SLAB_BYTES = 2**30
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # what the kernel says where there is none


def available_bytes() -> int | None:
    """Bytes that may still be taken: of the machine's, and of the control groups' that this process is in. None: unknown."""
    return min(filter(None, (_of_machine(), *_of_groups())), default=None)


def _of_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_groups() -> Iterator[int]:
    """What is left in each control group around this process; files that are cached can be dropped, and count as free."""
    for folder, limit, used in _groups():
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / limit).read_text())  # "max": no number
            if most < _NO_LIMIT:
                yield max(1, most - int((folder / used).read_text()) + _cached(folder))


def _groups() -> Iterator[tuple[Path, str, str]]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, kinds, name = line.split(":", 2)
            is_second = number == "0" and not kinds
            if not is_second and "memory" not in kinds.split(","):
                continue
            root = _CGROUPS if is_second else _CGROUPS / "memory"
            files = (
                ("memory.max", "memory.current") if is_second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            )
            inner = root / name.lstrip("/")
            for folder in dict.fromkeys((inner, *inner.parents)):  # inside a container, the root is its own group
                if folder.is_relative_to(root):
                    yield folder, *files


def _cached(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def rooms(wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], is_pinned: bool) -> list[Tensor]:
    """Tensors in the host's memory, see [Note: pinned].

    Args:
        wanted: shapes and dtypes.
        is_pinned: lock their pages.

    Raises:
        OffloadError: pages cannot be locked, or there are too few.
    """
    sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in wanted]
    made: dict[int, Tensor] = {}
    rest = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    while rest:
        slab = _slab(_slab_bytes([sizes[i] for i in rest]), is_pinned)
        storage, used = slab.untyped_storage(), 0
        for i in list(rest):
            if used + sizes[i] <= slab.numel():
                shape, dtype = wanted[i]
                # A storage of its own: who else holds it can be counted.
                alias = torch_compat.storage_alias(storage, used, math.prod(shape) * dtype.itemsize)
                made[i] = torch_compat.tensor_on(alias, 0, shape, dtype)
                used += sizes[i]
                rest.remove(i)
    return [made[i] for i in range(len(sizes))]


def _slab_bytes(sizes: Sequence[int]) -> int:
    """Of the next slab: as large as most, as the largest tensor, or as all of them, if that is less."""
    return _power_of_two(max(sizes[0], min(sum(sizes), _SLAB_BYTES)))


def _power_of_two(num_bytes: int) -> int:
    return int(2 ** math.ceil(math.log2(max(num_bytes, _ALIGNMENT))))


def _slab(num_bytes: int, is_pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned, device="cpu")
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        advice = (
            "; raise the limit of locked memory (`ulimit -l unlimited`), or set offload.pin: false" if is_pinned else ""
        )
        raise OffloadError(
            f"host memory of {num_bytes:,} bytes cannot be {'locked' if is_pinned else 'had'}: {reason}{advice}"
        ) from error
