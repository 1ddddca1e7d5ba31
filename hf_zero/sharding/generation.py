"""`generate` of a model whose parameters are gathered for each use: whole for the whole call, or every rank in step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hf_zero.checkpoint.export import world_of_model
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError
from hf_zero.host.room import free_bytes
from hf_zero.parameters import parameters_of
from hf_zero.sharding.sequence.passes import whole_sequences

# A rank that has nobody to gather with must not find out only after `timeout_s`, which is made for slow exchanges. Ranks
# are further apart here than in an exchange: one may have written a file, or scored what was generated before.
_LATEST_S = 30.0


def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`generate`; all ranks call it, or one alone while the others have gone on: see [Note: a forward alone].

    Where memory allows (`gather_for_generation`), parameters are gathered once for all tokens, and each rank generates by
    itself. Otherwise, and where ranks send each other tokens for their experts, they are gathered for every token, and every
    rank goes on until all have finished; a `generate` that is not transformers' has to make as many tokens on every rank then.

    Raises:
        CollectiveError: a rank has neither called it nor gone on.
    """
    with whole_sequences():
        return _generate(self, *args, **kwargs)


def _generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    original = type(self).generate  # type: ignore[attr-defined]
    world = world_of_model(self)
    shares_experts = world is not None and world.experts.num_ranks > 1
    is_alone = world is None or not (world.config.policy.shards_parameters or shares_experts)
    if is_alone or _is_whole(self):
        return original(self, *args, **kwargs)
    assert world is not None
    takes_it = _is_of_transformers(self)
    by_itself = kwargs | {"synced_gpus": False} if takes_it else kwargs
    engine = _engine_with(self)
    if engine is not None and engine.gathering.alone.begins("generate"):
        return original(self, *args, **by_itself)
    if shares_experts or not _gathers_once(self, world):
        with contextlib.nullcontext() if engine is None else engine.gathering.alone.all_together():
            return original(self, *args, **(kwargs | {"synced_gpus": True} if takes_it else kwargs))
    with _whole(self):
        return original(self, *args, **by_itself)


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether `generate` is transformers' own, or hands on to it what it is given; not that of a model written by hand."""
    parameters = inspect.signature(type(model).generate).parameters  # type: ignore[attr-defined]
    if "synced_gpus" in parameters:
        return True
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return takes_any and any(hasattr(module, "generation_config") for module in model.modules())


def _engine_with(model: nn.Module) -> ZeroEngine | None:
    """The engine that knows the parameters of a model, or of the model around it (PEFT's), if it has started."""
    first = next((param for param in parameters_of(model) if isinstance(param, DTensor)), None)
    return None if first is None else next((each for each in live_engines() if each.find(first) is not None), None)


def _is_whole(model: nn.Module) -> bool:
    """Whether an outer `generate` has gathered everything, with which all ranks have met."""
    engine = _engine_with(model)
    return engine is not None and engine.gathering.holds_all


def _gathers_once(model: nn.Module, world: World) -> bool:
    """Meet the other ranks, and decide with them."""
    wanted = world.config.gather_for_generation
    free = free_bytes(world.device, world.num_sharing_memory) // 2 if wanted == "auto" else 0
    try:
        world.meet("generate", min(_LATEST_S, world.limit_s))
    except CollectiveError as error:
        raise CollectiveError(
            f"{error} In stage 3 generate is for all ranks before the model's first forward, and over a sequence, tensor or "
            "expert axis. For a sample on one rank alone, let all ranks enter `with zero.GatheredParameters(model):`, and "
            "generate on one of them inside."
        ) from error
    if isinstance(wanted, bool):
        return wanted
    budget = wanted if isinstance(wanted, int) else min(each for (each,) in world.everyone.agree([free], "generate"))
    engine = _engine_with(model)
    if engine is not None:
        return sum(unit.buffer_nbytes for unit in engine.units if unit.is_releasable) <= budget
    compute = world.precision.compute_for
    return sum(param.numel() * compute(param.dtype).itemsize for param in parameters_of(model)) <= budget


@contextlib.contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """Within: all units stay whole. A model whose engine starts with its first forward holds them after that one."""
    with contextlib.ExitStack() as stack:
        engine = _engine_with(model)
        if engine is not None:
            stack.enter_context(engine.gathering.holding_all())
        else:
            handle = model.register_forward_hook(lambda *_: hold())
            stack.callback(handle.remove)

            def hold() -> None:
                handle.remove()
                started = _engine_with(model)
                assert started is not None
                stack.enter_context(started.gathering.holding_all())

        yield
