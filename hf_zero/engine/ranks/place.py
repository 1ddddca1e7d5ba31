"""Where a rank is in the program, as it is told to other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_zero.comm.beside.progress import Progress, is_ahead, is_receiving_from, is_waiting_beyond, progress

SENDING = "send"  # with this begins what a rank is about to do that sends a message


@dataclass(frozen=True)
class ProgramPlace:
    """Where a rank is in the program.

    Attributes:
        world: the name under which the meetings of those that it is told are counted.
        reached: what it has begun together with others, and how many operations all ranks of each group have come to.
        version: how many steps and edits have begun.
        is_apart: whether it has changed alone what it asks for.
        what: the operation that it is about to begin.
        on: what that reads.
        in_groups: how many exchanges it has begun in the program's groups, by their names.
        rank: its number in the program; -1: it has no peers.
    """

    world: str
    reached: Progress
    version: int
    is_apart: bool = False
    what: str = ""
    on: str = ""
    in_groups: Mapping[str, int] = field(default_factory=dict)
    rank: int = -1

    @property
    def key(self) -> str:
        """What ranks that come together have in common."""
        return f"{self.world} {self.reached.get(self.world)} {self.version} {self.what} {self.on}"

    def is_same(self, other: ProgramPlace) -> bool:
        """Whether nothing has been done together in between."""
        return not is_ahead(self.reached, other.reached) and not is_ahead(other.reached, self.reached)

    def is_passed(self) -> bool:
        """Whether this process, which another asks from there, has done all before it, and begun what comes after it."""
        is_addressed = self.what.startswith(SENDING) and is_receiving_from(self.rank)
        return is_addressed or is_ahead(progress(), self.reached) or is_waiting_beyond(self.in_groups)
