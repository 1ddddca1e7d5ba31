"""ZeroConfig and its files: round trips, and mistakes as one ConfigError each."""

import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.config import files
from hf_zero.config.zero_config import LossScale, StagePolicy, UnitGrouping, ZeroConfig, read_deepspeed
from hf_zero.errors import ConfigError

ROOT = Path(__file__).parents[2]
MIB = 2**20

unit_groupings = st.one_of(
    st.just(UnitGrouping()),
    st.lists(st.from_regex(r"[A-Z][A-Za-z0-9_]{0,20}", fullmatch=True), min_size=1, max_size=3).map(
        lambda names: UnitGrouping(class_names=tuple(names))
    ),
    st.integers(1, 2**40).map(lambda numel: UnitGrouping(min_numel=numel)),
    st.builds(UnitGrouping, min_numel=st.none() | st.integers(1, 9), whole=st.sampled_from([(), ("tower", "*.b")])),
)


loss_scales = st.builds(
    LossScale,
    initial=st.floats(1, 2.0**30),
    window=st.none() | st.integers(1, 10**6),
    hysteresis=st.integers(1, 9),
    consecutive_hysteresis=st.booleans(),
    minimum=st.floats(0, 1),
)


keepings = st.booleans() | st.just("auto") | st.integers(1, 2**63 - 1)


