"""One step of all ranks as a picture, which can be read on light and dark pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_zero.trace.timeline import Lane, Timeline

_COLOURS = {"forward": "#4c78a8", "backward": "#59a14f", "step": "#b279a2", "save": "#9d755d", "wait": "#e45756"}
_GATHER, _REDUCE, _OTHER = "#72b7b2", "#f2a541", "#a0a0a0"
_INK = "#808080"
_NAMES = {"step": "optimizer", "wait": "waiting"}


def draw(timeline: Timeline, path: Path) -> None:
    """Draw the last step that was recorded: for each rank compute and waits, exchanges under way, and memory.

    Args:
        timeline: what was recorded.
        path: the picture, .png or .svg.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    num_ranks = len(timeline.lanes)
    figure, axes = plt.subplots(num_ranks, 1, figsize=(11, 1 + 1.5 * num_ranks), sharex=True, squeeze=False)
    start_s = min(lane.ends_s[-2] for lane in timeline.lanes)
    for rank, (lane, (axis,)) in enumerate(zip(timeline.lanes, axes, strict=True)):
        _draw_rank(axis, lane, start_s)
        axis.set_ylabel(f"rank {rank}", color=_INK)
    axes[-1][0].set_xlabel("ms", color=_INK)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (*_COLOURS.values(), _GATHER, _REDUCE, _OTHER)]
    names = [_NAMES.get(name, name) for name in _COLOURS] + ["gather under way", "sum under way", "other exchange"]
    figure.legend(handles, names, loc="upper center", ncols=len(names), frameon=False, labelcolor=_INK, fontsize=7)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=130, transparent=True)
    plt.close(figure)


def _draw_rank(axis: Any, lane: Lane, start_s: float) -> None:
    end_s = lane.ends_s[-1]
    shown = [span for span in lane.spans if span.end_s > start_s and span.start_s < end_s]
    for span in shown:
        bar = [(1e3 * (max(span.start_s, start_s) - start_s), 1e3 * (span.end_s - max(span.start_s, start_s)))]
        if span.kind == "exchange":
            kind = span.name.split(" ")[0]
            is_sum = "reduce" in kind
            row = 1 if kind == "gather" else 0.5 if is_sum else 0
            axis.broken_barh(bar, (row, 0.4), color=_GATHER if kind == "gather" else _REDUCE if is_sum else _OTHER)
        else:
            axis.broken_barh(bar, (1.6, 1.0), color=_COLOURS[span.kind], linewidth=0.3, edgecolor="white")
    axis.set_xlim(0, 1e3 * (end_s - start_s))
    axis.set_ylim(-0.1, 2.7)
    axis.set_yticks([])
    axis.tick_params(colors=_INK)
    for side in axis.spines.values():
        side.set_color(_INK)
    memory = [(1e3 * (at_s - start_s), size / 2**20) for at_s, size in lane.memory if start_s <= at_s <= end_s]
    if memory:
        beside = axis.twinx()
        beside.step([at for at, _ in memory], [size for _, size in memory], where="post", color=_INK, linewidth=0.8)
        beside.set_ylabel("MiB whole", color=_INK, fontsize=7)
        beside.tick_params(colors=_INK, labelsize=7)
        for side in beside.spines.values():
            side.set_color(_INK)
