"""Rates of machines: what a rank computes, steps and exchanges in a second."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hf_zero.errors import ConfigError
from hf_zero.plan.timing.work import Work

# What a rank reaches of the figures of data sheets. Assumed, and told with every prediction.
OF_PRODUCTS, OF_MEMORY, OF_LINKS = 0.65, 0.8, 0.8
_LAUNCH_S = 8e-6  # Python and torch's dispatcher, an operator
_UNIT_S = 0.3e-3  # of the engine's hooks, a unit and pass, as measured on the project's machine
_LATENCY_S = 15e-6  # of an exchange, a doubling of the ranks
_HOST_BYTES_S = 100e9  # read and written in the memory of a host, by all of its ranks together
_PCIE_BYTES_S = 25e9  # between a device and pinned memory of its host, each way


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet, a of.

    Attributes:
        name: as `--gpu` takes it.
        operations: of matrix products in bfloat16 without sparsity, a second.
        operations_float32: the same in float32, with TensorFloat32 off, as torch has it by default.
        memory: bytes.
        memory_bytes_s: read or written, a second.
        link_bytes_s: received from the other cards of a host, a second.
    """

    name: str
    operations: float
    operations_float32: float
    memory: int
    memory_bytes_s: float
    link_bytes_s: float


def _gpu(name: str, tera: float, tera32: float, gib: int, memory: float, link: float) -> Gpu:
    return Gpu(name, tera * 1e12, tera32 * 1e12, gib * 2**30, memory * 1e9, link * 1e9)


# Source: the makers' data sheets. NVLink and Infinity Fabric one way; cards without either by their PCIe.
GPUS = {
    each.name: each
    for each in (
        _gpu("a10", 125, 31, 24, 600, 25),
        _gpu("l4", 121, 30, 24, 300, 25),
        _gpu("l40s", 362, 91, 48, 864, 25),
        _gpu("a100", 312, 19.5, 80, 2039, 300),
        _gpu("h100", 989, 67, 80, 3350, 450),
        _gpu("h200", 989, 67, 141, 4800, 450),
        _gpu("b200", 2250, 80, 180, 8000, 900),
        _gpu("mi300x", 1307, 163, 192, 5300, 448),
        _gpu("rtx3090", 71, 35.6, 24, 936, 25),
        _gpu("rtx4090", 165, 82.6, 24, 1008, 25),
        _gpu("rtx5090", 209, 104.8, 32, 1792, 50),
    )
}


@dataclass(frozen=True)
class Exchange:
    """Seconds of one exchange.

    Attributes:
        seconds: from its beginning to its end.
        busy: of these, seconds that are taken from what the rank computes.
    """

    seconds: float
    busy: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Exchanges of several sizes, measured.

    Attributes:
        sizes: bytes of the whole tensor, rising.
        seconds: of each.
        busy: of these, what each takes from what computes beside it.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    busy: tuple[float, ...]

    def of(self, num_bytes: float) -> Exchange:
        """Between two sizes in proportion; beyond the greatest, at its rate."""
        return Exchange(self._at(self.seconds, num_bytes), self._at(self.busy, num_bytes))

    def _at(self, values: Sequence[float], num_bytes: float) -> float:
        place = bisect_left(self.sizes, num_bytes)
        if place == 0:
            return values[0]
        if place == len(self.sizes):
            return values[-1] * num_bytes / self.sizes[-1]
        before, after = self.sizes[place - 1], self.sizes[place]
        part = (num_bytes - before) / (after - before)
        return values[place - 1] + part * (values[place] - values[place - 1])


