"""What moved between the ranks: bytes, calls and seconds, by kind of exchange and by unit."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entry:
    """Sums over the exchanges of one kind and one unit.

    Attributes:
        calls: number of exchanges.
        bytes: payload that this rank received from its peers.
        seconds: time that the calling thread spent waiting.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Ledger:
    """Counts the exchanges that really ran on this rank; it only counts, and sends nothing anywhere.

    Bytes are what this rank *received*, so a gather of `P` padded bytes over `N` ranks counts `P * (N - 1) / N`, as a
    reduce-scatter does, and an all-reduce of `P` bytes counts `2 * P * (N - 1) / N`. A reduction to one rank counts what its
    owner needs, its own bytes from `N - 1` peers, and nothing on the others.
    """

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)

    def add(self, kind: str, unit: str, num_bytes: int) -> Entry:
        """Count one exchange of `kind` for `unit`; returns the entry, so that its seconds can be added when waited for."""
        entry = self.entries.setdefault((kind, unit), Entry())
        entry.calls += 1
        entry.bytes += num_bytes
        return entry

    def total(self, kind: str | None = None) -> Entry:
        """The sum over all units of `kind` (of everything when `kind` is None)."""
        chosen = [entry for (entry_kind, _), entry in self.entries.items() if kind in (None, entry_kind)]
        return Entry(
            sum(entry.calls for entry in chosen),
            sum(entry.bytes for entry in chosen),
            sum(entry.seconds for entry in chosen),
        )

    def kinds(self) -> tuple[str, ...]:
        """The kinds of exchange seen so far, sorted."""
        return tuple(sorted({kind for kind, _ in self.entries}))

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.entries.clear()

    def table(self) -> str:
        """One line a kind: calls, MiB received, seconds waited."""
        lines = [f"{'exchange':<16}{'calls':>8}{'MiB':>12}{'wait s':>10}"]
        for kind in self.kinds():
            sums = self.total(kind)
            lines.append(f"{kind:<16}{sums.calls:>8}{sums.bytes / 2**20:>12.2f}{sums.seconds:>10.3f}")
        return "\n".join(lines)
