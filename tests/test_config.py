"""ZeroConfig and its files: round trips, mistakes as one ConfigError each, and what a DeepSpeed file becomes."""

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.config import StagePolicy, UnitGrouping, ZeroConfig, load_with_import, read_deepspeed
from hf_zero.deepspeed_rules import TOP_KEYS
from hf_zero.errors import ConfigError

ROOT = Path(__file__).parents[1]
MIB = 2**20

unit_groupings = st.one_of(
    st.just(UnitGrouping()),
    st.lists(st.from_regex(r"[A-Z][A-Za-z0-9_]{0,20}", fullmatch=True), min_size=1, max_size=3).map(
        lambda names: UnitGrouping(class_names=tuple(names))
    ),
    st.integers(1, 2**40).map(lambda numel: UnitGrouping(min_numel=numel)),
)


@st.composite
def configs(draw: st.DrawFn) -> ZeroConfig:
    stage = draw(st.integers(0, 3))
    return ZeroConfig(
        stage=stage,
        units=draw(unit_groupings),
        keep_whole_numel=draw(st.integers(0, 2**40)),
        prefetch_bytes=draw(st.integers(0, 2**63 - 1)),
        bucket_bytes=draw(st.integers(1, 2**63 - 1)),
        compute_dtype=draw(st.sampled_from(("auto", "float32", "bfloat16"))),
        master_dtype=draw(st.sampled_from(("auto", "float32"))),
        reduce_dtype=draw(st.sampled_from(("auto", "float32", "bfloat16"))),
        gradient_reduction=draw(st.sampled_from(("mean", "sum"))),
        collectives=draw(st.sampled_from(("auto", "native", "pairwise"))),
        timeout_s=draw(st.floats(1e-6, 1e9)),
        reduce_scatter=draw(st.sampled_from((True, False, "to_owner"))) if stage else True,
        reshard_after_forward=stage < 3 or draw(st.booleans()),
        expected_world_size=draw(st.none() | st.integers(1, 2**20)),
        async_save=draw(st.booleans()),
    )


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ---- our format ------------------------------------------------------------------------------------------------------


@given(configs())
def test_to_dict_round_trips_through_dict_json_yaml_and_pickle(config: ZeroConfig) -> None:
    plain = config.to_dict()
    assert ZeroConfig.from_dict(plain) == config
    assert ZeroConfig.load(json.dumps(plain)) == config
    assert ZeroConfig.from_dict(yaml.safe_load(yaml.safe_dump(plain))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(ZeroConfig.from_dict(plain)) == hash(config)


def test_defaults_are_stage_three_with_float32_masters() -> None:
    config = ZeroConfig()
    assert (config.stage, config.master_dtype, config.reduce_dtype) == (3, "float32", "float32")
    assert (config.prefetch_bytes, config.bucket_bytes, config.timeout_s) == (64 * MIB, 64 * MIB, 120.0)
    assert config.units == UnitGrouping() and config.expected_world_size is None


@pytest.mark.parametrize(
    ("stage", "policy"),
    [
        (0, StagePolicy(shards_optimizer=False, shards_gradients=False, shards_parameters=False)),
        (1, StagePolicy(shards_optimizer=True, shards_gradients=False, shards_parameters=False)),
        (2, StagePolicy(shards_optimizer=True, shards_gradients=True, shards_parameters=False)),
        (3, StagePolicy(shards_optimizer=True, shards_gradients=True, shards_parameters=True)),
    ],
)
def test_policy_of_each_stage(stage: int, policy: StagePolicy) -> None:
    assert ZeroConfig(stage=stage).policy == policy


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("64MiB", 64 * MIB),
        ("1GiB", 2**30),
        ("1.5 gib", 3 * 2**29),
        ("500MB", 500_000_000),
        ("2KB", 2000),
        ("7B", 7),
        ("5e7", 50_000_000),
        ("12", 12),
        (5e7, 50_000_000),
        (12, 12),
    ],
)
def test_byte_sizes_are_read_as_written(written: object, num_bytes: int) -> None:
    config = ZeroConfig.from_dict({"prefetch_bytes": written, "bucket_bytes": written})
    assert (config.prefetch_bytes, config.bucket_bytes) == (num_bytes, num_bytes)
    assert type(config.prefetch_bytes) is int


