"""Models that cannot be sliced: they compute across tokens elsewhere than in attention, or attend as no rank could alone."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_zero.config.axes import sharing_sequences
from hf_zero.engine.ranks.world import World
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.sharding.sequence.context import TAKEN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_OF_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest position
_ACROSS_TOKENS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention, nn.BatchNorm1d)
_NEEDED = ("position_ids", "attention_mask")


def find_model(model: nn.Module) -> PreTrainedModel:
    """The model of transformers that is, or is in, a model.

    Raises:
        PartitionError: there is none, or several.
    """
    from transformers import PreTrainedModel

    found: list[PreTrainedModel] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            found.append(module)
            inside.update(map(id, module.modules()))
    if len(found) != 1:
        raise PartitionError(
            f"sp_size and cp_size slice sequences of one model of transformers, and {type(model).__name__} has {len(found)}: "
            "leave them out"
        )
    return found[0]


def check(model: PreTrainedModel, world: World) -> None:
    """Raise a `PartitionError`, or a `ConfigError` for numbers of heads, for a model that cannot be sliced.

    It is judged by facts that it has before it is loaded.
    """
    config: Any = model.config.get_text_config()
    name = type(model).__name__
    if reason := _reason(model, config) or _reason_of_context(model, world):
        key = sharing_sequences(world.config.sp_size, world.config.cp_size)
        raise PartitionError(f"{key} is {world.sequence.num_ranks}, but {name} {reason}: leave {key} out")
    refuse_heads(config, name, world.heads.num_ranks, world.tensor.num_ranks)


def refuse_heads(config: Any, name: str, ranks: int, tensor: int = 1) -> None:
    """Raise a `ConfigError` if `ranks` ranks cannot divide heads (`sp_size`); those of a tensor axis divide them first."""
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(shared, int):
        return
    heads, shared = heads // tensor, max(1, shared // tensor)
    if heads % math.lcm(shared, ranks):
        fitting = [size for size in range(2, heads + 1) if heads % math.lcm(shared, size) == 0]
        along = "" if tensor == 1 else f" on each of {tensor} ranks of the tensor axis"
        raise ConfigError(
            f"sp_size is {ranks}, but {name} has {heads} heads of queries and {shared} of keys and values{along}, which so "
            f"many ranks cannot divide: use one of {fitting or [1]}"
        )


def _reason(model: PreTrainedModel, config: Any) -> str:
    forward = inspect.signature(type(model).forward).parameters
    missing = [each for each in _NEEDED if each not in forward]
    others = sorted({each for each in getattr(config, "layer_types", None) or () if each not in _ATTENTION})
    if others:
        return f"has layers of type {', '.join(others)}, which compute across tokens in a way of their own"
    crosses = getattr(config, "is_decoder", False) and getattr(config, "add_cross_attention", False)
    if getattr(config, "is_encoder_decoder", False) or crosses:
        return "has an encoder and a decoder"
    if model.config is not config or not _is_causal(model, config):
        return "is not causal over text alone"
    if not _has_loss_by_token(model):
        return "is neither a causal language model nor the base of one"
    if not model._supports_attention_backend:
        return "has attention of its own, not by transformers' attention interface"
    if missing:
        return f"takes no {' and no '.join(missing)}"
    across = next((part for part in model.modules() if isinstance(part, _ACROSS_TOKENS)), None)
    if across is not None:
        return f"has a {type(across).__name__}, which may compute across tokens"
    if kinds := _rotary_kinds(config) & set(_OF_LENGTH):
        return f"has rotary embeddings of type {', '.join(sorted(kinds))}, which depend on the length of the whole sequence"
    if getattr(config, "output_router_logits", False):
        return "has a loss of its router (output_router_logits), which is of whole sequences"
    return ""


def _reason_of_context(model: PreTrainedModel, world: World) -> str:
    """Why queries of a slice cannot be given to a model's attention by themselves."""
    if world.context.num_ranks == 1:
        return ""
    taken = TAKEN[:1] if world.config.cp_comm_strategy == "alltoall" else TAKEN
    name = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return "" if name in taken else f"computes attention by {name!r}, not by 'sdpa' (attn_implementation)"


def _is_causal(model: PreTrainedModel, config: Any) -> bool:
    return getattr(config, "is_causal", True) and all(getattr(part, "is_causal", True) for part in model.modules())


def _has_loss_by_token(model: PreTrainedModel) -> bool:
    """Whether outputs are by token: other heads look at the last token, or at several."""
    if model.base_model is not model and not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return False
    return "shift_labels" in inspect.signature(model.loss_function).parameters


def _rotary_kinds(config: Any) -> set[str]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    several = [found, *(each for each in found.values() if isinstance(each, dict))]
    return {str(each.get("rope_type", each.get("type", ""))) for each in several}
