"""What each DeepSpeed key asks for, and what becomes of it here: the table that `deepspeed` applies.

Source: DeepSpeed 0.19, `runtime/config.py`, `runtime/zero/config.py`, `runtime/lr_schedules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["kept", "differs", "unsupported"]


@dataclass(frozen=True)
class Rule:
    """What to do with a key that needs no translation.

    Attributes:
        fate: the row's status, or "refused" for a ConfigError; a value in `harmless` is always "kept".
        note: what happens here instead, or why it is refused.
        harmless: values that ask for nothing, or for what happens anyway; null is always harmless.
        switch: if set, the value is a block, and this key in it is what counts.
        type: type that the value must have ("any": not checked).
    """

    fate: Status | Literal["refused"]
    note: str
    harmless: tuple[object, ...] = ()
    switch: str = ""
    type: Literal["flag", "number", "any"] = "any"


def _flag(fate: Status | Literal["refused"], note: str, harmless: bool | None = False) -> Rule:
    """A rule for a boolean; `harmless=None`: neither value is harmless."""
    return Rule(fate, note, () if harmless is None else (harmless,), type="flag")


_TRAINER_LOGS = "the Trainer's own logging is used (report_to, logging_steps)"
_NO_REPORT = "no such report; hf_zero's ledger counts what really moved"
_BY_UNIT = "parameters are gathered and released by unit, ahead by prefetch_bytes"
_REDUCED = "gradients are reduced in contiguous memory, bucket_bytes at once"
_CHECKPOINTS = "checkpoints hold whole tensors; any number of ranks and any stage resumes them"
SHARDED_ONLY = "only used from stage 1 on"
_NO_OFFLOAD = "not needed: nothing is offloaded"

ZERO_RULES = {
    "allgather_bucket_size": Rule("differs", _BY_UNIT, type="number"),
    "allgather_partitions": _flag("differs", _BY_UNIT, harmless=True),
    "contiguous_gradients": _flag("differs", _REDUCED, harmless=True),
    "cpu_offload_use_pin_memory": Rule("kept", _NO_OFFLOAD),
    "elastic_checkpoint": Rule("kept", _CHECKPOINTS),
    "enable_sanity_checks": _flag("differs", "hf_zero's own checks are always on"),
    "ignore_unused_parameters": _flag("differs", "unused parameters never stop training", harmless=True),
    "leaf_module": Rule("differs", "whole modules are gathered together anyway; see the key 'units'"),
    "legacy_stage1": _flag("differs", "there is one engine for all stages"),
    "load_from_fp32_weights": _flag("differs", "masters are always read in their own dtype", harmless=True),
    "log_trace_cache_warnings": _flag("differs", _NO_REPORT),
    "memory_efficient_linear": _flag("differs", "torch's own linear is used; it holds no gathered weights", None),
    "mics_hierarchical_params_gather": _flag("unsupported", "parameters are gathered over all ranks at once"),
    "mics_shard_size": Rule("unsupported", "parameters are sharded over all ranks", (-1, 0, 1), type="number"),
    "override_module_apply": _flag("differs", "apply() runs on shards; use GatheredParameters for whole weights", None),
    "overlap_comm": Rule("differs", "parameters are gathered ahead of use (prefetch_bytes); no switch"),
    "pipeline_loading_checkpoint": _flag("differs", "every rank reads its own rows"),
    "round_robin_gradients": _flag("differs", "every rank owns rows of every parameter, so shards are even"),
    "save_muon_momentum_buffer_in_memory": Rule("kept", _NO_OFFLOAD),
    "stage3_allgather_sequential": _flag("differs", _BY_UNIT),
    "stage3_gather_16bit_weights_on_model_save": _flag("kept", "a whole safetensors export is always written"),
    "stage3_gather_fp16_weights_on_model_save": _flag("kept", "a whole safetensors export is always written"),
    "stage3_max_live_parameters": Rule("differs", _BY_UNIT, type="number"),
    "stage3_max_reuse_distance": Rule("differs", _BY_UNIT, type="number"),
    "stage3_model_persistence_threshold": Rule(
        "differs", "keep_whole_numel limits one parameter; their sum has no limit", type="number"
    ),
    "stage3_module_granularity_threshold": Rule("differs", "see the key 'units'", (0,), type="number"),
    "stage3_partition_stream_chunk_size": Rule("differs", "each rank reads only its own rows", (0,), type="number"),
    "stage3_use_all_reduce_for_fetch_params": _flag("differs", _BY_UNIT),
    "sub_group_size": Rule("differs", "the optimizer steps over all rows of a rank at once", type="number"),
    "zenflow": Rule("refused", "is not supported: its updates come late, so it trains differently; remove it"),
    "zero_quantized_nontrainable_weights": _flag("refused", "quantised weights do not exist yet; set it to false"),
    "zeropp_loco_param": Rule("refused", "errors of quantised gradients are not fed back here; remove it", ({},)),
}
ZERO_TRANSLATED = (
    "cpu_offload",
    "cpu_offload_param",
    "offload_optimizer",
    "offload_param",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_weights",
)

_SLABS = "parts of one shape lie side by side in memory that is made once; nothing to set"
ACTIVATION_RULES = {
    "contiguous_memory_optimization": _flag("kept", _SLABS),
    "number_checkpoints": Rule("kept", _SLABS),
    "profile": _flag("differs", _NO_REPORT),
    "profile_backward": _flag("differs", _NO_REPORT),
    "synchronize_checkpoint_boundary": _flag("kept", "ranks meet in each gather"),
}
ACTIVATION_TRANSLATED = ("cpu_checkpointing", "partition_activations")

TOP_RULES = {
    "aio": Rule("kept", "threads read and write past the page cache; nothing to tune"),
    "amp": Rule("refused", "Apex is not supported; use bf16", (False, "auto"), "enabled"),
    "autotuning": Rule("differs", "nothing is tuned", (False,), "enabled"),
    "checkpoint": Rule("differs", _CHECKPOINTS),
    "comet": Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "comms_logger": Rule("differs", _NO_REPORT, (False,), "enabled"),
    "compile": Rule("differs", "not compiled; use the Trainer's torch_compile", (False,), "deepcompile"),
    "compression_training": Rule("refused", "compression changes the model; remove it", ({},)),
    "csv_monitor": Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "curriculum_learning": Rule("refused", "it changes the data; prepare them in the dataset", (False,), "enabled"),
    "data_efficiency": Rule("refused", "it changes the data; prepare them in the dataset", (False,), "enabled"),
    "datastates_ckpt": Rule("differs", _CHECKPOINTS),
    "disable_allgather": _flag("differs", _BY_UNIT),
    "dump_state": _flag("differs", _NO_REPORT),
    "eigenvalue": Rule("kept", "only used by DeepSpeed's quantised training"),
    "elasticity": Rule("refused", "it changes the batch size; set the batch size yourself", (False,), "enabled"),
    "expert_parallel": Rule("refused", "remove it; for models of transformers, ep_size means it", ({},)),
    "flops_profiler": Rule("differs", _NO_REPORT, (False,), "enabled"),
    "gradient_predivide_factor": Rule("differs", "the mean is the same; it is divided once", (1,), type="number"),
    "graph_harvesting": _flag("differs", "not captured; results are the same"),
    "hybrid_engine": Rule("refused", "is not supported; remove it", (False,), "enabled"),
    "log_level": Rule("differs", "set the level of the Python logger 'hf_zero'"),
    "managed_gradient_accumulation": _flag("differs", "accelerate or your loop decides when to step", True),
    "memory_breakdown": _flag("differs", _NO_REPORT),
    "monitor_config": Rule("differs", _TRAINER_LOGS),
    "nebula": Rule("differs", _CHECKPOINTS, (False,), "enabled"),
    "pipeline": Rule("refused", "pipeline parallelism does not exist here; remove it", ({},)),
    "prescale_gradients": _flag("differs", "the mean is the same; it is divided once"),
    "progressive_layer_drop": Rule("refused", "it changes the model; remove it", (False,), "enabled"),
    "quantize_training": Rule("refused", "quantised training is not supported; remove it", (False,), "enabled"),
    "seq_parallel_communication_data_type": Rule("kept", "there is no sequence parallelism"),
    "seq_parallel_comm_data_type": Rule("kept", "there is no sequence parallelism"),
    "sequence_parallel_size": Rule("refused", "remove it, and set sp_size instead", (1,), type="number"),
    "sparse_attention": Rule("refused", "it changes the model; remove it"),
    "sparse_gradients": _flag("differs", "gradients are exchanged dense"),
    "steps_per_print": Rule("differs", _TRAINER_LOGS),
    "tensorboard": Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "timers": Rule("differs", _NO_REPORT),
    "torch_autocast": Rule("refused", 'use "bf16": {"enabled": true}', (False,), "enabled"),
    "use_data_before_expert_parallelism": Rule("kept", "ranks that share experts are next to each other"),
    "vocabulary_size": Rule("kept", "only used for a warning"),
    "wall_clock_breakdown": _flag("differs", _NO_REPORT),
    "wandb": Rule("differs", _TRAINER_LOGS, (False,), "enabled"),
    "weight_quantization": Rule("refused", "quantised weights are not supported; remove it", ({},)),
    "zero_allow_untested_optimizer": Rule("kept", "any elementwise optimizer is allowed"),
    "zero_force_ds_cpu_optimizer": Rule("kept", _NO_OFFLOAD),
}
_TOP_TRANSLATED = (
    "activation_checkpointing",
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
    "tensor_parallel",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
)
TOP_KEYS = frozenset({*TOP_RULES, *_TOP_TRANSLATED})
"""The top-level keys by which a DeepSpeed config is recognised."""

FP16_RULES = {
    "auto_cast": _flag("differs", "the Trainer's and accelerate's autocast casts inputs", None),
    "fp16_master_weights_and_grads": _flag("refused", "masters are float32 here; set it to false"),
    "fused_mode": _flag("differs", "gradients are unscaled once, before the optimizer's step", None),
}
FP16_TRANSLATED = (
    *("consecutive_hysteresis", "hysteresis", "initial_scale_power"),
    *("loss_scale", "loss_scale_window", "min_loss_scale"),
)
BF16_RULES = {
    "bf16_master_weights_and_grads": _flag(
        "refused", "is not supported; load the model in bfloat16 and set it to false"
    ),
    "bf16_optimizer_states": _flag("refused", "is not supported; set it to false"),
    "check_grad_overflow": _flag("refused", "steps are not skipped on overflow here; set it to false"),
    "immediate_grad_update": _flag("differs", "gradients are reduced as they are made", None),
}
_SLOTS = "states are streamed through 'slots' of 'slot_bytes'"
OFFLOAD_RULES = {
    "buffer_size": Rule("differs", _SLOTS),
    "cpuadam_cores_perc": Rule("differs", "torch's own optimizers are used"),
    "fast_init": _flag("differs", "states are made in the first step"),
    "max_in_cpu": Rule("differs", "the system keeps in memory what fits"),
    "pipeline": _flag("differs", "reads, steps and writes always overlap", None),
    "pipeline_read": _flag("differs", "reads, steps and writes always overlap", None),
    "pipeline_write": _flag("differs", "reads, steps and writes always overlap", None),
    "super_offload": _flag("refused", "is not supported; set it to false"),
}
OFFLOAD_TRANSLATED = ("buffer_count", "device", "nvme_path", "pin_memory", "ratio")

# Trainer arguments of every optimizer, then what goes into its `optim_args`.
OPTIMIZER_PARAMS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adagrad": ("eps", "lr_decay"),
    "adam": (),
    "adamw": (),
    "rmsprop": ("alpha", "centered", "eps", "momentum"),
    "sgd": ("dampening", "momentum", "nesterov"),
}
ADAM_RULES = {
    "adam_w_mode": _flag("refused", "the Trainer has no Adam with L2 decay; use AdamW (true)", harmless=True),
    "amsgrad": _flag("refused", "the Trainer's AdamW has no such variant; set it to false"),
    "bias_correction": _flag("refused", "the Trainer's AdamW always corrects; set it to true", harmless=True),
    "max_grad_norm": Rule("refused", "is no parameter of the optimizer; use the top-level 'gradient_clipping'"),
    "torch_adam": _flag("kept", "torch's AdamW is always used"),
}

SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr"}
_NO_WARMUP_START = 'the Trainer\'s warm-up starts at 0; set it to 0 or "auto"'
SCHEDULER_RULES = {
    "last_batch_iteration": Rule("refused", "a schedule starts at its beginning; resume from a checkpoint", (-1,)),
    "warmup_min_lr": Rule("refused", _NO_WARMUP_START, (0, "auto")),
    "warmup_min_ratio": Rule("refused", _NO_WARMUP_START, (0, "auto")),
    "warmup_type": Rule("refused", 'the Trainer\'s warm-up is linear; set it to "linear"', ("linear",)),
}

OUR_NAMES = {
    "reduce_bucket_size": "'bucket_bytes', in bytes",
    "stage3_param_persistence_threshold": "'keep_whole_numel'",
    "stage3_prefetch_bucket_size": "'prefetch_bytes', in bytes",
    "communication_data_type": "'reduce_dtype'",
    "use_multi_rank_bucket_allreduce": "'reduce_scatter', with true, false or to_owner",
}
