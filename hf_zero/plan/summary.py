"""The summaries: what is partitioned, what a rank holds and what will move; after a training, what was so."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero import torch_compat
from hf_zero.engine.backward.reduction import gradient_dtypes
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parameters.quantised import is_quantised
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.keeping import UNLIMITED, is_mostly_frozen
from hf_zero.plan.states import ModelStates, Placed, Ranks, Uses, add_up
from hf_zero.tables import aligned

_ADAM_STATES = 2  # exp_avg and exp_avg_sq, in the dtype at rest


def model_states(engine: ZeroEngine) -> ModelStates:
    """What this rank holds and receives, from the engine's own layouts, see `add_up`; but for tokens that go to experts."""
    world = engine.world
    dense = [p for p in engine.parameters if not p.computed.is_part]
    experts = [p for p in engine.parameters if p.computed.is_part]
    ranks = Ranks(world.num_shards, world.replicas.num_ranks, world.data.num_ranks, world.nearby.num_ranks)
    states = _states_of(engine, dense, ranks)
    if experts:
        same = Ranks(world.same_experts.num_ranks, world.replicas.num_ranks, world.replicas.num_ranks)
        states = states.plus(_states_of(engine, experts, same))
    states.largest_unit = max((unit.buffer_nbytes for unit in engine.units), default=0)
    return states


def _states_of(engine: ZeroEngine, parameters: list[ZeroParameter], ranks: Ranks) -> ModelStates:
    world = engine.world
    shared = {p for unit in engine.units if unit.is_shared for p in unit.parameters}
    units = {p: unit for unit in engine.units for p in unit.parameters}
    uses = {unit: Uses.of(unit.name, unit.entries) for unit in engine.units}
    stays = {u: is_mostly_frozen(u.nbytes, (p.param.requires_grad for p in u.parameters)) for u in engine.units}
    placed = [
        Placed(
            p.computed.layout,
            p.computed.rank,
            p.param.dtype,
            p.compute_dtype,
            gradient_dtypes(p, world),
            p.param.requires_grad,
            p in shared,
            uses[units[p]] if p in units else Uses(),
            uses[units[p]].num_gathers(units[p].index, engine.gathering.kept, stays[units[p]], p.param.requires_grad)
            if p in units
            else 1,
            "float32" if is_quantised(p.param) else world.config.wire.gather,
            p in units and units[p].keeps_whole,
        )
        for p in parameters
    ]
    return add_up(placed, world.config, ranks, _ADAM_STATES, world.steps_on_host)


def summary(engine: ZeroEngine, mixed_precision: str = "no", is_full: bool = True) -> str:
    """Lines about a partitioned model, for rank 0 to show when training starts: at most 15, or 4.

    Args:
        engine: of the model.
        mixed_precision: accelerate's word for the autocast that is on in forwards.
        is_full: whether all is told.
    """
    states = model_states(engine)
    total = sum(p.param.numel() for p in engine.parameters)
    trainable = sum(p.param.numel() for p in engine.parameters if p.param.requires_grad)
    parameters = f"{total:,} ({trainable:,} trainable)"
    if is_full:
        return _in_full(engine, states, parameters, _dtypes(engine, mixed_precision))
    world = engine.world
    units = f", {len(engine.units)} units of at most {_size(states.largest_unit)}" if engine.units else ""
    if engine.gathering.budget.is_asked_for and any(unit.comes_and_goes for unit in engine.units):
        budget, num_kept = engine.gathering.budget, len(engine.gathering.kept.by_budget)
        units += f", {num_kept} kept for the backward" if budget.is_known else ", kept as memory allows"
    lines = [
        f"hf_zero: stage {world.config.stage}, world size {world.num_ranks}{_axes(world)}, exchange {_exchange(world)}{units}",
        f"parameters: {parameters}; {_dtypes(engine, mixed_precision)}",
        f"a rank: {_size(states.parameters)} parameters, {_size(states.gradients)} gradients, {_size(states.optimizer)} "
        "optimizer (two states, as Adam)",
        f"a step: {_size(states.traffic)} received by a rank (one micro-batch); HF_ZERO_SUMMARY=full says more",
    ]
    return "\n  ".join(lines)


def _exchange(world: World) -> str:
    return "none (one process)" if world.num_ranks == 1 else f"{world.shards.name} on {world.shards.backend}"


