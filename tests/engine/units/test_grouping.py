"""A model -> its units: the repeated blocks of the architectures that people train, and of plain modules."""

import copy
import logging

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.config.zero_config import UnitGrouping
from hf_zero.engine.units.grouping import Group, find_parameters, group
from tests.architectures.build import build, forward, loss_of
from tests.architectures.configs import tiny_config
from tests.engine.twins import Block, Net, Twins, whole
from tests.ranks import by_hand, on_ranks

_ARCHITECTURES = [
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("MixtralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"),
    *("Olmo2ForCausalLM", "CohereForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "GPTNeoXForCausalLM"),
    *("BloomForCausalLM", "OPTForCausalLM", "FalconForCausalLM", "MptForCausalLM", "T5ForConditionalGeneration"),
    *("BartForConditionalGeneration", "MBartForConditionalGeneration", "PegasusForConditionalGeneration"),
    *("BertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaForMaskedLM", "ElectraForMaskedLM", "DebertaV2ForMaskedLM"),
    *("ModernBertForMaskedLM", "DistilBertForMaskedLM", "ViTForImageClassification", "DeiTForImageClassification"),
    *("BeitForImageClassification", "Dinov2ForImageClassification", "ViTMAEForPreTraining"),
    *("SwinForImageClassification", "ConvNextForImageClassification", "ResNetForImageClassification"),
    *("SegformerForSemanticSegmentation", "CLIPModel", "SiglipModel", "BlipForConditionalGeneration"),
    *("LlavaForConditionalGeneration", "WhisperForConditionalGeneration", "Wav2Vec2ForCTC", "HubertForCTC"),
    *("MambaForCausalLM", "Mamba2ForCausalLM"),
]


def _build(name: str) -> nn.Module:
    model_class = getattr(transformers, name)
    config = tiny_config(_model_type(name))
    if hasattr(config, "depths"):
        config.depths = [2] * len(config.depths)  # blocks that repeat within a stage
    return model_class(config)


def _model_type(name: str) -> str:
    return getattr(transformers, name).config_class.model_type


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


def test_architecture_without_repeated_blocks_is_grouped_by_size(caplog: pytest.LogCaptureFixture) -> None:
    model = _build("AlbertForMaskedLM")  # one layer, called for all of them
    with caplog.at_level(logging.INFO):
        parts = group(model, UnitGrouping())
    assert any("grouped by size" in record.message for record in caplog.records)
    _assert_each_parameter_once(model, parts)
    assert len(parts) >= 3 and all(_share(part, model) < 0.6 for part in parts)


_RUN = [
    *("AlbertForMaskedLM", "SwinBackbone"),
    *by_hand(
        "DebertaV2ForMaskedLM",
        "ViTMAEForPreTraining",
        "Qwen3MoeForCausalLM",
        "SiglipModel",
        "MambaForCausalLM",
        "BartForConditionalGeneration",
    ),
    *by_hand("FalconForCausalLM", "ElectraForMaskedLM", "SegformerForSemanticSegmentation"),
    *by_hand("LlavaForConditionalGeneration", "WhisperForConditionalGeneration", "Wav2Vec2ForCTC", "Gemma2ForCausalLM"),
]


@on_ranks(2, name=_RUN)
def test_architecture_runs_on_units_as_unsharded(name: str) -> None:
    """Loss and gradients are those of the unsharded model: no parameter is read outside its unit's call."""
    tiny = build(_model_type(name), name)
    model, reference = tiny.model, copy.deepcopy(tiny.model)
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    for _ in range(2):  # the second time gathers ahead
        losses = [loss_of(forward(each, tiny.inputs(1), 1)) for each in (model, reference)]
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


@on_ranks(2)
def test_shared_module_is_one_unit_and_trains() -> None:
    assert len(_names(Shared())) == 2
    twins = Twins(3, Shared)
    twins.step(2)
    assert len(twins.engine.units) == 2


def test_named_classes_are_units_outermost_first() -> None:
    assert list(_names(Net(), ["Block"])) == ["enter", "blocks.0", "blocks.1", "blocks.2", "head"]
    by_layer = _names(Net(), ["Linear"])
    assert len(by_layer) == 11 and all(len(names) == 2 for names in by_layer.values())
    assert list(_names(Net(), ["Block", "Linear"])) == ["enter", "blocks.0", "blocks.1", "blocks.2", "head"]


@on_ranks(2, units=[["Linear"], {"min_numel": 60}, {"min_numel": 10**9}])
def test_any_grouping_trains_alike(units: object) -> None:
    Twins(3, units=units).step(2)


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


@pytest.mark.parametrize("width", [4, 1200])
def test_model_without_blocks_is_grouped_by_size_with_a_warning_if_it_is_large(
    width: int, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    with caplog.at_level(logging.WARNING):
        names = _names(model)
    assert len(names) == 8
    if width == 4:
        assert not caplog.text
        return
    assert "no repeated blocks found in Sequential" in caplog.text and "units: [ClassName]" in caplog.text


def test_find_parameters_gives_each_once_with_all_names_and_places() -> None:
    model = Tied()
    found = find_parameters(model)
    assert len(found) == len(list(model.parameters()))
    (tied,) = [each for each in found if len(each.names) == 2]
    assert tied.names == ["enter.weight", "head.weight"]
    assert tied.locations == [(model.enter, "weight"), (model.head, "weight")]
