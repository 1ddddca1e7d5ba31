"""The time of a step of a row of the plan: see [Note: time]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_zero.plan.memory import OPTIMIZERS, Setting, kept_units, placed_of, ranks_of, unit_bytes
from hf_zero.plan.shapes import ModelShape
from hf_zero.plan.states import ModelStates, Placed, add_up
from hf_zero.plan.timing.machines import Exchange, Machine
from hf_zero.plan.timing.schedule import Part, Played, Step, UnitCosts, play
from hf_zero.plan.timing.work import Pass, Stretch, count


@dataclass(frozen=True)
class Counted:
    """What a model computes in a step of one micro-batch.

    Attributes:
        done: its forward and backward.
        blocks: numbers of the units that activation checkpointing computes again.
    """

    done: Pass
    blocks: frozenset[int]

    @property
    def operations(self) -> float:
        """Of matrix products and attention, without what is computed again."""
        return self.done.total().operations

    @classmethod
    def of(cls, model: nn.Module, shape: ModelShape, batch: Mapping[str, Tensor]) -> Counted:
        """Count.

        Args:
            model: on the meta device, in the dtype that it computes in.
            shape: its own.
            batch: with labels, on the meta device.

        Raises:
            UsageError: the model does not train without values.
        """
        again = {name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
        names = [unit.name for unit in shape.units]
        blocks = {number for number, name in enumerate(names) if again & set(name.split(" + "))}
        return cls(count(model, batch, names), frozenset(blocks))


def time_of(
    shape: ModelShape, setting: Setting, counted: Counted, checkpoints: bool, machine: Machine
) -> Played | None:
    """Seconds of a step of one micro-batch; None with offloading to a disk, whose rate is not known.

    Args:
        shape: of the model.
        setting: how it is trained.
        counted: what it computes.
        checkpoints: whether blocks are computed again in the backward.
        machine: what it runs on.
    """
    config = setting.config
    if config.offload.path is not None:
        return None
    forward_s, backward_s = machine.passes_s or (None, None)
    forward = _parts(counted.done.forward, machine, forward_s)
    backward = _parts(counted.done.backward, machine, backward_s)
    if checkpoints:
        backward = _with_again(forward, backward, counted.blocks)
    units = _units(shape, setting, machine)
    comes_and_goes = config.policy.shards_parameters and any(unit.gather for unit in units)
    kept = kept_units(shape, setting)
    step = Step(
        forward,
        backward,
        units,
        comes_and_goes,
        frozenset(kept.ahead),
        config.prefetch_bytes,
        config.bucket_bytes,
        _update(shape, setting, machine),
        frozenset(kept.by_budget),
        machine.is_background,
    )
    return play(step)


def _parts(stretches: Sequence[Stretch], machine: Machine, total: float | None) -> list[Part]:
    """What computes in a pass, in proportion to what is counted if it takes `total` seconds."""
    counted = [machine.computing(stretch.work) for stretch in stretches]
    scale = 1.0 if total is None else total / sum(counted)
    seen: set[int] = set()
    parts = []
    for stretch, seconds in zip(stretches, counted, strict=True):
        num_units = len(stretch.units - seen)
        parts.append(Part(stretch.units, machine.with_host(seconds * scale, stretch.work.launches, num_units)))
        seen |= stretch.units
    return parts


def _with_again(forward: Sequence[Part], backward: Sequence[Part], blocks: frozenset[int]) -> list[Part]:
    """With the forward of each block once more, where its backward begins."""
    again = {number: sum(part.seconds for part in forward if number in part.units) for number in blocks}
    found = []
    for part in backward:
        extra = sum(again.pop(number, 0.0) for number in part.units)
        found.append(replace(part, seconds=part.seconds + extra))
    return found


def _units(shape: ModelShape, setting: Setting, machine: Machine) -> list[UnitCosts]:
    num_states = OPTIMIZERS[setting.optimizer]
    sizes = unit_bytes(shape, setting)
    found = []
    for unit, size, placed in zip(shape.units, sizes, placed_of(shape, setting), strict=True):
        states = add_up(placed, setting.config, ranks_of(setting), num_states, setting.config.offload.goes_to_host)
        times = max((p.num_reductions(setting.config) for p in placed), default=1)
        gathered = states.gathered
        if setting.config.policy.shards_parameters:
            gathered /= max((p.num_gathers for p in placed), default=1) or 1
        sent = sum(p.layout.numel * p.gradient.sent.itemsize for p in placed if p.trains)
        gather = _gather(gathered, placed, setting, machine)
        reduction = _reduction(states, times, setting, machine)
        found.append(UnitCosts(size, gather, reduction, sent, unit.uses.reads, times > 1))
    return found


def _gather(received: float, placed: Sequence[Placed], setting: Setting, machine: Machine) -> Exchange | None:
    config, ranks = setting.config, setting.num_shards
    up = sum(p.own * p.compute.itemsize for p in placed) if config.offload.parameters == "host" else 0
    if not received and not up:
        return None
    exchange = machine.gathers.of(received * ranks / (ranks - 1)) if received else Exchange(0.0)
    return replace(exchange, seconds=exchange.seconds + up / machine.pcie_bytes_s)


def _reduction(states: ModelStates, times: int, setting: Setting, machine: Machine) -> Exchange | None:
    """Of one backward of a unit; what goes down to the host, too."""
    seconds = busy = 0.0
    if states.reduced:
        ranks = setting.num_shards if setting.config.policy.shards_optimizer else setting.num_ranks
        exchange = machine.reductions.of(states.reduced / times * ranks / max(ranks - 1, 1))
        seconds, busy = exchange.seconds, exchange.busy
    if states.between_replicas:
        replicas = setting.config.replicate
        seconds += machine.between_replicas.of(states.between_replicas / times * replicas / (replicas - 1)).seconds
    seconds += states.rows_from_device / machine.pcie_bytes_s
    return Exchange(seconds, busy) if seconds else None


def _update(shape: ModelShape, setting: Setting, machine: Machine) -> float:
    """Seconds of the optimizer: by elements where that was measured, else by bytes read and written."""
    trained = [p for placed in placed_of(shape, setting) for p in placed if p.trains]
    elements = sum(p.own for p in trained)
    if machine.step_s is not None:
        return elements * machine.step_s
    width, config = 4, setting.config
    num_bytes = elements * width * (3 + 2 * OPTIMIZERS[setting.optimizer])
    num_bytes += sum(p.own * p.compute.itemsize for p in trained if p.compute != p.rest)
    if config.offload.optimizer != "host":
        return num_bytes / machine.memory_bytes_s
    up = 0.0 if config.offload.parameters == "host" else sum(p.own * p.compute.itemsize for p in trained)
    return max(num_bytes / machine.host_bytes_s, up / machine.pcie_bytes_s)
