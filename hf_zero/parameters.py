"""The parameters of a module, whatever its class says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters, each once.

    Some classes have a method `parameters` of their own, for their optimizers: fewer of them, or without arguments.
    """
    return (param for _, param in module.named_parameters())