def _in_full(engine: ZeroEngine, states: ModelStates, parameters: str, dtypes: str) -> str:
    world, config = engine.world, engine.world.config
    collectives = world.shards
    exchange = _exchange(world)
    if collectives.reason:
        exchange += f" ({collectives.reason})"
    if world.num_ranks > 1 and config.reduce_scatter is not True:
        exchange += f", reduce_scatter: {str(config.reduce_scatter).lower()}"
    units = (
        f"{len(engine.units)}" if engine.units else "none needed (every rank computes with its own whole parameters)"
    )
    rows = [
        ("stage", f"{config.stage}, world size {world.num_ranks}" + _axes(world)),
        ("exchange", exchange),
        ("units", units),
        ("parameters", parameters),
        ("dtypes", dtypes),
        ("a rank: parameters", _mib(states.parameters)),
        ("a rank: gradients", _mib(states.gradients)),
        ("a rank: optimizer", f"{_mib(states.optimizer)} (two states, as Adam)"),
        ("largest unit", _mib(states.largest_unit)),
        *_kept(engine),
        ("traffic a step", f"{_mib(states.traffic)} received by a rank (one micro-batch)"),
    ]
    if not config.wire.is_exact:
        rows.append(("wire", f"parameters travel in {config.wire.gather}, gradients in {config.wire.reduce}"))
    if config.offload.is_anything:
        rows.append(("offload", _offloaded(world, states.on_host)))
    if world.nearby.num_ranks > 1:
        rows.append(
            ("second copy", f"among {world.nearby.num_ranks} ranks of a host, for gathers of what has not changed")
        )
    if engine.activations.is_needed:
        rows.append(("activations", _kept_inputs(world)))
    hybrid = _hybrid(states, world)
    if hybrid:
        rows.append(("between hosts", hybrid))
    return "hf_zero\n" + aligned(rows, between="  ", margin="  ")


def _kept(engine: ZeroEngine) -> list[tuple[str, str]]:
    """What stays whole from a forward to its backward, where units come and go."""
    budget, num_kept = engine.gathering.budget, len(engine.gathering.kept.by_budget)
    if not budget.is_asked_for or not any(unit.comes_and_goes for unit in engine.units):
        return []
    if not budget.is_known:
        return [("kept for backward", "what memory has room for when a step has run (reshard_after_forward: auto)")]
    text = f"{num_kept} of {len(engine.units)} units, {_size(budget.kept_bytes)}"
    if budget.num_bytes != UNLIMITED:
        text += f"; at most {_size(budget.num_bytes)}" + (", half of what was free" if budget.is_measured else "")
    return [("kept for backward", text)]


def _dtypes(engine: ZeroEngine, mixed_precision: str) -> str:
    computed = {p.compute_dtype for p in engine.parameters}
    updated = {p.param.dtype for p in engine.parameters if p.param.requires_grad}
    compute, update = (", ".join(sorted(str(each).removeprefix("torch.") for each in s)) for s in (computed, updated))
    if computed in ({torch.bfloat16}, {torch.float16}):
        compute += ", norms too (see keep_fp32)"  # which autocast, in stage 0, leaves in float32
    elif mixed_precision != "no" and not engine.world.config.policy.shards_optimizer:
        compute += f", autocast to {mixed_precision} (as DDP)"
    return f"compute {compute}; optimizer updates {update or 'nothing'}"


def _axes(world: World) -> str:
    """How the ranks are arranged, where they are not one row."""
    shared = f", each sequence over {world.sequence.num_ranks} ranks" if world.sequence.num_ranks > 1 else ""
    shared += f", all experts over {world.config.ep_size} ranks" if world.experts.num_ranks > 1 else ""
    if world.tensor.num_ranks == 1:
        several = world.replicas.num_ranks > 1
        return (f" ({world.replicas.num_ranks} replicas of {world.num_shards} ranks)" if several else "") + shared
    replicas = f"{world.replicas.num_ranks} replicas x " if world.replicas.num_ranks > 1 else ""
    axis = "tensor axis, experts too" if world.config.ep_size > 1 else "tensor axis"
    return f" ({replicas}{world.num_shards} shards x {world.tensor.num_ranks} ({axis})){shared}"


def _kept_inputs(world: World) -> str:
    kept = world.config.activations
    part = f"1/{world.tensor.num_ranks} on each rank of the tensor axis" if kept.partition else "whole"
    return f"inputs of checkpointed layers: {part}{', in host memory' if kept.offload else ''}"


def _hybrid(states: ModelStates, world: World) -> str:
    """What replicas, one a host, would save in traffic between hosts and cost in memory; "" where they cannot be had.

    By formula: rows of `shards` ranks on `hosts` hosts, next to each other. Of what a rank gets from the others, as many
    `shards`ths come from other hosts; with a replica a host it is the sum of its own rows, which are `hosts` times as many.
    """
    hosts, shards = world.num_hosts, world.num_shards
    is_one_row = world.partitions and world.replicas.num_ranks == world.experts.num_ranks == 1
    if not (hosts > 1 and is_one_row and shards % hosts == 0 and shards > hosts):
        return ""
    now = states.traffic * (shards - shards / hosts) / (shards - 1)
    then = 2 * states.reduced_rows * hosts * (hosts - 1) / hosts
    more = (hosts - 1) * states.sharded
    saved = f"with replicate: {hosts}, {_mib(round(then))} and {_mib(more)} more memory a rank"
    return f"{_mib(round(now))} a rank and step; {saved}"


