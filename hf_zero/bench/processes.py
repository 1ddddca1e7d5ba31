"""Fresh processes for each measurement, one a rank, and what they measure of themselves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_zero.errors import ZeroError

_LIMIT_S = 900.0


class BenchError(ZeroError, RuntimeError):
    """A measurement could not be made."""


@dataclass(frozen=True)
class Sample:
    """One measurement on one rank.

    Attributes:
        seconds: from a barrier before to a barrier after.
        extra_bytes: peak of this process's anonymous memory, over what it held before.
    """

    seconds: float
    extra_bytes: int


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise BenchError("this kernel does not tell anonymous memory apart (RssAnon in /proc/self/status)")


class MemoryPeak:
    """Within: a thread looks at this process's anonymous memory every two milliseconds."""

    def __enter__(self) -> MemoryPeak:
        self.before = self.peak = anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())


def measure(work: Callable[[], object], barrier: Callable[[], object]) -> Sample:
    """Run `work` between two barriers."""
    barrier()
    with MemoryPeak() as memory:
        start = time.perf_counter()
        work()
        barrier()
        seconds = time.perf_counter() - start
    return Sample(seconds, memory.peak - memory.before)


def run_ranks(module: str, num_ranks: int, options: dict[str, Any], folder: Path) -> list[dict[str, Sample]]:
    """Run `python -m module` once a rank, each with one thread; what each wrote to its `report`.

    Args:
        module: reads its options from BENCH_OPTIONS, and writes its samples by `report`.
        num_ranks: processes.
        options: for all of them.
        folder: for their reports.

    Raises:
        BenchError: a process failed; with the end of what it printed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(num_ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "BENCH_OPTIONS": json.dumps(options | {"report": str(folder / f"report{rank}.json")}),
        }
        command = [sys.executable, "-m", module]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=_LIMIT_S)[0].decode(errors="replace"))
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise BenchError(f"{module} with {options} ended with {process.returncode}:\n{output[-2000:]}")
    reports = [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(num_ranks)]
    return [{name: Sample(**sample) for name, sample in each.items()} for each in reports]


def options() -> dict[str, Any]:
    """What `run_ranks` was given; in a process that it started."""
    return dict(json.loads(os.environ["BENCH_OPTIONS"]))


def report(samples: dict[str, Sample]) -> None:
    """Hand the samples of this rank to the process that started it."""
    Path(options()["report"]).write_text(json.dumps({name: asdict(sample) for name, sample in samples.items()}))
