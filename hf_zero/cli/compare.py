"""`hf-zero compare A B`: the first step and parameter in which two checkpoints, or two runs, differ, and by how much."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.errors import CheckpointError
from hf_zero.tables import aligned

if TYPE_CHECKING:
    from hf_zero.checkpoint.offline.comparison import Difference

_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser, place: Callable[[Path], int | None]) -> None:
    """Describe the command.

    Args:
        parser: of the command.
        place: the step in the name of a checkpoint's folder.
    """
    parser.add_argument("first", type=Path, metavar="A", help="a checkpoint, or a run with folders like checkpoint-N")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument("--all", action="store_true", help=f"list all tensors that differ, not {_SHOWN}")
    parser.set_defaults(run=lambda args: _run(args, place))


def _run(args: argparse.Namespace, place: Callable[[Path], int | None]) -> int:
    """Returns 0 if they are equal, 1 if not."""
    from hf_zero.checkpoint.offline.comparison import differences, first_difference_of_logs

    pairs = _pairs(args.first, args.second, place)
    told = first_difference_of_logs(*pairs[-1])
    if told is not None:
        last, step, name, one, other = told
        print(f"logs: equal up to step {last}; {name} of step {step} is {one:.9g}, and {other:.9g}")
    for first, second in pairs:
        found = list(differences(first, second))
        if found:
            print(f"{first} and {second}: {len(found)} tensors differ")
            print(aligned([_row(each) for each in found[: None if args.all else _SHOWN]], margin="  "))
            if len(found) > _SHOWN and not args.all:
                print(f"  and {len(found) - _SHOWN} more (--all lists them)")
            return 1
        print(f"{first} and {second}: all tensors are equal")
    return 1 if told is not None else 0


def _row(found: Difference) -> tuple[str, ...]:
    if found.what:
        return found.file, found.name, found.what, ""
    where = f"at {list(found.at)}" + ("" if found.rank is None else f", a row of rank {found.rank}")
    return (
        found.file,
        found.name,
        f"{found.count:,} of {found.numel:,} elements",
        f"most by {found.largest:.3g} {where}",
    )


def _pairs(first: Path, second: Path, place: Callable[[Path], int | None]) -> list[tuple[Path, Path]]:
    """What is compared with what, the oldest first."""
    from hf_zero.checkpoint.offline.inspection import checkpoints_in

    for folder in (first, second):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder")
    here, there = ({place(path): path for path in checkpoints_in(folder, place)} for folder in (first, second))
    if not here and not there:
        return [(first, second)]
    both = sorted(step for step in here.keys() & there.keys() if step is not None)
    if not both:
        raise CheckpointError(
            f"{first} and {second} have no step in common: compare two checkpoints, or two runs that saved at the same steps"
        )
    return [(here[step], there[step]) for step in both]
