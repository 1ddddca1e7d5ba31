"""Module and autograd hooks -> engine events.

[Note: life of a call] When a module that needs units is called, its pre-hook makes them whole, passes the whole tensors
through `_Gather` (an autograd function without inputs of its own, so that its backward gets all their gradients at once)
and puts them into the modules; the forward hook puts the shards back. The first gradient of an output makes the units
whole again, into the same storages, and puts the *same* function outputs back, since a checkpointed `forward` is
recomputed without module hooks. Autograd runs ready nodes by sequence number, latest first, and the function's node is
older than everything inside the call: so its backward runs after the rest of the call, and may release the units.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.engine.parameter import ZeroParameter
from hf_zero.engine.reading import connected, is_running, replace_tensors, tensors_in
from hf_zero.engine.saved import SavedWeights
from hf_zero.engine.unit import Lease, Unit
from hf_zero.errors import UsageError

if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine


logger = logging.getLogger(__name__)

_events = itertools.count()  # the order in which forwards of calls begin and end


class Call:
    """One call of a module that needs units, and the graph it leaves.

    It must not refer to the whole tensors: they refer to it, through the graph, and a cycle through C++ is never freed.
    """

    def __init__(self, entry: Entry, units: list[Unit]) -> None:
        self.entry = entry
        self.units = units
        self.epochs = [unit.epoch for unit in units]
        self.parameters: list[ZeroParameter] = []
        self.leases: list[Lease] = []
        self.has_function = False
        self.is_done = False  # its gradients have come, at least once
        self.session: object | None = None  # the backward in which they came last
        self.saved_weights: SavedWeights | None = None  # while its forward runs
        self.versions: list[int] = []  # of the whole tensors, as its forward began
        self.num_holders: list[int] = []  # of the memory of its releasable units, as its forward began
        self.gradients: dict[int, Tensor] = {}  # id(ZeroParameter) -> what has come of its whole gradient
        self.graph_task = -1  # the backward, or the one nested in it, in which the first gradient of an output came
        self.began = next(_events)
        self.ended: int | None = None  # its forward

    def release(self, kept: Container[int] = ()) -> None:
        """Give back all leases; units whose numbers are in `kept` stay whole, see `Lease.give_back`."""
        leases, self.leases = self.leases, []
        for unit, lease in zip(self.units, leases, strict=False):  # fewer, if acquiring one has failed
            lease.give_back(unit.index in kept)

    def check_not_outdated(self) -> None:
        """Raise if a unit's parameters have changed since this call's forward."""
        for unit, epoch in zip(self.units, self.epochs, strict=True):
            if unit.epoch != epoch:
                raise outdated(unit.name)


def outdated(unit: str) -> UsageError:
    """The error of a backward whose forward saw other parameters."""
    return UsageError(
        f"the parameters of {unit!r} were changed (an optimizer step, or an edit by hand) after the forward that this "
        "backward belongs to: its saved values are gone; run the forward again"
    )


class _Gather(torch.autograd.Function):
    """Hands out whole parameters; its backward gets all their gradients at once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, engine: ZeroEngine, *leaves: Tensor | None) -> tuple[Tensor, ...]:
        ctx.call, ctx.engine, ctx.num_leaves = call, engine, len(leaves)
        ctx.set_materialize_grads(False)
        tensors = engine.whole_tensors(call)
        frozen = [t for t, p in zip(tensors, call.parameters, strict=True) if not p.param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.engine.on_gradients(ctx.call, gradients)
        return (None, None, None, *[None] * ctx.num_leaves)


class Entry:
    """The hooks of one module whose calls need units.

    Attributes:
        units: the units.
        reads_in_backward: whether the backward of a call reads its parameters.
    """

    def __init__(self, engine: ZeroEngine, module: nn.Module, units: list[Unit]) -> None:
        self.units = units
        self.module = module
        self.reads_in_backward = reads_in_backward(module)
        self._keeps = self.reads_in_backward or not engine.world.config.reshard_after_forward
        self.backward_call: Call | None = None  # whose tensors are in the modules during backward
        self._engine = weakref.ref(engine)
        self._stack: list[tuple[Call, list[Tensor]] | None] = []
        self.handles = [
            module.register_forward_pre_hook(Hook(self._before), with_kwargs=True, prepend=True),
            module.register_forward_hook(Hook(self._after), with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        engine = self._engine()
        if self._stack and self.backward_call is None and is_running(module) <= len(self._stack):
            self.reset(engine)  # a call that Ctrl-C has ended: torch does not run its hooks then
        if engine is None or engine.is_closed or self.backward_call is not None or self._stack:
            # Recomputed inside its own backward, or called from within itself: the whole tensors are in place.
            self._stack.append(None)
            return None
        if self._is_gathered_elsewhere():
            self._stack.append(None)
            return None
        call = Call(self, self.units)
        self._stack.append((call, []))  # before anything can raise: the forward hook pops it in any case
        engine.acquire(call)
        for unit in self.units:
            call.parameters.extend(unit.parameters)
        is_traced = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if is_traced and any(p.param.requires_grad for p in call.parameters):
            call.has_function = True
            leaves = [connected(p) for p in call.parameters]
            tensors = list(_Gather.apply(engine.anchor, call, engine, *leaves))  # type: ignore[no-untyped-call]
            for unit in self.units:
                unit.live_calls.add(call)
        else:
            tensors = engine.whole_tensors(call)
        self._stack[-1] = (call, tensors)
        engine.install(call, tensors)
        call.versions = [] if torch.is_inference_mode_enabled() else [tensor._version for tensor in tensors]
        releasable = [unit for unit in self.units if unit.is_releasable]
        if releasable and is_traced:
            call.saved_weights = SavedWeights(releasable, engine.make_whole_for_backward)
        if releasable and (call.saved_weights is None or call.saved_weights.is_active):
            call.num_holders = [unit.num_holders() for unit in releasable]
        return None

    def _is_gathered_elsewhere(self) -> bool:
        """Whether the modules hold whole parameters already, inside `GatheredParameters`."""
        whole = [p.is_whole_elsewhere for unit in self.units for p in unit.parameters]
        if any(whole) and not all(whole):
            raise UsageError(
                f"a forward of {self.units[0].name!r} inside GatheredParameters needs all of its parameters to be gathered, or "
                "none: give GatheredParameters the module"
            )
        return any(whole)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        top = self._stack.pop() if self._stack else None
        engine = self._engine()
        if top is None or engine is None:
            return None
        call, tensors = top
        call.ended = next(_events)
        if call.saved_weights is not None:
            call.saved_weights.end()
        engine.uninstall(call)
        _check_unchanged(call, tensors)
        found = list(tensors_in(output))
        if copies := self._copies_of_views(found):
            output = replace_tensors(output, copies)
            found = [copies.get(id(tensor), tensor) for tensor in found]
        self._find_holders(call, len(copies))
        watched = [t for t in found if t.requires_grad] if torch.is_grad_enabled() else []
        call.release(kept=engine.kept_for_backward if watched and self._keeps else ())
        if watched:
            on_gradient = _OnOutputGradient(engine, call, tensors)
            for tensor in watched:
                tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return output

    def _copies_of_views(self, found: list[Tensor]) -> dict[int, Tensor]:
        """Copies, by id, of the tensors that are views of memory that will be released: a module may return its parameter."""
        places = [(u.address, u.address + u.buffer_nbytes) for u in self.units if u.is_releasable and u.is_whole]
        return {
            id(tensor): tensor.clone()
            for tensor in found
            if tensor.layout is torch.strided and any(start <= tensor.data_ptr() < end for start, end in places)
        }

    def _find_holders(self, call: Call, num_outputs: int) -> None:
        """Keep the memory of a unit for good if somebody has kept a view of it, see [Note: saved weights]."""
        releasable = [unit for unit in self.units if unit.is_releasable]
        for unit, before in zip(releasable, call.num_holders, strict=False):
            if unit.num_holders() > before + num_outputs and not sys.exc_info()[1]:
                unit.is_held = True
                logger.warning(
                    "a view of the parameters of %r outlives their module's call (an attribute, a custom function's "
                    "context): its memory stays from now on",
                    unit.name,
                )

    def reset(self, engine: ZeroEngine | None) -> None:
        """Forget calls that never came to their end."""
        for top in self._stack:
            if top is not None and engine is not None:
                if top[0].saved_weights is not None:
                    top[0].saved_weights.end()
                engine.uninstall(top[0])
        self._stack.clear()
        self.backward_call = None


def reads_in_backward(module: nn.Module) -> bool:
    """Whether the backward of a call of `module` reads its parameters; that of a plain embedding needs indices only.

    Not by its hooks, which may differ between ranks: one that computes with the weights makes torch's backward raise.
    """
    is_plain = type(module) is nn.Embedding and module._parameters.keys() == {"weight"}
    return not is_plain or bool(module._modules) or "forward" in vars(module)


def _check_unchanged(call: Call, tensors: list[Tensor]) -> None:
    for p, tensor, version in zip(call.parameters, tensors, call.versions, strict=False):
        if p.is_sharded and tensor._version != version:
            raise UsageError(
                f"parameter {p.name!r} was changed in place inside its module's forward, where modules see a gathered copy, "
                "so the change would be lost: change it between forwards (nn.Embedding: without max_norm)"
            )


class _OnOutputGradient:
    """Tensor hook: the backward of a call begins when the first of its outputs has a gradient."""

    def __init__(self, engine: ZeroEngine, call: Call, tensors: list[Tensor]) -> None:
        self._engine, self._call, self._tensors = engine, call, tensors

    def __call__(self, gradient: Tensor) -> None:
        self._engine.on_call_backward_begin(self._call, self._tensors)


class Hook:
    """A module hook that a deep copy or a pickle of the module does not take along.

    Args:
        call: the hook.
        copied_as: the hook of a deep copy of the module; none by default.
    """

    def __init__(self, call: Callable[..., Any] | None, copied_as: Any = None) -> None:
        self._call = None if call is None else torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        self.copied_as = copied_as

    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        return None if self._call is None else self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Hook(None) if self.copied_as is None else copy.deepcopy(self.copied_as, memo)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)


def watch_plain_gradients(p: ZeroParameter, on_gradient: Callable[[ZeroParameter], None]) -> Any:
    """Call `on_gradient(p)` whenever autograd has added to the gradient of a plain parameter; returns the handle."""
    owner, of_parameter = weakref.WeakMethod(on_gradient), weakref.ref(p)

    def hook(_: Tensor) -> None:  # a tensor's hooks are invisible to the garbage collector: no cycle through them
        call, parameter = owner(), of_parameter()
        if call is not None and parameter is not None:
            call(parameter)

    return p.param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
