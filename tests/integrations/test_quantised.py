"""Adapters on quantised models (QLoRA): their weights stay whole, everything else is partitioned as ever."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import hf_zero as zero
from hf_zero.comm.backends import wire
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.shapes import shapes_of
from hf_zero.plan.summary import model_states
from tests.engine.twins import whole
from tests.integrations.test_peft_methods import logits, trained
from tests.integrations.trainer.runs import arguments, logged, trainer_of, undone
from tests.models import CASES, make_model
from tests.ranks import by_hand, on_ranks, run_alone, run_ranks

pytest.importorskip("bitsandbytes")
LLAMA = CASES["llama"]
KINDS: dict[str, dict[str, Any]] = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "4bit_in_floats": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.float32},
    "8bit": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("quantised")
    make_model(LLAMA).save_pretrained(path / "llama")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(path / "wide")
    return str(path)


def adapted(folder: str, kind: str) -> nn.Module:
    config = BitsAndBytesConfig(**KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(
        f"{folder}/llama", quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config).train()  # in evaluation, bitsandbytes packs weights of some sizes only


def adapters(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.detach() for name, param in model.named_parameters() if "lora" in name}
    return {name: whole(param).clone() for name, param in found.items()}


CASES_OF_STAGES = [(0, "4bit"), (1, "8bit"), (2, "4bit_in_floats"), (3, "4bit"), (3, "4bit_in_floats")]
BY_HAND = [case for case in itertools.product((0, 1, 2), KINDS) if case not in CASES_OF_STAGES]


@on_ranks(2, case=[*CASES_OF_STAGES, *by_hand(*BY_HAND)])
def test_training_equals_one_process(case: tuple[int, str], folder: str) -> None:
    stage, kind = case
    ours, reference = adapted(folder, kind), adapted(folder, kind)
    quantised = {n: p for n, p in ours.named_parameters() if type(p).__name__ in ("Params4bit", "Int8Params")}
    before = adapters(ours)
    assert len(quantised) == 14
    zero.shard_model(ours, {"stage": stage, "collectives": "pairwise"})
    losses, expected = trained(ours, LLAMA, [dist.get_rank()]), trained(reference, LLAMA, [0, 1])
    assert losses == [[by_rank[dist.get_rank()]] for by_rank in expected]
    found, weights = adapters(ours), adapters(reference)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert not all(torch.equal(found[name], value) for name, value in before.items())
    if stage < 3:
        assert all(dict(ours.named_parameters())[name] is param for name, param in quantised.items())
    else:
        assert all(isinstance(ours.get_parameter(name), DTensor) for name in quantised)
    assert stage == 0 or isinstance(ours.get_parameter("base_model.model.lm_head.weight"), DTensor)


@on_ranks(2)
def test_wire_formats_leave_packed_bytes_alone(folder: str) -> None:
    """A layer of 4-bit weights in floats, of which each rank has blocks of the format."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.float32)
    models = [
        AutoModelForCausalLM.from_pretrained(f"{folder}/wide", quantization_config=config, device_map={"": "cpu"})
        for _ in range(2)
    ]
    for model in models:
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)
    ids = torch.arange(12).view(2, 6)
    zero.shard_model(models[0], {"stage": 3, "collectives": "pairwise", "wire": {"gather": "bfloat16"}})
    found, expected = (model(input_ids=ids).logits for model in models)
    packed = [p for p in models[0].parameters() if isinstance(p, DTensor) and p.to_local().numel() >= wire.BLOCK]
    assert len(packed) > 4
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@on_ranks(2)
def test_checkpointed_training_in_stage_3_has_one_block_whole_at_a_time(folder: str) -> None:
    ours, reference = adapted(folder, "4bit"), adapted(folder, "4bit")
    for model in (ours, reference):
        model.base_model.model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    num_bytes = sum(p.numel() for p in ours.parameters() if type(p).__name__ == "Params4bit")
    config = {"stage": 3, "collectives": "pairwise", "prefetch_bytes": 0, "reshard_after_forward": True}
    engine = zero.shard_model(ours, config)
    assert trained(ours, LLAMA, [dist.get_rank()])[1] == trained(reference, LLAMA, [0, 1])[1][dist.get_rank() :][:1]
    quantised = [p for p in engine.parameters if p.param.dtype == torch.uint8]
    assert sum(p.local.nbytes for p in quantised) == num_bytes / 2
    assert engine.memory.bytes == 0
    assert engine.memory.peak_bytes <= max(unit.buffer_nbytes for unit in engine.units) * 1.1


