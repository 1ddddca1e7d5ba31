"""What a rank holds and receives, by kind: arithmetic on shapes, as the engine lays them out.

[Note: peak] Rows, optimizer states, buffers and whole copies stay. Beside them, the memory of a step moves from activations to
gradients. Three moments are looked at: the backward begins (all activations, and the gradient of the largest of them), is half
done, and ends. The gradient of a tied weight waits meanwhile. On their way are whole gradients and what peers send of them.
Reductions end while the backward goes on: beside real runs, half of `bucket_bytes` on the way fits the middle, and all of it
the end. With accumulation, gradients of earlier micro-batches are there all the time; without it, stage 1 keeps none of them
whole for longer than their unit's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.precision import Precision
from hf_zero.engine.units.keeping import Candidate, asked_bytes, choose, is_mostly_frozen
from hf_zero.engine.units.keeping import Kept as KeptUnits
from hf_zero.errors import ConfigError
from hf_zero.layout import RowLayout, place
from hf_zero.plan.activations import NOTHING, Kept
from hf_zero.plan.shapes import ModelShape, ParameterShape
from hf_zero.plan.states import ModelStates, Placed, Ranks, add_up

# States of a parameter's size and dtype that an optimizer keeps; factored ones are too small to count.
OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "muon": 1, "momentum": 1, "sgd": 0, "adafactor": 0}


@dataclass(frozen=True)
class Setting:
    """What a model is trained with.

    Attributes:
        config: ZeRO's; `collectives: host` means that all ranks are on one host.
        num_ranks: of all replicas; ranks that share layers (`tp_size`) count as one.
        optimizer: a name in `OPTIMIZERS`.
        accumulates: whether a step has several micro-batches.
    """

    config: ZeroConfig
    num_ranks: int
    optimizer: str = "adamw"
    accumulates: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks % self.config.replicate:
            raise ConfigError(
                f"replicate is {self.config.replicate}, which does not divide {self.num_ranks} ranks: give a number that does"
            )

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
        gathered: the most that is whole at a time beyond `parameters` (stage 3), with what is gathered ahead, and with what
            `reshard_after_forward` keeps for the backward, if it says how much ("auto" takes only what is left free).
        buffers: of the model.
        activations: kept for the backward.
        in_replica, between_replicas: received in a step.
        on_disk: what is offloaded; its slots are in the peak.
        on_host: what is offloaded to the host of a device, and what goes up and comes down.
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
    on_host: int
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
    return predictor(model, setting, rank)(kept)


def predictor(model: ModelShape, setting: Setting, rank: int = 0) -> Callable[[Kept], Holding]:
    """`predict` for many sequences: what does not depend on activations is counted once."""
    states, gathered = states_of(model, setting, rank), _gathered_at_once(model, setting)
    peak_of = _peak(model, setting, states, gathered)

    def holding(kept: Kept) -> Holding:
        tokens = 2 * kept.routed * (1 - 1 / setting.config.ep_size)  # to experts, and back
        return Holding(
            states.parameters - states.parameters_on_disk,
            states.gradients,
            states.optimizer - states.optimizer_on_disk,
            gathered,
            model.buffer_bytes,
            kept.total,
            round(states.gathered + states.reduced + tokens + kept.received),
            round(states.between_replicas),
            states.parameters_on_disk + states.optimizer_on_disk,
            states.on_host,
            peak_of(kept),
        )

    return holding


def states_of(model: ModelShape, setting: Setting, rank: int = 0) -> ModelStates:
    """The model states of a rank, see `add_up`."""
    config, ranks, num_states = setting.config, ranks_of(setting), OPTIMIZERS[setting.optimizer]
    dense: list[Placed] = []
    experts: list[Placed] = []
    for unit, placed in zip(model.units, placed_of(model, setting, rank), strict=True):
        for param, each in zip(unit.parameters, placed, strict=True):
            (experts if _is_part(param, config) else dense).append(each)
    has_device = config.offload.goes_to_host
    states = add_up(dense, config, ranks, num_states, has_device)
    same = Ranks(ranks.shards // config.ep_size, config.replicate, config.replicate)  # that compute the same experts
    return states.plus(add_up(experts, config, same, num_states, has_device))


def ranks_of(setting: Setting) -> Ranks:
    """Their numbers."""
    config = setting.config
    return Ranks(setting.num_shards, config.replicate, setting.num_ranks, config.wire.secondary)


def placed_of(model: ModelShape, setting: Setting, rank: int = 0) -> list[list[Placed]]:
    """The parameters of each unit as a rank holds them."""
    config, ranks = setting.config, setting.num_shards
    precision = Precision.from_config(config)
    found, kept, stays = [], kept_units(model, setting), _for_next_step(model, setting)
    for index, unit in enumerate(model.units):
        placed = []
        layouts = [_layout(param, config, ranks) for param in unit.parameters]
        is_shared = config.collectives == "host" and any(layout.num_ranks > 1 for layout in layouts)
        for param, layout in zip(unit.parameters, layouts, strict=True):
            compute = precision.compute_for(param.dtype)
            is_as_made = layout.num_ranks > 1 and (config.policy.shards_gradients or config.ep_size > 1)
            # `pairwise` and `host` send what autograd made, and so do wire formats.
            sends_as_given = config.collectives in ("pairwise", "host") and config.reduce_scatter is True
            placed.append(
                Placed(
                    layout,
                    rank // config.ep_size if _is_part(param, config) else rank,
                    precision.master_for(param.dtype, param.trains),
                    compute,
                    precision.gradient_dtypes(compute, is_as_made, sends_as_given),
                    param.trains,
                    is_shared,
                    unit.uses,
                    unit.uses.num_gathers(index, kept, stays[index], param.trains),
                    config.wire.gather,
                )
            )
        found.append(placed)
    return found


def _gathers(setting: Setting) -> bool:
    """Whether units are whole for a while only."""
    config = setting.config
    comes_and_goes = setting.num_shards > 1 or config.offload.parameters == "host"
    return config.policy.shards_parameters and comes_and_goes and config.collectives != "host"


def kept_units(model: ModelShape, setting: Setting) -> KeptUnits:
    """Numbers of the units that stay whole from a forward to its backward."""
    if not _gathers(setting):
        return KeptUnits()
    sizes = enumerate(zip(model.units, unit_bytes(model, setting), strict=True))
    units = [
        Candidate(index, size, setting.accumulates or max(unit.uses.calls - 1, unit.uses.reads) > 0, unit.uses.is_tied)
        for index, (unit, size) in sizes
    ]
    return choose(reversed(units), asked_bytes(setting.config), setting.config.prefetch_bytes)


def _gathered_at_once(model: ModelShape, setting: Setting) -> int:
    """Bytes of the units that are whole at a time, beyond those that are so between steps."""
    if not _gathers(setting):
        return 0
    sizes, config = unit_bytes(model, setting), setting.config
    largest, rest, held = max(sizes, default=0), sum(sizes), 0
    ahead = max(config.prefetch_bytes, largest) if config.prefetch_bytes else 0  # one unit at least
    most, kept = largest + min(ahead, rest - largest), kept_units(model, setting).by_budget
    for index, size in enumerate(sizes):  # in a forward; a backward has the same, the other way round
        rest -= size
        most = max(most, held + size + min(ahead, rest))
        held += size if index in kept else 0
    return most


def _peak(model: ModelShape, setting: Setting, states: ModelStates, gathered: int) -> Callable[[Kept], int]:
    """The most bytes at any time, see [Note: peak]; by the activations that are kept."""
    config, policy, ranks = setting.config, setting.config.policy, setting.num_shards
    sizes = unit_bytes(model, setting)
    largest = max(sizes, default=0)
    at_once = _made_as_rows(model, setting)
    gradients, rows = states.gradients, states.trained_rows - at_once
    slots = config.offload.slots * config.offload.slot_bytes if config.offload.optimizer == "disk" else 0
    on_disk = states.parameters_on_disk + states.optimizer_on_disk
    stays = states.parameters + states.optimizer - on_disk + model.buffer_bytes + slots
    before = float(gradients if setting.accumulates else 0)
    waiting = _waiting(model, setting)
    if ranks > 1 and (policy.shards_gradients or not setting.accumulates):
        on_way = min(config.bucket_bytes, sum(sizes))
        done = rows * (1 - on_way / sum(sizes)) if sizes else 0.0
        middle = max(before, (at_once + rows) / 2 - on_way / 2 / ranks) + gathered + on_way + waiting
        whole = max(largest, _staying(model, setting)) if _gathers(setting) else 0
        end = max(before, at_once + done) + 2 * on_way + whole + waiting
    else:
        on_way = 2 * largest if ranks == 1 < setting.num_ranks else _others(largest, setting.num_ranks)
        middle = max(before, gradients / 2) + on_way + waiting
        end = gradients + on_way
    down = before + gathered + _coming_down(model, setting, states, largest) if states.rows_from_device else None

    def most(kept: Kept) -> int:
        begin, half_way = kept.total + kept.largest + before + gathered, kept.total / 2 + middle
        if setting.accumulates:
            begin = max(begin, half_way if policy.shards_gradients else kept.total + before + on_way)
        rest = max(half_way, end) if down is None else down + kept.total / 2 + waiting
        return round(stays + max(begin, rest))

    return most


def _staying(model: ModelShape, setting: Setting) -> int:
    """Bytes of units that stay whole beyond their backward: see [Note: until it changes] in engine/units/keeping.py."""
    sizes, stays = unit_bytes(model, setting), _for_next_step(model, setting)
    return sum(sizes[i] for i in kept_units(model, setting).by_budget if setting.accumulates or stays[i])


def _for_next_step(model: ModelShape, setting: Setting) -> list[bool]:
    """Whether each unit would stay for the next step, if it is kept."""
    precision, found = Precision.from_config(setting.config), []
    for unit in model.units:
        layouts = [(p, _layout(p, setting.config, setting.num_shards)) for p in unit.parameters]
        sizes = [layout.padded_numel * precision.compute_for(p.dtype).itemsize for p, layout in layouts]
        found.append(is_mostly_frozen(sizes, (p.trains for p in unit.parameters)))
    return found


def _waiting(model: ModelShape, setting: Setting) -> int:
    """Bytes of gradients that wait for another use of a tied weight: see [Note: one reduction] in engine/backward."""
    found = [p for placed in placed_of(model, setting) for p in placed if p.trains and p.uses.calls > 1]
    found = [p for p in found if p.num_reductions(setting.config) == 1]
    # Of two, the first waits as it was made; of more, their sum.
    return sum(p.layout.numel * (p.compute if p.uses.calls == 2 else p.gradient.summed).itemsize for p in found)


def _made_as_rows(model: ModelShape, setting: Setting) -> int:
    """Bytes of gradients that nothing is reduced of within a replica: of experts that a rank computes with as they rest."""
    params = [p for p in model.parameters if p.trains and _rests_as_computed(p, setting)]
    return sum(p.numel // setting.num_shards * p.dtype.itemsize for p in params)


def _coming_down(model: ModelShape, setting: Setting, states: ModelStates, largest: int) -> float:
    """Gradients that a device has, of which the rows come down, from the second unit of a backward on.

    One unit's as autograd makes them; what is reduced, with its rows; and rows on their way, held until they are there. On one
    rank what is reduced are the rows, and the next unit's are copied before those are let go.
    """
    config, ranks = setting.config, setting.num_shards
    precision = Precision.from_config(config)
    of = max((p for unit in model.units for p in unit.parameters), key=lambda p: p.numel).dtype
    compute = precision.compute_for(of)
    per_byte = precision.gradient_dtypes(compute, False, False).summed.itemsize / compute.itemsize
    whole = states.rows_from_device * ranks
    reduced = min(largest * per_byte, whole)
    bucket = max(config.bucket_bytes, reduced)
    made = min(largest, whole / per_byte)
    if ranks == 1:
        return made + min(whole, reduced + 2 * bucket)
    down = min(states.rows_from_device, max(config.bucket_bytes, reduced / ranks))
    return made + min(whole, bucket) * (1 + 1 / ranks) + down


def balance(model: ModelShape, setting: Setting) -> float:
    """Elements of the rank that has most, over the mean."""
    layouts = [_layout(param, setting.config, setting.num_shards) for param in model.parameters]
    return sum(layout.local_numel(0) for layout in layouts) * setting.num_shards / max(model.numel, 1)


def divides_experts(model: ModelShape, setting: Setting) -> bool:
    """Whether the ranks that parameters are cut over divide the experts of a model, where some divide them (`ep_size`)."""
    experts = [param for param in model.parameters if _is_part(param, setting.config)]
    return not any(param.shape[0] % setting.num_shards for param in experts)


def _is_part(param: ParameterShape, config: ZeroConfig) -> bool:
    """Whether a rank computes with some experts of a parameter alone, see [Note: experts]."""
    return param.of_experts and config.ep_size > 1


def _layout(param: ParameterShape, config: ZeroConfig, ranks: int) -> RowLayout:
    if _is_part(param, config):
        return RowLayout((param.shape[0] // config.ep_size, *param.shape[1:]), ranks // config.ep_size)
    is_cut = ranks > 1 and bool(param.shape) and param.numel > config.keep_whole_numel and not param.dtype.is_complex
    goes_by_rows = config.tp_size > 1 or not param.dtype.is_floating_point
    if is_cut and not goes_by_rows:
        return RowLayout.balanced(param.shape, ranks)
    return RowLayout(param.shape, ranks if is_cut else 1)


def unit_bytes(model: ModelShape, setting: Setting) -> list[int]:
    """Bytes of each unit when it is whole; but for experts that a rank computes with as they rest."""
    precision = Precision.from_config(setting.config)
    found = []
    for unit in model.units:
        params = [p for p in unit.parameters if not _rests_as_computed(p, setting)]
        layouts = [(p, _layout(p, setting.config, setting.num_shards)) for p in params]
        sizes = [layout.padded_numel * precision.compute_for(p.dtype).itemsize for p, layout in layouts]
        found.append(place(sizes)[1])
    return found


def _rests_as_computed(param: ParameterShape, setting: Setting) -> bool:
    """Whether a rank holds all the experts of a parameter that it computes, in the dtype that it computes in."""
    config, precision = setting.config, Precision.from_config(setting.config)
    is_same = precision.master_for(param.dtype, param.trains) == precision.compute_for(param.dtype)
    return _is_part(param, config) and config.ep_size == setting.num_shards and is_same


def _others(num_bytes: int, ranks: int) -> int:
    return num_bytes * (ranks - 1) // ranks
