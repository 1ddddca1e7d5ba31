"""`hf-zero bench load`: `from_pretrained` of one model, several engines side by side.

The cost of a load is not only its time. A lazy map of the file is read when training first uses it, and becomes memory of the
process when training writes to it. Time and memory are therefore measured again after one step (in which the ranks of `plain`
exchange nothing). Memory is then read twice: as the process holds it, and after `malloc_trim`, since an allocator may hold on
to much of what an engine has freed. All engines read from the host's cache: the files are read once before each run, so that
no engine pays for the disk, and none profits from the one before it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_zero.bench.compare import Figure, others_than, ratios, table, worst
from hf_zero.bench.processes import BenchError, run_ranks
from hf_zero.plan.models import SIZES, config_of

ENGINES = ("plain", "transformers", "fsdp2", "deepspeed", "hf_zero")
DTYPES = {"float32": 1e-4, "bfloat16": 2e-2}  # and how far the first loss may be from plain's, relative to it
FIGURES = (
    Figure("seconds", "load [s]"),
    Figure("ready_seconds", "and first step [s]"),
    Figure("load_bytes", "memory while loading [MiB]", 2**20, 0),
    Figure("step_bytes", "memory after a step [MiB]", 2**20, 0),
    Figure("used_bytes", "the same, trimmed [MiB]", 2**20, 0),
    Figure("read_bytes", "asked of the file [MiB]", 2**20, 1),
)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")

Ranks = Sequence[Mapping[str, Any]]  # what each rank found in one round: a `Loading`


@dataclass(frozen=True)
class Loading:
    """What one rank found.

    Attributes:
        seconds: of the load, from a barrier before to a barrier after.
        ready_seconds: of the load and of the first training step.
        load_bytes: peak of private memory while loading, over what was held before.
        step_bytes: private memory after the first training step, gradients freed, over what was held before loading.
        used_bytes: the same after the allocator has given back what it can.
        read_bytes: requested from safetensors files; None if the engine has another reader.
        loss: of the first step.
    """

    seconds: float
    ready_seconds: float
    load_bytes: int
    step_bytes: int
    used_bytes: int
    read_bytes: int | None
    loss: float


@dataclass(frozen=True)
class LoadBenchmark:
    """What is measured.

    Attributes:
        model: a name in `SIZES`, or a local folder; if it has no weights, random ones are first written elsewhere.
        num_ranks: processes, one thread each.
        rounds: how often, all engines in turn.
        dtype: of the weights, a key of `DTYPES`.
        engines: names in `ENGINES`.
    """

    model: str
    num_ranks: int
    rounds: int
    dtype: str
    engines: tuple[str, ...]


def run(plan: LoadBenchmark, json_file: Path | None = None) -> str:
    """Load with every engine in fresh processes.

    Args:
        json_file: gets everything that every rank found.

    Returns:
        A table of the slowest and the largest rank.

    Raises:
        BenchError: a name is unknown, or a process failed.
    """
    config_of(plan.model)
    for name, known in ((plan.dtype, tuple(DTYPES)), *((engine, ENGINES) for engine in plan.engines)):
        if name not in known:
            raise BenchError(f"{name!r} is not known; choose from {', '.join(known)}")
    skipped = [each for each in plan.engines if each == "deepspeed" and importlib.util.find_spec(each) is None]
    engines = [engine for engine in dict.fromkeys(plan.engines) if engine not in skipped]
    if json_file is not None:
        json_file.touch()  # so that a path that cannot be written fails before the work
    found = _measure(plan, engines)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(plan) | {"skipped": skipped, "found": _details(found, plan.dtype)}))
    return summary(plan, found, skipped)


def _measure(plan: LoadBenchmark, engines: Sequence[str]) -> dict[str, list[Ranks]]:
    found: dict[str, list[Ranks]] = {engine: [] for engine in engines}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench_")))
        folder = _checkpoint(plan, scratch)
        for _ in range(plan.rounds):
            for engine in engines:
                _read_once(folder)
                options = {"engine": engine, "folder": str(folder), "dtype": plan.dtype}
                found[engine].append(run_ranks("hf_zero.bench.load.worker", plan.num_ranks, options, scratch))
    return found


def _checkpoint(plan: LoadBenchmark, scratch: Path) -> Path:
    """The folder to load from: the user's if it has weights, else one with random weights."""
    if plan.model not in SIZES and any(any(Path(plan.model).glob(pattern)) for pattern in _WEIGHTS):
        return Path(plan.model).resolve()
    folder = scratch / "model"
    options = {"model": plan.model, "dtype": plan.dtype, "folder": str(folder)}
    run_ranks("hf_zero.bench.checkpoint.writer", 1, options, scratch)
    return folder


def _read_once(folder: Path) -> None:
    for pattern in _WEIGHTS:
        for path in folder.glob(pattern):
            with path.open("rb") as file:
                for _ in iter(lambda: file.read(2**24), b""):
                    continue


def wrong_losses(found: Mapping[str, Sequence[Ranks]], tolerance: float) -> dict[str, float]:
    """Engines whose first loss, the mean over the ranks, is not that of `plain` in the same round; with their loss.

    All ranks get the same batch, so any rank that holds other values shows. Empty if `plain` was left out.
    """
    wrong = {}
    for engine in found if "plain" in found else ():
        for ranks, plain in zip(found[engine], found["plain"], strict=True):
            if not math.isclose(_loss(ranks), _loss(plain), rel_tol=tolerance):  # NaN is wrong too
                wrong[engine] = _loss(ranks)
    return wrong


def _loss(ranks: Ranks) -> float:
    return statistics.fmean(rank["loss"] for rank in ranks)


def _worst(found: Mapping[str, Sequence[Ranks]]) -> dict[str, list[dict[str, float | None]]]:
    keys = [figure.key for figure in FIGURES]
    return {engine: [worst(ranks, keys) for ranks in rounds] for engine, rounds in found.items()}


def _details(found: Mapping[str, Sequence[Ranks]], dtype: str) -> dict[str, Any]:
    wrong, of_rounds = wrong_losses(found, DTYPES[dtype]), _worst(found)
    has_plain = "plain" in found
    return {
        engine: {
            "is_valid": engine not in wrong if has_plain else None,
            "ranks": rounds,
            "ratio_to_plain": {f.key: ratios(of_rounds, engine, f.key, ["plain"]) for f in FIGURES if has_plain},
            "ratio_to_best_other": {
                f.key: ratios(of_rounds, engine, f.key, others_than(of_rounds, engine)) for f in FIGURES
            },
        }
        for engine, rounds in found.items()
    }


def summary(plan: LoadBenchmark, found: Mapping[str, Sequence[Ranks]], skipped: Sequence[str] = ()) -> str:
    """The table of `run`, with what a reader has to know about it."""
    wrong = wrong_losses(found, DTYPES[plan.dtype])
    lines = [
        f"{plan.model}, {plan.dtype}, {plan.num_ranks} ranks, {plan.rounds} rounds: "
        "worst rank of a round, median (least-greatest)",
        table(_worst(found), FIGURES, wrong),
    ]
    for engine, loss in wrong.items():
        lines.append(f"{engine} is INVALID: its first loss was {loss:.6g}, not {_loss(found['plain'][0]):.6g}")
    if "plain" not in found:
        lines.append("the loaded values were not compared: plain was left out")
    lines += [f"{engine}: skipped; pip install {engine}" for engine in skipped]
    return "\n".join(lines)
