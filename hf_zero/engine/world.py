"""What every part of the engine shares: the ranks, their exchanges, the configuration, the ledger."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm import wire
from hf_zero.comm.alone import AloneCollectives
from hf_zero.comm.axis import default_group, ranks_of
from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.host.memory import host_number
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.select import make_collectives
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.precision import Precision
from hf_zero.errors import CollectiveError, ConfigError, UsageError, ZeroError
from hf_zero.layout import RowLayout

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class World:
    """The ranks that train a model together.

    They may hold it several times: parameters are cut over the ranks of one *replica*, and gradients are added up over
    all ranks.

    Attributes:
        config: what the user asked for.
        precision: its dtypes.
        device: where parameters live.
        ledger: what counts the exchanges.
        collectives: the exchanges among the ranks that parameters are cut over: this rank's replica.
        replicas: those among the ranks that hold the same rows, one of each replica.
        nearby: those among the ranks that keep a second copy of rows; this rank alone where none do.
        everyone: those among all ranks, which agree, fail and end together; `collectives` itself where there is one replica.
        default_group: torch's default process group, when this was made.
        models: the models partitioned over these ranks.
        number: worlds are numbered as they are made.
    """

    config: ZeroConfig
    precision: Precision
    device: torch.device
    ledger: Ledger
    collectives: Collectives
    replicas: Collectives
    everyone: Collectives
    nearby: Collectives
    default_group: object = None
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    number: int = 0

    @classmethod
    def create(cls, config: ZeroConfig, device: torch.device, mesh: DeviceMesh | None = None) -> World:
        """Meet the other ranks; called by all of them together.

        Args:
            config: what the user asked for.
            device: where parameters live.
            mesh: the ranks; None: all ranks of the program, in `config.replicate` replicas. See `ranks_of`.

        Raises:
            ConfigError: the number of ranks does not fit the config, or the ranks have different configs.
            UsageError: there is no process group yet, or this rank is not in the mesh.
        """
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        group = default_group()
        if launched > 1 and group is None:
            raise UsageError(
                f"this is one of {launched} launched processes, but there is no process group yet: make the "
                "TrainingArguments or the Accelerator first, or call torch.distributed.init_process_group()"
            )
        replicas = _replicas(ranks_of(mesh), config)
        torch_compat.forget_old_groups(group)
        ledger, number = Ledger(), next(_numbers)

        def meet(choice: str, ranks: Sequence[int]) -> Collectives:
            made = make_collectives(choice, ranks, device, config.timeout_s, ledger)
            made.staging_bytes = config.bucket_bytes
            return made

        # Ranks that share parameters have them in memory, and send nothing.
        cannot_share = config.offload.parameters == "disk" or not config.wire.is_default
        choice = "pairwise" if cannot_share and config.exchange == "auto" and device.type == "cpu" else config.exchange
        if not config.wire.is_default and choice == "host":
            raise ConfigError(
                "wire makes messages smaller or fewer, but with HF_ZERO_COLLECTIVES=host ranks share memory"
            )
        if len(replicas) == 1:
            cut = everyone = meet(choice, replicas[0])
            same_rows: Collectives = AloneCollectives(cut.ranks[cut.rank], device, ledger)
        else:
            everyone = meet("pairwise", [rank for replica in replicas for rank in replica])
            own = everyone.ranks[everyone.rank]
            cut = meet(choice, next(replica for replica in replicas if own in replica))
            same_rows = meet("pairwise", next(column for column in zip(*replicas, strict=True) if own in column))
        names = sorted(config.to_dict())
        prints = [zlib.crc32(str(config.to_dict()[name]).encode()) for name in names]
        for rank, row in enumerate(everyone.agree(prints, "the configuration")):
            other = [name for name, left, right in zip(names, prints, row, strict=True) if left != right]
            if other:
                raise ConfigError(
                    f"rank {everyone.ranks[rank]} has another configuration than rank {everyone.ranks[everyone.rank]}: "
                    f"{other} differ"
                )
        precision = Precision.from_config(config)
        nearby: Collectives = AloneCollectives(cut.ranks[cut.rank], device, ledger)
        if config.wire.secondary > 1 and cut.num_ranks > 1:
            nearby = meet("native" if cut.name == "native" else "pairwise", _nearby(cut, config.wire.secondary))
            _check_host(nearby)
        world = cls(config, precision, device, ledger, cut, same_rows, everyone, nearby, group, number=number)
        _worlds.add(world)
        return world

    @classmethod
    def alone(cls, config: ZeroConfig, device: torch.device) -> World:
        """This process alone, whatever process groups there are."""
        ledger = Ledger()
        alone = AloneCollectives(0, device, ledger)
        return cls(
            config, Precision.from_config(config), device, ledger, alone, alone, alone, alone, number=next(_numbers)
        )

    def beside(self, timeout_s: float) -> World:
        """The same ranks with process groups of their own, for exchanges beside those of training; called by all of them.

        Args:
            timeout_s: seconds that a single exchange may take.
        """
        axes: dict[tuple[int, ...], Collectives] = {}
        for each in (self.everyone, self.collectives):
            if each.ranks not in axes:
                axes[each.ranks] = make_collectives("native", each.ranks, self.device, timeout_s, Ledger())
        return dataclasses.replace(
            self,
            collectives=axes[self.collectives.ranks],
            everyone=axes[self.everyone.ranks],
            models=weakref.WeakSet(),
        )

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        return self  # a copied parameter is partitioned over the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def rank(self) -> int:
        """This rank's place among all of them."""
        return self.everyone.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks, which gradients are averaged over."""
        return self.everyone.num_ranks

    @property
    def shard_rank(self) -> int:
        """Which rows this rank holds."""
        return self.collectives.rank

    @property
    def num_shards(self) -> int:
        """Number of ranks that parameters are cut over."""
        return self.collectives.num_ranks

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's rows are the ones that count where the replicas' are the same: in files."""
        return self.replicas.rank == 0

    @property
    def partitions(self) -> bool:
        """Whether anything is partitioned: from stage 1 on, over more than one rank."""
        return self.num_shards > 1 and self.config.policy.shards_optimizer

    def belongs_to(self, default_group: object) -> bool:
        """Whether this world was made under the default process group that is in place now (None: no group)."""
        return self.default_group is default_group

    def layout_of(self, param: Tensor) -> RowLayout:
        """How a `DTensor` is cut, or a plain parameter is to be: over the ranks of a replica, or not at all."""
        if isinstance(param, DTensor):
            is_cut = any(placement.is_shard() for placement in param.placements)
        else:
            is_large = param.ndim > 0 and param.numel() > self.config.keep_whole_numel
            is_cut = self.partitions and is_large and not param.is_complex()
        return RowLayout(tuple(param.shape), self.num_shards if is_cut else 1)

    def meet(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until every rank makes the same call, or raise and say who did not."""
        self.everyone.meet(label, timeout_s)

    def broadcast(self, tensor: Tensor, unit: str, source: int = 0) -> None:
        """Give every rank the values of rank `source`; of a tensor on this rank's device, or on the host."""
        self.everyone.broadcast(tensor, source, unit)

    def gather_whole(self, local: Tensor, layout: RowLayout, unit: str, sent_as: str = "float32") -> Tensor:
        """The whole tensor of which every rank has its rows `local`, in memory of its own; called by all ranks together.

        Args:
            local: this rank's rows.
            layout: which rows are whose.
            unit: for the ledger and for errors.
            sent_as: a wire format, for what modules compute with; "float32": as it is.
        """
        if layout.num_ranks == 1:
            return local.clone()
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=local.dtype, device=local.device)
        layout.elements_of(flat, self.shard_rank).copy_(local.reshape(-1))
        wire.gather(self.collectives, [Rows(flat, layout)], unit, sent_as).wait()
        whole = flat[: layout.numel].view(layout.shape)
        # In memory of its own: `save_pretrained` splits files by the bytes of storages.
        return whole if layout.numel == layout.padded_numel else whole.clone()

    def share(self, value: Any, what: str) -> Any:
        """Rank 0's `value` on every rank, pickled; the others' values do not matter."""
        data = bytearray(pickle.dumps(value)) if self.rank == 0 else bytearray()
        lengths = self.everyone.agree([len(data)], what)
        text = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(lengths[0][0], dtype=torch.uint8)
        self.broadcast(text, what)
        return pickle.loads(text.numpy().tobytes())

    def collect(self, value: object, what: str) -> list[Any]:
        """Every rank's `value`, by rank, on rank 0 (an empty list on the others), pickled."""
        data = pickle.dumps(value)
        lengths = [length for (length,) in self.everyone.agree([len(data)], what)]
        found = []
        for source, length in enumerate(lengths):
            text = torch.empty(length, dtype=torch.uint8)
            if source == self.rank:
                text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.broadcast(text, what, source)
            if self.rank == 0:
                found.append(pickle.loads(text.numpy().tobytes()))
        return found

    @contextmanager
    def together(self, what: str, kind: type[ZeroError], timeout_s: float | None = None) -> Iterator[None]:
        """An error in the block on any rank becomes an error on all: one that raised alone would look like a hang.

        Args:
            what: all ranks are doing, in the error.
            kind: the error's class.
            timeout_s: that the ranks wait for each other after the block; None: as for any exchange.

        Raises:
            CollectiveError: in the block, so that the others know already; or a rank did not come.
        """
        error: Exception | None = None
        try:
            yield
        except CollectiveError:
            raise
        except Exception as caught:
            error = caught
        if timeout_s is not None:
            self.meet(what, timeout_s)
        words = b"" if error is None else described(error, kind).encode()
        lengths = self.everyone.agree([len(words)], what)
        longest = max(length for (length,) in lengths)
        if longest:
            rows = self.everyone.agree([*words, *bytes(longest - len(words))], what)
            numbered = zip(self.everyone.ranks, rows, lengths, strict=True)
            said = {rank: bytes(row[:length]).decode(errors="replace") for rank, row, (length,) in numbered}
            texts = {text: rank for rank, text in reversed(said.items()) if text}
            raise kind(f"{what}: " + "; ".join(f"rank {rank}: {text}" for text, rank in texts.items())) from error

    def from_first(self, work: Callable[[], Result], what: str, kind: type[ZeroError]) -> Result:
        """What `work()` returns on rank 0, or its error, on all ranks; see `together`."""
        result = None
        with self.together(what, kind):
            if self.rank == 0:
                result = work()
        return cast(Result, self.share(result, what))


