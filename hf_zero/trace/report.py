"""Where the time of some steps went, in words: who waited for what, how much was hidden, and what cost most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_zero.trace.timeline import Lane, Span, Timeline

_MOST = 3  # losses that are told
_WITHOUT_UNITS = "all but the optimizer"  # of stage 0, where nothing shows when a forward begins
_PARTS = ("forward", "backward", "optimizer", "save", "between steps", _WITHOUT_UNITS)
_GATHERS, _REDUCTIONS = ("gather",), ("reduce_scatter", "reduce", "all_reduce")
_ADVICE = {
    "gathers": "more prefetch_bytes, or reshard_after_forward: false (or a size), or wire.gather, if the network is slow",
    "reductions": "accumulate more micro-batches a step, or wire.reduce, if the network is slow",
    "agreements": "ranks that compute different parts of the model, or parameters read between steps",
    "writes": "reads of parameters between steps",
    "between": "the loop's own work between steps: data loading (workers), logging, .item()",
    "save": "async_save: true writes while training goes on",
    "late": "its batch is larger, or its device or host slower",
}


@dataclass(frozen=True)
class Loss:
    """Time that ranks lost for one reason.

    Attributes:
        cause: a key of the advice.
        what: in words.
        seconds: of a step of a rank, in the mean.
        most: what most of it was.
    """

    cause: str
    what: str
    seconds: float
    most: str


@dataclass(frozen=True)
class Report:
    """What some steps say.

    Attributes:
        step_s: one step, in the mean.
        parts: seconds a step, of a rank in the mean, by what it did.
        waiting: share of the time in which a rank waited for exchanges.
        hidden: share of the time between the begin of an exchange and its end in which its rank did not wait for it; None
            without exchanges.
        losses: what cost most, the greatest first.
    """

    step_s: float
    parts: dict[str, float]
    waiting: float
    hidden: float | None
    losses: list[Loss]


def report(timeline: Timeline) -> Report:
    """Look at all steps of all ranks."""
    num_parts = timeline.num_steps * len(timeline.lanes)  # what sums are divided by
    whole_s = sum(lane.ends_s[-1] - lane.ends_s[0] for lane in timeline.lanes)
    waits = [span for lane in timeline.lanes for span in lane.spans if span.kind == "wait"]
    waited_s = sum(_length(_merged(_of(lane, "wait"))) for lane in timeline.lanes)
    under_way_s = sum(_seconds(span) for lane in timeline.lanes for span in lane.spans if span.kind == "exchange")
    parts = dict.fromkeys(_PARTS, 0.0)
    for lane in timeline.lanes:
        for name, seconds in _parts(lane).items():
            parts[name] += seconds / num_parts
    return Report(
        whole_s / num_parts,
        parts,
        waited_s / whole_s if whole_s else 0.0,
        1 - sum(map(_seconds, waits)) / under_way_s if under_way_s else None,
        sorted(_losses(timeline, num_parts, parts), key=lambda loss: -loss.seconds),
    )


def in_words(timeline: Timeline) -> str:
    """The report as some lines."""
    found = report(timeline)
    steps = "1 step" if timeline.num_steps == 1 else f"{timeline.num_steps} steps"
    ranks = "1 rank" if len(timeline.lanes) == 1 else f"{len(timeline.lanes)} ranks"
    parts = ", ".join(
        f"{name} {_share(s, found.step_s)}" for name, s in found.parts.items() if s >= 0.005 * found.step_s
    )
    lines = [f"trace of {steps} of {ranks}, stage {timeline.about.get('stage')}: {_ms(found.step_s)} a step: {parts}"]
    hidden = (
        "" if found.hidden is None else f"; {found.hidden:.0%} of the time of exchanges was hidden behind other work"
    )
    lines.append(f"waiting for exchanges: {found.waiting:.1%} of the time{hidden}")
    told = [loss for loss in found.losses if loss.seconds >= 0.001 * found.step_s][:_MOST]
    if told:
        lines.append("most time was lost to:")
    for number, loss in enumerate(told, 1):
        most = f" (most: {loss.most})" if loss.most else ""
        lines.append(f"  {number}. {loss.what}: {_ms(loss.seconds)} a step, {_share(loss.seconds, found.step_s)}{most}")
        lines.append(f"     look at: {_ADVICE[loss.cause]}")
    if timeline.about.get("device") not in (None, "cpu"):
        lines.append("times are the host's: a GPU works behind it, which torch.profiler shows")
    return "\n".join(lines)


def _losses(timeline: Timeline, num_parts: int, parts: dict[str, float]) -> Iterable[Loss]:
    begun: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)  # an exchange, by rank
    for rank, lane in enumerate(timeline.lanes):
        for span in _of(lane, "exchange"):
            begun[span.name, span.number][rank] = span.start_s
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    by_name: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(cause: str, what: str, name: str, lost_s: float) -> None:
        if lost_s > 0:
            seconds[cause, what] += lost_s
            by_name[cause, what][name] += lost_s

    for rank, lane in enumerate(timeline.lanes):
        for span in _of(lane, "wait"):
            starts = begun[span.name, span.number]
            last = max(starts, key=starts.__getitem__, default=rank)
            late_s = min(span.end_s, starts.get(last, 0.0)) - span.start_s if last != rank else 0.0
            late_s = max(late_s, 0.0)
            add("late", f"rank {last}, for which others waited", span.name, late_s)
            cause, what = _cause_of(span.name)
            add(cause, what, span.name, _seconds(span) - late_s)
    for (cause, what), lost_s in seconds.items():
        names = by_name[cause, what]
        yield Loss(cause, what, lost_s / num_parts, max(names, key=names.__getitem__))
    yield Loss("between", "what the loop does between steps", parts["between steps"], "")
    yield Loss("save", "checkpoints", parts["save"], "")


def _cause_of(name: str) -> tuple[str, str]:
    kind = name.split(" ")[0]
    if kind in _GATHERS:
        return "gathers", "waiting for gathers of parameters"
    if kind in _REDUCTIONS:
        return "reductions", "waiting for sums of gradients"
    if kind == "write":
        return "writes", "waiting for readers of shared memory"
    return "agreements", "waiting until ranks agree"


def _parts(lane: Lane) -> dict[str, float]:
    """Seconds of a rank by what it did. Forward and backward last from their first unit to their last, waits included."""
    found = dict.fromkeys(_PARTS, 0.0)
    found["save"] = _length(_merged(_of(lane, "save")))
    for began_s, ended_s in zip(lane.ends_s, lane.ends_s[1:], strict=False):
        inside = [span for span in lane.spans if began_s <= span.start_s and span.end_s <= ended_s]
        phases: list[tuple[str, float, float]] = []
        for span in sorted((s for s in inside if s.kind in ("forward", "backward", "step")), key=lambda s: s.start_s):
            if phases and phases[-1][0] == span.kind:
                phases[-1] = span.kind, phases[-1][1], max(phases[-1][2], span.end_s)
            else:
                phases.append((span.kind, span.start_s, span.end_s))
        for kind, start_s, end_s in phases:
            found["optimizer" if kind == "step" else kind] += end_s - start_s
        # What belongs to no unit, as the sums at the end of a backward, is part of what went before it.
        covered = sum(end_s - start_s for _, start_s, end_s in phases)
        first_s = min((start_s for _, start_s, _ in phases), default=ended_s)
        saved_s = sum(_seconds(s) for s in inside if s.kind == "save" and s.end_s <= first_s)
        between_s = max(first_s - began_s - saved_s, 0.0)
        has_units = any(kind != "step" for kind, _, _ in phases)
        found["between steps" if has_units or not phases else _WITHOUT_UNITS] += between_s
        rest_s = ended_s - began_s - covered - between_s - saved_s
        if phases:
            found["backward" if any(kind == "backward" for kind, _, _ in phases) else "forward"] += max(rest_s, 0.0)
    return found


def _of(lane: Lane, kind: str) -> list[Span]:
    return [span for span in lane.spans if span.kind == kind]


def _seconds(span: Span) -> float:
    return span.end_s - span.start_s


def _merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Intervals that cover what any of the spans covers, without overlap."""
    found: list[tuple[float, float]] = []
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
        if found and start_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((start_s, end_s))
    return found


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:.1f} ms"


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s:.1%}" if whole_s else "0%"
