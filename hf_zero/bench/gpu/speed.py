"""Parts about time: steps beside DDP and FSDP2, and what the host does for a layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_zero.bench.gpu.page import Section, mib
from hf_zero.bench.processes import BenchError, in_a_line
from hf_zero.bench.step.run import Result, Run, StepBenchmark, is_valid, measure
from hf_zero.plan.models import SIZES

_ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
_THIN = ("llama-thin-8", "llama-thin-32")
_SLOWER = 1.1


class Measured(NamedTuple):
    """Engines that were run one after the other, and what went wrong with others.

    Attributes:
        result: of those that ran.
        failed: what the others said, or that there was no time for them.
    """

    result: Result
    failed: dict[str, str]


def each_engine(plan: StepBenchmark, engines: Sequence[str], deadline: float) -> Measured:
    """Run engines one after the other, each in processes of its own, until there is no time left."""
    runs: dict[str, list[Run]] = {}
    failed = {}
    for engine in engines:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            failed[engine] = "no time was left"
            continue
        try:
            runs |= measure(replace(plan, engines=(engine,), limit_s=left_s)).runs
        except BenchError as error:
            failed[engine] = in_a_line(error)
    return Measured(Result(plan, runs, {}), failed)


def steps(plan: StepBenchmark, deadline: float) -> Section:
    """The time and the peak of a step in every stage, beside DDP and FSDP2."""
    result, failed = each_engine(plan, _ENGINES, deadline)
    if not result.runs:
        return Section("failed", "no engine ran", output="\n".join(f"{name}: {text}" for name, text in failed.items()))
    rows: list[tuple[str, ...]] = [("engine", "ms a step", "over fsdp2", "over ddp", "peak", "losses")]
    times = {engine: runs[0].seconds for engine, runs in result.runs.items()}
    validity = {engine: is_valid(result, engine) for engine in times}
    words = {True: "as ddp", False: "OTHERS", None: "-"}
    for engine in _ENGINES:
        if engine not in times:
            rows.append((engine, "-", "-", "-", "-", failed[engine]))
            continue
        over = (f"{times[engine] / times[base]:.2f}" if base in times else "-" for base in ("fsdp2", "ddp"))
        taken = mib(result.runs[engine][0].peak_bytes or 0)
        rows.append((engine, f"{times[engine] * 1e3:.1f}", *over, taken, words[validity[engine]]))
    said = f"{plan.model}, {plan.num_ranks} ranks, {plan.dtype}, {plan.batch_size} x {plan.seq_len} tokens a rank"
    ours = {name: seconds for name, seconds in times.items() if name.startswith("zero")}
    slow = [
        name
        for name, base in (("zero3", "fsdp2"), ("zero1", "ddp"), ("zero2", "ddp"), ("zero0", "ddp"))
        if name in ours and base in times and ours[name] > _SLOWER * times[base]
    ]
    to_do = []
    if slow:
        to_do.append(
            f"{', '.join(slow)} more than a tenth slower: the parts on overlap and on the host's time say where."
        )
    if failed:
        to_do.append(
            "An engine that did not run: see the last column; --minutes gives it more time, --model another size."
        )
    is_wrong = any(validity[name] is False for name in ours)
    return Section("WRONG" if is_wrong else "look" if to_do else "right", said, rows, to_do)


def host_time(plan: StepBenchmark, deadline: float) -> Section:
    """What a layer costs the host in a step: of models that compute next to nothing, 24 layers more over their number."""
    found = {name: each_engine(replace(plan, model=name), ("local", "zero3", "fsdp2"), deadline) for name in _THIN}
    few, many = (found[name].result.runs for name in _THIN)
    layers = SIZES[_THIN[1]]["num_hidden_layers"] - SIZES[_THIN[0]]["num_hidden_layers"]
    costs = {name: (many[name][0].seconds - few[name][0].seconds) / layers for name in few.keys() & many.keys()}
    if "zero3" not in costs:
        text = "\n".join(f"{name}: {text}" for each in found.values() for name, text in each.failed.items())
        return Section("failed", "stage 3 did not run", output=text)
    rows = [("engine", "ms a layer and step")]
    rows += [(name, f"{costs[name] * 1e3:.3f}") for name in ("local", "zero3", "fsdp2") if name in costs]
    said = f"stage 3 takes the host {costs['zero3'] * 1e3:.2f} ms a layer and step"
    if "local" in costs:
        more = costs["zero3"] - costs["local"]
        said += f", {abs(more) * 1e3:.2f} {'more' if more > 0 else 'less'} than one process"
    if costs["zero3"] <= 0:
        return Section(
            "look", "more layers took no longer: what this machine did besides was more than they cost", rows
        )
    is_slow = "fsdp2" in costs and costs["zero3"] > _SLOWER * costs["fsdp2"]
    to_do = [
        "A layer that computes for less than this waits for the host: larger batches, or units of several layers.",
        "Compile the blocks (`block.compile()`): one launch for many.",
        "Is each process bound to cores near its device (`nvidia-smi topo -m`), and OMP_NUM_THREADS not above its share?",
    ]
    return Section("look" if is_slow else "right", said, rows, to_do if is_slow else ())
