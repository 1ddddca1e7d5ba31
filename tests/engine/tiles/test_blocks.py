"""MLPs of some tokens at a time, beside those of all tokens."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero as zero
from hf_zero.engine.tiles.blocks import mlps_of
from tests.engine.tiles.models import batch, make
from tests.engine.twins import Near, Net, Twins
from tests.models import CASES, make_model
from tests.ranks import alone, on_ranks
from tests.tensor_axis import load, shared_folder, tokens

CLOSE = Near(rtol=1e-5, atol=1e-6)


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss


def checkpointed(name: str) -> nn.Module:
    model = make(name)
    model.gradient_checkpointing_enable()
    return model


@on_ranks(2, stage=[0, 2, 3], name=["llama", "gpt2"])
def test_training_is_that_of_all_tokens_at_once(stage: int, name: str) -> None:
    Twins(stage, functools.partial(make, name), loss_of, batch, near=CLOSE, tile_mlp=3, tile_tokens=5).step(2)


@on_ranks(2, units=["auto", {"min_numel": 1}])
def test_training_with_checkpointed_layers_and_smaller_units(units: object) -> None:
    make_it = functools.partial(checkpointed, "qwen3")
    Twins(3, make_it, loss_of, batch, near=CLOSE, tile_mlp=4, tile_tokens=5, units=units).step(2)


class Widest(TorchDispatchMode):
    """Sees how many tokens of the width between an MLP's layers there are at most."""

    num_tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.ndim > 1 and found.shape[-1] == 28 and found.shape != (16, 28):
            self.num_tokens = max(self.num_tokens, found[..., 0].numel())
        return found


@alone()
def test_no_more_tokens_than_a_tile_are_between_the_layers() -> None:
    model = make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=0, tile_mlp=4))
    with Widest() as seen:
        model(**batch(0, 0, 24)).loss.backward()
    assert seen.num_tokens == 4


@alone()
def test_dropout_draws_the_same_numbers_in_the_backward() -> None:
    model = make("gpt2")
    for each in mlps_of(model):
        each.dropout.p = 0.5
    zero.shard_model(model, zero.ZeroConfig(stage=0, tile_mlp=4))
    mlp, (x, step, weights) = next(iter(mlps_of(model))), torch.randn(3, 2, 9, 16)
    x.requires_grad_()

    def drawn(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return (mlp(x) * weights).sum()

    drawn(x).backward()
    with torch.no_grad():
        rise = (drawn(x + 1e-2 * step) - drawn(x - 1e-2 * step)) / 2e-2
    assert x.grad is not None
    torch.testing.assert_close((x.grad * step).sum(), rise, rtol=1e-2, atol=1e-4)


def test_experts_and_their_routers_are_left_alone() -> None:
    assert not list(mlps_of(make_model(CASES["mixtral"])))
    assert len(list(mlps_of(make("llama")))) == 2


@alone()
def test_a_model_without_an_mlp_is_an_error() -> None:
    with pytest.raises(zero.ConfigError, match="no MLP found in Net"):
        zero.shard_model(Net(), zero.ZeroConfig(stage=0, tile_mlp=4))


@on_ranks(2, stage=[1, 3])
def test_layers_that_the_tensor_axis_cuts(stage: int) -> None:
    folder, losses, norms = shared_folder("llama"), [], []
    for tile in (0, 4):
        with zero.Init(zero.ZeroConfig(stage=stage, tp_size=2, tile_mlp=tile)):
            model = load(folder)
        inputs = tokens(0, 0)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=1e-6)
