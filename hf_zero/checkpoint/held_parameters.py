"""The names of what an optimizer holds: a model's parameters, and others beside them, as losses have of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.engine.engine import live_engines
from hf_zero.errors import CheckpointError

_BESIDE = "(beside the model)"


def held_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, then those that the optimizer holds beside them, by group and position.

    The latter are whole on every rank, which trains its own, as under DDP; rank 0's states are saved.

    Raises:
        CheckpointError: the optimizer holds a parameter of another partitioned model.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    known = {id(param) for param in named.values()}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                _check_is_whole(param, number)
                named[f"{_BESIDE}.{number}.{position}"] = param
    return named


def named_groups(optimizer: Any, model: nn.Module) -> list[list[str]]:
    """The names of what each group holds; raises as `held_parameters`."""
    names = {id(param): name for name, param in held_parameters(optimizer, model).items()}
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def states_beside(optimizer: Any, held: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Rank 0's states of the parameters beside the model, by name, on every rank; others' may differ, or be none yet."""
    beside = [name for name in held if name.startswith(_BESIDE)]
    if not beside:
        return {}
    # That of the model, and not just any: some ranks may still hold engines of models that others have dropped.
    engine = next((each for each in live_engines() if any(each.find(p) is not None for p in held.values())), None)
    found = {name: {k: _on_host(v) for k, v in optimizer.state.get(held[name], {}).items()} for name in beside}
    return found if engine is None else cast(dict[str, Any], engine.world.share(found, "states beside the model"))


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _check_is_whole(param: Tensor, number: int) -> None:
    if any(engine.find(param) is not None for engine in live_engines()):
        raise CheckpointError(
            f"group {number} of the optimizer holds a parameter of shape {tuple(param.shape)} of another partitioned "
            "model, so its state cannot be saved: make the optimizer on the parameters of this model"
        )
