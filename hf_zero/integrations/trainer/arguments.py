"""ZeRO under the plain `transformers.Trainer`: `ZeroTrainingArguments(zero=...)`, `ZeroCallback`."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from hf_zero.checkpoint.ranks.background import background_of, wait_for
from hf_zero.config.axes import sharing_sequences
from hf_zero.config.files import CONFIG_VARIABLE, summary_level
from hf_zero.config.launched import tell_where_script_differs
from hf_zero.config.zero_config import ZeroConfig, load_with_import
from hf_zero.engine.engine import engine_of
from hf_zero.errors import ConfigError, UsageError
from hf_zero.integrations.accelerate.accelerator import use_cpu_without_accelerator
from hf_zero.integrations.accelerate.precision import with_mixed_precision
from hf_zero.integrations.accelerate.tensor_axis import (
    asked_for,
    num_processes,
    parallelism_of,
    ranks_of_a_batch,
    sharding_batches,
    with_axes,
)
from hf_zero.integrations.trainer import patch
from hf_zero.integrations.trainer.metrics import Metrics
from hf_zero.integrations.trainer.pace import Pace, share_of_time
from hf_zero.integrations.trainer.signals import SignalSaves
from hf_zero.parameters import parameters_of
from hf_zero.plan.summary import Measured, Start, summary, summary_after
from hf_zero.sharding.active import is_left_whole, is_partitioned
from hf_zero.sharding.init import activate
from hf_zero.sharding.shard_model import shard_model

logger = logging.getLogger(__name__)

_LARGE_BYTES = 2**30  # of a model: holding all of it, while it is made, may be too much

Arguments = TypeVar("Arguments", bound=TrainingArguments)


@dataclass
class ZeroTrainingArguments(TrainingArguments):  # type: ignore[misc]
    """`TrainingArguments` that also take a ZeRO configuration; create them before the model, as with DeepSpeed.

    From then on, `from_pretrained` partitions models while it loads them, and the plain `Trainer` trains them. Models
    loaded `with hf_zero.disabled():` stay whole, and `hf_zero.undo()` ends all of this. With `zero=None` (and no
    HF_ZERO_CONFIG), these are ordinary arguments.

    Args:
        zero: a stage (`zero=3`), a path to a YAML or JSON file (ours or DeepSpeed's), JSON text, or a dict; see
            `ZeroConfig`. Under `bf16=True` or `fp16=True`, a `compute_dtype` of "auto" becomes that (in stage 0 autocast is
            used, as under DDP); a `compute_dtype` of float16 sets `fp16`.
        zero_weights_only: `train(resume_from_checkpoint=...)` starts anew, at step 0 with a fresh optimizer, from the
            weights of the checkpoint.
        zero_any_batch: resume from a checkpoint that was written with another number of samples per step, although
            samples are then repeated or left out.
        zero_save_every: the share of the time that checkpoints may take, such as "2%", at a steady pace; in place of
            `save_strategy` and `save_steps`, and measured from save to save.
        tp_size: ranks that share every layer, as in the configuration; `parallelism_config` may say so too.
        sp_size: ranks that compute a slice each of the same sequences, as in the configuration; likewise.
        cp_size: likewise, for attention of a slice's queries to the keys of all; likewise.

    Attributes:
        zero_config: the `ZeroConfig` that was read; None without one.

    Raises:
        ConfigError: the configuration has a mistake, or contradicts another argument.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "zero"]  # noqa: RUF012

    # HfArgumentParser takes the second type of the union for the command line.
    zero: dict | str | int | None = field(  # type: ignore[type-arg]
        default=None, metadata={"help": "ZeRO configuration: a stage (0 to 3), a YAML or JSON file, or JSON text."}
    )

    zero_weights_only: bool = field(
        default=False, metadata={"help": "Start anew from the weights of the checkpoint to resume from."}
    )
    zero_any_batch: bool = field(
        default=False, metadata={"help": "Resume from a checkpoint with another number of samples per step."}
    )
    zero_save_every: str | None = field(
        default=None, metadata={"help": "Share of the time that checkpoints may take, such as 2%."}
    )

    tp_size: int = field(
        default=1, metadata={"help": "Ranks that share every layer (tensor parallelism), as tp_size of zero."}
    )
    sp_size: int = field(
        default=1, metadata={"help": "Ranks that share every sequence (sequence parallelism), as sp_size of zero."}
    )
    cp_size: int = field(
        default=1, metadata={"help": "Ranks that share every sequence (context parallelism), as cp_size of zero."}
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        after = cls.__mro__[cls.__mro__.index(ZeroTrainingArguments) + 1 :]
        hidden = [base.__name__ for base in after if _has_own_defaults(base)]
        if hidden:
            raise UsageError(
                f"class {cls.__name__}(ZeroTrainingArguments, {hidden[0]}) would lose the defaults of {hidden[0]}: write "
                f"class {cls.__name__}({hidden[0]}, ZeroTrainingArguments), or hf_zero.with_zero({hidden[0]})"
            )

    def __post_init__(self) -> None:
        """Read the configuration, start the process group, and partition models from now on."""
        start(self, super().__post_init__)


def _has_own_defaults(cls: type) -> bool:
    """Whether a class of arguments gives fields of `TrainingArguments` other defaults."""
    if not issubclass(cls, TrainingArguments):
        return False
    ours, theirs = TrainingArguments.__dataclass_fields__, vars(cls).get("__dataclass_fields__", {})
    return any(name in theirs and theirs[name].default != entry.default for name, entry in ours.items())


def start(args: TrainingArguments, make: Callable[[], None]) -> None:
    """Read the configuration of arguments, start the process group, and partition models from now on.

    Args:
        args: of any class; their configuration is `args.zero`, where there is such a field, or the file that
            HF_ZERO_CONFIG names. `args.zero_config` will hold it.
        make: what transformers does with them.

    Raises:
        ConfigError: the configuration has a mistake, or contradicts another argument.
    """
    use_cpu_without_accelerator()
    config = args.zero_config = _read_config(args)
    if config is not None:
        share_of_time(args)
        _check_combination(args)  # before transformers starts what cannot be combined
        if config.compute_dtype == "float16" and not args.bf16:
            args.fp16 = True  # with which the Trainer scales the loss
        if not torch.accelerator.is_available():
            args.use_cpu = True  # else transformers refuses bf16
    elif args.deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "DeepSpeed is not installed, but its file can be used here: write zero= in place of deepspeed="
        )
    make()
    if config is None:
        return
    config = _with_axes(with_mixed_precision(config, args.mixed_precision), args)
    if args.ddp_broadcast_buffers is not None:
        config = config.replace(broadcast_buffers=args.ddp_broadcast_buffers)
    args.zero_config = config
    _take_full_eval(args, config)
    _ = args.device  # starts the process group
    activate(config, args.device)
    patch.install(prepare_model=_prepare_model, callback=ZeroCallback)


