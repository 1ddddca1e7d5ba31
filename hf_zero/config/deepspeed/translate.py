"""DeepSpeed JSON: what each of its keys means here, key by key and in words.

[Note: three fates of a key] A key whose meaning also holds here is *kept*. A key that does not affect what is learned
*differs* (something else happens instead) or is *unsupported* (nothing happens), with a line that says so. A key is a
ConfigError if ignoring it would make training compute something else, or run out of the memory that the key was meant to
save: a run never changes silently. More precision than was asked for is not an error.

`translate` returns plain values; `hf_zero.config.zero_config` makes a ZeroConfig from them, so that imports point one way.

Source: DeepSpeed 0.19, `runtime/config.py`, `runtime/zero/config.py`, `runtime/lr_schedules.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.deepspeed.offload import translate_offload
from hf_zero.config.deepspeed.reader import ABSENT, FROM_TRAINER, SHORT, ImportRow, Reader
from hf_zero.config.deepspeed.rules import (
    ACTIVATION_RULES,
    ACTIVATION_TRANSLATED,
    BF16_RULES,
    SHARDED_ONLY,
    TOP_KEYS,
    TOP_RULES,
    ZERO_RULES,
    ZERO_TRANSLATED,
    Status,
)
from hf_zero.config.deepspeed.training import (
    translate_batch,
    translate_fp16,
    translate_optimizer,
    translate_scheduler,
)
from hf_zero.tables import aligned


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


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def translate(mapping: Mapping[Any, Any], source: str) -> Translation:
    """A DeepSpeed config in our terms.

    Args:
        mapping: the file's content.
        source: where it comes from; the errors name it.

    Raises:
        ConfigError: a key is unknown, or a value is wrong or would train differently here.
    """
    reader = Reader(source)
    reader.refuse_unknown("", mapping, TOP_KEYS)
    present = {key: value for key, value in mapping.items() if value is not None or key in TOP_RULES}
    _translate_precision(reader, present)
    _translate_activations(reader, present)
    _translate_tensor_parallel(reader, present)
    _translate_zero(reader, present)
    translate_batch(reader, present)
    _translate_gradients(reader, present)
    translate_optimizer(reader, present)
    translate_scheduler(reader, present)
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
    text = json.dumps(value) if isinstance(value, (str, int, type(None))) else SHORT.repr(value)
    return text if len(text) <= 32 else text[:29] + "..."


def _translate_precision(reader: Reader, top: Mapping[Any, Any]) -> None:
    is_half = translate_fp16(reader, top)
    name = "bf16" if "bf16" in top else "bfloat16"
    if name not in top:
        return
    block = reader.block(name, top[name])
    reader.refuse_unknown(f"{name}.", block, {"enabled", *BF16_RULES})
    enabled = block.get("enabled", False)
    if enabled == "auto":
        reader.row(f"{name}.enabled", enabled, FROM_TRAINER)
    else:
        dtype = "bfloat16" if reader.flag(f"{name}.enabled", enabled) else "float16" if is_half else "float32"
        if enabled and is_half:
            raise reader.error(f"{name}.enabled", enabled, "fp16.enabled is true as well; keep one of them")
        reader.zero["compute_dtype"] = dtype
        reader.training["bf16"] = enabled
        reader.row(f"{name}.enabled", enabled, f"compute_dtype={dtype}, bf16={enabled}")
    reader.judge(f"{name}.", block, BF16_RULES)


def _translate_activations(reader: Reader, top: Mapping[Any, Any]) -> None:
    prefix = "activation_checkpointing"
    if top.get(prefix) is None:
        return
    block = reader.block(prefix, top[prefix])
    reader.refuse_unknown(f"{prefix}.", block, (*ACTIVATION_RULES, *ACTIVATION_TRANSLATED))
    ours = {"partition_activations": "partition", "cpu_checkpointing": "offload"}
    asked = {ours[name]: reader.flag(f"{prefix}.{name}", block[name]) for name in ours if block.get(name) is not None}
    for name in (name for name in ours if name in block):
        note = f"activations.{ours[name]}={asked.get(ours[name], False)}"
        reader.row(f"{prefix}.{name}", block[name], f"{note}; for layers that gradient_checkpointing computes again")
    if any(asked.values()):
        reader.zero["activations"] = asked
    reader.judge(f"{prefix}.", block, ACTIVATION_RULES)


def _translate_tensor_parallel(reader: Reader, top: Mapping[Any, Any]) -> None:
    key = "tensor_parallel"
    if top.get(key) is None:
        return
    for name, value in reader.block(key, top[key]).items():
        if name == "autotp_size":
            size = max(reader.count(f"{key}.{name}", value), 1)
            reader.zero["tp_size"] = size
            reader.row(f"{key}.{name}", value, f"tp_size={size}, by the model's own plan")
        else:
            reader.row(f"{key}.{name}", value, "layers are shared by the model's own plan", "differs")


def _translate_gradients(reader: Reader, top: Mapping[Any, Any]) -> None:
    if "gradient_allreduce_op" in top:
        value = top["gradient_allreduce_op"]
        if value not in ("mean", "sum"):
            raise reader.error("gradient_allreduce_op", value, "use mean or sum")
        reader.zero["gradient_reduction"] = value
        reader.row("gradient_allreduce_op", value, f"gradient_reduction={value}")
    clipping = top.get("gradient_clipping", ABSENT)
    if clipping == ABSENT:
        note = f"max_grad_norm is {FROM_TRAINER}; DeepSpeed would not clip"
        reader.row("gradient_clipping", ABSENT, note, "differs")
    elif clipping == "auto":
        reader.row("gradient_clipping", clipping, FROM_TRAINER)
    else:
        reader.argument(
            "gradient_clipping", clipping, "max_grad_norm", float(reader.number("gradient_clipping", clipping))
        )
    _translate_data_types(reader, top)


def _translate_data_types(reader: Reader, top: Mapping[Any, Any]) -> None:
    block = reader.block("data_types", top.get("data_types", {}))
    reader.refuse_unknown("data_types.", block, ("buffer_dtype", "grad_accum_dtype", "param_dtype"))
    for name, value in block.items():
        key = f"data_types.{name}"
        if value is None or value == "auto":
            reader.row(key, value, "")
        elif name != "grad_accum_dtype":
            raise reader.error(key, value, "is not supported; load the model in that dtype and remove this key")
        elif value not in _DTYPES:
            raise reader.error(key, value, "is not supported; use fp32, bf16, fp16 or null")
        else:
            is_same = _DTYPES[value] == reader.zero.get("reduce_dtype", "float32")
            reader.row(key, value, "gradients are accumulated in reduce_dtype", "kept" if is_same else "differs")


def _translate_zero(reader: Reader, top: Mapping[Any, Any]) -> None:
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
    translate_offload(reader, block)
    _translate_wire(reader, block)

    is_half = any(name in top for name in ("bf16", "bfloat16")) or top.get("fp16", {}).get("enabled") == "auto"
    compute_dtype = reader.zero.get("compute_dtype", "bfloat16" if is_half else "float32")
    reduce_dtype = _translate_reduce_dtype(reader, top) or compute_dtype
    _translate_bucket(reader, block, "reduce_bucket_size", "bucket_bytes", reduce_dtype, minimum_bytes=1)
    _translate_bucket(reader, block, "stage3_prefetch_bucket_size", "prefetch_bytes", compute_dtype, minimum_bytes=0)
    _translate_persistence(reader, block)
    _translate_reduce_scatter(reader, block)
    reader.judge(prefix, block, ZERO_RULES)


def _translate_wire(reader: Reader, block: Mapping[Any, Any]) -> None:
    """ZeRO++'s smaller messages, in blocks of 256 here, and its second copy of rows."""
    wire: dict[str, object] = {}
    for name, what, word in (("weights", "gather", "int8"), ("gradients", "reduce", "int4")):
        key = f"zero_optimization.zero_quantized_{name}"
        value = block.get(f"zero_quantized_{name}")
        if value is None:
            continue
        is_used = reader.zero["stage"] == 3
        if reader.flag(key, value) and is_used:
            wire[what] = word
        reader.row(
            key, value, "only used in stage 3" if value and not is_used else f"wire.{what}={wire.get(what, 'float32')}"
        )
    size = block.get("zero_hpz_partition_size")
    if size is not None:
        key, is_used = "zero_optimization.zero_hpz_partition_size", reader.zero["stage"] == 3
        number = max(1, reader.count(key, size))
        if is_used and number > 1:
            wire["secondary"] = number
        reader.row(key, size, f"wire.secondary={number}" if is_used or number == 1 else "only used in stage 3")
    if wire:
        reader.zero["wire"] = wire


def _translate_reduce_dtype(reader: Reader, top: Mapping[Any, Any]) -> str | None:
    if "communication_data_type" not in top:
        return None
    value = top["communication_data_type"]
    dtype = _DTYPES.get(value.lower()) if isinstance(value, str) else None
    if dtype is None:
        raise reader.error("communication_data_type", value, "is not supported; use fp32, bf16, fp16 or null")
    reader.zero["reduce_dtype"] = dtype
    reader.row("communication_data_type", value, f"reduce_dtype={dtype}")
    return dtype


def _translate_bucket(
    reader: Reader, block: Mapping[Any, Any], name: str, zero_key: str, dtype: str, *, minimum_bytes: int
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


def _translate_persistence(reader: Reader, block: Mapping[Any, Any]) -> None:
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


def _translate_reduce_scatter(reader: Reader, block: Mapping[Any, Any]) -> None:
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