@pytest.mark.parametrize(
    "written",
    ["64 megabytes", "5ib", "64M", "-1", "-1MiB", "1e999", "9e18GiB", 2**63, "1.5", "", True, float("nan"), None, []],
)
def test_byte_sizes_that_are_none_are_refused(written: object) -> None:
    with pytest.raises(ConfigError, match=r"^given: key 'prefetch_bytes': .* is not a number of bytes; use .*64MiB"):
        ZeroConfig.from_dict({"prefetch_bytes": written}, source="given")


def test_byte_sizes_zero_prefetches_nothing_but_is_no_bucket() -> None:
    assert ZeroConfig(prefetch_bytes=0).prefetch_bytes == 0
    with pytest.raises(ConfigError, match="key 'bucket_bytes': 0 is not a number of bytes"):
        ZeroConfig(bucket_bytes=0)


@pytest.mark.parametrize("written", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_aliases_become_one_name(written: Any) -> None:
    config = ZeroConfig(compute_dtype=written, reduce_dtype=written)
    assert (config.compute_dtype, config.reduce_dtype) == ("bfloat16", "bfloat16")


def test_dtype_fp32_is_float32_for_every_dtype_field() -> None:
    config = ZeroConfig.from_dict({"compute_dtype": "fp32", "master_dtype": torch.float32, "reduce_dtype": "fp32"})
    assert {config.compute_dtype, config.master_dtype, config.reduce_dtype} == {"float32"}


@pytest.mark.parametrize("written", ["float16", "fp16", torch.float16])
@pytest.mark.parametrize("key", ["compute_dtype", "master_dtype", "reduce_dtype"])
def test_dtype_float16_is_refused_with_a_way_out(key: str, written: object) -> None:
    with pytest.raises(ConfigError, match=f"key '{key}': .*not supported yet; use bfloat16"):
        ZeroConfig.from_dict({key: written})


@pytest.mark.parametrize(
    ("written", "grouping"),
    [
        ("auto", UnitGrouping()),
        (["LlamaDecoderLayer"], UnitGrouping(class_names=("LlamaDecoderLayer",))),
        (("A", "B"), UnitGrouping(class_names=("A", "B"))),
        ({"min_numel": 1_000_000}, UnitGrouping(min_numel=1_000_000)),
        ({"min_numel": "1e6"}, UnitGrouping(min_numel=1_000_000)),
    ],
)
def test_units_forms(written: object, grouping: UnitGrouping) -> None:
    assert ZeroConfig.from_dict({"units": written}).units == grouping


@pytest.mark.parametrize(
    "written",
    ["LlamaDecoderLayer", [], [3], ["not a name"], {"min_numel": 0}, {"min_numel": None}, {"min_size": 3}, {}, 7, None],
)
def test_units_that_are_none_are_refused(written: object) -> None:
    with pytest.raises(ConfigError, match="key 'units"):
        ZeroConfig.from_dict({"units": written})


def test_units_of_two_kinds_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="both class names and min_numel"):
        UnitGrouping(class_names=("Block",), min_numel=10)


@pytest.mark.parametrize("names", ["Block", {"Block"}, 3])
def test_units_class_names_must_be_a_list(names: Any) -> None:
    with pytest.raises(ConfigError, match="is not a list of class names"):
        UnitGrouping(class_names=names)


