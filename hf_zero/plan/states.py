"""Model states and traffic of one rank: one arithmetic, for a model that is planned and for an engine that runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.comm.backends import wire
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.precision import GradientDtypes
from hf_zero.engine.units.grouping import reads_in_backward
from hf_zero.engine.units.keeping import Kept
from hf_zero.layout import RowLayout

_HOLDS_ONLY = "shared"  # transformers' name for the module whose tied weight others compute with; nobody calls it


@dataclass(frozen=True)
class Uses:
    """How often a step of one micro-batch uses a unit. A tied weight has a use for each of the modules that hold it.

    Attributes:
        calls: in the forward, each of which is gathered for; each has a gradient, see `Placed.num_reductions`.
        reads: calls whose backward reads the parameters again.
    """

    calls: int = 1
    reads: int = 1

    @classmethod
    def of(cls, name: str, entries: Sequence[nn.Module]) -> Uses:
        """By the modules, as `group` names them, whose calls need the unit; each is taken to be called once."""
        names = name.split(" + ")
        called = [
            module
            for path, module in zip(names, entries)
            if path.rpartition(".")[2] != _HOLDS_ONLY or len(entries) == 1
        ]
        return cls(max(len(called), 1), sum(map(reads_in_backward, called)))

    @property
    def is_tied(self) -> bool:
        """Whether several modules compute with it, of which a backward reads one."""
        return self.calls > 1 and self.reads > 0

    def num_gathers(self, unit: int, kept: Kept, stays: bool, trains: bool) -> int:
        """How often a step gathers a parameter of a unit that comes and goes.

        Args:
            unit: its number.
            kept: the units that stay whole for the backward.
            stays: whether such a unit would stay for the next step, see `keeping.is_mostly_frozen`.
            trains: the parameter does.
        """
        if unit in kept.by_budget and stays:
            return int(trains)  # but for the first step
        in_forward = 1 if unit in kept.by_budget else self.calls
        return in_forward + self.reads - (self.reads > 0 and unit in kept.all)


@dataclass(frozen=True)
class Placed:
    """A parameter as one rank holds it.

    Attributes:
        layout: how it is cut.
        rank: whose rows are counted.
        rest: dtype at rest.
        compute: dtype that modules see.
        gradient: dtypes of its gradient.
        trains: whether it gets gradients.
        is_shared: its whole is in memory that the ranks of the host share.
        uses: of its unit.
        num_gathers: of its unit in a step, where it comes and goes.
        gather: the wire format of its gathers.
        stays_whole: between uses, in stage 3 too.
    """

    layout: RowLayout
    rank: int
    rest: torch.dtype
    compute: torch.dtype
    gradient: GradientDtypes
    trains: bool
    is_shared: bool
    uses: Uses
    num_gathers: int
    gather: str
    stays_whole: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds only its rows."""
        return self.layout.num_ranks > 1

    @property
    def own(self) -> int:
        """Elements of this rank's rows."""
        return self.layout.local_numel(self.rank)

    def num_reductions(self, config: ZeroConfig) -> int:
        """How often a step reduces its gradient: see [Note: one reduction] in engine/backward/accumulation.py."""
        return 1 if self.gradient.send_sums(config.wire.reduce) else self.uses.calls

    @property
    def row_bytes(self) -> int:
        """Bytes of this rank's rows at rest."""
        return self.own * self.rest.itemsize


@dataclass(frozen=True)
class Ranks:
    """Numbers of ranks.

    Attributes:
        shards: that parameters are cut over.
        replicas: of what these hold.
        data: that see different batches.
        nearby: that keep a second copy of all rows among them; 1: none.
    """

    shards: int
    replicas: int
    data: int
    nearby: int = 1


