"""What of a plan fits, and what would help where nothing does."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_zero.tables import size_told as size

if TYPE_CHECKING:
    from hf_zero.cli.planning.row import Row
    from hf_zero.plan.memory import Holding
    from hf_zero.plan.shapes import ModelShape

MARGIN = 0.9  # of a device's memory: the rest is for its context, workspaces and fragments
USUAL_RANKS_A_HOST = 8
_MOST_RANKS = 2**14


def chosen_of(rows: list[Row], args: argparse.Namespace) -> Row | None:
    """The first that fits, or the fastest; None: nothing fits."""
    fitting = [row for row in rows if fits(row, args)]
    if args.best:
        timed = [(row.played.total, row) for row in fitting if row.played is not None]
        return min(timed, key=lambda each: each[0])[1] if timed else None
    return next(iter(fitting), None)


def fits(row: Row, args: argparse.Namespace) -> bool:
    """Whether there is room for it, on the device and on its host."""
    return fits_device(row.holding, args) and fits_host(row, args)


def fits_device(holding: Holding, args: argparse.Namespace) -> bool:
    """Whether a device has room."""
    return bool(args.gpu_memory is None or holding.peak <= MARGIN * args.gpu_memory)


def fits_host(row: Row, args: argparse.Namespace) -> bool:
    """Whether a host has room for its ranks."""
    return bool(args.host_memory is None or row.holding.on_host * on_a_host(args) <= MARGIN * args.host_memory)


def on_a_host(args: argparse.Namespace) -> int:
    """Ranks that share a host's memory."""
    return int(min(args.ranks, args.ranks_per_host or USUAL_RANKS_A_HOST))


def verdict(shape: ModelShape, rows: list[Row], args: argparse.Namespace) -> list[str]:
    """Lines about what fits into --gpu-memory; where nothing does, what would help."""
    limit = f"{size(args.gpu_memory)}, of which a tenth is kept free"
    chosen = chosen_of(rows, args)
    if chosen is not None:
        advice = ["offload to the host is what makes it fit."] if chosen.setting.config.offload.goes_to_host else []
        how = "Fastest" if args.best else "Cheapest"
        return [f"{how} that fits into {limit}: {chosen.name}" + (f"; {advice[0]}" if advice else ".")]
    least = min(rows, key=lambda row: (not fits_host(row, args), row.holding.peak))
    h, room = least.holding, MARGIN * args.gpu_memory
    too_much = min((row.holding.on_host for row in rows if fits_device(row.holding, args)), default=None)
    if too_much is not None:
        needed = too_much * on_a_host(args)
        return [f"It fits into {limit}, if a host has {size(needed / MARGIN)} for its {on_a_host(args)} ranks."]
    lines = [f"Nothing fits into {limit}; {least.name} comes nearest."]
    if h.activations > room or h.activations + h.gathered > room > h.gathered:
        lines.append(
            f"More ranks do not help: activations alone need {size(h.activations)}"
            + (f", and gathered units {size(h.gathered)}" if h.activations <= room else "")
            + ". Use a smaller batch or shorter sequences."
            + ("" if least.checkpoints or not args.seq_len else " Or checkpointing.")
        )
    elif h.gathered > room:
        lines.append(f"More ranks do not help: gathered units alone need {size(h.gathered)}.")
    else:
        ranks = _enough_ranks(shape, least, args)
        lines += [] if ranks is None else [f"It fits on {ranks:,} ranks."]
        if not least.setting.config.offload.is_anything:
            lines.append(
                "`offload: {optimizer: host, parameters: host}` moves what a rank holds at rest to host memory."
            )
    if room - h.gathered < h.activations <= room:
        lines.append(_smaller_units(shape, least, room))
    return lines


def _smaller_units(shape: ModelShape, row: Row, room: float) -> str:
    """What makes less whole at a time, as far as it does: nothing is smaller than a parameter."""
    from hf_zero.plan.memory import unit_bytes

    together = max(unit_bytes(shape, row.setting), default=0)
    alone = max(unit_bytes(shape.one_by_one(), row.setting), default=0)
    tensor_axis = "`tp_size: 2` (or more) cuts every layer over that many ranks."
    if alone > room:
        return f"The largest parameter takes {size(alone)}: {tensor_axis}"
    return (
        f"Less is whole at a time with `prefetch_bytes: 0` (the largest unit takes {size(together)}), and with smaller units, "
        f"such as `units: {{min_numel: 1}}` (the largest parameter takes {size(alone)}). {tensor_axis}"
    )


def _enough_ranks(shape: ModelShape, row: Row, args: argparse.Namespace) -> int | None:
    from hf_zero.plan.activations import Kept
    from hf_zero.plan.memory import divides_experts, predict

    ranks = args.ranks
    while ranks < _MOST_RANKS:
        ranks *= 2
        setting = replace(row.setting, num_ranks=ranks // args.tp)
        if not divides_experts(shape, setting):
            return None
        held = predict(shape, setting, Kept(row.holding.activations, 0))
        if held.peak <= MARGIN * args.gpu_memory:
            return int(ranks)
    return None
