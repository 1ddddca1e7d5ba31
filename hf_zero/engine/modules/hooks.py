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
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.engine.backward.backward import Backward
from hf_zero.engine.parameters.records import as_seen
from hf_zero.engine.units.calls.call import Call, Entry
from hf_zero.engine.units.calls.forward_alone import CallAlone
from hf_zero.engine.units.calls.saved import SavedWeights
from hf_zero.engine.units.calls.writes import check_numpy
from hf_zero.engine.units.reading import connected, replace_tensors, tensors_in
from hf_zero.errors import UsageError
from hf_zero.under_way import has_raised

_OWN_REFERENCES = 1  # to a whole tensor, after its call: that of the list

_FULLGRAPH = (  # torch shows it where a whole call is to be one graph
    "hf_zero makes parameters whole around a module's call, outside of compiled graphs: leave fullgraph out, or compile what "
    "runs inside, `block.forward = torch.compile(block.forward, fullgraph=True)`"
)


class _Gather(torch.autograd.Function):
    """Hands out whole parameters; its backward gets all their gradients at once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, backward: Backward, *leaves: Tensor | None) -> tuple[Tensor, ...]:
        ctx.call, ctx.engine, ctx.num_leaves = call, backward, len(leaves)
        call.node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        tensors = call.whole_tensors()
        frozen = [t for t, p in zip(tensors, call.parameters, strict=True) if not p.param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        asked = ctx.engine.on_gradients(ctx.call, gradients)
        return (None, None, None, *(map(asked.get, ctx.call.parameters) if asked else [None] * ctx.num_leaves))


class ModuleHooks:
    """The hooks of one module whose calls need units.

    Args:
        entry: the module.
        module: the same, or another whose calls stand for its.
        backward: of its model.
        is_other: whether `module` is another.
    """

    def __init__(self, entry: Entry, module: nn.Module, backward: Backward, is_other: bool = False) -> None:
        self.entry = entry
        if is_other:
            entry.others.append(weakref.ref(module))
        self._backward = weakref.ref(backward)
        home = backward.gathering.home
        after = module.register_forward_hook(Hook(home.visited(self._after)), with_kwargs=True, always_call=True)
        before = module.register_forward_pre_hook(Hook(home.visited(self.before)), with_kwargs=True, prepend=True)
        self.handles = [before, after]
        self._number = after.id

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """The pre-hook: make the units whole, and put them into the modules."""
        entry, backward = self.entry, self._backward()
        if entry.is_closed:
            return None  # the root's hook has made a new engine in this call, and torch calls old hooks without kwargs
        if backward is not None and not entry.stack and backward.gathering.has_nothing_to_do():
            return None
        if entry.stack and entry.backward_call is None and entry.num_calls(module) <= len(entry.stack):
            entry.reset()  # a call that Ctrl-C has ended: torch does not run its hooks then
        # Hooks of users that came later are of the forward, too: what they see, and write, is what it computes with.
        hooks: Any = module._forward_hooks  # an `OrderedDict`, which torch calls a dict
        if self._number in hooks and next(reversed(hooks)) != self._number:
            hooks.move_to_end(self._number)
        is_inside = entry.backward_call is not None or bool(entry.stack)
        entry.stack.append(None)  # before anything can raise: the forward hook pops it in any case
        if backward is None or entry.is_closed or is_inside or self._is_gathered_elsewhere():
            return None  # recomputed inside its own backward, or called from within itself: the tensors are in place
        alone = backward.gathering.alone
        is_outermost = backward.gathering.begins_alone(torch.is_grad_enabled())
        if is_outermost:
            itself = weakref.ref(module)
            alone.begin(lambda: (found := itself()) is not None and entry.num_calls(found) > 0)
        if alone.is_under_way:
            entry.stack[-1] = (CallAlone(alone, [p for unit in entry.units for p in unit.parameters], is_outermost), [])
            return None
        backward.recover_if_dead()
        backward.gathering.begin_read()
        call = Call(entry)
        entry.stack[-1] = (call, [])
        backward.gathering.acquire(call)
        is_traced = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if is_traced and any(p.param.requires_grad for p in call.parameters):
            leaves = connected(call.parameters)
            tensors = list(torch_compat.apply_function(_Gather, backward.anchor, call, backward, *leaves))
            for unit in entry.units:
                unit.live_calls.add(call)
        else:
            tensors = call.whole_tensors()
        tensors = as_seen(call.parameters, tensors)
        entry.stack[-1] = (call, tensors)
        call.install(tensors, backward.make_whole)
        releasable = [unit for unit in entry.units if unit.is_releasable]
        if releasable and is_traced:
            call.saved_weights = SavedWeights(releasable, backward.make_whole)
        if releasable and (call.saved_weights is None or call.saved_weights.is_active):
            call.num_holders = [unit.num_holders() for unit in releasable]
        return None

    def _is_gathered_elsewhere(self) -> bool:
        """Whether the modules hold whole parameters already, inside `GatheredParameters`."""
        if not any(unit.is_whole_elsewhere for unit in self.entry.units):
            return False
        whole = [p.is_whole_elsewhere for unit in self.entry.units for p in unit.parameters]
        if any(whole) and not all(whole):
            raise UsageError(
                f"a forward of {self.entry.units[0].name!r} inside GatheredParameters needs all of its parameters to be "
                "gathered, or none: give GatheredParameters the module"
            )
        return any(whole)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        stack, backward = self.entry.stack, self._backward()
        if not stack or stack[-1] is None or backward is None:
            del stack[-1:]
            return None
        call, tensors = stack[-1]
        if isinstance(call, CallAlone):
            stack.pop()
            call.end(has_raised(output))
            return None
        written = call.end_forward()
        stack.pop()  # only now: Ctrl-C may have ended that, and `Entry.reset` does it again
        if not has_raised(output):
            check_numpy(call.units, written)
        backward.gathering.keep_written(written, has_raised(output))
        del written  # holds memory
        found = list(tensors_in(output))
        if copies := self._copies_of_views(found):
            backward.gathering.home.hand_out(copies.values())
            output = replace_tensors(output, copies)
            found = [copies.get(id(tensor), tensor) for tensor in found]
        if not sys.exc_info()[1]:  # whose frames hold tensors
            self._find_holders(call, len(copies))
            call.pin_what_is_kept(tensors, _OWN_REFERENCES, but=copies)
        watched = [t for t in found if t.requires_grad] if torch.is_grad_enabled() else []
        call.release(kept=backward.gathering.kept_after(self.entry, bool(watched)) if torch.is_grad_enabled() else ())
        if watched:
            on_gradient = _OnOutputGradient(backward, call, tensors)
            for tensor in watched:
                tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return output

    def _copies_of_views(self, found: list[Tensor]) -> dict[int, Tensor]:
        """Copies, by id, of the tensors that are views of memory that will be released: a module may return its parameter."""
        places = [(u.address, u.address + u.buffer_nbytes) for u in self.entry.units if u.is_releasable and u.is_whole]
        return {
            id(tensor): tensor.clone()
            for tensor in found
            if tensor.layout is torch.strided and any(start <= tensor.data_ptr() < end for start, end in places)
        }

    def _find_holders(self, call: Call, num_outputs: int) -> None:
        """Keep the memory of a unit for good if somebody has kept a view of it, see [Note: saved weights]."""
        releasable = [unit for unit in self.entry.units if unit.is_releasable]
        for unit, before in zip(releasable, call.num_holders, strict=False):
            if unit.num_holders() > before + num_outputs:
                unit.pin()


class _OnOutputGradient:
    """Tensor hook: the backward of a call begins when the first of its outputs has a gradient."""

    def __init__(self, backward: Backward, call: Call, tensors: list[Tensor]) -> None:
        self._backward, self._call, self._tensors = backward, call, tensors

    def __call__(self, gradient: Tensor) -> None:
        self._backward.on_call_begin(self._call, self._tensors)


class _NotScriptedError(UsageError, AttributeError):
    """A model whose hooks gather its parameters is no script."""


class Hook:
    """A module hook that a deep copy or a pickle of the module does not take along.

    Args:
        call: the hook.
        copied_as: the hook of a deep copy of the module; none by default.
    """

    def __init__(self, call: Callable[..., Any] | None, copied_as: Any = None) -> None:
        self._call = call
        self._outside_graphs = None if call is None else torch.compiler.disable(call, reason=_FULLGRAPH)  # type: ignore[no-untyped-call]
        self.copied_as = copied_as

    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        if self._outside_graphs is None or self._call is None:
            return None
        # Where nothing is compiled, three microseconds are saved: as much as the rest of a call of a small module's hook.
        is_plain = not torch.compiler.is_dynamo_compiling() and not torch_compat.compiles_frames()
        return self._call(*args) if is_plain else self._outside_graphs(*args)

    @property
    def __name__(self) -> str:
        """None: `torch.jit.script` asks each hook for it, to compile the function of that name."""
        raise _NotScriptedError(
            "torch.jit.script cannot compile the hooks that make a partitioned model's parameters whole: script another model "
            "with its weights (`save_pretrained`, or `state_dict()`), or use torch.compile"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Hook(None) if self.copied_as is None else copy.deepcopy(self.copied_as, memo)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)
