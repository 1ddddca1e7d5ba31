"""Engines made late: a model that was partitioned while it was made gets its engine at its first forward.

Until then, adapters, a resized embedding or a new head can still be added to it, and become a part of the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hf_zero.engine.engine import ZeroEngine, engine_of, live_engines
from hf_zero.engine.modules.float32 import find_modules
from hf_zero.engine.modules.hooks import Hook
from hf_zero.engine.modules.state_dict import CutStateDict
from hf_zero.engine.parameters.on_disk import check_offload
from hf_zero.engine.parameters.records import ZeroParameter, is_gathered
from hf_zero.engine.ranks.world import World, world_of
from hf_zero.engine.units.as_partitioned import CAST_TO
from hf_zero.engine.units.grouping import FoundParameter, find_parameters, named_blocks
from hf_zero.engine.units.named import find_named
from hf_zero.optim.optimizers import hear_of_steps, hold_current
from hf_zero.parameters import parameters_of
from hf_zero.sharding import model_methods
from hf_zero.sharding.axes.cutting import KnownBuffers, broadcast_buffers, partition_whole, raise_to_master, take_home
from hf_zero.sharding.axes.experts import share_experts
from hf_zero.sharding.checks import (
    agree_on_model,
    check_quantised,
    refuse_classes_of_users,
    refuse_lazy,
    refuse_parameters_in_lists,
    refuse_sparse_gradients,
    refuse_whole_for_a_while,
)
from hf_zero.sharding.sequence.model import slice_sequences
from hf_zero.sharding.shared_memory import find_aliases
from hf_zero.trace.recorder import record_if_asked


@torch.inference_mode(False)
@torch.no_grad()
def start_engine(model: nn.Module, world: World, known_buffers: KnownBuffers = MappingProxyType({})) -> ZeroEngine:
    """Partition what is not partitioned yet, and make the engine; called by all ranks together.

    Inference mode is off here: a first forward may run in it, and parameters made in it could never be trained.
    """
    named_blocks(model, world.config.units)  # these three raise before anything is changed
    find_named(model, world.config.units.whole, "units.whole")
    find_modules(model, world.config)
    check_offload(world)
    slice_sequences(model, world)
    share_experts(model, world)
    refuse_whole_for_a_while(model)
    refuse_lazy(model)
    hear_of_steps()
    if world.num_ranks > 1:
        refuse_sparse_gradients(model)
        refuse_parameters_in_lists(model)
    if world.partitions:
        refuse_classes_of_users(model)
    aliases = find_aliases(model) if world.partitions else []
    agree_on_model(model, world)
    check_quantised(model, world)
    partition_whole(model, world)
    raise_to_master(model, world)
    take_home(model, world)
    broadcast_buffers(model, world, known_buffers)
    made_in = {name: getattr(param, "_zero_made_in", param.dtype) for name, param in model.named_parameters()}
    engine = ZeroEngine(model, world, copied_as=LateEngine(world, made_in))
    hold_current(engine)
    for alias in aliases:
        alias.follow()
    record_if_asked(engine)
    return engine


def _is_run(model: nn.Module) -> bool:
    """Whether a model has no parameters, or is a part of one that has an engine.

    By the places of its parameters: while a call is under way, modules hold whole tensors there.
    """
    places = _places(find_parameters(model))
    return not places or any(places <= _places(engine.parameters) for engine in live_engines())


def _places(found: Iterable[FoundParameter | ZeroParameter]) -> set[tuple[int, str]]:
    return {(id(module), name) for each in found for module, name in each.locations}


class LateEngine:
    """Forward pre-hook of a partitioned model without an engine; makes one at the first forward.

    Until then, adapters, a resized embedding or a new head can still be added to a loaded model.
    """

    def __init__(self, world: World, made_in: Mapping[str, torch.dtype] | None = None, load_handle: Any = None) -> None:
        self.world = world
        self._load_handle = load_handle
        self._made_in = made_in or {}  # a deep copy of a plain parameter forgets its attributes
        self._is_done = False
        self.known_buffers: KnownBuffers = {}  # that the ranks have had from rank 0 before
        self.is_anew = False  # whether the model has had an engine, so that plain parameters are new ones
        self.inside: list[Any] = []  # handles of the hooks of the model's parts

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make the engine, and let it see this call, since its own hooks come too late for it."""
        engine = self.start(module)
        return None if engine is None else engine.enter_root_late(module, args, kwargs)

    def start(self, module: nn.Module) -> ZeroEngine | None:
        """Make the engine of a model, if none of its parameters has one."""
        if self._is_done:
            return None
        if engine_of(module) is not None:
            self._end()
            return None
        is_run = _is_run(module)
        if not is_run and self.world.partitions and self._is_left_plain(module):
            return None
        if not torch.is_grad_enabled() and any(map(is_lazy, parameters_of(module))):
            return None  # lazy modules see an example
        engine = None if is_run else self._start(module)
        self._end()
        return engine

    def _end(self) -> None:
        """There is an engine: the hooks of parts, which each of their calls would run, go."""
        self._is_done = True
        for handle in self.inside:
            handle.remove()
        self.inside.clear()

    def _is_left_plain(self, module: nn.Module) -> bool:
        """Whether a model is whole now: inside `GatheredParameters`, whose end it waits for, or a copy made there."""
        params = list(parameters_of(module))
        if any(isinstance(param, DTensor) for param in params):
            return False
        return not self.is_anew or any(map(is_gathered, params))

    def start_inside(self, model: nn.Module, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make the engine of `model` in a call of a part of it, or of itself, and let it see this call."""
        if part is model:
            return self(model, args, kwargs)
        if all(map(is_gathered, parameters_of(part))):
            return None  # it computes with what it has, and the next forward makes the engine
        known = set(part._forward_pre_hooks)
        if self.start(model) is None:
            return None
        for key, hook in list(part._forward_pre_hooks.items()):
            if key not in known:
                args, kwargs = hook(part, args, kwargs) or (args, kwargs)
        return args, kwargs

    def _start(self, module: nn.Module) -> ZeroEngine:
        for inner in engines_inside(module):
            inner.close()
        for name, param in module.named_parameters():
            if (cast_to := vars(param).pop(CAST_TO, None)) is not None:
                param._zero_made_in = cast_to  # type: ignore[attr-defined]
            elif name in self._made_in:
                made_in = self._made_in[name]
                is_as_made = param.dtype in (made_in, self.world.precision.master_for(made_in, requires_grad=True))
                param._zero_made_in = made_in if is_as_made else param.dtype  # type: ignore[attr-defined]  # else cast since
        engine = start_engine(module, self.world, self.known_buffers)
        if self._load_handle is not None:
            self._load_handle.remove()  # the engine has its own
        return engine

    def __deepcopy__(self, memo: dict[int, Any]) -> LateEngine:
        return LateEngine(self.world, self._made_in)


class _LateInside:
    """Forward pre-hook of a part of such a model, which some code calls by itself, or calls the model's `forward`."""

    def __init__(self, model: nn.Module, late: LateEngine) -> None:
        self._model = weakref.ref(model)
        self._late = late

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make the engine, and let its hooks of this part see this call."""
        model = self._model()
        return None if model is None else self._late.start_inside(model, module, args, kwargs)


def is_late(model: nn.Module) -> bool:
    """Whether a model will have an engine at its first forward."""
    hooks = model._forward_pre_hooks.values()
    return any(
        isinstance(hook, LateEngine) or isinstance(getattr(hook, "copied_as", None), LateEngine) for hook in hooks
    )


def attach_late(model: nn.Module, world: World) -> None:
    """Make a model that was partitioned while it was made get its engine at its first forward."""
    world.models.add(model)
    for param in parameters_of(model):
        param._zero_world = world  # type: ignore[attr-defined]
    handle = model.register_load_state_dict_pre_hook(CutStateDict(world))  # type: ignore[no-untyped-call]
    late = LateEngine(world, load_handle=handle)
    hook = Hook(late, copied_as=LateEngine(world))
    model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    parts = [part for part in model.modules() if part is not model and next(parameters_of(part), None) is not None]
    if world.partitions:
        inside = Hook(_LateInside(model, late))
        late.inside += [part.register_forward_pre_hook(inside, with_kwargs=True, prepend=True) for part in parts]


def engines_inside(model: nn.Module) -> list[ZeroEngine]:
    """The engines of a model and of its parts."""
    return [engine for engine in map(engine_of, model.modules()) if engine is not None]


def run_instead(model: nn.Module) -> None:
    """Let `model` be what has an engine, from its next forward on, instead of a model inside it or around it.

    Otherwise what it adds (the encoder of a prompt) would be in no engine, and nobody would reduce its gradients; and what is
    left of a model would lack the methods of a partitioned one. A model without a partitioned part stays as it is.
    """
    params = list(parameters_of(model))
    engines = [engine for engine in live_engines() if any(engine.find(p) is not None for p in params)]
    world = engines[0].world if engines else world_at_rest(model)
    if world is None:
        return
    for engine in engines:
        engine.close()
    attach_late(model, world)
    model_methods.attach(model, world)


def world_at_rest(model: nn.Module) -> World | None:
    """The ranks over which a model without an engine was partitioned when it was made."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            for late in (hook, getattr(hook, "copied_as", None)):
                if isinstance(late, LateEngine):
                    return late.world
    for param in parameters_of(model):
        if isinstance(param, DTensor):
            return world_of(param)
    return None
