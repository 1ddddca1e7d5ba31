"""Models constructed under `Init`: the bits of the unsharded model, its random state afterwards, and memory for a window.

The oracle is the same constructor with the same seed, without `Init`; each rank runs it for itself and compares its rows.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_zero
from hf_zero.sharding.construct import Cutter
from hf_zero.sharding.whole_window import WINDOW_BYTES, is_mapped
from hf_zero.torch_compat import local_of
from tests.models import CASES, VOCAB, AwkwardMLP, Stack
from tests.ranks import by_hand, on_ranks

# The dtype at rest is then the model's own, as the oracle's is.
STAGE_3 = {"stage": 3, "master_dtype": "auto", "timeout_s": 20}
TINY = {"hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 1, "num_attention_heads": 2}


# --- comparing with the unsharded model -----------------------------------------------------------------------------


def own_rows(whole: Tensor, param: Tensor) -> Tensor:
    """What this rank holds of `whole`, if it is cut as `param` is; torch.chunk cuts as `Shard(0)` does."""
    if isinstance(whole, DTensor):
        return whole.to_local()
    if not isinstance(param, DTensor) or not param.placements[0].is_shard():
        return whole
    rank, chunks = dist.get_rank(), whole.chunk(dist.get_world_size())
    return chunks[rank] if rank < len(chunks) else whole[:0]


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


def names_by_parameter(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, tied ones together."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return list(names.values())


def differences(reference: nn.Module, model: nn.Module, is_cut: bool = True, has_engine: bool = False) -> list[str]:
    """How `model` differs from the unsharded `reference` on this rank: names, ties, dtypes, bits, memory of its rows.

    Args:
        is_cut: whether every parameter must be a DTensor.
        has_engine: rows may live in the memory of whole tensors, as they do in stages 1 and 2.
    """
    if names_by_parameter(reference) != names_by_parameter(model):
        return [f"names or ties: {names_by_parameter(reference)} {names_by_parameter(model)}"]
    found = []
    for (name, wanted), param in zip(reference.named_parameters(), model.parameters(), strict=True):
        local = local_of(param)
        if isinstance(param, DTensor) is not is_cut:
            found.append(f"{name} is a {type(param).__name__}")
        elif is_cut and param.placements[0].is_shard() is not bool(wanted.ndim and wanted.numel()):
            found.append(f"{name} is placed {param.placements}")
        elif param.shape != wanted.shape or param.requires_grad != wanted.requires_grad:
            found.append(f"{name}: {param.shape} {param.requires_grad}")
        elif not same_bits(local, own_rows(wanted, param)):
            found.append(f"{name}: other bits, {local.dtype} for {wanted.dtype}")
        elif is_cut and not has_engine and (is_mapped(local) or local.storage_offset()):
            found.append(f"{name}: its rows are a part of other memory")
    buffers = dict(model.named_buffers())
    for name, wanted in reference.named_buffers():
        if name not in buffers or not same_bits(buffers[name], wanted):
            found.append(f"buffer {name}")
        elif is_cut and not buffers[name].untyped_storage().resizable():
            found.append(f"buffer {name} is mapped")
    return found


def window_of(num_bytes: int) -> Any:
    """Within: at most `num_bytes` of parameters, or one parameter, are whole while a model is constructed."""
    return mock.patch.object(Cutter.__init__, "__defaults__", (num_bytes,))


# --- what is constructed --------------------------------------------------------------------------------------------


class Hostile(nn.Module):
    """Everything that a constructor may do to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 3))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        held = nn.Parameter(torch.empty(7, 3))
        self.held = held
        self.linear = nn.Linear(3, 11)
        self.also = self.linear.weight  # a second name
        nn.init.normal_(held)  # through the reference
        self.a.data.mul_(2.0)
        with torch.no_grad():
            self.linear.weight[2] = 9.0
            self.linear.bias.copy_(torch.arange(11.0))
        self.parts = nn.ModuleList([nn.Linear(4, 3) for _ in range(5)])
        self.clone = copy.deepcopy(self.linear)
        self.lstm = nn.LSTM(3, 4)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm1d(4)
        nn.init.orthogonal_(self.parts[1].weight)
        view = self.parts[0].weight.data
        self.big = nn.Linear(64, 64)
        view.zero_()  # when it has left the window
        self.parts[2].weight = nn.Parameter(self.parts[3].weight * 2 + self.parts[4].weight[0])
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 4))


