"""What users do with a partitioned model under `torch.inference_mode()` gives what it gives with a plain one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.ranks import on_ranks

_INPUTS = torch.arange(24.0).view(3, 8) / 24


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5))


def _edited(model: nn.Module) -> list[Tensor]:
    for param in model.parameters():
        param.mul_(0.9)
        param.data.add_(0.01)
        param[0].fill_(0.5)
    torch._foreach_mul_(list(model.parameters()), 1.1)
    return list(model.parameters())


def _loaded(model: nn.Module) -> list[Tensor]:
    model.load_state_dict({name: _whole(value) * 0.99 for name, value in model.state_dict().items()})
    return list(model.parameters())


_USES: dict[str, Callable[[Any], list[Tensor]]] = {
    "states": lambda model: list(model.state_dict().values()),
    "views": lambda model: [each for p in model.parameters() for each in (p[0], p.view(-1)[1:], p.t(), p.detach())],
    "casts": lambda model: [
        each for p in model.parameters() for each in (p.to(torch.device("cpu")), p.double(), p.type(torch.bfloat16))
    ],
    "moved": lambda model: [model.to(torch.device("cpu"), torch.float32)(_INPUTS)],
    "products": lambda model: [
        model[0].weight @ model[0].weight.T,
        model[0].weight.norm(),
        _INPUTS @ model[0].weight.T,
    ],
    "parts that are conjugate": lambda model: [torch.fft.hfftn(model[0].weight)],
    "vector": lambda model: [nn.utils.parameters_to_vector(model.parameters())],
    "numbers": lambda model: [torch.tensor(model[2].weight.reshape(-1)[3:5].tolist())],
    "called": lambda model: [torch.func.functional_call(model, dict(model.named_parameters()), (_INPUTS,))],
    "copied": lambda model: [copy.deepcopy(model)(_INPUTS)],
    "edited": _edited,
    "loaded": _loaded,
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_uses_under_inference_mode_give_what_they_give_of_a_plain_model(stage: int) -> None:
    plain, model = _model(), _model()
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise", "timeout_s": 60})
    for use, of in _USES.items():
        with torch.inference_mode():
            found, expected = of(model), of(plain)
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(_whole(here), _whole(there), msg=lambda text, use=use: f"{use}: {text}")
        torch.testing.assert_close(_trained(model), _trained(plain))


def _trained(model: nn.Module) -> Tensor:
    """The loss before a step that is taken."""
    loss = model(_INPUTS).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()
    return loss.detach()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