@dataclass(frozen=True)
class Links:
    """Exchanges of ranks on hosts, by what crosses the slowest link.

    Attributes:
        num_ranks: that exchange.
        on_a_host: of these, on one host.
        inside: bytes that a rank receives from others of its host, a second.
        between: bytes that a host receives from others, a second.
    """

    num_ranks: int
    on_a_host: int
    inside: float
    between: float

    def of(self, num_bytes: float) -> Exchange:
        """A gather, or a reduce-scatter, of a whole tensor of so many bytes: a ring over all ranks.

        Source: Thakur et al., "Optimization of collective communication operations in MPICH" (2005), for the ring.
        """
        if self.num_ranks == 1:
            return Exchange(0.0)
        received = num_bytes * (self.num_ranks - 1) / self.num_ranks
        rate = self.inside if self.num_ranks <= self.on_a_host else min(self.inside, self.between)
        return Exchange(_LATENCY_S * math.ceil(math.log2(self.num_ranks)) + received / rate)


@dataclass(frozen=True)
class Machine:
    """What ranks run on.

    Attributes:
        name: as the page tells it.
        operations: of matrix products, a second and rank, as reached.
        memory_bytes_s: as reached.
        peak_operations: of a data sheet; None where nothing is stated, so that there is no MFU.
        gathers, reductions: of the ranks that shard.
        between_replicas: of the ranks that hold the same rows.
        is_ahead: the host starts operators, and does not wait for them.
        is_background: exchanges go on beside what computes.
        passes_s: of a forward and a backward of the model, measured; None: as counted.
        step_s: an element that the optimizer updates; None: by the bytes that it reads and writes.
        host_bytes_s: a rank's part of the memory of its host.
        pcie_bytes_s: a rank's.
    """

    name: str
    operations: float
    memory_bytes_s: float
    peak_operations: float | None
    gathers: Measured | Links
    reductions: Measured | Links
    between_replicas: Links
    is_ahead: bool
    is_background: bool = True
    passes_s: tuple[float, float] | None = None
    step_s: float | None = None
    host_bytes_s: float = _HOST_BYTES_S
    pcie_bytes_s: float = _PCIE_BYTES_S

    def computing(self, work: Work) -> float:
        """Seconds that the work takes where it runs."""
        products = max(work.operations / self.operations, work.product_bytes / self.memory_bytes_s)
        return products + work.other_bytes / self.memory_bytes_s

    def with_host(self, seconds: float, launches: int, num_units: int) -> float:
        """Seconds with what the host does for operators and units: beside what computes, where it runs ahead of that."""
        host = num_units * _UNIT_S
        return max(seconds, host + launches * _LAUNCH_S) if self.is_ahead else seconds + host


def card(gpu: str) -> Gpu:
    """By its name.

    Raises:
        ConfigError: it is not known.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not known: give one of {', '.join(GPUS)}, or --measure for this machine")
    return GPUS[gpu]


def stated(
    gpu: str, network: float | None, num_ranks: int, num_shards: int, on_a_host: int, is_float32: bool
) -> Machine:
    """A machine by its data sheet.

    Args:
        gpu: a name in `GPUS`.
        network: bytes a second that a host receives from others; None: there is one host.
        num_ranks: all.
        num_shards: ranks that parameters are cut over, next to each other.
        on_a_host: ranks.
        is_float32: what modules compute in.

    Raises:
        ConfigError: the card is not known, or several hosts have no network.
    """
    of = card(gpu)
    if num_ranks > on_a_host and network is None:
        raise ConfigError(
            f"{num_ranks} ranks are on {math.ceil(num_ranks / on_a_host)} hosts of {on_a_host}: give --network, what a host "
            "receives from others, such as 400gbit"
        )
    peak = of.operations_float32 if is_float32 else of.operations
    inside, between = of.link_bytes_s * OF_LINKS, (network or math.inf) * OF_LINKS
    shards = Links(num_shards, on_a_host, inside, between)
    # All ranks of a host send their own rows at once, and share what it receives.
    share = between / min(on_a_host, num_shards)
    replicas = Links(num_ranks // num_shards, on_a_host if num_ranks <= on_a_host else 1, inside, share)
    return Machine(
        gpu,
        peak * OF_PRODUCTS,
        of.memory_bytes_s * OF_MEMORY,
        peak,
        shards,
        shards,
        replicas,
        is_ahead=True,
        host_bytes_s=_HOST_BYTES_S / min(on_a_host, num_ranks),
    )