def _read_config(args: TrainingArguments) -> ZeroConfig | None:
    source = getattr(args, "zero", None)
    if source is None and not os.environ.get(CONFIG_VARIABLE):
        return None
    config, imported = load_with_import(source)
    if source is not None:
        tell_where_script_differs(config, "zero")
    if imported is not None:
        _take_over(args, imported.training)
    return config


def _take_over(args: TrainingArguments, values: Mapping[str, Any]) -> None:
    """Use what a DeepSpeed file says about training; an argument that says something else is an error."""
    defaults = {name: entry.default for name, entry in type(args).__dataclass_fields__.items()}
    for name, value in values.items():
        if name not in defaults:
            continue
        mine = getattr(args, name)
        if mine not in (defaults[name], value):
            raise ConfigError(
                f"{name} is {value!r} in the DeepSpeed configuration but {mine!r} in the arguments: change one of them"
            )
        setattr(args, name, value)


def _check_combination(args: TrainingArguments) -> None:
    if args.fsdp or args.deepspeed:
        raise ConfigError("zero cannot be combined with fsdp or deepspeed: keep one of them")
    if "lomo" in (optim := str(getattr(args.optim, "value", args.optim))):
        raise ConfigError(
            f"optim={optim!r} changes parameters while the backward runs, when gradients are not reduced yet; use adafactor "
            "or adamw_torch"
        )
    if os.environ.get("WANDB_LOG_MODEL", "false").lower() not in ("false", "0", ""):
        raise ConfigError("WANDB_LOG_MODEL saves the model on rank 0 alone, which cannot work with zero: unset it")


