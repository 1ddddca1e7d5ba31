"""Modules that compute in float32 while the model computes in half precision, against a plain model that does so by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.engine.modules.float32 import find_modules
from tests.models import CASES, make_model
from tests.ranks import on_ranks, run_alone, run_ranks

CASE, NORMS, NUM_STEPS = CASES["llama"], "LlamaRMSNorm", 3


def whole(param: Tensor) -> Tensor:
    return param.detach().full_tensor() if isinstance(param, DTensor) else param.detach().clone()


def train(stage: int, dtype: str, keep: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    model, losses, rank = make_model(CASE), [], dist.get_rank()
    zero.shard_model(model, {"stage": stage, "compute_dtype": dtype, "keep_fp32": keep})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(NUM_STEPS):
        loss = CASE.loss(model, CASE.batch(step, rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: whole(param) for name, param in model.named_parameters()}


def widen(norm: nn.Module) -> None:
    plain = norm.forward
    norm.forward = lambda hidden: plain(hidden.float()).to(hidden.dtype)


def oracle(num_ranks: int, dtype: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    model = make_model(CASE)
    worker = copy.deepcopy(model)
    for param in worker.parameters():
        param.data = param.data.to(getattr(torch, dtype))
    for module in worker.modules():
        if type(module).__name__ == NORMS:
            module.weight.data = module.weight.data.float()
            widen(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            worker.zero_grad()
            loss = CASE.loss(worker, CASE.batch(step, rank))
            loss.backward()
            losses[rank].append(loss.item())
            for master, param in zip(model.parameters(), worker.parameters(), strict=True):
                master.grad = param.grad.float() + (0 if master.grad is None else master.grad)
        for master in model.parameters():
            master.grad /= num_ranks
        optimizer.step()
        optimizer.zero_grad()
        for master, param in zip(model.parameters(), worker.parameters(), strict=True):
            param.data.copy_(master.data)
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "dtype", "keep"),
    [
        (1, "bfloat16", [NORMS]),
        (2, "float16", ["*norm"]),
        (3, "bfloat16", ["norm", "*_layernorm"]),
        (3, "float16", [NORMS]),
    ],
)
def test_norms_in_float32_are_those_of_one_process(stage: int, dtype: str, keep: list[str]) -> None:
    losses, weights = run_alone(oracle, 2, dtype)
    for rank, (found, found_weights) in enumerate(run_ranks(train, 2, stage, dtype, keep)):
        assert found == losses[rank]
        for name, value in weights.items():
            torch.testing.assert_close(found_weights[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("autocasts", [False, True])
@on_ranks(2)
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


@pytest.mark.parametrize(("dtype", "expected"), [("float16", torch.float32), ("bfloat16", torch.bfloat16)])
@on_ranks(2)
def test_what_transformers_keeps_in_float32_stays_so(dtype: str, expected: torch.dtype) -> None:
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
