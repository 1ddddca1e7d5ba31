"""Which tensors the base model of a model has, and the layers of adapters around them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of the base model.

    Attributes:
        name: as the base model without adapters has it.
        module: that holds it.
        attribute: its name there.
        layer: the outermost layer of adapters around it, if there is one.
    """

    name: str
    module: nn.Module
    attribute: str
    layer: nn.Module | None = None

    @property
    def value(self) -> Tensor:
        """What the module holds now."""
        held: Any = self.module._parameters.get(self.attribute)
        return self.module._buffers[self.attribute] if held is None else held  # type: ignore[return-value]


def weights_of(model: nn.Module, buffers: bool) -> list[Weight]:
    """The tensors of the base model, in the order of its modules; a tied one under each of its names.

    Args:
        model: any module; a `PeftModel`, or one with adapters in it.
        buffers: whether the buffers of the state dict count, too.
    """
    return list(_visit(base_of(model), "", None, buffers))


def has_adapters(model: nn.Module) -> bool:
    """Whether this is a `PeftModel`."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> nn.Module:
    """The model inside a `PeftModel`; another model is its own."""
    return model.get_base_model() if has_adapters(model) else model  # type: ignore[no-any-return]


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether this is a layer of PEFT with adapters that can be merged into what lies in it."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def _visit(module: nn.Module, prefix: str, layer: nn.Module | None, buffers: bool) -> Iterator[Weight]:
    inside = _inside(module)
    if inside is not None:
        yield from _visit(inside, prefix, layer or (module if is_adapter_layer(module) else None), buffers)
        return
    for name, param in module._parameters.items():
        if param is not None:
            yield Weight(prefix + name, module, name, layer)
    if buffers:
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield Weight(prefix + name, module, name, layer)
    for name, child in module.named_children():
        yield from _visit(child, f"{prefix}{name}.", layer, buffers)


def _inside(module: Any) -> Any:
    """What the base model would have in the place of one of PEFT's modules; None: this is no such module."""
    if is_adapter_layer(module):
        return module.base_layer
    other: Any = sys.modules.get("peft.utils.other")
    if other is None or not isinstance(module, other.AuxiliaryTrainingWrapper):
        return None
    if hasattr(module, "token_adapter"):
        return module.token_adapter
    saved = getattr(module, "modules_to_save", {})
    active = [name for name in module.active_adapters if name in saved]
    return saved[active[0]] if active and not module.disable_adapters else module.original_module
