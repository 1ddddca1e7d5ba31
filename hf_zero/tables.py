"""Text in aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest


def aligned(rows: Iterable[Sequence[object]], sides: str = "<", between: str = "   ", margin: str = "") -> str:
    """Rows as lines of text, in columns.

    Args:
        rows: their cells; a single cell is a heading, which may reach over all columns.
        sides: "<" or ">" for each column; the last one holds for the rest of them.
        between: the columns.
        margin: at the start of each line.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    columns = zip_longest(*(row for row in texts if len(row) > 1), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    sides = sides.ljust(len(widths), sides[-1])
    return "\n".join(
        margin + between.join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip()
        for row in texts
    )


def size_told(num_bytes: float) -> str:
    """Bytes for a reader."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes / 2**20:,.1f} MiB"
