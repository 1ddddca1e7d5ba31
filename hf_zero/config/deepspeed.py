"""DeepSpeed JSON: what each of its keys means here, key by key and in words.

[Note: three fates of a key] A key whose meaning also holds here is *kept*. A key that does not affect what is learned
*differs* (something else happens instead) or is *unsupported* (nothing happens), with a line that says so. A key is a
ConfigError if ignoring it would make training compute something else, or run out of the memory that the key was meant to
save: a run never changes silently. More precision than was asked for is not an error.

`translate` returns plain values; `hf_zero.config.zero_config` makes a ZeroConfig from them, so that imports point one way.

Source: DeepSpeed 0.19, `runtime/config.py`, `runtime/zero/config.py`, `runtime/lr_schedules.py`.
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_zero.config.deepspeed_rules import (
    ADAM_RULES,
    BF16_RULES,
    FP16_RULES,
    OFFLOAD_KEYS,
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    SCHEDULER_RULES,
    SCHEDULERS,
    SHARDED_ONLY,
    TOP_KEYS,
    TOP_RULES,
    ZERO_RULES,
    ZERO_TRANSLATED,
    Rule,
    Status,
)
from hf_zero.errors import ConfigError
from hf_zero.tables import aligned

ABSENT = "(absent)"
"""The value in a row about a key that is not in the file, if DeepSpeed's default for it differs from ours."""


@dataclass(frozen=True)
class ImportRow:
    """What became of one DeepSpeed key.

    Attributes:
        key: dotted path, such as "zero_optimization.stage".
        value: as the file has it, or "(absent)".
        status: "kept", "differs" or "unsupported": see [Note: three fates of a key].
        note: what happens here, in one line.
    """

    key: str
    value: Any
    status: Status
    note: str


@dataclass(frozen=True)
class Translation:
    """A DeepSpeed file in our terms.

    Attributes:
        zero: keys and values of a ZeroConfig.
        training: values of the Trainer's arguments, by argument name.
        rows: what became of every key.
    """

    zero: dict[str, Any]
    training: dict[str, Any]
    rows: tuple[ImportRow, ...]


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_FROM_TRAINER = "taken from the Trainer's arguments"

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def translate(mapping: Mapping[Any, Any], source: str) -> Translation:
    """A DeepSpeed config in our terms.

    Args:
        mapping: the file's content.
        source: where it comes from; the errors name it.

    Raises:
        ConfigError: a key is unknown, or a value is wrong or would train differently here.
    """
    reader = _Reader(source)
    reader.refuse_unknown("", mapping, TOP_KEYS)
    present = {key: value for key, value in mapping.items() if value is not None or key in TOP_RULES}
    _translate_precision(reader, present)
    _translate_zero(reader, present)
    _translate_batch(reader, present)
    _translate_gradients(reader, present)
    _translate_optimizer(reader, present)
    _translate_scheduler(reader, present)
    reader.judge("", present, TOP_RULES)
    return Translation(reader.zero, reader.training, tuple(reader.rows))


def render_table(rows: Iterable[ImportRow]) -> str:
    """The rows as plain text, in aligned columns."""
    header = ("DeepSpeed key", "value", "here", "note")
    return aligned([header, *((row.key, _as_json(row.value), row.status, row.note) for row in rows)], between="  ")


def _as_json(value: object) -> str:
    if value == ABSENT:
        return ABSENT
    if isinstance(value, float):
        return f"{value:g}"
    text = json.dumps(value) if isinstance(value, (str, int, type(None))) else _SHORT.repr(value)
    return text if len(text) <= 32 else text[:29] + "..."


