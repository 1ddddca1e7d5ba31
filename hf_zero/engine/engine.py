"""The engine of one model: builds its units and hangs its hooks; sees its forwards, reads and edits."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.engine.backward.plain import PlainBackward
from hf_zero.engine.backward.visited import kind_of_backward
from hf_zero.engine.modules.activations import PartitionedActivations
from hf_zero.engine.modules.float32 import compute_in_float32, kept_parameters
from hf_zero.engine.modules.hooks import Hook, ModuleHooks
from hf_zero.engine.modules.inputs import CastInputs
from hf_zero.engine.modules.state_dict import CutStateDict
from hf_zero.engine.parameters.left_behind import note_left_behind
from hf_zero.engine.parameters.on_disk import offload_parameters
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor, set_owner
from hf_zero.engine.parameters.quantised import as_shown
from hf_zero.engine.parameters.records import ZeroParameter, as_seen
from hf_zero.engine.parameters.whole import SharedWhole, Whole
from hf_zero.engine.ranks.alike import SameInputs
from hf_zero.engine.ranks.world import World
from hf_zero.engine.tiles.heads import Surroundings
from hf_zero.engine.tiles.model import tile
from hf_zero.engine.units.as_partitioned import AsPartitioned
from hf_zero.engine.units.calls.call import Entry
from hf_zero.engine.units.calls.writes import check_edits
from hf_zero.engine.units.gathering import Gathering
from hf_zero.engine.units.grouping import find_parameters, group, roots_of
from hf_zero.engine.units.keeping import note_failure
from hf_zero.engine.units.reading import Read, ReadableParameters, in_graph, refuse_pickling, tensors_in
from hf_zero.engine.units.served import ServedParameters
from hf_zero.engine.units.storage.memory import GatheredMemory
from hf_zero.engine.units.unit import Unit
from hf_zero.errors import UsageError, ZeroError
from hf_zero.under_way import CountedCalls, has_raised, is_peeked_at

logger = logging.getLogger(__name__)

_live_engines: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()
_numbers: list[int] = []  # of the engines that this process has made


class ZeroEngine:
    """Runs one model under ZeRO. Made by `shard_model`, or at the first forward of a model made under `Init`.

    Args:
        model: its parameters are partitioned already.
        world: the ranks.
        copied_as: forward pre-hook that a deep copy of the model gets in place of the engine's.

    Attributes:
        world: the ranks, the configuration and the ledger.
        parameters: every parameter once, in the model's order.
        activations: keeps the inputs of checkpointed layers.
        number: engines are numbered as they are made.
    """

    def __init__(self, model: nn.Module, world: World, copied_as: Any = None) -> None:
        self.world = world
        self.number = len(_numbers)
        _numbers.append(self.number)
        self._copied_as = copied_as
        self._model = weakref.ref(model)
        self._handles: list[Any] = []
        self.user_hooks: list[Any] = []  # of parameters, see [Note: who holds hooks]
        self._forwards = CountedCalls()  # of the model, or of parts that hold units
        self._hooks_of: dict[int, ModuleHooks] = {}
        self._unit_of: dict[int, Unit] = {}
        with torch.inference_mode(False):
            kept = kept_parameters(model, world.config)
            self.parameters = [found.record(world, found.param in kept) for found in find_parameters(model)]
            self._by_param = {id(p.param): p for p in self.parameters}
            offload_parameters(self.parameters, world)
            self.gathering = Gathering(world, self.parameters)
            self.after_edit = self.gathering.home.note_that_rows_settle  # see `Owner.after_edit`
            self.activations = PartitionedActivations(world, world.config.activations)
            self._inputs = SameInputs(world)
            make_backward = kind_of_backward(world, self.parameters)
            self.backward = make_backward(model, world, self.parameters, self.gathering)
            self._build(model)
        _live_engines.add(self)
        world.models.add(model)
        self._served = ServedParameters(self, self.parameters, self.gathering, world.serving)
        model.__dict__["_zero_engine"] = self

    # --- building -----------------------------------------------------------------------------------------------

    def _build(self, model: nn.Module) -> None:
        self.backward.watch()
        if not isinstance(self.backward, PlainBackward):
            self._build_units(model)
            for p in self.parameters:
                set_owner(p.param, self)
        seen = Surroundings(self.world, self.parameters, self._unit_of, self._hooks_of, self.backward)
        for module in tile(
            model, roots_of(model, set(self._hooks_of)), seen, lambda: bool(self._forwards.modules), self._handles
        ):
            hook = Hook(self._enter_root, copied_as=self._copied_as if module is model else None)
            self._handles.insert(0, module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            leave = Hook(self.gathering.home.visited(self._leave_root))
            self._handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        self._handles += compute_in_float32(model, self.world.config)
        self._cast = CastInputs(model, self.world.config, self.world.precision.compute)
        self._handles += self._cast.register([model, *(entry for unit in self.units for entry in unit.entries)])
        self.as_partitioned = AsPartitioned(model, self.parameters)
        self._buffers = {id(buffer): weakref.ref(buffer) for buffer in model.buffers()}
        before_load = Hook(CutStateDict(self.world), copied_as=CutStateDict(self.world))
        self._handles.append(model.register_load_state_dict_pre_hook(before_load))  # type: ignore[no-untyped-call]

    def _build_units(self, model: nn.Module) -> None:
        torch_compat.let_compiled_code_take(Whole, SharedWhole)
        torch_compat.let_compilers_pass_by(PartitionedTensor)
        by_entry: dict[int, tuple[nn.Module, list[Unit]]] = {}
        for index, part in enumerate(group(model, self.world.config.units)):
            members = [self._by_param[id(found.param)] for found in part.params]
            unit = Unit(index, part.name, members, part.entries, self.world, self.memory, part.stays_whole)
            self.units.append(unit)
            self._unit_of.update({id(p): unit for p in members})
            self.backward.unit_of.update(dict.fromkeys(members, unit))
            for module in part.entries:
                by_entry.setdefault(id(module), (module, []))[1].append(unit)
        for key, (module, units) in by_entry.items():
            entry = Entry(module, units)
            self.backward.entries.append(entry)
            hooks = ModuleHooks(entry, module, self.backward)
            self._hooks_of[key] = hooks
            self._handles += hooks.handles
        self.gathering.expect_units()
        for unit in self.units:
            if unit.keeps_whole:
                unit.start_gather()
        for module in {id(module): module for p in self.parameters for module, _ in p.locations}.values():
            module._parameters = ReadableParameters(self, module._parameters)

    def close(self) -> None:
        """Remove every hook; parameters stay as they are. All ranks close together."""
        self.gathering.home.visited(self.gathering.settle)()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.backward.stop()
        for entry in self.backward.entries:
            entry.is_closed = True
        for p in self.parameters:
            p.leave(self)
            for module, _ in p.locations:
                module._parameters = dict(module._parameters)
        if (model := self._model()) is not None:
            note_left_behind(model, self.parameters)
            if model.__dict__.get("_zero_engine") is self:
                del model.__dict__["_zero_engine"]
        _live_engines.discard(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model gets an engine of its own, at its first forward."""

    def __reduce__(self) -> NoReturn:
        refuse_pickling()

    @property
    def units(self) -> list[Unit]:
        """The sets of parameters gathered together, in the model's order; empty where nothing is (stage 0, one rank)."""
        return self.gathering.units

    @property
    def memory(self) -> GatheredMemory:
        """Counts the bytes of gathered units."""
        return self.gathering.memory

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    # --- looking up ---------------------------------------------------------------------------------------------

    def find(self, param: Tensor) -> ZeroParameter | None:
        """The engine's record of a parameter (as the user holds it), if it is this engine's."""
        return self._by_param.get(id(param))

    # --- forward ------------------------------------------------------------------------------------------------

    def enter_root_late(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let a forward that is already under way be seen; for an engine made inside it."""
        self._enter_root(module, args, kwargs)
        hooks = self._hooks_of.get(id(module))
        if hooks is not None:
            hooks.before(module, args, kwargs)
        return self._cast(module, args, kwargs)

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        forwards = self._forwards
        if forwards.modules and not forwards.are_alive(module):
            self._abandon_forward()
        records = torch_compat.in_backward() or self.gathering.alone.records(module, args, kwargs)
        if not forwards.modules and self.backward.session is None:
            self.gathering.home.move_here(self.backward.settle, self.memory.held)
        self.backward.buffers.begin_forward(records and not forwards.modules and not torch_compat.in_backward())
        if not forwards.modules and self.gathering.has_nothing_to_do():
            return None
        is_alone = self.gathering.begins_alone(records)
        forwards.begin(module)
        if len(forwards.modules) > 1 or torch_compat.in_backward():
            return None
        if is_alone:
            return self._begin_alone(module)
        self.gathering.alone.forget()
        self.backward.recover()
        model = self._model()
        if model is not None and self._has_changed(module, model):
            return self._start_anew(model, module, args, kwargs)
        for entry in self.backward.entries:
            entry.reset()
        self.gathering.drop()  # if the last forward had no backward, or failed on some ranks only
        check_edits(self.gathering.edited, self.world)
        self.gathering.flush_edits()
        self.gathering.refresh()
        if self.activations.is_needed and torch.is_grad_enabled() and model is not None:
            self.activations.begin_forward(model)
        self.backward.watch()
        self._inputs.check(args, kwargs)
        kind = "forward" if torch.is_grad_enabled() else "inference"
        self.gathering.schedule.begin(kind if module is model else f"{kind} of {id(module)}")
        return None

    def _begin_alone(self, module: nn.Module) -> None:
        model = self._model()
        if model is not None and self._has_changed(module, model):
            self._forwards.modules.clear()
            raise UsageError(
                "one rank alone runs a model that has other parameters or dtypes now: let all ranks run it once"
            )
        for entry in self.backward.entries:
            entry.reset()
        self.gathering.alone.begin(lambda: not self._forwards.have_ended_unseen())

    def _has_changed(self, module: nn.Module, model: nn.Module) -> bool:
        # An evaluation of plain parameters computes with them as they are now.
        minds_dtypes = torch.is_grad_enabled() or not isinstance(self.backward, PlainBackward)
        try:
            return self.as_partitioned.has_changed(module is model, minds_dtypes)
        except ZeroError:
            self._forwards.modules.clear()
            raise

    def _start_anew(self, model: nn.Module, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The model has other parameters or dtypes than before: run this forward under a new engine."""
        self.close()
        logger.info(
            "the model has other parameters, or other dtypes, than when it was partitioned: it is partitioned anew"
        )
        if self._copied_as is None:
            return None
        late = copy.deepcopy(self._copied_as)
        late.known_buffers = self._buffers
        late.is_anew = True
        return late.start_inside(model, module, args, kwargs)

    def _leave_root(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._forwards.modules:
            return  # its parameters were held
        self._forwards.modules.pop()
        if self._forwards.modules or torch_compat.in_backward():
            return
        if self.gathering.alone.is_under_way:
            return self.gathering.alone.end(has_raised(output))
        self.gathering.end_reads(has_raised(output))
        self.gathering.end_forward()
        if output is None:
            note_failure(sys.exc_info()[1])
            self.gathering.schedule.abandon()
        else:
            self.gathering.schedule.end()
        self.gathering.drop(but_kept=True)
        if torch.is_grad_enabled() and (self.units or self.world.data.num_ranks > 1):
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self.backward.on_root_gradient)  # type: ignore[no-untyped-call]

    def _abandon_forward(self) -> None:
        """Forget a forward that never came to its end."""
        self._forwards.modules.clear()
        self.gathering.alone.end(has_failed=True)
        self.gathering.reads.clear()
        self.gathering.end_forward()
        self.gathering.schedule.abandon()
        for entry in self.backward.entries:
            entry.reset()

    # --- reads outside a call: see [Note: whoever reads gets the whole] ---------------------------------------------

    @property
    def is_at_rest(self) -> bool:
        """Whether no forward and no backward is under way."""
        return not self._forwards.modules and self.backward.session is None

    def read(self, param: Tensor) -> Tensor:
        """The whole tensor of a parameter, while a forward or backward is under way; at rest, the parameter itself."""
        p = self._by_param.get(id(param))
        if p is None or not self._is_running() or is_peeked_at():
            return param
        if is_traced := self._is_traced(p):
            p.computed.refuse_part(f"{p.name!r} is read outside its module's call")
        if self.gathering.alone.is_under_way:
            return self.gathering.alone.read(p)
        self.gathering.keep_written_reads()
        known = self.gathering.reads.find(p, is_traced)
        if known is None:
            self.gathering.begin_read()
            if (unit := self._unit_of[id(p)]).is_releasable:
                self.gathering.tell_of_wait()
            with self.gathering.home as home:
                home.hand_out([read := unit.read_whole(p)])
            (whole,) = as_shown([param], [read])
            (known,) = as_seen([p], [in_graph(self.backward, Read(p, unit), whole) if is_traced else whole])
            self.gathering.reads.add(unit, p, is_traced, known)
        return known

    def read_from(self, tensor: Tensor) -> Tensor:
        """See `Reader.read_from`."""
        return self.gathering.reads.source_of(tensor)

    def _is_traced(self, p: ZeroParameter) -> bool:
        return p.param.requires_grad and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _is_running(self) -> bool:
        if self.backward.is_running:
            return True
        self.settle()
        return self._forwards.are_here()

    def settle(self) -> None:
        """Put everything at rest, if a forward was under way that Ctrl-C has ended: torch does not run its hooks then."""
        if self._forwards.have_ended_unseen():
            self._abandon_forward()

    def whole_at_hand(self, param: Tensor) -> Tensor | None:
        """See `Owner.whole_at_hand`."""
        return self.gathering.whole_at_hand(self._unit_of[id(p := self._by_param[id(param)])], p)

    def everywhere(self, param: Tensor) -> list[Tensor]:
        """See `Owner.everywhere`."""
        return self._by_param[id(param)].everywhere()

    def name_of(self, param: Tensor) -> str:
        """See `Owner.name_of`."""
        return self._by_param[id(param)].name

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See `Backward.no_sync`."""
        return self.backward.no_sync()

    # --- changes of parameters ----------------------------------------------------------------------------------

    def before_step(self, optimizer: object) -> None:
        """An optimizer that holds parameters of this engine is about to step, on every rank."""
        self.gathering.before_step(optimizer)

    def before_edit(self, param: Tensor, mark: int = 0) -> None:
        """See `Owner.before_edit`."""
        self.gathering.before_edit(self._by_param[id(param)], mark)

    def on_step(self, params: Iterable[Tensor]) -> None:
        """An optimizer that holds `params` has stepped, on every rank."""
        self.gathering.after_step([p for p in map(self.find, params) if p is not None])

    def on_rows_changed(self, changed: Iterable[ZeroParameter]) -> None:
        """These parameters have new rows, on every rank: whole tensors are gathered again."""
        self.gathering.on_rows_changed(changed)

    def mark_dirty(self) -> None:
        """All ranks have changed the rows of parameters behind torch's back: whole tensors are gathered again."""
        self.gathering.mark_dirty()


def engine_of(model: nn.Module) -> ZeroEngine | None:
    """The engine of a model (of the whole model, not of a part of it), if it has one."""
    engine = model.__dict__.get("_zero_engine")
    return engine if isinstance(engine, ZeroEngine) and engine.model is model else None


def number_of_engines() -> int:
    """How many engines this process has made."""
    return len(_numbers)


def live_engines() -> list[ZeroEngine]:
    """All engines of this process, in the order in which they were made: the same on every rank."""
    return sorted(_live_engines, key=lambda engine: engine.number)
