"""The first run on a machine's accelerators: all parts one after the other, each in its own time, and the page about them."""

from __future__ import annotations

import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_zero import __version__
from hf_zero.bench import devices
from hf_zero.bench.gpu import speed
from hf_zero.bench.gpu.page import Page, Section
from hf_zero.bench.processes import BenchError, in_a_line, run_ranks
from hf_zero.bench.step.run import StepBenchmark
from hf_zero.errors import UsageError
from hf_zero.plan.models import SIZES, config_of

_WORKER = "hf_zero.bench.gpu.worker"
_SIZES = ("llama-1b", "llama-125m", "llama-34m", "llama-10m", "llama-thin-8")  # the first that fits is measured
_USUAL_MINUTES = 10.0  # more let each part take as much longer
_BYTES = 24  # a parameter, whole: weights, gradients and Adam's states in float32, copies in bfloat16, activations
_SHARE = 0.7  # of a device's memory
# NCCL refuses two ranks on one device unless each claims to be on a host of its own; they talk over sockets then.
ON_ONE_DEVICE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}
_ENVIRONMENT = ("NCCL_", "CUDA_", "PYTORCH_", "TORCH_", "HIP_", "ROCR_", "ZE_")


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        title: on the page.
        limit_s: that it may take, in the usual minutes for all of them.
        needs_two: two ranks at least; on a single device they share it. Else what needs one rank for each device.
    """

    title: str
    limit_s: float
    needs_two: bool = False


PARTS = {
    "parity": Part("parity of every stage with one process", 120, needs_two=True),
    "resume": Part("resume from a checkpoint", 90, needs_two=True),
    "killed": Part("a rank that is killed", 90, needs_two=True),
    "communicators": Part("memory of communicators", 60),
    "overlap": Part("exchanges beside the computation", 120),
    "host_time": Part("the host's time a layer", 150),
    "peak": Part("peak beside the plan", 150),
    "offload": Part("offload to the host", 150),
    "steps": Part("steps beside DDP and FSDP2", 300),
}


@dataclass(frozen=True)
class FirstRun:
    """What is to be run.

    Attributes:
        num_ranks: processes, each on a device of its own.
        model: a named size, or a folder with a config.
        minutes: for all parts together.
        parts: names in `PARTS`, in order.
        batch_size: sequences a rank.
        seq_len: tokens of a sequence.
        steps: timed steps of an engine.
    """

    num_ranks: int
    model: str
    minutes: float = _USUAL_MINUTES
    parts: tuple[str, ...] = tuple(PARTS)
    batch_size: int = 2
    seq_len: int = 1024
    steps: int = 10


def planned(
    num_ranks: int | None, model: str | None, minutes: float, parts: Iterable[str], seq_len: int | None = None
) -> FirstRun:
    """What can be run on this machine.

    Raises:
        UsageError: there is no device, or fewer than ranks, or a launcher has started this process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("doctor --gpu starts its own processes: run it without a launcher")
    found = devices.count()
    if not found:
        raise UsageError(
            "no GPU is to be seen here: torch finds no accelerator that ranks can exchange on (a CPU build of torch, or "
            "an empty CUDA_VISIBLE_DEVICES?); `hf-zero doctor` looks at the rest"
        )
    count = found if num_ranks is None else num_ranks
    if not 1 <= count <= found:
        here = f"{found} {'device is' if found == 1 else 'devices are'} here"
        raise UsageError(
            f"--num-processes {count}, but {here}: two processes cannot exchange on one device, so give 1 to {found}"
        )
    unknown = [each for each in parts if each not in PARTS]
    if unknown:
        raise UsageError(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    chosen = model or _fitting(devices.memory_of(torch.device(devices.kind(), 0))[1])
    longest = int(getattr(config_of(chosen), "max_position_embeddings", 1024))
    return FirstRun(count, chosen, minutes, tuple(parts), seq_len=min(seq_len or 1024, longest))


def run(
    plan: FirstRun,
    progress: Callable[[str], None] = lambda line: None,
    so_far: Callable[[Page], object] = lambda page: None,
) -> Page:
    """Run all parts; one that fails is told on the page, and the rest goes on.

    Args:
        plan: which parts, on how many ranks.
        progress: gets a line after each part.
        so_far: gets the page after each part, so that it can be kept before the end.
    """
    kind = devices.kind()
    name = devices.name_of(torch.device(kind, 0))
    page = Page(f"hf_zero on {plan.num_ranks} x {name}", list(_machine(plan, kind)))
    end = time.monotonic() + 60 * plan.minutes
    for part in plan.parts:
        begin = time.monotonic()
        limit_s = min(PARTS[part].limit_s * max(plan.minutes / _USUAL_MINUTES, 1), end - begin)
        if limit_s <= 1:
            section = Section("failed", f"not run: the {plan.minutes:g} minutes were over (--minutes gives more)")
        else:
            section = _run(part, plan, limit_s)
        seconds = time.monotonic() - begin
        page.parts.append((PARTS[part].title, seconds, section))
        progress(f"{PARTS[part].title}: {section.verdict}, {seconds:.0f} s: {section.said}")
        so_far(page)
    return page


def _run(part: str, plan: FirstRun, limit_s: float) -> Section:
    try:
        if part in ("steps", "host_time"):
            of_steps = part == "steps"
            benchmark = StepBenchmark(
                plan.model,
                plan.num_ranks,
                batch_size=plan.batch_size if of_steps else 1,
                seq_len=plan.seq_len if of_steps else 16,
                steps=plan.steps,
                rounds=1,
                dtype="bfloat16" if of_steps else "float32",
                checkpointing=False,
                engines=(),
            )
            measured = speed.steps if of_steps else speed.host_time
            return measured(benchmark, time.monotonic() + limit_s)
        return _on_ranks(part, plan, limit_s)
    except BenchError as error:
        return Section("failed", in_a_line(error), output=str(error).partition("\n")[2])


def _on_ranks(part: str, plan: FirstRun, limit_s: float) -> Section:
    needs_two = PARTS[part].needs_two
    shares = needs_two and plan.num_ranks == 1
    count = 2 if shares else plan.num_ranks
    with tempfile.TemporaryDirectory(prefix="hf_zero_gpu_") as folder:
        given: dict[str, Any] = {
            "part": part,
            "model": plan.model,
            "batch_size": plan.batch_size,
            "seq_len": plan.seq_len,
            "folder": folder,
        }
        found = run_ranks(
            _WORKER,
            count,
            given,
            Path(folder),
            limit_s,
            partial(_on_one_device, shares),
            lambda rank: part == "killed" and rank == count - 1,
        )
    section = Section.of(found[0])
    if not shares:
        return section
    return Section.of(found[0] | {"said": f"{section.said} (two ranks on the one device, over sockets)"})


def _on_one_device(shares: bool, rank: int) -> dict[str, str]:
    return ON_ONE_DEVICE | {"LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"} if shares else {}


def _machine(plan: FirstRun, kind: str) -> Iterable[tuple[str, str]]:
    """What is known of this machine, for whoever reads the page elsewhere."""
    yield "written by", f"`hf-zero doctor --gpu`, hf_zero {__version__}, {datetime.date.today().isoformat()}"
    backend, version = devices.transport_of(kind)
    built = torch.version.cuda or getattr(torch.version, "hip", None) or "-"
    yield "torch", f"{torch.__version__}, CUDA or HIP {built}, {backend} {version}".rstrip()
    for index in range(plan.num_ranks):
        device = torch.device(kind, index)
        yield str(device), f"{devices.name_of(device)}, {devices.memory_of(device)[1] / 2**30:.0f} GiB"
    yield "host", f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.platform()}"
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)]
    yield "environment", ", ".join(told) or "nothing about devices is set"


def _fitting(num_bytes: int) -> str:
    """The largest model whose states one device holds whole, as DDP does; the smallest where devices do not tell."""
    for name in _SIZES:
        size = SIZES[name]
        width, inner, layers = size["hidden_size"], size["intermediate_size"], size["num_hidden_layers"]
        numel = layers * (4 * width**2 + 3 * width * inner) + 2 * size["vocab_size"] * width
        if _BYTES * numel <= _SHARE * num_bytes:
            return name
    return _SIZES[-1]
