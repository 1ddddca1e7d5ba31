"""What moved between the ranks: bytes, calls and seconds, by kind of exchange and by unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_zero.tables import aligned


@dataclass
class LedgerLine:
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
    """Counts the exchanges that really ran on this rank. It only counts; it sends nothing anywhere.

    Bytes are those that this rank *received*. A gather or a reduce-scatter of `P` padded bytes over `N` ranks counts
    `P * (N - 1) / N`; an all-reduce of `P` bytes counts `2 * P * (N - 1) / N`. A reduce to one rank counts the owner's bytes
    from `N - 1` peers on the owner, and nothing on the others.
    """

    entries: dict[tuple[str, str], LedgerLine] = field(default_factory=dict)

    def add(self, kind: str, unit: str, num_bytes: int) -> LedgerLine:
        """Count one exchange of `kind` for `unit`; returns the entry, to which waiting adds its seconds."""
        entry = self.entries.setdefault((kind, unit), LedgerLine())
        entry.calls += 1
        entry.bytes += num_bytes
        return entry

    def along(self, axis: str) -> Ledger:
        """A ledger that counts here, with the name of an axis after each kind: "gather (tensor axis)"."""
        return _Along(self, axis)

    def total(self, kind: str | None = None) -> LedgerLine:
        """The sum over all units of `kind` (of everything when `kind` is None)."""
        chosen = [entry for (entry_kind, _), entry in self.entries.items() if kind in (None, entry_kind)]
        return LedgerLine(
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
        """One line per kind: calls, MiB received, seconds waited."""
        rows: list[tuple[object, ...]] = [("exchange", "calls", "MiB", "wait s")]
        for kind in self.kinds():
            sums = self.total(kind)
            rows.append((kind, sums.calls, f"{sums.bytes / 2**20:.2f}", f"{sums.seconds:.3f}"))
        return aligned(rows, "<>")


class _Along(Ledger):
    """See `Ledger.along`."""

    def __init__(self, ledger: Ledger, axis: str) -> None:
        super().__init__(ledger.entries)
        self._axis = axis

    def add(self, kind: str, unit: str, num_bytes: int) -> LedgerLine:
        """See `Ledger.add`."""
        return super().add(f"{kind} ({self._axis})", unit, num_bytes)
