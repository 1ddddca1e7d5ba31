"""Bytes that autograd keeps from a forward for its backward, measured with tensors that have no values.

[Note: activations] Counted is every storage that a saved tensor refers to, once, but for parameters and buffers. With
activation checkpointing a block keeps its inputs only. Two moments can be the greatest. One is the begin of the backward,
with the inputs of all blocks and all that lies outside of them. In the other a block computes again: what it keeps is there
in full, with two gradients of the size of its largest tensor, and what came after the last block (logits) has been given
back. A loss keeps logarithms of probabilities, its largest tensor, and its backward makes two gradients of that size: theirs
and the logits'. Other memory within an operation is not counted. With `tile_tokens`, a loss keeps the head's input, and its
backward has these tensors of a slice only. With `tile_mlp`, an MLP keeps its input, and what it makes of a slice is there
while its backward runs, with two gradients of the size of its largest tensor and the sums of its weights' gradients. Products
grouped by expert, which torch knows in bfloat16 only where there are no values, keep what they multiply. Experts that ranks
divide are taken to get as many tokens each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.engine.parameters.experts import are_experts
from hf_zero.engine.tiles.blocks import TiledBlock, mlps_of
from hf_zero.engine.tiles.heads import Runner, TiledHead, heads_of
from hf_zero.errors import UsageError
from hf_zero.parameters import parameters_of
from hf_zero.plan.tensor_axis import Receiving


@dataclass(frozen=True)
class Kept:
    """Bytes kept for a backward.

    Attributes:
        total: the most at a time.
        largest: what is there beside it when the backward begins: gradients of the size of its largest tensor.
        routed: of rows that tokens are for experts (a row for each expert of a token), over all passes of a step.
        received: by attention of slices of sequences, or by layers that ranks share, in a step.
    """

    total: int
    largest: int
    routed: int = 0
    received: int = 0


NOTHING = Kept(0, 0)


@dataclass
class _Count:
    """Bytes by storage: of each block while it runs, and outside of blocks.

    Attributes:
        outside: bytes kept outside of blocks.
        after: of those, bytes kept since the last block.
        largest: the largest of those outside.
        blocks: bytes that each call of a block keeps.
        inputs: bytes of each such call's inputs.
        largest_inside: bytes of the largest tensor that a block keeps.
        routed: bytes of rows for experts.
        receiving: counts what is received of ranks that share layers, if any do.
        received_again: of that, what blocks receive before they save their last tensor, where computing again ends.
    """

    outside: int = 0
    after: int = 0
    largest: int = 0
    blocks: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    largest_inside: int = 0
    routed: int = 0
    receiving: Receiving = field(default_factory=Receiving)
    received_again: int = 0
    _received_before: int = 0
    _storages: set[int] = field(default_factory=set)
    _keeps: list[Tensor] = field(default_factory=list)  # so that no storage is freed, and its number taken by another
    _running: int = 0

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the memory of a tensor."""
        self._storages.add(torch_compat.local_of(tensor).untyped_storage()._cdata)

    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor."""
        if self._running:
            self.received_again += self.receiving.num_bytes - self._received_before
            self._received_before = self.receiving.num_bytes
        storage = torch_compat.local_of(tensor).untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._keeps.append(tensor)
            if self._running:
                self.blocks[-1] += storage.nbytes()
                self.largest_inside = max(self.largest_inside, storage.nbytes())
            else:
                self.outside += storage.nbytes()
                self.after += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        return tensor

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A block begins."""
        if not self._running:
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            self.inputs.append(sum(torch_compat.local_of(t).untyped_storage().nbytes() for t in tensors))
            self.blocks.append(0)
            self._received_before = self.receiving.num_bytes
        self._running += 1

    def leave(self, *_: object) -> None:
        """A block has ended."""
        self._running -= 1
        self.after = 0

    def route(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Experts begin, with tokens [tokens, width] and the experts of each [tokens, k]."""
        hidden, experts = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:2]
        self.routed += experts.numel() * hidden.shape[-1] * hidden.itemsize

    def result(self, checkpoints: bool, num_gradients: int = 1, of_tiles: int = 0, in_block: int = 0) -> Kept:
        """What is kept at the end of the forward; with checkpointing, then or while the largest block computes again.

        Args:
            checkpoints: whether blocks keep their inputs only.
            num_gradients: that the backward begins with, of the size of the largest tensor outside of blocks.
            of_tiles: bytes that it begins with besides, see `of_tile`.
            in_block: bytes that a block has for a while, beside what it keeps.
        """
        beside = num_gradients * self.largest + of_tiles
        begin = self.outside + sum(self.inputs if checkpoints else self.blocks)
        later = begin - self.after + in_block
        if checkpoints:
            later += max(self.blocks, default=0) + max(2 * self.largest_inside - in_block, 0)
        total = max(begin, later)
        received = self.receiving.num_bytes + (self.received_again if checkpoints else 0)
        return Kept(total, max(begin + beside - total, 0), self.routed * (3 if checkpoints else 2), received)


class _Grouped(torch.autograd.Function):
    """A product of rows grouped by expert: keeps both factors, as torch's own does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)


def is_grouped(func: Any, args: Any) -> bool:
    """Whether a call is the product of rows [S, K], grouped by expert, with experts' weights [E, K, N]."""
    is_product = getattr(func, "__name__", "").lstrip("_") == "grouped_mm"
    return is_product and args[0].dim() == 2 and args[1].dim() == 3


class _GroupedByShape(TorchFunctionMode):
    """Within: grouped products of rows [S, K] with experts' weights [E, K, N] are made by shape, in every dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_grouped(func, args):
            return _Grouped.apply(*args[:2])  # type: ignore[no-untyped-call, unused-ignore]
        return func(*args, **(kwargs or {}))


def activations(
    model: nn.Module, batch: dict[str, Tensor], checkpoints: bool = False, tile_tokens: int = 0, tile_mlp: int = 0
) -> Kept:
    """What a forward of a batch keeps for the backward.

    Args:
        model: on the meta device, in the dtype that it computes in.
        batch: keyword arguments of its forward, on the meta device.
        checkpoints: whether blocks are computed again in the backward.
        tile_tokens, tile_mlp: as in the configuration.

    Raises:
        UsageError: the model cannot run on the meta device.
    """
    return activations_by_way(model, batch, tile_tokens, tile_mlp)[checkpoints]


def activations_by_way(
    model: nn.Module, batch: dict[str, Tensor], tile_tokens: int = 0, tile_mlp: int = 0, in_block: int = 0
) -> dict[bool, Kept]:
    """`activations` by whether blocks are computed again in the backward.

    Args:
        model, batch, tile_tokens, tile_mlp: see `activations`.
        in_block: bytes that a block has for a while besides, for what it exchanges.
    """
    count = _Count()
    num_tokens = max((t.numel() for t in batch.values() if not t.is_floating_point()), default=0)
    few = math.ceil(num_tokens / 2)  # two slices keep what thousands keep, and are counted at once
    heads = [
        TiledHead(each, Runner(), max(tile_tokens, few), lambda: True, tuple) for each in heads_of(model) if tile_tokens
    ]
    mlps = mlps_of(model) if tile_mlp else []
    tiled = [TiledBlock(each, max(tile_mlp, few), None) for each in mlps]
    handles: list[Any] = [*heads, *tiled]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            handles.append(module.register_forward_pre_hook(count.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(count.leave))
        if are_experts(module):
            handles.append(module.register_forward_pre_hook(count.route, with_kwargs=True))
    try:
        # Fake tensors, since models look at values in places, and know of these that they have none.
        with (
            torch_compat.fake_tensors() as convert,
            torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor),
            _GroupedByShape(),
            Changes() as changes,
        ):
            # transformers looks at values for whether documents are packed, and without any it makes a mask for them.
            changes.replace(masking_utils, "find_packed_sequence_indices", lambda _: None)
            named = {name: convert(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
            for tensor in named.values():
                count.leave_out(tensor)
            given = {key: convert(value) for key, value in batch.items()}
            with count.receiving:
                outputs = torch.func.functional_call(model, named, (), given)
                if any(isinstance(tensor, DTensor) for tensor in named.values()):
                    torch.autograd.backward(_number_of(outputs))
            for each in tiled:
                each.remove()
            of_mlps = [_of_slice(each, _tokens(model, tile_mlp, convert), convert) for each in mlps]
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"{type(model).__name__} does not run on tensors without values ({str(error).splitlines()[0]}), so its "
            "activations are not known: leave --seq-len out"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    of_tiles = sum(of_tile(each.module, min(tile_tokens, num_tokens), each.num_words) for each in heads)
    num_gradients = 2 if "labels" in batch and not heads else 1
    return {
        checkpoints: count.result(checkpoints, num_gradients, of_tiles, max(in_block, *of_mlps, 0))
        for checkpoints in (False, True)
    }


def _number_of(outputs: Any) -> Tensor:
    """What a backward begins with: the loss, or a sum of the first tensor."""
    loss: Tensor | None = getattr(outputs, "loss", None)
    return outputs[0].sum() if loss is None else loss


_Convert = Callable[[Tensor], Tensor]  # of a tensor on the meta device, to one that knows that it has no values


def _tokens(model: nn.Module, count: int, convert: _Convert) -> Tensor:
    """Hidden states [count, width] of a model of transformers."""
    width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    dtype = next(parameters_of(model)).dtype
    return convert(torch.empty(count, width, dtype=dtype, device="meta")).requires_grad_()


def _of_slice(mlp: nn.Module, tokens: Tensor, convert: _Convert) -> int:
    """Bytes that an MLP has while it computes a slice of tokens again, and adds up the gradients of its weights."""
    count, named = _Count(), {name: convert(param) for name, param in mlp.named_parameters()}
    for tensor in named.values():
        count.leave_out(tensor)
    with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor):
        torch.func.functional_call(mlp, named, (tokens,))
    return count.outside + 2 * count.largest + _of_sums(mlp)


def _of_sums(module: nn.Module) -> int:
    """Bytes of the gradients of weights that slices add up, and of those of one slice."""
    own = [param for param in parameters_of(module) if param.requires_grad]
    return sum(param.numel() * (4 + param.element_size()) for param in own)


def of_tile(head: nn.Module, size: int, num_words: int) -> int:
    """Bytes that the backward of a loss has beside what was kept: of a slice, and of the sum of its weights' gradients.

    A slice's logarithms of probabilities and two gradients of their size, in float32; the gradient of one slice.

    Args:
        head: with its weights.
        size: tokens in a slice.
        num_words: logits of a token.
    """
    return 12 * size * num_words + _of_sums(head)
