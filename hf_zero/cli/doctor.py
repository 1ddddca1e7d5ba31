"""`hf-zero doctor`: what this machine has for training, what is missing, and how ranks would exchange here."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hf_zero import __version__
from hf_zero.cli.options import at_least
from hf_zero.errors import ZeroError

_OPTIONAL = {
    "peft": "adapters",
    "trl": "SFT, DPO and GRPO trainers",
    "tokenizers": "recipes on a vocabulary of their own",
    "matplotlib": "plots of recipes",
}
# The newest releases that the tests have been run with, see `.ci/versions newest`; the README tells of them, too.
TESTED = {
    "torch": "2.15",
    "transformers": "5.24",
    "accelerate": "1.15",
    "datasets": "5.2",
    "safetensors": "0.8",
    "peft": "0.21",
    "trl": "1.16",
}
_NAMES = ("HF_ZERO_CONFIG", "HF_ZERO_COLLECTIVES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")


# With "1", kernels of two communicators wait for each other, where ranks launch them in different orders.
_ONE_AFTER_THE_OTHER = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT")


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        state: "ok", "note" (nothing is wrong, but it is good to know), or "bad".
        what: has been looked at.
        said: what was found, and what to do about it.
    """

    state: str
    what: str
    said: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--num-processes",
        type=at_least(0),
        metavar="N",
        help="ranks to try (default: 2; 0: none; with --gpu: one a device)",
    )
    gpu = parser.add_argument_group("the first run on GPUs")
    gpu.add_argument(
        "--gpu", action="store_true", help="try everything on this machine's GPUs, and write a page about it"
    )
    gpu.add_argument("--write", type=Path, default=Path("hf-zero-gpu.md"), metavar="FILE", help="(hf-zero-gpu.md)")
    gpu.add_argument(
        "--minutes", type=float, default=10.0, help="for all parts together (10; more, and each may take longer)"
    )
    gpu.add_argument("--model", help="a named size, or a folder with a config (default: 1B, or what fits)")
    gpu.add_argument(
        "--parts", metavar="A,B", help="of parity, resume, killed, communicators, overlap, host_time, peak, ..."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found.

    Returns:
        1 if training could not run here, or with --gpu if anything is wrong or failed, else 0.
    """
    if args.gpu:
        return _first_run(args)
    findings = []
    for finding in _all(args.num_processes):
        findings.append(finding)
        print(f"{finding.state:<4}  {finding.what:<14} {finding.said}", flush=True)
    bad = sum(finding.state == "bad" for finding in findings)
    print(f"\n{bad} {'problem' if bad == 1 else 'problems'} to mend first." if bad else "\nReady to train.")
    return int(bad > 0)


def _first_run(args: argparse.Namespace) -> int:
    from hf_zero.bench.gpu import run as first_run

    parts = args.parts.split(",") if args.parts else first_run.PARTS
    plan = first_run.planned(args.num_processes, args.model, args.minutes, parts)
    page = first_run.run(
        plan,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        so_far=lambda page: args.write.write_text(page.text()),
    )
    print(page.text())
    print(f"Written to {args.write}.")
    return int(not page.is_right)


def _all(num_processes: int | None) -> Iterator[Finding]:
    yield Finding("ok", "hf_zero", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield from packages(importlib.metadata.requires("hf-zero") or [])
    yield from _devices()
    yield from _host()
    yield from _environment()
    yield from _ranks(num_processes)


def packages(requirements: list[str]) -> Iterator[Finding]:
    """What is installed of the packages that are needed, and of some that are useful.

    Args:
        requirements: as package metadata has them; those of extras are left out.
    """
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, wanted = requirement.name, str(requirement.specifier) or "any version"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("bad", name, f"is missing: pip install '{requirement}'")
            continue
        if is_newer_than_tested(name, version):
            yield Finding("note", name, f"{version} is newer than what was tested ({TESTED[name]}): it may do")
        elif requirement.specifier.contains(version, prereleases=True):
            yield Finding("ok", name, f"{version} (supported: {wanted})")
        else:
            yield Finding("bad", name, f"{version} is not supported: pip install '{requirement}'")
    for name, use in _OPTIONAL.items():
        try:
            yield Finding("ok", name, f"{importlib.metadata.version(name)} ({use})")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("note", name, f"is not installed; needed for {use} only")


def is_newer_than_tested(name: str, version: str) -> bool:
    """Whether a release of a package is beyond the newest that the tests have been run with."""
    from packaging.version import Version

    return name in TESTED and Version(version).release[:2] > Version(TESTED[name]).release


def _devices() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from hf_zero.bench import devices

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("bad", "gloo", "this build of torch cannot exchange between processes: install another one")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        yield Finding("ok", "devices", "no GPU: ranks train on the CPU, over gloo")
        return
    kind = accelerator.type
    for device in (torch.device(kind, index) for index in range(torch.accelerator.device_count())):
        size = devices.memory_of(device)[1] / 2**30
        yield Finding("ok", str(device), devices.name_of(device) + (f", {size:.0f} GiB" if size else ""))
    library, version = devices.transport_of(kind)
    if library in ("", "gloo"):
        yield Finding(
            "note", "exchanges", f"torch knows none between {kind} devices: ranks train on the CPU, over gloo"
        )
    elif dist.is_backend_available(library):
        yield Finding("ok", library, version or f"exchanges what is on {kind}")
    else:
        yield Finding(
            "bad", library, f"this build of torch has {kind} devices, but not {library}, by which they exchange"
        )


def _host() -> Iterator[Finding]:
    from hf_zero.comm.host import memory as host_memory

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("ok", "host", f"{cores} cores, {total:.0f} GiB of memory")
    if host_memory.is_supported():
        yield Finding("ok", "shared memory", "anonymous memory can be shared between the ranks of a host")
    else:
        yield Finding("note", "shared memory", "cannot be had (it needs Linux on x86-64): ranks exchange pairwise")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        said = "the host's own name does not resolve, so gloo may find no interface: export GLOO_SOCKET_IFNAME=lo (one host)"
        yield Finding("note", "network", f"GLOO_SOCKET_IFNAME={interface}" if interface else said)


def _environment() -> Iterator[Finding]:
    for name in _NAMES:
        if name in os.environ:
            yield Finding("note", name, os.environ[name])
    for name in _ONE_AFTER_THE_OTHER:
        if os.environ.get(name) == "1":
            why = "gathers and reductions use a communicator each, which may then wait for each other for ever"
            yield Finding("note", name, f"1: {why}; unset it, unless something else needs it")


def _ranks(num_processes: int | None) -> Iterator[Finding]:
    """Whether ranks can exchange: as many as are asked for, else two; where there are devices, not more than these."""
    from hf_zero.bench import devices
    from hf_zero.bench.comm import run as comm

    wanted, count = 2 if num_processes is None else num_processes, devices.count()
    if wanted < 2:
        return
    if count == 1 and num_processes is None:
        yield Finding("ok", "ranks", "one device: one rank trains on it, and exchanges with nobody")
        return
    if 0 < count < wanted:
        there = f"{count} {'device is' if count == 1 else 'devices are'} here"
        yield Finding("bad", "ranks", f"{wanted} asked for, but {there}: two ranks cannot exchange on one device")
        return
    try:
        found = comm.run(wanted, [1.0], 3)
    except ZeroError as error:
        last = str(error).strip().splitlines()[-1]
        yield Finding("bad", "ranks", f"{wanted} processes could not exchange: {last}")
        return
    times = [f"{name} {1e3 * sum(timing[1:]):.1f}" for name, (timing,) in found["timings"].items()]
    reason = found["reason"].removeprefix("auto: ")
    said = f"auto takes {found['chosen']} ({reason}; ms for 1 MiB: {', '.join(times)})"
    yield Finding("ok", "ranks", f"{found['ranks']} exchange; collectives: {said}")
