"""What was recorded of some steps, by rank, and its file: the trace event format that Perfetto and `chrome://tracing` show."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from hf_zero.errors import UsageError

Kind = Literal["forward", "backward", "step", "wait", "exchange", "save"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LANES: dict[str, int] = {"forward": 0, "backward": 0, "step": 0, "save": 0, "wait": 1, "exchange": 2}
_LANE_NAMES = {0: "compute", 1: "waiting", 2: "exchanges under way"}
_MAKER = "hf_zero"


class Span(NamedTuple):
    """Something that lasted.

    Attributes:
        kind: what it was.
        name: the unit, or the exchange ("gather of 'model.layers.0'").
        start_s, end_s: of the host's clock that never goes back.
        number: of an exchange or a wait: the how-manieth of its name, alike on all ranks; else -1.
        bytes: received by an exchange.
    """

    kind: Kind
    name: str
    start_s: float
    end_s: float
    number: int = -1
    bytes: int = 0


@dataclass
class Lane:
    """What one rank has recorded.

    Attributes:
        spans: in the order in which they ended.
        memory: times and the bytes of whole parameters from then on.
        ends_s: the end of each step that was recorded; the first is that of the step before them.
    """

    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def moved(self, by_s: float) -> Lane:
        """The same by another clock."""
        spans = [span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in self.spans]
        return Lane(spans, [(at_s + by_s, size) for at_s, size in self.memory], [end_s + by_s for end_s in self.ends_s])


@dataclass(frozen=True)
class Timeline:
    """Some steps of all ranks, by one clock, from 0 on.

    Attributes:
        lanes: of each rank.
        about: what was trained: stage, exchanges, device.
    """

    lanes: Sequence[Lane]
    about: dict[str, Any]

    @classmethod
    def of(cls, lanes: Sequence[Lane], about: dict[str, Any]) -> Timeline:
        """Of lanes whose clocks show the same at the end of the step before the first."""
        return cls([lane.moved(-lane.ends_s[0]) for lane in lanes], about)

    @property
    def num_steps(self) -> int:
        """How many steps were recorded."""
        return len(self.lanes[0].ends_s) - 1

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            new.write_text(json.dumps({"traceEvents": self._events(), "otherData": {"maker": _MAKER, **self.about}}))
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Timeline:
        """Read what `save` has written.

        Raises:
            UsageError: there is no such file, or it is another program's.
        """
        try:
            content = json.loads(path.read_text())
            about = dict(content["otherData"])
            if about.pop("maker") != _MAKER:
                raise KeyError("maker")
            events = content["traceEvents"]
            lanes = [Lane() for _ in range(1 + max(event["pid"] for event in events))]
            for event in events:
                _take(lanes[event["pid"]], event)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; `hf-zero trace -- SCRIPT` records one") from None
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"{path} is no trace that hf_zero has recorded ({type(error).__name__}: {error})"
            ) from None
        return cls(lanes, about)

    def _events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for rank, lane in enumerate(self.lanes):
            events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
            for number, name in _LANE_NAMES.items():
                events.append({"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": name}})
            for end_s in lane.ends_s:
                events.append({"ph": "i", "s": "p", "pid": rank, "tid": 0, "ts": _us(end_s), "name": "end of a step"})
            for at_s, size in lane.memory:
                args = {"bytes": size}
                events.append({"ph": "C", "pid": rank, "ts": _us(at_s), "name": "whole parameters", "args": args})
            events.extend(_event(rank, place, span) for place, span in enumerate(lane.spans))
            # Exchanges overlap, which only events with a begin and an end of their own may.
            events.extend(_end(rank, place, span) for place, span in enumerate(lane.spans) if span.kind == "exchange")
        return events


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _event(rank: int, place: int, span: Span) -> dict[str, Any]:
    event: dict[str, Any] = {"pid": rank, "tid": _LANES[span.kind], "cat": span.kind, "name": span.name}
    event["ts"] = _us(span.start_s)
    event["args"] = {"number": span.number, "bytes": span.bytes, "us": _us(span.end_s - span.start_s)}
    if span.kind == "exchange":
        return event | {"ph": "b", "id": f"{rank}.{place}"}
    return event | {"ph": "X", "dur": _us(span.end_s - span.start_s)}


def _end(rank: int, place: int, span: Span) -> dict[str, Any]:
    event = {"pid": rank, "tid": _LANES[span.kind], "cat": span.kind, "name": span.name, "ts": _us(span.end_s)}
    return event | {"ph": "e", "id": f"{rank}.{place}"}


def _take(lane: Lane, event: dict[str, Any]) -> None:
    """Add what an event says to the lane of its rank."""
    if event["ph"] == "i":
        lane.ends_s.append(event["ts"] / 1e6)
    elif event["ph"] == "C":
        lane.memory.append((event["ts"] / 1e6, event["args"]["bytes"]))
    elif event["ph"] in ("X", "b"):
        start_s, args = event["ts"] / 1e6, event["args"]
        end_s = start_s + args["us"] / 1e6
        lane.spans.append(Span(event["cat"], event["name"], start_s, end_s, args["number"], args["bytes"]))
