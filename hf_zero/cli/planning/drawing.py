"""What `hf-zero plan` draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.cli.planning.row import Row
    from hf_zero.plan.shapes import ModelShape

_COLOURS = {
    "parameters": "#4C72B0",
    "gradients": "#DD8452",
    "optimizer": "#55A868",
    "gathered": "#8172B3",
    "activations": "#C44E52",
}


def draw(shape: ModelShape, rows: list[Row], path: Path) -> None:
    """Stacked bars of what a rank holds, one for each row."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(1.5 + 1.2 * len(rows), 4))
    bottoms = [0.0] * len(rows)
    for kind, colour in _COLOURS.items():
        heights = [getattr(row.holding, kind) / 2**30 for row in rows]
        axes.bar([row.name.replace(", ", "\n") for row in rows], heights, bottom=bottoms, label=kind, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0, 1.06 * max(bottoms))
    axes.set_ylabel("GiB a rank")
    setting = rows[0].setting
    num_ranks = setting.num_ranks * setting.config.tp_size
    axes.set_title(f"{shape.name}, {shape.numel / 1e9:.2f} B parameters, {num_ranks} ranks")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_scale(shape: ModelShape, rows: list[Row], path: Path) -> None:
    """Lines of what a rank holds at rest on more and more ranks: of the first row of each stage."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from hf_zero.plan.scale import at_scale

    figure, axes = plt.subplots(figsize=(6, 4))
    first = {row.setting.config.stage: row for row in reversed(rows)}
    for _, row in sorted(first.items()):
        found = at_scale(shape, row.setting)
        axes.plot([each.num_ranks for each in found], [each.states / 2**30 for each in found], "o-", label=row.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("GiB a rank, without activations")
    axes.set_title(f"{shape.name}, {shape.numel / 1e9:.2f} B parameters")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
