"""What a rank holds and receives, by kind: arithmetic on shapes, as the engine lays them out.

[Note: peak] Rows, optimizer states, buffers and whole copies stay. Beside them, the memory of a step moves from activations to
gradients. Three moments are looked at: the backward begins (all activations, and the gradient of the largest of them), is half
done, and ends. On their way are whole gradients and what peers send of them. Reductions end while the backward goes on: beside
real runs, half of `bucket_bytes` on the way fits the middle, and all of it the end. With accumulation, gradients of earlier
micro-batches are there all the time; without it, stage 1 keeps none of them whole for longer than their unit's backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.comm import wire
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.precision import Precision
from hf_zero.errors import ConfigError
from hf_zero.layout import RowLayout, place
from hf_zero.plan.activations import NOTHING, Kept
from hf_zero.plan.shapes import ModelShape, ParameterShape

# States of a parameter's size and dtype that an optimizer keeps; factored ones are too small to count.
OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "muon": 1, "momentum": 1, "sgd": 0, "adafactor": 0}


@dataclass(frozen=True)
class Setting:
    """What a model is trained with.

    Attributes:
        config: ZeRO's; `collectives: host` means that all ranks are on one host.
        num_ranks: of all replicas.
        optimizer: a name in `OPTIMIZERS`.
        accumulates: whether a step has several micro-batches.
    """

    config: ZeroConfig
    num_ranks: int
    optimizer: str = "adamw"
    accumulates: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks % self.config.replicate:
            raise ConfigError(f"replicate is {self.config.replicate}, which does not divide {self.num_ranks} ranks")

    @property
    def num_shards(self) -> int:
        """Ranks that parameters are cut over."""
        return self.num_ranks // self.config.replicate if self.config.policy.shards_optimizer else 1


@dataclass(frozen=True)
class Holding:
    """Bytes of one rank, and what it receives in a step of one micro-batch.

    Attributes:
        parameters: at rest, with the whole copies that stages 0 to 2 compute with.
        gradients: all of them, between micro-batches.
        optimizer: states.
        gathered: the most that is whole at a time beyond `parameters` (stage 3), with what is gathered ahead.
        buffers: of the model.
        activations: kept for the backward.
        in_replica, between_replicas: received in a step.
        on_disk: what is offloaded; its slots are in the peak.
        peak: the most at any time, see [Note: peak].
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    buffers: int
    activations: int
    in_replica: int
    between_replicas: int
    on_disk: int
    peak: int

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer states: what ZeRO's paper calls model states."""
        return self.parameters + self.gradients + self.optimizer


