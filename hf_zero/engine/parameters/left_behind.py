"""Parameters that a model has no longer, since others have taken their places: a new head, a resized embedding.

[Note: what optimizers hold] An optimizer made before such a change still holds the old parameter, which gets no gradient any
more; the new one gets gradients, and nobody steps on it. One process trains on without a word, and so would ranks. Nobody wants
that, so it is told at the step. What hf_zero itself makes anew keeps its objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from hf_zero.engine.parameters.records import ZeroParameter, at_rest

_PLACE = "_zero_left"


def note_left_behind(model: nn.Module, parameters: Iterable[ZeroParameter]) -> None:
    """Remember of each of these where it was, if `model` holds another there now."""
    modules = dict(model.named_modules())
    for p in parameters:
        path, _, name = p.name.rpartition(".")
        holder = modules.get(path)
        now = None if holder is None else holder._parameters.get(name)
        if holder is not None and now is not None and at_rest(now) is not p.param:
            vars(p.param)[_PLACE] = weakref.ref(holder), name, p.name


def successor(param: Tensor) -> tuple[Tensor, str] | None:
    """What a model holds where it once held `param`, and the name there; None: it was not left behind."""
    if _PLACE not in vars(param):
        return None
    holder, attribute, name = vars(param)[_PLACE]
    now = None if holder() is None else holder()._parameters.get(attribute)
    return None if now is None or at_rest(now) is param else (at_rest(now), name)
