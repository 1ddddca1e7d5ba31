"""One backward pass: see [Note: one backward] of the package. Autograd's events arrive here."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.backward.accumulation import Accumulation, add_up
from hf_zero.engine.backward.buffers import Buffers
from hf_zero.engine.backward.landing import landing_of
from hf_zero.engine.backward.passes import at_next_pass, current_pass, hear_of_passes, makes_graph, refuse_create_graph
from hf_zero.engine.backward.reduction import Reducer, gradient_dtypes
from hf_zero.engine.backward.session import Session
from hf_zero.engine.backward.wanted import comes_to, handed_out, is_asked, is_wanted, reaches
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.parameters.records import ZeroParameter, is_trainable
from hf_zero.engine.parameters.user_hooks import post_accumulate_hooks, those_hooked_after
from hf_zero.engine.parameters.whole import when_exchanged
from hf_zero.engine.ranks.alike import SameGradients
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.calls.call import Call, Entry, check_not_outdated
from hf_zero.engine.units.differing import advise
from hf_zero.engine.units.gathering import Gathering
from hf_zero.engine.units.reading import Read
from hf_zero.engine.units.storage.residency import LiveCall
from hf_zero.engine.units.unit import Unit

_OWN_REFERENCES = 2  # to a whole tensor, after its call's backward: of two lists


class Backward:
    """The backward passes of one model, one after the other.

    Args:
        model: as a whole.
        world: the ranks.
        parameters: all of the model.
        gathering: its units.

    Attributes:
        session: the pass under way.
        entries: the modules whose calls need units.
        anchor: an input of all graphs that hold gathered parameters, so that their functions run.
    """

    def __init__(self, model: nn.Module, world: World, parameters: list[ZeroParameter], gathering: Gathering) -> None:
        hear_of_passes()
        self.session: Session | None = None
        self.entries: list[Entry] = []
        self.unit_of: dict[ZeroParameter, Unit] = {}
        self.anchor = torch.zeros((), device=world.device, requires_grad=True)
        self.gathering = gathering
        self._anchor_node = torch_compat.gradient_node(self.anchor)
        self._world = world
        self._gradient_dtypes = {p: gradient_dtypes(p, world) for p in parameters}
        self._trained = parameters
        self._same_gradients = SameGradients(world)
        self.buffers = Buffers(model, world)
        self._landing = landing_of(world)
        self._watchable = [p for p in parameters if self._is_to_be_watched(p)]
        self._watched: dict[ZeroParameter, Any] = {}  # with what undoes it
        self._nodes: dict[ZeroParameter, Any] = {}  # of the graph, with hooks: they live only while somebody holds them
        self._is_syncing = True
        self._follows_no_sync = False  # since the last reduction
        self._owed: set[ZeroParameter] = set()  # trainable under `no_sync`, since the last reduction

    # --- gradients that autograd adds up itself ----------------------------------------------------------------

    def watch(self) -> None:
        """Watch the parameters that are trainable now; torch refuses a hook on others, which may be thawed later."""
        for p in self._watchable:
            if p.param.requires_grad and p not in self._watched:
                self._watched[p] = self._watch(p)

    def settle(self) -> None:
        """Between passes: wait for what is under way, and let buffers have what has come for them."""
        self.gathering.settle()
        self.buffers.put_in()

    def stop(self) -> None:
        """Watch no longer, and let buffers have what has come for them."""
        self.buffers.put_in()
        self._watchable.clear()
        for handle in self._watched.values():
            handle.remove()

    def _is_to_be_watched(self, p: ZeroParameter) -> bool:
        return isinstance(p.param, DTensor)

    def _watch(self, p: ZeroParameter) -> Any:
        """Take the gradient of what users compute of a parameter at rest, whole and this rank's own, as that of any use."""
        owner, of_parameter, node = weakref.ref(self), weakref.ref(p), torch_compat.gradient_node(p.param)

        def take(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
            (grad,), backward, known = gradients, owner(), of_parameter()
            if grad is None or backward is None or known is None:
                return None
            backward.on_gradient(known, grad)
            return (None,)

        def watch_again() -> None:  # `module.to` puts another tensor in its place, with a node of its own
            backward, known = owner(), of_parameter()
            if backward is not None and known is not None and backward._watched.pop(known, None) is not None:
                at_next_pass(backward.watch)

        self._nodes[p] = node
        when_exchanged(p.param, watch_again)
        return node.register_prehook(take)

    # --- the pass -----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a pass is under way."""
        return self.session is not None and not self.session.is_dead and torch_compat.in_backward()

    def begin(self) -> Session:
        """The pass under way; a new one at its first event."""
        under_way = current_pass()
        if under_way is not None and under_way.is_over:
            raise RuntimeError("this backward has broken off already, on another thread")  # nobody hears this one
        self.recover_if_dead()
        if self.session is None:
            self.gathering.flush_edits()
            takes_part = self._who_takes_part()
            reducer, follows = self._make_reducer(takes_part), self._follows_no_sync
            gradients = Accumulation(self._world, reducer, self._comes_again, takes_part, follows)
            session = self.session = Session(gradients, under_way is not None and under_way.is_for_all)
            self.gathering.before_wait = self._before_wait
            if under_way is not None:
                under_way.at_end(lambda: self._on_return(session))
            self.gathering.schedule.begin("backward")
            token = session.take_token()
            # What autograd calls at the end of a call inside this one comes before the rest of this one.
            around = under_way if under_way is not None and under_way.num_inside else None
            at_completion = torch_compat.after_backward if around is None else around.at_completion
            at_completion(lambda token=token: self._end())  # type: ignore[misc]
        return self.session

    def _who_takes_part(self) -> Callable[[ZeroParameter], bool]:
        """What is trainable, and what `no_sync` may have kept a gradient of, before it was frozen."""
        frozen = {p for p in self._owed if not p.param.requires_grad} if self._is_syncing else None
        return (lambda p: is_trainable(p) or p in frozen) if frozen else is_trainable

    def _make_reducer(self, takes_part: Callable[[ZeroParameter], bool]) -> Reducer | None:
        if self._world.data.num_ranks > 1 and not self._is_syncing and not self._world.shards_gradients:
            return None
        trainable = {unit.index: unit for unit in self.gathering.units if any(map(takes_part, unit.parameters))}
        return Reducer(
            trainable,
            takes_part,
            self._world,
            self.gathering.reductions,
            self._is_over,
            self._gradient_dtypes,
            self.gathering.num_steps,
            self._landing,
            self.gathering.offer,
            lambda: self.gathering.staying(self._is_syncing),
            lambda: advise(self._world, self.gathering.units, self.gathering.schedule.recorded.get("forward", ())),
        )

    def _is_over(self, unit: int) -> bool:
        """Whether all the calls of a unit have had their backward, or get none in this pass."""
        session, calls = self.session, self.gathering.units[unit].live_calls
        return session is None or not calls.any_apart_from(session, lambda call: self._is_to_come(call, session))

    def _is_to_come(self, call: LiveCall, session: Session) -> bool:
        return not session.reached < call.began < session.began and (not call.is_done or comes_to(call))

    def _comes_again(self, unit: Unit) -> bool:
        """Whether the running backward will give a unit gradients of another call."""
        return unit.live_calls.any_apart_from(self.session, comes_to)

    def _before_wait(self) -> None:
        """All ranks are about to wait for each other, for a gather."""
        session = self.session
        if session is None or session.gradients.reducer is None:
            return
        # One that gives no parameter a gradient reduces nothing.
        if session.has_gradients or any(
            is_wanted(p, self._anchor_node) for p in self._trained if p.param.requires_grad
        ):
            session.gradients.reducer.before_wait()

    def _end(self) -> None:
        session = self.session
        if session is None:
            return
        self._finish_calls(session)
        session.gradients.run_hooks()
        session.has_gradients = session.has_gradients or self._reduces_earlier_ones(session)
        self.gathering.schedule.end()
        self.gathering.end_reads()
        self.session = self.gathering.before_wait = None
        session.give_back()
        self._finish(session)
        if session.has_gradients and self._is_syncing:
            self.buffers.exchange()
        self.gathering.drop()
        if self._world.tensor.num_ranks > 1 and session.has_gradients and session.gradients.reducer is not None:
            self._same_gradients.check(self.gathering.num_steps, [(p.name, p.param) for p in self._trained])
        for param in those_hooked_after([p.param for p in session.gradients.given()]):
            for hook in post_accumulate_hooks(param):
                hook(param)

    def _reduces_earlier_ones(self, session: Session) -> bool:
        """Whether what was kept under `no_sync` is reduced by a backward that has given no parameter a gradient."""
        is_kept = self._follows_no_sync and not self._world.shards_gradients
        return is_kept and self._is_syncing and session.is_for_all

    def _finish(self, session: Session) -> None:
        if session.has_gradients:
            turns, reducer = self.gathering.reductions.turns, session.gradients.reducer
            session.gradients.finish(reversed(self.gathering.units))
            has_other_budget = reducer is not None and self.gathering.take_offers(
                reducer.lowest_offer, reducer.stays_alike, self._is_syncing
            )
            if has_other_budget or self.gathering.reductions.turns is not turns:
                self.gathering.choose_kept_again(has_other_budget)
            if reducer is not None:
                self._forget_no_sync()
                self._note_gradients()

    def _note_gradients(self) -> None:
        """Let a rank read alone what a backward of all ranks has left: see [Note: alone]."""
        if not self._world.serving.is_asked:
            return
        grads: list[Any] = [p.param.grad for p in self._trained]
        numbers = [number for number, grad in enumerate(grads) if isinstance(grad, PartitionedTensor)]
        self.gathering.changes.note_gradients(numbers, [grads[i]._local_tensor for i in numbers], self._world.device)

    def _forget_no_sync(self) -> None:
        self._follows_no_sync = False
        self._owed.clear()

    def _on_return(self, session: Session) -> None:
        """The call that a session belongs to returns or raises: if the session has not ended, the backward broke off."""
        if self.session is session:
            self.recover()

    def recover_if_dead(self) -> None:
        """Put everything at rest, if a pass broke off that nobody has told of."""
        if self.session is not None and self.session.is_dead:
            self.recover()

    def recover(self) -> None:
        """Put everything at rest after a pass that broke off."""
        session, self.session = self.session, None
        self.gathering.before_wait = None
        if session is None:
            return
        for call in list(session.open_calls):
            call.gradients = {}
            self._close(call, has_failed=True)
        self.gathering.schedule.abandon()
        self.gathering.reads.clear()
        session.give_back()
        for entry in self.entries:
            entry.backward_call = None
        session.gradients.abandon()
        self.gathering.drop()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within: backward passes of stages 0 and 1 accumulate whole gradients and exchange nothing, as under DDP.

        Stages 2 and 3 reduce every micro-batch into the shards. The last backward before the optimizer's step must run outside.
        """
        before, self._is_syncing = self._is_syncing, False
        self._follows_no_sync = True  # told by the context, which all ranks enter: not all may run a backward in it
        if not self._world.shards_gradients:
            self._owed.update(filter(is_trainable, self._trained))
        self.gathering.budget.expect_micro_batches()
        try:
            yield
        finally:
            self._is_syncing = before

    # --- events -------------------------------------------------------------------------------------------------

    def on_root_gradient(self, gradient: Tensor) -> None:
        """The gradient of an output of the model is there."""
        self.begin()

    def on_call_begin(self, call: Call, tensors: list[Tensor]) -> None:
        """The first gradient of a call's outputs is there: its units must be whole while its backward runs."""
        session = self.begin()
        if call.session is session or call in session.open_calls:
            return
        call.check_not_outdated()
        self._finish_calls(session, before=call)
        session.reached = call.ended or session.reached
        session.open_calls.add(call)
        call.graph_task = torch_compat.graph_task()
        if call.entry.reads_in_backward:
            if not call.leases:
                self.gathering.acquire(call)
            if session.is_differentiated:
                self.gathering.for_graphs.hold(call.units)
            call.install(tensors, self.make_whole)
            call.entry.backward_call = call

    def on_gradients(self, call: Call, gradients: Sequence[Tensor | None]) -> Mapping[ZeroParameter, Tensor]:
        """All gradients of a call's parameters are there (None: not used); returns what `torch.autograd.grad` asks for."""
        refuse_create_graph()
        session = self.begin()
        call.check_not_outdated()
        pairs = zip(call.parameters, gradients, strict=True)
        found = {p: g if type(g) is Tensor else torch_compat.complete(g) for p, g in pairs if g is not None}
        asked = dict[ZeroParameter, Tensor]()
        if found and not reaches(self._anchor_node):
            asked = {p: handed_out(p, g) for p, g in found.items() if is_asked(p)}
            found = {p: g for p, g in found.items() if is_wanted(p, self._anchor_node)}
        session.has_gradients = session.has_gradients or not asked
        add_up(call.gradients, found)
        # A reentrant checkpoint inside the call runs a backward of its own: the rest of the call is still to come.
        if call not in session.open_calls or call.graph_task == torch_compat.graph_task():
            self._finish_call(call, session)
        return asked

    def on_read_gradient(self, read: Read, gradient: Tensor) -> Tensor | None:
        """The gradient of a parameter that was read outside its module's call is there; returns it where it is asked for."""
        refuse_create_graph()
        read.session = session = self.begin()
        check_not_outdated(read.unit, read.epoch)
        if is_wanted(read.parameter, self._anchor_node):
            session.has_gradients = True
            session.gradients.add(read.unit, {read.parameter: gradient})
            return None
        return handed_out(read.parameter, gradient) if is_asked(read.parameter) else None

    def on_gradient(self, p: ZeroParameter, gradient: Tensor) -> None:
        """This rank's whole gradient of what was computed of a parameter at rest is there."""
        refuse_create_graph()
        p.computed.refuse_part(f"a loss is computed from {p.name!r} itself")
        session = self.begin()
        session.has_gradients = True
        part = self._world.cut_of(p.param).part_of(gradient).to(self._world.device)
        session.gradients.add(self.unit_of[p], {p: part.contiguous()}, is_part=True)

    def make_whole(self, unit: Unit, epoch: int) -> None:
        """Autograd needs a saved view of a unit: let the unit be whole until this backward ends."""
        check_not_outdated(unit, epoch)
        if not unit.is_whole:
            session = self.begin()
            self.gathering.tell_of_wait()
            session.leases.append(unit.acquire())
        if makes_graph():
            self.gathering.for_graphs.hold([unit])

    def _finish_calls(self, session: Session, before: Call | None = None) -> None:
        """Finish all calls, or those whose forward came after all of `before`: autograd runs the latest nodes first."""
        for call in sorted(session.open_calls, key=lambda call: -call.began):
            if before is None or (before.ended is not None and before.ended < call.began):
                self._finish_call(call, session)

    def _finish_call(self, call: Call, session: Session) -> None:
        """A call's backward is over: hand on its gradients, and put its units back."""
        call.is_done = call.is_done or not session.is_differentiated
        call.session = session
        gradients, call.gradients = call.gradients, {}
        for unit in call.units:
            found = gradients
            if len(call.units) > 1:
                found = {p: gradients[p] for p in unit.parameters if p in gradients}
            if found or session.gradients.is_waiting(unit):
                session.gradients.add(unit, found)
        self._close(call)

    def _close(self, call: Call, has_failed: bool = False) -> None:
        session = self.session
        if session is not None:
            session.open_calls.discard(call)
            call.session = session
        if call.entry.backward_call is call:
            call.entry.backward_call = None
        shown = call.shown()
        self.gathering.keep_written(call.uninstall(), has_failed)
        if shown and not has_failed:
            call.pin_what_is_kept(shown, _OWN_REFERENCES)
        for unit in call.units:
            if not unit.stays and not self.gathering.may_stay(unit, self._is_syncing):
                unit.stop_keeping()
        call.release()