@dataclass
class _Reader:
    """One pass over a DeepSpeed config: collects what its keys mean here, and raises for a key that cannot be honoured."""

    source: str
    zero: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    rows: list[ImportRow] = field(default_factory=list)

    def row(self, key: str, value: object, note: str, status: Status = "kept") -> None:
        self.rows.append(ImportRow(key, value, status, note))

    def error(self, key: str, value: object, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: key '{key}': {_SHORT.repr(value)}: {problem}")

    def refuse_unknown(self, prefix: str, block: Mapping[Any, Any], known: Iterable[str]) -> None:
        names = sorted(known)
        for key in block:
            if key in names:
                continue
            near = difflib.get_close_matches(str(key), names, n=1)
            advice = f"did you mean '{prefix}{near[0]}'?" if near else "hf_zero knows no such DeepSpeed key; remove it"
            raise ConfigError(f"{self.source}: unknown key {_SHORT.repr(f'{prefix}{key}')}; {advice}")

    def block(self, key: str, value: object) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise self.error(key, value, "is not a block of keys; write {...}")
        return value

    def flag(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.error(key, value, "is not a boolean; use true or false")
        return value

    def number(self, key: str, value: object, *, minimum: float = 0.0) -> int | float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= sys.maxsize:  # type: ignore[operator]
            raise self.error(key, value, f"is not a number of at least {minimum:g}")
        return value  # type: ignore[return-value]

    def count(self, key: str, value: object, *, minimum: int = 0) -> int:
        number = self.number(key, value, minimum=minimum)
        if number != int(number):
            raise self.error(key, value, "is not a whole number")
        return int(number)

    def argument(self, key: str, value: object, argument: str, parsed: Any) -> None:
        """Record a value that the Trainer takes under another argument name."""
        self.training[argument] = parsed
        self.row(key, value, f"{argument}={parsed}")

    def judge(self, prefix: str, block: Mapping[Any, Any], rules: Mapping[str, Rule]) -> None:
        """Add rows, or raise an error, for the keys that need no translation."""
        for name, value in block.items():
            rule = rules.get(name)
            if rule is None:
                continue
            key, asked = f"{prefix}{name}", value
            if rule.switch and value is not None:
                asked = self.block(key, value).get(rule.switch)
                key = f"{key}.{rule.switch}"
            if asked is None:  # DeepSpeed's default, which is harmless for every key
                self.row(key, asked, "")
                continue
            if rule.type == "flag":
                self.flag(key, asked)
            elif rule.type == "number" and asked != "auto" and asked not in rule.harmless:
                self.number(key, asked)
            is_harmless = asked in rule.harmless
            if rule.fate == "refused" and not is_harmless:
                raise self.error(key, asked, rule.note)
            if rule.fate == "refused":
                self.row(key, asked, "")
            elif is_harmless:
                self.row(key, asked, rule.note if asked is True else "")
            else:
                self.row(key, asked, rule.note, rule.fate)


def _translate_precision(reader: _Reader, top: Mapping[Any, Any]) -> None:
    if "fp16" in top:
        block = reader.block("fp16", top["fp16"])
        reader.refuse_unknown("fp16.", block, {"enabled", *FP16_RULES})
        enabled = block.get("enabled", False)
        if enabled != "auto" and reader.flag("fp16.enabled", enabled):
            raise reader.error("fp16.enabled", True, "float16 with its loss scaling is not supported yet; use bf16")
        reader.row("fp16.enabled", enabled, _FROM_TRAINER if enabled == "auto" else "")
        reader.judge("fp16.", block, FP16_RULES)
    name = "bf16" if "bf16" in top else "bfloat16"
    if name not in top:
        return
    block = reader.block(name, top[name])
    reader.refuse_unknown(f"{name}.", block, {"enabled", *BF16_RULES})
    enabled = block.get("enabled", False)
    if enabled == "auto":
        reader.row(f"{name}.enabled", enabled, _FROM_TRAINER)
    else:
        dtype = "bfloat16" if reader.flag(f"{name}.enabled", enabled) else "float32"
        reader.zero["compute_dtype"] = dtype
        reader.training["bf16"] = enabled
        reader.row(f"{name}.enabled", enabled, f"compute_dtype={dtype}, bf16={enabled}")
    reader.judge(f"{name}.", block, BF16_RULES)


def _translate_gradients(reader: _Reader, top: Mapping[Any, Any]) -> None:
    if "gradient_allreduce_op" in top:
        value = top["gradient_allreduce_op"]
        if value not in ("mean", "sum"):
            raise reader.error("gradient_allreduce_op", value, "use mean or sum")
        reader.zero["gradient_reduction"] = value
        reader.row("gradient_allreduce_op", value, f"gradient_reduction={value}")
    clipping = top.get("gradient_clipping", ABSENT)
    if clipping == ABSENT:
        note = f"max_grad_norm is {_FROM_TRAINER}; DeepSpeed would not clip"
        reader.row("gradient_clipping", ABSENT, note, "differs")
    elif clipping == "auto":
        reader.row("gradient_clipping", clipping, _FROM_TRAINER)
    else:
        reader.argument(
            "gradient_clipping", clipping, "max_grad_norm", float(reader.number("gradient_clipping", clipping))
        )
    _translate_data_types(reader, top)


def _translate_data_types(reader: _Reader, top: Mapping[Any, Any]) -> None:
    block = reader.block("data_types", top.get("data_types", {}))
    reader.refuse_unknown("data_types.", block, ("buffer_dtype", "grad_accum_dtype", "param_dtype"))
    for name, value in block.items():
        key = f"data_types.{name}"
        if value is None or value == "auto":
            reader.row(key, value, "")
        elif name != "grad_accum_dtype":
            raise reader.error(key, value, "is not supported; load the model in that dtype and remove this key")
        elif value not in ("fp32", "bf16"):
            raise reader.error(key, value, "is not supported; use fp32, bf16 or null")
        else:
            is_same = _DTYPES[value] == reader.zero.get("reduce_dtype", "float32")
            reader.row(key, value, "gradients are accumulated in reduce_dtype", "kept" if is_same else "differs")


def _translate_zero(reader: _Reader, top: Mapping[Any, Any]) -> None:
    value = top.get("zero_optimization", {})
    if isinstance(value, bool):
        raise reader.error("zero_optimization", value, 'is an old form; write {"stage": 1} or {"stage": 0}')
    block = reader.block("zero_optimization", value)
    prefix = "zero_optimization."
    reader.refuse_unknown(prefix, block, {*ZERO_RULES, *ZERO_TRANSLATED})

    stage = block.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise reader.error(f"{prefix}stage", stage, "is not a stage; use 0, 1, 2 or 3")
    reader.zero["stage"] = int(stage)
    reader.row(f"{prefix}stage", block.get("stage", ABSENT), f"stage={int(stage)}")
    for name in ("offload_optimizer", "offload_param"):
        _refuse_offload(reader, f"{prefix}{name}", block.get(name))

    compute_dtype = reader.zero.get("compute_dtype", "bfloat16" if "bf16" in top or "bfloat16" in top else "float32")
    reduce_dtype = _translate_reduce_dtype(reader, top) or compute_dtype
    _translate_bucket(reader, block, "reduce_bucket_size", "bucket_bytes", reduce_dtype, minimum_bytes=1)
    _translate_bucket(reader, block, "stage3_prefetch_bucket_size", "prefetch_bytes", compute_dtype, minimum_bytes=0)
    _translate_persistence(reader, block)
    _translate_reduce_scatter(reader, block)
    reader.judge(prefix, block, ZERO_RULES)


def _refuse_offload(reader: _Reader, key: str, value: object) -> None:
    if value is None:
        return
    block = reader.block(key, value)
    reader.refuse_unknown(f"{key}.", block, OFFLOAD_KEYS)
    device = block.get("device", "none")
    if device not in (None, "none"):
        advice = 'offload is not supported yet, and the run would need the memory that it saves; set it to "none"'
        raise reader.error(f"{key}.device", device, advice)
    reader.row(f"{key}.device", device, "")


def _translate_reduce_dtype(reader: _Reader, top: Mapping[Any, Any]) -> str | None:
    if "communication_data_type" not in top:
        return None
    value = top["communication_data_type"]
    dtype = _DTYPES.get(value.lower()) if isinstance(value, str) else None
    if dtype is None:
        raise reader.error("communication_data_type", value, "is not supported; use fp32, bf16 or null")
    reader.zero["reduce_dtype"] = dtype
    reader.row("communication_data_type", value, f"reduce_dtype={dtype}")
    return dtype


def _translate_bucket(
    reader: _Reader, block: Mapping[Any, Any], name: str, zero_key: str, dtype: str, *, minimum_bytes: int
) -> None:
    """Convert DeepSpeed's number of elements to our number of bytes: what the buffer would have taken there."""
    value = block.get(name)
    if value is None:
        return
    key = f"zero_optimization.{name}"
    if value == "auto":
        reader.row(key, value, f"{zero_key} keeps its default; DeepSpeed's would follow the hidden size", "differs")
        return
    num_bytes = max(minimum_bytes, reader.count(key, value) * _DTYPE_BYTES[dtype])
    reader.zero[zero_key] = num_bytes
    reader.row(key, value, f"{zero_key}={num_bytes}: elements of {_DTYPE_BYTES[dtype]} bytes ({dtype})")


def _translate_persistence(reader: _Reader, block: Mapping[Any, Any]) -> None:
    name = "stage3_param_persistence_threshold"
    value = block.get(name)
    if value is None:
        return
    key = f"zero_optimization.{name}"
    if value == "auto":
        reader.row(key, value, "keep_whole_numel keeps its default; DeepSpeed's would be 10 x hidden size", "differs")
        return
    numel = reader.count(key, value)
    if reader.zero["stage"] == 3:
        reader.zero["keep_whole_numel"] = numel
        reader.row(key, value, f"keep_whole_numel={numel}")
    else:
        reader.row(key, value, "only used in stage 3")


def _translate_reduce_scatter(reader: _Reader, block: Mapping[Any, Any]) -> None:
    """Which exchange gives each rank its own rows.

    DeepSpeed's `reduce_scatter` scatters nothing: it all-reduces a bucket that holds several ranks' rows or, if
    `use_multi_rank_bucket_allreduce` is false, reduces each rank's part to that rank. Here it does what its name says.
    """
    key, bucket_key = "zero_optimization.reduce_scatter", "zero_optimization.use_multi_rank_bucket_allreduce"
    scatters, is_bucketed = block.get("reduce_scatter"), block.get("use_multi_rank_bucket_allreduce")
    is_used = reader.zero["stage"] > 0
    if scatters is not None:
        choice = "to_owner" if reader.flag(key, scatters) and is_bucketed is False else scatters
        if is_used:
            reader.zero["reduce_scatter"] = choice
        reader.row(key, scatters, f"reduce_scatter={choice}" if is_used else SHARDED_ONLY)
    elif "reduce_scatter" in block:
        reader.row(key, None, "")
    if is_bucketed is not None:
        reader.flag(bucket_key, is_bucketed)
        note, status = _note_of_buckets(scatters, is_bucketed) if is_used else (SHARDED_ONLY, "kept")
        reader.row(bucket_key, is_bucketed, note, status)
    elif "use_multi_rank_bucket_allreduce" in block:
        reader.row(bucket_key, None, "")


def _note_of_buckets(scatters: bool | None, is_bucketed: bool) -> tuple[str, Status]:
    """What becomes of `use_multi_rank_bucket_allreduce` beside `reduce_scatter` (None: not in the file)."""
    if scatters is False:
        return "not used: whole gradients are all-reduced (reduce_scatter=False)", "kept"
    if is_bucketed:
        return "gradients are reduce-scattered; DeepSpeed would all-reduce buckets of several ranks' rows", "differs"
    if scatters:
        return "reduce_scatter=to_owner: each rank's rows are reduced to it, one reduce per rank", "kept"
    return 'gradients are reduce-scattered; write "reduce_scatter": true too to reduce to each owner', "differs"


def _translate_batch(reader: _Reader, top: Mapping[Any, Any]) -> None:
    sizes: dict[str, int] = {}
    for key, argument in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ):
        if top.get(key) == "auto":
            reader.row(key, "auto", _FROM_TRAINER)
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


def _translate_total_batch(reader: _Reader, top: Mapping[Any, Any], total: int, sizes: Mapping[str, int]) -> None:
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


def _translate_optimizer(reader: _Reader, top: Mapping[Any, Any]) -> None:
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
        note = f"learning_rate is {_FROM_TRAINER}, or the scheduler's; DeepSpeed would use its optimizer's default"
        reader.row("optimizer.params.lr", ABSENT, note, "differs")

    optim_args: dict[str, str] = {}
    for param, value in params.items():
        key = f"optimizer.params.{param}"
        if param in ADAM_RULES:
            continue
        if value == "auto":
            reader.row(key, value, _FROM_TRAINER)
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


def _translate_adam_param(reader: _Reader, param: str, value: object) -> None:
    key = f"optimizer.params.{param}"
    if param == "eps":
        reader.argument(key, value, "adam_epsilon", float(reader.number(key, value)))
        return
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise reader.error(key, value, "is not a pair of numbers; write for example [0.9, 0.999]")
    beta1, beta2 = (float(reader.number(key, beta)) for beta in value)
    reader.training |= {"adam_beta1": beta1, "adam_beta2": beta2}
    reader.row(key, value, f"adam_beta1={beta1}, adam_beta2={beta2}")


def _translate_scheduler(reader: _Reader, top: Mapping[Any, Any]) -> None:
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


def _translate_scheduler_params(reader: _Reader, kind: str, params: Mapping[Any, Any]) -> None:
    if params.get("warmup_type") is None:
        note = "the Trainer's warm-up is linear; DeepSpeed's is logarithmic unless warmup_type says \"linear\""
        reader.row("scheduler.params.warmup_type", ABSENT, note, "differs")
    for name, argument, minimum in (("warmup_num_steps", "warmup_steps", 0), ("total_num_steps", "max_steps", 1)):
        key, value = f"scheduler.params.{name}", params.get(name)
        if value == "auto":
            reader.row(key, value, _FROM_TRAINER)
        elif value is not None:
            reader.argument(key, value, argument, reader.count(key, value, minimum=minimum))
    key, value = "scheduler.params.warmup_max_lr", params.get("warmup_max_lr")
    if value == "auto":
        reader.row(key, value, _FROM_TRAINER)
    elif value is not None:
        reader.training["learning_rate"] = rate = float(reader.number(key, value))
        reader.row(key, value, f"learning_rate={rate}, in place of the optimizer's lr, as in DeepSpeed")
    if "warmup_num_steps" not in params:
        note = f"warmup_steps is {_FROM_TRAINER}; DeepSpeed would use 1000"
        reader.row("scheduler.params.warmup_num_steps", ABSENT, note, "differs")
    if kind == "WarmupDecayLR" and "warmup_max_lr" not in params:
        note = "the optimizer's lr, or the Trainer's learning_rate; DeepSpeed would use 0.001"
        reader.row("scheduler.params.warmup_max_lr", ABSENT, note, "differs")
