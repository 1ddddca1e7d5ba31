"""Norms of tensors at rest, from the norms of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hf_zero.comm.collectives import Rows
from hf_zero.engine.parameters.at_rest.known.lineage import key_of
from hf_zero.engine.parameters.at_rest.root import AtRest, Root
from hf_zero.engine.ranks.world import World
from hf_zero.layout import RowLayout


def norms_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms of whole tensors from the norms of their rows; None for those of some dims, or of views."""
    is_list = isinstance(args[0], list | tuple)
    tensors: list[Tensor] = list(args[0]) if is_list else [args[0]]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    if not is_list and (
        (len(args) > 2 and args[2] is not None) or kwargs.get("dim") is not None or args[3:4] == (True,)
    ):
        return None
    if any(isinstance(t, AtRest) and not isinstance(t, Root) for t in tensors):
        return None
    if kwargs.get("keepdim") or any(not t.is_floating_point() for t in tensors):
        return None
    dtype = kwargs.get("dtype") or (args[2] if is_list and len(args) > 2 else None)
    parts = [t.rows if isinstance(t, Root) else t for t in tensors]
    if all(part.numel() for part in parts):
        norms = list(torch._foreach_norm(parts, order, dtype=dtype))
    else:
        norms = [_norm(part, order, dtype) for part in parts]
    cut = [i for i, t in enumerate(tensors) if isinstance(t, Root) and t.is_cut]
    roots = [cast(Root, tensors[i]) for i in cut]
    have_met = _all_ask(roots, is_read=not is_list)
    if have_met is False:
        return None
    for place, norm in zip(cut, _added(roots, [norms[i] for i in cut], order, bool(have_met)), strict=True):
        norms[place] = norm
    return norms if is_list else norms[0]


def _all_ask(roots: Sequence[Root], is_read: bool) -> bool | None:
    """Whether every rank asks for norms of these, or one does so alone, which may happen with parameters and values.

    None: they have not met to see.

    Args:
        roots: the tensors.
        is_read: with gradients, too: several at once are clipped next.
    """
    worlds = dict.fromkeys(root.held[0] for root in roots)
    if len(worlds) != 1 or any(root.param is None and key_of(root, is_read) is None for root in roots):
        return None
    (world,) = worlds
    known = [cast(Tensor, root) if root.param is None else root.param for root in roots]
    return world.all_come(f"norms of {roots[0].describe()}", known) if world.serving.can_be_alone else None


def _norm(rows: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    if not rows.numel():
        return torch.full((), math.inf if order == -math.inf else 0.0, dtype=dtype or rows.dtype, device=rows.device)
    return cast(Tensor, torch.linalg.vector_norm(rows, order, dtype=dtype))


def _added(roots: list[Root], norms: list[Tensor], order: float, have_met: bool) -> list[Tensor]:
    """The norms of the whole tensors, of which every rank has that of its elements; one exchange for each set of ranks."""
    result = list(norms)
    for world in dict.fromkeys(root.held[0] for root in roots):  # not a set: its order differs by rank
        places = [i for i, root in enumerate(roots) if root.held[0] is world]
        mine = torch.stack([norms[i].double() for i in places])
        by_rows = by_rank(world, mine, over_tensor=False, have_met=have_met)
        cuts = [roots[i].held[1] for i in places]
        mine = _whole_norms(by_rows, mine, [cut.rows.num_ranks > 1 for cut in cuts], order)
        if world.tensor.num_ranks > 1:
            parts = by_rank(world, mine, over_tensor=True)
            mine = _whole_norms(parts, mine, [cut.tensor is not None for cut in cuts], order)
        for value, place in zip(mine.unbind(), places, strict=True):
            result[place] = value.to(norms[place].dtype)
    return result


def _whole_norms(parts: Tensor, own: Tensor, are_cut: list[bool], order: float) -> Tensor:
    """The norm of each column of `parts`, [ranks, tensors]; `own` where a tensor is not cut."""
    whole = parts.sum(0) if order == 0 else torch.linalg.vector_norm(parts, order, dim=0)
    return whole if all(are_cut) else torch.where(own.new_tensor(are_cut, dtype=torch.bool), whole, own)


def by_rank(world: World, values: Tensor, over_tensor: bool, have_met: bool = False) -> Tensor:
    """Every rank's `values`, a row each, by rank of the shard axis or of the tensor axis; `have_met`: just now, for this."""
    axis = world.tensor if over_tensor else world.shards
    layout = RowLayout((axis.num_ranks, values.numel()), axis.num_ranks)
    rows = values.new_zeros(layout.padded_numel)
    layout.elements_of(rows, axis.rank).copy_(values)
    if axis.num_ranks > 1:
        if not have_met:
            world.meet("norms of partitioned tensors (all ranks must ask for them)")
        axis.gather([Rows(rows, layout)], "norms of partitioned tensors").wait()
    return rows.view(layout.shape)
