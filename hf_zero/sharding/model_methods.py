"""What hf_zero attaches to model objects, so that transformers and accelerate treat them as what they are.

- `_is_distributed_loading_by_transformers`: the Trainer neither wraps the model in DDP nor moves it, and all ranks take
  part in saving.
- `no_sync`: where accelerate and the Trainer look for it.
- `_apply`: tells the engine of casts, which rows in float32 do not show.
- `_replicated_grad_hook_registered` on parameters that stay plain: the Trainer leaves their gradients to the engine.
- `device`: that on which it computes, where parameters rest in host memory beside one.
- `save_pretrained`, also of parts: writes whole weights. Of other libraries than transformers and PEFT (diffusers,
  sentence-transformers), all parameters are whole on every rank while rank 0 writes.
- `resize_token_embeddings`: sees whole embeddings; what it creates is partitioned by the next `shard_model`.
- hooks that slice sequences, where there is a sequence axis; forwards of experts that send tokens, where there is an axis of
  experts.
- `generate`: gathers once for the whole call, or keeps the ranks in step while any of them still generates (stage 3).

The methods are bound to the model, so a deep copy of it gets its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.checkpoint.export import save_by_library, save_whole
from hf_zero.checkpoint.files.model_plan import saves_given_state
from hf_zero.checkpoint.ranks.one_writer import is_saving_alone
from hf_zero.engine.engine import engine_of
from hf_zero.engine.gathered_parameters import GatheredParameters
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.parameters import parameters_of
from hf_zero.sharding.axes.experts import share_experts
from hf_zero.sharding.generation import generate
from hf_zero.sharding.other_libraries.resting_on_host import tell_device
from hf_zero.sharding.sequence.model import slice_sequences

_LOCAL_SGD = "accelerate.local_sgd"
_OURS = (__name__, generate.__module__)  # of functions that are bound to models


def attach(model: nn.Module, world: World) -> None:
    """Attach all of this to a model; a second call changes nothing."""
    slice_sequences(model, world)
    share_experts(model, world)
    _bind(model, "no_sync", _no_sync)
    if world.steps_on_host:
        tell_device(model)
    if world.num_ranks == 1:
        return
    name = "_is_distributed_loading_by_transformers"
    vars(model)[name if hasattr(type(model), name) else name.removeprefix("_")] = True
    if world.partitions:
        _bind(model, "_apply", _apply)
    for param in parameters_of(model):
        if not isinstance(param, DTensor):  # stage 0: otherwise the Trainer averages their gradients a second time
            param._replicated_grad_hook_registered = True  # type: ignore[attr-defined]
    for part in model.modules():
        if hasattr(type(part), "save_pretrained"):
            how = _save_pretrained if saves_given_state(part) else _save_pretrained_of_library
            _bind(part, "save_pretrained", how)
    if hasattr(type(model), "resize_token_embeddings"):
        _bind(model, "resize_token_embeddings", _resize_token_embeddings)
    if hasattr(type(model), "generate"):
        _bind(model, "generate", generate)


def _bind(part: nn.Module, name: str, function: Callable[..., Any]) -> None:
    vars(part)[name] = types.MethodType(function, part)
    vars(part)["__deepcopy__"] = types.MethodType(_copied, part)


def _copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, made without what is bound here: a copy of a bound method copies the module once more.

    Classes whose `__reduce__` hands on their state let that be copied before there is a copy of the module to refer to.
    """
    copied = sys._getframe(1).f_locals.get("x")  # as `copy.deepcopy` calls it
    if copied is not self and isinstance(copied, nn.Module) and "__deepcopy__" in vars(copied):
        self = copied  # a shallow copy, which has its original's methods
    own = vars(self)
    bound = {n: v for n, v in own.items() if isinstance(v, types.MethodType) and v.__func__.__module__ in _OURS}
    for name in bound:
        del own[name]
    try:
        made = copy.deepcopy(self, memo)
    finally:
        own.update(bound)
    vars(made).update({name: types.MethodType(value.__func__, made) for name, value in bound.items()})
    return made


def _apply(self: nn.Module, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    """What `model.float()`, `.to(...)` and the like call."""
    engine = engine_of(self)
    if engine is not None and engine.world.config.compute_dtype == "auto":
        engine.as_partitioned.note_cast(function)
    module: nn.Module = type(self)._apply(self, function, *args, **kwargs)  # type: ignore[no-untyped-call]
    return module


def _no_sync(self: nn.Module) -> contextlib.AbstractContextManager[None]:
    engine = engine_of(self)
    if engine is None:
        return contextlib.nullcontext()
    if engine.world.partitions and sys._getframe(1).f_globals.get("__name__") == _LOCAL_SGD:
        raise UsageError(
            "LocalSGD lets every rank train parameters of its own for some steps, but here the ranks hold one set of "
            "parameters together: use stage 0, or gradient accumulation"
        )
    return engine.no_sync()


def _save_pretrained(
    self: nn.Module,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """`save_pretrained` of whole weights; all ranks must call it."""
    original = functools.partial(type(self).save_pretrained, self)  # type: ignore[attr-defined]
    if is_saving_alone():
        original(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        return
    save_whole(self, original, save_directory, is_main_process, state_dict, **kwargs)


def _save_pretrained_of_library(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained` that reads the model itself; all ranks must call it."""
    save = functools.partial(type(self).save_pretrained, self, *args, **kwargs)  # type: ignore[attr-defined]
    if is_saving_alone():
        save()
        return
    save_by_library(self, save, str(next(iter((*args, *kwargs.values())), "")))


def _resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`resize_token_embeddings` on whole embeddings; all ranks must call it."""
    embeddings = [self.get_input_embeddings(), self.get_output_embeddings()]  # type: ignore[operator]
    params = [param for module in embeddings if module is not None for param in parameters_of(module)]
    with GatheredParameters(params):
        return type(self).resize_token_embeddings(self, *args, **kwargs)  # type: ignore[attr-defined]
