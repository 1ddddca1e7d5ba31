"""DeepSpeed JSON: what each of its keys means here, said in words, key by key.

[Note: three fates of a key] A key whose meaning holds here is *kept*. One without influence on what is learned is
*differs* (something else happens instead) or *unsupported* (nothing does), with a line that says so. One that would
make training compute something else if it were ignored, or run out of the memory it was meant to save, is a
ConfigError: a run never changes silently. More precision than was asked for is not an error.

`translate` returns plain values; `hf_zero.config` makes a ZeroConfig of them, so that imports point one way.

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
from typing import Any, Literal

from hf_zero.errors import ConfigError

Status = Literal["kept", "differs", "unsupported"]

ABSENT = "(absent)"
"""The value of a row about a key that the file does not have, where DeepSpeed's default is another than ours."""


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
    """A DeepSpeed file in our words.

    Attributes:
        zero: keys and values of a ZeroConfig.
        training: values of the Trainer's arguments, by argument name.
        rows: what became of every key.
    """

    zero: dict[str, Any]
    training: dict[str, Any]
    rows: tuple[ImportRow, ...]


@dataclass(frozen=True)
class _Rule:
    """What to do with a key that needs no translation.

    Attributes:
        fate: the row's status, or "refused" for a ConfigError; where the value is in `harmless`, always "kept".
        note: what happens here instead, or why it is refused.
        harmless: values that ask for nothing, or for what happens anyway; null always is.
        switch: the value is a block, and this key in it is what counts.
        type: type that the value must have ("any": not checked).
    """

    fate: Status | Literal["refused"]
    note: str
    harmless: tuple[object, ...] = ()
    switch: str = ""
    type: Literal["flag", "number", "any"] = "any"


def _flag(fate: Status | Literal["refused"], note: str, harmless: bool | None = False) -> _Rule:
    """A rule for a boolean; `harmless=None`: neither value is."""
    return _Rule(fate, note, () if harmless is None else (harmless,), type="flag")


_TRAINER_LOGS = "the Trainer's own logging is used (report_to, logging_steps)"
_NO_REPORT = "no such report; hf_zero's ledger counts what really moved"
_BY_UNIT = "parameters are gathered and released by unit, ahead by prefetch_bytes"
_REDUCED = "gradients are reduced in contiguous memory, bucket_bytes at once"
_CHECKPOINTS = "checkpoints hold whole tensors; any number of ranks and any stage resumes them"
_SHARDED_ONLY = "only used from stage 1 on"
_NO_OFFLOAD = "not needed: nothing is offloaded"

