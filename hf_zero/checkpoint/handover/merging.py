"""Adapters merged into copies of the weights around which they lie; what is trained stays as it is, to the last bit."""

from __future__ import annotations

import copy
import importlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.handover.contents import is_adapter_layer
from hf_zero.engine.parameters.quantised import as_shown, is_quantised
from hf_zero.engine.parameters.records import put
from hf_zero.errors import UsageError
from hf_zero.parameters import parameters_of

_QUANTISED = ("Params4bit", "Int8Params")


def parameters_merged(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that merging the adapters of these layers reads."""
    return list({id(param): param for layer in layers for param in parameters_of(layer)}.values())


def state_of(layer: nn.Module) -> int:
    """A number for which adapters in a layer count, and how much."""
    known: list[Any] = [each for each in layer.modules() if is_adapter_layer(each)]
    state = [(each.active_adapters, each.merged_adapters, getattr(each, "scaling", None)) for each in known]
    return zlib.crc32(repr(state).encode())


@contextmanager
def merged(
    layers: Sequence[nn.Module], wholes: Mapping[int, Tensor], as_numbers: bool
) -> Iterator[dict[int, nn.Parameter]]:
    """Within: modules hold the given wholes, with the adapters that are active merged into them.

    PEFT's own `merge` runs, as in one process. Afterwards modules hold their parameters again, which nobody has touched:
    to merge and to unmerge in floating point would leave other bits each time.

    Args:
        layers: outermost layers of adapters.
        wholes: of all their parameters, by id; written.
        as_numbers: whether quantised weights become numbers, instead of being quantised again.

    Returns:
        What stands for each parameter, by its id.
    """
    modules = list({id(each): each for layer in layers for each in layer.modules()}.values())
    held = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
    tuned: list[Any] = [each for each in modules if is_adapter_layer(each)]
    before = [(list(each.merged_adapters), dict(vars(each).get("_caches", {}))) for each in tuned]
    try:
        made: dict[int, nn.Parameter] = {}
        with torch.no_grad():
            for module, name, param in held:
                if id(param) not in made:
                    made[id(param)] = _stand_in(param, wholes[id(param)], as_numbers)
                put([(module, name)], made[id(param)])
            for each in tuned:
                _merge(each, as_numbers)
        yield made
    finally:
        for module, name, param in held:
            put([(module, name)], param)
        for each, (adapters, caches) in zip(tuned, before, strict=True):
            each.merged_adapters = adapters
            if "_caches" in vars(each):
                each._caches = caches


def _stand_in(param: nn.Parameter, whole: Tensor, as_numbers: bool) -> nn.Parameter:
    """A parameter of the values `whole`, which merging may write to."""
    if not is_packed(param):
        return nn.Parameter(whole, requires_grad=False)
    return nn.Parameter(as_number(param, whole), requires_grad=False) if as_numbers else _packed(param, whole)


def is_packed(value: Tensor) -> bool:
    """Whether these are the bytes of quantised weights."""
    return type(value).__name__ in _QUANTISED or is_quantised(value)


def _packed(param: Tensor, whole: Tensor) -> Any:
    """The whole bytes as the class that knows what they mean."""
    if is_quantised(param):
        return as_shown([param], [whole])[0]
    made: Any = torch.Tensor._make_subclass(type(param), whole, False)
    vars(made).update(copy.copy(vars(param)))
    return made


def as_number(param: Any, whole: Tensor) -> Tensor:
    """The numbers that the bytes `whole` of a quantised parameter stand for.

    Raises:
        UsageError: the bytes are not of 4 bits a weight.
    """
    number_of(param)
    bitsandbytes: Any = importlib.import_module("bitsandbytes.functional")
    return bitsandbytes.dequantize_4bit(_packed(param, whole).data, param.quant_state)  # type: ignore[no-any-return]


def number_of(param: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the shape of the numbers that a quantised parameter stands for.

    Raises:
        UsageError: its bytes are not of 4 bits a weight.
    """
    state = getattr(param, "quant_state", None)
    if state is None:
        raise UsageError(
            f"whole_parameters: quantised weights (here {type(param).__name__}) are handed over as numbers, for which they "
            "have to be of 4 bits: load the base in 4 bits, or not quantised"
        )
    return state.dtype, tuple(state.shape)


def _merge(layer: Any, as_numbers: bool) -> None:
    """Merge the active adapters of one layer, whose weights are copies."""
    if as_numbers and type(layer).__module__.endswith(".bnb"):
        lora: Any = importlib.import_module("peft.tuners.lora.layer")
        if not isinstance(layer, lora.LoraLayer):
            raise UsageError(f"adapters of the kind {type(layer).__qualname__} on quantised weights cannot be merged")
        lora.Linear.merge(layer)  # into numbers
    else:
        layer.merge()
