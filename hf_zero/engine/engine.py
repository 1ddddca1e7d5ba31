"""The engine of one model: wires units, hooks, orders and reductions; the events of a training step arrive here."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.engine.grouping import Found, find_parameters, group
from hf_zero.engine.hooks import Call, Entry, Hook, outdated, watch_plain_gradients
from hf_zero.engine.parameter import ZeroParameter, at_rest_id
from hf_zero.engine.partitioned_tensor import forget_owner, grad_hooks, post_accumulate_hooks, set_owner
from hf_zero.engine.reading import (
    Read,
    ReadableParameters,
    connected,
    in_graph,
    is_function_running,
    is_method_running,
    is_running,
    tensors_in,
)
from hf_zero.engine.reduction import LocalReducer, Reducer, WholeReducer, ways
from hf_zero.engine.schedule import GatherOrder, first_uses
from hf_zero.engine.state_dict import CutStateDict
from hf_zero.engine.unit import GatheredMemory, Lease, Residency, Unit
from hf_zero.engine.world import World
from hf_zero.errors import PartitionError, UsageError

logger = logging.getLogger(__name__)

_live_engines: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()
_numbers = itertools.count()


class _Session:
    """One backward pass, from its first event to its end."""

    def __init__(self, reducer: Reducer | LocalReducer | None, on_break: Callable[[_Session], None]) -> None:
        self.reducer = reducer
        self.has_gradients = False
        self.leases: list[Lease] = []  # of units that autograd's saved tensors need, see [Note: saved weights]
        self.accumulated: dict[ZeroParameter, None] = {}  # under `no_sync`
        self.hooked: dict[
            Unit, dict[int, Tensor]
        ] = {}  # gradients that wait for users' hooks, until all of them are there
        self.open_calls: set[Call] = set()
        self._token = _Token()
        self.token = weakref.ref(self._token, lambda _: on_break(self))

    def take_token(self) -> _Token:
        """An object that lives as long as autograd may still call back; if backward raises, it is gone."""
        token = self._token
        del self._token
        return token

    @property
    def is_dead(self) -> bool:
        """Whether the backward broke off with an exception."""
        return self.token() is None


class _Token:
    """See `_Session.take_token`."""


class ZeroEngine:
    """Runs one model under ZeRO. Made by `shard_model`, or at the first forward of a model made under `Init`.

    Args:
        model: its parameters are partitioned already.
        world: the ranks.
        copied_as: forward pre-hook that a deep copy of the model gets in place of the engine's.

    Attributes:
        world: the ranks, the configuration and the ledger.
        parameters: every parameter once, in the model's order.
        units: the sets of parameters gathered together, in the model's order; empty where nothing has to be gathered
            (stage 0 and world size 1 in one dtype), so that modules then run without hooks.
        kept_for_backward: numbers of the units that stay whole from a forward to its backward, the same on every rank.
        memory: counts the bytes of gathered units.
        number: engines are numbered as they are made.
    """

    def __init__(self, model: nn.Module, world: World, copied_as: Any = None) -> None:
        self.world = world
        self.number = next(_numbers)
        self._copied_as = copied_as
        self.is_closed = False
        self.memory = GatheredMemory()
        self.units: list[Unit] = []
        self._model = weakref.ref(model)
        self._entries: list[Entry] = []
        self._entry_of: dict[int, Entry] = {}
        self._handles: list[Any] = []
        self._session: _Session | None = None
        self._order = GatherOrder()
        self._reduction_order: list[int] = []
        self.kept_for_backward: set[int] = set()
        self._watched: set[int] = set()
        self._thread = 0  # on which the forward under way runs
        self._roots: list[nn.Module] = []  # whose forwards are under way: the model, or parts that hold units
        self._reads: dict[
            tuple[int, bool], Tensor
        ] = {}  # (id(ZeroParameter), in the graph): what was read outside its call
        self._edited: dict[ZeroParameter, None] = {}  # by hand, since whole tensors were made
        self._stepping: object = None  # the optimizer whose step is under way
        self._has_read = False  # since ranks last met before a change of parameters
        self._is_syncing = True
        with torch.inference_mode(False):
            self.anchor = torch.zeros((), device=world.device, requires_grad=True)
            self.parameters = [self._known(found) for found in find_parameters(model)]
            self._ways = ways(self.parameters, world)
            self._anchor_node = torch_compat.gradient_node(self.anchor)
            self._by_param = {id(p.param): p for p in self.parameters}
            self._unit_of: dict[int, Unit] = {}
            self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
            self._build(model)
        _live_engines.add(self)
        world.models.add(model)
        model.__dict__["_zero_engine"] = self

    # --- building -----------------------------------------------------------------------------------------------

    def _known(self, found: Found) -> ZeroParameter:
        param, world = found.param, self.world
        layout = world.layout_of(param)
        made_in = getattr(param, "_zero_made_in", param.dtype)
        return ZeroParameter(
            name=found.names[0],
            param=param,
            locations=found.locations,
            layout=layout,
            rank=world.rank,
            compute_dtype=world.precision.compute_for(made_in),
            averages=world.config.gradient_reduction == "mean",
            aliases=found.names[1:],
        )

    def _build(self, model: nn.Module) -> None:
        is_plain = not self.world.partitions and all(p.compute_dtype == p.param.dtype for p in self.parameters)
        is_plain = is_plain and (self.world.num_ranks == 1 or self.world.config.gradient_reduction == "mean")
        self._whole_reducer: WholeReducer | None = None
        if is_plain:
            if self.world.num_ranks > 1:
                self._whole_reducer = WholeReducer(self.parameters, self.world)
                self._watch_plain_gradients()
        else:
            self._build_units(model)
            for p in self.parameters:
                set_owner(p.param, self)
        for module in _roots_of(model, [entry.module for entry in self._entries]):
            hook = Hook(self._enter_root, copied_as=self._copied_as if module is model else None)
            self._handles.insert(0, module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            self._handles.append(
                module.register_forward_hook(Hook(self._leave_root), with_kwargs=True, always_call=True),
            )
        self._structure = _structure_of(model)
        self._buffers = {id(buffer) for buffer in model.buffers()}
        before_load = Hook(CutStateDict(self.world), copied_as=CutStateDict(self.world))
        after_load = Hook(self._after_load)
        self._handles.append(model.register_load_state_dict_pre_hook(before_load))  # type: ignore[no-untyped-call]
        self._handles.append(model.register_load_state_dict_post_hook(after_load))  # type: ignore[no-untyped-call]

    def _build_units(self, model: nn.Module) -> None:
        by_entry: dict[int, tuple[nn.Module, list[Unit]]] = {}
        for index, part in enumerate(group(model, self.world.config.units)):
            members = [self._by_param[id(found.param)] for found in part.params]
            unit = Unit(index, part.name, members, part.entries, self.world, self.memory)
            self.units.append(unit)
            self._unit_of.update({id(p): unit for p in members})
            for module in part.entries:
                by_entry.setdefault(id(module), (module, []))[1].append(unit)
        for key, (module, units) in by_entry.items():
            entry = Entry(self, module, units)
            self._entries.append(entry)
            self._entry_of[key] = entry
            self._handles += entry.handles
        self._expect([unit.index for unit in reversed(self.units)])
        for unit in self.units:
            if unit.keeps_whole:
                unit.start_gather()
        for module in {id(module): module for p in self.parameters for module, _ in p.locations}.values():
            module._parameters = ReadableParameters(self, module._parameters)

    def close(self) -> None:
        """Remove every hook; parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for p in self.parameters:
            forget_owner(p.param, self)
            for module, _ in p.locations:
                module._parameters = dict(module._parameters)
        self.is_closed = True
        model = self._model()
        if model is not None and model.__dict__.get("_zero_engine") is self:
            del model.__dict__["_zero_engine"]
        _live_engines.discard(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model gets an engine of its own, at its first forward."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    # --- looking up ---------------------------------------------------------------------------------------------

    def find(self, param: Tensor) -> ZeroParameter | None:
        """The engine's record of a parameter (as the user holds it), if it is this engine's."""
        return self._by_param.get(id(param))

    def remember_replaced(self, old: nn.Parameter, name: str) -> None:
        """`old` was the parameter `name` before the model was partitioned: an optimizer must not hold it."""
        self._replaced[id(old)] = (weakref.ref(old), name)

    def replaced_name(self, param: Tensor) -> str | None:
        """The name under which `param` was part of the model before it was partitioned."""
        entry = self._replaced.get(id(param))
        return entry[1] if entry is not None and entry[0]() is param else None

    # --- forward ------------------------------------------------------------------------------------------------

    def enter_root_late(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let a forward that is already under way be seen; for an engine made inside it."""
        self._enter_root(module, args, kwargs)
        entry = self._entry_of.get(id(module))
        return None if entry is None else entry._before(module, args, kwargs)

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._roots and is_running(self._roots[0]) < self._roots.count(self._roots[0]) + (module is self._roots[0]):
            self._abandon_forward()  # see `settle`
        self._thread = threading.get_ident()
        self._roots.append(module)
        if len(self._roots) > 1 or torch_compat.in_backward():
            return None
        self._recover()
        model = self._model()
        if module is model and self._structure != _structure_of(module):
            if is_function_running("functional_call"):
                self._roots.clear()
                raise UsageError(
                    "torch.func.functional_call puts other tensors into the modules of a partitioned model for one call, which "
                    "the engine cannot tell from new parameters: call it on a whole copy (`copy.deepcopy` before shard_model)"
                )
            return self._start_anew(module, args, kwargs)
        self._check_dtypes()
        for entry in self._entries:
            entry.reset(self)
        self._drop_gathered()  # if the last forward had no backward, or failed on some ranks only
        self._flush_edits()
        if not self.world.partitions:
            for unit in self.units:
                unit.refresh()
        if self._whole_reducer is not None:
            self._watch_plain_gradients()
        kind = "forward" if torch.is_grad_enabled() else "inference"
        self._order.begin(kind if module is model else f"{kind} of {id(module)}")
        return None

    def _start_anew(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The model has other parameters than before: partition them, and run this forward under a new engine."""
        self.close()
        logger.info("the model has other parameters than when it was partitioned: they are partitioned now")
        if self._copied_as is None:
            return None
        late = copy.deepcopy(self._copied_as)
        late.known_buffers = self._buffers
        return late(module, args, kwargs)

    def _check_dtypes(self) -> None:
        for p in self.parameters:
            if p.param.dtype != p.dtype_at_rest:
                raise PartitionError(
                    f"parameter {p.name!r} was cast from {p.dtype_at_rest} to {p.param.dtype} after the model was partitioned "
                    "(`model.to(dtype)`, `.half()`, ...): cast the model before, or set compute_dtype and master_dtype"
                )

    def _leave_root(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._roots:
            self._roots.pop()
        if self._roots or torch_compat.in_backward():
            return
        self._reads.clear()
        if output is None:
            self._order.abandon()
        else:
            self._order.end()
        self._drop_gathered(but_kept=True)
        if torch.is_grad_enabled() and (self.units or self._whole_reducer):
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_root_gradient)  # type: ignore[no-untyped-call]

    def _abandon_forward(self) -> None:
        """Forget a forward that never came to its end."""
        self._roots.clear()
        self._reads.clear()
        self._order.abandon()
        for entry in self._entries:
            entry.reset(self)

    # --- reads outside a call: see [Note: whoever reads gets the whole] ---------------------------------------------

    def read(self, param: Tensor) -> Tensor:
        """The whole tensor of a parameter, while a forward or backward is under way; at rest, the parameter itself."""
        p = self._by_param.get(id(param))
        if p is None or not self._is_running():
            return param
        is_traced = self._is_traced(p)
        known = self._reads.get((id(p), is_traced))
        if known is None:
            self._flush_edits()
            self._has_read = True
            unit = self._unit_of[id(p)]
            whole = unit.read_whole(p)
            known = in_graph(self, Read(p, unit.epoch), whole) if is_traced else whole
            self._reads[id(p), is_traced] = known
        return known

    def _is_traced(self, p: ZeroParameter) -> bool:
        return p.param.requires_grad and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _is_running(self) -> bool:
        if self._session is not None and not self._session.is_dead and torch_compat.in_backward():
            return True
        self.settle()
        return bool(self._roots) and self._thread == threading.get_ident()

    def settle(self) -> None:
        """Put everything at rest, if a forward was under way that Ctrl-C has ended: torch does not run its hooks then."""
        if self._roots and self._thread == threading.get_ident() and not is_running(self._roots[0]):
            self._abandon_forward()

    def whole_at_rest(self, param: Tensor) -> Tensor:
        """See `Owner.whole_at_rest`."""
        p = self._by_param[id(param)]
        unit = self._unit_of[id(p)]
        return in_graph(self, Read(p, unit.epoch), self.world.gather_whole(p.local, p.layout, "whole parameters"))

    def on_read_gradient(self, read: Read, gradient: Tensor) -> None:
        """The gradient of a parameter that was read outside its module's call is there."""
        if torch.is_grad_enabled():
            _refuse_create_graph()
        session = self._begin_session()
        p, unit = read.parameter, self._unit_of[id(read.parameter)]
        if read.epoch != unit.epoch:
            raise outdated(unit.name)
        if self._is_wanted(p):
            session.has_gradients = True
            self._hand_on(unit, {id(p): gradient}, session)

    def make_whole_for_backward(self, unit: Unit, epoch: int) -> None:
        """Autograd needs a saved view of a unit: let the unit be whole until this backward ends."""
        if unit.epoch != epoch:
            raise outdated(unit.name)
        if unit.is_whole:
            return
        session = self._session
        if session is not None and not session.is_dead:
            session.leases.append(unit.acquire())
        else:
            self._begin_session().leases.append(unit.acquire())

    def name_of(self, param: Tensor) -> str:
        """See `Owner.name_of`."""
        return self._by_param[id(param)].name

    def acquire(self, call: Call) -> None:
        """Make the units of a call whole, and start to gather those that will be needed next."""
        if self._session is not None and self._session.is_dead:
            self._recover()
        self._flush_edits()
        self._has_read = True
        for unit in call.units:
            if unit.residency is Residency.RELEASED:
                unit.start_gather()
        for unit in call.units:
            coming = self._order.use(unit.index)
            if not unit.keeps_whole:
                self._prefetch(coming)
        for unit in call.units:
            call.leases.append(unit.acquire())

    def _prefetch(self, coming: Iterable[int]) -> None:
        budget = self.world.config.prefetch_bytes
        ahead = 0
        for index in coming:
            unit = self.units[index]
            if unit.keeps_whole or unit.is_leased:
                continue
            ahead += 0 if unit.is_shared else unit.buffer_nbytes
            if ahead > budget:
                return
            if unit.residency is Residency.RELEASED:
                unit.start_gather()

    def _drop_gathered(self, but_kept: bool = False) -> None:
        """Release what nobody reads: at events that all ranks share, so that they will gather alike again.

        Args:
            but_kept: leave those that wait for their backward.
        """
        for unit in self.units:
            unit.is_kept = unit.is_kept and but_kept
            if not unit.keeps_whole and not unit.is_leased:
                unit.release_if_unused()

    def whole_tensors(self, call: Call) -> list[Tensor]:
        """The whole tensors of a call's parameters, in order."""
        return [tensor for unit in call.units for tensor in unit.whole_tensors()]

    def install(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Let the modules see the whole tensors of a call."""
        for p, tensor in zip(call.parameters, tensors, strict=True):
            p.push(call, tensor)

    def uninstall(self, call: Call) -> None:
        """Let the modules see what they saw before the call."""
        for p in call.parameters:
            p.pop(call)

    # --- backward -----------------------------------------------------------------------------------------------

    def _begin_session(self) -> _Session:
        if self._session is not None and self._session.is_dead:
            self._recover()
        if self._session is None:
            self._flush_edits()
            self._session = _Session(self._make_reducer(), self._on_break)
            self._order.begin("backward")
            token = self._session.take_token()
            torch_compat.after_backward(lambda token=token: self._end_backward())  # type: ignore[misc]
        return self._session

    def _on_break(self, session: _Session) -> None:
        """Autograd has dropped a session's callback: it has been called, or the backward broke off."""
        if self._session is session:
            self._recover()

    def _make_reducer(self) -> Reducer | LocalReducer | None:
        if not self.units:
            return None
        if self.world.num_ranks == 1:
            return LocalReducer(self.world)
        if not self._is_syncing and not self.world.config.policy.shards_gradients:
            return None
        trainable = {unit.index: unit for unit in self.units if unit.trainable()}
        return Reducer(trainable, self.world, self._reduction_order, self._ways)

    def _on_root_gradient(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            _refuse_create_graph()
        self._begin_session()

    def on_call_backward_begin(self, call: Call, tensors: list[Tensor]) -> None:
        """The first gradient of a call's outputs is there: its units must be whole while its backward runs."""
        if torch.is_grad_enabled():
            _refuse_create_graph()
        session = self._begin_session()
        if call.session is session or call in session.open_calls:
            return
        call.check_not_outdated()
        self._finish_calls(session, before=call)
        session.open_calls.add(call)
        call.graph_task = torch_compat.graph_task()
        if not call.entry.reads_in_backward:
            return
        if not call.leases:
            self.acquire(call)
        self.install(call, tensors)
        call.entry.backward_call = call

    def on_call_backward_end(self, call: Call) -> None:
        """The last node of a call has run."""
        session = self._session
        if session is not None:
            session.open_calls.discard(call)
            call.session = session
        if call.entry.backward_call is call:
            call.entry.backward_call = None
        self.uninstall(call)
        for unit in call.units:
            unit.is_kept = False
        call.release()

    def on_gradients(self, call: Call, gradients: Sequence[Tensor | None]) -> None:
        """All gradients of a call's parameters are there (None: not used)."""
        if torch.is_grad_enabled():
            _refuse_create_graph()
        session = self._begin_session()
        call.check_not_outdated()
        session.has_gradients = True
        for p, grad in zip(call.parameters, gradients, strict=True):
            if grad is not None and self._is_wanted(p):
                known = call.gradients.get(id(p))
                call.gradients[id(p)] = grad if known is None else known + grad
        # A reentrant checkpoint inside the call runs a backward of its own: the rest of the call is still to come.
        if call not in session.open_calls or call.graph_task == torch_compat.graph_task():
            self._finish_call(call, session)

    def _finish_call(self, call: Call, session: _Session) -> None:
        """A call's backward is over: hand on its gradients, and put its units back."""
        call.is_done = True
        gradients, call.gradients = call.gradients, {}
        for unit in call.units:
            found = {id(p): gradients[id(p)] for p in unit.parameters if id(p) in gradients}
            if found:
                self._hand_on(unit, found, session)
        self.on_call_backward_end(call)

    def _is_wanted(self, p: ZeroParameter) -> bool:
        """Whether the running backward is to give `p` a gradient: `backward(inputs=...)` names those that get one."""
        try:
            if torch_compat.will_run(self._anchor_node):
                return True
            leaf = connected(p)
            return leaf is not None and torch_compat.will_run(torch_compat.gradient_node(leaf))
        except RuntimeError as error:
            raise UsageError(
                f"torch.autograd.grad does not work for the partitioned parameter {p.name!r}, whose gradient is reduced over "
                "the ranks: use `loss.backward()`, or `loss.backward(inputs=[...])`, and read `.grad`"
            ) from error

    def _hand_on(self, unit: Unit, found: dict[int, Tensor], session: _Session, is_last: bool = False) -> None:
        """Accumulate or reduce gradients of a unit; those that users' hooks are to see wait until all have come."""
        waits = unit in session.hooked or any(grad_hooks(p.param) for p in unit.parameters if id(p) in found)
        if waits and not is_last:
            waiting = session.hooked.setdefault(unit, {})
            for key, grad in found.items():
                waiting[key] = waiting[key] + grad if key in waiting else grad
        elif self.world.num_ranks > 1 and not self.world.config.policy.shards_gradients:
            self._accumulate_whole(unit, found, session)
        else:
            assert session.reducer is not None
            session.reducer.ready(unit, found)

    def _run_grad_hooks(self, session: _Session) -> None:
        """Pass this rank's whole gradients through what users have registered, once a backward, as autograd does."""
        for unit, waiting in session.hooked.items():
            for p in unit.parameters:
                for hook in grad_hooks(p.param) if id(p) in waiting else ():
                    changed = hook(waiting[id(p)])
                    waiting[id(p)] = waiting[id(p)] if changed is None else changed
            self._hand_on(unit, waiting, session, is_last=True)

    def _accumulate_whole(self, unit: Unit, gradients: dict[int, Tensor], session: _Session) -> None:
        """Stages 0 and 1: gradients stay whole until the last backward of a step, and until the unit's last call."""
        for p in unit.trainable():
            if id(p) in gradients:
                grad = gradients[id(p)]
                p.add_whole_grad(grad, self.world.precision.reduce_for(grad.dtype))
                session.accumulated[p] = None
                if session.reducer is None:
                    p.keep_whole_grad()
        if session.reducer is not None and all(getattr(call, "is_done", True) for call in unit.live_calls):
            self._reduce_whole(unit, session.reducer)

    def _reduce_whole(self, unit: Unit, reducer: Reducer | LocalReducer) -> None:
        found = {id(p): grad for p in unit.trainable() if (grad := p.take_whole_grad()) is not None}
        if found:
            reducer.ready(unit, found)

    def _watch_plain_gradients(self) -> None:
        """Watch the parameters that are trainable now; torch refuses a hook on others, which may be thawed later."""
        for p in self.parameters:
            if p.param.requires_grad and id(p) not in self._watched:
                self._watched.add(id(p))
                self._handles.append(watch_plain_gradients(p, self._on_plain_gradient))

    def _on_plain_gradient(self, p: ZeroParameter) -> None:
        assert self._whole_reducer is not None
        self._begin_session().has_gradients = True
        self._whole_reducer.touch(p)

    def _end_backward(self) -> None:
        session = self._session
        if session is None:
            return
        self._finish_calls(session)
        self._run_grad_hooks(session)
        self._order.end()
        self._reads.clear()
        self._session = None
        _give_back(session)
        if session.has_gradients:
            self._finish_gradients(session)
        self._drop_gathered()
        for p in session.accumulated if session.reducer is None else session.reducer.given:
            for hook in post_accumulate_hooks(p.param):
                hook(p.param)

    def _finish_gradients(self, session: _Session) -> None:
        if self._whole_reducer is not None:
            if self._is_syncing:
                self._whole_reducer.finish()
        elif session.reducer is not None:
            if self.world.num_ranks > 1 and not self.world.config.policy.shards_gradients:
                for unit in reversed(self.units):
                    self._reduce_whole(unit, session.reducer)
            order = session.reducer.finish()
            self._expect(order or self._reduction_order)

    def _expect(self, reductions: list[int]) -> None:
        """Take the agreed order of reductions; the units that it begins with stay whole from the forward's end.

        The backward would gather them at once: within `prefetch_bytes`, or all of them if nothing is to be resharded.
        """
        if reductions == self._reduction_order:
            return
        self._reduction_order = reductions
        config = self.world.config
        order = [index for index in dict.fromkeys(reductions) if not self.units[index].keeps_whole]
        sizes = itertools.accumulate(self.units[index].buffer_nbytes for index in order)
        self.kept_for_backward = {
            index
            for index, num_bytes in zip(order, sizes, strict=True)
            if num_bytes <= config.prefetch_bytes or not config.reshard_after_forward
        }

    def _finish_calls(self, session: _Session, before: Call | None = None) -> None:
        """Finish all calls, or those whose forward came after all of `before`: autograd runs the latest nodes first."""
        for call in sorted(session.open_calls, key=lambda call: -call.began):
            if before is None or (before.ended is not None and before.ended < call.began):
                self._finish_call(call, session)

    def _recover(self) -> None:
        """Put everything at rest after a backward that broke off."""
        session, self._session = self._session, None
        if session is None:
            return
        for call in list(session.open_calls):
            call.gradients = {}
            self.on_call_backward_end(call)
        self._order.abandon()
        self._reads.clear()
        _give_back(session)
        for entry in self._entries:
            entry.backward_call = None
        for p in self.parameters:
            p.drop_whole_grad()
        if session.reducer is not None:
            session.reducer.abandon()
        self._drop_gathered()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within: backward passes of stages 0 and 1 accumulate whole gradients and exchange nothing, as under DDP.

        Stages 2 and 3 reduce every micro-batch into the shards, within and without. The last backward before the
        optimizer's step must run outside.
        """
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    # --- changes of parameters ----------------------------------------------------------------------------------

    def before_step(self, optimizer: object) -> None:
        """An optimizer that holds parameters of this engine is about to step, on every rank."""
        self._before_write("the optimizer's step")
        self._stepping = optimizer

    def before_edit(self, param: Tensor) -> None:
        """A parameter is about to be changed by hand, on every rank: see [Note: an edit is seen]."""
        p = self._by_param[id(param)]
        if p.is_whole_elsewhere:
            return  # inside `GatheredParameters`
        if (
            self._stepping is None or self._has_read
        ):  # an optimizer's step has met already, unless it has run the model since
            self._before_write(f"an edit of {p.name!r}")
        self._edited[p] = None

    def _before_write(self, what: str) -> None:
        self._has_read = False
        if self.world.collectives is not None and any(unit.is_shared for unit in self.units):
            self.world.collectives.before_write(what)

    def on_step(self, params: Iterable[Tensor]) -> None:
        """An optimizer that holds `params` has stepped, on every rank."""
        held = [p for p in map(self.find, params) if p is not None]
        self._stepping = None
        self.on_rows_changed([p for p in held if p.param.requires_grad or p.param.grad is not None])
        if held:
            self._drop_gathered()  # also units without anything that has changed

    def on_rows_changed(self, changed: Iterable[ZeroParameter]) -> None:
        """These parameters have new rows, on every rank: whole tensors are gathered again."""
        chosen = {id(p) for p in changed}
        for p in self.parameters:
            if id(p) in chosen:
                self._edited.pop(p, None)
        for unit in map(self.units.__getitem__, first_uses(self._reduction_order)):
            members = [p for p in unit.parameters if id(p) in chosen]
            if members:
                unit.changed(members)

    def _flush_edits(self) -> None:
        if self._stepping is not None and not is_method_running(self._stepping):
            self._stepping = None
            self._edited.update(dict.fromkeys(self.parameters))  # a step that raised may have changed any of them
        if self._edited:
            self.on_rows_changed(list(self._edited))

    def mark_dirty(self) -> None:
        """All ranks have changed the rows of parameters behind torch's back: whole tensors are gathered again."""
        self._before_write("mark_dirty")
        self.on_rows_changed(self.parameters)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self.mark_dirty()


def engine_of(model: nn.Module) -> ZeroEngine | None:
    """The engine of a model (of the whole model, not of a part of it), if it has one."""
    engine = model.__dict__.get("_zero_engine")
    return engine if isinstance(engine, ZeroEngine) and engine.model is model else None


def live_engines() -> list[ZeroEngine]:
    """All engines of this process, in the order in which they were made: the same on every rank."""
    return sorted(_live_engines, key=lambda engine: engine.number)


def _roots_of(model: nn.Module, entries: list[nn.Module]) -> list[nn.Module]:
    """The model, and the modules in it that hold entries: a forward of any of them is one of the model."""
    inner = {id(entry) for entry in entries}
    return [m for m in model.modules() if m is model or any(id(c) in inner for c in m.modules() if c is not m)]


def _structure_of(model: nn.Module) -> list[list[int]]:
    """Which parameters and modules every module of a model holds."""
    return [[*map(at_rest_id, dict.values(m._parameters)), *map(id, m._modules.values())] for m in model.modules()]


def _give_back(session: _Session) -> None:
    for lease in session.leases:
        lease.give_back()
    session.leases.clear()


def _refuse_create_graph() -> None:
    raise UsageError(
        "backward with create_graph=True is not supported under ZeRO: gradients of partitioned parameters are reduced "
        "outside autograd, so they cannot be differentiated again"
    )