_ZERO_RULES = {
    "allgather_bucket_size": _Rule("differs", _BY_UNIT, type="number"),
    "allgather_partitions": _flag("differs", _BY_UNIT, harmless=True),
    "contiguous_gradients": _flag("differs", _REDUCED, harmless=True),
    "cpu_offload": _flag("refused", "offload is not supported yet; remove it, or use more ranks"),
    "cpu_offload_param": _flag("refused", "offload is not supported yet; remove it, or use more ranks"),
    "cpu_offload_use_pin_memory": _Rule("kept", _NO_OFFLOAD),
    "elastic_checkpoint": _Rule("kept", _CHECKPOINTS),
    "enable_sanity_checks": _flag("differs", "hf_zero's own checks are always on"),
    "ignore_unused_parameters": _flag("differs", "unused parameters never stop training", harmless=True),
    "leaf_module": _Rule("differs", "whole modules are gathered together anyway; see the key 'units'"),
    "legacy_stage1": _flag("differs", "there is one engine for all stages"),
    "load_from_fp32_weights": _flag("differs", "masters are always read in their own dtype", harmless=True),
    "log_trace_cache_warnings": _flag("differs", _NO_REPORT),
    "memory_efficient_linear": _flag("differs", "torch's own linear is used; it holds no gathered weights", None),
    "mics_hierarchical_params_gather": _flag("unsupported", "parameters are gathered over all ranks at once"),
    "mics_shard_size": _Rule("unsupported", "parameters are sharded over all ranks", (-1, 0, 1), type="number"),
    "override_module_apply": _flag("differs", "apply() runs on shards; use GatheredParameters for whole weights", None),
    "overlap_comm": _Rule("differs", "parameters are gathered ahead of use (prefetch_bytes); no switch"),
    "pipeline_loading_checkpoint": _flag("differs", "every rank reads its own rows"),
    "round_robin_gradients": _flag("differs", "every rank owns rows of every parameter, so shards are even"),
    "save_muon_momentum_buffer_in_memory": _Rule("kept", _NO_OFFLOAD),
    "stage3_allgather_sequential": _flag("differs", _BY_UNIT),
    "stage3_gather_16bit_weights_on_model_save": _flag("kept", "a whole safetensors export is always written"),
    "stage3_gather_fp16_weights_on_model_save": _flag("kept", "a whole safetensors export is always written"),
    "stage3_max_live_parameters": _Rule("differs", _BY_UNIT, type="number"),
    "stage3_max_reuse_distance": _Rule("differs", _BY_UNIT, type="number"),
    "stage3_model_persistence_threshold": _Rule(
        "differs", "keep_whole_numel limits one parameter; their sum has no limit", type="number"
    ),
    "stage3_module_granularity_threshold": _Rule("differs", "see the key 'units'", (0,), type="number"),
    "stage3_partition_stream_chunk_size": _Rule("differs", "each rank reads only its own rows", (0,), type="number"),
    "stage3_use_all_reduce_for_fetch_params": _flag("differs", _BY_UNIT),
    "sub_group_size": _Rule("differs", "the optimizer steps over all rows of a rank at once", type="number"),
    "zenflow": _Rule("refused", "is not supported: its updates come late, so it trains differently; remove it"),
    "zero_hpz_partition_size": _Rule(
        "unsupported",
        "no size to choose: collectives: host (CPU) keeps whole parameters on every host",
        (0, 1),
        type="number",
    ),
    "zero_quantized_gradients": _flag("refused", "quantised exchange does not exist yet; set it to false"),
    "zero_quantized_nontrainable_weights": _flag("refused", "quantised weights do not exist yet; set it to false"),
    "zero_quantized_weights": _flag("refused", "quantised exchange does not exist yet; set it to false"),
    "zeropp_loco_param": _Rule("refused", "quantised exchange does not exist yet; remove it", ({},)),
}
_ZERO_TRANSLATED = (
    "offload_optimizer",
    "offload_param",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "use_multi_rank_bucket_allreduce",
)

