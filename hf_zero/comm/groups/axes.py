"""The axes on which ranks meet: who cuts parameters with whom, who adds up gradients, who shares a layer.

[Note: axes] Ranks are counted with the tensor axis innermost, then shards, then replicas. With 2 x 2 x 2 of them:

    replica 0: shard 0: ranks 0 1    shard 1: ranks 2 3
    replica 1: shard 0: ranks 4 5    shard 1: ranks 6 7

Rank 0 cuts parameters with rank 2 (`shards`), holds the same rows as rank 4 (`replicas`), averages gradients with 2, 4
and 6 (`data`), sees the same batch as rank 1 and shares every layer with it (`tensor`), holds the whole model together with 1,
2 and 3 (`holders`), and agrees with all of them (`everyone`).

Some of those that cut parameters, next to each other, may see the same batch, and compute a slice of its sequence each
(`sequence`). For parameters and gradients they are as any other. In attention, those of them that are next to each other
divide heads (`heads`), and one of each such group meets the others for the keys of all slices (`context`).

Some of those that cut parameters, next to each other, may compute some experts each of every layer (`experts`), and send each
other tokens. Those at the same place of each such group compute the same experts (`same_experts`), and gather them from each
other. With 4 shards and `ep_size: 2`, ranks 0 and 1 compute all experts, 2 and 3 again; 0 and 2 compute the same ones. Where
there is a tensor axis, its ranks divide experts as they divide layers, and send each other no tokens: `experts` are then
those at the same place of `ep_size / tp_size` shards, which divide that place's experts once more; or this rank alone.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from hf_zero.comm.alone import AloneCollectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.groups import torch_groups
from hf_zero.comm.groups.devices import device_number
from hf_zero.comm.groups.process_groups import SHARD_AXIS, TENSOR_AXIS, Cell, cells_of, default_group, grid_over
from hf_zero.comm.groups.select import make_collectives, plain_choice
from hf_zero.comm.host.memory import host_number
from hf_zero.comm.ledger import Ledger
from hf_zero.config.axes import check_experts_on_tensor_axis, sharing_sequences
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError, UsageError

logger = logging.getLogger(__name__)

_NOT_ALL_SHARE = "other ranks that parameters are cut over are on several hosts, or cannot share memory"

_Meet = Callable[..., Collectives]


@dataclass(frozen=True, eq=False)
class Axes:
    """Exchanges among the ranks of each axis; see [Note: axes]. One object serves several of them where they are the same.

    Attributes:
        shards: among the ranks that parameters are cut over.
        replicas: among those that hold the same rows, one of each replica.
        data: among those that gradients are averaged over: they see different batches.
        tensor: among those that share every layer.
        sequence: among those that see slices of the same sequences; this rank alone where none do.
        heads: of them, among those that divide heads in attention.
        context: of them, among those that have the same heads.
        experts: among those that compute all experts of this place of the tensor axis, some each; this rank alone where each
            computes all of them.
        same_experts: among those of a replica that compute the same experts.
        holders: among those that hold the whole model once.
        everyone: among all ranks, which agree, fail and end together.
        nearby: among those that keep a second copy of rows; this rank alone where none do.
        grid: the mesh of parameters at rest, (shards, tensor axis); None without a tensor axis.
        cells: of the holders: their ranks by shard and along the tensor axis.
        num_hosts: that the ranks run on.
        is_first_on_host: whether no rank before this one runs on its host.
        num_sharing_memory: ranks that share this one's memory: on one device, or, of those on CPUs, on one host.
    """

    shards: Collectives
    replicas: Collectives
    data: Collectives
    tensor: Collectives
    holders: Collectives
    everyone: Collectives
    nearby: Collectives
    sequence: Collectives
    heads: Collectives
    context: Collectives
    experts: Collectives
    same_experts: Collectives
    grid: DeviceMesh | None = None
    cells: tuple[Cell, ...] = ()
    num_hosts: int = 1
    is_first_on_host: bool = True
    num_sharing_memory: int = 1

    @classmethod
    def connect(cls, config: ZeroConfig, device: torch.device, mesh: DeviceMesh | None, ledger: Ledger) -> Axes:
        """Connect the ranks; called by all of them together.

        Args:
            config: what the user asked for.
            device: where exchanged tensors live.
            mesh: see `cells_of`.
            ledger: counts the exchanges.

        Raises:
            ConfigError: the number of ranks does not fit the config.
            UsageError: this rank is not in the mesh.
        """
        replicas = _replicas(cells_of(mesh, config.tp_size), config)
        torch_groups.forget_old_groups(default_group())
        choice, plain = _exchange_of(config, device), plain_choice(device)
        tensor_size = len(replicas[0][0])

        def make(how: str, ranks: Sequence[int], counted: Ledger = ledger) -> Collectives:
            made = make_collectives(how, ranks, device, config.limit_s, counted)
            made.staging_bytes = config.bucket_bytes
            return made

        if len(replicas) == tensor_size == 1:
            everyone = cut = data = holders = make(choice, [rank for (rank,) in replicas[0]])
            _agree_on(config, everyone)
            same_rows = tensor = make(choice, everyone.ranks[everyone.rank : everyone.rank + 1])
        else:
            everyone = make(plain, [rank for row in replicas for cell in row for rank in cell])
            _agree_on(config, everyone)
            own = everyone.ranks[everyone.rank]
            row, shard, place = _place_of(own, replicas)
            cut = make(choice, [cell[place] for cell in replicas[row]])
            cut = _like_all(cut, choice, everyone, make)
            same_rows = make(plain, [each[shard][place] for each in replicas])
            data, holders = cut, everyone
            if len(replicas) > 1:
                data = make(plain, [cell[place] for each in replicas for cell in each])
                holders = make(plain, [rank for cell in replicas[row] for rank in cell])
            tensor = make(plain, replicas[row][shard], ledger.along("tensor axis"))
            if tensor_size == 1:
                data = everyone
                holders = cut
        nearby = _nearby(cut, config, device, ledger, make)
        by_sequence = _of_sequences(cut, config, ledger, partial(make, plain))
        by_experts = _of_experts(cut, _dividing_experts(config.ep_size, tensor_size), partial(make, plain), ledger)
        own_row = next(row for row in replicas if any(everyone.ranks[everyone.rank] in cell for cell in row))
        grid, cells = None, tuple(own_row)
        if tensor_size > 1:
            grid = _grid(mesh, replicas, device, config.limit_s)
        places = everyone.agree([host_number(), device_number(device)], "the number of hosts")
        hosts = [host for host, _ in places]
        is_first = hosts.index(hosts[everyone.rank]) == everyone.rank
        num_sharing = places.count(places[everyone.rank])
        others = (holders, everyone, nearby, *by_sequence, *by_experts)
        return cls(cut, same_rows, data, tensor, *others, grid, cells, len(set(hosts)), is_first, num_sharing)

    @staticmethod
    def of_one(device: torch.device, ledger: Ledger) -> Axes:
        """Those of a process that meets nobody."""
        alone = AloneCollectives(0, device, ledger)
        others = (alone,) * 8
        return Axes(alone, alone, alone, alone, *others, cells=((0,),))

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The mesh of what modules compute with, over the tensor axis."""
        return None if self.grid is None else self.grid[TENSOR_AXIS]


