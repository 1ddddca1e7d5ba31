"""A model -> its units: the repeated blocks of the architectures that people train, and of plain modules."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.config.zero_config import UnitGrouping
from hf_zero.engine.units.grouping import Group, find_parameters, group
from tests.engine.twins import Block, Net, Twins, whole
from tests.ranks import on_ranks, run_ranks

_SIZES = {"intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
_TOKENS = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32}
_TEXT = {**_SIZES, **_TOKENS, "num_key_value_heads": 2}
_WITH_HEAD_DIM = {**_TEXT, "head_dim": 8}
_GPT = {"vocab_size": 37, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
_IMAGE = {**_SIZES, "image_size": 32, "patch_size": 8, "num_labels": 3}
_SEQ2SEQ = {
    **_TOKENS,
    "d_model": 16,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    **{f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in [("layers", 3), ("attention_heads", 2)]},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
}
_SOUND = {
    **_TEXT,
    "conv_dim": [8, 8],
    "conv_kernel": [3, 3],
    "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_STAGES = {"depths": [2, 2], "num_labels": 3}

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _TEXT,
    "MistralForCausalLM": _TEXT,
    "Qwen2ForCausalLM": _TEXT,
    "Qwen3ForCausalLM": _WITH_HEAD_DIM,
    "Qwen3MoeForCausalLM": {**_WITH_HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "MixtralForCausalLM": {**_TEXT, "num_local_experts": 4},
    "GemmaForCausalLM": _WITH_HEAD_DIM,
    "Gemma2ForCausalLM": _WITH_HEAD_DIM,
    "Gemma3ForCausalLM": _WITH_HEAD_DIM,
    "Phi3ForCausalLM": _TEXT,
    "Olmo2ForCausalLM": _TEXT,
    "CohereForCausalLM": _TEXT,
    "GPT2LMHeadModel": _GPT,
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 4},
    "GPTNeoXForCausalLM": _TEXT,
    "BloomForCausalLM": _TEXT,
    "OPTForCausalLM": {**_TEXT, "ffn_dim": 24},
    "FalconForCausalLM": {**_SIZES, "vocab_size": 37},
    "MptForCausalLM": {"vocab_size": 37, "d_model": 16, "n_layers": 3, "n_heads": 2, "max_seq_len": 32},
    "T5ForConditionalGeneration": {
        **{"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2},
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": _SEQ2SEQ,
    "MBartForConditionalGeneration": _SEQ2SEQ,
    "PegasusForConditionalGeneration": _SEQ2SEQ,
    "BertForMaskedLM": _TEXT,
    "RobertaForMaskedLM": _TEXT,
    "XLMRobertaForMaskedLM": _TEXT,
    "ElectraForMaskedLM": _TEXT,
    "DebertaV2ForMaskedLM": _TEXT,
    "ModernBertForMaskedLM": _TEXT,
    "DistilBertForMaskedLM": {
        **{"vocab_size": 37, "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2},
        "max_position_embeddings": 32,
    },
    "ViTForImageClassification": _IMAGE,
    "DeiTForImageClassification": _IMAGE,
    "BeitForImageClassification": _IMAGE,
    "Dinov2ForImageClassification": _IMAGE,
    "ViTMAEForPreTraining": {
        **_IMAGE,
        **{"decoder_hidden_size": 16, "decoder_intermediate_size": 24},
        **{"decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2},
    },
    "SwinForImageClassification": {
        **_STAGES,
        **{"image_size": 32, "patch_size": 2, "embed_dim": 8, "num_heads": [2, 2], "window_size": 4},
    },
    "ConvNextForImageClassification": {**_STAGES, "hidden_sizes": [8, 16], "num_stages": 2},
    "ResNetForImageClassification": {
        **_STAGES,
        **{"embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic"},
    },
    "SegformerForSemanticSegmentation": {
        **_STAGES,
        **{"num_encoder_blocks": 2, "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3]},
        **{"strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16},
    },
    "CLIPModel": {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 8},
    "SiglipModel": {"text_config": _TEXT, "vision_config": _IMAGE},
    "BlipForConditionalGeneration": {
        "text_config": {**_TEXT, "encoder_hidden_size": 16},
        "vision_config": _IMAGE,
        "projection_dim": 8,
    },
    "LlavaForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_IMAGE, "model_type": "clip_vision_model"},
        "image_token_index": 5,
    },
    "WhisperForConditionalGeneration": {
        **_SEQ2SEQ,
        **{"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        **{"suppress_tokens": None, "begin_suppress_tokens": None},
    },
    "Wav2Vec2ForCTC": _SOUND,
    "HubertForCTC": _SOUND,
    "MambaForCausalLM": {
        **{"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4, "time_step_rank": 2},
    },
    "Mamba2ForCausalLM": {
        **{"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4, "num_heads": 4},
        **{"head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 4},
    },
}
# One layer, called for all of them: there is nothing repeated to find.
_BY_SIZE = {"AlbertForMaskedLM": {**_TEXT, "embedding_size": 8}}
_ALL_ARCHITECTURES = {**_ARCHITECTURES, **_BY_SIZE}


def _build(name: str) -> nn.Module:
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**_ALL_ARCHITECTURES[name])).eval()  # eval: without dropout


def _share(part: Group, model: nn.Module) -> float:
    return sum(found.param.numel() for found in part.params) / sum(p.numel() for p in model.parameters())


def _assert_each_parameter_once(model: nn.Module, parts: list[Group]) -> None:
    ids = [id(found.param) for part in parts for found in part.params]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_blocks_of_an_architecture_are_found(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _build(name)
    parts = group(model, UnitGrouping())
    assert not [record for record in caplog.records if record.name.startswith("hf_zero")], "grouped by size"
    _assert_each_parameter_once(model, parts)
    assert len(parts) >= 4
    for part in parts:
        assert _share(part, model) < 0.6 or "embed" in part.name or "head" in part.name, part.name


@pytest.mark.parametrize("name", _BY_SIZE)
def test_architecture_without_repeated_blocks_is_grouped_by_size(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _build(name)
    parts = group(model, UnitGrouping())
    assert any("grouped by size" in record.message for record in caplog.records)
    _assert_each_parameter_once(model, parts)
    assert len(parts) >= 3 and all(_share(part, model) < 0.6 for part in parts)


def _inputs(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 37, (2, 6), generator=generator)
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    if name in ("CLIPModel", "SiglipModel"):
        return {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}
    if name.startswith("Blip"):
        return {"input_ids": tokens, "pixel_values": pixels, "labels": tokens}
    if name.startswith("Llava"):
        with_image = torch.cat([torch.full((2, 16), 5), tokens], dim=1)
        return {"input_ids": with_image, "pixel_values": pixels, "labels": with_image}
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": tokens}
    if name.endswith("ForCTC"):
        return {"input_values": torch.randn(2, 200, generator=generator), "labels": tokens[:, :3]}
    if name.endswith("SemanticSegmentation"):
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (2, 32, 32), generator=generator)}
    if name.endswith("ForPreTraining"):
        return {"pixel_values": pixels, "noise": torch.rand(2, 16, generator=generator)}
    if name.endswith("ImageClassification"):
        return {"pixel_values": pixels, "labels": torch.tensor([0, 2])}
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Gemma2ForCausalLM", marks=pytest.mark.slow),
        "Qwen3MoeForCausalLM",
        "FalconForCausalLM",
        "BartForConditionalGeneration",
        "ElectraForMaskedLM",
        "DebertaV2ForMaskedLM",
        "AlbertForMaskedLM",
        "SwinForImageClassification",
        "SegformerForSemanticSegmentation",
        "ViTMAEForPreTraining",
        "SiglipModel",
        "LlavaForConditionalGeneration",
        "WhisperForConditionalGeneration",
        "Wav2Vec2ForCTC",
        "MambaForCausalLM",
    ],
)
@on_ranks(2)
def test_architecture_runs_on_units_as_unsharded(name: str) -> None:
    """Loss and gradients are those of the unsharded model: no parameter is read outside its unit's call."""
    model = _build(name)
    reference = copy.deepcopy(model)
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    for _ in range(2):  # the second time gathers ahead
        losses = [each(**_inputs(name)).loss for each in (model, reference)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss in losses:
            loss.backward()
    gradients = {p_name: p.grad for p_name, p in model.named_parameters()}
    for p_name, p in reference.named_parameters():
        assert (p.grad is None) == (gradients[p_name] is None), p_name
        if p.grad is not None:
            torch.testing.assert_close(whole(gradients[p_name]), p.grad, rtol=1e-4, atol=1e-5)


# ---- plain modules ---------------------------------------------------------------------------------------------------


def _names(model: nn.Module, units: object = "auto") -> dict[str, list[str]]:
    parts = group(model, UnitGrouping.from_value(units))
    _assert_each_parameter_once(model, parts)
    return {part.name: [name for found in part.params for name in found.names] for part in parts}


def test_blocks_in_a_module_list_and_what_lies_beside_them_are_units() -> None:
    assert list(_names(Net())) == ["enter", "blocks.0", "blocks.1", "blocks.2", "head"]


class Stack(nn.Module):
    """Blocks in a `Sequential`, and parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.body = nn.Sequential(Block(5), Block(5), nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_blocks_in_a_sequential_are_units_and_own_parameters_belong_to_the_model() -> None:
    assert list(_names(Stack())) == ["Stack", "body.0", "body.1", "body.2"]


class Tied(Net):
    """The first layer's weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[-1] == 3 else x


def test_tied_parameter_is_a_unit_of_its_own_needed_by_both_modules() -> None:
    model = Tied()
    names = _names(model)
    assert names["enter + head"] == ["enter.weight", "head.weight"]
    assert names["enter"] == ["enter.bias"]
    (part,) = [part for part in group(model, UnitGrouping()) if part.name == "enter + head"]
    assert part.entries == [model.enter, model.head]


def test_tied_parameter_inside_one_block_stays_in_it() -> None:
    model = Net()
    model.blocks[1].norm.bias = model.blocks[1].down.bias
    names = _names(model)
    assert {"blocks.1.norm.bias", "blocks.1.down.bias"} < set(names["blocks.1"])
    assert not any("+" in name for name in names)


class Shared(nn.Module):
    """One block in two places of a list, and once outside."""

    def __init__(self) -> None:
        super().__init__()
        block = Block(3)
        self.blocks = nn.ModuleList([block, Block(3), block])
        self.again = block

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.again):
            x = block(x)
        return x


