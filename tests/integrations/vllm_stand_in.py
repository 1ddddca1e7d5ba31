"""What TRL calls of vLLM, made of plain transformers: vLLM itself does not run on these machines.

Its loader copies into tensors of its own (`target.data.copy_(weight)`), with q, k and v stacked into one as vLLM has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}


class Loader:
    """The tensors of an engine, under vLLM's names; a name that it does not know is an error."""

    def __init__(self, model: nn.Module) -> None:
        self.targets: dict[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        params = dict(model.named_parameters())
        for name, param in params.items():
            kind = next((kind for kind in _STACKED if f".{kind}." in name), None)
            if kind is None:
                self.targets[name] = self.parts[name] = param.detach().clone()
                continue
            stacked = name.replace(kind, _STACKED[kind])
            names = [name.replace(kind, each) for each in _STACKED]
            if stacked not in self.targets:
                self.targets[stacked] = torch.cat([params[each].detach() for each in names]).clone()
                at = 0
                for each in names:
                    self.parts[each] = self.targets[stacked].narrow(0, at, len(params[each]))
                    at += len(params[each])
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As vLLM's `weight_loader`s do."""
        for name, weight in weights:
            target: Any = self.parts[name]
            assert target.shape == weight.shape, f"{name}: {tuple(weight.shape)} for {tuple(target.shape)}"
            target.data.copy_(weight)
            self.loaded.append(name)
