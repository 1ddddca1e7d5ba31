"""What a DeepSpeed file says about training: loss scaling, and arguments of the Trainer (batch sizes, optimizer, scheduler)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_zero.config.deepspeed.reader import ABSENT, FROM_TRAINER, Reader
from hf_zero.config.deepspeed.rules import (
    ADAM_RULES,
    FP16_RULES,
    FP16_TRANSLATED,
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    SCHEDULER_RULES,
    SCHEDULERS,
)


def translate_fp16(reader: Reader, top: Mapping[Any, Any]) -> bool:
    """The block `fp16`; returns whether it is on. The scale is DeepSpeed's also where the Trainer decides ("auto")."""
    if "fp16" not in top:
        return False
    block = reader.block("fp16", top["fp16"])
    reader.refuse_unknown("fp16.", block, {"enabled", *FP16_RULES, *FP16_TRANSLATED})
    enabled = block.get("enabled", False)
    is_open = enabled == "auto"
    if is_open:
        reader.row("fp16.enabled", enabled, FROM_TRAINER)
    elif reader.flag("fp16.enabled", enabled):
        reader.zero["compute_dtype"], reader.training["fp16"] = "float16", True
        reader.row("fp16.enabled", enabled, "compute_dtype=float16, fp16=True")
    else:
        reader.row("fp16.enabled", enabled, "")
    if not enabled:
        for name in block.keys() - {"enabled"}:
            reader.row(f"fp16.{name}", block[name], "not used: fp16 is off")
        return False
    _translate_loss_scale(reader, block)
    reader.judge("fp16.", block, FP16_RULES)
    return not is_open


def _translate_loss_scale(reader: Reader, block: Mapping[Any, Any]) -> None:
    """DeepSpeed's scaler has other defaults than torch's, so that all of them are written down."""
    given = {name: value for name, value in block.items() if value is not None}
    static = float(reader.number("fp16.loss_scale", given.get("loss_scale", 0)))
    scale: dict[str, Any] = {
        "initial": static or 2.0 ** reader.count("fp16.initial_scale_power", given.get("initial_scale_power", 16)),
        "window": reader.count("fp16.loss_scale_window", given.get("loss_scale_window", 1000), minimum=1),
        "hysteresis": reader.count("fp16.hysteresis", given.get("hysteresis", 2), minimum=1),
        "consecutive_hysteresis": reader.flag(
            "fp16.consecutive_hysteresis", given.get("consecutive_hysteresis", False)
        ),
        "minimum": float(reader.number("fp16.min_loss_scale", given.get("min_loss_scale", 1))),
    }
    reader.zero["loss_scale"] = static or scale
    parts = {
        "consecutive_hysteresis": "consecutive_hysteresis",
        "hysteresis": "hysteresis",
        "initial_scale_power": "initial",
        "loss_scale_window": "window",
        "min_loss_scale": "minimum",
    }
    for name in FP16_TRANSLATED:
        if name not in block:
            continue
        if name == "loss_scale":
            note = f"loss_scale={static:g}" if static else "the scale is dynamic"
        else:
            value = scale[parts[name]]
            note = "not used: loss_scale is fixed" if static else f"loss_scale.{parts[name]}={value}"
        reader.row(f"fp16.{name}", block[name], note)


def translate_batch(reader: Reader, top: Mapping[Any, Any]) -> None:
    """Sizes of batches, which must fit each other and the number of ranks."""
    sizes: dict[str, int] = {}
    for key, argument in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ):
        if top.get(key) == "auto":
            reader.row(key, "auto", FROM_TRAINER)
        elif key in top:
            sizes[key] = reader.count(key, top[key], minimum=1)
            reader.argument(key, top[key], argument, sizes[key])
    if "dataloader_drop_last" in top:
        value = reader.flag("dataloader_drop_last", top["dataloader_drop_last"])
        reader.argument("dataloader_drop_last", value, "dataloader_drop_last", value)
    key = "train_batch_size"
    if top.get(key) == "auto":
        reader.row(key, "auto", "follows from the other sizes and the number of ranks")
    elif key in top:
        _translate_total_batch(reader, top, reader.count(key, top[key], minimum=1), sizes)


def _translate_total_batch(reader: Reader, top: Mapping[Any, Any], total: int, sizes: Mapping[str, int]) -> None:
    key, parts = "train_batch_size", ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    missing = [part for part in parts if part not in top]
    if missing:
        advice = f"needs the number of ranks, unknown here, to find '{missing[0]}'; write that key too, or \"auto\""
        raise reader.error(key, total, advice)
    if len(sizes) < len(parts):
        reader.row(key, total, "not checked: the other sizes are taken from the Trainer's arguments", "differs")
        return
    num_ranks, rest = divmod(total, math.prod(sizes.values()))
    if rest or num_ranks == 0:
        raise reader.error(key, total, f"is not a multiple of {parts[0]} x {parts[1]}, {math.prod(sizes.values())}")
    reader.zero["expected_world_size"] = num_ranks
    reader.row(key, total, f"expected_world_size={num_ranks}")