def _trains(make: Callable[[], nn.Module], config: dict[str, Any]) -> int:
    twins = Twins(3, make, **config)
    twins.step(2)
    return len(twins.engine.units)


def test_shared_module_is_one_unit_and_trains() -> None:
    assert len(_names(Shared())) == 2
    assert run_ranks(_trains, 2, Shared, {}) == [2, 2]


def test_named_classes_are_units_outermost_first() -> None:
    assert list(_names(Net(), ["Block"])) == ["enter", "blocks.0", "blocks.1", "blocks.2", "head"]
    by_layer = _names(Net(), ["Linear"])
    assert len(by_layer) == 11 and all(len(names) == 2 for names in by_layer.values())
    assert list(_names(Net(), ["Block", "Linear"])) == ["enter", "blocks.0", "blocks.1", "blocks.2", "head"]


@pytest.mark.parametrize("units", [["Linear"], {"min_numel": 60}, {"min_numel": 10**9}])
def test_any_grouping_trains_alike(units: object) -> None:
    run_ranks(_trains, 2, Net, {"units": units})


def test_unknown_class_raises_and_names_those_there_are() -> None:
    with pytest.raises(zero.ConfigError, match=r"NoSuchClass.*Block"):
        group(Net(), UnitGrouping(class_names=("NoSuchClass",)))


