"""Which exchanges had the computation beside them: from a trace of the device's kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_zero.bench import devices
from hf_zero.bench.gpu.page import Section
from hf_zero.bench.gpu.training import step, under

_KINDS = {"allgather": "gather", "all_gather": "gather", "reducescatter": "reduction", "reduce_scatter": "reduction"}
_OF_LIBRARIES = ("nccl", "rccl", "xccl", "oneccl", "hccl")
_COVERED = 0.5  # of an exchange, from which on the computation is said to be beside it
_ENOUGH = 0.8  # of the exchanges
_WARM_UP, _TRACED = 3, 2


class Kernel(NamedTuple):
    """What ran on a device.

    Attributes:
        name: of the kernel.
        start: microseconds.
        end: microseconds.
    """

    name: str
    start: float
    end: float


class Covered(NamedTuple):
    """The exchanges of one kind.

    Attributes:
        number: of them.
        beside: of them that had the computation beside them for half of their time, or more.
        microseconds: of all.
        bare: of these, those in which nothing was computed.
    """

    number: int
    beside: int
    microseconds: float
    bare: float


def kernels_of(trace: Path) -> list[Kernel]:
    """The kernels in a trace that torch's profiler has exported."""
    events = json.loads(trace.read_text())["traceEvents"]
    chosen = [each for each in events if each.get("cat") == "kernel" and "dur" in each]
    return [Kernel(each["name"], float(each["ts"]), float(each["ts"]) + float(each["dur"])) for each in chosen]


def coverage(kernels: Iterable[Kernel]) -> dict[str, Covered]:
    """The exchanges by kind: gathers, reductions, others."""
    exchanges: dict[str, list[Kernel]] = {}
    computing = []
    for kernel in kernels:
        kind = _kind_of(kernel.name)
        if kind is None:
            computing.append((kernel.start, kernel.end))
        else:
            exchanges.setdefault(kind, []).append(kernel)
    busy, found = _merged(computing), {}
    for kind, chosen in sorted(exchanges.items()):
        bare = [(each.end - each.start) - _within(busy, each.start, each.end) for each in chosen]
        lengths = [each.end - each.start for each in chosen]
        beside = sum(alone <= (1 - _COVERED) * length for alone, length in zip(bare, lengths, strict=True))
        found[kind] = Covered(len(chosen), beside, sum(lengths), sum(bare))
    return found


def overlap(device: torch.device, given: dict[str, Any]) -> Section:
    """Steps of stage 3 under torch's profiler."""
    if dist.get_world_size() == 1:
        return Section("not here", "one rank gathers from nobody")
    trained, trace = under("zero3", device, given), Path(given["folder"], f"trace{dist.get_rank()}.json")
    for _ in range(_WARM_UP):
        step(trained, device, given)
    devices.synchronize(device)
    kinds = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(_TRACED):
            step(trained, device, given)
        devices.synchronize(device)
    profile.export_chrome_trace(str(trace))
    return told(kernels_of(trace))


def told(kernels: Sequence[Kernel]) -> Section:
    """What a trace of `_TRACED` steps shows."""
    if not kernels:
        return Section("not here", "torch's profiler shows no kernels of this device")
    found = coverage(kernels)
    if not found.keys() - {"other"}:
        return Section("not here", "one rank gathers from nobody")
    rows: list[tuple[str, ...]] = [("kind", "a step", "with compute beside", "ms a step", "ms with nothing beside")]
    for kind, each in found.items():
        times = (f"{value / _TRACED / 1e3:.2f}" for value in (each.microseconds, each.bare))
        rows.append((kind, f"{each.number / _TRACED:g}", f"{each.beside} of {each.number}", *times))
    first, last = min(each.start for each in kernels), max(each.end for each in kernels)
    bare = sum(each.bare for each in found.values())
    gathers = found.get("gather", Covered(0, 0, 0, 0))
    is_enough = gathers.beside >= _ENOUGH * gathers.number
    said = (
        f"{gathers.beside} of {gathers.number} gathers had compute beside them; nothing was computed beside exchanges for "
        f"{100 * bare / (last - first):.0f}% of the time"
    )
    to_do = [
        "Larger batches give each gather more compute to hide behind, and so does gradient accumulation in stages 1 and 2.",
        "prefetch_bytes of two or three units gathers further ahead, and takes their memory.",
        "reshard_after_forward: false, or a size, saves second gathers of a step, and takes the memory of what is kept.",
        "Between hosts: replicate, or wire: {secondary: 8}, keep gathers within a host.",
    ]
    return Section("right" if is_enough else "look", said, rows, () if is_enough else to_do)


def _kind_of(name: str) -> str | None:
    """The kind of exchange that a kernel belongs to; None: it computes."""
    lower = name.lower()
    if not any(word in lower for word in _OF_LIBRARIES):
        return None
    return next((kind for word, kind in _KINDS.items() if word in lower), "other")


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time in order, those that overlap as one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _within(spans: Iterable[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in spans)