@pytest.mark.parametrize("name", ["quantised", "quantized"])
def test_collectives_that_do_not_exist_yet_list_those_that_do(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' does not exist yet; use one of auto, native, pairwise"):
        ZeroConfig.from_dict({"collectives": name})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stage", 4),
        ("stage", -1),
        ("stage", True),
        ("stage", "3"),
        ("stage", 2.0),
        ("stage", None),
        ("stage", [3]),
        ("keep_whole_numel", -1),
        ("keep_whole_numel", 1.5),
        ("keep_whole_numel", False),
        ("keep_whole_numel", 10**400),
        ("compute_dtype", "int8"),
        ("compute_dtype", {"a": 1}),
        ("master_dtype", "bfloat16"),
        ("reduce_dtype", None),
        ("gradient_reduction", "average"),
        ("collectives", ["native"]),
        ("timeout_s", 0),
        ("timeout_s", float("inf")),
        ("timeout_s", "soon"),
        ("timeout_s", True),
        ("reduce_scatter", "false"),
        ("reduce_scatter", 0),
        ("reduce_scatter", "to owner"),
        ("reduce_scatter", ["to_owner"]),
        ("reshard_after_forward", "false"),
        ("reshard_after_forward", 0),
        ("expected_world_size", 0),
        ("expected_world_size", True),
        ("expected_world_size", 2.0),
    ],
)
def test_wrong_value_names_source_and_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^my.yaml: key '{key}': "):
        ZeroConfig.from_dict({key: value}, source="my.yaml")


@given(
    key=st.sampled_from([field.name for field in dataclasses.fields(ZeroConfig)]) | st.text(max_size=5) | st.integers(),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.integers(), inner),
        max_leaves=6,
    ),
)
def test_any_key_and_value_gives_a_config_or_a_config_error(key: Any, value: Any) -> None:
    try:
        config = ZeroConfig.from_dict({key: value})
    except ConfigError:
        return
    assert ZeroConfig.from_dict(config.to_dict()) == config


def test_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict({"prefetch_byte": 1}, source="configs/zero3.yaml")
    assert str(caught.value) == "configs/zero3.yaml: unknown key 'prefetch_byte'; did you mean 'prefetch_bytes'?"


def test_unknown_key_without_a_near_one_lists_the_keys() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'training'; the keys are stage, units, .*expected_world_size"):
        ZeroConfig.from_dict({"stage": 1, "training": {}})


def test_unknown_key_of_deepspeed_says_our_name_or_forbids_the_mix() -> None:
    with pytest.raises(ConfigError, match="'reduce_bucket_size': that is DeepSpeed's name; here it is 'bucket_bytes'"):
        ZeroConfig.from_dict({"stage": 2, "reduce_bucket_size": 5e8})
    with pytest.raises(ConfigError, match="'zero_optimization': it belongs to the DeepSpeed format"):
        ZeroConfig.from_dict({"stage": 2, "zero_optimization": {}})


def test_reshard_after_forward_false_needs_sharded_parameters() -> None:
    assert ZeroConfig(stage=3, reshard_after_forward=False).reshard_after_forward is False
    for stage in (0, 1, 2):
        assert ZeroConfig(stage=stage, reshard_after_forward=True).reshard_after_forward is True
        with pytest.raises(ConfigError, match=f"False has no effect in stage {stage}"):
            ZeroConfig(stage=stage, reshard_after_forward=False)


def test_reduce_scatter_needs_rows_to_reduce_to() -> None:
    assert ZeroConfig(stage=0, reduce_scatter=True).reduce_scatter is True
    for choice in (False, "to_owner"):
        assert all(ZeroConfig(stage=stage, reduce_scatter=choice).reduce_scatter == choice for stage in (1, 2, 3))
        with pytest.raises(ConfigError, match=f"'reduce_scatter': {choice!r} has no effect in stage 0"):
            ZeroConfig(stage=0, reduce_scatter=choice)


def test_replace_validates_again_and_knows_its_keys() -> None:
    config = ZeroConfig(stage=1)
    assert config.replace(stage=2, prefetch_bytes="1MiB") == ZeroConfig(stage=2, prefetch_bytes=MIB)
    with pytest.raises(ConfigError, match="key 'stage': 9"):
        config.replace(stage=9)
    with pytest.raises(ConfigError, match="did you mean 'stage'"):
        config.replace(stages=2)


