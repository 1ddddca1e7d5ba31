"""Puts tiles into a model: around its heads and its blocks' MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_zero.engine.modules.hooks import Hook
from hf_zero.engine.tiles.blocks import TiledBlock, tile_mlps
from hf_zero.engine.tiles.heads import Surroundings, TiledHead, compute_unused, tile_heads


def tile(
    model: nn.Module, roots: Sequence[nn.Module], seen: Surroundings, is_inside: Callable[[], bool], handles: list[Any]
) -> list[nn.Module]:
    """Put in what the configuration asks for.

    Args:
        model: as a whole.
        roots: its modules that are called from outside.
        seen: what tiles know of the engine.
        is_inside: whether a forward is under way.
        handles: take those of what was put in.

    Returns:
        The roots, and the modules in whose calls tiles are computed.
    """
    tiles: list[TiledHead | TiledBlock] = [*tile_heads(model, seen, is_inside), *tile_mlps(model, seen)]
    handles += tiles
    entered = [*roots, *(each.runner for each in tiles if each.runner is not None)]
    if seen.world.config.tile_tokens:
        handles += [module.register_forward_hook(Hook(compute_unused)) for module in entered]
    return entered
