"""Which keys of a DeepSpeed file are refused, and which are reported: none is passed over in silence."""

from typing import Any

import pytest

from hf_zero.config.deepspeed.rules import TOP_KEYS
from hf_zero.config.zero_config import ZeroConfig, read_deepspeed
from hf_zero.errors import ConfigError

# Keys whose block counts by one switch, or whose value does: (key, a value that asks for it, one that does not).
REFUSED = [
    ("amp", {"enabled": True, "opt_level": "O1"}, {"enabled": "auto"}),
    ("compression_training", {"weight_quantization": {}}, {}),
    ("curriculum_learning", {"enabled": True}, {"enabled": False}),
    ("data_efficiency", {"enabled": True}, {"enabled": False}),
    ("elasticity", {"enabled": True}, {"enabled": False, "max_train_batch_size": 8}),
    ("expert_parallel", {"size": 2}, {}),
    ("hybrid_engine", {"enabled": True}, {"enabled": False}),
    ("pipeline", {"stages": 2}, {}),
    ("progressive_layer_drop", {"enabled": True}, {"enabled": False}),
    ("quantize_training", {"enabled": True}, {"enabled": False}),
    ("sequence_parallel_size", 2, 1),
    ("sparse_attention", {"mode": "fixed"}, None),
    ("torch_autocast", {"enabled": True}, {"enabled": False}),
    ("weight_quantization", {"quantized_initialization": {}}, {}),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, None),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, False),
    ("zero_optimization.zeropp_loco_param", {"err_beta": 0.8}, {}),
    ("bf16.bf16_master_weights_and_grads", True, False),
    ("bf16.bf16_optimizer_states", True, False),
    ("bf16.check_grad_overflow", True, False),
    ("data_types.param_dtype", "bf16", None),
    ("data_types.buffer_dtype", "bf16", "auto"),
]

# Keys without influence on what is learned: (key, a value that asks, what happens then, one that does not ask).
REPORTED = [
    ("autotuning", {"enabled": True}, "differs", {"enabled": False}),
    ("checkpoint", {"load_universal": True}, "differs", None),
    ("comet", {"enabled": True}, "differs", {"enabled": False}),
    ("comms_logger", {"enabled": True}, "differs", {"enabled": False}),
    ("compile", {"deepcompile": True}, "differs", {"deepcompile": False}),
    ("csv_monitor", {"enabled": True}, "differs", {"enabled": False}),
    ("datastates_ckpt", {"host_cache_size": 1}, "differs", None),
    ("disable_allgather", True, "differs", False),
    ("dump_state", True, "differs", False),
    ("flops_profiler", {"enabled": True}, "differs", {"enabled": False}),
    ("gradient_predivide_factor", 2.0, "differs", 1.0),
    ("graph_harvesting", True, "differs", False),
    ("log_level", "info", "differs", None),
    ("managed_gradient_accumulation", False, "differs", True),
    ("memory_breakdown", True, "differs", False),
    ("monitor_config", {}, "differs", None),
    ("nebula", {"enabled": True}, "differs", {"enabled": False}),
    ("prescale_gradients", True, "differs", False),
    ("sparse_gradients", True, "differs", False),
    ("steps_per_print", 10, "differs", None),
    ("tensorboard", {"enabled": True}, "differs", {"enabled": False}),
    ("timers", {}, "differs", None),
    ("wall_clock_breakdown", True, "differs", False),
    ("wandb", {"enabled": True}, "differs", {"enabled": False}),
    ("bf16.immediate_grad_update", True, "differs", None),
    ("data_types.grad_accum_dtype", "bf16", "differs", "fp32"),
    ("zero_optimization.allgather_bucket_size", 5e8, "differs", None),
    ("zero_optimization.allgather_partitions", False, "differs", True),
    ("zero_optimization.contiguous_gradients", False, "differs", True),
    ("zero_optimization.enable_sanity_checks", True, "differs", False),
    ("zero_optimization.ignore_unused_parameters", False, "differs", True),
    ("zero_optimization.leaf_module", {"classes": ["Experts"]}, "differs", None),
    ("zero_optimization.legacy_stage1", True, "differs", False),
    ("zero_optimization.load_from_fp32_weights", False, "differs", True),
    ("zero_optimization.log_trace_cache_warnings", True, "differs", False),
    ("zero_optimization.memory_efficient_linear", True, "differs", None),
    ("zero_optimization.mics_hierarchical_params_gather", True, "unsupported", False),
    ("zero_optimization.mics_shard_size", 4, "unsupported", -1),
    ("zero_optimization.override_module_apply", True, "differs", None),
    ("zero_optimization.overlap_comm", True, "differs", None),
    ("zero_optimization.pipeline_loading_checkpoint", True, "differs", False),
    ("zero_optimization.round_robin_gradients", True, "differs", False),
    ("zero_optimization.stage3_allgather_sequential", True, "differs", False),
    ("zero_optimization.stage3_max_live_parameters", 1e9, "differs", None),
    ("zero_optimization.stage3_max_reuse_distance", "auto", "differs", None),
    ("zero_optimization.stage3_model_persistence_threshold", 1e6, "differs", None),
    ("zero_optimization.stage3_module_granularity_threshold", 5, "differs", 0),
    ("zero_optimization.stage3_partition_stream_chunk_size", 5, "differs", 0),
    ("zero_optimization.stage3_use_all_reduce_for_fetch_params", True, "differs", False),
    ("zero_optimization.sub_group_size", 1e9, "differs", None),
]


