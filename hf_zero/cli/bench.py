"""The commands `hf-zero bench ...`. Imports torch only when one of them runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_zero.bench.processes import BenchError
from hf_zero.plan.models import SIZES


def add_benchmarks(kinds: Any) -> None:
    """Add a parser for each benchmark to `kinds`, the subparsers of `hf-zero bench`."""
    saving = kinds.add_parser("checkpoint", help="time and memory to save, load and export, and the stall of a save")
    saving.add_argument(
        "--model", default="llama-92m", help=f"{', '.join(SIZES)} (default: llama-92m), fp32, with AdamW"
    )
    saving.add_argument("--ranks", type=int, default=2)
    saving.add_argument("--rounds", type=int, default=3)
    saving.add_argument("--engines", default="plain,hf_zero,fsdp2-dcp,fsdp2-full", help="comma-separated (all)")
    saving.set_defaults(run=_bench_checkpoint)
    _add_bench_step(kinds)
    comm = kinds.add_parser("comm", help="every implementation of the exchange between ranks, at several sizes")
    comm.add_argument("--ranks", type=int, default=2, help="processes to start, if no launcher has (2)")
    comm.add_argument("--sizes", type=_numbers, default="0.25,1,4,16,64", help="MiB, comma-separated (0.25,1,4,16,64)")
    comm.add_argument("--repeats", type=int, default=5, help="of each exchange (5)")
    comm.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    comm.set_defaults(run=_bench_comm)
    calls = kinds.add_parser(
        "calls", help="calls of functions a layer, beyond the layer's own: what the host does for it"
    )
    calls.add_argument("--ranks", type=int, default=2)
    calls.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="to compute in (bfloat16)")
    calls.add_argument("--engines", default="ddp,zero1,zero2,zero3,zero3:none,fsdp2", help="as of bench step")
    calls.add_argument("--most", type=int, default=0, metavar="N", help="also the N functions called most often (0)")
    calls.set_defaults(run=_bench_calls)
    loading = kinds.add_parser("load", help="time, memory and bytes read of from_pretrained, and memory after a step")
    loading.add_argument("--model", default="llama-92m", help=f"{', '.join(SIZES)} (default: llama-92m), or a folder")
    loading.add_argument("--ranks", type=int, default=2)
    loading.add_argument("--rounds", type=int, default=5)
    loading.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    loading.add_argument("--engines", default="plain,transformers,deepspeed,hf_zero", help="comma-separated (all)")
    loading.add_argument("--json", type=Path, metavar="FILE", help="write what every rank found")
    loading.set_defaults(run=_bench_load)


def _add_bench_step(kinds: Any) -> None:
    step = kinds.add_parser("step", help="time, memory and traffic of training steps")
    step.add_argument(
        "--model",
        default="llama-34m",
        help="a size or shape by name (hf_zero/bench/README.md), or a folder with a config",
    )
    step.add_argument("--ranks", type=int, default=2, help="processes (2)")
    step.add_argument("--batch-size", type=int, default=4, help="sequences per rank (4)")
    step.add_argument("--seq-len", type=int, default=128, help="tokens per sequence (128)")
    step.add_argument("--steps", type=int, default=10, help="timed steps per run (10)")
    step.add_argument("--rounds", type=int, default=9, help="runs of each engine, in turn (9)")
    step.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in (float32)")
    step.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    step.add_argument("--accumulation", type=int, default=1, help="micro-batches a step (1)")
    step.add_argument("--lora", action="store_true", help="train LoRA adapters of rank 8 alone (needs peft)")
    step.add_argument("--compile", action="store_true", help="compile each block on its own")
    step.add_argument(
        "--engines",
        default="local,ddp,zero0,zero1,zero2,zero3,fsdp2",
        help="comma-separated: local (exchanges nothing), ddp, zero0..zero3 (zero3:pairwise names the exchange, zero3:none has "
        "none, zero3:disk offloads, zero3:tp2 shares layers, zero3:sp2 or cp2 sequences, zero3:pairwise:keep=64MiB keeps "
        "so much whole for the backward; keep=none, keep=all, keep=auto), fsdp2, fsdp2:tp2, deepspeed3:sp2, fsdp2-noreshard, "
        "zero-redundancy-optimizer, fairscale-oss, fairscale-sdp, deepspeed1..deepspeed3",
    )
    step.add_argument(
        "--in-turn",
        action="store_true",
        help="all engines in the same processes: steadier ratios, but no memory of each",
    )
    step.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    step.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time against memory (needs matplotlib)")
    step.set_defaults(run=_bench_step)


def _bench_comm(args: argparse.Namespace) -> int:
    from hf_zero.bench.comm import run as comm

    found = comm.run(args.ranks, args.sizes, args.repeats)
    if found and args.json is not None:
        comm.write_json(found, args.json)
    if found:
        print(comm.table(found))
    return 0


def _bench_calls(args: argparse.Namespace) -> int:
    from hf_zero.bench.calls import run as calls

    print(calls.table(calls.count(args.engines.split(","), args.ranks, args.dtype), args.most))
    return 0


def _bench_step(args: argparse.Namespace) -> int:
    from hf_zero.bench.step import run as step

    if args.plot is not None:
        if args.in_turn:
            raise BenchError("--plot draws time against memory, which --in-turn cannot tell apart: leave one out")
        step.check_plot()
    plan = step.StepBenchmark(
        args.model,
        args.ranks,
        args.batch_size,
        args.seq_len,
        args.steps,
        args.rounds,
        args.dtype,
        args.checkpointing,
        tuple(args.engines.split(",")),
        args.in_turn,
        args.accumulation,
        args.lora,
        args.compile,
    )
    result = step.measure(plan, lambda line: print(line, file=sys.stderr, flush=True))
    if args.json is not None:
        step.write_json(result, args.json)
    if args.plot is not None:
        step.write_plot(result, args.plot)
    print(step.table(result))
    return 0


def _bench_checkpoint(args: argparse.Namespace) -> int:
    from hf_zero.bench.checkpoint.run import run

    print(run(args.model, args.ranks, args.rounds, args.engines.split(",")))
    return 0


def _bench_load(args: argparse.Namespace) -> int:
    from hf_zero.bench.load.run import LoadBenchmark, run

    print(
        run(LoadBenchmark(args.model, args.ranks, args.rounds, args.dtype, tuple(args.engines.split(","))), args.json)
    )
    return 0


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no comma list of numbers") from None
