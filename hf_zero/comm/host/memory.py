"""Memory of other processes on the host: shared with them, or read where it lies. Linux only.

Shared memory is anonymous (`memfd_create`); the others open it through `/proc/<pid>/fd`. It takes no room in `/dev/shm`, has
no name that could be left behind, and is gone with the last process that maps it, however that process ends. A peer's
private memory is read with `process_vm_readv`, at the speed of a copy.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import platform
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_MOST_SPANS = 1024  # a call takes, see IOV_MAX of readv(2)
_PR_SET_PTRACER = 0x59616D61  # of the Yama security module; see prctl(2)


class PeerMemoryError(RuntimeError):
    """Shared memory, or the memory of another process, is not available; the message says why."""


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    spans = ctypes.POINTER(_Span)
    libc.process_vm_readv.argtypes = [ctypes.c_int, spans, ctypes.c_ulong, spans, ctypes.c_ulong, ctypes.c_ulong]
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def is_supported() -> bool:
    """Whether processes on this machine can share memory the way this file does.

    On x86-64, the others see what a process writes in the order in which it was written. Elsewhere that would need fences,
    which Python does not have.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def host_number() -> int:
    """A 62-bit number: the same for all processes that can see each other in `/proc`, different elsewhere."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return int.from_bytes(hashlib.sha256("\n".join(facts).encode()).digest()[:8], "big") >> 2


def let_read(pid: int) -> None:
    """Let process `pid` and its descendants read this one's memory, where the Yama security module would forbid it; 0: nobody.

    Source: PR_SET_PTRACER of prctl(2), which knows one process at a time.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    with suppress(OSError):
        if scope.read_text().strip() == "1":
            _libc().prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def reader_of(own: int, parents: dict[int, int]) -> int | None:
    """Whom to let read, so that every rank of the host may and nobody else: their launcher, or the only peer.

    Args:
        own: this process.
        parents: process of every rank of this host -> its parent.

    Returns:
        A process; None where no single one stands for all peers.
    """
    if len(set(parents.values())) == 1 and parents[own] > 1:  # all processes descend from 1
        return parents[own]
    peers = [pid for pid in parents if pid != own]
    return peers[0] if len(peers) == 1 else None


def read(pid: int, moves: Sequence[tuple[int, int, int]]) -> None:
    """Copy memory of process `pid`, by one call of the system where it takes as much.

    Args:
        pid: the process.
        moves: of each piece the address there, the address here and the number of bytes.

    Raises:
        PeerMemoryError: the process is gone, or may not be read.

    Source: process_vm_readv(2).
    """
    left = [move for move in moves if move[2]]
    while left:
        now = left[:_MOST_SPANS]
        spans = _Span * len(now)
        here = spans(*[(target, num_bytes) for _, target, num_bytes in now])  # type: ignore[misc]
        there = spans(*[(source, num_bytes) for source, _, num_bytes in now])  # type: ignore[misc]
        count = _libc().process_vm_readv(pid, here, len(now), there, len(now), 0)
        if count <= 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            gone = "its process has ended" if code == errno.ESRCH else os.strerror(code)
            raise PeerMemoryError(f"the memory of process {pid} cannot be read: {gone}")
        while left and count >= left[0][2]:
            count -= left.pop(0)[2]
        if count:
            source, target, num_bytes = left[0]
            left[0] = source + count, target + count, num_bytes - count


def create(num_bytes: int) -> tuple[int, mmap.mmap]:
    """Anonymous memory filled with zeros, and a file descriptor for peers to open; close it once they have.

    Raises:
        PeerMemoryError: there is not enough memory, or none of this kind.
    """
    descriptor = -1
    try:
        descriptor = os.memfd_create("hf_zero", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, num_bytes)  # now: without memory, a later write would kill the process
        return descriptor, mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise PeerMemoryError(f"no shared memory of {num_bytes} bytes: {error}") from error


def attach(pid: int, descriptor: int, num_bytes: int, writes: bool) -> mmap.mmap:
    """Map what process `pid` has made with `create`, for reading, or for writing as well.

    Raises:
        PeerMemoryError: it cannot be opened.
    """
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "r+b" if writes else "rb", buffering=0) as file:
            return mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise PeerMemoryError(f"the shared memory of process {pid} cannot be opened: {error}") from error


def as_storage(memory: mmap.mmap) -> torch.UntypedStorage:
    """A storage over mapped memory, which it keeps mapped."""
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
