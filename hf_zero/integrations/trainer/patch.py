"""The methods of `transformers.Trainer` that hf_zero wraps, in one place; `hf_zero.undo()` puts the originals back.

Nothing changes for a Trainer whose arguments, callbacks and model have nothing to do with hf_zero. These are wrapped:

- `__init__`: before it runs, the model gets its engine (a Trainer reads at construction whether a model is sharded), what
  cannot work is refused, a user's optimizer is rebound, and the callback is attached. Subclasses such as TRL's get here
  too, with their final model.
- `create_accelerator_and_postprocess`: fp16 gets its loss scaler, and one launched rank no DDP; a hyperparameter search makes
  an accelerator each trial.
- `call_model_init`: the model of `model_init` gets its engine.
- `train`: finds and verifies the checkpoint to resume from.
- `save_model`, before transformers 5.23: adapters are saved by all ranks, as everything else is.
- `_save`: a model without a `save_pretrained` is saved by all ranks.
- `_save_checkpoint`, `_save_optimizer_and_scheduler`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler`,
  `_load_best_model`: checkpoints are written, committed, verified and read by `trainer_checkpoint`.
- `_load_rng_state`: ranks that share layers or sequences get one random state.
- `evaluation_loop`: predictions are of whole sequences.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import compare_versions
from torch import nn
from transformers import PreTrainedModel, Trainer

from hf_zero.changes import Changes
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.checkpoint.model_state import write_model
from hf_zero.checkpoint.ranks.one_place import one_place
from hf_zero.config.axes import sharing_sequences
from hf_zero.engine.engine import engine_of
from hf_zero.errors import CheckpointError, UsageError
from hf_zero.integrations import vllm_weights
from hf_zero.integrations.accelerate.precision import scale_loss
from hf_zero.integrations.accelerate.tensor_axis import also_on_cpus, gather_each_batch_once
from hf_zero.integrations.random_state import share_random_state
from hf_zero.integrations.trainer import checkpoint as trainer_checkpoint
from hf_zero.integrations.trainer import healing
from hf_zero.integrations.trainer.checkpoint import engine_under
from hf_zero.integrations.trainer.signals import signal_saves
from hf_zero.optim.optimizers import rebind_optimizer
from hf_zero.sharding.active import is_partitioned
from hf_zero.sharding.sequence.passes import joined_outputs

PrepareModel = Callable[[nn.Module | None, Any, list[Any]], None]

_TAKES_SLICES = ("SFTTrainer",)  # whose losses and metrics are of values by token, which are joined

_changes = Changes()


def install(prepare_model: PrepareModel, callback: type) -> None:
    """Wrap the methods; a second call changes nothing.

    Args:
        prepare_model: called with the model, the arguments and the callbacks of every Trainer.
        callback: the class attached to Trainers whose model is partitioned.
    """
    if _changes:
        return
    vllm_weights.install()
    wrappers: dict[str, Callable[..., Any]] = {
        "__init__": functools.partial(_wrap_init, prepare_model=prepare_model, callback=callback),
        "create_accelerator_and_postprocess": _wrap_create_accelerator,
        "call_model_init": functools.partial(_wrap_call_model_init, prepare_model=prepare_model),
        "train": _wrap_train,
        "_run_epoch": _wrap_epoch,
        "log": functools.partial(_wrap_log, callback=callback),
        "_save": _wrap_save,
        "_save_checkpoint": functools.partial(_wrap_save_checkpoint, callback=callback),
        "_save_optimizer_and_scheduler": _wrap_save_optimizer,
        "_load_from_checkpoint": _wrap_load_weights,
        "_load_optimizer_and_scheduler": _wrap_load_optimizer,
        "_load_best_model": _wrap_load_best,
        "_load_rng_state": _wrap_load_random,
        "evaluation_loop": _wrap_evaluation_loop,
    }
    if compare_versions("transformers", "<", "5.23"):
        wrappers["save_model"] = _wrap_save_model
    _changes.keep()
    # transformers' own, also where somebody has put a subclass in its place
    trainer = next(each for each in reversed(Trainer.__mro__) if "_run_epoch" in vars(each))
    for name, wrap in wrappers.items():
        original = vars(trainer)[name]
        _changes.replace(trainer, name, functools.wraps(original)(wrap(original)))


def _wrap_init(original: Callable[..., None], prepare_model: PrepareModel, callback: type) -> Callable[..., None]:
    by_name = _by_name(
        original, ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
    )

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given, more = by_name(args, kwargs)
        model, arguments = given.get("model"), given.get("args")
        callbacks = list(given.get("callbacks") or [])
        if arguments is not None:
            _check_sequences(type(self), arguments, given.get("compute_loss_func"))
            prepare_model(model, arguments, callbacks)
            _rebind(given.get("optimizers"), model)
            trainer_checkpoint.agree_on_folder(arguments, model)
        is_ours = getattr(arguments, "zero_config", None) is not None
        if is_ours:
            healing.save_on_sigterm(arguments)
        if is_ours and not any(isinstance(entry, callback) or entry is callback for entry in callbacks):
            given["callbacks"] = [*callbacks, callback]
        with _allowing_checkpoints(arguments, is_ours or engine_under(model) is not None):
            original(self, *more, **given)
        for entry in self.callback_handler.callbacks:
            if isinstance(entry, callback):
                entry.signal_saves = signal_saves(self)  # type: ignore[attr-defined]

    return wrapped


def _by_name(
    method: Callable[..., Any], first: Sequence[str]
) -> Callable[[Any, Any], tuple[dict[str, Any], list[Any]]]:
    """What takes the arguments of a method's call apart: those with names, and what is left.

    Args:
        method: it.
        first: the names of its first arguments, should somebody have wrapped it in `(*args, **kwargs)`.
    """
    parameters = list(inspect.signature(method).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] or list(first)

    def by_name(args: Any, kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
        return dict(zip(names, args, strict=False), **kwargs), list(args[len(names) :])

    return by_name


def _wrap_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if healing.has_ended(self) else original(self, *args, **kwargs)

    return wrapped


def _check_sequences(kind: type, arguments: Any, compute_loss: Any) -> None:
    """Raise for a Trainer that computes its loss from whole logits, which no rank has of slices."""
    config = getattr(arguments, "zero_config", None)
    if config is None or config.sp_size * config.cp_size == 1:
        return
    owner = next(each for each in kind.__mro__ if "compute_loss" in vars(each))
    if compute_loss is not None or (owner is not Trainer and owner.__name__ not in _TAKES_SLICES):
        what = "compute_loss_func" if compute_loss is not None else f"compute_loss of {owner.__name__}"
        key = sharing_sequences(config.sp_size, config.cp_size)
        raise UsageError(
            f"{key} is {config.sp_size * config.cp_size}: {what} would see logits of a slice of each sequence; the plain "
            f"Trainer and TRL's SFTTrainer train with it: leave {key} out, or let the model compute the loss"
        )


@contextmanager
def _allowing_checkpoints(arguments: Any, is_ours: bool) -> Iterator[None]:
    """While active, the Trainer believes that it need not save the optimizer; it cannot, for a model sharded at load."""
    if not is_ours or arguments is None:
        yield
        return
    before, arguments.save_only_model = arguments.save_only_model, True
    try:
        yield
    finally:
        arguments.save_only_model = before


def _rebind(optimizers: Any, model: nn.Module | None) -> None:
    """Rebind a user's optimizer that was made before the model was partitioned."""
    engine = None if model is None else engine_of(model)
    optimizer = optimizers[0] if optimizers else None
    if engine is not None and optimizer is not None:
        rebind_optimizer(optimizer, engine)