@dataclass
class ModelStates:
    """Bytes that one rank holds between steps, by kind, and what it receives in a step of one micro-batch.

    Attributes:
        parameters: rows or whole tensors at rest, and the whole copies that stages 0 to 2 compute with; a rank's part of
            those that the ranks of a host share.
        gradients: as they stand between micro-batches.
        optimizer: states of a trainable parameter's size and dtype.
        largest_unit: the most that a single unit takes while it is whole.
        gathered, reduced, between_replicas: received; agreements and small change left out.
        sharded: of the parameters, gradients and optimizer states, those of which a rank has its rows only.
        reduced_rows: of a rank's rows of all gradients, as they travel.
        trained_rows: of a rank's rows of all parameters that train, at rest.
        parameters_on_disk, optimizer_on_disk: of the above, what the configuration puts there.
        on_host: what rests in host memory, beside a device: not in the above.
        rows_from_device: of gradients whose rows come down from a device, at rest.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    largest_unit: int = 0
    gathered: float = 0.0
    reduced: float = 0.0
    between_replicas: float = 0.0
    sharded: int = 0
    reduced_rows: int = 0
    trained_rows: int = 0
    parameters_on_disk: int = 0
    optimizer_on_disk: int = 0
    on_host: int = 0
    rows_from_device: int = 0

    def plus(self, others: ModelStates) -> ModelStates:
        """Those of more parameters."""
        return ModelStates(**{name: value + getattr(others, name) for name, value in vars(self).items()})

    @property
    def traffic(self) -> int:
        """Received in a step."""
        return round(self.gathered + self.reduced + self.between_replicas)


def add_up(
    parameters: Iterable[Placed], config: ZeroConfig, ranks: Ranks, num_states: int, has_device: bool = False
) -> ModelStates:
    """Compute the sizes from layouts; nothing is measured or allocated.

    Args:
        parameters: of the model, each once.
        config: how they are trained.
        ranks: over how many.
        num_states: of a parameter's size that the optimizer keeps.
        has_device: modules compute beside the host's memory.

    Source: ZeRO (arXiv:1910.02054), sections 5 and 7.
    """
    states = ModelStates()
    for p in parameters:
        if has_device and _rests_on_host(p, config):
            _add_resting(states, p, config, ranks, num_states)
            continue
        _add_parameter(states, p, config, ranks)
        if p.trains:
            _add_trained(states, p, config, ranks, num_states)
    return states


def _add_parameter(states: ModelStates, p: Placed, config: ZeroConfig, ranks: Ranks) -> None:
    whole = p.layout.padded_numel * p.compute.itemsize
    stays_whole = not config.policy.shards_parameters or p.is_shared or p.stays_whole
    has_copy = stays_whole and (p.is_cut or p.compute != p.rest)
    # Where nothing is cast, packed or moved to another dim, the rows lie inside the whole copy.
    is_inside = p.is_cut and p.compute == p.rest and config.wire.gather == "float32" and not p.layout.dim
    at_rest = 0 if has_copy and is_inside else p.row_bytes
    states.parameters += at_rest
    if not stays_whole:
        is_on_disk = config.offload.parameters == "disk"
    else:
        is_on_disk = has_copy and p.trains and p.is_cut and config.offload.optimizer == "disk"  # masters
    states.parameters_on_disk += at_rest if is_on_disk else 0
    states.parameters += whole // (ranks.shards if p.is_shared else 1) if has_copy else 0
    _add_gathers(states, p, ranks, stays_whole)


def _rests_on_host(p: Placed, config: ZeroConfig) -> bool:
    offload = config.offload
    is_chosen = offload.parameters == "host" or (offload.optimizer == "host" and p.trains)
    return is_chosen and p.rest.is_floating_point


def _add_resting(states: ModelStates, p: Placed, config: ZeroConfig, ranks: Ranks, num_states: int) -> None:
    """See [Note: rows on the host] in `engine.parameters.host_rows`."""
    sent, all_on_host = p.own * p.compute.itemsize, config.offload.parameters == "host"
    stays_whole = not config.policy.shards_parameters or (ranks.shards == 1 and not all_on_host)
    states.on_host += p.row_bytes + sent
    if stays_whole:
        states.parameters += p.layout.padded_numel * p.compute.itemsize
    elif not all_on_host:
        states.parameters += sent
    _add_gathers(states, p, ranks, stays_whole)
    if p.trains:
        states.on_host += (1 + num_states) * p.row_bytes
        states.rows_from_device += p.row_bytes
        _add_reductions(states, p, config, ranks)


def _add_gathers(states: ModelStates, p: Placed, ranks: Ranks, stays_whole: bool) -> None:
    if not p.is_cut:
        return
    whole = p.layout.padded_numel * p.compute.itemsize
    once = wire.bytes_of(p.gather, p.compute, p.layout, p.layout.chunk_numel) * (ranks.shards - 1)
    if not stays_whole:
        part = whole // ranks.nearby
        states.parameters += part if ranks.nearby > 1 else 0  # the second copy
        states.sharded += p.row_bytes
        again = part * (ranks.nearby - 1) if ranks.nearby > 1 else once
        states.gathered += once + again * (p.num_gathers - 1) if p.num_gathers else 0
    elif p.trains and not p.is_shared:  # what has changed
        states.gathered += once


def _add_trained(states: ModelStates, p: Placed, config: ZeroConfig, ranks: Ranks, num_states: int) -> None:
    policy = config.policy
    states.trained_rows += p.row_bytes
    is_whole = config.optimizer_on == "every_rank"
    states.optimizer += num_states * (p.layout.numel * p.rest.itemsize if is_whole else p.row_bytes)
    states.optimizer_on_disk += num_states * p.row_bytes if config.offload.optimizer == "disk" else 0
    keeps_whole = not policy.shards_gradients and ranks.data > 1 and config.ep_size == 1
    states.gradients += p.layout.numel * p.gradient.summed.itemsize if keeps_whole else p.row_bytes
    if p.is_cut:
        states.sharded += p.row_bytes * (num_states + policy.shards_gradients)
    _add_reductions(states, p, config, ranks)


def _add_reductions(states: ModelStates, p: Placed, config: ZeroConfig, ranks: Ranks) -> None:
    times = p.num_reductions(config)
    if not p.is_cut:
        states.reduced += times * _all_reduced(p.layout.numel * p.gradient.summed.itemsize, ranks.data)
        return
    states.reduced_rows += p.own * p.gradient.sent.itemsize
    states.between_replicas += times * _all_reduced(p.own * p.gradient.summed.itemsize, ranks.replicas)
    if config.reduce_scatter is False:
        states.reduced += times * _all_reduced(p.layout.numel * p.gradient.sent.itemsize, ranks.shards)
    elif config.wire.reduce != "float32":
        sent = wire.bytes_of(config.wire.reduce, p.gradient.given, p.layout, p.own)
        states.reduced += times * sent * (ranks.shards - 1)
    else:
        states.reduced += times * p.layout.numel * p.gradient.sent.itemsize * (ranks.shards - 1) / ranks.shards


def _all_reduced(num_bytes: int, ranks: int) -> float:
    return 2 * num_bytes * (ranks - 1) / ranks
