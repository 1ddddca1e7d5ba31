"""What more ranks bring, and where they stop doing so: balance, traffic, messages and sockets up to 10,000 of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hf_zero.comm.agreements import FEW_RANKS, messages_of
from hf_zero.engine.backward.reduction import num_values_agreed
from hf_zero.plan.memory import Setting, balance, predict, unit_bytes
from hf_zero.plan.shapes import ModelShape
from hf_zero.tables import aligned

RANKS = (8, 64, 256, 1_024, 4_096, 10_000)
_UNEVEN = 1.1  # the greatest rank over the mean: from here on a rank in ten, or more, saves nothing
_SMALL_MESSAGE = 2**14  # bytes of a unit that go from one rank to another; below, latency counts and not bandwidth
_USUAL_FILES = 1_024  # that a process may have open where nobody has raised the limit; it needs some beside sockets
_OTHER_FILES = 64


@dataclass(frozen=True)
class AtScale:
    """One number of ranks.

    Attributes:
        num_ranks: of all replicas.
        states: bytes of model states of the greatest rank.
        balance: elements of the greatest rank over the mean.
        traffic: bytes that a rank receives in a step.
        message: bytes of the median unit that one rank gives to another.
        control: messages that a rank sends in a micro-batch for agreement with all others.
        on_host: bytes of a rank in host memory, beside a device.
        sockets: that a rank has open to others for agreements, with gloo: on devices, to those that it talks to; ranks on
            CPUs exchange rows over the same group, which connects each with every other.
    """

    num_ranks: int
    states: int
    balance: float
    traffic: int
    message: int
    control: int
    sockets: int
    on_host: int = 0

    def limits(self) -> list[str]:
        """What stands in the way of this many ranks."""
        found = []
        if self.balance > _UNEVEN:
            found.append(f"the greatest rank holds {self.balance:.2f} of the mean")
        if self.sockets + _OTHER_FILES > _USUAL_FILES:
            found.append(f"{self.sockets:,} sockets a rank (the usual `ulimit -n` is {_USUAL_FILES:,})")
        if self.message < _SMALL_MESSAGE:
            found.append(f"messages of {self.message / 2**10:.1f} KiB, which cost more latency than bandwidth")
        return found


@dataclass(frozen=True)
class HostMemory:
    """What one host offers beside its devices.

    Attributes:
        num_bytes: that may be taken.
        num_ranks: at most, that share them.
    """

    num_bytes: float
    num_ranks: int

    def needed(self, row: AtScale) -> int:
        """Bytes that the ranks of a host take."""
        return row.on_host * min(row.num_ranks, self.num_ranks)


def at_scale(model: ModelShape, setting: Setting) -> list[AtScale]:
    """The same model and configuration on each number of `RANKS` that its replicas divide."""
    found = []
    for num_ranks in RANKS:
        if num_ranks % setting.config.replicate or num_ranks == setting.config.replicate:
            continue
        now = replace(setting, num_ranks=num_ranks)
        held, sizes = predict(model, now), sorted(unit_bytes(model, now))
        found.append(
            AtScale(
                num_ranks,
                held.states,
                balance(model, now),
                held.in_replica + held.between_replicas,
                sizes[len(sizes) // 2] // now.num_shards,
                messages_of(num_ranks, num_values_agreed(len(model.parameters))),
                _sockets(num_ranks, setting.config.exchange == "native"),
                held.on_host,
            )
        )
    return found


def _sockets(num_ranks: int, is_on_device: bool) -> int:
    """See `AtScale`. On a device ranks connect when they first talk: to all if they are few, else as messages go round."""
    to_all = num_ranks - 1
    return min(to_all, 2 * to_all.bit_length()) if is_on_device and num_ranks > FEW_RANKS else to_all


def told(
    model: ModelShape, setting: Setting, size: Callable[[float], str], host: HostMemory | None = None
) -> list[str]:
    """The table, and which limit comes first.

    Args:
        model: its shapes.
        setting: how it is trained; its number of ranks does not count.
        size: writes bytes.
        host: what rests in its memory is shown, too.
    """
    found = at_scale(model, setting)
    head = (
        f"stage {setting.config.stage} on",
        "states",
        "balance",
        "received a step",
        "a message",
        "control",
        "sockets",
    )
    table: list[tuple[str, ...]] = [(*head, *(["on a host"] if host else []))]
    for row in found:
        table.append(
            (
                f"{row.num_ranks:,} ranks",
                size(row.states),
                f"{row.balance:.3f}",
                size(row.traffic),
                f"{row.message / 2**10:,.1f} KiB",
                f"{row.control:,}",
                f"{row.sockets:,}",
                *([size(host.needed(row))] if host else []),
            )
        )
    first = next((row for row in found if row.limits()), None)
    what = "None up to here." if first is None else f"At {first.num_ranks:,} ranks: {'; '.join(first.limits())}."
    return [
        aligned(table, "<>", margin="  "),
        "",
        f"What limits first: {what}",
        *([_told_of_host(found, host, size)] if host else []),
        "balance: the greatest rank over the mean. A message: of the median unit, from one rank to another. control: messages\n"
        "that a rank sends in a micro-batch to agree with all others. sockets: of one rank, for that: on GPUs\n"
        "(collectives: native) to the few that it talks to, on CPUs to all others.\n"
        "The files of a checkpoint do not depend on the ranks, but for the random states, one a rank.",
    ]


def _told_of_host(found: list[AtScale], host: HostMemory, size: Callable[[float], str]) -> str:
    first = next((row for row in found if host.needed(row) <= host.num_bytes), None)
    if first is None:
        return f"Host memory: too little for {host.num_ranks} ranks a host, up to here."
    return f"Host memory: enough from {first.num_ranks:,} ranks on, which need {size(host.needed(first))} on a host."
