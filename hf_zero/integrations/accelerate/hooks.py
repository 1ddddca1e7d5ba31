"""The pre-hooks that users register at an accelerator for its states, and the models that they leave to be saved or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.checkpoint.ranks.background import WRITING_S
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError


def models_of(accelerator: Any) -> list[nn.Module]:
    """The prepared models, without torch.compile's wrapper."""
    return [getattr(model, "_orig_mod", model) for model in accelerator._models]


def after_save_hooks(accelerator: Any, folder: Path, world: World) -> list[nn.Module]:
    """Run the user's pre-hooks; returns the models whose weights they left in the list on rank 0, where accelerate saves."""
    models = models_of(accelerator)
    hooks = accelerator._save_model_state_pre_hook
    if not hooks:
        return models
    given = [model.state_dict() for model in models]  # sharded: nothing is gathered
    names = [set(state) for state in given]
    weights: list[Any] = list(given)
    with world.together("pre-hooks of save_state", CheckpointError, WRITING_S):  # rank 0 alone may save in one
        for hook in hooks.values():
            hook(accelerator._models, weights, str(folder))
        if any(all(state is not one for one in given) for state in weights) or names != [set(one) for one in given]:
            raise CheckpointError(
                "a pre-hook of save_state changed weights; it may remove a model's from the list, not change them"
            )
    kept = [index for index, one in enumerate(given) if any(state is one for state in weights)]
    return [models[index] for index in world.share(kept, "the models to save")]


def after_load_hooks(accelerator: Any, folder: Path, world: World) -> list[nn.Module]:
    """Run the user's pre-hooks; returns the models that they left in the list on rank 0."""
    hooks = accelerator._load_model_state_pre_hook
    left = list(accelerator._models)
    with world.together("pre-hooks of load_state", CheckpointError):
        for hook in hooks.values():
            hook(left, str(folder))
    kept = [i for i, model in enumerate(accelerator._models) if any(model is each for each in left)]
    models = models_of(accelerator)
    return [models[index] for index in world.share(kept, "the models to load")]
