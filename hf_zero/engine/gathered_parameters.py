"""GatheredParameters: whole tensors on demand, outside a forward."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.engine.parameters.at_rest.given import have_been_given, refuse_unlike
from hf_zero.engine.parameters.at_rest.known import entries
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.parameters.quantised import as_shown
from hf_zero.engine.parameters.records import ZeroParameter, gathered, put
from hf_zero.engine.parameters.replaced import current, note_replaced
from hf_zero.engine.parameters.whole import STANDS_FOR, WholeParameter, attributes_of_users, retire
from hf_zero.engine.ranks.apart import same_bits
from hf_zero.engine.ranks.world import World, world_that_cut
from hf_zero.engine.units.grouping import find_parameters
from hf_zero.errors import UsageError
from hf_zero.layout import Cut
from hf_zero.parameters import parameters_of


@dataclass(eq=False)
class _Gathered:
    """A parameter that is whole for a while."""

    param: nn.Parameter
    cut: Cut
    world: World
    whole: nn.Parameter
    before: Tensor | None  # what the modifier rank compares with
    node: Any = None  # of the graph, which hands on gradients as long as it lives
    is_changed: bool = False  # and kept

    def own_rows(self) -> Tensor:
        """This rank's elements of the whole, as it is now, where its rows rest."""
        return self.cut.of(self.whole.detach()).to(torch_compat.local_of(self.param).device)


def gather_whole(param: Tensor, world: World | None = None) -> Tensor:
    """A copy of a partitioned parameter as a plain whole tensor, in its dtype at rest; called by all ranks together.

    Raises:
        UsageError: the parameter is a `DTensor` that hf_zero did not make.
        CollectiveError: a rank did not take part.
    """
    if isinstance(param, PartitionedTensor) and (whole := param.shown) is not None:
        return whole.clone()
    if not isinstance(param, DTensor):
        return param.detach().clone()
    world = world or world_that_cut(param)
    world.serving.apart.check("what gathers parameters")
    return world.gather_parameter(torch_compat.local_of(param), world.cut_of(param), "whole parameters")