def test_min_numel_makes_the_smallest_modules_of_that_size() -> None:
    model = Net()
    names = _names(model, {"min_numel": 60})
    for part in group(model, UnitGrouping(min_numel=60)):
        assert sum(found.param.numel() for found in part.params) >= 60 or part.entries == [model]
    assert {"Net", "blocks.0.up", "blocks.0.down"} < set(names)  # and not blocks.0, of which too little is left
    assert list(_names(model, {"min_numel": 10**9})) == ["Net"]


@pytest.mark.parametrize("min_numel", [1, 20, 40, 10**9])
def test_min_numel_never_cuts_into_modules_that_read_their_childrens_parameters(min_numel: int) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.MultiheadAttention(6, 2), nn.TransformerEncoderLayer(6, 2, 9))
    parts = group(model, UnitGrouping(min_numel=min_numel))
    assert not any(name.startswith(("1.", "2.")) for part in parts for name in part.name.split(" + "))


def test_small_model_without_blocks_is_grouped_by_size_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    with caplog.at_level(logging.WARNING):
        names = _names(model)
    assert len(names) == 8
    assert "no repeated blocks found in Sequential" in caplog.text and "units: [ClassName]" in caplog.text


def test_find_parameters_gives_each_once_with_all_names_and_places() -> None:
    model = Tied()
    found = find_parameters(model)
    assert len(found) == len(list(model.parameters()))
    (tied,) = [each for each in found if len(each.names) == 2]
    assert tied.names == ["enter.weight", "head.weight"]
    assert tied.locations == [(model.enter, "weight"), (model.head, "weight")]
