"""The command `hf-zero`: starts training; inspects, verifies, exports and imports checkpoints; benchmarks.

Imports torch only when a command runs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hf_zero import __version__
from hf_zero.cli import compare, doctor, plan
from hf_zero.cli.bench import add_benchmarks
from hf_zero.cli.configure import add_arguments
from hf_zero.cli.launch import launch
from hf_zero.cli.trace import trace
from hf_zero.errors import ZeroError
from hf_zero.tables import aligned

if TYPE_CHECKING:
    from hf_zero.checkpoint.offline.inspection import Contents

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # as `save_pretrained` counts
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_READ_OWN = {"launch": launch, "trace": trace}  # what follows is theirs to read
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_CHECKPOINT = re.compile(r"checkpoint[-_](\d+)")  # the names that the Trainer and accelerate give


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its arguments; those of the process by default.

    Returns:
        The exit code: 0, or 1 after an error or if a checkpoint is damaged. Wrong usage exits with 2.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    reads_own = _READ_OWN.get(given[0]) if given else None
    args = _parser().parse_args(given[:1] if reads_own else given)
    try:
        code = reads_own(given[1:]) if reads_own else int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ZeroError, OSError) as error:
        print(f"hf-zero: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hf-zero: interrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-zero", description="Start training, handle checkpoints, and run benchmarks."
    )
    parser.add_argument("--version", action="version", version=f"hf-zero {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="show what a checkpoint, or a folder of safetensors files, holds")
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, not only totals")
    inspect.add_argument("--no-verify", action="store_true", help="read headers only; do not compare checksums")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser(
        "verify", help="check every byte of a checkpoint, or of all checkpoints of a run, against checksums"
    )
    verify.add_argument(
        "folder", type=Path, metavar="DIR", help="a checkpoint, or a run with folders like checkpoint-N"
    )
    verify.set_defaults(run=_verify)

    compare.add_arguments(
        commands.add_parser("compare", help="where two checkpoints, or two runs, differ first, and by how much"), _place
    )

    export = commands.add_parser("export", help="write weights, configuration and tokenizer for from_pretrained")
    export.add_argument("folder", type=Path, metavar="DIR")
    export.add_argument("out", type=Path, metavar="OUT", help="must not exist, or must be empty")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of floating-point weights (default: their own)"
    )
    export.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of one file, such as 500MB (default: 5GB)"
    )
    export.set_defaults(run=_export)

    imports = commands.add_parser("import", help="convert another library's checkpoint, with its Adam states")
    imports.add_argument("kind", choices=("deepspeed", "dcp"), help="DeepSpeed ZeRO, or torch.distributed.checkpoint")
    imports.add_argument("folder", type=Path, metavar="DIR")
    imports.add_argument("out", type=Path, metavar="OUT")
    imports.add_argument(
        "--allow-pickle", action="store_true", help="read pickles, which can run any code: only from sources you trust"
    )
    imports.set_defaults(run=_import)

    add_arguments(
        commands.add_parser("config", help="answer a few questions, or translate a DeepSpeed file; writes YAML")
    )
    doctor.add_arguments(
        commands.add_parser("doctor", help="what is installed and missing here, and how ranks would exchange")
    )
    plan.add_arguments(
        commands.add_parser("plan", help="what a rank would hold and receive in each stage, and what fits"), _size
    )
    commands.add_parser(
        "launch", help="`accelerate launch` with --zero 3, or --zero FILE, for any script (launch --help says more)"
    )

    commands.add_parser(
        "trace", help="record where a few steps of a script spend their time, and say it (trace --help)"
    )

    bench = commands.add_parser("bench", help="measure on this machine, beside other engines")
    add_benchmarks(bench.add_subparsers(required=True, metavar="WHAT"))
    return parser


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", text.strip().upper())
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2] or ""])):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it like 500MB or 5GB")
    return size


def _place(path: Path) -> int | None:
    found = _CHECKPOINT.fullmatch(path.name)
    return None if found is None else int(found[1])


# ---- inspect ---------------------------------------------------------------------------------------------------------


def _inspect(args: argparse.Namespace) -> int:
    from hf_zero.checkpoint.offline.inspection import checkpoints_in, look_at
    from hf_zero.errors import UsageError

    of_run = checkpoints_in(args.folder, _place)
    if of_run and not any(args.folder.glob("*.safetensors")):
        raise UsageError(f"{args.folder} is a run, not a checkpoint: inspect one of its checkpoints, like {of_run[-1]}")
    contents = look_at(args.folder, verifies=not args.no_verify)
    print(args.folder)
    print(aligned(_facts(contents), margin="  "))
    for problem in contents.problems:
        print(f"    {problem}")
    print()
    rows = [(name, f"{size:,}") for name, size in contents.sizes.items()]
    total = ("total", f"{sum(contents.sizes.values()):,}")
    print(aligned([("file", "bytes"), *rows, total], "<>", margin="  ") + "\n")
    tensors = (_each_tensor(contents), "<<<>") if args.tensors else (_totals(contents), "<<>")
    print(aligned(*tensors, margin="  "))
    return 1 if contents.problems else 0


def _facts(contents: Contents) -> list[tuple[str, str]]:
    manifest = contents.manifest
    if contents.problems:
        health = f"DAMAGED, {_count(len(contents.problems), 'problem')}:"
    elif manifest is None:
        health = "unknown: there is no manifest, so nothing was verified"
    elif contents.is_verified:
        health = f"whole: every byte of {_count(len(contents.sizes), 'file')} is as it was written"
    else:
        health = "not verified (--no-verify): names, sizes and headers fit, the rest was not read"
    if manifest is None:
        return [("health", health)]
    batch = "unknown" if manifest.global_batch is None else f"{_count(manifest.global_batch, 'sample')} a step"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items()) or "unknown"
    return [
        ("step", f"{manifest.step:,}"),
        ("world size", _count(manifest.world_size, "rank")),
        ("ZeRO stage", str(manifest.stage)),
        ("global batch", batch),
        ("written with", versions),
        ("health", health),
    ]


def _totals(contents: Contents) -> list[tuple[str, ...]]:
    """One line for each dtype in each group of files; the shards of a group count together."""
    sums: dict[tuple[str, str], list[int]] = {}
    for name, tensors in contents.tensors.items():
        for tensor in tensors:
            entry = sums.setdefault((_group(name), _dtype(tensor.dtype)), [0, 0, 0])
            for index, value in enumerate((1, tensor.nbytes // tensor.dtype.itemsize, tensor.nbytes)):
                entry[index] += value
    rows = [(group, dtype, *(f"{value:,}" for value in values)) for (group, dtype), values in sorted(sums.items())]
    return [("tensors of", "dtype", "count", "elements", "bytes"), *rows]


def _each_tensor(contents: Contents) -> list[tuple[str, ...]]:
    rows = [
        (name, tensor.name, _dtype(tensor.dtype), " x ".join(map(str, tensor.shape)) or "scalar", f"{tensor.nbytes:,}")
        for name, tensors in contents.tensors.items()
        for tensor in tensors
    ]
    return [("file", "tensor", "dtype", "shape", "bytes"), *rows]


def _group(file: str) -> str:
    return _SHARD.sub("", file.removesuffix(".safetensors"))


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ---- verify ----------------------------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    from hf_zero.checkpoint.offline.inspection import check, checkpoints_in

    of_run = checkpoints_in(args.folder, _place)
    newest, is_whole = None, True
    for folder in of_run or [args.folder]:
        verdict = check(folder)
        if verdict.problems or verdict.manifest is None:
            is_whole = False
            _print_lines(verdict.problems)
            continue
        newest, manifest = folder, verdict.manifest
        size = _human(sum(record.size for record in manifest.files.values()))
        files = _count(len(manifest.files), "file")
        print(f"{folder} is whole: step {manifest.step}, {_count(manifest.world_size, 'rank')}, {files}, {size}")
    if of_run:
        print(f"newest valid checkpoint: {newest}" if newest else f"{args.folder} has no valid checkpoint")
    return 0 if is_whole else 1


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(" ".join(line.split()))


def _human(size: int) -> str:
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"


# ---- export and import -----------------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    import torch

    from hf_zero.checkpoint.offline.export import export

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    bar = _Bar(sys.stderr)
    try:
        done = export(args.folder, args.out, dtype, args.max_shard_size, bar.show)
    finally:
        bar.close()
    if done.overflown:
        print(
            f"hf-zero: {_count(len(done.overflown), 'tensor')} became partly infinite in {args.dtype}, like "
            f"{done.overflown[0]!r}: use bfloat16",
            file=sys.stderr,
        )
    note = "" if done.was_verified else f"; {args.folder} has no manifest, so it could not be verified itself"
    size = _human(sum(done.sizes.values()))
    kind = f" in {args.dtype}" if args.dtype else ""
    print(f"{args.out}: {_count(len(done.sizes), 'file')}, {size}, read again and equal to {args.folder}{kind}{note}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from hf_zero.checkpoint.importing.convert import import_dcp, import_deepspeed

    read = {"deepspeed": import_deepspeed, "dcp": import_dcp}[args.kind]
    print(f"imported into {read(args.folder, args.out, args.allow_pickle)}")
    return 0


class _Bar:
    """A progress bar that counts bytes, on one line of a terminal; shows nothing if the stream is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._shown = ""
        self._doing = ""

    def show(self, doing: str, done: int, total: int) -> None:
        """Redraw the line if its text has changed."""
        if self._stream is None:
            return
        if doing != self._doing:
            self.close()
            self._doing = doing
        share = done / total if total else 0.0
        filled = int(30 * share)
        text = f"{doing:<10} [{'#' * filled:<30}] {share:4.0%} of {_human(total)}" if total else f"{doing} ..."
        if text != self._shown:
            self._shown = text
            print(f"\r{text}", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._stream is not None and self._shown:
            print(file=self._stream, flush=True)
        self._shown = ""


if __name__ == "__main__":
    sys.exit(main())