class GatheredParameters:
    """Within: the given parameters are whole; on exit, what has changed is written back into the shards.

    Inside, modules hold plain whole parameters (`model.lm_head.weight`), which is the way to read and change them, by
    index, by in-place maths or by code that wants ordinary tensors. A reference taken before (`p`) shows the same memory:
    what is taken of it (`p.data`, `p.clone()`, `p[3]`) is plain, and stays so outside. A forward, a backward, an optimizer's
    step and `load_state_dict` inside mean what they mean outside; `.grad` is that of the parameter at rest. A parameter that
    is replaced or resized inside stays plain, until the next `shard_model` partitions it. All ranks must enter and leave
    together.

    Args:
        params: one parameter, several, or a module (all its parameters).
        modifier_rank: the rank whose changes count, on every rank. None: every rank makes the same changes, and keeps
            its own rows of them; nothing is sent.
        enabled: False does nothing.

    Example:
        with zero.GatheredParameters(model.lm_head, modifier_rank=0):
            if rank == 0:
                torch.nn.init.normal_(model.lm_head.weight[-10:])

    Raises:
        UsageError: a parameter is in use by a forward or backward, or is not one of hf_zero's.
        CollectiveError: a rank did not take part.

    Source: deepspeed.zero.GatheredParameters.
    """

    def __init__(
        self,
        params: nn.Module | Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            chosen: list[Tensor] = list(parameters_of(params))
        else:
            chosen = [params] if isinstance(params, Tensor) else list(params)
        self._params = list({id(param): param for param in map(current, chosen)}.values()) if enabled else []
        self._modifier_rank = modifier_rank
        self._gathered: list[_Gathered] = []
        self._plain: list[tuple[Tensor, World]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> GatheredParameters:
        with contextlib.ExitStack() as stack, torch.no_grad():
            for param in self._params:
                if isinstance(param, DTensor):
                    self._open(param, stack)  # type: ignore[arg-type]
                else:
                    self._note_plain(param)
            self._stack = stack.pop_all()
        return self

    def _open(self, param: nn.Parameter, stack: contextlib.ExitStack) -> None:
        world = world_that_cut(cast(DTensor, param))
        assert isinstance(param, PartitionedTensor)
        self._check_modifier(world)
        _check_not_in_use(param)
        if have_been_given([param]):
            refuse_unlike([param], "GatheredParameters", world)
        cut = world.cut_of(param)
        values = self._gather(param).to(world.device)  # where modules compute, wherever rows rest
        whole: nn.Parameter = WholeParameter(values, requires_grad=param.requires_grad)
        whole = cast(nn.Parameter, as_shown([param], [whole])[0])
        vars(whole).update(attributes_of_users(param) | vars(whole))
        vars(whole)[STANDS_FOR] = param
        item = _Gathered(param, cut, world, whole, None)
        self._gathered.append(item)
        self._note_values(item)
        if whole.requires_grad:
            item.node = torch_compat.gradient_node(whole)
            item.node.register_prehook(functools.partial(_hand_on, weakref.ref(param)))
        places = _places_of(param, world)
        put(places, whole)
        gathered[id(param)] = self
        stack.callback(_put_back, places, whole, param)
        param.show(whole)
        stack.callback(param.show, None)

    def _note_values(self, item: _Gathered) -> None:
        """Remember what the modifier rank will compare with."""
        if self._modifier_rank is not None and item.world.rank == self._modifier_rank:
            item.before = item.whole.detach().clone()

    def keep(self) -> None:
        """Write what has changed into the shards; all ranks together."""
        with torch.no_grad():
            for item in self._gathered:
                item.is_changed = self._write_back(item) or item.is_changed

    def show(self) -> None:
        """Show what the shards hold now; all ranks together."""
        with torch.no_grad():
            for item in self._gathered:
                if item.whole.shape == item.param.shape:
                    rows = torch_compat.local_of(item.param)
                    item.whole.detach().copy_(item.world.gather_parameter(rows, item.cut, "whole parameters"))
                    self._note_values(item)

    def _gather(self, param: nn.Parameter) -> Tensor:
        return gather_whole(param)

    def _note_plain(self, param: Tensor) -> None:
        """A parameter that is whole on every rank, in stage 0: the modifier's values still have to reach the others."""
        worlds = [engine.world for engine in live_engines() if engine.find(param) is not None]
        world = next(iter(worlds), vars(param).get("_zero_world"))  # an engine's, or that of a model without one yet
        if world is not None and self._modifier_rank is not None:
            self._check_modifier(world)
            self._plain.append((param, world))

    def _check_modifier(self, world: World) -> None:
        if self._modifier_rank is not None and not 0 <= self._modifier_rank < world.num_ranks:
            raise UsageError(
                f"modifier_rank={self._modifier_rank}, but there are ranks 0 to {world.num_ranks - 1} only"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        items, self._gathered = self._gathered, []
        plain, self._plain = self._plain, []
        _forget(items)
        if kind is not None:
            return  # the ranks may have left at different points, so nothing is written back
        self._note_change(items)
        with torch.no_grad():
            changed = [item.param for item in items if self._write_back(item) or item.is_changed]
            for param, world in plain:
                assert self._modifier_rank is not None
                world.broadcast(param.data, "whole parameters", self._modifier_rank)
        for engine in live_engines():
            engine.on_rows_changed(p for p in map(engine.find, changed) if p is not None)

    def _note_change(self, items: list[_Gathered]) -> None:
        """Values may be about to change: what is read alone is from before, or from after."""
        for engine in live_engines():
            if any(engine.find(item.param) for item in items):
                engine.gathering.changes.begun += 1

    def _write_back(self, item: _Gathered) -> bool:
        """Keep this rank's rows of what has changed; whether anything has, on any rank."""
        if item.whole.shape != item.param.shape:
            return False  # resized: it stays whole in its modules, and the old one is nobody's
        local = torch_compat.local_of(item.param)
        rows = item.own_rows()
        everyone = item.world.everyone
        if self._modifier_rank is None:
            is_changed = not same_bits(rows, local)
        else:
            is_changed = item.before is not None and not same_bits(item.whole.detach(), item.before)
        reports = everyone.agree([int(is_changed)], "the end of GatheredParameters")
        if self._modifier_rank is not None and reports[self._modifier_rank][0]:
            everyone.broadcast(item.whole.data, self._modifier_rank, "whole parameters")
            # Again: where the tensor axis cuts another dim than the rows, it is no view of the whole.
            rows = item.own_rows()
        if any(flag for (flag,) in reports) and not same_bits(rows, local):
            entries.forget(local)
            local.copy_(rows)
        return any(flag for (flag,) in reports)


def _hand_on(of: weakref.ref[nn.Parameter], gradients: tuple[Tensor | None, ...]) -> tuple[None]:
    """Give a backward's gradient of a whole parameter to the engine of the one that it stands for."""
    (gradient,), param = gradients, of()
    if gradient is not None and param is not None:
        engine, known = _engine_of(param)
        if engine is None or known is None:
            raise UsageError(
                "a backward inside GatheredParameters reaches a parameter whose model has no engine: run the model's forward, "
                "or call shard_model, before"
            )
        engine.backward.on_gradient(known, gradient)
    return (None,)


def _engine_of(param: nn.Parameter) -> tuple[ZeroEngine | None, ZeroParameter | None]:
    """The engine of a parameter, and its record there."""
    return next(((engine, known) for engine in live_engines() if (known := engine.find(param))), (None, None))


def _forget(items: list[_Gathered]) -> None:
    """What modules held inside is nobody's any more: an optimizer that holds it is told so, or given the parameter."""
    for item in items:
        if item.whole.shape == item.param.shape:
            note_replaced(item.whole, item.param)


class GatheredAlone(GatheredParameters):
    """As `GatheredParameters`, on a rank whose peers do not take part (see [Note: alone]): to be read only."""

    def _gather(self, param: nn.Parameter) -> Tensor:
        assert isinstance(param, DTensor)
        return param.full_tensor()

    def _note_change(self, items: list[_Gathered]) -> None:
        """There is none: the others would give nothing any more to a rank that had changed the model alone."""

    def _write_back(self, item: _Gathered) -> bool:
        is_same_shape = item.whole.shape == item.param.shape
        if is_same_shape and not same_bits(item.own_rows(), torch_compat.local_of(item.param)):
            raise UsageError("a parameter was changed while one rank read the model alone: change it on all ranks")
        return False


def _put_back(places: list[tuple[nn.Module, str]], whole: nn.Parameter, param: nn.Parameter) -> None:
    """Let modules hold `param` again, but for those that were given another parameter, or another shape, meanwhile."""
    gathered.pop(id(param), None)
    del vars(whole)[STANDS_FOR]
    retire([(whole, param)])
    if isinstance(whole, WholeParameter):
        cast(Any, whole).__class__ = nn.Parameter  # where it stays, it is one like any that a module has been given
    if whole.shape == param.shape:
        put([(module, name) for module, name in places if module._parameters.get(name) is whole], param)


def _check_not_in_use(param: nn.Parameter) -> None:
    for engine in live_engines():
        known = engine.find(param)
        if known is not None and any(module._parameters.get(name) is not param for module, name in known.locations):
            raise UsageError(
                f"GatheredParameters: {known.name!r} is whole already: in use by a forward or a backward, or gathered by "
                "an outer GatheredParameters; read it from its module there"
            )


def _places_of(param: nn.Parameter, world: World) -> list[tuple[nn.Module, str]]:
    """The modules that hold `param`."""
    for model in world.models:
        for found in find_parameters(model):
            if found.param is param:
                return found.locations
    return []
