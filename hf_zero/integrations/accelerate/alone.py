"""`save_state` on one rank, whose peers do not take part: see [Note: alone] in `engine/ranks/serving`.

What the others hold of weights and optimizer states is asked for; one rank then writes the checkpoint, as it would without
peers. Random states of the others are not in it, as under DDP.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.checkpoint.files.model_plan import model_sources
from hf_zero.checkpoint.files.tensor_file import Source
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout

_STATES = "states of optimizers"

SourcesOf = Callable[[int], Mapping[str, Source]]
"""This rank's part of the states of an optimizer, by its number."""


def whole_weights(model: nn.Module) -> dict[str, Source]:
    """As `model_sources`, with whole tensors in this rank's memory."""
    found = model_sources(model)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if isinstance(value, DTensor):
                found[name] = _whole(value.full_tensor().cpu())
    return found


def _whole(value: Tensor) -> Source:
    return Source(value, RowLayout(tuple(value.shape), 1))


def offer_states(accelerator: Any, world: World, sources_of: Callable[[Any, int], Mapping[str, Source]]) -> None:
    """Let a rank that saves alone ask this one for its part of optimizer states.

    Args:
        accelerator: has the optimizers.
        world: the ranks.
        sources_of: of an accelerator and the number of an optimizer: this rank's part of its states.
    """
    reference = weakref.ref(accelerator)
    last: dict[tuple[int, int], Mapping[str, Source]] = {}

    def give(item: tuple[int, str]) -> tuple[Tensor, RowLayout]:
        index, name = item
        found, key = reference(), (index, world.serving.version)
        if found is None:
            raise CollectiveError("the accelerator does not exist there any more")
        if key not in last:
            last.clear()
            last[key] = sources_of(found, index)
        source = last[key][name]
        return source.rows, source.layout

    world.serving.offer(_STATES, give)


def whole_states(sources: Mapping[str, Source], index: int, world: World) -> dict[str, Source]:
    """The whole of an optimizer's states, of which this rank has `sources`."""
    return {
        name: source
        if source.layout.num_ranks == 1
        else _whole(world.serving.whole_of(_STATES, (index, name), source.rows, source.layout).cpu())
        for name, source in sources.items()
    }
