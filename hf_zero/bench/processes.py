"""Fresh processes for each measurement, one per rank, and what they measure about themselves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_zero.errors import ZeroError

_LIMIT_S = 900.0


class BenchError(ZeroError, RuntimeError):
    """A measurement could not be made."""


def in_a_line(error: BenchError) -> str:
    """What went wrong in processes that `run_ranks` has started: which rank, and the last that it printed."""
    head, _, output = str(error).partition("\n")
    last = output.strip().rpartition("\n")[2]
    return head.rpartition(": ")[2].rstrip(":") + (f": {last}" if last else "")


@dataclass(frozen=True)
class Sample:
    """One measurement on one rank.

    Attributes:
        seconds: from a barrier before to a barrier after.
        extra_bytes: peak of this process's memory, over what it held before.
    """

    seconds: float
    extra_bytes: int


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    return _status_bytes("RssAnon")


def private_bytes(num_ranks: int) -> int:
    """Memory that this process costs the host: anonymous memory, and its part of what the ranks of the host share.

    Pages of a file that is only read do not count: they are in the host's cache, once for all processes.

    Args:
        num_ranks: number of ranks that the shared memory is divided by.
    """
    return _status_bytes("RssAnon") + _status_bytes("RssShmem") // num_ranks


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"this kernel does not tell kinds of memory apart ({name} in /proc/self/status)")


class MemoryPeak:
    """While active, a thread looks at this process's memory every two milliseconds.

    Args:
        held: the memory that it looks at, in bytes.
    """

    def __init__(self, held: Callable[[], int] = anonymous_bytes) -> None:
        self._held = held

    def __enter__(self) -> MemoryPeak:
        self.before = self.peak = self._held()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, self._held())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.peak = max(self.peak, self._held())


def measure(
    work: Callable[[], object], barrier: Callable[[], object], held: Callable[[], int] = anonymous_bytes
) -> Sample:
    """Run `work` between two barriers.

    Args:
        held: the memory to watch, in bytes.
    """
    barrier()
    with MemoryPeak(held) as memory:
        start = time.perf_counter()
        work()
        barrier()
        seconds = time.perf_counter() - start
    return Sample(seconds, memory.peak - memory.before)


def run_ranks(
    module: str,
    num_ranks: int,
    options: dict[str, Any],
    folder: Path,
    limit_s: float = _LIMIT_S,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    is_lost: Callable[[int], bool] = lambda rank: False,
) -> list[dict[str, Any]]:
    """Run `python -m module` once per rank, with one thread each; returns their reports. No process is left behind.

    Args:
        module: reads its options from BENCH_OPTIONS, and hands over what it found through `report`.
        num_ranks: processes.
        options: for all of them.
        folder: for their reports.
        limit_s: that they may take.
        environment: variables of a rank, besides those that launchers set.
        is_lost: whether a rank ends before its time, and has nothing to report.

    Raises:
        BenchError: a process failed, or took too long; the message has the end of what it printed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    is_late = False
    with _ended_by_sigterm():
        try:
            for rank in range(num_ranks):
                own = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "BENCH_OPTIONS": json.dumps(options | {"report": str(folder / f"report{rank}.json")}),
                }
                command = [sys.executable, "-m", module]
                with (folder / f"output{rank}").open("wb") as output:
                    processes[rank] = subprocess.Popen(
                        command, env={**os.environ, **own, **environment(rank)}, stdout=output, stderr=subprocess.STDOUT
                    )
            waited_for = [process for rank, process in processes.items() if not is_lost(rank)]
            deadline = time.monotonic() + limit_s
            while any(process.poll() is None for process in waited_for) and not is_late:
                if any(process.poll() for process in waited_for):
                    break  # the others would wait for it
                is_late = time.monotonic() > deadline
                time.sleep(0.05)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    reporting = [rank for rank in processes if not is_lost(rank)]
    # Processes that failed by themselves come first: the others were killed above.
    for rank in sorted(reporting, key=lambda rank: processes[rank].returncode < 0):
        if code := processes[rank].returncode:
            lines = (folder / f"output{rank}").read_text(errors="replace").splitlines(keepends=True)
            text = "".join(line for line in lines if not line.startswith("frame #"))  # of C++, some sixty an error
            what = f"was not done after {limit_s:.0f} s" if is_late else f"ended with {code}"
            raise BenchError(f"{module} with {options}: rank {rank} {what}:\n{text[-4000:]}")
    return [dict(json.loads((folder / f"report{rank}.json").read_text())) for rank in reporting]


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While active, SIGTERM raises `SystemExit`, as an interrupt raises `KeyboardInterrupt`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def options() -> dict[str, Any]:
    """The options that `run_ranks` was given; called in a process that it started."""
    return dict(json.loads(os.environ["BENCH_OPTIONS"]))


def report(found: Mapping[str, object]) -> None:
    """Hand what this rank found to the process that started it.

    Args:
        found: values that JSON can hold, and dataclasses, which become objects of their fields.
    """
    Path(options()["report"]).write_text(json.dumps(dict(found), default=asdict))
