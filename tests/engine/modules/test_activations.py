"""Inputs of checkpointed layers, of which each rank of the tensor axis keeps a part."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import hf_zero as zero
from hf_zero import torch_compat
from hf_zero.errors import UsageError
from tests.ranks import alone, on_ranks, run_ranks
from tests.tensor_axis import BATCH, LENGTH, load, loss_of, saved, shared_folder, tokens

_HIDDEN, _LAYERS = 24, 2


class _Inputs:
    """Watches the inputs of a model's layers, without keeping them."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []
        self.storages: list[torch.UntypedStorage] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._watch)

    def _watch(self, module: nn.Module, args: Any) -> None:
        self.tensors.append(weakref.ref(args[0]))
        self.storages.append(args[0].untyped_storage())

    def are_alive(self) -> list[bool]:
        """Whether anybody holds an input, or its memory."""
        return [
            reference() is not None or torch_compat.num_holders(storage) > 1
            for reference, storage in zip(self.tensors, self.storages, strict=True)
        ]


def _step(folder: str, size: int, partition: bool, use_reentrant: bool) -> dict[str, Any]:
    config = {"stage": 3, "tp_size": size, "collectives": "pairwise", "activations": {"partition": partition}}
    with zero.Init(config):
        model = load(folder)
    engine = zero.shard_model(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    watched = _Inputs(model.model.layers)
    cell = engine.world.data.rank
    loss_of(model, tokens(0, cell)).backward()  # also another shape, with a slab of its own, which must go again
    model.zero_grad()
    watched.tensors.clear()
    watched.storages.clear()
    batch = tokens(1, cell)[:, 1:]
    engine.world.ledger.reset()
    loss = loss_of(model, batch)
    alive = watched.are_alive()
    slabs = engine.activations.slabs
    stored = {tuple(shape): [slab.nbytes for slab in held] for (shape, _), held in slabs.items()}
    is_full = [slab.is_full for held in slabs.values() for slab in held]
    loss.backward()
    entry = engine.world.ledger.entries.get(("gather (tensor axis)", "activations"))
    return {
        "loss": loss.item(),
        "gradients": [param.grad.to_local() for param in model.parameters()],
        "alive": alive,
        "stored": stored,
        "is full": is_full,
        "is empty": [slab.is_empty for held in slabs.values() for slab in held],
        "gathers": None if entry is None else (entry.calls, entry.bytes),
    }


@pytest.mark.parametrize(
    ("num_ranks", "size", "use_reentrant"),
    [
        (4, 2, True),
        pytest.param(4, 2, False, marks=pytest.mark.slow),
        pytest.param(3, 3, True, marks=pytest.mark.slow),
        (3, 3, False),
    ],
    ids=["2x2 reentrant", "2x2", "1x3 reentrant", "1x3"],
)
def test_each_rank_keeps_a_part_of_each_input_and_gradients_have_the_same_bits(
    num_ranks: int, size: int, use_reentrant: bool
) -> None:
    numel = BATCH * (LENGTH - 1) * _HIDDEN
    part = -(-numel // size)  # of 384: with 3 ranks that is 128; see the test of odd sizes
    wholes = run_ranks(_step, num_ranks, saved("llama"), size, False, use_reentrant)
    for whole, ours in zip(wholes, run_ranks(_step, num_ranks, saved("llama"), size, True, use_reentrant), strict=True):
        assert ours["loss"] == whole["loss"]
        assert all(torch.equal(left, right) for left, right in zip(ours["gradients"], whole["gradients"], strict=True))
        assert whole["alive"] == [True] * _LAYERS
        assert ours["alive"] == [False] * _LAYERS
        assert ours["stored"] == {(BATCH, LENGTH - 1, _HIDDEN): [4 * part * _LAYERS]}
        assert (ours["is full"], ours["is empty"]) == ([True], [True])
        assert ours["gathers"] == (_LAYERS, 4 * part * (size - 1) * _LAYERS)
        assert (whole["stored"], whole["gathers"]) == ({}, None)


_SHAPES = {2: [(3, 7), (2, 3)], 3: [(5, 5), (2, 2)]}


@on_ranks(2, 3, number=[0, 1])
def test_lengths_that_do_not_divide_are_padded(number: int) -> None:
    """Packs and unpacks inputs of a layer that two others are given too."""
    size = dist.get_world_size()
    shape = _SHAPES[size][number]
    config = {"stage": 2, "tp_size": size, "collectives": "pairwise", "activations": {"partition": True}}
    with zero.Init(config):
        engine = zero.shard_model(load(shared_folder("llama")))
    owner = engine.activations
    torch.manual_seed(0)
    given = [torch.randn(shape) for _ in range(3)]
    packed = [owner.pack(tensor) for tensor in (given[0], given[0], *given[1:])]
    assert packed[0] is packed[1]
    given[0].add_(1)
    assert owner.pack(given[0]) is not packed[0]  # it is another input now
    kept = [packed[0], *packed[2:]]
    assert [part.values.numel() for part in kept] == [-(-given[0].numel() // size)] * 3
    given[0].sub_(1)
    for at, (part, tensor) in reversed(list(enumerate(zip(kept, given, strict=True)))):
        torch.testing.assert_close(owner.unpack(part), tensor, rtol=0, atol=1e-6)
        assert at == 0 or kept[at - 1].arriving is not None  # the one before is on its way
    assert torch.equal(owner.unpack(owner.pack(given[1])), given[1])
    assert owner.pack(torch.arange(9)).dtype == torch.int64  # a mask, positions: kept as they are


@on_ranks(2)
def test_ranks_with_other_inputs_are_told_so() -> None:
    config = {"stage": 1, "tp_size": 2, "collectives": "pairwise", "activations": {"partition": True}}
    with zero.Init(config):
        model = load(shared_folder("llama"))
    model.gradient_checkpointing_enable()
    engine = zero.shard_model(model)
    for _ in range(2):  # also under a second engine of the same modules
        loss_of(model, tokens(0, 0)).backward()
        assert engine.activations.slabs
        engine.close()
        engine = zero.shard_model(model)
    with pytest.raises(UsageError, match=r"ranks \[0, 1\] share a layer, but do not have the same input"):
        engine.activations.pack(torch.full((3, 3), float(dist.get_rank())))


@alone(
    case=[
        ({"partition": True}, "partition: there is no tensor axis (tp_size is 1), so nothing is partitioned"),
        ({"offload": True}, "offload: the model is in host memory already, so nothing is offloaded"),
    ]
)
def test_without_a_tensor_axis_or_a_device_it_says_that_there_is_nothing_to_do(case: tuple[Any, str]) -> None:
    activations, expected = case
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero.engine.modules.activations").addHandler(handler)
    model = load(saved("llama"))
    engine = zero.shard_model(model, {"stage": 2, "activations": activations})
    model.gradient_checkpointing_enable()
    loss_of(model, tokens(0, 0)).backward()
    assert said == [f"activations.{expected}"]
    assert not engine.activations.is_needed


def test_the_papers_example() -> None:
    """ZeRO, sections 3.2 and 6.1: GPT-2 of 1.5 B parameters, batch 32, sequences of 1,024, 16 bits, checkpoints of each layer.

    The paper's 60 GB of all activations come from its own formula, 12 x hidden size x batch x length x layers numbers. One
    checkpoint a layer leaves 5 GB of these by arithmetic, where the paper says "about 8 GB", and a quarter of it on each of 4
    ranks. (60 GB over 4 ranks are 15 GB: what partitioning alone would leave, without checkpoints.)
    """
    config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    one = 32 * 1024 * config.n_embd * 2
    assert one * config.n_layer == 5_033_164_800
    assert 12 * one * config.n_layer == 60_397_977_600
    parts = -(-one // 2 // 4) * 2 * config.n_layer
    assert parts == 1_258_291_200
