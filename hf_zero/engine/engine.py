"""The engine of one model: wires units, hooks, orders and reductions; the events of a training step arrive here."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.engine.grouping import Found, find_parameters, group
from hf_zero.engine.hooks import Call, Entry, Hook, watch_plain_gradients
from hf_zero.engine.parameter import ZeroParameter
from hf_zero.engine.reduction import LocalReducer, Reducer, WholeReducer, ways
from hf_zero.engine.schedule import GatherOrder, first_uses
from hf_zero.engine.state_dict import CutStateDict
from hf_zero.engine.unit import GatheredMemory, Residency, Unit
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
        self._root_depth = 0
        self._is_syncing = True
        with torch.inference_mode(False):
            self.anchor = torch.zeros((), device=world.device, requires_grad=True)
            self.parameters = [self._known(found) for found in find_parameters(model)]
            self._ways = ways(self.parameters, world)
            self._by_param = {id(p.param): p for p in self.parameters}
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
        hook = Hook(self._enter_root, copied_as=self._copied_as)
        self._handles.insert(0, model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        self._handles.append(
            model.register_forward_hook(Hook(self._leave_root), with_kwargs=True, always_call=True),
        )
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
        self._remember_versions()

    def close(self) -> None:
        """Remove every hook; parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
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

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._root_depth += 1
        if self._root_depth > 1 or torch_compat.in_backward():
            return
        self._recover()
        for entry in self._entries:
            entry.reset()
        self._drop_gathered()  # if the last forward had no backward, or failed on some ranks only
        self._check_versions()
        if self._whole_reducer is not None:
            self._watch_plain_gradients()
        self._order.begin("forward" if torch.is_grad_enabled() else "inference")

    def _leave_root(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._root_depth = max(self._root_depth - 1, 0)
        if self._root_depth or torch_compat.in_backward():
            return
        if output is None:
            self._order.abandon()
        else:
            self._order.end()
        self._drop_gathered(but_kept=True)
        if torch.is_grad_enabled() and (self.units or self._whole_reducer):
            for tensor in _tensors_with_graph(output):
                tensor.register_hook(self._on_root_gradient)  # type: ignore[no-untyped-call]

    def acquire(self, call: Call) -> None:
        """Make the units of a call whole, and start to gather those that will be needed next."""
        if self._session is not None and self._session.is_dead:
            self._recover()
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
            if grad is not None:
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
            if not found:
                continue
            if self.world.num_ranks > 1 and not self.world.config.policy.shards_gradients:
                self._accumulate_whole(unit, found, session)
            else:
                assert session.reducer is not None
                session.reducer.ready(unit, found)
        self.on_call_backward_end(call)

    def _accumulate_whole(self, unit: Unit, gradients: dict[int, Tensor], session: _Session) -> None:
        """Stages 0 and 1: gradients stay whole until the last backward of a step, and until the unit's last call."""
        for p in unit.parameters:
            if id(p) in gradients:
                grad = gradients[id(p)]
                p.add_whole_grad(grad, self.world.precision.reduce_for(grad.dtype))
                if session.reducer is None:
                    p.show_whole_grad()
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
        self._order.end()
        self._session = None
        if session.has_gradients:
            self._finish_gradients(session)
        self._drop_gathered()

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
        for entry in self._entries:
            entry.backward_call = None
        for p in self.parameters:
            p.drop_unshown_whole_grad()
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

    def before_step(self) -> None:
        """An optimizer that holds parameters of this engine is about to step, on every rank."""
        self._before_write("the optimizer's step")

    def _before_write(self, what: str) -> None:
        if self.world.collectives is not None and any(unit.is_shared for unit in self.units):
            self.world.collectives.before_write(what)

    def on_step(self, params: Iterable[Tensor]) -> None:
        """An optimizer that holds `params` has stepped, on every rank."""
        held = [p for p in map(self.find, params) if p is not None]
        self._changed([p for p in held if p.param.requires_grad or p.param.grad is not None])
        if held:
            self._drop_gathered()  # also units without anything that has changed

    def mark_dirty(self) -> None:
        """All ranks have changed parameters by hand: whole tensors kept in stages 1 and 2 must be gathered again."""
        self._before_write("mark_dirty")
        self._changed(self.parameters)

    def _changed(self, changed: list[ZeroParameter]) -> None:
        chosen = {id(p) for p in changed}
        for unit in map(self.units.__getitem__, first_uses(self._reduction_order)):
            members = [p for p in unit.parameters if id(p) in chosen]
            if members:
                unit.changed(members)
        self._remember_versions(changed)

    def _remember_versions(self, changed: Iterable[ZeroParameter] | None = None) -> None:
        for p in self.parameters if changed is None else changed:
            p.version = p.param._version

    def _check_versions(self) -> None:
        """Parameters that were edited without a word would leave stages 1 and 2 training on old rows."""
        for unit in self.units:
            if not unit.keeps_whole:
                continue
            edited = [p for p in unit.parameters if p.param._version != p.version]
            if not edited:
                continue
            if any(p.is_sharded for p in edited):
                raise PartitionError(
                    f"parameter {edited[0].name!r} was changed in place since the last step, so the other ranks' whole "
                    "copies are old: change it inside `zero.GatheredParameters`, or call `zero.mark_dirty(model)` on "
                    "every rank afterwards"
                )
            unit.changed(edited)
            self._remember_versions(edited)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self.mark_dirty()


def engine_of(model: nn.Module) -> ZeroEngine | None:
    """The engine of a model (of the whole model, not of a part of it), if it has one."""
    engine = model.__dict__.get("_zero_engine")
    return engine if isinstance(engine, ZeroEngine) and engine.model is model else None


def live_engines() -> list[ZeroEngine]:
    """All engines of this process, in the order in which they were made: the same on every rank."""
    return sorted(_live_engines, key=lambda engine: engine.number)


def _tensors_with_graph(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _refuse_create_graph() -> None:
    raise UsageError(
        "backward with create_graph=True is not supported under ZeRO: gradients of partitioned parameters are reduced "
        "outside autograd, so they cannot be differentiated again"
    )