_TOP_RULES = {
    "activation_checkpointing": _Rule(
        "differs", "it only acts on models that call DeepSpeed's checkpoint(); use the Trainer's gradient_checkpointing"
    ),
    "aio": _Rule("kept", _NO_OFFLOAD),
    "amp": _Rule("refused", "Apex is not supported; use bf16", (False, "auto"), "enabled"),
    "autotuning": _Rule("differs", "nothing is tuned", (False,), "enabled"),
    "checkpoint": _Rule("differs", _CHECKPOINTS),
    "comet": _Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "comms_logger": _Rule("differs", _NO_REPORT, (False,), "enabled"),
    "compile": _Rule("differs", "not compiled; use the Trainer's torch_compile", (False,), "deepcompile"),
    "compression_training": _Rule("refused", "compression changes the model; remove it", ({},)),
    "csv_monitor": _Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "curriculum_learning": _Rule("refused", "it changes the data; prepare them in the dataset", (False,), "enabled"),
    "data_efficiency": _Rule("refused", "it changes the data; prepare them in the dataset", (False,), "enabled"),
    "datastates_ckpt": _Rule("differs", _CHECKPOINTS),
    "disable_allgather": _flag("differs", _BY_UNIT),
    "dump_state": _flag("differs", _NO_REPORT),
    "eigenvalue": _Rule("kept", "only used by DeepSpeed's quantised training"),
    "elasticity": _Rule("refused", "it changes the batch size; set the batch size yourself", (False,), "enabled"),
    "expert_parallel": _Rule("refused", "expert parallelism is not supported; remove it", ({},)),
    "flops_profiler": _Rule("differs", _NO_REPORT, (False,), "enabled"),
    "gradient_predivide_factor": _Rule("differs", "the mean is the same; it is divided once", (1,), type="number"),
    "graph_harvesting": _flag("differs", "not captured; results are the same"),
    "hybrid_engine": _Rule("refused", "is not supported; remove it", (False,), "enabled"),
    "log_level": _Rule("differs", "set the level of the Python logger 'hf_zero'"),
    "managed_gradient_accumulation": _flag("differs", "accelerate or your loop decides when to step", True),
    "memory_breakdown": _flag("differs", _NO_REPORT),
    "monitor_config": _Rule("differs", _TRAINER_LOGS),
    "nebula": _Rule("differs", _CHECKPOINTS, (False,), "enabled"),
    "pipeline": _Rule("refused", "pipeline parallelism does not exist here; remove it", ({},)),
    "prescale_gradients": _flag("differs", "the mean is the same; it is divided once"),
    "progressive_layer_drop": _Rule("refused", "it changes the model; remove it", (False,), "enabled"),
    "quantize_training": _Rule("refused", "quantised training is not supported; remove it", (False,), "enabled"),
    "seq_parallel_communication_data_type": _Rule("kept", "there is no sequence parallelism"),
    "seq_parallel_comm_data_type": _Rule("kept", "there is no sequence parallelism"),
    "sequence_parallel_size": _Rule("refused", "sequence parallelism is not supported; remove it", (1,), type="number"),
    "sparse_attention": _Rule("refused", "it changes the model; remove it"),
    "sparse_gradients": _flag("differs", "gradients are exchanged dense"),
    "steps_per_print": _Rule("differs", _TRAINER_LOGS),
    "tensor_parallel": _Rule("refused", "tensor parallelism is not supported; remove it", (0, 1), "autotp_size"),
    "tensorboard": _Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "timers": _Rule("differs", _NO_REPORT),
    "torch_autocast": _Rule("refused", 'use "bf16": {"enabled": true}', (False,), "enabled"),
    "use_data_before_expert_parallelism": _Rule("kept", "there is no expert parallelism"),
    "vocabulary_size": _Rule("kept", "only used for a warning"),
    "wall_clock_breakdown": _flag("differs", _NO_REPORT),
    "wandb": _Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "weight_quantization": _Rule("refused", "quantised weights are not supported; remove it", ({},)),
    "zero_allow_untested_optimizer": _Rule("kept", "any elementwise optimizer is allowed"),
    "zero_force_ds_cpu_optimizer": _Rule("kept", _NO_OFFLOAD),
}
_TOP_TRANSLATED = (
    "bf16",
    "bfloat16",
    "communication_data_type",
    "data_types",
    "dataloader_drop_last",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
)
TOP_KEYS = frozenset({*_TOP_RULES, *_TOP_TRANSLATED})
"""The top-level keys by which a DeepSpeed config is recognised."""

_FP16_RULES = {
    key: _Rule("kept", "not used: float16 is not supported yet")
    for key in (
        *("auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads", "fused_mode", "hysteresis"),
        *("initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale"),
    )
}
_BF16_RULES = {
    "bf16_master_weights_and_grads": _flag(
        "refused", "is not supported; load the model in bfloat16 and set it to false"
    ),
    "bf16_optimizer_states": _flag("refused", "is not supported; set it to false"),
    "check_grad_overflow": _flag("refused", "steps are not skipped on overflow here; set it to false"),
    "immediate_grad_update": _flag("differs", "gradients are reduced as they are made", None),
}
_OFFLOAD_KEYS = (
    *("buffer_count", "buffer_size", "device", "fast_init", "max_in_cpu", "nvme_path", "pin_memory"),
    *("pipeline", "pipeline_read", "pipeline_write", "ratio", "super_offload", "cpuadam_cores_perc"),
)

# Trainer arguments of every optimizer, then what goes into its `optim_args`.
_OPTIMIZER_PARAMS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adagrad": ("eps", "lr_decay"),
    "adam": (),
    "adamw": (),
    "rmsprop": ("alpha", "centered", "eps", "momentum"),
    "sgd": ("dampening", "momentum", "nesterov"),
}
_ADAM_RULES = {
    "adam_w_mode": _flag("refused", "the Trainer has no Adam with L2 decay; use AdamW (true)", harmless=True),
    "amsgrad": _flag("refused", "the Trainer's AdamW has no such variant; set it to false"),
    "bias_correction": _flag("refused", "the Trainer's AdamW always corrects; set it to true", harmless=True),
    "max_grad_norm": _Rule("refused", "is no parameter of the optimizer; use the top-level 'gradient_clipping'"),
    "torch_adam": _flag("kept", "torch's AdamW is always used"),
}

_SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr"}
_NO_WARMUP_START = 'the Trainer\'s warm-up starts at 0; set it to 0 or "auto"'
_SCHEDULER_RULES = {
    "last_batch_iteration": _Rule("refused", "a schedule starts at its beginning; resume from a checkpoint", (-1,)),
    "warmup_min_lr": _Rule("refused", _NO_WARMUP_START, (0, "auto")),
    "warmup_min_ratio": _Rule("refused", _NO_WARMUP_START, (0, "auto")),
    "warmup_type": _Rule("refused", 'the Trainer\'s warm-up is linear; set it to "linear"', ("linear",)),
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_FROM_TRAINER = "taken from the Trainer's arguments"

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def translate(mapping: Mapping[Any, Any], source: str) -> Translation:
    """A DeepSpeed config in our words.

    Args:
        mapping: the file's content.
        source: where it comes from; the errors name it.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or means what would train differently here.
    """
    reader = _Reader(source)
    reader.refuse_unknown("", mapping, TOP_KEYS)
    present = {key: value for key, value in mapping.items() if value is not None or key in _TOP_RULES}
    _translate_precision(reader, present)
    _translate_zero(reader, present)
    _translate_batch(reader, present)
    _translate_gradients(reader, present)
    _translate_optimizer(reader, present)
    _translate_scheduler(reader, present)
    reader.judge("", present, _TOP_RULES)
    return Translation(reader.zero, reader.training, tuple(reader.rows))


def render_table(rows: Iterable[ImportRow]) -> str:
    """The rows as plain text, in aligned columns."""
    header = ("DeepSpeed key", "value", "here", "note")
    lines = [header, *((row.key, _as_json(row.value), row.status, row.note) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in lines
    )


def _as_json(value: object) -> str:
    if value == ABSENT:
        return ABSENT
    if isinstance(value, float):
        return f"{value:g}"
    text = json.dumps(value) if isinstance(value, (str, int, type(None))) else _SHORT.repr(value)
    return text if len(text) <= 32 else text[:29] + "..."


@dataclass
class _Reader:
    """One pass over a DeepSpeed config: collects what its keys mean here, and raises where they cannot be meant."""

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
        """A value that is the Trainer's argument of another name."""
        self.training[argument] = parsed
        self.row(key, value, f"{argument}={parsed}")

    def judge(self, prefix: str, block: Mapping[Any, Any], rules: Mapping[str, _Rule]) -> None:
        """Rows, or an error, for the keys that need no translation."""
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
        reader.refuse_unknown("fp16.", block, {"enabled", *_FP16_RULES})
        enabled = block.get("enabled", False)
        if enabled != "auto" and reader.flag("fp16.enabled", enabled):
            raise reader.error("fp16.enabled", True, "float16 with its loss scaling is not supported yet; use bf16")
        reader.row("fp16.enabled", enabled, _FROM_TRAINER if enabled == "auto" else "")
        reader.judge("fp16.", block, _FP16_RULES)
    name = "bf16" if "bf16" in top else "bfloat16"
    if name not in top:
        return
    block = reader.block(name, top[name])
    reader.refuse_unknown(f"{name}.", block, {"enabled", *_BF16_RULES})
    enabled = block.get("enabled", False)
    if enabled == "auto":
        reader.row(f"{name}.enabled", enabled, _FROM_TRAINER)
    else:
        dtype = "bfloat16" if reader.flag(f"{name}.enabled", enabled) else "float32"
        reader.zero["compute_dtype"] = dtype
        reader.training["bf16"] = enabled
        reader.row(f"{name}.enabled", enabled, f"compute_dtype={dtype}, bf16={enabled}")
    reader.judge(f"{name}.", block, _BF16_RULES)


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
    reader.refuse_unknown(prefix, block, {*_ZERO_RULES, *_ZERO_TRANSLATED})

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
    reader.judge(prefix, block, _ZERO_RULES)


def _refuse_offload(reader: _Reader, key: str, value: object) -> None:
    if value is None:
        return
    block = reader.block(key, value)
    reader.refuse_unknown(f"{key}.", block, _OFFLOAD_KEYS)
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
    """Elements of DeepSpeed to bytes of ours: what the buffer would have taken there."""
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

    DeepSpeed's `reduce_scatter` scatters nothing: it all-reduces a bucket that holds several ranks' rows, or reduces each
    rank's part to it where `use_multi_rank_bucket_allreduce` is false. Here it does what it says.
    """
    key, bucket_key = "zero_optimization.reduce_scatter", "zero_optimization.use_multi_rank_bucket_allreduce"
    scatters, is_bucketed = block.get("reduce_scatter"), block.get("use_multi_rank_bucket_allreduce")
    is_used = reader.zero["stage"] > 0
    if scatters is not None:
        choice = "to_owner" if reader.flag(key, scatters) and is_bucketed is False else scatters
        if is_used:
            reader.zero["reduce_scatter"] = choice
        reader.row(key, scatters, f"reduce_scatter={choice}" if is_used else _SHARDED_ONLY)
    elif "reduce_scatter" in block:
        reader.row(key, None, "")
    if is_bucketed is not None:
        reader.flag(bucket_key, is_bucketed)
        note, status = _note_of_buckets(scatters, is_bucketed) if is_used else (_SHARDED_ONLY, "kept")
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
    if name not in _OPTIMIZERS:
        known = "Adam, AdamW, SGD, Adagrad or RMSprop"
        raise reader.error("optimizer.type", kind, f"the Trainer cannot build it; use {known}, or remove the block")
    params = reader.block("optimizer.params", block.get("params", {}))
    is_adam = name in ("adam", "adamw")
    optim = ("adamw_torch" if params.get("torch_adam") is True else "adamw_torch_fused") if is_adam else name
    reader.argument("optimizer.type", kind, "optim", optim)
    known_params = {*_OPTIMIZER_PARAMS, *_OPTIMIZERS[name], *(("betas", "eps", *_ADAM_RULES) if is_adam else ())}
    reader.refuse_unknown("optimizer.params.", params, known_params)
    if "lr" not in params:
        note = f"learning_rate is {_FROM_TRAINER}, or the scheduler's; DeepSpeed would use its optimizer's default"
        reader.row("optimizer.params.lr", ABSENT, note, "differs")

    optim_args: dict[str, str] = {}
    for param, value in params.items():
        key = f"optimizer.params.{param}"
        if param in _ADAM_RULES:
            continue
        if value == "auto":
            reader.row(key, value, _FROM_TRAINER)
        elif param in _OPTIMIZER_PARAMS:
            reader.argument(key, value, _OPTIMIZER_PARAMS[param], float(reader.number(key, value)))
        elif is_adam:
            _translate_adam_param(reader, param, value)
        else:
            is_flag = param in ("nesterov", "centered")
            optim_args[param] = str(reader.flag(key, value) if is_flag else float(reader.number(key, value)))
            reader.row(key, value, "goes into optim_args")
    if optim_args:
        reader.training["optim_args"] = ",".join(f"{param}={value}" for param, value in optim_args.items())
    reader.judge("optimizer.params.", params, _ADAM_RULES if is_adam else {})


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
    if not isinstance(kind, str) or kind not in _SCHEDULERS:
        known = ", ".join(_SCHEDULERS)
        raise reader.error(
            "scheduler.type", kind, f"the Trainer cannot build it; use one of {known}, or remove the block"
        )
    params = reader.block("scheduler.params", block.get("params", {}))
    is_cosine = kind == "WarmupCosineLR"
    known_params = {*_SCHEDULER_RULES, "warmup_num_steps"}
    known_params |= {"cos_min_ratio"} if is_cosine else {"warmup_max_lr"}
    known_params |= set() if kind == "WarmupLR" else {"total_num_steps"}
    reader.refuse_unknown("scheduler.params.", params, known_params)
    note = f"lr_scheduler_type={_SCHEDULERS[kind]}; DeepSpeed's runs one step behind"
    reader.training["lr_scheduler_type"] = _SCHEDULERS[kind]
    reader.row("scheduler.type", kind, note, "differs")
    if is_cosine:
        ratio = float(reader.number("scheduler.params.cos_min_ratio", params.get("cos_min_ratio", 0.0001)))
        reader.training["lr_scheduler_kwargs"] = {"min_lr_rate": ratio}
        reader.row("scheduler.params.cos_min_ratio", params.get("cos_min_ratio", ABSENT), f"min_lr_rate={ratio}")
    _translate_scheduler_params(reader, kind, params)
    reader.judge("scheduler.params.", params, _SCHEDULER_RULES)


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
