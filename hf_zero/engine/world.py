"""What every part of the engine shares: the ranks, their exchanges, the configuration, the ledger."""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.select import make_collectives
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.precision import Precision
from hf_zero.errors import ConfigError, UsageError, ZeroError
from hf_zero.layout import RowLayout

_worlds: weakref.WeakSet[World] = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class World:
    """The ranks that a model is partitioned over.

    Attributes:
        config: what the user asked for.
        precision: its dtypes.
        device: where parameters live.
        ledger: what counts the exchanges.
        collectives: the exchanges; None where there is one rank, and so nothing to exchange.
        default_group: torch's default process group, when this was made.
        models: the models partitioned over these ranks.
        number: worlds are numbered as they are made.
    """

    config: ZeroConfig
    precision: Precision
    device: torch.device
    ledger: Ledger
    collectives: Collectives | None
    default_group: object = None
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    number: int = field(default_factory=itertools.count().__next__)

    @classmethod
    def create(cls, config: ZeroConfig, device: torch.device) -> World:
        """Meet the other ranks; called by all of them together.

        Raises:
            ConfigError: the number of ranks is not `config.expected_world_size`, or the ranks have different configs.
        """
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and not dist.is_initialized():
            raise UsageError(
                f"this is one of {launched} launched processes, but there is no process group yet: make the "
                "TrainingArguments or the Accelerator first, or call torch.distributed.init_process_group()"
            )
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if config.expected_world_size not in (None, world_size):
            raise ConfigError(
                f"expected_world_size is {config.expected_world_size}, but {world_size} "
                f"{'process runs' if world_size == 1 else 'processes run'}: start as many with `accelerate launch` or "
                "`torchrun` (on CPU the accelerate config needs `distributed_type: MULTI_GPU` and `use_cpu: true`), or "
                "change expected_world_size"
            )
        default_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        torch_compat.forget_old_groups(default_group)
        ledger = Ledger()
        collectives = make_collectives(config.exchange, device, config.timeout_s, ledger)
        if collectives is not None:
            collectives.staging_bytes = config.bucket_bytes
            names = sorted(config.to_dict())
            prints = [zlib.crc32(str(config.to_dict()[name]).encode()) for name in names]
            for rank, row in enumerate(collectives.agree(prints, "the configuration")):
                other = [name for name, left, right in zip(names, prints, row, strict=True) if left != right]
                if other:
                    raise ConfigError(
                        f"rank {rank} has another configuration than rank {collectives.rank}: {other} differ"
                    )
        world = cls(config, Precision.from_config(config), device, ledger, collectives, default_group)
        _worlds.add(world)
        return world

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        return self  # a copied parameter is partitioned over the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return 0 if self.collectives is None else self.collectives.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return 1 if self.collectives is None else self.collectives.num_ranks

    @property
    def partitions(self) -> bool:
        """Whether anything is partitioned: from stage 1 on, over more than one rank."""
        return self.num_ranks > 1 and self.config.policy.shards_optimizer

    def belongs_to(self, default_group: object) -> bool:
        """Whether this world was made under the default process group that is in place now (None: no group)."""
        return self.default_group is default_group

    def layout_for(self, shape: torch.Size, is_complex: bool = False) -> RowLayout:
        """How a parameter of `shape` is cut: over all ranks, or not at all where it stays whole."""
        numel = shape.numel()
        stays_whole = not self.partitions or not shape or numel <= self.config.keep_whole_numel or is_complex
        return RowLayout(tuple(shape), 1 if stays_whole else self.num_ranks)

    def layout_of(self, param: Tensor) -> RowLayout:
        """How a parameter is cut already: over all ranks, or not at all."""
        is_cut = isinstance(param, DTensor) and any(placement.is_shard() for placement in param.placements)
        return RowLayout(tuple(param.shape), self.num_ranks if is_cut else 1)

    def meet(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until every rank makes the same call, or raise and say who did not."""
        if self.collectives is not None:
            self.collectives.meet(label, timeout_s)

    def broadcast(self, tensor: Tensor, unit: str, source: int = 0) -> None:
        """Give every rank the values of rank `source`."""
        if self.collectives is None:
            return
        if tensor.device.type == self.device.type:
            self.collectives.broadcast(tensor, source, unit)
            return
        moved = tensor.to(self.device)
        self.collectives.broadcast(moved, source, unit)
        tensor.copy_(moved)

    def gather_whole(self, local: Tensor, layout: RowLayout, unit: str) -> Tensor:
        """The whole tensor of which every rank has its rows `local`, in memory of its own; called by all ranks together."""
        if layout.num_ranks == 1:
            return local.clone()
        assert self.collectives is not None
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=local.dtype, device=local.device)
        start, stop = layout.local_span_in_chunk(self.rank)
        flat[start:stop] = local.reshape(-1)
        self.collectives.gather([Rows(flat, layout)], unit).wait()
        whole = flat[: layout.numel].view(layout.shape)
        # In memory of its own: `save_pretrained` splits files by the bytes of storages.
        return whole if layout.numel == layout.padded_numel else whole.clone()

    def share(self, value: Any, what: str) -> Any:
        """Rank 0's `value` on every rank, pickled; the others' values do not matter."""
        if self.collectives is None:
            return value
        data = bytearray(pickle.dumps(value)) if self.rank == 0 else bytearray()
        lengths = self.collectives.agree([len(data)], what)
        text = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(lengths[0][0], dtype=torch.uint8)
        self.broadcast(text, what)
        return pickle.loads(text.numpy().tobytes())

    def collect(self, value: object, what: str) -> list[Any]:
        """Every rank's `value`, by rank, on rank 0 (an empty list on the others), pickled."""
        if self.collectives is None:
            return [value]
        data = pickle.dumps(value)
        lengths = [length for (length,) in self.collectives.agree([len(data)], what)]
        found = []
        for source, length in enumerate(lengths):
            text = torch.empty(length, dtype=torch.uint8)
            if source == self.rank:
                text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.broadcast(text, what, source)
            if self.rank == 0:
                found.append(pickle.loads(text.numpy().tobytes()))
        return found

    def raise_together(self, problem: str | None, what: str, kind: type[ZeroError]) -> None:
        """Raise `kind` on every rank if any rank has a problem: one rank raising alone looks like a hang to the others.

        Args:
            problem: what is wrong on this rank; None if nothing is.
            what: what all ranks are doing.
            kind: the error's class.
        """
        words = (problem or "").encode()
        if self.collectives is None:
            lengths, rows = [[len(words)]], [list(words)]
        else:
            lengths = self.collectives.agree([len(words)], what)
            longest = max(length for (length,) in lengths)
            rows = self.collectives.agree([*words, *bytes(longest - len(words))], what)
        if any(length for (length,) in lengths):
            said = {rank: bytes(row[: lengths[rank][0]]).decode(errors="replace") for rank, row in enumerate(rows)}
            texts = {text: rank for rank, text in reversed(said.items()) if text}
            raise kind(f"{what}: " + "; ".join(f"rank {rank}: {text}" for text, rank in texts.items()))


def world_of(param: DTensor) -> World | None:
    """The ranks over which hf_zero has partitioned `param`; None if somebody else made it."""
    world = getattr(
        param, "_zero_world", None
    )  # not by its mesh: torch's caches hand out an equal one of another world
    if isinstance(world, World):
        return world
    # A detached or moved copy has lost the attribute; the last world over the same ranks will do, the same on every rank.
    candidates = [each for each in _worlds if each.collectives is not None]
    fitting = [each for each in candidates if each.collectives.mesh == param.device_mesh]  # type: ignore[union-attr]
    return max(fitting, key=lambda each: each.number, default=None)