def _wrap_create_accelerator(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def wrapped(self: Any) -> None:
        with also_on_cpus():
            original(self)
        engine = engine_under(self.model)
        if engine is None:
            return
        size = engine.world.tensor.num_ranks * engine.world.sequence.num_ranks
        if size > 1:
            gather_each_batch_once(self.accelerator, size)
            self.gather_function = self.accelerator.gather_for_metrics
        scale_loss(self.accelerator, engine.world.config)
        _leave_unwrapped(self.accelerator)

    return wrapped


def _leave_unwrapped(accelerator: Any) -> None:
    """Let accelerate prepare models without `DistributedDataParallel`, in which it wraps that of one launched rank.

    With `compute_dtype` that rank's gradients are the engine's, and DDP would drop those of all micro-batches but the first.
    """
    accelerator.prepare_model = functools.partial(type(accelerator).prepare_model, accelerator, evaluation_mode=True)


def _wrap_call_model_init(original: Callable[..., Any], prepare_model: PrepareModel) -> Callable[..., Any]:
    def wrapped(self: Any, trial: Any = None) -> Any:
        model = original(self, trial)
        prepare_model(
            model, self.args, list(self.callback_handler.callbacks) if hasattr(self, "callback_handler") else []
        )
        trainer_checkpoint.agree_on_folder(self.args, model)
        return model

    return wrapped


def _wrap_train(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.model is not None and not engine_under(self.model) and is_partitioned(self.model):
            raise UsageError("the Trainer's model was partitioned, but its engine is gone: make the Trainer again")
        if engine_under(self.model) is not None:
            _leave_unwrapped(self.accelerator)
        if "_tp_size" in vars(self) and engine_under(self.model) is not None:
            self._tp_size = 1  # TRL divides counts of tokens by it, which are of each batch once here
        # Else its next model agrees; after a trial of a search, rank 0 alone has let go of the last.
        if self.model_init is None:
            trainer_checkpoint.agree_on_folder(self.args, self.model)
        engine, given = engine_under(self.model), resume_from_checkpoint
        if engine is not None:
            if kwargs.get("trial") is not None:
                healing.refuse_search()
            resume_from_checkpoint = healing.where_to_go_on(self, engine.world, given)
        if resume_from_checkpoint and engine is not None:
            is_new = trainer_checkpoint.wants_weights_only(self.args) and resume_from_checkpoint is given
            resume_from_checkpoint = trainer_checkpoint.find_checkpoint(self, resume_from_checkpoint, not is_new)
            if is_new:
                if self.model_init is not None:
                    raise UsageError(
                        "zero_weights_only is set, but model_init makes the model anew when the training begins: load the "
                        "weights there, or give the Trainer a model"
                    )
                self._load_from_checkpoint(resume_from_checkpoint)
                resume_from_checkpoint = None
        if engine is not None and self.model_init is None:  # in a search, ranks come here by different ways
            first = trainer_checkpoint.step_of(Path(resume_from_checkpoint)) if resume_from_checkpoint else None
            trainer_checkpoint.check_folder(self, first or 0, engine.world)
        result = original(self, resume_from_checkpoint, *args, **kwargs)
        healing.leave_if_told(self)
        return result

    return wrapped


def _wrap_save_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
        if engine_under(self.model) is None or not hasattr(self.model, "peft_config"):
            return original(self, output_dir, _internal_call)
        self._save(output_dir if output_dir is not None else self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    return wrapped


def _wrap_log(original: Callable[..., None], callback: type) -> Callable[..., None]:
    def wrapped(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # of training, not of an evaluation
            for entry in self.callback_handler.callbacks:
                if isinstance(entry, callback):
                    logs.update(entry.metrics(self.state.global_step))  # type: ignore[attr-defined]
        original(self, logs, *args, **kwargs)

    return wrapped


def _wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> Any:
        engine = engine_under(self.model)
        is_plain_module = not isinstance(self.model, PreTrainedModel) and not hasattr(self.model, "peft_config")
        if state_dict is not None or not is_plain_module or engine is None or engine.model is not self.model:
            return original(self, output_dir, state_dict)
        folder = output_dir if output_dir is not None else self.args.output_dir
        if not engine.world.all_come(f"saving {type(self.model).__name__}", [p.param for p in engine.parameters]):
            return original(self, output_dir, whole_state_dict(engine.model))
        output_dir = folder = str(one_place(folder, engine.world))
        with engine.world.together(f"saving {folder}", CheckpointError):
            original(self, output_dir, {})  # everything but the weights
        return write_model(engine.model, Path(folder), engine.world)

    return wrapped


def _wrap_save_checkpoint(original: Callable[..., Any], callback: type) -> Callable[..., Any]:
    def wrapped(self: Any, model: Any, trial: Any) -> Any:
        if engine_under(self.model) is None:
            return original(self, model, trial)
        began_s = time.monotonic()
        trainer_checkpoint.save_checkpoint(original, self, model, trial)
        for entry in self.callback_handler.callbacks:
            if isinstance(entry, callback):
                entry.saved(self.state.global_step, time.monotonic() - began_s)  # type: ignore[attr-defined]

    return wrapped


def _wrap_save_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, output_dir: str) -> Any:
        if engine_under(self.model) is None:
            return original(self, output_dir)
        return trainer_checkpoint.save_optimizer(self, Path(output_dir))

    return wrapped


def _wrap_load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, resume_from_checkpoint: str, model: Any = None) -> Any:
        if engine_under(self.model) is None or hasattr(self.model, "peft_config"):
            return original(self, resume_from_checkpoint, model)
        return trainer_checkpoint.load_weights(self, Path(resume_from_checkpoint))

    return wrapped


def _wrap_load_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, checkpoint: str | None) -> Any:
        if engine_under(self.model) is None or checkpoint is None:
            return original(self, checkpoint)
        return trainer_checkpoint.load_optimizer(self, Path(checkpoint))

    return wrapped


def _wrap_load_random(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, checkpoint: str | None) -> None:
        original(self, checkpoint)
        engine = engine_under(self.model)
        if engine is not None and checkpoint is not None:
            share_random_state(engine.world)

    return wrapped


def _wrap_evaluation_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    by_name = _by_name(original, ("dataloader", "description", "prediction_loss_only"))

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        only_loss = by_name(args, kwargs)[0].get("prediction_loss_only")
        only_loss = self.args.prediction_loss_only if only_loss is None else only_loss
        with nullcontext() if only_loss else joined_outputs():
            return original(self, *args, **kwargs)

    return wrapped


def _wrap_load_best(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any) -> Any:
        if engine_under(self.model) is None or hasattr(self.model, "peft_config"):
            return original(self)
        return trainer_checkpoint.load_best(self)

    return wrapped