def predict(model: ModelShape, setting: Setting, kept: Kept = NOTHING, rank: int = 0) -> Holding:
    """What a rank holds.

    Args:
        model: its shapes.
        setting: how it is trained.
        kept: activations.
        rank: within its replica; rank 0 has the most rows.

    Source: ZeRO (arXiv:1910.02054), sections 5 and 7.
    """
    config, policy = setting.config, setting.config.policy
    precision, ranks = Precision.from_config(config), setting.num_shards
    shares = config.collectives == "host" and ranks > 1
    parameters = gradients = rows = optimizer = in_replica = between = on_disk = 0
    for unit in model.units:
        for param in unit.parameters:
            layout = _layout(param, config, ranks)
            is_cut, own = layout.num_ranks > 1, layout.local_numel(rank)
            rest = precision.master_for(param.dtype, param.trains)
            compute = precision.compute_for(param.dtype)
            whole = layout.padded_numel * compute.itemsize
            stays_whole = not policy.shards_parameters or shares
            has_copy = stays_whole and (is_cut or compute != rest)
            is_exact = compute == rest and config.wire.gather == "float32"
            lies_inside = has_copy and is_cut and is_exact and not layout.dim
            at_rest = 0 if lies_inside else own * rest.itemsize
            if _is_on_disk(config, stays_whole, has_copy, param.trains and is_cut):
                on_disk, at_rest = on_disk + at_rest, 0
            parameters += at_rest
            parameters += whole // (ranks if shares and is_cut else 1) if has_copy else 0
            once = wire.bytes_of(config.wire.gather, compute, layout, layout.chunk_numel) * (ranks - 1)
            if is_cut and not stays_whole:
                near, part = config.wire.secondary, whole // config.wire.secondary
                parameters += part if near > 1 else 0
                again = part * (near - 1) if near > 1 else once
                in_replica += once + (again if unit.reads_in_backward else 0)
            elif is_cut and param.trains and not shares:
                in_replica += once
            if not param.trains:
                continue
            states = OPTIMIZERS[setting.optimizer] * own * rest.itemsize
            if config.offload.optimizer == "disk":
                on_disk += states
            else:
                optimizer += states
            reduced = precision.reduce_for(compute)
            keeps_whole_gradient = not policy.shards_gradients and setting.num_ranks > 1
            gradients += layout.numel * reduced.itemsize if keeps_whole_gradient else own * rest.itemsize
            rows += own * rest.itemsize
            if is_cut:
                sent = _sent(precision, compute, config)
                if config.wire.reduce == "float32":
                    in_replica += _others(layout.numel * sent.itemsize, ranks)
                else:
                    in_replica += wire.bytes_of(config.wire.reduce, sent, layout, own) * (ranks - 1)
                between += 2 * _others(own * reduced.itemsize, config.replicate)
            else:
                in_replica += 2 * _others(layout.numel * reduced.itemsize, setting.num_ranks)
    sizes = unit_bytes(model, setting)
    largest = max(sizes, default=0)
    gathers = policy.shards_parameters and ranks > 1 and not shares
    ahead = max(config.prefetch_bytes, largest) if config.prefetch_bytes else 0  # one unit at least
    gathered = largest + min(ahead, sum(sizes) - largest) if gathers else 0
    slots = config.offload.slots * config.offload.slot_bytes if config.offload.optimizer == "disk" else 0
    stays = parameters + optimizer + model.buffer_bytes + slots
    before = float(gradients if setting.accumulates else 0)
    if ranks > 1 and (policy.shards_gradients or not setting.accumulates):
        on_way = min(config.bucket_bytes, sum(sizes))
        done = rows * (1 - on_way / sum(sizes)) if sizes else 0.0
        middle = kept.total / 2 + max(before, rows / 2 - on_way / 2 / ranks) + gathered + on_way
        end = max(before, done) + 2 * on_way + (largest if gathers else 0)
    else:
        on_way = 2 * largest if ranks == 1 < setting.num_ranks else _others(largest, setting.num_ranks)
        middle = kept.total / 2 + max(before, gradients / 2) + on_way
        end = gradients + on_way
    begin = kept.total + kept.largest + before + gathered
    if setting.accumulates:
        begin = max(begin, middle) if policy.shards_gradients else max(begin, kept.total + before + on_way)
    return Holding(
        parameters,
        gradients,
        optimizer,
        gathered,
        model.buffer_bytes,
        kept.total,
        in_replica,
        between,
        on_disk,
        round(stays + max(begin, middle, end)),
    )


def _is_on_disk(config: ZeroConfig, stays_whole: bool, has_copy: bool, trains: bool) -> bool:
    """Whether rows at rest, beside what modules compute with, are on a disk."""
    if not stays_whole:
        return config.offload.parameters == "disk"
    return has_copy and trains and config.offload.optimizer == "disk"  # masters


def balance(model: ModelShape, setting: Setting) -> float:
    """Elements of the rank that has most, over the mean."""
    layouts = [_layout(param, setting.config, setting.num_shards) for param in model.parameters]
    return sum(layout.local_numel(0) for layout in layouts) * setting.num_shards / max(model.numel, 1)


def _layout(param: ParameterShape, config: ZeroConfig, ranks: int) -> RowLayout:
    is_cut = ranks > 1 and bool(param.shape) and param.numel > config.keep_whole_numel and not param.dtype.is_complex
    goes_by_rows = config.tp_size > 1 or not param.dtype.is_floating_point
    if is_cut and not goes_by_rows:
        return RowLayout.balanced(param.shape, ranks)
    return RowLayout(param.shape, ranks if is_cut else 1)


def unit_bytes(model: ModelShape, setting: Setting) -> list[int]:
    """Bytes of each unit when it is whole."""
    precision = Precision.from_config(setting.config)
    found = []
    for unit in model.units:
        layouts = [(p, _layout(p, setting.config, setting.num_shards)) for p in unit.parameters]
        sizes = [layout.padded_numel * precision.compute_for(p.dtype).itemsize for p, layout in layouts]
        found.append(place(sizes)[1])
    return found


def _sent(precision: Precision, compute: torch.dtype, config: ZeroConfig) -> torch.dtype:
    """Of a gradient on its way: `pairwise`, `host` and wire formats take what autograd made, where it is not kept whole."""
    is_as_made = config.collectives in ("pairwise", "host") or config.wire.reduce != "float32"
    as_given = is_as_made and config.policy.shards_gradients
    return precision.sent_for(compute) if as_given else precision.reduce_for(compute)


def _others(num_bytes: int, ranks: int) -> int:
    return num_bytes * (ranks - 1) // ranks
