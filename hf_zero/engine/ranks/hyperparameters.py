"""With what optimizers have stepped: the same on all ranks, since each steps on its part of one model.

[Note: hyperparameters] Under DDP, ranks with other learning rates (a scheduler that looks at a rank's own validation loss)
drift apart. Here each rank's rows of one weight would have been stepped on in another way. So each remembers with what its
optimizers have stepped, and says a fingerprint of it among what it reports at the end of the next backward. Where those differ,
ranks show each other the values: what differs by rounding only may go on.
"""

from __future__ import annotations

import json
import math
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError

_TOLERANCE = 1e-3  # of a value
_COUNTED = (
    "lr",
    "weight_decay",
    "momentum",
    "dampening",
)  # may be whole numbers; others count, or say which rank this is
_LABEL = "hyperparameters of an optimizer"
_HELD, _ORDER = "parameters of group", ", in the order"

_Values = dict[str, float | str]


class _Steps:
    """What one rank's optimizers have stepped with since ranks have last compared it: by the optimizer's id."""

    def __init__(self) -> None:
        self.taken: dict[int, _Values] = {}

    def as_text(self) -> str:
        return json.dumps([*self.taken.values()])


_by_world: weakref.WeakKeyDictionary[World, _Steps] = weakref.WeakKeyDictionary()


def note_step(optimizer: torch.optim.Optimizer, names: Iterable[Sequence[str]], world: World) -> None:
    """An optimizer is about to step on parameters of a model, on every rank.

    Args:
        optimizer: whose hyperparameters count as they are now.
        names: of the model's parameters in each of its groups.
        world: the model's ranks.
    """
    if not world.partitions:
        return
    values: _Values = {"class": type(optimizer).__name__}
    for index, (group, held) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        values[f"{_HELD} {index}"] = f"{len(held)} ({_print_of(sorted(held))}{_ORDER} {_print_of(held)})"
        for key, value in group.items():
            for place, number in enumerate(_numbers(key, value)):
                values[f"{key} of group {index}" + f", value {place}" * isinstance(value, list | tuple)] = number
    _by_world.setdefault(world, _Steps()).taken[id(optimizer)] = values


def _print_of(names: Sequence[str]) -> str:
    return f"{zlib.crc32(' '.join(names).encode()):08x}"


def _numbers(key: str, value: Any) -> list[float]:
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 and value.device.type == "cpu" else []
    several = value if isinstance(value, list | tuple) else [value]
    return [
        float(each) for each in several if isinstance(each, bool | float) or (key in _COUNTED and type(each) is int)
    ]


def fingerprint(world: World) -> int:
    """A number that tells apart what was stepped with."""
    steps = _by_world.get(world)
    return 0 if steps is None else zlib.crc32(steps.as_text().encode())


def check(world: World, are_alike: bool) -> None:
    """Ranks have told each other their fingerprints; called by all together.

    Args:
        world: the ranks.
        are_alike: whether those are the same; the same answer on all ranks.

    Raises:
        UsageError: on all ranks: what they have stepped with is not.
    """
    text = _by_world.pop(world, _Steps()).as_text()
    if are_alike:
        return
    everyone = world.everyone
    own = text.encode()
    lengths = [length for (length,) in everyone.agree([len(own)], _LABEL)]
    rows = everyone.agree([*own, *bytes(max(lengths) - len(own))], _LABEL)
    said: list[list[_Values]] = [json.loads(bytes(row[:size])) for row, size in zip(rows, lengths, strict=True)]
    for rank, other in zip(everyone.ranks, said, strict=True):
        found = next(_differences(said[0], other), None)
        if found is not None:
            what, one, two = found
            where = f"{one} on rank {everyone.ranks[0]}, {two} on rank {rank}"
            advice = "give all ranks the same (a scheduler: what it looks at, averaged over the ranks)"
            if what.startswith(_HELD) and str(one).partition(_ORDER)[0] == str(two).partition(_ORDER)[0]:
                advice = "list them in one order (a set has another one in each process)"
            raise UsageError(
                f"the ranks have stepped with other optimizers on one model ({what}: {where}), so the rows of each are of "
                f"another step: {advice}"
            )


def _differences(first: Sequence[_Values], other: Sequence[_Values]) -> Iterator[tuple[str, object, object]]:
    if len(first) != len(other):
        yield "number of optimizers", len(first), len(other)
        return
    for one, two in zip(first, other, strict=True):
        for key in dict.fromkeys((*one, *two)):
            if _differ(one.get(key), two.get(key)):
                yield key, one.get(key), two.get(key)


def _differ(one: float | str | None, two: float | str | None) -> bool:
    if isinstance(one, float | int) and isinstance(two, float | int):
        return not math.isclose(one, two, rel_tol=_TOLERANCE) and not (math.isnan(one) and math.isnan(two))
    return one != two
