"""Options of single parameters that bitsandbytes keeps beside its optimizers: `GlobalOptimManager`.

One object of the process has them, by ids of parameters, by their places in groups, and by modules, which a first step looks
up; the Trainer registers embeddings there, whose states stay in 32 bits. A stand-in holds other parameters, at other places.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_zero.engine.parameters.replaced import when_replaced

_PACKAGE = "bitsandbytes.optim"


@when_replaced
def _follow(old: nn.Parameter, now: nn.Parameter) -> None:
    if (package := sys.modules.get(_PACKAGE)) is not None:
        known = package.GlobalOptimManager.get_instance().pid2config
        if id(old) in known:
            known[id(now)] = known.pop(id(old))


def is_manager(value: object) -> bool:
    """Whether this is such an object."""
    return hasattr(value, "pid2config") and hasattr(value, "index2config")


def overrides_of(
    manager: Any, optimizer: Any, present: Sequence[dict[str, Any]], plain: Mapping[int, nn.Parameter]
) -> Any:
    """What a stand-in's step sees instead of the manager; the manager itself if it has no options.

    Args:
        manager: of options.
        optimizer: that the stand-in is of.
        present: the stand-in's groups.
        plain: the stand-in's parameters, by the ids of those they stand for.
    """
    if getattr(optimizer, "initialized", True) is False:
        optimizer.check_overrides()  # finds parameters of modules, which the stand-in's are not
    if not manager.pid2config and not manager.index2config:
        return manager
    seen = copy.copy(manager)
    seen.pid2config, seen.index2config, seen.module_weight_config_triple = {}, {}, []
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            options = manager.index2config.get((number, place), {}) | manager.pid2config.get(id(param), {})
            if options:
                seen.pid2config[id(plain.get(id(param), param))] = options
    for number, group in enumerate(present):
        for place, param in enumerate(group["params"]):
            if id(param) in seen.pid2config:
                seen.index2config[number, place] = seen.pid2config[id(param)]
    return seen
