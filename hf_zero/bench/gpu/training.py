"""What the parts train: small models with batches of their own on each rank, and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_zero
from hf_zero.bench.step.engines import Setup, Training, build
from hf_zero.engine.engine import ZeroEngine
from hf_zero.plan.models import config_of

STEPS = 4
_TIMEOUT_S = 60.0
_SIZES = (2, 32)  # sequences and tokens of a rank
_LEARNING_RATE = 1e-2


def small_model() -> nn.Module:
    """Two blocks that compute almost nothing, the same on every rank, on the CPU."""
    torch.manual_seed(0)
    config = config_of("llama-thin-8")
    config.num_hidden_layers, config.use_cache = 2, False
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def partitioned(stage: int, **config: Any) -> nn.Module:
    """The small model under hf_zero, on this rank's device."""
    model = small_model()
    hf_zero.shard_model(model, {"stage": stage, "timeout_s": _TIMEOUT_S, **config})
    return model


def engine_of(model: nn.Module) -> ZeroEngine:
    """The engine of a model that `partitioned` has made."""
    engine = hf_zero.engine_of(model)
    assert engine is not None
    return engine


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused, as on devices."""
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)


def batch(step: int, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(256, _SIZES, generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def train(
    model: nn.Module, device: torch.device, steps: range = range(STEPS), optimizer: torch.optim.Optimizer | None = None
) -> Tensor:
    """This rank's losses, fetched at the end only: [steps]."""
    return _trained(model, device, steps, [dist.get_rank()], optimizer or adamw(model))


def expected(device: torch.device) -> Tensor:
    """The losses of this rank's batches when one process trains on those of all: [steps]."""
    model = small_model().to(device)
    return _trained(model, device, range(STEPS), range(dist.get_world_size()), adamw(model), dist.get_rank())


def _trained(
    model: nn.Module,
    device: torch.device,
    steps: range,
    ranks: Sequence[int],
    optimizer: torch.optim.Optimizer,
    own: int = 0,
) -> Tensor:
    found = []
    for step in steps:
        losses = [model(**batch(step, rank, device)).loss for rank in ranks]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[own].detach())
    return torch.stack(found).float().cpu()


def under(engine: str, device: torch.device, given: dict[str, Any], offload: object = "none") -> Training:
    """The model to measure under an engine of `hf-zero bench step`, in bfloat16, some of it in the host's memory."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = config_of(given["model"])
        config.use_cache = False
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model.train()

    return build(engine, Setup(make, device, torch.bfloat16, given["batch_size"], offload))


def step(trained: Training, device: torch.device, given: dict[str, Any], number: int = 0) -> Tensor:
    """One step of it, on the batch of that number; its loss."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(256, (given["batch_size"], given["seq_len"]), generator=generator).to(device)
    with trained.context():
        loss = trained.model(input_ids=tokens, labels=tokens).loss
    trained.backward(loss)
    trained.step()
    return cast(Tensor, loss.detach())


def worst(value: float) -> float:
    """The greatest value of all ranks."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)  # in the host's memory, over gloo
    return float(values)