def translate_optimizer(reader: Reader, top: Mapping[Any, Any]) -> None:
    """The optimizer and its settings."""
    if "optimizer" not in top:
        return
    block = reader.block("optimizer", top["optimizer"])
    reader.refuse_unknown("optimizer.", block, ("legacy_fusion", "params", "type"))
    kind = block.get("type")
    name = kind.lower() if isinstance(kind, str) else ""
    if name not in OPTIMIZERS:
        known = "Adam, AdamW, SGD, Adagrad or RMSprop"
        raise reader.error("optimizer.type", kind, f"the Trainer cannot build it; use {known}, or remove the block")
    params = reader.block("optimizer.params", block.get("params", {}))
    is_adam = name in ("adam", "adamw")
    optim = ("adamw_torch" if params.get("torch_adam") is True else "adamw_torch_fused") if is_adam else name
    reader.argument("optimizer.type", kind, "optim", optim)
    known_params = {*OPTIMIZER_PARAMS, *OPTIMIZERS[name], *(("betas", "eps", *ADAM_RULES) if is_adam else ())}
    reader.refuse_unknown("optimizer.params.", params, known_params)
    if "lr" not in params:
        note = f"learning_rate is {FROM_TRAINER}, or the scheduler's; DeepSpeed would use its optimizer's default"
        reader.row("optimizer.params.lr", ABSENT, note, "differs")

    optim_args: dict[str, str] = {}
    for param, value in params.items():
        key = f"optimizer.params.{param}"
        if param in ADAM_RULES:
            continue
        if value == "auto":
            reader.row(key, value, FROM_TRAINER)
        elif param in OPTIMIZER_PARAMS:
            reader.argument(key, value, OPTIMIZER_PARAMS[param], float(reader.number(key, value)))
        elif is_adam:
            _translate_adam_param(reader, param, value)
        else:
            is_flag = param in ("nesterov", "centered")
            optim_args[param] = str(reader.flag(key, value) if is_flag else float(reader.number(key, value)))
            reader.row(key, value, "goes into optim_args")
    if optim_args:
        reader.training["optim_args"] = ",".join(f"{param}={value}" for param, value in optim_args.items())
    reader.judge("optimizer.params.", params, ADAM_RULES if is_adam else {})


def _translate_adam_param(reader: Reader, param: str, value: object) -> None:
    key = f"optimizer.params.{param}"
    if param == "eps":
        reader.argument(key, value, "adam_epsilon", float(reader.number(key, value)))
        return
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise reader.error(key, value, "is not a pair of numbers; write for example [0.9, 0.999]")
    beta1, beta2 = (float(reader.number(key, beta)) for beta in value)
    reader.training |= {"adam_beta1": beta1, "adam_beta2": beta2}
    reader.row(key, value, f"adam_beta1={beta1}, adam_beta2={beta2}")


def translate_scheduler(reader: Reader, top: Mapping[Any, Any]) -> None:
    """The schedule of the learning rate."""
    if "scheduler" not in top:
        return
    block = reader.block("scheduler", top["scheduler"])
    reader.refuse_unknown("scheduler.", block, ("params", "type"))
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise reader.error(
            "scheduler.type", kind, f"the Trainer cannot build it; use one of {known}, or remove the block"
        )
    params = reader.block("scheduler.params", block.get("params", {}))
    is_cosine = kind == "WarmupCosineLR"
    known_params = {*SCHEDULER_RULES, "warmup_num_steps"}
    known_params |= {"cos_min_ratio"} if is_cosine else {"warmup_max_lr"}
    known_params |= set() if kind == "WarmupLR" else {"total_num_steps"}
    reader.refuse_unknown("scheduler.params.", params, known_params)
    note = f"lr_scheduler_type={SCHEDULERS[kind]}; DeepSpeed's runs one step behind"
    reader.training["lr_scheduler_type"] = SCHEDULERS[kind]
    reader.row("scheduler.type", kind, note, "differs")
    if is_cosine:
        ratio = float(reader.number("scheduler.params.cos_min_ratio", params.get("cos_min_ratio", 0.0001)))
        reader.training["lr_scheduler_kwargs"] = {"min_lr_rate": ratio}
        reader.row("scheduler.params.cos_min_ratio", params.get("cos_min_ratio", ABSENT), f"min_lr_rate={ratio}")
    _translate_scheduler_params(reader, kind, params)
    reader.judge("scheduler.params.", params, SCHEDULER_RULES)


def _translate_scheduler_params(reader: Reader, kind: str, params: Mapping[Any, Any]) -> None:
    if params.get("warmup_type") is None:
        note = "the Trainer's warm-up is linear; DeepSpeed's is logarithmic unless warmup_type says \"linear\""
        reader.row("scheduler.params.warmup_type", ABSENT, note, "differs")
    for name, argument, minimum in (("warmup_num_steps", "warmup_steps", 0), ("total_num_steps", "max_steps", 1)):
        key, value = f"scheduler.params.{name}", params.get(name)
        if value == "auto":
            reader.row(key, value, FROM_TRAINER)
        elif value is not None:
            reader.argument(key, value, argument, reader.count(key, value, minimum=minimum))
    key, value = "scheduler.params.warmup_max_lr", params.get("warmup_max_lr")
    if value == "auto":
        reader.row(key, value, FROM_TRAINER)
    elif value is not None:
        reader.training["learning_rate"] = rate = float(reader.number(key, value))
        reader.row(key, value, f"learning_rate={rate}, in place of the optimizer's lr, as in DeepSpeed")
    if "warmup_num_steps" not in params:
        note = f"warmup_steps is {FROM_TRAINER}; DeepSpeed would use 1000"
        reader.row("scheduler.params.warmup_num_steps", ABSENT, note, "differs")
    if kind == "WarmupDecayLR" and "warmup_max_lr" not in params:
        note = "the optimizer's lr, or the Trainer's learning_rate; DeepSpeed would use 0.001"
        reader.row("scheduler.params.warmup_max_lr", ABSENT, note, "differs")