def nested(key: str, value: object) -> dict[str, Any]:
    """A DeepSpeed config with one value at a dotted path."""
    block, _, name = key.rpartition(".")
    return {block: {name: value}} if block else {key: value}


def status_of(key: str, value: object) -> str:
    """The status of the row about a key, or about the switch in its block."""
    found = {row.status for row in read_deepspeed(nested(key, value)).rows if f"{row.key}.".startswith(f"{key}.")}
    assert len(found) <= 1, "one key, one fate"
    return found.pop() if found else "kept"


@pytest.mark.parametrize(("key", "asking", "not_asking"), REFUSED)
def test_refused_key_is_an_error_only_where_it_asks(key: str, asking: object, not_asking: object) -> None:
    assert status_of(key, not_asking) == "kept"
    with pytest.raises(ConfigError, match=f"^the given mapping: key '{key}"):
        read_deepspeed(nested(key, asking))


@pytest.mark.parametrize(("key", "asking", "status", "not_asking"), REPORTED)
def test_reported_key_has_its_row(key: str, asking: object, status: str, not_asking: object) -> None:
    assert status_of(key, asking) == status
    assert status_of(key, not_asking) == "kept"


def test_every_known_key_has_a_fate_under_test() -> None:
    translated = {"bf16", "bfloat16", "communication_data_type", "data_types", "dataloader_drop_last", "fp16"}
    translated |= {
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "optimizer",
        "scheduler",
    }
    translated |= {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
    translated |= {"activation_checkpointing", "tensor_parallel"}
    inert: dict[str, Any] = {
        "aio": {},
        "eigenvalue": {},
        "vocabulary_size": 7,
        "use_data_before_expert_parallelism": True,
    }
    inert |= {"seq_parallel_communication_data_type": "fp32", "seq_parallel_comm_data_type": "fp32"}
    inert |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    for key, value in inert.items():
        assert status_of(key, value) == "kept"
    tested = {str(key).split(".")[0] for key, *_ in [*REFUSED, *REPORTED]}
    assert translated | set(inert) | tested == TOP_KEYS


def test_default_that_is_not_ours_has_a_row() -> None:
    absent = {
        row.key
        for row in read_deepspeed({"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupDecayLR"}}).rows
        if row.value == "(absent)" and row.status == "differs"
    }
    assert absent == {
        "gradient_clipping",
        "optimizer.params.lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.warmup_type",
    }


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "'bf16.enabled': True: fp16.enabled is true as well"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "'fp16.hysteresis': 0: is not a number of at least 1"),
        ({"fp16": {"enabled": True, "loss_scale": "big"}}, "'fp16.loss_scale': 'big': is not a number"),
        ({"fp16": {"enabled": "auto", "fp16_master_weights_and_grads": True}}, "masters are float32 here"),
        ({"fp16": {"enabled": True, "scale": 1}}, "unknown key 'fp16.scale'"),
        ({"bf16": {"enabled": 1}}, "'bf16.enabled': 1: is not a boolean"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
        ({"bf16": True}, "'bf16': True: is not a block"),
        ({"communication_data_type": "fp8"}, "'communication_data_type': 'fp8'"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "data_types.grad_accum_dtype"),
        ({"gradient_clipping": -1}, "'gradient_clipping': -1: is not a number of at least 0"),
        ({"gradient_clipping": True}, "'gradient_clipping': True"),
        ({"gradient_allreduce_op": "max"}, "use mean or sum"),
        ({"zero_optimization": True}, 'write {"stage": 1}'),
        ({"zero_optimization": {"stage": 4}}, "'zero_optimization.stage': 4: is not a stage"),
        ({"zero_optimization": {"stage": True}}, "'zero_optimization.stage': True: is not a stage"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "ssd"}}},
            "offload_optimizer.device': 'ssd': is not a place; use none, cpu or nvme",
        ),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": []}}}, "is not a place"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "ratio": "x"}}},
            "offload_param.ratio': 'x': is not a number",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param.nvme_path': None: must be one folder",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                    "offload_param": {"device": "nvme", "nvme_path": "/b"},
                }
            },
            "offload_param.nvme_path': '/b': must be one folder",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload': True: is not supported",
        ),
        ({"zero_optimization": {"stage": 1, "cpu_offload": 1}}, "cpu_offload': 1: is not a boolean"),
        ({"zero_optimization": {"zero_quantized_weights": 1}}, "zero_quantized_weights': 1: is not a boolean"),
        ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "quantised weights do not exist yet"),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size': 'big': is not a number"),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, "reduce_bucket_size': 1.5: is not a whole number"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'zero_optimization.overlap_comm'?"),
        ({"zero_optimization": {"use_multi_rank_bucket_allreduce": 1}}, "allreduce': 1: is not a boolean"),
        ({"zero_optimization": {"reduce_scatter": "yes"}}, "reduce_scatter': 'yes': is not a boolean"),
        (
            {"zero_optimization": {"offload_param": {"devise": "none"}}},
            "did you mean 'zero_optimization.offload_param.device'",
        ),
        (
            {"zero_optimization": {}, "gradient_cliping": 1},
            "unknown key 'gradient_cliping'; did you mean 'gradient_clipping'",
        ),
        ({"zero_optimization": {}, "xyzzy": 1}, "unknown key 'xyzzy'; hf_zero knows no such DeepSpeed key"),
        ({"zero_optimization": {}, 3: 1}, "unknown key '3'"),
        ({"amp": {"enabled": True}}, "'amp.enabled': True"),
        ({"sparse_attention": {"mode": "fixed"}}, "'sparse_attention'"),
        ({"compression_training": {"weight_quantization": {}}}, "'compression_training'"),
        ({"pipeline": {"stages": 2}}, "'pipeline'"),
        ({"sequence_parallel_size": 2}, "'sequence_parallel_size': 2"),
        ({"train_batch_size": 32}, "'train_batch_size': 32: needs the number of ranks"),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            "'train_batch_size': 7: is not a multiple",
        ),
        ({"train_micro_batch_size_per_gpu": 0}, "is not a number of at least 1"),
        ({"optimizer": {"type": "OneBitAdam"}}, "'optimizer.type': 'OneBitAdam': the Trainer cannot build it"),
        ({"optimizer": {"params": {"lr": 1}}}, "'optimizer.type': None"),
        ({"optimizer": {"type": ["AdamW"]}}, "'optimizer.type'"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "no Adam with L2 decay"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "is not a pair of numbers"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "use the top-level 'gradient_clipping'"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}}, "unknown key 'optimizer.params.betas'"),
        ({"scheduler": {"type": "OneCycle"}}, "'scheduler.type': 'OneCycle': the Trainer cannot build it"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, "the Trainer's warm-up is linear"),
        ({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 5}}}, "resume from a checkpoint"),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1}}},
            "the Trainer's warm-up starts at 0",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}}, "the Trainer's warm-up starts at 0"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}},
            "unknown key 'scheduler.params.total_num",
        ),
    ],
)
def test_key_that_would_change_the_result_is_an_error(mapping: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(mapping, source="ds.json")
    assert str(caught.value).startswith("ds.json: ")
    assert message.split(" .* ")[0] in str(caught.value) and message.split(" .* ")[-1] in str(caught.value)


def test_misspelt_block_is_recognised_in_the_advice() -> None:
    with pytest.raises(ConfigError, match="unknown key 'zero_optimisation'; did you mean 'zero_optimization'"):
        ZeroConfig.load({"zero_optimisation": {"stage": 2}})
