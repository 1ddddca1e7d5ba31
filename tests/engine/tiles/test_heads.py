"""Logits of some tokens at a time, beside the model that computes them all."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hf_zero as zero
from hf_zero.engine.tiles.put_off import PutOff
from tests.engine.tiles.models import CONFIGS, VOCAB, LargestLogits, batch, make
from tests.engine.twins import STAGES, Near, Twins
from tests.ranks import alone, on_ranks
from tests.tensor_axis import load, shared_folder

CLOSE = Near(rtol=1e-5, atol=1e-6)


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss


# ---- training ----------------------------------------------------------------------------------------------------------


@on_ranks(2, stage=STAGES, name=["llama", "gpt2", "gemma2"])
def test_training_is_that_of_all_logits_at_once(stage: int, name: str) -> None:
    twins = Twins(stage, functools.partial(make, name), loss_of, batch, near=CLOSE, tile_tokens=5)
    twins.step(2)


@on_ranks(2, name=["qwen3", "mistral", "cohere", "granite", "phi"])
def test_training_with_every_kind_of_head(name: str) -> None:
    Twins(3, functools.partial(make, name), loss_of, batch, near=CLOSE, tile_tokens=4).step(2)


@alone(name=sorted(CONFIGS))
def test_no_tensor_of_logits_is_larger_than_a_tile(name: str) -> None:
    model = make(name)
    zero.shard_model(model, zero.ZeroConfig(stage=0, tile_tokens=4))
    with LargestLogits() as seen:
        model(**batch(0, 0, 24)).loss.backward()
    assert seen.numel == 4 * VOCAB


@on_ranks(2)
def test_a_head_is_gathered_once_in_a_pass_and_reduced_once() -> None:
    model = make("llama")
    engine = zero.shard_model(model, zero.ZeroConfig(stage=3, tile_tokens=3, prefetch_bytes=0))
    counts = []
    for step in range(3):
        engine.world.ledger.reset()
        model(**batch(step, engine.world.rank)).loss.backward()
        entries = engine.world.ledger.entries
        counts.append({kind: line.calls for (kind, unit), line in entries.items() if unit == "lm_head"})
    assert counts[1] == counts[2] == {"gather": 2, "reduce_scatter": 1}, counts


@on_ranks(2, stage=[0, 2, 3])
def test_a_batch_without_a_valid_label_gives_no_gradient(stage: int) -> None:
    def draw(step: int, rank: int) -> dict[str, Any]:
        inputs: dict[str, Any] = batch(step, rank)
        if rank == 0:
            inputs["labels"] = torch.full_like(inputs["labels"], -100)
        return {**inputs, "num_items_in_batch": torch.tensor(17)}

    Twins(stage, functools.partial(make, "llama"), loss_of, draw, near=CLOSE, tile_tokens=5).step(2)


@on_ranks(2, stage=[0, 3])
def test_gradients_of_tokens_have_the_bits_of_all_logits_at_once(stage: int) -> None:
    model, reference = make("llama"), make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=stage, tile_tokens=1000))
    inputs = batch(0, 0)
    for each in (model, reference):
        each(**inputs).loss.backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = param.grad.full_tensor() if stage else param.grad
        assert torch.equal(grad, other.grad), name


@on_ranks(2, stage=[0, 3])
def test_in_half_precision_gradients_are_rounded_once(stage: int) -> None:
    dtype = "bfloat16"
    twins = Twins(
        stage, functools.partial(make, "llama"), loss_of, batch, dtype=dtype, near=Near(2e-2, 2e-3), tile_tokens=2
    )
    twins.step(2)


@on_ranks(2, stage=[1, 3])
def test_micro_batches_and_checkpointed_layers(stage: int) -> None:
    def checkpointed() -> nn.Module:
        model = make("qwen3")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    twins = Twins(stage, checkpointed, loss_of, batch, near=CLOSE, tile_tokens=5)
    for _ in range(2):
        for _ in range(2):
            twins.backward()
            twins.backward_reference()
        twins.update()


@alone()
def test_autocast_and_a_scaled_loss() -> None:
    model, reference = make("llama"), make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=0, tile_tokens=3))
    for each in (model, reference):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(**batch(0, 0)).loss
        (loss * 2**10).backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=2e-2, atol=2**10 * 2e-4)


# ---- losses of one's own --------------------------------------------------------------------------------------------------


def shifted(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = inputs.pop("labels")
    return model(**inputs).logits[:, :-1].contiguous(), labels[:, 1:].contiguous()


def plain_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, labels = shifted(model, inputs)
    return functional.cross_entropy(logits.view(-1, logits.size(-1)).float(), labels.view(-1))


def smoothed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, labels = shifted(model, inputs)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum") / 9


def smoothed_by_the_trainer(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    labels = inputs.pop("labels")
    return LabelSmoother(0.1)(model(**inputs), labels, shift_labels=True)


def preferred(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, labels = shifted(model, inputs)
    chosen, rejected = logits.div(0.7).chunk(2)
    words = labels.clamp(min=0).unsqueeze(-1)
    gains = [(x.log_softmax(-1).gather(-1, y).squeeze(-1)).sum(-1) for x, y in zip((chosen, rejected), words.chunk(2))]
    return -functional.logsigmoid(0.1 * (gains[0] - gains[1])).mean()


def entropies(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, _ = shifted(model, inputs)
    return (torch.logsumexp(logits, -1) - logits.max(-1).values).mean()


TILED = {loss.__name__: loss for loss in (plain_loss, smoothed, smoothed_by_the_trainer, preferred, entropies)}


@on_ranks(2, stage=[0, 2, 3], loss=sorted(TILED))
def test_losses_of_ones_own(stage: int, loss: str) -> None:
    Twins(stage, functools.partial(make, "gemma2"), TILED[loss], batch, near=CLOSE, tile_tokens=5).step(2)


@on_ranks(2, loss=["plain_loss", "smoothed_by_the_trainer"])
def test_a_head_in_the_unit_of_the_whole_model(loss: str) -> None:
    units = {"min_numel": 10**9}
    Twins(3, functools.partial(make, "llama"), TILED[loss], batch, near=CLOSE, tile_tokens=5, units=units).step(2)


@on_ranks(2)
def test_ranks_that_share_memory() -> None:
    Twins(3, functools.partial(make, "gpt2"), loss_of, batch, near=CLOSE, tile_tokens=5, collectives="host").step(2)


@alone(loss=sorted(TILED))
def test_losses_of_ones_own_hold_a_tile_only(loss: str) -> None:
    model = make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=0, tile_tokens=4))
    with LargestLogits() as seen:
        TILED[loss](model, batch(0, 0, 24)).backward()
    assert seen.numel == 4 * VOCAB


def distilled(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, _ = shifted(model, inputs)
    target = torch.linspace(0, 1, VOCAB).softmax(-1).expand_as(logits)
    return functional.kl_div(logits.log_softmax(-1), target, reduction="batchmean")


def transposed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, labels = shifted(model, inputs)
    return functional.cross_entropy(logits.transpose(1, 2), labels)


def written_into(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, _ = shifted(model, inputs)
    double, view = logits * 2, logits[:, 1:]
    logits[..., 3] = -5.0
    logits /= 2
    return (double.sum() + view.pow(2).sum() + logits.pow(3).sum()) / 1000


OTHERS = {loss.__name__: loss for loss in (distilled, transposed, written_into)}


@on_ranks(2, stage=[0, 3], loss=sorted(OTHERS))
def test_what_needs_all_logits_gets_them(stage: int, loss: str) -> None:
    Twins(stage, functools.partial(make, "llama"), OTHERS[loss], batch, near=CLOSE, tile_tokens=5).step(2)


# ---- what users see of logits -----------------------------------------------------------------------------------------------


@on_ranks(2, stage=[0, 2, 3])
def test_logits_beside_a_loss_are_computed_when_they_are_read(stage: int) -> None:
    model, reference = make("gemma2"), make("gemma2")
    zero.shard_model(model, zero.ZeroConfig(stage=stage, tile_tokens=5))
    inputs = batch(0, 0)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            found, expected = model(**inputs), reference(**inputs)
            assert isinstance(found.logits, PutOff)
            assert found.logits.shape == expected.logits.shape and found.logits.dtype == expected.logits.dtype
            torch.testing.assert_close(found.logits.argmax(-1), expected.logits.argmax(-1))
            torch.testing.assert_close(found.logits.detach().numpy(), expected.logits.detach().numpy())
            torch.testing.assert_close(found.loss, expected.loss)


@on_ranks(2, stage=[0, 3])
def test_a_forward_without_a_loss_gives_plain_logits_where_there_is_no_graph(stage: int) -> None:
    model, reference = make("llama"), make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=stage, tile_tokens=5))
    inputs = {key: value for key, value in batch(0, 0).items() if key != "labels"}
    with torch.no_grad():
        found = model(**inputs).logits
    assert type(found) is Tensor
    torch.testing.assert_close(found, reference(**inputs).logits)
    ids = inputs["input_ids"][:1, :4]
    expected = reference.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)


@on_ranks(2, stage=[0, 2, 3])
def test_logits_of_weights_that_have_changed_since_are_an_error(stage: int) -> None:
    model = make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=stage, tile_tokens=5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = model(**batch(0, 0))
    found.loss.backward()
    optimizer.step()
    with pytest.raises(zero.UsageError, match="have changed since the forward"):
        found.logits.argmax(-1)


@alone()
def test_gradients_of_logits_are_not_lost_silently() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    model = make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=0, tile_tokens=5))
    found = model(**batch(0, 0))
    with pytest.raises(zero.UsageError, match="would see no gradient"):
        found.logits.retain_grad()
    with pytest.raises(zero.UsageError, match="would be lost"):
        Twice.apply(found.logits).sum().backward()
    Twice.apply(found.logits.clone()).sum().backward()
    assert model.lm_head.weight.grad is not None


@alone()
def test_a_copy_of_a_model_computes_all_logits_until_it_has_an_engine() -> None:
    model = make("llama")
    engine = zero.shard_model(model, zero.ZeroConfig(stage=0, tile_tokens=5))
    assert "_compiled_call_impl" not in vars(copy.deepcopy(model).lm_head)
    engine.close()
    assert type(model(**batch(0, 0)).logits) is Tensor


# ---- the tensor axis ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_head_that_the_tensor_axis_cuts_is_an_error() -> None:
    with zero.Init(zero.ZeroConfig(stage=1, tp_size=2, tile_tokens=4)):
        model = load(shared_folder("llama"))
    with pytest.raises(zero.ConfigError, match=r"'lm_head.weight' is cut over the tensor axis"):
        zero.shard_model(model)