def test_config_and_import_are_frozen_and_fields_are_named() -> None:
    imported = read_deepspeed({"zero_optimization": {}})
    frozen: list[tuple[Any, str]] = [(ZeroConfig(), "stage"), (imported, "config"), (imported.rows[0], "key")]
    for instance, name in [*frozen, (ZeroConfig().policy, "shards_optimizer"), (UnitGrouping(), "min_numel")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, name, None)
    with pytest.raises(TypeError):
        ZeroConfig(3)  # type: ignore[call-arg]


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_load_takes_every_kind_of_source(tmp_path: Path) -> None:
    expected = ZeroConfig(stage=2, timeout_s=5)
    plain = {"stage": 2, "timeout_s": 5}
    yaml_path = write(tmp_path, "zero.yaml", "stage: 2\ntimeout_s: 5\n")
    json_path = write(tmp_path, "zero.json", "\ufeff" + json.dumps(plain))  # editors on Windows add the mark
    for source in (expected, plain, yaml_path, str(json_path), ' {"stage": 2, "timeout_s": 5}'):
        assert ZeroConfig.load(source) == expected
    assert ZeroConfig.from_file(yaml_path) == expected
    assert ZeroConfig.load(yaml_path, stage=1) == expected.replace(stage=1)
    assert ZeroConfig.load(expected, stage=1) == expected.replace(stage=1)


def test_load_override_mistakes_name_the_source(tmp_path: Path) -> None:
    path = write(tmp_path, "zero.yaml", "stage: 3\nreshard_after_forward: false\n")
    with pytest.raises(ConfigError, match=r"zero\.yaml, with the given overrides: key 'reshard_after_forward'"):
        ZeroConfig.load(path, stage=2)


def test_load_none_reads_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_CONFIG", str(write(tmp_path, "zero.yml", "stage: 1")))
    assert ZeroConfig.load(None) == ZeroConfig(stage=1)
    monkeypatch.setenv("HF_ZERO_CONFIG", str(write(tmp_path, "bad.yml", "stage: 8")))
    with pytest.raises(ConfigError, match=r"^HF_ZERO_CONFIG=.*bad\.yml: key 'stage': 8"):
        ZeroConfig.load()
    monkeypatch.setenv("HF_ZERO_CONFIG", "")
    with pytest.raises(ConfigError, match="the environment variable HF_ZERO_CONFIG is not set"):
        ZeroConfig.load()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "stage: 3\nunits: [A\n", r"a\.yaml: is not YAML: line 3, column 1: "),
        ("a.yaml", "stage: 3\nstage: 2\n", r"a\.yaml: is not YAML: line 2, column 1: key 'stage' is written twice"),
        ("a.yaml", "units:\n  min_numel: 1\n  min_numel: 2\n", "line 3, column 3: key 'min_numel' is written twice"),
        ("a.yaml", "? [a]\n: 1\n", "is not YAML: line 1, column 3: found unhashable key"),
        ("a.yaml", "stage: 2026-13-45\n", "cannot be read as YAML: month must be in 1..12"),
        ("a.yaml", "stage: \0", "cannot be read as YAML"),
        ("a.yaml", "- stage\n", "holds a list, not keys with values"),
        ("a.yaml", "", "holds a NoneType, not keys with values"),
        ("a.yaml", "3: stage\n", "key 3 is not a word"),
        ("a.json", '{"stage": 3,\n "units" "auto"}', r"a\.json: is not JSON: line 2, column 10: "),
        ("a.json", '{"stage": 3, "stage": 2}', "key 'stage' is written twice"),
        ("a.json", "[" * 100_000, "cannot be read as JSON"),
        ("a.json", '{"stage": NaN}', "key 'stage': nan"),
        ("a.toml", "stage = 3", r"is not a configuration file; its name must end in \.yaml, \.yml or \.json"),
    ],
)
def test_broken_file_is_one_error_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ZeroConfig.load(write(tmp_path, name, text))
    assert str(tmp_path / name) in str(caught.value)