def _dividing_experts(ep_size: int, tensor_size: int) -> int:
    """Ranks that cut parameters and divide the experts that one place of the tensor axis has."""
    return max(ep_size // tensor_size, 1)


def _of_experts(cut: Collectives, size: int, make: _Meet, ledger: Ledger) -> tuple[Collectives, Collectives]:
    """Among the ranks that compute all experts, and among those that compute the same ones."""
    if size == 1:
        return AloneCollectives(cut.ranks[cut.rank], cut.device, ledger), cut
    first, place = cut.rank // size * size, cut.rank % size
    experts = make(cut.ranks[first : first + size], ledger.along("expert axis"))
    return experts, make(cut.ranks[place::size], ledger.along("same experts"))


def _like_all(cut: Collectives, choice: str, everyone: Collectives, make: _Meet) -> Collectives:
    """Exchanges of one kind for all groups that cut parameters: dtypes and sums hang on it.

    One group may be on one host while another is not; then all of them exchange pairwise.
    """
    names = everyone.agree([zlib.crc32(cut.name.encode())], "how shards are exchanged")
    if len({name for (name,) in names}) == 1:
        return cut
    reason = cut.reason
    if cut.name == "host":
        reason = f"auto: {_NOT_ALL_SHARE}" if choice == "auto" else ""
        if choice == "host":
            logger.warning("collectives: host cannot be had here, but pairwise: %s", _NOT_ALL_SHARE)
    plain = make(plain_choice(cut.device), cut.ranks)
    plain.reason = reason
    return plain


def _agree_on(config: ZeroConfig, everyone: Collectives) -> None:
    names = sorted(config.to_dict())
    prints = [zlib.crc32(str(config.to_dict()[name]).encode()) for name in names]
    for rank, row in enumerate(everyone.agree(prints, "the configuration")):
        other = [name for name, left, right in zip(names, prints, row, strict=True) if left != right]
        if other:
            raise ConfigError(
                f"rank {everyone.ranks[rank]} has another configuration than rank {everyone.ranks[everyone.rank]}: "
                f"{other} differ. Start all ranks with the same file and arguments"
            )


def _place_of(rank: int, replicas: list[list[Cell]]) -> tuple[int, int, int]:
    for number, row in enumerate(replicas):
        for shard, cell in enumerate(row):
            if rank in cell:
                return number, shard, cell.index(rank)
    raise AssertionError(rank)


def _grid(mesh: DeviceMesh | None, replicas: list[list[Cell]], device: torch.device, timeout_s: float) -> DeviceMesh:
    if mesh is None:
        shape = (len(replicas), len(replicas[0]), len(replicas[0][0]))
        return grid_over(*shape, device.type, timeout_s)[SHARD_AXIS, TENSOR_AXIS]
    if mesh.mesh.reshape(-1).tolist() != sorted(mesh.mesh.reshape(-1).tolist()):
        raise UsageError("a mesh with a tensor axis must count its ranks upwards, the tensor axis innermost")
    names = mesh.mesh_dim_names or ()
    return mesh if mesh.ndim == 2 else mesh[names[-2:]]


def _exchange_of(config: ZeroConfig, device: torch.device) -> str:
    # Ranks that share parameters have them in memory, and send nothing.
    cannot_share = config.offload.parameters == "disk" or not config.wire.is_default
    choice = "pairwise" if cannot_share and config.exchange == "auto" and device.type == "cpu" else config.exchange
    if not config.wire.is_default and choice == "host":
        raise ConfigError("wire makes messages smaller or fewer, but with HF_ZERO_COLLECTIVES=host ranks share memory")
    return choice


def _nearby(cut: Collectives, config: ZeroConfig, device: torch.device, ledger: Ledger, make: _Meet) -> Collectives:
    """Among the ranks, this one with them, that keep a second copy of rows."""
    size = config.wire.secondary
    if size == 1 or cut.num_ranks == 1:
        return AloneCollectives(cut.ranks[cut.rank], device, ledger)
    if cut.num_ranks % size:
        raise ConfigError(
            f"wire.secondary is {size}, which does not divide the {cut.num_ranks} ranks that shard parameters: give the "
            "number of ranks on a host"
        )
    first = cut.rank // size * size
    nearby = make("native" if cut.name == "native" else plain_choice(device), cut.ranks[first : first + size])
    hosts = {number for (number,) in nearby.agree([host_number()], "the host of a second copy")}
    if len(hosts) > 1 and nearby.rank == 0:
        logger.warning(
            "wire.secondary: ranks %s are on %d hosts, so what they gather from each other crosses hosts all the same",
            list(nearby.ranks),
            len(hosts),
        )
    return nearby


def _of_sequences(
    cut: Collectives, config: ZeroConfig, ledger: Ledger, make: _Meet
) -> tuple[Collectives, Collectives, Collectives]:
    """Among the ranks that share sequences; those of them that divide heads; those that have the same heads."""
    inner, size = config.sp_size, config.sp_size * config.cp_size
    first, place = cut.rank // size * size, cut.rank % inner
    ranks = cut.ranks[first : first + size]
    sequence = make(ranks, ledger.along("sequence axis"))
    alone = AloneCollectives(cut.ranks[cut.rank], cut.device, ledger)
    if inner == 1:
        return sequence, alone, sequence
    if inner == size:
        return sequence, sequence, alone
    start = (cut.rank - first) // inner * inner
    heads = make(ranks[start : start + inner], ledger.along("heads of the sequence axis"))
    return sequence, heads, make(ranks[place::inner], ledger.along("context of the sequence axis"))


def _replicas(cells: list[list[Cell]], config: ZeroConfig) -> list[list[Cell]]:
    """The ranks by replica and shard, checked against the configuration."""
    if not config.policy.shards_optimizer:
        cells = [[cell for row in cells for cell in row]]  # nothing is cut, so every rank is a replica
    count, tensor_size = sum(map(len, cells)), len(cells[0][0])
    processes = count * tensor_size
    running = f"{processes} {'process runs' if processes == 1 else 'processes run'}"
    if config.expected_world_size not in (None, processes):
        raise ConfigError(
            f"expected_world_size is {config.expected_world_size}, but {running}: start as many with `accelerate launch` or "
            "`torchrun` (on CPU the accelerate config needs `distributed_type: MULTI_GPU` and `use_cpu: true`), or "
            "change expected_world_size"
        )
    if len(cells) > 1 and config.replicate not in (1, len(cells)):
        raise ConfigError(
            f"replicate is {config.replicate}, but the mesh has {len(cells)} replicas: leave one of them out"
        )
    if len(cells) == 1 and config.replicate > 1:
        size, rest = divmod(count, config.replicate)
        if rest or size < 2:
            along = "" if tensor_size == 1 else f", {tensor_size} of them to each layer (tp_size), which leaves {count}"
            instead = "for none, use stage 0" if tensor_size == 1 else "or leave replicate or tp_size out"
            raise ConfigError(
                f"replicate is {config.replicate}, but {running}{along}: it must divide them into replicas of two ranks "
                f"or more, which shard parameters ({instead})"
            )
        cells = [cells[0][start : start + size] for start in range(0, count, size)]
    if len(cells) > 1 and len(cells[0]) == 1:
        instead = ", or use stage 0" if tensor_size == 1 else ""  # which cannot share layers
        raise ConfigError(
            f"stage {config.stage} shards over the last axis of the mesh, which has one rank only: give it more{instead}"
        )
    size = config.sp_size * config.cp_size
    if len(cells[0]) % size:
        along = "" if tensor_size == 1 else f", {tensor_size} of them to each layer (tp_size)"
        along += "" if len(cells) == 1 else f", in {len(cells)} replicas"
        raise ConfigError(
            f"{sharing_sequences(config.sp_size, config.cp_size)} is {size}, but {running}{along}: it must divide the "
            f"{len(cells[0])} ranks that shard parameters"
        )
    check_experts_on_tensor_axis(config.ep_size, tensor_size)
    if len(cells[0]) % _dividing_experts(config.ep_size, tensor_size):
        along = "" if tensor_size == 1 else f", {tensor_size} of them to each layer (tp_size)"
        along += "" if len(cells) == 1 else f", in {len(cells)} replicas"
        what = "it" if tensor_size == 1 else f"ep_size / tp_size, {config.ep_size // tensor_size},"
        raise ConfigError(
            f"ep_size is {config.ep_size}, but {running}{along}: {what} must divide the {len(cells[0])} ranks that shard "
            "parameters"
        )
    return cells
