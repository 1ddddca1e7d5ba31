"""The start-up summary: what is partitioned, what a rank holds, what will move."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.engine.call import reads_in_backward
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parameter import ZeroParameter
from hf_zero.engine.reduction import given_dtype, sent_dtype
from hf_zero.engine.unit import Unit
from hf_zero.engine.world import World
from hf_zero.tables import aligned

_ADAM_STATES = 2  # exp_avg and exp_avg_sq, in the dtype at rest


@dataclass(frozen=True)
class ModelStates:
    """Bytes that one rank holds between steps, by kind, and what it receives.

    Attributes:
        parameters: rows or whole tensors at rest, and the whole copies that stages 0 to 2 compute with; a rank's part of
            those that the ranks of a host share.
        gradients: as they stand between micro-batches.
        optimizer: two states a trainable parameter, as Adam has.
        largest_unit: the most that a single unit takes while it is whole.
        traffic: received in a step of one micro-batch; agreements and small change left out.
    """

    parameters: int
    gradients: int
    optimizer: int
    largest_unit: int
    traffic: int


def model_states(engine: ZeroEngine) -> ModelStates:
    """Compute the sizes from the layout; nothing is measured or allocated."""
    policy, world = engine.world.config.policy, engine.world
    others = (world.num_shards - 1) / world.num_shards
    num_sharing = world.collectives.num_sharing
    parameters = gradients = optimizer = 0
    gathered = reduced = 0.0
    shared = {id(p) for unit in engine.units if unit.is_shared for p in unit.parameters}
    gathered_twice = {id(p) for unit in engine.units if _is_gathered_twice(engine, unit) for p in unit.parameters}
    for p in engine.parameters:
        own = p.layout.local_numel(p.rank)
        stays_whole = not policy.shards_parameters or id(p) in shared
        has_copy = bool(engine.units) and stays_whole and (p.is_sharded or _casts(p))
        shares = (
            p.is_sharded and not _casts(p) and world.config.wire.gather == "float32"
        )  # the rows lie inside the whole copy
        parameters += 0 if has_copy and shares else own * p.param.dtype.itemsize
        parameters += p.whole_nbytes // (num_sharing if id(p) in shared else 1) if has_copy else 0
        if p.is_sharded and not stays_whole:
            gathered += p.whole_nbytes * others * (2 if id(p) in gathered_twice else 1)
        elif p.is_sharded and p.param.requires_grad:  # what has changed, from those who do not share the memory
            gathered += p.whole_nbytes * (1 / num_sharing - 1 / world.num_shards)
        if not p.param.requires_grad:
            continue
        optimizer += _ADAM_STATES * own * p.param.dtype.itemsize
        grad_size = world.precision.reduce_for(p.compute_dtype).itemsize
        whole_grads = not policy.shards_gradients and world.num_ranks > 1
        gradients += p.layout.numel * grad_size if whole_grads else own * p.param.dtype.itemsize
        reduced += _reduced_bytes(p, world)
    largest = max((unit.buffer_nbytes for unit in engine.units), default=0)
    return ModelStates(parameters, gradients, optimizer, largest, round(reduced + gathered))


def _reduced_bytes(p: ZeroParameter, world: World) -> float:
    """What a rank receives to reduce a parameter's gradient once."""
    if not p.is_sharded:
        return _all_reduced_bytes(p.layout.numel, p, world, world.num_ranks)
    between = _all_reduced_bytes(p.local_numel, p, world, world.replicas.num_ranks)
    if world.config.reduce_scatter is False:
        return between + _all_reduced_bytes(p.layout.numel, p, world, world.num_shards)
    num_sharing = world.collectives.num_sharing
    if world.config.reduce_scatter == "to_owner" or num_sharing in (1, world.num_shards):
        others = (world.num_shards - 1) / world.num_shards
        return between + p.layout.numel * sent_dtype(p, world).itemsize * others
    num_hosts = world.num_shards / num_sharing
    in_host = (num_sharing - 1) * num_hosts * given_dtype(p, world).itemsize
    return p.layout.numel / world.num_shards * (in_host + (num_hosts - 1) * sent_dtype(p, world).itemsize) + between


def _all_reduced_bytes(numel: int, p: ZeroParameter, world: World, num_ranks: int) -> float:
    return 2 * numel * sent_dtype(p, world).itemsize * (num_ranks - 1) / num_ranks


def _is_gathered_twice(engine: ZeroEngine, unit: Unit) -> bool:
    """Whether the backward gathers again what the forward has gathered."""
    is_kept = unit.keeps_whole or unit.index in engine.kept_for_backward
    return not is_kept and any(map(reads_in_backward, unit.entries))


def _casts(p: ZeroParameter) -> bool:
    return p.compute_dtype != p.param.dtype


def summary(engine: ZeroEngine) -> str:
    """At most 15 lines about a partitioned model, for rank 0 to show when training starts."""
    world, config = engine.world, engine.world.config
    states = model_states(engine)
    total = sum(p.layout.numel for p in engine.parameters)
    trainable = sum(p.layout.numel for p in engine.parameters if p.param.requires_grad)
    collectives = world.collectives
    exchange = "none (one process)" if world.num_ranks == 1 else f"{collectives.name} on {collectives.backend}"
    if 1 < collectives.num_sharing < collectives.num_ranks:
        exchange += f", hosts of {collectives.num_sharing} ranks"
    if collectives.reason:
        exchange += f" ({collectives.reason})"
    if world.num_ranks > 1 and config.reduce_scatter is not True:
        exchange += f", reduce_scatter: {str(config.reduce_scatter).lower()}"
    dtypes = sorted({str(p.compute_dtype).removeprefix("torch.") for p in engine.parameters})
    rest = sorted({str(p.param.dtype).removeprefix("torch.") for p in engine.parameters if p.param.requires_grad})
    units = (
        f"{len(engine.units)}" if engine.units else "none needed (every rank computes with its own whole parameters)"
    )
    replicas = (
        f" ({world.replicas.num_ranks} replicas of {world.num_shards} ranks)" if world.replicas.num_ranks > 1 else ""
    )
    rows = [
        ("stage", f"{config.stage}, world size {world.num_ranks}" + replicas),
        ("exchange", exchange),
        ("units", units),
        ("parameters", f"{total:,} ({trainable:,} trainable)"),
        ("dtypes", f"compute {', '.join(dtypes)}; optimizer updates {', '.join(rest) or 'nothing'}"),
        ("a rank: parameters", _mib(states.parameters)),
        ("a rank: gradients", _mib(states.gradients)),
        ("a rank: optimizer", f"{_mib(states.optimizer)} (two states, as Adam)"),
        ("largest unit", _mib(states.largest_unit)),
        ("traffic a step", f"{_mib(states.traffic)} received by a rank (one micro-batch)"),
    ]
    if not config.wire.is_exact:
        rows.append(("wire", f"parameters travel in {config.wire.gather}, gradients in {config.wire.reduce}"))
    if config.offload.is_anything:
        rows.append(("offload", _offloaded(world)))
    return "hf_zero\n" + aligned(rows, between="  ", margin="  ")


def _offloaded(world: World) -> str:
    offload = world.config.offload
    where = {"host": "in host memory (where these ranks compute)", "disk": f"on disk ({offload.path})"}
    parts = [
        f"{what} {where[place]}" for what in ("optimizer", "parameters") if (place := getattr(offload, what)) in where
    ]
    slots = f"; a step reads and writes {offload.slots} slots of {_mib(offload.slot_bytes)}"
    return ", ".join(parts) + (slots if offload.optimizer == "disk" else "")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
