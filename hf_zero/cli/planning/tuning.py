"""`hf-zero plan --best`: keys that change the time of a step and not its results, and what smaller messages would save."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_zero.cli.planning.fitting import fits
from hf_zero.config.wire import Wire

if TYPE_CHECKING:
    from hf_zero.cli.planning.row import Row
    from hf_zero.cli.planning.timing import Clock
    from hf_zero.plan.shapes import ModelShape

# Of stage 3: how much is gathered ahead, and whether units stay whole from the forward to the backward.
_EXACT: tuple[dict[str, Any], ...] = (
    *({"prefetch_bytes": mebi * 2**20} for mebi in (0, 16, 256, 1024)),
    {"reshard_after_forward": False},
    {"reshard_after_forward": False, "prefetch_bytes": 256 * 2**20},
)
_FORMATS = (Wire("bfloat16", "bfloat16"), Wire("int8", "bfloat16"), Wire("int8", "int4"))
_WORTH = 0.99  # of the time before: what saves less is not told


def tuned(
    chosen: Row, rows: Sequence[Row], shape: ModelShape, args: argparse.Namespace, clock: Clock
) -> tuple[Row, list[str]]:
    """The fastest of what computes the same and fits, and lines about it.

    Args:
        chosen: the fastest of the rows.
        rows: ways to train, with the keys' usual values.
        shape: of the model.
        args: of the command.
        clock: predicts times.
    """
    cut = [row for row in rows if row.setting.config.stage == 3]
    others = _faster((_with(row, shape, clock, **keys) for row in cut for keys in _EXACT), chosen, args)
    best = min((chosen, *others), key=seconds)
    lines = []
    if best is not chosen:
        lines = [
            f"Faster, with the same results: {best.name} with {changed(best)}: {_told(best)}, not {_told(chosen)}."
        ]
    smaller = _faster((_with(best, shape, clock, wire=wire) for wire in _FORMATS), best, args)
    if smaller:
        told = ", ".join(f"{_format_of(each)} {_told(each)}" for each in smaller)
        lines.append(f"Not chosen, since results would differ: `wire:` {told}; the time of packing is not counted.")
    return best, lines


def changed(row: Row) -> str:
    """The keys of `_EXACT` that a row sets, as a configuration has them."""
    return ", ".join(f"`{key}: {str(value).lower()}`" for key, value in keys_of(row).items())


def keys_of(row: Row) -> dict[str, Any]:
    """What `tuned` has set."""
    config, usual = row.setting.config, type(row.setting.config)()
    keys = dict.fromkeys(key for keys in _EXACT for key in keys)
    return {key: getattr(config, key) for key in keys if getattr(config, key) != getattr(usual, key)}


def seconds(row: Row) -> float:
    """Of a step; the time of the row is predicted."""
    assert row.played is not None
    return row.played.total


def _with(row: Row, shape: ModelShape, clock: Clock, **keys: Any) -> Row:
    from hf_zero.plan.memory import predict

    setting = replace(row.setting, config=replace(row.setting.config, **keys))
    holding = predict(shape, setting, row.kept)
    return replace(row, setting=setting, holding=holding, played=clock.time_of(setting, row.checkpoints))


def _faster(rows: Iterable[Row], than: Row, args: argparse.Namespace) -> list[Row]:
    timed = [row for row in rows if row.played is not None and fits(row, args)]
    return [row for row in timed if seconds(row) < _WORTH * seconds(than)]


def _format_of(row: Row) -> str:
    wire = row.setting.config.wire
    return f"`{{gather: {wire.gather}, reduce: {wire.reduce}}}`"


def _told(row: Row) -> str:
    return f"{1e3 * seconds(row):,.1f} ms"