@on_ranks(2)
def test_backward_that_begins_inside_a_block_finds_its_bytes(folder: str) -> None:
    ours, reference = adapted(folder, "4bit"), adapted(folder, "4bit")
    zero.shard_model(ours, {"stage": 3, "collectives": "pairwise", "prefetch_bytes": 0})
    found = []
    for model in (ours, reference):
        caught: list[Tensor] = []
        block = model.base_model.model.model.layers[0]
        block.mlp.up_proj.register_forward_hook(lambda module, args, output, caught=caught: caught.append(output))
        model(**LLAMA.batch(0, 0))
        caught[0].square().sum().backward()
        weight = block.self_attn.v_proj.lora_B["default"].weight
        assert weight.grad is not None
        found.append(whole(weight.grad))
    torch.testing.assert_close(*found)


@on_ranks(2)
def test_evaluation_generation_and_merging_in_stage_3_are_those_of_the_whole_model(folder: str) -> None:
    ours, reference = adapted(folder, "4bit").eval(), adapted(folder, "4bit").eval()
    for module in reference.modules():  # what packs weights in evaluation, for kernels with other roundings
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    zero.shard_model(ours, {"stage": 3, "collectives": "pairwise"})
    assert torch.equal(logits(ours, LLAMA), logits(reference, LLAMA))
    inputs = LLAMA.batch(0, dist.get_rank())["input_ids"][:, :4]
    tokens = [m.generate(input_ids=inputs, max_new_tokens=5, do_sample=False) for m in (ours, reference)]
    assert torch.equal(*tokens)
    with zero.GatheredParameters(ours):
        merged = ours.merge_and_unload()
    torch.testing.assert_close(logits(merged, LLAMA), logits(reference.merge_and_unload(), LLAMA), rtol=0, atol=0)


