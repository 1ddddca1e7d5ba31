"""Modules and libraries with habits of their own: RNNs, torch's attention, torch.compile, PEFT, optimizers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import SHARDED, STAGES, Net, Twins, assert_same, batch, square_loss
from tests.ranks import on_ranks


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.enter(x)[None])[0])


def _ran(model: nn.Module, operator: str) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch(0, 0))
    return any(event.key == operator for event in profile.key_averages())


def _train_and_evaluate(stage: int, make: Callable[[], nn.Module], config: dict[str, Any], operator: str = "") -> None:
    twins = Twins(stage, make, **config)
    twins.step(2)
    for model in (twins.model, twins.reference):
        model.eval()
    twins.assert_same_output()
    with torch.inference_mode():
        torch.testing.assert_close(twins.model(batch(0, 0)), twins.reference(batch(0, 0)))
        assert not operator or _ran(twins.model, operator)
    for model in (twins.model, twins.reference):
        model.train()
    twins.step()


@on_ranks(2, stage=STAGES)
def test_lstm_with_flat_weights_trains(stage: int) -> None:
    _train_and_evaluate(stage, Recurrent, {})


class Attentive(nn.Module):
    """An encoder of torch's own; its attention reads `out_proj` without calling it, in evaluation on a fast path."""

    num_layers = 2

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=9, dropout=0.0, batch_first=True)
        self.enter = nn.Linear(3, 6)
        self.encoder = nn.TransformerEncoder(layer, self.num_layers) if self.num_layers > 1 else layer
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.enter(x)[None])
        return self.head(self.attention(x, x, x)[0])


class AttentiveOnce(Attentive):
    num_layers = 1


@on_ranks(2, stage=[1, 3], case=[(Attentive, {}), (AttentiveOnce, {}), (Attentive, {"units": {"min_numel": 30}})])
def test_torchs_attention_trains_and_evaluates_on_its_fast_path(stage: int, case: Any) -> None:
    make, config = case  # blocks that repeat; none, so units by size; units by a size that is given
    _train_and_evaluate(stage, make, config, "aten::_native_multi_head_attention")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.enter(x))


@on_ranks(2, stage=[0, 3])
def test_buffers_start_as_those_of_rank_0_and_are_again_at_the_forward_after_a_backward(stage: int) -> None:
    model = Normed()
    model.norm.running_mean.fill_(1.0 + dist.get_rank())
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    assert torch.equal(model.norm.running_mean, torch.ones(5))
    square_loss(model, batch(0, dist.get_rank())).backward()
    model.eval()
    with torch.inference_mode() if stage else torch.no_grad():
        model(batch(0, 0))
    after = [torch.empty(5) for _ in range(2)]
    dist.all_gather(after, model.norm.running_mean)
    assert torch.equal(*after) and not torch.equal(after[0], torch.ones(5))


@on_ranks(2, stage=STAGES)
def test_initial_values_are_those_of_rank_0(stage: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    torch.manual_seed(0)
    assert_same(model, Net())


def _lora_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=33, num_key_value_heads=2, **sizes))
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return model


def _tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 33, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def _language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


@on_ranks(2, stage=SHARDED, checkpointing=[False, True])
def test_lora_reduces_only_adapters_and_equals_the_unsharded_run(stage: int, checkpointing: bool) -> None:
    twins = Twins(stage, _lora_llama, _language_loss, _tokens)
    if checkpointing:
        for model in (twins.model, twins.reference):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    twins.step()
    ledger = twins.engine.world.ledger
    ledger.reset()
    released_in_backward = _watch_release(twins, "lm_head")
    computed = _watch_gradients(twins)
    twins.step()
    assert computed and all("lora_" in name for name in computed)
    assert released_in_backward == ([True] if stage == 3 else [])
    trainable = [p for p in twins.model.parameters() if p.requires_grad]
    reduced = {unit for kind, unit in ledger.entries if kind in ("reduce_scatter", "all_reduce")}
    assert all("layers." in unit for unit in reduced)
    assert ledger.total("reduce_scatter").bytes == sum(p.to_local().nbytes for p in trainable)
    assert all(p.grad is None for p in twins.model.parameters() if not p.requires_grad)
    assert twins.engine.memory.bytes == 0 or stage < 3


def _watch_gradients(twins: Twins) -> set[str]:
    """The names of the parameters for which autograd computes a gradient."""
    names: set[str] = set()
    original = twins.engine.backward.on_gradients

    def look(call: Any, gradients: tuple[Tensor | None, ...]) -> None:
        names.update(p.name for p, grad in zip(call.parameters, gradients, strict=True) if grad is not None)
        original(call, gradients)

    twins.engine.backward.on_gradients = look
    return names


def _watch_release(twins: Twins, name: str) -> list[bool]:
    """Whether the frozen unit `name` had been released when a layer's first gradient came."""
    (unit,) = [unit for unit in twins.engine.units if unit.name.endswith(name)]
    seen: list[bool] = []
    last = twins.model.get_base_model().model.layers[0]

    def look(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad and not seen:
            tensor.register_hook(lambda _: seen.append(not unit.num_leases) if not seen else None)

    if not unit.keeps_whole:
        last.register_forward_hook(look)
    return seen