def described(error: Exception, kind: type[ZeroError]) -> str:
    """What an error says; with its class, unless that is `kind`, which is what the reader gets."""
    said = str(error) if isinstance(error, kind) else f"{type(error).__name__}: {error}"
    return said or type(error).__name__


def _nearby(cut: Collectives, size: int) -> tuple[int, ...]:
    """The ranks, this one among them, that keep a second copy of rows."""
    if cut.num_ranks % size:
        raise ConfigError(
            f"wire.secondary is {size}, which does not divide the {cut.num_ranks} ranks that parameters are cut over"
        )
    first = cut.rank // size * size
    return cut.ranks[first : first + size]


def _check_host(nearby: Collectives) -> None:
    hosts = {number for (number,) in nearby.agree([host_number()], "the host of a second copy")}
    if len(hosts) > 1 and nearby.rank == 0:
        logger.warning(
            "wire.secondary: ranks %s are on %d hosts, so what they gather from each other crosses hosts all the same",
            list(nearby.ranks),
            len(hosts),
        )


def _replicas(ranks: list[list[int]], config: ZeroConfig) -> list[list[int]]:
    """The ranks by replica, checked against the configuration."""
    if not config.policy.shards_optimizer:
        ranks = [[rank for row in ranks for rank in row]]  # nothing is cut, so every rank is a replica
    count = sum(map(len, ranks))
    if config.expected_world_size not in (None, count):
        raise ConfigError(
            f"expected_world_size is {config.expected_world_size}, but {count} "
            f"{'process runs' if count == 1 else 'processes run'}: start as many with `accelerate launch` or "
            "`torchrun` (on CPU the accelerate config needs `distributed_type: MULTI_GPU` and `use_cpu: true`), or "
            "change expected_world_size"
        )
    if len(ranks) > 1 and config.replicate not in (1, len(ranks)):
        raise ConfigError(
            f"replicate is {config.replicate}, but the mesh has {len(ranks)} replicas: leave one of them out"
        )
    if len(ranks) == 1 and config.replicate > 1:
        size, rest = divmod(count, config.replicate)
        if rest or size < 2:
            raise ConfigError(
                f"replicate is {config.replicate}, but {count} {'process runs' if count == 1 else 'processes run'}: it must "
                "divide them into replicas of two or more, over which parameters are cut (for none, use stage 0)"
            )
        ranks = [ranks[0][start : start + size] for start in range(0, count, size)]
    if len(ranks) > 1 and len(ranks[0]) == 1:
        raise ConfigError(
            f"stage {config.stage} cuts parameters over the last axis of the mesh, which has one rank only: give it more, "
            "or use stage 0"
        )
    return ranks


def world_of(param: DTensor) -> World | None:
    """The ranks over which hf_zero has partitioned `param`; None if somebody else made it."""
    world = getattr(
        param, "_zero_world", None
    )  # not by its mesh: torch's caches hand out an equal one of another world
    if isinstance(world, World):
        return world
    # A detached or moved copy has lost the attribute; the last world over the same ranks will do, the same on every rank.
    fitting = [each for each in _worlds if each.num_shards > 1 and each.collectives.mesh == param.device_mesh]
    return max(fitting, key=lambda each: each.number, default=None)


def world_that_cut(param: DTensor) -> World:
    """The ranks over which hf_zero has partitioned `param`.

    Raises:
        UsageError: somebody else made it.
    """
    world = world_of(param)
    if world is None:
        raise UsageError("this DTensor was not made by hf_zero, which cannot tell its rows; use its full_tensor()")
    return world


def own_rows(whole: Tensor, param: DTensor) -> Tensor:
    """This rank's rows of `whole`, cut as `param` is."""
    world = world_that_cut(param)
    return world.layout_of(param).rows_of(whole, world.shard_rank)
