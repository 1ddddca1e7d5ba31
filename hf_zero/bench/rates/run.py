"""Rates of this machine, by ranks that all work at the same time, as in a training."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_zero.bench.processes import run_ranks
from hf_zero.plan.timing.machines import Links, Machine, Measured

_SIZES_MIB = (0.25, 1, 4, 16, 64)
_SHARES = 1e11, 1e10  # operations and bytes a second: parts of a pass are in proportion, whose whole is measured


def measure(
    model: str, num_ranks: int, batch_size: int, seq_len: int, dtype: str, optimizer: str, collectives: str
) -> tuple[str, Machine]:
    """What `num_ranks` processes of this machine do, one thread or device each; and the name of the exchange.

    In a process that a launcher has started, these are the launcher's ranks, which all call this.

    Of the model, its embeddings, its head and one and several of its layers run, and what a layer takes is counted for all.

    Args:
        model: a named size, a folder with a config, or a name on the hub.
        num_ranks: processes.
        batch_size: sequences a rank.
        seq_len: tokens of a sequence.
        dtype: to compute in.
        optimizer: "adamw", "adam", "sgd" or "momentum".
        collectives: an implementation of the exchange; "auto" for the one that training would take here.

    Raises:
        BenchError: a process failed.
    """
    options = {
        "model": model,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "dtype": dtype,
        "optimizer": optimizer,
        "collectives": collectives,
        "sizes": [round(mib * 2**20) for mib in _SIZES_MIB],
    }
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from hf_zero.bench.rates.worker import measure_here

        ranks = measure_here(options)
        return ranks[0]["collectives"], _machine(ranks)
    with tempfile.TemporaryDirectory(prefix="hf_zero_bench_") as folder:
        ranks = run_ranks("hf_zero.bench.rates.worker", num_ranks, options, Path(folder))[0]["ranks"]
    return ranks[0]["collectives"], _machine(ranks)


def _machine(ranks: Sequence[dict[str, Any]]) -> Machine:
    name = ranks[0]["collectives"]
    passes = [max(rank["rest"][way] + rank["layer"][way] * rank["num_layers"] for rank in ranks) for way in (0, 1)]
    exchanges = {kind: _exchange(kind, ranks) for kind in ("gather", "reduce_scatter")}
    return Machine(
        f"this machine, {len(ranks)} processes, {name}",
        *_SHARES,
        None,
        exchanges["gather"],
        exchanges["reduce_scatter"],
        Links(1, 1, 1.0, 1.0),
        is_ahead=False,
        is_background=name != "host",
        passes_s=(passes[0], passes[1]),
        step_s=max(rank["step_s"] for rank in ranks),
    )


def _exchange(kind: str, ranks: Sequence[dict[str, Any]]) -> Measured:
    rows = [rank[kind] for rank in ranks]
    sizes = tuple(size for size, *_ in rows[0])
    seconds = tuple(max(row[place][1] for row in rows) for place in range(len(sizes)))
    return Measured(sizes, seconds, tuple(max(row[place][2] for row in rows) for place in range(len(sizes))))