def _with_axes(config: ZeroConfig, args: TrainingArguments) -> ZeroConfig:
    """The configuration with the axes that the arguments ask for, and arguments that deal out batches by them."""
    for name in ("tp_size", "sp_size", "cp_size"):
        wanted = getattr(args, name, 1)
        if wanted > 1:
            if getattr(config, name) not in (1, wanted):
                raise ConfigError(
                    f"{name} is {getattr(config, name)} in zero, but {wanted} in the arguments: leave one of them out"
                )
            config = config.replace(**{name: wanted})
    config = with_axes(config, asked_for(args.parallelism_config))
    if ranks_of_a_batch(config) == 1:
        return config
    key = sharing_sequences(config.sp_size, config.cp_size)
    if not args.average_tokens_across_devices:
        name = "tp_size" if config.tp_size > 1 else key
        raise ConfigError(
            f"average_tokens_across_devices=False makes the Trainer's losses {name} times too large: leave it out"
        )
    given = args.accelerator_config.dispatch_batches
    args.accelerator_config.dispatch_batches = sharding_batches(
        DataLoaderConfiguration(dispatch_batches=given)
    ).dispatch_batches
    if config.sp_size * config.cp_size > 1:
        _check_sequences(config, args, key)
        args.parallelism_config = parallelism_of(config, num_processes())
    return config


def _check_sequences(config: ZeroConfig, args: TrainingArguments, key: str) -> None:
    if config.tp_size > 1:
        raise ConfigError(
            f"the Trainer deals out batches by one axis: use tp_size or {key}; a loop of your own may have both"
        )
    if args.label_smoothing_factor:
        raise ConfigError(
            f"label_smoothing_factor needs the logits of whole sequences, which no rank has with {key}: leave one of them out"
        )


def _take_full_eval(args: TrainingArguments, config: ZeroConfig) -> None:
    """From stage 1 on, modules compute in one dtype, in training and in evaluation, so there is nothing left to cast for an
    evaluation. In stage 0 the Trainer casts the parameters, as under DDP.
    """
    if config.compute_dtype == "auto" and not config.policy.shards_optimizer:
        return
    for name, dtype in (("bf16_full_eval", "bfloat16"), ("fp16_full_eval", "float16")):
        if not getattr(args, name):
            continue
        if config.compute_dtype != dtype:
            raise ConfigError(
                f"{name} would cast the partitioned parameters for good, also for training: set {name[:4]}=True (or "
                f"compute_dtype: {dtype} in zero), with which evaluation and training compute in {dtype}"
            )
        setattr(args, name, False)


@functools.cache
def with_zero(arguments: type[Arguments]) -> type[Arguments]:
    """A class of arguments with the fields of `ZeroTrainingArguments` added; it keeps its own defaults.

    Args:
        arguments: a dataclass derived from `TrainingArguments`, such as TRL's `SFTConfig` or `Seq2SeqTrainingArguments`.

    Example:
        args = zero.with_zero(SFTConfig)(output_dir="out", zero=3)
    """
    if issubclass(arguments, ZeroTrainingArguments):
        return arguments
    if arguments is TrainingArguments:
        return ZeroTrainingArguments
    if not issubclass(arguments, TrainingArguments):
        raise UsageError(
            f"with_zero takes a class of arguments: {arguments.__name__} is not derived from TrainingArguments"
        )
    body = {
        "__doc__": f"`{arguments.__name__}` that also take a ZeRO configuration; see `hf_zero.with_zero`.",
        "__module__": arguments.__module__,
        "__reduce__": lambda self: (_remade, (arguments, vars(self))),
        "_VALID_DICT_FIELDS": [*arguments._VALID_DICT_FIELDS, "zero"],
    }
    return dataclass(type(f"Zero{arguments.__name__}", (arguments, ZeroTrainingArguments), body))


def _remade(arguments: type, state: dict[str, Any]) -> Any:
    """What `pickle` makes of arguments of a class that no module has by name."""
    made = object.__new__(with_zero(arguments))
    vars(made).update(state)
    return made


