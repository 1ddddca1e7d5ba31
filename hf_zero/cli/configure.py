"""`hf-zero config`: a few questions, and the two files that a run needs; or a DeepSpeed file in our terms."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero.cli.options import at_least
from hf_zero.config.zero_config import ZeroConfig, read_deepspeed
from hf_zero.errors import ConfigError

_STAGES = """What should be partitioned over the ranks?
  1  optimizer states                             fastest; for models that fit
  2  optimizer states and gradients
  3  optimizer states, gradients and parameters   least memory; for models that do not fit on one rank"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--from", dest="source", metavar="FILE", help="a DeepSpeed JSON to translate")
    parser.add_argument("--out", type=Path, default=Path("zero.yaml"), metavar="FILE", help="(default: zero.yaml)")
    parser.add_argument(
        "--accelerate", type=Path, default=Path("accelerate.yaml"), metavar="FILE", help="(default: accelerate.yaml)"
    )
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="instead of being asked")
    parser.add_argument("--num-processes", type=at_least(1), metavar="N", help="instead of being asked")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), help="instead of being asked")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, ask: Callable[[str], str] = input) -> int:
    """Ask what the options leave open, and write the files; files that exist are kept.

    Args:
        args: of `add_arguments`.
        ask: shows a question and returns the answer; empty: the default.

    Raises:
        ConfigError: a file exists already, an answer is none, or the DeepSpeed file cannot be honoured.
    """
    for path in (args.out, *([] if args.source else [args.accelerate])):
        if path.exists():
            raise ConfigError(f"{path} exists already: remove it, or name another file (--out, --accelerate)")
    if args.source:
        imported = read_deepspeed(args.source)
        print(imported.table())
        _write(args.out, _changed(imported.config), f"Translated from {Path(args.source).name}.")
        if imported.training:
            print("Give the Trainer: " + " ".join(f"--{name} {value}" for name, value in imported.training.items()))
        print(f"\nWrote {args.out}. Run: hf-zero launch --num_processes N --zero {args.out} script.py ...")
        return 0
    stage = args.stage or _choice(ask, f"{_STAGES}\nStage", ("1", "2", "3"), "3", "--stage")
    count = args.num_processes or _choice(
        ask, "How many processes (one a GPU, or one a CPU core that computes)", None, "2", "--num-processes"
    )
    precision = args.mixed_precision or _choice(
        ask, "Compute in (no: float32)", ("no", "bf16"), "bf16", "--mixed-precision"
    )
    _write(
        args.out, {"stage": int(stage), "expected_world_size": int(count)}, "All keys: configuration.md in the guide."
    )
    _write(args.accelerate, _accelerate(int(count), str(precision)), "For `accelerate launch --config_file`.")
    print(f"\nWrote {args.out} and {args.accelerate}. Run:")
    names = (shlex.quote(str(name)) for name in (args.accelerate, args.out))
    print("  hf-zero launch --config_file {} --zero {} script.py ...".format(*names))
    return 0


def _choice(ask: Callable[[str], str], question: str, words: tuple[str, ...] | None, default: str, option: str) -> str:
    hint = f" ({'/'.join(words)})" if words else ""
    try:
        answer = ask(f"{question}{hint} [{default}]: ").strip().lower() or default
    except EOFError:
        raise ConfigError(f"the input ended before an answer: give {option}, or answer at a terminal") from None
    if words is None and (not answer.isdecimal() or int(answer) < 1):
        raise ConfigError(f"{answer!r} is not a number of processes: use 1 or more")
    if words is not None and answer not in words:
        raise ConfigError(f"{answer!r} is not one of the choices: use {', '.join(words)}")
    return answer


def _changed(config: ZeroConfig) -> dict[str, Any]:
    """The keys of a configuration that are not the defaults, and its stage."""
    defaults = ZeroConfig().to_dict()
    return {key: value for key, value in config.to_dict().items() if key == "stage" or value != defaults[key]}


def _accelerate(count: int, precision: str) -> dict[str, Any]:
    import torch

    has_accelerator = torch.accelerator.is_available()
    return {
        "compute_environment": "LOCAL_MACHINE",
        # On CPUs too: MULTI_CPU without an MPI host file starts one process.
        "distributed_type": "MULTI_GPU" if count > 1 else "NO",
        "use_cpu": not has_accelerator,
        "num_processes": count,
        "num_machines": 1,
        "machine_rank": 0,
        "mixed_precision": precision,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }


def _write(path: Path, content: dict[str, Any], comment: str) -> None:
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {comment}\n{yaml.safe_dump(content, sort_keys=False)}")
