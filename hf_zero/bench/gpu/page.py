"""The page that is written: what each part found, and what to do where it falls short."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_zero.tables import aligned

Verdict = Literal["right", "look", "WRONG", "failed", "not here"]

_MEANS = {
    "right": "as it should be",
    "look": "works, but falls short: see what to do",
    "WRONG": "do not train on this before it is understood",
    "failed": "the part ended in an error, or took too long",
    "not here": "this machine, or this version, has no such thing",
}
_SHOWN_LINES = 12  # of what a failed part has printed

_IN_A_LINE = 120


@dataclass(frozen=True)
class Section:
    """What one part found.

    Attributes:
        verdict: in a word.
        said: in a line.
        rows: a table, its head first; none: no table.
        to_do: what to do where it falls short, a sentence each.
        output: what it printed before it failed.
    """

    verdict: Verdict
    said: str
    rows: Sequence[Sequence[object]] = ()
    to_do: Sequence[str] = ()
    output: str = ""

    @classmethod
    def of(cls, found: dict[str, Any]) -> Section:
        """As a rank has reported it."""
        return cls(**found)


@dataclass
class Page:
    """One page of Markdown.

    Attributes:
        title: of the page.
        machine: what is known of it, as facts.
        parts: titles, seconds and findings.
    """

    title: str
    machine: Sequence[tuple[str, str]]
    parts: list[tuple[str, float, Section]] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong and nothing has failed."""
        return not any(section.verdict in ("WRONG", "failed") for _, _, section in self.parts)

    def text(self) -> str:
        """The whole page."""
        lines = [f"# {self.title}", "", *(f"- {name}: {value}" for name, value in self.machine), ""]
        overview: list[Sequence[object]] = [("part", "", "seconds", "in a line")]
        overview += [
            (title, each.verdict, f"{seconds:.0f}", textwrap.shorten(each.said, _IN_A_LINE, placeholder=" ..."))
            for title, seconds, each in self.parts
        ]
        lines += [table(overview), ""]
        used = dict.fromkeys(each.verdict for _, _, each in self.parts)
        lines.append("; ".join(f"{verdict}: {_MEANS[verdict]}" for verdict in used) + ".")
        for title, _, section in self.parts:
            lines += ["", f"## {title[:1].upper()}{title[1:]}", "", f"{section.verdict}: {section.said}"]
            if section.rows:
                lines += ["", table(section.rows)]
            if section.to_do:
                lines += ["", "What to do:", *(f"- {each}" for each in section.to_do)]
            if section.output:
                lines += ["", "```", *section.output.strip().splitlines()[-_SHOWN_LINES:], "```"]
        return "\n".join(lines) + "\n"


def table(rows: Sequence[Sequence[object]]) -> str:
    """A table of Markdown; the first row is its head."""
    head, *rest = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    filled = [[*row, ""] for row in (head, ["---"] * len(head), *rest)]
    return aligned(filled, between=" | ", margin="| ")


def mib(num_bytes: float) -> str:
    """Bytes as the page writes them."""
    return f"{num_bytes / 2**20:,.0f} MiB"