def from_config(name: str, dtype: torch.dtype | None = None, **fields: Any) -> nn.Module:
    config = getattr(transformers, name)(**fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def clip() -> nn.Module:
    """A 0-dimensional parameter, two models in one."""
    text = {**TINY, "vocab_size": VOCAB, "projection_dim": 8}
    vision = {**TINY, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def wav2vec2() -> nn.Module:
    """weight_norm: a parametrised convolution."""
    config = transformers.Wav2Vec2Config(
        **TINY,
        vocab_size=VOCAB,
        conv_dim=(8, 8),
        conv_stride=(2, 2),
        conv_kernel=(3, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
    )
    return transformers.Wav2Vec2Model(config)


def mamba() -> nn.Module:
    """Parameters drawn from distributions of its own."""
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=VOCAB, state_size=4)
    )


def dinov2() -> nn.Module:
    return transformers.Dinov2Model(
        transformers.Dinov2Config(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
    )


def with_loaded_state() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 7))
    model.load_state_dict({k: torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()})
    return model


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(CASES["llama"].build(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    **{name: case.build for name, case in CASES.items()},
    "hostile": Hostile,
    "clip": clip,
    "wav2vec2": wav2vec2,
    "mamba": mamba,
    "dinov2": dinov2,
    "padding_idx": lambda: from_config(
        "LlamaConfig", **TINY, vocab_size=VOCAB, pad_token_id=3, tie_word_embeddings=True
    ),
    "from_config in bf16": lambda: from_config("LlamaConfig", torch.bfloat16, **TINY, vocab_size=VOCAB),
    "converted": lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7).half(), nn.Linear(7, 3)).to(torch.bfloat16),
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)), nn.Linear(7, 3)),
    "state dict": with_loaded_state,
    "lora": with_lora,
    "alone": lambda: nn.Linear(5, 7),
}


# --- equal to the unsharded model -----------------------------------------------------------------------------------


def check_construction(name: str, same_seeds: bool) -> None:
    """With a window of one parameter where all ranks have the same seed, and the usual one where they have not."""
    window_bytes, build = 1 if same_seeds else WINDOW_BYTES, CONSTRUCTORS[name]
    torch.manual_seed(7)
    reference, after = build(), torch.get_rng_state()
    torch.manual_seed(7 if same_seeds else 7 + dist.get_rank())
    before = torch.get_rng_state()
    with window_of(window_bytes), hf_zero.Init(STAGE_3) as init:
        model = build()
        window = init._cutter.window
    assert differences(reference, model) == []
    goes_on = same_seeds or dist.get_rank() == 0
    assert torch.equal(torch.get_rng_state(), after if goes_on else before)
    largest = max(4 * param.numel() for param in model.parameters())
    assert window.peak_bytes <= max(window_bytes, largest) + largest


@on_ranks(2, name=list(CONSTRUCTORS), same_seeds=[True, False])
def test_constructed_model_has_the_bits_of_the_unsharded_one(name: str, same_seeds: bool) -> None:
    check_construction(name, same_seeds)


@on_ranks(3, name=["mlp", "hostile", "mixtral", "converted", *by_hand(*CONSTRUCTORS)])
def test_constructed_model_has_the_bits_of_the_unsharded_one_on_three_ranks(name: str) -> None:
    check_construction(name, same_seeds=False)


