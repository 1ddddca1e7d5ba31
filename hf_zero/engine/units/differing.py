"""Which units only some ranks have called, where they have not gathered alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.unit import Unit

_MOST = 3  # names that are told


def advise(world: World, units: Sequence[Unit], used: Collection[int]) -> str:
    """What to do about it; all ranks ask together.

    Args:
        world: the ranks.
        units: of the model.
        used: numbers of those that this rank's last forward has called.
    """
    counts = world.everyone.combine([int(unit.index in used) for unit in units], "units that were called")
    called = list(zip(units, counts.lowest, counts.highest, strict=True))
    some = [unit.name for unit, lowest, highest in called if lowest < highest]
    names = _outermost(some, [unit.name for unit, lowest, _ in called if lowest])
    if not names:
        return "Look for one that only some ranks call, or not as often as others"
    told = ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")
    return f"Only some have called {told}: with `units: {{whole: [{told}]}}` these stay whole, and ranks may skip them"


def _outermost(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """The outermost modules that hold units of these names, and none of the others."""
    apart = [part for name in others for part in name.split(" + ")]
    found: dict[str, None] = {}
    for name in (part for each in names for part in each.split(" + ")):
        steps = name.split(".")
        heads = (".".join(steps[:length]) for length in range(1, len(steps) + 1))
        found[next((h for h in heads if not any(f"{each}.".startswith(f"{h}.") for each in apart)), name)] = None
    return list(found)
