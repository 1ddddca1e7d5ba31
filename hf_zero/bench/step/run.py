"""`hf-zero bench step`: training steps of one model, several engines side by side."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.bench import devices
from hf_zero.bench.figures import Spread, ratio
from hf_zero.bench.processes import BenchError, run_ranks
from hf_zero.bench.step import engines as known_engines
from hf_zero.bench.step.shapes import Shape
from hf_zero.tables import aligned

_MIB = 2**20
_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of a loss, relative to ddp's


@dataclass(frozen=True)
class StepBenchmark:
    """What to measure.

    Attributes:
        model: a name of `hf_zero.bench.step.shapes` or `hf_zero.plan.models`, or a folder with a config.
        num_ranks: processes, one thread each on CPU.
        batch_size: sequences per rank and step.
        seq_len: tokens per sequence.
        steps: timed steps per run; three more come first to warm up, and are watched for memory.
        rounds: runs of every engine, in turn.
        in_turn: all engines live in the same processes, which is steadier: what one of them is slower by, with the machine
            as it is at the time. Their memory cannot be told apart then.
        dtype: to compute in, "float32" or "bfloat16".
        checkpointing: recompute activations in backward.
        engines: names of `hf_zero.bench.step.engines`.
        accumulation: micro-batches a step.
        lora: train adapters alone.
        compiles: compile each block.
        limit_s: that one engine may take in one round.
    """

    model: str
    num_ranks: int
    batch_size: int
    seq_len: int
    steps: int
    rounds: int
    dtype: str
    checkpointing: bool
    engines: tuple[str, ...]
    in_turn: bool = False
    accumulation: int = 1
    lora: bool = False
    compiles: bool = False
    limit_s: float = 900.0

    def __post_init__(self) -> None:
        for engine in self.engines:
            if not known_engines.known(engine):
                raise BenchError(f"engine {engine!r} is not known; choose from {', '.join(known_engines.ENGINES)}")
        for name in ("num_ranks", "batch_size", "seq_len", "steps", "rounds", "accumulation"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name} must be at least 1")
        Shape(self.model)


@dataclass(frozen=True)
class Run:
    """One engine in one round.

    Attributes:
        seconds: per step, of the slowest rank.
        peak_bytes: growth of the largest rank's memory since before the model was made; None if engines shared processes.
        moved_bytes: received per step by the rank that received most; None if nothing counted them.
        losses: of every step, averaged over the ranks.
    """

    seconds: float
    peak_bytes: int | None
    moved_bytes: float | None
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """All runs by engine, and the pip lines of the engines that were skipped."""

    plan: StepBenchmark
    runs: dict[str, list[Run]]
    skipped: dict[str, str]


def measure(plan: StepBenchmark, progress: Callable[[str], None] = lambda line: None) -> Result:
    """Run every engine `plan.rounds` times in turn, in fresh processes each time, or all of them in the same.

    Raises:
        BenchError: a process failed.
    """
    missing = {engine: known_engines.missing_package(engine) for engine in plan.engines}
    skipped = {engine: line for engine, line in missing.items() if line is not None}
    present = [engine for engine in plan.engines if engine not in skipped]
    runs: dict[str, list[Run]] = {engine: [] for engine in present}
    if plan.in_turn:
        return Result(plan, _run(plan, present, plan.rounds) if present else runs, skipped)
    for number in range(plan.rounds):
        for engine in present:
            (run,) = _run(plan, [engine], 1)[engine]
            runs[engine].append(run)
            progress(f"round {number + 1} of {plan.rounds}: {engine:<26}{run.seconds * 1e3:8.1f} ms a step")
    return Result(plan, runs, skipped)


def _run(plan: StepBenchmark, engines: list[str], rounds: int) -> dict[str, list[Run]]:
    """The rounds of engines that live in the same processes."""
    options = asdict(plan) | {"together": engines, "rounds_in_turn": rounds}
    limit_s = plan.limit_s * len(engines) * rounds
    with tempfile.TemporaryDirectory(prefix="hf_zero_bench_") as folder:
        ranks = run_ranks("hf_zero.bench.step.worker", plan.num_ranks, options, Path(folder), limit_s)
    runs = {}
    for engine in engines:
        found = [rank[engine] for rank in ranks]
        moved, peaks = [each["moved_bytes"] for each in found], [each["peak_bytes"] for each in found]
        losses = tuple(sum(row) / len(row) for row in zip(*(each["losses"] for each in found), strict=True))
        runs[engine] = [
            Run(
                seconds=max(seconds),
                peak_bytes=None if None in peaks else max(peaks),
                moved_bytes=None if None in moved else max(moved),
                losses=losses,
            )
            for seconds in zip(*(each["seconds"] for each in found), strict=True)
        ]
    return runs


def compared_with(result: Result) -> str:
    """What all are compared with: ddp, or else the first engine that exchanges anything."""
    names = [name for name in result.runs if name != "local"]
    return "ddp" if "ddp" in names or not names else names[0]


def is_valid(result: Result, engine: str) -> bool | None:
    """Whether an engine's losses match those that all are compared with, in every round.

    None: nothing is exchanged, there is nothing to compare with, or ranks see other batches.
    """
    base = compared_with(result)
    if engine == "local" or base not in result.runs or not _is_comparable(engine, base):
        return None
    tolerance = _TOLERANCE[result.plan.dtype]
    expected = result.runs[base][0].losses
    return all(
        abs(loss - other) <= tolerance * abs(other)
        for run in result.runs[engine]
        for loss, other in zip(run.losses, expected, strict=True)
    )


def _is_comparable(engine: str, base: str) -> bool:
    """Whether ranks see the same batches."""
    return known_engines.num_alike(engine) == known_engines.num_alike(base)


def table(result: Result) -> str:
    """A Markdown table of the figures, with what was measured above it."""
    plan = result.plan
    base = compared_with(result)
    heads = ["engine", "ms a step", "over local", f"over {base}", "peak MiB a rank", "MiB moved a step", "losses"]
    rows = [heads, ["---", *["---:"] * 5, "---"]]
    for engine, runs in result.runs.items():
        spread = Spread.of([run.seconds * 1e3 for run in runs])
        peaks = [run.peak_bytes / _MIB for run in runs if run.peak_bytes is not None]
        moved = runs[0].moved_bytes
        rows.append(
            [
                engine,
                spread.show(),
                _ratio(result, engine, "local"),
                _ratio(result, engine, base),
                Spread.of(peaks).show() if peaks else "-",
                "-" if moved is None else f"{moved / _MIB:.1f}",
                {True: f"as {base}", False: "INVALID", None: "-"}[is_valid(result, engine)],
            ]
        )
    what = f"{plan.model}, {plan.num_ranks} ranks, {plan.batch_size} x {plan.seq_len} tokens a rank, {plan.dtype}"
    extra = f" in each of {plan.accumulation} micro-batches" if plan.accumulation > 1 else ""
    extra += ", LoRA" if plan.lora else ""
    extra += ", compiled blocks" if plan.compiles else ""
    extra += ", activation checkpointing" if plan.checkpointing else ""
    extra += ", engines in turn in the same processes" if plan.in_turn else ""
    of_markdown = aligned([[*row, ""] for row in rows], between=" | ", margin="| ")
    lines = [f"{what}{extra}; {plan.rounds} rounds of {plan.steps} steps; {_hardware()}", "", of_markdown]
    lines += [f"skipped: {engine} ({line})" for engine, line in result.skipped.items()]
    return "\n".join(lines)


def _ratio(result: Result, engine: str, base: str) -> str:
    if engine == base or base not in result.runs or not _is_comparable(engine, base):
        return "-"
    return str(ratio(*([run.seconds for run in result.runs[name]] for name in (engine, base))))


def _hardware() -> str:
    if devices.count():
        return f"{devices.name_of(torch.device(devices.kind(), 0))}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"


def write_json(result: Result, path: Path) -> None:
    """Write every run, and the plan."""
    runs: dict[str, Any] = {engine: [asdict(run) for run in runs] for engine, runs in result.runs.items()}
    content = {"plan": asdict(result.plan), "hardware": _hardware(), "runs": runs, "skipped": result.skipped}
    path.write_text(json.dumps(content, indent=1) + "\n")


def check_plot() -> None:
    """Raise before anything is measured if a plot could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None


def write_plot(result: Result, path: Path) -> None:
    """Plot step time against peak memory: one point per engine, with the range of its rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for engine, runs in result.runs.items():
        time = Spread.of([run.seconds * 1e3 for run in runs])
        peak = Spread.of([run.peak_bytes / _MIB for run in runs if run.peak_bytes is not None])
        is_ours = engine.startswith("zero") and engine[4:5].isdigit()
        errors = [[time.median - time.least], [time.greatest - time.median]]
        axes.errorbar([peak.median], [time.median], errors, marker="o" if is_ours else "s", capsize=3, label=engine)
    figure.legend(loc="outside right upper", title="median and range")
    axes.set_xlabel("peak memory growth a rank, MiB")
    axes.set_ylabel("ms a step")
    axes.set_title(f"{result.plan.model}, {result.plan.num_ranks} ranks, {result.plan.dtype}")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
