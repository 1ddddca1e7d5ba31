"""Whole tensors of those at rest, for operators that need them: of all ranks together, or for one that reads alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from hf_zero.engine.parameters.at_rest.given import have_been_given, refuse_unlike
from hf_zero.engine.parameters.at_rest.known.lineage import copied_over, is_back
from hf_zero.engine.parameters.at_rest.known.values import VALUES
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.host_rows import refuse_beside_a_backward
from hf_zero.engine.ranks.serving import ChangedAloneError
from hf_zero.engine.ranks.world import World


def gather(roots: Sequence[Root], what: str, only_reads: bool = True) -> list[Tensor]:
    """The whole tensors, in memory of their own where they are cut; called by all ranks together, if one has to ask.

    Where they are parameters or optimizer states that are only read, by one rank too: see [Note: alone].
    """
    wholes = [_without_asking(root) for root in roots]
    cut = [root for root, whole in zip(roots, wholes, strict=True) if whole is None]
    worlds = dict.fromkeys(root.held[0] for root in cut)
    are_together = {world.number: _meet(world, cut, what, only_reads) for world in worlds}
    for world in worlds:
        written = [
            root for root in cut if root.held[0] is world and root.param is not None and have_been_given((root,))
        ]
        if written and are_together[world.number]:
            refuse_unlike(written, what, world)  # else what ranks compute of a mixture is alike on all of them
    return [
        _asked(root, are_together, only_reads) if whole is None else whole
        for root, whole in zip(roots, wholes, strict=True)
    ]


def _without_asking(root: Root) -> Tensor | None:
    if root.shown is not None or not root.is_cut:
        return root.rows if root.shown is None else root.shown
    whole = root.whole_at_hand()
    return None if whole is None else whole.clone()


def _asked(root: Root, are_together: dict[int, bool], only_reads: bool) -> Tensor:
    world, cut = root.held
    if are_together[world.number]:
        return world.gather_parameter(root.rows, cut, "whole parameters")
    return ask_alone(root, only_reads)


def ask_alone(root: Root, only_reads: bool = True) -> Tensor:
    """The whole of a tensor at rest, in memory of its own, on a rank whose peers have gone on; errors as of `whole_of`.

    Args:
        root: the tensor.
        only_reads: False: an edit of it has been begun, and needs the whole as it was before.
    """
    world, cut = root.held
    if not root.is_cut:
        return root.rows.clone()
    known = known_to_all(root)
    is_apart = world.serving.apart.num_edits(known) > (not only_reads) and not is_back(root)
    try:
        return world.serving.whole(known, root.rows, cut.rows, is_apart)
    except ChangedAloneError:
        if (source := copied_over(root)) is None:
            raise
        if isinstance(source, Tensor):
            return source.clone()
        return world.serving.whole_of(VALUES, source, root.rows, cut.rows)


def _meet(world: World, roots: Sequence[Root], what: str, only_reads: bool) -> bool:
    """Whether all ranks gather these, or this one alone."""
    label = f"{what} (all ranks must run it)"
    refuse_beside_a_backward(what, [root.rows for root in roots], world)
    if only_reads:
        return world.all_come(label, map(known_to_all, roots))
    if any(world.serving.apart.before(known_to_all(root)) is not None for root in roots):
        return False  # see [Note: edits alone]
    world.meet(label)
    return True


def known_to_all(root: Root) -> Tensor:
    """What other ranks can be asked for: the parameter that it is an alias of, else itself."""
    return cast(Tensor, root) if root.param is None else root.param