class ZeroCallback(TrainerCallback):  # type: ignore[misc]
    """Partitions what the Trainer is about to train, if it is not yet partitioned, and shows summaries.

    `ZeroTrainingArguments` attach it automatically; pass it yourself along with a model made under `Init`.

    Args:
        config: for a model that is not partitioned yet; None takes `args.zero_config`.
    """

    def __init__(self, config: ZeroConfig | Mapping[str, Any] | str | int | None = None) -> None:
        self._config = None if config is None else ZeroConfig.load(config)
        self._level = summary_level()
        self.signal_saves: SignalSaves | None = None
        self._start: Start | None = None
        self._metrics: Metrics | None = None
        self._pace: Pace | None = None
        patch.install(prepare_model=_prepare_model, callback=ZeroCallback)

    @property
    def config(self) -> ZeroConfig | None:
        """The configuration given to the callback itself."""
        return self._config

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Show what is partitioned, on rank 0, and listen for a signal to save."""
        if self.signal_saves is not None:
            self.signal_saves.listen()
        engine = engine_of(_unwrap(model)) if model is not None else None
        self._metrics = None if engine is None else Metrics(engine, state.global_step)
        share = share_of_time(args)
        self._pace = None if engine is None or share is None else Pace(share, engine.world, state.global_step)
        if engine is not None and engine.world.rank == 0 and self._level != "none":
            sys.stderr.write(summary(engine, args.mixed_precision, self._level == "full") + "\n")
            self._start = Start.of(engine, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check whether a save in the background has ended, whether a signal asks for a save, and whether one is due."""
        engine = engine_of(_unwrap(model)) if model is not None else None
        background = None if engine is None else background_of(engine.world)
        if background is not None:
            background.poll()
        if self._metrics is not None:
            self._metrics.compare(state.global_step)
        if self._pace is not None:
            control.should_save = self._pace.is_due(state.global_step) or state.global_step >= state.max_steps
        if self.signal_saves is not None:
            self.signal_saves.poll(control)
            if self.signal_saves.has_asked:
                args.save_total_limit = None  # the Trainer would leave the best alone, at its end

    def saved(self, step: int, took_s: float) -> None:
        """A checkpoint is written, or under way; training stood still for `took_s` seconds."""
        if self._pace is not None:
            self._pace.saved(step, took_s)

    def metrics(self, step: int) -> dict[str, float]:
        """What is logged beside the loss; see `Metrics`."""
        return {} if self._metrics is None else self._metrics.since_last(step)

    def on_train_end(
        self, args: TrainingArguments, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Wait for a save in the background; show what was measured, on rank 0."""
        engine = engine_of(_unwrap(model)) if model is not None else None
        if engine is None:
            return
        wait_for(engine.world)
        if self._start is not None:
            measured = Measured.since(self._start, engine, getattr(optimizer, "state", {}), state.global_step)
            sys.stderr.write(f"\n{summary_after(engine, measured, self._level == 'full')}\n")  # below the progress bar


def _unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s wrapper."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _prepare_model(model: nn.Module | None, args: TrainingArguments, callbacks: list[Any]) -> None:
    """Give the model its engine, before the Trainer does anything else."""
    config = getattr(args, "zero_config", None)
    for callback in callbacks:
        if isinstance(callback, ZeroCallback) and callback.config is not None:
            config = callback.config
    if model is None:
        return
    is_ours = is_partitioned(model)
    if config is None and not is_ours:
        return
    if is_left_whole(model):
        return
    if not is_ours and config is not None and args.process_index == 0 and _is_worth_a_warning(model, config):
        logger.warning(
            "every rank has held all of %s, which is partitioned now: where arguments are made first, from_pretrained and "
            "from_config partition it while it is made; so does hf_zero.Init with any constructor",
            type(model).__name__,
        )
    shard_model(model, config)


def _is_worth_a_warning(model: nn.Module, config: ZeroConfig) -> bool:
    nbytes = sum(param.numel() * param.element_size() for param in parameters_of(model))
    return config.policy.shards_parameters and nbytes >= _LARGE_BYTES
