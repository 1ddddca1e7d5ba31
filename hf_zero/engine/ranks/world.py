"""What every part of the engine shares: the ranks, their exchanges, the configuration, the ledger."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm import together
from hf_zero.comm.backends.wire import WireCollectives
from hf_zero.comm.beside import crossed
from hf_zero.comm.beside.progress import leave_out
from hf_zero.comm.beside.service import Peers
from hf_zero.comm.collectives import Collectives, RowCollectives, Rows
from hf_zero.comm.groups import torch_groups
from hf_zero.comm.groups.axes import Axes
from hf_zero.comm.groups.process_groups import default_group
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.ledger import Ledger
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.precision import Precision
from hf_zero.engine.ranks.serving import Serving
from hf_zero.errors import UsageError, ZeroError
from hf_zero.layout import Cut, RowLayout

Result = TypeVar("Result")

_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_numbers = itertools.count()
STAYS_ON_DEVICE = "_zero_stays_on_device"  # attribute of a parameter that `offload.ratio` leaves there


@dataclass(frozen=True, eq=False, kw_only=True)
class World(Axes):
    """The ranks that train a model together, by axis (see `Axes`).

    They may hold it several times: parameters are cut over the ranks of one *replica*, and gradients are added up over
    all ranks that see different batches.

    Attributes:
        config: what the user asked for.
        precision: its dtypes.
        device: where parameters live.
        ledger: what counts the exchanges.
        default_group: torch's default process group, when this was made.
        models: the models partitioned over these ranks.
        number: worlds are numbered as they are made.
        serving: what one of the ranks may do alone.
        limit_s: seconds after which one exchange counts as failed.
    """

    config: ZeroConfig
    precision: Precision
    device: torch.device
    ledger: Ledger
    serving: Serving
    limit_s: float
    default_group: object = None
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    number: int = 0

    @classmethod
    def create(cls, config: ZeroConfig, device: torch.device, mesh: DeviceMesh | None = None) -> World:
        """Meet the other ranks; called by all of them together.

        Args:
            config: what the user asked for.
            device: where parameters live.
            mesh: the ranks; None: all ranks of the program, in `config.replicate` replicas. See `cells_of`.

        Raises:
            ConfigError: the number of ranks does not fit the config, or the ranks have different configs.
            UsageError: there is no process group yet, or this rank is not in the mesh.
        """
        device = torch.empty(0, device=device).device  # as tensors tell theirs: "cpu", which is not equal to "cpu:0"
        launched, group = int(os.environ.get("WORLD_SIZE", "1")), default_group()
        if launched > 1 and group is None:
            raise UsageError(
                f"this is one of {launched} launched processes, but there is no process group yet: make the "
                "TrainingArguments or the Accelerator first, or call torch.distributed.init_process_group()"
            )
        limited = config
        if group is not None and config.timeout_s == "auto":
            limited = dataclasses.replace(config, timeout_s=max(config.limit_s, torch_groups.timeout_of(group)))
        ledger, number = Ledger(), next(_numbers)
        axes = Axes.connect(limited, device, mesh, ledger)
        precision = Precision.from_config(config)
        world = cls(
            **vars(axes),
            config=config,
            precision=precision,
            device=device,
            ledger=ledger,
            serving=_serving(axes, limited, device),
            limit_s=limited.limit_s,
            default_group=group,
            number=number,
        )
        _worlds.add(world)
        return world

    @classmethod
    def alone(cls, config: ZeroConfig, device: torch.device) -> World:
        """This process alone, whatever process groups there are."""
        ledger = Ledger()
        return cls(
            **vars(Axes.of_one(device, ledger)),
            serving=Serving("", None, (), config.limit_s, device),
            limit_s=config.limit_s,
            config=config,
            precision=Precision.from_config(config),
            device=device,
            ledger=ledger,
            number=next(_numbers),
        )

    def beside(self, timeout_s: float) -> World:
        """The same ranks with process groups of their own, for exchanges beside those of training; called by all of them.

        Args:
            timeout_s: seconds that a single exchange may take.
        """
        made: dict[tuple[int, ...], Collectives] = {}
        for each in (self.everyone, self.shards, self.tensor, self.holders):  # what a checkpoint needs
            if each.ranks not in made:
                made[each.ranks] = make_collectives("native", each.ranks, self.device, timeout_s, Ledger())
                if each.num_ranks > 1:
                    leave_out(made[each.ranks].counts)
        return dataclasses.replace(
            self,
            everyone=made[self.everyone.ranks],
            shards=made[self.shards.ranks],
            tensor=made[self.tensor.ranks],
            holders=made[self.holders.ranks],
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
        """Number of ranks."""
        return self.everyone.num_ranks

    @functools.cached_property
    def wired(self) -> RowCollectives:
        """`shards` in the wire formats asked for: for what modules compute with, and for gradients.

        All else goes over `shards`, exact: masters, checkpoints, integers, and what ranks agree on.
        """
        wire = self.config.wire
        return self.shards if wire.is_exact else WireCollectives(self.shards, wire.gather, wire.reduce)

    @property
    def shard_rank(self) -> int:
        """Which rows this rank holds."""
        return self.shards.rank

    @property
    def num_shards(self) -> int:
        """Number of ranks that parameters are cut over."""
        return self.shards.num_ranks

    @property
    def batch_rank(self) -> int:
        """Which of the batches of a step this rank sees: ranks that share layers, or a sequence, see the same one."""
        return self.data.rank // self.sequence.num_ranks

    @property
    def num_batches(self) -> int:
        """How many batches all ranks see together."""
        return self.data.num_ranks // self.sequence.num_ranks

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's rows are the ones that count where the replicas' are the same: in files."""
        return self.replicas.rank == 0

    @property
    def partitions(self) -> bool:
        """Whether anything is partitioned: from stage 1 on, over more than one rank."""
        return (self.num_shards > 1 or self.tensor.num_ranks > 1) and self.config.policy.shards_optimizer

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are whole only while they are used. What one rank sends up after a step may as well stay there."""
        is_kept = self.num_shards == 1 and self.steps_on_host and self.config.offload.parameters != "host"
        return self.config.policy.shards_parameters and not is_kept

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are reduced to rows after every micro-batch.

        In stage 1, too, where they go to the host, or where a rank has those of some experts only.
        """
        return self.config.policy.shards_gradients or self.steps_on_host or self.experts.num_ranks > 1

    @property
    def steps_on_host(self) -> bool:
        """Whether optimizers step in host memory, beside a device."""
        return self.device.type != "cpu" and self.config.offload.goes_to_host

    def home_of(self, param: Tensor) -> torch.device:
        """Where a parameter's rows are to lie at rest: see [Note: rows on the host]."""
        offload = self.config.offload
        is_chosen = offload.parameters == "host" or (offload.optimizer == "host" and param.requires_grad)
        is_host = self.steps_on_host and is_chosen and param.is_floating_point()
        return torch.device("cpu") if is_host and not vars(param).get(STAYS_ON_DEVICE) else self.device

    def belongs_to(self, default_group: object) -> bool:
        """Whether this world was made under the default process group that is in place now (None: no group)."""
        return self.default_group is default_group

    def cut_of(self, param: Tensor) -> Cut:
        """Which elements this rank holds of a partitioned parameter, or is to hold of one that will be.

        Args:
            param: at rest; or as it was made, plain, or a `DTensor` over the tensor axis.
        """
        tensor, shape = None, tuple(param.shape)
        placements = list(param.placements) if isinstance(param, DTensor) else []
        if placements and self.tensor.num_ranks > 1:
            tensor = torch_compat.tensor_cut(shape, placements.pop(), self.tensor.num_ranks)
        part = shape if tensor is None else tensor.local_shape(self.tensor.rank)
        if placements and not placements[0].is_replicate():
            is_cut, dim = True, torch_compat.dim_of(placements[0])
        elif placements:
            is_cut, dim = False, 0
        else:
            is_large = len(part) > 0 and math.prod(part) > self.config.keep_whole_numel
            is_cut = self.partitions and is_large and not param.is_complex()
            dim = self._dim_of(part) if is_cut and param.is_floating_point() else 0  # packed bytes have an order
        rows = RowLayout(part, self.num_shards if is_cut else 1, dim=dim)
        return Cut(shape, rows, self.shard_rank, tensor, self.tensor.rank)

    def _dim_of(self, shape: tuple[int, ...]) -> int:
        """The dim on which a parameter is cut: always the first where the tensor axis cuts as well."""
        return 0 if self.tensor.num_ranks > 1 else RowLayout.balanced(shape, self.num_shards).dim

    def layout_of(self, param: Tensor) -> RowLayout:
        """How what a rank has of a parameter is cut by rows over the ranks of a replica, or that it is not."""
        return self.cut_of(param).rows

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of parameters at rest."""
        return self.shards.mesh if self.grid is None else self.grid

    def meet(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until every rank makes the same call, or raise and say who did not."""
        self.everyone.meet(label, timeout_s)

    def all_come(self, label: str, tensors: Iterable[Tensor | None], timeout_s: float | None = None) -> bool:
        """Whether every rank makes the same call, which only reads these tensors; else this one makes it alone.

        See [Note: alone]. They are parameters, gradients, states of optimizers, and what was computed of these; nobody can be
        asked for anything else. Those of other models may be of other worlds, which are asked later, one by one.

        Raises:
            UsageError: this rank makes it alone, and there is something that it cannot ask for.
        """
        if not self.serving.can_be_alone:
            self.meet(label, timeout_s)
            return True
        places = [None if tensor is None else self._serving_of(tensor).find(tensor) for tensor in tensors]
        has_all = self.serving.all_come(label, str(places[:1]))
        if not has_all and None in places:
            raise UsageError(
                f"{label}: rank {self.rank} runs this alone, while the others have gone on; only a model's parameters and "
                "its optimizers' states can be read by one rank, and gradients until the step: let all ranks run it (not "
                "behind `if is_main_process`)"
            )
        return has_all

    def _serving_of(self, tensor: Tensor) -> Serving:
        world = getattr(tensor, "_zero_world", None)
        return world.serving if isinstance(world, World) else self.serving

    def broadcast(self, tensor: Tensor, unit: str, source: int = 0) -> None:
        """Give every rank the values of rank `source`; of a tensor on this rank's device, or on the host."""
        self.everyone.broadcast(tensor, source, unit)

    def gather_whole(self, local: Tensor, layout: RowLayout, unit: str, over: RowCollectives | None = None) -> Tensor:
        """The whole tensor of which every rank has its rows `local`, in memory of its own; called by all ranks together.

        Args:
            local: this rank's rows.
            layout: which rows are whose.
            unit: for the ledger and for errors.
            over: `wired`, for what modules compute with; None: `shards`, for what must arrive as it is.
        """
        if layout.num_ranks == 1:
            return local.clone()
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=local.dtype, device=local.device)
        layout.elements_of(flat, self.shard_rank).copy_(layout.flat(local))
        (over or self.shards).gather([Rows(flat, layout)], unit).wait()
        whole = layout.in_shape(flat[: layout.numel], layout.shape).contiguous()
        # In memory of its own: `save_pretrained` splits files by the bytes of storages.
        return whole.clone() if whole.data_ptr() == flat.data_ptr() and layout.numel != layout.padded_numel else whole

    def gather_parameter(self, local: Tensor, cut: Cut, unit: str) -> Tensor:
        """The whole of what every rank holds a part of, over both axes, in memory of its own; called by all ranks together.

        Args:
            local: this rank's elements.
            cut: which they are.
            unit: for the ledger and for errors.
        """
        part = self.gather_whole(local, cut.rows, unit)
        if cut.tensor is None:
            return part
        shapes = [cut.tensor.local_shape(rank) for rank in range(self.tensor.num_ranks)]
        layout = RowLayout((len(shapes), max(map(math.prod, shapes))), len(shapes))  # a row a rank, equally long
        rows = part.new_zeros(layout.shape)
        rows[self.tensor.rank, : part.numel()].copy_(part.reshape(-1))
        self.tensor.gather([Rows(rows.view(-1), layout)], unit).wait()
        whole = part.new_empty(cut.shape)
        for rank, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
            cut.tensor.put(whole, row[: math.prod(shape)].view(shape), rank)
        return whole

    def share(self, value: Any, what: str) -> Any:
        """Rank 0's `value` on every rank, pickled; the others' values do not matter."""
        return together.share(self.everyone, value, what)

    def collect(self, value: object, what: str) -> list[Any]:
        """Every rank's `value`, by rank, on rank 0 (an empty list on the others), pickled."""
        return together.collect(self.everyone, value, what)

    def together(
        self, what: str, kind: type[ZeroError], timeout_s: float | None = None
    ) -> AbstractContextManager[None]:
        """An error in the block on any rank becomes an error on all; see `comm.together.together`."""
        return together.together(self.everyone, what, kind, timeout_s)

    def from_first(self, work: Callable[[], Result], what: str, kind: type[ZeroError]) -> Result:
        """What `work()` returns on rank 0, or its error, on all ranks; see `together`."""
        return together.from_first(self.everyone, work, what, kind)


def _serving(axes: Axes, config: ZeroConfig, device: torch.device) -> Serving:
    everyone = axes.everyone
    serves = everyone.num_ranks > 1 and axes.tensor.num_ranks == 1 and config.policy.shards_optimizer
    peers = Peers.connect(everyone, axes.num_hosts == 1) if serves else None
    if peers is not None and device.type == "cpu":
        crossed.watch(peers)
    name = "" if peers is None else f"coming {everyone.counts.group}"
    return Serving(name, peers, axes.shards.ranks, config.limit_s, device)


def world_of(param: DTensor) -> World | None:
    """The ranks over which hf_zero has partitioned `param`; None if somebody else made it."""
    world = getattr(
        param, "_zero_world", None
    )  # not by its mesh: torch's caches hand out an equal one of another world
    if isinstance(world, World):
        return world
    # A detached or moved copy has lost the attribute; the last world over the same ranks will do, the same on every rank.
    fitting = [each for each in _worlds if each.partitions and each.mesh == param.device_mesh]
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
    """This rank's elements of `whole`, cut as `param` is."""
    return world_that_cut(param).cut_of(param).of(whole)