def test_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file \(the working directory is "):
        ZeroConfig.load(tmp_path / "nowhere.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml.*cannot be read"):
        ZeroConfig.load(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"units: [\xe9]")
    with pytest.raises(ConfigError, match=r"latin\.yaml.*cannot be read"):
        ZeroConfig.load(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        ZeroConfig.load("nul\0.yaml")


@pytest.mark.parametrize("source", [3, ["stage"], b"zero.yaml", object()])
def test_load_refuses_what_is_no_source(source: Any) -> None:
    with pytest.raises(ConfigError, match="is not a configuration; use "):
        ZeroConfig.load(source)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shipped_configs_are_their_stage_with_default_values(stage: int) -> None:
    path = ROOT / "configs" / f"zero{stage}.yaml"
    assert ZeroConfig.load(path) == ZeroConfig(stage=stage)
    keys = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.split("#")[1:] for line in keys), "every key has its explanation on its line"


def test_shipped_accelerate_configs_are_what_accelerate_reads() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    sizes = {}
    for path in sorted((ROOT / "configs" / "accelerate").glob("*.yaml")):
        config = load_config_from_file(str(path))
        sizes[path.stem] = (config.num_machines, config.num_processes, config.use_cpu, str(config.distributed_type))
    multi = "DistributedType.MULTI_GPU"
    assert sizes == {"cpu2": (1, 2, True, multi), "gpu8": (1, 8, False, multi), "gpu8x2": (2, 16, False, multi)}


def test_import_of_config_loads_neither_torch_nor_yaml() -> None:
    # The package itself is replaced by an empty one, so that only what config.py asks for is imported.
    program = (
        "import sys, types; package = types.ModuleType('hf_zero'); package.__path__ = ['hf_zero'];"
        "sys.modules['hf_zero'] = package; import hf_zero.config;"
        "print([name for name in ('torch', 'yaml', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------

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


def test_deepspeed_file_of_the_transformers_documentation_imports_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path, "ds.json", json.dumps(HF_STAGE3))
    config, imported = load_with_import(path)
    assert imported is not None and imported.config == config == ZeroConfig.load(path) == ZeroConfig.from_file(path)
    assert config == ZeroConfig(stage=3)
    assert imported.training == {"optim": "adamw_torch_fused", "lr_scheduler_type": "constant_with_warmup"}
    rows = {row.key for row in imported.rows}
    pinned = {"zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory"}
    assert leaves(HF_STAGE3) - pinned <= rows, "every key of the file has a row"
    assert not [row for row in imported.rows if row.status == "unsupported"]


def test_deepspeed_values_become_ours_and_the_trainers() -> None:
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


def test_deepspeed_training_values_are_arguments_of_the_trainer() -> None:
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


def test_deepspeed_bytes_follow_the_dtype() -> None:
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


def test_deepspeed_defaults_written_out_have_a_row_each_and_no_error() -> None:
    imported = read_deepspeed({"zero_optimization": ZERO_DEFAULTS})
    rows = {row.key.removeprefix("zero_optimization.") for row in imported.rows}
    assert set(ZERO_DEFAULTS) - {"offload_param", "offload_optimizer"} <= rows
    assert not [row for row in imported.rows if row.status == "unsupported"]
    assert imported.config.keep_whole_numel == 100_000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_stage_is_the_same_stage(stage: int) -> None:
    assert read_deepspeed({"zero_optimization": {"stage": stage}}).config.stage == stage


def test_deepspeed_smallest_sizes_are_still_sizes() -> None:
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


def test_deepspeed_precision_block_without_enabled_is_off() -> None:
    imported = read_deepspeed({"bf16": {}, "fp16": {"loss_scale": 0}})
    assert imported.training == {"bf16": False} and imported.config.compute_dtype == "float32"


def test_deepspeed_auto_is_taken_from_the_trainer_and_said_so() -> None:
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


def test_deepspeed_stage_is_zero_where_absent() -> None:
    assert read_deepspeed({"train_micro_batch_size_per_gpu": 1}).config.stage == 0
    assert read_deepspeed({"zero_optimization": {}}).config.stage == 0


def test_deepspeed_persistence_is_of_stage_three_only() -> None:
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
def test_deepspeed_reduction_of_gradients_has_the_exchange_of_its_name(
    block: dict[str, Any], choice: bool | str, fates: list[str]
) -> None:
    for stage in (1, 2, 3):
        imported = read_deepspeed({"zero_optimization": {"stage": stage, **block}})
        assert imported.config.reduce_scatter == choice
        rows = [row for row in imported.rows if row.key.partition(".")[2] in (_SCATTER, _BUCKETS)]
        assert [row.key.partition(".")[2] for row in rows] == list(block)
        for row, fate in zip(rows, fates, strict=True):
            assert re.match(fate, f"{row.status}: {row.note}")


def test_deepspeed_reduction_of_gradients_is_of_sharded_stages_only() -> None:
    imported = read_deepspeed({"zero_optimization": {"stage": 0, _SCATTER: False, _BUCKETS: False}})
    assert imported.config == ZeroConfig(stage=0)
    notes = [(row.status, row.note) for row in imported.rows if row.key.partition(".")[2] in (_SCATTER, _BUCKETS)]
    assert notes == [("kept", "only used from stage 1 on")] * 2


def test_deepspeed_status_of_keys_without_influence_on_the_result() -> None:
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
        f"{zero}zero_hpz_partition_size": "unsupported",
        "data_types.grad_accum_dtype": "differs",
        "gradient_clipping": "differs",
        "gradient_predivide_factor": "differs",
        "prescale_gradients": "differs",
        "tensorboard.enabled": "differs",
        "wall_clock_breakdown": "differs",
        "wandb.enabled": "kept",
    }


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
    ("tensor_parallel", {"autotp_size": 2}, {"autotp_size": 0}),
    ("tensor_parallel", {"autotp_size": 4}, {"autotp_size": 1}),
    ("torch_autocast", {"enabled": True}, {"enabled": False}),
    ("weight_quantization", {"quantized_initialization": {}}, {}),
    ("zero_optimization.cpu_offload", True, False),
    ("zero_optimization.cpu_offload_param", True, False),
    ("zero_optimization.offload_optimizer", {"device": "nvme"}, {"pin_memory": True}),
    ("zero_optimization.offload_param", {"device": "cpu"}, {"device": "none"}),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, None),
    ("zero_optimization.zero_quantized_gradients", True, False),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, False),
    ("zero_optimization.zero_quantized_weights", True, False),
    ("zero_optimization.zeropp_loco_param", {"err_beta": 0.8}, {}),
    ("bf16.bf16_master_weights_and_grads", True, False),
    ("bf16.bf16_optimizer_states", True, False),
    ("bf16.check_grad_overflow", True, False),
    ("data_types.param_dtype", "bf16", None),
    ("data_types.buffer_dtype", "bf16", "auto"),
]