@dataclass(frozen=True)
class Start:
    """What an engine had received, and for how long it had waited, when a training began.

    Attributes:
        step: optimizer steps before it.
        num_bytes: received by this rank.
        seconds: waited for.
    """

    step: int
    num_bytes: int
    seconds: float

    @classmethod
    def of(cls, engine: ZeroEngine, step: int) -> Start:
        """That of a training which begins now, after `step` steps."""
        so_far = engine.world.ledger.total()
        return cls(step, so_far.bytes, so_far.seconds)


@dataclass(frozen=True)
class Measured:
    """What this rank held and received in a training.

    Attributes:
        num_steps: of the optimizer.
        optimizer: bytes of its states.
        traffic: bytes received a step: micro-batches, evaluation and saves included.
        seconds: waited for peers, a step.
        peak: most bytes at a time, of the device; on the CPU of the process, with all its programs.
    """

    num_steps: int
    optimizer: int
    traffic: int
    seconds: float
    peak: int

    @classmethod
    def since(cls, start: Start, engine: ZeroEngine, state: Mapping[Any, Mapping[str, Any]], step: int) -> Measured:
        """Since `start`, with the optimizer's `state` by parameter, after `step` steps in all."""
        device, so_far = engine.world.device, engine.world.ledger.total()
        num_steps = max(step - start.step, 1)
        traffic = (so_far.bytes - start.num_bytes) // num_steps
        return cls(num_steps, _held(state), traffic, (so_far.seconds - start.seconds) / num_steps, peak_of(device))


def summary_after(engine: ZeroEngine, measured: Measured, is_full: bool = True) -> str:
    """What was measured in a training: in two lines, or beside what its start promised."""
    is_on_device = engine.world.device.type != "cpu"
    if not is_full:
        peak = f"{_size(measured.peak)} of the {'device' if is_on_device else 'process, libraries included'}"
        return (
            f"hf_zero, after {measured.num_steps:,} steps: {_size(measured.traffic)} received a step, evaluation and saves "
            f"included\n  optimizer {_size(measured.optimizer)} a rank, peak {peak}, {measured.seconds * 1e3:,.1f} ms a step "
            "waited for peers"
        )
    states = model_states(engine)
    expected = states.parameters + states.gradients + states.optimizer + states.largest_unit
    expected += engine.gathering.budget.kept_bytes
    rows = [
        ("", "measured", "expected", ""),
        ("a rank: optimizer", _mib(measured.optimizer), _mib(states.optimizer), "(expected: two states, as Adam)"),
        (
            "traffic a step",
            _mib(measured.traffic),
            _mib(states.traffic),
            "(measured: with evaluation and saves; expected: one micro-batch)",
        ),
        (
            "peak",
            _mib(measured.peak),
            _mib(expected) if is_on_device else "",  # of a process, most is not the model's
            "(of the device; expected: without activations)"
            if is_on_device
            else "(of the process, libraries included)",
        ),
        ("waited a step", f"{measured.seconds * 1e3:,.1f} ms", "", "(for peers)"),
    ]
    return f"hf_zero, after {measured.num_steps:,} steps\n" + aligned(rows, "<>><", between="  ", margin="  ")


def _held(state: Mapping[Any, Mapping[str, Any]]) -> int:
    values = [value for kept in state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    return sum(torch_compat.local_of(value).nbytes for value in values)


def peak_of(device: torch.device) -> int:
    """Most bytes at a time so far, of a device; on the CPU of this process, with all its programs."""
    if device.type != "cpu":
        return int(getattr(torch.get_device_module(device), "max_memory_allocated", lambda device: 0)(device))
    import resource  # there is none on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 2**10


def _offloaded(world: World, on_host: int) -> str:
    offload = world.config.offload
    host = (
        f"in host memory ({_mib(on_host)} a rank in all)"
        if world.steps_on_host
        else "in host memory (where these ranks compute)"
    )
    where = {"host": host, "disk": f"on disk ({offload.path})"}
    parts = [
        f"{what} {where[place]}" for what in ("optimizer", "parameters") if (place := getattr(offload, what)) in where
    ]
    slots = f"; a step reads and writes {offload.slots} slots of {_mib(offload.slot_bytes)}"
    return ", ".join(parts) + (slots if offload.optimizer == "disk" else "")


def _size(num_bytes: int) -> str:
    """In the unit that suits it: a tiny model is not 0.0 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