@undone
def train(folder: str, stage: int | None, out: str, resumes: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    size = 4 // dist.get_world_size()
    options = {"output_dir": out, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": size}
    args = arguments(folder, stage, **options)
    model = adapted(folder, "4bit")
    trainer = trainer_of(model, args)
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2" if resumes else None)
    trainer.save_model(f"{out}/final")
    return logged(trainer), adapters(model)


def load(folder: str, adapter: str) -> Tensor:
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/llama")
    return logits(peft.PeftModel.from_pretrained(base, adapter), LLAMA)


@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_trains_saves_and_goes_on_as_under_ddp(stage: int, folder: str, tmp_path: Path) -> None:
    plain, ours = str(tmp_path / "ddp"), str(tmp_path / "zero")
    expected = run_ranks(train, 2, folder, None, plain)[0]
    results = [run_ranks(train, 2, folder, stage, ours)[0]]
    saved = [run_alone(load, folder, f"{out}/final") for out in (plain, ours)]
    torch.testing.assert_close(*saved, rtol=0, atol=1e-5)
    results += [
        run_ranks(train, ranks, folder, other, ours, True)[0] for ranks, other in ((2, stage), (1, 2), (2, 5 - stage))
    ]
    for losses, weights in results:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, value in expected[1].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-6)


@on_ranks(2)
@undone
def test_what_cannot_be_cut_is_an_error_that_says_what_can(folder: str) -> None:
    with pytest.raises(zero.PartitionError, match=r"4-bit ones only.*stage 2 \(or 1\)"):
        zero.shard_model(adapted(folder, "8bit"), {"stage": 3})
    with pytest.raises(zero.PartitionError, match=r"outside of zero\.Init"), zero.Init({"stage": 1}):
        adapted(folder, "4bit")


class Int8Weight(Tensor):
    """Packed bytes and their scales, as torchao wraps them: knows what to do in a linear layer, and little else."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> Int8Weight:
        made: Int8Weight = Tensor._make_wrapper_subclass(cls, packed.shape, dtype=scale.dtype)
        return made

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.packed.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        raise NotImplementedError(f"{func} of Int8Weight")


class PackedInBuffers(nn.Module):
    """A layer without a parameter, as GPTQ's and AWQ's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, None
        weight = Int8Weight.of(layer.weight.detach())
        self.register_buffer("qweight", weight.packed)
        self.register_buffer("scales", weight.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.qweight.to(x.dtype) * self.scales).t()  # type: ignore[operator]


def with_int8(in_buffers: bool) -> nn.Module:
    model = make_model(LLAMA)
    for block in model.model.layers:
        for part, name in [(block.mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]:
            layer = getattr(part, name)
            if in_buffers:
                setattr(part, name, PackedInBuffers(layer))
            else:
                layer.weight = nn.Parameter(Int8Weight.of(layer.weight.detach()), requires_grad=False)
    model.is_quantized, model.quantization_method = True, "int8"
    torch.manual_seed(3)
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, adapters)


@on_ranks(2, stage=[0, 1, 2, 3], in_buffers=[False, True])
def test_weights_of_other_quantisers_stay_whole_and_adapters_train(stage: int, in_buffers: bool) -> None:
    ours, reference = with_int8(in_buffers), with_int8(in_buffers)
    config = {"stage": stage, "collectives": "pairwise"}
    if stage == 3:
        with pytest.raises(zero.PartitionError, match=r"quantised \(int8.*4-bit ones only.*stage 2 \(or 1\)"):
            zero.shard_model(ours, config)
        return
    zero.shard_model(ours, config)
    losses, expected = trained(ours, LLAMA, [dist.get_rank()]), trained(reference, LLAMA, [0, 1])
    assert losses == [[by_rank[dist.get_rank()]] for by_rank in expected]
    found, weights = adapters(ours), adapters(reference)
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@on_ranks(2)
def test_other_values_on_a_rank_are_found_in_what_wrappers_hold() -> None:
    model = with_int8(in_buffers=False)
    if dist.get_rank() == 1:
        model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight").packed.add_(1)
    with pytest.raises(zero.PartitionError, match=r"mlp\.up_proj\.weight.*are others on rank"):
        zero.shard_model(model, {"stage": 1, "collectives": "pairwise"})


@on_ranks(2, stage=[2, 3])
def test_the_plan_counts_what_the_engine_holds(stage: int, folder: str) -> None:
    ours = adapted(folder, "4bit")
    config = {"stage": stage, "collectives": "pairwise", "prefetch_bytes": 0}
    states = model_states(zero.shard_model(ours, config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_model(LLAMA).config, dtype=torch.float32)
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    shape = shapes_of(model, in_4bit=True)
    held = predict(shape, Setting(ZeroConfig(**config), 2), rank=dist.get_rank())
    left = sum(p.numel() for p in ours.parameters() if type(p).__name__ == "Params4bit")  # bytes that no engine holds
    assert (left > 0) == (stage == 2)
    assert (held.parameters - left, held.gradients) == (states.parameters, states.gradients)
    assert held.optimizer == states.optimizer
    packed = [p for name, p in ours.named_parameters() if "proj" in name and "lora" not in name]
    kept = [p.quant_state for p in packed]
    tensors = [t for q in kept for t in (q.absmax, q.code, q.offset, q.state2.absmax, q.state2.code)]
    buffers = sum(b.numel() * b.element_size() for b in ours.buffers())
    assert shape.buffer_bytes == buffers + sum(t.numel() * t.element_size() for t in tensors)