@pytest.mark.slow
@on_ranks(3, name=list(CONSTRUCTORS))
def test_constructed_model_has_the_bits_of_the_unsharded_one_on_three_ranks_of_one_seed(name: str) -> None:
    check_construction(name, same_seeds=True)


@on_ranks(2, name=["llama", "gpt2", "t5", "hostile"])
def test_nothing_is_gathered_while_the_window_holds_the_model(name: str) -> None:
    with hf_zero.Init(STAGE_3) as init:
        CONSTRUCTORS[name]()
        assert init._cutter.window.num_gathers == 0


# --- what a constructor sees ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_are_shards_inside_and_whole_for_maths() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 5)
    torch.manual_seed(0)
    with hf_zero.Init(STAGE_3):
        linear = nn.Linear(3, 5)
        assert isinstance(linear.weight, DTensor)
        assert linear.weight.shape == (5, 3) and linear.weight.to_local().shape[0] < 5
        assert same_bits(linear.weight[1], plain.weight[1])
        assert same_bits(linear(torch.ones(3)), plain(torch.ones(3)))
        assert same_bits(linear.weight.sum(), plain.weight.sum())
        with torch.no_grad():
            assert linear.weight.mul_(2) is linear.weight
        with torch.device("meta"):
            assert type(nn.Linear(3, 5).weight) is nn.Parameter
        assert not isinstance(nn.LazyLinear(4).weight, DTensor)
    assert same_bits(linear.weight.to_local(), own_rows(2 * plain.weight, linear.weight))


@on_ranks(2)
def test_other_threads_and_later_modules_stay_plain() -> None:
    made: list[nn.Module] = []
    with hf_zero.Init(STAGE_3):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(3, 5)))
        thread.start()
        thread.join()
    made.append(nn.Linear(3, 5))
    assert all(type(module.weight) is nn.Parameter and type(module.weight.data) is Tensor for module in made)


# --- memory ---------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of plain tensors that live at a time, of those made by torch functions within."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._forget, key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@on_ranks(2, 3)
def test_constructing_holds_the_rows_and_a_window() -> None:
    with LiveBytes() as plain:
        reference = Stack(64, 8)
        sizes = [param.nbytes for param in reference.parameters()]
        plain_peak = plain.peak
    with LiveBytes() as live, window_of(4096), hf_zero.Init({"stage": 3}):
        model = Stack(64, 8)
    own = sum(param.to_local().nbytes for param in model.parameters())
    assert plain_peak >= sum(sizes)
    assert own < sum(sizes) / dist.get_world_size() + max(sizes)
    assert live.now <= own + 1024
    # The window, the parameter in use, and a copy of it by what draws it.
    assert live.peak <= own + 4096 + 3 * max(sizes)
    assert live.peak < plain_peak


@on_ranks(2)
def test_the_usual_window_is_kept() -> None:
    with hf_zero.Init({"stage": 3}) as init:
        AwkwardMLP()
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(7)])
        window = init._cutter.window
    del model
    assert 8 * 2**20 <= window.peak_bytes <= WINDOW_BYTES + 4 * 2**20


# --- errors ---------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        raise ValueError("no such layer")


@on_ranks(2)
def test_an_exception_in_a_constructor_leaves_torch_as_it_was() -> None:
    def state() -> list[Any]:
        hooks = [
            len(torch_module._global_parameter_registration_hooks),
            len(torch_module._global_module_registration_hooks),
        ]
        return [hooks, len(_get_current_function_mode_stack()), dict(vars(transformers.PreTrainedModel))]

    before = state()
    assert (
        before[0][0] <= 1 and before[0][1:] == [0] and before[1] == 0
    )  # a kept one, for parameters that were replaced
    with pytest.raises(ValueError, match="no such layer"), hf_zero.Init(STAGE_3):
        nn.Linear(3, 5)
        Broken()
    assert state() == before
    assert type(nn.Linear(3, 5).weight.data) is Tensor
