"""Modules that compute in float32 while the model computes in half precision, against a plain model that does so by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero as zero
from hf_zero.engine.modules.float32 import find_modules
from tests.engine.twins import SAME_BITS, Twins
from tests.models import CASES, make_model
from tests.ranks import on_ranks

CASE, NORMS = CASES["llama"], "LlamaRMSNorm"


def compute_in_float32(norm: nn.Module) -> None:
    plain = norm.forward
    norm.float()
    norm.forward = lambda hidden: plain(hidden.float()).to(hidden.dtype)


@on_ranks(
    2,
    case=[
        (1, "bfloat16", [NORMS]),
        (2, "float16", ["*norm"]),
        (3, "bfloat16", ["norm", "*_layernorm"]),
        (3, "float16", [NORMS]),
    ],
)
def test_norms_in_float32_have_the_bits_of_one_process(case: tuple[int, str, list[str]]) -> None:
    stage, dtype, keep = case
    adamw = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # noqa: E731
    make, options = lambda: make_model(CASE), {"dtype": dtype, "near": SAME_BITS, "keep_fp32": keep}
    twins = Twins(stage, make, CASE.loss, CASE.batch, optimizer=adamw, **options)
    for module in twins.worker.modules():
        if type(module).__name__ == NORMS:
            compute_in_float32(module)
    twins.step(3)


@on_ranks(2, autocasts=[False, True])
def test_router_computes_in_float32_and_its_block_goes_on_in_half(autocasts: bool) -> None:
    model = make_model(CASES["mixtral"])
    model.set_experts_implementation("eager")  # torch's grouped product wants wider rows
    zero.shard_model(model, {"stage": 3, "compute_dtype": "bfloat16", "keep_fp32": ["MixtralTopKRouter"]})
    seen: list[Any] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(
                lambda m, args, out: seen.append((args[0].dtype, m.weight.dtype, out[0].dtype))
            )
        elif name.endswith("mlp"):
            module.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        CASES["mixtral"].loss(model, CASES["mixtral"].batch(0, dist.get_rank())).backward()
        assert torch.is_autocast_enabled("cpu") == autocasts
    assert seen == [(torch.float32, torch.float32, torch.float32), torch.bfloat16] * 2, seen


@on_ranks(2, dtypes=[("float16", torch.float32), ("bfloat16", torch.bfloat16)])
def test_what_transformers_keeps_in_float32_stays_so(dtypes: tuple[str, torch.dtype]) -> None:
    dtype, expected = dtypes
    case = CASES["t5"]
    model = make_model(case)
    engine = zero.shard_model(model, {"stage": 3, "compute_dtype": dtype})
    compute = {p.name: p.compute_dtype for p in engine.parameters}
    assert {kind for name, kind in compute.items() if ".wo." in name} == {expected}
    assert {kind for name, kind in compute.items() if ".wo." not in name} == {getattr(torch, dtype)}
    loss = case.loss(model, case.batch(0, dist.get_rank()))
    loss.backward()
    assert loss.isfinite() and model.encoder.block[0].layer[1].DenseReluDense.wo.weight.grad is not None


def test_entry_that_fits_no_module_is_named() -> None:
    model = make_model(CASE)
    with pytest.raises(zero.ConfigError, match=r"'LlamaNorm' fits no module of LlamaForCausalLM.*LlamaRMSNorm"):
        zero.shard_model(model, {"keep_fp32": ["LlamaRMSNorm", "LlamaNorm"]})
    assert not hasattr(model, "_zero_engine")


def test_outermost_modules_are_found_by_class_name_or_last_name() -> None:
    model = make_model(CASES["mixtral"])

    def names(*entries: str) -> list[str]:
        chosen = find_modules(model, zero.ZeroConfig(keep_fp32=entries))
        return [name for name, module in model.named_modules() if module in chosen]

    assert (
        names("gate") == names("*.gate") == names("MixtralTopKRouter") == [f"model.layers.{i}.mlp.gate" for i in (0, 1)]
    )
    assert names("mlp", "gate") == [f"model.layers.{i}.mlp" for i in (0, 1)]
