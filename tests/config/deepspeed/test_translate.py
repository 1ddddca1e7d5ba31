"""What becomes of a DeepSpeed file: every key mapped, reported or refused."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.config import files
from hf_zero.config.activations import Activations
from hf_zero.config.offload import Offload
from hf_zero.config.wire import Wire
from hf_zero.config.zero_config import LossScale, ZeroConfig, load_with_import, read_deepspeed
from hf_zero.errors import ConfigError
from tests.config.test_zero_config import MIB, write

# The file that transformers' documentation of DeepSpeed shows for stage 3, without its offload.
HF_STAGE3: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}

# Every key of zero_optimization with DeepSpeed's default, and a stage.
ZERO_DEFAULTS: dict[str, Any] = {
    "stage": 3,
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "sub_group_size": 1e9,
    "zero_hpz_partition_size": 1,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_module_granularity_threshold": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "load_from_fp32_weights": True,
    "ignore_unused_parameters": True,
    "memory_efficient_linear": True,
    "override_module_apply": True,
    "stage3_gather_16bit_weights_on_model_save": False,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "elastic_checkpoint": False,
    "round_robin_gradients": False,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "enable_sanity_checks": False,
    "overlap_comm": None,
    "offload_param": None,
    "offload_optimizer": None,
}


def leaves(block: dict[str, Any], prefix: str = "") -> set[str]:
    """The dotted names of all values that are not blocks."""
    names: set[str] = set()
    for key, value in block.items():
        names |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return names


def statuses(mapping: dict[str, Any]) -> dict[str, str]:
    return {row.key: row.status for row in read_deepspeed(mapping).rows}


def test_file_of_the_transformers_documentation_imports_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path, "ds.json", json.dumps(HF_STAGE3))
    config, imported = load_with_import(path)
    assert imported is not None and imported.config == config == ZeroConfig.load(path) == ZeroConfig.from_file(path)
    assert config == ZeroConfig(stage=3, loss_scale=LossScale(2.0**16, 1000, 2, minimum=1.0))
    assert imported.training == {"optim": "adamw_torch_fused", "lr_scheduler_type": "constant_with_warmup"}
    rows = {row.key for row in imported.rows}
    pinned = {"zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory"}
    assert leaves(HF_STAGE3) - pinned <= rows, "every key of the file has a row"
    assert not [row for row in imported.rows if row.status == "unsupported"]


def test_values_become_ours_and_the_trainers() -> None:
    imported = read_deepspeed(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 5e8,
                "stage3_prefetch_bucket_size": 5e7,
                "stage3_param_persistence_threshold": 1e5,
            },
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
            "gradient_clipping": 0.5,
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "dataloader_drop_last": True,
            "gradient_allreduce_op": "mean",
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": 1000,
                    "warmup_num_steps": 10,
                    "warmup_type": "linear",
                    "warmup_max_lr": 1e-3,
                },
            },
        }
    )
    assert imported.config == ZeroConfig(
        stage=3,
        bucket_bytes=2_000_000_000,
        prefetch_bytes=100_000_000,
        keep_whole_numel=100_000,
        compute_dtype="bfloat16",
        reduce_dtype="float32",
        expected_world_size=8,
    )
    assert imported.training == {
        "bf16": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "dataloader_drop_last": True,
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "max_steps": 1000,
        "warmup_steps": 10,
    }


def test_training_values_are_arguments_of_the_trainer() -> None:
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 1, "cos_min_ratio": 0.1}}
    for optimizer in (
        {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    ):
        imported = read_deepspeed(
            {**HF_STAGE3, "optimizer": optimizer, "scheduler": cosine, "bf16": {"enabled": False}}
        )
        assert set(imported.training) <= names
        TrainingArguments(output_dir="unused", use_cpu=True, **imported.training)
    assert imported.training["optim_args"] == "momentum=0.9,nesterov=True"
    assert imported.training["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}


def test_bytes_follow_the_dtype() -> None:
    block = {"stage": 2, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000}
    plain = read_deepspeed({"zero_optimization": block}).config
    assert (plain.bucket_bytes, plain.prefetch_bytes, plain.compute_dtype) == (4000, 4000, "auto")
    half = read_deepspeed({"zero_optimization": block, "bf16": {"enabled": True}}).config
    assert (half.bucket_bytes, half.prefetch_bytes, half.compute_dtype) == (2000, 2000, "bfloat16")
    auto = read_deepspeed({"zero_optimization": block, "bf16": {"enabled": "auto"}}).config
    assert (auto.bucket_bytes, auto.prefetch_bytes, auto.compute_dtype) == (2000, 2000, "auto")
    single = read_deepspeed({"zero_optimization": block, "bf16": {"enabled": False}}).config
    assert (single.bucket_bytes, single.prefetch_bytes, single.compute_dtype) == (4000, 4000, "float32")
    sent = read_deepspeed({"zero_optimization": block, "communication_data_type": "bf16"}).config
    assert (sent.bucket_bytes, sent.prefetch_bytes, sent.reduce_dtype) == (2000, 4000, "bfloat16")


def test_defaults_written_out_have_a_row_each_and_no_error() -> None:
    imported = read_deepspeed({"zero_optimization": ZERO_DEFAULTS})
    rows = {row.key.removeprefix("zero_optimization.") for row in imported.rows}
    assert set(ZERO_DEFAULTS) - {"offload_param", "offload_optimizer"} <= rows
    assert not [row for row in imported.rows if row.status == "unsupported"]
    assert imported.config.keep_whole_numel == 100_000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_is_the_same_stage(stage: int) -> None:
    assert read_deepspeed({"zero_optimization": {"stage": stage}}).config.stage == stage


def test_smallest_sizes_are_still_sizes() -> None:
    block = {"stage": 3, "reduce_bucket_size": 0, "stage3_prefetch_bucket_size": 0}
    config = read_deepspeed({"zero_optimization": block}).config
    assert (config.bucket_bytes, config.prefetch_bytes) == (1, 0)
    batch = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    assert read_deepspeed(batch).config.expected_world_size == 1
    steps = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 1, "warmup_num_steps": 0, "last_batch_iteration": -1},
    }
    training = read_deepspeed({"scheduler": steps}).training
    assert (training["max_steps"], training["warmup_steps"]) == (1, 0)


def test_precision_block_without_enabled_is_off() -> None:
    imported = read_deepspeed({"bf16": {}, "fp16": {"loss_scale": 0}})
    assert imported.training == {"bf16": False} and imported.config.compute_dtype == "float32"


@pytest.mark.parametrize("enabled", [True, "auto"])
def test_fp16_block_is_a_loss_scale_with_deepspeeds_defaults(enabled: object) -> None:
    imported = read_deepspeed({"fp16": {"enabled": enabled}})
    assert imported.config.loss_scale == LossScale(2.0**16, 1000, 2, False, 1.0)
    is_on = enabled is True
    assert imported.config.compute_dtype == ("float16" if is_on else "auto")
    assert imported.training == ({"fp16": True} if is_on else {})
    block = {"initial_scale_power": 10, "loss_scale_window": 50, "hysteresis": 3, "min_loss_scale": 4}
    imported = read_deepspeed({"fp16": {"enabled": enabled, "loss_scale": 0, "consecutive_hysteresis": True, **block}})
    assert imported.config.loss_scale == LossScale(1024.0, 50, 3, True, 4.0)
    notes = {row.key: (row.status, row.note) for row in imported.rows}
    assert notes["fp16.loss_scale_window"] == ("kept", "loss_scale.window=50")


def test_fp16_fixed_scale_and_float16_exchanges() -> None:
    block = {"enabled": True, "loss_scale": 128, "hysteresis": 2, "auto_cast": True}
    imported = read_deepspeed({"fp16": block, "bf16": {"enabled": False}, "communication_data_type": "fp16"})
    config = imported.config
    assert (config.loss_scale, config.compute_dtype, config.reduce_dtype) == (
        LossScale(128.0, None),
        "float16",
        "float16",
    )
    notes = {row.key: (row.status, row.note) for row in imported.rows}
    assert notes["fp16.hysteresis"] == ("kept", "not used: loss_scale is fixed")
    assert notes["fp16.auto_cast"][0] == "differs"


def test_auto_is_taken_from_the_trainer_and_said_so() -> None:
    notes = {row.key: row.note for row in read_deepspeed(HF_STAGE3).rows if row.value == "auto"}
    assert len(notes) == 16
    for key in (
        "fp16.enabled",
        "bf16.enabled",
        "gradient_clipping",
        "optimizer.params.lr",
        "gradient_accumulation_steps",
    ):
        assert notes[key] == "taken from the Trainer's arguments"


def test_stage_is_zero_where_absent() -> None:
    assert read_deepspeed({"train_micro_batch_size_per_gpu": 1}).config.stage == 0
    assert read_deepspeed({"zero_optimization": {}}).config.stage == 0


def test_persistence_is_of_stage_three_only() -> None:
    block = {"stage": 2, "stage3_param_persistence_threshold": 1e5}
    assert read_deepspeed({"zero_optimization": block}).config.keep_whole_numel == 0


# Values of the two keys (None: absent), our choice, and what became of each.
_SCATTER, _BUCKETS = "reduce_scatter", "use_multi_rank_bucket_allreduce"
REDUCTIONS: list[tuple[dict[str, Any], bool | str, list[str]]] = [
    ({}, True, []),
    ({_SCATTER: True}, True, ["kept: reduce_scatter=True"]),
    ({_SCATTER: False}, False, ["kept: reduce_scatter=False"]),
    ({_SCATTER: True, _BUCKETS: False}, "to_owner", ["kept: reduce_scatter=to_owner", "kept: reduce_scatter=to_owner"]),
    ({_SCATTER: True, _BUCKETS: True}, True, ["kept: reduce_scatter=True", "differs: .* DeepSpeed would all-reduce"]),
    ({_SCATTER: False, _BUCKETS: False}, False, ["kept: reduce_scatter=False", "kept: not used: whole gradients"]),
    ({_SCATTER: False, _BUCKETS: True}, False, ["kept: reduce_scatter=False", "kept: not used: whole gradients"]),
    ({_BUCKETS: True}, True, ["differs: .* DeepSpeed would all-reduce"]),
    ({_BUCKETS: False}, True, ['differs: .* write "reduce_scatter": true too']),
    ({_SCATTER: None, _BUCKETS: None}, True, ["kept: ", "kept: "]),
]


@pytest.mark.parametrize(("block", "choice", "fates"), REDUCTIONS)
def test_reduction_of_gradients_has_the_exchange_of_its_name(
    block: dict[str, Any], choice: bool | str, fates: list[str]
) -> None:
    for stage in (1, 2, 3):
        imported = read_deepspeed({"zero_optimization": {"stage": stage, **block}})
        assert imported.config.reduce_scatter == choice
        rows = [row for row in imported.rows if row.key.partition(".")[2] in (_SCATTER, _BUCKETS)]
        assert [row.key.partition(".")[2] for row in rows] == list(block)
        for row, fate in zip(rows, fates, strict=True):
            assert re.match(fate, f"{row.status}: {row.note}")


def test_reduction_of_gradients_is_of_sharded_stages_only() -> None:
    imported = read_deepspeed({"zero_optimization": {"stage": 0, _SCATTER: False, _BUCKETS: False}})
    assert imported.config == ZeroConfig(stage=0)
    notes = [(row.status, row.note) for row in imported.rows if row.key.partition(".")[2] in (_SCATTER, _BUCKETS)]
    assert notes == [("kept", "only used from stage 1 on")] * 2


def test_status_of_keys_without_influence_on_the_result() -> None:
    found = statuses(
        {
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": False,
                "contiguous_gradients": True,
                "zero_hpz_partition_size": 8,
                "mics_shard_size": 4,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "prescale_gradients": True,
            "gradient_predivide_factor": 2.0,
            "wall_clock_breakdown": True,
            "tensorboard": {"enabled": True, "output_path": "x"},
            "wandb": {"enabled": False},
            "data_types": {"grad_accum_dtype": "bf16"},
        }
    )
    zero = "zero_optimization."
    assert found == {
        f"{zero}stage": "kept",
        f"{zero}contiguous_gradients": "kept",
        f"{zero}mics_shard_size": "unsupported",
        f"{zero}overlap_comm": "differs",
        f"{zero}stage3_gather_16bit_weights_on_model_save": "kept",
        f"{zero}zero_hpz_partition_size": "kept",
        "data_types.grad_accum_dtype": "differs",
        "gradient_clipping": "differs",
        "gradient_predivide_factor": "differs",
        "prescale_gradients": "differs",
        "tensorboard.enabled": "differs",
        "wall_clock_breakdown": "differs",
        "wandb.enabled": "kept",
    }


def test_quantised_exchange_means_ours() -> None:
    block = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert ZeroConfig.from_dict({"zero_optimization": block}).wire == Wire("int8", "int4")
    assert ZeroConfig.from_dict({"zero_optimization": {**block, "zero_quantized_gradients": False}}).wire == Wire(
        "int8"
    )
    assert ZeroConfig.from_dict({"zero_optimization": {**block, "stage": 2}}).wire.is_exact
    second = {"zero_optimization": {**block, "zero_hpz_partition_size": 8}}
    assert ZeroConfig.from_dict(second).wire == Wire("int8", "int4", 8)
    assert ZeroConfig.from_dict({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}).wire.is_default


@pytest.mark.parametrize(
    ("block", "offload"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, {"optimizer": "host"}),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
            {"optimizer": "host", "pin": False},
        ),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.5},
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
            {"optimizer": "host", "parameters": "host", "ratio": 0.5},
        ),
        ({"stage": 1, "cpu_offload": True}, {"optimizer": "host"}),
        ({"stage": 3, "cpu_offload": False, "cpu_offload_param": True}, {"parameters": "host"}),
        ({"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}}, None),
        ({"stage": 0, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, None),
        ({"stage": 3, "offload_optimizer": {"device": "none"}}, None),
        (
            {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/x",
                    "ratio": 0.5,
                    "buffer_count": 5,
                    "pin_memory": False,
                },
                "offload_param": {"device": "nvme", "nvme_path": "/x", "buffer_count": 7, "max_in_cpu": 1e9},
            },
            {"optimizer": "disk", "parameters": "disk", "path": "/x", "ratio": 0.5, "slots": 5},
        ),
    ],
)
def test_offload_means_ours(block: dict[str, Any], offload: dict[str, Any] | None) -> None:
    found = ZeroConfig.from_dict({"zero_optimization": block}).offload
    assert found == Offload.from_value(offload)


def test_total_batch_with_auto_parts_is_not_checked() -> None:
    mapping = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    imported = read_deepspeed(mapping)
    assert imported.config.expected_world_size is None and imported.training == {}
    assert statuses(mapping)["train_batch_size"] == "differs"


def test_old_names_and_nulls_are_understood() -> None:
    mapping = {"bfloat16": {"enabled": True}, "optimizer": None, "scheduler": None, "gradient_clipping": None}
    imported = read_deepspeed({**mapping, "communication_data_type": None, "sparse_attention": None, "amp": None})
    assert imported.config == ZeroConfig(stage=0, compute_dtype="bfloat16")
    assert imported.training == {"bf16": True}


def test_import_takes_overrides_and_ours_has_none() -> None:
    config, imported = load_with_import({"zero_optimization": {"stage": 2}}, prefetch_bytes="1MiB")
    assert imported is not None and imported.config == config == ZeroConfig(stage=2, prefetch_bytes=MIB)
    assert load_with_import({"stage": 2}) == (ZeroConfig(stage=2), None)
    assert load_with_import(config) == (config, None)
    with pytest.raises(ConfigError, match="is not a DeepSpeed config"):
        read_deepspeed({"stage": 2})


def test_table_is_aligned_and_complete() -> None:
    imported = read_deepspeed({**HF_STAGE3, "aio": {("odd", "key"): object()}})
    notes = {row.key: row.note for row in imported.rows}
    assert notes["zero_optimization.contiguous_gradients"].startswith("gradients are reduced in contiguous memory")
    assert notes["wall_clock_breakdown"] == "", "what was not asked for needs no note"
    lines = imported.table().splitlines()
    assert len(lines) == len(imported.rows) + 1
    start = lines[0].index("here")
    assert {line[start:].split()[0] for line in lines[1:]} == {"kept", "differs"}
    assert any(line.split()[:3] == ["zero_optimization.sub_group_size", "1e+09", "differs"] for line in lines)
    assert any(line.split()[:3] == ["zero_optimization.overlap_comm", "true", "differs"] for line in lines)
    assert all(line[start - 2 : start] == "  " for line in lines)


@given(
    block=st.dictionaries(
        st.sampled_from(sorted({*ZERO_DEFAULTS, "offload_param", "leaf_module"})),
        st.none() | st.booleans() | st.integers() | st.floats() | st.just("auto") | st.lists(st.integers()),
    ),
    top=st.dictionaries(
        st.sampled_from(sorted(set(HF_STAGE3) - {"zero_optimization"})),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.dictionaries(st.sampled_from(["enabled", "type"]), st.text()),
    ),
)
def test_any_values_give_an_import_or_a_config_error(block: dict[str, Any], top: dict[str, Any]) -> None:
    try:
        imported = read_deepspeed({"zero_optimization": block, **top})
    except ConfigError:
        return
    assert imported.table() and ZeroConfig.from_dict(imported.config.to_dict()) == imported.config


def test_table_is_shown_once_on_the_first_rank_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, shown in (("1", 0), ("0", 1)):
        files.show_once.cache_clear()
        monkeypatch.setenv("RANK", rank)
        for _ in range(2):
            ZeroConfig.load({"zero_optimization": {"stage": 2}, "steps_per_print": 10})
        text = capsys.readouterr().err
        assert text.count("is a DeepSpeed file; what it means here") == shown
        assert text.count("steps_per_print") == shown


def test_activations_and_shared_layers_are_translated() -> None:
    block = {
        "partition_activations": True,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 24,
        "synchronize_checkpoint_boundary": True,
        "profile": False,
    }
    given = {**HF_STAGE3, "activation_checkpointing": block, "tensor_parallel": {"autotp_size": 4, "tp_grain_size": 64}}
    imported = read_deepspeed(given)
    assert imported.config.activations == Activations(partition=True)
    assert imported.config.tp_size == 4
    fates = {row.key: row.status for row in imported.rows}
    for name in block:
        assert fates[f"activation_checkpointing.{name}"] == "kept"
    assert fates["tensor_parallel.autotp_size"] == "kept"
    assert fates["tensor_parallel.tp_grain_size"] == "differs"
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.partition_activation'; did you mean"):
        read_deepspeed({**HF_STAGE3, "activation_checkpointing": {"partition_activation": True}})
    with pytest.raises(ConfigError, match=r"autotp_size.*whole number"):
        read_deepspeed({**HF_STAGE3, "tensor_parallel": {"autotp_size": 1.5}})
