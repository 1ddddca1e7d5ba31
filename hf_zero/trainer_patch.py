"""The methods of `transformers.Trainer` that hf_zero wraps, in one place; `remove()` puts the originals back.

Nothing changes for a Trainer whose arguments, callbacks and model have nothing to do with hf_zero. Wrapped are:

- `__init__`: before it runs, the model gets its engine (a Trainer reads at construction whether a model is sharded), what
  cannot work is refused, a user's optimizer is rebound, and the callback is attached. Subclasses such as TRL's come here
  too, with their final model.
- `call_model_init`: the model of `model_init` gets its engine.
- `train`: `resume_from_checkpoint` is refused.
- `_save`: a model without a `save_pretrained` is saved with whole weights.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer

from hf_zero.checkpoint.export import whole_state_dict, world_of_model
from hf_zero.engine.engine import engine_of
from hf_zero.errors import UsageError
from hf_zero.init import is_partitioned
from hf_zero.rebind import rebind_optimizer

PrepareModel = Callable[[nn.Module | None, Any, list[Any]], None]

_originals: dict[str, Any] = {}


def install(prepare_model: PrepareModel, callback: type) -> None:
    """Wrap the methods; a second time changes nothing.

    Args:
        prepare_model: called with the model, the arguments and the callbacks of every Trainer.
        callback: the class attached to Trainers whose model is partitioned.
    """
    if _originals:
        return
    wrappers = {
        "__init__": functools.partial(_wrap_init, prepare_model=prepare_model, callback=callback),
        "call_model_init": functools.partial(_wrap_call_model_init, prepare_model=prepare_model),
        "train": functools.partial(_wrap_train),
        "_save": functools.partial(_wrap_save),
    }
    for name, wrap in wrappers.items():
        original = Trainer.__dict__[name]
        _originals[name] = original
        setattr(Trainer, name, functools.wraps(original)(wrap(original)))


def remove() -> None:
    """Put the original methods back."""
    for name, original in _originals.items():
        setattr(Trainer, name, original)
    _originals.clear()


def _wrap_init(original: Callable[..., None], prepare_model: PrepareModel, callback: type) -> Callable[..., None]:
    signature = inspect.signature(original)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        model, arguments = given.get("model"), given.get("args")
        callbacks = list(given.get("callbacks") or [])
        if arguments is not None:
            prepare_model(model, arguments, callbacks)
            _rebind(given.get("optimizers"), model)
        is_ours = getattr(arguments, "zero_config", None) is not None
        if is_ours and not any(isinstance(entry, callback) or entry is callback for entry in callbacks):
            given["callbacks"] = [*callbacks, callback]
        original(*bound.args, **bound.kwargs)

    return wrapped


def _rebind(optimizers: Any, model: nn.Module | None) -> None:
    """A user's optimizer, made before the model was partitioned, follows it."""
    engine = None if model is None else engine_of(model)
    optimizer = optimizers[0] if optimizers else None
    if engine is not None and optimizer is not None:
        rebind_optimizer(optimizer, engine)


def _wrap_call_model_init(original: Callable[..., Any], prepare_model: PrepareModel) -> Callable[..., Any]:
    def wrapped(self: Any, trial: Any = None) -> Any:
        model = original(self, trial)
        prepare_model(
            model, self.args, list(self.callback_handler.callbacks) if hasattr(self, "callback_handler") else []
        )
        return model

    return wrapped


def _wrap_train(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.model is not None and is_partitioned(self.model):
            refuse_resume(resume_from_checkpoint)
        return original(self, resume_from_checkpoint, *args, **kwargs)

    return wrapped


def refuse_resume(checkpoint: object) -> None:
    """Raise if a checkpoint to resume from is given.

    Raises:
        UsageError: it is.
    """
    if checkpoint:
        raise UsageError(
            f"resume_from_checkpoint={checkpoint!r}: hf_zero cannot resume optimizer state yet; to go on from saved "
            "weights, load them with from_pretrained"
        )


def _wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> Any:
        is_plain_module = not isinstance(self.model, PreTrainedModel) and not hasattr(self.model, "peft_config")
        if state_dict is None and is_plain_module and world_of_model(self.model) is not None:
            state_dict = whole_state_dict(self.model, keep=self.args.should_save)
            if not self.args.should_save:
                return None
        return original(self, output_dir, state_dict)

    return wrapped
