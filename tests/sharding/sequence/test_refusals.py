"""Models, arguments and ranks that cannot be sliced: one clear error each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hf_zero as zero
from hf_zero.errors import ConfigError, PartitionError, UsageError
from hf_zero.sharding import loading
from tests.ranks import on_ranks
from tests.sequence_axis import CONFIGS, make, plain
from tests.tensor_axis import NEEDS_TENSOR_PARALLELISM

_SIZES = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {**_SIZES, "intermediate_size": 20, "max_position_embeddings": 16}
_LINEAR = {**_SIZES, "intermediate_size": 20, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 2}
_T5 = {"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}


def _refuses(model: nn.Module, kind: type[Exception], match: str, **config: Any) -> None:
    with pytest.raises(kind, match=match):
        zero.shard_model(model, zero.ZeroConfig(**{"stage": 2, "sp_size": 2, "collectives": "pairwise", **config}))


@on_ranks(2)
def test_models_that_cannot_be_sliced_are_named() -> None:
    _refuses(nn.Linear(3, 3), PartitionError, "Linear has 0")
    _refuses(transformers.BertForMaskedLM(transformers.BertConfig(**_BERT)), PartitionError, "not causal")
    _refuses(transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)), PartitionError, "an encoder and a")
    classifier = transformers.LlamaForSequenceClassification(CONFIGS["llama"]())
    _refuses(classifier, PartitionError, "neither a causal language model nor the base of one")
    bloom = transformers.BloomConfig(vocab_size=37, hidden_size=16, n_layer=1, n_head=2)
    _refuses(transformers.BloomForCausalLM(bloom), PartitionError, "attention of its own|takes no position_ids")
    recurrent = transformers.Qwen3NextConfig(**_LINEAR)
    _refuses(transformers.Qwen3NextForCausalLM(recurrent), PartitionError, "linear_attention|Conv1d")
    dynamic = CONFIGS["llama"]()
    dynamic.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    _refuses(transformers.LlamaForCausalLM(dynamic), PartitionError, "rotary embeddings of type dynamic")


def _fails(*_: Any, **__: Any) -> None:
    raise AssertionError("a file is read")


@contextmanager
def _reading_nothing() -> Iterator[None]:
    """Within: whoever reads a weight, or the shape of one, fails."""
    library = mock.patch.object(transformers.PreTrainedModel, "_load_pretrained_model", staticmethod(_fails))
    with library, mock.patch.object(loading, "checkpoint_shapes", _fails):
        yield


def _saved(model: Any, folder: Path) -> Path:
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return folder


def _refuses_to_load(folder: Path, kind: type[Exception], match: str, config: dict[str, Any], **how: Any) -> None:
    config = {"stage": 3, "collectives": "pairwise", **config}
    with _reading_nothing(), pytest.raises(kind, match=match), zero.Init(config):
        transformers.AutoModelForCausalLM.from_pretrained(folder, **how)


def _with_heads(count: int) -> Any:
    sizes = {**_SIZES, "hidden_size": 24, "num_attention_heads": count}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=20))


@on_ranks(2)
def test_models_that_cannot_be_sliced_are_named_before_a_weight_is_read(tmp_path: Path) -> None:
    three = _saved(_with_heads(3), tmp_path / "three")
    recurrent = _saved(
        transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**_LINEAR)), tmp_path / "recurrent"
    )
    for stage in (0, 1, 3):
        _refuses_to_load(three, ConfigError, "sp_size is 2, but .* has 3 heads", {"stage": stage, "sp_size": 2})
    for axis in ("sp_size", "cp_size"):
        _refuses_to_load(recurrent, PartitionError, f"{axis} is 2, but .* of type linear_attention", {axis: 2})
    flex = {"attn_implementation": "flex_attention"}
    _refuses_to_load(three, PartitionError, "computes attention by 'flex_attention'", {"cp_size": 2}, **flex)
    with _reading_nothing():
        zero.ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, zero=3, sp_size=2)
        with pytest.raises(ConfigError, match="has 3 heads"):
            transformers.AutoModelForCausalLM.from_pretrained(three)
        zero.undo()


@NEEDS_TENSOR_PARALLELISM
@on_ranks(4)
def test_heads_that_two_axes_do_not_divide_are_named_before_a_weight_is_read(tmp_path: Path) -> None:
    six = _saved(_with_heads(6), tmp_path)
    _refuses_to_load(
        six, ConfigError, "has 3 heads .* on each of 2 ranks of the tensor axis", {"tp_size": 2, "sp_size": 2}
    )


@on_ranks(2)
def test_numbers_that_do_not_divide_are_named() -> None:
    _refuses(make("llama"), ConfigError, "sp_size is 3, but 2 processes run", sp_size=3)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "sp"))
    with pytest.raises(UsageError, match="the mesh has an axis 'sp'"):
        zero.shard_model(make("llama"), zero.ZeroConfig(stage=2, sp_size=2), mesh)
    _refuses(_with_heads(3), ConfigError, r"has 3 heads of queries .* use one of \[3\]")


@on_ranks(2)
def test_arguments_that_cannot_be_sliced_are_named() -> None:
    model = make("llama")
    engine = zero.shard_model(model, zero.ZeroConfig(stage=2, sp_size=2, collectives="pairwise"))
    batch = plain(0, 0)
    for match, more in {
        "output_attentions": {"output_attentions": True},
        "logits_to_keep": {"logits_to_keep": 1},
        "'token_type_ids', of shape": {"token_type_ids": batch["input_ids"]},
        "past_key_values": {"past_key_values": transformers.DynamicCache()},
        "position_ids have the shape": {"position_ids": torch.zeros(3, 2, 10, dtype=torch.long)},
    }.items():
        with pytest.raises(UsageError, match=match):
            model(**batch, **more)
    with pytest.raises(UsageError, match="is called outside a call of the whole model"):
        model.model(input_ids=batch["input_ids"])
    ours, theirs = model(**batch).loss, make("llama")(**batch).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    engine.close()


@on_ranks(2)
def test_other_batches_on_ranks_that_share_sequences_are_found() -> None:
    model = make("llama")
    engine = zero.shard_model(model, zero.ZeroConfig(stage=3, sp_size=2, collectives="pairwise"))
    with pytest.raises(UsageError, match=r"share each sequence \(sp_size\), but the inputs of the model differ"):
        model(**plain(0, engine.world.rank))
