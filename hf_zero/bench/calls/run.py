"""`hf-zero bench calls`: calls of functions that each layer costs, in a forward and in a backward, beyond the layer itself."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_zero.bench.processes import BenchError, run_ranks
from hf_zero.bench.step import engines as known_engines
from hf_zero.tables import aligned

_FEW, _MANY = "llama-thin-8", "llama-thin-16"
_LAYERS = 16 - 8
_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Layer:
    """Calls for one layer, beyond those of the same model alone.

    Attributes:
        python, c: of Python's functions and of C's.
        by_name: both.
    """

    python: float
    c: float
    by_name: Counter[str]


def count(engines: Sequence[str], num_ranks: int, dtype: str) -> dict[str, dict[str, Layer]]:
    """Count on fresh ranks: by engine, and by "forward" and "backward".

    A layer is an eighth of the difference between 16 layers and 8, and what `local`, which exchanges nothing, has is left out.

    Args:
        engines: names of `hf_zero.bench.step.engines`.
        num_ranks: processes.
        dtype: to compute in.

    Raises:
        BenchError: an engine is not known, or a process failed.
    """
    for engine in engines:
        if not known_engines.known(engine):
            raise BenchError(f"engine {engine!r} is not known; choose from {', '.join(known_engines.ENGINES)}")
    alone = _of_layers("local", num_ranks, dtype)
    found = {}
    for engine in engines:
        of_layers = _of_layers(engine, num_ranks, dtype)
        found[engine] = {name: _beyond(of_layers[name], alone[name]) for name in _PASSES}
    return found


def _of_layers(engine: str, num_ranks: int, dtype: str) -> dict[str, Counter[str]]:
    few, many = (_run(model, engine, num_ranks, dtype) for model in (_FEW, _MANY))
    for name in _PASSES:
        many[name].subtract(few[name])
    return many


def _run(model: str, engine: str, num_ranks: int, dtype: str) -> dict[str, Counter[str]]:
    options = {"model": model, "engine": engine, "dtype": dtype}
    with tempfile.TemporaryDirectory(prefix="hf_zero_bench_") as folder:
        first, *_ = run_ranks("hf_zero.bench.calls.worker", num_ranks, options, Path(folder))
    return {name: Counter(first[name]) for name in _PASSES}


def _beyond(calls: Counter[str], alone: Counter[str]) -> Layer:
    calls.subtract(alone)
    sums = {kind: sum(n for name, n in calls.items() if name.startswith(kind)) / _LAYERS for kind in ("Python", "C ")}
    return Layer(sums["Python"], sums["C "], calls)


def table(found: dict[str, dict[str, Layer]], most: int = 0) -> str:
    """A line for each engine; with `most`, the functions called most often for a layer."""
    rows = [["calls a layer", *(f"{name}, {kind}" for name in _PASSES for kind in ("Python", "C"))]]
    for engine, passes in found.items():
        rows.append(
            [engine, *(f"{number:.0f}" for name in _PASSES for number in (passes[name].python, passes[name].c))]
        )
    lines = [aligned(rows, "<>")]
    for engine, passes in found.items() if most else ():
        for name in _PASSES:
            lines.append(f"\n{engine}, {name}:")
            lines += [f"{n / _LAYERS:8.1f}  {what}" for what, n in passes[name].by_name.most_common(most) if n]
    return "\n".join(lines)