# Keys without influence on what is learned: (key, a value that asks, what happens then, one that does not ask).
REPORTED = [
    ("activation_checkpointing", {"partition_activations": True}, "differs", None),
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
    ("zero_optimization.zero_hpz_partition_size", 8, "unsupported", 1),
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
def test_deepspeed_refused_key_is_an_error_only_where_it_asks(key: str, asking: object, not_asking: object) -> None:
    assert status_of(key, not_asking) == "kept"
    with pytest.raises(ConfigError, match=f"^the given mapping: key '{key}"):
        read_deepspeed(nested(key, asking))


@pytest.mark.parametrize(("key", "asking", "status", "not_asking"), REPORTED)
def test_deepspeed_reported_key_has_its_row(key: str, asking: object, status: str, not_asking: object) -> None:
    assert status_of(key, asking) == status
    assert status_of(key, not_asking) == "kept"


def test_deepspeed_every_known_key_has_a_fate_under_test() -> None:
    translated = {"bf16", "bfloat16", "communication_data_type", "data_types", "dataloader_drop_last", "fp16"}
    translated |= {
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "optimizer",
        "scheduler",
    }
    translated |= {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
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


def test_deepspeed_default_that_is_not_ours_has_a_row() -> None:
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
        ({"fp16": {"enabled": True}}, "'fp16.enabled': True: float16 .* not supported yet; use bf16"),
        ({"bf16": {"enabled": 1}}, "'bf16.enabled': 1: is not a boolean"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
        ({"bf16": True}, "'bf16': True: is not a block"),
        ({"communication_data_type": "fp16"}, "'communication_data_type': 'fp16'"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype"),
        ({"gradient_clipping": -1}, "'gradient_clipping': -1: is not a number of at least 0"),
        ({"gradient_clipping": True}, "'gradient_clipping': True"),
        ({"gradient_allreduce_op": "max"}, "use mean or sum"),
        ({"zero_optimization": True}, 'write {"stage": 1}'),
        ({"zero_optimization": {"stage": 4}}, "'zero_optimization.stage': 4: is not a stage"),
        ({"zero_optimization": {"stage": True}}, "'zero_optimization.stage': True: is not a stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device': 'cpu': offload is not",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device': 'nvme': offload is not"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload': True: offload is not supported yet"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "quantised exchange does not exist yet"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "quantised exchange does not exist yet"),
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
def test_deepspeed_key_that_would_change_the_result_is_an_error(mapping: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(mapping, source="ds.json")
    assert str(caught.value).startswith("ds.json: ")
    assert message.split(" .* ")[0] in str(caught.value) and message.split(" .* ")[-1] in str(caught.value)


def test_deepspeed_total_batch_with_auto_parts_is_not_checked() -> None:
    mapping = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    imported = read_deepspeed(mapping)
    assert imported.config.expected_world_size is None and imported.training == {}
    assert statuses(mapping)["train_batch_size"] == "differs"


def test_deepspeed_old_names_and_nulls_are_understood() -> None:
    mapping = {"bfloat16": {"enabled": True}, "optimizer": None, "scheduler": None, "gradient_clipping": None}
    imported = read_deepspeed({**mapping, "communication_data_type": None, "sparse_attention": None, "amp": None})
    assert imported.config == ZeroConfig(stage=0, compute_dtype="bfloat16")
    assert imported.training == {"bf16": True}


def test_deepspeed_import_takes_overrides_and_ours_has_none() -> None:
    config, imported = load_with_import({"zero_optimization": {"stage": 2}}, prefetch_bytes="1MiB")
    assert imported is not None and imported.config == config == ZeroConfig(stage=2, prefetch_bytes=MIB)
    assert load_with_import({"stage": 2}) == (ZeroConfig(stage=2), None)
    assert load_with_import(config) == (config, None)
    with pytest.raises(ConfigError, match="is not a DeepSpeed config"):
        read_deepspeed({"stage": 2})


def test_deepspeed_misspelt_block_is_recognised_in_the_advice() -> None:
    with pytest.raises(ConfigError, match="unknown key 'zero_optimisation'; did you mean 'zero_optimization'"):
        ZeroConfig.load({"zero_optimisation": {"stage": 2}})


def test_deepspeed_table_is_aligned_and_complete() -> None:
    imported = read_deepspeed({**HF_STAGE3, "activation_checkpointing": {("odd", "key"): object()}})
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
def test_deepspeed_any_values_give_an_import_or_a_config_error(block: dict[str, Any], top: dict[str, Any]) -> None:
    try:
        imported = read_deepspeed({"zero_optimization": block, **top})
    except ConfigError:
        return
    assert imported.table() and ZeroConfig.from_dict(imported.config.to_dict()) == imported.config
