"""What `hf-zero plan --seq-len` tells about long sequences: activations, logits, what a tile saves, the longest that fits."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_zero.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_zero.plan.activations import Kept
    from hf_zero.plan.memory import Holding, Setting
    from hf_zero.plan.shapes import ModelShape

_WITH_LABELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
USUAL_TILE = 4096
_Counted = Callable[[int], "dict[bool, Kept]"]


def activations_of(model: nn.Module, args: argparse.Namespace, num_tokens: int, tile_tokens: int) -> dict[bool, Kept]:
    """What a forward keeps, by whether blocks are computed again; with --sp or --cp, of a slice, and what a layer exchanges.

    Raises:
        UsageError: the model reads no tokens.
    """
    import torch

    from hf_zero.plan.activations import activations_by_way
    from hf_zero.plan.long_sequences import Exchanged

    own = math.ceil(num_tokens / (args.sp * args.cp))
    batch = batch_of(model, args.batch_size, own, args.dtype)
    if args.sp * args.cp == 1:
        return activations_by_way(model, batch, tile_tokens, args.tile_mlp)
    config, itemsize = getattr(model, "config", None), getattr(torch, args.dtype).itemsize
    more = Exchanged.of(config, args.batch_size * num_tokens, itemsize, args.sp, args.cp)
    found = activations_by_way(model, batch, tile_tokens, args.tile_mlp, more.at_once)
    layers = int(getattr(config.get_text_config(), "num_hidden_layers", 1))  # type: ignore[union-attr]
    for checkpoints, kept in found.items():
        total = kept.total + more.kept * (1 if checkpoints else layers)
        received = layers * (more.forward * (2 if checkpoints else 1) + more.backward)
        found[checkpoints] = replace(kept, total=total, received=received)
    return found


def batch_of(model: nn.Module, batch_size: int, num_tokens: int, dtype: str) -> dict[str, Tensor]:
    """A batch on the meta device, with labels where the model takes them; the model is put into the dtype of its computing.

    Raises:
        UsageError: the model reads no tokens.
    """
    import torch

    if getattr(model, "main_input_name", None) != "input_ids":
        raise UsageError(f"{type(model).__name__} reads no tokens, so --seq-len says nothing about it: leave it out")
    tokens = torch.zeros(batch_size, num_tokens, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens}
    if type(model).__name__.endswith(_WITH_LABELS) and "labels" in inspect.signature(model.forward).parameters:
        batch["labels"] = tokens
    config = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # type: ignore[union-attr]
    model.to(getattr(torch, dtype))
    return batch


@contextlib.contextmanager
def shared(model: nn.Module, args: argparse.Namespace) -> Iterator[None]:
    """Within: ranks divide the heads (--sp), the experts (--ep) and the layers (--tp) of a model on the meta device.

    Raises:
        ConfigError: they cannot.
        PartitionError: there are no experts, or no plan for layers.
        UsageError: it is no model of transformers.
    """
    from hf_zero.cli.planning.tensor_axis import shared_among
    from hf_zero.engine.parameters.experts import mark_experts
    from hf_zero.sharding.axes.experts import find_experts
    from hf_zero.sharding.sequence.checks import refuse_heads

    if args.sp > 1:
        refuse_heads(model.config.get_text_config(), type(model).__name__, args.sp)  # type: ignore[union-attr, operator]
    for experts in find_experts(model, args.ep, args.ranks // args.replicate).values():
        mark_experts(experts)
    with shared_among(args.tp, model) if args.tp > 1 else contextlib.nullcontext():
        yield


def told(
    model: nn.Module,
    shape: ModelShape,
    ways: Sequence[tuple[str, Setting, bool]],
    args: argparse.Namespace,
    fits: Callable[[Holding], bool],
    size: Callable[[float], str],
) -> list[str]:
    """Lines about the logits of a batch and what a tile saves; with --memory, the longest sequences that fit.

    Args:
        model: on the meta device.
        shape: of the model.
        ways: to train it: a name, the setting, and whether blocks are computed again.
        args: of the command.
        fits: whether a rank's memory is enough.
        size: words for bytes.
    """
    from hf_zero.plan.long_sequences import longest
    from hf_zero.plan.memory import predict

    words, tile = num_words(model), args.tile_tokens or USUAL_TILE
    total = args.batch_size * math.ceil(args.seq_len / (args.sp * args.cp))
    if not words or not ways:
        return []
    in_float32 = f"Logits of {total:,} tokens over {words:,} words: {size(4 * total * words)} in float32"
    tiles = [0] if args.tp > 1 else [0, tile]  # a head that ranks share gives its logits whole
    beside = "" if args.tp > 1 else f"; {size(4 * min(tile, total) * words)} with tile_tokens {tile}"
    lines = [f"{in_float32}, and gradients of that size{beside}."]
    found: dict[str, list[int]] = {}
    for size_of_tile in tiles:
        counted = functools.cache(lambda length, size=size_of_tile: activations_of(model, args, length, size))
        for name, setting, checkpoints in ways:
            given = replace(setting, config=setting.config.replace(tile_tokens=size_of_tile))

            def kept_of(length: int, checkpoints: bool = checkpoints, counted: _Counted = counted) -> Kept:
                return counted(length)[checkpoints]

            values = found.setdefault(name, [])
            values.append(predict(shape, given, kept_of(args.seq_len)).peak)
            if args.gpu_memory is not None:
                values.append(longest(shape, given, kept_of, fits, args.seq_len))
    with_tile = f" with tile_tokens {tile}"
    for name, values in found.items():
        if args.gpu_memory is None:
            more = f"; {size(values[1])}{with_tile}" if len(values) > 1 else ""
            lines.append(f"Peak of {name}: {size(values[0])}{more}.")
            continue
        tokens, peaks = [f"{each:,}" for each in values[1::2]], "; ".join(map(size, values[::2]))
        told_of = f"{tokens[0]} tokens" + (f"; {tokens[1]}{with_tile}" if len(tokens) > 1 else "")
        lines.append(f"Longest sequence of {name}: {told_of} (peak of {args.seq_len:,} tokens: {peaks}).")
    return lines


def num_words(model: nn.Module) -> int:
    """Of the vocabulary over which a model's head gives logits; 0 without one."""
    from hf_zero.engine.tiles.heads import heads_of

    weights = [getattr(head, "weight", None) for head in heads_of(model)]
    return max((int(weight.shape[0]) for weight in weights if weight is not None), default=0)
