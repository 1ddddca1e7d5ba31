"""A model that computes slices: it is given whole sequences, the same on all ranks of a group, and has their loss."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.engine.engine import engine_of
from hf_zero.engine.modules.hooks import Hook
from hf_zero.engine.modules.sequence import Slice, Swap
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.sharding.sequence import attention, passes
from hf_zero.sharding.sequence.checks import check, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IGNORED = -100  # a label that is no target
_WHOLE = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch")
_SLICED = ("input_ids", "inputs_embeds", "position_ids", "labels", "shift_labels")
_UNUSED = "seq_idx"  # of packed documents, for recurrent layers alone
_CACHE = ("cache", "past_key_values")  # since transformers 5.24, and before
_KNOWN = (*_WHOLE, *_SLICED, _UNUSED, *_CACHE, "logits_to_keep", "cache_position")


def slice_sequences(model: nn.Module, world: World) -> None:
    """Let a model compute slices, if there is a sequence axis; a second call lets it be a part of `model`.

    Raises:
        PartitionError, ConfigError: the model cannot be sliced.
    """
    if world.sequence.num_ranks == 1:
        return
    inner = find_model(model)
    sliced = vars(inner).get("_zero_slices")
    if not isinstance(sliced, Slices) or sliced.model() is not inner:
        check(inner, world)
        sliced = vars(inner)["_zero_slices"] = Slices(inner, world)
        before = Hook(sliced.before)
        inner.register_forward_pre_hook(before, with_kwargs=True)
        inner.register_forward_hook(Hook(sliced.after), with_kwargs=True, always_call=True)
    sliced.around = weakref.ref(model)
    attention.install(inner, sliced.swap)


class Slices:
    """What a model does before and after each of its forwards.

    Args:
        model: a causal language model of transformers, or its base.
        world: the ranks.
    """

    def __init__(self, model: PreTrainedModel, world: World) -> None:
        self.model, self.around = weakref.ref(model), weakref.ref[nn.Module](model)
        self.world = world
        self.swap = Swap(world, self._before_wait)
        self._signature = inspect.signature(type(model).forward)
        self._number_of_modules = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is sliced when it is partitioned."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def _before_wait(self) -> None:
        around = self.around()
        engine = None if around is None else engine_of(around)
        if engine is not None:
            engine.gathering.tell_of_wait()

    # --- before -----------------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]] | None:
        """Give a forward this rank's slice of what it is given."""
        bound = self._signature.bind(module, *args, **kwargs).arguments
        names = list(self._signature.parameters)
        rest = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        given: dict[str, Any] = {key: value for key, value in bound.items() if key not in (names[0], rest)}
        given |= bound.get(rest, {})
        if passes.are_whole() or self._is_of_generation(given):
            passes.begin(self, None)
            return None
        attention.install(module, self.swap)  # adapters and other parts may have come since
        _refuse_unknown(given, self.swap.key)
        one, sliced = self._sliced(given)
        passes.begin(self, one)
        return (), sliced

    def _is_of_generation(self, given: dict[str, Any]) -> bool:
        cache = next((name for name in _CACHE if given.get(name) is not None), None)
        if cache is None and not given.get("use_cache"):
            return False
        if torch.is_grad_enabled() and cache is not None:
            raise UsageError(
                f"{self.swap.key}: sequences cannot be sliced where {cache} comes before them: leave it out"
            )
        return not torch.is_grad_enabled()

    def _sliced(self, given: dict[str, Any]) -> tuple[passes.Pass, dict[str, Any]]:
        tokens = given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None:
            raise UsageError(f"{self.swap.key}: the model is given neither input_ids nor inputs_embeds")
        own = self.swap.slice_of(tokens.shape[1])
        found = {name: value for name, value in given.items() if name != _UNUSED}
        for name, padding in (("input_ids", self._padding()), ("inputs_embeds", 0)):
            if found.get(name) is not None:
                found[name] = own.own(own.pad(found[name], padding, 1), 1)
        places = self._positions(own, given.get("position_ids"), tokens.device)
        found["position_ids"] = own.own(places)
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor):
            if mask.ndim != 2 and own.padded != own.length:
                raise UsageError(
                    f"{self.swap.key} is {own.num_ranks}, which does not divide the {own.length} tokens of a mask of "
                    f"{mask.ndim} dimensions: pad it"
                )
            found["attention_mask"] = own.pad(mask, 1) if mask.ndim == 2 else mask
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if own.padded != own.length and found.get(name) is not None:
                found[name] = torch.cat([found[name], found[name].new_tensor([own.padded])])
        if "use_cache" in self._signature.parameters:
            found["use_cache"] = False  # of slices, it would be of no use
        self._slice_labels(own, found)
        return passes.Pass(self.swap, own, places), found

    def _positions(self, own: Slice, given: Any, device: torch.device) -> Tensor:
        if given is None:
            return torch.arange(own.padded, device=device).unsqueeze(0)
        if given.ndim != 2:
            raise UsageError(f"{self.swap.key}: position_ids have the shape {tuple(given.shape)}, not [batch, tokens]")
        missing = torch.arange(1, own.padded - own.length + 1, device=given.device, dtype=given.dtype)
        return torch.cat([given, given[:, -1:] + missing], 1)

    def _padding(self) -> int:
        model = self.model()
        padding = None if model is None else getattr(model.config, "pad_token_id", None)
        return padding if isinstance(padding, int) and padding >= 0 else 0

    def _slice_labels(self, own: Slice, found: dict[str, Any]) -> None:
        """Targets are shifted before they are sliced, and counted over the whole batch."""
        labels, targets = found.get("labels"), found.get("shift_labels")
        if labels is None and targets is None:
            return
        self._check_loss()
        ignored = found.get("ignore_index", _IGNORED)
        if targets is None:
            assert isinstance(labels, Tensor)
            targets = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        if found.get("num_items_in_batch") is None:
            found["num_items_in_batch"] = (targets != ignored).sum()
        found["shift_labels"] = own.own(own.pad(targets, ignored)).contiguous()
        if labels is not None:
            found["labels"] = found["shift_labels"]

    def _check_loss(self) -> None:
        model = self.model()
        assert model is not None
        has_rest = any(each.kind is each.VAR_KEYWORD for each in self._signature.parameters.values())
        takes = inspect.signature(model.loss_function).parameters
        if not has_rest or "shift_labels" not in takes or "num_items_in_batch" not in takes:
            raise UsageError(
                f"{self.swap.key}: the loss of {type(model).__name__} is not that of a causal language model (it takes no "
                f"shift_labels and num_items_in_batch): leave {self.swap.key} out"
            )

    # --- after ------------------------------------------------------------------------------------------------------

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Give its caller the loss of whole sequences, and values by token of all tokens."""
        one = passes.end(self)
        if one is None or output is None:
            return None
        self._check_calls(one)
        has_loss = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        batch = next(len(kwargs[name]) for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        by_token = (batch, one.tokens.size)
        if isinstance(output, tuple):
            found = [self._joined(value, one, by_token) for value in output]
            return (self.swap.add_up(output[0], "loss"), *found[1:]) if has_loss else tuple(found)
        if not isinstance(output, dict):
            return None
        for name, value in list(output.items()):
            if name == "loss" and has_loss and isinstance(value, Tensor):
                output[name] = self.swap.add_up(value, "loss")
            elif (joined := self._joined(value, one, by_token)) is not value:
                output[name] = joined
        return output

    def _joined(self, value: Any, one: passes.Pass, by_token: tuple[int, int]) -> Any:
        """Values by token of all tokens; tensors of more dimensions stay slices, where nobody asks for them."""
        is_by_token = isinstance(value, Tensor) and tuple(value.shape[:2]) == by_token
        if not is_by_token or (value.ndim > 2 and not passes.are_joined()):
            return value
        return self.swap.join(value, "outputs")[:, : one.tokens.length]

    def _check_calls(self, one: passes.Pass) -> None:
        model = self.model()
        assert model is not None
        expected = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
        if one.num_calls < expected:
            raise UsageError(
                f"{self.swap.key}: {type(model).__name__} has {expected} layers, but asked transformers' attention interface "
                f"for only {one.num_calls} of them, so others did not see whole sequences: leave {self.swap.key} out"
            )


def _refuse_unknown(given: dict[str, Any], key: str) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor) and name not in _KNOWN:
            raise UsageError(
                f"{key}: the model is given {name!r}, of shape {tuple(value.shape)}, which nobody knows how to slice: "
                f"known are {', '.join(_SLICED)} and attention_mask"
            )
    if given.get("output_attentions"):
        raise UsageError(f"{key}: output_attentions: no rank has the weights of all heads: leave it out")
    keep = given.get("logits_to_keep")
    if keep is not None and not (isinstance(keep, int) and keep == 0):
        raise UsageError(f"{key}: logits_to_keep is of whole sequences, which no rank has: leave it out")
