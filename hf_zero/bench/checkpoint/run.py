"""`hf-zero bench checkpoint`: saving, loading and exporting one model, several engines side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_zero.bench.figures import Spread
from hf_zero.bench.processes import BenchError, Sample, run_ranks
from hf_zero.plan.models import SIZES
from hf_zero.tables import aligned

ENGINES = ("plain", "hf_zero", "fsdp2-dcp", "fsdp2-full")
_COLUMNS = ("save", "load", "export", "stall of save 1", "stall of save 2")


def run(model: str, num_ranks: int, rounds: int, engines: Sequence[str]) -> str:
    """Measure every engine in fresh processes, `rounds` times in turn.

    Args:
        model: a name in `SIZES`; fp32, with AdamW.
        num_ranks: processes, one thread each.
        rounds: how often.
        engines: names in `ENGINES`.

    Returns:
        A table of medians, with the least and the greatest, of the slowest and the largest rank.

    Raises:
        BenchError: a name is unknown, or a process failed.
    """
    for name, known in ((model, tuple(SIZES)), *((engine, ENGINES) for engine in engines)):
        if name not in known:
            raise BenchError(f"{name!r} is not known; choose from {', '.join(known)}")
    found: dict[str, list[dict[str, Sample]]] = {engine: [] for engine in engines}
    for _ in range(rounds):
        for engine in engines:
            with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench_") as scratch:
                options = {"engine": engine, "sizes": SIZES[model], "folder": f"{scratch}/files"}
                Path(scratch, "files").mkdir()
                ranks = run_ranks("hf_zero.bench.checkpoint.worker", num_ranks, options, Path(scratch))
                found[engine].append(_worst([{name: Sample(**each) for name, each in rank.items()} for rank in ranks]))
    return table(found)


def _worst(ranks: Sequence[dict[str, Sample]]) -> dict[str, Sample]:
    return {
        name: Sample(max(rank[name].seconds for rank in ranks), max(rank[name].extra_bytes for rank in ranks))
        for name in ranks[0]
    }


def table(found: dict[str, list[dict[str, Sample]]]) -> str:
    """The table of `run`: seconds and extra MiB of the worst rank, median (least-greatest) over the rounds."""
    rows = [["", *_COLUMNS]]
    for engine, rounds in found.items():
        by_column = ([each[column] for each in rounds if column in each] for column in _COLUMNS)
        rows.append([engine, *map(_cell, by_column)])
    return aligned(rows, "<>")


def _cell(samples: Sequence[Sample]) -> str:
    if not samples:
        return "-"
    seconds = Spread.of([sample.seconds for sample in samples])
    extra = Spread.of([sample.extra_bytes / 2**20 for sample in samples])
    return f"{seconds.show(3)} s, {extra.median:.0f} MiB"
