"""`hf-zero bench comm`: every implementation of the exchange at several sizes, and what `collectives: auto` chooses."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_zero.bench.processes import BenchError, run_ranks
from hf_zero.tables import aligned


def run(num_ranks: int, sizes_mib: Sequence[float], repeats: int) -> dict[str, Any]:
    """Measure on fresh ranks, or, in a process that a launcher has started, on the launcher's ranks.

    Args:
        num_ranks: processes to start.
        sizes_mib: of the whole tensor, fp32.
        repeats: of each exchange; the least time of the slowest rank counts.

    Returns:
        {"ranks", "chosen", "reason", "timings": {implementation: [[bytes, seconds to gather, to reduce-scatter], ...]}}.
        Empty on launched ranks other than the first.
    """
    if num_ranks < 2 or repeats < 1 or not sizes_mib or min(sizes_mib) <= 0:
        raise BenchError("an exchange needs at least two ranks, one repeat, and sizes above 0")
    options = {"sizes": [round(size * 2**20) for size in sizes_mib], "repeats": repeats}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from hf_zero.bench.comm.worker import measure_all

        return measure_all(options)
    with tempfile.TemporaryDirectory(prefix="hf_zero_bench_") as folder:
        return run_ranks("hf_zero.bench.comm.worker", num_ranks, options, Path(folder))[0]


def table(found: dict[str, Any]) -> str:
    """Milliseconds to gather and to reduce-scatter, a line for each implementation and size."""
    lines = [f"{found['ranks']} ranks; ms of the slowest rank, least of the repeats; fp32"]
    rows = [["exchange", "MiB", "gather", "reduce_scatter"]]
    for name, timings in found["timings"].items():
        for num_bytes, *seconds in timings:
            rows.append([name, f"{num_bytes / 2**20:.2f}", *(f"{each * 1e3:.2f}" for each in seconds)])
    lines.append(aligned(rows, "<>"))
    lines.append(f"collectives: auto takes {found['chosen']} {'(' + found['reason'] + ')' if found['reason'] else ''}")
    return "\n".join(lines)


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write what `run` found."""
    path.write_text(json.dumps(found, indent=1) + "\n")