@st.composite
def configs(draw: st.DrawFn) -> ZeroConfig:
    stage = draw(st.integers(0, 3))
    return ZeroConfig(
        stage=stage,
        units=draw(unit_groupings if stage == 3 else unit_groupings.filter(lambda grouping: not grouping.whole)),
        keep_whole_numel=draw(st.integers(0, 2**40)),
        prefetch_bytes=draw(st.integers(0, 2**63 - 1)),
        bucket_bytes=draw(st.integers(1, 2**63 - 1)),
        compute_dtype=draw(st.sampled_from(("auto", "float32", "bfloat16", "float16"))),
        cast_forward_inputs=draw(st.booleans()),
        keep_fp32=tuple(draw(st.lists(st.sampled_from(("LlamaRMSNorm", "*.gate"))))),
        loss_scale=draw(loss_scales),
        master_dtype=draw(st.sampled_from(("auto", "float32"))),
        reduce_dtype=draw(st.sampled_from(("auto", "float32", "bfloat16", "float16"))),
        gradient_reduction=draw(st.sampled_from(("mean", "sum"))),
        collectives=draw(st.sampled_from(("auto", "native", "pairwise"))),
        timeout_s=draw(st.floats(1e-6, 1e9)),
        reduce_scatter=draw(st.sampled_from((True, False, "to_owner"))) if stage else True,
        reshard_after_forward=draw(st.sampled_from((True, "auto")) if stage < 3 else keepings),
        gather_for_generation=draw(st.booleans() | st.just("auto") | st.integers(1, 2**63 - 1)),
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
    assert (config.prefetch_bytes, config.bucket_bytes, config.timeout_s) == (64 * MIB, 64 * MIB, "auto")
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


@pytest.mark.parametrize("written", ["float16", "fp16", "half", torch.float16])
def test_dtype_float16_computes_and_reduces_over_float32_masters(written: object) -> None:
    config = ZeroConfig.from_dict({"compute_dtype": written, "reduce_dtype": written})
    assert (config.compute_dtype, config.reduce_dtype, config.master_dtype) == ("float16", "float16", "float32")
    with pytest.raises(ConfigError, match=r"key 'master_dtype': .* is not one of the choices; use auto, float32"):
        ZeroConfig.from_dict({"master_dtype": written})


@pytest.mark.parametrize(
    ("written", "scale"),
    [
        ("dynamic", LossScale()),
        (1024, LossScale(1024.0, None)),
        ("1e3", LossScale(1000.0, None)),
        ({"initial": 256, "window": 10, "hysteresis": 2, "minimum": 1}, LossScale(256.0, 10, 2, minimum=1.0)),
        ({"consecutive_hysteresis": True}, LossScale(consecutive_hysteresis=True)),
    ],
)
def test_loss_scale_forms(written: object, scale: LossScale) -> None:
    assert ZeroConfig.from_dict({"loss_scale": written}).loss_scale == scale


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("static", "key 'loss_scale.initial': 'static' is not a number"),
        (0, "key 'loss_scale.initial': 0 is not a number; use one above 0"),
        (True, "key 'loss_scale': True is not understood; use dynamic, a number"),
        ({"window": 0}, "key 'loss_scale.window': 0 is not a number of steps"),
        ({"hysteresis": 1.5}, "key 'loss_scale.hysteresis': 1.5 is not a number of overflows"),
        ({"initial": 2, "minimum": 4}, "key 'loss_scale.minimum': 4.0 is above loss_scale.initial, 2"),
        ({"scale": 2}, "key 'loss_scale': 'scale' is not one of its keys; they are initial, window"),
    ],
)
def test_loss_scale_mistakes_are_named(written: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ZeroConfig.from_dict({"loss_scale": written})


@pytest.mark.parametrize("written", ["LlamaRMSNorm", [1], [""], {"LlamaRMSNorm": True}, None])
def test_keep_fp32_that_is_no_list_of_names_is_refused(written: object) -> None:
    with pytest.raises(ConfigError, match=r"key 'keep_fp32': .* is not a list of names"):
        ZeroConfig.from_dict({"keep_fp32": written})


@pytest.mark.parametrize(
    ("written", "grouping"),
    [
        ("auto", UnitGrouping()),
        (["LlamaDecoderLayer"], UnitGrouping(class_names=("LlamaDecoderLayer",))),
        (("A", "B"), UnitGrouping(class_names=("A", "B"))),
        ({"min_numel": 1_000_000}, UnitGrouping(min_numel=1_000_000)),
        ({"min_numel": "1e6"}, UnitGrouping(min_numel=1_000_000)),
        ({"whole": ["*.tower"]}, UnitGrouping(whole=("*.tower",))),
        ({"class_names": ["A"], "whole": ["b"]}, UnitGrouping(class_names=("A",), whole=("b",))),
    ],
)
def test_units_forms(written: object, grouping: UnitGrouping) -> None:
    assert ZeroConfig.from_dict({"units": written}).units == grouping


@pytest.mark.parametrize(
    "written",
    [
        "LlamaDecoderLayer",
        [],
        [3],
        ["not a name"],
        {"min_numel": 0},
        {"min_numel": None},
        {"min_size": 3},
        {},
        7,
        None,
        {"whole": "b"},
    ],
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


def test_units_that_stay_for_the_backward_need_sharded_parameters() -> None:
    assert ZeroConfig(stage=3, reshard_after_forward=False).reshard_after_forward is False
    assert ZeroConfig(reshard_after_forward="2GiB").reshard_after_forward == 2**31
    for stage in (0, 1, 2):
        assert ZeroConfig(stage=stage, reshard_after_forward=True).reshard_after_forward is True
        assert ZeroConfig(stage=stage).reshard_after_forward == "auto"
        for value in (False, 1, 2**20):
            with pytest.raises(ConfigError, match=f"{value} has no effect in stage {stage}"):
                ZeroConfig(stage=stage, reshard_after_forward=value)


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
        ("a.yaml", "", "is empty; write for example 'stage: 3'"),
        ("a.yaml", "# nothing\n", "is empty"),
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


@pytest.mark.parametrize("source", [3.0, True, ["stage"], b"zero.yaml", object()])
def test_load_refuses_what_is_no_source(source: Any) -> None:
    with pytest.raises(ConfigError, match="is not a configuration; use "):
        ZeroConfig.load(source)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_short_forms_are_a_stage_or_a_shipped_file(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"zero{stage}").mkdir()  # what lies there by chance is not meant
    for source in (stage, str(stage), f"zero{stage}"):
        assert ZeroConfig.load(source) == ZeroConfig(stage=stage)
        assert files.from_anywhere(str(source)) == str(source)
    monkeypatch.setenv("HF_ZERO_CONFIG", f"zero{stage}")
    assert ZeroConfig.load(bucket_bytes=5) == ZeroConfig(stage=stage, bucket_bytes=5)
    Path("mine.yaml").write_text("stage: 3")
    assert files.from_anywhere("mine.yaml") == str(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (7, r"^7 is not a stage; use 0, 1, 2 or 3, or a configuration file$"),
        ("7", r"^7 is not a stage; use 0, 1, 2 or 3"),
        (-1, r"^-1 is not a stage"),
        (
            "zero7",
            r"^'zero7' is not a configuration; use a stage .*, one that comes with hf_zero \(.*zero0, zero1, .*, or a file",
        ),
        ("zero3.yaml", r"^zero3\.yaml: no such file .*; 'zero3' alone is the one that comes with hf_zero$"),
    ],
)
def test_short_form_that_is_none_says_what_there_is(
    source: int | str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        ZeroConfig.load(source)


def test_wheel_has_what_short_forms_name(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    program = (
        "import hf_zero as z; from hf_zero.config import shipped;"
        "print(shipped.folder(), z.ZeroConfig.load(2).stage, z.ZeroConfig.load('zero3').stage)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout.split() == [str(tmp_path / "installed" / "hf_zero" / "configs"), "2", "3"], run.stderr
    there = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    shipped = tmp_path / "installed" / "hf_zero"
    assert there == {path.relative_to(shipped) for path in shipped.rglob("*.yaml")}


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
    assert sizes == {
        "cpu2": (1, 2, True, multi),
        "cpu4": (1, 4, True, multi),
        "gpu8": (1, 8, False, multi),
        "gpu8x2": (2, 16, False, multi),
    }


def test_import_of_config_loads_neither_torch_nor_yaml() -> None:
    # The package itself is replaced by an empty one, so that only what config.py asks for is imported.
    program = (
        "import sys, types; package = types.ModuleType('hf_zero'); package.__path__ = ['hf_zero'];"
        "sys.modules['hf_zero'] = package; import hf_zero.config.zero_config;"
        "print([name for name in ('torch', 'yaml', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
