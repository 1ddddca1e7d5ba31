"""Arguments of a Trainer: where they are read from, what they refuse, and that nothing stays changed after them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import compare_versions
from torch.distributed.tensor import DTensor
from transformers import HfArgumentParser, Trainer, TrainingArguments

import hf_zero as zero
from hf_zero.config import files
from hf_zero.integrations.trainer import patch
from tests.integrations.refusals import error_of, refused
from tests.integrations.trainer.runs import (
    COLLECTIVES,
    Values,
    arguments,
    collate,
    dataset,
    loaded,
    trained,
    trainer_of,
    undone,
)
from tests.ranks import alone, on_ranks

CONFIG: Values = {"stage": 2, "prefetch_bytes": 1024, "collectives": COLLECTIVES}


def made(folder: str, **options: Any) -> zero.ZeroTrainingArguments:
    return zero.ZeroTrainingArguments(output_dir=f"{folder}/out", use_cpu=True, report_to="none", **options)


@alone()
@undone
def test_arguments_are_read_from_everywhere(folder: str) -> None:
    path = Path(folder, "zero2.yaml")
    path.write_text("".join(f"{key}: {value}\n" for key, value in CONFIG.items()))
    common = {"output_dir": f"{folder}/out", "use_cpu": True, "report_to": "none"}
    Path(folder, "args.yaml").write_text(
        f"output_dir: {folder}/out\nuse_cpu: true\nreport_to: none\nzero: {{stage: 2, prefetch_bytes: 1024, "
        f"collectives: {COLLECTIVES}}}\n"
    )
    Path(folder, "args.json").write_text(json.dumps(common | {"zero": str(path)}))
    parser = HfArgumentParser(zero.ZeroTrainingArguments)
    words = ["--output_dir", f"{folder}/out", "--use_cpu", "--report_to", "none", "--zero"]
    ways = {
        "dict": made(folder, zero=dict(CONFIG)),
        "path": made(folder, zero=str(path)),
        "inline": made(folder, zero=json.dumps(CONFIG)),
        "command_line_path": parser.parse_args_into_dataclasses([*words, str(path)])[0],
        "command_line_inline": parser.parse_args_into_dataclasses([*words, json.dumps(CONFIG)])[0],
        "parse_dict": parser.parse_dict(common | {"zero": dict(CONFIG)})[0],
        "parse_yaml": parser.parse_yaml_file(f"{folder}/args.yaml")[0],
        "parse_json": parser.parse_json_file(f"{folder}/args.json")[0],
    }
    args = ways["dict"]
    ways["pickle"] = pickle.loads(pickle.dumps(args))
    buffer = io.BytesIO()
    torch.save(args, buffer)
    buffer.seek(0)
    ways["torch_save"] = torch.load(buffer, weights_only=False)
    ways["deepcopy"] = copy.deepcopy(args)
    ways["replace"] = dataclasses.replace(args, learning_rate=0.5)
    Path(folder, "short.yaml").write_text(f"output_dir: {folder}/out\nuse_cpu: true\nreport_to: none\nzero: 2\n")
    short = [
        made(folder, zero=2),
        made(folder, zero="zero2"),
        parser.parse_args_into_dataclasses([*words, "2"])[0],
        parser.parse_yaml_file(f"{folder}/short.yaml")[0],
        pickle.loads(pickle.dumps(made(folder, zero=2))),
    ]
    assert [each.zero_config for each in short] == [zero.ZeroConfig(stage=2)] * len(short)
    with pytest.raises(zero.ConfigError, match=r"^7 is not a stage"):
        made(folder, zero=7)
    os.environ["HF_ZERO_CONFIG"] = str(path)
    ways["variable"] = made(folder)
    with mock.patch.object(files, "show_once") as said:
        assert made(folder, zero=1).zero_config.stage == 1  # a script's own word counts, and that is said
        assert "zero of the script counts (stage 1)" in said.call_args.args[0]
        made(folder, zero=str(path))
        assert said.call_count == 1
    del os.environ["HF_ZERO_CONFIG"]
    none = made(folder)
    for name, each in ways.items():
        assert each.zero_config == zero.ZeroConfig(**CONFIG), name
        assert type(each) is zero.ZeroTrainingArguments, name
    assert args.to_dict()["zero"] == json.loads(args.to_json_string())["zero"] == CONFIG
    assert "stage" in str(args.to_sanitized_dict()["zero"])
    assert "zero_config" not in args.to_dict()
    assert none.zero_config is None and none.to_dict()["zero"] is None
    assert "zero" not in TrainingArguments._VALID_DICT_FIELDS


DEEPSPEED: Values = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.25,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.02}},
}


@alone()
@undone
def test_a_deepspeed_file_sets_the_arguments_that_it_names(folder: str) -> None:
    path = Path(folder, "deepspeed.json")
    path.write_text(json.dumps(DEEPSPEED))
    make = functools.partial(made, folder, zero=str(path))
    args = make()
    wanted = {
        "bf16": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.25,
        "learning_rate": 0.003,
        "weight_decay": 0.02,
    }
    assert {name: getattr(args, name) for name in wanted} == wanted
    assert (args.zero_config.stage, args.zero_config.compute_dtype) == (2, "bfloat16")
    assert make(learning_rate=0.003, gradient_accumulation_steps=3).learning_rate == 0.003
    for given, is_on in ((None, True), (True, True), (False, False)):
        assert make(ddp_broadcast_buffers=given).zero_config.broadcast_buffers is is_on
    kind, text = error_of(lambda: make(learning_rate=0.1))
    assert kind == "ConfigError"
    assert "learning_rate is 0.003 in the DeepSpeed configuration but 0.1 in the arguments" in text


@alone()
@undone
def test_one_process_trains_as_without_us(folder: str) -> None:
    plain = trained(trainer_of(loaded(folder), arguments(folder, None)))
    trainer = trainer_of(loaded(folder), arguments(folder, 3))
    assert trained(trainer) == plain
    assert not any(isinstance(param, DTensor) for param in trainer.model.parameters())


# ---- what is refused ------------------------------------------------------------------------------------------------

ZERO_3: Values = {"stage": 3, "collectives": COLLECTIVES}
REFUSED: list[tuple[Values, str]] = [
    ({"zero": ZERO_3 | {"expected_world_size": 4}}, "expected_world_size is 4, but 2 processes run"),
    (
        {"bf16": True, "zero": ZERO_3 | {"compute_dtype": "float16"}},
        "compute_dtype is float16, but mixed precision is 'bf16'",
    ),
    ({"fsdp": "full_shard"}, "cannot be combined with fsdp or deepspeed"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "cannot be combined with fsdp or deepspeed"),
    ({"optim": "lomo"}, "while the backward runs"),
    ({"bf16_full_eval": True}, "set bf16=True"),
    ({"fp16_full_eval": True}, "set fp16=True"),
    ({"zero": ZERO_3 | {"prefetch_byte": 1}}, "did you mean 'prefetch_bytes'?"),
    ({"zero": "/no/such/nothing.yaml"}, "nothing.yaml"),
]


@on_ranks(2)
@undone
def test_what_cannot_be_combined_is_a_config_error_on_all_ranks(folder: str) -> None:
    for values, text in REFUSED:
        refused(lambda values=values: arguments(folder, 3, **values), "ConfigError", text)


# ---- what is put back -----------------------------------------------------------------------------------------------

Surface = dict[tuple[str, str, str], Any]


def surface() -> Surface:
    """Every attribute of every module and class of transformers and accelerate that is loaded."""
    found: Surface = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("transformers", "accelerate") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if not isinstance(value, type):
                found[name, key, ""] = value
            elif value.__module__ == name:
                found.update({(name, key, inner): item for inner, item in vars(value).items()})
    return found


def changes(before: Surface, after: Surface) -> list[tuple[str, str, str]]:
    """What can be called and is another thing now."""
    caches = ("__abstractmethods__", "_abc_impl", "__doc__", "__dict__", "__weakref__")
    kinds = (staticmethod, classmethod, property, functools.cached_property)
    return [
        key
        for key, value in before.items()
        if key[2] not in caches and after.get(key) is not value and (callable(value) or isinstance(value, kinds))
    ]


@on_ranks(2)
@undone
def test_a_trainer_that_others_have_wrapped_and_replaced_trains_as_ever(folder: str) -> None:
    def train(kind: type[Trainer]) -> list[float]:
        torch.manual_seed(3)
        args = arguments(folder, 3)
        return trained(kind(loaded(folder), args, collate, train_dataset=dataset()))

    expected = train(Trainer)
    zero.undo()
    original = Trainer.__init__

    def nameless(self: Trainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    class Another(Trainer):
        pass

    with mock.patch.object(Trainer, "__init__", nameless), mock.patch.object(patch, "Trainer", Another):
        assert train(Another) == expected
        assert train(Trainer) == expected


@on_ranks(2)
@undone
def test_undo_puts_back_all_that_the_arguments_change(folder: str) -> None:
    def is_cut() -> set[bool]:
        return {isinstance(param, DTensor) for param in loaded(folder).parameters()}

    loaded(folder)
    Trainer(model=loaded(folder), args=arguments(folder, None), train_dataset=dataset())
    before = surface()
    arguments(folder, None)
    none = made(folder)
    assert none.zero_config is None and changes(before, surface()) == []
    args = arguments(folder, 3)
    once = surface()
    again = arguments(folder, 3)
    assert args.zero_config == again.zero_config and changes(once, surface()) == []
    assert sorted({(key[1], key[2]) for key in changes(before, once)}) == [
        ("PreTrainedModel", "_finalize_model_loading"),
        ("PreTrainedModel", "_from_config"),
        ("PreTrainedModel", "_load_pretrained_model"),
        ("Trainer", "__init__"),
        ("Trainer", "_load_best_model"),
        ("Trainer", "_load_from_checkpoint"),
        ("Trainer", "_load_optimizer_and_scheduler"),
        ("Trainer", "_load_rng_state"),
        ("Trainer", "_run_epoch"),
        ("Trainer", "_save"),
        ("Trainer", "_save_checkpoint"),
        ("Trainer", "_save_optimizer_and_scheduler"),
        ("Trainer", "call_model_init"),
        ("Trainer", "create_accelerator_and_postprocess"),
        ("Trainer", "evaluation_loop"),
        ("Trainer", "log"),
        *([("Trainer", "save_model")] if compare_versions("transformers", "<", "5.23") else []),
        ("Trainer", "train"),
    ]
    with zero.disabled():
        assert is_cut() == {False}
    assert is_cut() == {True}
    zero.undo()
    assert changes(before, surface()) == []
    zero.undo()
    assert is_cut() == {False}
