"""How an optimizer steps: one interface. On rows, by owners and from the disk are its classes, chosen by `choice`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.config.offload import Offload
from hf_zero.engine.engine import live_engines
from hf_zero.engine.parameters.partitioned_tensor import rows_like
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.errors import PartitionError
from hf_zero.host.scratch import Place
from hf_zero.optim.kinds import kept_tensors, wrapped_optimizers
from hf_zero.optim.owners import Owners

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class StepCall:
    """A step that torch is about to run.

    Attributes:
        optimizer: whose step it is.
        worlds: the ranks over which each of its partitioned parameters is cut, by the parameter's id; others are plain.
        args: of `step`, without the optimizer.
        kwargs: of `step`.
        before_change: to be called before parameters change, and after anything else has used them.
        after_change: to be called when they have changed, though the step goes on.
    """

    optimizer: torch.optim.Optimizer
    worlds: Mapping[int, World]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before_change: Callable[[], None]
    after_change: Callable[[], None]

    @property
    def has_closure(self) -> bool:
        """Whether the step runs the model itself."""
        return any(map(callable, (*self.args, *self.kwargs.values())))

    def with_closures(self, wrap: Callable[[Any], Any]) -> Arguments:
        """The arguments, of which closures are replaced; in the order in which they were given."""
        args = tuple(wrap(arg) if callable(arg) else arg for arg in self.args)
        return args, {key: wrap(value) if callable(value) else value for key, value in self.kwargs.items()}


class Stepping:
    """How one optimizer steps. An attribute of it, which neither copies nor pickles take along."""

    def __init__(self) -> None:
        self._under_way: Any = None  # the step that runs now, which has a `finish`
        self.served: Any = None  # what other ranks may read of the optimizer, see `optim.served`

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied optimizer finds out anew: its parameters are others."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def begin(self, call: StepCall) -> Arguments | None:
        """Prepare a step, and say with what torch is to run it: the optimizer's stand-in first. None: with the optimizer."""
        raise NotImplementedError

    def finish(self) -> None:
        """The step has run: take over what it has changed."""
        step, self._under_way = self._under_way, None
        if step is not None:
            step.finish()

    def abandon(self) -> None:
        """Let go of what a step that has raised still uses."""

    def fits(self, offload: Offload, steps_on_host: bool) -> bool:
        """Whether it serves this configuration still: the model may have been partitioned anew."""
        return offload.optimizer != "disk" and not steps_on_host

    def hear_of(self, optimizer: torch.optim.Optimizer, worlds: Mapping[int, World]) -> None:
        """See to partitioned parameters that the optimizer holds now and may not have held before."""

    def owned(self, params: Iterable[Tensor], worlds: Mapping[int, World]) -> dict[int, Owners]:
        """Who sees to the owners of parameters, by their ids; no entry where every rank steps on its rows."""
        return {}

    def rooms_on_disk(
        self,
        optimizer: torch.optim.Optimizer,
        worlds: Mapping[int, World],
        states: Mapping[int, Mapping[str, torch.dtype]],
    ) -> Mapping[int, Mapping[str, Place]]:
        """Room for states that are about to be read, see `optimizers.rooms_on_disk`."""
        return {}

    def kept(self, value: Any, known: ZeroParameter) -> Any:
        """A state of a parameter in the form in which this optimizer keeps it: this rank's rows.

        Args:
            value: of any kind; only tensors of the parameter's shape are cut.
            known: the parameter that it is for.
        """
        if not isinstance(value, Tensor) or value.shape != known.param.shape or not isinstance(known.param, DTensor):
            return value
        if isinstance(value, DTensor):
            value = torch_compat.local_of(value.redistribute(known.param.device_mesh, known.param.placements))
            rows = value.contiguous()
        else:
            rows = known.layout.rows_of(value, known.rank).clone(memory_format=torch.contiguous_format)
        return rows_like(rows, known.param)

    def cut_loaded_states(self, optimizer: torch.optim.Optimizer, worlds: Mapping[int, World]) -> None:
        """Let states that were loaded whole, as a plain run saves them, be this rank's; checked once for every load."""
        for inner in wrapped_optimizers(optimizer):
            if "state" in vars(inner):
                self.cut_loaded_states(inner, worlds)
        if vars(optimizer).get("_zero_checked_state") is optimizer.state:
            return  # `load_state_dict` puts a new dict in its place
        for index, param in enumerate(params_of(optimizer)):
            known = find_record(param) if id(param) in worlds else None
            if known is not None and isinstance(param, DTensor) and param in optimizer.state:
                self._cut_loaded_state(optimizer.state, param, known, worlds[id(param)], f"(its parameter {index})")
        vars(optimizer)["_zero_checked_state"] = optimizer.state

    def _cut_loaded_state(
        self, states: dict[Any, Any], param: DTensor, known: ZeroParameter, world: World, place: str
    ) -> None:
        state, shape = states[param], known.param.shape
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.shape != shape and value.ndim == len(shape) and value.shape[1:] == shape[1:] and value.ndim:
                raise PartitionError(
                    f"the optimizer's state {key!r} of {known.name!r} {place} has the shape {tuple(value.shape)}, but the "
                    f"parameter is {tuple(shape)}: load a whole state of this model, as a plain run saves it"
                )
            state[key] = self.kept(value, known)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer holds, in its order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def all_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """As `params_of`, and what it keeps beside: parameters that it may hold later."""
    beside = [each for each in kept_tensors(optimizer) if isinstance(each, nn.Parameter)]
    return (
        list({id(param): param for param in (*params_of(optimizer), *beside)}.values())
        if beside
        else params_of(optimizer)
    )


def find_record(param: Tensor) -> ZeroParameter | None:
    """What an engine of this process knows of a parameter; None: it is of no partitioned model."""
    return next(filter(None, (engine.find(param) for engine in live_engines())), None)
